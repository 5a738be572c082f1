"""Met and missed, windows, rates, distributions."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.metrics import metrics
from kvbench.core.metrics.metrics import Distribution, Slo, Window, met, summarise
from kvbench.core.records import RequestRecord

SLO = Slo(ttft_ms=200, tpot_ms=20, attainment=0.95)


def request(
    at_s: float, ttft_s: float = 0.1, tpot_s: float = 0.01, tokens: int = 11, input_len: int = 100
) -> RequestRecord:
    first = at_s + ttft_s
    return RequestRecord(
        f"r{at_s}", at_s, input_len, tokens, sent_s=at_s + 0.001, first_token_s=first,
        last_token_s=first + tpot_s * (tokens - 1), output_len=tokens, itl_s=[tpot_s] * (tokens - 1),
        status=200,
    )  # fmt: skip


def cancelled(at_s: float, first_token_s: float | None = None, tokens: int = 11) -> RequestRecord:
    return RequestRecord(
        f"c{at_s}", at_s, 100, tokens, sent_s=at_s, first_token_s=first_token_s, error="cancelled"
    )


@pytest.mark.parametrize(("record", "verdict"), [
    (request(0), True),
    (request(0, ttft_s=0.3), False),
    (request(0, tpot_s=0.03), False),
    (request(0, tokens=1), True),  # TPOT undefined
    (replace(request(0), error="wrong_length"), False),
    (replace(request(0), error="http_error"), False),
    (RequestRecord("x", 0, 1, 1, error="timeout"), False),
    (RequestRecord("x", 0, 1, 1, sent_s=0.0, last_token_s=0.1), False),  # no first token was ever seen
])  # fmt: skip
def test_met(record: RequestRecord, verdict: bool) -> None:
    assert met(record, SLO) is verdict


def test_latency_counts_from_the_scheduled_send() -> None:
    late = replace(request(0, ttft_s=0.19), sent_s=0.15)
    assert late.ttft_sent_s == pytest.approx(0.04)
    assert met(replace(late, first_token_s=0.25), SLO) is False


@pytest.mark.parametrize(("record", "ended_s", "verdict"), [
    (cancelled(1.0), 1.1, None),
    (cancelled(1.0), 1.3, False),  # waited past its TTFT limit
    (cancelled(1.0), None, None),
    (cancelled(1.0, first_token_s=1.5), None, False),
    (cancelled(1.0, first_token_s=1.1), 1.2, None),
    (cancelled(1.0, first_token_s=1.1), 1.4, False),  # 10 gaps in 0.3 s or more: TPOT above 20 ms
    (cancelled(1.0, first_token_s=1.1), 1.299, None),  # 10 gaps in 0.199 s or more
    (cancelled(1.0, first_token_s=1.1), 1.301, False),
    (cancelled(2.0), 1.0, None),  # not yet due
])  # fmt: skip
def test_cancelled_requests(record: RequestRecord, ended_s: float | None, verdict: bool | None) -> None:
    assert met(record, SLO, ended_s) is verdict


def test_no_limits_ask_for_success_alone() -> None:
    assert met(request(0, ttft_s=99), Slo()) is True
    assert met(RequestRecord("x", 0, 1, 1, error="timeout"), Slo()) is False


@pytest.mark.parametrize("values", [{"ttft_ms": 0}, {"tpot_ms": -1}, {"attainment": 0}, {"attainment": 1.1}])
def test_impossible_slos_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Slo(**values)


def test_the_window_drops_the_warmup_by_count_or_by_latency() -> None:
    arrivals = [i / 10 for i in range(100)]
    assert metrics.steady_window([request(t) for t in arrivals]) == Window(1.0, 9.9)
    slow = metrics.steady_window([request(t, ttft_s=2.0) for t in arrivals])
    assert slow.start_s == pytest.approx(2.1)
    slower = metrics.steady_window([request(t, ttft_s=50.0) for t in arrivals])
    assert slower.start_s == pytest.approx(3.0)


def test_the_window_does_not_depend_on_when_the_clock_began() -> None:
    for ttft_s in (0.1, 2.0, 50.0):
        at_once, later = (
            metrics.steady_window([request(began + i / 10, ttft_s=ttft_s) for i in range(100)])
            for began in (0.0, 40.0)
        )
        assert later.start_s - 40.0 == pytest.approx(at_once.start_s)
        assert later.end_s - 40.0 == pytest.approx(at_once.end_s)


def test_small_trials_keep_every_request() -> None:
    few = [request(t) for t in (0.5, 0.7, 0.9)]
    summary = summarise(few, SLO, 5.0, 1.2)
    assert (summary.judged_met, summary.judged_missed) == (3, 0)
    assert (summary.ttft_ms.p50, summary.ttft_ms.p90) == (pytest.approx(100), None)
    one = summarise(few[:1], SLO, 5.0, 1.2)
    assert (one.judged, one.slo_attainment, one.achieved_rate) == (1, 1.0, None)


def test_nothing_at_all() -> None:
    summary = summarise([], SLO, 5.0, 0.0)
    assert summary.slo_attainment is None
    assert (summary.attainment_lower, summary.attainment_upper) == (0.0, 1.0)
    assert summary.run_request_rate is None
    assert summary.ttft_ms == Distribution()
    json.dumps(summary.to_json(), allow_nan=False)


def test_counts_and_causes() -> None:
    records = [request(i / 10) for i in range(15)]
    records += [request(1.5, ttft_s=0.3, tpot_s=0.03), replace(request(1.6), error="wrong_length")]
    records += [
        RequestRecord("e", 1.7, 100, 11, sent_s=1.7, error="http_error"),
        cancelled(1.8),
        cancelled(9.0),
    ]
    summary = summarise(records, SLO, 10.0, 1.9, window=Window(0.0, 2.0))
    assert (summary.planned, summary.sent, summary.completed, summary.cancelled) == (20, 20, 16, 2)
    assert summary.failed == {"wrong_length": 1, "http_error": 1}
    assert (summary.met, summary.missed, summary.undecided) == (15, 3, 2)
    assert (summary.judged_met, summary.judged_missed, summary.judged_undecided) == (15, 3, 1)
    assert summary.missed_by == {"ttft": 1, "tpot": 1, "wrong_length": 1, "http_error": 1}
    assert summary.slo_attainment == pytest.approx(15 / 18)
    assert summary.attainment_lower < 15 / 18 < summary.attainment_upper


def test_the_drain_distorts_no_rate() -> None:
    # 10 a second for 20 s, each taking 10 s: after the fill, 10 a second complete.
    records = [request(i / 10, ttft_s=5.0, tpot_s=0.5) for i in range(200)]
    summary = summarise(records, Slo(), 10.0, 30.0, window=Window(10.0, 19.9))
    assert summary.achieved_rate == pytest.approx(10.0, rel=0.03)
    assert summary.request_goodput == summary.achieved_rate
    assert summary.output_tok_per_s == pytest.approx(110.0, rel=0.03)
    assert summary.total_tok_per_s == pytest.approx(1110.0, rel=0.03)
    assert summary.run_request_rate == pytest.approx(200 / 30)
    assert (summary.run_total_tok_per_s, summary.peak_waiting) == (pytest.approx(200 * 111 / 30), 50)
    assert summary.peak_in_flight == 100


def test_goodput_counts_what_completes_in_the_window_that_divides_it() -> None:
    # One a second, each takes 4 s; those of 8 s and 9 s miss the SLO.
    records = [request(float(i), ttft_s=4.0 if i < 8 else 4.5, tokens=1) for i in range(20)]
    summary = summarise(records[:10], Slo(ttft_ms=4200), 1.0, 13.5, window=Window(4.5, 12.75))
    assert summary.achieved_rate == pytest.approx(8 / 8.25)  # those of 1 s to 8 s
    assert summary.request_goodput == pytest.approx(7 / 8.25)
    assert summary.whole_run.request_throughput == pytest.approx(10 / 13.5)


def test_tokens_count_for_the_window_that_they_came_in() -> None:
    window = Window(1.0, 2.0)
    whole = request(1.1, tokens=11, tpot_s=0.05)  # all of its 11 tokens inside
    one = request(1.2, tokens=1)
    half = request(1.4, ttft_s=0.1, tokens=11, tpot_s=0.1)  # 1.5 s to 2.5 s: the first and half of the others
    later = request(1.95, tokens=3)
    for records, output in (([whole], 11), ([one], 1), ([half], 6), ([later], 0), ([whole, one, half], 18)):
        found = summarise(records, Slo(), 5.0, 3.0, window=window)
        assert found.output_tok_per_s == pytest.approx(output)
    at_once = request(1.3, tokens=4, tpot_s=0.0)
    assert summarise([at_once], Slo(), 5.0, 3.0, window=window).output_tok_per_s == pytest.approx(4)


def test_the_peak_output_is_that_of_the_busiest_second_since_the_first_send() -> None:
    """Two answers of eleven tokens, at 0.1 s a token from 0.4 s and from 1.2 s after the first send."""
    two = [request(1.0, 0.401, 0.1), request(1.8, 0.401, 0.1)]
    assert metrics.peak_output(two) == 13.0  # 5 of the first and 8 of the second between 1 s and 2 s
    bundled = [replace(record, output_len=22) for record in two]
    assert metrics.peak_output(bundled) == 26.0
    assert metrics.peak_output([replace(record, itl_s=[]) for record in two]) == 13.0
    assert metrics.peak_output([RequestRecord("x", 0, 1, 1, error="timeout")]) is None


def test_clustered_misses_widen_the_interval() -> None:
    spread = [request(i / 10, ttft_s=0.3 if i % 20 == 10 else 0.1) for i in range(200)]
    cluster = [request(i / 10, ttft_s=0.3 if 100 <= i < 110 else 0.1) for i in range(200)]
    window = Window(0.0, 20.0)
    one, other = (summarise(records, SLO, 10, 20, window=window) for records in (spread, cluster))
    assert one.slo_attainment == other.slo_attainment == 0.95
    assert one.effective_n == 200
    assert other.effective_n < 60
    assert other.attainment_lower < one.attainment_lower


def test_percentiles_are_numpys_linear_ones() -> None:
    found = astuple(Distribution.of([None, *range(1, 101)]))
    assert found == pytest.approx((100, 50.5, 50.5, 90.1, 99.01, 100.0))
    assert Distribution.of([0.001], 1e3) == Distribution(1, 1.0, None, None, None, 1.0)


@pytest.mark.parametrize(("percentile", "least"), [("p50", 2), ("p90", 10), ("p99", 50)])
def test_a_percentile_needs_values_beyond_it(percentile: str, least: int) -> None:
    assert getattr(Distribution.of([1.0] * (least - 1)), percentile) is None
    assert getattr(Distribution.of([1.0] * least), percentile) == 1.0


def test_who_has_left_was_answered_well_within_the_window() -> None:
    window = Window(0.0, 1.0)
    inside, later = request(0.1), request(0.95)  # 0.2 s each
    spoilt = [replace(inside, error="wrong_length"), replace(inside, error="http_error")]
    assert summarise([inside, later, *spoilt], SLO, 5.0, 1.2, window=window).left == 1
    assert summarise([inside] * 3, SLO, 5.0, 1.2, window=window).left == 3


def test_waiting_counts_what_never_got_a_token() -> None:
    records = [
        request(0.0, ttft_s=1.0),
        cancelled(0.5),
        RequestRecord("t", 0.6, 1, 1, sent_s=0.6, error="timeout"),
    ]
    records.append(RequestRecord("h", 0.7, 1, 1, sent_s=0.7, error="http_error"))
    series = metrics.waiting_series(records, 3.0)
    assert series.sampled(np.array([0.2, 0.55, 0.8, 1.5, 3.5])).tolist() == [1, 2, 3, 2, 0]
    assert metrics.in_flight_series(records, 3.0).peak() == 3


ERRORS = st.sampled_from(["", "", "", "cancelled", "timeout", "http_error", "wrong_length", "connect"])


@st.composite
def any_records(draw: st.DrawFn) -> list[RequestRecord]:
    records = []
    for at_s in draw(st.lists(st.floats(0, 10), max_size=60)):
        record = request(at_s, draw(st.floats(0, 2)), draw(st.floats(0, 0.1)), draw(st.integers(1, 5)))
        record = replace(record, error=draw(ERRORS))
        if not record.ok and draw(st.booleans()):
            record = replace(record, first_token_s=None, last_token_s=None, output_len=0, itl_s=[])
            if draw(st.booleans()):
                record = replace(record, sent_s=None)
        records.append(record)
    return records


@settings(max_examples=60, deadline=None)
@given(any_records(), st.floats(0, 12))
def test_a_summary_adds_up_for_any_records(records: list[RequestRecord], duration_s: float) -> None:
    summary = summarise(records, SLO, 5.0, duration_s)
    assert summary.met + summary.missed + summary.undecided == summary.planned == len(records)
    assert summary.completed + summary.cancelled + sum(summary.failed.values()) == len(records)
    assert summary.undecided <= summary.cancelled
    assert summary.judged <= summary.met + summary.missed
    if summary.slo_attainment is not None:
        assert summary.attainment_lower <= summary.slo_attainment + 1e-9
        assert summary.attainment_upper >= summary.slo_attainment - 1e-9
    json.dumps(summary.to_json(), allow_nan=False)
