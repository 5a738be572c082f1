"""Measures raw transfers between workers, case by case: every case ends as a row, whatever goes wrong."""

from __future__ import annotations

import datetime
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvbench import transfer
from kvbench.core.transfers import stats
from kvbench.core.transfers.cases import initiator_layout, target_layout
from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.errors import InputError, KvbenchError
from kvbench.hosts import devices
from kvbench.launchers.local import LocalLauncher
from kvbench.microbench.measuring import CaseRun, CounterWindow, carried
from kvbench.microbench.settings import Settings
from kvbench.microbench.sides import Side, WorkerError, Workers
from kvbench.microbench.teams import Key, Team, Teams
from kvbench.processes.transfer_worker.memory import MEMORY_SHARE, available_bytes

MAX_FAILURES: Final = 2
"""Workers of one kind that did not start, or connect, so often in a row are not waited for again."""

Progress = Callable[[int, Case, str], None]
"""Progress: the case's place in the list, the case, and what happens to it now."""


def run_cases(
    cases: Sequence[Case],
    initiator: Side | None = None,
    target: Side | None = None,
    settings: Settings | None = None,
    on_stage: Progress = lambda index, case, stage: None,
    log_dir: Path | None = None,
) -> Iterator[TransferRecord]:
    """Measure cases one after the other; a row for each, in their order, as soon as it is known.

    Whatever goes wrong with a case becomes its row's error. The workers' output goes to files in ``log_dir``.
    Close the iterator, or interrupt it, and no process is left. Use it from one thread: workers end with it.
    """
    with tempfile.TemporaryDirectory(prefix="kvbench-microbench-") as folder:
        scratch = Path(folder)
        bench = Microbench(
            initiator or Side(),
            target or Side(),
            settings or Settings(),
            log_dir or scratch / "logs",
            scratch,
        )
        yield from bench.run(cases, on_stage)


def skipped_because(case: Case) -> str:
    """What keeps a case from being tried on this machine, or an empty string. Raises InputError for a
    mistake."""
    backend = transfer.get(case.backend)
    for what, value, known in (
        ("protocol", case.protocol, backend.protocols),
        ("op", case.op, backend.ops),
        ("memory", case.memory, backend.memories),
    ):
        if value not in known:
            raise InputError(f"{case.backend} has no {what} {value!r}, only {', '.join(known)}")
    if problem := backend.check() or backend.check_protocol(case.protocol):
        return problem.reason + (f": {problem.fix}" if problem.fix else "")
    match backend.needs.get(case.protocol):
        case "rdma" if not devices.rdma():
            return "not run here: no RDMA device"
        case "gpu" if not devices.gpus():
            return "not run here: no GPU"
    return "not run here: no GPU" if case.memory == "cuda" and not devices.gpus() else ""


