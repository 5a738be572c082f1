"""One cell of the result table: is its output right, and what is the highest rate it holds?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvbench.core.records import Cell, TrialRecord, VerdictKind
from kvbench.core.scenario import Scenario
from kvbench.core.search import Answer, Hint, Probe, RateSearch, SearchLimits
from kvbench.equality import Equality, Outputs, check_prompts, compare, greedy_outputs
from kvbench.progress import Watcher
from kvbench.runs import CellResult
from kvbench.trial import TrialPlan, TrialRunner

START_CONCURRENCY = 4.0
"""Without a better guess the search starts where this many requests would be in flight: above what
one request alone offers, and well below what any engine with batching can hold."""


class Strategy(Protocol):
    """What a cell asks which rates to try: a search, or a fixed rate."""

    def ask(self) -> Probe | None: ...
    def tell(self, rate: float, verdict: VerdictKind) -> None: ...
    def answer(self) -> Answer | None: ...


class OneRate:
    """The strategy of ``kvbench bench``: one rate, once, and no answer to a question nobody asked."""

    def __init__(self, rate: float) -> None:
        self._left: Probe | None = Probe(rate, "start")

    def ask(self) -> Probe | None:
        return self._left

    def tell(self, rate: float, verdict: VerdictKind) -> None:
        self._left = None

    def answer(self) -> Answer | None:
        return None


@dataclass
class Knowledge:
    """What earlier cells of a run have taught: the true outputs, and where rates are likely to lie."""

    reference: dict[int, Outputs]
    rates: dict[Cell, float]

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
        fixed_rate: float | None = None,
    ) -> None:
        self._scenario = scenario
        self._trials = trials
        self._knowledge = knowledge
        self._watcher = watcher
        self._disaggregated = disaggregated
        self._fixed_rate = fixed_rate

    def run(self, cell: Cell, *, is_reference: bool) -> CellResult:
        """Check the outputs, then try rates until the strategy is done."""
        latency_s, equality, refusal = self._check_outputs(cell, is_reference)
        checked = None if equality is None else {"checked": equality.checked, "equal": equality.equal}
        if equality is not None and not equality.passed:
            return CellResult(
                cell,
                "refused",
                equal_outputs=checked,
                reason=f"corrupt: {equality.checked - equality.equal} of {equality.checked} greedy outputs "
                f"differ from the aggregated server's ({equality.example})",
                hint="the KV cache did not arrive intact: look for transfer errors in the logs",
            )
        strategy = self._strategy(cell, latency_s)
        records = self._try_rates(cell, strategy)
        return self._result(cell, strategy, records, checked, refusal)

    def _check_outputs(self, cell: Cell, is_reference: bool) -> tuple[float, Equality | None, str]:
        deployment = self._trials.deployment
        if not deployment.connector.true_outputs:
            return 1.0, None, "outputs were not checked: this connector's KV is invented, by design"
        self._watcher.stage(f"{cell.connector}: checking outputs at {cell.input_len} tokens")
        prompts = check_prompts(self._scenario.seed, cell.input_len, self._scenario.model.vocab_size)
        outputs = greedy_outputs(deployment.complete, prompts, cell.output_len)
        deployment.reset_caches()
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

    def _strategy(self, cell: Cell, latency_s: float) -> Strategy:
        if self._fixed_rate is not None:
            return OneRate(self._fixed_rate)
        search = self._scenario.search
        hint = self._knowledge.hint(cell, self._disaggregated)
        if hint is not None:
            hint = Hint(min(max(hint.rate, search.min_rate), search.max_rate), hint.trusted)
        guess = search.start_rate or START_CONCURRENCY / max(latency_s, 1e-3)
        limits = SearchLimits(
            start_rate=min(max(guess, search.min_rate), search.max_rate),
            min_rate=search.min_rate,
            max_rate=search.max_rate,
            precision=search.precision,
            max_trials=search.max_trials,
            confidence=search.confidence,
        )
        return RateSearch(limits, hint if search.start_rate is None else None)

    def _try_rates(self, cell: Cell, strategy: Strategy) -> list[TrialRecord]:
        records: list[TrialRecord] = []
        while (probe := strategy.ask()) is not None:
            record = self._trials.run(TrialPlan(cell, len(records) + 1, probe.rate, probe.purpose))
            strategy.tell(probe.rate, record.verdict)
            records.append(record)
            self._watcher.trial_finished(record)
        return records

    def _result(
        self,
        cell: Cell,
        strategy: Strategy,
        records: list[TrialRecord],
        checked: Mapping[str, Any] | None,
        note: str,
    ) -> CellResult:
        answer = strategy.answer()
        equal = dict(checked) if checked is not None else None
        refused = [record for record in records if record.verdict == "invalid"]
        if refused and len(refused) == len(records):
            advice = next(
                (finding.advice for finding in refused[-1].findings if finding.level == "invalid"), ""
            )
            return CellResult(
                cell,
                "refused",
                answer=None if answer is None else answer.to_json(),
                equal_outputs=equal,
                reason=f"every trial was refused: {refused[-1].reason}",
                hint=advice,
            )
        if answer is not None and answer.max_request_rate is not None:
            self._knowledge.rates[cell] = answer.max_request_rate
        confirmed = [
            record.trial_id
            for record in records
            if answer is not None
            and record.verdict == "met"
            and record.request_rate == answer.max_request_rate
        ]
        return CellResult(
            cell,
            "done",
            answer=None if answer is None else answer.to_json(),
            equal_outputs=equal,
            reason=note or ("" if answer is None or answer.status == "converged" else answer.reason),
            confirmed_by=confirmed[-1] if confirmed else None,
        )
