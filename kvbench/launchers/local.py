"""Local processes, each in its own tagged session, which end with kvbench. Logs are bounded
(``LogBound``)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Protocol

from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import ONE_THREAD_ENV, RUN_TAG_ENV, ProcessSpec, unproxied
from kvbench.errors import LaunchError
from kvbench.hosts.log_tail import tail_of
from kvbench.launchers.base import GRACE_S, stop_in_reverse
from kvbench.launchers.parts import guard
from kvbench.launchers.parts.sockets import free_ports, listens, require_free_port


class LocalPlace:
    """``launchers.base.Place`` for this machine; nothing has to be copied."""

    host: Final = ""
    clock_ahead_s: Final = 0.0

    @property
    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def cpu_s(self, pid: int) -> float | None:
        return None

    def path_of(self, path: Path) -> str:
        return str(path)

    def put(self, path: Path) -> None:
        return None

    def fetch(self, path: Path) -> None:
        return None

    def forget(self, path: Path) -> None:
        for match in path.parent.glob(f"{path.name}*"):
            match.unlink(missing_ok=True)

    def require_free(self, address: str, ports: Sequence[tuple[str, int]]) -> None:
        for name, port in ports:
            require_free_port(address, port, name)

    def free_ports(self, address: str, counts: Sequence[int]) -> list[int]:
        return free_ports(address, counts)

    def listens(self, address: str, port: int) -> bool:
        return listens(address, port)


HEAD_BYTES: Final = 16 * 2**20
TAIL_BYTES: Final = 48 * 2**20
LOOK_S: Final = 0.5
_KEEP_SIZE: Final = 1  # linux/falloc.h
_PUNCH_HOLE: Final = 2
_COPY_BYTES: Final = 2**20
_BLOCK: Final = 4096


class Logged(Protocol):
    """A writer of a log; the log's path may change."""

    @property
    def log_path(self) -> Path: ...


@dataclass
class _Log:
    hole_ends: int = 0
    missing: int = 0


