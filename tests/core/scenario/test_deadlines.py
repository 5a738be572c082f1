"""How long one request may take: the deadline follows the SLO, and one that cuts good answers is refused."""

from __future__ import annotations

import json

import pytest

from kvbench.core.scenario.scenario import scenario_schema
from tests.core.scenario.test_scenario import MINIMAL, REGISTRY, mistakes, parse

OLD = "slo: {ttft_ms: 250}"
SHORT = "output_len: 4"


@pytest.mark.parametrize(("slo", "allowed_s", "timeout_s"), [
    ("{ttft_ms: 250}", 0.25, 60.0),
    ("{ttft_ms: 13000}", 13.0, 60.0),
    ("{ttft_ms: 343202, attainment: 0.99}", 343.202, 1029.606),
    ("{ttft_ms: 10000, tpot_ms: 10000, attainment: 0.9}", 40.0, 240.0),  # four tokens: three gaps
    ("{ttft_ms: 10000, tpot_ms: 10000, attainment: 0.99, limits: [e2el_ms <= 25000]}", 25.0, 75.0),
    ("{ttft_ms: 10000, limits: [e2el_ms p90 <= 50000]}", 50.0, 300.0),
    ("{limits: [ttft p50 <= 1000, ttft p99 <= 90000]}", 90.0, 270.0),
    ("{limits: [ttft p50 <= 10000]}", 10.0, 199.3157),
    ("{limits: [ttft mean <= 40000]}", 40.0, 552.6204),
    ("{tiers: {fast: {ttft_ms: 100}, slow: {ttft_ms: 30000, attainment: 0.9}}}", 30.0, 180.0),
    ("{ttft_ms: 10000000, tpot_ms: 10000000}", 40_000.0, 86_400.0),
])  # fmt: skip
def test_the_deadline_follows_the_slo(slo: str, allowed_s: float, timeout_s: float) -> None:
    scenario = parse(MINIMAL.replace(OLD, f"slo: {slo}"))
    assert (scenario.allowed_s, scenario.request_timeout_s) == pytest.approx((allowed_s, timeout_s))
    # What was chosen is written down with the run, and reads the same.
    assert scenario.resolved()["workload"]["request_timeout_s"] == pytest.approx(timeout_s)
    assert parse(json.dumps(scenario.resolved())) == scenario


def test_a_trace_s_longest_output_counts() -> None:
    text = MINIMAL.replace(OLD, "slo: {tpot_ms: 1000}\nsearch: {method: trace}")
    traced = text.replace("input_len: 64", "trace: {path: t.jsonl, longest_output: 101}, input_len: 64")
    assert parse(traced).allowed_s == 100.0


def test_a_deadline_that_would_cut_good_answers_is_refused_with_its_line() -> None:
    def mistakes_with(timeout: str) -> list[str]:
        text = MINIMAL.replace(OLD, "slo: {limits: [ttft p90 <= 90000]}")
        return mistakes(text.replace(SHORT, f"{SHORT}, request_timeout_s: {timeout}"))

    (found,) = mistakes_with("60")
    line = next(n for n, text in enumerate(MINIMAL.splitlines(), 1) if SHORT in text)
    assert f":{line}: workload.request_timeout_s (60) is less than the 90 s" in found
    assert "omit it, or set at least that value" in found
    explicit = parse(
        MINIMAL.replace(OLD, "slo: {ttft_ms: 90000}").replace(SHORT, f"{SHORT}, request_timeout_s: 90")
    )
    assert explicit.request_timeout_s == 90.0
    # A mistake of the SLO's own is told alone.
    wrong = mistakes(
        MINIMAL.replace(OLD, "slo: {ttft_ms: soon}").replace(SHORT, f"{SHORT}, request_timeout_s: 1")
    )
    assert [mistake for mistake in wrong if "request_timeout_s" in mistake] == []


def test_without_an_slo_any_deadline_will_do() -> None:
    text = MINIMAL.replace(OLD, "search: {method: fixed, rates: [1]}")
    assert parse(text).request_timeout_s == 60.0
    assert parse(text.replace(SHORT, f"{SHORT}, request_timeout_s: 1")).request_timeout_s == 1.0


def test_the_schema_says_so() -> None:
    key = scenario_schema(REGISTRY)["$defs"]["Workload"]["properties"]["request_timeout_s"]
    assert "a multiple of what the SLO's limits allow" in key["description"]
    assert key["default"] is None
