"""A recorded machine of eight GPUs, each with a NIC beside it; files as in the kernel's ABI documentation."""

from collections.abc import Mapping
from pathlib import Path

BUSES = ("15", "37", "48", "59", "97", "b7", "c7", "d7")
"""Host bridges with a switch, a GPU and a NIC each; the first four belong to NUMA node 0."""
STORAGE = {"mlx5_4": "29", "mlx5_9": "a8"}
"""Device and its host bridge; neither has a link."""
NAMES = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8")


def gpu_address(number: int) -> str:
    return f"0000:{int(BUSES[number], 16) + 6:02x}:00.0"


def nic_address(number: int) -> str:
    return f"0000:{int(BUSES[number], 16) + 3:02x}:00.0"


CARDS = [{"index": str(number), "pci_address": f"0000{gpu_address(number)}"} for number in range(8)]
"""As nvidia-smi tells them, with eight digits of domain."""


def topology() -> str:
    """What `nvidia-smi topo -m` prints of it (its format, with the escapes that it writes to a terminal)."""
    nics = [*NAMES, *STORAGE]
    nodes = [number // 4 for number in range(8)] + [0, 1]
    titles = [f"GPU{number}" for number in range(8)] + [f"NIC{number}" for number in range(len(nics))]
    lines = ["\t\x1b[4m" + "\t".join([*titles, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for gpu in range(8):
        others = [" X " if gpu == other else "NV18" for other in range(8)]
        ways = ["NODE" if node == gpu // 4 else "SYS" for node in nodes]
        ways[gpu] = "PXB"
        cores = "0-55" if gpu < 4 else "56-111"
        lines.append("\t".join([f"GPU{gpu}", *others, *ways, cores, str(gpu // 4), "", "N/A"]))
    legend = [f"  NIC{number}: {name}" for number, name in enumerate(nics)]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "", "NIC Legend:", "", *legend, ""])


ADDRESSES = {f"rail{number}": [f"10.0.{number}.1"] for number in range(8)} | {
    "lo": ["127.0.0.1"], "bond0": ["10.1.0.1"], "docker0": ["172.17.0.1"], "veth12ab": [],
}  # fmt: skip


MIB_H200 = 143_771
"""Memory that nvidia-smi tells of one H200."""


def write_smi(folder: Path, count: int) -> None:
    """An nvidia-smi that lists so many of the recorded node's GPUs, in the format that is asked for."""
    rows = [
        f"{card['index']}, NVIDIA H200, {MIB_H200}, 570.86, {card['pci_address'].upper()}, P0"
        for card in CARDS[:count]
    ]
    path = folder / "nvidia-smi"
    (folder / "topology").write_text(topology())
    topo = f'[ "$1" = topo ] && exec cat "{folder / "topology"}"'
    path.write_text(f"#!/bin/sh\n{topo}\ncat <<'EOF'\n" + "\n".join(rows) + "\nEOF\n")
    path.chmod(0o755)


def machine(root: Path) -> Path:
    """Write the whole tree."""
    for number, name in enumerate(NAMES):
        bus = BUSES[number]
        switch = f"pci0000:{bus}/0000:{bus}:01.0/0000:{int(bus, 16) + 1:02x}:00.0"
        up = f"{switch}/0000:{int(bus, 16) + 2:02x}"
        node = number // 4
        add_pci(root, f"{up}:00.0/{nic_address(number)}", node)
        add_pci(root, f"{up}:01.0/{gpu_address(number)}", node)
        add_nic(root, f"{up}:00.0/{nic_address(number)}", name, f"rail{number}", number)
    for number, (name, bus) in enumerate(STORAGE.items()):
        place = f"pci0000:{bus}/0000:{bus}:01.0/0000:{int(bus, 16) + 1:02x}:00.0"
        add_pci(root, place, number)
        add_nic(root, place, name, f"storage{number}", None)
    _virtual_interfaces(root)
    write(
        root,
        {
            "proc/sys/kernel/numa_balancing": "0",
            "proc/sys/vm/nr_hugepages": "0",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/devices/system/node/node0/cpulist": "0-55",
            "sys/devices/system/node/node1/cpulist": "56-111",
            "sys/module/nvidia_peermem/refcnt": "0",
        },
    )
    return root


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def device(root: Path, name: str) -> Path:
    """The folder of an RDMA device's first port."""
    return (root / "sys/class/infiniband" / name).resolve() / "ports/1"


def pci(root: Path, name: str) -> Path:
    """The folder of the PCI device below an RDMA device."""
    return (root / "sys/class/infiniband" / name / "device").resolve()


def link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


def add_pci(root: Path, place: str, node: int) -> None:
    folder = f"sys/devices/{place}"
    write(
        root,
        {
            f"{folder}/numa_node": str(node), f"{folder}/current_link_speed": "32.0 GT/s PCIe",
            f"{folder}/current_link_width": "16", f"{folder}/max_link_speed": "32.0 GT/s PCIe",
            f"{folder}/max_link_width": "16", f"{folder}/iommu_group/type": "identity",
        },
    )  # fmt: skip
    link(root / "sys/bus/pci/devices" / Path(place).name, root / folder)


def add_nic(root: Path, place: str, name: str, interface: str, rail: int | None) -> None:
    """An RDMA device and its interface; without a rail there is no link."""
    folder = f"sys/devices/{place}"
    port, net = f"{folder}/infiniband/{name}/ports/1", f"{folder}/net/{interface}"
    up = rail is not None
    zero = "0000:0000:0000:0000:0000:0000:0000:0000"
    local = f"fe80:0000:0000:0000:a288:c2ff:fe00:{rail or 0:04x}"
    mapped = f"0000:0000:0000:0000:0000:ffff:0a00:{rail or 0:02x}01"
    gids = [(local, "IB/RoCE v1"), (local, "RoCE v2"), (mapped, "IB/RoCE v1"), (mapped, "RoCE v2")]
    write(
        root,
        {
            f"{folder}/infiniband/{name}/fw_ver": "28.39.1002",
            f"{port}/state": "4: ACTIVE" if up else "1: DOWN",
            f"{port}/phys_state": "5: LinkUp" if up else "3: Disabled",
            f"{port}/rate": "400 Gb/sec (4X NDR)" if up else "40 Gb/sec (4X QDR)",
            f"{port}/link_layer": "Ethernet", f"{port}/gids/4": zero,
            f"{net}/operstate": "up" if up else "down", f"{net}/speed": "400000" if up else "-1",
            f"{net}/mtu": "9000" if up else "1500", f"{net}/type": "1",
        },
    )  # fmt: skip
    for index, (gid, kind) in enumerate(gids if up else []):
        write(
            root,
            {
                f"{port}/gids/{index}": gid,
                f"{port}/gid_attrs/types/{index}": kind,
                f"{port}/gid_attrs/ndevs/{index}": interface,
            },
        )
    for kind, entry in (("infiniband", name), ("net", interface)):
        link(root / "sys/class" / kind / entry, root / folder / kind / entry)
        link(root / folder / kind / entry / "device", root / folder)


def _virtual_interfaces(root: Path) -> None:
    net = "sys/devices/virtual/net"
    write(
        root,
        {
            f"{net}/lo/operstate": "unknown", f"{net}/lo/type": "772", f"{net}/docker0/operstate": "up",
            f"{net}/docker0/bridge/bridge_id": "8000", f"{net}/veth12ab/operstate": "up",
            f"{net}/veth12ab/ifindex": "20", f"{net}/veth12ab/iflink": "19",
            f"{net}/dummy0/operstate": "up", f"{net}/dummy0/ifindex": "21", f"{net}/dummy0/iflink": "21",
            f"{net}/tun0/operstate": "up", f"{net}/tun0/tun_flags": "0x1001",
            f"{net}/bond0/operstate": "up", f"{net}/bond0/speed": "50000", f"{net}/bond0/mtu": "9000",
            f"{net}/bond0/bonding/mode": "802.3ad 4",
        },
    )  # fmt: skip
    for folder in (root / net).iterdir():
        link(root / "sys/class/net" / folder.name, folder)
