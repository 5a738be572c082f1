"""What a scenario may say of its goals: SLO forms, tiers, methods, traces. Parser and JSON Schema agree."""

from __future__ import annotations

import json

import pytest
import yaml

from kvbench.core.scenario.checks import contradictions
from kvbench.core.scenario.scenario import scenario_schema
from kvbench.core.slo import Limit, Slo
from tests.core.scenario.test_scenario import MINIMAL, REGISTRY, fits, mistakes, parse

SCHEMA = scenario_schema(REGISTRY)
OLD = "slo: {ttft_ms: 250}"


@pytest.mark.parametrize(("old", "new"), [
    (OLD, 'slo: {limits: ["ttft_ms p90 <= 5000", {metric: tpot_ms, statistic: mean, limit: 50}]}'),
    (OLD, "slo: {ttft_ms: 250, limits: [tpot p99 <= 20]}"),
    (OLD, "slo: {tiers: {fast: {ttft_ms: 100}, slow: {limits: [ttft p50 <= 5000]}}, attainment: 0.9}"),
    (OLD, f"{OLD}\nsearch: {{method: burst}}"),
    (OLD, f"{OLD}\nsearch: {{compare_burst: true, equal_rate: false, max_trial_s: 40}}"),
    (OLD, "search: {method: fixed, rates: [1, 2.5, 4]}"),
    (OLD, "search: {method: trace}"),
])  # fmt: skip
def test_goals_that_are_accepted(old: str, new: str) -> None:
    text = MINIMAL.replace(old, new)
    if "method: trace" in text:
        text = text.replace("input_len: 64", "trace: {path: t.jsonl, time_scale: 0.5}, input_len: 64")
    scenario = parse(text)
    assert fits(SCHEMA, yaml.safe_load(text), SCHEMA)
    assert parse(json.dumps(scenario.resolved())) == scenario


@pytest.mark.parametrize(("old", "new", "message"), [
    (OLD, "slo: {limits: [ttft p90 >= 5]}", "is not a limit; expected such as"),
    (OLD, "slo: {limits: [{metric: ttft_ms, limit: 5, unit: s}]}", "but no `unit`"),
    (OLD, "slo: {limits: [ttft p90 <= 5, ttft p90 <= 6]}", "repeats the metric and the statistic"),
    (OLD, "slo: {ttft_ms: 5, tiers: {a: {ttft_ms: 9}}}", "slo.ttft_ms conflicts with slo.tiers"),
    (OLD, "slo: {tiers: {a: {attainment: 0.9}}}", "slo.tiers.a needs a limit"),
    (OLD, "slo: {tiers: {a: {ttft: 9}}}", "unknown key `ttft` in slo.tiers.a; did you mean `ttft_ms`?"),
    (OLD, f"{OLD}\nsearch: {{method: fixed}}", "method fixed needs search.rates"),
    (OLD, f"{OLD}\nsearch: {{rates: [1]}}", "search.rates are for method fixed"),
    (OLD, f"{OLD}\nsearch: {{method: trace}}", "method trace needs workload.trace"),
    (OLD, f"{OLD}\nsearch: {{method: burst, compare_burst: true}}", "needs method sustained"),
    (OLD, "slo: {tiers: {a: {ttft_ms: 9}}}\nsearch: {method: burst}", "one SLO, not tiers"),
    ("input_len: 64", "trace: {path: t}, input_len: 64", "workload.trace is for method trace"),
    (OLD, "search: {method: sustained}", "the scenario needs the key `slo`"),
])  # fmt: skip
def test_goals_that_contradict_themselves(old: str, new: str, message: str) -> None:
    assert old in MINIMAL
    assert any(message in mistake for mistake in mistakes(MINIMAL.replace(old, new)))


def test_an_old_slo_reads_as_it_did() -> None:
    slo = parse(MINIMAL).slo
    assert (slo.ttft_ms, slo.tpot_ms, slo.attainment) == (250, None, 0.95)
    assert slo.main() == Slo(250)
    assert slo.by_tier() == {"": Slo(250)}


def test_tiers_inherit_the_attainment_and_begin_with_the_strictest() -> None:
    tiers = "slo: {attainment: 0.8, tiers: {slow: {limits: [ttft p50 <= 900]}, fast: {ttft_ms: 9}}}"
    slo = parse(MINIMAL.replace(OLD, tiers)).slo
    assert slo.by_tier() == {
        "fast": Slo(9, None, 0.8),
        "slow": Slo(None, None, 0.8, (Limit("ttft_ms", "p50", 900),)),
    }
    assert slo.main() == Slo(9, None, 0.8)


def test_a_trace_stands_in_for_lengths() -> None:
    text = MINIMAL.replace(OLD, "search: {method: trace}")
    text = text.replace("input_len: 64, output_len: 4", "trace: {path: t.jsonl, longest: 900}")
    scenario = parse(text)
    assert scenario.workload.trace is not None
    assert scenario.workload.longest == 900
    assert fits(SCHEMA, yaml.safe_load(text), SCHEMA)
    assert not scenario.slo.given


@pytest.mark.parametrize(("engine", "fine"), [("external", True), ("emulated", False)])
def test_an_empty_slo_is_for_one_load_of_a_server_that_is_up(engine: str, fine: bool) -> None:
    data = {"deployment": {"engine": engine}, "slo": {}, "workload": {"input_len": [8], "output_len": 2}}
    texts = [contradiction.text for contradiction in contradictions(data)]
    assert any("slo needs a limit" in text for text in texts) is not fine
