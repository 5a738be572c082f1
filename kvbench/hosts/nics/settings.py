"""How each transfer library is told which NICs to use: a device list, or variables of its environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.hosts.nics.choice import Nic


def mooncake_settings(chosen: Sequence[Nic]) -> dict[str, Any]:
    """Mooncake's device list and environment.

    With MC_ENABLE_DEST_DEVICE_AFFINITY a slice goes to the peer's NIC of the same name, since others often
    cannot be reached. MC_FORCE_HCA makes it fail rather than use TCP in silence.
    """
    if not chosen or chosen[0].kind == "tcp":
        return {"device_name": "", "env": {"MC_FORCE_TCP": "1"}}
    env = {"MC_FORCE_HCA": "1", "MC_ENABLE_DEST_DEVICE_AFFINITY": "1"}
    return {
        "device_name": ",".join(nic.name for nic in chosen),
        "env": env | _gid(chosen, "MC_GID_INDEX"),
    }


def ucx_settings(chosen: Sequence[Nic]) -> dict[str, str]:
    """Environment of UCX, and so of NIXL: devices, and as many rails as there are."""
    if not chosen:
        return {}
    tcp = chosen[0].kind == "tcp"
    devices = [nic.name if tcp else f"{nic.name}:{nic.port}" for nic in chosen]
    env = {"UCX_NET_DEVICES": ",".join(devices), "UCX_MAX_RMA_RAILS": str(len(chosen))}
    return env if tcp else env | _gid(chosen, "UCX_IB_GID_INDEX")


def nccl_settings(chosen: Sequence[Nic]) -> dict[str, str]:
    """Environment of NCCL; the equals sign stands for exact names, without it they are beginnings."""
    if not chosen:
        return {}
    if chosen[0].kind == "tcp":
        names = ",".join(nic.name for nic in chosen)
        return {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": f"={names}"}
    devices = ",".join(f"{nic.name}:{nic.port}" for nic in chosen)
    return {"NCCL_IB_HCA": f"={devices}"} | _gid(chosen, "NCCL_IB_GID_INDEX")


def _gid(chosen: Sequence[Nic], name: str) -> dict[str, str]:
    """One variable holds for all devices, so it is only set where all have the same index."""
    found = {nic.gid_index for nic in chosen}
    ethernet = all(nic.link_layer == "Ethernet" for nic in chosen)
    (index, *others) = found
    return {name: str(index)} if ethernet and not others and index is not None else {}
