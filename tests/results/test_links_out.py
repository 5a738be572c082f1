"""Nothing of a run folder is read or written through a link, which may lead anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sample_run import make_run

from kvbench.errors import StoreError
from kvbench.files import append_bytes, cut_torn_line, line_of, open_append
from kvbench.results.run import load_run
from kvbench.results.store import RunStore

VICTIM = "the only line, without an end"
FILES = ("trials.jsonl", "cells.jsonl", "outputs.jsonl", ".reserve", "manifest.json", "plan.json")
FOLDERS = ("requests", "telemetry", "logs", "logs/nixl")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sample"), input_lens=(512,), status="running")


@pytest.mark.parametrize("name", FILES)
def test_a_run_is_not_gone_on_with_through_a_linked_file(sample: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(sample, folder)
    victim = tmp_path / "victim"
    victim.write_text(VICTIM)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(victim)
    with pytest.raises(StoreError, match=f"{name} is a link"):
        RunStore.reopen(folder)
    assert victim.read_text() == VICTIM


@pytest.mark.parametrize("name", FOLDERS)
def test_nor_through_a_linked_folder(sample: Path, tmp_path: Path, name: str) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(sample, folder)
    elsewhere.mkdir()
    if (folder / name).is_dir():
        shutil.rmtree(folder / name)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match=f"{name} is a link"):
        RunStore.reopen(folder)
    assert list(elsewhere.iterdir()) == []


def test_no_line_is_appended_or_cut_through_a_link(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text(VICTIM)
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        append_bytes(open_append(link), line_of({"a": 1}))
    with pytest.raises(OSError, match="link"):
        cut_torn_line(link)
    assert victim.read_text() == VICTIM


@pytest.mark.parametrize("name", ["plan.json", "trials.jsonl", "cells.jsonl", "scenario.yaml"])
def test_nothing_is_read_through_a_link(sample: Path, tmp_path: Path, name: str) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(sample, folder)
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    run = load_run(folder)
    found = {"plan.json": run.plan, "trials.jsonl": run.trials, "cells.jsonl": run.cells}
    assert not found.get(name, run.scenario_text)
    assert name == "scenario.yaml" or any(name in warning and "link" in warning for warning in run.warnings)


def test_a_whole_run_behind_a_link_is_gone_on_with(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "run")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    RunStore.reopen(tmp_path / "latest").close()
