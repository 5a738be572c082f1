"""Measures raw transfers between workers, case by case; a failed case is a row with its error. Steps of a
case: connect workers, fill, prepare, warm up, measure, verify."""

from __future__ import annotations

import datetime
import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvbench import transfer
from kvbench.core.transfers import cases as transferplan
from kvbench.core.transfers import stats
from kvbench.core.transfers.cases import Pairing, initiator_layout, target_layout
from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.errors import InputError, KvbenchError
from kvbench.hosts import devices
from kvbench.launchers.local import LocalLauncher
from kvbench.microbench.options import Settings
from kvbench.microbench.sides import (
    ANSWER_S,
    Request,
    Side,
    Team,
    Teams,
    WorkerError,
    WorkerHandle,
    Workers,
    side_number,
    worker_key,
)
from kvbench.processes.transfer_worker.measure import Limits, unpack_times
from kvbench.processes.transfer_worker.memory import MEMORY_SHARE, available_bytes
from kvbench.transfer.parts.blocks import pack_ids

MAX_CALLS: Final = 200_000
"""Maximum calls of one initiator in one case: each call's time is kept."""
WARMUP_SHARE: Final = 0.15
WARMUP_CALLS: Final = 3
WARMUP_MAX_S: Final = 1.0
START_DELAY_S: Final = 0.01
"""Delay of the common start of several initiators on one clock, in seconds."""
SLOWEST_BYTES_PER_S: Final = 50e6
"""A large transfer slower than this counts as stuck; its deadline may exceed ``call_s``."""
BYTES_PER_S: Final = 50e6
"""A fill or comparison slower than this counts as a dead worker's."""


@dataclass
class CounterWindow:
    """Counters of all workers, initiators first, just before and after the timed window."""

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]


