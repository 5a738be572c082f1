"""Process of an external simulator: JSON lines, validated answers, deadlines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Final, cast, get_args

from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.records import RequestError
from kvbench.core.scenario.options import Simulator
from kvbench.errors import InputError, KvbenchError, ProcessDiedError, ProcessHungError
from kvbench.hosts.procfs import wait_while
from kvbench.launchers.local import LocalLauncher, LocalProcess
from kvbench.sweep.trial.loadgen_driver import cause_of

NAME: Final = "system"
MOST_BYTES: Final = 1 << 29
"""Longest answer in bytes: ten times that for a million requests with all times."""
READ_BYTES: Final = 1 << 20
END_S: Final = 2.0
"""Longest wait for it to end after its stdin is closed, in seconds."""
GONE_S: Final = 2.0


def require_there(simulator: Simulator) -> None:
    """Raise InputError if a simulator's program is missing, before anything starts."""
    program = shlex.split(simulator.command)[0]
    if shutil.which(program) is None:
        raise InputError(
            f"--system: program {program!r} is missing or not executable",
            hint="give the command as in a shell, such as 'python3 my_sim.py'",
        )


class SimulatorProcess:
    """Runs the command in its own process group; a context manager."""

    def __init__(self, simulator: Simulator, launcher: LocalLauncher) -> None:
        self._simulator = simulator
        self._launcher = launcher
        self._process: LocalProcess | None = None
        self._read = bytearray()

    def __enter__(self) -> SimulatorProcess:
        words = tuple(shlex.split(self._simulator.command))
        self._process = self._launcher.start(ProcessSpec(NAME, words, one_thread=False), piped=True)
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        assert process is not None
        try:
            if kind is None:  # a failed one gets no orderly end
                with contextlib.suppress(OSError):
                    process.stdin.close()
                wait_while(lambda: process.poll() is None, END_S, 0.01)
        finally:
            self._launcher.stop([process])

    def ask(self, question: Mapping[str, Any]) -> bytes:
        """Return the line that answers a question. Raises ProcessDiedError, ProcessHungError,
        KvbenchError."""
        # Output after the last complete answer may have arrived.
        with contextlib.suppress(BlockingIOError):
            self._read += os.read(self._running.stdout.fileno(), READ_BYTES)
        if self._read:
            raise self.bad_output("a line without a request", bytes(self._read))
        if not self._exchange(question, answered=True):
            raise self._end_error()
        line, _, rest = bytes(self._read).partition(b"\n")
        if rest:
            raise self.bad_output("more than the one line of its answer", rest)
        self._read.clear()
        return line

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message without an answer; the next ``ask`` detects an ended process. Raises as ``ask``."""
        self._exchange(message, answered=False)

    def bad_output(self, what: str, output: bytes) -> KvbenchError:
        """Create the error for an invalid answer, quoted."""
        quoted = output[:200].decode("utf-8", "replace").strip()
        more = "…" if len(output) > 200 else ""
        log = "; ".join(self._running.tail(3))
        return KvbenchError(
            f"the system wrote {what}: {quoted!r}{more}" + (f"; its stderr ends: {log}" if log else ""),
            hint="stdout is for one line of JSON a trial (docs/simulate.md); all else belongs on stderr, "
            f"which is kept in {self._running.log_path}",
        )

    @property
    def _running(self) -> LocalProcess:
        assert self._process is not None
        return self._process

    def _exchange(self, message: Mapping[str, Any], *, answered: bool) -> bool:
        """Write a line and read the answer, if any; return False if the process closed its end."""
        deadline = time.monotonic() + self._simulator.answer_timeout_s
        left = memoryview(json.dumps(message).encode() + b"\n")
        writes, reads = self._running.stdin.fileno(), self._running.stdout.fileno()
        whole = not answered
        with selectors.DefaultSelector() as selector:
            selector.register(writes, selectors.EVENT_WRITE)
            selector.register(reads, selectors.EVENT_READ)
            while left or not whole:
                wait_s = deadline - time.monotonic()
                if wait_s <= 0:
                    raise self._hung()
                for key, _ in selector.select(wait_s):
                    try:
                        if key.fd == writes:
                            left = left[os.write(writes, left) :]
                        else:
                            data = os.read(reads, READ_BYTES)
                            if not data:
                                return False
                            self._read += data
                            whole = whole or b"\n" in data
                    except BlockingIOError:
                        continue
                    except (BrokenPipeError, ConnectionResetError):
                        return False
                    if len(self._read) > MOST_BYTES:
                        raise self.bad_output(f"more than {MOST_BYTES >> 20} MiB", bytes(self._read[:300]))
                if not left and writes in selector.get_map():
                    selector.unregister(writes)
        return True

    def _end_error(self) -> ProcessDiedError:
        process = self._running
        wait_while(lambda: process.poll() is None, GONE_S, 0.01)
        cause, status = cause_of(process.tail()), process.poll()
        how = f"ended early (status {status})" if status is not None else "closed its pipes"
        return ProcessDiedError(
            f"the system's command {how}{cause and f': {cause}'}",
            hint=f"it must answer until its stdin ends; its whole stderr is {process.log_path}",
        )

    def _hung(self) -> ProcessHungError:
        process = self._running
        cause = cause_of(process.tail())
        return ProcessHungError(
            f"the system's command has not answered within {self._simulator.answer_timeout_s:g} s"
            + (f"; its stderr ends: {cause}" if cause else ""),
            hint="it must end each line with a line feed and flush its stdout; if it needs longer: "
            "--set deployment.engine_options.answer_timeout_s=SECONDS",
        )


ERRORS: Final = frozenset(get_args(RequestError)) - {"cancelled"}
"""Errors a request may have; only kvbench cancels."""
SLACK_S: Final = 1e-6
"""Tolerance for rounding, in seconds."""


@dataclass(frozen=True)
class SystemAnswer:
    """Times of each request in planned order, in seconds since the trial's start; None: never. ``events_s``:
    times of its tokens, empty if not given."""

    first_token_s: Sequence[float | None]
    last_token_s: Sequence[float | None]
    events_s: Sequence[Sequence[float]]
    errors: Sequence[RequestError]


def read_answer(line: bytes, arrivals_s: Sequence[float]) -> SystemAnswer:
    """Parse an answer. Raises ValueError with the problem and the request (from 0)."""
    try:
        data = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("invalid JSON: nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("invalid UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    if unknown := set(data) - {"first_token_s", "last_token_s", "events_s", "error"}:
        raise ValueError(f"unknown keys: {', '.join(sorted(map(repr, unknown)))}")
    count = len(arrivals_s)
    first = [_time(raw, "first_token_s", at) for at, raw in enumerate(_list(data, "first_token_s", count))]
    last = [_time(raw, "last_token_s", at) for at, raw in enumerate(_list(data, "last_token_s", count))]
    errors = [_error(raw, at) for at, raw in enumerate(_list(data, "error", count, needed=False))]
    events = [_events(raw, at) for at, raw in enumerate(_list(data, "events_s", count, needed=False))]
    for at, arrival_s in enumerate(arrivals_s):
        _require_order(at, arrival_s, first[at], last[at], errors[at])
        if events[at]:
            _require_events(at, events[at], first[at], last[at])
    return SystemAnswer(first, last, events, errors)


def _no_number(name: str) -> float:
    raise ValueError(f"{name}, which is not a time")


def _list(data: dict[str, Any], name: str, count: int, *, needed: bool = True) -> list[Any]:
    found = data.get(name)
    if found is None and not needed:
        return [None] * count
    if not isinstance(found, list):
        raise ValueError(f"no list {name}")
    if len(found) != count:
        raise ValueError(f"{len(found)} entries in {name} for {count} requests")
    return found


def _time(value: Any, name: str, at: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}[{at}] is {str(value)[:40]!r}, not a time")
    try:
        time_s = float(value)
    except OverflowError:
        time_s = math.inf
    if not math.isfinite(time_s):
        raise ValueError(f"{name}[{at}] is not finite")
    if time_s < 0:
        raise ValueError(f"{name}[{at}] is negative: {time_s:g}")
    return time_s


def _error(value: Any, at: int) -> RequestError:
    if value is None or value == "":
        return ""
    if not isinstance(value, str) or value not in ERRORS:
        known = ", ".join(sorted(ERRORS - {""}))
        raise ValueError(f"error[{at}] is {str(value)[:40]!r}; there are: {known}")
    return cast(RequestError, value)


def _events(value: Any, at: int) -> list[float]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"events_s[{at}] is not a list")
    times = [_time(raw, f"events_s[{at}]", place) for place, raw in enumerate(value)]
    if None in times:
        raise ValueError(f"events_s[{at}] has a null in it")
    return [time for time in times if time is not None]


def _require_order(
    at: int, arrival_s: float, first_s: float | None, last_s: float | None, error: RequestError
) -> None:
    if first_s is not None and first_s < arrival_s - SLACK_S:
        raise ValueError(f"first_token_s[{at}] is {first_s:g}, before its arrival at {arrival_s:g}")
    if last_s is None:
        return
    if first_s is not None and last_s < first_s - SLACK_S:
        raise ValueError(f"last_token_s[{at}] is {last_s:g}, before its first token at {first_s:g}")
    if first_s is None and not error:
        raise ValueError(f"last_token_s[{at}] is {last_s:g}, but it has no first token")
    if last_s < arrival_s - SLACK_S:
        raise ValueError(f"last_token_s[{at}] is {last_s:g}, before its arrival at {arrival_s:g}")


def _require_events(at: int, events_s: Sequence[float], first_s: float | None, last_s: float | None) -> None:
    if any(later < earlier for earlier, later in pairwise(events_s)):
        raise ValueError(f"events_s[{at}] does not ascend")
    if first_s is None or abs(events_s[0] - first_s) > SLACK_S:
        raise ValueError(f"events_s[{at}] does not begin with first_token_s[{at}]")
    if last_s is not None and abs(events_s[-1] - last_s) > SLACK_S:
        raise ValueError(f"events_s[{at}] does not end with last_token_s[{at}]")
