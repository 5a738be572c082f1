"""What many judged searches come to, by kind of system and overall: as a table, and as JSON."""

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
"""Figures of one kind, as they are written as JSON. None where there is nothing to count."""
Columns = Mapping[str, Callable[[Figures], str]]


def figures_of(kind: str, judged: Sequence[Judged]) -> Figures:
    """Count the searches of one kind.

    ``near``: ``converged`` answers within 5 %. ``held``: ``intervals`` with the truth in them; ``held_some``:
    drifting systems' intervals with a rate that was true at some time. ``wrong_none``, ``wrong_least``:
    "none" and "≥ x" that the truth refutes (intervals that do not hold, too). ``promised``: searches whose
    plan said that the time suffices; ``kept``: those of them that converged. ``replayed``: searches whose
    requests a replay explains; ``replay_held``: those whose replayed interval has the truth.
    """
    sure = [each for each in judged if each.converged]
    held = [each.holds for each in judged if each.holds is not None]
    drifting = [each for each in judged if each.true != each.true_at_first and each.holds is not None]
    answered = [each for each in judged if each.trials]
    promised = [each for each in judged if each.promised]
    replays = [(*each.replayed, each.true) for each in judged if each.replayed is not None]
    counts = {
        "searches": len(judged),
        "converged": len(sure),
        "near": sum(each.near for each in sure),
        "intervals": len(held),
        "held": sum(held),
        "drifting": len(drifting),
        "held_some": sum(bool(each.holds_some) for each in drifting),
        "wrong_none": sum(each.wrong_none for each in judged),
        "wrong_least": sum(each.wrong_least for each in judged),
        "right_none": sum(not each.true and each.said == "none" for each in judged),
        "promised": len(promised),
        "kept": sum(each.converged for each in promised),
        "replayed": len(replays),
        "replay_held": sum(lower <= true <= upper for lower, upper, true in replays),
    }
    parts = {"converged": "searches", "near": "converged", "held": "intervals"}
    parts |= {"held_some": "drifting", "kept": "promised"}
    return {
        "kind": kind,
        **counts,
        **ratios_of(each.ratio for each in judged),
        "half_width": middle_of(each.half_width for each in judged),
        **{name: middle_of(getattr(each, name) for each in answered) for name in SPENT},
        "outcomes": dict(Counter(each.outcome.partition(":")[0] for each in judged)),
        "replay_width": middle_of((upper / lower - 1) / 2 for lower, upper, _ in replays),
        **{f"{part}_share": share(counts[part], counts[whole]) for part, whole in parts.items()},
    }


SPENT: Final = ("virtual_s", "offered_s", "latencies")


def figures(judged: Sequence[Judged], every_kind: bool = False) -> list[Figures]:
    """Count by kind and then all. ``every_kind``: by all that a system is, not by what leads it alone."""

    def kinds(each: Judged) -> Iterable[str]:
        return each.kinds if every_kind else each.kinds[:1]

    names = sorted({kind for each in judged for kind in kinds(each)})
    by_kind = [figures_of(name, [each for each in judged if name in kinds(each)]) for name in names]
    return [*by_kind, figures_of(ALL, judged)]


_COLUMNS: Final[Columns] = {
    "searches": lambda of: str(of["searches"]),
    "converged": lambda of: counted(of, "converged", "searches"),
    "within 5 %": lambda of: counted(of, "near", "converged"),
    "truth in interval": lambda of: counted(of, "held", "intervals"),
    "± %": lambda of: NOTHING if of["half_width"] is None else f"{of['half_width']:.1%}",
    "found / true": lambda of: ratio_text(of),
    "seconds": lambda of: number(of["virtual_s"]),
    "offered s": lambda of: number(of["offered_s"]),
    "latencies": lambda of: number(of["latencies"]),
    "wrong none": lambda of: str(of["wrong_none"] or NOTHING),
    "wrong ≥": lambda of: str(of["wrong_least"] or NOTHING),
    "as promised": lambda of: counted(of, "kept", "promised"),
}


def table_of(found: Sequence[Figures], about: str) -> str:
    """Return a row a kind, and all of them; then what the table has no column for."""
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
    rows = [[each[name], *(shown(each) for shown in columns.values())] for each in found]
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


def counted(of: Figures, part: str, whole: str) -> str:
    """Return ``3/4 75%``; a dash of nothing."""
    return f"{of[part]}/{of[whole]} {of[part] / of[whole]:.0%}" if of[whole] else NOTHING


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def ratios_of(ratios: Iterable[float | None]) -> dict[str, float | None]:
    known = sorted(ratio for ratio in ratios if ratio is not None)
    low, high = (known[round(at * (len(known) - 1))] if known else None for at in (0.05, 0.95))
    return {"low": low, "middle": middle_of(known), "high": high}


def ratio_text(of: Figures) -> str:
    found = [of[name] for name in ("low", "middle", "high")]
    return " ".join(f"{ratio:.3f}" for ratio in found if ratio is not None) or NOTHING


def number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"


def middle_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
