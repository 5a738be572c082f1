"""Interface of a launcher, which starts processes and gives access to them.

Deployment, load generator, trial and sweep use only this. ``LocalLauncher`` starts local processes,
``RemoteLauncher`` uses agents on other hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import ProcessSpec

if TYPE_CHECKING:
    import httpx


class Writer(Protocol):
    """Pipe to a process's stdin. Raises OSError when its reader is gone."""

    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Reader(Protocol):
    """Pipe from a process's stdout, with a file descriptor for selectors."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Process(Protocol):
    @property
    def spec(self) -> ProcessSpec: ...
    @property
    def log_path(self) -> Path:
        """Local path of its output, even if it runs remotely."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int:
        """Process id on its host."""

    @property
    def stdin(self) -> Writer: ...
    @property
    def stdout(self) -> Reader: ...

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Kill it and its whole group."""

    def tail(self, lines: int = 12) -> list[str]:
        """Last lines of its log."""

    def rename(self, name: str) -> None:
        """Rename it and its log."""


class Launcher(Protocol):
    @property
    def log_dir(self) -> Path:
        """Local folder of all logs."""

    @property
    def run_tag(self) -> str: ...

    def start(self, spec: ProcessSpec, *, piped: bool = False) -> Process:
        """Start a process; ``piped`` keeps stdin and stdout. Raises LaunchError."""

    def stop(self, processes: Sequence[Any], grace_s: float = ...) -> None:
        """Stop in reverse order of start: terminate, wait at most ``grace_s`` in total, then kill."""

    def log_path(self, spec: ProcessSpec) -> Path:
        """Local path of a process's log."""

    def check(self) -> None:
        """Raise HostLostError if a needed host is lost."""

    def place_of(self, name: str) -> Place:
        """Return the place where the named process runs."""

    def web(self, access: ServerAccess) -> httpx.BaseTransport | None:
        """HTTP transport to its servers, or None for direct requests. ``access``: for external servers."""

    def host_of(self, name: str) -> str:
        """Host of a process by its name; empty for this machine."""

    def env_of(self, spec: ProcessSpec) -> Mapping[str, str]:
        """Environment of a process besides its host's: its own, and its GPUs if dealt."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of other hosts with processes."""

    def ask_hosts(
        self, what: str, more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return host → answer to one question."""


class Place(Protocol):
    """Files, clock, ports and web access where a process runs."""

    @property
    def host(self) -> str:
        """Host name; empty for this machine."""

    @property
    def clock_ahead_s(self) -> float:
        """Offset of its clock against this machine's, in seconds."""

    @property
    def cores(self) -> int:
        """CPU cores available to a process."""

    def cpu_s(self, pid: int) -> float | None:
        """CPU seconds of a process; None if unknown: local, or ended."""

    def path_of(self, path: Path) -> str:
        """Path of the local file ``path`` on that host."""

    def put(self, path: Path) -> None:
        """Copy a local file there. Raises LaunchError."""

    def fetch(self, path: Path) -> None:
        """Move a process's file to the local ``path``. Raises LaunchError."""

    def forget(self, path: Path) -> None:
        """Remove a process's file, also a partial one."""

    def require_free(self, address: str, ports: Sequence[tuple[str, int]]) -> None:
        """``ports``: (purpose, port). Raises PortInUseError for the first one in use."""

    def free_ports(self, address: str, counts: Sequence[int]) -> list[int]:
        """Return the first of each count's consecutive free ports. Raises PortInUseError."""

    def listens(self, address: str, port: int) -> bool:
        """Whether the address accepts a connection."""


GRACE_S: Final = 3.0
"""Seconds between SIGTERM and SIGKILL; the emulated engine needs far less than one."""
POLL_S: Final = 0.02


def stop_in_reverse(processes: Sequence[Process], grace_s: float) -> None:
    """Terminate all, the last started first; wait at most ``grace_s`` in total; kill the rest."""
    deadline = time.monotonic() + grace_s
    waiting = list(reversed(processes))
    for process in waiting:
        process.terminate()
    try:
        while waiting and time.monotonic() < deadline:
            waiting = [process for process in waiting if process.poll() is None]
            if waiting:
                time.sleep(POLL_S)
    finally:
        for process in waiting:
            process.kill()
