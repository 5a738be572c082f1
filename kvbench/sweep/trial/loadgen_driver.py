"""Run the load generator's processes and join their results.

Workers share one plan and one start; each sends every ``workers``-th request. Records are in scheduled order.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.core.load.workers import (
    LoadResult,
    Progress,
    merge_clients,
    merge_records,
    require_common_start,
    sum_progress,
    turn_records,
)
from kvbench.core.plan.processes import LOADGEN_MODULE, ProcessSpec
from kvbench.errors import KvbenchError, ProcessDiedError, ProcessHungError, StoreError
from kvbench.hosts.procfs import cpu_s, wait_while
from kvbench.launchers.base import Launcher, Place, Process
from kvbench.processes.common.record_file import read_records

_ERROR = re.compile(r"([a-z_][\w.]*\.)?([A-Z]\w*(Error|Exception|Exit|Interrupt)|kvbench\.loadgen)\b.*")
CAUSE_CHARS = 300
COMMAND = (sys.executable, "-m", LOADGEN_MODULE)
PREPARE_DEADLINE_S = 60.0
"""Longest silence while prompts are encoded and connections opened; 5,000 prompts of 32k tokens take 20 s."""
STOP_DEADLINE_S = 10.0
SILENT_S = 10.0
"""A generator that reports nothing for this many seconds hangs; it reports several times a second."""
IDLE_S = 0.1
"""CPU seconds that an idle generator may use in half of that."""
POLL_S = 0.05
TOGETHER_S = 0.05
"""Delay of a common start, so that each worker receives it before."""


@dataclass
class Spare:
    """A generator process started in advance, waiting for its spec on stdin: starting Python takes 0.25 s of
    a core between two trials."""

    launcher: Launcher
    _process: Process | None = None

    def prepare(self) -> None:
        if self._process is None or self._process.poll() is not None:
            spec = ProcessSpec(name="loadgen-spare", argv=(*COMMAND, "-"))
            self._process = self.launcher.start(spec, piped=True)

    def take(self, spec: Mapping[str, Any], name: str) -> Process | None:
        """Give the waiting process its spec and a name and return it, or None."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return None
        _send(process, json.dumps(dict(spec)))
        process.rename(name)
        return process

    def close(self) -> None:
        if self._process is not None:
            self.launcher.stop([self._process])
            self._process.log_path.unlink(missing_ok=True)
            self._process = None


