"""The conversation with whoever started the generator: JSON lines out, "go" and "stop" in."""

from __future__ import annotations

import asyncio
import json
import os
import select
import stat
from typing import Any, Final

STDIN: Final = 0
STDOUT: Final = 1


def report(event: dict[str, Any]) -> None:
    """Prints a progress line, unless whoever reads has fallen behind: the trial never waits for that."""
    poller = select.poll()
    poller.register(STDOUT, select.POLLOUT)
    # A pipe that polls writable takes at least PIPE_BUF bytes at once, more than any such line.
    if any(flags & select.POLLOUT for _, flags in poller.poll(0)):
        tell(event)


def tell(event: dict[str, Any]) -> None:
    """Prints a line, waiting for the reader if need be. A reader that is gone is not waited for."""
    data = json.dumps(event).encode() + b"\n"
    try:
        while data:
            data = data[os.write(STDOUT, data) :]
    except OSError:
        return


class Orders:
    """Reads "go" and "stop" lines from stdin, if it is a pipe, a socket or a terminal."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._buffer = b""
        self.go = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        mode = os.fstat(STDIN).st_mode
        self._listening = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(STDIN)
        if self._listening:
            self._loop.add_reader(STDIN, self._read)
        else:
            self.go.set()

    async def wait_for_go(self) -> None:
        """Returns at "go", at "stop", and when nobody can say either any more."""
        waits = {asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(self._stop.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def close(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(STDIN)

    def _read(self) -> None:
        try:
            data = os.read(STDIN, 4096)
        except OSError:
            data = b""
        if not data:
            if not self.go.is_set():
                self._stop.set()
            self.close()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.strip() == b"go":
                self.go.set()
            elif line.strip() == b"stop":
                self._stop.set()
