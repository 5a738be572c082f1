"""Logs and exit statuses of a deployment's processes during a wait."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvbench.connectors.base import Connector
from kvbench.core.gates.evidence import LoggedTransport
from kvbench.core.plan.processes import ProcessSpec
from kvbench.deployment.diagnose import Diagnosis, LogSource, LogWatch
from kvbench.errors import LaunchError, ProcessDiedError, ProcessHungError
from kvbench.launchers.base import Process
from kvbench.launchers.parts.liveness import Liveness

LOOK_S: Final = 0.05
"""Interval of checks next to a blocking call, in seconds."""
ROOT_GRACE_S: Final = 0.5
"""Wait after the first fatal line, in seconds: a traceback names its cause last."""
OTHERS_LINES: Final = 3
PORT_IN_USE_EXIT: Final = 98
ROUTER: Final = "router"

T = TypeVar("T")


class ProcessWatch:
    """Detects ended processes and fatal log lines."""

    def __init__(self, logs_like: str, connector: Connector, requested_transport: str) -> None:
        self._logs_like = logs_like
        self._connector = connector
        self._requested_transport = requested_transport
        self._logs = LogWatch()
        self._paths: dict[str, Path] = {}
        self._standing: list[Diagnosis] = []
        self._liveness: Liveness | None = None

    def follow(self, spec: ProcessSpec, path: Path) -> None:
        role = spec.name.split("-")[0]
        self._paths[spec.name] = path
        source = LogSource(
            process=spec.name,
            logs_like=ROUTER if role == ROUTER else self._logs_like,
            kv_connector="" if role == ROUTER else self._connector.kv_connector,
            role=role,
            requested_transport=self._requested_transport,
            kv_operation="" if role == ROUTER else self._connector.kv_operation,
        )
        self._logs.follow(path, source)

    def check(self, processes: Sequence[Process]) -> None:
        """Raise ProcessDiedError, ProcessHungError, or LaunchError for a fatal log line."""
        for process in processes:
            if (status := process.poll()) is not None:
                self._logs.drain(process.name)
                causes = [diagnosis for diagnosis in self._logs.take() if diagnosis.process == process.name]
                raise died(process, status, causes[0] if causes else None, processes)
        if self._logs.poll() is None:
            self._check_liveness(processes)
            return
        deadline = time.monotonic() + ROOT_GRACE_S
        while (cause := self._logs.drain()) is None or time.monotonic() < deadline:
            time.sleep(LOOK_S)
        raise LaunchError(cause.text(), hint=self._hint(cause))

    def _check_liveness(self, processes: Sequence[Process]) -> None:
        found = None if self._liveness is None else self._liveness.problem(processes)
        if found is None:
            return
        process, what, hint = found
        self._logs.drain()
        reported = [diagnosis.text() for diagnosis in self._logs.take()]
        words = "; ".join([what, *reported]) if reported else what + last_words(processes)
        raise ProcessHungError(words, hint=f"{hint}; the whole log is {process.log_path}")

    def _hint(self, diagnosis: Diagnosis) -> str:
        path = self._paths.get(diagnosis.process)
        return f"{diagnosis.hint}; the whole log is {path}" if path else diagnosis.hint

    def started(self, processes: Sequence[Process]) -> None:
        """Mark all as ready: earlier diagnoses apply to every trial, and all must respond from now on."""
        self._logs.drain()
        self._standing = self._logs.take()
        self._liveness = Liveness(processes)
        self._liveness.start()

    def close(self) -> None:
        """Stop the checks. May be called twice."""
        if self._liveness is not None:
            self._liveness.close()

    def explained(self, processes: Sequence[Process]) -> tuple[str, str]:
        """Log diagnosis for a message, and the hint; without a cause the last lines."""
        if found := self.take():
            return "\n".join(["", *(diagnosis.text() for diagnosis in found)]), self._hint(found[0])
        words = last_words(processes)
        return words, "no log shows a known cause: see the whole logs" if words else ""

    def transports(self) -> list[LoggedTransport]:
        self._logs.drain()
        return self._logs.transports()

    def take(self) -> list[Diagnosis]:
        """Diagnoses of start-up and since the last call, the worst first."""
        self._logs.drain()
        return [*self._standing, *self._logs.take()]


@dataclass(frozen=True)
class Box(Generic[T]):
    """Holds a value that may be None."""

    value: T


def beside(call: Callable[[], T], check: Callable[[], None]) -> T:
    """Run a blocking call, and ``check`` every 50 ms; raise what either raises. After an error of ``check``
    the call continues until its own timeout."""
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
    process: Process, status: int, diagnosis: Diagnosis | None = None, others: Sequence[Process] = ()
) -> ProcessDiedError:
    """Create the error for an ended process with its last lines, or those of ``others``."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    lines = process.tail()
    message = f"{process.name} {how}"
    hint = f"the whole log is {process.log_path}"
    if status == -signal.SIGKILL:
        hint = f"the kernel may have killed it for lack of memory: see `dmesg`; {hint}"
    if diagnosis is not None:
        message += f": {diagnosis.cause}"
        hint = f"{diagnosis.hint}; {hint}"
    elif status == PORT_IN_USE_EXIT:
        message += " since its port is in use"
    if lines:
        message += "\nits last lines:\n" + "\n".join(f"  {line}" for line in lines)
    if diagnosis is None and status != PORT_IN_USE_EXIT:
        message += last_words([other for other in others if other is not process])
    return ProcessDiedError(message, hint=hint)


def last_words(processes: Sequence[Process]) -> str:
    """Last lines of each log for a message, or ""."""
    lines = [f"  {process.name}: {line}" for process in processes for line in process.tail(OTHERS_LINES)]
    return "\n".join(["", "last lines of the logs:", *lines]) if lines else ""
