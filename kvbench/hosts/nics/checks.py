"""Check NICs and their surroundings for doctor, with hints. All paths are below ``root``, so recorded
machines can be checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvbench.hosts.devices import children, link_rate, nics, output_of, pcie_link, rdma, read, read_int
from kvbench.hosts.nics.choice import Addresses, best_gid, find, in_order, own_addresses
from kvbench.hosts.version_rules import Check

ROOT: Final = Path("/")
ROCE_MTU: Final = 4200
"""Smallest interface MTU with RoCE's largest MTU of 4096 bytes plus headers."""
FAST_MBIT: Final = 25_000
"""Speed in Mbit/s above which TCP with 1500-byte packets is limited by CPU interrupts."""
PCIE_ENOUGH: Final = 0.95
"""Share of the NIC's rate that a PCIe link must have; its headers are ignored."""
VERSION_DEADLINE_S: Final = 10.0

MOONCAKE: Final = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
NIXL: Final = ("nixl-cu12", "nixl-cu13", "nixl")

# NIXL's wheel brings its own UCX, whose version only the library itself reports.
_ASK_UCX: Final = """
import ctypes, importlib.metadata, sys
for file in importlib.metadata.files(sys.argv[1]) or ():
    if file.name.startswith("libucp"):
        library = ctypes.CDLL(str(file.locate()))
        library.ucp_get_version_string.restype = ctypes.c_char_p
        print(library.ucp_get_version_string().decode())
        break
"""


@dataclass(frozen=True)
class Machine:
    """Input of the checks, read once."""

    root: Path
    devices: Sequence[Mapping[str, Any]]
    interfaces: Sequence[Mapping[str, Any]]
    addresses: Addresses
    gpus: int = 0

    @classmethod
    def at(cls, root: Path = ROOT, gpus: int = 0, addresses: Addresses | None = None) -> Machine:
        known = own_addresses() if addresses is None else addresses
        return cls(root, rdma(root), nics(root), known, gpus)

    def ports(self, *, active: bool = False) -> list[tuple[str, Mapping[str, Any]]]:
        """(device name, port) of each RDMA device."""
        listed = [(str(device["name"]), port) for device in self.devices for port in device["ports"]]
        return [(name, port) for name, port in listed if port["state"] == "ACTIVE" or not active]


def nic_checks(machine: Machine, versions: Mapping[str, str]) -> list[Check]:
    """All checks of NICs; RDMA-only ones need an RDMA device."""
    checks = [_choice_check(machine), _mtu_check(machine), _pcie_check(machine)]
    if machine.devices:
        checks += [_link_check(machine), _gid_check(machine), _iommu_check(machine)]
        checks += [_peer_memory_check(machine)] if machine.gpus else []
    checks += [_huge_pages_check(machine.root), *_numa_checks(machine.root)]
    return checks + version_checks(versions)


def _choice_check(machine: Machine) -> Check:
    """Show which NICs `--nics` would choose and omit."""
    parts, number = [], 0
    for kind in ("rdma", "tcp"):
        if kind == "rdma" and not machine.devices:
            continue
        found = find(kind, machine.root, machine.addresses)
        number += len(found.usable)
        words = ", ".join(str(nic) for nic in in_order(found.usable, root=machine.root)) or "none"
        others = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items() if name != "lo")
        parts.append(f"for {kind}: {words}" + (f" (not {others})" if others else ""))
    fix = "configure an interface with link and address; or try NICs in a lab: kvbench lab up --nics 8"
    return Check.of("nics", bool(number), "; ".join(parts), fix)


def _link_check(machine: Machine) -> Check:
    """Find ports that are on without a link."""
    down = [(name, port) for name, port in machine.ports() if port["state"] != "ACTIVE"]
    trying = [f"{name}:{port['port']}" for name, port in down if port["phys_state"] != "Disabled"]
    off = [f"{name}:{port['port']}" for name, port in down if port["phys_state"] == "Disabled"]
    up = "all up" + (f", {', '.join(off)} switched off" if off else "")
    detail = f"no link on {', '.join(trying)}" if trying else up
    return Check.of(
        "nic links", not trying, detail, "check cable, transceiver and switch port; else ignore them"
    )