@dataclass
class LoadGenerator:
    """One run of ``workers`` processes of ``command`` with the path of its spec. ``spare``: a
    waiting process; the next one starts once this load runs."""

    launcher: Launcher
    spec: Mapping[str, Any]
    name: str = "loadgen"
    workers: int = 1
    command: Sequence[str] = COMMAND
    spare: Spare | None = None
    _running: list[_Worker] = field(default_factory=list)
    _deadline: float = 0.0

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._running]

    def run(
        self, on_progress: Callable[[Progress], bool], check: Callable[[], None], deadline_s: float
    ) -> LoadResult:
        """Send the load. ``on_progress`` returns True to stop early; ``check`` raises if a server died.
        Raises ProcessDiedError if a generator dies, KvbenchError after the deadline. All processes and record
        files are removed at the end."""
        try:
            for index in range(self.workers):
                self._running.append(self._start(index))
            self._handle_events(on_progress, check, deadline_s)
            return self._join()
        finally:
            self.launcher.stop([worker.process for worker in self._running])
            for worker in self._running:
                path = worker.records_path
                with contextlib.suppress(KvbenchError):  # a lost host keeps nothing
                    worker.place.forget(path)
                for piece in path.parent.glob(f"{path.name}*"):
                    piece.unlink(missing_ok=True)
            self._running = []

    def _start(self, index: int) -> _Worker:
        spec, name = {**self.spec, "wait_for_go": True}, self.name
        path = Path(str(spec["records_path"]))
        if self.workers > 1:
            name = f"{name}-w{index}"
            path = path.with_name(f"{path.stem}-w{index}{path.suffix}")
            spec |= {"worker": index, "workers": self.workers}
        place = self.launcher.place_of(name)
        spec["records_path"] = place.path_of(path)
        for key in ("requests_path", "sessions_path"):
            if self.spec.get(key):
                requests = Path(str(self.spec[key]))
                place.put(requests)
                spec[key] = place.path_of(requests)
        # The waiting process runs on the first worker's host.
        fits = self.spare is not None and place.host == self.launcher.host_of("loadgen-spare")
        process = self.spare.take(spec, name) if self.spare is not None and fits else None
        if process is None:
            process_spec = ProcessSpec(name=name, argv=tuple(self.command), spec=spec)
            process = self.launcher.start(process_spec, piped=True)
        return _Worker(process, path, place)

    def _handle_events(
        self, on_progress: Callable[[Progress], bool], check: Callable[[], None], deadline_s: float
    ) -> None:
        """Handle the workers from the first event to the last end."""
        self._deadline = time.monotonic() + PREPARE_DEADLINE_S
        waiting, stopping = self.workers, False
        for worker, event in self._events(check):
            kind = event.get("event")
            if kind == "ready":
                waiting -= 1
                if not waiting:
                    self._deadline = time.monotonic() + deadline_s
                    self._start_load()
                    if self.spare is not None:
                        self.spare.prepare()
            elif kind == "preparing":
                worker.prepared = int(event["done"])
                self._deadline = time.monotonic() + PREPARE_DEADLINE_S
                on_progress(Progress(prepared=sum(member.prepared for member in self._running)))
            elif kind == "progress":
                worker.progress = Progress.from_json(event)
                latest = [member.progress for member in self._running]
                if on_progress(sum_progress(latest, worker.progress)) and not stopping:
                    stopping = True
                    grace_s = float(self.spec.get("stop_grace_s", 0.0))
                    self._deadline = min(self._deadline, time.monotonic() + grace_s + STOP_DEADLINE_S)
                    self._send_to_all("stop")
            elif kind == "unwritten":
                raise StoreError(
                    f"the load generator {worker.process.name} cannot write its records to "
                    f"{worker.records_path.parent}: {event.get('why')}",
                    hint="free space on the disk of the run folder, or choose another folder with --output",
                )
            elif kind == "end":
                worker.end = event
                if all(member.end is not None for member in self._running):
                    return
        raise AssertionError("unreachable: the events end by the last end event or an error")

    def _events(self, check: Callable[[], None]) -> Iterator[tuple[_Worker, dict[str, Any]]]:
        with selectors.DefaultSelector() as selector:
            for worker in self._running:
                os.set_blocking(worker.process.stdout.fileno(), False)
                selector.register(worker.process.stdout.fileno(), selectors.EVENT_READ, worker)
            while True:
                if time.monotonic() > self._deadline:
                    raise self._too_late()
                check()
                self._check_workers()
                for key, _ in selector.select(POLL_S):
                    data = os.read(key.fd, 65_536)
                    if data:
                        yield from ((key.data, json.loads(line)) for line in key.data.lines(data))
                    elif key.data.end is not None:
                        selector.unregister(key.fd)  # it has ended; others still run
                    else:
                        raise early_end_error(key.data.process)

    def _check_workers(self) -> None:
        """Raise ProcessHungError for a worker that neither reports nor uses CPU time."""
        for worker in self._running:
            silent_s = time.monotonic() - worker.reported_at
            if worker.end is None and silent_s > SILENT_S / 2 and worker.idle() and silent_s > SILENT_S:
                process = worker.process
                raise ProcessHungError(
                    f"the load generator {process.name} hangs: no report for {silent_s:.0f} s "
                    "and no CPU time used",
                    hint="check whether a signal has stopped it, and whether the machine has free CPU time; "
                    f"the whole log is {process.log_path}",
                )

    def _too_late(self) -> KvbenchError:
        late = [worker.process for worker in self._running if worker.end is None]
        return KvbenchError(
            "the load generator did not finish within its deadline",
            hint=f"see {', '.join(str(process.log_path) for process in late)}",
        )

    def _start_load(self) -> None:
        """Start all workers at one moment, given on each host's clock; expect their progress from now on."""
        for worker in self._running:
            worker.reported_at = time.monotonic()
        if self.workers == 1:
            self._send_to_all("go")
            return
        ahead_s = {worker.place.host: worker.place.clock_ahead_s for worker in self._running}
        for worker in self._running:
            worker.ahead_s = ahead_s[worker.place.host]
        began = time.monotonic() + TOGETHER_S
        for worker in self._running:
            _send(worker.process, f"go {began + worker.ahead_s:.6f}")

    def _send_to_all(self, command: str) -> None:
        for worker in self._running:
            _send(worker.process, command)

    def _count_planned(self) -> int:
        """Requests in the plan: the lines of its trace, if any."""
        trace = str(self.spec.get("requests_path", ""))
        if not trace:
            return int(self.spec["num_requests"])
        with open(trace, "rb") as file:
            return sum(1 for line in file if line.strip())

    def _join(self) -> LoadResult:
        ends = [worker.end or {} for worker in self._running]
        clients = [worker.client() for worker in self._running]
        require_common_start(clients)
        unfinished = [str(end["reason"]) for end in ends if end["reason"] != "complete"]
        for worker in self._running:
            worker.place.fetch(worker.records_path)
        shares = [read_records(worker.records_path) for worker in self._running]
        if self.spec.get("sessions_path"):
            records = turn_records(shares[0])
        else:
            records = merge_records(shares, None if unfinished else self._count_planned())
        return LoadResult(
            records=records,
            reason=unfinished[0] if unfinished else "complete",
            duration_s=max(float(end.get("duration_s", 0.0)) for end in ends),
            client=merge_clients(clients),
        )


