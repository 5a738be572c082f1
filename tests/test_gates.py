"""Each lie is caught by the gate that is meant for it; an honest trial trips none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.evidence import ClientFigures, EngineFigures, Evidence, HostFigures
from kvbench.core.gates import GATES, early_verdict, judge
from kvbench.core.metrics import Slo, summarise
from kvbench.core.records import RequestRecord

SLO = Slo(ttft_ms=200, tpot_ms=20, attainment=0.95)
N, INPUT, KV_BYTES = 100, 1000, 4096.0


def request(i: int, ttft_s: float = 0.1, rate: float = 25.0, **changes: Any) -> RequestRecord:
    at, first = i / rate, i / rate + ttft_s
    record = RequestRecord(
        f"r{i}", at, INPUT, 5, sent_s=at, first_token_s=first, last_token_s=first + 0.04, output_len=5
    )
    return replace(record, itl_s=[0.01] * 4, status=200, **changes)


def failed(i: int, error: str = "http_error") -> RequestRecord:
    return RequestRecord(
        f"f{i}", i / 25, INPUT, 5, sent_s=i / 25, status=500, error=error, error_detail="boom"
    )


GOOD = [request(i) for i in range(N)]
BAD = [request(i, ttft_s=0.3 if i % 5 == 0 else 0.1) for i in range(N)]
PREFILL = EngineFigures(
    prompt_tokens=N * INPUT,
    prefix_queries=N * INPUT,
    prefix_hits=0,
    requests=N,
    kv_transfers=N,
    kv_bytes=N * KV_BYTES,
    kv_failures=0,
    step_lag_s=0.01,
    steps=1000,
    step_lag_p99_s=0.001,
    busy_s=3.0,
)
DECODE = EngineFigures(
    prompt_tokens=N * INPUT,
    prompt_tokens_by_source={"local_compute": 0, "external_kv_transfer": N * INPUT},
    prefix_queries=N * INPUT,
    prefix_hits=0,
    requests=N,
    preemptions=0,
    step_lag_s=0.01,
    steps=1000,
    step_lag_p99_s=0.001,
    busy_s=3.0,
)


def evidence(records: list[RequestRecord], slo: Slo = SLO, **changes: Any) -> Evidence:
    base = Evidence(
        records=records,
        summary=summarise(records, slo, 25.0, 4.2),
        slo=slo,
        client=ClientFigures(0.1, 1.0, 0.5, 0.1),
        engines={"prefill": PREFILL, "decode": DECODE},
        host=HostFigures(0.5, 2, 0.0),
        kv_bytes_per_request=KV_BYTES,
        transport_asked="tcp",
        transport_ran="tcp",
    )
    return replace(base, **changes)


def engines(prefill: Mapping[str, Any] = {}, decode: Mapping[str, Any] = {}) -> dict[str, EngineFigures]:
    return {"prefill": replace(PREFILL, **prefill), "decode": replace(DECODE, **decode)}


def fired(found: Evidence) -> dict[str, str]:
    return {finding.gate: finding.level for finding in judge(found)[2]}


def test_an_honest_trial_trips_no_gate() -> None:
    verdict, reason, findings = judge(evidence(GOOD))
    assert (verdict, findings) == ("met", [])
    assert reason.startswith("90 of 90 requests (100.0%) within the SLO, 95.0% asked")
    verdict, reason, findings = judge(evidence(BAD))
    assert (verdict, findings) == ("missed", [])
    assert "18 × ttft" in reason


def test_unknown_figures_trip_no_gate() -> None:
    bare = Evidence(GOOD, summarise(GOOD, SLO, 25.0, 4.2), SLO)
    assert judge(bare)[2] == []
    assert judge(replace(bare, engines={"prefill": EngineFigures(), "decode": EngineFigures()}))[2] == []


LIES: list[tuple[str, str, Evidence]] = [
    ("warm_cache", "invalid", evidence(GOOD, engines=engines({"prefix_hits": 0.02 * N * INPUT}))),
    ("warm_cache", "invalid", evidence(GOOD, engines=engines(decode={"prefix_hits": 0.5 * N * INPUT}))),
    ("prefill_skipped", "invalid", evidence(GOOD, engines=engines({"prompt_tokens": 0}))),
    ("prefill_repeated", "invalid", evidence(GOOD, engines=engines({"prompt_tokens": 2 * N * INPUT}))),
    (
        "decode_recomputed",
        "invalid",
        evidence(GOOD, engines=engines(decode={"prompt_tokens_by_source": {"local_compute": N * INPUT}})),
    ),
    (
        "decode_recomputed",
        "invalid",
        evidence(GOOD, engines=engines(decode={"prompt_tokens_by_source": {"external_kv_transfer": 0.0}})),
    ),
    (
        "decode_recomputed",
        "warning",
        evidence(
            GOOD,
            engines=engines(
                decode={
                    "prompt_tokens_by_source": {
                        "local_compute": 5 * INPUT,
                        "external_kv_transfer": N * INPUT,
                    },
                    "preemptions": 5,
                }
            ),
        ),
    ),
    ("kv_bytes_wrong", "invalid", evidence(GOOD, engines=engines({"kv_bytes": 0.5 * N * KV_BYTES}))),
    ("kv_bytes_wrong", "invalid", evidence(GOOD, engines=engines({"kv_bytes": 2 * N * KV_BYTES}))),
    ("kv_failures", "invalid", evidence(GOOD, engines=engines(decode={"kv_failures": 1}))),
    ("wrong_transport", "invalid", evidence(GOOD, transport_asked="rdma", transport_ran="tcp")),
    ("wrong_transport", "invalid", evidence(GOOD, transport_asked="rdma", transport_ran="ucx:tcp/lo")),
    ("hidden_retries", "invalid", evidence(GOOD, engines=engines({"requests": N + 1}))),
    ("lost_requests", "invalid", evidence(GOOD, engines=engines(decode={"requests": N - 1}))),
    ("server_restarted", "invalid", evidence(GOOD, engines=engines(decode={"requests": -40}))),
    ("emulator_behind", "warning", evidence(GOOD, engines=engines({"step_lag_s": 1.2}))),
    ("emulator_behind", "warning", evidence(BAD, engines=engines({"step_lag_p99_s": 0.006}))),
    ("emulator_behind", "invalid", evidence(GOOD, engines=engines({"step_lag_s": 2.5}))),
    ("emulator_behind", "invalid", evidence(GOOD, engines=engines({"step_lag_p99_s": 0.3}))),
    ("machine_disturbed", "warning", evidence(GOOD, host=HostFigures(5.0, 2, 0.0, 0.3))),
    ("machine_disturbed", "warning", evidence(GOOD, host=HostFigures(None, None, 0.1))),
    ("client_limited", "warning", evidence(GOOD, client=ClientFigures(send_lag_p99_ms=8))),
    ("client_limited", "invalid", evidence(GOOD, client=ClientFigures(loop_lag_p99_ms=80))),
    ("client_limited", "warning", evidence(BAD, client=ClientFigures(send_lag_p99_ms=8))),
]


@pytest.mark.parametrize(
    ("gate", "level", "lie"), LIES, ids=[f"{gate}-{i}" for i, (gate, _, _) in enumerate(LIES)]
)
def test_each_lie_is_caught(gate: str, level: str, lie: Evidence) -> None:
    assert fired(lie).get(gate) == level
    verdict, reason, findings = judge(lie)
    assert (verdict == "invalid") == ("invalid" in fired(lie).values())
    for finding in findings:
        assert finding.message
        assert finding.advice
        json.dumps(asdict(finding), allow_nan=False)
    assert reason


def test_a_late_client_refuses_a_miss_that_it_may_have_caused() -> None:
    # 300 ms would be missed without the client's lag as well; 205 ms would not.
    barely = [request(i, ttft_s=0.205 if i % 5 == 0 else 0.1) for i in range(N)]
    assert judge(evidence(barely))[0] == "missed"
    assert judge(evidence(barely, client=ClientFigures(send_lag_p99_ms=8)))[0] == "invalid"
    assert judge(evidence(BAD, client=ClientFigures(send_lag_p99_ms=8)))[0] == "missed"


def test_the_transport_may_be_one_of_several() -> None:
    assert fired(evidence(GOOD, transport_asked="tcp, cma", transport_ran="CMA")) == {}
    assert fired(evidence(GOOD, transport_asked="", transport_ran="tcp")) == {}
    assert fired(evidence(GOOD, transport_asked="tcp", transport_ran="")) == {}


def test_asked_for_reuse_is_no_lie() -> None:
    warm = engines({"prefix_hits": 0.5 * N * INPUT})
    assert fired(evidence(GOOD, engines=warm, reuse_expected=True)) == {}


def test_failed_requests_are_misses_and_a_dead_server_is_no_measurement() -> None:
    some = [failed(i) if i in (50, 51) else record for i, record in enumerate(GOOD)]
    assert fired(evidence(some)) == {"failed_requests": "warning"}
    assert judge(evidence(some))[0] == "met"
    verdict, reason, _ = judge(evidence([failed(i) for i in range(N)], engines={}))
    assert verdict == "invalid"
    assert reason == "server errors: 100 of 100 requests failed (100 × http_error); the first: boom"


def test_an_overload_whose_late_requests_time_out_is_missed() -> None:
    late = [record if i < 20 else failed(i, "timeout") for i, record in enumerate(GOOD)]
    assert judge(evidence(late))[0] == "missed"


def test_wrong_lengths() -> None:
    wrong = [
        replace(record, error="wrong_length", output_len=3) if i > 60 else record
        for i, record in enumerate(GOOD)
    ]
    verdict, reason, _ = judge(evidence(wrong))
    assert verdict == "invalid"
    assert "39 of 100 answers had a wrong length, as 3 tokens instead of 5" in reason


def test_too_few_requests_for_the_target() -> None:
    few = [request(i) for i in range(10)]
    verdict, reason, _ = judge(evidence(few, engines={}))
    assert (verdict, "fewer than 20" in reason) == ("invalid", True)
    assert judge(evidence([request(i, 1.0) for i in range(10)], engines={}))[0] == "missed"  # no doubt left
    assert judge(evidence([], engines={}))[0] == "invalid"


def test_a_growing_queue_is_missed_though_every_request_is_in_time() -> None:
    slow = Slo(ttft_ms=5000, attainment=0.95)
    growing = [request(i, ttft_s=0.1 + i * 0.02) for i in range(N)]
    found = evidence(growing, slow, engines={})
    assert found.attained
    verdict, reason, findings = judge(found)
    assert verdict == "missed"
    assert reason.startswith("the queue grows: by ")
    assert {finding.gate: finding.level for finding in findings} == {
        "growing_queue": "warning",
        "too_short": "warning",
    }


def test_no_false_alarm_of_the_growing_queue_in_stable_queues() -> None:
    alarms = 0
    for seed in range(50):  # M/D/1 at 85 % load, 20 ms of service
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(0.02 / 0.85, 170))
        free, records = 0.0, []
        for i, at in enumerate(arrivals.tolist()):
            free = max(free, at) + 0.02
            records.append(
                RequestRecord(
                    str(i), at, 1, 1, sent_s=at, first_token_s=free, last_token_s=free, output_len=1
                )
            )
        summary = summarise(records, SLO, 0.85 / 0.02, free)
        alarms += "growing_queue" in fired(Evidence(records, summary, SLO))
    assert alarms == 0


def test_a_trial_stopped_early_keeps_its_live_verdict_and_its_counters_fit() -> None:
    records = [request(i, 0.3) for i in range(40)]
    records += [
        RequestRecord(f"c{i}", i / 25, INPUT, 5, sent_s=i / 25, error="cancelled") for i in range(40, 50)
    ]
    stopped = evidence(records, stopped_as="missed", engines=engines())
    partly = {
        "prompt_tokens": 45 * INPUT,
        "prefix_queries": 45 * INPUT,
        "requests": 45,
        "kv_bytes": 45 * KV_BYTES,
    }
    source = {"prompt_tokens_by_source": {"external_kv_transfer": 45 * INPUT}}
    stopped = replace(stopped, engines=engines(partly, {**partly, **source}))
    verdict, reason, findings = judge(stopped)
    assert (verdict, findings) == ("missed", [])
    assert reason.endswith("stopped early as missed")


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_judge_is_total(good: int, bad: int, errors: int, with_engines: bool) -> None:
    records = [request(i) for i in range(good)] + [request(good + i, 0.5) for i in range(bad)]
    records += [failed(good + bad + i, "connect") for i in range(errors)]
    verdict, reason, findings = judge(evidence(records, engines=engines() if with_engines else {}))
    assert reason
    assert (verdict == "invalid") == any(finding.level == "invalid" for finding in findings)
    assert len(findings) <= len(GATES)


@pytest.mark.parametrize(
    ("met", "missed", "planned", "verdict"),
    [
        (0, 0, 100, None),
        (20, 5, 100, None),
        (20, 14, 100, None),  # 10 of them may belong to the warm-up, 4 are allowed
        (20, 15, 100, "missed"),
        (95, 1, 100, None),
        (96, 0, 100, "met"),
        (0, 8, 60, None),
        (0, 9, 60, "missed"),
        (200, 240, 2000, "missed"),  # by evidence: arithmetic asks for 291 misses
        (2, 200, 2000, None),  # a slow start of nothing but the warm-up
        (900, 20, 2000, None),
        (0, 0, 0, None),
    ],
)
def test_early_verdict(met: int, missed: int, planned: int, verdict: str | None) -> None:
    assert early_verdict(met, missed, planned, SLO, 0.95) == verdict


def test_an_early_verdict_agrees_with_the_judge() -> None:
    random = np.random.default_rng(3)
    for _ in range(300):
        n = int(random.integers(60, 200))
        late = random.random(n) < random.uniform(0, 0.2)
        verdicts = [
            judge(evidence([request(i, 0.3 if bad else 0.1) for i, bad in enumerate(late)], engines={}))[0]
        ]
        for i in range(1, n + 1):
            missed = int(late[:i].sum())
            live = early_verdict(i - missed, missed, n, SLO, 0.99)
            if live is not None:
                assert live == verdicts[0]
                break