@dataclass
class _Timed:
    """Results of the initiators' loops, of one or several rounds."""

    calls: int = 0
    window_s: float = 0.0
    call_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    transport: str = ""

    def add(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Add a round: its window is from the first start to the last end over all initiators."""
        first, last = (min(a["started_ns"] for a in answers), max(a["ended_ns"] for a in answers))
        self.window_s += (last - first) / 1e9
        self.calls += sum(answer["calls"] for answer in answers)
        self.cpu_s += sum(answer["cpu_s"] for answer in answers)
        self.call_s += [ns / 1e9 for answer in answers for ns in unpack_times(answer["call_ns"])]
        self.transport = answers[0]["transport"]


@dataclass
class CaseRun:
    """The steps of one case; fills its record. Every step raises WorkerError on failure."""

    case: Case
    record: TransferRecord
    team: Team
    workers: Workers
    settings: Settings

    def __post_init__(self) -> None:
        self._pairs = transferplan.pairings(self.case, self.settings.seed)
        self._moves = transfer.get(self.case.backend).moves_bytes
        size = max(layout.nbytes for layout in self.team.layouts)
        in_flight = self.case.nbytes * self.case.threads * self.case.initiators * self.case.targets
        self._call_s = max(self.settings.call_s, in_flight / SLOWEST_BYTES_PER_S)
        self._repeats: int | None = None
        self._offered = False
        self._bytes_s = ANSWER_S + size / BYTES_PER_S

    def run(self, new_content: Callable[[], int], on_stage: Callable[[str], None]) -> CounterWindow:
        """Run all steps. ``new_content`` numbers the buffers' contents, so that all fills differ."""
        on_stage("preparing")
        generation = new_content()
        self._fill(generation)
        self._prepare()
        warm_up_s, calls = WARMUP_SHARE * self.settings.seconds, WARMUP_CALLS * self._tickets
        done = self._run(Limits(warm_up_s, calls, MAX_CALLS, WARMUP_MAX_S, self._call_s))
        self.record.warmup_calls = done.calls
        on_stage("measuring")
        window = self._measure()
        if self._moves and self.settings.verify:
            on_stage("verifying")
            self._verify(generation)
            # Repeat with other bytes: a repeated transfer without effect would have passed up to now.
            generation = new_content()
            self._fill(generation)
            count = self._tickets
            self._run(Limits(0.0, count, count, self._call_s, self._call_s))
            self._verify(generation)
            self.record.verified = True
        return window

    @property
    def _tickets(self) -> int:
        """Concurrent transfers of each initiator."""
        return self.case.threads * self.case.targets

    def _fill(self, generation: int) -> None:
        if not self._moves:
            return
        team = self.team
        self.workers.ask(
            [(worker, "fill", {"generation": generation}) for worker in team.everyone], self._bytes_s
        )
        self._offer()

    def _offer(self) -> None:
        if self.case.op == "read" and self._moves:
            self._to_targets("offer", self._bytes_s + self.settings.connect_s)
            self._offered = True

    def _to_targets(self, command: str, deadline_s: float) -> None:
        requests: list[Request] = []
        for number, worker in enumerate(self.team.targets):
            blocks = [block for pair in self._pairs if pair.target == number for block in pair.remote]
            requests.append((worker, command, {"blocks": pack_ids(blocks)}))
        self.workers.ask(requests, deadline_s)

    def _prepare(self) -> None:
        requests: list[Request] = []
        for number, worker in enumerate(self.team.initiators):
            transfers = [
                {
                    "peer": self.team.agents[pair.target]["id"],
                    "local": pack_ids(pair.local),
                    "remote": pack_ids(pair.remote),
                }
                for pair in self._pairs
                if pair.initiator == number
            ]
            requests.append((worker, "prepare", {"op": self.case.op, "transfers": transfers}))
        answers = self.workers.ask(requests, self._bytes_s + self._call_s)
        self.record.prepare_s = statistics.median(s for answer in answers for s in answer["prepare_s"])
        self.record.descriptors = answers[0]["descriptors"]
        self.record.nbytes = answers[0]["nbytes"]
        self._repeats = answers[0]["repeats"]

    def _measure(self) -> CounterWindow:
        settings, record = self.settings, self.record
        least = max(settings.min_calls, self._tickets)
        before = self._counters()
        done = self._run(Limits(settings.seconds, least, MAX_CALLS, settings.max_seconds, self._call_s))
        after = self._counters()
        record.transport = done.transport
        record.calls, record.window_s, record.call_s = done.calls, done.window_s, done.call_s
        record.initiator_cpu_s = done.cpu_s
        count = len(self.team.initiators)
        record.target_cpu_s = sum(
            b["cpu_s"] - a["cpu_s"] for a, b in zip(before[count:], after[count:], strict=True)
        )
        if self._moves and record.window_s:
            record.gb_per_s = record.calls * record.nbytes / record.window_s / 1e9
        return CounterWindow(before, after)

    def _run(self, limits: Limits) -> _Timed:
        """Run all transfers up to the limits, in rounds if the target must offer again."""
        done, remaining = _Timed(), limits
        while True:
            if self._repeats is not None and not self._offered:
                self._offer()
            done.add(self._round(replace(remaining, repeats=self._repeats)))
            self._offered = False
            remaining = replace(
                limits,
                seconds=limits.seconds - done.window_s,
                min_calls=limits.min_calls - done.calls,
                max_seconds=limits.max_seconds - done.window_s,
            )
            over = remaining.seconds <= 0 and (remaining.min_calls <= 0 or remaining.max_seconds <= 0)
            if self._repeats is None or over or done.calls >= limits.max_calls:
                return done

    def _round(self, limits: Limits) -> list[dict[str, Any]]:
        workers = self.team.initiators
        start_at_ns = 0
        if len(workers) > 1:
            clock = self.workers.ask([(workers[0], "counters", {})], ANSWER_S)[0]["clock_ns"]
            start_at_ns = clock + int(START_DELAY_S * 1e9)
        content = {"limits": asdict(limits), "start_at_ns": start_at_ns}
        longest = max(limits.seconds, limits.max_seconds) + limits.call_deadline_s + ANSWER_S
        return self.workers.ask([(worker, "run", content) for worker in workers], longest)

    def _counters(self) -> list[dict[str, Any]]:
        return self.workers.ask([(worker, "counters", {}) for worker in self.team.everyone], ANSWER_S)

    def _verify(self, generation: int) -> None:
        """Compare all blocks at their destination. Raises WorkerError for the first wrong byte."""
        if self.case.op == "write":
            self._to_targets("collect", self._bytes_s + self.settings.connect_s)
        calls = [self._comparison(pair, generation) for pair in self._pairs]
        # Answers arrive in order, so all pairs of all workers can be requested at once.
        for answer, (worker, _, _) in zip(self.workers.ask(calls, self._bytes_s * 2), calls, strict=True):
            if answer["difference"]:
                self.record.verified = False
                raise WorkerError(f"wrong bytes arrived at the {worker.name}: {answer['difference']}")

    def _comparison(self, pair: Pairing, generation: int) -> Request:
        if self.case.op == "write":
            worker, side = self.team.targets[pair.target], side_number("initiator", pair.initiator)
            blocks, source = pair.remote, pair.local
        else:
            worker, side = self.team.initiators[pair.initiator], side_number("target", pair.target)
            blocks, source = pair.local, pair.remote
        origin = {"side": side, "generation": generation, "blocks": pack_ids(source)}
        return worker, "verify", {"blocks": pack_ids(blocks), "source": origin}


def nic_bytes(workers: Sequence[WorkerHandle], window: CounterWindow) -> dict[str, dict[str, int]]:
    """Return side → NIC → bytes in the window, of the direction with more."""
    found: dict[str, dict[str, int]] = {}
    for worker, before, after in zip(workers, window.before, window.after, strict=True):
        role = worker.name.partition("-")[0]
        moved = {
            name: int(max(after["nics"][name][way] - count[way] for way in ("sent_bytes", "received_bytes")))
            for name, count in before["nics"].items()
            if name in after["nics"]
        }
        # Workers of one side share their host's counters.
        found.setdefault(role, moved)
    return found


MAX_FAILURES: Final = 2
"""Cases of one kind are skipped after this many consecutive failed starts or connects."""

Progress = Callable[[int, Case, str], None]
"""Called with the case's index, the case, and its current stage."""


def run_cases(
    cases: Sequence[Case],
    initiator: Side | None = None,
    target: Side | None = None,
    settings: Settings | None = None,
    on_stage: Progress = lambda index, case, stage: None,
    log_dir: Path | None = None,
) -> Iterator[TransferRecord]:
    """Measure cases in order; yield a row for each as soon as it is known. A failed case's row has its error.
    The workers' output goes to files in ``log_dir``. Closing or interrupting the iterator ends all processes.
    Use it from one thread: workers end with it."""
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


def skip_reason(case: Case) -> str:
    """Return why a case cannot run on this machine, or an empty text. Raises InputError for a mistake."""
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
    def __init__(
        self, initiator: Side, target: Side, settings: Settings, log_dir: Path, scratch: Path
    ) -> None:
        self._sides = {"initiator": initiator, "target": target}
        self._settings = settings
        self._workers = Workers(LocalLauncher(f"microbench-{os.getpid()}", log_dir, scratch))
        self._teams = Teams(self._sides, settings, self._workers)
        self._failures: dict[Case, int] = {}
        self._generation = 0
        self._memcpy: float | None = None
        self._load = None if initiator.launcher else os.getloadavg()[0]

    def run(self, cases: Sequence[Case], on_stage: Progress) -> Iterator[TransferRecord]:
        """Yield a row for each case, in order. Ends all processes, also when closed or interrupted."""
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
        remote = all(side.launcher for side in self._sides.values())
        try:
            # Other hosts have already reported missing libraries.
            if reason := "" if remote else skip_reason(case):
                record.status, record.error = "skipped", reason
                return record
            if reason := self._too_large(case, room) or self._too_few_nics(case):
                raise WorkerError(reason)
            key = worker_key(case)
            if self._failures.get(key, 0) >= MAX_FAILURES:
                raise WorkerError(f"skipped, since the last {MAX_FAILURES} such cases did not start")
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
        return "; ".join([cause, *(word for word in self._workers.unexpected_ends() if word not in cause)])

    def _new_content(self) -> int:
        self._generation += 1
        return self._generation

    # --- impossible cases

    def _room(self) -> int | None:
        return None if all(side.elsewhere for side in self._sides.values()) else available_bytes()

    def _too_large(self, case: Case, room: int | None) -> str:
        if room is None or case.memory != "host":
            return ""
        local = {name: not side.elsewhere for name, side in self._sides.items()}
        needed = local["initiator"] * case.initiators * initiator_layout(case).nbytes
        needed += local["target"] * case.targets * target_layout(case).nbytes
        if needed <= MEMORY_SHARE * room:
            return ""
        return f"its buffers need {needed:,} bytes, and {room:,} bytes of memory are free"

    def _too_few_nics(self, case: Case) -> str:
        for name, side in self._sides.items():
            if case.nics and len(side.nics) < case.nics:
                found = ", ".join(str(nic["name"]) for nic in side.nics) or "none"
                return f"{case.nics} NICs are requested, but the {name} has {len(side.nics)}: {found}"
        return ""

    # --- judging

    def _judge(self, record: TransferRecord, team: Team, window: CounterWindow) -> None:
        case, sides = record.case, self._sides
        before, after = window.before[0], window.after[0]
        record.load_average = before["load"]
        record.line_rate_gb_per_s = self._line_rate(case, window)
        moved = nic_bytes(team.everyone, window)
        wanted = {role: [str(nic["name"]) for nic in side.nics[: case.nics]] for role, side in sides.items()}
        little = 0.01 * record.calls * record.nbytes
        record.nic_bytes = {
            f"{role}:{name}": count
            for role, nics in moved.items()
            for name, count in nics.items()
            if name in wanted[role] or count > little
        }
        workers_cpu_s = (record.initiator_cpu_s or 0.0) + (
            0.0 if sides["target"].elsewhere else record.target_cpu_s or 0.0
        )
        backend = transfer.get(case.backend)
        conditions = stats.CaseConditions(
            cores=before["cores"],
            load_before=self._load,
            others_cpu_s=after["host_cpu_s"] - before["host_cpu_s"] - workers_cpu_s,
            steal_s=after["steal_s"] - before["steal_s"],
            burst_bytes=self._settings.burst_bytes if case.nics else None,
            memcpy_gb_per_s=self._memcpy,
            moves_bytes=backend.moves_bytes,
            carried=moved,
            requested_nics=wanted if backend.nics else {},
        )
        if case.backend == "memcpy":
            self._memcpy = max(self._memcpy or 0.0, record.gb_per_s or 0.0)
        record.warnings = stats.warnings(record, conditions)

    def _line_rate(self, case: Case, window: CounterWindow) -> float | None:
        """Line rate of the requested NICs of the slower side together, in GB/s."""
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
