"""Start of a process from a JSON spec: reading it, stopping, exit code, timing on Linux, compiled parts.

On a busy core a process that wakes up waits for the end of the other's time slice, 3 ms by default. From
Linux 6.12 on it may request a shorter slice (``sched_attr.sched_runtime``, 0.1 to 100 ms) and then runs
first, without privilege or more CPU time. A sleep may end 50 µs late by default. ``KVBENCH_PURE_PYTHON=1``
disables the compiled parts of hot paths; the Python versions give the same results."""

from __future__ import annotations

import asyncio
import ctypes
import difflib
import importlib
import json
import logging
import os
import platform
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, TypeVar, get_origin, get_type_hints

from kvbench.errors import EXIT_BAD_INPUT, EXIT_FAILED, InputError, KvbenchError, PortInUseError

EXIT_PORT_IN_USE: Final = 98
PARENT_POLL_S: Final = 0.25
STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
"""Signals that stop a process. A process that starts others blocks them until ``run`` handles them."""

S = TypeVar("S")


def read_spec(cls: type[S], argv: Sequence[str]) -> S:
    """Return the dataclass ``cls`` from the JSON file named by the only argument. Raises InputError."""
    if len(argv) != 1:
        raise InputError("expected one argument: the path of a JSON spec")
    try:
        data = json.loads(Path(argv[0]).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the spec {argv[0]}: {error}") from error
    return parse_spec(cls, data)


def parse_spec(cls: type[S], data: Any, where: str = "the spec") -> S:
    """Return the dataclass ``cls`` from decoded JSON. Unknown, missing and mistyped keys raise InputError."""
    if not isinstance(data, dict):
        raise InputError(f"{where} must be a JSON object")
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    mistakes = []
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            mistakes.append(f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    for name, item in known.items():
        if name not in data:
            if item.default is MISSING and item.default_factory is MISSING:
                mistakes.append(f"missing key {name!r}")
        elif not _fits(data[name], types[name]):
            mistakes.append(f"{name!r} has an unusable value: {json.dumps(data[name])[:80]}")
    if mistakes:
        raise InputError(f"{where}: " + "; ".join(mistakes))
    return cls(**data)


def _fits(value: Any, kind: Any) -> bool:
    kind = get_origin(kind) or kind
    if kind is Any:
        return True
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    return isinstance(value, kind)


def run(name: str, body: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Run ``body(stop)`` on uvloop and return the exit code: the body's, or that of its KvbenchError
    (printed). ``stop`` is set by SIGTERM, SIGINT, or the parent's death."""
    import uvloop

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    parent = os.getppid()

    async def main() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, stop.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        watch = asyncio.ensure_future(_watch_parent(parent, stop))
        try:
            return await body(stop)
        finally:
            watch.cancel()

    try:
        # Runner and loop_factory are newer than Python 3.10; installing a policy is deprecated later.
        loop = uvloop.new_event_loop()
        try:
            return int(loop.run_until_complete(main()))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    except KvbenchError as error:
        return print_error(name, error)


def raise_open_files() -> None:
    """Raise this process's limit of open files to its hard limit: a stream needs one on each side."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def print_error(name: str, error: KvbenchError) -> int:
    if isinstance(error, PortInUseError):
        print(error.message, file=sys.stderr)
        return EXIT_PORT_IN_USE
    print(f"{name}: {error}", file=sys.stderr)
    return EXIT_BAD_INPUT if isinstance(error, InputError) else error.exit_code or EXIT_FAILED


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(PARENT_POLL_S)
        if os.getppid() != parent:
            logging.getLogger(__name__).warning("the parent process is gone: stopping")
            stop.set()


SLICE_S: Final = 0.0001
"""Shortest time slice that Linux grants, in seconds."""
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""System call number by machine (Linux's syscall tables); glibc has no wrapper."""


_PR_SET_TIMERSLACK: Final = 29  # linux/prctl.h
_LEAST_SLACK_NS: Final = 1


class _SchedAttr(ctypes.Structure):
    """``struct sched_attr`` of linux/sched/types.h, first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def shorten_slice() -> bool:
    """Request a time slice for this thread and its later children. False if the system has no such call. An
    older kernel accepts the call without effect."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attr = _SchedAttr(size=ctypes.sizeof(_SchedAttr), nice=nice, runtime=int(SLICE_S * 1e9))
    try:
        return int(ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.byref(attr), 0)) == 0
    except (OSError, AttributeError):
        return False


def sleep_exactly() -> bool:
    """Let this thread's sleeps end on time if it gets a core. False if the kernel refuses."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _LEAST_SLACK_NS, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def run_queue_wait_s() -> float:
    """Return the seconds that this process was ready to run but had no core (second field of schedstat)."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def compiled(module: str) -> Any:
    """Import an extension module; None if it is missing or disabled."""
    if os.environ.get("KVBENCH_PURE_PYTHON", "") not in ("", "0"):
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
