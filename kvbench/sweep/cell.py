"""One cell of the result table: check its outputs, then find its highest rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench import connectors
from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.canaries.tally import Tally
from kvbench.core.metrics.limit import limit_of_cell
from kvbench.core.plan.plan import Plan
from kvbench.core.plan.prospect import Prospect, prospect_of, seen_of
from kvbench.core.records import MAIN_METHODS, Cell, Method, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.burst import BurstSearch
from kvbench.core.search.load_plan import ClosedLoad, LoadMode, TrialPlan, fixed_requests
from kvbench.core.search.search import FORESEEN, Hint, RateSearch, SearchLimits, foreseen_after
from kvbench.core.search.trial_requests import Objective
from kvbench.results.run import CellResult
from kvbench.sweep.bench import CellWork, CellWorkOf, Knowledge, Site
from kvbench.sweep.display import Watcher
from kvbench.sweep.strategies import Burst, OneRate, RateList, Strategy, Tiered
from kvbench.sweep.trial.output_check import Equality, compare

START_CONCURRENCY = 4.0
"""Start of a search without a hint, in requests in flight."""


CEILING = True
"""A search without a hint starts with a ceiling probe, which is cheaper than climbing."""
DECIDED = 2.0
"""Precision of a cell with a decided comparison, as a multiple of the requested one, if time is limited."""
CLOSER = 0.5
"""Precision of further trials of a converged cell with an open comparison, as a multiple."""
FINEST = 0.002
"""Smallest precision of a search."""
UNCOMPARED = "outputs were not checked: there is no aggregated server to compare with"


@dataclass(frozen=True)
class Attempt:
    """One method on one cell; ``latency_s`` is that of a single request."""

    cell: Cell
    method: Method
    latency_s: float


@dataclass
class _Searched:
    """A cell's searches so far, which may continue while its deployment runs. ``last``: canaries after it."""

    latency_s: float
    checked: dict[str, Any] | None
    note: str
    searches: dict[Method, tuple[Strategy, list[TrialRecord]]] = field(default_factory=dict)
    last: CanaryResult | None = None


@dataclass(frozen=True)
class Fixed:
    """Load of ``kvbench bench``: one rate (``both_modes``: alternately via the router and direct); at rate 0
    a closed loop of ``concurrency`` requests, limited by ``num_requests`` or ``duration_s``."""

    rate: float
    both_modes: bool = False
    concurrency: int = 0
    num_requests: int = 0
    duration_s: float = 0.0

    def closed(self, most: int, latency_s: float) -> ClosedLoad | None:
        """Return the closed loop, if any. ``latency_s``: of a single idle request."""
        if not self.concurrency:
            return None
        rounds = 2 + math.ceil(1.2 * self.duration_s / max(latency_s, 1e-3))
        n = self.num_requests or min(most, self.concurrency * rounds)
        return ClosedLoad(self.concurrency, n, self.duration_s)

    def requests(self, scenario: Scenario, latency_s: float) -> int:
        """Maximum requests of each trial; ``latency_s``: of a single idle request."""
        closed = self.closed(scenario.search.max_requests, latency_s)
        return closed.num_requests if closed is not None else fixed_requests(scenario, self.rate)

    def turns(self, mode: LoadMode) -> tuple[tuple[LoadMode, int], ...]:
        """Return each trial's mode and the number of the trial whose load it repeats, in the order mode,
        other, other, mode. So neither mode always comes first, and drift affects both equally. The last
        trial, shown in tables, uses the scenario's ``mode``."""
        other: LoadMode = "direct" if mode == "router" else "router"
        return (mode, 1), (other, 1), (other, 3), (mode, 3)


def searched_cells(
    scenario: Scenario, plan: Plan, watcher: Watcher, fixed: Fixed | None = None
) -> CellWorkOf:
    """Search each cell of a plan for its highest rate, or run ``fixed``."""
    pairs = frozenset(
        deployment.label
        for deployment in plan.deployments
        if connectors.get(deployment.connector).disaggregated
    )
    return lambda site, knowledge: CellRunner(scenario, site, knowledge, watcher, pairs, fixed)


