"""`kvbench calibrate --from` as a user runs it, on what an engine of known coefficients served."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import invoke, kvbench, not_spoilt, the_run

from kvbench.core.calibration.fit import ServedLoad, Times
from kvbench.core.calibration.profile_file import ProfileFile, timing_of_values
from kvbench.core.records import TrialRecord
from kvbench.core.simulation.data import SimulatedLoad, System
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.engines.parts.timing_files import read_profile
from kvbench.errors import InputError
from kvbench.importers.llmservingsim import read, recognise
from kvbench.sweep.calibrate import CalibrateOptions, EngineLimits, calibrate, read_inputs

RECORDED = Path(__file__).parents[2] / "recorded"
TRUTH = {
    "front_end_ms": 4.0, "prefill_step_ms": 12.0, "prefill_token_ms": 0.06, "prefill_attention_ms": 4e-6,
    "decode_step_ms": 18.0, "decode_seq_ms": 0.2, "decode_context_ms": 1e-4,
}  # fmt: skip
META = {"engine_kwargs": {"max_num_seqs": 32, "max_num_batched_tokens": 1024}, "vllm_version": "0.19.0"}

DETAILED = (RECORDED / "vllm" / "detailed.json", RECORDED / "aiperf")

pytestmark = pytest.mark.timeout(240)


def recorded(folder: Path, slower_from: int | None = None, num_kv_tokens: int | None = None) -> Path:
    """Requests that an engine with TRUTH served; from one on everything may take half as long again.

    ``num_kv_tokens``: the engine's KV memory, which the record has too.
    """
    rng = np.random.default_rng(3)
    count = 60
    config = EngineConfig(16, (num_kv_tokens or 128_000) // 16, 32, 1024, 8192, False)
    system = System(timing_of_values({}), config, prefill=0)
    arrivals = np.cumsum(rng.exponential(0.4, count)).tolist()
    inputs, outputs = rng.integers(50, 2500, count).tolist(), rng.integers(10, 60, count).tolist()
    nothing = np.zeros(count)
    load = ServedLoad("made", system, SimulatedLoad(arrivals, inputs, outputs, 1e9), Times(nothing, nothing))
    times = load.predicted(TRUTH)
    folder.mkdir()
    lines = []
    for at in range(count):
        slow = 1.5 if slower_from is not None and at >= slower_from else 1.0
        first = arrivals[at] + slow * times.ttft_s[at]
        row = {
            "request_id": f"r{at}", "input_toks": inputs[at], "output_toks": outputs[at],
            "arrival_time": 1.7e9 + arrivals[at], "queued_ts": 500.0 + arrivals[at],
            "first_token_ts": 500.0 + first, "last_token_ts": 500.0 + first + slow * times.decode_s[at],
        }  # fmt: skip
        lines.append(json.dumps(row))
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")
    cache = {"kv_cache": {"num_kv_tokens": num_kv_tokens}} if num_kv_tokens else {}
    (folder / "meta.json").write_text(json.dumps({**META, **cache}))
    return folder


def test_a_profile_is_fitted_checked_written_and_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    words = ("calibrate", "--from", str(recorded(tmp_path / "one")), "--machine", "a test", "-o", str(path))
    done = invoke(*words, "--json").succeeded()
    profile = read_profile(path)
    assert (ProfileFile.model_validate_json(done.out), profile.status) == (profile, "fit")
    assert (profile.name, profile.engine, profile.machine) == ("mine", "vllm 0.19.0", "a test")
    assert profile.value("decode_step_ms") == pytest.approx(TRUTH["decode_step_ms"], rel=0.1)
    assert profile.value("prefill_token_ms") == pytest.approx(TRUTH["prefill_token_ms"], rel=0.1)
    assert profile.held_out.requests == 20
    assert profile.held_out.figures["tpot_mean"].ratio == pytest.approx(1.0, abs=0.02)
    assert "KV memory is assumed to suffice" in profile.source
    for expected in ("decode_step_ms", "held out: the last 33% of each load", "FIT"):
        assert expected in done.text
    assert "already exists" in invoke(*words).failed(2).text
    sets = (f"simulate.timing={path}", "workload.input_len=[256]", "slo.tpot_ms=60", "search.max_trials=2")
    used = invoke("simulate", "quickstart", "--connector", "aggregated", "-o", str(tmp_path / "r"), sets=sets)
    assert used.status in (0, 3), used.text
    assert "timing profile mine" in json.dumps(the_run(tmp_path / "r").manifest["simulated_with"])


def test_what_is_not_predicted_makes_it_unfit(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    source = recorded(tmp_path / "odd", slower_from=40)
    done = invoke("calibrate", "--from", str(source), "-o", str(path)).failed(1)
    profile = read_profile(path)
    assert profile.status == "unfit"
    assert any(text.startswith("tpot_mean of the held-out requests") for text in profile.cannot_explain)
    assert "UNFIT" in done.text


def calibrated_from(*paths: Path, **limits: int) -> ProfileFile:
    return calibrate(CalibrateOptions(paths, Path("x.yaml"), limits=EngineLimits(**limits)))


def test_sums_and_engines_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has totals only; a fit needs single requests"):
        calibrated_from(RECORDED / "seeds" / "pr10884.txt")
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    (other / "meta.json").write_text(json.dumps({**META, "vllm_version": "0.20.0"}))
    with pytest.raises(InputError, match=r"several engines: vllm 0\.19\.0, vllm 0\.20\.0"):
        calibrated_from(one, other)


def test_a_simulated_run_is_refused(tmp_path: Path) -> None:
    sets = ("workload.input_len=[256]", "search.max_trials=2")
    done = invoke("simulate", "quickstart", "--connector", "aggregated", "-o", str(tmp_path), sets=sets)
    assert done.status in (0, 3), done.text
    with pytest.raises(InputError, match="without measurements of an engine"):
        calibrated_from(the_run(tmp_path).path)


def test_limits_are_those_of_the_record_unless_given() -> None:
    limits = EngineLimits(max_num_seqs=7)
    (load,) = read_inputs([RECORDED / "llmservingsim"], limits).loads
    assert (load.system.config.max_num_seqs, load.system.config.max_num_batched_tokens) == (7, 2048)
    assert len(load.load.offsets_s) == 20


@pytest.mark.parametrize(("meta", "given", "blocks"), [
    ({"kv_cache": {"num_kv_tokens": 4000}}, None, 250),
    ({"kv_cache": {"num_gpu_blocks": 300, "block_size": 16}}, None, 300),
    ({"kv_cache": {"num_kv_tokens": 4000}}, 8000, 500),
    ({}, 8000, 500),
])  # fmt: skip
def test_kv_memory_is_read_from_the_record_or_given(
    tmp_path: Path, meta: dict[str, object], given: int | None, blocks: int
) -> None:
    folder = recorded(tmp_path / "one")
    (folder / "meta.json").write_text(json.dumps({**META, **meta}))
    found = read_inputs([folder], EngineLimits(num_kv_tokens=given))
    assert (found.loads[0].system.config.num_blocks, found.num_kv_tokens) == (blocks, blocks * 16)
    assert not any("assumed to suffice" in note for note in found.notes)


def test_a_kv_memory_that_makes_requests_wait_is_part_of_the_prediction(tmp_path: Path) -> None:
    """Requests that wait for KV memory have late first tokens, which no step time explains."""
    folder = recorded(tmp_path / "one", num_kv_tokens=3000)
    known = calibrated_from(folder)
    assert known.num_kv_tokens == 3000
    assert known.held_out.figures["ttft_mean"].ratio == pytest.approx(1.0, abs=0.15)
    (folder / "meta.json").write_text(json.dumps(META))
    unknown = calibrated_from(folder)
    assert (unknown.num_kv_tokens, unknown.status) == (None, "unfit")


def test_a_kv_memory_smaller_than_a_served_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one was served"):
        calibrated_from(recorded(tmp_path / "one"), num_kv_tokens=100)


def test_requests_of_vllm_bench_and_aiperf_are_read() -> None:
    for path in DETAILED:
        assert all(load.known.any() for load in read_inputs([path], EngineLimits()).loads)


@pytest.mark.heavy
def test_an_emulated_engine_s_step_times_are_found(tmp_path: Path) -> None:
    """A real bench of the emulated engine, at three lengths, of which the middle one is held out."""
    runs = 0

    def measured(scale: int) -> TrialRecord:
        nonlocal runs
        runs += 1
        sets = (
            "workload.input_len=[256,1024,2048]",
            "workload.output_len=24",
            "search.equal_rate=false",
            f"deployment.engine_options.time_scale={scale}",
        )
        words = ("--connector", "aggregated", "--rate", f"{12 / scale}", "--num-requests", "36")
        kvbench("bench", "quickstart", *words, "-o", str(tmp_path / f"{runs}"), sets=sets)
        trials = the_run(tmp_path / f"{runs}").trials
        return next((trial for trial in trials if trial.verdict == "invalid"), trials[0])

    _, scale = not_spoilt(measured, (5, 12))
    profile = calibrate(CalibrateOptions([the_run(tmp_path / f"{runs}").path], Path("emulated.yaml")))
    assert profile.held_out.by == "the prompts of 1020 tokens"
    assert profile.scenario_sha256
    # The profile quick: 4 ms a decode step, 0.12 ms a sequence.
    per_step = profile.value("decode_step_ms") + 3 * profile.value("decode_seq_ms")
    assert per_step == pytest.approx(4.36 * scale, rel=0.25)
    assert profile.held_out.figures["tpot_mean"].ratio == pytest.approx(1.0, abs=0.1)
    assert profile.held_out.figures["ttft_mean"].ratio == pytest.approx(1.0, abs=0.25)


# -- the importer ------------------------------------------------------------------------------------
def test_llmservingsim_s_requests_are_on_the_client_s_clock() -> None:
    folder = RECORDED / "llmservingsim"
    assert recognise(folder)
    assert recognise(folder / "requests.jsonl")
    assert not recognise(RECORDED / "aiperf")
    (row,) = read(folder).serving
    first = row.requests[0]
    assert (first.scheduled_s, first.input_len, first.output_len) == (0.0, 2358, 531)
    # Queued 2 ms after its arrival by the clocks as they are; scheduled to first token took 169 ms.
    assert (first.ttft_s, row.settings["max_num_seqs"]) == (pytest.approx(0.1695, abs=0.02), 128)
    assert row.figures["completed"] == 20


def test_a_torn_line_is_left_out_by_name(tmp_path: Path) -> None:
    text = (RECORDED / "llmservingsim" / "requests.jsonl").read_text().split("\n")
    text[1] = text[1][:40]
    text[2] = text[2].replace('"output_toks"', '"tokens"')
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(text))
    reading = read(path)
    assert reading.serving[0].figures["completed"] == 18
    assert [problem.line for problem in reading.problems] == [2, 3]
    assert "has no output_toks" in reading.problems[1].text
    path.write_text("{}\n")
    with pytest.raises(InputError, match="no complete request"):
        read(path)
