"""The highest rate that keeps an SLO, by replaying long loads through models that explain the trials.

Arrivals and first tokens of a trial give the work of every request in seconds, for each kind of queue; last
tokens give the decode steps. The most likely models replay long loads with such work: the answer is the rate
at which the worst criterion is just met. Its error has three parts: sampling of the work (bootstrap), model
error that no check shows (``DISCREPANCY``), and deviations of trials near the answer. A trial that
contradicts a model is an objection to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from kvbench.core.search.posterior.posterior import GRID, RateEstimate
from kvbench.core.search.replay.engines import LARGEST, engine_model, engine_objections
from kvbench.core.search.replay.models import (
    FEWEST,
    NATS,
    Candidate,
    Decode,
    Model,
    QueueModel,
    candidates,
    error_between,
    judged_part,
    whole_work,
    work_objections,
)
from kvbench.core.search.replay.queues import BoolArray, FloatArray
from kvbench.core.search.replay.unit_load import BISECTIONS, UnitLoad
from kvbench.core.search.trial_requests import CENSORED, Goal, Latencies, Objective, TrialRequests
from kvbench.core.stats import NORMAL_90, t_quantile, variance_between

BOOTSTRAPS: Final = 24
MODELS: Final = 3
"""Largest number of families to average."""
EXACT: Final = 0.12
"""Mean error of the latencies, as a share, up to which engines in steps alone explain the trials: they
predict each request; a queue with random work predicts only how many are late."""
EVEN: Final = 0.02
CLEARLY: Final = 0.7
"""Engines in steps are considered where the best queue of equal requests has a larger error than the first,
and theirs is below the second share of it."""
PHASES: Final = 0.25
"""Relative error of the rate by engines in steps, as a share of the latencies' mean error: the times at which
steps begin cause most of the latter."""
DISCREPANCY: Final = 0.02
"""Relative error of the rate that a model may have and no check shows (standard deviation), divided by the
square root of the number of trials near the rate: each could have shown it."""
AGREEING: Final = 4
"""Largest such number."""
APART: Final = 0.02
"""Relative difference of two models' rates above which they are different."""
TOLERATED: Final = 0.25
"""Prior standard deviation of a bias of all trials, as a share of the allowed misses."""
LEAST_ALLOWED: Final = 1e-3
"""Minimum share of misses that counts as allowed."""
FAILED_MOST: Final = 0.1
"""Failed requests that are not an objection, as a share of the allowed misses: no model predicts them."""
MOST: Final = 1e9
"""Largest forecast of further requests."""
ABOVE: Final = 1.12
"""Trials at more than this multiple of the rate can contradict a model only by being better than it says."""
REPLAYS: Final = 30
"""Number of replays of each trial, to predict its figures."""


@dataclass(frozen=True)
class NearTrials:
    """The trials near a model's rate against their replays. ``shift``: relative difference of the rate by
    them, up to 1; ``error``: its standard error; ``known``: how much a request raises 1 / ``error``²."""

    count: int
    shift: float
    error: float
    known: float

    @property
    def discrepancy(self) -> float:
        """Relative error of the rate that they do not show (standard deviation)."""
        return DISCREPANCY / math.sqrt(min(max(self.count, 1), AGREEING))

    def after(self, further: float) -> NearTrials:
        """Forecast the same after trials with this many further requests that agree."""
        error = 1 / math.sqrt(self.error**-2 + further * self.known)
        return replace(self, error=error, count=AGREEING if further else self.count)


@dataclass(frozen=True)
class Root:
    """One model's rate in requests per second, and objections to the model. Relative standard errors:
    ``sampling`` of requests, differences ``between`` trials, and of the finite ``load`` that is replayed."""

    model: Model
    rate: float
    sampling: float
    between: float
    load: float
    near: NearTrials
    objections: tuple[str, ...]

    @property
    def error(self) -> float:
        """Relative standard error of the rate, at most 1: nothing is known then."""
        near = self.near
        return min(math.hypot(self.sampling, self.between, self.load, near.error, near.discrepancy), 1.0)

    def after(self, growth: float, further: float) -> Root:
        """Forecast the same once all requests are ``growth`` times as many, by trials with ``further`` near
        the rate that agree."""
        return replace(
            self, sampling=self.sampling / math.sqrt(growth), between=0.0, near=self.near.after(further)
        )


