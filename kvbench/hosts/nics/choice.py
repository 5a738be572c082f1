"""Select and order NICs for a transfer. RDMA devices and interfaces come from sysfs; each omitted one has a
reason."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvbench.errors import InputError
from kvbench.hosts.devices import LOOPBACK_TYPE, PCI_ADDRESS, gpus, link_rate, nics, rdma, read_int

Kind = Literal["rdma", "tcp"]
Addresses = Mapping[str, Sequence[str]]

ROOT: Final = Path("/")

_PLACE: Final = re.compile(r"(gpu|numa):(\d+)")


@dataclass(frozen=True)
class Nic:
    """A NIC for transfers: a port of an RDMA device, or an interface."""

    name: str
    kind: Kind
    address: str
    """IP address, of an RDMA device's interface; empty for InfiniBand without one."""
    gbit_per_s: float | None = None
    """One-way line rate, or None if not reported."""
    port: int = 1
    gid_index: int | None = None
    """Index of a routable RoCE v2 GID if possible; None for an interface."""
    link_layer: str = ""
    interface: str = ""
    pci_address: str | None = None
    numa_node: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rate = "speed unknown" if self.gbit_per_s is None else f"{self.gbit_per_s:g} Gbit/s"
        node = "" if self.numa_node is None else f", NUMA node {self.numa_node}"
        return f"{self.name} ({rate}{node})"


@dataclass(frozen=True)
class Found:
    """Usable NICs by name, and reasons for the others."""

    usable: tuple[Nic, ...]
    left_out: Mapping[str, str]


def find(kind: Kind, root: Path = ROOT, addresses: Addresses | None = None, *, in_lab: bool = False) -> Found:
    """Find all NICs of a kind. Veth interfaces are used in a lab only."""
    known = own_addresses() if addresses is None else addresses
    return _find_rdma(root, known) if kind == "rdma" else _find_tcp(root, known, in_lab)


def are_rdma(names: Sequence[str], root: Path = ROOT) -> bool:
    """Whether all these NICs, with or without ports, are local RDMA devices."""
    folder = root / "sys/class/infiniband"
    return bool(names) and all((folder / name.partition(":")[0]).exists() for name in names)


