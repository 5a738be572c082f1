"""One active request, and its record."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, Protocol

from kvbench.core.metrics.untimed_tokens import StreamShape, untimed_tokens
from kvbench.core.records import ROUTER_TIMES, RequestRecord, timing_header
from kvbench.processes.loadgen.answer import ServerAnswer
from kvbench.processes.loadgen.http_request import Failure, HttpRequest, RequestRun
from kvbench.processes.loadgen.plan import PlannedRequest
from kvbench.processes.loadgen.sockets.clock import gaps
from kvbench.processes.loadgen.sockets.pool import ConnectionPool
from kvbench.processes.loadgen.stream import PROMPT_ID_BYTES, clip, whole_body_error

DECIMALS: Final = 7
"""Decimals of recorded times in seconds: 0.1 µs, below the clocks' noise."""

_TIMING_HEADERS: Final = {name: timing_header(name) for name in ROUTER_TIMES}


class InFlightRun(RequestRun, Protocol):
    pools: Sequence[ConnectionPool]

    def finished(self, request: InFlightRequest) -> None:
        """Make the record of an ended request."""


class InFlightRequest:
    """A request of the plan, answered by one server; see ``direct`` for two. ``stream`` is the HTTP request
    whose answer has the tokens, once known. All objects are made before the request is due, so that only the
    send is left."""

    def __init__(self, run: InFlightRun, plan: PlannedRequest, scheduled_s: float) -> None:
        self.run = run
        self.place = self.index = plan.index
        """Index in the plan, and the number in the record: for turns the order of sending."""
        self.scheduled_s = scheduled_s
        self.record = RequestRecord(
            request_id=plan.request_id,
            scheduled_s=round(plan.offset_s, DECIMALS),
            input_len=plan.input_len,
            requested_output_len=plan.output_len,
            canary=plan.canary,
            session=plan.session,
            turn=plan.turn,
        )
        self._keeps_ids = plan.keeps_ids
        self.stream: HttpRequest | None = self._stream_request()
        self.over = False
        self.failure: Failure | None = None
        self.failed_request: HttpRequest | None = None

    def start(self, plan: PlannedRequest) -> None:
        """Send. The plan may drop the request's bytes afterwards."""
        assert self.stream is not None
        self.stream.start(plan.parts)

    def _stream_request(self) -> HttpRequest | None:
        return self._new_stream(self.run.pools[0])

    def _new_stream(self, pool: ConnectionPool) -> HttpRequest:
        """Make the streaming request; a canary's text is kept."""
        kept = self.record.canary is not None, self._keeps_ids
        streamed = HttpRequest(self, pool, keep_text=kept[0], keep_ids=kept[1])
        streamed.answer.stream.requested_tokens = self.record.requested_output_len
        if self._keeps_ids:
            streamed.answer.stream.event_bytes += PROMPT_ID_BYTES * self.record.input_len
        return streamed

    @property
    def http_requests(self) -> tuple[HttpRequest, ...]:
        return (self.stream,) if self.stream is not None else ()

    @property
    def chunks(self) -> int:
        return len(self.stream.answer.stream.token_stamps) if self.stream is not None else 0

    def answer_ids(self) -> list[int]:
        return (self.stream.answer.stream.token_ids if self.stream is not None else None) or []

    def answered(self, http_request: HttpRequest) -> None:
        """Handle the complete answer of one of its HTTP requests."""
        self._end()

    def failed(self, http_request: HttpRequest, failure: Failure) -> None:
        self.end(failure, http_request)

    def end(self, failure: Failure, http_request: HttpRequest | None = None) -> None:
        """End the request: no connection, past its deadline, cancelled, closed early."""
        for request in self.http_requests:
            request.take_all()  # the rest may show that it has ended
        if self.over:
            return
        self.failure, self.failed_request = failure, http_request
        for request in self.http_requests:
            request.drop()
        self._end()

    def _end(self) -> None:
        self.over = True
        self.run.finished(self)
        for http_request in self.http_requests:
            http_request.release()

    # after the end

    def settle(self, start_s: float) -> RequestRecord:
        """Return the record, with times in seconds since ``start_s``."""
        record, http_request = self.record, self.stream
        start_ns = int(start_s * 1e9)
        first_ns = min((request.sent_ns for request in self.http_requests if request.sent_ns), default=None)
        record.sent_s = relative_s(first_ns, start_ns)
        first_http_request = self.first_http_request()
        record.sent_kernel_s = relative_s(
            first_http_request.sent_kernel_ns if first_http_request else None, start_ns
        )
        if http_request is not None:
            self._take_stream(http_request, start_s, start_ns)
        record.error, record.error_detail = self._class()
        return record

    def first_http_request(self) -> HttpRequest | None:
        return self.stream

    def _take_stream(self, http_request: HttpRequest, start_s: float, start_ns: int) -> None:
        record, answer = self.record, http_request.answer
        stream = answer.stream
        stream.finish(whole=self.failure is None)
        record.status = answer.status
        record.output_len = stream.completion_tokens or 0
        record.prompt_tokens = stream.prompt_tokens
        if http_request.reads:
            record.stamps = "read" if http_request.fallbacks else "kernel"
        if stream.event_seen and answer.status == 200:
            record.text_bytes, record.empty_events = stream.text_bytes, stream.empty_events
            record.first_event_s = relative_s(stream.first_event_stamp, start_ns)
        if stream.kept is not None:
            record.text = stream.kept.decode("utf-8", "replace")
        tokens = stream.token_stamps
        if not tokens and self._one_without_text() and http_request.last_ns is not None:
            # A token without text, such as half a character: it came no later than the answer's end.
            record.first_token_s = record.last_token_s = relative_s(http_request.last_ns, start_ns)
        elif tokens and answer.status == 200:
            record.text_crc = stream.text_crc
            record.first_token_s = relative_s(tokens[0], start_ns)
            assert isinstance(tokens, array)
            after = stream.tokens_after
            timed = tokens + array("q", after)
            record.last_token_s = relative_s(timed[-1], start_ns)
            record.itl_s = array("f", gaps(timed))
            if (first := stream.first_event) is not None:
                record.first_blank = first.blank
                untimed = stream.empty_events - len(after)
                outside = first.empty_before + len(stream.empty_after) - len(after)
                shape = StreamShape(first.text_bytes, stream.text_bytes, first.tokens, untimed, outside)
                record.untimed_tokens = untimed_tokens(record.output_len, record.itl_s, shape)
            self._take_router_times(answer.headers, start_s, tokens[0] / 1e9)

    def _take_router_times(self, headers: dict[str, str], start_s: float, first_token_s: float) -> None:
        """Take the router's times if it used this clock: within this request's first token."""
        times = {}
        for name, header in _TIMING_HEADERS.items():
            if (value := headers.get(header)) is not None:
                try:
                    times[name] = float(value)
                except ValueError:
                    continue
        if not times or self.record.sent_s is None:
            return
        sent_s = self.record.sent_s + start_s
        if all(sent_s - 1e-3 <= time_s <= first_token_s + 1e-3 for time_s in times.values()):
            for name, time_s in times.items():
                setattr(self.record, name, round(time_s - start_s, DECIMALS))

    def _class(self) -> Failure:
        """Return the class of failure, most specific first; ("", "") is success."""
        failure = self.failure
        if failure is not None and failure[0] in ("connect", "cancelled"):
            return failure
        http_request = self.stream
        if http_request is None:
            assert failure is not None
            return failure
        answer = http_request.answer
        if answer.status not in (0, 200):
            return http_failure(answer)
        if failure is not None and failure[0] == "timeout" and not http_request.reads:
            return timeout_failure(http_request, failure)
        if failure is not None and failure[0] not in ("early_close", "reset"):
            return failure
        return _stream_failure(answer, failure) or self._length_failure(answer)

    def _one_without_text(self) -> bool:
        """Whether the answer is one token, as requested, without text."""
        assert self.stream is not None
        stream = self.stream.answer.stream
        return stream.completion_tokens == self.record.requested_output_len == 1 and stream.empty_events > 0

    def _length_failure(self, answer: ServerAnswer) -> Failure:
        tokens, wanted = answer.stream.completion_tokens, self.record.requested_output_len
        if tokens is None:
            return "bad_stream", "the stream carries no usage, so its tokens cannot be counted"
        if tokens != wanted:
            return "wrong_length", f"{tokens} tokens instead of {wanted}"
        if not answer.stream.token_stamps and not self._one_without_text():
            empty = answer.stream.empty_events
            why = f": all of its {empty} token events are without text" if empty else ""
            return "bad_stream", f"the answer has no text, so the time of its first token is unknown{why}"
        ids = answer.stream.token_ids
        if ids is not None and len(ids) != tokens:
            return "bad_stream", (
                f"the answer has {len(ids)} token ids of {tokens} tokens: for a server without "
                "return_token_ids set workload.sessions.answers: recorded"
            )
        return "", ""


