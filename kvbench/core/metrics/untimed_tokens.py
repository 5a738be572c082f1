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
"""Bytes a token, on average, beyond which a text has more in it than its tokens: random ones of a vocabulary
of 150,000 have 7. vLLM since February 2026 repeats a whole prompt in the first event where it ends within a
character (issue 48853), as 1 % of random prompts do."""


@dataclass(frozen=True)
class StreamShape:
    """How a stream's events were filled. Texts in bytes. ``first_text``, ``text``: of the first text event,
    and of all; 0 where that is not known. ``told``: tokens by the usage in the first event, of a server that
    tells it all along. ``empty``: events without text, of which ``outside`` came before the first text or
    after the last."""

    first_text: int = 0
    text: int = 0
    told: int | None = None
    empty: int = 0
    outside: int = 0


def untimed_tokens(tokens: int, gaps_s: Sequence[float], shape: StreamShape) -> float:
    """Return the untimed tokens (at least 1) of an answer whose text events were ``gaps_s`` apart.

    A time per token is (last − first) / (tokens − these). They are those that came with the first text:

    - by the usage there, if reported; else, where events bring several, as large a part of the tokens as of
      the text, or an even part if the text is not known, or is more than that of the tokens. Events within
      0.1 ms of each other were sent together, and count as one. Bundles of 16 tokens of 5 ms each come 80 ms
      apart, and with ``tokens`` − 1 would seem to take 3.8 ms of an answer of 64;
    - and tokens without text before the first or after the last, as parts of a character and ends of sequence
      that are ignored: events without text, as far as there are more tokens than events with text."""
    events, together = len(gaps_s) + 1, 1
    for gap_s in gaps_s:
        if gap_s > AT_ONCE_TOKEN_S:
            break
        together += 1
    textless = max(0, tokens - events)
    outside = min(textless, shape.outside)
    most = tokens - outside - (events - together)  # each later event brings one at least
    first = 1.0
    if shape.told is not None and 1 <= shape.told <= most:
        first = float(shape.told)
    elif tokens > MERGED * (events + min(textless, shape.empty)):
        inside = tokens - outside
        known = 0 < shape.text <= MOST_TEXT * inside
        first = inside * shape.first_text / shape.text if known else inside / events
        first = max(1.0, first) * together
    return max(1.0, min(max(first, float(together)), float(most)) + outside)


def peak_output(records: Sequence[RequestRecord]) -> float | None:
    """Most output tokens of answered requests in one second, the seconds counted from the first send. So does
    ``vllm bench serve``, which counts events; here an event counts as many tokens as it brought on average.
    Without times of single events, tokens are spread evenly from the first to the last."""
    done = [record for record in records if record.ok and record.first_token_s is not None]
    if not done:
        return None
    gaps = [_gaps_s(record) for record in done]
    events = np.array([len(each) + 1 for each in gaps])
    first = np.array([record.first_token_s for record in done])
    # One cumulative sum over all gaps, minus its value at each request's first event.
    summed = np.cumsum(np.concatenate([part for each in gaps for part in ([0.0], each)]))
    times = summed + np.repeat(first - summed[np.cumsum(events) - events], events)
    tokens = np.repeat(np.array([record.output_len for record in done]) / events, events)
    start_s = min(record.scheduled_s if record.sent_s is None else record.sent_s for record in done)
    return float(np.bincount(np.maximum(times - start_s, 0.0).astype(np.int64), tokens).max())


def _gaps_s(record: RequestRecord) -> Sequence[float]:
    """Times between the events of an answered request, evenly spread where they are not known."""
    if len(record.itl_s) or record.output_len < 2 or record.first_token_s is None:
        return record.itl_s
    gaps = record.output_len - 1
    last_s = record.first_token_s if record.last_token_s is None else record.last_token_s
    return [(last_s - record.first_token_s) / gaps] * gaps
