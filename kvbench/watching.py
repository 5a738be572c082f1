"""What the logs and the exit statuses of a deployment's processes say while somebody waits for them."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar
from urllib.parse import urljoin

from kvbench.connectors.base import Connector
from kvbench.core.processes import ProcessSpec
from kvbench.diagnose import Diagnosis, LogWatch, Source
from kvbench.errors import KvbenchError, LaunchError, ProcessDiedError, ProcessHungError
from kvbench.launchers.base import Process
from kvbench.launchers.farprocess import RemoteProcess
from kvbench.launchers.local import LocalProcess
from kvbench.procstate import cpu_s, family, is_stopped
from kvbench.pulse import Pulse

LOOK_S: Final = 0.05
"""How often processes and logs are looked at beside a call that blocks."""
ROOT_GRACE_S: Final = 0.5
"""A traceback names its cause last: after the first fatal line the rest of it is waited for."""
STATE_S: Final = 0.5
"""How often it is looked whether processes are stopped."""
FAMILY_S: Final = 3.0
"""How often their children are looked up."""
FROZEN_S: Final = 5.0
"""So long stopped is no hiccup: nothing measured beside it is worth anything."""
SILENT_S: Final = 10.0
"""So long without an answer and without CPU time, and a server hangs."""
BUSY_SILENT_S: Final = 60.0
"""A server that computes may have good reasons, such as a compilation: it gets longer."""
IDLE_SHARE: Final = 0.02
"""Of a core; what a hung process's other threads may still take."""
OTHERS_LINES: Final = 3
PORT_IN_USE_EXIT: Final = 98
ROUTER: Final = "router"

T = TypeVar("T")


class ProcessWatch:
    """Looks after a deployment's processes: have they ended, and do their logs say why they will not work?"""

    def __init__(self, engine: str, connector: Connector, transport_asked: str) -> None:
        self._engine = engine
        self._connector = connector
        self._transport_asked = transport_asked
        self._logs = LogWatch()
        self._paths: dict[str, Path] = {}
        self._standing: list[Diagnosis] = []
        self._liveness: Liveness | None = None

    def follow(self, spec: ProcessSpec, path: Path) -> None:
        """Follow a process's log; to be called before it is started."""
        role = spec.name.split("-")[0]
        self._paths[spec.name] = path
        source = Source(
            process=spec.name,
            engine=ROUTER if role == ROUTER else self._engine,
            kv_connector="" if role == ROUTER else self._connector.kv_connector,
            role=role,
            transport_asked=self._transport_asked,
        )
        self._logs.follow(path, source)

    def check(self, processes: Sequence[Process]) -> None:
        """Raises ProcessDiedError if one has ended, LaunchError if a log tells a fatal cause,
        ProcessHungError if one does nothing any more.
        """
        for process in processes:
            status = process.poll()
            if status is not None:
                self._logs.drain(process.name)
                mine = [each for each in self._logs.take() if each.process == process.name]
                raise died(process, status, mine[0] if mine else None, processes)
        if self._logs.poll() is None:
            self._check_liveness(processes)
            return
        deadline = time.monotonic() + ROOT_GRACE_S
        while (cause := self._logs.drain()) is None or time.monotonic() < deadline:
            time.sleep(LOOK_S)
        raise LaunchError(cause.text(), hint=self._mend(cause))

    def _check_liveness(self, processes: Sequence[Process]) -> None:
        found = None if self._liveness is None else self._liveness.problem(processes)
        if found is None:
            return
        process, what, mend = found
        self._logs.drain()
        told = [each.text() for each in self._logs.take()]
        words = "; ".join([what, *told]) if told else what + last_words(processes)
        raise ProcessHungError(words, hint=f"{mend}; the whole log is {process.log_path}")

    def _mend(self, diagnosis: Diagnosis) -> str:
        path = self._paths.get(diagnosis.process)
        return f"{diagnosis.mend}; the whole log is {path}" if path else diagnosis.mend

    def started(self, processes: Sequence[Process]) -> None:
        """All are ready: what was found until now holds for every trial; from now on all are to answer."""
        self._logs.drain()
        self._standing = self._logs.take()
        self._liveness = Liveness(processes)
        self._liveness.start()

    def close(self) -> None:
        """Nothing is asked any more. Safe to call twice."""
        if self._liveness is not None:
            self._liveness.close()

    def explained(self, processes: Sequence[Process]) -> tuple[str, str]:
        """What the logs say, to stand behind a message, and the mend; without a cause their last lines."""
        found = self.take()
        if found:
            return "\n".join(["", *(each.text() for each in found)]), self._mend(found[0])
        words = last_words(processes)
        return words, "no log names a cause: look into the whole logs" if words else ""

    def take(self) -> list[Diagnosis]:
        """What start-up left to say, and what was found since the last call; the worst first."""
        self._logs.drain()
        return [*self._standing, *self._logs.take()]


