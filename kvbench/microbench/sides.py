"""The worker processes of a transfer measurement: where each side runs, how they are started and called.
Every wait has a deadline, and every started process is ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvbench.core.plan.processes import TRANSFER_WORKER_MODULE, ProcessSpec
from kvbench.core.transfers import cases
from kvbench.core.transfers.records import Case, Layout, TransferOp, TransferRecord
from kvbench.errors import KvbenchError, TransferError
from kvbench.hosts.procfs import wait_while
from kvbench.launchers.base import Launcher, Process
from kvbench.launchers.local import LocalLauncher
from kvbench.microbench.options import Settings

ANSWER_S: Final = 2.0
"""Time for an answer, in addition to a command's duration, in seconds."""
QUIT_S: Final = 2.0
"""Time for a library to close properly, in seconds; it may own shared memory that only it can remove."""
LOG_LINES: Final = 8
READ_BYTES: Final = 1 << 20
LAST_OUTPUT_S: Final = 1.0
"""Time to read the last output of an ended worker from the pipe, in seconds."""


@dataclass(frozen=True)
class Side:
    """Location of the initiators or the targets. ``host``: address for the other side. ``prefix``: put in
    front of the worker's command (``ip netns exec …``, ``ssh node``). ``nics``: usable NICs, best first:
    ``{"name", "address"}``."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    nics: tuple[Mapping[str, Any], ...] = ()
    python: str = sys.executable
    elsewhere: bool = False
    """Whether it is another machine, with separate memory and cores."""
    name: str = ""
    """The host's name in the scenario; empty without one."""
    launcher: Launcher | None = None
    """Starts its workers on that host; None: here, behind the prefix."""

    @property
    def host_key(self) -> tuple[Any, ...]:
        """Key that is equal for sides on the same machine, as far as known."""
        return (self.name,) if self.name else ((self.prefix, self.host) if self.elsewhere else ())


class WorkerError(TransferError):
    """A worker failed, died, or gave no answer; ``log`` is its library's last output."""

    def __init__(self, cause: str, log: Sequence[str] = ()) -> None:
        super().__init__(cause)
        self.log = list(log)


@dataclass
class WorkerHandle:
    """One started worker. ``name`` is ``initiator`` or ``target``, with a number if there are several."""

    name: str
    process: Process
    launcher: Launcher
    hello: dict[str, Any] = field(default_factory=dict)
    _next: int = 0
    _rest: bytes = b""
    _answers: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def fd(self) -> int:
        return self.process.stdout.fileno()

    def send(self, command: str, content: Mapping[str, Any]) -> int:
        """Write a request and return its number. Raises WorkerError when the worker has gone."""
        self._next += 1
        self._write({"n": self._next, "cmd": command, **content})
        return self._next

    def introduce(self, spec: Mapping[str, Any]) -> None:
        self._write(spec)

    def _write(self, message: Mapping[str, Any]) -> None:
        try:
            self.process.stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            self._read_rest()
            raise self.end_error() from None

    def _read_rest(self) -> None:
        """Read everything that was sent before the end. Raises WorkerError."""
        deadline = time.monotonic() + LAST_OUTPUT_S
        while select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            self.read()

    def read(self) -> None:
        """Read what is available. Raises WorkerError at the end of file."""
        chunk = os.read(self.fd, READ_BYTES)
        if not chunk:
            raise self.end_error()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                self._answers[int(message.get("n", 0))] = message
            except (ValueError, AttributeError):
                text = line[:200].decode(errors="replace")
                raise WorkerError(f"the {self.name} sent something unreadable: {text}", self.tail()) from None

    def take(self, number: int) -> dict[str, Any] | None:
        """Return an answer that has arrived. Raises WorkerError if it is an error."""
        message = self._answers.pop(number, None)
        if message is None:
            return None
        if (cause := message.get("error", message.get("failed"))) is not None:
            raise WorkerError(f"{self.name}: {cause}", message.get("log") or self.tail())
        return dict(message.get("ok", message.get("ready", {})))

    def end_error(self) -> WorkerError:
        """Return the error for this worker's end, or its host's loss."""
        try:
            self.launcher.check()
        except KvbenchError as error:
            return WorkerError(error.message, self.tail())
        deadline = time.monotonic() + 1.0
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        how = "closed its output" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        return WorkerError(f"the {self.name} {how}", self.tail())

    def tail(self) -> list[str]:
        return self.process.tail(LOG_LINES)


Request = tuple[WorkerHandle, str, Mapping[str, Any]]


