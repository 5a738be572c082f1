"""``kvbench sweep --resume RUN``: resume an interrupted run in its own folder, by its plan.

Finished cells are kept. An unfinished cell's trials are replayed to its search in order, so it continues with
the same next rate; at most the interrupted trial is repeated."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvbench.core.plan.plan import Plan
from kvbench.core.plan.processes import RUN_TAG_ENV
from kvbench.core.records import HELD_METHODS, Method
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import EXIT_OK, InputError, StoreError
from kvbench.hosts import environment
from kvbench.planning.load_files import load_trace, trace_digest
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.checksums import require_untouched
from kvbench.results.finished_cells import ELSEWHERE, differences, earlier_sessions
from kvbench.results.run import RunFolder, load_run, writer_is_alive
from kvbench.results.store import RunStore
from kvbench.sweep.calibration import measured_run
from kvbench.sweep.cell import Fixed
from kvbench.sweep.deployed import scratch_prefix
from kvbench.sweep.display import Silent, TimeLeft
from kvbench.sweep.simulate import ReadySweep
from kvbench.sweep.sweep import carry_out, resume_words
from kvbench.sweep.verify.audit import DAMAGED, damages_before_resume
from kvbench.sweep.verify.cross_checks import fixed_of, scenario_of

GONE_DEADLINE_S: Final = 10.0
"""Longest wait for processes of a killed run to end, in seconds."""
MAX_SHOWN: Final = 5


def command(
    path: Path, cli: CliOptions, kind: str, console: Console, *, force: bool = False, verbose: bool = False
) -> int:
    """Resume a run, write and print its report; return the exit code. ``kind``: sweep or bench. ``cli``:
    other options, which must agree with the folder. ``verbose``: as in ``carry_out``. Raises InputError if
    they do not agree, StoreError for a folder that cannot be resumed."""
    run = load_run(path)
    _require_kind(run, kind)
    if cli != CliOptions():
        _require_agreement(run, cli)
    if nothing_left(run, console):
        return EXIT_OK
    resumed = reopen(path, force=force)
    for difference in resumed.store.manifest["sessions"][-1]["differs"]:
        console.print(f"changed: {difference}", markup=False, style="yellow")
    done = len(resumed.plan.cells) - resumed.left
    console.print(
        f"{done} of {len(resumed.plan.cells)} cells are finished; {len(run.all_trials)} trials are kept",
        markup=False,
    )
    open_cells = [cell for cell in resumed.plan.cells if not resumed.store.earlier.finished(cell)]
    paced = resumed.store.manifest["kind"] != "simulate"
    left = TimeLeft(resumed.plan, open_cells, paced=paced) if resumed.fixed is None else None
    return carry_out(resumed.store, resumed.left, console, resumed.sweep, left, verbose=verbose)


def resume(path: Path, *, force: bool = False) -> Path:
    """Resume a run without output; return its folder. Errors as in ``command``."""
    if not is_complete(load_run(path)):
        resumed = reopen(path, force=force)
        with resumed.store:
            resumed.sweep(Silent()).run()
    return path


def is_complete(run: RunFolder) -> bool:
    failed = any(result.status == "failed" for result in [*run.cells, *run.other_cells])
    incomplete = failed or bool(run.manifest.get("incomplete"))
    return run.manifest.get("status") == "complete" and not incomplete


def nothing_left(run: RunFolder, console: Console) -> bool:
    """Print the report of a complete run; return whether it is complete."""
    if is_complete(run):
        console.print(f"{run.path} is complete", markup=False)
        from kvbench.report.report import print_documents

        print_documents([run], console)
        return True
    return False


def reopen(path: Path, *, force: bool = False) -> ReadySweep:
    """Open and lock a run folder, and return what is left of its sweep. Raises StoreError if another process
    uses it, if its kind or version cannot be resumed, or, without ``force``, if machine or software have
    changed."""
    run = load_run(path)
    if run.manifest.get("status") == "running" and writer_is_alive(path):
        RunStore.reopen(path)  # its error names the process
    require_untouched(run)
    damages = [str(damage) for damage in islice(damages_before_resume(run), MAX_SHOWN)]
    if damages and not force:
        raise StoreError(
            f"{path} has changed since it was written:\n  " + "\n  ".join(damages),
            hint="restore the files from a copy of the run, or use --force, which marks the run",
        )
    scenario, plan, fixed = planned(run)
    trace = load_trace(scenario.workload.trace) if scenario.workload.trace else []
    _require_trace(run, scenario)
    differs = list(differences(run.environment, environment.describe()))
    if differs and not force:
        raise StoreError(
            f"{path} was started under other conditions:\n  " + "\n  ".join(differs),
            hint="resume it there, or use --force, which marks the run",
        )
    like = (run.manifest.get("asked") or {}).get("like")
    measured = measured_run(Path(like)) if like else None
    _wait_for_earlier_processes(run)
    store = RunStore.reopen(path)
    try:
        for folder in Path(tempfile.gettempdir()).glob(f"{scratch_prefix(path)}*"):
            shutil.rmtree(folder, ignore_errors=True)
        if differs:
            store.resumed_elsewhere(differs, ELSEWHERE)
        if damages:
            store.resumed_elsewhere(damages, DAMAGED)
        take_over(store, scenario, fixed, forced=force)
    except BaseException:
        store.close()
        raise
    return ReadySweep(scenario, plan, store, trace, fixed, measured)


def take_over(store: RunStore, scenario: Scenario, fixed: Fixed | None, *, forced: bool = False) -> None:
    """Give a reopened store the folder's content; no other process writes from here on."""
    method: Method = scenario.search.method
    if fixed is not None:
        method = "trace" if scenario.workload.trace else "sustained"
    store.earlier = earlier_sessions(load_run(store.path), method, forced=forced)