class Liveness:
    """Do a deployment's processes go on? None may be stopped by a signal, and each server is to answer.

    What it costs them is one small request in two seconds (``pulse.py``). Processes on other hosts are looked
    at by the agents there, which tell what they see (``far/lifewatch.py``).
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        # No page of this name need be there, and nobody works for it: an engine's health page may generate
        # a token, a router's asks everybody behind it.
        asked = [each.spec for each in processes if isinstance(each, LocalProcess) and each.spec.ready_url]
        self._pulse = Pulse({each.name: urljoin(each.ready_url, "/version") for each in asked})
        self._far: dict[str, list[RemoteProcess]] = {}
        for each in processes:
            if isinstance(each, RemoteProcess):
                self._far.setdefault(each.host, []).append(each)
        self._families: dict[str, list[int]] = {}
        self._families_at = -math.inf
        self._looked_at = -math.inf
        self._stopped_at: dict[int, tuple[float, float]] = {}
        self._taken: dict[str, tuple[float, float]] = {}

    def start(self) -> None:
        self._pulse.start()
        self._tell_agents("watch")

    def close(self) -> None:
        self._pulse.close()
        self._tell_agents("unwatch")

    def _tell_agents(self, what: str) -> None:
        for processes in self._far.values():
            keys = [each.key for each in processes]
            with contextlib.suppress(KvbenchError):  # a host that is lost is told by others
                processes[0].agent.say(what, watch=keys[0], keys=keys)

    def problem(self, processes: Sequence[Process]) -> tuple[Process, str, str] | None:
        """Which process does nothing any more, why, and what to do; None while all is well, and at most
        twice a second anything else.
        """
        now = time.monotonic()
        if now - self._looked_at < STATE_S:
            return None
        if now - self._looked_at > 4 * STATE_S:  # what went on meanwhile is not known
            self._stopped_at, self._taken = {}, {}
        self._looked_at = now
        if now - self._families_at > FAMILY_S:
            self._families_at = now
            here = [each for each in processes if isinstance(each, LocalProcess)]
            self._families = {each.name: family(each.pid) for each in here}
        return self._told() or self._stopped(processes, now) or self._silent(processes, now)

    def _told(self) -> tuple[Process, str, str] | None:
        for process in (each for processes in self._far.values() for each in processes):
            if process.hung is not None and process.poll() is None:
                what, mend = process.hung
                return process, f"on the host {process.host}: {what}", f"on {process.host}: {mend}"
        return None

    def _stopped(self, processes: Sequence[Process], now: float) -> tuple[Process, str, str] | None:
        for process in processes:
            for pid in self._families.get(process.name, ()):
                if not is_stopped(pid):
                    self._stopped_at.pop(pid, None)
                    continue
                taken_s = cpu_s([pid])
                since, before_s = self._stopped_at.setdefault(pid, (now, taken_s))
                if taken_s > before_s:  # it went on between two looks
                    self._stopped_at[pid] = now, taken_s
                elif now - since >= FROZEN_S:
                    whose = process.name if pid == process.pid else f"{process.name}'s child process"
                    return (
                        process,
                        f"{whose} {pid} is frozen: a signal has stopped it, for {FROZEN_S:g} s now",
                        f"find out who stops it; `kill -CONT {pid}` lets it go on",
                    )
        return None

    def _silent(self, processes: Sequence[Process], now: float) -> tuple[Process, str, str] | None:
        silent = self._pulse.silent_s()
        for process in processes:
            seconds = silent.get(process.name, 0.0)
            if seconds < SILENT_S / 2:
                self._taken.pop(process.name, None)
                continue
            members = self._families.get(process.name)
            taken_s = cpu_s(members) if members else math.inf
            since, before_s = self._taken.setdefault(process.name, (now, taken_s))
            idle = members is not None and taken_s - before_s <= IDLE_SHARE * (now - since)
            if seconds >= (SILENT_S if idle else BUSY_SILENT_S):
                busy = "takes no CPU time" if idle else "is busy with something else"
                return (
                    process,
                    f"{process.name} hangs: it has not answered for {seconds:.0f} s and {busy}",
                    "look into its log, and at its stacks with `py-spy dump` or gdb while it hangs",
                )
        return None


@dataclass(frozen=True)
class Box(Generic[T]):
    """A value that may itself be None."""

    value: T


def beside(call: Callable[[], T], check: Callable[[], None]) -> T:
    """Run a call that blocks, and ``check`` every 50 ms meanwhile; what either raises is raised.

    If ``check`` raises, the call is left behind: it must end by a timeout of its own.
    """
    answers: queue.SimpleQueue[tuple[Box[T] | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            value = call()
        except BaseException as error:
            answers.put((None, error))
        else:
            answers.put((Box(value), None))

    threading.Thread(target=work, name="beside", daemon=True).start()
    while True:
        try:
            answer, error = answers.get(timeout=LOOK_S)
        except queue.Empty:
            check()
            continue
        if error is not None:
            raise error
        assert answer is not None
        return answer.value


def died(
    process: Process,
    status: int,
    diagnosis: Diagnosis | None = None,
    others: Sequence[Process] = (),
) -> ProcessDiedError:
    """The error for a process that has ended although it should run, with its last lines.

    If nothing is known of the cause, the last lines of the ``others`` too.
    """
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    lines = process.tail()
    message = f"{process.name} {how}"
    hint = f"the whole log is {process.log_path}"
    if status == -signal.SIGKILL:
        hint = f"if nobody killed it the kernel did, for want of memory: see `dmesg`; {hint}"
    if diagnosis is not None:
        message += f": {diagnosis.cause}"
        hint = f"{diagnosis.mend}; {hint}"
    elif status == PORT_IN_USE_EXIT:
        message += " since its port is in use"
    if lines:
        message += "; its last lines:\n" + "\n".join(f"  {line}" for line in lines)
    if diagnosis is None and status != PORT_IN_USE_EXIT:
        message += last_words([each for each in others if each is not process])
    return ProcessDiedError(message, hint=hint)


def last_words(processes: Sequence[Process]) -> str:
    """The last lines of each one's log, to stand behind a message; empty if there are none."""
    lines = [f"  {each.name}: {line}" for each in processes for line in each.tail(OTHERS_LINES)]
    return "\n".join(["", "last lines of the logs:", *lines]) if lines else ""