class Workers:
    """Starts workers and calls them. Use it from one thread that outlives them."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher
        self._started = 0
        self.all: list[WorkerHandle] = []

    def start(self, name: str, side: Side, spec: Mapping[str, Any]) -> WorkerHandle:
        """Start a worker; ``hello`` waits until it is ready. Raises LaunchError, WorkerError."""
        self._started += 1
        # The last argument is only shown in process lists.
        argv = (*side.prefix, side.python, "-m", TRANSFER_WORKER_MODULE, name)
        command = ProcessSpec(f"{spec['backend']}-{name}-{self._started}", argv)
        launcher = side.launcher or self._launcher
        worker = WorkerHandle(name, launcher.start(command, piped=True), launcher)
        self.all.append(worker)
        worker.introduce(spec)
        return worker

    def hello(self, workers: Sequence[WorkerHandle], deadline_s: float) -> None:
        """Wait until all are ready. Raises WorkerError."""
        answers = self._gather([(worker, 0) for worker in workers], deadline_s, "did not get ready")
        for worker, answer in zip(workers, answers, strict=True):
            worker.hello = answer

    def ask(self, requests: Sequence[Request], deadline_s: float) -> list[dict[str, Any]]:
        """Send requests to workers at the same time and return their answers in order. Raises WorkerError for
        the first error, dead worker (even an idle one), or missed deadline."""
        numbers = [(worker, worker.send(command, content)) for worker, command, content in requests]
        commands = " and ".join(dict.fromkeys(command for _, command, _ in requests))
        return self._gather(numbers, deadline_s, f"gave no answer to {commands}")

    def _gather(
        self, pending: Sequence[tuple[WorkerHandle, int]], deadline_s: float, what: str
    ) -> list[dict[str, Any]]:
        deadline = time.monotonic() + deadline_s
        found: dict[int, dict[str, Any]] = {}
        by_fd = {worker.fd: worker for worker in self.all}
        poller = select.poll()
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        while True:
            for index, (worker, number) in enumerate(pending):
                if index not in found and (answer := worker.take(number)) is not None:
                    found[index] = answer
            if len(found) == len(pending):
                return [found[index] for index in range(len(pending))]
            left = deadline - time.monotonic()
            if left <= 0:
                silent = [worker for index, (worker, _) in enumerate(pending) if index not in found]
                names = " and the ".join(worker.name for worker in silent)
                raise WorkerError(f"the {names} {what} within {deadline_s:.3g} s", silent[0].tail())
            for fd, _ in poller.poll(left * 1e3):
                by_fd[fd].read()

    def unexpected_ends(self) -> list[str]:
        """Return descriptions of how workers ended unexpectedly."""
        return [worker.end_error().message for worker in self.all if worker.process.poll() is not None]

    def stop(self, *, orderly: bool = True) -> None:
        """End all workers: by request if possible, else by force."""
        workers, self.all = self.all, []
        try:
            for worker in workers:
                with contextlib.suppress(WorkerError, OSError, ValueError):
                    worker.send("quit", {})
                    worker.process.stdin.close()
            left_s = QUIT_S if orderly else QUIT_S / 4
            wait_while(lambda: any(worker.process.poll() is None for worker in workers), left_s, 0.005)
        finally:
            for worker in workers:
                worker.process.kill()
            for launcher in dict.fromkeys(worker.launcher for worker in workers):
                if launcher is not self._launcher:  # what is left of them on another host
                    launcher.stop([worker.process for worker in workers if worker.launcher is launcher], 0.0)


TOUCH_BYTES_PER_S: Final = 200e6
"""A worker that touches and registers memory slower than this counts as stuck."""


def worker_key(case: Case) -> Case:
    """Return what a case's workers depend on: cases with equal keys can use the same workers."""
    # Libraries distribute reads and writes differently over several NICs.
    op: TransferOp = case.op if case.nics > 1 else "write"
    used = replace(case, op=op, threads=max(case.threads, case.nics, 1))
    return replace(used, block_bytes=0, batch_size=0, scattered=False, regions=1, shape="")


@dataclass
class Team:
    key: Case
    layouts: tuple[Layout, Layout]
    """Layouts of the initiators' and the targets' buffers."""
    initiators: list[WorkerHandle] = field(default_factory=list)
    targets: list[WorkerHandle] = field(default_factory=list)
    agents: list[dict[str, Any]] = field(default_factory=list)
    open_s: float = 0.0
    register_s: float = 0.0
    connect_s: float | None = None

    @property
    def everyone(self) -> list[WorkerHandle]:
        return [*self.initiators, *self.targets]


def side_number(role: str, number: int) -> int:
    """Return a number that separates the buffers of one team."""
    return 2 * number + (role == "target")


