"""One fault on its own deployment: run the load, inject, undo, observe, compute the cost, store.

Detections are recorded with their times: warnings in logs, kvbench's liveness check, the first failed
request."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.chaos_soak.fault_cost import FaultCost, cost_of
from kvbench.core.chaos_soak.fault_plan import PlannedFault
from kvbench.core.foreign_text import visible
from kvbench.core.load.workers import LoadResult, Progress
from kvbench.core.metrics.metrics import summarise
from kvbench.core.records import Finding, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import KvbenchError
from kvbench.hosts.lab.lab import Lab
from kvbench.hosts.log_tail import LogReader
from kvbench.hosts.procfs import wait_while
from kvbench.launchers.base import Launcher
from kvbench.results.store import RunStore
from kvbench.sweep.chaos_soak.constant_rate import CellRate, Holdings, grown_bytes, holdings, stranded_blocks
from kvbench.sweep.chaos_soak.strikes import DecodePoolFault, OrphanedKvFault, Strike, process_name, strike_of
from kvbench.sweep.display import Watcher
from kvbench.sweep.trial.canary_supply import CanarySupply
from kvbench.sweep.trial.idle import Idleness
from kvbench.sweep.trial.readings import Observer
from kvbench.sweep.trial.trial import TrialRunner

POLL_S: Final = 0.05
MOST_LINES: Final = 5
"""Maximum lines per log; the first ones show the cause."""
MOST_CHARS: Final = 240
COMPLAINT: Final = re.compile(r"\b(?:WARN|WARNING|ERROR|CRITICAL|FATAL|Traceback)\b|\b[EWF]\d{4} \d\d:")
"""Python's levels, and the first letter of glog's lines (``E1122 01:03:45``)."""
KVBENCH: Final = "kvbench"
CLIENT: Final = "client"


@dataclass(frozen=True)
class Notice:
    """Detection by ``who``, ``after_s`` seconds after the fault; ``more`` lines followed."""

    who: str
    after_s: float
    words: str
    more: int = 0


@dataclass
class Notices:
    """Watches the logs and liveness of a deployment in a thread. It does not raise: a struck deployment is
    expected to fail."""

    deployment: RunningDeployment
    _found: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _readers: dict[str, LogReader] = field(default_factory=dict)
    _alarm: tuple[float, str] | None = None
    _struck_at: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        logs: Mapping[str, Path] = {process.name: process.log_path for process in self.deployment.processes}
        self._readers = {name: LogReader(path) for name, path in logs.items()}
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def __enter__(self) -> Notices:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._look()

    def struck(self, at: float) -> None:
        """Record the time of the fault: ``at`` on the monotonic clock."""
        self._struck_at = at

    def seen(self, progress: Progress) -> None:
        """Take progress; the first request that fails after the fault is a detection."""
        if self._struck_at is None or CLIENT in self._found:
            return
        failed = next((record for record in progress.settled if record.error not in ("", "cancelled")), None)
        if failed is not None:
            self._found[CLIENT] = [(time.monotonic(), f"request {failed.index}: {failed.error}")]
            self._counts[CLIENT] = 1

    def found(self) -> list[Notice]:
        began = self._struck_at
        if began is None:
            return []
        notices = [
            Notice(source, round(lines[0][0] - began, 3), text, self._counts[source] - len(lines))
            for source, lines in self._found.items()
            for text in [" | ".join(line for _, line in lines)]
        ]
        if self._alarm is not None:
            notices.append(Notice(KVBENCH, round(self._alarm[0] - began, 3), self._alarm[1]))
        return sorted(notices, key=lambda notice: notice.after_s)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for name, reader in self._readers.items():
            lines = reader.drain()
            if self._struck_at is None:
                continue
            for line in lines:
                if COMPLAINT.search(line):
                    self._counts[name] = self._counts.get(name, 0) + 1
                    source_lines = self._found.setdefault(name, [])
                    if len(source_lines) < MOST_LINES:
                        source_lines.append((now, visible(line.strip())[:MOST_CHARS]))
        if self._struck_at is not None and self._alarm is None:
            self._watch(now)

    def _watch(self, now: float) -> None:
        """Record the failure that would have ended a sweep's cell."""
        try:
            self.deployment.check_alive()
        except KvbenchError as error:
            self._alarm = (now, visible(error.message.splitlines()[0])[:MOST_CHARS])


SETTLE_S: Final = 10.0
"""Longest wait for the system to drain before its resources are read, in seconds."""
LOOK_S: Final = 0.05
COUNTS_NOTHING: Final = ("router", "metadata")
"""Targets without a request counter: the load's successes show whether they serve again."""
NOT_HELD: Final = "not_held"


