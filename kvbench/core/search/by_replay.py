"""Where the next trial goes, and when a search is over, while replays explain all trials.

Few long trials a little below the answer: each adds requests to what is replayed, whatever its rate, and
shows whether the server does there what the replays say.
"""

from __future__ import annotations

from typing import Final

from kvbench.core.search.data import Probe, Purpose, SearchLimits
from kvbench.core.search.replay.replay import ReplayResult
from kvbench.core.search.trial_history import TrialHistory, reached_target

BELOW: Final = 0.3
BELOW_STEP: Final = 0.1
BELOW_MOST: Final = 0.6
"""In units of the precision: so far below the answer a trial goes, or every other one would be missed; so
much further for each that has not confirmed it; and at most."""
UP_MOST: Final = 3.0
"""The longest step up, as a factor of the highest rate tried."""
LEAST_S: Final = 20.0
LEAST_REQUESTS: Final = 400
LEAST_LIMITS: Final = 2.0
"""A trial lasts at least so many seconds, requests, and limits on TTFT."""
LONGER_S: Final = 150.0
LONGER_REQUESTS: Final = 1000
"""For the precision's sake alone a trial is not made longer, nor of more requests: what drifts shows between
trials."""
WATCHED_S: Final = 120.0
WATCHED_COARSE_S: Final = 30.0
COARSE: Final = 0.1
"""For so long a system is watched before its answer counts; less from that precision on. Of servers that were
slower for their first minute, replays of 60 s believed 14 of 14, replays of 120 s none of 8."""
NEAR: Final = 0.06
NEAR_REQUESTS: Final = 200
NEAR_MISSES: Final = 10
NEAR_MOST: Final = 2000
"""One trial within this share of the answer must have offered so many requests; and more, up to the last
number, until so many misses are allowed among them: nothing else shows what the slowest ones do."""
CONFIRMS: Final = 1.85
"""In units of the precision: the interval's half-width from which on a trial may confirm."""
TOO_FAR_AFTER: Final = 4
TOO_FAR: Final = 3.0
"""After so many trials a search ends whose precision takes so many times what its further trials can
bring."""


def next_probe(history: TrialHistory, replay: ReplayResult) -> Probe | None:
    """A trial a little below the answer, long enough for the precision; at the highest rate that a model says
    where they differ. None when the search is over."""
    limits = history.limits
    if too_far(history, replay):
        return None
    failed = sum(each.purpose == "confirm" and not reached_target(each) for each in history.tried)
    below = min(min(BELOW + BELOW_STEP * failed, BELOW_MOST) * limits.precision, 0.75 * NEAR)
    highest = max(each.rate for each in history.tried)
    rate = history.inside(min(replay.highest / (1 + below), highest * UP_MOST))
    unusable = [each for each, tally in history.bracket.tallies.items() if not history.usable(tally)]
    if unusable and rate >= min(unusable):
        rate = history.inside(min(unusable) / (1 + limits.precision))
        if sum(each.rate == rate for each in history.tried) >= 2:
            return None
    wanted = max(LEAST_REQUESTS, 1.2 * _near_requests(limits))
    seconds = max(LEAST_S, wanted / rate, LEAST_LIMITS * history.waiting.limit_s)
    seconds = max(seconds, min(replay.further_requests(limits.precision) / rate, _longest_s(rate)))
    if replay.estimate.width <= limits.precision:
        seconds = max(seconds, min(_watched_s(limits) - replay.seconds, LONGER_S / 2))
    purpose: Purpose = "confirm" if replay.estimate.width <= limits.precision * CONFIRMS else "bisect"
    return Probe(rate, purpose, True, seconds)


def suffices(history: TrialHistory, replay: ReplayResult) -> bool:
    """Whether the replays rest on enough: two trials, some minutes, and one long trial near the answer."""
    limits, median = history.limits, replay.estimate.median
    near = any(
        abs(each.rate / median - 1) <= NEAR and len(each.requests) >= _near_requests(limits)
        for each in history.tried
        if each.requests is not None
    )
    watched = len(history.tried) >= 2 and replay.seconds >= _watched_s(limits)
    return watched and near and replay.estimate.width <= limits.precision


def too_far(history: TrialHistory, replay: ReplayResult) -> bool:
    """Whether the precision would take several times what the trials left can bring."""
    each = _longest_s(replay.estimate.median) * replay.estimate.median
    further = replay.further_requests(history.limits.precision)
    return len(history.tried) >= TOO_FAR_AFTER and further > TOO_FAR * each * max(history.trials_left, 1)


def too_far_text(history: TrialHistory, replay: ReplayResult) -> str:
    """Why such a search ended: what the precision would take."""
    precision = history.limits.precision
    hours = replay.further_requests(precision) / replay.estimate.median / 3600
    return f"±{100 * precision:.2g} % would take about {hours:.2g} h more: its requests differ too much"


def _longest_s(rate: float) -> float:
    return max(LONGER_S, LONGER_REQUESTS / rate)


def _watched_s(limits: SearchLimits) -> float:
    return WATCHED_S if limits.precision < COARSE else WATCHED_COARSE_S


def _near_requests(limits: SearchLimits) -> float:
    """Requests of the trial near the answer."""
    allowed = max(1.0 - limits.attainment, 1e-6)
    return min(max(NEAR_REQUESTS, NEAR_MISSES / allowed), NEAR_MOST)
