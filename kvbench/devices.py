"""NICs, RDMA devices and GPUs of a machine, from sysfs and nvidia-smi. What cannot be read is null."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

SMI_DEADLINE_S: Final = 5.0

_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SMI_FIELDS: Final = ("index", "name", "memory.total", "driver_version", "pci.bus_id", "pstate")


def read(path: Path) -> str | None:
    """A file's text without surrounding space; None if it is absent, unreadable or empty.

    Some sysfs files exist and still fail on read, such as the speed of a link that is down.
    """
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    try:
        return int(read(path) or "")
    except ValueError:
        return None


def children(folder: Path) -> list[Path]:
    """What a folder holds, by name, with numbers in their order; empty if there is no such folder."""
    try:
        return sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name))
    except OSError:
        return []


def link_name(path: Path) -> str | None:
    """The last part of where a symbolic link points to: in sysfs, a driver's name or a PCI address."""
    try:
        return Path(os.readlink(path)).name
    except OSError:
        return None


def output_of(command: list[str], deadline_s: float) -> str | None:
    """What a command prints; None if it cannot be run, fails, or does not end in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def nics(root: Path) -> list[dict[str, Any]]:
    """Network interfaces; ``speed_mbit`` is null where the driver does not tell or the link is down."""
    found = []
    for folder in children(root / "sys/class/net"):
        if not (folder / "operstate").exists():  # such as the file bonding_masters
            continue
        speed = read_int(folder / "speed")
        found.append(
            {
                "name": folder.name,
                "speed_mbit": speed if speed and speed > 0 else None,
                "operstate": read(folder / "operstate"),
                "mtu": read_int(folder / "mtu"),
                **_pci(folder),
            }
        )
    return found


def _pci(folder: Path) -> dict[str, Any]:
    """Driver, PCI address and NUMA node of a device; null for a virtual one."""
    device = (folder / "device").resolve()
    # A virtio device hangs one level below the PCI device that carries it.
    addresses = [place for place in (device, *device.parents[:2]) if _PCI_ADDRESS.fullmatch(place.name)]
    node = read_int(addresses[0] / "numa_node") if addresses else None
    return {
        "driver": link_name(device / "driver"),
        "pci_address": addresses[0].name if addresses else None,
        "numa_node": node if node is not None and node >= 0 else None,
    }


def rdma(root: Path = Path("/")) -> list[dict[str, Any]]:
    """RDMA devices with the state, rate and link layer of each port and its table of GIDs."""
    return [
        {
            "name": device.name,
            "firmware": read(device / "fw_ver"),
            "board": read(device / "board_id"),
            **_pci(device),
            "ports": [_rdma_port(port) for port in children(device / "ports")],
        }
        for device in children(root / "sys/class/infiniband")
    ]


def _rdma_port(port: Path) -> dict[str, Any]:
    gids = []
    for entry in children(port / "gids"):
        gid = read(entry)
        if gid and gid.strip("0:"):  # an unused entry is all zero
            attributes = port / "gid_attrs"
            gids.append(
                {
                    "index": int(entry.name),
                    "gid": gid,
                    "type": read(attributes / "types" / entry.name),
                    "nic": read(attributes / "ndevs" / entry.name),
                }
            )
    state = read(port / "state")
    return {
        "port": int(port.name),
        "state": state.split(":")[-1].strip() if state else None,
        "rate": read(port / "rate"),
        "link_layer": read(port / "link_layer"),
        "gids": gids,
    }


def gpus(command: str = "nvidia-smi", deadline_s: float = SMI_DEADLINE_S) -> list[dict[str, Any]] | None:
    """GPUs as nvidia-smi lists them; empty without nvidia-smi, null if it fails or does not answer."""
    path = shutil.which(command)
    if path is None:
        return []
    question = [path, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    answer = output_of(question, deadline_s)
    if answer is None:
        return None
    found = []
    for line in answer.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_SMI_FIELDS):
            gpu: dict[str, Any] = dict(zip(_SMI_FIELDS, values, strict=True))
            mebibytes = gpu.pop("memory.total")
            gpu["memory_bytes"] = int(mebibytes) * 2**20 if mebibytes.isdigit() else None
            gpu["pci_address"] = gpu.pop("pci.bus_id").lower()
            found.append(gpu)
    return found
