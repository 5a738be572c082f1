"""One cell of the result table: is its output right, and what is the highest rate it holds?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvbench.core.metrics.limit import limit_of_cell
from kvbench.core.records import MAIN_METHODS, Cell, Method, Outputs, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.burst import BurstSearch
from kvbench.core.search.search import Hint, RateSearch, SearchLimits
from kvbench.results.finished_cells import Past
from kvbench.results.run import CellResult
from kvbench.sweep.display import Watcher
from kvbench.sweep.strategies import Burst, OneRate, RateList, Strategy, Tiered, tier_verdict
from kvbench.sweep.trial.output_check import Equality, check_prompts, compare, greedy_outputs
from kvbench.sweep.trial.trial import LoadMode, TrialPlan, TrialRunner

START_CONCURRENCY = 4.0
"""Without a better guess the search starts where this many requests would be in flight: above what
one request alone offers, and well below what any engine with batching can hold."""


CEILING = True
"""A cold search begins by asking what comes out at most: cheaper than to climb there."""


@dataclass(frozen=True)
class Attempt:
    """One method on one cell; ``latency_s`` is that of a single request."""

    cell: Cell
    method: Method
    latency_s: float


@dataclass(frozen=True)
class Fixed:
    """What ``kvbench bench`` offers: one rate; if ``both_modes``, through the router and past it in turns."""

    rate: float
    both_modes: bool = False

    def turns(self, own: LoadMode) -> tuple[tuple[LoadMode, int], ...]:
        """Each trial's way and the number of the trial whose load it repeats: own, other, other, own.

        So neither way is always the first after a start, and what drifts with time falls on both alike. The
        last trial, which a table shows, goes the scenario's ``own`` way.
        """
        other: LoadMode = "direct" if own == "router" else "router"
        return (own, 1), (other, 1), (other, 3), (own, 3)


@dataclass
class Knowledge:
    """What earlier cells of a run have taught: the true outputs, and where rates are likely to lie."""

    reference: dict[int, Outputs]
    rates: dict[Cell, float]
    past: Past = field(default_factory=Past)
    """What the run folder held when this process took it over."""

    def hint(self, cell: Cell, disaggregated: frozenset[str]) -> Hint | None:
        """A rate to start from: the same length on a connector of the same kind, or other lengths."""
        alike = [
            rate
            for known, rate in self.rates.items()
            if known.input_len == cell.input_len
            and (known.connector in disaggregated) == (cell.connector in disaggregated)
        ]
        if alike:
            return Hint(alike[-1], trusted=True)
        own = [
            (known.input_len, rate) for known, rate in self.rates.items() if known.connector == cell.connector
        ]
        return Hint(extrapolated(own, cell.input_len), trusted=len(own) > 1) if own else None


def extrapolated(known: Sequence[tuple[int, float]], input_len: int) -> float:
    """A rate for an input length from those of others: a request costs a fixed part and one per token.

    With two lengths known, 1/rate is taken as linear in the length. With one, the fixed part is unknown
    and the cost is taken to grow by the power 0.7, between none of it and nothing else.
    """
    length, rate = min(known, key=lambda pair: abs(pair[0] - input_len))
    others = [pair for pair in known if pair[0] != length]
    if not others:
        return float(rate * (length / input_len) ** 0.7)
    other_length, other_rate = min(others, key=lambda pair: abs(pair[0] - input_len))
    slope = (1 / rate - 1 / other_rate) / (length - other_length)
    cost = 1 / rate + slope * (input_len - length)
    return 1 / cost if slope > 0 and cost > 0 else rate


class CellRunner:
    """Measures the cells of one deployment."""

    def __init__(
        self,
        scenario: Scenario,
        trials: TrialRunner,
        knowledge: Knowledge,
        watcher: Watcher,
        disaggregated: frozenset[str],
        fixed: Fixed | None = None,
    ) -> None:
        self._scenario = scenario
        self._trials = trials
        self._knowledge = knowledge
        self._watcher = watcher
        self._disaggregated = disaggregated
        self._fixed = fixed

    def run(self, cell: Cell, *, is_reference: bool) -> list[CellResult]:
        """Check the outputs, then try rates until each strategy is done.

        The first result is the main one; others are of further SLO tiers and of other methods.
        """
        self._trials.prepare()
        try:
            return self._run(cell, is_reference=is_reference)
        finally:
            self._trials.close()

    def _run(self, cell: Cell, *, is_reference: bool) -> list[CellResult]:
        latency_s, equality, note = self._check_outputs(cell, is_reference)
        checked = None if equality is None else {"checked": equality.checked, "equal": equality.equal}
        if equality is not None and not equality.passed:
            wrong = f"{equality.checked - equality.equal} of {equality.checked}"
            reason = (
                f"corrupt: {wrong} greedy outputs differ from the aggregated server's ({equality.example})"
            )
            hint = "the KV cache did not arrive intact: look for transfer errors in the logs"
            return [CellResult(cell, "refused", equal_outputs=checked, reason=reason, hint=hint)]
        results = []
        for method in self._methods():
            strategy = self._strategy(method, cell, latency_s)
            records = self._try_rates(Attempt(cell, method, latency_s), strategy)
            results += self._results(cell, method, strategy, records)
        return [replace(each, equal_outputs=checked, reason=each.reason or note) for each in results]

    def _methods(self) -> Sequence[Method]:
        search = self._scenario.search
        if self._fixed is not None:
            return ("trace" if self._trials.trace_rate else "sustained",)
        return (search.method, "burst") if search.compare_burst else (search.method,)

    def at_rate(self, cell: Cell, rate: float) -> TrialRecord:
        """One whole trial at a rate that others get too: with the same requests for every connector."""
        key = f"equal-in{cell.input_len}-out{cell.output_len}"
        plan = TrialPlan(cell, 1, rate, "equal_rate", method="equal_rate", searched=False, seed_key=key)
        try:
            record = self._trials.run(plan)
        finally:
            self._trials.close()
        self._watcher.trial_finished(record)
        return record

    def _check_outputs(self, cell: Cell, is_reference: bool) -> tuple[float, Equality | None, str]:
        deployment = self._trials.deployment
        if not deployment.connector.true_outputs:
            return 1.0, None, "outputs were not checked: this connector's KV is invented, by design"
        self._watcher.stage(f"{cell.connector}: checking outputs at {cell.input_len} tokens")
        prompts = check_prompts(self._scenario.seed, cell.input_len, self._scenario.model.vocab_size)
        outputs = greedy_outputs(deployment.complete, prompts, cell.output_len)
        deployment.reset_caches()
        known = self._knowledge.past.outputs.get((cell.connector, cell.input_len))
        if known is not None:  # the search began with that latency, and is told the same trials again
            outputs = replace(outputs, latency_s=known.latency_s)
        self._trials.keep_outputs(cell.connector, cell.input_len, outputs)
        if is_reference:
            self._knowledge.reference[cell.input_len] = outputs
            return outputs.latency_s, None, ""
        reference = self._knowledge.reference.get(cell.input_len)
        if reference is None:
            return (
                outputs.latency_s,
                None,
                "outputs were not checked: there is no aggregated server to compare with",
            )
        return outputs.latency_s, compare(reference, outputs), ""

    def _strategy(self, method: Method, cell: Cell, latency_s: float) -> Strategy:
        search = self._scenario.search
        if self._fixed is not None:
            return OneRate(self._fixed.rate)
        if method == "fixed":
            return RateList(search.rates)
        if method == "trace" and not self._scenario.slo.given:
            return OneRate(self._trials.trace_rate)
        hint = self._knowledge.hint(cell, self._disaggregated) if search.start_rate is None else None
        if hint is not None:
            hint = Hint(self._allowed(hint.rate), hint.trusted)
        start = self._allowed(search.start_rate or self._trials.trace_rate or _first_guess(latency_s))
        if method == "burst":
            known = self._knowledge.rates.get(cell)
            return Burst(
                BurstSearch(
                    self._allowed(known or (hint.rate if hint else start)),
                    search.min_rate,
                    search.max_rate,
                    search.precision,
                    search.max_trials,
                )
            )
        limits = SearchLimits(
            start_rate=start,
            min_rate=search.min_rate,
            max_rate=search.max_rate,
            precision=search.precision,
            max_trials=search.max_trials,
            confidence=search.confidence,
        )
        searches = {}
        for tier, slo in self._scenario.slo.by_tier().items():
            own = replace(limits, attainment=min(slo.shares))
            searches[tier] = RateSearch(own, hint, ceiling=CEILING)
        return Tiered(searches)

    def _allowed(self, rate: float) -> float:
        search = self._scenario.search
        return min(max(rate, search.min_rate), search.max_rate)

    def _try_rates(self, attempt: Attempt, strategy: Strategy) -> list[TrialRecord]:
        records: list[TrialRecord] = []
        past = self._knowledge.past
        stored = past.tried(attempt.cell, attempt.method)
        if stored:
            self._watcher.stage(f"{attempt.cell.key}: {len(stored)} trials are taken from the folder")
        latency_s = attempt.latency_s
        while (ask := strategy.ask()) is not None:
            for mode, twin_of in self._turns():
                plan = TrialPlan(
                    attempt.cell,
                    len(records) + 1,
                    ask.rate,
                    ask.purpose,
                    mode,
                    twin_of,
                    method=attempt.method,
                    tier=ask.tier,
                    searched=isinstance(strategy, Tiered),
                    latency_s=latency_s,
                    thorough=ask.thorough,
                )
                again = bool(stored)
                if again:
                    record = stored.pop(0)
                    past.check(record, plan.trial_id, plan.rate, plan.purpose)
                else:
                    record = self._trials.run(plan)
                strategy.tell(record)
                records.append(record)
                median_ms = (record.summary.get("e2el_ms") or {}).get("p50")
                if record.verdict in ("met", "undecided") and median_ms:
                    latency_s = median_ms / 1e3
                if not again:
                    self._watcher.trial_finished(record)
        return records

    def _turns(self) -> Sequence[tuple[LoadMode | None, int]]:
        """How often one load is offered, and which way: once, but for ``Fixed.both_modes``."""
        has_router = self._trials.deployment.endpoints.direct is not None
        if self._fixed is None or not self._fixed.both_modes or not has_router:
            return ((None, 0),)
        return self._fixed.turns(self._scenario.load.mode)

    def _results(
        self, cell: Cell, method: Method, strategy: Strategy, records: Sequence[TrialRecord]
    ) -> list[CellResult]:
        """What came of one method: a result for each SLO tier, or one where nothing was searched."""
        main = method in MAIN_METHODS
        refused = [record for record in records if record.verdict == "invalid"]
        answers = strategy.answers()
        if refused and len(refused) == len(records):
            invalid = (each.advice for each in refused[-1].findings if each.level == "invalid")
            reason = f"every trial was refused: {refused[-1].reason}"
            answer = next((dict(each) for each in answers.values()), None)
            return [
                CellResult(
                    cell, "refused", answer, reason=reason, hint=next(invalid, ""), method=method, main=main
                )
            ]
        if not answers:
            return [CellResult(cell, "done", method=method, main=main)]
        results = []
        for place, (tier, told) in enumerate(answers.items()):
            answer = dict(told)
            rate = answer["max_request_rate"]
            if main and place == 0 and rate is not None:
                self._knowledge.rates[cell] = rate
            results.append(
                CellResult(
                    cell,
                    "done",
                    answer=answer,
                    reason="" if answer["status"] == "converged" else answer["reason"],
                    confirmed_by=resting_on(records, tier, rate, self._scenario.search.precision),
                    method=method,
                    tier=tier,
                    main=main and place == 0,
                    limit=limit_of_cell(records, answer["lower"]) if place == 0 else None,
                )
            )
        return results


def _first_guess(latency_s: float) -> float:
    return START_CONCURRENCY / max(latency_s, 1e-3)


def resting_on(records: Sequence[TrialRecord], tier: str, rate: float | None, precision: float) -> str | None:
    """The trial that a rate rests on, or that shows what is known of it.

    One that was met at the rate or up to the precision above it, the nearest and then the newest; without one
    (the answer is not "converged" then) what came out nearest to the rate, met or not.
    """
    if not rate:
        return None
    judged = [
        (abs(math.log(record.request_rate / rate)), -place, record)
        for place, record in enumerate(records)
        if record.purpose != "ceiling" and tier_verdict(record, tier) in ("met", "missed", "undecided")
        if abs(math.log(record.request_rate / rate)) <= math.log1p(precision) + 1e-9
    ]
    above = [
        each
        for each in judged
        if tier_verdict(each[2], tier) == "met" and each[2].request_rate >= rate * (1 - 1e-9)
    ]
    found = min(above or judged, default=None)
    return found[2].trial_id if found is not None else None
