"""The result table: one row per connector and input length, built from a run folder.

Latencies and rates come from the trial that supports the answer: the highest rate that met the SLO at or
below it. Without such a trial they are empty. A predicted rate has a mark and a minimum interval from its
timing profile's status, lengths and held-out error (``fitted_with`` in the manifest)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from kvbench import engines
from kvbench.core.findings.rate_change import PossibleRates, known, within
from kvbench.core.findings.setups import cache_blind
from kvbench.core.metrics.limit import Binding
from kvbench.core.plan.engine_count import Size, Unit, price_per_gpu_hour, size_in, unit_of
from kvbench.core.records import Cell, TrialRecord
from kvbench.report.tables.table import number
from kvbench.report.tables.trial_values import engine_word, finite, trial_values
from kvbench.results.run import CellResult, RunFolder

EXTRAPOLATED: Final = 1.05
"""Factor beyond the fitted lengths from which a prediction is marked as extrapolated."""


@dataclass(frozen=True)
class FitLimits:
    """Limits of a prediction. ``mark``: "unfit", "extrapolated" or empty; ``why``: the sentence; ``margin``:
    the fit's error as a share of the rate."""

    mark: str = ""
    why: str = ""
    margin: float = 0.0


def fit_limits(run: RunFolder, cell: Cell) -> FitLimits:
    every = run.manifest.get("fitted_with")
    fitted = every.get(cell.connector) if isinstance(every, Mapping) else None
    if not isinstance(fitted, Mapping):
        return FitLimits()
    why = _why(fitted, cell)
    return FitLimits(why.partition(":")[0], why, max(finite(fitted.get("margin")) or 0.0, 0.0))


def _why(fitted: Mapping[str, Any], cell: Cell) -> str:
    name = fitted.get("name")
    if fitted.get("status") == "unfit":
        return f"unfit: timing profile {name} did not predict the held-out requests"
    parts = []
    lengths = (("prompts", "input_len", cell.input_len), ("outputs", "output_len", cell.output_len))
    for what, key, length in lengths:
        ends = fitted.get(key)
        if not isinstance(ends, Sequence) or len(ends) != 2:
            continue
        shortest, longest = (finite(end) or 0.0 for end in ends)
        if not shortest / EXTRAPOLATED <= length <= longest * EXTRAPOLATED:
            span = f"{shortest:,.0f}" if shortest == longest else f"{shortest:,.0f} to {longest:,.0f}"
            parts.append(f"{what} of {length:,} tokens (fitted: {span})")
    return f"extrapolated: timing profile {name} to {', '.join(parts)}" if parts else ""


# found: a rate and its interval · at_least: no miss bounds the rate from above · none: no tested rate met
# the SLO · undecided: no trial gave a verdict · one_rate: one rate was offered, nothing was searched ·
# unfinished: the run ended before this cell did · refused, failed, skipped: see the row's reason.
Outcome = Literal[
    "found", "at_least", "none", "undecided", "one_rate", "unfinished", "refused", "failed", "skipped"
]


@dataclass(frozen=True)
class Answer:
    """The search's answer. ``upper`` is None if no tested rate missed the SLO."""

    outcome: Outcome
    max_request_rate: float | None = None
    lower: float | None = None
    upper: float | None = None
    converged: bool = True
    """Whether the search finished: a trial at that rate was met."""
    exhausted: bool = False
    """Whether the search used all trials or all of its time: the interval is valid, but too wide."""
    level: float | None = None
    """Probability that the interval contains the rate."""
    posterior: tuple[float, ...] = ()
    """Equally probable rates, if the search stored them."""
    refusals: str = ""
    """Number and reasons of refused trials; empty if there are none or there is a rate."""
    mark: str = ""
    """"unfit" or "extrapolated": the fit does not support the prediction, which rules out a winner."""
    mark_reason: str = ""

    @property
    def comparable(self) -> bool:
        """Whether the answer may be compared with others."""
        return self.converged or (self.exhausted and self.outcome == "found" and bool(self.posterior))

    @property
    def possible(self) -> PossibleRates:
        """Return the possible rates: the posterior; for older answers a log-normal through the interval, or
        all rates between a met and a missed one."""
        if self.outcome == "found" and self.posterior:
            return known(self.posterior)
        return within(None if self.outcome == "none" else self.lower, self.upper, self.level)

    def text(self) -> str:
        """Return the answer as text: ``12.3 [11.9, 12.8]``, ``12.3? [9, 14]`` if not converged, ``≥ 12.3``,
        ``none (< 0.5)``, ``no rate (< 390)``, followed by the mark."""
        return " ".join(filter(None, (self._text(), self.mark)))

    def _text(self) -> str:
        if self.outcome in ("found", "unfinished") and self.max_request_rate is not None:
            interval = f"[{number(self.lower)}, {'…' if self.upper is None else number(self.upper)}]"
            return f"{number(self.max_request_rate)}{'' if self.converged else '?'} {interval}"
        if self.outcome == "at_least":
            return f"≥ {number(self.max_request_rate)}"
        if self.outcome == "one_rate":
            return f"at {number(self.max_request_rate)}"
        if self.outcome in ("none", "undecided"):
            known = "none" if self.outcome == "none" else "no rate"
            return known if self.upper is None else f"{known} (< {number(self.upper)})"
        return str(self.outcome)


