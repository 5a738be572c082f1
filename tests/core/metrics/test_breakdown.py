"""The parts of the time to the first token: they add up, and what is not known is not invented."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_pages import Server, histogram

from kvbench.core.load.workers import LoadResult
from kvbench.core.metrics.ttft_breakdown import (
    PART_WORDS,
    PARTS,
    Phases,
    RouterTimes,
    hand_off_parts,
    ttft_breakdown,
)
from kvbench.core.records import RequestRecord
from kvbench.hosts.telemetry import parse_metrics
from kvbench.sweep.trial.evidence import engine_figures, engine_summary, router_times

P, D = Phases(0.010, 0.050), Phases(0.004, 0.016, 0.005)


def total(parts: dict[str, float | None]) -> float:
    return sum(value for value in parts.values() if value is not None)


def test_one_after_the_other() -> None:
    parts = ttft_breakdown(0.100, P, D, RouterTimes(0.065, 0.025, 0.002), 0.008)
    assert parts == pytest.approx({
        "router": 8, "prefill_queue": 10, "prefill": 50, "hand_off": 12, "kv_transfer": 8, "decode_queue": 7,
        "first_decode_step": 5,
    })  # fmt: skip
    assert tuple(PART_WORDS) == PARTS


def test_both_at_once() -> None:
    """D's residence holds P's compute, so its own queue is not told apart."""
    parts = ttft_breakdown(0.100, P, Phases(0.07, 0.015, 0.005), RouterTimes(0.07, 0.095, None), 0.008)
    assert (parts["decode_queue"], parts["router"]) == (None, pytest.approx(5))
    assert parts["hand_off"] == pytest.approx(95 - 60 - 8 - 5)
    assert total(parts) == pytest.approx(100)


def test_without_pd_the_rest_is_the_front_end() -> None:
    parts = ttft_breakdown(0.070, P, None)
    known = {name: value for name, value in parts.items() if value is not None}
    assert known == pytest.approx({"router": 10, "prefill_queue": 10, "prefill": 50})


def test_without_a_router_its_part_is_in_the_hand_off() -> None:
    parts = ttft_breakdown(0.100, P, D, None, 0.008)
    assert (parts["router"], parts["hand_off"]) == (None, pytest.approx(20))
    assert total(parts) == pytest.approx(100)


def test_without_transfer_times_they_are_in_decodes_queue() -> None:
    parts = ttft_breakdown(0.100, P, D, RouterTimes(0.065, 0.025, 0.002), None)
    assert (parts["kv_transfer"], parts["decode_queue"]) == (None, pytest.approx(15))
    assert total(parts) == pytest.approx(100)


def test_without_pages_nothing_is_told() -> None:
    assert set(ttft_breakdown(0.1, None, Phases(), None).values()) == {None}
    assert set(ttft_breakdown(None, None, None).values()) == {None}


times = st.floats(0, 2)


@given(times, times, times, times, times, st.floats(0, 0.5), times, times, times, st.booleans())
def test_the_parts_add_up(
    outside: float, p_leg: float, turn: float, d_leg: float, kv: float, gap: float, queue: float,
    prefill: float, residence: float, at_once: bool,
) -> None:  # fmt: skip
    """Whatever the engines' histograms say, no part is negative and the sum is the TTFT."""
    if at_once:  # D's answer comes after P's
        d_leg = max(d_leg, p_leg)
    routed = RouterTimes(p_leg, d_leg, None if at_once else turn)
    ttft = outside + (d_leg if at_once else p_leg + turn + d_leg)
    parts = ttft_breakdown(ttft, Phases(queue, prefill), Phases(0.0, residence, gap), routed, kv)
    assert all(value is None or value >= 0 for value in parts.values())
    assert math.isclose(total(parts), ttft * 1e3, abs_tol=1e-6)


def test_where_a_long_hand_off_lies() -> None:
    parts = hand_off_parts(P, D, RouterTimes(0.065, 0.025, 0.002))
    assert parts == pytest.approx({"prefill_front_end": 5, "router_turn": 2, "decode_front_end": 5})
    assert set(hand_off_parts(P, D, RouterTimes(0.065, 0.025, None)).values()) == {None}


def record(number: int, **router: float) -> RequestRecord:
    at = float(number)
    done = RequestRecord(f"r{number}", at, 64, 4, at, at + 0.1, at + 0.2, 4, [0.03] * 3, 200)
    for name, offset in router.items():
        setattr(done, name, at + offset)
    return done


SEQUENTIAL = {"prefill_sent_s": 0.01, "prefill_answered_s": 0.06, "decode_sent_s": 0.062}
CONCURRENT = {"prefill_sent_s": 0.01, "prefill_answered_s": 0.06, "decode_sent_s": 0.0101}


def test_legs_from_the_times_of_each_request() -> None:
    found = router_times([record(i, **SEQUENTIAL, decode_first_byte_s=0.09) for i in range(4)], None, None)
    assert (found.prefill, found.hand_off, found.decode) == pytest.approx((0.05, 0.002, 0.028))
    found = router_times([record(i, **CONCURRENT, decode_first_byte_s=0.09) for i in range(4)], None, None)
    assert found.hand_off is None


def test_an_answer_of_p_after_decodes_first_byte_is_no_gap() -> None:
    late = {name: time_s for name, time_s in CONCURRENT.items() if name != "prefill_answered_s"}
    found = router_times([record(i, **late, decode_first_byte_s=0.09) for i in range(4)], None, None)
    assert (found.prefill, found.hand_off) == (None, None)
    parts = ttft_breakdown(0.1, P, Phases(0.07, 0.015, 0.005), found, 0.008)
    assert total(parts) == pytest.approx(100)


def test_legs_from_the_routers_histograms() -> None:
    names = ("prefill", "handoff", "decode_first_byte")
    lines = [line for name in names for line in histogram(f"kvbench:router_{name}_seconds", 10, 0.5)]
    page, empty = parse_metrics("\n".join(lines) + "\n"), parse_metrics("")
    assert router_times([record(0)], empty, page) == RouterTimes(0.05, 0.05, 0.05)
    assert router_times([record(0)], empty, empty) is None
    assert router_times([record(0)], None, page) is None


def test_from_vllm_pages_to_the_trials_columns() -> None:
    n = 20
    p = Server(n, 64, "prefill", queue_s=n * 0.002, prefill_s=n * 0.03)
    d = Server(n, 64, queue_s=n * 0.01, prefill_s=n * 0.005, transfers={"nixl": (n, n * 0.006, 1.0, 1.0)})
    zero = {"prefill-0": Server(0, 64, "prefill").page(), "decode-0": Server(0, 64).page(), "router": None}
    after = {"prefill-0": p.page(), "decode-0": d.page(), "router": None}
    load = LoadResult([record(i, **SEQUENTIAL, decode_first_byte_s=0.09) for i in range(n)], "complete", 20.0)
    summary = engine_summary(zero, after, engine_figures(zero, after), load)
    parts = summary["ttft_breakdown_ms"]
    assert (parts["prefill"], parts["kv_transfer"]) == (pytest.approx(30), pytest.approx(6))
    assert (parts["first_decode_step"], parts["decode_queue"]) == (pytest.approx(4), pytest.approx(5))
    assert total(parts) == pytest.approx(summary["ttft_ms_mean_of_all"]) == pytest.approx(100)
