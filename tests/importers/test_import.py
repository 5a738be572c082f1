"""``kvbench import``: what other tools wrote becomes rows; what is missing stays missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_files import imported
from typer.testing import CliRunner

from kvbench import importers
from kvbench.cli.app import app
from kvbench.core.metrics.metrics import Summary
from kvbench.errors import InputError
from kvbench.importers import base
from kvbench.importers.base import Imported, ImportedRow, ServingRow, TransferRow
from kvbench.importers.parts import importing, vllm_result
from kvbench.importers.parts.trials import summary_of

RECORDED = Path(__file__).parents[1] / "recorded"
FORMATS = {
    "llmservingsim": "llmservingsim", "vllm/serve.log": "vllm_serve", "vllm/result.json": "vllm_json",
    "vllm/detailed.json": "vllm_json", "vllm/sweep": "vllm_sweep", "aiperf": "aiperf",
    "aiperf/profile_export_aiperf.csv": "aiperf", "guidellm/benchmarks.json": "guidellm",
    "mooncake/initiator.log": "transfer_engine_bench", "mooncake/target.log": "transfer_engine_bench",
    "written/nixlbench.txt": "nixlbench", "written/nixlbench-0.1.txt": "nixlbench",
    "written/sendrecv_perf.txt": "nccl_tests", "written/ib_write_bw.txt": "perftest",
    "seeds/notes.txt": "notes", "seeds/pr10884.txt": "pr10884",
}  # fmt: skip


def evidence(row: TransferRow) -> dict[str, Any]:
    """What an importer keeps of a transfer beside its figures."""
    found: dict[str, Any] = row.record.warnings[0].evidence
    return found


def read(name: str) -> Imported:
    return importers.get(FORMATS[name]).read(RECORDED / name)


def read_text(tmp_path: Path, importer: str, text: str) -> Imported:
    path = tmp_path / "odd.log"
    path.write_text(text, encoding="utf-8", newline="")
    return importers.get(importer).read(path)


def serving(name: str) -> ServingRow:
    row = read(name).rows[0]
    assert isinstance(row, ServingRow)
    return row


def figures_of(row: ImportedRow) -> set[tuple[str, Any]]:
    if isinstance(row, ServingRow):
        return set(row.figures.items())
    return {("gb_per_s", row.record.gb_per_s), ("block_bytes", row.record.case.block_bytes)}


@pytest.mark.parametrize(("name", "expected"), FORMATS.items())
def test_each_sample_is_known_for_what_it_is(name: str, expected: str) -> None:
    assert importers.recognise_format(RECORDED / name) == expected


def test_every_importer_has_a_sample_and_a_word_for_its_format() -> None:
    assert set(FORMATS.values()) == set(importers.names())
    for name in importers.names():
        assert importers.get(name).FORMAT


# --- vllm bench ------------------------------------------------------------------------------------
def test_blocks_of_a_log_with_what_was_asked_for() -> None:
    first, second = read("vllm/serve.log").serving
    assert (first.input_len, first.output_len, first.request_rate, first.num_prompts) == (32, 16, 10.0, 12)
    assert (first.figures["completed"], first.figures["mean_ttft_ms"]) == (12, 102.41)
    assert (first.figures["request_goodput"], first.figures["p99_itl_ms"]) == (5.99, 150.24)
    assert first.settings["model"] == "exact"
    assert first.command.startswith("vllm bench serve --backend openai")
    assert (second.num_prompts, second.settings["max_concurrency"]) == (4, 2)
    assert (first.missing, first.derived) == (["connector"], {})


def test_a_log_and_its_json_say_the_same() -> None:
    block, result = serving("vllm/serve.log"), serving("vllm/result.json")
    shared = block.figures.keys() & result.figures.keys()
    assert len(shared) >= 30
    for name in shared:
        assert block.figures[name] == pytest.approx(result.figures[name], abs=0.0051), name


def test_single_requests_of_a_detailed_file(tmp_path: Path) -> None:
    run = imported(tmp_path / "results", RECORDED / "vllm/detailed.json")
    (trial,) = run.other_trials
    raw = json.loads((RECORDED / "vllm/detailed.json").read_text())
    records = run.request_records(trial.trial_id)
    assert [record.ttft_sent_s for record in records] == pytest.approx(raw["ttfts"])
    assert [record.input_len for record in records] == raw["input_lens"]
    assert [len(record.itl_s) for record in records] == [len(gaps) for gaps in raw["itls"]]
    tpots = [record.tpot_s for record in records if record.tpot_s is not None]
    assert sum(tpots) / len(tpots) * 1e3 == pytest.approx(raw["mean_tpot_ms"], rel=1e-3)
    assert "requests.scheduled_s" in trial.engine["source"]["derived"]
    assert trial.summary["ttft_ms"]["mean"] == raw["mean_ttft_ms"]
    assert trial.summary["ttft_ms"]["std"] == raw["std_ttft_ms"]


def test_old_key_names_unbounded_rates_and_metadata(tmp_path: Path) -> None:
    result = json.loads((RECORDED / "vllm/result.json").read_text())
    result |= {
        "request_rate": "inf", "request_goodput:": 1.5, "kv_connector": "nixl", "tensor_parallel_size": 4,
    }  # fmt: skip
    del result["request_goodput"], result["failed"], result["p99_itl_ms"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(result))
    (row,) = importers.get("vllm_json").read(path).serving
    assert (row.request_rate, row.figures["request_goodput"]) == (math.inf, 1.5)
    assert (row.connector, row.settings["tp"]) == ("nixl", 4)
    assert row.missing == ["failed", "p99_itl_ms"]
    (trial,) = imported(tmp_path / "results", path).other_trials
    assert (trial.request_rate, trial.summary["offered_rate"]) == (0.0, None)
    assert (trial.summary["failed"], trial.summary["itl_ms"]["p99"]) == (None, None)
    assert trial.engine["source"]["request_rate"] == "inf"


def test_appended_results_of_which_the_last_is_torn(tmp_path: Path) -> None:
    one = json.dumps(json.loads((RECORDED / "vllm/result.json").read_text()))
    reading = read_text(tmp_path, "vllm_json", f"{one}\n{one}\n{one[:300]}")
    assert [row.origin.line for row in reading.rows] == [1, 2]
    assert [problem.line for problem in reading.problems] == [3]


def test_a_sweep_folder(tmp_path: Path) -> None:
    reading = read("vllm/sweep")
    rows = reading.serving
    assert [row.request_rate for row in rows] == [5, 5, 10, 10]
    assert [row.settings["run_number"] for row in rows] == [0, 1, 0, 1]
    assert [row.origin.file.rsplit("/", 1)[1] for row in rows] == ["run=0.json", "run=1.json"] * 2
    run = imported(tmp_path / "results", RECORDED / "vllm/sweep", connector="nixl")
    assert len(run.manifest["imported"]["files"]) == 4
    assert {trial.cell.connector for trial in run.other_trials} == {"nixl"}
    assert all("connector" in trial.engine["source"]["derived"] for trial in run.other_trials)


def test_failed_runs_of_a_sweep_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "BENCH--request_rate=5"
    folder.mkdir(parents=True)
    (folder / "run=0.json").write_text((RECORDED / "vllm/result.json").read_text())
    (folder / "run=1.json").write_text("{")
    (folder / "run=2.failure.json").write_text(json.dumps({"error": "server died"}))
    reading = importers.get("vllm_sweep").read(tmp_path / "sweep")
    assert len(reading.rows) == 1
    text = " ".join(problem.message() for problem in reading.problems)
    assert "run=1.json" in text
    assert "server died" in text


@pytest.mark.parametrize("kept", [18, 30, 45])
def test_a_log_that_ends_inside_a_block(tmp_path: Path, kept: int) -> None:
    lines = (RECORDED / "vllm/serve.log").read_text().split("\n")
    reading = read_text(tmp_path, "vllm_serve", "\n".join([*lines[:51], *lines[51 : 51 + kept]]))
    assert len(reading.rows) == 1
    whole = read("vllm/serve.log").rows[0]
    assert isinstance(whole, ServingRow)
    assert reading.serving[0].figures == whole.figures
    (problem,) = reading.problems
    assert (problem.line, "the file ends at line" in problem.text) == (64, True)


def test_unknown_figures_and_strange_lines_in_a_block(tmp_path: Path) -> None:
    text = (RECORDED / "vllm/serve.log").read_text()
    text = text.replace("Failed requests: ", "Wasted watts: 12\n警告:磁盘已满\nFailed requests: ", 1)
    reading = read_text(tmp_path, "vllm_serve", text)
    assert reading.serving[0].unknown == {"Wasted watts": "12"}
    messages = {problem.line: problem.text for problem in reading.problems}
    assert "警告" in messages[17]
    assert "Wasted watts" in messages[14]


def test_blocks_behind_a_prefix_and_with_windows_line_ends(tmp_path: Path) -> None:
    lines = (RECORDED / "vllm/serve.log").read_text().split("\n")
    path = tmp_path / "prefixed.log"
    path.write_bytes("\r\n".join(f"bench-1  | {line}" for line in lines).encode("utf-16"))
    assert importers.recognise_format(path) == "vllm_serve"
    rows = importers.get("vllm_serve").read(path).serving
    assert [row.figures for row in rows] == [row.figures for row in read("vllm/serve.log").serving]


def test_blocks_of_the_relatives_of_vllm(tmp_path: Path) -> None:
    """SGLang's block has labels of its own, vLLM-Omni's has headings of equal signs within."""
    text = (RECORDED / "vllm/serve.log").read_text().split("\n")
    block = text[13:51]
    block[1:1] = ["Backend:  sglang", "Traffic request rate:   inf", "Max request concurrency:   not set"]
    block.remove(next(line for line in block if line.startswith("Request rate configured")))
    block.insert(9, "================== Text Result ===================")
    block = [line.replace("E2EL (ms):  ", "E2E Latency (ms):  ") for line in block]
    command = "python3 -m sglang.bench_serving --backend sglang --num-prompt 12"
    reading = read_text(tmp_path, "vllm_serve", "\n".join([command, *block, ""]))
    (row,) = reading.serving
    assert (row.origin.tool, row.num_prompts, row.request_rate) == ("sglang.bench_serving", 12, math.inf)
    assert row.figures == read("vllm/serve.log").serving[0].figures
    assert row.unknown == {"Backend": "sglang"}
    assert "max_concurrency" not in row.settings
    assert [problem.text for problem in reading.problems] == [
        "unknown names of values: Backend (kept as text)"
    ]


def test_lines_count_as_in_an_editor_and_progress_bars_are_written_over(tmp_path: Path) -> None:
    text = (RECORDED / "vllm/serve.log").read_text()
    bar = "  0%| | 0/12\r100%|##| 12/12\r============ Serving"
    text = text.replace("============ Serving", bar, 1).replace("Mean TTFT", "\x1b[32mMean TTFT\x1b[0m")
    rows = read_text(tmp_path, "vllm_serve", text).serving
    assert [row.origin.line for row in rows] == [14, 64]
    assert [row.figures for row in rows] == [row.figures for row in read("vllm/serve.log").serving]


@given(
    st.lists(
        st.sampled_from([*(RECORDED / "vllm/serve.log").read_text().split("\n")[12:52], "", "x: y", "==="])
    )
)
def test_no_order_of_lines_invents_a_figure(lines: list[str]) -> None:
    for block in vllm_result.blocks(lines):
        block_lines = lines[block.line - 1 : block.last_line]
        for name, value in block.figures.items():
            assert any(
                vllm_result.figure_name(line.partition(":")[0].strip()) == name
                and base.number(line.partition(":")[2]) == value
                for line in block_lines
            )


# --- aiperf, guidellm ------------------------------------------------------------------------------
def test_aiperf_json_and_csv() -> None:
    row, sheet = serving("aiperf"), serving("aiperf/profile_export_aiperf.csv")
    raw = json.loads((RECORDED / "aiperf/profile_export_aiperf.json").read_text())
    assert row.figures["mean_ttft_ms"] == raw["time_to_first_token"]["avg"]
    assert row.figures["p99_tpot_ms"] == raw["inter_token_latency"]["p99"]
    assert row.figures["p99_itl_ms"] == raw["inter_chunk_latency"]["p99"]
    assert row.figures["max_e2el_ms"] == raw["request_latency"]["max"]
    assert row.figures["duration_s"] == raw["benchmark_duration"]["avg"]
    assert (row.request_rate, row.num_prompts, row.origin.version) == (10.0, 12, "0.13.0")
    assert row.settings["model"] == "exact"
    assert row.command.startswith("aiperf profile")
    for name, value in sheet.figures.items():
        assert value == pytest.approx(row.figures[name], abs=0.0051), name
    assert sheet.request_rate is None
    assert "request_rate" in sheet.missing


def test_guidellm() -> None:
    row = serving("guidellm/benchmarks.json")
    raw = json.loads((RECORDED / "guidellm/benchmarks.json").read_text())["benchmarks"][0]
    metrics = raw["metrics"]
    assert row.figures["mean_ttft_ms"] == metrics["time_to_first_token_ms"]["successful"]["mean"]
    assert row.figures["p99_tpot_ms"] == metrics["inter_token_latency_ms"]["successful"]["percentiles"]["p99"]
    assert row.figures["mean_e2el_ms"] == 1e3 * metrics["request_latency"]["successful"]["mean"]
    assert row.figures["completed"] == metrics["request_totals"]["successful"]
    assert row.figures["duration_s"] == raw["duration"]
    assert (row.request_rate, row.num_prompts, row.origin.version) == (10.0, 8, "0.8.1")
    assert {name for name in row.missing if name.endswith("_itl_ms")} == {
        "mean_itl_ms", "median_itl_ms", "p90_itl_ms", "p99_itl_ms",
    }  # fmt: skip


def test_single_requests_of_aiperf_and_guidellm_count_from_the_plan(tmp_path: Path) -> None:
    lines = (RECORDED / "aiperf/profile_export.jsonl").read_text().splitlines()
    logged = sorted((json.loads(line) for line in lines), key=lambda row: row["metadata"]["credit_issued_ns"])
    records = serving("aiperf").requests
    assert len(records) == len(logged) == 12
    for record, row in zip(records, logged, strict=True):
        about, metrics = row["metadata"], row["metrics"]
        late_s = (about["request_start_ns"] - about["credit_issued_ns"]) / 1e9
        ttft_s = metrics["time_to_first_token"]["value"] / 1e3
        assert record.ttft_sent_s == pytest.approx(ttft_s, abs=1e-6)
        assert record.ttft_s == pytest.approx(ttft_s + late_s, abs=1e-6)
        assert record.tpot_s == pytest.approx(metrics["inter_token_latency"]["value"] / 1e3, abs=1e-6)
        assert len(record.itl_s) == len(metrics["inter_chunk_latency"]["value"])
    (benchmark,) = json.loads((RECORDED / "guidellm/benchmarks.json").read_text())["benchmarks"]
    raw = benchmark["requests"]["successful"]
    found = {record.request_id: record for record in serving("guidellm/benchmarks.json").requests}
    assert len(found) == len(raw) == 8
    for row in raw:
        record, times = found[row["request_id"]], row["info"]["timings"]
        ttft_s = times["first_token_iteration"] - times["targeted_start"]
        assert record.ttft_sent_s == pytest.approx(row["time_to_first_token_ms"] / 1e3, abs=1e-6)
        assert record.ttft_s == pytest.approx(ttft_s, abs=1e-6)
        assert record.tpot_s == pytest.approx(row["inter_token_latency_ms"] / 1e3, abs=1e-6)
    run = imported(tmp_path / "results", RECORDED / "aiperf")
    assert [file["name"] for file in run.manifest["imported"]["files"]] == [
        "profile_export_aiperf.json", "profile_export.jsonl",
    ]  # fmt: skip
    assert len(run.request_records(run.other_trials[0].trial_id)) == 12


# --- transfers -------------------------------------------------------------------------------------
def transfers(name: str) -> list[TransferRow]:
    return read(name).transfers


def test_nixlbench_of_two_versions() -> None:
    new, old = transfers("written/nixlbench.txt"), transfers("written/nixlbench-0.1.txt")
    assert [(r.record.case.block_bytes, r.record.case.batch_size, r.record.gb_per_s) for r in new] == [
        (4096, 1, 0.512), (65536, 16, 12.25), (67108864, 1, 46.5),
    ]  # fmt: skip
    case = new[1].record.case
    assert (case.op, case.memory, case.threads, case.protocol) == ("read", "cuda", 4, "ucx")
    assert (evidence(new[1])["p99_tx_us"], new[1].record.prepare_s) == (99.0, pytest.approx(12.5e-6))
    assert [r.record.gb_per_s for r in old] == [1.024, 41.94304]
    assert {"op", "threads", "memory", "protocol"} <= set(old[0].missing)
    (problem,) = read("written/nixlbench-0.1.txt").problems
    assert problem.line == 7


@pytest.mark.parametrize(("words", "gb_per_s"), [
    ("0.11 GB/s", 0.11), ("0.26", 0.26), ("8.00 Gb/s", 1.0), ("1.00 GiB/s", 1.073741824),
    ("500.00 MB/s", 0.5),
])  # fmt: skip
def test_transfer_engine_bench_in_any_unit(tmp_path: Path, words: str, gb_per_s: float) -> None:
    text = (RECORDED / "mooncake/initiator.log").read_text()
    text = text.replace("throughput 0.11 GB/s", f"throughput {words}")
    (row,) = read_text(tmp_path, "transfer_engine_bench", text).transfers
    assert row.record.gb_per_s == pytest.approx(gb_per_s)
    case = row.record.case
    assert (case.op, case.protocol, case.block_bytes, case.batch_size, case.threads) == (
        "write", "tcp", 65536, 8, 2,
    )  # fmt: skip
    assert (row.record.calls, row.record.window_s, row.record.transport) == (624, 3.01, "tcp")
    # what the tool counts is what it says: 624 batches of 8 blocks in 3.01 s
    assert 624 * case.nbytes / 3.01 / 1e9 == pytest.approx(0.11, abs=0.005)


def test_a_log_without_the_command_leaves_sizes_missing(tmp_path: Path) -> None:
    text = (RECORDED / "mooncake/initiator.log").read_text().partition("\n")[2]
    (row,) = read_text(tmp_path, "transfer_engine_bench", text).transfers
    assert {"block_bytes", "batch_size", "op", "nics"} <= set(row.missing)
    assert row.record.case.threads == 2


def test_nccl_tests() -> None:
    reading = read("written/sendrecv_perf.txt")
    rows = reading.transfers
    assert [(r.record.case.block_bytes, r.record.gb_per_s, evidence(r)["placement"]) for r in rows] == [
        (1048576, 99.96, "out of place"), (1048576, 95.5, "in place"),
        (2097152, 135.3, "out of place"), (2097152, 133.58, "in place"),
    ]  # fmt: skip
    assert rows[0].record.library == "nccl 2.27.3"
    assert (rows[0].record.verified, rows[1].record.verified) == (True, None)
    assert evidence(rows[0])["collective"] == "sendrecv"
    assert (evidence(rows[0])["ranks"], evidence(rows[0])["hosts"]) == (2, 1)
    assert "op" in rows[0].missing
    assert [problem.line for problem in reading.problems] == [12, 15]
    # GB/s = bytes / time, with time in µs and a decimal GB
    assert rows[0].record.gb_per_s == pytest.approx(1048576 / 10.49 / 1e3, rel=1e-3)


def test_perftest_units() -> None:
    first, second, third = transfers("written/ib_write_bw.txt")
    # 65,536 bytes × the message rate has to give the same figure: MiB/sec are 2²⁰ bytes
    assert first.record.gb_per_s == pytest.approx(65536 * 0.366211e6 / 1e9, rel=1e-4)
    assert (first.record.case.op, first.record.case.threads, evidence(first)["device"]) == (
        "write",
        2,
        "mlx5_0",
    )
    assert (second.record.case.block_bytes, third.record.gb_per_s) == (1048576, pytest.approx(196.25 / 8))
    assert (third.record.case.op, evidence(third)["device"], evidence(third)["link_type"]) == (
        "read",
        "mlx5_1",
        "IB",
    )


def test_transfers_become_a_run_that_reads_back(tmp_path: Path) -> None:
    run = imported(
        tmp_path / "results", RECORDED / "written/ib_write_bw.txt", RECORDED / "mooncake/initiator.log"
    )
    records = run.transfer_records()
    assert [record.gb_per_s for record in records][2:] == [pytest.approx(24.53125), 0.11]
    assert (run.manifest["kind"], run.labels) == ("microbench", ["imported"])
    found = records[0].warnings[0].evidence
    assert (found["file"], found["line"], found["tool"]) == ("ib_write_bw.txt", 15, "perftest")
    assert "call_s" in found["missing"]


# --- the run folder --------------------------------------------------------------------------------
def test_the_manifest_tells_where_all_comes_from(tmp_path: Path) -> None:
    run = imported(tmp_path / "results", RECORDED / "vllm/serve.log")
    origin = run.manifest["imported"]
    (file,) = origin["files"]
    assert (file["name"], file["format"], file["tool"]) == ("serve.log", "vllm_serve", "vllm bench serve")
    assert (origin["rows"], origin["missing"]) == (2, {"connector": 2})
    assert run.manifest["seed"] is None
    assert str(tmp_path) not in json.dumps([run.manifest, run.plan, run.environment])
    for trial in run.other_trials:
        assert (trial.method, trial.verdict, trial.labels) == ("imported", "measured", ["imported"])


def test_a_summary_has_every_key_of_kvbenchs_own(tmp_path: Path) -> None:
    summary = summary_of(serving("vllm/serve.log"))
    assert set(Summary.__dataclass_fields__) <= set(summary)
    whole: Any = Summary.__dataclass_fields__["whole_run"].default_factory
    assert set(whole().__dataclass_fields__) <= set(summary["whole_run"])


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for name in ("mooncake", "nixl"):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "result.json")
        paths[-1].write_text((RECORDED / "vllm/result.json").read_text())
    run = imported(tmp_path / "results", *paths)
    files = [trial.engine["source"]["file"] for trial in run.other_trials]
    assert files == ["mooncake/result.json", "nixl/result.json"]
    assert len({trial.trial_id for trial in run.other_trials}) == 2


# --- trouble ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("content", "message"), [
    (b"", "no result of a known tool in its 1 lines"),
    (b"hello\nworld\n", "line 1 is 'hello'"),
    (b"\x00\x01\x02\xff" * 100, "this is not text"),
    (b"nothing\nvllm bench serve --model x\nTraceback\n", "similar text at line 2"),
    ("你好\n============ Serving Benchmark Result ============\n成功".encode(), "the file ends at line 3"),
    (b'{"request_throughput": 1, "total_input_tokens"', "bad.txt:1: is not complete JSON"),
    (b'{"request_throughput": 1, "total_input_tokens": 2}', "is not a result of a serving benchmark"),
    (b'{"benchmarks": 3, "x": "time_to_first_token_ms", "time_to_first_token_ms": 1}',
     "no list of benchmarks"),
])  # fmt: skip
def test_what_is_nothing_is_said_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        importing.read(path)
    assert message in caught.value.message
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", [name for name in FORMATS if (RECORDED / name).is_file()])
def test_a_file_cut_anywhere_gives_whole_rows_or_none(tmp_path: Path, name: str) -> None:
    """No row has a figure that the whole file has not; but one on an unended last line may, which is said."""
    data = (RECORDED / name).read_bytes()
    known = [figures_of(row) for row in read(name).rows]
    path = tmp_path / Path(name).name
    for cut in range(len(data) // 23, len(data), len(data) // 23 + 1):
        path.write_bytes(data[:cut])
        try:
            found = importing.read(path, FORMATS[name])
        except InputError:
            continue
        last = max(found.reading.rows, key=lambda row: row.origin.line)
        unsure = any("without a line end" in problem.text for problem in found.reading.problems)
        for row in found.reading.rows:
            if not (unsure and row.origin.line == last.origin.line):
                assert any(figures_of(row) <= whole for whole in known)


def test_a_target_log_and_mixed_kinds(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Test completed"):
        importing.read(RECORDED / "mooncake/target.log")
    with pytest.raises(InputError, match="need different tables"):
        imported(tmp_path / "results", RECORDED / "vllm/serve.log", RECORDED / "written/nixlbench.txt")
    with pytest.raises(InputError, match="unknown format"):
        importing.read(RECORDED / "vllm/serve.log", "excel")


def test_the_command(tmp_path: Path) -> None:
    path = str(RECORDED / "vllm/serve.log")
    runner = CliRunner()
    done = runner.invoke(
        app, ["import", path, "--output", str(tmp_path), "--name", "Mine", "--connector", "nixl"]
    )
    assert done.exit_code == 0, done.output
    assert "2 rows, read as vllm_serve" in done.output
    assert "102 / 68.2 / 223" in done.output
    (folder,) = tmp_path.iterdir()
    assert "-mine-" in folder.name
    absent = runner.invoke(app, ["import", str(tmp_path / "absent.log")])
    assert absent.exit_code == 2
    assert "there is no file" in absent.output
    assert "give the path of a result file" in absent.output


@pytest.mark.parametrize("content", [bytes(range(256)) * 8, b"\x7fELF\x02\x01\0\0", b"\x89PNG\r\n\x1a\n\0"])
def test_bytes_that_are_no_text_are_not_printed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.bin"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        importing.read(path)
    assert "this is not text" in caught.value.message
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"request_throughput": %s, "total_input_tokens": 1}' % ("1" * 5000)]
)
def test_json_that_python_cannot_hold_is_refused_in_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    for read_file in (importers.get("vllm_json").read, base.parse_json):
        with pytest.raises(InputError, match="not complete JSON"):
            read_file(path)