def _stream_failure(answer: ServerAnswer, failure: Failure | None) -> Failure | None:
    """Return the failure of the stream itself, or of its end."""
    stream = answer.stream
    if stream.error:
        if stream.error == "bad_stream" and not stream.token_stamps and not stream.event_seen:
            return whole_body_error(bytes(answer.body))
        return stream.error, stream.detail
    if failure is not None:
        if failure[0] == "early_close" and stream.half:
            return "half_event", "the connection was closed in the middle of an event"
        return failure
    if stream.half:
        return "half_event", "the stream ended in the middle of an event, without [DONE]"
    if not stream.done:
        return "early_close", "the stream ended without [DONE]"
    return None


def timeout_failure(http_request: HttpRequest, failure: Failure) -> Failure:
    """Return the failure of a request that timed out before any answer."""
    if http_request.sent_s is None:
        return "connect", "no connection was open when the request's time was up"
    return "no_answer", failure[1].replace("no complete answer", "nothing of an answer")


def http_failure(answer: ServerAnswer) -> Failure:
    """Return the failure for a status other than 200."""
    body = clip(bytes(answer.body))
    if 300 <= answer.status < 400:
        return (
            "redirect",
            f"HTTP {answer.status}: redirect to {answer.headers.get('location', 'nowhere')}; {body}",
        )
    return "http_error", f"HTTP {answer.status}: {body}"


def relative_s(when_ns: int | None, start_ns: int) -> float | None:
    return None if when_ns is None else round((when_ns - start_ns) / 1e9, DECIMALS)
