"""Processes that may end while they are looked at; a zombie is a process that is gone."""

import time
from collections.abc import Sequence

import psutil

POLL_S = 0.02


def lives(process: psutil.Process | int) -> bool:
    """Whether it runs: it is there, it is still the same one, and no zombie."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def living(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if lives(process)]


def still_living(processes: Sequence[psutil.Process], deadline_s: float = 15.0) -> list[psutil.Process]:
    """Those that live at the deadline; it is not waited for once all have ended.

    psutil's own ``wait_procs`` takes an orphan's zombie for a process that runs, and so waits in vain.
    """
    deadline = time.monotonic() + deadline_s
    while (left := living(processes)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none of one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie, too
        return []


def below(word: str = "", of: int | None = None) -> list[psutil.Process]:
    """Those below a process (this one) that live, with that word somewhere in their command line."""
    found = psutil.Process(of).children(recursive=True)
    return [child for child in found if any(word in part for part in words_of(child)) and lives(child)]
