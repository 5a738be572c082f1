"""The plausibility check of imported rows: what was not measured or cannot be true is left out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_files import imported
from typer.testing import CliRunner

from kvbench.cli.app import app
from kvbench.core.transfers.records import Case
from kvbench.errors import InputError
from kvbench.importers.base import Imported, Origin, ReportedTransfer, ServingRow, transfer_row
from kvbench.importers.parts import importing
from kvbench.importers.parts.trials import keep_plausible

RECORDED = Path(__file__).parents[1] / "recorded"
WRITTEN = RECORDED / "written"
HERE = Origin("result.json", 1, 1, "a tool")


def checked(**row: Any) -> tuple[ServingRow, str]:
    """A row after the check, and what was said of it."""
    reading = Imported([ServingRow(HERE, **row)])
    keep_plausible(reading)
    return reading.serving[0], " ".join(problem.message() for problem in reading.problems)


def one(name: str) -> tuple[ServingRow, str]:
    """The one row of a recorded file, and what was said of it."""
    reading = importing.read(WRITTEN / name).reading
    (row,) = reading.serving
    return row, " ".join(problem.message() for problem in reading.problems)


def run_of(tmp_path: Path, name: str) -> Path:
    return imported(tmp_path / "results", WRITTEN / name, connector="nixl").path


def test_a_first_token_after_0_ms_was_not_measured() -> None:
    row, text = one("zero-ttft.log")
    assert not [name for name in row.figures if name.endswith(("ttft_ms", "itl_ms"))]
    assert row.figures["completed"] == 100
    assert {"mean_ttft_ms", "p99_itl_ms"} <= set(row.missing) & set(row.refused)
    assert "TTFT of 0 ms was not measured" in text


def test_a_negative_latency_is_left_out_with_all_of_its_kind() -> None:
    row, text = checked(
        figures={"completed": 10, "mean_ttft_ms": 50.0, "mean_tpot_ms": -12.3, "p99_tpot_ms": 9.0}
    )
    assert row.figures == {"completed": 10, "mean_ttft_ms": 50.0}
    assert "TPOT of -12.3 ms is impossible" in text
    assert row.refused["p99_tpot_ms"] == "TPOT of -12.3 ms is impossible"


def test_a_first_token_after_the_end_of_the_answer_is_impossible() -> None:
    row, text = one("ttft-above-e2el.log")
    assert not [name for name in row.figures if name.endswith(("ttft_ms", "e2el_ms"))]
    assert row.figures["mean_tpot_ms"] == 12.31
    assert "TTFT above E2EL" in text


def test_what_may_be_true_stays() -> None:
    """Two decimals round TTFT up to E2EL where one token is answered; chunks of several tokens have gaps
    of 0."""
    figures = {
        "completed": 10, "failed": 0, "request_goodput": 0.0, "mean_ttft_ms": 50.01, "mean_e2el_ms": 50.0,
        "std_ttft_ms": 0.0, "mean_itl_ms": 4.0, "median_itl_ms": 0.0,
    }  # fmt: skip
    row, text = checked(figures=dict(figures))
    assert (row.figures, text, row.refused) == (figures, "", {})


def test_rates_and_counts_of_0_beside_completed_requests_were_not_measured() -> None:
    figures = {"completed": 10, "output_throughput": 0.0, "peak_concurrent_requests": 0, "failed": -1}
    row, text = checked(figures=figures)
    assert row.figures == {"completed": 10}
    assert "output_throughput" in text
    assert "failed below 0" in text


@pytest.mark.parametrize("name", ["vllm/serve.log", "vllm/result.json", "aiperf", "guidellm/benchmarks.json"])
def test_sound_files_lose_nothing(name: str) -> None:
    for row in importing.read(RECORDED / name).reading.serving:
        assert row.refused == {}


def test_sglangs_default_lengths_are_not_the_measured_ones() -> None:
    row, _ = one("sglang-sharegpt.jsonl")
    assert (row.input_len, row.output_len, row.origin.tool) == (301, 198, "sglang.bench_serving")
    assert "total_input_tokens / completed" in row.derived["input_len"]
    assert row.figures["mean_e2el_ms"] == 2200.5


def test_a_requested_length_that_is_far_from_the_mean_gives_way_to_it() -> None:
    figures = {"completed": 100, "total_input_tokens": 101_000, "total_output_tokens": 19_800}
    row, _ = checked(figures=figures, input_len=1024, output_len=1000)
    assert (row.input_len, row.output_len) == (1024, 198)
    assert row.qualifiers == [
        "input_len 1,024 was requested; the mean was 1,010",
        "output_len 1,000 was requested; the mean was 198",
    ]
    assert "output_len" in row.derived


def test_a_run_in_which_all_requests_failed_is_reported_and_compared(tmp_path: Path) -> None:
    folder = run_of(tmp_path, "all-failed.json")
    row, text = one("all-failed.json")
    assert row.figures["completed"] == 0
    assert not [name for name in row.figures if name.endswith("_ms")]
    assert "no request was completed" in text
    for command in (["report", str(folder)], ["compare", str(folder), str(folder)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert "all 200 requests failed" in (folder / "report.md").read_text()


def test_ranks_that_are_alone_measure_no_transfer() -> None:
    with pytest.raises(InputError, match="copies to itself"):
        importing.read(WRITTEN / "nccl-without-mpi.txt")


@pytest.mark.parametrize(
    ("gb_per_s", "initiators", "kept"),
    [(4.4e6, 1, 0), (0.0, 1, 0), (-1.0, 1, 0), (45.0, 1, 1), (12_000.0, 1, 0), (12_000.0, 8, 1)],
)
def test_bandwidths_that_nothing_has_are_left_out(gb_per_s: float, initiators: int, kept: int) -> None:
    case = Case("nccl", "nccl", "write", 4096, 1, initiators=initiators)
    reading = Imported([transfer_row(HERE, ReportedTransfer(case, gb_per_s), [])])
    keep_plausible(reading)
    assert (len(reading.rows), len(reading.problems)) == (kept, 1 - kept)


@pytest.mark.parametrize(("name", "qualifier"), [
    ("ib_write_bw-both.txt", "both directions together"),
    ("nixlbench-pairs.txt", "one pair; all together 184 GB/s"),
])  # fmt: skip
def test_a_bandwidth_keeps_its_qualifier(tmp_path: Path, name: str, qualifier: str) -> None:
    (row,) = importing.read(WRITTEN / name).reading.transfers
    assert row.qualifiers == [qualifier]
    folder = run_of(tmp_path, name)
    report = CliRunner().invoke(app, ["report", str(folder)])
    assert report.exit_code == 0, report.output
    assert qualifier in (folder / "report.md").read_text()


def test_a_peak_of_0_was_not_measured() -> None:
    (row,) = importing.read(WRITTEN / "ib_write_bw-both.txt").reading.transfers
    assert row.record.warnings[0].evidence["bw_peak"] is None


def test_qualifiers_of_serving_rows_reach_trial_and_report(tmp_path: Path) -> None:
    result = json.loads((RECORDED / "vllm/result.json").read_text())
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**result, "random_output_len": 999}))
    options = importing.ImportOptions([path], connector="nixl")
    console = Console(file=io.StringIO(), width=200)
    importing.command(options, tmp_path / "results", console)
    (folder,) = (tmp_path / "results").iterdir()
    (trial,) = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert trial["engine"]["source"]["qualifiers"] == ["output_len 999 was requested; the mean was 16"]
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    assert "output_len 999 was requested" in (folder / "report.md").read_text()
