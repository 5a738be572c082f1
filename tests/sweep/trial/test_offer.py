"""What a trial offers, when it has been offered for long enough, and whose verdict stands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvbench.core.gates.evidence import Evidence
from kvbench.core.load.workers import Progress, Settled
from kvbench.core.metrics.metrics import Window, summarise
from kvbench.core.records import Cell, RequestRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.ceiling import SaturationProbe
from kvbench.core.search.data import TrialFigures
from kvbench.core.search.judging import TrialWatch, ceiling_figures
from kvbench.core.search.live_config import Decision
from kvbench.core.search.load_plan import Offered, TrialPlan, planned
from kvbench.core.search.methods import joined_verdict
from kvbench.core.slo import Slo
from kvbench.planning.scenario_files import load_scenario

SLO = Slo(ttft_ms=250, tpot_ms=15, attainment=0.9)
CELL = Cell("aggregated", 256, 16)


@pytest.fixture
def scenario() -> Scenario:
    return load_scenario("quickstart")[0]


def settled(index: int, at_s: float, *, good: bool) -> Settled:
    return Settled(index, 0.05 if good else 0.4, 0.01, 0.2)


def offered_whole(watch: TrialWatch, offered: Offered, share: float) -> float:
    """So many requests are in time, at random; returns when the trial may end."""
    reported, t_s = 0, 0.0
    good = np.random.default_rng(5).random(offered.n) < share
    while t_s < 3 * offered.length_s:
        t_s += 0.25
        upto, sent = np.searchsorted(offered.offsets_s, [t_s - 0.2, t_s])
        rows = tuple(settled(i, t_s, good=bool(good[i])) for i in range(reported, int(upto)))
        reported = int(upto)
        if watch.progressed(Progress(t_s=t_s, sent=int(sent), done=reported, waiting_first=0, settled=rows)):
            return t_s
    raise AssertionError("the trial never ended")


@pytest.mark.parametrize("full_length", [False, True])
def test_an_undecided_trial_ends_when_its_time_is_up(scenario: Scenario, full_length: bool) -> None:
    """It is planned for longer than it takes: what comes after its time is up can change nothing."""
    scenario = scenario.model_copy(
        update={"search": scenario.search.model_copy(update={"max_trial_s": 120.0, "max_requests": 10**6})}
    )
    plan = TrialPlan(CELL, 1, 40.0, "bisect", latency_s=0.2, full_length=full_length)
    offered = planned(scenario, plan)
    watch = TrialWatch(scenario, plan, offered, {"": SLO})
    ended_s = offered_whole(watch, offered, 0.9)
    assert (watch.decision.verdict, ended_s) == ("undecided", watch.decision.at_s)
    assert ended_s < 0.8 * offered.length_s


def test_a_confirming_trial_says_yes_where_its_share_is_reached(scenario: Scenario) -> None:
    verdicts = {}
    for share in (0.92, 0.87):
        for purpose in ("bisect", "confirm"):
            plan = TrialPlan(CELL, 1, 40.0, purpose, latency_s=0.2)
            offered = planned(scenario, plan)
            watch = TrialWatch(scenario, plan, offered, {"": SLO})
            offered_whole(watch, offered, share)
            verdicts[share, purpose] = watch.decision.verdict
    assert (verdicts[0.92, "bisect"], verdicts[0.92, "confirm"]) == ("undecided", "met")
    assert "met" not in (verdicts[0.87, "bisect"], verdicts[0.87, "confirm"])


def record(i: int, *, late: bool = False) -> RequestRecord:
    at = i / 40
    first = at + (0.4 if late else 0.05)
    return RequestRecord(
        f"r{i}", at, 256, 3, sent_s=at, first_token_s=first, last_token_s=first + 0.02, output_len=3
    )


def evidence(late_every: int) -> Evidence:
    records = [
        replace(record(i, late=i % late_every == 0), itl_s=[0.01, 0.01], status=200) for i in range(400)
    ]
    summary = summarise(records, SLO, 40.0, 10.0, Window(1.0, 9.0))
    return Evidence(records=records, summary=summary, slo=SLO)


def decided(verdict: str, n: int = 100) -> Decision:
    return Decision(verdict, f"it was {verdict}", 9.0, (1.0, 9.0), TrialFigures(n=n))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, 100])
@pytest.mark.parametrize("late_every", [3, 1000])
def test_what_ended_after_the_load_does_not_overrule_undecided(n: int, late_every: int) -> None:
    """The whole trial's interval would prove either verdict; it has the drain in it."""
    found = joined_verdict("sustained", evidence(late_every), decided("undecided", n), searched=True)
    assert found[:2] == ("undecided", "it was undecided")


