"""The liars' bench: plants every lie in a real trial and demands that its gate catches it, and that none of
fifty honest trials is refused. ``python -m tools.liars`` or ``make liars``; exit code 1 if a lie got through
or an honest trial did not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from kvbench import transfer
from kvbench.core.gates.lies import LIES
from kvbench.core.records import TrialRecord
from kvbench.launchers.local import LocalLauncher
from kvbench.launchers.parts.ports import with_ports
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.sweep.display import Silent
from kvbench.sweep.new_run import create_store
from kvbench.sweep.sweep import deployed_sweep
from kvbench.sweep.trial.load_plan import TrialPlan
from kvbench.sweep.trial.trial import TrialRunner

# A light load with limits so wide that a busy machine breaks none of them.
EASY: Final = (
    "workload.input_len=[64]",
    "workload.output_len=8",
    "slo.ttft_ms=4000",
    "slo.tpot_ms=1000",
    "slo.attainment=0.5",
    "search.trial_s=1",
    "search.min_requests=24",
    "deployment.base_port=0",
)


@dataclass(frozen=True)
class Case:
    """One lie in one trial. ``nuisance`` disturbs from outside what no part of kvbench lies about.

    ``verdicts``: what may come of the trial. ``gate``: the finding that must be there.
    """

    lie: str
    gate: str
    verdicts: tuple[str, ...] = ("invalid",)
    connector: str = "tcp"
    options: dict[str, object] = field(default_factory=dict)
    rate: float = 30.0
    sets: tuple[str, ...] = ()
    nuisance: str = ""
    """A process whose command line has this word is stopped and continued again and again."""


def _lie(lie: str, *sets: str, rate: float = 30.0, connector: str = "tcp", **options: object) -> Case:
    return Case(lie, LIES[lie].gate, connector=connector, options=options, rate=rate, sets=sets)


def _missed(case: Case) -> Case:
    """One that is no refusal: the rate is missed. A busy machine may refuse it for another reason."""
    return Case(
        case.lie, case.gate, ("missed", "invalid"), case.connector, case.options, case.rate, case.sets
    )


def _beside(case: Case) -> Case:
    """One that is reported beside the number, which stands."""
    return replace(case, verdicts=("met", "missed", "invalid"))


# Prefill of `quick`, five times slower, computes at most 9 k tokens a second at this length: with so many
# parameters 80 % of an A10's peak. No GPU is stood for; the figures only have to be possible for the honest
# engine, and impossible for a liar that a busy machine holds up: hence the slow one, and the slow NIC below.
_PHYSICS: Final = (
    "workload.input_len=[4096]",
    "deployment.hardware=A10",
    "deployment.engine_options.time_scale=5",
    "model.active_parameters=1.1e10",
    "search.min_requests=20",
)
CASES: Final[tuple[Case, ...]] = (
    _lie("warm_cache"),
    _lie("skip_prefill"),
    _lie("impossible_speed", *_PHYSICS, rate=8),
    _lie("impossible_transfer", "deployment.nic_gbit=10"),
    _lie("decode_recomputes"),
    _lie("decode_only"),
    _lie("corrupt_kv"),
    _lie("double_kv"),
    _lie("failing_kv"),
    _lie("unreleased_kv"),
    _lie("silent_tcp", connector="mooncake", protocol="rdma"),
    _lie("claimed_rdma", connector="mooncake", protocol="rdma"),
    _lie("wrong_nics", connector="nixl", ucx_net_devices="lo,eth0"),
    _missed(_lie("slot_cap", "workload.output_len=64")),
    _lie("slow_drift", "workload.output_len=16", "slo.tpot_ms=40", "search.trial_s=4", "slo.attainment=0.8"),
    _lie("late_engine", "slo.ttft_ms=200"),
    _lie("early_eos"),
    _lie("wrong_usage"),
    _lie("hidden_retry", rate=20),
    _lie("router_retry"),
    _lie("router_drops", "slo.attainment=0.9"),
    _lie("lost_requests"),
    _lie("restart"),
    _lie("shedding"),
    _lie("cut_prompt"),
    _beside(_lie("merged_tokens", "workload.output_len=16")),
    _lie("answer_at_once", "workload.output_len=16"),
    _beside(_lie("canned_answers", "workload.output_len=16", "search.min_requests=60")),
    # What no part of kvbench has to lie about: the load itself, and the machine.
    Case("late_client", "client_limited", sets=("slo.ttft_ms=200",), nuisance="kvbench.processes.loadgen"),
    Case("late_router", "router_limited", sets=("slo.ttft_ms=200",), nuisance="kvbench.processes.router"),
    Case("one_batch", "one_batch", rate=60, sets=("workload.output_len=256", "search.trial_s=0.5")),
    Case(
        "overload",
        "growing_queue",
        ("missed", "invalid"),
        rate=150,
        sets=("search.trial_s=2", "slo.ttft_ms=20000", "deployment.engine_options.max_num_seqs=512"),
    ),
)
PAIRS: Final = ("mooncake", "nixl", "tcp")
LATE_GATES: Final = frozenset({"client_limited", "router_limited", "emulator_behind"})
TAKEN: Final = 0.25
"""With more of the CPU than this taken by others, kvbench's own processes may well be late."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case. ``findings``: gate → level of all findings."""

    case: Case
    verdict: str
    findings: dict[str, str]
    reason: str
    labels: tuple[str, ...]
    seconds: float

    @property
    def caught(self) -> bool:
        levels = ("invalid",) if self.case.verdicts == ("invalid",) else ("warning", "note")
        return self.findings.get(self.case.gate) in levels and self.verdict in self.case.verdicts


