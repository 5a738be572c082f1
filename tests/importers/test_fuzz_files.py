"""Files from anywhere: scenarios, results of other tools, traces, run folders. Clear errors, and no more.

``make fuzz`` runs these tests for longer, with new examples each time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import invoke
from hypothesis import given
from hypothesis import strategies as st
from mutations import damaged, fuzz, stored
from rich.console import Console
from sample_run import make_run

from kvbench import importers
from kvbench.core.scenario.scenario import Trace
from kvbench.errors import InputError, KvbenchError, StoreError
from kvbench.importers.parts import importing
from kvbench.importers.parts.importing import ImportOptions
from kvbench.planning.load_files import load_trace
from kvbench.planning.scenario_files import bundled_folder, load_scenario, registry
from kvbench.report.bundle import BundleOptions, bundle
from kvbench.report.report import render_terminal, write_report
from kvbench.results.run import load_run
from kvbench.results.store import CellResult

REGISTRY = registry()
RECORDED = Path(__file__).parents[1] / "recorded"
SCENARIOS = [path.read_bytes() for path in sorted(bundled_folder().glob("*.yaml"))]
TRACE = (
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    b'{"timestamp": 10, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]}\n'
)
TRACES = [
    TRACE,
    b'{"offset_s": 0.5, "input_len": 600, "output_len": 5}\n'
    b'{"timestamp": 1, "input_len": 6, "output_len": 5}\n',
    b"offset_s,input_len,output_len\n0.5,100,7\n1.5,200,9\n",
]
FILES = [path for path in sorted(RECORDED.rglob("*")) if path.is_file() and path.name != "README.md"]
RAW = ("manifest.json", "plan.json", "environment.json", "trials.jsonl", "cells.jsonl", "scenario.yaml")


@contextmanager
def nothing_outside(place: Path) -> Iterator[None]:
    """Nothing appears beside the folder ``place``, nor is there what the hostile names would make here."""
    before = sorted(os.listdir(place.parent))
    yield
    assert sorted(os.listdir(place.parent)) == before
    assert not Path("escaped").exists()


def require_readable(error: KvbenchError) -> None:
    """An error that a user can read: in words, in lines that fit a screen, with an exit code of ours."""
    assert error.message
    assert error.exit_code in (1, 2)
    assert "Traceback" not in str(error)
    assert len(str(error)) < 100_000


# --- scenarios and traces ----------------------------------------------------------------------------
@given(data=damaged(SCENARIOS))
@stored("scenario", "data")
@fuzz(60)
def test_a_scenario_is_planned_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(data)
    try:
        scenario, kept = load_scenario(str(path), known=REGISTRY)
        assert kept == data
        for name in (scenario.name, *(connector.label for connector in scenario.connectors)):
            assert Path(name).name == name
            assert not name.startswith(".")
    except KvbenchError as error:
        require_readable(error)


@pytest.mark.parametrize(
    "text",
    ["a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\ne: [*d, *d]\n" * 1,
     "a: &a {x: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [*a, *a]}}\n" for n in range(50)), "[" * 50_000,
     "- " * 100_000, "? " * 100_000, "{a: " * 100_000, "a: " + "9" * 100_000, "a: |\n" + " x\n" * 6_000,
     '"' + "\\" * 100_000, "!" * 100_000, "&" * 100_000 + " a", "%YAML 9999999999999999999999.1\n---\na: 1",
     "a: 2001-99-99", "a: 0x" + "f" * 10_000],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_bomb_of_yaml_is_refused_by_scenario_and_by_report(tmp_path: Path, text: str) -> None:
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(InputError):
        load_scenario(str(tmp_path / "bomb.yaml"))
    # The same text as the scenario of somebody's run folder.
    from kvbench.results.provenance import model_of, slo_of

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"schema": 1, "status": "complete"}')
    (folder / "scenario.yaml").write_text(text)
    run = load_run(folder)
    assert (model_of(run), slo_of(run).ttft_ms) == ("", None)


@given(data=damaged(TRACES))
@stored("trace", "data")
@fuzz(100)
def test_a_trace_is_read_or_refused_in_words(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.trace"
    path.write_bytes(data)
    try:
        requests = load_trace(Trace(path=str(path)))
        assert all(
            request.input_len > 0 and request.output_len > 0 and request.offset_s >= 0 for request in requests
        )
    except KvbenchError as error:
        require_readable(error)


# --- results of other tools --------------------------------------------------------------------------
@given(damaged([path.read_bytes()[:20_000] for path in FILES]))
@fuzz(50)
def test_any_file_is_imported_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    place = tmp_path_factory.getbasetemp() / "imports" / "results"
    place.mkdir(parents=True, exist_ok=True)
    path = place / "log.txt"
    path.write_bytes(data)
    for name in (None, *importers.names()):
        try:
            source = importing.read(path, name)
        except KvbenchError as error:
            require_readable(error)
            continue
        if name is None:
            with nothing_outside(place):
                folder = importing.write([source], ImportOptions([path], name="../../escaped"), place)
            assert folder.parent == place
            load_run(folder)
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", importers.names())
def test_folders_pipes_and_huge_files_are_no_results(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10 * 2**30)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in ("empty", "pipe", "sparse", "loop"):
        with pytest.raises(InputError):
            importing.read(tmp_path / place, name)


# --- run folders -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(
        tmp_path_factory.mktemp("sample") / "results", connectors=("mooncake", "nixl"), input_lens=(512,)
    )


def copied(sample: Path, to: Path) -> Path:
    """A run folder of one's own, alone in a folder."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(sample, to / "run"))


