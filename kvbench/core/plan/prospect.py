"""Precision that a search's trials allow, by the number of requests near the result.

While replays decide (``core.search.by_replay``), the relative half-width of a 90 % interval falls to a floor:
√(floor² + z² · variation / requests). Variations are the quartiles of 83 searches of random systems of
known rates; the floor is that of a replay with four trials near the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbench.core.records import TrialRecord
from kvbench.core.scenario.goals import Search
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.data import LONGEST, SECONDS, TRIAL_LATENCIES, WAITS, requests_s
from kvbench.core.slo import Criterion, Slo

FLOOR: Final = 0.017
"""Half-width that more requests do not reduce: models differ, and so do trials."""
EVEN: Final = 0.5
"""Variation (see above) of systems whose requests take about the same time."""
MODERATE: Final = 1.9
UNEVEN: Final = 9.5
"""Variation with heavy tails."""
Z90: Final = 1.645
SPENT: Final = 4
"""Trials that a search spends before it is near: a saturation probe and some steps from both sides."""
LEAST_SLACK: Final = 0.02
"""Smallest TTFT headroom that counts, as a fraction of the limit."""
ROUND_RATES: Final = (1.0, 10.0, 100.0)
IN_SIGHT: Final = 3.0
"""A mean above this multiple of its limit says nothing about the rate."""


@dataclass(frozen=True)
class KnownCell:
    """Known figures of a cell: a rate near the result (requests/s), the TTFT and the latency of one request
    alone in seconds."""

    rate: float
    first_s: float
    latency_s: float


def headroom_s(slo: Slo, alone: KnownCell) -> float:
    """Return the longest headroom of the criteria: the seconds that a limit leaves for waiting, 0 if only
    later tokens are limited."""
    return max((_headroom_s(criterion, alone) for criterion in slo.all_criteria()), default=0.0)


def _headroom_s(criterion: Criterion, alone: KnownCell) -> float:
    taken = {"ttft_ms": alone.first_s, "e2el_ms": alone.latency_s}
    headrooms = [
        max(limit.limit / 1e3 - taken[limit.metric], LEAST_SLACK * limit.limit / 1e3)
        for limit in criterion.limits
        if limit.metric in taken
    ]
    return min(headrooms, default=0.0)


def half_width(requests: float, variation: float) -> float:
    """Return the relative half-width of the 90 % interval of the highest rate after ``requests`` near it."""
    return math.hypot(FLOOR, Z90 * math.sqrt(variation / requests))


def trial_s(search: Search, rate: float, latency_s: float, headroom_s: float) -> float:
    """Return the seconds of load that a trial near the result offers."""
    usual_s = max(TRIAL_LATENCIES * latency_s, requests_s(rate))
    wanted_s = max(usual_s, min(max(WAITS * headroom_s, SECONDS), LONGEST * usual_s))
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
    search = scenario.search
    if not any(criterion.limits for criterion in slo.all_criteria()):
        return None
    long_s = trial_s(search, seen.rate, seen.latency_s, headroom_s(slo, seen))
    trials = max(1, search.max_trials - SPENT)
    if search.budget_s is not None:
        share_s = search.budget_s / (len(scenario.connectors) * len(scenario.workload.input_len))
        trials = max(1, min(trials, round(share_s / long_s)))
        long_s = min(long_s, share_s / trials)
    widths = (half_width(seen.rate * trials * long_s, variation) for variation in (EVEN, MODERATE, UNEVEN))
    return Prospect(seen.rate, trials, long_s, *widths)


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
        if all(_in_sight(criterion) for criterion in summary.get("criteria") or ()):
            return KnownCell(record.request_rate, min(first_s), min(latency_s))
    return None


def prospects(scenario: Scenario) -> tuple[Prospect, ...]:
    """Return the precision to expect, assuming that one request needs half of the SLO."""
    search, slo = scenario.search, scenario.slo.main()
    if search.method not in ("sustained", "trace") or not scenario.slo.given:
        return ()
    first_s = (slo.tightest("ttft_ms") or 0.0) / 2e3
    latency_s = max(slo.e2el_ms(scenario.workload.output_len) / 2e3, first_s)
    rates = [rate for rate in ROUND_RATES if search.min_rate <= rate <= search.max_rate] or [search.max_rate]
    if search.start_rate is not None:
        rates = [search.start_rate]
    found = (prospect_of(scenario, slo, KnownCell(rate, first_s, latency_s)) for rate in rates)
    return tuple(prospect for prospect in found if prospect is not None)


def _in_sight(criterion: dict[str, Any]) -> bool:
    value, target = criterion.get("value"), criterion["target"]
    if value is None:
        return False
    return bool(value > 0 if criterion["kind"] == "share" else value <= IN_SIGHT * target)


MOST_TRIALS: Final = 200
"""Largest number of trials that is advised."""
SLOW: Final = 1.0
"""Requests per second below which more time is advised."""


def prospect_text(prospects: Sequence[Prospect]) -> str:
    """Return one line for all rates; "" without any."""
    if not prospects:
        return ""
    rates = ", ".join(f"{prospect.rate:g}" for prospect in prospects)
    even, uneven = (
        ", ".join(_percent(getattr(prospect, kind)) for prospect in prospects) for kind in ("even", "uneven")
    )
    seconds = ", ".join(f"{prospect.trial_s:.3g}" for prospect in prospects)
    return (
        f"at {rates} req/s the time allows ±{even} % if services are even, ±{uneven} % with heavy tails "
        f"({prospects[0].trials} trials of {seconds} s near the result, if one request alone takes half "
        "of what the SLO allows)"
    )


def shortfall_text(search: Search, prospect: Prospect) -> str:
    """Return which precision the time does not allow, and what would help."""
    helps = "; ".join(_helps(search, prospect))
    return (
        f"near {prospect.rate:.3g} req/s {prospect.trials} trials of {prospect.trial_s:.3g} s allow "
        f"±{_percent(prospect.even)} %, and ±{_percent(search.precision)} % is requested: {helps}"
    )


def _helps(search: Search, prospect: Prospect) -> list[str]:
    least = round(1.1 * FLOOR, 3)
    if search.precision < least:
        return [f"search.precision={least:g}"]
    wanted = Z90**2 * EVEN / (search.precision**2 - FLOOR**2)
    times = wanted / (prospect.rate * prospect.trials * prospect.trial_s)
    trials = SPENT + math.ceil(prospect.trials * times)
    found = []
    if search.budget_s is not None:
        found.append(f"search.budget_s={math.ceil(search.budget_s * times)}")
    elif search.max_trials < trials <= MOST_TRIALS:
        found.append(f"search.max_trials={trials}")
    if prospect.rate * prospect.trial_s >= 0.99 * search.max_requests and search.max_trial_s is None:
        found.append(f"search.max_requests={math.ceil(search.max_requests * times / 1000) * 1000:d}")
    if prospect.rate < SLOW:
        found.append("more time: few requests come at such a rate")
    return found or [f"search.precision={math.ceil(prospect.even * 100) / 100:g}"]


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if share < 0.995 else "100 or more"
