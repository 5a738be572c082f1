"""`kvbench simulate` as a user runs it: folders, marks, splits, refusals; how close it is to a real run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import Finished, invoke, kvbench, not_spoilt, the_run
from run_files import QUICKSTART

from kvbench.core.load.arrivals import planned_offsets, trial_seed
from kvbench.core.load.traces import TracedRequest
from kvbench.core.metrics.metrics import Slo, Summary, summarise
from kvbench.core.plan.engine_count import size_in
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.simulation.data import Link, Overheads, SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate
from kvbench.engines.emulated import EmulatedOptions
from kvbench.errors import InputError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import profile_of
from kvbench.results.run import RunFolder, load_run, requests_to_replay
from kvbench.sweep.calibration import LOOPBACK, NETWORK, fitted, surroundings
from kvbench.sweep.simulate import simulable
from kvbench.sweep.simulate_splits import Choice, Split, split_plan, wanted_splits
from kvbench.sweep.simulated_trial import (
    SimulatedDeployment,
    engine_config,
    prompt_hashes,
    system_of,
    timing_of,
)

pytestmark = pytest.mark.timeout(180)

SHORT = ("workload.input_len=[256]", "search.max_trials=6", "search.precision=0.2", "search.equal_rate=false")


def simulated(results: Path, *words: str, sets: tuple[str, ...] = SHORT) -> tuple[Finished, RunFolder]:
    done = invoke("simulate", "quickstart", "--output", str(results), *words, sets=sets)
    return done, the_run(results)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, RunFolder]:
    """The quickstart's aggregated server and NIXL pair at one length."""
    words = ("--connector", "aggregated", "--connector", "nixl")
    return simulated(tmp_path_factory.mktemp("results"), *words)


def test_a_simulated_sweep_is_an_ordinary_run_folder_that_is_marked(pair: tuple[Finished, RunFolder]) -> None:
    done, run = pair
    assert done.status == 0, done.text
    assert (run.manifest["status"], run.manifest["kind"]) == ("complete", "simulate")
    assert run.labels == ["simulated"]
    assert all("simulated" in trial.labels for trial in run.trials)
    assert {result.cell.connector: result.status for result in run.cells} == {
        "aggregated": "done",
        "nixl": "done",
    }
    assert "SIMULATED · quickstart" in done.out
    assert "EMULATED" not in done.out
    report = (run.path / "report.md").read_text()
    assert "> **Simulated**: nothing ran" in report
    assert "was simulated with 0.95 GB/s" in report
    assert list((run.path / "figures").glob("*.svg"))
    assert "SIMULATED" in invoke("report", str(run.path)).succeeded().out


def test_a_pair_stands_against_two_servers_and_the_limit_is_named(pair: tuple[Finished, RunFolder]) -> None:
    _, run = pair
    found = {result.cell.connector: result for result in run.cells}
    rates = {name: (result.answer or {})["max_request_rate"] for name, result in found.items()}
    assert 20 < rates["aggregated"] / 2 < 45
    assert 50 < rates["nixl"] < 90
    assert (found["aggregated"].limit or {})["limit"] == "tpot"
    assert (found["nixl"].limit or {})["limit"] == "prefill"
    summary = json.loads((run.path / "tables" / "summary.json").read_text())
    assert {row["connector"]: row["limit"] for row in summary["rows"]} == {
        "aggregated": "tpot",
        "nixl": "prefill",
    }


def test_an_answer_has_what_its_requests_say_by_themselves(pair: tuple[Finished, RunFolder]) -> None:
    """Replayed from the request files; without one of them nothing is replayed."""
    _, run = pair
    for result in run.cells:
        replay = (result.answer or {})["replay"]
        assert replay["lower"] <= replay["rate"] <= replay["upper"]
        assert replay["models"]
        trials = [trial for trial in run.trials_of(result.cell) if trial.purpose != "ceiling"]
        assert 0.5 * replay["seconds"] <= sum(trial.duration_s for trial in trials) <= 2 * replay["seconds"]
    assert requests_to_replay(run.path, replace(run.trials[0], trial_id="nowhere"), 1.0) is None