@dataclass
class _Worker:
    process: Process
    records_path: Path
    place: Place
    progress: Progress = field(default_factory=Progress)
    prepared: int = 0
    ahead_s: float = 0.0
    """Offset of its host's clock, ahead of this one."""
    end: dict[str, Any] | None = None
    reported_at: float = math.inf
    """Time of its last report; infinite while none is due."""
    _silent_cpu_s: float | None = None
    _rest: bytes = b""

    def idle(self) -> bool:
        """Whether it used no CPU time since the first call in this silence, which rules out writing records.
        A remote one is checked by its agent."""
        used_s = self.place.cpu_s(self.process.pid) if self.place.host else cpu_s([self.process.pid])
        if used_s is None:
            return False
        if self._silent_cpu_s is None:
            self._silent_cpu_s = used_s
        return used_s - self._silent_cpu_s <= IDLE_S

    def client(self) -> dict[str, Any]:
        """Its own figures, its start on this host's clock."""
        figures = dict((self.end or {}).get("client", {}))
        if figures.get("started_monotonic_s") is not None:
            figures["started_monotonic_s"] -= self.ahead_s
        if self.place.host:
            figures |= {"host": self.place.host, "clock_ahead_s": self.ahead_s}
        return figures

    def lines(self, data: bytes) -> list[bytes]:
        if self.reported_at < math.inf:
            self.reported_at = time.monotonic()
            self._silent_cpu_s = None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def early_end_error(process: Process) -> ProcessDiedError:
    """Create the error for a generator that ended without an end event."""
    wait_while(lambda: process.poll() is None, 2, 0.01)
    cause = cause_of(process.tail())
    return ProcessDiedError(
        f"the load generator {process.name} ended early (status {process.poll()}){cause and f': {cause}'}",
        hint=f"the whole log is {process.log_path}",
    )


def cause_of(lines: Sequence[str]) -> str:
    """Summarize a log's last lines: the error of a traceback, or the last line."""
    stripped = [line.strip() for line in lines if line.strip()]
    errors = [line for line in stripped if _ERROR.match(line)]
    return (errors or stripped or [""])[-1][:CAUSE_CHARS]


def _send(process: Process, words: str) -> None:
    with contextlib.suppress(OSError):  # it has just ended; its end event or its exit status says why
        process.stdin.write(words.encode() + b"\n")
        process.stdin.flush()
