"""One side of a measured transfer: ``python -m kvbench.processes.transfer_worker.worker``.

It talks JSON lines over stdin and stdout.

The first line in is the spec: ``role`` ("initiator" or "target"), ``backend``, ``options``, ``layout``,
``memory`` ("host", "cuda"), ``seed``, ``side`` (a number that keeps the buffers of one case apart). The first
line out is ``{"ready": {agent, library, transport, open_s, register_s}}`` or ``{"failed": cause, "log":
[…]}``. Then each request ``{"n", "cmd", …}`` has one answer ``{"n", "ok": {…}}`` or ``{"n", "error": cause,
"log": […]}``:

- ``connect {peer, deadline_s}`` → ``{peer, connect_s}``; ``reshape {layout}`` → ``{agent}``, null where it
  cannot
- ``fill {generation}``; ``collect {blocks}``; ``offer {blocks}``; ``spoil {block}`` (one bit of it, to try
  the check)
- ``verify {blocks, source: {side, generation, blocks}}`` → ``{difference}``, empty where all bytes are right
- ``prepare {op, transfers: [{peer, local, remote}]}`` → ``{prepare_s, descriptors, nbytes, repeats}``
- ``release``
- ``run {limits, start_at_ns}`` → ``{started_ns, ended_ns, calls, call_ns, cpu_s, transport}``
- ``counters`` → ``{clock_ns, cpu_s, nics, load, host_cpu_s, steal_s, cores}``; ``quit``

Between requests the library makes its progress. The process ends at end of file, whatever a library is doing.
What a library writes never reaches stdout. Behind a prefix (``ssh host``) all of this stays the same.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from kvbench.errors import KvbenchError, TransferError
from kvbench.processes.transfer_worker.measure import sharp_sleeps
from kvbench.processes.transfer_worker.side import MeasuredSide
from kvbench.transfer.parts.nativelog import NativeLog

LOG_LINES = 8
LAST_WORDS_S = 0.02
"""What a library wrote last is so long on its way through the pipe of NativeLog."""
END_GRACE_S = 2.0
"""After end of file a library may take so long to close; then the process ends without it."""
SPEC_KEYS = {"role", "backend", "options", "layout", "memory", "seed", "side"}


class Requests:
    """Lines of stdin, read by a thread, so that end of file ends the process even while a library hangs."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def _read(self) -> None:
        with os.fdopen(0, "rb", closefd=False) as source:
            for line in source:
                self._lines.put(line)
                os.eventfd_write(self.wake, 1)
        self._lines.put(None)
        os.eventfd_write(self.wake, 1)
        time.sleep(END_GRACE_S)
        os._exit(0)

    def next(self, block: bool) -> bytes | None:
        """The next line, None at the end. Raises queue.Empty where there is none yet and it shall not
        block."""
        return self._lines.get(block=block)


class Conversation:
    """Answers on what was stdout, requests from stdin, and the library's progress in between."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        self.log = NativeLog()
        self.requests = Requests()

    def say(self, message: Mapping[str, Any]) -> None:
        """One line; a reader that is gone is noticed at stdin."""
        data = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError:
            return

    def serve(self, worker: MeasuredSide) -> None:
        """Until ``quit`` or the end of stdin."""
        epoll = select.epoll()
        epoll.register(self.requests.wake, select.EPOLLIN)
        for fd in worker.endpoint.wait_fds():
            epoll.register(fd, select.EPOLLIN)
        pause = worker.endpoint.progress_interval_s
        while True:
            try:
                line = self.requests.next(block=False)
            except queue.Empty:
                # epoll counts in whole milliseconds; select on the epoll set in microseconds.
                select.select([epoll], [], [], pause)
                if any(fd == self.requests.wake for fd, _ in epoll.poll(0)):
                    os.eventfd_read(self.requests.wake)
                worker.progress()
                continue
            if line is None or not self._one(worker, line):
                return

    def _one(self, worker: MeasuredSide, line: bytes) -> bool:
        """One request; whatever is wrong with it becomes its answer. False: it was the last one."""
        number, mark = -1, self.log.mark()
        try:
            request = json.loads(line)
            number = int(request["n"])
            if request["cmd"] == "quit":
                self.say({"n": number, "ok": {}})
                return False
            self.say({"n": number, "ok": worker.answer(request)})
        except Exception as error:
            time.sleep(LAST_WORDS_S)
            self.say({"n": number, "error": cause_of(error), "log": self.log.since(mark)[-LOG_LINES:]})
        return True


def cause_of(error: Exception) -> str:
    """An error in a line."""
    return str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}".rstrip(": ")


def main() -> NoReturn:
    """Open what the first line describes and serve it until the end."""
    # Ctrl-C reaches the whole process group; the coordinator decides what it means for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    talk = Conversation()
    try:
        spec = json.loads(talk.requests.next(block=True) or b"null")
        if not isinstance(spec, dict) or set(spec) != SPEC_KEYS:
            raise TransferError(f"the spec must have exactly these keys: {', '.join(sorted(SPEC_KEYS))}")
        sharp_sleeps()
        worker = MeasuredSide(spec, talk.log)
        ready = worker.ready()
    except Exception as error:
        time.sleep(LAST_WORDS_S)
        talk.say({"failed": cause_of(error), "log": talk.log.since(0)[-LOG_LINES:]})
        os._exit(1)
    talk.say({"ready": ready})
    talk.serve(worker)
    worker.endpoint.close()
    # Not sys.exit: destructors of native libraries wait for threads that may hang on a dead peer.
    os._exit(0)


if __name__ == "__main__":
    main()