@pytest.mark.parametrize("name", RAW)
@given(data=st.data())
@fuzz(12)
def test_a_damaged_run_folder_is_reported_or_refused(sample: Path, name: str, data: st.DataObject) -> None:
    place = sample.parent.parent / "damaged"
    folder = copied(sample, place)
    (folder / name).write_bytes(data.draw(damaged([(folder / name).read_bytes()])))
    with nothing_outside(place):
        try:
            run = load_run(folder)
            write_report(folder, ("md", "csv", "json"))
            render_terminal(run, Console(file=io.StringIO()))
        except KvbenchError as error:
            require_readable(error)


REPLACEMENTS = ("folder", "link", "pipe", "empty", "cut", "huge", "loop")


def replace_by(path: Path, kind: str, outside: Path) -> None:
    """Puts something else in a file's place."""
    data = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(data[: len(data) // 2] if kind == "cut" else b"")
        if kind == "huge":
            with path.open("r+b") as file:
                file.truncate(10 * 2**30)


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_whatever_lies_in_a_file_s_place_is_said(sample: Path, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not part of the run")
    parquet = sorted(path.relative_to(sample).as_posix() for path in sample.rglob("*.parquet"))
    for name in (*RAW, parquet[0], parquet[-1]):
        folder = copied(sample, tmp_path / "runs")
        replace_by(folder / name, kind, secret)
        with nothing_outside(tmp_path / "runs"):
            try:
                load_run(folder)
                for file in write_report(folder, ("md", "csv", "json")):
                    assert "not part of the run" not in file.read_text()
            except KvbenchError as error:
                require_readable(error)
        assert secret.read_text() == "not part of the run"


@pytest.mark.parametrize("name", ["tables", "figures", "report.md"])
def test_nothing_is_written_through_a_link(sample: Path, tmp_path: Path, name: str) -> None:
    folder = copied(sample, tmp_path / "runs")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / name).symlink_to(elsewhere / "report.md" if name == "report.md" else elsewhere)
    with contextlib.suppress(StoreError):
        write_report(folder, ("md", "csv", "json"))
    assert not list(elsewhere.iterdir())


def test_names_from_a_run_folder_are_no_paths(sample: Path, tmp_path: Path) -> None:
    """Cells and trials that are called ``../../escaped``, as somebody else's folder may have them."""
    folder = copied(sample, tmp_path / "runs")
    for name in ("trials.jsonl", "cells.jsonl", "plan.json", "manifest.json"):
        text = (folder / name).read_text()
        for word in ("mooncake", "nixl", "quickstart"):
            text = text.replace(word, "../../escaped")
        (folder / name).write_text(text)
    with nothing_outside(tmp_path / "runs"):
        run = load_run(folder)
        assert run.all_trials
        write_report(folder, ("md", "csv", "json"))
        with pytest.raises(StoreError, match="cannot be a file name"):
            run.requests(run.all_trials[0].trial_id)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_a_cell_of_a_wrong_shape_is_left_out_and_said(sample: Path, tmp_path: Path) -> None:
    folder = copied(sample, tmp_path / "runs")
    first, *rest = (folder / "cells.jsonl").read_text().splitlines()
    odd = json.loads(first)
    odd["cell"]["input_len"] = [1]
    (folder / "cells.jsonl").write_text("\n".join([json.dumps(odd), *rest]) + "\n")
    run = load_run(folder)
    assert len(run.cells) == len(rest)
    assert any("input_len" in warning for warning in run.warnings)
    assert all(isinstance(result, CellResult) for result in run.cells)


def empty_run(folder: Path, **manifest: object) -> Path:
    """A run folder in which nothing was measured."""
    (folder / "logs").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "status": "complete", **manifest}))
    return folder


def test_a_bundle_takes_no_file_from_outside(tmp_path: Path) -> None:
    folder = empty_run(tmp_path / "runs" / "run")
    (tmp_path / "secret.log").write_text("not part of the run")
    (folder / "logs" / "linked.log").symlink_to(tmp_path / "secret.log")
    os.mkfifo(folder / "logs" / "pipe.log")
    done = bundle(folder, BundleOptions(tmp_path / "bundle.tar.gz"))
    assert "logs/linked.log" in done.left_out
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        names = archive.getnames()
        assert all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in names)
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.isfile() else None
            assert file is None or b"not part of the run" not in file.read()


def test_what_nobody_foresaw_is_said_without_a_traceback(tmp_path: Path) -> None:
    """Values that are read by nobody's rule, as in a folder changed by hand: a line, a hint, exit code 1."""
    folder = empty_run(tmp_path / "run", skipped=[{}])
    done = invoke("report", str(folder)).failed(1)
    assert "Traceback" not in done.text
    assert "KVBENCH_TRACEBACK=1" in done.err
    assert "Traceback" in invoke("report", str(folder), env={"KVBENCH_TRACEBACK": "1"}).err
