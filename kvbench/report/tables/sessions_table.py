"""Sessions per second, at once, their TTFT by turn, and what of their prompts was reused, a line a cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvbench.core.records import TrialRecord
from kvbench.report.tables.result import Row
from kvbench.report.tables.table import Table, number, of_texts
from kvbench.results.run import RunFolder

WHICH_SESSIONS: Final = (
    "Sessions begin open loop, at random times whatever became of others; within one, each turn is sent "
    "think time after the answer before it, so that its times depend on answers. Sessions/s are the "
    "highest rate that holds, its requests divided by those of a session. All else is of the trial "
    "behind it: sessions at once with their think times, TTFT of turns that open a conversation and of "
    "the others, and of the whole blocks of all prompts the share that an unlimited cache could have "
    "found, one as large as the engines' that compute prompts, and they did."
)
_HEAD: Final = (
    "connector|sessions/s [interval]|at once|first TTFT P50 / P90 (ms)|later TTFT P50 / P95 (ms)|"
    "session P50 (s)|reuse offered / in pool / achieved (%)"
)


def sessions_table(run: RunFolder, rows: Sequence[Row]) -> Table | None:
    """None where the load was none of sessions."""
    trials = {trial.trial_id: trial for trial in run.trials if trial.engine.get("sessions")}
    body = [_line(row, trials[row.trial_id]) for row in rows if row.trial_id in trials]
    return of_texts("", _HEAD.split("|"), body) if body else None


def _line(row: Row, trial: TrialRecord) -> list[str]:
    found: dict[str, Any] = trial.engine["sessions"]
    each = float(found["requests_each"])
    answer = row.answer
    rate = None if answer.max_request_rate is None else answer.max_request_rate / each
    ends = [None if end is None else end / each for end in (answer.lower, answer.upper)]
    said = number(rate)
    if answer.outcome == "found":
        said += f"{'' if answer.sure else '?'} [{number(ends[0])}, {number(ends[1])}]"
    elif answer.outcome == "at_least":
        said = f"≥ {said}"
    elif answer.outcome == "one_rate":
        said = f"at {said}"
    reuse = [found.get(key) for key in ("offered_reuse", "offered_reuse_in_pool", "achieved_reuse")]
    return [
        row.cell.connector,
        said,
        number(found["at_once"]),
        _pair(found["first_ttft_ms"], "p90"),
        _pair(found["later_ttft_ms"], "p95"),
        number((found["session_s"] or {}).get("p50")),
        " / ".join("–" if share is None else f"{100 * share:.1f}" for share in reuse),
    ]


def _pair(quantiles: dict[str, float] | None, tail: str) -> str:
    known = quantiles or {}
    return f"{number(known.get('p50'))} / {number(known.get(tail))}"
