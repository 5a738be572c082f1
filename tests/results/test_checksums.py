"""Checksums of a run folder: no edit goes unnoticed, and no kill looks like one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_files import edit_json

from kvbench.core.records import Cell, RequestRecord, TrialRecord
from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.errors import StoreError
from kvbench.results import checksums
from kvbench.results.checksums import CHECKSUMS, Damage, adopted, damages
from kvbench.results.run import load_run
from kvbench.results.store import RunInfo, RunStore

CELL = Cell("tcp", 1024, 16)


def trial(number: int) -> TrialRecord:
    return TrialRecord(f"t{number}", CELL, 4.0 * number, 7, "met", "", summary={"sent": 1})


def write(store: RunStore, first: int = 0) -> None:
    """Everything that a store can write."""
    store.write_plan({"cells": [], "first": first})
    store.write_environment({"cpu": {}})
    for number in range(first, first + 3):
        store.add_telemetry([{"trial_id": f"t{number}", "value": number}])
        store.add_trial(trial(number), [RequestRecord("r", 0.0, 8, 8, itl_s=[0.5])])
        store.put_cell({"cell": vars(Cell("tcp", number, 16)), "status": "done"})
        store.update(labels=["l" * number])
    store.add_transfer(TransferRecord(Case("tcp", "tcp", "read", 8, first + 1)))
    store.skip_connector("nixl", "not here")


def begun(folder: Path) -> RunStore:
    return RunStore.create(folder, "x", b"name: x", {"cells": []}, {}, RunInfo(kind="sweep"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was gone on with once."""
    store = begun(tmp_path_factory.mktemp("whole"))
    write(store)
    store.close()
    with RunStore.reopen(store.path) as again:
        write(again, 3)
    return store.path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def issues(folder: Path) -> list[str]:
    return [f"{damage.file}: {damage.what}" for damage in damages(folder)]


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_run_is_as_it_was_written(whole: Path) -> None:
    assert (issues(whole), len(files_of(whole))) == ([], 8 + 12)


def test_every_byte_counts(folder: Path) -> None:
    """Of each file a byte is changed, in turn."""
    for name in files_of(folder):
        path = folder / name
        before = path.read_bytes()
        changed = bytearray(before)
        changed[len(changed) // 2] ^= 1
        path.write_bytes(changed)
        assert {damage.file for damage in damages(folder)} == {name}, name
        path.write_bytes(before)
    assert issues(folder) == []


def test_every_file_counts(folder: Path) -> None:
    for name in files_of(folder):
        before = (folder / name).read_bytes()
        (folder / name).unlink()
        found = list(damages(folder))
        assert {damage.file for damage in found} == {name}, name
        assert "is missing" in found[0].what or "lines before line 1 are missing" in found[0].what
        (folder / name).write_bytes(before)


@pytest.mark.parametrize("name", ["requests/t9.parquet", "telemetry/t9.parquet", "outputs.jsonl"])
def test_a_file_more_is_found(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"{}\n")
    assert issues(folder) == [f"{name}: {'line 1 ' if name.endswith('l') else ''}does not belong to this run"]


def _removed(lines: list[bytes], place: int) -> list[bytes]:
    return [*lines[:place], *lines[place + 1 :]]


def _doubled(lines: list[bytes], place: int) -> list[bytes]:
    return [*lines[:place], lines[place], *lines[place:]]


def _edited(lines: list[bytes], place: int) -> list[bytes]:
    return [*lines[:place], lines[place].replace(b"tcp", b"the best of all"), *lines[place + 1 :]]


@pytest.mark.parametrize("name", ["trials.jsonl", "cells.jsonl"])
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("edit", [_removed, _doubled, _edited])
def test_every_line_counts(
    folder: Path, name: str, place: int, edit: Callable[[list[bytes], int], list[bytes]]
) -> None:
    """Also the last one of all: the run has said that it came to its end."""
    path = folder / name
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True), place)))
    (found,) = issues(folder)
    assert found.startswith(f"{name}: ")
    if edit is _edited:
        assert found == f"{name}: line {place + 1} was changed since it was written"
    elif edit is _removed:
        assert found == f"{name}: 1 line before line {place + 1} is missing"


def test_half_a_line_after_the_end_is_found(folder: Path) -> None:
    with (folder / "trials.jsonl").open("ab") as file:
        file.write(b'{"trial_id": ')
    assert issues(folder) == ["trials.jsonl: ends in an incomplete line"]


@pytest.mark.parametrize("place", [0, 7, -2, -1])
def test_lines_of_the_checksums_are_tied_to_each_other(folder: Path, place: int) -> None:
    lines = (folder / CHECKSUMS).read_bytes().splitlines(keepends=True)
    del lines[place]
    (folder / CHECKSUMS).write_bytes(b"".join(lines))
    assert any(damage.startswith((CHECKSUMS, "manifest.json")) for damage in issues(folder))


