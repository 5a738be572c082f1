"""What a search's time buys, in words: before anything runs, and once a cell's first trials are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvbench.core.plan.prospect import ENOUGH, LEAST_SLACK, SPENT, Asked, KnownCell, Prospect
from kvbench.core.scenario.goals import Search
from kvbench.core.slo import Slo

MOST_TRIALS: Final = 200
"""More are not worth advising."""
TAIL: Final = 0.01
"""The share allowed to miss from which on downwards a percentile is in the tail."""
TIGHT: Final = 0.1
"""Of the limit: with less left for waiting, a little more of it helps a lot."""
SLOW: Final = 1.0
"""Requests a second."""


def prospect_text(prospects: Sequence[Prospect]) -> str:
    """One line of all rates; "" without any."""
    if not prospects:
        return ""
    rates = ", ".join(f"{each.rate:g}" for each in prospects)
    even, uneven = (
        ", ".join(_percent(getattr(each, kind)) for each in prospects) for kind in ("even", "uneven")
    )
    seconds = ", ".join(f"{each.trial_s:.3g}" for each in prospects)
    return (
        f"at {rates} req/s there is time for ±{even} % if services are even, ±{uneven} % with heavy tails "
        f"({prospects[0].trials} trials of {seconds} s near the answer, if one request alone takes half "
        "of what the SLO allows)"
    )


def shortfall_text(search: Search, slo: Slo, prospect: Prospect, seen: KnownCell | None = None) -> str:
    """What cannot be had in the time, and what would help. ``seen``: once a cell's first trials are known."""
    where = f"near {prospect.rate:.3g} req/s {prospect.trials} trials of {prospect.trial_s:.3g} s"
    allow = f"allow ±{_percent(prospect.even)} % at best"
    if not prospect.even > search.precision:
        allow = f"allow ±{_percent(prospect.moderate)} % unless services are even"
    helps = "; ".join(_helps(search, slo, prospect, seen))
    return f"{where} {allow}, and ±{_percent(search.precision)} % is asked for: {helps}"


def _helps(search: Search, slo: Slo, prospect: Prospect, seen: KnownCell | None) -> list[str]:
    times = (prospect.moderate / (ENOUGH * search.precision)) ** 2
    wanted = SPENT + math.ceil(prospect.trials * times)
    found = []
    if search.max_trials < wanted <= MOST_TRIALS:
        found.append(f"search.max_trials={wanted}")
    if prospect.rate * prospect.trial_s >= 0.99 * search.max_requests and search.max_trial_s is None:
        found.append(f"search.max_requests={math.ceil(search.max_requests * times / 1000) * 1000:d}")
    asked = () if seen is None else tuple(Asked.of(slo, seen))
    limits = [(each.limits, each) for each in slo.all_criteria() if each.limits]
    for (own, _), each in zip(limits, asked, strict=False):
        limit_s = min((x.limit for x in own if x.metric != "tpot_ms"), default=0.0) / 1e3
        if limit_s and each.slack_s < max(TIGHT, LEAST_SLACK) * limit_s:
            found.append(
                f"a looser limit: {each.slack_s * 1e3:.3g} of {limit_s * 1e3:g} ms are left for waiting"
            )
    if any(each.kind == "share" and 1.0 - each.target <= TAIL + 1e-9 for _, each in limits):
        found.append("a percentile that is not in the tail")
    if prospect.rate < SLOW:
        found.append("more time: few requests come at such a rate")
    return found or [f"search.precision={math.ceil(prospect.moderate * 100) / 100:g}"]


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if share < 0.995 else "100 or more"