@dataclass(frozen=True)
class ReplayResult:
    """Result of all trials. ``roots``: of the models without objections, or else of the one with the fewest.
    ``requests`` were replayed, of ``seconds`` of trials, without the first ``left_out`` trials."""

    roots: tuple[Root, ...]
    requests: int
    seconds: float
    left_out: int = 0

    @property
    def objections(self) -> tuple[str, ...]:
        """What the trials showed that no model does; empty where a model explains them."""
        return self.roots[0].objections

    @property
    def error(self) -> float:
        """Largest relative standard error of a model's rate."""
        return max(root.error for root in self.roots)

    @property
    def finest(self) -> float:
        """Half-width of the interval that remains after any number of requests."""
        error = max(math.hypot(root.load, root.near.after(1).discrepancy) for root in self.roots)
        return math.expm1(2 * NORMAL_90 * error) / 2

    @property
    def highest(self) -> float:
        """Highest model's rate where the models differ, else the middle of all, in requests per second."""
        rates = [root.rate for root in self.roots]
        return max(rates) if max(rates) > (1 + APART) * min(rates) else math.sqrt(max(rates) * min(rates))

    def further_requests(self, precision: float) -> float:
        """Forecast how many more requests near the rate the precision needs; inf if no number is enough,
        since models differ or may be wrong by more."""
        low, high = 0.0, 1.0
        if self._after(low).width <= precision:
            return low
        while self._after(high).width > precision:
            low, high = high, 2 * high
            if high > MOST:
                return math.inf
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._after(middle).width <= precision else (middle, high)
        return high

    def _after(self, further: float) -> RateEstimate:
        """Forecast the estimate after this many more requests near the rate."""
        growth = 1 + further / self.requests
        return replace(self, roots=tuple(root.after(growth, further) for root in self.roots)).estimate

    def to_json(self) -> dict[str, Any]:
        """Return rate and 90 % interval in requests per second, models and objections."""
        found = self.estimate
        return {
            "rate": float(f"{found.median:.5g}"),
            "lower": float(f"{found.lower:.5g}"),
            "upper": float(f"{found.upper:.5g}"),
            "models": [root.model.text() for root in self.roots],
            "objections": list(self.objections),
            "requests": self.requests,
            "seconds": round(self.seconds, 3),
            "left_out": self.left_out,
        }

    @cached_property
    def estimate(self) -> RateEstimate:
        """Density of the wanted rate; the models have equal weights."""
        low = min(math.log(root.rate) - 5 * root.error for root in self.roots)
        high = max(math.log(root.rate) + 5 * root.error for root in self.roots)
        logs = np.linspace(low, high, GRID)
        density = np.zeros(GRID)
        for root in self.roots:
            root_density = np.exp(-0.5 * ((logs - math.log(root.rate)) / root.error) ** 2)
            density += root_density / root_density.sum()
        return RateEstimate(np.exp(logs), density / density.sum())


@lru_cache(maxsize=16)
def replayed(trials: tuple[TrialRequests, ...], objective: Objective) -> ReplayResult | None:
    """Replay the trials; None if no family explains them, if decode steps are needed and missing, or if a
    trial has no request before its first failed one."""
    found = candidates(trials) if all(map(len, trials)) else ()
    if not found:
        return None
    load = UnitLoad(trials[-1].burstiness, np.concatenate([trial.tokens for trial in trials]), objective)
    decode = Decode.fitted(trials)
    if objective.needs_last and decode is None:
        return None
    seen = sum(map(len, trials)), sum(trial.end_s for trial in trials)
    stepwise = _stepwise(trials, objective, load, found)
    if stepwise is not None and not stepwise.objections:
        return ReplayResult((stepwise,), *seen)
    roots = []
    for candidate in _distinct(found):
        work_s = whole_work(trials, candidate)
        model = QueueModel(candidate.family, work_s, decode if objective.needs_last else None)
        objections = tuple(work_objections(trials, candidate, model))
        roots.append(_root(trials, objective, model, load, objections, error_between(candidate)))
    good = tuple(root for root in roots if not root.objections)
    if good:
        return ReplayResult(good, *seen)
    best = min(roots, key=lambda root: len(root.objections))
    return ReplayResult((best,), *seen)


def _stepwise(
    trials: tuple[TrialRequests, ...], objective: Objective, load: UnitLoad, found: Sequence[Candidate]
) -> Root | None:
    """Return the rate by engines in steps; None if they don't reproduce the requests, or not clearly better
    than a queue of equal requests."""
    even = min(_even_error(trials, candidate) for candidate in found)
    model = engine_model(trials, min(EXACT, CLEARLY * even)) if even >= EVEN else None
    if model is None:
        return None
    root = _root(trials, objective, model, load, between=PHASES * model.error)
    objections = engine_objections(trials, model, ABOVE * root.rate)
    return replace(root, objections=(*objections, *root.objections))


