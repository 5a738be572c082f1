"""The TTFT of single requests cut into parts by the client's and the router's times. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvbench.core.records import RequestRecord


@dataclass(frozen=True)
class Parts:
    """Seconds of one request: before P, at P, after P. ``back``: from D's first byte to the client."""

    client: float
    router: float
    prefill: float
    after: float | None
    """None without P/D."""


def parts_of(record: RequestRecord) -> Parts | None:
    """None where its times are not known."""
    first, sent = record.first_token_s, record.sent_s
    if first is None or sent is None:
        return None
    client = max(0.0, sent - record.scheduled_s)
    byte = record.decode_first_byte_s
    if record.prefill_sent_s is None:
        begun = record.decode_sent_s
        if begun is None:
            return Parts(client, 0.0, first - sent, None)
        if byte is None:
            return None
        # Engines without P/D behind the router: what it calls decode is all that there is.
        return Parts(client, max(0.0, begun - sent) + max(0.0, first - byte), max(0.0, byte - begun), None)
    if byte is None:
        return None
    answered = min(record.prefill_answered_s or byte, byte)
    begun = max(answered, min(record.decode_sent_s or answered, byte))
    router = (record.prefill_sent_s - sent) + (begun - answered) + max(0.0, first - byte)
    return Parts(client, max(0.0, router), max(0.0, answered - record.prefill_sent_s), byte - begun)


def shares_of(
    mine: Sequence[tuple[RequestRecord, Parts]],
    known: Sequence[tuple[RequestRecord, Parts]],
    kv_s: float,
) -> dict[str, float]:
    """Parts of the late requests' TTFT, waiting apart from working; they sum to 1."""
    floor_p = _floors((r, parts.prefill) for r, parts in known)
    floor_d = _floors((r, parts.after) for r, parts in known if parts.after is not None)
    sums = dict.fromkeys(
        ("client", "router", "prefill_wait", "prefill_work", "transfer", "decode_wait", "rest"), 0.0
    )
    after_all = fmean(parts.after or 0.0 for _, parts in known)
    kv_s = min(kv_s, after_all)
    moving = kv_s / after_all if after_all > 0 else 0.0
    for record, parts in mine:
        work = min(floor_p[_length(record)], parts.prefill)
        sums["client"] += parts.client
        sums["router"] += parts.router
        sums["prefill_work"] += work
        sums["prefill_wait"] += parts.prefill - work
        if parts.after is not None:
            transfer = parts.after * moving
            idle = min(floor_d[_length(record)], parts.after - transfer)
            sums["transfer"] += transfer
            sums["rest"] += idle
            sums["decode_wait"] += parts.after - transfer - idle
    total = sum(sums.values())
    return {name: value / total if total > 0 else 0.0 for name, value in sums.items()}


def _length(record: RequestRecord) -> int:
    """Requests of about one length are compared with each other: within a factor of two."""
    return record.input_len.bit_length()


def _floors(values: Iterable[tuple[RequestRecord, float]]) -> dict[int, float]:
    floors: dict[int, float] = {}
    for record, value in values:
        key = _length(record)
        floors[key] = min(value, floors.get(key, value))
    return floors
