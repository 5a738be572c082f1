"""Direct mode: the load generator asks P and D itself, and sees what the router would have seen."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import EASY, invoke, kvbench, the_run
from taping import taped

from kvbench import transfer
from kvbench.core.load.workers import LoadResult
from kvbench.core.records import RequestRecord
from kvbench.core.search.load_plan import LoadMode
from kvbench.deployment.deployment import RunningDeployment, with_ports
from kvbench.hosts.telemetry import Metrics
from kvbench.launchers.local import LocalLauncher
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import dispatch_spec, process_specs
from kvbench.planning.scenario_files import load_scenario
from kvbench.sweep.cell import Fixed
from kvbench.sweep.trial.loadgen_driver import LoadGenerator

pytestmark = pytest.mark.timeout(180)

PROBLEMS = {name: transfer.check(name) for name in ("tcp", "nixl", "mooncake")}
PAIRS = [
    pytest.param(name, marks=pytest.mark.skipif(problem is not None, reason=str(problem)))
    for name, problem in PROBLEMS.items()
]
CONCURRENT = {"mooncake"}
SLOW = "deployment.engine_options.time_scale=4"
"""Modelled steps so long that a busy machine does not put the engine behind its own model."""


@contextmanager
def deployed(
    folder: Path, connector: str, *overrides: str
) -> Iterator[tuple[RunningDeployment, LocalLauncher]]:
    """A pair of the quickstart's, up and ready."""
    scenario, _ = load_scenario("quickstart", [*EASY, f"connectors=[{connector}]", *overrides])
    (planned,) = (candidate for candidate in plan_of(scenario).deployments if not candidate.reference_only)
    launcher = LocalLauncher("test-direct", folder / "logs", folder / "specs")
    with RunningDeployment(scenario, with_ports(planned, "127.0.0.1"), launcher) as deployment:
        yield deployment, launcher


def offer(
    deployment: RunningDeployment,
    launcher: LocalLauncher,
    direct: dict[str, Any],
    n: int = 8,
    workers: int = 1,
) -> LoadResult:
    spec = {
        "base_url": deployment.endpoints.base_url, "direct": direct, "model": "tiny", "request_rate": 20.0,
        "num_requests": n, "seed": 3, "input_len": 64, "output_len": 4, "vocab_size": 8192,
        "timeout_s": 20.0, "records_path": str(launcher.log_dir / ".records.jsonl"),
        "slo": {"ttft_ms": 10_000, "tpot_ms": 5_000},
    }  # fmt: skip
    generator = LoadGenerator(launcher, spec, f"loadgen-{workers}", workers)
    return generator.run(lambda _: False, deployment.check_alive, 60.0)


def router_requests(pages: Mapping[str, Metrics | None]) -> float | None:
    page = pages["router"]
    return None if page is None else page.total("kvbench:router_requests_total")


def test_the_router_and_the_generator_get_the_same_dispatch() -> None:
    scenario, _ = load_scenario("quickstart", ["deployment.prefill=2"])
    for planned in plan_of(scenario).deployments:
        direct = dispatch_spec(scenario, planned)
        (router,) = [spec.spec for spec in process_specs(scenario, planned) if spec.name == "router"]
        assert set(direct) == {"connector", "version", "options", "prefill", "decode"}
        assert direct.items() <= router.items()
        lone = planned.connector == "aggregated"
        assert (len(direct["prefill"]), len(direct["decode"])) == ((0, 3) if lone else (2, 1))


def test_a_single_engine_has_no_router_and_no_dispatch() -> None:
    scenario, _ = load_scenario("quickstart", ["deployment.aggregated=1"])
    planned = plan_of(scenario).deployments[0]
    assert dispatch_spec(scenario, planned) is None
    assert [spec.name for spec in process_specs(scenario, planned)] == ["aggregated-0"]


def test_lone_engines_are_asked_in_turn_without_the_router(tmp_path: Path) -> None:
    with deployed(tmp_path, "aggregated", SLOW) as (deployment, launcher):
        direct = deployment.endpoints.direct
        assert direct["prefill"] == []
        assert [record.error for record in offer(deployment, launcher, direct).records] == [""] * 8
        pages = deployment.metrics()
        served = {
            name: page.total("vllm:request_success_total") for name, page in pages.items() if page is not None
        }
        assert (served["aggregated-0"], served["aggregated-1"]) == (4, 4)
        assert not router_requests(pages)


@pytest.mark.parametrize("connector", PAIRS)
def test_direct_answers_are_those_of_the_router(tmp_path: Path, connector: str) -> None:
    with deployed(tmp_path, connector) as (deployment, launcher):
        direct = deployment.endpoints.direct
        with taped(direct["decode"][0]["url"]) as (url, tape):
            result = offer(deployment, launcher, {**direct, "decode": [{**direct["decode"][0], "url": url}]})
        assert [record.error_detail for record in result.records] == [""] * 8
        assert len(tape) == 8
        for exchange in tape:
            assert exchange.text == deployment.complete(exchange.body["prompt"], 4)
        assert router_requests(deployment.metrics()) == 8  # those of complete()
    for record in result.records:
        assert record.router_received_s is None
        assert_in_order(record, connector in CONCURRENT)


