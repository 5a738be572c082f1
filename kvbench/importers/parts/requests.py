"""A request from what a client logged of it: times on one clock, from the first planned send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.core.records import RequestError, RequestRecord


@dataclass(frozen=True)
class Seen:
    """One request as logged, in seconds on the client's clock; None: it did not happen, or is not told."""

    request_id: str
    scheduled_s: float
    sent_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    input_len: int
    output_len: int
    itl_s: Sequence[float] = ()
    error: str = ""


def records_of(seen: Sequence[Seen]) -> list[RequestRecord]:
    """The requests in the order of their planned sends, with times from the first of them."""
    if not seen:
        return []
    start = min(each.scheduled_s for each in seen)
    ordered = sorted(seen, key=lambda each: each.scheduled_s)
    return [_record(each, start) for each in ordered]


def _record(seen: Seen, start: float) -> RequestRecord:
    moved = replace(
        seen,
        scheduled_s=seen.scheduled_s - start,
        sent_s=None if seen.sent_s is None else seen.sent_s - start,
        first_token_s=None if seen.first_token_s is None else seen.first_token_s - start,
        last_token_s=None if seen.last_token_s is None else seen.last_token_s - start,
    )
    kind: RequestError = ""
    if seen.error or moved.first_token_s is None:
        kind = "no_answer" if moved.first_token_s is None else "early_close"
    return RequestRecord(
        request_id=moved.request_id,
        scheduled_s=moved.scheduled_s,
        input_len=moved.input_len,
        requested_output_len=moved.output_len,
        sent_s=moved.sent_s,
        first_token_s=moved.first_token_s,
        last_token_s=moved.last_token_s,
        output_len=moved.output_len,
        itl_s=list(moved.itl_s),
        error=kind,
        error_detail=moved.error[-300:],
    )