def _even_error(trials: Sequence[TrialRequests], candidate: Candidate) -> float:
    """Return the mean log difference between measured TTFT and that of a queue of equal requests."""
    work_s = float(np.nanmean(np.concatenate(candidate.work)))
    errors = []
    for trial in trials:
        first_s = candidate.family.first_s(trial.arrived_s, np.full(len(trial), work_s))
        known = trial.first_s > trial.arrived_s
        ratios = (first_s - trial.arrived_s)[known] / (trial.first_s - trial.arrived_s)[known]
        errors.append(np.minimum(np.abs(np.log(ratios)), LARGEST))
    return float(np.concatenate(errors).mean())


def _distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the most likely candidate of each kind and number of servers."""
    kept: dict[tuple[str, float], Candidate] = {}
    for candidate in found:
        if candidate.log_likelihood >= found[0].log_likelihood - NATS:
            kept.setdefault((candidate.family.kind, candidate.family.servers), candidate)
    return list(kept.values())[:MODELS]


def _root(
    trials: Sequence[TrialRequests],
    objective: Objective,
    model: Model,
    load: UnitLoad,
    objections: tuple[str, ...] = (),
    between: float = 0.0,
) -> Root:
    """Return the model's rate. ``between``: relative error by differences between trials."""
    rate = load.root(model, objective)
    slope = load.slope(model, objective, rate)
    spread = _sampling_error(trials, objective, model, load, rate)
    goal = min(objective.goals, key=lambda goal: goal.target)
    tolerated = TOLERATED * max(1 - goal.target if goal.kind == "share" else 0.2, LEAST_ALLOWED)
    replays = _replays(trials, objective, model)
    near = _near(replays, rate, slope, tolerated)
    found = (
        *objections,
        *_failures(trials, rate, FAILED_MOST * (1 - goal.target)),
        *_differences(replays, rate, slope, spread, tolerated),
    )
    finite = load.error(model, objective, rate, slope)
    return Root(model, rate * math.exp(near.shift), 1.2 * spread, between, finite, near, found)


def _sampling_error(
    trials: Sequence[TrialRequests], objective: Objective, model: Model, load: UnitLoad, rate: float
) -> float:
    """Return the bootstrap standard deviation of the model's rate, relative to it."""
    rng = np.random.default_rng(9)
    samples = (model.resampled(trials, rng) for _ in range(BOOTSTRAPS))
    rates = [load.root_of_sample(sample, objective, rate) for sample in samples]
    return float(np.std(np.log(rates))) + 1e-4


@dataclass(frozen=True)
class TrialReplay:
    """A trial's figures (``_figures``), and mean and standard deviation of its replays' figures."""

    trial: TrialRequests
    model: Model
    objective: Objective
    seen: FloatArray
    mean: FloatArray
    deviation: FloatArray

    @property
    def variance(self) -> float:
        """Variance of the replays' score plus 1e-5; of shares at most that of rounding and the error seen."""
        shares = all(goal.kind == "share" for goal in self.objective.goals)
        error = float(self.seen[0] - self.mean[0]) ** 2 + 1 / (12 * len(self.trial) ** 2)
        return float(self.deviation[0]) ** 2 + (min(1e-5, error) if shares else 1e-5)

    @property
    def better(self) -> bool:
        """Whether the trial's score is better than the replays', beyond chance and ``DISCREPANCY``."""
        return self._exceeds and _replay(self.trial, self.model, self.objective, 1 + 2 * DISCREPANCY)._exceeds

    @property
    def _exceeds(self) -> bool:
        return bool(self.seen[0] > self.mean[0] + 0.05 + 3 * self.deviation[0])


def _replays(trials: Sequence[TrialRequests], objective: Objective, model: Model) -> list[TrialReplay]:
    """Replay each trial that has enough requests to judge."""
    judged = (trial for trial in trials if judged_part(trial, objective).sum() >= FEWEST / 2)
    return [_replay(trial, model, objective) for trial in judged]


def _replay(trial: TrialRequests, model: Model, objective: Objective, slower: float = 1.0) -> TrialReplay:
    """Replay a trial at its rate divided by ``slower``."""
    rng, part = np.random.default_rng(21), judged_part(trial, objective)
    shown = []
    for _ in range(REPLAYS):
        times = model.times(slower * trial.arrived_s, trial.tokens, rng.random((2, len(trial))))
        shown.append(_figures(objective, _cut(times, trial), part))
    seen = Latencies.of(trial.arrived_s, trial.first_s, trial.last_s, trial.tokens)
    mean, deviation = np.mean(shown, axis=0), np.std(shown, axis=0)
    return TrialReplay(trial, model, objective, _figures(objective, seen, part), mean, deviation)


