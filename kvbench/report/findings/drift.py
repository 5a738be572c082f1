"""Systems that got slower or faster while they were searched, where the search's trials show it.

A search weighs that the system stayed as it was against that it wandered from trial to trial, or jumped, and
keeps two posteriors: of the rate at its end, which is its answer, and of the rate at its beginning (the same
trials from the last to the first). It is said that a system drifted where one is above the other almost
surely, as if they were independent; of a system that stayed as it was, they are nearly the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from statistics import median
from typing import Final

from kvbench.core.findings.findings import Statement
from kvbench.core.findings.rate_change import known
from kvbench.core.records import TrialRecord
from kvbench.report.tables.result import Row, rates_of
from kvbench.report.tables.trial_values import finite
from kvbench.results.run import CellResult, RunFolder

SURE: Final = 0.95
LEAST_S: Final = 60.0
"""From what happened within a shorter time nothing is reckoned for an hour."""
MOST_AN_HOUR: Final = 10.0
"""A factor of more than that in an hour is a jump, and no trend."""
_ADVICE: Final = (
    "the answer is that of the end: let the system warm up, look at clocks, heat and neighbours, and search "
    "again"
)


def drifts(run: RunFolder, rows: Sequence[Row]) -> Iterable[Statement]:
    """One statement for each search whose system was surely not at its end what it had been."""
    names = {row.cell: row.name for row in rows}
    for result in run.cells:
        if result.cell in names:
            yield from _of_cell(names[result.cell], result, run.trials_of(result.cell))


def _of_cell(name: str, result: CellResult, trials: Sequence[TrialRecord]) -> Iterable[Statement]:
    answer = result.answer or {}
    first, last = (rates_of(answer.get(key)) for key in ("posterior_at_first", "posterior"))
    if not first or not last:
        return
    sure = known(last).above(known(first))
    if SURE > sure > 1 - SURE:
        return
    ratio, took_s = median(last) / median(first), _took_s(trials)
    word, sure = ("faster", sure) if sure > 0.5 else ("slower", 1 - sure)
    text = (
        f"{name} at {result.cell.input_len:,} got {word} during the search: the rate that it holds "
        f"{'rose' if word == 'faster' else 'fell'} by about {abs(ratio - 1):.0%}{_in_time(ratio, took_s)}"
    )
    places = tuple(trial.trial_id for trial in trials)
    evidence = {"sure": sure, "ratio": ratio, "took_s": took_s}
    yield Statement("suspicious", "drift", text, _ADVICE, "warning", places, evidence)


def _took_s(trials: Sequence[TrialRecord]) -> float | None:
    """From the first trial's start to the last one's, on the virtual clock where there is one."""
    if len(trials) < 2:
        return None
    virtual = [finite(each.engine.get("starts_at_s")) for each in (trials[0], trials[-1])]
    if virtual[0] is not None and virtual[1] is not None:
        return virtual[1] - virtual[0]
    try:
        begun, ended = (
            datetime.fromisoformat(each.started_at.replace("Z", "+00:00")) for each in (trials[0], trials[-1])
        )
    except ValueError:
        return None
    return (ended - begun).total_seconds()


def _in_time(ratio: float, took_s: float | None) -> str:
    if took_s is None or took_s <= 0:
        return ""
    time = f"{took_s:.0f} s" if took_s < 2 * 60 else f"{took_s / 60:.0f} minutes"
    hourly = math.log(ratio) * 3600 / took_s
    if took_s < LEAST_S or abs(hourly) > math.log(MOST_AN_HOUR):
        return f" in {time}"
    return f" in {time} (about {abs(math.expm1(hourly)):.0%} an hour)"
