"""Harmful variables of Mooncake, UCX, NCCL and Gloo."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from kvbench.hosts.nics.checks import ROCE_MTU, Machine
from kvbench.hosts.nics.choice import best_gid
from kvbench.hosts.version_rules import Check, Status

Settings = Mapping[str, str]
Harms = Iterator[tuple[str, Status, str, str]]
"""Each harmful variable with the check's status, the harm and the fix."""


# Names that UCX_TLS knows for transports over verbs, with its aliases: `ucx_info -d` and UCX's documentation.
_RDMA_TLS: Final = re.compile(r"all|ib|(rc|dc|ud)(_(x|v|verbs|mlx5))?|srd|gga(_mlx5)?")
_GPU_TLS: Final = re.compile(r"all|cuda|cuda_copy|gdr_copy|cuda_ipc|rocm.*|ze_.*")
_PATTERN: Final = re.compile(r"[*?\[\]]")
NIXL_RAILS: Final = 2
"""NIXL's default for UCX_MAX_RMA_RAILS."""
MC_LEAST_TIMEOUT_S: Final = 5
"""Mooncake's minimum of MC_TRANSFER_TIMEOUT."""


def settings_checks(machine: Machine, environ: Settings) -> list[Check]:
    """One check per harmful variable, or one without problems."""
    found = []
    for rule in _RULES:
        for name, status, harm, fix in rule(machine, environ):
            unset = f"{name} is unset, and NIXL makes it {NIXL_RAILS}"  # of the rails only
            shown = f"{name}={environ[name]}" if name in environ else unset
            found.append(Check(f"setting {name}", status, f"{shown}: {harm}", fix))
    if found:
        return found
    number = sum(1 for name in environ if name.startswith(("MC_", "UCX_", "NCCL_", "GLOO_")))
    detail = f"{number} of MC_*, UCX_*, NCCL_*, GLOO_* set" if number else "none of MC_*, UCX_*, NCCL_* set"
    return [Check("settings", "ok", f"{detail}; none is known to be harmful here")]


def _rdma_use(machine: Machine, environ: Settings) -> Harms:
    active = machine.ports(active=True)
    if active and "MC_FORCE_TCP" in environ:
        yield "MC_FORCE_TCP", "warn", "Mooncake uses TCP although there is RDMA", "unset MC_FORCE_TCP"
    if active and environ.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        yield "NCCL_IB_DISABLE", "warn", "NCCL uses sockets although there is RDMA", "unset NCCL_IB_DISABLE"
    if not active and "MC_FORCE_HCA" in environ:
        harm = "Mooncake may use RDMA only, and no port is active"
        yield "MC_FORCE_HCA", "missing", harm, "unset MC_FORCE_HCA"


def _transports(machine: Machine, environ: Settings) -> Harms:
    value = environ.get("UCX_TLS", "")
    if not value:
        return
    names = _words(value.removeprefix("^"))
    refused = value.startswith("^")
    rdma = any(_RDMA_TLS.fullmatch(name) for name in names) is not refused
    gpu = refused or any(_GPU_TLS.fullmatch(name) for name in names)
    if machine.ports(active=True) and not rdma:
        fix = "unset UCX_TLS, or add rc (and cuda, where there are GPUs)"
        yield "UCX_TLS", "warn", "leaves RDMA out, so UCX and NIXL use TCP", fix
    elif machine.gpus and not gpu:
        yield "UCX_TLS", "warn", "leaves CUDA out, so GPU memory cannot be moved", "add cuda: UCX_TLS=…,cuda"


def _ucx_devices(machine: Machine, environ: Settings) -> Harms:
    name = "UCX_NET_DEVICES"
    value = environ.get(name, "")
    if value in ("", "all") or value.startswith("^"):
        return
    ports = {f"{name}:{port['port']}": port["state"] for name, port in machine.ports()}
    known = ports | {nic["name"]: str(nic["operstate"]) for nic in machine.interfaces}
    named = [name for name in _words(value) if not _PATTERN.search(name)]
    absent = [name for name in named if name not in known]
    down = [name for name in named if str(known.get(name, "")).lower() in ("down", "init", "armed")]
    if absent:
        yield name, "missing", f"{', '.join(absent)} is not here", f"use one of these:  {', '.join(known)}"
    elif down:
        yield name, "missing", f"{', '.join(down)} has no link", "name ports that are up"
    name = "UCX_MAX_RMA_RAILS"
    rails = environ.get(name, str(NIXL_RAILS))
    if rails.isdigit() and len(named) > int(rails):
        harm = f"{len(named)} devices are named, a transfer uses {rails} of them"
        yield name, "warn", harm, f"{name}={len(named)}"


