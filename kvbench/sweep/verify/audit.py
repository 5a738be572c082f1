"""``kvbench verify RUN``: check that a run folder is unchanged, and that its answers follow from its
requests.

1. Compare checksums (results/checksums.py), and the digests of what was requested. 2. Recompute trials from
stored requests, verdicts, searches and answers, by the rules of this kvbench (results/store.py). 3.
Cross-check what cannot be recomputed (cross_checks.py). 4. Rebuild the report (stored_trials.py).

A contradiction means *not sound*. An input that could be neither recomputed nor compared means *not
verified*. Else *sound*; files with only a checksum are listed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console

from kvbench.core.canaries.pool import pool_of_cell
from kvbench.core.load.traces import TracedRequest
from kvbench.core.records import HELD_METHODS, RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan
from kvbench.errors import EXIT_FAILED, EXIT_NOT_VERIFIED, EXIT_OK, KvbenchError, StoreError
from kvbench.planning.load_files import load_trace
from kvbench.planning.plan import plan_of
from kvbench.results.checksums import CHECKSUMS, Damage, adopted, damages, lost_requests, require_untouched
from kvbench.results.finished_cells import canary_pools, extra_canaries
from kvbench.results.run import MANIFEST, TRIALS, RunFolder, load_run, parquet_path
from kvbench.results.store import RULES_VERSION, UNVERSIONED, rules_version_of
from kvbench.sweep.verify.cross_checks import (
    IMPORTED,
    breakdown_damages,
    claim_damages,
    fixed_of,
    mixed_transports,
    scenario_damages,
    scenario_of,
    statement_damages,
)
from kvbench.sweep.verify.stored_site import Searches
from kvbench.sweep.verify.stored_trials import StoredTrial, fixed_rate_damages, stale_files, transfer_damages

FileClass = Literal["recomputed", "cross-checked", "only checksummed", "not checksummed"]

CLASSES: Final[tuple[tuple[str, FileClass], ...]] = (
    ("trials.jsonl", "recomputed"),  # from requests/, canaries.jsonl and the scenario
    ("cells.jsonl", "recomputed"),  # from the trials
    ("transfers.parquet", "recomputed"),  # from the times of its calls
    ("report.md", "recomputed"),  # these four from all others
    ("report.html", "recomputed"),
    ("tables/*", "recomputed"),
    ("figures/*", "recomputed"),
    ("requests/*.parquet", "cross-checked"),  # with the arrivals that each trial's seed plans
    ("plan.json", "cross-checked"),  # with the scenario, the digests of the manifest and the cells
    ("scenario.yaml", "cross-checked"),  # with plan.json and the values that options changed
    ("manifest.json", "cross-checked"),  # kind, labels, seed and scenario with plan.json and the trials
    ("outputs.jsonl", "cross-checked"),  # with the searches that begin with them
    ("canaries.jsonl", "cross-checked"),  # with the counts in the trials
    ("environment.json", "only checksummed"),
    ("telemetry/*.parquet", "only checksummed"),
    ("logs/*", "not checksummed"),  # other processes write them
    ("against.md", "not checksummed"),  # derived from this run and another one
    ("splits.*", "not checksummed"),  # derived from this run and its splits
    ("checksums.jsonl", "cross-checked"),  # each line with the one before it
)
"""File pattern within the run folder → class; the first match counts."""


def class_of(name: str) -> FileClass:
    return next((found for pattern, found in CLASSES if fnmatch(name, pattern)), "not checksummed")


def unproven_files(folder: Path, *, checksums: bool) -> Iterator[str]:
    """Name files that are neither recomputed nor cross-checked, a folder once."""
    counts: Counter[tuple[FileClass, str]] = Counter()
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or file.is_dir():
            continue
        found = class_of(inside.as_posix())
        if found == "only checksummed" and not checksums:
            found = "not checksummed"
        counts[found, inside.parts[0] + ("/" if len(inside.parts) > 1 else "")] += 1
    for kind in ("only checksummed", "not checksummed"):
        names = [
            f"{name} ({count})" if name.endswith("/") else name
            for (of, name), count in counts.items()
            if of == kind
        ]
        if names:
            yield f"{kind}: {', '.join(names)}"


DAMAGED: Final = "damaged"
"""Label of a run that was resumed or packed in a damaged state."""
MOST_NOTED: Final = 3


Verdict = Literal["sound", "not sound", "not verified"]
EXIT_CODES: Final[dict[Verdict, int]] = {
    "sound": EXIT_OK,
    "not sound": EXIT_FAILED,
    "not verified": EXIT_NOT_VERIFIED,
}
READINGS: Final = (
    "readings of servers and machine in trials.jsonl (counters, transport, parts of the TTFT), if no result "
    "depends on them"
)
"""Parts of a recomputed file that have only a checksum."""


@dataclass
class Audit:
    """Result of an audit. ``checked``: number of items, by check. ``unverified``: inputs that could not be
    recomputed or compared, and why. ``unproven``: files with at most a checksum. ``notes``: the rest."""

    run: str
    damages: list[Damage] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)

    @property
    def verdict(self) -> Verdict:
        if self.damages:
            return "not sound"
        return "not verified" if self.unverified else "sound"

    @property
    def sound(self) -> bool:
        return self.verdict == "sound"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "verdict": self.verdict,
            "sound": self.sound,
            "damages": [asdict(damage) for damage in self.damages],
            "not_verified": self.unverified,
            "only_checksummed": self.unproven,
            "notes": self.notes,
            "checked": dict(self.checked),
        }


def command(path: Path, console: Console, *, as_json: bool = False) -> int:
    """Audit a run folder, print problems; return the exit code. Raises StoreError."""
    found = audit(path)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return found.exit_code
    for damage in found.damages:
        console.print(str(damage), markup=False, highlight=False, soft_wrap=True, style="red")
    for reason in found.unverified:
        text = f"not verified: {reason}"
        console.print(text, markup=False, highlight=False, soft_wrap=True, style="yellow")
    for note in [*found.notes, *found.unproven]:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    looked = ", ".join(f"{count:,} {what}" for what, count in found.checked.items()) or "nothing"
    verdict = {
        "sound": "sound",
        "not sound": f"not sound: {len(found.damages)} damages",
        "not verified": f"not verified: {len(found.unverified)} reasons",
    }[found.verdict]
    console.print(f"{path}: {verdict} ({looked})", markup=False, highlight=False, soft_wrap=True)
    return found.exit_code


def require_sound(path: Path, *, force: bool = False) -> bool:
    """Return whether a run is sound. Raises StoreError with the problems, unless ``force``."""
    found = audit(path).damages
    if found and not force:
        words = "\n  ".join(str(damage) for damage in found[:5])
        raise StoreError(
            f"{path} has changed since it was written:\n  {words}",
            hint=f"`kvbench verify` lists everything; --force accepts it, labelled {DAMAGED}",
        )
    return not found


def audit(path: Path) -> Audit:
    """Audit a run folder. Raises StoreError for an unreadable or missing run."""
    run = load_run(path)
    found = Audit(str(path))
    found.damages += _as_read(run, found)
    found.damages += _check_checksums(run, found)
    found.damages += _check_digests(run, found)
    found.damages += _missing_files(run, found.damages)
    found.damages += statement_damages(run)
    kind = run.manifest.get("kind")
    if kind == "microbench":
        found.damages += transfer_damages(run, found.checked)
    found.damages += claim_damages(run)
    if kind == IMPORTED or run.manifest.get("imported") is not None:
        found.unverified.append("measured by other tools: there are no requests to recompute it from")
    elif kind != "microbench":
        _from_scenario(run, found)
    found.unverified += stale_files(run, found.checked)
    checksums = _has_checksums(run)
    found.unproven += unproven_files(run.path, checksums=checksums)
    if missing := [trial for trial in run.all_trials if not _has_telemetry(run, trial)]:
        found.unproven.append(f"trials without telemetry: {len(missing)} of {len(run.all_trials)}")
    if run.all_trials:
        found.unproven.append(f"{'only' if checksums else 'not'} checksummed: {READINGS}")
    return found


def _has_telemetry(run: RunFolder, trial: TrialRecord) -> bool:
    with suppress(StoreError):  # an id that is not a file name
        return parquet_path(run.path, "telemetry", trial.trial_id).exists()
    return False


def _from_scenario(run: RunFolder, found: Audit) -> None:
    if run.plan.get("scenario") is None:
        found.unverified.append("plan.json has no scenario: verdicts and answers cannot be recomputed")
        return
    try:
        scenario = scenario_of(run)
    except KvbenchError as error:
        why = error.message.splitlines()[0]
        found.unverified.append(f"figures, verdicts and answers cannot be recomputed: {why}")
        return
    found.damages += scenario_damages(run, scenario)
    found.unverified += mixed_transports(run)
    if "overridden" not in run.manifest:
        found.unverified.append(
            f"{MANIFEST} has no list of the values that options changed: scenario.yaml cannot be compared "
            "with plan.json"
        )
    _recompute(run, scenario, found)


def damages_before_resume(run: RunFolder) -> Iterator[Damage]:
    """Find damage that prevents a resume."""
    found = Audit(str(run.path))
    changed = [*_check_checksums(run, found), *_check_digests(run, found)]
    yield from (*changed, *_missing_files(run, changed))
    if _has_checksums(run):
        return
    with suppress(KvbenchError):  # a scenario that cannot be read cannot be resumed either
        for trial in _stored_trials(run, scenario_of(run), {}, (), found):
            yield from trial.figures()


def _as_read(run: RunFolder, found: Audit) -> Iterator[Damage]:
    for warning in run.warnings:
        if "cut off" in warning:
            found.notes.append(warning)
        else:
            name, _, what = warning.partition(" ")
            yield Damage(name.rstrip(":"), what)
    for name, count in Counter(trial.trial_id for trial in run.all_trials).items():
        if count > 1:
            yield Damage(TRIALS, f"{name} occurs {count} times")


def _has_checksums(run: RunFolder) -> bool:
    return bool(run.manifest.get("checksums")) or (run.path / CHECKSUMS).exists()


def _check_checksums(run: RunFolder, found: Audit) -> Iterator[Damage]:
    if not _has_checksums(run):
        found.unverified.append(
            "it has no checksums: an edit is detected only if it contradicts something else"
        )
        return
    if adopted(run.path):
        found.unverified.append(
            "a run without checksums was resumed: files from before got their checksums unchecked"
        )
    yield from damages(run.path, found.checked)


def _check_digests(run: RunFolder, found: Audit) -> Iterator[Damage]:
    """Compare the scenario with the digests in the manifest."""
    if not isinstance(run.manifest.get("asked_digests"), dict):
        found.unverified.append(f"{MANIFEST} has no digests of scenario.yaml and plan.json")
        return
    try:
        require_untouched(run)
    except StoreError as error:
        yield Damage(MANIFEST, error.message.partition(": ")[2] or error.message)


def _missing_files(run: RunFolder, known: Sequence[Damage]) -> Iterator[Damage]:
    for text in lost_requests(run):
        name, _, what = text.partition(" ")
        if name not in {trial.file for trial in known}:
            yield Damage(name, what)


def _recompute(run: RunFolder, scenario: Scenario, found: Audit) -> None:
    version = rules_version_of(run.manifest)
    trace = _trace_of(scenario, found)
    by_rules: list[Damage] = []
    plans: dict[str, TrialPlan] = {}
    if run.manifest.get("kind") in HELD_METHODS:
        by_rules += fixed_rate_damages(run, found.checked)
    elif trace is not None and _is_repeatable(run, found):
        by_rules += _repeat_searches(run, scenario, trace, plans, found)
    for trial in _stored_trials(run, scenario, plans, trace or (), found):
        figures = [*trial.figures(), *breakdown_damages(trial.record, trial.requests)]
        found.damages += figures
        by_rules += () if figures or trial.record.method == "chaos" else trial.judgement()
    if missing := found.checked["trials without requests"]:
        found.unverified.append(f"requests of {missing} trials cannot be read")
    if version == RULES_VERSION:
        found.damages += by_rules
        return
    reason = f"{_version(run)} measured it by {_rules(version)}; this kvbench has {_rules(RULES_VERSION)}"
    found.unverified.append(f"verdicts and answers: {reason}")
    words = "; ".join(str(damage) for damage in by_rules[:MOST_NOTED]) or "the same"
    more = f"; and {len(by_rules) - MOST_NOTED} more" if len(by_rules) > MOST_NOTED else ""
    found.notes.append(f"by the rules of this kvbench the result would be: {words}{more}")


def _rules(version: int) -> str:
    return "rules without a version" if version == UNVERSIONED else f"version {version} of the rules"


def _is_repeatable(run: RunFolder, found: Audit) -> bool:
    """Whether a run's searches can be repeated, or there are none."""
    if run.manifest.get("asked") is not None:
        return True
    if any(cell.answer for cell in (*run.cells, *run.other_cells)):
        found.unverified.append("answers: its searches cannot be repeated, as their start is unknown")
    elif run.manifest.get("kind") == "sweep":
        found.unverified.append("a sweep without answers, which does not say what was requested")
    else:
        found.notes.append("there was no search, so there is no answer to recompute")
    return False


