"""Location of each GPU: its NUMA node, the nearest RDMA devices, and its NVLinks. Sources: sysfs (the tree of
PCI devices), and ``nvidia-smi topo -m``, which also reports NVLink and what a container or virtual machine
hides in sysfs. All files are below ``root``, so that recorded machines can be tested."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbench.hosts.devices import SMI_DEADLINE_S, output_of
from kvbench.hosts.nics.choice import distance, find, place_of

WAYS: Final = ("PIX/PXB", "PHB", "NODE", "SYS")
"""Kinds of ``choice.distance`` as ``nvidia-smi topo`` names them: switches only, through one host bridge,
within a NUMA node, between nodes. sysfs does not distinguish PIX (one bridge) from PXB (several)."""
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Topology:
    """A GPU's row of ``nvidia-smi topo -m``."""

    numa_node: int | None = None
    nics: Mapping[str, str] = field(default_factory=dict)
    """Connection by RDMA device."""
    gpus: Mapping[str, str] = field(default_factory=dict)
    """Connection by the other GPU's index; ``NV18`` is a bond of 18 NVLinks."""


def topologies(text: str) -> dict[str, Topology]:
    """Parse ``nvidia-smi topo -m`` into rows by GPU index; empty for another format."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    names = dict(re.findall(r"^\s*(NIC\d+): (\S+)", "\n".join(lines), re.MULTILINE))
    header = next((line.split("\t") for line in lines if line.strip().startswith("GPU0")), [])
    titles = [title.strip() for title in header]
    found = {}
    for line in lines[lines.index("\t".join(header)) + 1 :] if header else []:
        cells = [cell.strip() for cell in line.split("\t")]
        row = re.fullmatch(r"GPU(\d+)", cells[0])
        if row is None:
            continue
        by_title = dict(zip(titles[1:] if not titles[0] else titles, cells[1:], strict=False))
        node = by_title.get("NUMA Affinity", "")
        found[row[1]] = Topology(
            int(node) if node.isdigit() else None,
            {
                names.get(key, key): way
                for key, way in by_title.items()
                if re.fullmatch(r"NIC\d+|mlx\S+", key)
            },
            {key[3:]: way for key, way in by_title.items() if re.fullmatch(r"GPU\d+", key) and way != "X"},
        )
    return found


def with_affinity(
    cards: Sequence[Mapping[str, Any]] | None, root: Path = Path("/"), topology: str | None = None
) -> list[dict[str, Any]] | None:
    """Add ``numa_node``, ``nearest_nics``, ``nic_way`` and ``nvlink`` to the GPUs of ``devices.gpus``.
    ``topology``: output of ``nvidia-smi topo -m``, which is run if None. Unknown values are null or empty."""
    if not cards:
        return None if cards is None else []
    rows = topologies(_ask() if topology is None else topology)
    return [
        {**card, **_affinity(card, root, rows.get(str(card["index"]), Topology()), cards)} for card in cards
    ]


def _ask() -> str:
    path = shutil.which("nvidia-smi")
    return (output_of([path, "topo", "-m"], SMI_DEADLINE_S) if path else None) or ""


def _affinity(
    card: Mapping[str, Any], root: Path, row: Topology, cards: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    place = place_of(f"gpu:{card['index']}", root, cards)
    usable = find("rdma", root, {}).usable
    ways = {nic.name: distance(nic, place, root) for nic in usable}
    nearest = [name for name, way in ways.items() if way == min(ways.values())]
    links = {name: way for name, way in row.nics.items() if not ways or name in ways}
    if ways and min(ways.values())[0] < len(WAYS) - 1:
        way = WAYS[min(ways.values())[0]]
    elif links:  # sysfs shows no distance: nvidia-smi may
        order = ("PIX", "PXB", "PHB", "NODE", "SYS")
        way = min(links.values(), key=lambda link: order.index(link) if link in order else len(order))
        nearest = [name for name, link in links.items() if link == way]
    else:
        way = WAYS[-1] if ways else ""
    return {
        "numa_node": row.numa_node if place.numa_node is None else place.numa_node,
        "nearest_nics": nearest,
        "nic_way": way,
        "nvlink": {other: way for other, way in row.gpus.items() if way.startswith("NV")},
    }


def affinity_text(card: Mapping[str, Any]) -> str:
    """Return ``NUMA node 0; nearest RDMA mlx5_0 (PXB); NVLink to 7 GPUs (NV18)``, without unknown parts."""
    node, nics, links = card.get("numa_node"), card.get("nearest_nics"), card.get("nvlink") or {}
    parts = ["NUMA node unknown" if node is None else f"NUMA node {node}"]
    if nics:
        parts.append(f"nearest RDMA {', '.join(nics)} ({card.get('nic_way')})")
    if links:
        kinds = ", ".join(dict.fromkeys(links.values()))
        parts.append(f"NVLink to {len(links)} GPU{'s' * (len(links) > 1)} ({kinds})")
    return "; ".join(parts)