def assert_in_order(record: RequestRecord, at_once: bool) -> None:
    """P is asked and answers, then D; where both are asked at once only each by itself is in order."""
    assert record.ok, record
    prefill, decode = (
        (record.prefill_sent_s, record.prefill_answered_s),
        (record.decode_sent_s, record.decode_first_byte_s),
    )
    assert None not in (*prefill, *decode)
    requested, answered, sent, first = (float(time or 0.0) for time in (*prefill, *decode))
    assert record.scheduled_s - 1e-3 <= requested <= answered
    assert sent <= first <= record.first_token_s + 1e-3
    if not at_once:
        assert answered <= sent


def test_two_workers_share_the_pairs_of_a_direct_load(tmp_path: Path) -> None:
    with deployed(tmp_path, "tcp", "deployment.prefill=2") as (deployment, launcher):
        direct = deployment.endpoints.direct
        assert direct is not None
        before = deployment.metrics()
        result = offer(deployment, launcher, dict(direct), n=16, workers=2)
        after = deployment.metrics()
        assert router_requests(after) == 0
    assert [record.error_detail for record in result.records] == [""] * 16
    for name in ("prefill-0", "prefill-1"):
        ended = [
            page.total("vllm:request_success_total") for pages in (before, after) if (page := pages[name])
        ]
        assert (ended[1] or 0.0) - (ended[0] or 0.0) == 8


def test_a_bench_tells_what_the_router_adds(tmp_path: Path) -> None:
    words = ("bench", "quickstart", "--rate", "20", "--connector", "tcp", "--connector", "aggregated")
    done = kvbench(
        *words, "--router-cost", "--output", str(tmp_path), sets=(*EASY, "search.min_requests=30", SLOW)
    )
    assert done.status == 0, done.text
    run = the_run(tmp_path)
    tcp = [trial for trial in run.trials if trial.cell.connector == "tcp"]
    assert [trial.engine["load_mode"] for trial in tcp] == ["router", "direct", "direct", "router"]
    lone = [trial for trial in run.trials if trial not in tcp]
    assert [trial.engine["load_mode"] for trial in lone] == ["router", "direct", "direct", "router"]
    assert tcp[0].seed == tcp[1].seed != tcp[2].seed == tcp[3].seed
    for trial in tcp:
        rows = run.requests(trial.trial_id)
        assert rows.router_received_s.isna().all() == (trial.engine["load_mode"] == "direct")
        parts = {
            name: value for name, value in trial.engine["ttft_breakdown_ms"].items() if value is not None
        }
        assert {"router", "prefill", "hand_off", "kv_transfer", "decode_queue"} <= set(parts)
        assert sum(parts.values()) == pytest.approx(trial.engine["ttft_ms_mean_of_all"], rel=0.02)
        assert rows.decode_first_byte_s.notna().all()
        limited = "router_limited" in {finding.gate for finding in trial.findings}
        assert not (limited and trial.engine["load_mode"] == "direct")  # it stands idle then
        # Caches were emptied: no prompt was found that its twin had left behind.
        assert trial.engine["roles"]["prefill"]["prefix_hits"] == 0
    one, other = (list(run.requests(trial.trial_id).scheduled_s) for trial in tcp[:2])
    assert one == other
    assert "router overhead" in done.text
    assert "## Router overhead" in (run.path / "report.md").read_text()


def test_direct_mode_with_several_workers_by_the_short_options(tmp_path: Path) -> None:
    words = ("bench", "quickstart", "--rate", "20", "--connector", "tcp", "--direct", "--workers", "2")
    done = kvbench(*words, "--output", str(tmp_path), sets=(*EASY, SLOW)).succeeded()
    run = the_run(tmp_path)
    (trial,) = run.trials
    assert (trial.engine["load_mode"], trial.engine["client"]["workers"]) == ("direct", 2)
    assert "2 processes" in done.text
    assert not list(run.path.glob(".records*"))


def test_direct_mode_of_an_unknown_pair_is_refused() -> None:
    done = invoke("sweep", "--base-url", "http://127.0.0.1:9", "--input-len", "8", "--output-len", "4",
                   "--ttft-ms", "100", "--direct")  # fmt: skip
    assert done.status == 2
    assert "one URL only" in done.err


def test_the_short_options_reach_the_scenario_and_the_plan() -> None:
    scenario, _ = resolve(CliOptions(workers=3, direct=True))
    assert (scenario.load.workers, scenario.load.mode) == (3, "direct")
    sets = ("load.workers=3", "load.mode=direct", "deployment.base_port=0")
    done = invoke("plan", "quickstart", "--json", sets=sets).succeeded()
    assert json.loads(done.out)["scenario"]["load"] == {
        "workers": 3,
        "mode": "direct",
        "endpoint": "completions",
    }


@pytest.mark.parametrize("mode", ["router", "direct"])
def test_the_turns_are_fair_and_end_on_the_scenario_s_own_way(mode: LoadMode) -> None:
    turns = Fixed(5.0, both_modes=True).turns(mode)
    ways = [way for way, _ in turns]
    assert ways == ways[::-1]  # a drift in time falls on both alike
    assert ways.count("router") == ways.count("direct") == 2
    assert ways[-1] == mode
    by_twin: dict[int, set[str]] = {}
    for number, (way, twin_of) in enumerate(turns, start=1):
        assert twin_of <= number
        by_twin.setdefault(twin_of, set()).add(way)
    assert list(by_twin.values()) == [{"router", "direct"}] * 2
