"""The next trial, and the end of a search, while replays explain all trials.

A few long trials slightly below the answer: each adds requests to the replay, and shows whether the server
behaves there as the replay predicts.
"""

from __future__ import annotations

import math
from typing import Final

from kvbench.core.search.data import Probe, Purpose, SearchLimits
from kvbench.core.search.replay.replay import ReplayResult
from kvbench.core.search.trial_history import SHORTEST_S, TrialHistory, reached_target
from kvbench.core.units import estimate_text

BELOW: Final = 0.3
"""Distance of a trial below the answer, as a share of the precision: half of the trials at it miss."""
BELOW_STEP: Final = 0.1
"""Further distance for each trial that did not confirm the answer, as a share of the precision."""
BELOW_MOST: Final = 0.6
"""Largest distance, as a share of the precision; also until a trial is met, since an answer needs one. Once
trials near the answer suffice and none was met, the next one is the whole precision below."""
ABOVE: Final = 1.15
"""A trial above the answer, as a multiple: it can contradict the replay, and shows what limits the system."""
UP_MOST: Final = 3.0
"""Longest step up, as a multiple of the highest rate tried."""
LEAST_S: Final = 20.0
"""Minimum length of a trial, in seconds."""
LEAST_LIMITS: Final = 2.0
"""Minimum length of a trial, as a multiple of the TTFT limit."""
LONGER_S: Final = 150.0
LONGER_REQUESTS: Final = 1000
"""Length to which the precision alone extends a trial, the longer of the two: drift shows between trials."""
WATCHED_S: Final = 120.0
"""Time to observe a system before its answer counts, in seconds. Of servers that were slower for their first
minute, replays of 60 s accepted 14 of 14, replays of 120 s none of 8."""
WATCHED_COARSE_S: Final = 30.0
"""The same for a precision of ``COARSE`` or more."""
COARSE: Final = 0.1
"""Precision from which on trials are also half as long: two of them observe the system for long enough, since
each one that may confirm the answer lasts as long as there is still to observe."""
UNSEEN: Final = 0.1
"""Largest share of a kind of request that no trial has shown, as a multiple of the precision. On two random
systems one request in 100 took 22 times as long as the others. Few or none of 312 and 507 requests were of
that kind, and the answers were 43 and 25 % too high."""
RULE_OF_THREE: Final = 3.0
"""A kind that is absent from n requests has a share of up to 3 / n (95 %; Hanley and Lippman-Hand, 1983)."""
NEAR: Final = 0.06
"""Relative distance from the answer within which one trial must be long."""
NEAR_REQUESTS: Final = 200
"""Minimum number of requests of that trial."""
NEAR_MISSES: Final = 5
NEAR_MOST: Final = 2000
"""It has as many requests as the SLO allows the first number of misses, up to the second number of requests:
nothing else shows the slowest ones."""
CONFIRMS: Final = 1.85
"""Half-width of the interval up to which a trial may confirm the answer, as a multiple of the precision."""
TOO_FAR_AFTER: Final = 4
TOO_FAR: Final = 3.0
"""A search ends after the first number of trials if the precision needs more than the second multiple of the
requests that the remaining trials can add."""
TOO_LONG_AFTER: Final = 2
TOO_LONG: Final = 3.0
"""The same for the seconds that are left of a budget, once a trial near the answer makes a forecast possible:
of 13 forecasts for searches that converged later, all were right within a factor of 2.3."""
FORESEEN: Final = (0.8, 1.1)
"""Rates of that trial, as multiples of the answer: others don't show how much its latencies vary there."""
NO_GAIN: Final = 1.1
"""Half-width of the interval, as a multiple of the finest one, from which further trials gain nothing."""


def next_probe(history: TrialHistory, replay: ReplayResult) -> Probe | None:
    """Return a trial slightly below the answer, long enough for the precision; where models differ, below the
    highest one's answer. A search that cannot reach the precision ends (None) once a trial was met, since an
    answer needs one."""
    limits = history.limits
    some_met = any(trial.verdict == "met" for trial in history.tried)
    unreachable = too_far(history, replay)
    if unreachable and some_met:
        return None
    failed = sum(trial.purpose == "confirm" and not reached_target(trial) for trial in history.tried)
    below = min(BELOW + BELOW_STEP * failed, BELOW_MOST) if some_met else BELOW_MOST
    below = min(below * limits.precision, 0.75 * NEAR)
    if not some_met and _tried_near(history, replay):
        below = limits.precision
    highest = max(trial.rate for trial in history.tried)
    target = replay.estimate.lower if unreachable else replay.highest / (1 + below)
    rate = history.inside(min(target, highest * UP_MOST))
    unusable = min(
        (tried_rate for tried_rate, tally in history.bracket.tallies.items() if not history.usable(tally)),
        default=math.inf,
    )
    if rate >= unusable:
        rate = history.inside(unusable / (1 + limits.precision))
        if sum(trial.rate == rate for trial in history.tried) >= 2:
            return None
    above = history.inside(min(ABOVE * replay.estimate.median, highest * UP_MOST))
    if replay.estimate.width <= limits.precision and not _tried_above(history, replay) and above < unusable:
        return Probe(above, "bisect", True, LEAST_S)
    seconds = max(
        _shortest_s(history, rate), min(replay.further_requests(limits.precision) / rate, _longest_s(rate))
    )
    purpose: Purpose = "confirm" if replay.estimate.width <= limits.precision * CONFIRMS else "bisect"
    if replay.estimate.width <= limits.precision * (CONFIRMS if limits.precision >= COARSE else 1.0):
        seconds = max(seconds, min(_unobserved_s(history, replay, rate), _longest_s(rate) / 2))
    return Probe(rate, purpose, True, seconds)


