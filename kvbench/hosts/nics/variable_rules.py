"""Harmful variables of Mooncake, UCX, NCCL and Gloo."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from kvbench.hosts.nics.checks import ROCE_MTU, Machine
from kvbench.hosts.nics.choice import best_gid
from kvbench.hosts.version_rules import Check

Settings = Mapping[str, str]

PREFIXES: Final = ("MC_", "UCX_", "NCCL_", "GLOO_")

# Names that UCX_TLS knows for transports over verbs, with its aliases: `ucx_info -d` and UCX's documentation.
_RDMA_TLS: Final = re.compile(r"all|ib|(rc|dc|ud)(_(x|v|verbs|mlx5))?|srd|gga(_mlx5)?")
_GPU_TLS: Final = re.compile(r"all|cuda|cuda_copy|gdr_copy|cuda_ipc|rocm.*|ze_.*")
_PATTERN: Final = re.compile(r"[*?\[\]]")
_SLOW_LOGS: Final = ("debug", "trace", "req", "data", "async", "func", "poll")
NIXL_RAILS: Final = 2
"""NIXL's default for UCX_MAX_RMA_RAILS."""
MC_LEAST_TIMEOUT_S: Final = 5
"""Mooncake's minimum of MC_TRANSFER_TIMEOUT."""


def settings_checks(machine: Machine, environ: Settings) -> list[Check]:
    """One check per harmful variable, or one without problems."""
    found = [check for rule in _RULES for check in rule(machine, environ)]
    if found:
        return found
    number = sum(1 for name in environ if name.startswith(PREFIXES))
    detail = f"{number} of MC_*, UCX_*, NCCL_*, GLOO_* set" if number else "none of MC_*, UCX_*, NCCL_* set"
    return [Check("settings", "ok", f"{detail}; none is known to be harmful here")]


def _warn(name: str, environ: Settings, harm: str, fix: str) -> Check:
    return Check(f"setting {name}", "warn", f"{name}={environ[name]}: {harm}", fix)


def _broken(name: str, environ: Settings, harm: str, fix: str) -> Check:
    return Check(f"setting {name}", "missing", f"{name}={environ[name]}: {harm}", fix)


def _tcp_forced(machine: Machine, environ: Settings) -> Iterator[Check]:
    if not machine.ports(active=True):
        return
    if "MC_FORCE_TCP" in environ:
        yield _warn("MC_FORCE_TCP", environ, "Mooncake uses TCP although there is RDMA", "unset MC_FORCE_TCP")
    if environ.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        yield _warn(
            "NCCL_IB_DISABLE", environ, "NCCL uses sockets although there is RDMA", "unset NCCL_IB_DISABLE"
        )


def _hca_forced(machine: Machine, environ: Settings) -> Iterator[Check]:
    if "MC_FORCE_HCA" in environ and not machine.ports(active=True):
        yield _broken(
            "MC_FORCE_HCA", environ, "Mooncake may use RDMA only, and no port is active", "unset MC_FORCE_HCA"
        )


def _transports(machine: Machine, environ: Settings) -> Iterator[Check]:
    value = environ.get("UCX_TLS", "")
    if not value:
        return
    names = _words(value.removeprefix("^"))
    refused = value.startswith("^")
    rdma = any(_RDMA_TLS.fullmatch(name) for name in names) is not refused
    if machine.ports(active=True) and not rdma:
        yield _warn(
            "UCX_TLS",
            environ,
            "leaves RDMA out, so UCX and NIXL use TCP",
            "unset UCX_TLS, or add rc (and cuda, where there are GPUs)",
        )
        return
    gpu = any(_GPU_TLS.fullmatch(name) for name in names) is not refused
    if machine.gpus and not gpu and not refused:
        yield _warn(
            "UCX_TLS", environ, "leaves CUDA out, so GPU memory cannot be moved", "add cuda: UCX_TLS=…,cuda"
        )