def planned(run: RunFolder) -> tuple[Scenario, Plan, Fixed | None]:
    """Read a folder's plan. Raises StoreError if this kvbench would plan differently."""
    if run.manifest.get("asked") is None:
        raise StoreError(
            f"{run.path} cannot be resumed: it has several sweeps, uses an external simulator, "
            "or was started by a kvbench that could not resume",
            hint="start a new run",
        )
    scenario = scenario_of(run)
    plan = plan_of(scenario)
    now = json.loads(json.dumps(plan.to_json()))
    other = [
        key
        for key in ("cells", "deployments", "reference", "references")
        if now.get(key) != run.plan.get(key)
    ]
    if other:
        raise StoreError(
            f"{run.path}/plan.json: this kvbench plans other {' and '.join(other)} for its scenario",
            hint="resume with the version that started it, or start a new run",
        )
    return scenario, plan, fixed_of(run)


def _require_kind(run: RunFolder, kind: str) -> None:
    run_kind = str(run.manifest.get("kind"))
    if run_kind in HELD_METHODS:
        raise InputError(f"{run.path} is a run of kind {run_kind}", hint=resume_words(run_kind, run.path))
    if run_kind not in ("sweep", "bench", "simulate"):
        raise InputError(
            f"{run.path} is a run of kind {run_kind}, which cannot be resumed", hint="start a new run"
        )
    if (run_kind == "bench") != (kind == "bench"):
        raise InputError(f"{run.path} is a run of kind {run_kind}", hint=resume_words(run_kind, run.path))


def _require_agreement(run: RunFolder, cli: CliOptions) -> None:
    """Raise InputError if the command line contradicts the folder."""
    scenario, _ = resolve(cli)
    then, now = (
        dict(_flat(run.plan.get("scenario"))),
        dict(_flat(json.loads(json.dumps(scenario.resolved())))),
    )
    settings = run.manifest.get("asked") or {}
    then |= {"the rate": settings.get("rate"), "router cost": settings.get("both_modes", False)}
    now |= {"the rate": cli.fixed_rate, "router cost": cli.both_modes}
    if cli.fixed_rate is None:
        now["the rate"] = then["the rate"]
    if wrong := [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]:
        lines = [
            f"{name}: {then.get(name)} in the folder, {now.get(name)} requested" for name in wrong[:MAX_SHOWN]
        ]
        more = f"\n  and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        raise InputError(
            "--resume uses the run folder's plan, which other options contradict:\n  "
            + "\n  ".join(lines)
            + more,
            hint=f"omit them: {resume_words(str(run.manifest.get('kind')), run.path)}",
        )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _require_trace(run: RunFolder, scenario: Scenario) -> None:
    recorded = (run.manifest.get("trace") or {}).get("sha256")
    if scenario.workload.trace and recorded and recorded != trace_digest(scenario.workload.trace):
        raise StoreError(
            f"{scenario.workload.trace.path} is not the trace that the run started with",
            hint="restore the old file, or start a new run",
        )


def _wait_for_earlier_processes(run: RunFolder) -> None:
    tags = {str(session.get("run_tag")) for session in run.manifest.get("sessions", [])}
    deadline = time.monotonic() + GONE_DEADLINE_S
    while living := _tagged_processes(tags):
        if time.monotonic() > deadline:
            raise StoreError(
                f"earlier processes of this run are still running: pid {', '.join(map(str, living))}",
                hint="end them; their ports and devices may be needed",
            )
        time.sleep(0.1)


def _tagged_processes(tags: set[str]) -> list[int]:
    """This user's processes with one of these run tags in their environment."""
    wanted = [f"{RUN_TAG_ENV}={tag}".encode() for tag in tags]
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            words = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word in words for word in wanted):
            found.append(int(path.name))
    return sorted(found)