@dataclass(frozen=True)
class Row:
    """One row of the result table. ``values``: by VALUE_COLUMNS, None if missing."""

    run_id: str
    cell: Cell
    answer: Answer
    values: Mapping[str, float | None]
    trials: int = 0
    trial_id: str | None = None
    """The supporting trial; ``values``, ``trial_rate`` and ``verdict`` describe it."""
    trial_rate: float | None = None
    verdict: str = ""
    search: str = ""
    confirmed: bool = False
    transport: str = ""
    kv_source: str = ""
    load_mode: str = ""
    stamps: str = ""
    limit: str = ""
    """Limit above the answer: a key of ``LIMIT_WORDS``."""
    limit_evidence: str = ""
    reason: str = ""
    hint: str = ""
    findings: Mapping[str, int] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    name: str = ""
    size: Size = field(default_factory=Size)
    """Engines and GPUs behind the rate."""
    price: float | None = None
    """Price of a GPU hour in the user's currency."""
    no_winner: str = ""
    """Reason why this row must not win; empty if it may."""

    @property
    def outcome(self) -> Outcome:
        return self.answer.outcome

    def rate_per(self, unit: Unit) -> float | None:
        """Return the highest rate per engine or GPU, or None without a searched rate or a known number."""
        rate, count = self.answer.max_request_rate, self.size.count(unit)
        return None if rate is None or not count or self.outcome == "one_rate" else rate / count

    def per(self, unit: Unit, column: str) -> float | None:
        """Return a figure of the supporting trial per engine or GPU."""
        value, count = self.values.get(column), self.size.count(unit)
        return None if value is None or not count else value / count

    @property
    def cost_per_1k_requests(self) -> float | None:
        """Return price · GPUs · 1000 / (3600 · rate), at the highest rate."""
        rate = self.rate_per("GPU")
        return None if not rate or self.price is None else self.price * 1e3 / 3600 / rate

    @property
    def cost_per_1m_output_tokens(self) -> float | None:
        """Return price · GPUs · 10⁶ / (3600 · output tokens per second), at the supporting trial."""
        tokens = self.per("GPU", "output_tok_per_s")
        return None if not tokens or self.price is None else self.price * 1e6 / 3600 / tokens

    @property
    def joules_per_output_token(self) -> float | None:
        """Return mean power of all GPUs / output tokens per second, at the supporting trial."""
        watts, tokens = self.values.get("gpu_watts"), self.values.get("output_tok_per_s")
        return None if watts is None or not tokens else watts / tokens

    def rate_text(self) -> str:
        """Return the answer, with the reason if it has no rate: ``no rate (< 390); 2 of 3 trials refused:
        step_lag``."""
        text = self.answer.text()
        if self.outcome in ("refused", "failed", "skipped"):
            return f"{text}: {self.reason}"
        return "; ".join(filter(None, (text, self.answer.refusals)))

    def flat(self) -> dict[str, Any]:
        """Return flat names and values, as in tables/summary.csv."""
        return {
            "run": self.run_id,
            "connector": self.cell.connector,
            "input_len": self.cell.input_len,
            "output_len": self.cell.output_len,
            "outcome": self.outcome,
            "max_request_rate": self.answer.max_request_rate,
            "lower": self.answer.lower,
            "upper": self.answer.upper,
            "interval_level": self.answer.level,
            "prediction": self.answer.mark,
            "censored": self.outcome == "at_least",
            "engines": self.size.engines,
            "gpus": self.size.gpus,
            "max_request_rate_per_engine": self.rate_per("engine"),
            "max_request_rate_per_gpu": self.rate_per("GPU"),
            "request_goodput_per_gpu": self.per("GPU", "request_goodput"),
            "output_tok_per_s_per_gpu": self.per("GPU", "output_tok_per_s"),
            "cost_per_1k_requests": self.cost_per_1k_requests,
            "cost_per_1m_output_tokens": self.cost_per_1m_output_tokens,
            "watts_per_gpu": self.per("GPU", "gpu_watts"),
            "joules_per_output_token": self.joules_per_output_token,
            **self.values,
            "transport": self.transport,
            "kv_source": self.kv_source,
            "limit": self.limit,
            "limit_evidence": self.limit_evidence,
            "load_mode": self.load_mode,
            "client_stamps": self.stamps,
            "trials": self.trials,
            "findings": sum(self.findings.values()),
            "trial_id": self.trial_id,
            "trial_request_rate": self.trial_rate,
            "verdict": self.verdict,
            "search": self.search,
            "confirmed": self.confirmed,
            "reason": self.reason,
            "labels": ";".join(self.labels),
        }


