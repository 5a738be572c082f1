"""``kvbench verify``: what somebody edited is found and named, and nothing else is called edited."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from commands import invoke
from resuming import Taped, cut_off, without_checksums, write_order
from rich.console import Console
from run_files import Edit, copied, edit_json, rows_in

from kvbench.errors import EXIT_FAILED, EXIT_OK, StoreError
from kvbench.planning.overrides import CliOptions
from kvbench.results.checksums import damages
from kvbench.results.run import load_run
from kvbench.results.store import RULES_VERSION, UNVERSIONED, RunStore, rules_version_of
from kvbench.sweep import resume, simulate
from kvbench.sweep.verify import audit as auditing
from kvbench.sweep.verify.audit import audit
from kvbench.sweep.verify.stored_trials import StoredTrial

pytestmark = pytest.mark.timeout(600)
REFERENCE = Path(__file__).parents[2] / "results" / "reference"
SLOW = "deployment.engine_options.time_scale=4"
"""A slow engine serves few requests in a trial, so that a run is soon verified."""
OVERRIDES = (
    *("connectors=[tcp]", "workload.input_len=[128]", "search.max_trials=3", SLOW),
    *("slo.ttft_ms=800", "slo.tpot_ms=80", "search.compare_burst=true", "seed=1"),
)
TIERS = (
    *("connectors=[aggregated,tcp]", "workload.input_len=[128]", "search.max_trials=3"),
    *("search.equal_rate=true", "seed=4", SLOW),
    "slo={tiers: {strict: {ttft_ms: 600, tpot_ms: 48}, loose: {ttft_ms: 1600, tpot_ms: 100}}}",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a search and bursts."""
    return simulate.simulated(CliOptions("quickstart", OVERRIDES), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return copied(whole, tmp_path)


def edit_line(file: Path, which: Callable[[dict[str, Any]], bool], edit: Edit) -> str:
    """Edits the first such line; returns its trial's id, or its cell's connector."""
    rows = rows_in(file)
    row = next(row for row in rows if which(row))
    edit(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(row.get("trial_id") or row["cell"]["connector"])


def searched(verdict: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: row["method"] == "sustained" and row["verdict"] == verdict


def decided(row: dict[str, Any]) -> bool:
    """It was cut at a no, and not because its queue grew."""
    live = row["summary"].get("live") or {"verdict": ""}
    return live["verdict"] == "missed" and not live["measured"]["grows"]


def found_in(folder: Path) -> list[str]:
    return [str(damage) for damage in audit(folder).damages]


def test_a_run_is_sound_and_all_of_it_is_looked_at(whole: Path) -> None:
    found = audit(whole)
    run = load_run(whole)
    assert [str(damage) for damage in found.damages] == []
    assert (found.unverified, found.notes) == ([], [])
    assert found.checked["trials"] == len(run.all_trials)
    assert found.checked["requests"] == sum(trial.summary["planned"] for trial in run.all_trials)
    assert found.checked["answers"] == 1
    assert {trial.method for trial in run.all_trials} == {"sustained", "burst"}
    assert {trial.verdict for trial in run.all_trials} >= {"met", "missed", "measured"}


def at(keys: str = "", **changes: Any) -> Edit:
    """An edit of the values below these keys; a callable computes its value from what is there."""

    def edit(row: dict[str, Any]) -> None:
        for key in filter(None, keys.split(".")):
            row = row[key]
        row.update({key: change(row, key) if callable(change) else change for key, change in changes.items()})

    return edit


def times(factor: float, other: str = "") -> Callable[[dict[str, Any], str], float]:
    """The value, or another one beside it, multiplied."""
    return lambda row, key: row[other or key] * factor


def main(row: dict[str, Any]) -> bool:
    return bool(row["main"])


def burst(row: dict[str, Any]) -> bool:
    return bool(row["method"] == "burst")


TRIALS, CELLS = "trials.jsonl", "cells.jsonl"
MET, MISSED = searched("met"), searched("missed")
GROWS = {"gate": "growing_queue", "level": "warning", "message": "it grows", "advice": "", "evidence": {}}
EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], bool], Edit, str]] = {
    "a verdict": (TRIALS, MISSED, at(verdict="met"), "the verdict"),
    "a reason": (TRIALS, MISSED, at(reason="so be it"), "the verdict"),
    "a decision with its verdict": (
        TRIALS, decided, lambda row: [part.update(verdict="met") for part in (row, row["summary"]["live"])],
        "live.verdict",
    ),
    "a share under way": (
        TRIALS, decided, at("summary.live.measured", attainment=0.97), "measured.attainment",
    ),
    "a percentile": (TRIALS, MET, at("summary.ttft_ms", p99=1.0), "summary.ttft_ms.p99"),
    "a percentile of the gaps": (TRIALS, MET, at("summary.itl_ms", p50=times(0.9999)), "summary.itl_ms.p50"),
    "a count": (TRIALS, MET, at("summary", sent=7), "summary.sent"),
    "goodput": (TRIALS, burst, at("summary", request_goodput=99.0), "summary.request_goodput"),
    "the steady part": (TRIALS, MET, at("summary.window", start_s=0.1), "summary."),
    "a finding": (TRIALS, MET, lambda row: row["findings"].append(GROWS), "findings"),
    "a rate": (TRIALS, MET, at(request_rate=times(1.1)), "summary.offered_rate"),
    "a seed": (TRIALS, MET, at(seed=5), "its seed"),
    "what limits": (TRIALS, MISSED, at("engine.limit", limit="client"), "limit"),
    "an answer": (CELLS, main, at("answer", max_request_rate=times(1.002)), "answer.max_request_rate"),
    "an answer's end": (
        CELLS, main, at("answer", lower=times(2, "max_request_rate")), "outside its interval",
    ),
    "a status": (CELLS, main, at("answer", status="converged", confirmed=True), "answer."),
    "a burst's answer": (
        CELLS, burst, at("answer", max_request_rate=times(1.01, "lower")), "answer.max_request_rate",
    ),
    "a supporting trial": (CELLS, main, at(confirmed_by="tcp-in128-out16-99"), "which is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_without_checksums(folder: Path, name: str) -> None:
    """By what it contradicts: the requests, or the trials."""
    file, which, edit, words = EDITS[name]
    edited = edit_line(without_checksums(folder) / file, which, edit)
    found = audit(folder).damages
    hits = [fault for fault in found if words in fault.what and edited in fault.what and fault.file == file]
    assert hits, [str(fault) for fault in found]


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_by_the_checksums(folder: Path, name: str) -> None:
    file, which, edit, _ = EDITS[name]
    before = (folder / file).read_text().splitlines()
    rows = [json.loads(line) for line in before]
    place = next(place for place, row in enumerate(rows) if which(row))
    edit(rows[place])
    before[place] = json.dumps(rows[place])
    (folder / file).write_text("\n".join(before) + "\n")
    (damage,) = damages(folder)
    assert str(damage) == f"{file}: line {place + 1} was changed since it was written"


def test_an_edited_tier_is_found(tmp_path: Path) -> None:
    """In a run with trials at one equal rate, too."""
    folder = without_checksums(simulate.simulated(CliOptions("quickstart", TIERS), tmp_path))
    assert {trial.method for trial in load_run(folder).all_trials} == {"sustained", "equal_rate"}
    assert found_in(folder) == []
    name = edit_line(
        folder / "trials.jsonl",
        lambda row: "tiers" in row["summary"] and row["purpose"] != "ceiling",
        lambda row: row["summary"]["tiers"]["loose"].update(slo_attainment=0.5, verdict="missed"),
    )
    found = found_in(folder)
    assert any(f"{name}: tiers.loose." in damage for damage in found), found
    assert any(f"{name}: the verdict" in damage and "loose missed" in damage for damage in found), found


def test_a_tier_without_its_line_is_found_but_a_kill_between_lines_is_no_damage(tmp_path: Path) -> None:
    """Of an unfinished cell, trials and lines may be missing, but not of a finished one."""
    whole = Taped(CliOptions("quickstart", TIERS)).unbroken(tmp_path)
    order = write_order(whole)
    ends = [number for number, (name, _) in enumerate(order) if name == CELLS]
    for lines in sorted({*ends, *(end + 1 for end in ends), len(order)}):
        cut = cut_off(whole, tmp_path / f"{lines}" / whole.name, lines, torn=False)
        assert found_in(cut) == [], lines
    rows = rows_in(whole / CELLS)
    assert [row["tier"] for row in rows] == ["loose", "strict"] * 2
    for status in ("complete", "interrupted"):
        folder = without_checksums(copied(whole, tmp_path / status))
        edit_json(folder / "manifest.json", status=status)
        (folder / CELLS).write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
        found = found_in(folder)
        assert any("loose: this answer follows" in damage for damage in found), found


def test_a_connector_that_a_resume_skipped_needs_no_answers(tmp_path: Path) -> None:
    """Its trials of an earlier session are left over."""
    whole = Taped(CliOptions("quickstart", TIERS)).unbroken(tmp_path)
    last = max(number for number, (name, _) in enumerate(write_order(whole)) if name == CELLS)
    folder = cut_off(whole, tmp_path / "cut" / whole.name, last - 2, torn=False)
    with RunStore.reopen(folder) as store:
        store.skip_connector("tcp", "it is not installed any more")
        store.put_cell({"cell": rows_in(whole / CELLS)[-1]["cell"], "status": "skipped"})
    run = load_run(folder)
    assert (run.manifest["status"], [cell.status for cell in run.cells]) == ("complete", ["done", "skipped"])
    assert any(trial.cell.connector == "tcp" for trial in run.all_trials)
    assert found_in(folder) == []


def with_requests(folder: Path, verdict: str, change: Callable[[pa.Table], pa.Table]) -> str:
    trial = next(t for t in load_run(folder).trials if t.verdict == verdict and t.purpose != "ceiling")
    path = folder / "requests" / f"{trial.trial_id}.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    return trial.trial_id


def _faster(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index("first_token_s")
    late = pc.subtract(table.column("first_token_s"), table.column("scheduled_s"))
    sooner = pc.add(table.column("scheduled_s"), pc.multiply(late, 0.5))
    return table.set_column(place, "first_token_s", sooner)


def _forgotten(table: pa.Table) -> pa.Table:
    return table.filter(pc.equal(table.column("error"), "")).slice(1)


def _moved(table: pa.Table) -> pa.Table:
    """All times a little later: no latency changes, but nobody planned these arrivals."""
    for name in ("scheduled_s", "sent_s", "first_token_s", "last_token_s"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pc.add(table.column(name), 1e-5))
    return table


@pytest.mark.parametrize(
    ("change", "words"),
    [(_faster, "more figures do not follow"), (_forgotten, "summary.planned"), (_moved, "not follow from")],
)
def test_edited_requests_are_found(folder: Path, change: Callable[[pa.Table], pa.Table], words: str) -> None:
    trial = with_requests(without_checksums(folder), "missed", change)
    found = found_in(folder)
    assert any(trial in damage and words in damage for damage in found), found


def test_arrivals_that_no_seed_plans_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if all figures were made to agree with them."""
    trial = with_requests(without_checksums(folder), "missed", _moved)
    monkeypatch.setattr(StoredTrial, "figures", lambda _: iter(()))
    found = found_in(folder)
    assert any(trial in damage and "not those that its seed plans" in damage for damage in found), found


def test_a_trial_that_was_taken_out_is_missed(folder: Path) -> None:
    """With its requests and its line: the search would not have asked what it asked after it."""
    without_checksums(folder)
    lines = (folder / "trials.jsonl").read_text().splitlines()
    gone = next(row for row in map(json.loads, lines) if searched("missed")(row))
    kept = [line for line in lines if json.loads(line)["trial_id"] != gone["trial_id"]]
    (folder / "trials.jsonl").write_text("\n".join(kept) + "\n")
    (folder / "requests" / f"{gone['trial_id']}.parquet").unlink()
    assert any(gone["trial_id"] in damage and "still requests" in damage for damage in found_in(folder))


def test_lines_that_cannot_be_read_are_damage(folder: Path) -> None:
    with (without_checksums(folder) / "trials.jsonl").open("a") as file:
        file.write("{}\n")
    assert any(damage.startswith("trials.jsonl: an entry is ignored") for damage in found_in(folder))


# --- other code ------------------------------------------------------------------------------------
def judged_by_others(folder: Path) -> None:
    edit_json(folder / "manifest.json", lambda data: data["sessions"][0].update(rules_version=UNVERSIONED))


def test_a_run_of_other_rules_is_not_verified(folder: Path) -> None:
    judged_by_others(without_checksums(folder))
    found = audit(folder)
    assert found.verdict == "not verified"
    assert any("rules without a version; this kvbench has version" in reason for reason in found.unverified)
    assert "by the rules of this kvbench the result would be: the same" in found.notes
    edit_line(folder / "trials.jsonl", searched("missed"), lambda row: row.update(reason="so be it"))
    found = audit(folder)
    assert found.verdict == "not verified"
    assert any("the result would be: trials.jsonl" in note and "so be it" in note for note in found.notes)


@pytest.mark.parametrize(
    "name", ["a percentile", "a count", "a decision with its verdict", "an answer's end"]
)
def test_figures_are_no_matter_of_rules(folder: Path, name: str) -> None:
    judged_by_others(without_checksums(folder))
    file, which, edit, words = EDITS[name]
    edit_line(folder / file, which, edit)
    assert any(words in damage for damage in found_in(folder))


SHORT = ("microbench-lab", "microbench-sizes", "seed-h200-emulated", "seed-notes", "seed-pr10884")
RUNS = [
    pytest.param(path.parent.name, marks=[pytest.mark.heavy] * (path.parent.name not in SHORT))
    for path in sorted(REFERENCE.glob("*/manifest.json"))
]


@pytest.mark.parametrize("name", RUNS)
def test_reference_runs_are_as_they_were_written(name: str) -> None:
    """Older kvbenches measured some: nothing contradicts them, and what cannot be verified is said."""
    found = audit(REFERENCE / name)
    assert [str(damage) for damage in found.damages] == []
    run = load_run(REFERENCE / name)
    trials = [trial for trial in run.all_trials if trial.method != "imported"]
    assert found.checked["trials"] == len(trials)
    today = (
        rules_version_of(run.manifest) == RULES_VERSION and (REFERENCE / name / "checksums.jsonl").exists()
    )
    other = run.manifest.get("kind") == "imported"
    assert found.verdict == ("sound" if today and not other else "not verified"), found.unverified


# --- the command -----------------------------------------------------------------------------------
def verified(folder: Path, *, as_json: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    status = auditing.command(folder, Console(file=out, width=60), as_json=as_json)
    return status, out.getvalue()


def test_the_command_says_what_is_damaged(folder: Path, tmp_path: Path) -> None:
    status, text = verified(folder)
    assert status == EXIT_OK
    assert ": sound (" in text
    name = edit_line(folder / "trials.jsonl", searched("met"), EDITS["a percentile"][2])
    status, text = verified(folder)
    assert status == EXIT_FAILED
    line = next(line for line in text.splitlines() if "summary.ttft_ms.p99" in line)
    assert line.startswith(f"trials.jsonl: {name}: summary.ttft_ms.p99 does not follow from requests/{name}")
    assert "stored 1, recomputed " in line
    assert ": not sound: " in text.splitlines()[-1]
    with pytest.raises(StoreError, match="is not a run folder"):
        auditing.command(tmp_path / "nowhere", Console(file=io.StringIO()))


def test_the_command_line(folder: Path) -> None:
    done = invoke("verify", str(folder), "--json").succeeded()
    output = json.loads(done.out)
    assert output["sound"]
    assert output["damages"] == []
    assert output["checked"]["trials"] == len(load_run(folder).all_trials)
    (folder / "requests" / f"{load_run(folder).trials[0].trial_id}.parquet").unlink()
    done = invoke("verify", str(folder), "--json").failed(EXIT_FAILED)
    (damage, *_) = json.loads(done.out)["damages"]
    assert damage["file"].startswith("requests/")
    assert damage["what"] == "is missing"
    assert invoke("verify", str(folder / "nowhere")).status == 2


# --- before going on, and before sharing -----------------------------------------------------------
def test_an_edited_run_is_not_gone_on_with(folder: Path) -> None:
    broken_off(folder)
    name = edit_line(folder / "trials.jsonl", searched("met"), EDITS["a percentile"][2])
    assert name
    with pytest.raises(
        StoreError, match=r"has changed since it was written:\n  trials\.jsonl: line \d+ was changed"
    ):
        resume.resume(folder)
    resume.resume(folder, force=True)
    run = load_run(folder)
    assert run.manifest["status"] == "complete"
    assert auditing.DAMAGED in run.labels
    assert any("was changed" in difference for difference in run.manifest["sessions"][-1]["differs"])


def broken_off(folder: Path) -> None:
    """As after an interrupt in the last cell."""
    with RunStore.reopen(folder) as store:
        row = json.loads((folder / "cells.jsonl").read_text().splitlines()[-1])
        store.put_cell({**row, "status": "failed", "answer": None})


def test_nor_is_one_without_checksums(folder: Path) -> None:
    broken_off(without_checksums(folder))
    file, which, edit, words = EDITS["a percentile"]
    edit_line(without_checksums(folder) / file, which, edit)
    with pytest.raises(StoreError, match=words):
        resume.resume(folder)


def test_an_edited_run_is_not_packed(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "x.tar.gz"
    invoke("bundle", str(folder), "--output", str(archive)).succeeded()
    inside = unpacked(archive, tmp_path / "sound")
    found = audit(inside)
    assert found.sound, found.damages
    assert found.checked["files"] > 10
    (inside / "trials.jsonl").write_text((inside / "trials.jsonl").read_text().replace("missed", "met"))
    assert any("line" in damage for damage in found_in(inside))

    edit_line(folder / "trials.jsonl", searched("met"), EDITS["a percentile"][2])
    refused = invoke("bundle", str(folder), "--output", str(archive)).failed(EXIT_FAILED)
    assert "has changed since it was written" in refused.text
    invoke("bundle", str(folder), "--output", str(archive), "--force").succeeded()
    inside = unpacked(archive, tmp_path / "edited")
    assert auditing.DAMAGED in load_run(inside).labels


def unpacked(archive: Path, target: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return next(target.iterdir())