@dataclass
class Striker:
    """Injects and undoes the fault in a thread. Times are monotonic. ``ready_at``: when a restarted process
    passed its health check."""

    fault: PlannedFault
    deployment: RunningDeployment
    strike: Strike
    on_struck: Callable[[float], None]
    name: str = ""
    done: str = ""
    struck_at: float | None = None
    undone_at: float | None = None
    ready_at: float | None = None
    problem: KvbenchError | None = None
    _began: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _due: threading.Event = field(default_factory=threading.Event)
    _started_at: float = 0.0

    def __enter__(self) -> Striker:
        self._thread = threading.Thread(target=self._run, name="striker", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._began.set()
        self._thread.join(timeout=30)

    def seen(self, progress: Progress) -> None:
        """Take progress, which gives the start of the load."""
        if not self._began.is_set():
            self._started_at = time.monotonic() - progress.t_s
            self._began.set()

    def watched(self) -> bool:
        """Whether the fault is undone and was watched long enough afterwards."""
        since = self.struck_at if not self.fault.down_s else self.undone_at
        if self.fault.kind == "restart":
            since = self.ready_at
        return since is not None and time.monotonic() >= since + self.fault.after_s

    def check(self) -> None:
        """Restart a killed process when due; raise KvbenchError if a fault failed. Not done in the striker's
        thread: a process dies with the thread that started it (launchers/parts/guard.py)."""
        if self._due.is_set():
            self._due.clear()
            self.strike.undo()
            self.undone_at = time.monotonic()
        if self.problem is not None:
            raise self.problem

    def _run(self) -> None:
        self._began.wait()
        try:
            if self._until(self._started_at + self.fault.at_s):
                self._strike()
        except KvbenchError as error:
            self.problem = error
        finally:
            if self.undone_at is None:
                with suppress(KvbenchError):
                    self.strike.undo(ending=True)

    def _strike(self) -> None:
        self.struck_at = time.monotonic()
        self.on_struck(self.struck_at)
        self.done = self.strike.begin()
        if not self.fault.down_s:
            self._over.wait()
        if not self._until(self.struck_at + self.fault.down_s):
            return
        if self.fault.kind != "restart":
            self.strike.undo()
            self.undone_at = time.monotonic()
            return
        self._due.set()
        while not self._over.wait(LOOK_S):
            if self.undone_at is not None and self.deployment.is_ready(self.name):
                self.ready_at = time.monotonic()
                return

    def _until(self, moment: float) -> bool:
        """Wait; return False if the trial ended first."""
        return not self._over.wait(max(0.0, moment - time.monotonic()))


@dataclass(frozen=True)
class FaultTrial:
    """Runs and stores one fault trial on a running deployment."""

    scenario: Scenario
    held: CellRate
    store: RunStore
    watcher: Watcher
    lab: Lab | None = None

    def run(self, fault: PlannedFault, launcher: Launcher, deployment: RunningDeployment) -> TrialRecord:
        """Run the trial. Raises KvbenchError if the fault or the load generator fails."""
        scenario, cell = self.scenario, self.held.cell
        trials = TrialRunner(scenario, deployment, self.store, launcher, self.watcher.trial_progress)
        supply = None
        if self.held.pool is not None:
            supply = trials.canaries[cell] = CanarySupply(scenario, deployment, self.held.pool)
        Idleness(scenario, deployment).wait(cell)
        before = holdings(deployment)
        plan = TrialPlan(cell, fault.number, self.held.rate, fault.name, method="chaos", searched=False)
        trial = trials.trials.begin_trial(plan)
        notices = Notices(deployment)
        striker = self._striker(fault, launcher, deployment, notices)

        def over(progress: Progress) -> bool:
            striker.seen(progress)
            notices.seen(progress)
            return striker.watched()

        with notices, striker, Observer(launcher, deployment, plan.trial_id) as observer:
            load = trials.offer(trial, over, striker.check)
        striker.check()
        wait_while(deployment.under_way, SETTLE_S, LOOK_S)
        after = holdings(deployment)
        self.store.add_telemetry(observer.rows)
        struck = _Observations(scenario, striker, load, before, after)
        found = struck.to_json() | {
            "fault": fault.to_json(),
            "name": fault.name,
            "noticed": [asdict(notice) for notice in notices.found()],
        }
        return self._record(trial.begun, load, found, None if supply is None else supply.judged(load.records))

    def _striker(
        self, fault: PlannedFault, launcher: Launcher, deployment: RunningDeployment, notices: Notices
    ) -> Striker:
        def pool_fault(planned: PlannedFault) -> OrphanedKvFault | DecodePoolFault:
            fault_class = OrphanedKvFault if planned.target == "prefill" else DecodePoolFault
            return fault_class(self.scenario, deployment, launcher, planned)

        strike = strike_of(fault, deployment, self.lab, pool_fault)
        name = "" if fault.target == "nic" else process_name(fault, deployment.plan, list(deployment.pids()))
        return Striker(fault, deployment, strike, notices.struck, name)

    def _record(
        self, begun: TrialRecord, load: LoadResult, found: dict[str, Any], canaries: CanaryResult | None
    ) -> TrialRecord:
        slo, rate = self.scenario.slo.main(), self.held.rate
        found["wrong_ids"] = [answer.request_id for answer in canaries.wrong] if canaries else []
        found["answers"] = _answers(canaries)
        cost = cost_of(load.records, slo, rate, found["struck_s"], found["wrong_ids"])
        if found.get("again") is not None:
            found["again"]["taken_up"] = bool(found["again"]["served"]) and cost.back_s is not None
        found["cost"] = cost.to_json()
        summary = summarise(load.records, slo, rate, load.duration_s).to_json()
        findings = [] if cost.was_held else [_rate_too_high(cost)]
        record = replace(
            begun,
            verdict="invalid" if findings else "measured",
            reason=findings[0].message if findings else "",
            duration_s=load.duration_s,
            summary={**summary, "chaos": found},
            engine={"client": dict(load.client)} | ({"canaries": canaries.to_json()} if canaries else {}),
            findings=findings,
        )
        self.store.add_trial(record, load.records)
        return record


def _answers(canaries: CanaryResult | None) -> dict[str, Any]:
    if canaries is None:
        return {"checked": 0, "unanswered": 0, "wrong": 0, "examples": []}
    return {
        "checked": canaries.checked,
        "unanswered": canaries.unanswered,
        "wrong": len(canaries.wrong),
        "examples": [answer.text() for answer in canaries.wrong[:3]],
    }


def _rate_too_high(cost: FaultCost) -> Finding:
    share = "none had ended" if cost.held_before is None else f"{cost.held_before:.0%} were good"
    return Finding(
        NOT_HELD,
        "invalid",
        f"the rate was too high before the fault: of {cost.before} requests {share}, "
        f"{cost.target:.0%} required",
        "use a lower rate: --rate, or a lower --share of the measured rate",
        {"held_before": cost.held_before, "before": cost.before},
    )


@dataclass(frozen=True)
class _Observations:
    """Observations of a fault, on the trial's clock."""

    scenario: Scenario
    striker: Striker
    load: LoadResult
    before: Holdings
    after: Holdings

    def to_json(self) -> dict[str, Any]:
        striker = self.striker
        began = self._began()
        stranded = stranded_blocks(self.before, self.after)
        return {
            "struck_s": self._since(striker.struck_at, began, striker.fault.at_s),
            "undone_s": self._since(striker.undone_at, began, None),
            "done": striker.done,
            "again": self._restart(began),
            "stranded_blocks": stranded,
            "stranded_bytes": self._bytes(stranded),
            "grown_bytes": grown_bytes(self.before, self.after),
            "read_after_s": round(time.monotonic() - (striker.struck_at or began), 3),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }

    def _began(self) -> float:
        started_s = self.load.client.get("started_monotonic_s")
        return float(started_s) if isinstance(started_s, (int, float)) else self.striker._started_at

    @staticmethod
    def _since(moment: float | None, began: float, unknown: float | None) -> float | None:
        return unknown if moment is None else round(moment - began, 4)

    def _restart(self, began: float) -> dict[str, Any] | None:
        """Ready time and served requests of a restarted process, or None."""
        striker = self.striker
        if striker.fault.kind != "restart":
            return None
        now: Mapping[str, Any] = self.after.to_json().get(striker.name, {})
        served = now.get("served")
        if striker.fault.target in COUNTS_NOTHING:
            ready_s = self._since(striker.ready_at, began, None)
            served = (
                sum(record.ok and record.scheduled_s >= ready_s for record in self.load.records)
                if ready_s
                else 0
            )
        return {"ready_s": self._since(striker.ready_at, began, None), "served": served}

    def _bytes(self, stranded: Mapping[str, float]) -> float | None:
        """KV bytes of the stranded blocks, or None if model or block size are unknown."""
        shape = self.scenario.kv_shape
        known = {name: self.after.of[name].block_tokens for name in stranded}
        if not shape.known or None in known.values():
            return None if stranded else 0.0
        ranks = self.scenario.deployment.wire_ranks
        return sum(
            blocks * shape.block_bytes(known[name] or 0, ranks) * shape.regions()
            for name, blocks in stranded.items()
        )
