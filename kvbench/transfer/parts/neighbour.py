"""Another process of this host: its files, and whether it is still there."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping
from typing import Any

from kvbench.errors import TransferError

HERE_FIX = "both sides must run on one host, as the same user and in one process namespace"


class Neighbour:
    """Another process of this host. Raises TransferError when it is not to be reached, or has ended."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            raise TransferError(f"there is no process {pid} here: {error}", hint=HERE_FIX) from error
        self._pid = pid
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def check(self) -> None:
        """It is still there."""
        if self._poll.poll(0):
            raise TransferError("the peer's process has ended")

    def open(self, file: Mapping[str, Any]) -> int:
        """A descriptor of the file that it named by ``file_of``."""
        try:
            fd = os.open(f"/proc/{self._pid}/fd/{file['fd']}", os.O_RDWR)
        except OSError as error:
            raise TransferError(f"cannot open the peer's memory: {error}", hint=HERE_FIX) from error
        if os.fstat(fd).st_ino != file["inode"]:
            os.close(fd)
            raise TransferError("another process answers in the peer's place", hint=HERE_FIX)
        return fd

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def file_of(fd: int) -> dict[str, int]:
    """How a neighbour finds a file of this process."""
    return {"pid": os.getpid(), "fd": fd, "inode": os.fstat(fd).st_ino}
