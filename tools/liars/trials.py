"""Runs one case: a deployment or a foreign server, one trial, its findings. And honest trials, without
alarms.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from kvbench import transfer
from kvbench.core.canaries.tally import Tally
from kvbench.core.gates.lies import LIES
from kvbench.core.records import TrialRecord
from kvbench.core.search.load_plan import TrialPlan
from kvbench.core.search.methods import STEADY_GATES
from kvbench.deployment.deployment import with_ports
from kvbench.launchers.local import LocalLauncher
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import load_run
from kvbench.sweep.bench import create_store
from kvbench.sweep.deployed import DeployedSite
from kvbench.sweep.display import Silent
from kvbench.sweep.selftest_server import exact_server
from kvbench.sweep.sweep import deployed_sweep
from kvbench.sweep.trial.trial import TrialRunner

from .cases import EASY, FOREIGN, Case


@dataclass(frozen=True)
class Outcome:
    """What came of a case. ``findings``: gate → level of all findings; ``unseen``: gates that saw nothing."""

    case: Case
    verdict: str
    findings: dict[str, str]
    reason: str
    unseen: frozenset[str]
    labels: tuple[str, ...]
    seconds: float

    @property
    def caught(self) -> bool:
        if self.case.unseen:
            return self.case.gate in self.unseen and self.case.gate not in self.findings
        levels = ("invalid",) if self.case.verdicts == ("invalid",) else ("warning", "note")
        return self.findings.get(self.case.gate) in levels and self.verdict in self.case.verdicts


def unable(case: Case) -> str:
    """Why a case cannot run here; empty if it can."""
    if case.servers or case.connector == "aggregated":
        return ""
    problem = transfer.check(case.connector)
    return "" if problem is None else problem.reason


def run_case(case: Case, folder: Path) -> Outcome:
    began = time.monotonic()
    if case.reference:
        return _run_with_reference(case, folder, began)
    with contextlib.ExitStack() as stack:
        trial = stack.enter_context(
            foreign(case, folder)
            if case.servers
            else running(deployed(case.connector, case.options, _sets(case)), folder)
        )
        stack.enter_context(nuisance(case.nuisance))
        record = trial(case.rate)
    return outcome_of(case, record, time.monotonic() - began)


def outcome_of(case: Case, record: TrialRecord, seconds: float) -> Outcome:
    found: dict[str, str] = {finding.gate: finding.level for finding in record.findings}
    unseen = frozenset(gate for gates in record.summary["unseen"].values() for gate in gates)
    return Outcome(case, record.verdict, found, record.reason, unseen, tuple(record.labels), seconds)


def _run_with_reference(case: Case, folder: Path, began: float) -> Outcome:
    """The way of ``kvbench bench``: an aggregated server gives the true outputs first."""
    cli = CliOptions(
        "quickstart", (*_sets(case), _connectors(case.connector, case.options)), fixed_rate=case.rate
    )
    scenario, source = resolve(cli)
    plan = plan_of(scenario)
    with create_store(folder, scenario, source, plan, "bench") as store:
        from kvbench.sweep.cell import Fixed

        (result,) = deployed_sweep(scenario, plan, store, Silent(), Fixed(case.rate)).run()
        labels = tuple(store.manifest.get("labels", []))
    seconds = time.monotonic() - began
    if trials := load_run(store.path).trials:
        return outcome_of(case, trials[-1], seconds)
    gate = result.reason.partition(":")[0]
    verdict = "invalid" if result.status == "refused" else result.status
    return Outcome(case, verdict, {gate: "invalid"}, result.reason, frozenset(), labels, seconds)


def _sets(case: Case) -> tuple[str, ...]:
    own = (f"deployment.engine_options.lie={case.lie}",) if case.lie in LIES else ()
    return (*EASY, *case.sets, *own)


def _connectors(connector: str, options: dict[str, object]) -> str:
    return f"connectors={json.dumps([{'name': connector, **options}])}"


def deployed(connector: str, options: dict[str, object], sets: Sequence[str]) -> CliOptions:
    return CliOptions("quickstart", (*sets, _connectors(connector, options)))


@contextlib.contextmanager
def foreign(case: Case, folder: Path) -> Iterator[Callable[[float], TrialRecord]]:
    """The case's servers, of which kvbench is told what anyone would tell it."""
    with contextlib.ExitStack() as stack:
        specs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-")))
        launcher = LocalLauncher(f"liars-{specs.name}", specs, specs)
        urls = [
            stack.enter_context(exact_server(launcher, spec, f"exact-{place}")).url
            for place, spec in enumerate(case.servers)
        ]
        pages = ",".join(f"{url}/metrics" for url in urls) if case.servers[0]["metrics"] else None
        sets = tuple(override for override in _sets(case) if not override.startswith("deployment."))
        yield stack.enter_context(
            running(
                replace(FOREIGN, overrides=sets, base_url=urls[0], decode_metrics_url=pages),
                folder,
                watched=case.watched,
            )
        )


