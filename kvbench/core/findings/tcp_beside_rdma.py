"""KV that is told to go over TCP although there is RDMA: seen from commands, and from what their hosts have.

One function for plan, doctor and report. Pure: the devices come in as ``hosts.devices.rdma`` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvbench.core.records import Finding

_RDMA_TLS: Final = re.compile(r"all|ib|(rc|dc|ud)(_(x|v|verbs|mlx5))?|srd|gga(_mlx5)?")
"""What UCX_TLS calls transports over verbs: `ucx_info -d` and UCX's documentation."""

Command = tuple[Sequence[str], Mapping[str, str]]
"""A process's argv and environment."""


def tcp_beside_rdma(
    label: str, commands: Iterable[Command], hosts: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Finding | None:
    """A warning where a connector's engines are told to use TCP on hosts with an active RDMA port.

    ``hosts``: RDMA devices by host; of this machine alone the name is empty.
    """
    told = next(filter(None, (forced_tcp(argv, env) for argv, env in commands)), "")
    active = [
        f"{device['name']}{f' of {host}' if host else ''}"
        for host, devices in hosts.items()
        for device in devices
        if any(port.get("state") == "ACTIVE" for port in device.get("ports") or ())
    ]
    if not told or not active:
        return None
    shown = ", ".join(active[:8]) + (f" and {len(active) - 8} more" if len(active) > 8 else "")
    return Finding(
        "tcp_beside_rdma",
        "warning",
        f"{label} is told to move its KV over TCP ({told}), beside active RDMA devices ({shown})",
        "leave protocol or ucx_tls out, or ask for RDMA, unless TCP is what you want to measure",
        {"told": told, "rdma": active},
    )


def forced_tcp(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """What in a command makes its KV go over TCP, as it stands there; empty if nothing does."""
    tls = env.get("UCX_TLS", "")
    words = [word.strip() for word in tls.removeprefix("^").split(",")]
    rdma = any(_RDMA_TLS.fullmatch(word) for word in words)
    if tls and (rdma if tls.startswith("^") else "tcp" in words and not rdma):
        return f"UCX_TLS={tls}"
    if "MC_FORCE_TCP" in env:  # its presence counts, whatever its value
        return f"MC_FORCE_TCP={env['MC_FORCE_TCP']}"
    if env.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        return f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}"
    return next((word for word in argv if word == "mooncake_tcp"), "")
