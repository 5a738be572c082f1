"""One request on its way, and the record it becomes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvbench.core.records import ROUTER_TIMES, RequestError, RequestRecord, timing_header
from kvbench.http1 import ClientConnection
from kvbench.loadgen.spec import LoadSpec, PlannedRequest
from kvbench.loadgen.stream import StreamReader, clipped, whole_body_error

if TYPE_CHECKING:
    from kvbench.loadgen.trial import Trial

READS_PER_SLICE: Final = 24
"""Reads parsed before the event loop gets its turn: about 0.1 ms."""
DECIMALS: Final = 7
"""Times in the records are rounded to 0.1 µs, which keeps the file small and is below the clock's noise."""


class Exchange:
    """A sink for one answer that keeps bytes and stamps; ``settle`` finds out later what they mean."""

    __slots__ = (
        "connection",
        "ended",
        "failure",
        "first_stamp",
        "headers",
        "parts",
        "plan",
        "record",
        "scheduled",
        "sent",
        "stamps",
        "status",
        "trial",
    )

    def __init__(self, trial: Trial, plan: PlannedRequest, scheduled: float, record: RequestRecord) -> None:
        self.trial = trial
        self.plan = plan
        self.scheduled = scheduled
        self.record = record
        self.sent: float | None = None
        self.connection: ClientConnection | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.stamps: list[float] = []
        self.first_stamp: float | None = None
        self.failure: tuple[RequestError, str] | None = None
        self.ended = False

    # the sink

    def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
        self.status = status
        self.headers = headers

    def on_body(self, data: bytes, stamp: float) -> None:
        self.parts.append(data)
        self.stamps.append(stamp)
        # Only for the progress lines; the record's first token is read from the events.
        if self.first_stamp is None and b'"choices"' in data:
            self.first_stamp = stamp
            self.trial.first_token(self)

    def on_end(self) -> None:
        self.ended = True
        self.trial.finished(self)

    def on_failure(self, cause: str, malformed: bool) -> None:
        self.fail("bad_stream" if malformed else "early_close", cause)

    def fail(self, error: RequestError, detail: str) -> None:
        """Ends the exchange from outside: no connection, past its deadline, cancelled, closed early."""
        self.failure = (error, detail)
        if self.connection is not None:
            self.connection.abort()
        self.trial.finished(self)

    # after the end

    def settle(self, spec: LoadSpec, start: float) -> Iterator[None]:
        """Fills in the record, a slice of the work for each step. Times become seconds since ``start``."""
        record = self.record
        reader = StreamReader()
        for index, (data, stamp) in enumerate(zip(self.parts, self.stamps, strict=True), start=1):
            reader.feed(data, stamp)
            if index % READS_PER_SLICE == 0:
                yield
        reader.finish(whole=self.failure is None)
        stamps = reader.token_stamps
        if self.sent is not None:
            record.sent_s = round(self.sent - start, DECIMALS)
        record.status = self.status
        if stamps and self.status == 200:
            record.first_token_s = round(stamps[0] - start, DECIMALS)
            record.last_token_s = round(stamps[-1] - start, DECIMALS)
            record.itl_s = [round(b - a, DECIMALS) for a, b in pairwise(stamps)]
            self._take_router_times(start, stamps[0])
        record.output_len = reader.completion_tokens or 0
        record.error, record.error_detail = self._class(reader, spec)
        self.parts.clear()
        self.stamps.clear()

    def _take_router_times(self, start: float, first_token: float) -> None:
        """The router's times, if it told them and its clock is ours: within this request's first token."""
        times = {}
        for name in ROUTER_TIMES:
            try:
                times[name] = float(self.headers[timing_header(name)])
            except (KeyError, ValueError):
                continue
        if self.sent is None or not all(self.sent - 1e-3 <= t <= first_token + 1e-3 for t in times.values()):
            return
        for name, time_s in times.items():
            setattr(self.record, name, round(time_s - start, DECIMALS))

    def _class(self, reader: StreamReader, spec: LoadSpec) -> tuple[RequestError, str]:
        """The class of failure, the most telling first; ("", "") is success."""
        if self.failure is not None and self.failure[0] in ("connect", "cancelled"):
            return self.failure
        if self.status not in (0, 200):
            return "http_error", self._http_detail()
        if self.failure is not None and self.failure[0] != "early_close":
            return self.failure
        if reader.error:
            no_stream = reader.error == "bad_stream" and not reader.token_stamps
            return whole_body_error(b"".join(self.parts)) if no_stream else (reader.error, reader.detail)
        if self.failure is not None:
            return self.failure
        if not reader.done:
            return "early_close", "the stream ended without [DONE]"
        if reader.completion_tokens is None:
            return "bad_stream", "the stream carries no usage, so its tokens cannot be counted"
        if reader.completion_tokens != spec.output_len:
            return "wrong_length", f"{reader.completion_tokens} tokens instead of {spec.output_len}"
        if not reader.token_stamps:
            return "bad_stream", "the stream carries no token events"
        return "", ""

    def _http_detail(self) -> str:
        location = self.headers.get("location")
        where = f"redirect to {location}; " if location else ""
        body = clipped(b"".join(self.parts))
        return f"HTTP {self.status}: {where}{body}"
