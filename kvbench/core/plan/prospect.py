"""Precision that a search's trials allow, by its time, SLO, rate and the latency of one request alone.

Near capacity the waiting time is that of a reflected Brownian motion (``core.search.posterior.queue_model``).
k² is the sum of the squared coefficients of variation of arrivals and services: 1 for even services at
Poisson arrivals, 2 for exponential ones, more with heavy tails. *Headroom* (``slack``) is the time that a
limit leaves for waiting.

1. The share beyond the limit is about load · exp(−depth · (1 − load)).
2. At the highest rate it changes by 1 + s per cent for each per cent of the rate, s = 2 · slack · rate / k²,
   and depth = s − ln(share allowed).
3. The queue forgets its state after ``memory`` slacks. Independent moments M = seconds / (slack · memory), at
   most the number of requests (a clump of correlated requests counts as one).
4. A share p is known with the relative error √((1 − p) / (p · M)), a mean with √(1 / M).
5. That error divided by the steepness is the error of the rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbench.core.records import TrialRecord
from kvbench.core.scenario.goals import Search
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.data import LONGEST, MEMORY, SECONDS, TRIAL_LATENCIES, WAITS, requests_s
from kvbench.core.slo import Criterion, Slo

EVEN: Final = 1.5
"""k² (see above) of a system whose requests take about the same time."""
MODERATE: Final = 2.5
UNEVEN: Final = 8.0
"""k² with heavy tails."""
KNOWN: Final = 0.8
"""Share of the arrival variance that is explained, since arrivals are known (``queue_model``)."""
LEFT: Final = 0.15
"""Lower bound on the residual share of the variance."""
Z90: Final = 1.645
SPENT: Final = 4
"""Trials that a search spends before it is near: a saturation probe and some steps from both sides."""
LEAST_SLACK: Final = 0.02
"""Smallest TTFT headroom that counts, as a fraction of the limit."""
ENOUGH: Final = 0.6
"""Fraction of the requested precision that the trials must allow: a search does not know its system's
variation, and trials differ among themselves."""
ROUND_RATES: Final = (1.0, 10.0, 100.0)
IN_SIGHT: Final = 3.0
"""A mean above this multiple of its limit says nothing about the rate."""


@dataclass(frozen=True)
class KnownCell:
    """Known about a cell: a rate near the result (requests/s), the TTFT and the latency of one request alone
    in seconds, and the number of correlated requests that count as one."""

    rate: float
    first_s: float
    latency_s: float
    clump: float = 1.0


@dataclass(frozen=True)
class Asked:
    """One criterion: the share that may miss (None for a mean), and the seconds that its limit leaves for
    waiting (0 if only later tokens are limited)."""

    allowed: float | None
    slack_s: float

    @classmethod
    def of(cls, slo: Slo, alone: KnownCell) -> Iterator[Asked]:
        """Yield each criterion that has limits."""
        for each in slo.all_criteria():
            if each.limits:
                yield cls(1.0 - each.target if each.kind == "share" else None, _slack_s(each, alone))


def _slack_s(criterion: Criterion, alone: KnownCell) -> float:
    taken = {"ttft_ms": alone.first_s, "e2el_ms": alone.latency_s}
    slacks = [
        max(limit.limit / 1e3 - taken[limit.metric], LEAST_SLACK * limit.limit / 1e3)
        for limit in criterion.limits
        if limit.metric in taken
    ]
    return min(slacks, default=0.0)


def half_width(
    asked: Asked, seen: KnownCell, variation: float, seconds: float, burstiness: float = 1.0
) -> float:
    """Return the relative half-width of the 90 % interval of the highest rate after ``seconds`` of trials
    near it. ``variation``: k²; ``burstiness``: of the arrivals, 1 for Poisson. Without headroom no request
    waits for others, and the share of misses grows in proportion to the rate."""
    allowed = 1.0 if asked.allowed is None else -math.log(asked.allowed)
    steepness = 2.0 * asked.slack_s * seen.rate / variation
    moments = seen.rate * seconds / seen.clump
    if steepness:
        depth = steepness + allowed
        forgets_s = asked.slack_s * MEMORY / (depth * max((1.0 - steepness / depth) ** 2, 1e-6))
        left = max(1.0 - KNOWN / burstiness / variation, LEFT)
        moments = min(moments, seconds / forgets_s / left)
    chance = 1.0 if asked.allowed is None else (1.0 - asked.allowed) / asked.allowed
    return Z90 * math.sqrt(chance / moments) / (1.0 + steepness)


def trial_s(search: Search, rate: float, latency_s: float, slack_s: float) -> float:
    """Return the seconds of load that a trial near the result offers."""
    usual_s = max(TRIAL_LATENCIES * latency_s, requests_s(rate))
    wanted_s = max(usual_s, min(max(WAITS * slack_s, SECONDS), LONGEST * usual_s))
    if search.max_trial_s is not None:
        wanted_s = min(wanted_s, search.max_trial_s)
    return max(search.min_requests / rate, min(wanted_s, search.max_requests / rate))


@dataclass(frozen=True)
class Prospect:
    """Relative half-widths of the 90 % interval at one rate, for an even, a moderate and an uneven system, by
    the number and length of the trials near the result; of the worst criterion."""

    rate: float
    trials: int
    trial_s: float
    even: float
    moderate: float
    uneven: float


def prospect_of(scenario: Scenario, slo: Slo, seen: KnownCell) -> Prospect | None:
    """Return the precision that the trials allow at a known rate."""
    search, burstiness = scenario.search, scenario.workload.burstiness
    criteria = list(Asked.of(slo, seen))
    if not criteria:
        return None
    long_s = trial_s(search, seen.rate, seen.latency_s, max(each.slack_s for each in criteria))
    trials = max(1, search.max_trials - SPENT)
    if search.budget_s is not None:
        share_s = search.budget_s / (len(scenario.connectors) * len(scenario.workload.input_len))
        trials = max(1, min(trials, round(share_s / long_s)))
        long_s = min(long_s, share_s / trials)

    def worst(variation: float) -> float:
        return max(half_width(each, seen, variation, trials * long_s, burstiness) for each in criteria)

    return Prospect(seen.rate, trials, long_s, worst(EVEN), worst(MODERATE), worst(UNEVEN))


def seen_of(records: Sequence[TrialRecord]) -> KnownCell | None:
    """Return what the first trial not far above the result shows, with the fastest trial until then."""
    first_s: list[float] = []
    latency_s: list[float] = []
    for record in records:
        summary = record.summary
        first, whole = ((summary.get(name) or {}).get("p50") for name in ("ttft_ms", "e2el_ms"))
        if record.purpose == "ceiling" or record.verdict == "invalid" or not first or not whole:
            continue
        first_s.append(first / 1e3)
        latency_s.append(whole / 1e3)
        if all(_in_sight(each) for each in summary.get("criteria") or ()):
            counted = (summary.get("judged_met") or 0) + (summary.get("judged_missed") or 0)
            clump = counted / max(summary.get("effective_n") or counted, 1.0)
            return KnownCell(record.request_rate, min(first_s), min(latency_s), max(clump, 1.0))
    return None


def may_suffice(search: Search, prospect: Prospect) -> bool:
    """Return whether the trials allow the requested precision on a system of moderate variation. The system's
    own variation is known after some trials only (``RateSearch.foreseen``)."""
    return prospect.moderate <= ENOUGH * search.precision


def prospects(scenario: Scenario) -> tuple[Prospect, ...]:
    """Return the precision to expect, assuming that one request needs half of the SLO."""
    search, slo = scenario.search, scenario.slo.main()
    if search.method not in ("sustained", "trace") or not scenario.slo.given:
        return ()
    first_s = (slo.tightest("ttft_ms") or 0.0) / 2e3
    latency_s = max(slo.e2el_ms(scenario.workload.output_len) / 2e3, first_s)
    rates = [each for each in ROUND_RATES if search.min_rate <= each <= search.max_rate] or [search.max_rate]
    if search.start_rate is not None:
        rates = [search.start_rate]
    found = (prospect_of(scenario, slo, KnownCell(rate, first_s, latency_s)) for rate in rates)
    return tuple(each for each in found if each is not None)


def _in_sight(criterion: dict[str, Any]) -> bool:
    value, target = criterion.get("value"), criterion["target"]
    if value is None:
        return False
    return bool(value > 0 if criterion["kind"] == "share" else value <= IN_SIGHT * target)


MOST_TRIALS: Final = 200
"""Largest number of trials that is advised."""
TAIL: Final = 0.01
"""A percentile with at most this share of misses counts as the tail."""
TIGHT: Final = 0.1
"""Fraction of the limit: with less headroom, a slightly looser limit helps much."""
SLOW: Final = 1.0
"""Requests per second below which more time is advised."""


def prospect_text(prospects: Sequence[Prospect]) -> str:
    """Return one line for all rates; "" without any."""
    if not prospects:
        return ""
    rates = ", ".join(f"{each.rate:g}" for each in prospects)
    even, uneven = (
        ", ".join(_percent(getattr(each, kind)) for each in prospects) for kind in ("even", "uneven")
    )
    seconds = ", ".join(f"{each.trial_s:.3g}" for each in prospects)
    return (
        f"at {rates} req/s the time allows ±{even} % if services are even, ±{uneven} % with heavy tails "
        f"({prospects[0].trials} trials of {seconds} s near the result, if one request alone takes half "
        "of what the SLO allows)"
    )


def shortfall_text(search: Search, slo: Slo, prospect: Prospect, seen: KnownCell | None = None) -> str:
    """Return which precision the time does not allow, and what would help."""
    where = f"near {prospect.rate:.3g} req/s {prospect.trials} trials of {prospect.trial_s:.3g} s"
    allow = f"allow ±{_percent(prospect.even)} % at best"
    if not prospect.even > search.precision:
        allow = f"allow ±{_percent(prospect.moderate)} % unless services are even"
    helps = "; ".join(_helps(search, slo, prospect, seen))
    return f"{where} {allow}, and ±{_percent(search.precision)} % is requested: {helps}"


def _helps(search: Search, slo: Slo, prospect: Prospect, seen: KnownCell | None) -> list[str]:
    times = (prospect.moderate / (ENOUGH * search.precision)) ** 2
    wanted = SPENT + math.ceil(prospect.trials * times)
    found = []
    if search.budget_s is not None:
        found.append(f"search.budget_s={math.ceil(search.budget_s * times)}")
    elif search.max_trials < wanted <= MOST_TRIALS:
        found.append(f"search.max_trials={wanted}")
    if prospect.rate * prospect.trial_s >= 0.99 * search.max_requests and search.max_trial_s is None:
        found.append(f"search.max_requests={math.ceil(search.max_requests * times / 1000) * 1000:d}")
    asked = () if seen is None else tuple(Asked.of(slo, seen))
    limits = [(each.limits, each) for each in slo.all_criteria() if each.limits]
    for (own, _), each in zip(limits, asked, strict=False):
        limit_s = min((x.limit for x in own if x.metric != "tpot_ms"), default=0.0) / 1e3
        if limit_s and each.slack_s < max(TIGHT, LEAST_SLACK) * limit_s:
            found.append(
                f"a looser limit: {each.slack_s * 1e3:.3g} of {limit_s * 1e3:g} ms remain for waiting"
            )
    if any(each.kind == "share" and 1.0 - each.target <= TAIL + 1e-9 for _, each in limits):
        found.append("a percentile that is not in the tail")
    if prospect.rate < SLOW:
        found.append("more time: few requests come at such a rate")
    return found or [f"search.precision={math.ceil(prospect.moderate * 100) / 100:g}"]


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if share < 0.995 else "100 or more"
