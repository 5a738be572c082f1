"""The findings of a chaos run: which pair loses less by a fault, where its repeats can tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb
from typing import Final

from kvbench.core.findings.findings import Statement
from kvbench.report.held.fault_rows import FaultGroup, fault_groups
from kvbench.report.tables.numbers import number
from kvbench.results.run import RunFolder

MOST_CHANCE: Final = 0.05
"""At most this likely by chance: that all repeats of one lie below all of the other, either of the two."""


def fault_statements(run: RunFolder) -> list[Statement]:
    """Who loses less goodput, fault by fault; what its repeats cannot tell is one statement."""
    groups = fault_groups(run)
    pairs = list(dict.fromkeys(each.cell.connector for each in groups))
    if len(pairs) < 2:
        alone = f"{pairs[0]} is alone in this run" if pairs else "no fault has been done"
        return [Statement("untold", "alone", f"who loses less by a fault: {alone}")]
    found = list(_ahead(groups))
    untold = [name for name in dict.fromkeys(each.name for each in groups) if name not in dict(found)]
    said = [
        Statement("ahead", "fault_cost", text, places=tuple(trial_ids(groups, name))) for name, text in found
    ]
    if untold:
        least = min(len(each.trials) for each in groups)
        which = ", ".join(untold) if found else f"any of {len(untold)} faults"
        text = f"who loses less goodput by {which}: {', '.join(pairs)} cannot be told apart"
        if chance(least, least) > MOST_CHANCE:
            text += f" by {least} repeat{'s' if least > 1 else ''} of each fault"
        advice = "with `--repeats 4` or more, a difference that every repeat shows can be told"
        said.append(Statement("untold", "fault_cost", text, advice if least < ENOUGH else ""))
    return said


def chance(one: int, other: int) -> float:
    """How likely all values of one sample lie on one side of all of another's if both are of one kind.

    Both sides count, hence 2 / C(n + m, n): the exact level of the rank-sum test at its extreme.
    """
    return 2.0 / comb(one + other, one)


ENOUGH: Final = next(count for count in range(1, 10) if chance(count, count) <= MOST_CHANCE)
"""Repeats of each from which on a difference can be told."""


def trial_ids(groups: Sequence[FaultGroup], name: str) -> Iterator[str]:
    """The trials of one fault."""
    for group in groups:
        if group.name == name:
            yield from (each.trial.trial_id for each in group.trials)


def _ahead(groups: Sequence[FaultGroup]) -> Iterator[tuple[str, str]]:
    """A fault, and who lost less by it, of every two pairs that were held at one rate and one length."""
    for one, other in combinations(groups, 2):
        if one.name != other.name or one.rate != other.rate or one.cell.input_len != other.cell.input_len:
            continue
        losses = [
            [each.cost.goodput_lost for each in group.trials if each.cost.was_held] for group in (one, other)
        ]
        if not all(losses) or chance(*map(len, losses)) > MOST_CHANCE:
            continue
        if max(losses[1]) < min(losses[0]):
            one, other, losses = other, one, losses[::-1]
        if max(losses[0]) < min(losses[1]):
            yield (
                one.name,
                (
                    f"{one.cell.connector} loses less goodput by {one.name} than {other.cell.connector}: "
                    f"{_between(losses[0])} against {_between(losses[1])} requests"
                ),
            )


def _between(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"
