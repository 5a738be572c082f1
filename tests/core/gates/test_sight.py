"""What each gate needs is said, and a gate that lacks it is named: its silence proves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.core.gates.evidence import ClientFigures, EngineFigures, Evidence
from kvbench.core.gates.gates import COUNTERS, GATES, NEEDS, unseen
from kvbench.core.metrics.metrics import summarise
from tests.core.gates.test_gates import GOOD, SLO, engines, evidence, fired, judge

STREAMED = [
    replace(r, prompt_tokens=r.input_len, text_crc=i, text_bytes=20, first_event_s=r.first_token_s)
    for i, r in enumerate(GOOD)
]


def blind(found: Evidence) -> set[str]:
    return {gate for gates in unseen(found).values() for gate in gates}


def test_only_gates_need_something() -> None:
    assert set(NEEDS) <= set(GATES)


def test_a_foreign_server_s_trial_names_what_its_counters_would_have_shown() -> None:
    bare = Evidence(STREAMED, summarise(STREAMED, SLO, 25.0, 4.2), SLO, client=ClientFigures(0.1, 1.0))
    assert {"warm_cache", "prefill_skipped", "unequal_instances", "hidden_retries"} - blind(bare) == {
        "hidden_retries"  # a finding of requests_lost_or_repeated
    }
    assert "requests_lost_or_repeated" in unseen(bare)[COUNTERS]
    assert not blind(bare) & {"wrong_prompt_length", "inflated_usage", "kv_failures", "two_populations"}
    assert "same_answers" in blind(bare)  # five tokens are too few


@pytest.mark.parametrize(("changes", "gates"), [
    ({"prompt_tokens": None}, {"wrong_prompt_length"}),
    ({"text_crc": None}, {"empty_answers", "inflated_usage"}),
    ({"itl_s": []}, {"early_first_token", "tokens_per_event", "inflated_usage"}),
    ({"first_event_s": None}, {"empty_first_event"}),
    ({"stamps": ""}, {"answer_at_once", "impossible_answers"}),
])  # fmt: skip
def test_what_answers_do_not_tell_blinds_its_gates(changes: dict[str, object], gates: set[str]) -> None:
    seen = blind(evidence(STREAMED))
    lacking = blind(evidence([replace(r, **changes) for r in STREAMED]))  # type: ignore[arg-type]
    assert not gates & seen
    assert gates <= lacking


def test_a_pair_s_counters_open_the_eyes() -> None:
    counters = engines({"served": (N_HALF, N_HALF), "kv_expired": 0.0}, {"served": (N_HALF, N_HALF)})
    assert not blind(evidence(STREAMED, engines=counters)) & {
        "warm_cache",
        "prefill_skipped",
        "unequal_instances",
    }
    nothing = {"prefill": EngineFigures(), "decode": EngineFigures()}
    assert {"kv_failures", "kv_bytes_wrong", "decode_recomputed"} <= blind(
        evidence(STREAMED, engines=nothing)
    )


N_HALF = len(GOOD) / 2


@pytest.mark.parametrize(("served", "level"), [
    ((100.0, 0.0), "warning"), ((85.0, 15.0), "warning"), ((60.0, 40.0), None), ((100.0,), None), ((), None),
])  # fmt: skip
def test_an_idle_instance_is_named(served: tuple[float, ...], level: str | None) -> None:
    found = evidence(GOOD, engines=engines(decode={"served": served}))
    assert (fired(found).get("unequal_instances"), judge(found)[0]) == (level, "met")


def test_tokens_count_where_requests_do_not() -> None:
    """Instances that count tokens serve as many requests as their part of them."""
    found = evidence(GOOD, engines=engines(decode={"served": (50_000.0, 100.0)}))
    finding = next(result for result in judge(found)[2] if result.gate == "unequal_instances")
    assert "1 of 2 decode instances were idle" in finding.message
