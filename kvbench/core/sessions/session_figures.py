"""What a trial of sessions shows beside its requests: sessions at once, TTFT by turn, reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvbench.core.records import RequestRecord
from kvbench.core.sessions.session_load import SessionLoad

BY_TURN: Final = 64
"""TTFT is told for so many turns by themselves."""


def session_figures(
    records: Sequence[RequestRecord], load: SessionLoad, window_s: tuple[float, float], pool_tokens: int
) -> dict[str, Any]:
    """As they stand in a trial's record; times in ms but for ``session_s``, reuse as shares of the whole
    blocks of all prompts that were sent. ``pool_tokens``: what the caches hold that prompts are looked up in.
    """
    begin_s, end_s = window_s
    inside = [each for each in records if begin_s <= each.scheduled_s <= end_s and each.ok]
    took = [each.session_s for each in inside if each.session_s is not None]
    ttft: dict[int, list[float]] = {}
    for each in inside:
        if each.ttft_s is not None and each.turn is not None:
            ttft.setdefault(each.turn, []).append(1e3 * each.ttft_s)
    later = [value for turn, values in ttft.items() if turn for value in values]
    return {
        "begun": len({each.session for each in records if each.session is not None}),
        "ended": len(took),
        "at_once": _at_once(records, begin_s, end_s),
        "session_s": _quantiles(took),
        "first_ttft_ms": _quantiles(ttft.get(0, [])),
        "later_ttft_ms": _quantiles(later),
        "ttft_ms_by_turn": [
            [turn, len(ttft[turn]), float(np.median(ttft[turn]))] for turn in sorted(ttft) if turn < BY_TURN
        ],
        **_reuse(records, load, pool_tokens),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.quantile(np.asarray(values, float), (0.5, 0.9, 0.95))
    return dict(zip(("p50", "p90", "p95"), found.tolist(), strict=True))


def _at_once(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> float | None:
    """Sessions under way, in the mean: from their begin to their last answer, think times included."""
    if end_s <= begin_s:
        return None
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    over: set[int] = set()
    for each in records:
        if each.session is None:
            continue
        starts.setdefault(each.session, each.scheduled_s)
        ends[each.session] = max(ends.get(each.session, 0.0), each.last_token_s or each.scheduled_s)
        if each.session_s is not None or not each.ok:
            over.add(each.session)
    spans = (
        min(end_s, ends[number] if number in over else end_s) - max(begin_s, start_s)
        for number, start_s in starts.items()
    )
    return sum(max(0.0, span) for span in spans) / (end_s - begin_s)


def _reuse(records: Sequence[RequestRecord], load: SessionLoad, pool_tokens: int) -> dict[str, Any]:
    """Offered and achieved over what was answered; of all prompts in the order of sending."""
    sent = [int(each.request_id.rpartition("-")[2]) for each in records if each.sent_s is not None]
    whole = load.prompt_tokens(sent)
    if not whole:
        return {}
    unlimited, held = load.offered_tokens(sent, (None, pool_tokens))
    found = sum(each.cached_tokens or 0 for each in records)
    return {
        "pool_tokens": pool_tokens,
        "offered_reuse": unlimited / whole,
        "offered_reuse_in_pool": held / whole,
        "achieved_reuse": found / whole,
    }