class Microbench:
    """Runs cases one after the other, and judges what was measured."""

    def __init__(
        self, initiator: Side, target: Side, settings: Settings, log_dir: Path, scratch: Path
    ) -> None:
        self._sides = {"initiator": initiator, "target": target}
        self._settings = settings
        self._workers = Workers(LocalLauncher(f"microbench-{os.getpid()}", log_dir, scratch))
        self._teams = Teams(self._sides, settings, self._workers)
        self._failures: dict[Key, int] = {}
        self._generation = 0
        self._memcpy: float | None = None
        self._load = None if initiator.launcher else os.getloadavg()[0]

    def run(self, cases: Sequence[Case], on_stage: Progress) -> Iterator[TransferRecord]:
        """A row for each case, in order. Leaves no process, also when it is closed or interrupted."""
        room = self._room()
        for case in cases:
            if not self._too_large(case, room):
                self._teams.expect(case)
        try:
            for index, case in enumerate(cases):
                on_stage(index, case, "starting")
                yield self._row(case, room, functools.partial(on_stage, index, case))
        finally:
            self._teams.disband(orderly=True)

    def _row(self, case: Case, room: int | None, on_stage: Callable[[str], None]) -> TransferRecord:
        now = datetime.datetime.now(datetime.timezone.utc)
        record = TransferRecord(case, started_at=now.isoformat(timespec="seconds"), lab=self._settings.lab)
        record.nbytes = case.nbytes
        record.initiator_host, record.target_host = (side.name for side in self._sides.values())
        far = all(side.launcher for side in self._sides.values())
        try:
            # What other hosts lack they have reported before.
            if reason := "" if far else skipped_because(case):
                record.status, record.error = "skipped", reason
                return record
            if reason := self._too_large(case, room) or self._too_few_nics(case):
                raise WorkerError(reason)
            key = Key.of(case)
            if self._failures.get(key, 0) >= MAX_FAILURES:
                raise WorkerError(f"not tried any more, since {MAX_FAILURES} such cases before did not start")
            self._failures[key] = self._failures.get(key, 0) + 1
            team = self._teams.fitting(case, record, on_stage)
            self._failures[key] = 0
            steps = CaseRun(case, record, team, self._workers, self._settings)
            self._judge(record, team, steps.run(self._new_content, on_stage))
        except (KvbenchError, OSError, ValueError, KeyError) as error:
            record.status = "error"
            record.error = self._cause(error)
            record.log = error.log if isinstance(error, WorkerError) else []
            record.gb_per_s = None
            self._teams.disband(orderly=False)
        return record

    def _cause(self, error: Exception) -> str:
        cause = str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}"
        return "; ".join([cause, *(word for word in self._workers.casualties() if word not in cause)])

    def _new_content(self) -> int:
        self._generation += 1
        return self._generation

    # --- what cannot be

    def _room(self) -> int | None:
        if all(side.elsewhere for side in self._sides.values()):
            return None
        return available_bytes()

    def _too_large(self, case: Case, room: int | None) -> str:
        if room is None or case.memory != "host":
            return ""
        here = {name: not side.elsewhere for name, side in self._sides.items()}
        needed = here["initiator"] * case.initiators * initiator_layout(case).nbytes
        needed += here["target"] * case.targets * target_layout(case).nbytes
        if needed <= MEMORY_SHARE * room:
            return ""
        return f"its buffers need {needed:,} bytes, and {room:,} bytes of memory are free"

    def _too_few_nics(self, case: Case) -> str:
        for name, side in self._sides.items():
            if case.nics and len(side.nics) < case.nics:
                there = ", ".join(str(nic["name"]) for nic in side.nics) or "none"
                return f"{case.nics} NICs are asked for, and the {name} has {len(side.nics)}: {there}"
        return ""

    # --- judging

    def _judge(self, record: TransferRecord, team: Team, window: CounterWindow) -> None:
        case, sides = record.case, self._sides
        before, after = window.before[0], window.after[0]
        record.load_average = before["load"]
        record.line_rate_gb_per_s = self._line_rate(case, window)
        moved = carried(team.everyone, window)
        asked = {role: [str(nic["name"]) for nic in side.nics[: case.nics]] for role, side in sides.items()}
        little = 0.01 * record.calls * record.nbytes
        record.nic_bytes = {
            f"{role}:{name}": count
            for role, nics in moved.items()
            for name, count in nics.items()
            if name in asked[role] or count > little
        }
        ours = (record.initiator_cpu_s or 0.0) + (
            0.0 if sides["target"].elsewhere else record.target_cpu_s or 0.0
        )
        backend = transfer.get(case.backend)
        seen = stats.CaseConditions(
            cores=before["cores"],
            load_before=self._load,
            others_cpu_s=after["host_cpu_s"] - before["host_cpu_s"] - ours,
            steal_s=after["steal_s"] - before["steal_s"],
            burst_bytes=self._settings.burst_bytes if case.nics else None,
            memcpy_gb_per_s=self._memcpy,
            moves_bytes=backend.moves_bytes,
            carried=moved,
            asked=asked if backend.nics else {},
        )
        if case.backend == "memcpy":
            self._memcpy = max(self._memcpy or 0.0, record.gb_per_s or 0.0)
        record.warnings = stats.warnings(record, seen)

    def _line_rate(self, case: Case, window: CounterWindow) -> float | None:
        """What the asked NICs of the slower side can carry together, in GB/s."""
        if not case.nics:
            return None
        if self._settings.nic_gb_per_s is not None:
            return case.nics * self._settings.nic_gb_per_s
        rates: list[float] = []
        for role, counters in (("initiator", window.before[0]), ("target", window.before[-1])):
            names = [str(nic["name"]) for nic in self._sides[role].nics[: case.nics]]
            known = [counters["nics"].get(name, {}).get("bytes_per_s") for name in names]
            if None in known:
                return None
            rates.append(sum(known) / 1e9)
        return min(rates)
