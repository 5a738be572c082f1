"""What the logs and the exit statuses of a deployment's processes say while somebody waits for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvbench.connectors.base import Connector
from kvbench.core.processes import ProcessSpec
from kvbench.diagnose import Diagnosis, LogWatch, Source
from kvbench.errors import LaunchError, ProcessDiedError
from kvbench.launchers.local import LocalProcess

LOOK_S: Final = 0.05
"""How often processes and logs are looked at beside a call that blocks."""
ROOT_GRACE_S: Final = 0.5
"""A traceback names its cause last: after the first fatal line the rest of it is waited for."""
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

    def check(self, processes: Sequence[LocalProcess]) -> None:
        """Raises ProcessDiedError if one has ended, LaunchError if a log tells a fatal cause."""
        for process in processes:
            status = process.poll()
            if status is not None:
                self._logs.drain(process.name)
                mine = [each for each in self._logs.take() if each.process == process.name]
                raise died(process, status, mine[0] if mine else None)
        if self._logs.poll() is None:
            return
        deadline = time.monotonic() + ROOT_GRACE_S
        while (cause := self._logs.drain()) is None or time.monotonic() < deadline:
            time.sleep(LOOK_S)
        raise LaunchError(cause.text(), hint=self._mend(cause))

    def _mend(self, diagnosis: Diagnosis) -> str:
        path = self._paths.get(diagnosis.process)
        return f"{diagnosis.mend}; the whole log is {path}" if path else diagnosis.mend

    def started(self) -> None:
        """All are ready: what was found until now holds for every trial."""
        self._logs.drain()
        self._standing = self._logs.take()

    def take(self) -> list[Diagnosis]:
        """What start-up left to say, and what was found since the last call; the worst first."""
        self._logs.drain()
        return [*self._standing, *self._logs.take()]


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


def died(process: LocalProcess, status: int, diagnosis: Diagnosis | None = None) -> ProcessDiedError:
    """The error for a process that has ended although it should run, with its last lines."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    lines = process.tail()
    message = f"{process.name} {how}"
    hint = f"the whole log is {process.log_path}"
    if diagnosis is not None:
        message += f": {diagnosis.cause}"
        hint = f"{diagnosis.mend}; {hint}"
    elif status == PORT_IN_USE_EXIT:
        message += " since its port is in use"
    if lines:
        message += "; its last lines:\n" + "\n".join(f"  {line}" for line in lines)
    return ProcessDiedError(message, hint=hint)