class LogBound:
    """Bounds each log to ``head`` + ``tail`` bytes, plus half a second of output.

    Processes write directly to their files. A thread checks all logs twice a second and punches a hole in a
    long one (fallocate(2)); at the process's end it removes the hole and notes the missing bytes. Without
    hole support the log is cut after its head and continues. The thread ends with the last process."""

    def __init__(self, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._head = head - head % _BLOCK
        self._tail = tail
        self._lock = threading.Lock()
        self._logs: dict[Logged, _Log] = {}
        self._none_left = threading.Event()

    def watch(self, process: Logged) -> None:
        with self._lock:
            if not self._logs:
                self._none_left = threading.Event()
                threading.Thread(target=self._run, args=(self._none_left,), name="logs", daemon=True).start()
            self._logs[process] = _Log()

    def ended(self, process: Logged) -> None:
        """Finish the log of an ended process. May be called twice."""
        with self._lock:
            if process not in self._logs:
                return
            self._cut(process)
            log = self._logs.pop(process)
            if not self._logs:
                self._none_left.set()
        if log.missing:
            with contextlib.suppress(OSError):  # a full disk: the hole stays, at no cost
                self._close(process.log_path, log)

    def _run(self, none_left: threading.Event) -> None:
        while not none_left.wait(LOOK_S):
            with self._lock:
                for process in self._logs:
                    self._cut(process)

    def _cut(self, process: Logged) -> None:
        """Free the middle of a long log."""
        log, path = self._logs[process], process.log_path
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            begin = log.hole_ends or self._head
            end = (size - self._tail) // _BLOCK * _BLOCK
            if end <= begin:
                return
            try:
                _punch(path, begin, end - begin)
                log.hole_ends = end
                log.missing += end - begin
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                os.truncate(path, self._head)  # appending continues from there
                log.missing += size - self._head

    def _close(self, path: Path, log: _Log) -> None:
        """Rewrite the file without its hole, atomically."""
        rest_from = log.hole_ends or self._head
        short = path.with_name(f".{path.name}.short")
        try:
            with path.open("rb") as old, short.open("wb") as new:
                _copy(old.fileno(), new.fileno(), 0, self._head)
                new.write(f"\n[kvbench: {log.missing} bytes of this log were not kept]\n".encode())
                new.flush()
                _copy(old.fileno(), new.fileno(), rest_from, os.fstat(old.fileno()).st_size)
            short.replace(path)
        finally:
            short.unlink(missing_ok=True)


def _punch(path: Path, offset: int, length: int) -> None:
    """Punch a hole. Raises OSError, also if the file system cannot."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    number = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if fallocate(number, _KEEP_SIZE | _PUNCH_HOLE, offset, length) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(number)


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end and (data := os.pread(source, min(_COPY_BYTES, end - begin), begin)):
        begin += len(data)
        while data:
            data = data[os.write(target, data) :]


class LocalProcess:
    """A started process and its group; signals only these."""

    def __init__(
        self, spec: ProcessSpec, popen: subprocess.Popen[bytes], log_path: Path, logs: LogBound
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self._popen = popen
        self._logs = logs
        self._logs.watch(self)
        self._returncode: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs; at its end the rest of the group is killed."""
        if self._returncode is None and self.has_exited:
            self._reap()
        return self._returncode

    def terminate(self) -> None:
        """Send SIGTERM to the process, which ends its children; a stopped one is continued first."""
        if self._returncode is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._returncode is None:
            self._reap()

    @property
    def stdin(self) -> IO[bytes]:
        assert self._popen.stdin is not None
        return self._popen.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._popen.stdout is not None
        return self._popen.stdout

    def tail(self, lines: int = 12) -> list[str]:
        return tail_of(self.log_path, lines)

    def rename(self, name: str) -> None:
        """Rename it and its log, for a process that got its work after its start."""
        self.spec = replace(self.spec, name=name)
        path = self.log_path.with_name(f"{name}.log")
        self.log_path = self.log_path.rename(path)

    @property
    def has_exited(self) -> bool:
        """Whether it has ended; its group is not yet killed and its pipes are readable."""
        if self._returncode is not None:
            return True
        # WNOWAIT leaves the zombie in place, so that its process group id cannot be reused
        # before the rest of the group has been swept up.
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return status is not None

    def _reap(self) -> None:
        guard.end_group(self.pid)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._returncode = self._popen.wait()
        self._logs.ended(self)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class LocalLauncher:
    """Starts local processes. Logs go to ``log_dir``, JSON specs to ``spec_dir``."""

    name = "local"

    def __init__(self, run_tag: str, log_dir: Path, spec_dir: Path) -> None:
        self.run_tag = run_tag
        self.log_dir = log_dir
        self._spec_dir = spec_dir
        self._logs = LogBound()

    def start(self, spec: ProcessSpec, *, piped: bool = False) -> LocalProcess:
        self._spec_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        argv = list(spec.argv)
        if spec.spec is not None:
            path = self._spec_dir / f"{spec.name}.json"
            path.write_text(json.dumps(spec.spec, indent=1))
            argv.append(str(path))
        env = dict(spec.env)
        for variable, content in spec.files.items():
            path = self._spec_dir / f"{spec.name}-{variable.lower()}.json"
            path.write_text(json.dumps(content, indent=1))
            env[variable] = str(path)
        log_path = self.log_path(spec)
        # Foreign engines have children, which outlive them.
        kind = "alone" if spec.one_thread else "family"
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), kind, *argv]
        try:
            with log_path.open("ab") as log:
                popen = subprocess.Popen(
                    command,
                    env=child_environment(
                        # A process's temporary files are removed with kvbench's own.
                        {"TMPDIR": str(self._spec_dir), **env},
                        self.run_tag,
                        one_thread=spec.one_thread,
                        beside=spec.beside,
                    ),
                    stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"cannot start {spec.name}: {error.strerror}", hint=" ".join(argv)) from error
        return LocalProcess(spec, popen, log_path, self._logs)

    def log_path(self, spec: ProcessSpec) -> Path:
        return self.log_dir / f"{spec.name}.log"

    def check(self) -> None:
        """This machine is never lost."""

    def place_of(self, name: str) -> LocalPlace:
        return LocalPlace()

    def web(self, access: ServerAccess) -> None:
        """Servers are requested directly."""

    def host_of(self, name: str) -> str:
        return ""

    def env_of(self, spec: ProcessSpec) -> Mapping[str, str]:
        return spec.env

    @property
    def hosts(self) -> tuple[str, ...]:
        return ()

    def ask_hosts(
        self, what: str, more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        return {}

    def stop(self, processes: Sequence[LocalProcess], grace_s: float = GRACE_S) -> None:
        stop_in_reverse(processes, grace_s)


def child_environment(
    extra: Mapping[str, str], run_tag: str, *, one_thread: bool = True, beside: Sequence[str] = ()
) -> dict[str, str]:
    """Return this process's environment with ``extra`` and the run tag; ``one_thread`` limits numerical
    libraries. A proxy stays set for model downloads, except for the given addresses, which vLLM's
    MooncakeConnector (httpx) and Mooncake (libcurl) would contact through it."""
    env = {
        **os.environ,
        **(ONE_THREAD_ENV if one_thread else {}),
        "PYTHONUNBUFFERED": "1",
        **extra,
        RUN_TAG_ENV: run_tag,
    }
    return {**env, **unproxied(env, beside)}