def test_arrivals_are_those_of_a_measured_trial(pair: tuple[Finished, RunFolder]) -> None:
    _, run = pair
    # A ceiling probe's are its own.
    measured = (candidate for candidate in run.trials if candidate.purpose != "ceiling")
    trial = next(trial for trial in measured if trial.cell.connector == "nixl")
    number = int(trial.trial_id.rsplit("-", 1)[1])
    assert trial.seed == trial_seed(1, trial.cell.lengths_key, number)
    records = run.request_records(trial.trial_id)
    offsets = planned_offsets(trial.request_rate, 5000, 1.0, trial.seed)[: len(records)]
    assert [record.scheduled_s for record in records] == pytest.approx(offsets.tolist())


def test_a_simulated_trial_has_what_a_measured_one_has(pair: tuple[Finished, RunFolder]) -> None:
    _, run = pair
    trial = next(trial for trial in run.trials if trial.cell.connector == "nixl" and trial.verdict == "met")
    parts = trial.engine["ttft_breakdown_ms"]
    assert None not in parts.values()
    assert sum(parts.values()) == pytest.approx(trial.engine["ttft_ms_mean_of_all"], rel=0.05)
    assert (trial.engine["kv_bytes_per_request"], trial.engine["transport"]) == (256 * 2048, "simulated")
    assert set(trial.engine["use"]) == set(trial.engine["roles"]) == {"prefill", "decode"}
    assert 0 < trial.engine["use"]["prefill"]["busy_share"] <= 1
    assert not [finding for finding in trial.findings if finding.level == "invalid"]
    assert TrialRecord.from_json(trial.to_json()) == trial


