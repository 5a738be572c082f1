"""``kvbench verify RUN``: is a run folder as it was written, and does what it says follow from its requests?

Three questions, the later ones also of a run that was written without checksums: do the checksums hold
(results/checksums.py); are each trial's figures those of its stored requests; do verdicts follow from the
requests, answers from the trials, and each trial from those before it. The last is a matter of rules, so it
is damage only where the run was judged by the very code that asks; else it is a note.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvbench.core.canaries.pool import pool_of_cell
from kvbench.core.load.traces import TracedRequest
from kvbench.core.records import HELD_METHODS, RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import EXIT_FAILED, EXIT_OK, KvbenchError, StoreError
from kvbench.planning.plan import plan_of
from kvbench.planning.trace_files import load_trace
from kvbench.results.checksums import CHECKSUMS, Damage, adopted, damages
from kvbench.results.finished_cells import asked_canaries, canary_pools
from kvbench.results.rules import rules_digest
from kvbench.results.run import CELLS, MANIFEST, TRIALS, RunFolder, load_run
from kvbench.results.untouched import lost_requests, require_untouched
from kvbench.sweep.verify.stored_faults import held_damages
from kvbench.sweep.verify.stored_scenario import fixed_of, scenario_of
from kvbench.sweep.verify.stored_site import Searches
from kvbench.sweep.verify.stored_transfers import transfer_damages
from kvbench.sweep.verify.stored_trials import StoredTrial

DAMAGED: Final = "damaged"
"""Label of a run that was gone on with, or packed, although it is not as it was written."""
MOST_NOTED: Final = 3
_CUT_OFF: Final = "cut off"


@dataclass
class Audit:
    """What was found. ``checked``: how much was looked at, by what; ``notes``: what could not be, and why."""

    run: str
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)

    @property
    def sound(self) -> bool:
        return not self.damages

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "sound": self.sound,
            "damages": [asdict(each) for each in self.damages],
            "notes": self.notes,
            "checked": dict(self.checked),
        }


def command(path: Path, console: Console, *, as_json: bool = False) -> int:
    """Looks through a run folder and says what is wrong with it; returns the exit code.

    Raises StoreError for what is no run folder, or cannot be read.
    """
    found = audit(path)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return EXIT_OK if found.sound else EXIT_FAILED
    for damage in found.damages:
        console.print(str(damage), markup=False, highlight=False, soft_wrap=True, style="red")
    for note in found.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    looked = ", ".join(f"{count:,} {what}" for what, count in found.checked.items()) or "nothing"
    verdict = "sound" if found.sound else f"not as it was written: {len(found.damages)} damages"
    console.print(f"{path}: {verdict} ({looked})", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK if found.sound else EXIT_FAILED


def require_sound(path: Path, *, force: bool = False) -> bool:
    """Whether it is. Raises StoreError, with what is not, unless ``force``."""
    found = audit(path).damages
    if found and not force:
        words = "\n  ".join(str(each) for each in found[:5])
        raise StoreError(
            f"{path} is not as it was written:\n  {words}",
            hint=f"`kvbench verify` says all of it; --force takes it as it is, labelled {DAMAGED}",
        )
    return not found


def audit(path: Path) -> Audit:
    """Looks through a run folder. Raises StoreError for what is no run folder, or cannot be read."""
    run = load_run(path)
    found = Audit(str(path))
    found.damages += _as_read(run, found)
    found.damages += _as_written(run, found)
    found.damages += _lost(run, found.damages)
    if run.manifest.get("kind") == "microbench":
        found.damages += transfer_damages(run, found.checked)
    found.damages += _claims(run)
    if run.plan.get("scenario") is None:
        found.notes.append("no scenario was measured: there are no verdicts or answers to recompute")
        return found
    try:
        scenario = scenario_of(run)
    except KvbenchError as error:
        why = error.message.splitlines()[0]
        found.notes.append(f"figures, verdicts and answers are not recomputed: {why}")
        return found
    _recomputed(run, scenario, found)
    return found


def damages_before_resume(run: RunFolder) -> Iterator[Damage]:
    """What keeps a run from being gone on with: what is not as it was written.

    Where there are no checksums, figures that do not follow from their requests.
    """
    found = Audit(str(run.path))
    changed = list(_as_written(run, found))
    yield from (*changed, *_lost(run, changed))
    if _has_checksums(run):
        return
    with suppress(KvbenchError):  # a scenario that cannot be read is nothing to go on with either
        for trial in _stored_trials(run, scenario_of(run), {}, (), found):
            yield from trial.figures()


def _as_read(run: RunFolder, found: Audit) -> Iterator[Damage]:
    for warning in run.warnings:
        if _CUT_OFF in warning:
            found.notes.append(warning)
        else:
            name, _, what = warning.partition(" ")
            yield Damage(name.rstrip(":"), what)
    for name, count in Counter(trial.trial_id for trial in run.all_trials).items():
        if count > 1:
            yield Damage(TRIALS, f"{name} stands there {count} times")


def _has_checksums(run: RunFolder) -> bool:
    return bool(run.manifest.get("checksums")) or (run.path / CHECKSUMS).exists()


def _as_written(run: RunFolder, found: Audit) -> Iterator[Damage]:
    if _has_checksums(run):
        if adopted(run.path):
            found.notes.append("a run without checksums was gone on with: what lay there was taken as it was")
        yield from damages(run.path, found.checked)
        return
    found.notes.append(
        "it was written without checksums, by a kvbench that had none: what was edited is found only where "
        "it contradicts something else"
    )
    try:
        require_untouched(run)
    except StoreError as error:
        yield Damage(MANIFEST, error.message.partition(": ")[2] or error.message)


def _lost(run: RunFolder, known: Sequence[Damage]) -> Iterator[Damage]:
    for text in lost_requests(run):
        name, _, what = text.partition(" ")
        if name not in {each.file for each in known}:
            yield Damage(name, what)


def _recomputed(run: RunFolder, scenario: Scenario, found: Audit) -> None:
    digest = rules_digest()
    same = all(each.get("rules") == digest for each in run.manifest.get("sessions") or [{}])
    by_rules: list[Damage] = []
    trace = _trace_of(scenario, found)
    asked = {}
    held = run.manifest.get("kind") in HELD_METHODS
    if held:
        by_rules += held_damages(run, found.checked)
    elif run.manifest.get("asked") is None or trace is None:
        found.notes.append("its searches are not repeated: it is not one sweep that can be gone on with")
    else:
        searches = Searches(run, scenario, plan_of(scenario), fixed_of(run), trace)
        answers = list(searches.damages())
        asked = searches.asked
        found.checked["answers"] += len([each for each in run.cells if each.cell not in searches.unknown])
        if searches.unknown:
            found.notes.append(
                f"not repeated, as their beginning is not stored: {len(searches.unknown)} cells"
            )
        by_rules += answers if searches.as_then else ()
    for trial in _stored_trials(run, scenario, asked, trace or (), found):
        figures = list(trial.figures())
        found.damages += figures
        by_rules += () if figures or trial.record.method == "chaos" else trial.judgement()
    if same:
        found.damages += by_rules
    elif by_rules:
        words = "; ".join(str(each) for each in by_rules[:MOST_NOTED])
        more = f"; and {len(by_rules) - MOST_NOTED} more" if len(by_rules) > MOST_NOTED else ""
        found.notes.append(f"by this kvbench's rules, not those of {_who(run)}, it would say: {words}{more}")
    else:
        found.notes.append(
            f"it was judged by other code than this kvbench's ({_who(run)}), which says the same"
        )


def _who(run: RunFolder) -> str:
    git = run.manifest.get("git") or {}
    return " ".join(
        filter(None, ("kvbench", str(run.manifest.get("kvbench", "")), str(git.get("commit", ""))[:12]))
    )


def _trace_of(scenario: Scenario, found: Audit) -> Sequence[TracedRequest] | None:
    if not scenario.workload.trace:
        return ()
    try:
        return load_trace(scenario.workload.trace)
    except KvbenchError as error:
        found.notes.append(f"its trace cannot be read: {error.message}")
        return None


def _stored_trials(
    run: RunFolder,
    scenario: Scenario,
    asked: dict[str, Any],
    trace: Sequence[TracedRequest],
    found: Audit,
) -> Iterator[StoredTrial]:
    """Those whose requests were stored."""
    pools, beside = canary_pools(run.canaries), asked_canaries(run.canaries)
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
            asked.get(record.trial_id),
            trace,
            pool,
            beside.get(record.trial_id, ()),
        )


def _requests(run: RunFolder, record: TrialRecord) -> list[RequestRecord] | None:
    """None where they cannot be read, which is said elsewhere."""
    if not record.summary.get("planned"):
        return []
    try:
        return run.request_records(record.trial_id)
    except StoreError:
        return None


def _claims(run: RunFolder) -> Iterator[Damage]:
    """What an answer says of its trials, by whatever rule it was found."""
    trials = {each.trial_id: each for each in run.all_trials}
    for result in [*run.cells, *run.other_cells]:
        answer = result.answer or {}
        name = " ".join(filter(None, (result.cell.key, result.method, result.tier)))
        if result.confirmed_by and result.confirmed_by not in trials:
            yield Damage(CELLS, f"{name} rests on {result.confirmed_by}, which is not there")
        low, rate, high = (answer.get(key) for key in ("lower", "max_request_rate", "upper"))
        if rate is not None and not ((low or 0) * (1 - 1e-9) <= rate <= (high or rate) * (1 + 1e-9)):
            yield Damage(CELLS, f"{name}: {rate} lies outside of its interval [{low}, {high}]")
        mine = [(each.request_rate, each.verdict) for each in trials.values() if each.cell == result.cell]
        rates = {f"{each:.6g}" for each, _ in mine}
        for point in answer.get("curve") or ():
            if f"{point.get('rate'):.6g}" not in rates:
                yield Damage(
                    CELLS, f"{name}: its curve has a trial at {point.get('rate')} req/s, which is not there"
                )
