"""``kvbench compare``: the conclusions first, rows sorted and grouped by any axis, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_files import imported
from sample_run import ENVIRONMENT, PLAN, SCENARIO, make_requests, make_trial

from kvbench.core.foreign_text import spreadsheet_cell
from kvbench.core.metrics.metrics import Slo, summarise
from kvbench.core.records import Cell, TrialRecord
from kvbench.errors import InputError
from kvbench.report import compare
from kvbench.report.compare import CompareOptions, compare_runs, rows_page
from kvbench.report.tables.table import Column, as_csv, as_latex, as_markdown, latex, of_values
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import CellResult, RunInfo, RunStore

RECORDED = Path(__file__).parents[1] / "recorded" / "seeds"


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return imported(tmp_path_factory.mktemp("notes"), RECORDED / "notes.txt", name="notes")


@pytest.fixture(scope="module")
def pr10884(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return imported(tmp_path_factory.mktemp("pr10884"), RECORDED / "pr10884.txt", name="pr10884")


def listed_rates(folder: Path, seed: int, connectors: tuple[str, ...] = ("mooncake", "nixl")) -> RunFolder:
    """A run of one listed rate for each connector, with 200 requests each."""
    store = RunStore.create(
        folder, "listed", SCENARIO.encode(), PLAN, ENVIRONMENT,
        RunInfo(kind="fixed", seed=1, labels=["emulated"]),
    )  # fmt: skip
    with store:
        for connector in connectors:
            cell = Cell(connector, 1024, 16)
            requests = make_requests(cell, 12.0, seed, 200)
            trial = make_trial(cell, 12.0, seed, requests)
            trial.method, trial.verdict, trial.purpose = "fixed", "measured", "fixed"
            store.add_trial(trial, requests)
    return load_run(store.path)


def printed(paths: list[Path], **options: object) -> str:
    out = io.StringIO()
    compare.command(paths, CompareOptions(**options), Console(file=out, width=160))  # type: ignore[arg-type]
    return out.getvalue()


def test_every_cell_of_the_rows_is_in_csv_and_json(notes: RunFolder) -> None:
    rows = list(csv.DictReader(io.StringIO(printed([notes.path], format="csv"))))
    data = json.loads(printed([notes.path], format="json"))
    assert len(rows) == len(data["rows"]) == 10
    trials = {trial.trial_id: trial for trial in notes.all_trials}
    for row, same in zip(rows, data["rows"], strict=True):
        whole = trials[row["trial_id"]].summary["whole_run"]
        assert float(row["mean_ttft_ms"]) == same["mean_ttft_ms"] == whole["ttft_ms"]["mean"]
        assert float(row["median_tpot_ms"]) == same["median_tpot_ms"] == whole["tpot_ms"]["p50"]
        assert int(row["total_input_tokens"]) == same["total_input_tokens"] == whole["input_tokens"]
        assert re.fullmatch(r"notes\.txt:\d+-\d+", row["source"])
    assert data["by"] == "connector"
    assert {conclusion["rule"] for conclusion in data["conclusions"]} >= {"burst", "slot_cap", "claim"}


def test_the_conclusions_stand_before_the_table(notes: RunFolder) -> None:
    text = printed([notes.path])
    assert text.index("Warnings") < text.index("Inconclusive") < text.rindex("mooncake  ")
    markdown = printed([notes.path], format="md")
    assert markdown.index("five-second burst") < markdown.index("| connector |")


def test_columns_are_called_as_in_the_page(pr10884: RunFolder) -> None:
    page = (RECORDED / "pr10884.txt").read_text()
    header = next(line for line in page.splitlines() if line.startswith("Setting num_rdma_nic"))
    table = next(line for line in printed([pr10884.path], format="md").splitlines() if "num_rdma_nic" in line)
    for title in re.findall(
        r"(?:Mean|Median|P99) (?:TTFT|TPOT|ITL) \(ms\)|Duration \(s\)|Req Throughput", header
    ):
        assert title in table
    assert all(title in table for title in ("Successful Requests", "Total Generated Tokens", "num_rdma_nic"))


@pytest.mark.parametrize("axis", ["connector", "protocol", "nics", "tp", "input_len", "rate"])
def test_rows_are_sorted_and_grouped_by_any_axis(pr10884: RunFolder, axis: str) -> None:
    options = CompareOptions(by=axis, group=axis, sort=("rate",))
    compared = compare_runs([pr10884], options)
    groups = rows_page(compared, options).tables
    levels = [{row[axis] for row in table.rows} for table in groups]
    assert all(len(level) == 1 for level in levels)
    assert len(groups) == len({next(iter(level)) for level in levels})
    assert sum(len(table.rows) for table in groups) == 33
    for table in groups:
        rates = [row["rate"] for row in table.rows]
        assert rates == sorted(rates)
        assert table.columns[0].key == axis


def test_two_runs_of_one_scenario_are_repeats(tmp_path: Path) -> None:
    one, other = listed_rates(tmp_path, 1), listed_rates(tmp_path, 2)
    compared = compare_runs([one, other])
    assert compared.by == "connector"
    (statement,) = [fact for fact in compared.statements if fact.rule == "connector_ahead"]
    assert statement.evidence["scope"] == "runs"
    by_run = compare_runs([one, other], CompareOptions(by="run"))
    assert {fact.evidence["scope"] for fact in by_run.statements if fact.rule == "run_ahead"} == {"requests"}


def test_one_run_with_its_requests_gives_intervals_of_that_run(tmp_path: Path) -> None:
    (statement,) = [
        fact
        for fact in compare_runs([listed_rates(tmp_path, 3)]).statements
        if fact.rule == "connector_ahead"
    ]
    ratios = statement.evidence["places"]["1,024 in, 12 req/s"]
    mean = next(ratio for ratio in ratios if ratio["figure"] == "mean_ttft_ms")
    assert mean["low"] < mean["ratio"] < mean["high"]


def test_runs_that_are_not_comparable_need_force_and_are_marked(tmp_path: Path, notes: RunFolder) -> None:
    listed = listed_rates(tmp_path, 1)
    with pytest.raises(InputError, match="not comparable"):
        printed([listed.path, notes.path])
    for name in ("terminal", "md", "latex"):
        assert "NOT COMPARABLE" in printed([listed.path, notes.path], force=True, format=name)
    data = json.loads(printed([listed.path, notes.path], force=True, format="json"))
    assert any(line.startswith("model:") for line in data["not_comparable"])


def test_a_rate_against_none_is_plain_json(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, "none", SCENARIO.encode(), PLAN, ENVIRONMENT)
    holds = {"max_request_rate": 6.0, "lower": 6.0, "upper": 6.6, "status": "converged"}
    none = {"max_request_rate": None, "lower": None, "upper": 0.5, "status": "slo_unattainable"}
    with store:
        for connector, answer in (("mooncake", holds), ("nixl", none)):
            store.put_cell(CellResult(Cell(connector, 1024, 16), "done", answer))

    def never(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    data = json.loads(printed([store.path], format="json"), parse_constant=never)
    (statement,) = data["conclusions"]
    assert "mooncake sustains a rate, nixl none of the tested rates" in statement["text"]
    assert statement["evidence"]["pairs"][0]["ratio"] is None


def test_searched_rates_stand_with_their_interval(tmp_path: Path) -> None:
    store = RunStore.create(
        tmp_path, "searched", SCENARIO.encode(), PLAN, ENVIRONMENT, RunInfo(labels=["emulated"])
    )
    with store:
        for place, connector in enumerate(("mooncake", "nixl")):
            cell = Cell(connector, 1024, 16)
            requests = make_requests(cell, 6.0 + place * 6, 1)
            store.add_trial(make_trial(cell, 6.0 + place * 6, 1, requests), requests)
            rate = 6.0 + place * 6
            answer = {"max_request_rate": rate, "lower": rate, "upper": rate * 1.1, "status": "converged"}
            store.put_cell(CellResult(cell, "done", answer))
    text = printed([store.path])
    assert "highest request rate, nixl 2.00× mooncake" in text
    assert "6.00 [6.00, 6.60]" in text


@pytest.mark.parametrize(
    "options", [CompareOptions(by="colour"), CompareOptions(sort=("colour",)), CompareOptions(format="xls")]
)
def test_unknown_axes_and_formats_are_named(notes: RunFolder, options: CompareOptions) -> None:
    with pytest.raises(InputError) as caught:
        compare.command([notes.path], options, Console(file=io.StringIO()))
    assert "there are:" in (caught.value.hint or "")


def test_a_run_without_any_load_says_so(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, "empty", b"", {}, {})
    store.finish("failed", "nothing came of it")
    assert "no load was measured" in printed([store.path])
    assert json.loads(printed([store.path], format="json"))["rows"] == []


def test_a_refused_trial_is_no_row(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, "refused", b"", {}, {}, RunInfo(kind="fixed"))
    cell = Cell("a", 64, 4)
    records = make_requests(Cell("tcp", 64, 4), 5.0, 1, 20)
    summary = summarise(records, Slo(250.0, 15.0, 0.95), 5.0, 5.0).to_json()
    with store:
        store.add_trial(TrialRecord("t1", cell, 5.0, 1, "invalid", "late", summary=summary, method="fixed"))
    assert "no load was measured" in printed([store.path])


# --- formats ---------------------------------------------------------------------------------------
@given(st.text(max_size=40))
def test_no_text_breaks_a_format(text: str) -> None:
    table = of_values("", [Column("a", "A"), Column("b", "B")], [{"a": text, "b": 1.5}])
    (row,) = csv.DictReader(io.StringIO(as_csv([table]), newline=""))
    assert row["b"] == "1.5"
    assert row["a"] == spreadsheet_cell(text)
    assert len(as_markdown([table]).splitlines()) == 3
    (line,) = [candidate for candidate in as_latex([table]).splitlines() if candidate.endswith("& 1.50 \\\\")]
    inside = line.removesuffix("& 1.50 \\\\")
    assert not re.search(r"(?<!\\)[&%#_]", inside)


def test_what_latex_and_spreadsheets_would_run_is_text() -> None:
    assert latex(r"50% of $x_1$ & \input{a}") == r"50\% of \$x\_1\$ \& \textbackslash{}input\{a\}"
    assert [spreadsheet_cell(value) for value in ("=1+1", "@x", "-x", "-1.5", "a", None, 2)] == [
        "'=1+1", "'@x", "'-x", "-1.5", "a", "", 2
    ]  # fmt: skip
