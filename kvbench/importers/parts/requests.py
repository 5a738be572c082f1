"""A request from what a client logged of it: times on one clock, from the first planned send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.core.records import RequestError, RequestRecord


@dataclass(frozen=True)
class LoggedRequest:
    """One request as logged, in seconds on the client's clock; None: it did not happen, or is not known."""

    request_id: str
    scheduled_s: float
    sent_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    input_len: int
    output_len: int
    itl_s: Sequence[float] = ()
    error: str = ""


def records_of(seen: Sequence[LoggedRequest]) -> list[RequestRecord]:
    """The requests in the order of their planned sends, with times from the first of them."""
    ordered = sorted(seen, key=lambda each: each.scheduled_s)
    return [_record(each, ordered[0].scheduled_s) for each in ordered]


def _record(seen: LoggedRequest, start: float) -> RequestRecord:
    sent_s, first_s, last_s = (
        None if moment is None else moment - start
        for moment in (seen.sent_s, seen.first_token_s, seen.last_token_s)
    )
    kind: RequestError = "no_answer" if first_s is None else "early_close" if seen.error else ""
    return RequestRecord(
        request_id=seen.request_id,
        scheduled_s=seen.scheduled_s - start,
        input_len=seen.input_len,
        requested_output_len=seen.output_len,
        sent_s=sent_s,
        first_token_s=first_s,
        last_token_s=last_s,
        output_len=seen.output_len,
        itl_s=list(seen.itl_s),
        error=kind,
        error_detail=seen.error[-300:],
    )