def _ucx_devices(machine: Machine, environ: Settings) -> Iterator[Check]:
    value = environ.get("UCX_NET_DEVICES", "")
    if value in ("", "all") or value.startswith("^"):
        return
    ports = {f"{name}:{port['port']}": port["state"] for name, port in machine.ports()}
    interfaces = {nic["name"]: str(nic["operstate"]) for nic in machine.interfaces}
    known = ports | interfaces
    named = [name for name in _words(value) if not _PATTERN.search(name)]
    absent = [name for name in named if name not in known]
    down = [name for name in named if str(known.get(name, "")).lower() in ("down", "init", "armed")]
    if absent:
        yield _broken(
            "UCX_NET_DEVICES",
            environ,
            f"{', '.join(absent)} is not here",
            f"name what is here: {', '.join(known)}",
        )
    elif down:
        yield _broken("UCX_NET_DEVICES", environ, f"{', '.join(down)} has no link", "name ports that are up")
    rails = environ.get("UCX_MAX_RMA_RAILS", str(NIXL_RAILS))
    if rails.isdigit() and len(named) > int(rails):
        name = "UCX_MAX_RMA_RAILS"
        said = f"{name}={rails}" if name in environ else f"{name} is unset, and NIXL makes it {NIXL_RAILS}"
        detail = f"{said}: {len(named)} devices are named, a transfer uses {rails} of them"
        yield Check(f"setting {name}", "warn", detail, f"{name}={len(named)}")


def _nccl_names(machine: Machine, environ: Settings) -> Iterator[Check]:
    devices = [str(device["name"]) for device in machine.devices]
    interfaces = [str(nic["name"]) for nic in machine.interfaces]
    for name, known in (("NCCL_IB_HCA", devices), ("NCCL_SOCKET_IFNAME", interfaces)):
        value = environ.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=")
        wanted = [word.split(":")[0] for word in _words(value.lstrip("="))]
        absent = [
            word
            for word in wanted
            if not any(own == word or (not exact and own.startswith(word)) for own in known)
        ]
        if absent:
            there = f"name what is here: {', '.join(known)}" if known else f"unset {name}: there is none here"
            yield _broken(name, environ, f"{', '.join(absent)} is not here", there)
    absent = [word for word in _words(environ.get("GLOO_SOCKET_IFNAME", "")) if word not in interfaces]
    if absent:
        yield _broken(
            "GLOO_SOCKET_IFNAME",
            environ,
            f"{', '.join(absent)} is not here",
            f"name what is here: {', '.join(interfaces)}",
        )


def _gid_indices(machine: Machine, environ: Settings) -> Iterator[Check]:
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
            yield _warn(name, environ, f"that GID of {device} is {what}", fix)
            break


def _mooncake_numbers(machine: Machine, environ: Settings) -> Iterator[Check]:
    timeout = environ.get("MC_TRANSFER_TIMEOUT", "")
    if timeout.isdigit() and int(timeout) < MC_LEAST_TIMEOUT_S:
        yield _warn(
            "MC_TRANSFER_TIMEOUT",
            environ,
            f"Mooncake waits {MC_LEAST_TIMEOUT_S} s at least",
            "for less use MC_TCP_STATUS_TIMEOUT_SEC, or a deadline of the caller's own",
        )
    small = [
        str(nic["name"])
        for nic in machine.interfaces
        if nic["operstate"] == "up"
        and any(nic["name"] in device["interfaces"] for device in machine.devices)
        and (nic["mtu"] or ROCE_MTU) < ROCE_MTU
    ]
    if environ.get("MC_MTU") == "4096" and small:
        yield _warn(
            "MC_MTU",
            environ,
            f"{', '.join(small)} carries less",
            f"ip link set {small[0]} mtu 9000, or lower it",
        )


def _mooncake_places(machine: Machine, environ: Settings) -> Iterator[Check]:
    address = environ.get("MC_TCP_BIND_ADDRESS", "")
    own = [each for known in machine.addresses.values() for each in known]
    if address and address not in ("0.0.0.0", "::", *own):
        yield _broken(
            "MC_TCP_BIND_ADDRESS", environ, "no interface has this address", f"one of: {', '.join(own)}"
        )
    topology = environ.get("MC_CUSTOM_TOPO_JSON", "")
    if topology and not Path(topology).is_file():
        yield _broken(
            "MC_CUSTOM_TOPO_JSON", environ, "there is no such file", "name the file, or unset the variable"
        )


def _slow_logs(machine: Machine, environ: Settings) -> Iterator[Check]:
    for name in ("UCX_LOG_LEVEL", "MC_LOG_LEVEL", "NCCL_DEBUG"):
        if environ.get(name, "").lower() in _SLOW_LOGS:
            yield _warn(name, environ, "writes a line for each transfer, which is slow", f"unset {name}")


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


_RULES: Final[tuple[Callable[[Machine, Settings], Iterator[Check]], ...]] = (
    _tcp_forced,
    _hca_forced,
    _transports,
    _ucx_devices,
    _nccl_names,
    _gid_indices,
    _mooncake_numbers,
    _mooncake_places,
    _slow_logs,
)
