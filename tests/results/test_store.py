"""The run folder: readable at every instant, whatever kills its writer."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.records import SCHEMA_VERSION, Cell, Finding, RequestRecord, TrialRecord
from kvbench.errors import NewerSchemaError, StoreError
from kvbench.files import append_bytes, line_of, open_append, write_json
from kvbench.results.checksums import damages
from kvbench.results.parquet import write_parquet
from kvbench.results.run import listed_runs, writer_is_alive
from kvbench.results.store import CellResult, RunInfo, RunStore, load_run

CELL = Cell("tcp", 1024, 16)


def new_store(folder: Path, **info: object) -> RunStore:
    settings = RunInfo(**{"argv": ["kvbench", "sweep"], "seed": 7, "hosts": ["here"], **info})  # type: ignore[arg-type]
    return RunStore.create(
        folder, "Quick Start!", b"name: quickstart\r\n", {"cells": []}, {"cpu": {}}, settings
    )


def trial(number: int = 1, **changes: object) -> TrialRecord:
    record = TrialRecord(f"tcp-in1024-{number:03d}", CELL, 4.0 * number, 7, "met", "", summary={"n": number})
    return replace(record, **changes)  # type: ignore[arg-type]


def request(number: int) -> RequestRecord:
    return RequestRecord(f"r{number}", number * 0.1, 1024, 16, number * 0.1, 1.0, 1.5, 16, [0.25, 0.5], 200)


def _removed(path: Path) -> None:
    path.unlink()


def _replaced(path: Path) -> None:
    path.write_bytes(b"")
    path.with_suffix(".new").write_bytes(b"")
    path.with_suffix(".new").rename(path)


def _emptied(path: Path) -> None:
    os.truncate(path, 0)


def _grown(path: Path) -> None:
    with path.open("a") as file:
        file.write("{}\n")


@pytest.mark.parametrize("lost", [_removed, _replaced, _emptied, _grown])
@pytest.mark.parametrize("name", ["trials.jsonl", "cells.jsonl"])
def test_a_file_that_is_not_ours_any_more_is_said(
    tmp_path: Path, name: str, lost: Callable[[Path], None]
) -> None:
    with new_store(tmp_path / "results") as store:
        cell = {"cell": {"connector": "tcp", "input_len": 1024, "output_len": 16}, "status": "done"}
        for _ in range(2):
            store.add_trial(trial())
            store.put_cell(cell)
        lost(store.path / name)
        append = (
            partial(store.add_trial, trial(2)) if name == "trials.jsonl" else partial(store.put_cell, cell)
        )
        with pytest.raises(StoreError, match=rf"{name} was (removed or replaced|changed by another process)"):
            append()


def test_a_run_folder_has_the_promised_shape(tmp_path: Path) -> None:
    with new_store(tmp_path / "results", labels=["emulated"]) as store:
        store.skip_connector("nixl", "not installed", "make setup")
        store.skip_connector("nixl", "still not installed", "make setup")
        store.add_trial(trial(), [request(0), request(1)])
        store.put_cell({"cell": {"connector": "tcp", "input_len": 1024, "output_len": 16}, "status": "done"})
        (store.logs / "router.log").write_text("up\n")
        running = json.loads((store.path / "manifest.json").read_text())
        assert (running["status"], running["ended_at"]) == ("running", None)
    stamp, *name, short = store.path.name.split("-")
    assert (name, len(short)) == (["quick", "start"], 6)
    assert time.strptime(stamp, "%Y%m%dT%H%M%SZ")
    assert (store.path / "scenario.yaml").read_bytes() == b"name: quickstart\r\n"
    run = load_run(store.path)
    assert (run.manifest["status"], run.manifest["schema"]) == ("complete", SCHEMA_VERSION)
    assert run.manifest["argv"] == ["kvbench", "sweep"]
    assert run.manifest["ended_at"] >= run.manifest["started_at"]
    assert run.skipped == [{"connector": "nixl", "reason": "still not installed", "hint": "make setup"}]
    assert run.labels == ["emulated"]
    assert run.trials == [trial()]
    assert run.request_records("tcp-in1024-001") == [request(0), request(1)]
    assert (list(run.requests("tcp-in1024-001", ["sent_s"]).columns), run.warnings) == (["sent_s"], [])
    assert sorted(os.listdir(tmp_path / "results")) == [store.path.name]


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    with new_store(tmp_path) as first, new_store(tmp_path) as second:
        assert first.path != second.path


def test_a_running_run_can_be_read_and_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    assert load_run(store.path).manifest["status"] == "running"
    store.add_trial(trial())
    assert load_run(store.path).trials == [trial()]
    assert writer_is_alive(store.path)
    assert [entry.status for entry in listed_runs(tmp_path)] == ["running"]
    store.close()  # what the kernel does when the process dies
    run = load_run(store.path)
    assert run.manifest["status"] == "interrupted"
    assert "cut off" in run.warnings[0]
    assert [entry.status for entry in listed_runs(tmp_path)] == ["interrupted"]


@pytest.mark.parametrize(("error", "status", "text"), [
    (KeyboardInterrupt(), "interrupted", "interrupted"),
    (StoreError("no luck", hint="try again"), "failed", "no luck (try again)"),
    (ValueError(), "failed", "ValueError"),
])  # fmt: skip
def test_the_store_writes_how_it_ended(tmp_path: Path, error: BaseException, status: str, text: str) -> None:
    with pytest.raises(type(error)), new_store(tmp_path) as store:
        raise error
    manifest = load_run(store.path).manifest
    assert (manifest["status"], manifest["error"]) == (status, text)


def test_the_first_finish_counts_and_nothing_is_written_after_it(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.finish("failed", "a server died")
    store.finish("complete")
    with pytest.raises(StoreError, match="already finished"):
        store.add_trial(trial())
    assert load_run(store.path).manifest["error"] == "a server died"


def test_of_two_lines_for_a_cell_the_later_counts(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        store.put_cell(CellResult(CELL, "failed", reason="port"))
        store.put_cell(CellResult(Cell("tcp", 2048, 16), "skipped"))
        store.put_cell(CellResult(CELL, "done", {"max_request_rate": 4.0}, extra={"note": "x"}))
    cells = load_run(store.path).cells
    assert [(result.cell.input_len, result.status) for result in cells] == [(1024, "done"), (2048, "skipped")]
    assert cells[0].extra == {"note": "x"}


def test_a_torn_line_and_missing_files_are_warnings(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        store.add_trial(trial(1))
        store.add_trial(trial(2))
    path = store.path / "trials.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    (store.path / "cells.jsonl").unlink()
    (store.path / "plan.json").unlink()
    (store.path / "environment.json").write_text("[1")
    run = load_run(store.path)
    assert ([entry.trial_id for entry in run.trials], len(run.warnings)) == (["tcp-in1024-001"], 4)
    assert "trials.jsonl: the last line is cut off and is left out" in run.warnings
    path.write_bytes(b'{"half\n{"schema": 1}\n' + content)
    run = load_run(store.path)
    assert len(run.trials) == 2
    assert any("line 1 cannot be read" in warning for warning in run.warnings)
    assert any("expected fields" in warning for warning in run.warnings)


@pytest.mark.parametrize("keep", range(0, 400, 13))
def test_any_prefix_of_the_trials_file_can_be_loaded(tmp_path: Path, keep: int) -> None:
    with new_store(tmp_path) as store:
        store.add_trial(trial(1))
        store.add_trial(trial(2))
    path = store.path / "trials.jsonl"
    path.write_bytes(path.read_bytes()[:keep])
    assert len(load_run(store.path).trials) <= 2


def test_what_is_no_run_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run folder"):
        load_run(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema": ')
    with pytest.raises(StoreError, match="cannot be read") as cut:
        load_run(tmp_path)
    assert "take it from a copy of the run" in cut.value.hint
    (tmp_path / "manifest.json").write_text('{"schema": "1"}')
    with pytest.raises(StoreError, match="unknown schema"):
        load_run(tmp_path)


def test_a_newer_schema_is_refused_politely(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        store.update(schema=SCHEMA_VERSION + 1, kvbench="9.9")
    with pytest.raises(NewerSchemaError, match=r"kvbench 9\.9 with schema 2.*upgrade kvbench"):
        load_run(store.path)


def test_missing_requests_are_said(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        store.add_trial(trial())
        with pytest.raises(StoreError, match="cannot be a file name"):
            store.add_trial(trial(trial_id="../x"), [request(0)])
    with pytest.raises(StoreError, match="does not exist"):
        load_run(store.path).requests("tcp-in1024-001")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .* GB free there"):
        new_store(tmp_path / "file" / "results")


def test_json_stays_strict_json(tmp_path: Path) -> None:
    import numpy as np

    data = {"nan": math.nan, "inf": [math.inf], "np": np.int64(3), "path": Path("a"), "odd": "\ud800\u2028é"}
    write_json(tmp_path / "x.json", data)
    handle = open_append(tmp_path / "x.jsonl")
    append_bytes(handle, line_of(data))
    os.close(handle)
    expected = {"nan": None, "inf": [None], "np": 3, "path": "a", "odd": "\ud800\u2028é"}
    assert json.loads((tmp_path / "x.json").read_bytes()) == expected
    assert json.loads((tmp_path / "x.jsonl").read_bytes()) == expected


def test_a_failed_append_leaves_no_half_line(tmp_path: Path) -> None:
    handle = open_append(tmp_path / "x.jsonl")
    append_bytes(handle, line_of({"a": 1}))
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))  # room for half of the next line
    try:
        with pytest.raises(OSError, match="File too large"):
            append_bytes(handle, line_of({"b": "x" * 100}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    append_bytes(handle, line_of({"c": 3}))
    os.close(handle)
    assert (tmp_path / "x.jsonl").read_text() == '{"a": 1}\n{"c": 3}\n'


# --- killed writers ---------------------------------------------------------------------------
WRITER = """
import sys
from kvbench.core.records import Cell, RequestRecord, TrialRecord
from kvbench.results.store import RunStore
cell = Cell("tcp", 1024, 16)
while True:
    store = RunStore.create(sys.argv[1], "kill", b"name: kill", {"cells": []}, {}, None)
    print("made", flush=True)
    for number in range(30):
        requests = [RequestRecord(f"r{i}", i * 0.1, 1024, 16, itl_s=[0.5] * 16) for i in range(50)]
        store.add_trial(TrialRecord(f"t{number}", cell, 1.0, 0, "met", "x" * 500), requests)
        store.put_cell({"cell": vars(Cell("tcp", number, 16)), "status": "done"})
        store.update(labels=["l" * number])
    store.finish("complete")