def summary_table(run: RunFolder, name: str = "") -> list[Row]:
    """Return the run's rows by input length, then connector. ``name``: label if several runs share a
    table."""
    results = {result.cell: result for result in run.cells}
    # Finished cells first, then one that was cut off.
    cells = list(dict.fromkeys([*results, *(trial.cell for trial in run.trials)]))
    connectors = list(dict.fromkeys(cell.connector for cell in cells))
    cells.sort(key=lambda cell: (cell.input_len, cell.output_len, connectors.index(cell.connector)))
    return [_row(run, cell, results.get(cell), name) for cell in cells]


def _row(run: RunFolder, cell: Cell, result: CellResult | None, name: str) -> Row:
    trials = run.trials_of(cell)
    answer = _as_predicted(_answer(run, trials, result), fit_limits(run, cell))
    support = _supporting_trial(trials, answer)
    if support is None and answer.outcome in ("found", "undecided", "none"):
        answer = _without_support(answer, trials)
    given = (result.answer if result else None) or {}
    labels = dict.fromkeys([*run.labels, *(label for trial in trials for label in trial.labels)])
    levels: Counter[str] = Counter(finding.level for trial in trials for finding in trial.findings)
    limit = Binding.from_json(result.limit) if result and result.limit else None
    return Row(
        run_id=run.run_id,
        cell=cell,
        answer=answer,
        values=trial_values(support),
        trials=len(trials),
        trial_id=support.trial_id if support else None,
        trial_rate=support.request_rate if support else None,
        verdict=support.verdict if support else "",
        search=str(given.get("status") or ""),
        confirmed=bool(given.get("confirmed")),
        transport=engine_word(support, "transport"),
        kv_source=engine_word(support, "kv_source"),
        limit="" if limit is None else limit.limit,
        limit_evidence="" if limit is None else limit.evidence,
        load_mode=engine_word(support, "load_mode"),
        stamps=engine_word(support, "client.stamps"),
        reason=(result.reason if result else "") or _search_reason(given),
        hint=result.hint if result else "",
        findings=dict(levels),
        labels=tuple(labels),
        name=f"{cell.connector}@{name}" if name else cell.connector,
        size=size_in(run.plan, run.environment, cell.connector, engines.options_model_of(run.plan)),
        price=price_per_gpu_hour(run.plan),
        no_winner=cache_blind(run.plan, cell.connector)
        or (f"{answer.mark} prediction" if answer.mark else ""),
    )


def shared_unit(rows: Iterable[Row]) -> Unit:
    """Return the unit of a table's rates: GPUs if known for all rows, else engines."""
    return unit_of(row.size for row in rows)


def _search_reason(answer: Mapping[str, Any]) -> str:
    """Return why the search ended; empty if it converged."""
    return "" if answer.get("status") == "converged" else str(answer.get("reason") or "")


def _answer(run: RunFolder, trials: Sequence[TrialRecord], result: CellResult | None) -> Answer:
    if result and result.status != "done":
        return Answer(result.status)
    fixed = (
        result is not None and result.answer is None and len({trial.request_rate for trial in trials}) == 1
    )
    if (run.manifest.get("kind") == "bench" or fixed) and trials:
        return Answer("one_rate", trials[-1].request_rate)
    if result and result.answer:
        return read_answer(result.answer)
    met = [trial.request_rate for trial in trials if trial.verdict == "met"]
    lower = max(met, default=None)
    missed = [trial.request_rate for trial in trials if trial.verdict == "missed"]
    upper = min((rate for rate in missed if lower is None or rate > lower), default=None)
    return Answer("unfinished", lower, lower, upper)


