"""NICs, RDMA devices and GPUs of a machine, and their counters. Unreadable values are null."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

SMI_DEADLINE_S: Final = 5.0

LOOPBACK_TYPE: Final = 772
"""Linux's ARPHRD_LOOPBACK."""
PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SMI_FIELDS: Final = ("index", "name", "memory.total", "driver_version", "pci.bus_id", "pstate")


def read(path: Path) -> str | None:
    """Return a file's stripped text; None if it is absent, unreadable or empty. Some sysfs files fail on
    read, such as the speed of a link that is down."""
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
    """Return a folder's entries in natural order; empty without the folder."""
    try:
        return sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name))
    except OSError:
        return []


def link_name(path: Path) -> str | None:
    """Return the last part of a symbolic link's target: in sysfs, a driver's name or a PCI address."""
    try:
        return Path(os.readlink(path)).name
    except OSError:
        return None


def output_of(command: list[str], deadline_s: float) -> str | None:
    """Return a command's output; None if it cannot run, fails, or times out."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def nics(root: Path) -> list[dict[str, Any]]:
    """Return network interfaces; ``speed_mbit`` is null if unreported or the link is down."""
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
    """Return driver, PCI address and NUMA node of a device; null for a virtual one."""
    device = (folder / "device").resolve()
    # A virtio device is one level below its PCI device.
    addresses = [place for place in (device, *device.parents[:2]) if PCI_ADDRESS.fullmatch(place.name)]
    node = read_int(addresses[0] / "numa_node") if addresses else None
    return {
        "driver": link_name(device / "driver"),
        "pci_address": addresses[0].name if addresses else None,
        "numa_node": node if node is not None and node >= 0 else None,
    }


def pcie_link(folder: Path) -> dict[str, Any] | None:
    """Return current and maximum speed (GT/s per lane) and width of a PCIe link; null if unknown. Source:
    sysfs-bus-pci in the kernel's ABI documentation."""
    device = (folder / "device").resolve()
    place = next(
        (place for place in (device, device.parent) if (place / "current_link_width").exists()), None
    )
    if place is None:
        return None
    link: dict[str, Any] = {}
    for way in ("current", "max"):
        speed = re.match(r"[\d.]+", read(place / f"{way}_link_speed") or "")
        link[f"{way}_gt_per_s"] = float(speed[0]) if speed else None
        link[f"{way}_width"] = read_int(place / f"{way}_link_width") or None
    return link


