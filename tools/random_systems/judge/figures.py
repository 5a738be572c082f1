"""What many judged searches come to, by kind of system and overall: as a table, and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from tools.bench import table

from .search import Judged

ALL: Final = "all"
NOTHING: Final = "–"
NAMED: Final = ("converged", "undecided", "exhausted", "censored", "slo_unattainable", "refused")
"""Outcomes as they are; what else there is, is a failure of the judge or of the search."""


@dataclass(frozen=True)
class Figures:
    """Of one kind. Shares are of one; None where there is nothing to count.

    ``near``: of the ``converged`` answers those within 5 %. ``held``: of the ``intervals`` those with the
    truth in them; ``held_some``: of drifting systems' those with a rate that was true at some time.
    ``wrong_none`` and ``wrong_least``: "none" and "≥ x" that the truth refutes, which are intervals that do
    not hold, too. ``right_none``: "none" where there is none. ``promised``: searches whose plan said that the
    time suffices; ``kept``: those of them that converged. ``replayed``: searches whose requests a replay
    explains; ``replay_held``: those of them whose replayed interval has the truth, ``replay_width`` wide.
    """

    kind: str
    searches: int
    converged: int
    near: int
    intervals: int
    held: int
    drifting: int
    held_some: int
    half_width: float | None
    low: float | None
    middle: float | None
    high: float | None
    virtual_s: float | None
    offered_s: float | None
    latencies: float | None
    wrong_none: int
    wrong_least: int
    right_none: int
    promised: int
    kept: int
    outcomes: dict[str, int]
    replayed: int
    replay_held: int
    replay_width: float | None

    @classmethod
    def of(cls, kind: str, judged: Sequence[Judged]) -> Figures:
        sure = [each for each in judged if each.converged]
        held = [each.holds for each in judged if each.holds is not None]
        drifting = [each for each in judged if each.true != each.true_at_first and each.holds is not None]
        ratios = sorted(each.ratio for each in judged if each.ratio is not None)
        widths = [each.half_width for each in judged if each.half_width is not None]
        answered = [each for each in judged if each.trials]
        promised = [each for each in judged if each.promised]
        replays = [(*each.replayed, each.true) for each in judged if each.replayed is not None]
        return cls(
            kind,
            searches=len(judged),
            converged=len(sure),
            near=sum(each.near for each in sure),
            intervals=len(held),
            held=sum(held),
            drifting=len(drifting),
            held_some=sum(bool(each.holds_some) for each in drifting),
            half_width=middle_of(widths),
            low=quantile(ratios, 0.05),
            middle=middle_of(ratios),
            high=quantile(ratios, 0.95),
            virtual_s=middle_of(each.virtual_s for each in answered),
            offered_s=middle_of(each.offered_s for each in answered),
            latencies=middle_of(each.latencies for each in answered),
            wrong_none=sum(each.wrong_none for each in judged),
            wrong_least=sum(each.wrong_least for each in judged),
            right_none=sum(not each.true and each.said == "none" for each in judged),
            promised=len(promised),
            kept=sum(each.converged for each in promised),
            outcomes=dict(Counter(_named(each.outcome) for each in judged)),
            replayed=len(replays),
            replay_held=sum(lower <= true <= upper for lower, upper, true in replays),
            replay_width=middle_of((upper / lower - 1) / 2 for lower, upper, _ in replays),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "converged_share": _share(self.converged, self.searches),
            "near_share": _share(self.near, self.converged),
            "held_share": _share(self.held, self.intervals),
            "held_some_share": _share(self.held_some, self.drifting),
            "kept_share": _share(self.kept, self.promised),
        }


def figures(judged: Sequence[Judged], every_kind: bool = False) -> list[Figures]:
    """By kind and then of all. ``every_kind``: by all that a system is, not by what leads it alone."""

    def kinds(each: Judged) -> Iterable[str]:
        return each.kinds if every_kind else each.kinds[:1]

    names = sorted({kind for each in judged for kind in kinds(each)})
    by_kind = [Figures.of(name, [each for each in judged if name in kinds(each)]) for name in names]
    return [*by_kind, Figures.of(ALL, judged)]


_COLUMNS: Final[Mapping[str, Callable[[Figures], str]]] = {
    "searches": lambda of: str(of.searches),
    "converged": lambda of: counted(of.converged, of.searches),
    "within 5 %": lambda of: counted(of.near, of.converged),
    "truth in interval": lambda of: counted(of.held, of.intervals),
    "± %": lambda of: NOTHING if of.half_width is None else f"{of.half_width:.1%}",
    "found / true": lambda of: ratio_text(of.low, of.middle, of.high),
    "virtual s": lambda of: number(of.virtual_s),
    "offered s": lambda of: number(of.offered_s),
    "latencies": lambda of: number(of.latencies),
    "wrong none": lambda of: str(of.wrong_none or NOTHING),
    "wrong ≥": lambda of: str(of.wrong_least or NOTHING),
    "as promised": lambda of: counted(of.kept, of.promised),
}


def table_of(found: Sequence[Figures], about: str) -> str:
    """A row a kind, and all of them; then what the table has no column for."""
    rows = [[each.kind, *(shown(each) for shown in _COLUMNS.values())] for each in found]
    caption = f"{about}; found / true: 5 / 50 / 95 %"
    text = table("kind", "|".join(_COLUMNS), rows, "the search on drawn systems", caption, [len(rows) - 1])
    return "\n".join([text, *notes(found[-1])])


def notes(overall: Figures) -> list[str]:
    """What the table has no column for, a sentence each."""
    said = [f"{count} {name}" for name, count in sorted(overall.outcomes.items())]
    found = [f"outcomes: {', '.join(said)}"]
    if overall.replay_width is not None:
        share = counted(overall.replay_held, overall.replayed)
        found.append(f"by replays, which decide nothing: truth in {share}, ± {overall.replay_width:.1%}")
    if overall.drifting:
        share = counted(overall.held_some, overall.drifting)
        found.append(f"of systems that drifted meanwhile, a rate that was true at some time: {share}")
    if overall.right_none:
        found.append(f"where no rate meets the SLO, that was said {overall.right_none} times")
    return found


def _named(outcome: str) -> str:
    return outcome if outcome in NAMED else outcome.split(":")[0]


def counted(part: int, whole: int) -> str:
    """``3/4 75%``; a dash of nothing."""
    return f"{part}/{whole} {part / whole:.0%}" if whole else NOTHING


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def ratio_text(*ratios: float | None) -> str:
    return " ".join(f"{ratio:.3f}" for ratio in ratios if ratio is not None) or NOTHING


def number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"


def middle_of(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[round(share * (len(ordered) - 1))] if ordered else None