@contextlib.contextmanager
def running(
    cli: CliOptions, folder: Path, *, watched: bool = False
) -> Iterator[Callable[[float], TrialRecord]]:
    """A deployment; what it gives runs one trial at a rate and returns its record. ``watched``: with canaries
    whose right answers are those that it gives when idle.
    """
    from kvbench.deployment.deployment import RunningDeployment

    scenario, source = resolve(cli)
    plan = plan_of(scenario)
    planned = next(entry for entry in plan.deployments if not entry.reference_only)
    (cell,) = plan.cells
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(create_store(folder, scenario, source, plan, "bench"))
        specs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-")))
        launcher = LocalLauncher(store.path.name, store.logs, specs)
        deployment = stack.enter_context(
            RunningDeployment(scenario, with_ports(planned, scenario.deployment.host), launcher)
        )
        runner = TrialRunner(scenario, deployment, store, launcher, Silent().trial_progress)
        stack.callback(runner.close)
        if watched:
            DeployedSite(scenario, deployment, runner, store, Silent()).watch_answers(cell, None)
        number = 0

        def trial(rate: float) -> TrialRecord:
            nonlocal number
            number += 1
            return runner.run(TrialPlan(cell, number, rate, "bench", searched=False))

        yield trial


@contextlib.contextmanager
def nuisance(word: str, stopped_s: float = 0.15, free_s: float = 0.15) -> Iterator[None]:
    """Stops and continues this process's descendant with that word in its command line, until it ends."""
    if not word:
        yield
        return
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(free_s):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if word not in process.cmdline():
                        continue
                    process.send_signal(signal.SIGSTOP)
                    over.wait(stopped_s)
                    process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=disturb, name="nuisance")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


PAIRS: Final = ("mooncake", "nixl", "tcp")
LATE_GATES: Final = frozenset({"client_limited", "router_limited", "host_starved", "emulator_behind"})
NO_ACCUSATION: Final = STEADY_GATES | LATE_GATES | {"machine_disturbed"}
"""Warnings of the load, of kvbench's own parts, and of the machine."""
TAKEN: Final = 0.25
"""With more of the CPU than this taken by others, kvbench's own processes may well be late."""


def honest(connector: str, trials: int, folder: Path, noise: float = 0.0) -> Iterator[TrialRecord]:
    """Honest trials of a connector at light and moderate rates. ``noise``: share of tokens that come out
    otherwise in a batch.
    """
    slow = "deployment.engine_options.time_scale=3"  # so that a busy machine can keep the model's time
    noisy = f"deployment.engine_options.output_noise={noise:g}"
    with running(deployed(connector, {}, (*EASY, slow, noisy)), folder, watched=True) as trial:
        for number in range(trials):
            yield trial(6.0 + 2.0 * (number % 5))


def false_alarms(record: TrialRecord) -> list[str]:
    """The gates that refuse a trial wrongly, or warn of the servers, if it is an honest one.

    That kvbench's own processes are late is no false alarm where others take the machine's CPU.
    """
    findings = {finding.gate: finding for finding in record.findings}
    disturbed = (findings["machine_disturbed"].evidence if "machine_disturbed" in findings else {}) or {}
    taken = max(disturbed.get("other_cpu_share") or 0.0, disturbed.get("steal_share") or 0.0) > TAKEN
    refused = [name for name, finding in findings.items() if finding.level == "invalid"]
    warned = [name for name, finding in findings.items() if finding.level == "warning"]
    return [
        *(name for name in refused if not (taken and name in LATE_GATES)),
        *(name for name in warned if name not in NO_ACCUSATION),
    ]


def honest_deployments(trials: int, folder: Path, noise: float = 0.0) -> int:
    """So many real trials over the connectors that are here, as printed; how many raised an alarm."""
    names = ["aggregated", *(name for name in PAIRS if transfer.check(name) is None)]
    done = late = wrong = 0
    counts: Counter[str] = Counter()
    tally = Tally()
    for index, name in enumerate(names):
        share = trials // len(names) + (index < trials % len(names))
        for record in honest(name, share, folder, noise) if share else ():
            done += 1
            tally += Tally.of_trial(record)
            counts.update(f"{f.gate} ({f.level})" for f in record.findings if f.level != "note")
            alarms = false_alarms(record)
            wrong += bool(alarms)
            late += record.verdict == "invalid" and not alarms
            if alarms:
                print(f"honest trial of {name} ALARM by {', '.join(alarms)}: {record.reason}")
    noisy = f" with noise {noise:g}" if noise else ""
    print(
        f"{done} honest trials{noisy} over {', '.join(names)}: {wrong} alarms, {late} refused since other "
        "processes took the CPU; findings: "
        + (", ".join(f"{count} × {gate}" for gate, count in sorted(counts.items())) or "none")
        + f"; answers: {tally.text()}"
    )
    return wrong