def rdma(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Return RDMA devices with each port's state, rate and link layer, and its table of GIDs."""
    return [
        {
            "name": device.name,
            "firmware": read(device / "fw_ver"),
            "board": read(device / "board_id"),
            **_pci(device),
            "interfaces": [folder.name for folder in children(device / "device/net")],
            "virtual_function": (device / "device/physfn").exists(),
            "pcie": pcie_link(device),
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
    state, physical = read(port / "state"), read(port / "phys_state")
    return {
        "port": int(port.name),
        "state": state.split(":")[-1].strip() if state else None,
        "phys_state": physical.split(":")[-1].strip() if physical else None,
        "rate": read(port / "rate"),
        "link_layer": read(port / "link_layer"),
        "gids": gids,
    }


def gpus(command: str = "nvidia-smi", deadline_s: float = SMI_DEADLINE_S) -> list[dict[str, Any]] | None:
    """Return nvidia-smi's GPUs; empty without nvidia-smi, null if it fails or times out."""
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


# Counters that grow while a trial runs

_RATE: Final = re.compile(r"([\d.]+)\s*([GM])b/sec")
_RDMA_COUNTERS: Final = (
    (("counters/port_xmit_data", "counters/port_rcv_data"), 4),
    (("hw_counters/tx_bytes", "hw_counters/rx_bytes"), 1),
)
"""Files of a port's sent and received bytes, with their unit; the first existing pair counts. InfiniBand
counts four-byte words (octets over four lanes). EFA has only its own files (EFA_DEFINE_PORT_STATS in the
kernel's efa_verbs.c: all bytes, including RDMA reads and writes)."""


@dataclass(frozen=True)
class NicReading:
    """Byte counters of an interface ("ip"), RDMA device ("rdma") or GPU's NVLinks ("nvlink")."""

    kind: Literal["ip", "rdma", "nvlink"]
    sent_bytes: float
    received_bytes: float
    bytes_per_s: float | None = None
    """Line rate in one direction; null if the driver does not report it or the link is down."""
    loopback: bool = False


def nic_counters(root: Path = Path("/")) -> dict[str, NicReading]:
    """Read all interfaces and RDMA devices with byte counters; an RDMA device's ports are summed."""
    found: dict[str, NicReading] = {}
    for folder in children(root / "sys/class/net"):
        sent, received = (read_int(folder / f"statistics/{way}_bytes") for way in ("tx", "rx"))
        if sent is None or received is None:
            continue
        speed = read_int(folder / "speed")
        rate = speed * 1e6 / 8 if speed and speed > 0 else None
        loopback = folder.name == "lo" or read_int(folder / "type") == LOOPBACK_TYPE
        found[folder.name] = NicReading("ip", sent, received, rate, loopback)
    for device in children(root / "sys/class/infiniband"):
        ports = children(device / "ports")
        counted = [both for port in ports if (both := _rdma_bytes(port)) is not None]
        if not ports or len(counted) < len(ports):
            continue
        sent, received = (sum(way) for way in zip(*counted, strict=True))
        rates = [rate for port in ports if (rate := link_rate(read(port / "rate"))) is not None]
        found[device.name] = NicReading("rdma", sent, received, sum(rates) if rates else None)
    return found


def _rdma_bytes(port: Path) -> tuple[int, int] | None:
    """Return bytes sent and received by an RDMA port; None unless it counts both."""
    for names, unit in _RDMA_COUNTERS:
        sent, received = (read_int(port / name) for name in names)
        if sent is not None and received is not None:
            return sent * unit, received * unit
    return None


def link_rate(text: str | None) -> float | None:
    """Return bytes per second from an RDMA port's ``400 Gb/sec (4X NDR)``."""
    match = _RATE.search(text or "")
    return None if match is None else float(match[1]) * {"G": 1e9, "M": 1e6}[match[2]] / 8


def thermal_events(root: Path = Path("/")) -> int | None:
    """Count thermal slowdowns of any core or CPU package since boot."""
    folders = children(root / "sys/devices/system/cpu")
    counts = [
        count
        for folder in folders
        for name in ("core_throttle_count", "package_throttle_count")
        if (count := read_int(folder / "thermal_throttle" / name)) is not None
    ]
    return sum(counts) if counts else None


def cgroup_folders(root: Path) -> list[Path]:
    """Return this process's cgroup (v2) and its parents."""
    entry = re.search(r"^0::/(.*)$", read(root / "proc/self/cgroup") or "", re.MULTILINE)
    base = root / "sys/fs/cgroup"
    folder = base / (entry[1] if entry else "")
    return [place for place in (folder, *folder.parents) if place == base or base in place.parents]


def cpu_pressure_s(root: Path = Path("/")) -> float | None:
    """Seconds since boot in which a process was ready without a core; None on kernels without PSI."""
    found = re.search(r"^some .*total=(\d+)$", read(root / "proc/pressure/cpu") or "", re.MULTILINE)
    return int(found[1]) / 1e6 if found else None


def cgroup_throttled_s(root: Path = Path("/")) -> float | None:
    """Seconds for which a CPU limit throttled this process's cgroup or a parent."""
    base = root / "sys/fs/cgroup"
    seconds: list[float] = []
    for place in cgroup_folders(root):
        if found := re.search(r"^throttled_usec (\d+)$", read(place / "cpu.stat") or "", re.MULTILINE):
            seconds.append(int(found[1]) / 1e6)
    first_version = read(base / "cpu/cpu.stat") or read(base / "cpu,cpuacct/cpu.stat") or ""
    if found := re.search(r"^throttled_time (\d+)$", first_version, re.MULTILINE):
        seconds.append(int(found[1]) / 1e9)
    return max(seconds, default=None)
