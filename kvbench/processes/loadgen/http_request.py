"""One HTTP request to one server over one connection, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvbench.core.records import RequestError
from kvbench.processes.loadgen.answer import ServerAnswer
from kvbench.processes.loadgen.heartbeat import GeneratorFigures
from kvbench.processes.loadgen.sockets.clock import SLACK_NS, Log, StampClock, new_log
from kvbench.processes.loadgen.sockets.loop import SocketLoop
from kvbench.processes.loadgen.sockets.pool import ConnectionPool
from kvbench.processes.loadgen.sockets.wire import ServerConnection

READS_AT_ONCE: Final = 256
"""Reads parsed at once: about 0.2 ms in the slow case."""
_ID_BITS: Final = 0xFFFFFFFF

Failure = tuple[RequestError, str]


class RequestRun(Protocol):
    loop: SocketLoop
    clock: StampClock
    figures: GeneratorFigures
    monotonic: Callable[[], float]

    def take_soon(self, http_request: HttpRequest) -> None:
        """Parse its reads when there is time, within a beat."""

    def watch_closely(self, http_request: HttpRequest) -> None:
        """Check it often: its end may not show in its bytes."""


class HttpRequestOwner(Protocol):
    """Owner of a request: gets exactly one call, for the answer or the failure."""

    @property
    def run(self) -> RequestRun: ...

    def answered(self, http_request: HttpRequest) -> None:
        """Its answer is complete."""

    def failed(self, http_request: HttpRequest, failure: Failure) -> None:
        """It has failed and was dropped."""


class HttpRequest:
    """A request to one server and its answer: bytes and stamps are stored, then parsed when there is time. An
    ``urgent`` answer is parsed at each read."""

    __slots__ = (
        "_connection",
        "answer",
        "done",
        "ended",
        "fallbacks",
        "last_ns",
        "log",
        "owner",
        "pool",
        "queued",
        "reads",
        "sent_kernel_ns",
        "sent_ns",
        "sent_s",
        "transmissions",
        "urgent",
    )

    def __init__(
        self,
        owner: HttpRequestOwner,
        pool: ConnectionPool,
        body_limit: int = 0,
        *,
        keep_text: bool = False,
        keep_ids: bool = False,
    ) -> None:
        self.owner = owner
        self.pool = pool
        self.answer = ServerAnswer(body_limit, keep_text=keep_text, keep_ids=keep_ids)
        self.urgent = body_limit > 0
        self.log: Log = new_log()
        self.queued = self.ended = self.done = False
        self.sent_s: float | None = None
        self.sent_ns = 0
        self.sent_kernel_ns: int | None = None
        """When the kernel sent the last byte; known after the end."""
        self.transmissions: tuple[int, int] | None = None
        self.reads = self.fallbacks = 0
        self.last_ns: int | None = None
        self._connection: ServerConnection | None = None

    # sending

    def start(self, parts: Sequence[bytes]) -> None:
        """Send a request, over a new connection if none is idle."""
        connection = self.pool.take()
        if connection is not None:
            self._begin(connection, parts)
            return

        def opened(connection: ServerConnection | None, error: OSError | None) -> None:
            if self.ended:
                if connection is not None:
                    self.pool.release(connection)
            elif connection is not None:
                self._begin(connection, parts)
            elif not self.ended:
                self.fail("connect", str(error) or type(error).__name__)

        self.pool.open(opened)

    def _begin(self, connection: ServerConnection, parts: Sequence[bytes]) -> None:
        run = self.owner.run
        self._connection = connection
        connection.owner = self
        run.loop.stream(connection, self)
        if self.urgent:
            run.watch_closely(self)
        self.sent_s = run.monotonic()
        self.sent_ns = int(self.sent_s * 1e9)
        if not connection.send(parts):
            self.pool.wait_to_write(connection)

    def transmitted(self, written: int, stamp: bytes) -> None:
        """Record the kernel's stamp of the moment when ``written`` bytes of the connection had been sent."""
        self.transmissions = written, self.owner.run.clock.monotonic_ns(stamp)

    # receiving

    def noticed(self, what: bytes | OSError) -> None:
        """Handle a read that may be the last, the end (no bytes), or a failure, from the loop."""
        if self.ended:
            return
        if isinstance(what, OSError):
            self._closed(what)
        elif not what:
            self._closed(None)
        elif self.urgent:
            self.take_all()
        # A chunked answer ends with an empty line after another line, unless a read splits it.
        elif what[-4:] == b"\r\n\r\n" or len(what) < 4 or not self.answer.head_seen:
            self.owner.run.take_soon(self)

    def first_token_ns(self) -> int | None:
        tokens = self.answer.stream.token_stamps
        return tokens[0] if tokens else None

    def take(self) -> bool:
        log = self.log
        if self.ended or not log:
            return False
        run, answer = self.owner.run, self.answer
        taken = log.take(READS_AT_ONCE, self.sent_ns, run.clock.offset_ns)
        reads, came_ns, lags_ns, doubts_ns, useless, text = taken
        run.figures.read(lags_ns, useless)
        stamps = memoryview(came_ns).cast("q")
        self.reads += len(stamps)
        self.last_ns = stamps[-1]
        self.fallbacks += useless
        answer.take(reads, stamps, memoryview(doubts_ns).cast("i"), text)
        if answer.complete:
            self._finish()
        elif answer.malformed:
            self.fail("bad_stream", answer.malformed)
        elif answer.head_seen and not answer.chunked:
            # Its end does not show in its bytes.
            self.urgent = True
            run.watch_closely(self)
        elif not log and (expected := answer.expected()) is not None:
            log.expect(*expected)
        return bool(log) and not self.ended

    def take_all(self) -> None:
        while self.take():
            pass

    def _closed(self, error: OSError | None) -> None:
        self.take_all()
        if self.ended:
            return
        if error is None:
            self.answer.closed()
        if self.answer.complete:
            self._finish()
        elif error is None:
            self.fail("early_close", "the connection was closed")
        else:
            self.fail("reset", str(error) or type(error).__name__)

    def _finish(self) -> None:
        connection, answer = self._connection, self.answer
        assert connection is not None
        self.done = True
        self._end()
        if answer.keep_alive and not answer.surplus and not self.log and not connection.unsent:
            connection.last_used = self.owner.run.monotonic()
            self.pool.release(connection)
        else:
            self.pool.drop(connection)
        self.owner.answered(self)

    def fail(self, error: RequestError, detail: str) -> None:
        """End it with an error, drop its connection, and notify the owner."""
        self.drop()
        self.owner.failed(self, (error, detail))

    def drop(self) -> None:
        """End it and drop its connection; earlier reads are still parsed."""
        if self.ended:
            return
        self._end()
        if self._connection is not None:
            self.pool.drop(self._connection)

    def release(self) -> None:
        """Break the cycle with the owner after the record was made; garbage collection is off."""
        del self.owner
        self.log = new_log()

    def _end(self) -> None:
        self.ended = True
        self.answer.release()
        connection = self._connection
        if connection is None:
            return
        connection.owner = None
        self.owner.run.loop.end_stream(connection.fd)
        if self.transmissions is not None and not connection.unsent:
            written, when_ns = self.transmissions
            if (written - connection.written) & _ID_BITS == 0 and when_ns >= self.sent_ns - SLACK_NS:
                self.sent_kernel_ns = when_ns