def test_the_trials_own_verdict_stands_but_a_yes_that_the_records_contradict_is_none() -> None:
    assert joined_verdict("sustained", evidence(1000), decided("met"), searched=True)[0] == "met"
    assert joined_verdict("sustained", evidence(1000), decided("missed"), searched=True)[0] == "missed"
    assert joined_verdict("sustained", evidence(3), decided("missed"), searched=True)[0] == "missed"
    assert joined_verdict("sustained", evidence(3), decided("met"), searched=True)[0] == "undecided"
    assert joined_verdict("sustained", evidence(3), None, searched=True)[0] == "missed"


def test_a_ceiling_is_told_in_one_way() -> None:
    """Twice what comes out was offered for ten seconds, or a load that the system carried easily."""
    saturation = SaturationProbe(np.arange(400) / 40.0, 0.0, 10.0, 0.5, 40.0)
    slow = [replace(record(i), last_token_s=i / 20 + 0.1) for i in range(400)]
    figures = ceiling_figures(slow, saturation, 10.0)
    assert figures["completion_rate"] == pytest.approx(20, rel=0.05)
    assert figures["completion_steady"] is True
    easy = [replace(record(i), last_token_s=i / 40 + 0.1) for i in range(400)]
    assert ceiling_figures(easy, saturation, 10.0)["completion_steady"] is False
    assert ceiling_figures([], saturation, 10.0) == {}


@pytest.mark.parametrize("service_s", [0.02, 0.1, 2.0])
def test_a_ceiling_probe_ends_before_it_buries_a_slow_server(scenario: Scenario, service_s: float) -> None:
    """One request at a time, and those that the client drops are worked on all the same."""
    plan = TrialPlan(CELL, 1, 320 / service_s, "ceiling", latency_s=service_s)
    offered = planned(scenario, plan)
    watch = TrialWatch(scenario, plan, offered, {"": SLO})
    behind = service_s * np.arange(offered.n)
    ends = np.maximum.accumulate(offered.offsets_s - behind) + behind + service_s
    reported, t_s, sent, done = 0, 0.0, 0, 0
    over = False
    while not over:
        t_s += 0.2507
        sent, done = (int(np.searchsorted(times, t_s)) for times in (offered.offsets_s, ends))
        rows = tuple(Settled(i, e2el_s=float(ends[i] - offered.offsets_s[i])) for i in range(reported, done))
        reported = done
        over = watch.progressed(Progress(t_s=t_s, sent=sent, done=done, settled=rows))
    assert watch.saturated_s == t_s
    assert watch.progressed(Progress(t_s=t_s + 10.0, sent=sent, done=sent))
    assert watch.saturated_s == t_s, "what ends in the grace is none of it"
    assert (sent - done) * service_s <= max(32.0, 24 * service_s), "and not 1,600 requests' work"


def test_connectors_get_the_same_arrivals_scaled_to_their_rates(scenario: Scenario) -> None:
    def offsets(connector: str, rate: float, number: int = 3, input_len: int = 256) -> np.ndarray:
        plan = TrialPlan(Cell(connector, input_len, 16), number, rate, "bisect")
        return planned(scenario, plan).offsets_s[:100]

    slow = offsets("nixl", 20.0)
    assert offsets("mooncake", 25.0) * 25 == pytest.approx(slow * 20)
    for other in (offsets("nixl", 20.0, number=4), offsets("nixl", 20.0, input_len=512)):
        assert not np.allclose(other, slow)


def test_a_repeated_load_keeps_its_own_seed() -> None:
    plan = TrialPlan(CELL, 4, 20.0, "bisect", paired_with=3)
    assert plan.seed(1) == replace(plan, number=3, paired_with=0).seed(1)
    assert plan.seed(1) != replace(plan, seed_key="equal-in256-out16").seed(1)
