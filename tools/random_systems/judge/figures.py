"""Figures of many judged searches, by kind of system and overall: as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from tools.bench import table

from .search import Judged

ALL: Final = "all"
NOTHING: Final = "–"
Figures = dict[str, Any]
"""Figures of one kind, in the form of their JSON. A value is None if there is nothing to count."""
Columns = Mapping[str, Callable[[Figures], str]]


def figures_of(kind: str, judged: Sequence[Judged]) -> Figures:
    """Count the searches of one kind.

    ``near``: ``converged`` answers within 5 %. ``held``: ``intervals`` that contain the truth; ``held_some``:
    drifting systems' intervals that contain a rate that was true at some time. ``wrong_none``,
    ``wrong_least``: wrong "none" and "≥ x" (their intervals miss the truth, too). ``promised``: searches with
    a plan that states that the time suffices; ``kept``: those of them that converged. ``replayed``: searches
    with a valid replay; ``replay_held``: those with the truth in the replay's interval.
    """
    converged = [one for one in judged if one.converged]
    held = [one.holds for one in judged if one.holds is not None]
    drifting = [one for one in judged if one.true != one.true_at_first and one.holds is not None]
    answered = [one for one in judged if one.trials]
    promised = [one for one in judged if one.promised]
    replays = [(*one.replayed, one.true) for one in judged if one.replayed is not None]
    counts = {
        "searches": len(judged),
        "converged": len(converged),
        "near": sum(one.near for one in converged),
        "intervals": len(held),
        "held": sum(held),
        "drifting": len(drifting),
        "held_some": sum(bool(one.holds_some) for one in drifting),
        "wrong_none": sum(one.wrong_none for one in judged),
        "wrong_least": sum(one.wrong_least for one in judged),
        "right_none": sum(not one.true and one.said == "none" for one in judged),
        "promised": len(promised),
        "kept": sum(one.converged for one in promised),
        "replayed": len(replays),
        "replay_held": sum(lower <= true <= upper for lower, upper, true in replays),
    }
    parts = {"converged": "searches", "near": "converged", "held": "intervals"}
    parts |= {"held_some": "drifting", "kept": "promised"}
    return {
        "kind": kind,
        **counts,
        **ratios_of(one.ratio for one in judged),
        "half_width": middle_of(one.half_width for one in judged),
        **{name: middle_of(getattr(one, name) for one in answered) for name in SPENT},
        "outcomes": dict(Counter(one.outcome.partition(":")[0] for one in judged)),
        "replay_width": middle_of((upper / lower - 1) / 2 for lower, upper, _ in replays),
        **{f"{part}_share": share(counts[part], counts[whole]) for part, whole in parts.items()},
    }


SPENT: Final = ("virtual_s", "offered_s", "latencies")


def figures(judged: Sequence[Judged], every_kind: bool = False) -> list[Figures]:
    """Count by kind, then all. ``every_kind``: by all kinds of a system, not only by its lead."""

    def kinds(search: Judged) -> Iterable[str]:
        return search.kinds if every_kind else search.kinds[:1]

    names = sorted({kind for search in judged for kind in kinds(search)})
    by_kind = [figures_of(name, [search for search in judged if name in kinds(search)]) for name in names]
    return [*by_kind, figures_of(ALL, judged)]


_COLUMNS: Final[Columns] = {
    "searches": lambda row: str(row["searches"]),
    "converged": lambda row: counted(row, "converged", "searches"),
    "within 5 %": lambda row: counted(row, "near", "converged"),
    "truth in interval": lambda row: counted(row, "held", "intervals"),
    "± %": lambda row: NOTHING if row["half_width"] is None else f"{row['half_width']:.1%}",
    "found / true": lambda row: ratio_text(row),
    "seconds": lambda row: number(row["virtual_s"]),
    "offered s": lambda row: number(row["offered_s"]),
    "latencies": lambda row: number(row["latencies"]),
    "wrong none": lambda row: str(row["wrong_none"] or NOTHING),
    "wrong ≥": lambda row: str(row["wrong_least"] or NOTHING),
    "as promised": lambda row: counted(row, "kept", "promised"),
}


def table_of(found: Sequence[Figures], about: str) -> str:
    """Return a table with a row per kind and one for all, then figures that have no column."""
    caption = f"{about}; found / true: 5 / 50 / 95 %"
    text = figure_table("kind", _COLUMNS, found, "the search on drawn systems", caption, [len(found) - 1])
    return "\n".join([text, *notes(found[-1])])


def figure_table(
    name: str,
    columns: Columns,
    found: Sequence[Figures],
    title: str,
    caption: str,
    sections: Sequence[int] = (),
) -> str:
    rows = [[row[name], *(shown(row) for shown in columns.values())] for row in found]
    text: str = table(name, "|".join(columns), rows, title, caption, sections)
    return text


def notes(overall: Figures) -> list[str]:
    found = [
        "outcomes: " + ", ".join(f"{count} {name}" for name, count in sorted(overall["outcomes"].items()))
    ]
    if overall["replay_width"] is not None:
        held = counted(overall, "replay_held", "replayed")
        found.append(f"by replays, which decide nothing: truth in {held}, ± {overall['replay_width']:.1%}")
    if overall["drifting"]:
        held = counted(overall, "held_some", "drifting")
        found.append(f"of systems that drifted meanwhile, a rate that was true at some time: {held}")
    if overall["right_none"]:
        found.append(f"where no rate meets the SLO, that was said {overall['right_none']} times")
    return found


def counted(row: Figures, part: str, whole: str) -> str:
    """Return ``3/4 75%``; a dash if the whole is 0."""
    return f"{row[part]}/{row[whole]} {row[part] / row[whole]:.0%}" if row[whole] else NOTHING


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def ratios_of(ratios: Iterable[float | None]) -> dict[str, float | None]:
    known = sorted(ratio for ratio in ratios if ratio is not None)
    low, high = (known[round(at * (len(known) - 1))] if known else None for at in (0.05, 0.95))
    return {"low": low, "middle": middle_of(known), "high": high}


def ratio_text(row: Figures) -> str:
    found = [row[name] for name in ("low", "middle", "high")]
    return " ".join(f"{ratio:.3f}" for ratio in found if ratio is not None) or NOTHING


def number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"


def middle_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