# -- how close it is -----------------------------------------------------------------------------------
# Five times slower than the quickstart, so that a busy machine is behind the model by little.
SLOW = (
    "workload.input_len=[512]", "deployment.base_port=0", "deployment.ready_timeout_s=60",
    "deployment.engine_options.time_scale=5", "search.min_requests=40", "search.trial_s=4",
    "slo.ttft_ms=2500", "slo.tpot_ms=200",
)  # fmt: skip


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A real emulated pair at a rate that it holds with ease."""
    results = tmp_path_factory.mktemp("measured")
    words = ("--rate", "5", "--connector", "tcp", "--output", str(results))
    kvbench("bench", "quickstart", *words, sets=SLOW).succeeded()
    return the_run(results)


def test_virtual_and_emulated_agree_where_nothing_is_overloaded(emulated: RunFolder, tmp_path: Path) -> None:
    """The same requests at the same times; medians, since a busy machine makes the real tail longer."""
    words = ("--connector", "tcp", "--rate", "5", "--like", str(emulated.path))
    done, run = simulated(tmp_path, *words, sets=SLOW)
    assert done.status == 0, done.text
    (real,), (virtual,) = emulated.trials, run.trials
    assert (real.seed, real.summary["planned"]) == (virtual.seed, virtual.summary["planned"])
    for figure, margin in (("ttft_ms", 0.6), ("tpot_ms", 0.3), ("e2el_ms", 0.4)):
        measured, predicted = real.summary[figure]["p50"], virtual.summary[figure]["p50"]
        assert predicted == pytest.approx(measured, rel=margin), figure
    busy = [trial.engine["roles"]["prefill"]["busy_s"] for trial in (real, virtual)]
    assert busy[1] == pytest.approx(busy[0], rel=0.2)
    steps = [trial.engine["roles"]["decode"]["steps"] for trial in (real, virtual)]
    assert steps[1] == pytest.approx(steps[0], rel=0.25)


def test_a_real_overload_is_named(tmp_path: Path) -> None:
    """512 tokens at 30 req/s are three times what one P computes that is five times slower than quick."""

    def overloaded(scale: int) -> TrialRecord:
        slower = (f"deployment.engine_options.time_scale={scale}", f"slo.ttft_ms={200 * scale}")
        folder = tmp_path / str(scale)
        words = ("--rate", str(150 / scale), "--connector", "tcp", "--output", str(folder))
        done = kvbench("bench", "quickstart", *words, sets=(*SLOW, *slower, "search.trial_s=3"))
        (trial,) = the_run(folder).trials
        assert trial.verdict in ("missed", "measured", "invalid"), done.text
        return trial

    trial, _ = not_spoilt(overloaded, (5, 10, 20))
    limit = trial.engine["limit"]
    assert limit["limit"] == "prefill", limit
    assert "waiting for prefill" in limit["evidence"]
    assert trial.engine["use"]["prefill"]["slots"] == 64


def test_a_fit_takes_what_it_is_given(emulated: RunFolder) -> None:
    found = fitted(emulated, "tcp")
    assert found is not None
    trial = emulated.trials[0]
    # One length only: a bandwidth that explains the transfers' mean time, and no latency.
    moved_ms = trial.engine["kv_bytes_per_request"] / (found.link.gb_per_s * 1e9) * 1e3
    assert moved_ms == pytest.approx(trial.engine["kv_transfer_ms_per_request"], rel=0.01)
    assert found.link.latency_ms == 0.0
    assert 0 < found.overheads.router_ms < 100
    assert emulated.run_id in found.source
    assert fitted(emulated, "nixl") is None


def test_a_fit_over_two_lengths_is_a_line(tmp_path: Path) -> None:
    def trial(length: int, kv_ms: float) -> TrialRecord:
        engine = {
            "kv_bytes_per_request": length * 2048,
            "kv_transfer_ms_per_request": kv_ms,
            "ttft_breakdown_ms": {"router": 2.0, "decode_queue": 5.0, "first_decode_step": 4.0},
            "hand_off_parts_ms": {"prefill_front_end": 1.0, "decode_front_end": 3.0, "router_turn": 0.5},
        }
        return TrialRecord("t", Cell("nixl", length, 16), 1.0, 1, "met", "", engine=engine)

    run = RunFolder(tmp_path, 1, {"kind": "sweep"}, "", {}, {}, [trial(1000, 3.0), trial(3000, 5.0)], [], [])
    found = fitted(run, "nixl")
    assert found.link.latency_ms == pytest.approx(2.0)
    assert found.link.gb_per_s == pytest.approx(2000 * 2048 / 2e-3 / 1e9, rel=1e-3)
    assert found.overheads == Overheads(2.0, 2.0, 0.5, 3.0)
    odd = RunFolder(tmp_path, 1, {}, "", {}, {}, [trial(1000, 5.0), trial(3000, 3.0)], [], [])
    refit = fitted(odd, "nixl")
    assert refit.link.latency_ms == 0.0
    assert refit.link.gb_per_s > 0


# -- what is simulated ---------------------------------------------------------------------------------
def scenario(name: str = "quickstart", *sets: str) -> Scenario:
    return resolve(CliOptions(scenario=name, overrides=sets))[0]


def test_the_scenario_wins_over_defaults() -> None:
    sets = (
        "simulate.kv_gb_per_s=3",
        "simulate.router_ms=7",
        "simulate.connectors.mooncake.kv_gb_per_s=5",
        "simulate.connectors.mooncake.kv_latency_ms=0",
    )
    chosen = scenario("quickstart", *sets)
    nixl, mooncake = (surroundings(chosen, name, name) for name in ("nixl", "mooncake"))
    assert nixl.link == Link(3.0, LOOPBACK["nixl"].link.latency_ms)
    assert mooncake.link == Link(5.0, 0.0)
    assert nixl.overheads.router_ms == mooncake.overheads.router_ms == 7.0
    assert nixl.overheads.arrival_ms == LOOPBACK["nixl"].overheads.arrival_ms
    assert "gb_per_s, router_ms from the scenario" in nixl.source
    assert surroundings(scenario(), "aggregated", "").link == LOOPBACK[""].link


def test_the_emulated_engines_limits_are_the_simulations() -> None:
    config = engine_config(scenario())
    assert (config.max_num_seqs, config.block_tokens, config.max_num_batched_tokens) == (64, 16, 2048)
    assert config.num_blocks == 96 * 65  # half as much again as 64 slots of 1040 tokens
    assert engine_config(scenario("quickstart", "simulate.num_blocks=100")).num_blocks == 100


def test_a_real_engine_is_simulated_where_its_step_times_are_known() -> None:
    h200 = scenario("qwen3-30b-a3b-h200-nixl")
    assert (timing_of(h200).name, engine_config(h200).max_num_seqs) == ("h200-tp8-qwen3-30b-a3b", 256)
    assert surroundings(h200, "nixl", "nixl").link == NETWORK.link
    with pytest.raises(
        InputError, match=r"no timing profile is known for tiny-qwen3.*there are: quick, h200"
    ):
        timing_of(scenario("vllm-cpu-tiny"))
    assert timing_of(scenario("vllm-cpu-tiny", "simulate.timing=quick")).name == "quick"


def test_what_cannot_be_simulated_is_refused() -> None:
    done = invoke("simulate", "vllm-cpu-tiny").failed(2)
    assert "no timing profile is known" in done.err
    assert "simulate.timing=NAME" in done.err
    with pytest.raises(InputError, match="behind a URL"):
        simulable(CliOptions(base_url="http://127.0.0.1:1"))
    done = invoke("simulate", "quickstart", sets=("simulate.connectors.nixl.kv_gbs=1",)).failed(2)
    assert "did you mean `kv_gb_per_s`?" in done.err


def test_a_simulated_run_is_nothing_to_learn_from(pair: tuple[Finished, RunFolder], tmp_path: Path) -> None:
    done = invoke("simulate", "quickstart", "--like", str(pair[1].path), "--output", str(tmp_path)).failed(2)
    assert "without measurements" in done.err
    assert not list(tmp_path.iterdir())


def test_shared_blocks_of_a_trace_hash_alike_as_far_as_they_are_shared() -> None:
    one = prompt_hashes(TracedRequest(0.0, 1200, 4, (7, 8, 9)), 16)
    other = prompt_hashes(TracedRequest(1.0, 1100, 4, (7, 8, 5)), 16)
    assert (len(one), one[:64]) == (75, other[:64])
    assert not set(one[64:]) & set(other[64:])
    fresh = [prompt_hashes(TracedRequest(at, 1024, 4), 16) for at in (0.0, 1.0)]
    assert not set(fresh[0]) & set(fresh[1])
    assert len(set(one)) == 75


def test_trials_have_enough_requests_for_the_strictest_of_several_limits(tmp_path: Path) -> None:
    slo = ("--slo", "ttft_ms p50 <= 100", "--slo", "ttft_ms p99.9 <= 400")
    words = ("quickstart", "--connector", "nixl", "--input-len", "256", "--output", str(tmp_path), *slo)
    invoke("simulate", *words, sets=("search.max_trial_s=null",)).succeeded()
    searched = [trial for trial in the_run(tmp_path).trials if trial.purpose != "ceiling"]
    assert searched
    assert all(trial.verdict != "invalid" for trial in searched)


# -- splits --------------------------------------------------------------------------------------------
def test_splits_are_read_and_refused() -> None:
    assert wanted_splits(Choice("1:1, 2:1,1:1")) == [Split(1, 1), Split(2, 1)]
    assert wanted_splits(Choice(gpus=4)) == [Split(1, 3), Split(2, 2), Split(3, 1)]
    assert wanted_splits(Choice("3:1", 4)) == [Split(3, 1), Split(1, 3), Split(2, 2)]
    for wrong in ("", "1", "1:0", "a:b", "1:1,,", "1:65"):
        with pytest.raises(InputError, match="--splits takes pairs"):
            wanted_splits(Choice(wrong))
    with pytest.raises(InputError, match="no connector with separate prefill and decode"):
        split_plan(scenario("quickstart", "connectors=[aggregated]"), [Split(1, 1)])


def test_the_best_split_is_found(tmp_path: Path) -> None:
    """At long inputs prefill is scarce: two of three instances must prefill."""
    sets = (
        *("workload.input_len=[1024]", "search.max_trials=4", "search.precision=0.2", "seed=3"),
        *("deployment.engine_options.time_scale=4", "slo.ttft_ms=1000", "slo.tpot_ms=60"),
    )
    words = ("--gpus", "3", "--connector", "nixl", "--connector", "aggregated", "--json")
    done = invoke("simulate", "xpyd", "--output", str(tmp_path), *words, sets=sets).succeeded()
    output = json.loads(done.out)
    splits = {row["split"]: row for row in output["splits"]}
    assert set(splits) == {"1P2D", "2P1D", "3 servers"}
    assert [name for name, split in splits.items() if split["best"]] == ["2P1D"]
    assert splits["2P1D"]["max_request_rate"] > 1.5 * splits["1P2D"]["max_request_rate"]
    assert splits["1P2D"]["limit"] == "prefill"
    for split in splits.values():
        assert split["gpus"] == 3
        assert split["goodput_per_gpu"] <= split["max_request_rate"] / 3
        assert np.isfinite(split["ttft_ms_p50"])
    run = the_run(tmp_path)
    text = (run.path / "splits.md").read_text()
    assert "2P1D ← best" in text
    assert "(simulated)" in text
    assert json.loads((run.path / "splits.json").read_text()) == output
    assert {result.cell.connector for result in load_run(run.path).cells} == {
        "nixl-1P2D",
        "nixl-2P1D",
        "aggregated-3-servers",
    }


# -- against the reference run -------------------------------------------------------------------------


def replayed(run: RunFolder, trial: TrialRecord, system: System) -> tuple[Summary, Summary]:
    """A measured trial and the same requests on virtual time, summarised alike."""
    slo = Slo(250, 15, 0.9)
    real = run.request_records(trial.trial_id)
    ended = any(record.error == "cancelled" for record in real)
    offsets = [record.scheduled_s for record in real]
    load = SimulatedLoad.alike(offsets, trial.cell.input_len, trial.cell.output_len, 10.0)
    outcome = simulate(system, load, (lambda tick: tick.t_s >= trial.duration_s) if ended else None)
    rate = trial.request_rate
    return (
        summarise(real, slo, rate, trial.duration_s),
        summarise(outcome.records, slo, rate, outcome.duration_s),
    )


@pytest.mark.parametrize(
    ("connector", "ttft_margin"), [("aggregated", 0.1), ("nixl", 0.15), ("mooncake", 0.25)]
)
def test_measured_trials_are_met_again_on_virtual_time(connector: str, ttft_margin: float) -> None:
    """Request by request the same load: medians over all trials of the quickstart's reference run."""
    run = load_run(QUICKSTART)
    whole = size_in(
        run.plan, run.environment, "aggregated", EmulatedOptions
    ).engines  # as many as were measured
    chosen = scenario("quickstart", f"deployment.aggregated={whole}")
    planned = next(deployment for deployment in plan_of(chosen).deployments if deployment.label == connector)
    profile = profile_of(chosen, planned.connector, planned.label)
    around = surroundings(chosen, connector, profile.transfer_backend, run)
    system = system_of(chosen, SimulatedDeployment(planned, profile, around))
    pairs = [
        replayed(run, trial, system)
        for trial in run.trials
        if trial.cell.connector == connector and trial.verdict in ("met", "missed")
    ]
    assert len(pairs) >= 3
    ttft = [
        (virtual.ttft_ms.p50 or 0) / (real.ttft_ms.p50 or 1) for real, virtual in pairs if real.ttft_ms.p50
    ]
    tpot = [
        (virtual.tpot_ms.p50 or 0) / (real.tpot_ms.p50 or 1) for real, virtual in pairs if real.tpot_ms.p50
    ]
    share = [abs((virtual.slo_attainment or 0) - (real.slo_attainment or 0)) for real, virtual in pairs]
    assert np.median(ttft) == pytest.approx(1.0, abs=ttft_margin)
    assert np.median(tpot) == pytest.approx(1.0, abs=0.1)
    assert np.median(share) <= 0.05


def test_a_search_that_replays_explain_ends_with_their_interval(tmp_path: Path) -> None:
    sets = (
        "connectors=[aggregated]",
        "workload.input_len=[256]",
        "search.precision=0.1",
        "search.max_trial_s=12",
    )
    _, run = simulated(tmp_path, sets=sets)
    answer = run.cells[0].answer or {}
    replay = answer["replay"]
    assert answer["status"] == "converged"
    assert replay["decides"]
    assert [answer["lower"], answer["upper"]] == pytest.approx([replay["lower"], replay["upper"]], rel=1e-3)
    assert replay["upper"] / replay["lower"] < 1.2
