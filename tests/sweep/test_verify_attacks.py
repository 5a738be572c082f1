"""``kvbench verify`` cannot be switched off from inside a run folder, not even with checksums made anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measured_run import measured_run, with_rebuilt_checksums
from typer.testing import CliRunner

from kvbench.cli.app import app
from kvbench.errors import EXIT_FAILED, EXIT_NOT_VERIFIED, EXIT_OK
from kvbench.report.report import write_report
from kvbench.results.checksums import CHECKSUMS
from kvbench.results.provenance import mark_of
from kvbench.results.run import load_run
from kvbench.sweep.verify.audit import CLASSES, audit, class_of

pytestmark = pytest.mark.timeout(600)
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = measured_run(tmp_path_factory.mktemp("measured"))
    (folder / "telemetry" / f"{load_run(folder).trials[0].trial_id}.parquet").write_bytes(b"samples")
    return with_rebuilt_checksums(folder)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def document(name: str, edit: Callable[[dict[str, Any]], object]) -> Edit:
    """Edits a JSON file."""

    def edited(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        edit(data)
        (folder / name).write_text(json.dumps(data))

    return edited


def rows(
    name: str, edit: Callable[[dict[str, Any]], object], first: int = 0, last: int | None = None
) -> Edit:
    """Edits lines of a file of JSON lines, all by default."""

    def edited(folder: Path) -> None:
        found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for row in found[first:last]:
            edit(row)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))

    return edited


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def sessions(edit: Callable[[dict[str, Any]], object]) -> Edit:
    return document("manifest.json", lambda manifest: [edit(each) for each in manifest["sessions"]])


def text(name: str, old: str, new: str) -> Edit:
    def edited(folder: Path) -> None:
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new))

    return edited


def without_label(row: dict[str, Any]) -> None:
    row["labels"] = [label for label in row["labels"] if label != "emulated"]


def manifest(**values: Any) -> Edit:
    return document("manifest.json", lambda data: data.update(values))


def forgotten(*keys: str) -> Edit:
    return document("manifest.json", lambda data: [data.pop(key, None) for key in keys])


def moved_ttft(row: dict[str, Any]) -> None:
    parts = row["engine"]["ttft_breakdown_ms"]
    parts["prefill"] = (parts["prefill"] or 0.0) + 5.0


NOT_SOUND, NOT_VERIFIED, SOUND = "not sound", "not verified", "sound"
ATTACKS: dict[str, tuple[Edit, bool, str, str]] = {
    # name: (edit, digests are rebuilt too, verdict, words that name it)
    "rules of another version": (
        sessions(lambda each: each.update(rules_version=0)),
        False,
        NOT_VERIFIED,
        "rules without a version",
    ),
    "rules of a later version": (
        sessions(lambda each: each.update(rules_version=10**6)),
        False,
        NOT_VERIFIED,
        "version 1000000 of the rules",
    ),
    "rules deleted": (sessions(lambda each: each.pop("rules_version")), False, NOT_VERIFIED, "rules"),
    "sessions deleted": (manifest(sessions=[]), False, NOT_VERIFIED, "rules"),
    "an unknown key in the scenario": (
        document("plan.json", lambda plan: plan["scenario"].update(colour="red")),
        False,
        NOT_SOUND,
        "the scenario was changed since the run began, in plan.json",
    ),
    "the same with its digest": (
        document("plan.json", lambda plan: plan["scenario"].update(colour="red")),
        True,
        NOT_VERIFIED,
        "cannot be recomputed",
    ),
    "the scenario null": (
        document("plan.json", lambda plan: plan.update(scenario=None)),
        True,
        NOT_VERIFIED,
        "plan.json has no scenario",
    ),
    "asked null": (manifest(asked=None), False, NOT_VERIFIED, "searches cannot be repeated"),
    "kind soak": (manifest(kind="soak"), False, NOT_SOUND, "kind soak does not fit"),
    "kind chaos": (manifest(kind="chaos"), False, NOT_SOUND, "kind chaos does not fit"),
    "kind microbench": (manifest(kind="microbench"), False, NOT_SOUND, "kind microbench does not fit"),
    "kind imported": (manifest(kind="imported"), False, NOT_SOUND, "kind imported does not fit"),
    "kind simulate": (manifest(kind="simulate"), False, NOT_SOUND, "the label simulated is missing"),
    "kind of nothing": (manifest(kind="x"), False, NOT_SOUND, "kind 'x' is none of"),
    "all trials imported": (
        rows("trials.jsonl", lambda row: row.update(method="imported")),
        False,
        NOT_SOUND,
        "does not fit trials of the method imported",
    ),
    "all of it imported": (
        both(
            rows("trials.jsonl", lambda row: row.update(method="imported")),
            manifest(kind="imported", labels=["emulated", "imported"]),
        ),
        False,
        NOT_VERIFIED,
        "measured by other tools",
    ),
    "marked as imported": (manifest(imported={}), False, NOT_VERIFIED, "measured by other tools"),
    "no checksums, rules and digests": (
        both(
            lambda folder: (folder / CHECKSUMS).unlink(),
            forgotten("checksums", "asked_digests"),
            sessions(lambda each: each.pop("rules_version")),
        ),
        False,
        NOT_VERIFIED,
        "it has no checksums",
    ),
    "no checksums": (
        both(lambda folder: (folder / CHECKSUMS).unlink(), forgotten("checksums")),
        False,
        NOT_VERIFIED,
        "it has no checksums",
    ),
    "no digests": (forgotten("asked_digests"), False, NOT_VERIFIED, "no digests of scenario.yaml"),
    "another schema, and another scenario": (
        both(text("scenario.yaml", "ttft_ms: 250", "ttft_ms: 300"), manifest(schema=1)),
        False,
        NOT_SOUND,
        "in scenario.yaml",
    ),
    "EMULATED removed": (
        both(document("manifest.json", without_label), rows("trials.jsonl", without_label)),
        False,
        NOT_SOUND,
        "the label emulated is missing",
    ),
    "EMULATED removed from one trial": (
        rows("trials.jsonl", without_label, 0, 1),
        False,
        NOT_SOUND,
        "the label emulated is missing",
    ),
    "another engine in the plan": (
        both(
            document("manifest.json", without_label),
            rows("trials.jsonl", without_label),
            document("plan.json", lambda plan: plan["scenario"]["deployment"].update(engine="external")),
        ),
        False,
        NOT_SOUND,
        "in plan.json",
    ),
    "SIMULATED added": (manifest(labels=["emulated", "simulated"]), False, NOT_SOUND, "does not fit"),
    "another transport": (
        rows("trials.jsonl", lambda row: row["engine"].update(transport="ucx:rc_mlx5/mlx5_0:1"), -1),
        False,
        NOT_SOUND,
        "its transport is not the one of plan.json",
    ),
    "a transport where none is": (
        rows("trials.jsonl", lambda row: row["engine"].update(transport="rdma"), 0, 1),
        False,
        NOT_SOUND,
        "its transport is not the one of plan.json: stored rdma, recomputed none",
    ),
    "another SLO in scenario.yaml": (
        text("scenario.yaml", "ttft_ms: 250", "ttft_ms: 300"),
        False,
        NOT_SOUND,
        "the scenario was changed since the run began, in scenario.yaml",
    ),
    "the same SLO with its digest": (
        text("scenario.yaml", "ttft_ms: 250", "ttft_ms: 300"),
        True,
        NOT_SOUND,
        "slo.ttft_ms is not that of plan.json",
    ),
    "the list of overridden values deleted": (
        forgotten("overridden"),
        False,
        NOT_VERIFIED,
        "values that options changed",
    ),
    "another SLO in plan.json": (
        document("plan.json", lambda plan: plan["scenario"]["slo"].update(ttft_ms=300.0)),
        True,
        NOT_SOUND,
        "slo.ttft_ms is not that of plan.json",
    ),
    "another seed": (manifest(seed=99), False, NOT_SOUND, "seed is not that of plan.json"),
    "a cell that nobody planned": (
        rows("cells.jsonl", lambda row: row["cell"].update(connector="mooncake"), -1),
        False,
        NOT_SOUND,
        "is not a cell of plan.json",
    ),
    "cells of the plan": (
        document("plan.json", lambda plan: plan["cells"].pop()),
        False,
        NOT_SOUND,
        "is not a cell of plan.json",
    ),
    "a part of the TTFT": (
        rows("trials.jsonl", moved_ttft, -1),
        False,
        NOT_SOUND,
        "engine.ttft_breakdown_ms does not add up",
    ),
    "the mean TTFT beside its parts": (
        rows("trials.jsonl", lambda row: row["engine"].update(ttft_ms_mean_of_all=1.0), -1),
        False,
        NOT_SOUND,
        "engine.ttft_ms_mean_of_all does not follow",
    ),
    "no outputs": (lambda folder: (folder / "outputs.jsonl").unlink(), False, NOT_VERIFIED, "not stored"),
    "no requests": (
        lambda folder: next((folder / "requests").glob("*")).unlink(),
        False,
        NOT_SOUND,
        "is missing",
    ),
    "another machine": (
        document("environment.json", lambda data: data.update(gpus=[{"name": "H100"}] * 8)),
        False,
        SOUND,
        "only checksummed: environment.json",
    ),
    "no telemetry": (
        lambda folder: shutil.rmtree(folder / "telemetry"),
        False,
        SOUND,
        "trials without telemetry",
    ),
}


def test_the_folder_is_sound_as_it_is(whole: Path) -> None:
    found = audit(whole)
    assert (found.damages, found.unverified, found.notes) == ([], [], [])
    assert (found.verdict, found.checked["answers"]) == (SOUND, 2)
    assert any("environment.json" in each and "telemetry/ (1)" in each for each in found.unproven)
    assert {trial.engine["transport"] for trial in load_run(whole).trials} == {"", "tcp"}
    mark = mark_of(load_run(whole))
    assert mark.word == "emulated"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_edit_with_rebuilt_checksums_does_not_stay_sound(folder: Path, name: str) -> None:
    edit, digests_too, verdict, words = ATTACKS[name]
    edit(folder)
    with_rebuilt_checksums(folder, digests_too=digests_too)
    found = audit(folder)
    said = [*map(str, found.damages), *found.unverified, *found.unproven]
    assert found.verdict == verdict, said
    assert any(words in each for each in said), said


def test_each_verdict_has_its_exit_code_and_its_line(folder: Path) -> None:
    def verified() -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", str(folder)])
        return done.exit_code, done.output.splitlines()[-1]

    status, line = verified()
    assert (status, ": sound (" in line) == (EXIT_OK, True)
    sessions(lambda each: each.update(rules_version=0))(folder)
    with_rebuilt_checksums(folder)
    status, line = verified()
    assert (status, ": not verified: 1 reasons (" in line) == (EXIT_NOT_VERIFIED, True)
    manifest(kind="soak")(folder)
    status, line = verified()
    assert (status, ": not sound: " in line) == (EXIT_FAILED, True)


def test_an_edited_report_is_not_verified(folder: Path) -> None:
    """Pictures, tables and texts are made anew; a file that differs was edited, or is of another version."""
    write_report(folder)
    found = audit(folder)
    assert found.verdict == SOUND, found.unverified
    assert found.checked["derived files"] > 5
    before = (folder / "report.html").read_text()
    (folder / "report.html").write_text(before.replace("EMULATED", "MEASURED"))
    picture = next((folder / "figures").glob("*.svg"))
    picture.write_text(picture.read_text() + " ")
    (reason,) = audit(folder).unverified
    for name in ("report.html", f"figures/{picture.name}"):
        assert name in reason


def test_every_file_of_a_run_has_a_class(folder: Path) -> None:
    write_report(folder)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    known = {name: class_of(name) for name in names}
    assert known["trials.jsonl"] == known["report.html"] == "recomputed"
    assert (known["scenario.yaml"], known["environment.json"]) == ("cross-checked", "only checksummed")
    assert [name for name, found in known.items() if found == "not checksummed"] == []
    assert {found for _, found in CLASSES} == {
        "recomputed",
        "cross-checked",
        "only checksummed",
        "not checksummed",
    }
