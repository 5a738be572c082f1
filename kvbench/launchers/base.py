"""The contract of a launcher: where processes run, and what may be done with them from here.

Deployment, load generator, trial and sweep know nothing else. ``LocalLauncher`` starts processes on this
machine, ``RemoteLauncher`` has agents start them on other hosts.
"""

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
    """The way to a process's stdin. Raises OSError when nobody can read it any more."""

    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Reader(Protocol):
    """The way from a process's stdout: a file descriptor that selectors can wait for."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Process(Protocol):
    """A process that a launcher has started, with its group."""

    @property
    def spec(self) -> ProcessSpec: ...
    @property
    def log_path(self) -> Path:
        """Its output, here, whichever host it runs on."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int:
        """Its number on the host where it runs."""

    @property
    def stdin(self) -> Writer: ...
    @property
    def stdout(self) -> Reader: ...

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it and its whole group at once."""

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of its log."""

    def rename(self, name: str) -> None:
        """Another name, for the log too."""


class Launcher(Protocol):
    """Starts processes, each where its name says it belongs, and stops them."""

    @property
    def log_dir(self) -> Path:
        """Where the logs of all its processes are, here."""

    @property
    def run_tag(self) -> str: ...

    def start(self, spec: ProcessSpec, *, piped: bool = False) -> Process:
        """Start one process; ``piped`` keeps its stdin and stdout for a conversation. Raises LaunchError."""

    def stop(self, processes: Sequence[Any], grace_s: float = ...) -> None:
        """Stop in reverse order of start: ask, wait at most ``grace_s`` altogether, then force."""

    def log_path(self, spec: ProcessSpec) -> Path:
        """Where a process's output goes, here."""

    def check(self) -> None:
        """Raises HostLostError if a host that this launcher needs is gone."""

    def place_of(self, name: str) -> Place:
        """What there is to say and to do where the process of that name runs."""

    def web(self, access: ServerAccess) -> httpx.BaseTransport | None:
        """How its servers are asked by HTTP, if not from here. ``access``: to those of somebody else's."""

    def host_of(self, name: str) -> str:
        """The host that a process of this name belongs on; empty for this machine."""

    def env_of(self, spec: ProcessSpec) -> Mapping[str, str]:
        """What the process is given beside what its host has: its own, and its GPUs where these are dealt."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the other hosts that it starts processes on; none for this machine alone."""

    def ask_hosts(
        self, what: str, more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        """The answers of all of ``hosts`` to one question, by name."""


class Place(Protocol):
    """The place of one process: its files, clock, ports and web pages, as seen from there."""

    @property
    def host(self) -> str:
        """The host's name; empty for this machine."""

    @property
    def clock_ahead_s(self) -> float:
        """How far its monotonic clock is ahead of this machine's, in seconds."""

    @property
    def cores(self) -> int:
        """CPU cores that a process may use there."""

    def cpu_s(self, pid: int) -> float | None:
        """CPU seconds that a process has taken there; None where it is unknown: here, or when it ended."""

    def path_of(self, path: Path) -> str:
        """Where a process there finds or leaves the file that is ``path`` here."""

    def put(self, path: Path) -> None:
        """Bring the file ``path`` there. Raises LaunchError."""

    def fetch(self, path: Path) -> None:
        """Bring what a process left there to ``path`` here, and remove it there. Raises LaunchError."""

    def forget(self, path: Path) -> None:
        """Remove what a process may have left there, whole or in part."""

    def require_free(self, address: str, ports: Sequence[tuple[str, int]]) -> None:
        """``ports``: what for, and which. Raises PortInUseError for the first that is taken."""

    def free_ports(self, address: str, counts: Sequence[int]) -> list[int]:
        """For each count the first of so many consecutive free ports. Raises PortInUseError."""

    def listens(self, address: str, port: int) -> bool:
        """Whether a connection to ``address:port`` is taken there."""


GRACE_S: Final = 3.0
"""Seconds between SIGTERM and SIGKILL. The emulated engine needs well under one."""
POLL_S: Final = 0.02


def stop_in_reverse(processes: Sequence[Process], grace_s: float) -> None:
    """Ask all to end, the last started first; wait at most ``grace_s`` altogether; kill the rest."""
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
