"""The router's overhead in TTFT: the same load through the router and directly.

Two trials are paired if they have one cell, rate and seed and different paths (``kvbench bench
--router-cost``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvbench.core.records import Cell, TrialRecord
from kvbench.core.stats import Added, Pairs, added
from kvbench.errors import StoreError
from kvbench.report.tables.table import number
from kvbench.results.run import RunFolder

FIGURE_WORDS: Final[Mapping[str, str]] = {
    "mean": "mean",
    "p50": "P50",
    "p90": "P90",
    "p99": "P99",
    "request": "same request (median difference)",
}
_COLUMNS: Final = ("scheduled_s", "first_token_s", "error")


@dataclass(frozen=True)
class RouterCost:
    """TTFT of one cell and rate through the router and directly, in milliseconds. ``added`` is empty if
    ``reason`` rules out a comparison. ``requests``: answered both ways after warm-up; ``left_out``: not
    answered both ways."""

    cell: Cell
    request_rate: float
    trials: tuple[str, ...]
    requests: int = 0
    left_out: int = 0
    added: tuple[Added, ...] = ()
    reason: str = ""

    def of(self, figure: str) -> Added | None:
        return next((delta for delta in self.added if delta.figure == figure), None)

    def text(self) -> str:
        where = f"{self.cell.connector} at {self.cell.input_len:,}, {number(self.request_rate)} req/s"
        if not self.added:
            return f"{where}: {self.reason}"
        parts = []
        for name in ("p50", "p99"):
            if (delta := self.of(name)) is not None:
                times = f"{number(delta.with_)} ms through the router, {number(delta.without)} ms directly"
                parts.append(f"TTFT {FIGURE_WORDS[name]} {times}: {difference(delta)}")
        if (delta := self.of("request")) is not None:
            parts.append(f"the same request {difference(delta)} (median)")
        return f"{where}: {'; '.join(parts)}"

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one flat row per figure, as in tables/router_cost.csv."""
        for delta in self.added:
            yield {
                "connector": self.cell.connector,
                "input_len": self.cell.input_len,
                "output_len": self.cell.output_len,
                "request_rate": self.request_rate,
                "figure": delta.figure,
                "ttft_ms_router": delta.with_,
                "ttft_ms_direct": delta.without,
                "added_ms": delta.added,
                "lower_ms": delta.lower,
                "upper_ms": delta.upper,
                "requests": self.requests,
                "left_out": self.left_out,
                "trials": ";".join(self.trials),
            }


def difference(delta: Added) -> str:
    """Return ``+0.21 ms [0.18, 0.24]``, marked if not significant."""
    sign = "+" if delta.added >= 0 else ""
    text = f"{sign}{_signed(delta.added)} ms [{_signed(delta.lower)}, {_signed(delta.upper)}]"
    return text if delta.seen else f"{text}, no significant difference from zero"


def _signed(value: float) -> str:
    return f"-{number(-value)}" if value < 0 else number(value)


def router_costs(run: RunFolder) -> list[RouterCost]:
    """Return the overhead of each cell measured both ways."""
    groups: dict[tuple[Cell, float], dict[int, list[TrialRecord]]] = {}
    for trial in run.trials:
        if trial.engine.get("load_mode"):
            by_seed = groups.setdefault((trial.cell, trial.request_rate), {})
            by_seed.setdefault(trial.seed, []).append(trial)
    costs = []
    for (cell, rate), by_seed in groups.items():
        pairs = [pair for trials in by_seed.values() if (pair := _both_ways(trials)) is not None]
        if pairs:
            costs.append(_cost(run, cell, rate, pairs))
    return costs


def _both_ways(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, TrialRecord] | None:
    """Return the last trial (through the router, directly), or None if one is missing."""
    ways = {str(trial.engine["load_mode"]): trial for trial in trials}
    return (ways["router"], ways["direct"]) if {"router", "direct"} <= set(ways) else None


def _cost(
    run: RunFolder, cell: Cell, rate: float, pairs: Sequence[tuple[TrialRecord, TrialRecord]]
) -> RouterCost:
    names = tuple(trial.trial_id for pair in pairs for trial in pair)
    refused = [trial for pair in pairs for trial in pair if trial.verdict == "invalid"]
    if refused:
        why = f"no router cost, since {refused[0].trial_id} is not a valid measurement: {refused[0].reason}"
        return RouterCost(cell, rate, names, reason=why)
    measured: list[Pairs] = []
    left_out = 0
    try:
        for routed, direct in pairs:
            ttft_pairs, missing = _paired(run, routed, direct)
            measured.append(ttft_pairs)
            left_out += missing
    except StoreError as error:
        return RouterCost(cell, rate, names, reason=error.message)
    count = sum(len(with_) for with_, _ in measured)
    found = tuple(added(measured))
    why = "" if found else f"no router cost: only {count} requests were answered in both runs"
    return RouterCost(cell, rate, names, count, left_out, found, why)


def _paired(run: RunFolder, routed: TrialRecord, direct: TrialRecord) -> tuple[Pairs, int]:
    """Return the TTFT pairs (ms) in both steady windows, and the number of unpaired requests. Raises
    StoreError for different plans."""
    read = [run.columns("requests", trial.trial_id, _COLUMNS) for trial in (routed, direct)]
    n = min(len(table["error"]) for table in read)  # one that was stopped early has the beginning of the plan
    one, other = ({name: column[:n] for name, column in table.items()} for table in read)
    if not np.array_equal(one["scheduled_s"], other["scheduled_s"]):
        raise StoreError(f"{routed.trial_id} and {direct.trial_id} have the same seed but different plans")
    begin_s = max(_window_start(trial) for trial in (routed, direct))
    steady = one["scheduled_s"] >= begin_s
    both = steady & _answered(one) & _answered(other)
    return (_ttft_ms(one)[both], _ttft_ms(other)[both]), int(steady.sum() - both.sum())


def _window_start(trial: TrialRecord) -> float:
    window = trial.summary.get("window")
    return float(window.get("start_s") or 0.0) if isinstance(window, Mapping) else 0.0


def _answered(requests: Mapping[str, Any]) -> Any:
    return (requests["error"] == "") & ~np.isnan(requests["first_token_s"])


def _ttft_ms(requests: Mapping[str, Any]) -> Any:
    return (requests["first_token_s"] - requests["scheduled_s"]) * 1e3