class Teams:
    """Reuses the workers of one case for the next one if possible. ``sides`` by role."""

    def __init__(self, sides: Mapping[str, Side], settings: Settings, workers: Workers) -> None:
        self._workers = workers
        self._sides = sides
        self._settings = settings
        self._team: Team | None = None
        self._largest: dict[Case, tuple[Layout, Layout]] = {}
        self._rigid: set[str] = set()

    def expect(self, case: Case) -> None:
        """Announce a case: workers get buffers for the largest case that they can run."""
        layouts = (cases.initiator_layout(case), cases.target_layout(case))
        known = self._largest.get(worker_key(case))
        if known is None or layouts[0].nbytes > known[0].nbytes:
            self._largest[worker_key(case)] = layouts

    def fitting(self, case: Case, record: TransferRecord, on_stage: Callable[[str], None]) -> Team:
        """Return a connected team for a case: the previous one if possible, else a new one."""
        layouts = (cases.initiator_layout(case), cases.target_layout(case))
        key = worker_key(case)
        if self._team is None or self._team.key != key or self._workers.unexpected_ends():
            self.disband(orderly=True)
            rigid = case.backend in self._rigid
            self._team = self._assemble(case, layouts if rigid else self._largest[key])
        if self._team.layouts != layouts and not self._reshape(self._team, layouts):
            self._rigid.add(case.backend)
            self.disband(orderly=True)
            self._team = self._assemble(case, layouts)
        team = self._team
        if team.connect_s is None:
            on_stage("connecting")
            team.connect_s = self._connect(team)
        record.open_s, record.register_s, record.connect_s = team.open_s, team.register_s, team.connect_s
        library = team.initiators[0].hello["library"]
        record.library = f"{library['name']} {library['version']}"
        record.nics_asked = [str(nic["name"]) for nic in self._sides["initiator"].nics[: case.nics]]
        return team

    def _assemble(self, case: Case, layouts: tuple[Layout, Layout]) -> Team:
        key, settings = worker_key(case), self._settings
        team = Team(key, layouts)
        for role, count, layout in (
            ("target", case.targets, layouts[1]),
            ("initiator", case.initiators, layouts[0]),
        ):
            for number in range(count):
                spec = {
                    "role": role,
                    "backend": case.backend,
                    "options": {
                        "role": role,
                        **self._options(key, self._sides[role]),
                        **self._gpu(key, role, number),
                    },
                    "layout": layout.to_json(),
                    "memory": case.memory,
                    "seed": settings.seed,
                    "side": side_number(role, number),
                }
                name = role if count == 1 else f"{role}-{number}"
                worker = self._workers.start(name, self._sides[role], spec)
                (team.targets if role == "target" else team.initiators).append(worker)
        size = max(layout.nbytes for layout in layouts)
        self._workers.hello(team.everyone, settings.open_s + size / TOUCH_BYTES_PER_S)
        team.agents = [worker.hello["agent"] for worker in team.targets]
        team.open_s = max(worker.hello["open_s"] for worker in team.everyone)
        team.register_s = max(worker.hello["register_s"] for worker in team.everyone)
        return team

    def _options(self, key: Case, side: Side) -> dict[str, Any]:
        nics = [dict(nic) for nic in side.nics[: key.nics]]
        return {
            "host": next((nic["address"] for nic in nics if nic.get("address")), side.host),
            "protocol": key.protocol,
            "merge": key.merged,
            "streams": key.threads,
            **({"nics": nics} if nics else {}),
            **({"op": key.op} if key.nics > 1 else {}),
            **dict(self._settings.options.get(key.backend, {})),
        }

    def _gpu(self, key: Case, role: str, number: int) -> dict[str, Any]:
        """Return a worker's GPU option: workers of one host get different GPUs if possible."""
        if key.memory != "cuda":
            return {}
        one, other = self._sides["initiator"], self._sides["target"]
        together = one.host_key == other.host_key
        return {"memory": "cuda", "gpu_turn": number + key.initiators * (together and role == "target")}

    def _reshape(self, team: Team, layouts: tuple[Layout, Layout]) -> bool:
        requests: list[Request] = [
            (worker, "reshape", {"layout": layout.to_json()})
            for workers, layout in ((team.initiators, layouts[0]), (team.targets, layouts[1]))
            for worker in workers
        ]
        answers = self._workers.ask(requests, self._settings.connect_s)
        if any(answer["agent"] is None for answer in answers):
            return False
        team.agents = [answer["agent"] for answer in answers[len(team.initiators) :]]
        team.layouts, team.connect_s = layouts, None
        return True

    def _connect(self, team: Team) -> float:
        """Connect each initiator to each target; return the longest time."""
        limit = self._settings.connect_s
        longest = 0.0
        for agent in team.agents:
            requests: list[Request] = [
                (worker, "connect", {"peer": agent, "deadline_s": limit}) for worker in team.initiators
            ]
            answers = self._workers.ask(requests, limit + ANSWER_S)
            longest = max(longest, *(answer["connect_s"] for answer in answers))
        return longest

    def disband(self, *, orderly: bool) -> None:
        """End all workers: by request if possible, else by force."""
        self._team = None
        self._workers.stop(orderly=orderly)