def own_addresses() -> dict[str, list[str]]:
    """Interface → local addresses, IPv4 first, without link-local ones."""
    import socket

    import psutil

    found = {}
    for name, entries in psutil.net_if_addrs().items():
        inet = [entry for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        inet.sort(key=lambda entry: entry.family != socket.AF_INET)
        kept = [entry.address for entry in inet if not entry.address.startswith("fe80")]
        found[name] = kept
    return found


def _find_rdma(root: Path, addresses: Addresses) -> Found:
    usable, left_out = [], {}
    for device in rdma(root):
        for port in device["ports"]:
            label = device["name"] if len(device["ports"]) == 1 else f"{device['name']}:{port['port']}"
            if reason := _rdma_fault(root, device, port):
                left_out[label] = reason
            else:
                usable.append(_rdma_nic(device, port, addresses))
    return Found(tuple(usable), left_out)


def _rdma_fault(root: Path, device: Mapping[str, Any], port: Mapping[str, Any]) -> str:
    if device["virtual_function"]:
        return "a virtual function"
    if port["state"] != "ACTIVE":
        physical = port["phys_state"]
        return f"its port is {port['state'] or 'in an unknown state'}" + (
            f" ({physical})" if physical else ""
        )
    bonds = {bond for name in device["interfaces"] if (bond := bond_of(root, name))}
    if "bond" in device["name"] or bonds:
        return f"part of a bond ({', '.join(sorted(bonds)) or device['name']}): one name, several cables"
    if not port["gids"]:
        return "it has no GID"
    return ""


def bond_of(root: Path, interface: str) -> str:
    folder = root / "sys/class/net" / interface
    if (folder / "bonding").is_dir():
        return interface
    master = folder / "master"
    return master.resolve().name if (master / "bonding").is_dir() else ""


def _rdma_nic(device: Mapping[str, Any], port: Mapping[str, Any], addresses: Addresses) -> Nic:
    gid = best_gid(port)
    interface = (gid["nic"] if gid else None) or next(iter(device["interfaces"]), "")
    mapped = ipaddress.IPv6Address(gid["gid"]).ipv4_mapped if gid else None
    rate = link_rate(port["rate"])
    return Nic(
        name=device["name"],
        kind="rdma",
        address=str(mapped) if mapped else next(iter(addresses.get(interface, ())), ""),
        gbit_per_s=None if rate is None else rate * 8 / 1e9,
        port=port["port"],
        gid_index=gid["index"] if gid else None,
        link_layer=port["link_layer"] or "",
        interface=interface,
        pci_address=device["pci_address"],
        numa_node=device["numa_node"],
    )


def best_gid(port: Mapping[str, Any]) -> dict[str, Any] | None:
    """Best GID: RoCE v2 of an IPv4, then global IPv6, then link-local address, then any."""

    def rank(gid: Mapping[str, Any]) -> tuple[int, int]:
        address = ipaddress.IPv6Address(gid["gid"])
        routable = 0 if address.ipv4_mapped else 2 if address.is_link_local else 1
        return (routable if gid["type"] == "RoCE v2" else 3, gid["index"])

    # Over InfiniBand the first entry is the port's own; the others are of virtual ports.
    key = rank if port["link_layer"] == "Ethernet" else lambda gid: (0, gid["index"])
    return min(port["gids"], key=key, default=None)


def _find_tcp(root: Path, addresses: Addresses, in_lab: bool) -> Found:
    usable, left_out = [], {}
    for nic in nics(root):
        known = addresses.get(nic["name"], ())
        if reason := _tcp_fault(root, nic, known, in_lab):
            left_out[nic["name"]] = reason
            continue
        # The kernel reports 10 Gbit/s for every veth; only the lab knows the rate of its NICs.
        speed = None if in_lab or nic["speed_mbit"] is None else nic["speed_mbit"] / 1e3
        usable.append(
            Nic(
                name=nic["name"],
                kind="tcp",
                address=known[0],
                gbit_per_s=speed,
                interface=nic["name"],
                pci_address=nic["pci_address"],
                numa_node=nic["numa_node"],
            )
        )
    return Found(tuple(usable), left_out)


def _tcp_fault(root: Path, nic: Mapping[str, Any], addresses: Sequence[str], in_lab: bool) -> str:
    """Why an interface is unusable, or "", by sysfs-class-net."""
    name = nic["name"]
    folder = root / "sys/class/net" / name
    if name == "lo" or read_int(folder / "type") == LOOPBACK_TYPE:
        return "the loopback"
    if (folder / "bridge").is_dir():
        return "a bridge of containers or virtual machines"
    if (folder / "tun_flags").exists():
        return "a tunnel"
    if (folder / "device/physfn").exists():
        return "a virtual function"
    if (folder / "master").exists():
        return f"part of {(folder / 'master').resolve().name}"
    if nic["pci_address"] is None and not (folder / "bonding").is_dir() and not in_lab:
        # A pair's other end has another number. A VLAN's interface is named after its parent.
        number, other = read_int(folder / "ifindex"), read_int(folder / "iflink")
        if not (folder / "device").exists() and number == other:
            return "a virtual interface with no hardware below"
        if not list(folder.glob("lower_*")) and not (folder / "device").exists():
            return "one end of a virtual pair (veth)"
    if nic["operstate"] != "up":
        return f"its link is {nic['operstate'] or 'in an unknown state'}"
    return "" if addresses else "it has no IP address"


# Order: nearest first


@dataclass(frozen=True)
class MemoryPlace:
    """Location of memory to move: a GPU, a PCI device, or a NUMA node."""

    numa_node: int | None
    pci_address: str | None = None


def place_of(text: str, root: Path = ROOT, cards: Sequence[Mapping[str, Any]] | None = None) -> MemoryPlace:
    """Parse ``gpu:0``, ``numa:1`` or a PCI address. Raises InputError."""
    if match := _PLACE.fullmatch(text):
        kind, number = match[1], int(match[2])
        if kind == "numa":
            return MemoryPlace(number)
        listed = (gpus() or []) if cards is None else cards
        for card in listed:
            if card["index"] == str(number):
                return _place_of_pci(card["pci_address"], root)
        raise InputError(f"there is no GPU {number} here", hint="nvidia-smi lists them")
    if PCI_ADDRESS.fullmatch(text.lower()):
        return _place_of_pci(text.lower(), root)
    raise InputError(f"{text!r} is not a location", hint="write gpu:0, numa:1 or a PCI address")


def _place_of_pci(address: str, root: Path) -> MemoryPlace:
    # nvidia-smi writes the domain with eight digits, sysfs with four.
    domain, _, rest = address.partition(":")
    short = f"{int(domain, 16):04x}:{rest}"
    node = read_int(root / "sys/bus/pci/devices" / short / "numa_node")
    return MemoryPlace(node if node is not None and node >= 0 else None, short)


def distance(nic: Nic, place: MemoryPlace, root: Path = ROOT) -> tuple[int, int]:
    """Distance of a NIC from memory: (kind, PCI bridges). Kinds as in ``nvidia-smi topo``: 0 PCI switches
    (PIX, PXB), 1 one host bridge (PHB), 2 one NUMA node (NODE), 3 across nodes (SYS) or unknown."""
    nic_path, place_path = (_pci_path(address, root) for address in (nic.pci_address, place.pci_address))
    common = 0
    while common < min(len(nic_path), len(place_path)) and nic_path[common] == place_path[common]:
        common += 1
    hops = len(nic_path) + len(place_path) - 2 * common
    if common >= 2:
        return 0, hops
    if common == 1:
        return 1, hops
    same = place.numa_node is not None and nic.numa_node == place.numa_node
    return (2 if same else 3), 0


def _pci_path(address: str | None, root: Path) -> tuple[str, ...]:
    link = root / "sys/bus/pci/devices" / (address or "")
    if address is None or not link.exists():
        return ()
    parts = link.resolve().parts
    return tuple(part for part in parts if part.startswith("pci") or PCI_ADDRESS.fullmatch(part))


def in_order(found: Sequence[Nic], place: MemoryPlace | None = None, root: Path = ROOT) -> list[Nic]:
    """Order by speed, then distance, then natural name. Slower NICs are last even if near, as they serve
    storage or management."""

    def key(nic: Nic) -> tuple[float, tuple[int, int], int, str, int]:
        way = (0, 0) if place is None else distance(nic, place, root)
        return -(nic.gbit_per_s or 0.0), way, len(nic.name), nic.name, nic.port

    return sorted(found, key=key)


def choose(count: int, found: Found, place: MemoryPlace | None = None, root: Path = ROOT) -> list[Nic]:
    """Choose ``count`` NICs by affinity. Raises InputError with all NICs and reasons if there are fewer."""
    ordered = in_order(found.usable, place, root)
    if 1 <= count <= len(ordered):
        return ordered[:count]
    there = ", ".join(str(nic) for nic in ordered) or "none"
    others = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items())
    noun = "NIC" if count == 1 else "NICs"
    fewer = f"--nics {len(ordered)} uses all of them; " if ordered else ""
    raise InputError(
        f"{count} {noun} requested, {len(ordered)} usable here: {there}",
        hint=f"{fewer}kvbench microbench --lab --nics {max(count, 1)} shows how they scale on shaped virtual "
        "ones, without root" + (f"; left out: {others}" if others else ""),
    )