def test_what_is_damaged_is_said_in_words() -> None:
    damage = Damage("trials.jsonl", "t1: summary.met does not follow", "7", "6")
    assert str(damage) == "trials.jsonl: t1: summary.met does not follow: stored 7, recomputed 6"


# --- kills -----------------------------------------------------------------------------------------
class Killed(BaseException):
    """Nobody catches it."""


def killed(patch: pytest.MonkeyPatch, place: int, work: Callable[[], None]) -> bool:
    """Does the work until the n-th thing that it does to a disk, half of which still happens.

    From then on nothing is done any more, as in a process that is dead: no cleaning up, no last words.
    Returns whether it came so far. What is not synced is not lost: the machine lives on.
    """
    done = 0

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            nonlocal done
            done += 1
            if done == place and name == "write":
                real(words[0], bytes(words[1])[: len(words[1]) // 2])
            if done >= place:
                raise Killed
            return None if name == "fsync" else real(*words, **named)

        return call

    with patch.context() as inside:
        for name in ("write", "replace", "fsync", "rename", "unlink", "ftruncate"):
            inside.setattr(os, name, counted(name, getattr(os, name)))
        with suppress(Killed):
            work()
    return done >= place


def anew(results: Path) -> None:
    with begun(results) as store:
        write(store)


def on(folder: Path) -> None:
    with RunStore.reopen(folder) as store:
        write(store, 3)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.heavy)])
def test_no_kill_looks_like_an_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Killed at any ``step``-th thing that it does to the disk, a run is sound; so it is when continued."""
    place = 1
    while killed(monkeypatch, place, partial(anew, tmp_path / str(place))):
        folders = list((tmp_path / str(place)).glob("2*"))
        if folders:
            assert issues(folders[0]) == [], place
            for again in (1 + place // 2, 10_000):
                killed(monkeypatch, again, partial(on, folders[0]))
                assert issues(folders[0]) == [], (place, again)
            assert load_run(folders[0]).manifest["status"] == "complete"
            assert len(load_run(folders[0]).trials) >= 3
        place += step
    assert place > 80


@pytest.mark.parametrize("name", ["trials.jsonl", "cells.jsonl", "requests/t1.parquet", "plan.json"])
def test_what_was_not_written_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A full disk: the line is announced, but never comes; the run says how it ended."""
    real_write, real_replace = os.write, os.replace

    def full(handle: int, data: bytes) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink().name == name:
            raise OSError(28, "No space left on device")
        return real_write(handle, data)

    def unplaced(source: Path, target: Path) -> None:
        if str(target).endswith(name):
            raise OSError(28, "No space left on device")
        real_replace(source, target)

    def until_it_is_full(store: RunStore) -> None:
        with store:
            store.add_trial(trial(0), [RequestRecord("r", 0.0, 8, 8)])
            monkeypatch.setattr(os, "write", full)
            monkeypatch.setattr(os, "replace", unplaced)
            write(store, 1)

    store = begun(tmp_path)
    with pytest.raises(StoreError, match="No space left"):
        until_it_is_full(store)
    monkeypatch.undo()
    assert (load_run(store.path).manifest["status"], issues(store.path)) == ("failed", [])
    with RunStore.reopen(store.path) as again:
        write(again, 1)
    assert issues(store.path) == []


def test_a_run_under_way_is_no_edited_one(tmp_path: Path) -> None:
    with begun(tmp_path) as store:
        write(store)
        assert issues(store.path) == []
        for at in range(4):
            store.update(labels=[str(at)])
            assert issues(store.path) == []


# --- older runs ------------------------------------------------------------------------------------
def test_what_an_older_kvbench_wrote_is_taken_as_it_is_found(folder: Path) -> None:
    (folder / CHECKSUMS).unlink()
    edit_json(folder / "manifest.json", lambda manifest: manifest.pop("checksums"))
    with RunStore.reopen(folder) as store:
        assert adopted(store.path)
        write(store, 6)
    assert issues(folder) == []
    lines = (folder / "trials.jsonl").read_bytes()
    (folder / "trials.jsonl").write_bytes(lines.replace(b'"t1"', b'"t9"', 1))
    assert issues(folder) == ["trials.jsonl: line 2 was changed since it was written"]


def test_a_folder_that_cannot_be_read_is_said(folder: Path) -> None:
    (folder / "plan.json").unlink()
    (folder / "plan.json").symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match=r"cannot be checked: .*link"):
        issues(folder)


def test_a_digest_is_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 10**6)
    assert checksums.sha256_of_file(tmp_path / "x") == checksums.sha256_of(b"abc" * 10**6)
