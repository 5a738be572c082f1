"""Whose greedy outputs are the truth for whom: those of engines without P/D that have as many ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

AGGREGATED: Final = "aggregated"


@dataclass(frozen=True)
class Sized:
    """A deployment's label, its connector's name, and which of the tensor parallel sizes it has."""

    label: str
    connector: str
    size: int


@dataclass(frozen=True)
class References:
    """``of``: label → label of the deployment with the true outputs. ``added``: those that are not measured.

    More ranks add their parts in another order, so each size has a reference of its own.
    """

    of: Mapping[str, str]
    added: tuple[Sized, ...]


def references(chosen: Sequence[Sized]) -> References:
    """The first that is aggregated of each size; of a size that has none one is added."""
    sizes = list(dict.fromkeys(each.size for each in chosen))
    taken = {each.label for each in chosen}
    by_size: dict[int, str] = {}
    added = []
    for size in sizes:
        whole = (each.label for each in chosen if (each.connector, each.size) == (AGGREGATED, size))
        label = next(whole, "")
        if not label:
            label = _free_label("reference" if len(sizes) == 1 else f"reference-tp{size}", taken)
            added.append(Sized(label, AGGREGATED, size))
        by_size[size] = label
    return References({each.label: by_size[each.size] for each in [*chosen, *added]}, tuple(added))


def _free_label(wanted: str, taken: Iterable[str]) -> str:
    """A label for a reference deployment that no connector has."""
    label, number = wanted, 1
    while label in taken:
        number += 1
        label = f"{wanted}-{number}"
    return label