def _interface_names(machine: Machine, environ: Settings) -> Harms:
    interfaces = [str(nic["name"]) for nic in machine.interfaces]
    devices = [str(device["name"]) for device in machine.devices]
    for name, known in {
        "NCCL_IB_HCA": devices,
        "NCCL_SOCKET_IFNAME": interfaces,
        "GLOO_SOCKET_IFNAME": interfaces,
    }.items():
        value, nccl = environ.get(name, ""), name.startswith("NCCL_")
        if nccl and value.startswith("^"):
            continue
        # NCCL takes the beginning of a name, unless there is an equals sign; and a port after a colon.
        exact = not nccl or value.startswith("=")
        wanted = [word.split(":")[0] for word in _words(value.lstrip("="))] if nccl else _words(value)
        absent = [
            word
            for word in wanted
            if word not in known and (exact or not any(key.startswith(word) for key in known))
        ]
        if absent:
            there = f"use one of these:  {', '.join(known)}" if known else f"unset {name}: there is none here"
            yield name, "missing", f"{', '.join(absent)} is not here", there


def _gid_indices(machine: Machine, environ: Settings) -> Harms:
    ethernet = [(name, port) for name, port in machine.ports(active=True) if port["link_layer"] == "Ethernet"]
    for name in ("MC_GID_INDEX", "UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX"):
        value = environ.get(name, "")
        if not value.isdigit():
            continue
        for device, port in ethernet:
            gid = next((gid for gid in port["gids"] if gid["index"] == int(value)), None)
            best = best_gid(port)
            if gid is not None and gid["type"] == "RoCE v2" and not gid["gid"].lower().startswith("fe80"):
                continue
            what = "empty" if gid is None else "link-local" if gid["type"] == "RoCE v2" else str(gid["type"])
            fix = f"{name}={best['index']}" if best and best["index"] != int(value) else f"unset {name}"
            yield name, "warn", f"that GID of {device} is {what}", fix
            break


def _mooncake(machine: Machine, environ: Settings) -> Harms:
    timeout = environ.get("MC_TRANSFER_TIMEOUT", "")
    if timeout.isdigit() and int(timeout) < MC_LEAST_TIMEOUT_S:
        fix = "for less use MC_TCP_STATUS_TIMEOUT_SEC, or a deadline of the caller's own"
        yield "MC_TRANSFER_TIMEOUT", "warn", f"Mooncake waits {MC_LEAST_TIMEOUT_S} s at least", fix
    small = [
        str(nic["name"])
        for nic in machine.interfaces
        if nic["operstate"] == "up"
        and any(nic["name"] in device["interfaces"] for device in machine.devices)
        and (nic["mtu"] or ROCE_MTU) < ROCE_MTU
    ]
    if environ.get("MC_MTU") == "4096" and small:
        fix = f"ip link set {small[0]} mtu 9000, or lower it"
        yield "MC_MTU", "warn", f"{', '.join(small)} carries less", fix
    address = environ.get("MC_TCP_BIND_ADDRESS", "")
    local_ips = [ip for known in machine.addresses.values() for ip in known]
    if address and address not in ("0.0.0.0", "::", *local_ips):
        fix = f"one of: {', '.join(local_ips)}"
        yield "MC_TCP_BIND_ADDRESS", "missing", "no interface has this address", fix
    topology = environ.get("MC_CUSTOM_TOPO_JSON", "")
    if topology and not Path(topology).is_file():
        fix = "name the file, or unset the variable"
        yield "MC_CUSTOM_TOPO_JSON", "missing", "there is no such file", fix


def _slow_logs(machine: Machine, environ: Settings) -> Harms:
    for name in ("UCX_LOG_LEVEL", "MC_LOG_LEVEL", "NCCL_DEBUG"):
        if environ.get(name, "").lower() in ("debug", "trace", "req", "data", "async", "func", "poll"):
            yield name, "warn", "writes a line for each transfer, which is slow", f"unset {name}"


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


_RULES: Final[tuple[Callable[[Machine, Settings], Harms], ...]] = (
    _rdma_use,
    _transports,
    _ucx_devices,
    _interface_names,
    _gid_indices,
    _mooncake,
    _slow_logs,
)
