"""Which rates a cell tries: one, a list, by the burst rule, for several SLO tiers at once."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.core.records import Cell, TrialRecord, VerdictKind
from kvbench.core.search.burst import BurstSearch
from kvbench.core.search.data import Probe
from kvbench.core.search.search import RateSearch, SearchLimits
from kvbench.sweep.strategies import Burst, OneRate, RateList, Strategy, Tiered, common_rates, measured_of

CELL = Cell("tcp", 64, 4)


def record(ask: Probe, verdict: VerdictKind, **summary: Any) -> TrialRecord:
    return TrialRecord("t", CELL, ask.rate, 0, verdict, "", ask.purpose, summary=summary)


def limits(most: int = 30) -> SearchLimits:
    return SearchLimits(8, 0.5, 1000, 0.05, most)


def run(strategy: Strategy, capacities: dict[str, float]) -> list[Probe]:
    """Tries rates against systems that hold each tier up to a rate."""
    probes = []
    while (ask := strategy.ask()) is not None:
        probes.append(ask)
        verdicts: dict[str, VerdictKind] = {
            tier: "met" if ask.rate <= capacity else "missed" for tier, capacity in capacities.items()
        }
        tiers = {tier: {"verdict": verdict} for tier, verdict in verdicts.items() if tier}
        strategy.tell(record(ask, next(iter(verdicts.values())), tiers=tiers))
        assert len(probes) < 100
    return probes


def test_one_rate_and_listed_rates_are_asked_once() -> None:
    assert [ask.rate for ask in run(OneRate(5), {"": 1})] == [5]
    listed = RateList([1, 4, 2])
    assert [ask.rate for ask in run(listed, {"": 1})] == [1, 4, 2]
    assert listed.answers() == {}


def test_burst_is_bisected() -> None:
    burst = Burst(BurstSearch(8, 0.5, 1000, 0.05, 30))
    assert {ask.purpose for ask in run(burst, {"": 33})} == {"burst"}
    assert 31 < burst.answers()[""]["max_request_rate"] <= 33


def test_tiers_share_their_trials() -> None:
    alone = sum(len(run(Tiered({"": RateSearch(limits())}), {"": rate})) for rate in (20, 33))
    both = Tiered({"fast": RateSearch(limits()), "slow": RateSearch(limits())})
    probes = run(both, {"fast": 20, "slow": 33})
    assert [ask.tier for ask in probes] == sorted(ask.tier for ask in probes)  # the strictest first
    assert len(probes) < alone
    answers = both.answers()
    assert answers["fast"]["max_request_rate"] == pytest.approx(20, rel=0.06)
    assert answers["slow"]["max_request_rate"] == pytest.approx(33, rel=0.06)


def test_what_a_cut_trial_did_not_decide_is_not_told_to_other_tiers() -> None:
    both = Tiered({"fast": RateSearch(limits()), "slow": RateSearch(limits())})
    ask = both.ask()
    assert ask is not None
    both.tell(record(ask, "missed", tiers={"fast": {"verdict": "missed"}, "slow": {"verdict": "undecided"}}))
    assert (both.answers()["fast"]["trials"], both.answers()["slow"]["trials"]) == (1, 0)


def test_what_was_measured_goes_to_the_search() -> None:
    live = {"measured": {"attainment": 0.97, "n": 100, "score": 0.2, "unknown": 1}}
    ask = Probe(5, "bisect")
    measured = measured_of(record(ask, "met", live=live), "")
    assert (measured.attainment, measured.n, measured.score) == (0.97, 100, 0.2)
    tiers = {"slow": {"verdict": "met", "live": {"measured": {"n": 7}}}}
    measured = measured_of(record(ask, "met", tiers=tiers), "slow")
    assert measured.n == 7
    assert measured_of(record(ask, "met"), "") is None
    ceiling = measured_of(record(Probe(400, "ceiling"), "measured", completion_rate=42.0), "")
    assert ceiling.completion_rate == 42.0
    assert ceiling.grows  # not said to be steady
    nothing = measured_of(record(Probe(400, "ceiling"), "invalid"), "")
    assert nothing.completion_rate is None


@pytest.mark.parametrize("verdict", ["measured", "invalid"])
def test_what_a_refused_saturation_passed_on_is_no_ceiling(verdict: VerdictKind) -> None:
    """The router was late: what came out then bounds nothing, though the search may begin there."""
    search = RateSearch(limits(), ceiling=True)
    one = Tiered({"": search})
    ask = one.ask()
    assert ask is not None
    one.tell(record(ask, verdict, completion_rate=39.3, completion_steady=True))
    assert one.ask() == Probe(35.37, "start", full_length=True)
    root = search.estimate()
    assert (root is not None and root.upper < 50) == (verdict == "measured")


def test_the_equal_rate_is_the_lowest_where_two_found_one() -> None:
    found = {Cell("a", 64, 4): 20.0, Cell("b", 64, 4): 30.0, Cell("a", 128, 4): 9.0}
    assert common_rates(found) == {(64, 4): 20.0}
