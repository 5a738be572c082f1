"""The spans of a traced request as the router sees it: what it waited for at P and at D."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.processes.common.spans import Span
from kvbench.processes.router.backend_request import Timing


def request_spans(timing: Timing, began_s: float, ended_s: float, error: str) -> Iterator[Span]:
    """The request from its arrival to the end of its answer, then what P and D did as far as they came."""
    yield Span("request", began_s, ended_s, {"error": error} if error else {})
    sent, answered = timing.prefill_sent, timing.prefill_answered
    if sent is not None:
        yield Span("prefill call", sent, ended_s if answered is None else answered)
    if timing.decode_sent is None:
        return
    if answered is not None and answered <= timing.decode_sent:
        yield Span("hand-off", answered, timing.decode_sent)
    yield Span("decode call", timing.decode_sent, ended_s)
    if timing.decode_first_byte is not None:
        yield Span("first byte from D", timing.decode_sent, timing.decode_first_byte)