def _gid_check(machine: Machine) -> Check:
    """Check for a routable RoCE v2 GID, at the same index everywhere."""
    ethernet = [(name, port) for name, port in machine.ports(active=True) if port["link_layer"] == "Ethernet"]
    best = {f"{name}:{port['port']}": best_gid(port) for name, port in ethernet}
    without = [name for name, gid in best.items() if gid is None or gid["type"] != "RoCE v2"]
    local = [name for name, gid in best.items() if gid and gid["gid"].lower().startswith("fe80")]
    if without:
        detail = f"no RoCE v2 GID on {', '.join(without)}"
        return Check("gids", "missing", detail, "cma_roce_mode -d DEVICE -p PORT -m 2, and an IP address")
    if local:
        detail = f"only link-local GIDs on {', '.join(local)}: not reachable through a router"
        return Check("gids", "warn", detail, "give its interface an IPv4 address: ip address add … dev …")
    indices = {gid["index"] for gid in best.values() if gid}
    if len(indices) > 1:
        text = ", ".join(f"{name} {gid['index']}" for name, gid in best.items() if gid)
        fix = "leave MC_GID_INDEX, UCX_IB_GID_INDEX, NCCL_IB_GID_INDEX unset: each holds for all devices"
        return Check("gids", "warn", f"RoCE v2 is not at one index: {text}", fix)
    return Check("gids", "ok", f"RoCE v2 at index {indices.pop()}" if indices else "InfiniBand: index 0")


def _mtu_check(machine: Machine) -> Check:
    roce = {name for device in machine.devices for name in device["interfaces"]}
    up = [nic for nic in machine.interfaces if nic["operstate"] == "up" and nic["pci_address"]]
    of_roce = [nic for nic in up if nic["name"] in roce]
    fast = [nic for nic in up if nic["name"] not in roce and (nic["speed_mbit"] or 0) >= FAST_MBIT]
    small = [nic for nic in of_roce if (nic["mtu"] or ROCE_MTU) < ROCE_MTU]
    small += [nic for nic in fast if (nic["mtu"] or ROCE_MTU) < ROCE_MTU]
    if small:
        words = ", ".join(f"{nic['name']} {nic['mtu']}" for nic in small)
        fix = f"ip link set {small[0]['name']} mtu 9000, there, at the peer and in the switches"
        return Check("mtu", "warn", f"{words}: small packets on a fast NIC", fix)
    sizes = sorted({nic["mtu"] for nic in (of_roce or up) if nic["mtu"]})
    if len(sizes) > 1 and of_roce:
        text = ", ".join(f"{nic['name']} {nic['mtu']}" for nic in of_roce)
        return Check("mtu", "warn", f"not the same everywhere: {text}", "ip link set INTERFACE mtu 9000")
    return Check("mtu", "ok", " and ".join(str(size) for size in sizes) or "no NIC with a link")


def _pcie_check(machine: Machine) -> Check:
    """Check each slot's rate and link state."""
    fine, slow = 0, []
    for name, link, rate_gbit in _links(machine):
        carries = pcie_gbit(link["current_gt_per_s"], link["current_width"])
        if carries is None:
            continue
        could = pcie_gbit(link["max_gt_per_s"], link["max_width"])
        words = f"{name} {link['current_gt_per_s']:g} GT/s x{link['current_width']}, {carries:.0f} Gbit/s"
        if rate_gbit is not None and carries < PCIE_ENOUGH * rate_gbit:
            words += f" for a NIC of {rate_gbit:g}"
            if could is not None and could > carries:
                words += f" (its slot could have x{link['max_width']} at {link['max_gt_per_s']:g})"
            slow.append(words)
        else:
            fine += 1
    fix = "seat the card in a wider slot, check bifurcation in the BIOS, and `lspci -vv` LnkSta"
    wide = f"wide enough for {fine} NIC{'s' if fine != 1 else ''}" if fine else "no link's width is known"
    return Check.of("pcie", not slow, "; ".join(slow) or wide, fix)