def suffices(history: TrialHistory, replay: ReplayResult) -> bool:
    """Return whether trials, time and requests observed, and a long trial near the answer suffice."""
    rate = replay.estimate.median
    observed = len(history.tried) - replay.left_out >= 2 and _unobserved_s(history, replay, rate) <= 0
    precise = replay.estimate.width <= history.limits.precision
    return observed and precise and _tried_near(history, replay) and _tried_above(history, replay)


def too_far(history: TrialHistory, replay: ReplayResult) -> bool:
    """Return whether the precision takes several times what the remaining trials or seconds bring. Without a
    forecast the search continues. It also continues to a precision that no replay has, if its time is limited
    and trials still make the interval narrower."""
    limits, trials = history.limits, len(history.tried)
    further = replay.further_requests(limits.precision)
    if limits.precision <= replay.finest:
        spent = limits.seconds_left == math.inf or replay.estimate.width <= replay.finest * NO_GAIN
        return trials >= TOO_FAR_AFTER and spent
    if further == math.inf or not _foreseen(history, replay):
        return False
    per_trial = _longest_s(replay.estimate.median) * replay.estimate.median
    too_long = further > TOO_LONG * max(limits.seconds_left, SHORTEST_S) * replay.estimate.median
    too_many = further > TOO_FAR * per_trial * max(history.trials_left, 1)
    return (trials >= TOO_LONG_AFTER and too_long) or (trials >= TOO_FAR_AFTER and too_many)


def needed_text(history: TrialHistory, replay: ReplayResult, why: str = "") -> str:
    """Describe what the precision needs. ``why``: reason, if that takes long."""
    precision = history.limits.precision
    wanted = f"±{100 * precision:.2g} %"
    further = replay.further_requests(precision)
    if precision <= replay.finest:
        return f"{wanted} is finer than any replay of requests (±{100 * replay.finest:.2g} %)"
    if further == math.inf:
        return f"what {wanted} needs is not known, since models of the server differ"
    if further and not _foreseen(history, replay):
        return f"what {wanted} needs is not known before a trial near {replay.estimate.median:.3g} req/s"
    rate = replay.estimate.median
    seconds = max(further / rate, _unobserved_s(history, replay, rate), _shortest_s(history, rate))
    seconds += 0.0 if _tried_above(history, replay) else LEAST_S
    return f"{wanted} needs {estimate_text(seconds, seconds)} more{why}"


def _foreseen(history: TrialHistory, replay: ReplayResult) -> bool:
    """Return whether a trial near the answer makes a forecast possible."""
    low, high = (factor * replay.estimate.median for factor in FORESEEN)
    return any(low < trial.rate < high for trial in history.tried)


def _tried_near(history: TrialHistory, replay: ReplayResult) -> bool:
    """Return whether a trial near the answer was long enough to contradict it."""
    return any(
        abs(trial.rate / replay.estimate.median - 1) <= NEAR
        and len(trial.requests) >= _near_requests(history.limits)
        for trial in history.tried
        if trial.requests is not None
    )


def _tried_above(history: TrialHistory, replay: ReplayResult) -> bool:
    """Return whether a trial above the answer could contradict it, and shows what limits the system."""
    highest = max(trial.rate for trial in history.tried)
    return highest >= min(replay.estimate.upper, history.limits.max_rate)


def _shortest_s(history: TrialHistory, rate: float) -> float:
    least_s = LEAST_S / 2 if history.limits.precision >= COARSE else LEAST_S
    requests_s = 1.2 * _near_requests(history.limits) / rate
    return max(least_s, requests_s, LEAST_LIMITS * history.waiting.limit_s)


def _longest_s(rate: float) -> float:
    return max(LONGER_S, LONGER_REQUESTS / rate)


def _unobserved_s(history: TrialHistory, replay: ReplayResult, rate: float) -> float:
    """Return how much longer the system must be observed at a rate before an answer counts, in seconds."""
    requests = RULE_OF_THREE / (UNSEEN * history.limits.precision)
    return max(watched_s(history.limits) - replay.seconds, (requests - replay.requests) / rate)


def watched_s(limits: SearchLimits) -> float:
    """Return how long a system must be observed before its answer counts, in seconds."""
    return WATCHED_S if limits.precision < COARSE else WATCHED_COARSE_S


def _near_requests(limits: SearchLimits) -> float:
    """Return the number of requests that the trial near the answer needs."""
    allowed = max(1.0 - limits.attainment, 1e-6)
    return min(max(NEAR_REQUESTS, NEAR_MISSES / allowed), NEAR_MOST)
