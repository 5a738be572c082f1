"""Another user's answer is found among all answers of a load, and honest equal ones are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.gates.answers import repeated_answers
from kvbench.core.gates.evidence import Evidence
from kvbench.core.metrics.equal_answers import CERTAIN_TEXTS, LONG_BYTES, LONG_TOKENS, equal_answers
from kvbench.core.metrics.metrics import summarise
from kvbench.core.records import Finding, RequestRecord
from kvbench.core.slo import Slo

SLO = Slo(ttft_ms=1000)
RATE, TAKES_S = 30.0, 0.4
"""About twelve requests are under way at once."""


def load(texts: Sequence[int], seed: int = 1, **changes: Any) -> list[RequestRecord]:
    """Requests with these texts (as CRCs), sent at random times."""
    sent = np.cumsum(np.random.default_rng(seed).exponential(1 / RATE, len(texts))).tolist()
    return [
        replace(
            RequestRecord(f"r{place}", at, 64, LONG_TOKENS, at, at + 0.1, at + TAKES_S, LONG_TOKENS),
            **{"text_crc": int(text), "text_bytes": 2 * LONG_BYTES, **changes},
        )
        for place, (at, text) in enumerate(zip(sent, texts, strict=True))
    ]


def found(records: list[RequestRecord], **changes: Any) -> Finding | None:
    return repeated_answers(Evidence(records, SUMMARY, SLO, **changes))


SUMMARY = summarise(load(range(30)), SLO, RATE, 2.0)
"""The gate reads none of it."""


def swapped(n: int, every: int, back: int = 3) -> list[int]:
    """Of every so many requests one gets the answer of the request ``back`` places before."""
    return [n + place - back if place % every == every - 1 else n + place for place in range(n)]


def idle(*texts: int) -> CanaryResult:
    return CanaryResult(len(texts), idle=tuple((text, 2 * LONG_BYTES) for text in texts))


@pytest.mark.parametrize(("n", "every"), [(1800, 20), (180, 20), (600, 100)])
def test_five_per_cent_and_less_of_other_users_answers_are_found(n: int, every: int) -> None:
    finding = found(load(swapped(n, every)))
    assert (finding.level, finding.evidence["at_the_same_time"]) == ("invalid", n // every)
    assert finding.evidence["pairs"][0] == [f"r{every - 4}", f"r{every - 1}"]
    assert f"r{every - 4} and r{every - 1} got the same" in finding.message


def test_a_stale_answer_of_the_request_before_is_found_where_none_is_under_way() -> None:
    records = [replace(record, last_token_s=record.sent_s) for record in load(swapped(300, 50, back=1))]
    assert found(records) is not None


def test_answers_from_any_time_are_found_by_the_idle_ones() -> None:
    """Every second answer is one of few old ones, whenever they were."""
    texts = [place % 40 if place % 2 else 1000 + place for place in range(400)]
    assert found(load(texts)) is None
    finding = found(load(texts), canaries=idle(*range(10_000, 10_018)))
    assert "200 of 400 answers under load repeat another one's text, of 18 idle ones 0" in finding.message
    # An idle server that gives them as often is an honest one.
    assert found(load(texts), canaries=idle(*range(10), *range(20_000, 20_008))) is None


def test_a_few_canaries_that_have_the_idle_answers_are_no_evidence() -> None:
    records = load(range(1000))
    for place in range(18):
        records[50 * place].canary = place
    assert found(records, canaries=idle(*(50 * place for place in range(18)))) is None


HONEST = {
    "all different": lambda random, n: random.integers(0, 2**31, n),
    "one greedy text for a fifth of the prompts": lambda random, n: np.where(
        random.random(n) < 0.2, 7, random.integers(0, 2**31, n)
    ),
    "many greedy texts, most of them once or twice": lambda random, n: random.integers(0, n, n),
    "texts by Zipf's law": lambda random, n: random.zipf(1.5, n) % 2**31,
    "all blank": lambda random, n: np.zeros(n),
}


@pytest.mark.parametrize("kind", HONEST)
def test_honest_equal_answers_raise_no_alarm(kind: str) -> None:
    """At 1 alarm of 1,000 trials, 60 trials have more than one in fewer than 1 of 500 cases."""
    random, alarms = np.random.default_rng(sorted(HONEST).index(kind)), 0
    for _ in range(60):
        texts = HONEST[kind](random, 198).astype(int).tolist()
        records = load(texts[:180], int(random.integers(2**31)))
        alarms += found(records, canaries=idle(*texts[180:])) is not None
    assert alarms <= 1


def test_short_answers_are_not_compared() -> None:
    """Shorter ones may be equal by chance: fewer than 16 tokens, or 32 bytes, as of blank texts."""
    assert found(load(swapped(1800, 20), output_len=LONG_TOKENS - 1)) is None
    assert found(load(swapped(1800, 20), text_bytes=LONG_BYTES - 1)) is None
    assert equal_answers(load(swapped(1800, 20), text_bytes=LONG_BYTES - 1)).answers == 0
    assert found(load(swapped(1800, 20), text_bytes=LONG_BYTES)) is not None


def test_prompts_with_equal_beginnings_and_dummy_weights_refuse_nothing() -> None:
    assert found(load(swapped(1800, 20)), reuse_expected=True) is None
    finding = found(load(swapped(1800, 20)), dummy_weights=True)
    assert finding.level == "warning"


def test_lengths_that_change_with_time_are_compared_among_themselves() -> None:
    """A trace whose second half has longer answers: equal greedy texts are nearer than in all of the load."""
    random = np.random.default_rng(5)
    alarms = 0
    for _ in range(40):
        texts = random.integers(0, 200, 300).tolist()
        records = load(texts, int(random.integers(2**31)))
        for record in records[30:]:
            record.output_len, record.text_crc = LONG_TOKENS + 1, 10_000 + (record.text_crc or 0)
        alarms += found(records) is not None
    assert alarms <= 1


def test_one_text_alone_refuses_nothing() -> None:
    texts = list(range(100_000, 105_000))
    texts[2500] = texts[2499]
    alone = equal_answers(load(texts))
    assert alone.expected < 0.01
    assert alone.neighbours == 1 < CERTAIN_TEXTS
    assert found(load(texts)) is None
