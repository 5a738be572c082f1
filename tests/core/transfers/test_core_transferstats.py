"""Figures of a row, its limits, and two runs compared: told only where the calls' spread allows it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_transfers import make_record

from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.core.transfers.stats import apart, call_times, calls_needed, compare, figures

CASE = Case("tcp", "tcp", "write", 1 << 20, 8)
TIMES = st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=300)


@given(TIMES)
def test_percentiles_are_ordered_and_really_occurred(times: list[float]) -> None:
    summary = call_times(times)
    known = [summary.minimum, summary.p50, summary.p90, summary.p99, summary.p999, summary.maximum]
    values = [value for value in known if value is not None]
    assert values == sorted(values)
    assert set(values) <= set(times)
    assert summary.mean == pytest.approx(np.mean(times))


@pytest.mark.parametrize(("share", "needed"), [(0.5, 3), (0.9, 10), (0.99, 100), (0.999, 1000)])
def test_a_percentile_needs_a_call_beyond_it(share: float, needed: int) -> None:
    assert calls_needed(share) == needed
    name = {0.5: "p50", 0.9: "p90", 0.99: "p99", 0.999: "p999"}[share]
    assert getattr(call_times([1.0] * (needed - 1)), name) is None
    assert getattr(call_times([1.0] * needed), name) == 1.0


def test_a_row_that_was_not_measured_moved_nothing() -> None:
    row = TransferRecord(CASE, "skipped", "no such device")
    assert (row.calls, row.nbytes, row.logical_bytes, row.descriptors, row.warmup_calls) == (0, 0, 0, 0, 0)
    assert (row.window_s, row.gb_per_s, row.call_s) == (0.0, None, [])


def test_no_calls_have_no_figures() -> None:
    assert call_times([]).mean is None


def test_a_row_stands_beside_the_limits_of_its_own_transfer() -> None:
    nixl = replace(CASE, backend="nixl", nics=2)
    run = [
        make_record(CASE),
        make_record(replace(CASE, batch_size=1)),
        make_record(replace(CASE, backend="memcpy", protocol="memory")),
        make_record(replace(CASE, backend="memcpy", protocol="memory", op="read")),
        make_record(replace(CASE, nics=2)),
        make_record(nixl),
    ]
    row = run[-1]
    result = figures(row, run)
    assert result.of_line_rate == pytest.approx(0.96, abs=0.03)
    assert result.of_memcpy == row.gb_per_s / run[2].gb_per_s
    # Plain TCP over as many NICs, not over the loopback.
    assert result.of_tcp == row.gb_per_s / run[4].gb_per_s == pytest.approx(1.0, abs=0.05)
    spent = (row.initiator_cpu_s or 0) + (row.target_cpu_s or 0)
    assert result.cpu_s_per_gb == pytest.approx(spent / (row.calls * row.nbytes / 1e9))
    assert (figures(run[0], run).of_tcp, figures(run[2], run).of_tcp) == (None, None)


def test_a_failed_row_and_one_that_moves_nothing_have_no_bandwidth() -> None:
    assert figures(TransferRecord(CASE, "error", "gone")).gb_per_s is None
    null = make_record(replace(CASE, backend="null", protocol="none"))
    assert (figures(null).gb_per_s, figures(null).cpu_s_per_gb) == (None, None)
    assert figures(null).times.p50 is not None


def rows(speed: float, seed: int, calls: int = 200) -> list[TransferRecord]:
    return [make_record(replace(CASE, block_bytes=1 << size), seed, calls, speed) for size in (12, 16, 20)]


def test_a_run_compared_with_itself_or_its_like_has_not_changed() -> None:
    for other in (rows(1.0, 1), rows(1.0, 2)):
        assert [change.why for change in compare(rows(1.0, 1), other)] == ["no significant difference"] * 3


@pytest.mark.parametrize("speed", [0.5, 0.9, 1.2, 4.0])
def test_a_change_is_found_with_the_truth_in_its_interval(speed: float) -> None:
    for change in compare(rows(1.0, 1), rows(speed, 2)):
        assert change.ratio is not None
        assert change.low <= speed <= change.high
        assert ("faster" if speed > 1 else "slower") in change.text()


def test_what_moves_nothing_is_compared_by_its_calls() -> None:
    null = replace(CASE, backend="null", protocol="none")
    (change,) = compare([make_record(null, 1)], [make_record(null, 2, speed=3.0)])
    assert (change.ratio, change.after_gb_per_s) == (pytest.approx(3.0, rel=0.1), None)


def test_equal_runs_are_rarely_told_apart() -> None:
    false_alarms = 0
    for seed in range(200):
        (change,) = compare([make_record(CASE, seed)], [make_record(CASE, seed + 1000)])
        false_alarms += change.ratio is not None
    # 1 % by design; drifts slower than a run are the reader's to judge.
    assert false_alarms <= 8


def test_what_cannot_be_compared_says_why() -> None:
    old = [*rows(1.0, 1), make_record(replace(CASE, nics=4))]
    few = make_record(CASE, 1, calls=9)
    failed = TransferRecord(replace(CASE, nics=4), "error", "the peer is gone")
    changes = {change.case.key: change.text() for change in compare(old, [few, failed])}
    assert "9 calls in this run" in changes[few.case.key]
    assert changes[failed.case.key] == "failed in this run"
    assert changes[replace(CASE, block_bytes=1 << 12).key] == "only in the other run"


@given(st.floats(0.01, 100), st.integers(0, 5))
def test_the_interval_is_even_about_the_ratio(speed: float, seed: int) -> None:
    (change,) = compare([make_record(CASE, seed)], [make_record(CASE, seed + 9, speed=speed)])
    if change.ratio is not None and change.low is not None and change.high is not None:
        assert math.sqrt(change.low * change.high) == pytest.approx(change.ratio)


def test_rows_are_apart_only_beyond_their_spread() -> None:
    pairs = [(make_record(CASE, seed), make_record(CASE, seed + 100)) for seed in range(50)]
    assert sum(apart(*pair) for pair in pairs) <= 3
    one = make_record(CASE, 1)
    assert apart(one, make_record(CASE, 2, speed=1.3))
    rng = random.Random(3)
    noisy = replace(one, call_s=[rng.expovariate(1 / 0.005) for _ in range(60)])
    assert not apart(replace(noisy, gb_per_s=(one.gb_per_s or 0) * 1.02), one)
