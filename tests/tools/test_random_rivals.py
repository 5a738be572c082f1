"""Other tools' rules on drawn systems: closed loops that are what an open replay shows, and the bill."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tools.random_systems import truth
from tools.random_systems.family import SEEDS, draw
from tools.random_systems.judge import __main__ as command
from tools.random_systems.judge.rivals import (
    OPEN,
    RULES,
    DrawnBench,
    RivalFound,
    RivalJob,
    rival_table,
    rule_figures,
    rules_for,
)
from tools.random_systems.queues import can_close, closed
from tools.random_systems.simulate import Jobs, run
from tools.random_systems.system import Clock, Disturbances, Service, Slo, System, Workload

PLAIN = System(
    name="plain",
    kinds=("deterministic",),
    discipline="fifo",
    servers=1,
    prefill_s=0.1,
    service=Service(),
    token_s=0.01,
    slope_s=0.0,
    batch=None,
    disturbances=Disturbances(),
    aborts=True,
    workload=Workload(100, 11, 1.0),
    slo=Slo(300.0, None, 0.9),
)


@pytest.mark.parametrize("discipline", ["fifo", "sharing"])
@pytest.mark.parametrize(("servers", "users"), [(1, 1), (1, 7), (4, 3), (4, 20), (30, 9)])
def test_a_closed_loop_is_an_open_one_at_its_own_arrivals(discipline: str, servers: int, users: int) -> None:
    system = replace(PLAIN, discipline=discipline, servers=servers, service=Service("exponential"))
    work = system.service.draw(400, np.random.default_rng(1))
    arrived, first, last = closed(system, users, work)
    order = np.argsort(arrived, kind="stable")
    assert np.all(np.diff(arrived) >= 0)
    jobs = Jobs.identical(arrived[order], work[order], system.workload)
    again, again_last = run(system, Clock(system.disturbances), jobs)
    np.testing.assert_allclose(first[order], again, rtol=1e-9)
    np.testing.assert_allclose(last[order], again_last, rtol=1e-9)
    # At each moment as many are under way as there are users.
    moment = float(np.quantile(last, 0.5))
    assert ((arrived <= moment) & (last > moment)).sum() == min(users, 400)


def test_fewer_requests_than_users() -> None:
    arrived, first, _ = closed(replace(PLAIN, discipline="sharing"), 50, np.ones(3))
    assert len(arrived) == len(first) == 3


def test_which_systems_can_be_closed() -> None:
    assert rules_for(PLAIN) == RULES
    tenants = replace(PLAIN, disturbances=Disturbances(tenants=0.2))
    for other in (tenants, replace(PLAIN, slope_s=1e-3), draw(1, 5)):
        assert not can_close(other)
        assert rules_for(other) == tuple(OPEN)


def test_a_bench_pays_for_what_it_offers() -> None:
    bench = DrawnBench(PLAIN, 1)
    below, above = bench.seconds(4.0, 500.0), bench.seconds(8.0, 500.0)
    assert (bench.meets_slo(below), bench.meets_slo(above)) == (True, False)
    assert bench.margin(below) < 0 < bench.margin(above)
    assert bench.measured_s == pytest.approx(1000.0, rel=0.01)
    outcomes, rate = bench.users(2, requests=1000)
    assert len(outcomes.end_s) == 1000
    assert rate == pytest.approx(10.0, rel=0.01)  # one decodes for as long as the other one prefills
    _, rate = bench.users(20, 60.0)
    assert rate == pytest.approx(10.0, rel=0.05)
    before = bench.measured_s
    bench.wait(60.0)
    assert bench.measured_s == before + 60.0
    assert bench.trials == 4


def test_a_mean_is_kept_as_a_mean() -> None:
    bench = DrawnBench(replace(PLAIN, slo=Slo(None, None, 0.9, ("ttft_ms mean <= 200",))), 1)
    outcomes = bench.seconds(5.0, 2000.0)
    assert bench.margin(outcomes) == pytest.approx(float(outcomes.ttft_s.mean()) / 0.2 - 1)
    assert bench.meets_slo(outcomes) == (bench.margin(outcomes) <= 0)


def test_time_goes_on_between_points() -> None:
    slow = replace(PLAIN, disturbances=Disturbances(warmup_factor=2.0, noise=0.02))
    bench = DrawnBench(slow, 1)
    cold, _ = bench.users(1, requests=20)
    bench.wait(60.0)
    warm, _ = bench.users(1, requests=20)
    assert float(np.median(cold.ttft_s)) == pytest.approx(0.2, rel=0.2)
    assert float(np.median(warm.ttft_s)) == pytest.approx(0.1, rel=0.2)
    assert float(np.median(warm.ttft_s)) != pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_answers(rule: str) -> None:
    index = 15
    true = truth.known()[draw(SEEDS["develop"], index).fingerprint]
    row = RivalJob("develop", index, true, 1, 60.0, rule).row()
    assert row["answered"], row
    assert row["found"] is None or 0.2 < row["found"] / row["true"] < 5
    assert row["virtual_s"] > 0
    late = RivalJob("develop", index, true, 1, 1e-4, rule).row()
    assert not late["answered"]


def test_figures_are_of_what_can_be_found() -> None:
    row = RivalFound("x", "random", "r", True, 10.0, 10.2, 5, 100.0, 50.0, 1.0)
    rows = [
        row,
        replace(row, found=None),
        replace(row, found=20.0, converged=False),
        replace(row, true=0.0),
        replace(row, answered=False),
    ]
    figures = rule_figures("r", rows)
    counts = {"searches": 5, "answered": 4, "possible": 3, "converged": 1, "found": 2, "near": 1}
    assert {**figures, **counts} == figures
    assert figures["middle"] == pytest.approx(1.51)
    assert {"converged", "within 5 %", "seconds"} <= set(rival_table([figures], "").split("  "))
    assert rule_figures("r", [])["middle"] is None


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    words = ["--rivals", "--first-system", "15", "--count", "1", "--workers", "1"]
    assert command.main([*words, "--figures", str(written)]) == 0
    assert "develop-015 deterministic AIPerf smooth isotonic: " in capsys.readouterr().out
    found = json.loads(written.read_text())["kinds"]
    assert [kind["rule"] for kind in found] == list(RULES)
    assert not math.isnan(found[0]["virtual_s"])
