"""Tables of a soak: its windows and their drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbench.core.chaos_soak.window_drift import CONFIDENCE, Drift, SoakWindow, drift
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.stats import upper_bound
from kvbench.report.tables.table import MISSING, Column, Table, number
from kvbench.results.run import RunFolder

ANSWERS: Final = 0.95
"""Confidence of the bound on wrong answers."""
_LATENCIES: Final = (
    ("TTFT P50 (ms)", "ttft_ms", "p50", 1.0),
    ("TTFT P99 (ms)", "ttft_ms", "p99", 5.0),
    ("TPOT P50 (ms)", "tpot_ms", "p50", 0.5),
    ("TPOT P99 (ms)", "tpot_ms", "p99", 1.0),
)
"""Label, metric, statistic, and the smallest change (ms) that matters."""
_HELD: Final = (
    ("memory (MB)", "rss_bytes", 1e6, 8.0),
    ("descriptors", "descriptors", 1.0, 2.0),
    ("threads", "threads", 1.0, 1.0),
    ("KV blocks in use", "blocks", 1.0, 8.0),
)
"""Per process: label, key, unit, and the smallest change that matters in that unit."""


@dataclass(frozen=True)
class SoakSeries:
    """One metric over the windows of a pair."""

    cell: Cell
    name: str
    of: str
    """The process; empty for the load."""
    windows: tuple[SoakWindow, ...]
    drift: Drift


def soak_trials(run: RunFolder) -> dict[Cell, list[TrialRecord]]:
    found: dict[Cell, list[TrialRecord]] = {}
    for trial in run.all_trials:
        soak = trial.engine.get("soak")
        known = isinstance(soak, Mapping) and None not in (soak.get("at_s"), soak.get("session"))
        if trial.method == "soak" and known:
            found.setdefault(trial.cell, []).append(trial)
    return found


def soak_series(run: RunFolder) -> list[SoakSeries]:
    """Return all series of each pair: latency, then processes."""
    return [series for cell, trials in soak_trials(run).items() for series in _of_cell(cell, trials)]


def _of_cell(cell: Cell, trials: Sequence[TrialRecord]) -> Iterator[SoakSeries]:
    for name, key, statistic, least in _LATENCIES:
        yield _series(cell, name, "", trials, _latency(key, statistic), least)
    share = _series(cell, "within the SLO (%)", "", trials, _attainment, 1.0)
    yield share
    names = dict.fromkeys(name for trial in trials for name in _holdings(trial))
    for process in names:
        for name, key, unit, least in _HELD:
            series = _series(cell, name, process, trials, _held(process, key, unit), least)
            if any(window.value is not None for window in series.windows):
                yield series


def _series(
    cell: Cell,
    name: str,
    of: str,
    trials: Sequence[TrialRecord],
    value: Callable[[TrialRecord], float | None],
    least: float,
) -> SoakSeries:
    windows = tuple(
        SoakWindow(float(trial.engine["soak"]["at_s"]), int(trial.engine["soak"]["session"]), value(trial))
        for trial in trials
    )
    return SoakSeries(cell, name, of, windows, drift(windows, least))


def _latency(key: str, statistic: str) -> Callable[[TrialRecord], float | None]:
    return lambda trial: _number((trial.summary.get(key) or {}).get(statistic))


def _attainment(trial: TrialRecord) -> float | None:
    share = _number(trial.summary.get("slo_attainment"))
    return None if share is None else share * 100


def _held(process: str, key: str, unit: float) -> Callable[[TrialRecord], float | None]:
    def value(trial: TrialRecord) -> float | None:
        found = _number((_holdings(trial).get(process) or {}).get(key))
        return None if found is None else found / unit

    return value


def _holdings(trial: TrialRecord) -> Mapping[str, Any]:
    found = trial.engine["soak"].get("holdings")
    return found if isinstance(found, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def soak_problems(run: RunFolder) -> list[str]:
    found = []
    for series in soak_series(run):
        worse = series.drift.verdict == ("falls" if "SLO" in series.name else "grows")
        if worse:
            found.append(f"{_where(series)} {series.drift.verdict}: {_slope_text(series.drift)}")
    for cell, trials in soak_trials(run).items():
        counts = answers_of(trials)
        if counts["wrong"]:
            found.append(f"{cell.connector}: {counts['wrong']} of {counts['checked']} answers were wrong")
        refused = [trial for trial in trials if trial.verdict == "invalid"]
        if refused:
            found.append(
                f"{cell.connector}: {len(refused)} of {len(trials)} windows were refused, the last: "
                f"{refused[-1].reason}"
            )
    for result in [*run.cells, *run.other_cells]:
        if result.status == "failed":
            windows = len(soak_trials(run).get(result.cell, ()))
            reason = result.reason.splitlines()[0] if result.reason else "it failed"
            found.append(f"{result.cell.connector} ended after {windows} windows: {reason}")
    return found


def _where(series: SoakSeries) -> str:
    of = f"{series.of}, " if series.of else ""
    return f"{series.cell.connector}, {of}{series.name}"


def _slope_text(found: Drift) -> str:
    share = "" if found.growth is None else f"{found.growth:+.0%} over the soak, "
    return (
        f"{share}{number(found.per_hour)} an hour ({CONFIDENCE:.0%}: {number(found.lower)} to "
        f"{number(found.upper)})"
    )


def answers_of(trials: Sequence[TrialRecord]) -> Counter[str]:
    """Return the counts of checked, wrong and missing answers."""
    counts: Counter[str] = Counter()
    for trial in trials:
        canaries = trial.engine.get("canaries") or {}
        counts.update({key: int(canaries.get(key) or 0) for key in ("checked", "wrong", "unanswered")})
    return counts


def verdict_lines(run: RunFolder) -> list[str]:
    """Return a summary sentence per pair, then the problems."""
    lines = []
    for cell, trials in soak_trials(run).items():
        requests = sum(int(trial.summary.get("planned") or 0) for trial in trials)
        seconds = sum(trial.duration_s for trial in trials)
        sessions = len({trial.engine["soak"]["session"] for trial in trials})
        counts = answers_of(trials)
        answers = "no answer could be checked"
        if counts["checked"]:
            most = upper_bound(counts["wrong"], counts["checked"], ANSWERS)
            checked = f"{counts['wrong']} of {counts['checked']:,} answers wrong"
            answers = f"{checked}: at most {most:.2%} ({ANSWERS:.0%} confidence)"
        lines.append(
            f"{cell.connector} at {number(trials[0].request_rate)} req/s for {seconds / 3600:.2f} hours: "
            f"{requests:,} requests in {len(trials)} windows"
            + (f" of {sessions} sessions" if sessions > 1 else "")
            + f"; {answers}"
        )
    problems = soak_problems(run)
    short = [series for series in soak_series(run) if series.drift.verdict == "too short"]
    if not problems and short and len(short) == len(soak_series(run)):
        return [*lines, "too short to detect drift"]
    return [*lines, *(problems or ["no drift, and no wrong answer"] if lines else ["no window yet"])]


COLUMNS: Final = (
    Column("connector", "pair", align="left"),
    Column("process", "process", align="left"),
    Column("what", "what", align="left"),
    Column("verdict", "verdict", align="left"),
    Column("median", "median", align="right"),
    Column("first", "first", align="right", rank=2),
    Column("last", "last", align="right", rank=2),
    Column("per_hour", "per hour", align="right"),
    Column("interval", f"{CONFIDENCE:.0%} interval", align="right", rank=1),
    Column("growth", "over the\nsoak (%)", align="right"),
)
WORDS: Final = (
    "A straight line through the windows after the first quarter (warm-up); its interval allows for "
    "correlated windows. *grows*: significantly, and by more than 5 % over the soak."
)


def drift_rows(run: RunFolder) -> list[dict[str, Any]]:
    return [
        {
            "connector": series.cell.connector,
            "input_len": series.cell.input_len,
            "process": series.of,
            "what": series.name,
            **series.drift.to_json(),
        }
        for series in soak_series(run)
    ]


def drift_table(run: RunFolder) -> Table:
    cells = []
    for series in soak_series(run):
        found = series.drift
        interval = MISSING if found.lower is None else f"{number(found.lower)} to {number(found.upper)}"
        growth = MISSING if found.growth is None else f"{100 * found.growth:+.1f}"
        cells.append(
            [
                series.cell.connector, series.of or "load", series.name, found.verdict, number(found.median),
                number(found.first), number(found.last), number(found.per_hour), interval, growth,
            ]
        )  # fmt: skip
    return Table("Drift", COLUMNS, cells, drift_rows(run), "drift", WORDS)


def window_rows(run: RunFolder) -> list[dict[str, Any]]:
    rows = []
    for trials in soak_trials(run).values():
        for trial in trials:
            soak, canaries = trial.engine["soak"], trial.engine.get("canaries") or {}
            row: dict[str, Any] = {
                "trial_id": trial.trial_id,
                "connector": trial.cell.connector,
                "at_s": soak["at_s"],
                "session": soak["session"],
                "verdict": trial.verdict,
                "requests": trial.summary.get("planned"),
                "completed": trial.summary.get("completed"),
                "slo_attainment": trial.summary.get("slo_attainment"),
                **{name: _latency(key, statistic)(trial) for name, key, statistic, _ in _LATENCIES},
                **{name: canaries.get(name) for name in ("checked", "wrong", "unanswered")},
            }
            for process, holdings in _holdings(trial).items():
                row |= {f"{process}.{key}": holdings.get(key) for _, key, _, _ in _HELD}
            rows.append(row)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key) for key in keys} for row in rows]
