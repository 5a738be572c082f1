"""Burst, listed rates, tiers and one equal rate on virtual time; bursts and traces on emulated engines."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from commands import EASY, Finished, invoke, kvbench, the_run

from kvbench.results.run import RunFolder

pytestmark = pytest.mark.timeout(180)

QUICK = (*EASY, "search.equal_rate=false")
LONG_STEPS = "deployment.engine_options.time_scale=6"
"""Where most of a prompt is in the cache little is left to compute: a busy machine's delays dwarf it."""


def sweep(results: Path, *words: str, sets: tuple[str, ...] = QUICK) -> tuple[Finished, RunFolder]:
    done = kvbench("sweep", "quickstart", "--output", str(results), *words, sets=sets)
    return done.succeeded(), the_run(results)


def simulated(results: Path, *words: str, sets: tuple[str, ...] = QUICK) -> tuple[Finished, RunFolder]:
    """The same rules on virtual time, in this process."""
    done = invoke("simulate", "quickstart", "--output", str(results), *words, sets=sets)
    return done.succeeded(), the_run(results)


def rows(run: RunFolder, name: str) -> list[dict[str, str]]:
    with (run.path / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_listed_rates_are_described_and_the_overloaded_one_ends_marked(tmp_path: Path) -> None:
    # One sequence at a time, of some 0.3 s: three a second are carried.
    slow = ("deployment.engine_options.max_num_seqs=1", "deployment.engine_options.time_scale=20")
    more = ("search.trial_s=4", "search.min_requests=2", "workload.request_timeout_s=5", "slo={}")
    words = ("--connector", "aggregated", "--rates", "0.5,20")
    done, run = simulated(tmp_path, *words, sets=(*EASY, *slow, *more))
    assert [(trial.request_rate, trial.verdict) for trial in run.other_trials] == [
        (0.5, "measured"),
        (20.0, "measured"),
    ]
    assert ["saturated" in trial.labels for trial in run.other_trials] == [False, True]
    assert (run.trials, run.cells) == ([], [])
    low, high = rows(run, "fixed_by_rate")
    assert (low["saturated"], high["saturated"]) == ("False", "True")
    assert low["completed"] == "2"
    assert float(high["request_throughput"]) < 10
    assert float(low["mean_ttft_ms"]) < float(high["mean_ttft_ms"])
    report = (run.path / "report.md").read_text()
    assert "## Listed rates, by rate" in report
    assert "saturated" in done.text
    assert "no cell was measured" not in done.text


def test_burst_stands_beside_sustained_and_never_in_its_column(tmp_path: Path) -> None:
    done, run = sweep(tmp_path, "--connector", "aggregated", "--method", "sustained,burst")
    (main,), (burst,) = run.cells, run.other_cells
    assert (main.method, burst.method) == ("sustained", "burst")
    assert {trial.method for trial in run.trials} == {"sustained"}
    assert {trial.method for trial in run.other_trials} == {"burst"}
    trial = run.other_trials[-1]
    assert trial.summary["planned"] == 100  # 5 × 20 requests
    offsets = run.requests(trial.trial_id).scheduled_s
    assert offsets.max() == pytest.approx(5.0)  # stretched as `vllm bench serve` does
    assert [criterion["kind"] for criterion in trial.summary["criteria"]][-2:] == ["mean", "mean"]
    (row,) = rows(run, "burst")
    held, fitted = float(row["sustained_request_rate"]), float(row["burst_request_rate"])
    assert (fitted, float(row["ratio"])) == (20, pytest.approx(fitted / held))
    assert len(rows(run, "summary")) == 1
    assert "(burst)" in done.text
    assert "Burst and sustained" in (run.path / "report.md").read_text()


def test_burst_alone_gives_no_sustained_rate(tmp_path: Path) -> None:
    done, run = simulated(tmp_path, "--connector", "aggregated", "--method", "burst")
    assert run.cells == []
    (burst,) = run.other_cells
    assert burst.answer["max_request_rate"] == 20
    assert "not measured" in done.text


def test_every_connector_is_measured_at_one_equal_rate_with_the_same_requests(tmp_path: Path) -> None:
    sets = (*EASY, "search.equal_rate=true")
    done, run = simulated(tmp_path, "--connector", "aggregated", "--connector", "tcp", sets=sets)
    equal = {trial.cell.connector: trial for trial in run.other_trials}
    assert set(equal) == {"aggregated", "tcp"}
    assert {trial.method for trial in equal.values()} == {"equal_rate"}
    assert equal["aggregated"].seed == equal["tcp"].seed
    one, other = (list(run.requests(trial.trial_id).scheduled_s) for trial in equal.values())
    assert one == pytest.approx(other, abs=1e-6)
    lowest = min(float(result.answer["max_request_rate"]) for result in run.cells if result.answer)
    assert {trial.request_rate for trial in equal.values()} == {lowest}
    assert len(rows(run, "equal_rate")) == 2
    assert "At one equal rate" in done.text


def test_tiers_are_answered_from_the_same_trials(tmp_path: Path) -> None:
    tiers = {
        "batch": {"limits": ["ttft_ms p90 <= 20000", "tpot_ms mean <= 5000"]},
        "fast": {"ttft_ms": 1, "attainment": 0.5},
    }
    done, run = simulated(
        tmp_path,
        "--connector",
        "aggregated",
        sets=(*QUICK, f"slo={json.dumps({'tiers': tiers})}", "search.min_rate=20"),
    )
    (main,), (second,) = run.cells, run.other_cells
    assert (main.tier, second.tier) == ("fast", "batch")
    assert (main.answer["max_request_rate"], second.answer["max_request_rate"]) == (None, 20)
    for trial in run.trials:
        assert set(trial.summary["tiers"]) == {"fast", "batch"}
    assert {row["tier"] for row in rows(run, "tiers")} == {"fast", "batch"}
    assert "fast: TTFT ≤ 1 ms for 50 % of requests · batch: TTFT P90 ≤ 20000 ms" in done.text


def test_listed_limits_take_the_place_of_the_scenarios(tmp_path: Path) -> None:
    limits = ("--slo", "ttft_ms p90 <= 20000", "--slo", "tpot mean <= 5000")
    bare = tuple(setting for setting in QUICK if not setting.startswith("slo."))
    done, run = simulated(tmp_path, "--connector", "aggregated", *limits, sets=bare)
    assert "TTFT P90 ≤ 20000 ms; TPOT mean ≤ 5000 ms" in done.text
    texts = [criterion["text"] for criterion in run.trials[-1].summary["criteria"]]
    assert texts == ["TTFT P90 ≤ 20000 ms", "TPOT mean ≤ 5000 ms"]
    assert 10 < run.cells[0].answer["max_request_rate"] <= 20


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """40 requests of three conversations in ten seconds; all but the first of each find their beginning."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 250 * n, "input_length": 600, "output_length": 3 + n % 3, "hash_ids": [n % 3, 10 + n]}
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_trace_is_replayed_with_its_reuse(tmp_path: Path, trace: Path) -> None:
    words = ("--trace", str(trace), "--connector", "aggregated", "--connector", "tcp", "--time-scale", "0.4")
    done = kvbench("bench", "quickstart", *words, "--output", str(tmp_path / "r"), sets=(*EASY, LONG_STEPS))
    assert done.status == 0, done.text
    run = the_run(tmp_path / "r")
    assert {trial.method for trial in run.trials} == {"trace"}
    for trial in run.trials:
        assert trial.verdict == "met", trial.reason
        requests = run.requests(trial.trial_id)
        assert list(requests.scheduled_s) == pytest.approx([0.1 * n for n in range(40)], abs=1e-3)
        assert set(requests.requested_output_len) == {3, 4, 5}
        assert trial.engine["expected_hit_rate"] == pytest.approx(37 * 512 / (40 * 600))
        assert 0.5 < trial.engine["prefix_hit_rate_prefill"] <= trial.engine["expected_hit_rate"] + 1e-6
    assert (run.manifest["trace"]["requests"], len(run.manifest["trace"]["sha256"])) == (40, 64)
    assert len(rows(run, "trace")) == 2
    assert "prefix hits expected" in (run.path / "report.md").read_text()


def test_a_trace_is_searched_for_the_speed_that_holds(tmp_path: Path, trace: Path) -> None:
    sets = (*QUICK, LONG_STEPS, "search.min_rate=1", "search.max_rate=8", "search.start_rate=8")
    words = ("--trace", str(trace), "--connector", "aggregated")
    _, run = sweep(tmp_path / "r", *words, sets=sets)
    (result,) = run.cells
    assert result.method == "trace"
    assert 4 < result.answer["max_request_rate"] <= 8
    last = rows(run, "trace")[-1]
    assert float(last["speed_up"]) == pytest.approx(float(last["request_rate"]) / 4)


@pytest.mark.parametrize(("words", "text"), [
    (("sweep", "--method", "burst,fixed"), "--method takes one method, or sustained,burst"),
    (("sweep", "--method", "brust"), "--method brust: must be 'sustained', 'burst', 'fixed' or 'trace'"),
    (("sweep", "--method", "fixed"), "method fixed needs search.rates"),
    (("sweep", "--method", "trace"), "method trace needs workload.trace"),
    (("sweep", "--rates", "1,x"), "must be a number, not 'x'"),
    (("sweep", "--rates", "1", "--method", "burst"), "--rates 1: are for method fixed"),
    (("sweep", "--trace", "/nowhere/t.jsonl"), "the trace /nowhere/t.jsonl cannot be read"),
    (("sweep", "--slo", "ttft p90 => 5"), "is not a limit"),
    (("bench",), "give a --rate"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_starts(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    done = invoke(words[0], "quickstart", "--output", str(tmp_path), *words[1:]).failed(2)
    assert text in " ".join(done.text.split())
    assert not list(tmp_path.iterdir())


def test_a_request_that_never_fits_is_told_before_anything_starts(tmp_path: Path, trace: Path) -> None:
    sets = ("deployment.engine_options.max_model_len=600",)
    done = invoke("bench", "quickstart", "--trace", str(trace), "--output", str(tmp_path / "r"), sets=sets)
    assert done.status == 2, done.text
    assert "40 of the trace's 40 requests exceed the engine's max_model_len of 600" in done.text
