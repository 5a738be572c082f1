"""Tensor parallel sizes that differ, between prefill and decode or between rows. Pure.

One function for plan and report: the ranks come in as a plan.json has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvbench.core.plan.engine_count import tensor_ranks_in
from kvbench.core.records import Finding


def unequal_ranks(plan: Mapping[str, Any], labels: Iterable[str]) -> Iterator[Finding]:
    """Warnings for the deployments with these labels, which are compared with each other."""
    ranks = {label: tensor_ranks_in(plan, label) for label in labels}
    apart: dict[tuple[int, int], list[str]] = {}
    sizes: dict[tuple[int, ...], list[str]] = {}
    for label, by_instance in ranks.items():
        sizes.setdefault(tuple(sorted(set(by_instance.values()))), []).append(label)
        found = {name.partition("-")[0]: count for name, count in by_instance.items()}
        prefill, decode = found.get("prefill", 0), found.get("decode", 0)
        if prefill and decode and prefill != decode:
            apart.setdefault((prefill, decode), []).append(label)
    for (prefill, decode), named in apart.items():
        yield Finding(
            "unequal_ranks",
            "warning",
            f"{', '.join(named)}: prefill has TP {prefill} and decode TP {decode}, so heads are dealt out "
            "anew on the way, and no engine without P/D adds in the order that they do",
            "in bf16 a greedy output may honestly differ from the one that it is compared with; equal sizes "
            "leave the transfer as the only difference",
            {"prefill": prefill, "decode": decode},
        )
    sizes.pop((), None)
    if len(sizes) > 1:
        told = "; ".join(f"{_text(size)}: {', '.join(named)}" for size, named in sorted(sizes.items()))
        yield Finding(
            "unequal_ranks",
            "warning",
            f"rows are of unequal tensor parallel sizes ({told}): a difference between them is the size's as "
            "well as the connector's, per GPU too",
            "compare connectors at one size, and sizes at one connector",
            {"sizes": {label: list(size) for size, named in sizes.items() for label in named}},
        )


def _text(size: tuple[int, ...]) -> str:
    return f"TP {' and '.join(map(str, size))}"
