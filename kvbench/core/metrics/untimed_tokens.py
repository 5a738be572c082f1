"""Arrival of tokens in a stream: those outside its first and last text, and the busiest second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvbench.core.records import RequestRecord

MERGED: Final = 1.05
"""Average tokens per event from which merging is no accident."""
AT_ONCE_TOKEN_S: Final = 1e-4
"""Time per token below which it was produced earlier: no model decodes one sequence faster."""
MOST_TEXT: Final = 16
"""Bytes per token, on average, above which a text contains more than its tokens; random tokens of a
vocabulary of 150,000 have 7. Since February 2026 vLLM repeats the prompt in the first event if the prompt
ends within a character (issue 48853), as 1 % of random prompts do."""


@dataclass(frozen=True)
class StreamShape:
    """Content of a stream's events. Lengths of texts in bytes: ``first_text`` of the first text event,
    ``text`` of all; 0 if unknown. ``first_tokens``: tokens by the usage of the first event, if every event
    reports it. ``empty``: untimed events without text, of which ``outside`` came before the first text or
    after the last token."""

    first_text: int = 0
    text: int = 0
    first_tokens: int | None = None
    empty: int = 0
    outside: int = 0


def untimed_tokens(tokens: int, gaps_s: Sequence[float], shape: StreamShape) -> float:
    """Return the untimed tokens (at least 1) of an answer whose text events were ``gaps_s`` apart. Time per
    token is (last − first) / (tokens − untimed tokens). Untimed are tokens that came with the first text:

    - by the usage in that event, if reported; otherwise, if events have several tokens, the same share of the
      tokens as of the text, or an equal share per event if the text is unknown or contains more than the
      tokens. Events within 0.1 ms of each other were sent together, and count as one. Example: bundles of 16
      tokens at 5 ms each come 80 ms apart; for an answer of 64 tokens ``tokens`` − 1 would give 3.8 ms per
      token;
    - and tokens without text before the first or after the last text, such as parts of a character or ignored
      end-of-sequence tokens: as many as events without text, if there are more tokens than events with
      text."""
    events, together = len(gaps_s) + 1, 1
    for gap_s in gaps_s:
        if gap_s > AT_ONCE_TOKEN_S:
            break
        together += 1
    textless = max(0, tokens - events)
    outside = min(textless, shape.outside)
    most = tokens - outside - (events - together)  # each later event has at least one
    first = 1.0
    if shape.first_tokens is not None and 1 <= shape.first_tokens <= most:
        first = float(shape.first_tokens)
    elif tokens > MERGED * (events + min(textless, shape.empty)):
        inside = tokens - outside
        known = 0 < shape.text <= MOST_TEXT * inside
        first = inside * shape.first_text / shape.text if known else inside / events
        first = max(1.0, first) * together
    return max(1.0, min(max(first, float(together)), float(most)) + outside)


def peak_output(records: Sequence[RequestRecord]) -> float | None:
    """Return the most output tokens of answered requests in one second, with seconds counted from the first
    send, as in ``vllm bench serve``. That tool counts events; here each event counts as the average number of
    tokens per event. Without times of single events, tokens are spread evenly from the first to the last."""
    done = [record for record in records if record.ok and record.first_token_s is not None]
    if not done:
        return None
    gaps = [_gaps_s(record) for record in done]
    events = np.array([len(gap) + 1 for gap in gaps])
    first = np.array([record.first_token_s for record in done])
    # One cumulative sum over all gaps, minus its value at each request's first event.
    summed = np.cumsum(np.concatenate([part for gap in gaps for part in ([0.0], gap)]))
    times = summed + np.repeat(first - summed[np.cumsum(events) - events], events)
    tokens = np.repeat(np.array([record.output_len for record in done]) / events, events)
    start_s = min(record.scheduled_s if record.sent_s is None else record.sent_s for record in done)
    return float(np.bincount(np.maximum(times - start_s, 0.0).astype(np.int64), tokens).max())


def _gaps_s(record: RequestRecord) -> Sequence[float]:
    """Return the times between the events of an answered request, evenly spread where unknown."""
    if len(record.itl_s) or record.output_len < 2 or record.first_token_s is None:
        return record.itl_s
    gaps = record.output_len - 1
    last_s = record.first_token_s if record.last_token_s is None else record.last_token_s
    return [(last_s - record.first_token_s) / gaps] * gaps