def _as_predicted(answer: Answer, limits: FitLimits) -> Answer:
    """Return the answer with its mark and an interval no narrower than the fit's margin. A relative error in
    step time changes the rate by about the same share."""
    rate = answer.max_request_rate
    answer = replace(answer, mark=limits.mark, mark_reason=limits.why)
    if not limits.margin or rate is None or answer.lower is None or answer.upper is None:
        return answer
    lower = min(answer.lower, rate / (1 + limits.margin))
    upper = max(answer.upper, rate * (1 + limits.margin))
    if answer.outcome != "found" or (lower, upper) == (answer.lower, answer.upper):
        return answer
    return replace(answer, lower=lower, upper=upper, posterior=())


def stored_answer(run: RunFolder, result: CellResult) -> Answer | None:
    """Return a cell's answer for one method and tier, with the limits of a prediction; None without one."""
    if not result.answer:
        return None
    return _as_predicted(read_answer(result.answer), fit_limits(run, result.cell))


def read_answer(given: Mapping[str, Any]) -> Answer:
    """Return the search's answer from its JSON."""
    rate, lower, upper = (finite(given.get(key)) for key in ("max_request_rate", "lower", "upper"))
    converged = given.get("status") not in ("undecided", "exhausted")
    if rate is None:
        below = upper is not None and given.get("censored", "below") == "below"
        return Answer("none" if below else "undecided", None, None, upper, converged)
    level = finite(given.get("level"))
    outcome: Outcome = "at_least" if upper is None else "found"
    exhausted = given.get("status") == "exhausted"
    return Answer(outcome, rate, lower, upper, converged, exhausted, level, rates_of(given.get("posterior")))


def interval_word(answers: Iterable[Answer]) -> str:
    """Return a column's bracket label: ``[90 %]``, or ``[interval]`` if not all levels are known."""
    levels = {answer.level for answer in answers if answer.outcome in ("found", "unfinished")}
    known = [level for level in levels if level is not None]
    return f"[{known[0] * 100:g} %]" if len(levels) == len(known) == 1 else "[interval]"


def rates_of(given: Any) -> tuple[float, ...]:
    """Return a stored posterior's rates; empty if invalid."""
    rates = [finite(value) for value in given] if isinstance(given, (list, tuple)) else []
    found = [rate for rate in rates if rate is not None and rate > 0]
    return tuple(found) if len(found) == len(rates) else ()


def _supporting_trial(trials: Sequence[TrialRecord], answer: Answer) -> TrialRecord | None:
    if answer.outcome == "one_rate":
        return trials[-1]
    if answer.outcome not in ("found", "at_least", "unfinished"):
        return None
    return highest_met(trials, answer.max_request_rate)


def highest_met(trials: Iterable[TrialRecord], rate: float | None, tier: str = "") -> TrialRecord | None:
    """Return the trial that supports a rate: the last of the highest met at or below it."""
    limit = -1.0 if rate is None else rate * (1 + 1e-6)
    met = [trial for trial in trials if trial.verdict_of(tier) == "met" and trial.request_rate <= limit]
    return max(reversed(met), key=lambda trial: trial.request_rate, default=None)


def _without_support(answer: Answer, trials: Sequence[TrialRecord]) -> Answer:
    """Return no rate for an answer without a met trial at or below it, unless it converged."""
    if answer.outcome == "found" and answer.converged:
        return answer
    refused = [trial for trial in trials if trial.verdict == "invalid"]
    causes = Counter(_cause(trial) for trial in refused)
    by_cause = ", ".join(cause if len(causes) == 1 else f"{cause} {n}" for cause, n in causes.most_common())
    return Answer(
        "none" if answer.outcome == "none" else "undecided",
        upper=answer.upper,
        converged=answer.converged,
        refusals=f"{len(refused)} of {len(trials)} trials refused: {by_cause}" if refused else "",
    )


def _cause(trial: TrialRecord) -> str:
    return next((finding.gate for finding in trial.findings if finding.level == "invalid"), trial.reason)