"""


@pytest.mark.parametrize("delay_ms", [0, 3, 7, 15, 31, 60, 110, 170, 230, 300])
def test_a_kill_at_any_moment_leaves_readable_folders(tmp_path: Path, delay_ms: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == b"made\n"
        time.sleep(delay_ms / 1000)
    finally:
        writer.kill()
        writer.communicate(timeout=10)
    folders = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert folders
    for folder in folders:
        run = load_run(folder)
        assert run.manifest["status"] in ("interrupted", "complete")
        assert run.scenario_text == "name: kill"
        assert [entry.trial_id for entry in run.trials] == [f"t{n}" for n in range(len(run.trials))]
        assert len(run.cells) in (len(run.trials), len(run.trials) - 1)
        assert list(damages(folder)) == []
        for entry in run.trials:
            assert len(run.requests(entry.trial_id, ["request_id"])) == 50


# --- round trips ------------------------------------------------------------------------------
times = st.none() | st.floats(0, 1e5)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
requests = st.builds(
    RequestRecord, request_id=text, scheduled_s=st.floats(0, 1e5), input_len=st.integers(0, 2**31 - 1),
    requested_output_len=st.integers(0, 2**31 - 1), sent_s=times, first_token_s=times, last_token_s=times,
    output_len=st.integers(0, 2**31 - 1), itl_s=st.lists(st.floats(0, 1e5, width=32), max_size=5),
    status=st.integers(0, 599), error=st.sampled_from(["", "timeout", "cancelled"]), error_detail=text,
)  # fmt: skip
json_values = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text
json_values |= st.floats(allow_nan=False, allow_infinity=False)
objects = st.dictionaries(text, json_values | st.lists(json_values, max_size=3), max_size=4)
trials = st.builds(
    TrialRecord, trial_id=text, cell=st.builds(Cell, text, st.integers(0, 2**40), st.integers(0, 2**40)),
    request_rate=st.floats(0, 1e9), seed=st.integers(0, 2**63),
    verdict=st.sampled_from(["met", "missed", "invalid"]), reason=text, purpose=text, started_at=text,
    duration_s=st.floats(0, 1e9), summary=objects, engine=objects,
    findings=st.lists(st.builds(Finding, text, st.just("note"), text, text, objects), max_size=2),
    labels=st.lists(text, max_size=2),
)  # fmt: skip


def test_the_strategies_cover_every_field() -> None:
    assert {entry.name for entry in fields(RequestRecord)} == set(RequestRecord("a", 0, 1, 1).to_json())


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(requests, min_size=1, max_size=4))
def test_parquet_keeps_requests(tmp_path_factory: pytest.TempPathFactory, rows: list[RequestRecord]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path_factory.mktemp("p") / "x.parquet"
    write_parquet(path, rows, {"trial_id": "t"})
    table = pq.read_table(path)
    assert [RequestRecord.from_json(row) for row in table.to_pylist()] == rows
    assert table.schema.field("itl_s").type == pa.list_(pa.float32())
    assert table.schema.metadata[b"trial_id"] == b"t"


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(trials, max_size=4))
def test_trials_survive_json_lines(tmp_path_factory: pytest.TempPathFactory, rows: list[TrialRecord]) -> None:
    path = tmp_path_factory.mktemp("j") / "x.jsonl"
    handle = open_append(path)
    for row in rows:
        append_bytes(handle, line_of(row.to_json()))
    os.close(handle)
    lines = path.read_bytes().split(b"\n")[:-1]
    assert [TrialRecord.from_json(json.loads(line)) for line in lines] == rows


def test_an_undecodable_error_text_does_not_lose_the_trial(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", [replace(request(1), error_detail="\udcff broken")], {})
    assert (tmp_path / "x.parquet").stat().st_size > 0


def test_rows_become_the_columns_that_arrow_would_make_and_need_no_pandas(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "mixed": [1.5, None, 2], "whole": [1, None, 3], "text": ["a", None, "ü"], "flag": [True, None, False],
        "nothing": [None, None, None],
    }  # fmt: skip
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    code = (
        "import sys, pathlib; from kvbench.results.parquet import write_rows; "
        f"write_rows(pathlib.Path(sys.argv[1]), {rows!r}); print('pandas' in sys.modules)"
    )
    path = tmp_path / "rows.parquet"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
    assert pq.read_table(path).equals(pa.table(columns))


def test_importing_the_store_loads_no_heavy_library() -> None:
    heavy = ("pandas", "pyarrow", "numpy")
    code = f"import sys, kvbench.results.store; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
