"""What ``import kvbench`` offers: tables, pictures, comparisons, simulations; for runs of every kind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import sample_run
import sample_transfers
from run_files import QUICKSTART, edit_json

import kvbench
from kvbench.errors import InputError, NewerSchemaError, StoreError
from kvbench.report.tables.columns import MEANINGS

ROOT = Path(__file__).parents[3]
TABLES = ("summary", "cells", "trials", "requests", "telemetry", "transfers", "calls", "models", "findings")


@pytest.fixture(scope="module")
def run() -> kvbench.Run:
    return kvbench.load(QUICKSTART)


@pytest.fixture(scope="module")
def microbench(tmp_path_factory: pytest.TempPathFactory) -> kvbench.Run:
    return kvbench.load(sample_transfers.make_run(tmp_path_factory.mktemp("microbench")))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QUICKSTART, tmp_path / "run"))


# --- tables ----------------------------------------------------------------------------------------
def test_every_column_of_every_table_is_explained(run: kvbench.Run, microbench: kvbench.Run) -> None:
    for source in (run, microbench):
        for table in TABLES:
            words = "transfers" if table == "summary" and source is microbench else table
            unknown = set(getattr(source, table).columns) - set(MEANINGS[words])
            assert not unknown, (source.kind, table, unknown)
    assert list(kvbench.columns("requests").columns) == ["column", "meaning"]
    assert set(kvbench.columns().table) == set(MEANINGS)
    with pytest.raises(InputError, match="no table is called 'request'"):
        kvbench.columns("request")


def test_summary_is_the_table_of_the_report(run: kvbench.Run) -> None:
    written = pd.read_csv(QUICKSTART / "tables/summary.csv")
    assert run.summary.connector.tolist() == written.connector.tolist()
    assert run.summary.max_request_rate.tolist() == pytest.approx(written.max_request_rate.tolist())
    assert run.cells.max_request_rate.notna().all()
    assert run.cells.trials.sum() == len(run.trials)


def test_requests_are_what_the_records_say(run: kvbench.Run) -> None:
    trial = run.trials.trial_id.iloc[-1]
    table = run.read_requests(trials=[trial])
    records = run.folder.request_records(trial)
    assert len(table) == len(records)
    for column, attribute in (("ttft_ms", "ttft_s"), ("tpot_ms", "tpot_s"), ("e2el_ms", "e2el_s")):
        expected = [getattr(record, attribute) for record in records]
        expected = [float("nan") if value is None else value * 1e3 for value in expected]
        assert table[column].tolist() == pytest.approx(expected, nan_ok=True)
    assert table.ok.tolist() == [record.ok for record in records]
    assert set(table.trial_id) == {trial}


def test_requests_of_all_trials_lie_under_each_other(run: kvbench.Run) -> None:
    assert run.requests.trial_id.nunique() == len(run.trials)
    rates = run.requests.groupby("trial_id", observed=True).request_rate.first()
    assert rates.to_dict() == run.trials.set_index("trial_id").request_rate.to_dict()
    nixl = run.read_requests(["ttft_ms"], connector="nixl", input_len=256)
    rows = run.requests[(run.requests.connector == "nixl") & (run.requests.input_len == 256)]
    assert nixl.ttft_ms.tolist() == pytest.approx(rows.ttft_ms.tolist(), nan_ok=True)
    only_keys = run.read_requests(["trial_id", "request_rate"])
    assert len(only_keys) == len(run.requests)


def test_only_the_needed_columns_are_read(copied: Path) -> None:
    trial = kvbench.load(copied).trials.trial_id.iloc[0]
    path = copied / "requests" / f"{trial}.parquet"
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = {group.column(place).path_in_schema: group.column(place) for place in range(group.num_columns)}
    spoilt = next(chunk for name, chunk in chunks.items() if name.startswith("itl_s"))
    begin = min(spoilt.dictionary_page_offset or spoilt.data_page_offset, spoilt.data_page_offset)
    data = bytearray(path.read_bytes())
    data[begin : begin + spoilt.total_compressed_size] = b"\xff" * spoilt.total_compressed_size
    path.write_bytes(data)
    run = kvbench.load(copied)
    assert run.read_requests(["ttft_ms"], trials=[trial]).ttft_ms.notna().any()
    with pytest.raises(StoreError, match=trial):
        run.read_requests(["itl_s"], trials=[trial])


def test_what_is_not_there_is_refused_by_name(run: kvbench.Run) -> None:
    with pytest.raises(InputError, match="no column 'ttft'"):
        run.read_requests(["ttft"])
    with pytest.raises(InputError, match="no trial called 'x'"):
        run.read_requests(trials=["x"])


def test_a_file_of_an_older_kvbench_lacks_columns(copied: Path) -> None:
    trial = kvbench.load(copied).trials.trial_id.iloc[0]
    path = copied / "requests" / f"{trial}.parquet"
    pq.write_table(pq.read_table(path, columns=["scheduled_s", "first_token_s", "error"]), path)
    table = kvbench.load(copied).read_requests()
    rows = table[table.trial_id == trial]
    assert rows.ttft_ms.notna().any()
    assert rows.ttft_sent_ms.isna().all()
    assert table[table.trial_id != trial].ttft_sent_ms.notna().any()


# --- states ----------------------------------------------------------------------------------------
def test_a_crashed_sweep_gives_what_it_had(copied: Path) -> None:
    lines = (copied / "trials.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "trials.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:100])
    (copied / "cells.jsonl").write_bytes(b"")
    edit_json(copied / "manifest.json", status="running", ended_at=None)
    run = kvbench.load(copied)
    assert (run.status, len(run.trials)) == ("interrupted", 6)
    assert run.cells.empty
    assert "max_request_rate" in run.cells.columns
    assert set(run.summary.outcome) == {"unfinished"}
    assert any("cut off" in warning for warning in run.warnings)
    assert "cut off" in run._repr_html_()
    assert "latency" in list(run.plot)


def test_a_run_without_a_trial_has_tables_without_rows(copied: Path) -> None:
    (copied / "trials.jsonl").write_bytes(b"")
    (copied / "cells.jsonl").write_bytes(b"")
    shutil.rmtree(copied / "requests")
    run = kvbench.load(copied)
    for table in set(TABLES) - {"findings"}:
        assert getattr(run, table).empty
    assert list(run.plot) == []
    assert "no rows yet" in run._repr_markdown_()
    with pytest.raises(InputError, match="no data for the picture 'latency'"):
        run.plot.latency()


def test_a_newer_schema_is_refused(copied: Path) -> None:
    edit_json(copied / "manifest.json", schema=99)
    with pytest.raises(NewerSchemaError, match="schema 99"):
        kvbench.load(copied)


def test_a_run_that_goes_on_is_read_again(copied: Path) -> None:
    lines = (copied / "trials.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "trials.jsonl").write_bytes(b"".join(lines[:3]))
    run = kvbench.load(copied)
    assert len(run.trials) == 3
    (copied / "trials.jsonl").write_bytes(b"".join(lines[:5]))
    assert (len(run.trials), len(run.reload().trials)) == (3, 5)


def test_runs_lists_what_can_be_read_and_what_cannot(tmp_path: Path, copied: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    listed = kvbench.runs(tmp_path)
    assert (listed.path.tolist(), listed.status.tolist()[0]) == ([str(copied), str(broken)], "complete")
    assert "manifest.json" in listed.problem.iloc[1]
    with pytest.raises(InputError, match="does not exist"):
        kvbench.runs(tmp_path / "none")


# --- microbenchmarks -------------------------------------------------------------------------------
def test_a_microbenchmark_has_cases_and_calls(microbench: kvbench.Run) -> None:
    measured = microbench.transfers[microbench.transfers.status == "ok"]
    assert len(microbench.calls) == measured.calls.sum()
    medians = microbench.calls.groupby("case", observed=True).call_s.median()
    assert len(medians) == len(measured)
    assert medians.min() == pytest.approx(measured.call_s_p50.min(), rel=1e-3)
    assert (microbench.transfers.status == "skipped").any()
    assert "busy_machine" in set(microbench.findings.gate)
    assert "nixl over tcp" in microbench._repr_html_()
    assert "bandwidth" in list(microbench.plot)


def test_two_microbenchmarks_are_compared_case_by_case(microbench: kvbench.Run, tmp_path: Path) -> None:
    faster = sample_transfers.make_run(tmp_path, speed=2.0)
    rows = kvbench.compare(microbench, faster).rows
    with_ratio = rows[rows.ratio.notna()]
    assert len(with_ratio) > 20
    assert with_ratio.ratio.between(1.8, 2.2).all()
    with pytest.raises(InputError, match="no table in common"):
        kvbench.compare(microbench, QUICKSTART)


# --- imported runs ---------------------------------------------------------------------------------
def test_an_imported_run_has_rows_with_their_source_and_conclusions() -> None:
    notes = kvbench.load(ROOT / "results/reference/seed-notes")
    assert notes.kind == "imported"
    assert notes.summary.connector.tolist() == ["mooncake"] * 5 + ["nixl"] * 5
    assert notes.summary.mean_ttft_ms.tolist()[4] == pytest.approx(412.94)
    assert notes.trials.source.str.contains(r":\d+-\d+$").all()
    assert set(notes.trials.tp) == {8}
    assert notes.trials.slo_attainment.isna().all()
    assert notes.requests.empty
    assert {"burst", "slot_cap", "impossible_prefill"} <= set(notes.findings.gate)
    assert "| mooncake | 32,768 |" in notes._repr_markdown_()
    compared = kvbench.compare(notes)
    assert not compared.rows.told.any()
    assert set(compared.rows.one) == {"mooncake"}


# --- comparisons -----------------------------------------------------------------------------------
def test_connectors_of_one_run_are_ordered_where_posteriors_tell(run: kvbench.Run) -> None:
    compared = kvbench.compare(run)
    ordered = compared.rows[compared.rows.told]
    assert len(ordered) >= 1
    assert (ordered.ratio > 1).all()
    assert (ordered.low <= ordered.ratio).all()
    alike = compared.rows.text.str.contains("no significant difference")
    assert alike.sum() == compared.rows.ratio.isna().sum()
    assert "<table>" in compared._repr_html_()
    assert repr(compared).startswith("A: quickstart")


def test_runs_that_differ_are_put_together_only_by_force(run: kvbench.Run, tmp_path: Path) -> None:
    other = sample_run.make_run(tmp_path, input_lens=(256, 512))
    with pytest.raises(InputError, match="not comparable"):
        kvbench.compare(run, other)
    compared = kvbench.compare(run, other, force=True)
    assert any(line.startswith("SLO") for line in compared.differing)
    assert "NOT COMPARABLE" in compared._repr_markdown_()
    assert set(compared.summary.run) == {"A", "B"}
    assert len(compared.summary) == len(run.summary) + len(kvbench.load(other).summary)
    assert any(name.endswith("@B") for name in compared.rows.one)


# --- how it looks ----------------------------------------------------------------------------------
class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_words_of_others_are_never_markup(copied: Path) -> None:
    edit_json(copied / "manifest.json", scenario="<script>alert(1)</script>|x")
    run = kvbench.load(copied)
    page = _Elements()
    page.feed(run._repr_html_())
    assert "script" not in page.tags
    assert "<script>alert(1)</script>|x" in "".join(page.text)
    assert page.tags.count("table") == 1
    assert "<script" not in run._repr_markdown_()


def test_a_picture_shows_itself_and_is_the_same_twice(run: kvbench.Run) -> None:
    assert {"max_request_rate", "latency", "ttft_breakdown"} <= set(run.plot)
    first, again = (vars(run.plot.latency())["_repr_png_"]() for _ in range(2))
    assert first.startswith(b"\x89PNG")
    assert first == again
    with pytest.raises(InputError, match="there is no picture called 'latencies'"):
        run.plot("latencies")
    with pytest.raises(AttributeError, match="it has: "):
        run.plot.latencies  # noqa: B018 - the mere asking is what raises


# --- virtual time ----------------------------------------------------------------------------------
def test_a_simulated_run_is_a_run_and_goes_with_it() -> None:
    run = kvbench.simulate("quickstart", {"workload.input_len": [256]}, connectors=["nixl"])
    assert run.mark == "simulated"
    assert run.summary.connector.tolist() == ["nixl"]
    assert run.summary.max_request_rate.iloc[0] > 1
    assert run.requests.ok.any()
    folder = run.path
    assert folder.is_dir()
    del run
    assert not folder.exists()


def test_a_simulated_run_can_be_kept_and_take_one_rate(tmp_path: Path) -> None:
    wanted = {"workload.input_len": [256], "search.equal_rate": False}
    run = kvbench.simulate("quickstart", wanted, connectors=["nixl"], rate=5, output=tmp_path)
    assert run.path.parent == tmp_path
    assert run.trials.request_rate.tolist() == [5.0]
    with pytest.raises(InputError):
        kvbench.simulate("quickstart", {"slo.no_such_key": 1})


def test_splits_are_compared_by_gpu() -> None:
    found = kvbench.simulate_splits(
        "quickstart",
        splits="1:1,2:1",
        overrides={"workload.input_len": [512], "search.max_trials": 4},
        connectors=["nixl"],
    )
    assert set(found.split) >= {"1P1D", "2P1D"}
    assert found.best.sum() == 1
    assert found[found.best].goodput_per_gpu.iloc[0] == found.goodput_per_gpu.max()


# --- the package -----------------------------------------------------------------------------------
def python(code: str) -> str:
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_kvbench_loads_nothing() -> None:
    heavy = ("pandas", "numpy", "rich", "kvbench.api")
    assert python(f"import sys, kvbench; print(sorted(sys.modules.keys() & {set(heavy)!r}))") == "[]"


@pytest.mark.parametrize("name", ["load", "runs", "simulate"])
def test_a_function_is_loaded_when_it_is_asked_for(name: str) -> None:
    code = (
        f"import kvbench; first = kvbench.{name};"
        f"assert callable(first) and first is kvbench.{name};"
        f"from kvbench import {name} as second; assert second is first;"
        "print(first.__module__.startswith('kvbench.'))"
    )
    assert python(code) == "True"


def test_no_module_takes_the_name_of_what_is_offered() -> None:
    code = (
        "import pkgutil, kvbench, kvbench.api\n"
        "print({each.name for each in pkgutil.iter_modules(kvbench.__path__)} & set(kvbench.api.__all__))\n"
        f"print(len(kvbench.runs({str(ROOT / 'results/reference')!r})) > 3, callable(kvbench.simulate),"
        f" kvbench.load({str(QUICKSTART)!r}).kind)"
    )
    assert python(code) == "set()\nTrue True sweep"


def test_what_is_offered_is_said_in_three_places_alike() -> None:
    from kvbench import api

    stub = (ROOT / "kvbench/__init__.pyi").read_text()
    offered = {name for name in api.__all__ if name != "Plots"}
    assert {line.split()[-1] for line in stub.splitlines() if " as " in line} == offered
    assert offered <= set(dir(kvbench))
    assert all(getattr(kvbench, name) is getattr(api, name) for name in offered)


def test_pictures_take_the_place_of_given_axes_and_say_what_they_are(run: kvbench.Run) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5))
    one, other = figure.subplots(1, 2)
    label = one.set_ylabel("mine")
    place = other.get_position().bounds
    assert run.plot.max_request_rate(ax=one) is figure
    assert run.plot.latency("light", ax=other) is figure
    assert one.lines
    assert label.get_text() == "max request rate (req/s)"
    panels = [axes for axes in figure.axes if axes not in (one, other)]
    assert len(panels) == 2 * len({cell.input_len for cell in (c.cell for c in run.folder.cells)})
    assert all(axes.lines for axes in panels)
    for axes in panels:  # all within the place that they were given
        x, y, width, height = axes.get_position().bounds
        assert place[0] - 1e-6 <= x <= x + width <= place[0] + place[2] + 1e-6
        assert place[1] - 1e-6 <= y <= y + height <= place[1] + place[3] + 1e-6
    loose = Figure().add_axes((0, 0, 1, 1))
    with pytest.raises(InputError, match="cannot be divided"):
        run.plot.latency(ax=loose)
    assert "TTFT and TPOT of every trial" in str(run.plot.latency.__doc__)