def _near(replays: Sequence[TrialReplay], rate: float, slope: float, tolerated: float) -> NearTrials:
    """Compare the trials near a rate with their replays. ``tolerated``: prior standard deviation of the
    difference of their scores."""
    near = [replay for replay in replays if 0.8 < replay.trial.rate / rate < 1.1]
    differences = np.array([float(replay.seen[0] - replay.mean[0]) for replay in near])
    variances = np.array([replay.variance for replay in near])
    excess = variance_between(differences, variances)
    if excess:  # a few trials estimate it poorly
        excess *= (t_quantile(0.95, len(near) - 1) / NORMAL_90) ** 2
    weights = 1 / (variances + excess)
    precision = tolerated**-2 + float(weights.sum())
    shift = float((differences * weights).sum()) / precision
    nearest = min(replays, key=lambda replay: abs(math.log(replay.trial.rate / rate)), default=None)
    known = 0.0 if nearest is None else slope**2 / ((nearest.variance + excess) * len(nearest.trial))
    return NearTrials(len(near), max(-1.0, min(1.0, shift / slope)), precision**-0.5 / slope, known)


def _failures(trials: Sequence[TrialRequests], rate: float, most: float) -> Iterator[str]:
    """Describe the trials up to near a rate of which more than the share ``most`` failed."""
    for trial in trials:
        if trial.failed > most * len(trial) and trial.rate <= ABOVE * rate:
            yield f"{trial.failed} requests failed at {trial.rate:.3g} req/s"


def _differences(
    replays: Sequence[TrialReplay], rate: float, slope: float, spread: float, tolerated: float
) -> Iterator[str]:
    """Describe what differs between trials and their replays beyond chance and ``spread``, the relative
    error of the rate by sampling."""
    threshold = 3.0 + 0.12 * len(replays)
    for replay in replays:
        tried, seen, mean, deviation = replay.trial.rate, replay.seen, replay.mean, replay.deviation
        if tried > ABOVE * rate:
            if replay.better:
                yield f"better at {tried:.3g} req/s than the replay ({seen[0]:+.3f}, {mean[0]:+.3f})"
            continue
        relative = np.hypot(deviation[2:], np.hypot(1.5 * spread * mean[2:], 0.1 * mean[2:] + 0.004))
        if np.abs((seen[2:] - mean[2:]) / relative).max() > threshold + 0.3:
            yield f"latency quantiles at {tried:.3g} req/s differ from the replay"
        score_error = math.hypot(deviation[0], spread * slope * min(1.0, tried / rate))
        if abs(seen[0] - mean[0]) / math.hypot(score_error, 3 * tolerated) > threshold:
            yield f"margin of the SLO at {tried:.3g} req/s: {seen[0]:+.3f}, replay {mean[0]:+.3f}"
        mean_error = math.hypot(deviation[1], spread * mean[1] * 1.5)
        if abs(seen[1] - mean[1]) / math.hypot(mean_error, 0.03 * mean[1] + 0.004) > threshold:
            yield f"mean / limit at {tried:.3g} req/s: {seen[1]:.3f}, replay {mean[1]:.3f}"


def never_better(found: ReplayResult, trials: Sequence[TrialRequests], objective: Objective) -> bool:
    """Return whether no trial was better than its replay by the first model."""
    return not any(replay.better for replay in _replays(trials, objective, found.roots[0].model))


def _figures(objective: Objective, times: Latencies, part: BoolArray) -> FloatArray:
    """Return (score, mean ratio up to 2, four quantiles of the ratio) of the worst criterion."""
    found = []
    for goal in objective.goals:
        ratios = np.nan_to_num(goal.ratios(times)[part], nan=CENSORED, posinf=CENSORED, neginf=0.0)
        low = np.minimum(ratios, CENSORED)
        found.append(
            (
                goal.score(ratios),
                float(np.minimum(ratios, 2.0).mean()),
                *np.quantile(low, (0.3, 0.6, 0.85, _tail(goal, len(low)))),
            )
        )
    return np.array(min(found))


def _tail(goal: Goal, count: int) -> float:
    """Return the quantile that decides a share, as far as ``count`` requests can show it."""
    return max(min(goal.target if goal.kind == "share" else 0.95, 1 - 3 / count), 0.85)


def _cut(times: Latencies, trial: TrialRequests) -> Latencies:
    """Return the latencies that end before the trial does; others are NaN."""
    late_first = trial.arrived_s + times.ttft_s > trial.end_s
    late_last = trial.arrived_s + times.e2el_s > trial.end_s
    return Latencies(
        np.where(late_first, math.nan, times.ttft_s),
        np.where(late_last, math.nan, times.tpot_s),
        np.where(late_last, math.nan, times.e2el_s),
    )
