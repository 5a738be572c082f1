"""Where the time to the first token goes: router, P, hand-off, transfer, D. Pure.

``ttft_breakdown`` gives means over a trial in milliseconds, ``parts_of`` one request's parts in seconds, from
the client's TTFT, the router's times (in direct mode the load generator's), and the engines' histograms:

- ``router``: TTFT that is neither P's nor D's: client, network, router. Without P/D: all that is not the
  engine's queue or prefill, so its HTTP front end, too.
- ``prefill_queue``, ``prefill``: P's ``request_queue_time_seconds`` and ``request_prefill_time_seconds``.
- ``kv_transfer``: mean time of a transfer as the engine reports it; with parallel ranks, that of one.
- ``first_decode_step``: D's mean gap between two tokens in this trial, since no engine reports it.
- ``decode_queue``: the rest of D's queue and prefill time, which include the transfer.
- ``hand_off``: the rest between P's last compute and D having the request: front ends and the router's turn.

The parts add up to the TTFT. An unknown part is None and its time is in another one: ``decode_queue`` (with
concurrent dispatch) and ``router`` (without its times) in ``hand_off``; ``kv_transfer`` in ``decode_queue``
(sequential) or ``hand_off`` (concurrent). The histograms also count failed requests, so P's and D's parts are
cut to the router's wait for them. Without its times a part below zero is shown as 0, and the sum exceeds the
TTFT by that much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from kvbench.core.records import RequestRecord

PARTS: Final = (
    "router",
    "prefill_queue",
    "prefill",
    "hand_off",
    "kv_transfer",
    "decode_queue",
    "first_decode_step",
)
"""Parts in their order of time."""

PART_WORDS: Final = {
    "router": "router and client",
    "prefill_queue": "prefill queue",
    "prefill": "prefill",
    "hand_off": "hand-off",
    "kv_transfer": "KV transfer",
    "decode_queue": "decode queue",
    "first_decode_step": "first decode step",
}
"""Names of the parts in tables and plots."""


@dataclass(frozen=True)
class RouterTimes:
    """The router's times of a request, in seconds: P's and D's answers as it waited for them. ``hand_off``:
    from P's answer to the request to D; None with concurrent dispatch. ``prefill`` is None if D's first byte
    mostly came before P's answer, which can only be then."""

    prefill: float | None
    decode: float
    hand_off: float | None


@dataclass(frozen=True)
class Phases:
    """Mean seconds of a request in one role's engines, and between two tokens."""

    queue: float | None = None
    prefill: float | None = None
    token_gap: float | None = None

    @property
    def residence(self) -> float | None:
        """Return the time from arrival at the engine to the first token."""
        return None if self.queue is None or self.prefill is None else self.queue + self.prefill


def ttft_breakdown(
    ttft_s: float | None,
    prefill: Phases | None,
    decode: Phases | None,
    router: RouterTimes | None = None,
    kv_s: float | None = None,
) -> dict[str, float | None]:
    """Return the parts of the TTFT in milliseconds by name; None: unknown. ``decode`` is None without P/D."""
    parts: dict[str, float | None] = dict.fromkeys(PARTS)
    if router is not None:
        # With concurrent dispatch, D has its first token only after P has finished.
        limit_s = router.decode if router.hand_off is None else router.prefill
        prefill, decode = _within(prefill, limit_s), _within(decode, router.decode)
    if prefill is not None:
        parts["prefill_queue"], parts["prefill"] = prefill.queue, prefill.prefill
    if ttft_s is None:
        return _milliseconds(parts)
    residence = prefill.residence if prefill is not None else None
    if decode is None:
        if residence is not None:
            parts["router"] = ttft_s - residence
        return _milliseconds(parts)
    concurrent = router is not None and router.hand_off is None
    inside = ttft_s
    if router is not None:
        inside = router.decode
        if router.hand_off is not None:
            inside += router.hand_off + (router.prefill or 0.0)
        parts["router"] = ttft_s - inside
    if decode.residence is None:
        parts["kv_transfer"] = kv_s
        return _milliseconds(parts)
    parts["kv_transfer"] = kv_s = None if kv_s is None else min(kv_s, decode.residence)
    left = decode.residence - (kv_s or 0.0)
    if decode.token_gap is not None:
        step = parts["first_decode_step"] = min(decode.token_gap, left)
        left -= step
    if not concurrent:
        parts["decode_queue"] = left
        if residence is not None:
            parts["hand_off"] = inside - residence - decode.residence
    elif residence is not None:
        _share_concurrent(parts, inside - residence)
    return _milliseconds(parts)


