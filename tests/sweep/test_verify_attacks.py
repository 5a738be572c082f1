"""``kvbench verify`` cannot be switched off from inside a run folder, not even with checksums made anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measured_run import SETTINGS, measured_run, with_rebuilt_checksums
from run_files import copied, edit_json, edit_rows, rows_in
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
    return copied(whole, tmp_path)


def document(name: str, edit: Callable[[dict[str, Any]], object]) -> Edit:
    """Edits a JSON file."""

    return lambda folder: edit_json(folder / name, edit)


def rows(
    name: str, edit: Callable[[dict[str, Any]], object], first: int = 0, last: int | None = None
) -> Edit:
    """Edits lines of a file of JSON lines, all by default."""
    return lambda folder: edit_rows(folder / name, edit, first, last)


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def sessions(edit: Callable[[dict[str, Any]], object]) -> Edit:
    return document("manifest.json", lambda manifest: [edit(session) for session in manifest["sessions"]])


def below(name: str, keys: str = "", first: int = 0, last: int | None = None, **values: Any) -> Edit:
    """Sets the values below these keys, in a JSON file or in lines of a file of JSON lines."""

    def edit(data: dict[str, Any]) -> None:
        for key in filter(None, keys.split(".")):
            data = data[key]
        data.update(values)

    return rows(name, edit, first, last) if name.endswith("l") else document(name, edit)


def plan(keys: str = "", **values: Any) -> Edit:
    return below("plan.json", keys, **values)


def text(name: str, old: str, new: str) -> Edit:
    def edited(folder: Path) -> None:
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new))

    return edited


def without_label(row: dict[str, Any]) -> None:
    row["labels"] = [label for label in row["labels"] if label != "emulated"]


def manifest(**values: Any) -> Edit:
    return below("manifest.json", **values)


def forgotten(*keys: str) -> Edit:
    return document("manifest.json", lambda data: [data.pop(key, None) for key in keys])


def moved_ttft(row: dict[str, Any]) -> None:
    parts = row["engine"]["ttft_breakdown_ms"]
    parts["prefill"] = (parts["prefill"] or 0.0) + 5.0


def without_lines_of_tcp(*names: str) -> Edit:
    def removed(folder: Path) -> None:
        for name in names:
            kept = [row for row in rows_in(folder / name) if row["cell"]["connector"] != "tcp"]
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in kept))

    return removed


NOT_SOUND, NOT_VERIFIED, SOUND = "not sound", "not verified", "sound"
NO_RULES = sessions(lambda session: session.pop("rules_version"))
NO_CHECKSUMS = both(lambda folder: (folder / CHECKSUMS).unlink(), forgotten("checksums"))
NO_EMULATED = both(document("manifest.json", without_label), rows("trials.jsonl", without_label))
ALL_IMPORTED = below("trials.jsonl", method="imported")
OTHER_SLO = text("scenario.yaml", "ttft_ms: 150", "ttft_ms: 300")
RED = plan("scenario", colour="red")
CHANGED = "the scenario was changed since the run began, in"
OTHER_TRANSPORT = "its transport is not the one of plan.json"
ATTACKS: dict[str, tuple[Edit, str, str]] = {
    # name: (edit, verdict, words that name it)
    "rules of another version": (sessions(lambda session: session.update(rules_version=0)), NOT_VERIFIED,
                                 "rules without a version"),
    "rules of a later version": (sessions(lambda session: session.update(rules_version=10**6)), NOT_VERIFIED,
                                 "version 1000000 of the rules"),
    "rules deleted": (NO_RULES, NOT_VERIFIED, "rules"),
    "sessions deleted": (manifest(sessions=[]), NOT_VERIFIED, "rules"),
    "an unknown key in the scenario": (RED, NOT_SOUND, f"{CHANGED} plan.json"),
    "asked null": (manifest(asked=None), NOT_VERIFIED, "searches cannot be repeated"),
    "kind soak": (manifest(kind="soak"), NOT_SOUND, "kind soak does not fit"),
    "kind chaos": (manifest(kind="chaos"), NOT_SOUND, "kind chaos does not fit"),
    "kind microbench": (manifest(kind="microbench"), NOT_SOUND, "kind microbench does not fit"),
    "kind imported": (manifest(kind="imported"), NOT_SOUND, "kind imported does not fit"),
    "kind simulate": (manifest(kind="simulate"), NOT_SOUND, "the label simulated is missing"),
    "kind of nothing": (manifest(kind="x"), NOT_SOUND, "kind 'x' is none of"),
    "all trials imported": (ALL_IMPORTED, NOT_SOUND, "does not fit trials of the method imported"),
    "all of it imported": (both(ALL_IMPORTED, manifest(kind="imported", labels=["emulated", "imported"])),
                           NOT_VERIFIED, "measured by other tools"),
    "marked as imported": (manifest(imported={}), NOT_VERIFIED, "measured by other tools"),
    "no checksums, rules and digests": (both(NO_CHECKSUMS, forgotten("asked_digests"), NO_RULES),
                                        NOT_VERIFIED, "it has no checksums"),
    "no checksums": (NO_CHECKSUMS, NOT_VERIFIED, "it has no checksums"),
    "no digests": (forgotten("asked_digests"), NOT_VERIFIED, "no digests of scenario.yaml"),
    "another schema, and another scenario": (both(OTHER_SLO, manifest(schema=1)), NOT_SOUND,
                                             "in scenario.yaml"),
    "EMULATED removed": (NO_EMULATED, NOT_SOUND, "the label emulated is missing"),
    "EMULATED removed from one trial": (rows("trials.jsonl", without_label, 0, 1), NOT_SOUND,
                                        "the label emulated is missing"),
    "another engine in the plan": (both(NO_EMULATED, plan("scenario.deployment", engine="external")),
                                   NOT_SOUND, "in plan.json"),
    "SIMULATED added": (manifest(labels=["emulated", "simulated"]), NOT_SOUND, "does not fit"),
    "another transport": (below("trials.jsonl", "engine", -1, transport="ucx:rc_mlx5/mlx5_0:1"), NOT_SOUND,
                          OTHER_TRANSPORT),
    "a transport where none is": (below("trials.jsonl", "engine", 0, 1, transport="rdma"), NOT_SOUND,
                                  f"{OTHER_TRANSPORT}: stored rdma, recomputed none"),
    "another SLO in scenario.yaml": (OTHER_SLO, NOT_SOUND, f"{CHANGED} scenario.yaml"),
    "the list of overridden values deleted": (forgotten("overridden"), NOT_VERIFIED,
                                              "values that options changed"),
    "another seed": (manifest(seed=99), NOT_SOUND, "seed is not that of plan.json"),
    "a cell that nobody planned": (below("cells.jsonl", "cell", -1, connector="mooncake"), NOT_SOUND,
                                   "is not a cell of plan.json"),
    "a cell's answer removed": (without_lines_of_tcp("cells.jsonl"), NOT_SOUND,
                                "this answer follows from the trials, but is missing"),
    "a cell removed with its trials": (without_lines_of_tcp("cells.jsonl", "trials.jsonl"), NOT_SOUND,
                                       "is missing, although the run is complete"),
    "a cell skipped": (below("cells.jsonl", "", -1, status="skipped", answer=None, confirmed_by=None),
                       NOT_SOUND, "is skipped, but manifest.json has no reason"),
    "cells of the plan": (document("plan.json", lambda plan: plan["cells"].pop()), NOT_SOUND,
                          "is not a cell of plan.json"),
    "a part of the TTFT": (rows("trials.jsonl", moved_ttft, -1), NOT_SOUND,
                           "engine.ttft_breakdown_ms does not add up"),
    "the mean TTFT beside its parts": (below("trials.jsonl", "engine", -1, ttft_ms_mean_of_all=1.0),
                                       NOT_SOUND, "engine.ttft_ms_mean_of_all does not follow"),
    "no outputs": (lambda folder: (folder / "outputs.jsonl").unlink(), NOT_VERIFIED, "not stored"),
    "no requests": (lambda folder: next((folder / "requests").glob("*")).unlink(), NOT_SOUND, "is missing"),
    "another machine": (below("environment.json", gpus=[{"name": "H100"}] * 8), SOUND,
                        "only checksummed: environment.json"),
    "no telemetry": (lambda folder: shutil.rmtree(folder / "telemetry"), SOUND, "trials without telemetry"),
}  # fmt: skip
WITH_DIGESTS: dict[str, tuple[Edit, str, str]] = {
    # Edits of which the digests are rebuilt, too.
    "an unknown key in the scenario and its digest": (RED, NOT_VERIFIED, "cannot be recomputed"),
    "the scenario null": (plan(scenario=None), NOT_VERIFIED, "plan.json has no scenario"),
    "another SLO and its digest": (OTHER_SLO, NOT_SOUND, "slo.ttft_ms is not that of plan.json"),
    "another SLO in plan.json": (plan("scenario.slo", ttft_ms=300.0), NOT_SOUND,
                                 "slo.ttft_ms is not that of plan.json"),
}  # fmt: skip


def test_the_folder_is_sound_as_it_is(whole: Path) -> None:
    found = audit(whole)
    assert (found.damages, found.unverified, found.notes) == ([], [], [])
    assert (found.verdict, found.checked["answers"]) == (SOUND, 2)
    assert any("environment.json" in reason and "telemetry/ (1)" in reason for reason in found.unproven)
    assert {trial.engine["transport"] for trial in load_run(whole).trials} == {"", "tcp"}
    mark = mark_of(load_run(whole))
    assert mark.word == "emulated"


def test_a_run_of_several_parallel_sizes_has_a_reference_for_each(tmp_path: Path) -> None:
    """Outputs of engines with other tensor-parallel sizes differ, and are not compared."""
    both_sizes = "{name: %s}, {name: %s, label: %s-2, tensor_parallel_size: 2}"
    labels = ", ".join(both_sizes % (name, name, name) for name in ("aggregated", "tcp"))
    folder = measured_run(tmp_path, (f"connectors=[{labels}]", *SETTINGS[1:]))
    results = {cell.cell.connector: cell.equal_outputs for cell in load_run(folder).cells}
    equal = {"checked": 2, "equal": 2}
    assert results == {"aggregated": None, "aggregated-2": None, "tcp": equal, "tcp-2": equal}
    assert [str(damage) for damage in audit(folder).damages] == []
    file = folder / "outputs.jsonl"
    edit_rows(file, lambda row: row.update(texts=["another", "two"]), -1)
    assert any("equal_outputs" in str(damage) for damage in audit(folder).damages)


@pytest.mark.parametrize("name", [*ATTACKS, *WITH_DIGESTS])
def test_an_edit_with_rebuilt_checksums_does_not_stay_sound(folder: Path, name: str) -> None:
    edit, verdict, words = {**ATTACKS, **WITH_DIGESTS}[name]
    edit(folder)
    with_rebuilt_checksums(folder, digests_too=name in WITH_DIGESTS)
    found = audit(folder)
    reasons = [*map(str, found.damages), *found.unverified, *found.unproven]
    assert found.verdict == verdict, reasons
    assert any(words in reason for reason in reasons), reasons


def test_each_verdict_has_its_exit_code_and_its_line(folder: Path) -> None:
    def verified() -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", str(folder)])
        return done.exit_code, done.output.splitlines()[-1]

    status, line = verified()
    assert (status, ": sound (" in line) == (EXIT_OK, True)
    sessions(lambda session: session.update(rules_version=0))(folder)
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
        "recomputed", "cross-checked", "only checksummed", "not checksummed",
    }  # fmt: skip
