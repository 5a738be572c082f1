"""The block of ``kvbench bench``, as a terminal, a page and files have it, and closed loops side by side."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from run_files import printed
from sample_run import ENVIRONMENT, PLAN, SCENARIO, make_requests, make_trial

from kvbench.core.records import Cell, Finding, RequestRecord, TrialRecord
from kvbench.report.compare import CompareOptions, command
from kvbench.report.plots import write_plots
from kvbench.report.report import write_report
from kvbench.report.tables.vllm_bench import DIFFERENCE, closed_loop_table
from kvbench.results.run import CellResult, load_run
from kvbench.results.store import RunInfo, RunStore

PAIR, LONE = Cell("nixl", 512, 16), Cell("aggregated", 512, 16)
REASON = "the load generator was late"


def offered(cell: Cell, rate: float = 10.0, concurrency: int = 0) -> TrialRecord:
    trial = replace(make_trial(cell, rate, 1, make_requests(cell, rate, 1)), purpose="start")
    if concurrency:
        trial = replace(trial, method="closed_loop", request_rate=0.0, verdict="measured")
        trial.engine["concurrency"] = concurrency
    return trial


def bench_run(folder: Path, trials: Sequence[TrialRecord]) -> Path:
    argv = ["kvbench", "bench", "quickstart"]
    info = RunInfo(kind="bench", argv=argv, seed=7, hosts=["node-a"], labels=["emulated"])
    store = RunStore.create(folder, "quickstart", SCENARIO.encode(), PLAN, ENVIRONMENT, info)
    for trial in trials:
        store.add_trial(trial, make_requests(trial.cell, trial.request_rate or 10.0, 1))
        refused = trial.verdict == "invalid"
        main = trial.method == "sustained"
        reason = f"every trial was refused: {trial.reason}" if refused else ""
        status = "refused" if refused else "done"
        store.put_cell(CellResult(trial.cell, status, reason=reason, method=trial.method, main=main))
    store.finish("complete")
    return store.path


def shown(folder: Path) -> str:
    return printed(load_run(folder))


def test_one_block_has_the_lines_of_vllm_bench_serve(tmp_path: Path) -> None:
    trial = offered(PAIR)
    text = shown(bench_run(tmp_path, [trial]))
    lines = dict(line.rsplit(maxsplit=1) for line in text.splitlines() if len(line.split()) > 1)
    whole = trial.summary["whole_run"]
    assert (lines["Successful requests"], lines["Failed requests"]) == ("120", "0")
    assert lines["Request goodput (req/s)"] == f"{trial.summary['met'] / whole['duration_s']:.2f}"
    assert lines["Peak concurrent requests"] == str(trial.summary["peak_in_flight"])
    assert lines["Peak output token throughput (tok/s)"] == f"{trial.summary['peak_output_tok_per_s']:.0f}"
    titles = [line.split(" (ms)")[0] for line in text.splitlines() if "(ms)" in line]
    latencies = [f"{word} {name}" for name in ("TTFT", "TPOT", "ITL", "E2EL")
                 for word in ("Mean", "Median", "P90", "P99")]  # fmt: skip
    assert titles == [*latencies, "Mean KV transfer"]
    assert DIFFERENCE.replace("`", "") in text
    assert "max rate" not in text


def test_goodput_is_never_above_the_rate_that_arrived(tmp_path: Path) -> None:
    # 9 requests in 0.9 s, all within the SLO: by chance more than the 8 a second that were offered.
    requests = [
        RequestRecord(f"r{n}", n / 10, 512, 2, n / 10, n / 10 + 0.01, n / 10 + 0.02, status=200)
        for n in range(1, 10)
    ]
    for request in requests:
        request.itl_s, request.output_len = [0.01], 2
    made = make_trial(PAIR, 8.0, 1, requests)
    assert made.summary["met"] == 9
    assert made.summary["window"]["end_s"] == pytest.approx(0.9)
    folder = bench_run(tmp_path, [replace(made, purpose="start")])
    write_report(folder, ("csv",))
    (row,) = csv.DictReader((folder / "tables" / "bench.csv").read_text().splitlines())
    assert float(row["request_rate"]) == 8.0
    assert float(row["arrived_request_rate"]) == pytest.approx(9 / 0.9)
    assert float(row["run_request_goodput"]) == pytest.approx(9 / 0.92)
    assert float(row["request_throughput"]) == pytest.approx(9 / 0.92)


def test_a_closed_loop_has_no_rate_of_arrivals(tmp_path: Path) -> None:
    text = shown(bench_run(tmp_path, [offered(PAIR, concurrency=4)]))
    assert "arrived" not in text


def test_a_lone_server_has_no_kv_lines_and_a_load_without_slo_no_goodput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLAN["scenario"], "slo", {})
    text = shown(bench_run(tmp_path, [offered(LONE)]))
    assert "Request throughput" in text
    assert "KV" not in text
    assert "goodput" not in text


def test_several_loads_stand_side_by_side_and_a_refused_one_says_why_in_one_line(tmp_path: Path) -> None:
    refused = replace(offered(Cell("tcp", 512, 16)), verdict="invalid", reason=REASON)
    refused.findings = [Finding("client_late", "invalid", REASON, "use a quieter machine")]
    folder = bench_run(tmp_path, [offered(LONE), offered(PAIR), refused])
    text = shown(folder)
    assert any(line.split() == ["aggregated", "nixl"] for line in text.splitlines())
    assert f"refused: tcp, 512 in, 16 out, 10.0 req/s: {REASON}" in text
    assert text.count(REASON) == 1
    write_report(folder, ("csv", "md"))
    rows = list(csv.DictReader((folder / "tables" / "bench.csv").read_text().splitlines()))
    assert [(row["connector"], row["request_rate"]) for row in rows] == [
        ("aggregated", "10.0"),
        ("nixl", "10.0"),
    ]
    page = (folder / "report.md").read_text()
    assert "Serving benchmark" in page
    assert "max rate" not in page


def test_one_load_has_no_picture_over_the_rate(tmp_path: Path) -> None:
    folder = bench_run(tmp_path, [offered(PAIR)])
    drawn = {path.stem for path in write_plots(load_run(folder), folder / "figures")}
    assert not drawn & {"latency", "goodput", "max_request_rate", "pareto"}


def test_the_state_of_a_refused_closed_loop_names_the_gates_alone(tmp_path: Path) -> None:
    late = Finding("client_late", "invalid", REASON)
    trial = replace(offered(PAIR, concurrency=8), verdict="invalid", reason=REASON * 20, findings=[late])
    table = closed_loop_table(load_run(bench_run(tmp_path, [trial])))
    assert table.cells[0][-1] == "refused: client_late"


def test_closed_loops_are_compared_where_as_many_are_under_way(tmp_path: Path) -> None:
    runs = [bench_run(tmp_path / name, [offered(PAIR, concurrency=8)]) for name in ("a", "b")]
    console = Console(file=io.StringIO(), width=160)
    assert command(runs, CompareOptions(), console) == 0
    text = console.file.getvalue()
    assert "A or B" in text
    assert "0 req/s" not in text
    console = Console(file=io.StringIO(), width=160)
    more = bench_run(tmp_path / "c", [offered(PAIR, concurrency=16)])
    command([runs[0], more], CompareOptions(by="concurrency", format="md"), console)
    assert "max concurrency" in console.file.getvalue()