def hand_off_parts(
    prefill: Phases | None, decode: Phases | None, router: RouterTimes | None
) -> dict[str, float | None]:
    """Split ``hand_off`` (ms) into P's front end, the router and D's front end, if known."""
    parts: dict[str, float | None] = dict.fromkeys(("prefill_front_end", "router_turn", "decode_front_end"))
    if router is None or router.hand_off is None:
        return parts
    parts["router_turn"] = router.hand_off
    if prefill is not None and prefill.residence is not None and router.prefill is not None:
        parts["prefill_front_end"] = router.prefill - prefill.residence
    if decode is not None and decode.residence is not None:
        parts["decode_front_end"] = router.decode - decode.residence
    return _milliseconds(parts)


def _share_concurrent(parts: dict[str, float | None], left: float) -> None:
    """Split the rest with concurrent dispatch: step, transfer, remainder."""
    for name in ("first_decode_step", "kv_transfer"):
        if (part := parts[name]) is not None:
            part = parts[name] = min(part, max(0.0, left))
            left -= part
    parts["hand_off"] = left


def _within(phases: Phases | None, limit_s: float | None) -> Phases | None:
    """Return the phases, scaled down to the router's wait."""
    if limit_s is None or phases is None or phases.queue is None or phases.prefill is None:
        return phases
    share = min(1.0, limit_s / (phases.queue + phases.prefill)) if phases.queue + phases.prefill > 0 else 1.0
    return replace(phases, queue=phases.queue * share, prefill=phases.prefill * share)


def _milliseconds(parts: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else max(0.0, value * 1e3) for name, value in parts.items()}


@dataclass(frozen=True)
class Parts:
    """Seconds of one request before P, at P, after P. ``back``: from D's first byte to the client."""

    client: float
    router: float
    prefill: float
    after: float | None
    """None without P/D."""


def parts_of(record: RequestRecord) -> Parts | None:
    """Return the parts of a request; None without its times."""
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
        # Without P/D, the router's decode time is the whole time at the server.
        return Parts(client, max(0.0, begun - sent) + max(0.0, first - byte), max(0.0, byte - begun), None)
    if byte is None:
        return None
    answered = min(record.prefill_answered_s or byte, byte)
    begun = max(answered, min(record.decode_sent_s or answered, byte))
    router = (record.prefill_sent_s - sent) + (begun - answered) + max(0.0, first - byte)
    return Parts(client, max(0.0, router), max(0.0, answered - record.prefill_sent_s), byte - begun)


def shares_of(
    late: Sequence[tuple[RequestRecord, Parts]], known: Sequence[tuple[RequestRecord, Parts]], kv_s: float
) -> dict[str, float]:
    """Return shares of the late requests' TTFT, waiting separate from working; they sum to 1."""
    floor_p = _floors((r, parts.prefill) for r, parts in known)
    floor_d = _floors((r, parts.after) for r, parts in known if parts.after is not None)
    sums = dict.fromkeys(
        ("client", "router", "prefill_wait", "prefill_work", "transfer", "decode_wait", "rest"), 0.0
    )
    after_all = fmean(parts.after or 0.0 for _, parts in known)
    kv_s = min(kv_s, after_all)
    moving = kv_s / after_all if after_all > 0 else 0.0
    for record, parts in late:
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
    """Return the bucket of similar lengths (factor of two)."""
    return record.input_len.bit_length()


def _floors(values: Iterable[tuple[RequestRecord, float]]) -> dict[int, float]:
    floors: dict[int, float] = {}
    for record, value in values:
        key = _length(record)
        floors[key] = min(value, floors.get(key, value))
    return floors