def _links(machine: Machine) -> list[tuple[str, Mapping[str, Any], float | None]]:
    """Name, PCIe link and rate in Gbit/s of each card; its ports share the slot."""
    rows: list[tuple[str, str | None, Mapping[str, Any], float | None]] = []
    for device in machine.devices:
        active = [port for port in device["ports"] if port["state"] == "ACTIVE"]
        rates = [rate for port in active if (rate := link_rate(port["rate"])) is not None]
        if device["pcie"] and active and not device["virtual_function"]:
            gbit = sum(rates) * 8 / 1e9 if rates else None
            rows.append((str(device["name"]), device["pci_address"], device["pcie"], gbit))
    covered = {device["pci_address"] for device in machine.devices}
    for nic in machine.interfaces:
        link = pcie_link(machine.root / "sys/class/net" / nic["name"])
        if link and nic["operstate"] == "up" and nic["pci_address"] not in covered:
            speed = nic["speed_mbit"]
            rows.append((nic["name"], nic["pci_address"], link, None if speed is None else speed / 1e3))
    slots: dict[str, tuple[str, Mapping[str, Any], float | None]] = {}
    for name, address, width, gbit in rows:
        slot = (address or name).rpartition(".")[0] or name
        if slot in slots:
            other, _, added = slots[slot]
            gbit = None if gbit is None or added is None else gbit + added
            name = f"{other} and {name}"
        slots[slot] = (name, width, gbit)
    return list(slots.values())


def pcie_gbit(gt_per_s: float | None, width: int | None) -> float | None:
    """One-way PCIe rate in Gbit/s, before packet headers. Encoding: 8/10 up to 5 GT/s, 128/130 up to 32 GT/s,
    242/256 from 64 GT/s (PCI Express Base Specification 2.0, 3.0 and 6.0)."""
    if not gt_per_s or not width:
        return None
    share = 0.8 if gt_per_s <= 5 else 128 / 130 if gt_per_s <= 32 else 242 / 256
    return gt_per_s * width * share


def _peer_memory_check(machine: Machine) -> Check:
    """Check that NICs can access GPU memory directly."""
    modules = machine.root / "sys/module"
    for name in ("nvidia_peermem", "nv_peer_mem"):
        if (modules / name).is_dir():
            return Check("peer memory", "ok", f"{name} is loaded")
    version = read(machine.root / "proc/driver/nvidia/version") or ""
    if "Open Kernel Module" in version:
        return Check("peer memory", "ok", "by dmabuf, with NVIDIA's open kernel module")
    detail = "no nvidia_peermem: GPU memory is copied through the host, or cannot be registered"
    return Check("peer memory", "missing", detail, "modprobe nvidia_peermem")


def _iommu_check(machine: Machine) -> Check:
    """Check for a translating IOMMU, which costs bandwidth and disables GPUDirect."""
    translated = []
    for device in machine.devices:
        place = machine.root / "sys/bus/pci/devices" / (device["pci_address"] or "")
        kind = read(place / "iommu_group/type")
        if kind is not None and kind != "identity":
            translated.append(f"{device['name']} {kind}")
    fix = "kernel command line: iommu=pt (and in the BIOS ACS off, for GPUDirect)"
    detail = (
        f"translates for {', '.join(translated)}"
        if translated
        else "does not translate between NICs and memory"
    )
    return Check.of("iommu", not translated, detail, fix)


def _huge_pages_check(root: Path) -> Check:
    enabled = read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", enabled)
    static = read_int(root / "proc/sys/vm/nr_hugepages") or 0
    mode = chosen[1] if chosen else "unknown"
    fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: small pages slow registration"
    detail = f"transparent: {mode}, static: {static}"
    return Check.of("huge pages", mode != "never" or static > 0, detail, fix)


def _numa_checks(root: Path) -> list[Check]:
    nodes = [
        node for node in children(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", node.name)
    ]
    if len(nodes) < 2:
        return []
    moves = bool(read_int(root / "proc/sys/kernel/numa_balancing"))
    how = "and the kernel moves pages between them while they are used" if moves else "pages are not moved"
    detail = f"{len(nodes)} nodes, {how}"
    return [Check.of("numa balancing", not moves, detail, "sysctl -w kernel.numa_balancing=0")]


def version_checks(versions: Mapping[str, str]) -> list[Check]:
    checks = []
    if mooncake := [f"{name} {versions[name]}" for name in MOONCAKE if name in versions]:
        checks.append(Check("mooncake", "ok", ", ".join(mooncake)))
    if nixl := [name for name in NIXL if name in versions]:
        ucx = next((version for name in nixl if (version := bundled_ucx(name))), None)
        detail = ", ".join(f"{name} {versions[name]}" for name in nixl)
        checks.append(Check("nixl", "ok", detail + (f" with UCX {ucx}" if ucx else "")))
    return checks


def bundled_ucx(distribution: str) -> str | None:
    """UCX version in a wheel, read in a separate process, or None."""
    output = output_of([sys.executable, "-c", _ASK_UCX, distribution], VERSION_DEADLINE_S)
    return (output or "").strip() or None
