"""The forms of an SLO: joint attainment, percentiles, means, tiers."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.metrics.metrics import judge_criteria, summarise
from kvbench.core.records import RequestRecord
from kvbench.core.slo import (
    METRICS,
    Limit,
    Slo,
    burst_slo,
    by_strictness,
    misses_allowed,
    same_metric_twice,
    tiers_text,
)

limits = st.builds(
    Limit,
    st.sampled_from(METRICS),
    st.sampled_from(["each", "mean", "p50", "p90", "p95", "p99", "p99.9"]),
    st.floats(0.01, 1e6),
)
slos = st.builds(
    Slo, st.none() | st.floats(1, 1e5), st.none() | st.floats(1, 1e4), st.floats(0.01, 1.0),
    st.lists(limits, max_size=4).map(tuple),
)  # fmt: skip


def request(ttft_s: float, tpot_s: float = 0.01, at_s: float = 0.0, error: str = "") -> RequestRecord:
    first = at_s + ttft_s
    record = RequestRecord(f"r{at_s}", at_s, 10, 11, at_s, first, first + 10 * tpot_s, 11)
    record.error = error  # type: ignore[assignment]
    return record


@pytest.mark.parametrize(("text", "limit"), [
    ("ttft_ms p90 <= 5000", Limit("ttft_ms", "p90", 5000)),
    ("TPOT mean ≤ 50 ms", Limit("tpot_ms", "mean", 50)),
    ("e2el_ms<=1e4", Limit("e2el_ms", "each", 10_000)),
    ("ttft median < 2.5", Limit("ttft_ms", "p50", 2.5)),
    ("  tpot_ms  p99.9  <=  7 ", Limit("tpot_ms", "p99.9", 7)),
])  # fmt: skip
def test_short_forms(text: str, limit: Limit) -> None:
    assert Limit.parse(text) == limit


@pytest.mark.parametrize(("text", "message"), [
    ("ttft_ms p90 >= 5000", "is not a limit; expected such as `ttft_ms p90 <= 5000`"),
    ("itl_ms p90 <= 5", "unknown metric 'itl_ms'"),
    ("ttft_ms p100 <= 5", "statistic must be"),
    ("ttft_ms p0 <= 5", "statistic must be"),
    ("ttft_ms worst <= 5", "statistic must be"),
    ("ttft_ms <= 0", "must be above 0"),
    ("", "is not a limit"),
])  # fmt: skip
def test_what_is_no_limit_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Limit.parse(text)


@given(limits)
def test_a_limit_is_read_back_from_its_short_form(limit: Limit) -> None:
    read = Limit.parse(limit.short())
    assert (read.metric, read.statistic) == (limit.metric, limit.statistic)
    assert read.limit == pytest.approx(limit.limit, rel=1e-11)
    assert (
        Limit.from_json({"metric": limit.metric, "statistic": limit.statistic, "limit": limit.limit}) == limit
    )


@given(st.text(max_size=40))
def test_any_text_is_a_limit_or_refused(text: str) -> None:
    refused, limit = False, None
    try:
        limit = Limit.parse(text)
    except ValueError:
        refused = True
    assert refused != (limit is not None)


@given(slos)
def test_an_slo_is_read_back(slo: Slo) -> None:
    read = Slo.from_json(slo.to_json())
    assert (read.ttft_ms, read.tpot_ms, read.attainment) == (slo.ttft_ms, slo.tpot_ms, slo.attainment)
    assert [limit.short() for limit in read.limits] == [limit.short() for limit in slo.limits]


def test_old_scenarios_slos_are_joint_attainment() -> None:
    slo = Slo.from_json({"ttft_ms": 250.0, "tpot_ms": None, "attainment": 0.9})
    assert slo == Slo(250, None, 0.9)
    assert (slo.criteria(), slo.text()) == ((("share", 0.9),), "TTFT ≤ 250 ms for 90 % of requests")


def test_criteria_of_each_form() -> None:
    listed = Slo(limits=(Limit.parse("ttft p90 <= 5000"), Limit.parse("tpot mean <= 50")))
    assert listed.criteria() == (("share", 0.9), ("mean", 50))
    assert not listed.joint
    assert listed.text() == "TTFT P90 ≤ 5000 ms; TPOT mean ≤ 50 ms"
    # A mean of survivors can be bought by dropping requests.
    assert Slo(limits=(Limit.parse("tpot mean <= 50"),)).criteria() == (("share", 0.95), ("mean", 50))
    mixed = Slo(100, None, 0.9, (Limit.parse("e2el <= 2000"), Limit.parse("ttft p50 <= 50")))
    assert (mixed.criteria(), Slo().criteria()) == ((("share", 0.9), ("share", 0.5)), (("share", 0.95),))
    assert Slo().text() == "no SLO"


@given(
    slos, st.none() | st.floats(0, 1e6), st.none() | st.floats(0, 1e6), st.none() | st.floats(0, 1e6),
    st.booleans(),
)  # fmt: skip
def test_observations_and_margins_agree(
    slo: Slo, ttft: float | None, tpot: float | None, e2el: float | None, ok: bool
) -> None:
    in_ms = {"ttft_ms": ttft, "tpot_ms": tpot, "e2el_ms": e2el}
    seen, margins = slo.observe(in_ms, ok), slo.margins(in_ms, ok)
    assert len(seen) == len(margins) == len(slo.criteria())
    for (kind, target), value, margin in zip(slo.criteria(), seen, margins, strict=True):
        if kind == "share":
            assert value == float(margin <= 1.0)
            assert ok or value == 0.0
        elif math.isnan(value):
            assert math.isnan(margin)
        else:
            assert ok
            assert margin == pytest.approx(value / target)


def test_a_failed_request_keeps_nothing_and_counts_in_no_mean() -> None:
    slo = Slo(limits=(Limit.parse("ttft p90 <= 500"), Limit.parse("ttft mean <= 500")))
    share, mean = slo.observe({"ttft_ms": 10, "tpot_ms": 5, "e2el_ms": 100}, ok=False)
    assert share == 0.0
    assert math.isnan(mean)


def test_each_criterion_over_a_trial() -> None:
    records = [request(0.1 if number < 95 else 2.0, at_s=number / 10) for number in range(100)]
    records[0] = request(0.1, error="http_error")
    slo = Slo(1000, None, 0.9, (
        Limit.parse("ttft p99 <= 1000"), Limit.parse("ttft mean <= 190"), Limit.parse("ttft p50 <= 100.1"),
    ))  # fmt: skip
    joint, p99, p50, mean = judge_criteria(records, slo, None)
    assert joint.met
    assert joint.value == pytest.approx(0.94)
    assert not p99.met
    assert p50.met
    assert mean.value == pytest.approx((94 * 100 + 5 * 2000) / 99)
    assert not mean.met
    assert mean.n == 99
    assert mean.lower < mean.value < mean.upper


def test_what_comes_in_clusters_widens_the_interval_of_every_form() -> None:
    # Ten of 200 are slow either way, one here and there or all in a row.
    spread = [request(2.0 if i % 20 == 10 else 0.1, at_s=i / 10) for i in range(200)]
    cluster = [request(2.0 if 100 <= i < 110 else 0.1, at_s=i / 10) for i in range(200)]
    slo = Slo(1000, None, 0.9, (Limit.parse("ttft p90 <= 1000"), Limit.parse("ttft mean <= 500")))
    alone, together = (judge_criteria(records, slo, None) for records in (spread, cluster))
    assert [criterion.kind for criterion in alone] == ["share", "share", "mean"]
    for one, other in zip(alone, together, strict=True):
        assert one.value == pytest.approx(other.value)
        assert None not in (one.lower, one.upper, other.lower, other.upper)
        assert other.upper - other.lower > 1.3 * (one.upper - one.lower)  # type: ignore[operator]


def test_a_cancelled_request_counts_where_it_can_no_longer_keep_a_limit() -> None:
    waiting = RequestRecord("w", 1.0, 10, 11, 1.0, error="cancelled")
    slo = Slo(limits=(Limit.parse("ttft p50 <= 500"), Limit.parse("ttft mean <= 500")))
    share, mean = judge_criteria([request(0.1), waiting], slo, ended_s=1.2)
    assert (share.n, share.value) == (1, 1.0)
    share, mean = judge_criteria([request(0.1), waiting], slo, ended_s=2.0)
    assert (share.n, share.value) == (2, 0.5)
    assert mean.n == 1


def test_a_summary_says_what_was_asked_and_what_came_of_it() -> None:
    records = [request(0.1, at_s=number / 10) for number in range(50)]
    listed = summarise(records, Slo(limits=(Limit.parse("ttft p90 <= 150"),)), 10, 6)
    assert listed.slo_attainment is None  # no limit on single requests
    assert listed.attained
    assert [criterion.text for criterion in listed.criteria] == ["TTFT P90 ≤ 150 ms"]
    assert not summarise(records, Slo(limits=(Limit.parse("ttft mean <= 99"),)), 10, 6).attained
    assert not summarise([], Slo(100), 10, 6).attained
    whole = listed.whole_run
    assert (whole.successful, whole.failed, whole.output_tokens) == (50, 0, 550)
    assert whole.request_throughput == pytest.approx(50 / 6)


@pytest.mark.parametrize(("n", "allowed"), [(100, 5), (20, 1), (19, 0), (1, 0), (0, 0), (60, 3)])
def test_misses_allowed(n: int, allowed: int) -> None:
    assert misses_allowed(n, 0.95) == allowed


@given(st.integers(0, 10_000), st.floats(0.001, 1.0))
def test_misses_allowed_leave_the_share(n: int, share: float) -> None:
    most = misses_allowed(n, share)
    assert (n - most) >= share * n - 1e-6
    assert most == n or (n - most - 1) < share * n


@given(slos, st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_loosened_slo_is_kept_by_whoever_kept_it(slo: Slo, ttft: float, tpot: float) -> None:
    looser = slo.loosened(ttft, tpot)
    assert len(looser.criteria()) == len(slo.criteria())
    for before, after in zip(slo.each, looser.each, strict=True):
        assert after.limit >= before.limit


def test_the_tightest_limit_of_a_metric_and_the_longest_request() -> None:
    slo = Slo(500, 20, 0.9, (Limit.parse("ttft p50 <= 100"), Limit.parse("e2el <= 400")))
    assert (slo.tightest("ttft_ms"), slo.tightest("tpot_ms"), slo.tightest("e2el_ms")) == (100, 20, 400)
    assert (slo.e2el_ms(11), slo.e2el_ms(101), Slo().e2el_ms(10)) == (300, 400, 0)
    # What keeps some limit: the loosest of a metric, not the tightest.
    assert (slo.longest_ms(11), Slo(500, 20).longest_ms(11), Slo().longest_ms(10)) == (700, 700, 0)
    assert Slo(500, 20, 0.9, (Limit.parse("e2el <= 400"),)).longest_ms(11) == 400


def test_the_burst_method_looks_at_means() -> None:
    slo = burst_slo(Slo(5000, 50, 0.95))
    assert slo.limits == (Limit("ttft_ms", "mean", 5000), Limit("tpot_ms", "mean", 50))
    # Failed requests are no part of it.
    records = [request(0.1), *(request(0.1, error="timeout") for _ in range(9))]
    assert all(criterion.met for criterion in judge_criteria(records, slo, None))


def test_tiers_begin_with_the_strictest() -> None:
    tiers = {
        "batch": Slo(5000, 50), "interactive": Slo(200, 15), "chat": Slo(200, 15, 0.99), "any": Slo(9000),
    }  # fmt: skip
    assert by_strictness(tiers) == ["chat", "interactive", "batch", "any"]
    assert tiers_text({"a": Slo(1)}) == "a: TTFT ≤ 1 ms for 95 % of requests"


def test_a_limit_given_twice_is_found() -> None:
    twice = [Limit.parse("ttft <= 5"), Limit.parse("ttft p90 <= 5"), Limit.parse("ttft <= 6")]
    assert list(same_metric_twice(twice)) == [2]