def _repeat_searches(
    run: RunFolder,
    scenario: Scenario,
    trace: Sequence[TracedRequest],
    plans: dict[str, TrialPlan],
    found: Audit,
) -> list[Damage]:
    """Repeat the searches with their stored trials. ``plans`` gets each trial's plan."""
    searches = Searches(run, scenario, plan_of(scenario), fixed_of(run), trace)
    answers = list(searches.damages())
    plans |= searches.plans
    found.checked["answers"] += len([cell for cell in run.cells if cell.cell not in searches.unknown])
    if searches.unknown:
        found.unverified.append(
            f"answers of {len(searches.unknown)} cells: the search cannot be repeated, as its start "
            "is not stored"
        )
    if answers and not searches.repeatable:
        found.unverified.append(
            "answers: a cell failed and was measured later; other cells did not know its rate at their time"
        )
        return []
    return answers


def _version(run: RunFolder) -> str:
    commit = run.manifest.get("git") or {}
    return " ".join(
        filter(None, ("kvbench", str(run.manifest.get("kvbench", "")), str(commit.get("commit", ""))[:12]))
    )


def _trace_of(scenario: Scenario, found: Audit) -> Sequence[TracedRequest] | None:
    if not scenario.workload.trace:
        return ()
    try:
        return load_trace(scenario.workload.trace)
    except KvbenchError as error:
        found.unverified.append(f"answers: the trace cannot be read: {error.message}")
        return None


def _stored_trials(
    run: RunFolder, scenario: Scenario, plans: dict[str, Any], trace: Sequence[TracedRequest], found: Audit
) -> Iterator[StoredTrial]:
    pools, extra = canary_pools(run.canaries), extra_canaries(run.canaries)
    references = plan_of(scenario) if pools else None
    for record in run.all_trials:
        if record.method == "imported":
            continue
        requests = _requests(run, record)
        if requests is None:
            found.checked["trials without requests"] += 1
            continue
        found.checked["trials"] += 1
        found.checked["requests"] += len(requests)
        pool = None
        if references is not None:
            pool = pool_of_cell(pools, record.cell, references.reference_of(record.cell.connector))
        yield StoredTrial(
            record,
            requests,
            scenario,
            plans.get(record.trial_id),
            trace,
            pool,
            extra.get(record.trial_id, ()),
        )


def _requests(run: RunFolder, record: TrialRecord) -> list[RequestRecord] | None:
    """Requests of a trial, or None if unreadable, which is reported elsewhere."""
    if not record.summary.get("planned"):
        return []
    try:
        return run.request_records(record.trial_id)
    except StoreError:
        return None