class CellRunner(CellWork):
    """Measures the cells of one deployment. ``disaggregated``: labels of P/D connectors."""

    def __init__(
        self,
        scenario: Scenario,
        site: Site,
        knowledge: Knowledge,
        watcher: Watcher,
        disaggregated: frozenset[str],
        fixed: Fixed | None = None,
    ) -> None:
        self._scenario = scenario
        self._site = site
        self._knowledge = knowledge
        self._watcher = watcher
        self._disaggregated = disaggregated
        self._fixed = fixed
        self._searched: dict[Cell, _Searched] = {}

    def run(self, cell: Cell, *, is_reference: bool) -> list[CellResult]:
        """Check the outputs, then run trials until each strategy is done. The first result is the main one,
        then come further SLO tiers and methods."""
        self._site.prepare()
        try:
            return self._run(cell, is_reference=is_reference)
        finally:
            self._site.close()

    def further(self, cell: Cell, seconds: float) -> list[CellResult]:
        """Continue a search that has not converged, or at a finer precision a converged one with an
        interval that overlaps another connector's."""
        searched, precision = self._searched.get(cell), self._scenario.search.precision
        strategy = next((search for search, _ in searched.searches.values()), None) if searched else None
        answer = next(iter(strategy.answers().values()), None) if strategy else None
        if searched is None or strategy is None or answer is None:
            return []
        bounds = answer["lower"] or 0.0, answer["upper"] or math.inf
        overlaps, converged = self._knowledge.budget.overlaps(cell, *bounds), answer["status"] == "converged"
        finer = max(CLOSER * precision, FINEST) if converged else precision
        strategy.allow(seconds, finer)
        if overlaps is False or (converged and not overlaps) or strategy.ask() is None:
            return []
        self._watcher.note(f"{cell.key}: further trials, since time is left and its comparison is open")
        self._site.prepare()
        try:
            return self._search(cell, searched, seconds, (finer, precision))
        finally:
            self._site.close()

    def _run(self, cell: Cell, *, is_reference: bool) -> list[CellResult]:
        latency_s, equality, note = self._check_outputs(cell, is_reference)
        checked = None if equality is None else equality.to_json()
        if equality is not None and not equality.passed:
            wrong = f"{equality.checked - equality.equal - equality.within_noise} of {equality.checked}"
            reason = (
                f"corrupt: {wrong} greedy outputs differ from the aggregated server's ({equality.example})"
                + (f"; {equality.power}" if equality.power else "")
            )
            hint = "the KV cache arrived corrupted: look for transfer errors in the logs"
            return [CellResult(cell, "refused", equal_outputs=checked, reason=reason, hint=hint)]
        self._knowledge.learn_answers(self._site.watch_answers(cell, self._knowledge.right_answers(cell)))
        searched = self._searched[cell] = _Searched(latency_s, checked, note)
        share_s, precision = self._knowledge.budget.share_s(), self._scenario.search.precision
        return self._search(cell, searched, share_s, (precision,))

    def _search(
        self, cell: Cell, searched: _Searched, seconds: float, precisions: Sequence[float]
    ) -> list[CellResult]:
        """Search by each method with this time, to one precision after the other."""
        results, tally, continued = [], Tally(), bool(searched.searches)
        for method in self._methods():
            if method not in searched.searches:
                searched.searches[method] = self._strategy(method, cell, searched.latency_s), []
            strategy, records = searched.searches[method]
            attempt = Attempt(cell, method, searched.latency_s)
            for precision in precisions:
                seconds = self._try_rates(attempt, strategy, records, seconds, precision)
            tally += Tally.of_trials(records)
            results += self._results(cell, method, strategy, records)
        if not continued:
            searched.last, pool = self._site.last_canaries(cell)
            self._knowledge.learn_answers(pool)
        last = searched.last
        if last is not None and last.wrong:
            results = [replace(result, status="refused", reason=_wrong_at_end(last)) for result in results]
            self._knowledge.rates.pop(cell, None)
        tally += Tally.of_result(last, at_end=True)
        return [
            replace(
                result,
                equal_outputs=searched.checked,
                reason=result.reason or searched.note,
                canaries=tally.to_json() or None if result.main else None,
            )
            for result in results
        ]

    def _methods(self) -> Sequence[Method]:
        search = self._scenario.search
        if self._fixed is not None and self._fixed.concurrency:
            return ("closed_loop",)
        if self._fixed is not None:
            return ("trace" if self._site.trace_rate else "sustained",)
        return (search.method, "burst") if search.compare_burst else (search.method,)

    def _check_outputs(self, cell: Cell, is_reference: bool) -> tuple[float, Equality | None, str]:
        idle = self._site.alone(cell)
        if idle.outputs is None:
            return idle.latency_s, None, idle.unchecked
        if is_reference:
            self._knowledge.reference[cell.input_len] = idle.outputs
            return idle.latency_s, None, ""
        reference = self._knowledge.reference.get(cell.input_len)
        if reference is None:
            return idle.latency_s, None, UNCOMPARED
        equality = compare(reference, idle.outputs)
        if not equality.within_noise:
            return idle.latency_s, equality, ""
        text = (
            f"{equality.within_noise} of {equality.checked} outputs differ within the reference's own noise"
        )
        return idle.latency_s, equality, f"{text}: {equality.power}"

    def _strategy(self, method: Method, cell: Cell, latency_s: float) -> Strategy:
        search = self._scenario.search
        if self._fixed is not None:
            return OneRate(self._fixed.rate)
        if method == "fixed":
            return RateList(search.rates)
        if method == "trace" and not self._scenario.slo.given:
            return OneRate(self._site.trace_rate)
        hint = self._knowledge.hint(cell, self._disaggregated) if search.start_rate is None else None
        if hint is not None:
            hint = Hint(self._within_limits(hint.rate), hint.trusted)
        guess = START_CONCURRENCY / max(latency_s, 1e-3)
        start = self._within_limits(search.start_rate or self._site.trace_rate or guess)
        if method == "burst":
            known = self._knowledge.rates.get(cell)
            return Burst(
                BurstSearch(
                    self._within_limits(known or (hint.rate if hint else start)),
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
            limits_of_tier = replace(limits, attainment=max(slo.shares))
            # SaturationProbe gives no rate of sessions, as their turns wait for each other.
            ceiling = CEILING and self._scenario.workload.sessions is None
            objective = Objective.of(slo.all_criteria()) if self._replayable(method) else None
            searches[tier] = RateSearch(limits_of_tier, hint, ceiling=ceiling, objective=objective)
        return Tiered(searches, self._site.requests)

    def _replayable(self, method: Method) -> bool:
        """Whether trials differ in their rate only, with open-loop arrivals."""
        return (
            method == "sustained" and self._scenario.workload.sessions is None and not self._site.trace_rate
        )

    def _within_limits(self, rate: float) -> float:
        search = self._scenario.search
        return min(max(rate, search.min_rate), search.max_rate)

    def _try_rates(
        self,
        attempt: Attempt,
        strategy: Strategy,
        records: list[TrialRecord],
        left_s: float,
        precision: float,
    ) -> float:
        """Run the trials of a search and append them; return the seconds left."""
        earlier, budget = self._knowledge.earlier, self._knowledge.budget
        stored = earlier.tried(attempt.cell, attempt.method)[len(records) :]
        if stored:
            self._watcher.stage(f"{attempt.cell.key}: {len(stored)} trials are reused from the folder")
        latency_s, search = attempt.latency_s, self._scenario.search
        self._set_budget(attempt.cell, strategy, left_s, precision)
        while (ask := strategy.ask()) is not None:
            for mode, repeat_of in self._turns():
                plan = TrialPlan(
                    attempt.cell,
                    len(records) + 1,
                    ask.rate,
                    ask.purpose,
                    mode,
                    repeat_of,
                    method=attempt.method,
                    tier=ask.tier,
                    searched=strategy.searched,
                    latency_s=latency_s,
                    full_length=ask.full_length,
                    least_s=ask.least_s,
                    closed=self._fixed.closed(search.max_requests, latency_s) if self._fixed else None,
                )
                replayed = bool(stored)
                if replayed:
                    record = stored.pop(0)
                    earlier.check(record, plan.trial_id, plan.rate, plan.purpose)
                else:
                    record = self._site.run(plan)
                budget.left_s -= record.duration_s
                left_s -= record.duration_s
                strategy.allow(left_s)
                strategy.tell(record)
                self._set_budget(attempt.cell, strategy, left_s, precision)
                records.append(record)
                median_ms = (record.summary.get("e2el_ms") or {}).get("p50")
                if record.verdict in ("met", "undecided") and median_ms:
                    latency_s = median_ms / 1e3
                if not replayed:
                    self._watcher.trial_finished(record, strategy.standing())
                if len(records) == foreseen_after(search.max_trials):
                    self._warn_if_imprecise(attempt, strategy)
        return left_s

    def _set_budget(self, cell: Cell, strategy: Strategy, left_s: float, precision: float) -> None:
        strategy.allow(left_s, precision * (DECIDED if self._decided(cell, strategy) else 1))

    def _decided(self, cell: Cell, strategy: Strategy) -> bool:
        """Return whether the cell's interval is clear of those of all other connectors at its lengths."""
        budget, found = self._knowledge.budget, strategy.standing() if self._knowledge.budget.cells else None
        return found is not None and budget.overlaps(cell, found.lower, found.upper) is False

    def _warn_if_imprecise(self, attempt: Attempt, strategy: Strategy) -> None:
        """Report after some trials if the rest will probably not suffice."""
        standing, search = strategy.standing(), self._scenario.search
        if standing is None or standing.width <= FORESEEN * search.precision or strategy.ask() is None:
            return
        done = foreseen_after(search.max_trials)
        self._watcher.note(
            f"{attempt.cell.key}: after {done} of {search.max_trials} trials it is {standing.text()}; "
            f"the rest will probably not reach ±{100 * search.precision:.2g} % (raise search.max_trials "
            "or search.precision, or lengthen the trials)",
            caveat=True,
        )

    def _prospect(
        self, method: Method, strategy: Strategy, tier: str, records: Sequence[TrialRecord]
    ) -> Prospect | None:
        """Estimate what the trials allow, from the first one that bounds the answer."""
        if self._scenario.workload.sessions is not None:
            return None  # the forecast assumes independent requests
        if method not in MAIN_METHODS or not strategy.searched or (seen := seen_of(records)) is None:
            return None
        slos = self._scenario.slo.by_tier()
        return prospect_of(self._scenario, slos.get(tier) or next(iter(slos.values())), seen)

    def _turns(self) -> Sequence[tuple[LoadMode | None, int]]:
        """Modes and repeats of one load: once, except with ``Fixed.both_modes``."""
        has_router = self._site.has_direct
        if self._fixed is None or not self._fixed.both_modes or not has_router:
            return ((None, 0),)
        return self._fixed.turns(self._scenario.load.mode)

    def _results(
        self, cell: Cell, method: Method, strategy: Strategy, records: Sequence[TrialRecord]
    ) -> list[CellResult]:
        """Return one result per SLO tier, or one if nothing was searched."""
        main = method in MAIN_METHODS
        refused = [record for record in records if record.verdict == "invalid"]
        answers = strategy.answers()
        if refused and len(refused) == len(records):
            invalid = (finding.advice for finding in refused[-1].findings if finding.level == "invalid")
            reason = f"every trial was refused: {refused[-1].reason}"
            answer = next((dict(value) for value in answers.values()), None)
            return [
                CellResult(
                    cell, "refused", answer, reason=reason, hint=next(invalid, ""), method=method, main=main
                )
            ]
        if not answers:
            return [CellResult(cell, "done", method=method, main=main)]
        results, standing, decided = [], strategy.standing(), ""
        wide = standing is not None and standing.width > self._scenario.search.precision
        if standing and wide and len(answers) == 1 and self._decided(cell, strategy):
            decided = f"ended at ±{100 * standing.width:.2g} %: its comparison is decided"
        for index, (tier, found) in enumerate(answers.items()):
            answer = dict(found)
            if (prospect := self._prospect(method, strategy, tier, records)) is not None:
                answer["time_allows"] = round(prospect.moderate, 4)
            rate = answer["max_request_rate"]
            if main and index == 0 and rate is not None:
                self._knowledge.rates[cell] = rate
            results.append(
                CellResult(
                    cell,
                    "done",
                    answer=answer,
                    reason=decided if answer["status"] == "converged" else answer["reason"],
                    confirmed_by=confirmed_by(records, tier, rate, self._scenario.search.precision),
                    method=method,
                    tier=tier,
                    main=main and index == 0,
                    limit=limit_of_cell(records, answer["lower"]) if index == 0 else None,
                )
            )
        return results


def _wrong_at_end(last: CanaryResult) -> str:
    """Explain a refusal: canaries correct during the cell's trials, wrong afterwards."""
    texts = " | ".join(answer.text() for answer in last.wrong)
    return f"wrong_answers: after the trials {len(last.wrong)} of {last.checked} answers were wrong: {texts}"


def confirmed_by(
    records: Sequence[TrialRecord], tier: str, rate: float | None, precision: float
) -> str | None:
    """Return the nearest, then newest trial met at the rate or within the precision above it."""
    if not rate:
        return None
    low, high = rate * (1 - 1e-9), rate * (1 + precision) * (1 + 1e-9)
    met = [
        record
        for record in reversed(records)
        if record.verdict_of(tier) == "met" and low <= record.request_rate <= high
    ]
    found = min(met, key=lambda record: record.request_rate, default=None)
    return found.trial_id if found is not None else None
