"""Processes on this machine: each in a session of its own, tagged, and gone when kvbench is gone.

Their logs are bounded: of one that grows without end the beginning and the end are kept (``LogBound``).
"""

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Protocol

from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import ONE_THREAD_ENV, RUN_TAG_ENV, ProcessSpec, unproxied
from kvbench.errors import LaunchError
from kvbench.hosts.log_tail import tail_of
from kvbench.launchers.base import GRACE_S, stop_in_reverse
from kvbench.launchers.parts.sockets import free_ports, listens, require_free_port


class LocalPlace:
    """``launchers.base.Place`` for this machine, where there is nothing to bring."""

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
        for each in path.parent.glob(f"{path.name}*"):
            each.unlink(missing_ok=True)

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
    """Whoever writes a log; its path may change."""

    @property
    def log_path(self) -> Path: ...


@dataclass
class _Log:
    hole_ends: int = 0
    missing: int = 0
    """Bytes."""


class LogBound:
    """Keeps the logs of processes within ``head`` + ``tail`` bytes, and what half a second adds to them.

    A process writes straight into its log file, at no extra cost. One thread looks at all of a launcher's
    logs twice a second; it gives the middle of a log beyond the bound back to the disk (fallocate(2), a
    hole), while the process writes on at the end. When the process has ended the hole is closed and a line
    says how much is missing. On a file system without holes the log is cut off at its beginning's end, and
    what comes later is kept. The thread ends with the last process.
    """

    def __init__(self, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._head = head - head % _BLOCK
        self._tail = tail
        self._lock = threading.Lock()
        self._logs: dict[Logged, _Log] = {}
        self._none_left = threading.Event()

    def watch(self, process: Logged) -> None:
        """From now on its log is bounded."""
        with self._lock:
            if not self._logs:
                self._none_left = threading.Event()
                threading.Thread(target=self._run, args=(self._none_left,), name="logs", daemon=True).start()
            self._logs[process] = _Log()

    def ended(self, process: Logged) -> None:
        """Nothing writes that log any more. Safe to call twice."""
        with self._lock:
            if process not in self._logs:
                return
            self._cut(process)
            log = self._logs.pop(process)
            if not self._logs:
                self._none_left.set()
        if log.missing:
            with contextlib.suppress(OSError):  # a full disk: the hole stays, and costs nothing
                self._close(process.log_path, log)

    def _run(self, none_left: threading.Event) -> None:
        while not none_left.wait(LOOK_S):
            with self._lock:
                for process in self._logs:
                    self._cut(process)

    def _cut(self, process: Logged) -> None:
        """Gives the middle of a log that is too long back to the disk."""
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
                os.truncate(path, self._head)  # whoever appends goes on from there
                log.missing += size - self._head

    def _close(self, path: Path, log: _Log) -> None:
        """Writes the file anew without its hole, renamed into place."""
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
    """Raises OSError, also on a file system that cannot do it."""
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


_GUARD = str(Path(__file__).parent / "parts" / "guard.py")
TRACKER_GRACE_S = 2.0
"""Seconds that a Python resource tracker has to clean up after the killed. It needs a tenth of one."""


def _members(group: int) -> set[int]:
    """The processes of a process group that still run."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state != "Z":
                    found.add(int(path.name))
    return found


def _trackers(group: int) -> set[int]:
    found = set()
    for pid in _members(group):
        with contextlib.suppress(OSError):
            if b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


class LocalProcess:
    """A started process and its group. Only ever signals what it started itself."""

    def __init__(
        self, spec: ProcessSpec, popen: subprocess.Popen[bytes], log_path: Path, logs: LogBound
    ) -> None:
        """``logs``: what keeps its log within bounds, until it has ended."""
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
        """The exit status, or None while it runs. Sweeps up the rest of the group once it has ended."""
        if self._returncode is None and self.has_exited:
            self._reap()
        return self._returncode

    def terminate(self) -> None:
        """Ask it to end (SIGTERM to the process itself, which ends its own children); one that is stopped
        is continued, so that it can.
        """
        if self._returncode is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it and its whole group at once."""
        if self._returncode is None:
            self._reap()

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to a process that was started piped."""
        assert self._popen.stdin is not None
        return self._popen.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from a process that was started piped."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of its log."""
        return tail_of(self.log_path, lines)

    def rename(self, name: str) -> None:
        """Another name, for the log too, for a process that got its work after its start."""
        self.spec = replace(self.spec, name=name)
        path = self.log_path.with_name(f"{name}.log")
        self.log_path = self.log_path.rename(path)

    @property
    def has_exited(self) -> bool:
        """Whether it has ended; nothing is swept up yet, and its pipes can still be read."""
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
        self._end_group()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._returncode = self._popen.wait()
        self._logs.ended(self)

    def _end_group(self) -> None:
        """Kill all of the group, Python's resource trackers last: these unlink what the others leave in
        /dev/shm, then end by themselves; killed together with the others they would not.
        """
        for pid in _members(self.pid) - _trackers(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + TRACKER_GRACE_S
        while _trackers(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._signal_group(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class LocalLauncher:
    """Starts processes on this machine. Logs go to ``log_dir``, their JSON specs to ``spec_dir``."""

    name = "local"

    def __init__(self, run_tag: str, log_dir: Path, spec_dir: Path) -> None:
        self.run_tag = run_tag
        self.log_dir = log_dir
        self._spec_dir = spec_dir
        self._logs = LogBound()

    def start(self, spec: ProcessSpec, *, piped: bool = False) -> LocalProcess:
        """Start one process; ``piped`` keeps its stdin and stdout for a conversation with it.

        Raises LaunchError if the command cannot be run at all.
        """
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
        command = [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), *argv]
        try:
            with log_path.open("ab") as log:
                popen = subprocess.Popen(
                    command,
                    env=child_environment(
                        # What a process leaves in its temporary folder goes with our own.
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
        """Where a process's output goes."""
        return self.log_dir / f"{spec.name}.log"

    def check(self) -> None:
        """This machine is never lost."""

    def place_of(self, name: str) -> LocalPlace:
        """Every process is here."""
        return LocalPlace()

    def web(self, access: ServerAccess) -> None:
        """Servers are asked from here."""

    def host_of(self, name: str) -> str:
        """Empty: this machine."""
        return ""

    def env_of(self, spec: ProcessSpec) -> Mapping[str, str]:
        return spec.env

    @property
    def hosts(self) -> tuple[str, ...]:
        """There are no other hosts."""
        return ()

    def ask_hosts(
        self, what: str, more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        return {}

    def stop(self, processes: Sequence[LocalProcess], grace_s: float = GRACE_S) -> None:
        """Stop in reverse order of start: ask, wait at most ``grace_s`` altogether, then force."""
        stop_in_reverse(processes, grace_s)


def child_environment(
    extra: Mapping[str, str], run_tag: str, *, one_thread: bool = True, beside: Sequence[str] = ()
) -> dict[str, str]:
    """Our own environment with ``extra`` and the run tag; one thread for numerical libraries if wanted.

    A proxy set there stays, for a model that is downloaded; what is ``beside`` is excepted from it. vLLM's
    MooncakeConnector asks P's bootstrap server by an httpx client that would take it, Mooncake its metadata
    server by libcurl.
    """
    env = {
        **os.environ,
        **(ONE_THREAD_ENV if one_thread else {}),
        "PYTHONUNBUFFERED": "1",
        **extra,
        RUN_TAG_ENV: run_tag,
    }
    return {**env, **unproxied(env, beside)}
