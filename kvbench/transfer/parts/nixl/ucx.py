"""UCX below NIXL: which transports and devices it may use, and which it says it took."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.transfer.base import TransferNic, nics_of
from kvbench.transfer.parts.native import inherited

TLS = {"tcp": "tcp", "rdma": "ib", "cma": "cma,tcp", "shm": "posix,self"}
"""UCX_TLS by protocol: nothing that could take over. A memory copy (cma) needs tcp for its messages."""
LOOPBACK = ("127.", "localhost")


def env(options: Mapping[str, Any], protocol: str) -> dict[str, str]:
    """Transports are always explicit: UCX's own choice on one host is a memory copy (cma).

    What the user's environment names holds, unless an option names it too.
    """
    if protocol not in TLS:
        return {}
    nics = nics_of(options)
    # In GPU memory, UCX's messages are copied by these.
    tls = TLS[protocol] + (",cuda_copy,cuda_ipc" if options.get("memory") == "cuda" else "")
    wanted = tls if options.get("protocol") else None
    variables = {
        "UCX_TLS": inherited("UCX_TLS", wanted, tls),
        # At this level, and not below, UCX says once which transport each connection got.
        "UCX_LOG_LEVEL": inherited("UCX_LOG_LEVEL", None, "info"),
    }
    host = str(options.get("host", "127.0.0.1"))
    if nics:
        variables["UCX_NET_DEVICES"] = devices(nics, protocol)
        # NIXL's own preset is 2, whatever the number of devices.
        variables["UCX_MAX_RMA_RAILS"] = str(len(nics))
    elif host.startswith(LOOPBACK) and protocol != "rdma":
        # Otherwise UCX also takes, and listens on, the machine's other interfaces.
        variables["UCX_NET_DEVICES"] = inherited("UCX_NET_DEVICES", None, "lo")
    return variables


def devices(nics: Sequence[TransferNic], protocol: str) -> str:
    """UCX_NET_DEVICES: interfaces, or RDMA devices with their port."""
    port = ":1" if protocol == "rdma" else ""
    return ",".join(nic.name if ":" in nic.name else nic.name + port for nic in nics)


def transport_in_log(lines: Sequence[str]) -> str:
    """The lane for remote memory access to a peer that UCX last reported, such as ``tcp/lo``; or empty.

    UCX also reports an agent's connection to itself, which says nothing about peers. Where it names lanes
    for access by messages (``rma_am``), the bytes of large blocks go over the lanes of ``am``: over a memory
    lane if there is one (1 MiB took 0.1 ms so, which TCP alone does not), else over all of them.
    """
    for line in reversed(lines):
        if "-node cfg#" not in line:
            continue
        lanes = {kind: said.split() for kind, said in re.findall(r"\b(rma|rma_am|am)\(([^)]+)\)", line)}
        memory = [lane for lane in lanes.get("am", ()) if lane.endswith("/memory")]
        if found := lanes.get("rma") or memory or lanes.get("am") or lanes.get("rma_am"):
            return " ".join(found)
    return ""


def epoll_descriptors() -> set[int]:
    """This process's epoll sets; UCX keeps the sockets of its TCP transport in one per worker."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found