def unable(case: Case) -> str:
    """Why a case cannot run here; empty if it can."""
    problem = transfer.check(case.connector)
    return "" if problem is None else problem.reason


def run_case(case: Case, folder: Path) -> Outcome:
    """One trial of a case, in a deployment of its own."""
    began = time.monotonic()
    if case.lie == "corrupt_kv":
        return _run_with_reference(case, folder, began)
    with running(case.connector, case.options, _sets(case), folder) as trial, nuisance(case.nuisance):
        record = trial(case.rate)
    found: dict[str, str] = {finding.gate: finding.level for finding in record.findings}
    seconds = time.monotonic() - began
    return Outcome(case, record.verdict, found, record.reason, tuple(record.labels), seconds)


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
    gate = result.reason.partition(":")[0]
    verdict = "invalid" if result.status == "refused" else result.status
    return Outcome(case, verdict, {gate: "invalid"}, result.reason, labels, time.monotonic() - began)


def _sets(case: Case) -> tuple[str, ...]:
    own = (f"deployment.engine_options.lie={case.lie}",) if case.lie in LIES else ()
    return (*EASY, *case.sets, *own)


def _connectors(connector: str, options: dict[str, object]) -> str:
    return f"connectors={json.dumps([{'name': connector, **options}])}"


@contextlib.contextmanager
def running(
    connector: str, options: dict[str, object], sets: Sequence[str], folder: Path
) -> Iterator[Callable[[float], TrialRecord]]:
    """A deployment; what it gives runs one trial at a rate and returns its record."""
    from kvbench.deployment.deployment import RunningDeployment

    scenario, source = resolve(CliOptions("quickstart", (*sets, _connectors(connector, options))))
    plan = plan_of(scenario)
    planned = next(each for each in plan.deployments if not each.reference_only)
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
            for process in _descendants(word):
                with contextlib.suppress(psutil.Error):
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


def _descendants(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if word in process.cmdline():
                found.append(process)
    return found


def honest(connector: str, trials: int, folder: Path) -> Iterator[TrialRecord]:
    """Honest trials of a connector at light and moderate rates."""
    slow = "deployment.engine_options.time_scale=3"  # so that a busy machine can keep the model's time
    with running(connector, {}, (*EASY, slow), folder) as trial:
        for number in range(trials):
            yield trial(6.0 + 2.0 * (number % 5))


def main(argv: Sequence[str]) -> int:
    """Runs the bench; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--honest", type=int, default=50, metavar="N", help="honest trials (default: 50)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="LIE", help="only this lie; repeatable"
    )
    wanted = parser.parse_args(argv)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="kvbench-liars-") as name:
        folder = Path(name)
        print(f"{'lie':20} {'verdict':9} {'seconds':>7}  caught by")
        for case in CASES:
            if wanted.only and case.lie not in wanted.only:
                continue
            if reason := unable(case):
                print(f"{case.lie:20} not run: {reason}")
                continue
            outcome = run_case(case, folder)
            bad += not outcome.caught
            others = ", ".join(gate for gate in outcome.findings if gate != case.gate)
            word = case.gate if outcome.caught else f"NOT CAUGHT by {case.gate}: {outcome.reason}"
            print(
                f"{case.lie:20} {outcome.verdict:9} {outcome.seconds:7.1f}  {word}"
                + f" ({others})" * bool(others)
            )
            sys.stdout.flush()
        bad += _honest_part(wanted.honest, folder)
    return 1 if bad else 0


def false_alarms(record: TrialRecord) -> list[str]:
    """The gates that refuse a trial wrongly, if it is an honest one.

    That kvbench's own processes are late is no false alarm where others take the machine's CPU.
    """
    findings = {finding.gate: finding for finding in record.findings}
    disturbed = (findings["machine_disturbed"].evidence if "machine_disturbed" in findings else {}) or {}
    taken = max(disturbed.get("other_cpu_share") or 0.0, disturbed.get("steal_share") or 0.0) > TAKEN
    refused = [name for name, finding in findings.items() if finding.level == "invalid"]
    return [name for name in refused if not (taken and name in LATE_GATES)]


def _honest_part(trials: int, folder: Path) -> int:
    names = ["aggregated", *(name for name in PAIRS if transfer.check(name) is None)]
    done = late = wrong = 0
    counts: Counter[str] = Counter()
    for index, name in enumerate(names):
        share = trials // len(names) + (index < trials % len(names))
        for record in honest(name, share, folder) if share else ():
            done += 1
            counts.update(f"{f.gate} ({f.level})" for f in record.findings if f.level != "note")
            alarms = false_alarms(record)
            wrong += bool(alarms)
            late += record.verdict == "invalid" and not alarms
            if alarms:
                print(f"honest trial of {name} REFUSED by {', '.join(alarms)}: {record.reason}")
    print(
        f"{done} honest trials over {', '.join(names)}: {wrong} refused wrongly, {late} since other "
        "processes took the CPU; findings: "
        + (", ".join(f"{count} × {gate}" for gate, count in sorted(counts.items())) or "none")
    )
    return wrong


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "error")
    sys.exit(main(sys.argv[1:]))
