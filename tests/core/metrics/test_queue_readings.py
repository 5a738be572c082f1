"""A trial's queue as it is read from its beginning, or from the time when a load of sessions has filled."""

from __future__ import annotations

import numpy as np
import pytest
from serving import first_tokens

from kvbench.core.metrics.queue_growth import QueueReadings, queue_growth
from kvbench.core.records import RequestRecord


def test_a_load_that_began_later_is_read_as_one_that_began_then() -> None:
    """What an M/D/1 queue shows from 50 s on, beside the same queue with nothing before."""
    random = np.random.default_rng(3)
    offsets = np.cumsum(random.exponential(0.1, 2000))
    records = [
        RequestRecord(
            str(i), at, 1, 4, sent_s=at, first_token_s=at + 0.2, last_token_s=at + 0.3, output_len=4
        )
        for i, at in enumerate(offsets.tolist())
    ]
    end_s, begin_s = float(offsets[-1]), 50.0
    how = {"rate": 10.0, "latency_s": 0.3, "ttft_limit_s": 1.0}
    whole = QueueReadings.of_records(records, end_s, end_s + 1, **how)
    late = whole.since(begin_s)
    alone = [record for record in records if record.scheduled_s >= begin_s]
    assert (len(late.offsets_s), late.offsets_s[0]) == (len(alone), alone[0].scheduled_s - begin_s)
    assert np.all(late.times_s > 0)
    assert np.all(np.diff(late.firsts) >= 0)
    # Requests sent since, and first tokens of these: at most two were under way when the reading began.
    sent = np.searchsorted(late.offsets_s, late.times_s, side="right")
    assert np.all(np.abs(sent - late.waiting - late.firsts) <= whole.waiting.max())
    assert whole.since(end_s + 1) is whole  # nothing was sent since: all there is


@pytest.mark.parametrize(("per_s", "grows"), [(14.0, False), (8.0, True)])
def test_a_queue_is_seen_to_grow_in_what_came_after_the_filling(per_s: float, grows: bool) -> None:
    """Turns come more and more often until first sessions end, at 60 s: that alone is no queue's growth."""
    begin_s, end_s = 60.0, 180.0
    filling = begin_s * np.sqrt(np.arange(1, 301) / 300)  # from none to 10 a second
    offsets = np.concatenate([filling, np.arange(begin_s + 0.1, end_s, 0.1)])
    firsts = first_tokens(offsets, np.full(len(offsets), 1 / per_s), 1)
    records = [
        RequestRecord(
            str(i), at, 1, 2, sent_s=at, first_token_s=first, last_token_s=first + 0.1, output_len=2
        )
        for i, (at, first) in enumerate(zip(offsets.tolist(), firsts.tolist(), strict=True))
    ]
    whole = QueueReadings.of_records(
        records, end_s, float(firsts[-1]) + 1, rate=10.0, latency_s=0.5, ttft_limit_s=5.0
    )
    found = queue_growth(whole.since(begin_s))
    assert (found is not None) is grows
    if found is not None:
        assert found.per_s == pytest.approx(2.0, rel=0.25)
