"""Each lie is caught by the gate that is meant for it; an honest trial trips none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.gates.client import host_starved
from kvbench.core.gates.evidence import (
    EMULATED,
    ClientFigures,
    EngineFigures,
    Evidence,
    HostFigures,
    LoggedTransport,
    NicFigures,
    RouterFigures,
)
from kvbench.core.gates.gates import GATES, gate_table, judge
from kvbench.core.gates.transfer import plain_transport
from kvbench.core.metrics.metrics import Slo, summarise
from kvbench.core.physics import Hardware, PrefillWork, hardware_of, peak_flops, prefill_work
from kvbench.core.records import RequestRecord
from kvbench.core.slo import Limit

SLO = Slo(ttft_ms=200, tpot_ms=20, attainment=0.95)
N, INPUT, KV_BYTES = 100, 1000, 4096.0
RECORDED = Path(__file__).parents[2] / "recorded" / "gates" / "said.txt"


def request(
    i: int, ttft_s: float = 0.1, rate: float = 25.0, gap_s: float = 0.01, **changes: Any
) -> RequestRecord:
    at, first = i / rate, i / rate + ttft_s
    record = RequestRecord(
        f"r{i}", at, INPUT, 5, sent_s=at, first_token_s=first, last_token_s=first + 4 * gap_s, output_len=5
    )
    return replace(record, itl_s=[gap_s] * 4, status=200, stamps="kernel", **changes)


def failed(i: int, error: str = "http_error") -> RequestRecord:
    return RequestRecord(
        f"f{i}", i / 25, INPUT, 5, sent_s=i / 25, status=500, error=error, error_detail="boom"
    )


GOOD = [request(i) for i in range(N)]
BAD = [request(i, ttft_s=0.3 if i % 5 == 0 else 0.1) for i in range(N)]
PREFILL = EngineFigures(
    prompt_tokens=N * INPUT, prefix_queries=N * INPUT, prefix_hits=0, requests=N, kv_transfers=N,
    kv_bytes=N * KV_BYTES, kv_failures=0, step_lag_s=0.01, steps=1000, step_lag_p99_s=0.001, busy_s=3.0,
)  # fmt: skip
DECODE = EngineFigures(
    prompt_tokens=N * INPUT, prompt_tokens_by_source={"local_compute": 0, "external_kv_transfer": N * INPUT},
    prefix_queries=N * INPUT, prefix_hits=0, requests=N, preemptions=0, generation_tokens=N * 5, slots=64,
    step_lag_s=0.01, steps=1000, step_lag_p99_s=0.001, busy_s=3.0,
)  # fmt: skip


def evidence(records: list[RequestRecord], slo: Slo = SLO, **changes: Any) -> Evidence:
    base = Evidence(
        records=records, summary=summarise(records, slo, 25.0, 4.2), slo=slo,
        client=ClientFigures(0.1, 1.0, 0.5, 0.1), engines={"prefill": PREFILL, "decode": DECODE},
        host=HostFigures(0.5, 2, 0.0), router=RouterFigures(cpu_s=1.0, seconds=4.2, loop_lag_p99_s=0.001),
        kv_bytes_per_request=KV_BYTES, requested_transport="tcp", transport_ran="tcp",
    )  # fmt: skip
    return replace(base, **changes)


def engines(prefill: Mapping[str, Any] = {}, decode: Mapping[str, Any] = {}) -> dict[str, EngineFigures]:
    return {"prefill": replace(PREFILL, **prefill), "decode": replace(DECODE, **decode)}


def counted(prefill: Mapping[str, Any] = {}, decode: Mapping[str, Any] = {}, **changes: Any) -> Evidence:
    """A good trial whose engines counted so."""
    return evidence(GOOD, engines=engines(prefill, decode), **changes)


def bare(records: list[RequestRecord], slo: Slo = SLO) -> Evidence:
    """A trial of which the requests alone are known."""
    return evidence(records, slo, engines={}, kv_bytes_per_request=None)


def fired(found: Evidence) -> dict[str, str]:
    return {finding.gate: finding.level for finding in judge(found)[2]}


def test_an_honest_trial_trips_no_gate() -> None:
    verdict, reason, findings = judge(evidence(GOOD))
    assert (verdict, findings) == ("met", [])
    assert reason.startswith("90 of 90 requests (100.0%) within the SLO, target 95.0%")
    verdict, reason, findings = judge(evidence(BAD))
    assert (verdict, findings) == ("missed", [])
    assert "18 missed TTFT" in reason


def test_unknown_figures_trip_no_gate() -> None:
    known = Evidence(GOOD, summarise(GOOD, SLO, 25.0, 4.2), SLO)
    assert judge(known)[2] == []
    assert judge(replace(known, engines={"prefill": EngineFigures(), "decode": EngineFigures()}))[2] == []


def shed(i: int) -> RequestRecord:
    return replace(failed(i), status=503)


IDLE_RDMA = NicFigures("rdma", 1e3, 1e3, 5e10)
BUSY_RDMA = NicFigures("rdma", 5e6, 5e6, 5e10)
PULLED = LoggedTransport(
    "decode-0", ("tcp/eth1",), "read", "intra-node", "cuda", "cuda", EMULATED,
    "| 0..inf | software emulation |",
)  # fmt: skip
"""What a log proves in the case of vLLM issue 52607."""


TCP_BUSY = NicFigures("ip", 5e6, 5e6, None, True)


def logged(*proven: LoggedTransport, requested: str = "", nics: Mapping[str, NicFigures] = {}) -> Evidence:
    """A trial whose engines' logs prove the KV's way."""
    return evidence(
        GOOD, requested_transport=requested, transport_ran="", logged_transports=proven, disaggregated=True,
        host=HostFigures(nics=nics), engines=engines(decode={"kv_bytes": 5e9, "kv_seconds": 10.0}),
        kv_bytes_per_request=None,
    )  # fmt: skip


def over(nics: Mapping[str, NicFigures], tls: str, *names: str) -> Evidence:
    """A trial that moved 5 MB of KV, with what the NICs counted of it."""
    return evidence(
        GOOD, engines=engines({"kv_bytes": 5e6}), kv_bytes_per_request=5e6 / N, host=HostFigures(nics=nics),
        requested_transport=tls, transport_ran=tls.partition(",")[0], requested_nics=names, engines_here=True,
    )  # fmt: skip


BOTH_SOURCES = {"local_compute": 5 * INPUT, "external_kv_transfer": N * INPUT}
PREEMPTED = {"prompt_tokens_by_source": BOTH_SOURCES, "preemptions": 5}
SLOTS_FULL = {"running_peak": 4, "queued_samples": 9, "full_samples": 9}
LONG = [request(i, gap_s=0.1) for i in range(N)]
"""0.4 s in a slot each, 25 requests a second: 10 slots."""
LIES: list[tuple[str, str, Evidence]] = [
    ("warm_cache", "invalid", counted({"prefix_hits": 0.02 * N * INPUT})),
    ("warm_cache", "invalid", counted(decode={"prefix_hits": 0.5 * N * INPUT})),
    (
        "warm_cache",  # of sessions: more than their prompts have in common
        "invalid",
        counted({"prefix_hits": 0.72 * N * INPUT}, reuse_expected=True, reuse_offered=0.7 * N * INPUT),
    ),
    ("prefill_skipped", "invalid", counted({"prompt_tokens": 0})),
    ("prefill_repeated", "invalid", counted({"prompt_tokens": 2 * N * INPUT})),
    ("decode_recomputed", "invalid",
     counted(decode={"prompt_tokens_by_source": {"local_compute": N * INPUT}})),
    ("decode_recomputed", "invalid",
     counted(decode={"prompt_tokens_by_source": {"external_kv_transfer": 0.0}})),
    ("decode_recomputed", "warning", counted(decode=PREEMPTED)),
    ("kv_bytes_wrong", "invalid", counted({"kv_bytes": 0.5 * N * KV_BYTES})),
    ("kv_bytes_wrong", "invalid", counted({"kv_bytes": 2 * N * KV_BYTES})),
    ("kv_failures", "invalid", counted(decode={"kv_failures": 1})),
    ("wrong_transport", "invalid", evidence(GOOD, requested_transport="rdma", transport_ran="tcp")),
    ("wrong_transport", "invalid", evidence(GOOD, requested_transport="rdma", transport_ran="ucx:tcp/lo")),
    ("hidden_retries", "invalid", counted({"requests": N + 1})),
    ("lost_requests", "invalid", counted(decode={"requests": N - 1})),
    ("server_restarted", "invalid", counted(decode={"requests": -40})),
    ("emulator_behind", "warning", counted({"step_lag_s": 1.2})),
    ("emulator_behind", "warning", evidence(BAD, engines=engines({"step_lag_p99_s": 0.006}))),
    ("emulator_behind", "invalid", counted({"step_lag_s": 2.5})),
    ("emulator_behind", "invalid", counted({"step_lag_p99_s": 0.3})),
    ("emulator_behind", "warning", counted(decode={"transfer_lag_s": 0.3, "paced_s": 1.0})),
    ("emulator_behind", "invalid", counted(decode={"transfer_lag_s": 2.0, "paced_s": 1.0})),
    ("emulator_behind", "invalid", counted({"transfer_lag_p99_s": 0.3})),
    ("machine_disturbed", "warning", evidence(GOOD, host=HostFigures(5.0, 2, 0.0, 0.3))),
    ("machine_disturbed", "warning", evidence(GOOD, host=HostFigures(None, None, 0.1))),
    ("client_limited", "warning", evidence(GOOD, client=ClientFigures(send_lag_p99_ms=8))),
    ("client_limited", "invalid", evidence(GOOD, client=ClientFigures(loop_lag_p99_ms=80))),
    ("client_limited", "warning", evidence(BAD, client=ClientFigures(send_lag_p99_ms=8))),
    ("client_limited", "warning", evidence(GOOD, client=ClientFigures(chunk_lag_p99_ms=8, stamps="read"))),
    ("router_limited", "warning", evidence(GOOD, router=RouterFigures(cpu_s=4.0, seconds=4.2))),
    ("router_limited", "invalid", evidence(BAD, router=RouterFigures(cpu_s=4.0, seconds=4.2))),
    ("router_limited", "invalid", evidence(GOOD, router=RouterFigures(loop_lag_p99_s=0.1))),
    ("output_miscounted", "invalid", counted(decode={"generation_tokens": 3 * N})),
    ("server_restarted", "invalid", counted({"restarts": 1})),
    ("shedding", "invalid", evidence([shed(i) if i % 25 == 0 else r for i, r in enumerate(GOOD)])),
    ("shedding", "warning", evidence([shed(i) if i % 5 == 0 else r for i, r in enumerate(GOOD)])),
    ("slot_capped", "warning", evidence(LONG, engines=engines(decode=SLOTS_FULL))),
    ("wrong_transport", "invalid", over({"lo": NicFigures("ip", 5e6, 5e6, None, True)}, "rdma")),
    ("wrong_transport", "invalid", over({"mlx5_0": IDLE_RDMA, "ens1": NicFigures("ip", 5e6, 0)}, "rc,cuda")),
    ("wrong_transport", "warning", over({"mlx5_0": IDLE_RDMA, "ens1": NicFigures("ip", 0, 0)}, "rdma")),
    ("wrong_transport", "invalid", logged(PULLED)),
    ("wrong_transport", "invalid", logged(PULLED, requested="cuda_ipc,cuda_copy,tcp")),
    ("wrong_transport", "invalid", logged(PULLED, requested="rc")),
    ("wrong_transport", "warning", logged(replace(PULLED, between="inter-node"))),
    ("wrong_transport", "invalid", logged(replace(PULLED, between="inter-node"), nics={"mlx5_0": IDLE_RDMA})),
    ("wrong_transport", "warning", logged(replace(PULLED, local="host", remote="host"))),
    ("wrong_transport", "invalid", logged(replace(PULLED, transports=("srd/rdmap85s0:1",)))),
    ("wrong_transport", "warning", over({"lo": TCP_BUSY, "GPU 0 NVLink": NicFigures("nvlink", 0, 0)}, "")),
    ("wrong_nics", "invalid", over({"mlx5_0": BUSY_RDMA, "mlx5_1": IDLE_RDMA}, "rdma", "mlx5_0", "mlx5_1")),
    ("wrong_nics", "invalid", over({"mlx5_0": IDLE_RDMA, "mlx5_1": BUSY_RDMA}, "rdma", "mlx5_0")),
    ("wrong_nics", "warning", over({"mlx5_0": IDLE_RDMA, "mlx5_1": IDLE_RDMA}, "", "mlx5_0", "mlx5_1")),
    ("wrong_nics", "warning", over({"mlx5_0": BUSY_RDMA, "mlx5_1": BUSY_RDMA}, "rdma", "mlx5_0")),
    ("impossible_prefill", "invalid", evidence(GOOD, prefill_work=PrefillWork(1e9), prefill_flops=1e13)),
    ("impossible_transfer", "invalid", counted({"kv_seconds": N * KV_BYTES / 2e9}, kv_line_rate=1e9)),
    ("one_batch", "invalid", evidence([request(i, 0.1, 1000.0, gap_s=0.01) for i in range(N)])),
    ("not_steady", "invalid", evidence([request(i, gap_s=0.005 + 1.3e-4 * i) for i in range(N)])),
    ("machine_disturbed", "warning", evidence(GOOD, host=HostFigures(throttled_share=0.3))),
    ("machine_disturbed", "warning", evidence(GOOD, host=HostFigures(thermal_events=2))),
    ("machine_disturbed", "warning", evidence(GOOD, host=HostFigures(gpu_slowdowns=("GPU 0 (heat)",)))),
    ("machine_disturbed", "warning", over({"mlx5_0": replace(BUSY_RDMA, sent_bytes=2e8)}, "rdma", "mlx5_0")),
]  # fmt: skip


LIES += [
    ("wrong_prompt_length", "invalid", evidence([replace(r, prompt_tokens=INPUT // 2) for r in GOOD])),
    ("wrong_prompt_length", "invalid", evidence([replace(r, prompt_tokens=INPUT + 50) for r in GOOD])),
    ("wrong_prompt_length", "warning", evidence([replace(r, prompt_tokens=INPUT + 5) for r in GOOD])),
    ("wrong_prompt_length", "note", evidence([replace(r, prompt_tokens=INPUT + 1) for r in GOOD])),
    ("wrong_prompt_length", "warning",
     evidence([replace(GOOD[0], prompt_tokens=1), *(replace(r, prompt_tokens=INPUT) for r in GOOD[1:])])),
    ("tokens_per_event", "note", evidence([replace(r, itl_s=[0.02] * 2) for r in GOOD])),
    ("answer_at_once", "invalid", evidence([request(i, gap_s=0.0) for i in range(N)])),
    ("same_answers", "invalid",
     evidence([replace(r, output_len=9, requested_output_len=9, text_crc=7) for r in GOOD],
              engines=engines(decode={"generation_tokens": 9 * N}))),
]  # fmt: skip


def of_lengths(token_s: float) -> list[RequestRecord]:
    """Prompts of 128 and 4,096 tokens in turn, computed at that speed after 10 ms."""
    lengths = [128 if i % 2 else 4096 for i in range(N)]
    return [replace(request(i, 0.01 + token_s * n), input_len=n) for i, n in enumerate(lengths)]


LIES += [("prompts_unread", "warning", bare(of_lengths(0.0)))]


def test_prompts_that_take_their_time_by_length_are_read() -> None:
    for records in (of_lengths(1e-5), of_lengths(1e-6), [replace(r, stamps="") for r in of_lengths(0.0)]):
        assert "prompts_unread" not in fired(evidence(records, engines={}))
    assert "prompts_unread" not in fired(evidence(of_lengths(0.0), reuse_expected=True))


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


def test_what_is_said_of_each_lie() -> None:
    """Word for word, with the figures. Where it is meant to change: KVBENCH_RECORD=1 writes it anew."""
    lines = []
    for gate, _, lie in LIES:
        finding = next(result for result in judge(lie)[2] if result.gate == gate)
        lines.append(f"{gate} ({finding.level})\n  {finding.message}\n  {finding.advice}")
        lines += [f"    {name}: {value}" for name, value in sorted(rounded(finding.evidence).items())]
    text = "\n".join(lines) + "\n"
    if os.environ.get("KVBENCH_RECORD"):
        RECORDED.write_text(text, encoding="utf-8")
    assert text.splitlines() == RECORDED.read_text(encoding="utf-8").splitlines()


def rounded(value: Any) -> Any:
    """With floats to nine digits: the last ones are the machine's."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def test_a_late_client_refuses_a_miss_that_it_may_have_caused() -> None:
    # 300 ms would be missed without the client's lag as well; 205 ms would not.
    barely = [request(i, ttft_s=0.205 if i % 5 == 0 else 0.1) for i in range(N)]
    assert judge(evidence(barely))[0] == "missed"
    assert judge(evidence(barely, client=ClientFigures(send_lag_p99_ms=8)))[0] == "invalid"
    assert judge(evidence(BAD, client=ClientFigures(send_lag_p99_ms=8)))[0] == "missed"


def test_with_the_kernel_s_stamps_a_late_look_harms_what_was_read_together() -> None:
    late = ClientFigures(send_lag_p99_ms=1, chunk_lag_p99_ms=500, loop_lag_p99_ms=500, stamps="kernel")
    assert fired(evidence(GOOD, client=late)) == {}  # each chunk had a read, and so a stamp, of its own
    for error in ({"first_error_p99_ms": 6.0}, {"token_error_p99_ms": 6.0}):
        assert fired(evidence(GOOD, client=replace(late, **error))) == {"client_limited": "warning"}
        gross = dict.fromkeys(error, 60.0)
        assert fired(evidence(GOOD, client=replace(late, **gross))) == {"client_limited": "invalid"}
    # 205 ms would be 200 if the first tokens had come as early as they may have.
    barely = [request(i, ttft_s=0.205 if i % 5 == 0 else 0.1) for i in range(N)]
    assert judge(evidence(barely, client=replace(late, first_error_p99_ms=6.0)))[0] == "invalid"
    assert judge(evidence(BAD, client=replace(late, first_error_p99_ms=6.0)))[0] == "missed"
    assert "client_limited" in fired(evidence(GOOD, client=replace(late, stamps="mixed")))
    assert "client_limited" in fired(evidence(GOOD, client=replace(late, send_lag_p99_ms=6)))


def test_a_miss_stands_only_if_the_worst_lag_could_not_have_made_it() -> None:
    # 300 ms are missed by 100 ms: a P99 of 8 ms cannot have done that, a largest lag of 120 ms can.
    late = ClientFigures(send_lag_p99_ms=8, send_lag_max_ms=120)
    assert judge(evidence(BAD, client=late))[0] == "invalid"
    assert judge(evidence(BAD, client=replace(late, send_lag_max_ms=20)))[0] == "missed"


def test_a_queue_that_a_late_client_may_have_made_is_no_miss() -> None:
    slow = Slo(ttft_ms=5000, attainment=0.95)
    growing = [request(i, ttft_s=0.1 + i * 0.02) for i in range(N)]
    late = ClientFigures(send_lag_p99_ms=150)
    assert judge(evidence(growing, slow, engines={}))[0] == "missed"
    assert judge(evidence(growing, slow, engines={}, client=late))[0] == "invalid"


def test_failures_that_no_server_has_seen_are_no_miss_of_the_server() -> None:
    dropped = [failed(i) if i % 5 == 0 else record for i, record in enumerate(GOOD)]
    seen = {
        "requests": 80, "prompt_tokens": 80 * INPUT, "prefix_queries": 80 * INPUT, "kv_bytes": 80 * KV_BYTES,
    }  # fmt: skip
    source = {"prompt_tokens_by_source": {"external_kv_transfer": 80 * INPUT}, "generation_tokens": 400}
    unseen = evidence(dropped, engines=engines(seen, {**seen, **source}))
    assert fired(unseen)["failed_elsewhere"] == "invalid"
    both = evidence(dropped, engines=engines())  # the servers counted them all: their own failures
    assert (fired(both), judge(both)[0]) == ({"failed_requests": "warning"}, "missed")


def test_failed_transfers_of_cancelled_requests_are_excused() -> None:
    three = engines({"kv_expired": 1}, {"kv_failures": 2})
    assert fired(evidence(GOOD, engines=three, kv_may_expire=3)) == {
        "kv_failures": "note",
        "kv_expired": "note",
    }
    assert fired(evidence(GOOD, engines=three, kv_may_expire=2))["kv_failures"] == "invalid"


def test_slots_bound_what_a_trial_can_say() -> None:
    slo = Slo(ttft_ms=200, attainment=0.95)
    assert fired(evidence(LONG, slo, engines=engines(decode={"slots": 10}))) == {}
    verdict, reason, _ = judge(evidence(LONG, slo, engines=engines(decode={"slots": 9})))
    assert verdict == "missed"
    assert reason.startswith(
        "each decode engine runs 9 sequences at once; at 0.40 s per sequence, 1 × 9 slots serve at most 22.50"
    )
    assert fired(evidence(LONG, slo, engines=engines(decode={"slots": 5, "instances": 2}))) == {}
    free = {**SLOTS_FULL, "full_samples": 3, "slots": 64}  # it wanders below its peak
    assert fired(evidence(LONG, slo, engines=engines(decode=free))) == {}


@pytest.mark.parametrize(("requested", "ran"), [
    ("rc", "ucx:rc_mlx5/mlx5_0:1"), ("rc_x,cuda_copy", "ucx:rc_mlx5/mlx5_0:1"),
    ("ib", "ucx:dc_mlx5/mlx5_3:1"), ("tcp", "ucx:tcp/lo"), ("sm,tcp", "ucx:posix/memory"),
    ("rdma", "rdma (configured)"), ("all", "ucx:cma/memory"),
])  # fmt: skip
def test_names_that_mean_the_same_transport(requested: str, ran: str) -> None:
    assert fired(evidence(GOOD, requested_transport=requested, transport_ran=ran)) == {}
    assert fired(evidence(GOOD, requested_transport="nvlink", transport_ran=ran)) == {
        "wrong_transport": "invalid"
    }
    assert "/" not in plain_transport(ran)


def test_rdma_that_its_counters_confirm_is_no_lie() -> None:
    assert fired(over({"mlx5_0": BUSY_RDMA, "lo": NicFigures("ip", 9e6, 9e6, None, True)}, "rdma")) == {}
    two = {"mlx5_0": BUSY_RDMA, "mlx5_1": replace(BUSY_RDMA, sent_bytes=2e6)}
    assert fired(over(two, "rdma", "mlx5_0", "mlx5_1")) == {}


@pytest.mark.parametrize(("share", "gates"), [(0.4, {"wrong_transport": "invalid"}), (0.6, {})])
def test_rdma_that_carried_under_half_of_the_kv_did_not_carry_it(share: float, gates: dict[str, str]) -> None:
    nics = {"mlx5_0": NicFigures("rdma", share * 5e6, 0), "ens1": NicFigures("ip", 5e6, 0)}
    assert fired(over(nics, "rdma")) == gates


@pytest.mark.parametrize(
    ("nvlink", "tcp", "gates"), [(0.4, 0.6, {"wrong_transport": "warning"}), (0.6, 0.6, {}), (0.4, 0.4, {})]
)
def test_kv_went_where_half_of_it_was_counted(nvlink: float, tcp: float, gates: dict[str, str]) -> None:
    nics = {
        "GPU 0 NVLink": NicFigures("nvlink", nvlink * 5e6, 0),
        "lo": NicFigures("ip", tcp * 5e6, 0, None, True),
    }
    assert fired(over(nics, "")) == gates


@pytest.mark.parametrize(("failures", "one_batch"), [(0, True), (9, True), (10, False)])
def test_a_trial_of_which_a_tenth_failed_was_not_one_batch(failures: int, one_batch: bool) -> None:
    burst = [request(i, rate=1000.0) for i in range(N)]
    for i in range(failures):
        burst[i * 10] = replace(failed(i), scheduled_s=i / 100, sent_s=i / 100)
    assert ("one_batch" in fired(evidence(burst))) == one_batch


@pytest.mark.parametrize(("tpot_ms", "steady"), [
    ((5, 9, 13, 17), False), ((5, 13, 9, 17), True), ((9, 5, 13, 17), True), ((5, 9, 17, 16), True),
    ((5, 13, 14, 15), False), ((11, 12, 13, 14), True),
])  # fmt: skip
def test_only_what_climbs_each_quarter_is_not_steady(tpot_ms: tuple[float, ...], steady: bool) -> None:
    records = [request(i) for i in range(10)]  # of the warm-up
    records += [request(10 + i, gap_s=tpot_ms[i * 4 // 90] / 1e3) for i in range(90)]
    assert ("not_steady" not in fired(evidence(records))) == steady


def test_a_ttft_that_climbs_is_seen_where_no_limit_is_on_tpot() -> None:
    records = [request(i, ttft_s=0.01 + 0.02 * i, rate=100.0, gap_s=0.5) for i in range(400)]
    climbing = bare(records, Slo(ttft_ms=9000))
    findings = {finding.gate: finding for finding in judge(climbing)[2]}
    assert findings["not_steady"].evidence["metric"] == "ttft_ms"


@pytest.mark.parametrize(("shed_requests", "refused"), [(1, False), (2, True)])
def test_a_trial_is_refused_once_over_half_a_percent_were_shed(shed_requests: int, refused: bool) -> None:
    records = [shed(i) if i < shed_requests else request(i) for i in range(200)]
    found = bare(records)
    assert fired(found)["shedding"] == ("invalid" if refused else "warning")


def test_tokens_that_are_not_listed_as_computed_were_not() -> None:
    assert EngineFigures(prompt_tokens_by_source={"external_kv_transfer": 9}).computed_tokens == 0
    assert EngineFigures(prompt_tokens_by_source={"local_compute": 7}).computed_tokens == 7
    assert EngineFigures(prompt_tokens=9, prefix_hits=2).computed_tokens == 7
    assert EngineFigures(prompt_tokens=9).computed_tokens is None
    assert EngineFigures(prefix_hits=1, prefix_queries=4).hit_rate == 0.25
    assert EngineFigures(prefix_hits=1, prefix_queries=0).hit_rate is None


@pytest.mark.parametrize(("gate", "gap_s", "growth_s", "requests", "judged", "fires"), [
    pytest.param("too_few_requests", 0.01, 0, 23, 19, True, id="an attainment of 95 % takes 20: 19"),
    pytest.param("too_few_requests", 0.01, 0, 24, 20, False, id="an attainment of 95 % takes 20: 20"),
    pytest.param("not_steady", 0.005, 3e-4, 44, 39, False, id="a drift takes 40: 39"),
    pytest.param("not_steady", 0.005, 3e-4, 45, 40, True, id="a drift takes 40: 40"),
])  # fmt: skip
def test_requests_that_a_gate_takes(
    gate: str, gap_s: float, growth_s: float, requests: int, judged: int, fires: bool
) -> None:
    found = bare([request(i, gap_s=gap_s + growth_s * i) for i in range(requests)])
    assert (found.summary.judged, gate in fired(found)) == (judged, fires)


@pytest.mark.parametrize(("requests", "fires"), [(19, False), (20, True)])
def test_one_batch_takes_20_requests_to_be_told(requests: int, fires: bool) -> None:
    burst = evidence([request(i, rate=1000.0) for i in range(requests)])
    assert ("one_batch" in fired(burst)) == fires


@pytest.mark.parametrize(("tokens", "fires"), [(3, False), (4, True)])
def test_an_answer_of_few_tokens_may_come_at_once(tokens: int, fires: bool) -> None:
    short = [replace(request(i, gap_s=0.0), output_len=tokens, itl_s=[0.0] * (tokens - 1)) for i in range(N)]
    assert ("answer_at_once" in fired(bare(short))) == fires


def merged(records: list[RequestRecord], tokens: int, every: int = 1) -> list[RequestRecord]:
    """Every ``every``-th answer has so many tokens in one event."""
    return [
        replace(r, last_token_s=r.first_token_s, output_len=tokens, itl_s=[], untimed_tokens=float(tokens))
        if i % every == 0
        else r
        for i, r in enumerate(records)
    ]


@pytest.mark.parametrize(("slo", "tokens", "every", "refused"), [
    pytest.param(SLO, 3, 1, True, id="three tokens in one event"),
    pytest.param(SLO, 2, 1, True, id="two tokens in one event"),
    pytest.param(SLO, 1, 1, False, id="one token has no TPOT"),
    pytest.param(SLO, 3, 10, True, id="a tenth, of which half is allowed"),
    pytest.param(SLO, 3, 30, False, id="fewer than the misses allowed"),
    pytest.param(Slo(ttft_ms=200), 3, 1, False, id="TPOT is not judged"),
    pytest.param(Slo(limits=(Limit("tpot_ms", "mean", 20),)), 3, 10, True, id="a mean of the others"),
    pytest.param(Slo(limits=(Limit("tpot_ms", "p50", 20),)), 3, 10, False, id="p50 allows half"),
])  # fmt: skip
def test_an_unknown_tpot_is_not_judged(slo: Slo, tokens: int, every: int, refused: bool) -> None:
    found = bare(merged(GOOD, tokens, every), slo)
    assert ("unknown_tpot" in fired(found)) == refused
    assert judge(found)[0] == ("invalid" if refused else "met")


def test_answers_faster_than_any_model_are_said_with_their_time() -> None:
    quick = [
        replace(
            request(i, ttft_s=2e-4, gap_s=2e-5), output_len=50, requested_output_len=50, itl_s=[2e-5] * 49
        )
        for i in range(N)
    ]
    for record in quick:
        record.last_token_s = (record.sent_s or 0.0) + 0.0012
    found = bare(quick)
    (finding,) = [result for result in judge(found)[2] if result.gate == "impossible_answers"]
    assert finding.message == (
        "answers are faster than any model: 100 of 100 took less than 0.1 ms a token, for "
        "example 50 tokens within 1.20 ms"
    )


@pytest.mark.parametrize(("events", "level"), [(5, "note"), (4, "note"), (3, "warning")])
def test_two_tokens_an_event_are_a_warning_where_tpot_is_judged(events: int, level: str) -> None:
    records = [replace(r, output_len=8, requested_output_len=8, itl_s=[0.02] * (events - 1)) for r in GOOD]
    if events == 4:  # just two, less one token of a single answer
        records[0] = replace(records[0], output_len=7, requested_output_len=7)
    found = bare(records)
    assert fired(found)["tokens_per_event"] == level
    without = bare(records, Slo(ttft_ms=200))
    assert fired(without)["tokens_per_event"] == "note"


def test_the_share_of_an_emulated_engine_s_lag_is_of_its_busy_time() -> None:
    assert EngineFigures(step_lag_s=0.5, busy_s=2.0).lag_share == 0.25
    assert EngineFigures(step_lag_s=0.5).lag_share is None
    assert EngineFigures(step_lag_s=0.5, busy_s=0.0).lag_share is None
    assert EngineFigures(busy_s=2.0).lag_share is None


def test_counts_may_be_off_by_their_tolerance_both_ways() -> None:
    for share, wrong in ((0.991, False), (0.989, True), (1.009, False), (1.011, True)):
        found = fired(counted({"prompt_tokens": share * N * INPUT}))
        gate = "prefill_skipped" if share < 1 else "prefill_repeated"
        assert (gate in found) == wrong


def test_the_seed_study_s_cached_prompts_are_impossible() -> None:
    # 225 prompts of 32 k tokens with a first token within 5.5 s (29 PFLOP/s on eight H100s).
    records = [
        RequestRecord(
            str(i), i / 45, 32_768, 2, sent_s=i / 45, first_token_s=5.5, last_token_s=6.0, output_len=2
        )
        for i in range(225)
    ]
    work, peak = prefill_work("qwen3-30b-a3b"), Hardware("H200", 8).peak_flops
    found = Evidence(
        records, summarise(records, SLO, 45, 6), SLO, prefill_work=work, prefill_flops=peak,
        hardware="8 × H200",
    )  # fmt: skip
    finding = next(result for result in judge(found)[2] if result.gate == "impossible_prefill")
    assert finding.evidence["flop_per_s"] > 16e15
    # The same prompts, first tokens as far apart as 40 % of the peak allows.
    each_s = work.flop(32_768) / (0.4 * peak)
    slow = [replace(r, first_token_s=i * each_s + r.scheduled_s + each_s) for i, r in enumerate(records)]
    assert "impossible_prefill" not in fired(replace(found, records=slow))


def test_gpus_by_the_names_that_drivers_give() -> None:
    assert (peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe")) == (1979e12, 1513e12)
    assert (peak_flops("NVIDIA A100-SXM4-80GB"), peak_flops("NVIDIA L4")) == (624e12, 242e12)
    assert (peak_flops("NVIDIA L40S"), peak_flops("Radeon 9700")) == (733e12, None)
    assert hardware_of("8xH200") == Hardware("H200", 8)
    assert hardware_of("L40S") == Hardware("L40S", 1)
    for wrong in ("8x", "0xH200", "8xABACUS"):
        with pytest.raises(ValueError, match="not a known GPU"):
            hardware_of(wrong)


def test_every_gate_says_what_it_proves_and_how() -> None:
    table = gate_table()
    assert len(table) == len(GATES) + 2
    assert all(row.proves and row.evidence and row.limits for row in table)


@st.composite
def honest_trials(draw: st.DrawFn) -> Evidence:
    """An honest system: M/D/1 prefill at up to 95 % of its capacity, decode with room, counters that fit."""
    n = draw(st.integers(60, 160))
    service_s = draw(st.floats(0.002, 0.05))
    load = draw(st.floats(0.05, 0.95))
    tokens, gap_s = draw(st.integers(2, 40)), draw(st.floats(0.002, 0.03))
    gap_s = min(gap_s, n * service_s / load / tokens / 4)  # several latencies long
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    arrivals = np.cumsum(random.exponential(service_s / load, n))
    free, records = 0.0, []
    for i, at in enumerate(arrivals.tolist()):
        free = max(free, at) + service_s
        records.append(RequestRecord(
            f"h{i}", at, INPUT, tokens, sent_s=at + 1e-4, first_token_s=free + 1e-3,
            last_token_s=free + 1e-3 + gap_s * (tokens - 1) * float(random.uniform(1.0, 1.2)),
            output_len=tokens,
        ))  # fmt: skip
    slo = Slo(draw(st.floats(1.5, 40.0)) * service_s * 1e3, gap_s * 1e3 * draw(st.floats(0.9, 5.0)), 0.9)
    work = PrefillWork(1e9, 1e5)
    lost = draw(st.integers(0, 3))  # requests that were cancelled in earlier trials, on their way to D
    prefill = {
        "prompt_tokens": n * INPUT, "prefix_queries": n * INPUT, "requests": n, "kv_bytes": n * KV_BYTES,
        "kv_seconds": n * KV_BYTES / 1e9, "kv_expired": lost,
    }  # fmt: skip
    decode = {
        "prompt_tokens": n * INPUT, "prefix_queries": n * INPUT, "requests": n,
        "prompt_tokens_by_source": {"external_kv_transfer": n * INPUT}, "generation_tokens": n * tokens,
        "slots": 4 * n,
    }  # fmt: skip
    return Evidence(
        records, summarise(records, slo, load / service_s, free + 1.0), slo,
        client=ClientFigures(0.1, draw(st.floats(0, 5)), send_lag_max_ms=20, stamps="kernel"),
        router=RouterFigures(draw(st.floats(0, 0.8)), 1.0, loop_lag_p99_s=draw(st.floats(0, 0.005))),
        engines=engines(prefill, decode),
        host=HostFigures(nics={"mlx5_0": replace(BUSY_RDMA, sent_bytes=n * KV_BYTES)}),
        kv_bytes_per_request=KV_BYTES, kv_may_expire=lost, kv_line_rate=1.1e9, requested_transport="rdma",
        transport_ran="rdma", requested_nics=("mlx5_0",), engines_here=True, prefill_work=work,
        prefill_flops=work.flop(INPUT) / service_s * draw(st.floats(1.0, 5.0)),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(honest_trials())
def test_no_gate_refuses_an_honest_trial(trial: Evidence) -> None:
    refused = [finding for finding in judge(trial)[2] if finding.level == "invalid"]
    assert not refused


def test_the_transport_may_be_one_of_several() -> None:
    assert fired(evidence(GOOD, requested_transport="tcp, cma", transport_ran="CMA")) == {}
    assert fired(evidence(GOOD, requested_transport="", transport_ran="tcp")) == {}
    assert fired(evidence(GOOD, requested_transport="tcp", transport_ran="")) == {}


def test_asked_for_reuse_is_no_lie() -> None:
    warm = engines({"prefix_hits": 0.5 * N * INPUT})
    assert fired(evidence(GOOD, engines=warm, reuse_expected=True)) == {}
    offered = 0.5 * N * INPUT
    assert fired(evidence(GOOD, engines=warm, reuse_expected=True, reuse_offered=offered)) == {}


def test_failed_requests_are_misses_and_a_dead_server_is_no_measurement() -> None:
    some = [failed(i) if i in (50, 51) else record for i, record in enumerate(GOOD)]
    assert (fired(evidence(some)), judge(evidence(some))[0]) == ({"failed_requests": "warning"}, "met")
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
    assert "39 of 100 answers had a wrong length, for example 3 tokens instead of 5" in reason


def test_too_few_requests_for_the_target() -> None:
    few = [request(i) for i in range(10)]
    verdict, reason, _ = judge(evidence(few, engines={}))
    assert (verdict, "fewer than 20" in reason) == ("invalid", True)
    assert judge(evidence([request(i, 1.0) for i in range(10)], engines={}))[0] == "missed"  # no doubt left
    assert judge(evidence([], engines={}))[0] == "invalid"


def test_too_few_requests_for_a_listed_percentile() -> None:
    def listed(n: int, *limits: str, late: int = 0) -> tuple[str, str]:
        records = [request(i, 1.0 if i < late else 0.1) for i in range(n)]
        slo = Slo(limits=tuple(Limit.parse(limit) for limit in limits))
        return judge(evidence(records, slo, engines={}))[:2]

    assert listed(60, "ttft_ms p50 <= 500")[0] == "met"
    verdict, reason = listed(60, "ttft_ms p99 <= 500", "tpot_ms mean <= 50")
    assert (verdict, "99.0% cannot be judged from fewer than 100" in reason) == ("invalid", True)
    verdict, reason = listed(120, "ttft_ms p99 <= 500", "tpot_ms mean <= 50")
    assert verdict == "met"
    assert "TTFT P99 ≤ 500 ms: 108 of 108 requests (100.0%)" in reason
    assert "TPOT mean ≤ 50 ms: " in reason
    assert listed(60, "ttft_ms p99 <= 500", late=60)[0] == "missed"  # no doubt left


def test_a_growing_queue_is_missed_though_every_request_is_in_time() -> None:
    slow = Slo(ttft_ms=5000, attainment=0.95)
    growing = [request(i, ttft_s=0.1 + i * 0.02) for i in range(N)]
    found = evidence(growing, slow, engines={})
    assert found.attained
    verdict, reason, findings = judge(found)
    assert verdict == "missed"
    assert reason.startswith("the queue grows by ")
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
        "prompt_tokens": 45 * INPUT, "prefix_queries": 45 * INPUT, "requests": 45, "kv_bytes": 45 * KV_BYTES,
    }  # fmt: skip
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


def test_a_pull_over_tcp_is_refused_by_name_with_the_way_out() -> None:
    finding = next(result for result in judge(logged(PULLED))[2] if result.gate == "wrong_transport")
    assert finding.message == (
        "decode-0's KV moves over tcp/eth1 by software emulation (read from cuda into cuda memory, intra-"
        "node), 0.5 GB/s by the engine's times: the transfer library found no better transport, and TCP was "
        "not requested"
    )
    for words in ("nixl_push", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on", "ucx_tls: tcp,cuda"):
        assert words in finding.advice


@pytest.mark.parametrize(("proven", "requested"), [
    (PULLED, "tcp"),
    (PULLED, "tcp,cuda"),
    (replace(PULLED, transports=("cuda_ipc/cuda",), how="zero-copy"), ""),
    (replace(PULLED, transports=("cma/memory",), how="zero-copy", local="host", remote="host"), ""),
    (LoggedTransport("prefill-0", ("tcp",)), ""),
    (replace(PULLED, transports=("rc_mlx5/mlx5_0:1",), how="zero-copy"), "rc,cuda"),
])  # fmt: skip
def test_a_way_that_was_meant_is_no_wrong_transport(proven: LoggedTransport, requested: str) -> None:
    assert "wrong_transport" not in fired(logged(proven, requested=requested))


def test_kv_over_nvlink_is_not_taken_for_tcp() -> None:
    carried = {"lo": TCP_BUSY, "GPU 0 NVLink": NicFigures("nvlink", 5e6, 0)}
    assert "wrong_transport" not in fired(over(carried, ""))


def lacking(error: str, detail: str) -> Evidence:
    """A trial of which one request failed so."""
    return evidence([replace(GOOD[0], error=error, error_detail=detail), *GOOD[1:]])


@pytest.mark.parametrize(("error", "detail", "process"), [
    ("connect", "[Errno 24] Too many open files", "load generator"),
    ("connect", "[Errno 12] Cannot allocate memory", "load generator"),
    ("http_error", "decode-0: cannot be reached: [Errno 24] Too many open files", "router"),
    ("http_error", "[Errno 28] No space left on device", "emulated engine"),
])  # fmt: skip
def test_what_kvbench_itself_lacks_is_no_miss_of_the_system(error: str, detail: str, process: str) -> None:
    verdict, reason, findings = judge(lacking(error, detail))
    assert (verdict, findings[0].gate) == ("invalid", "own_resources")
    assert findings[0].evidence == {"failed": {process: 1}}
    assert reason.startswith("kvbench's own processes lacked resources: ")
    assert reason.endswith(f"; the first: {detail}")


def test_what_a_server_of_others_lacks_is_its_own_affair() -> None:
    found = replace(lacking("http_error", "Too many open files"), engines=REAL)
    assert "own_resources" not in fired(found)
    assert "own_resources" not in fired(lacking("connect", "[Errno 111] Connection refused"))


# --- others on the machine: recorded telemetry decides
REAL = {
    role: replace(figures, step_lag_s=None, steps=None, step_lag_p99_s=None, busy_s=None)
    for role, figures in engines().items()
}
"""Engines that tell no delay of their own, as real ones do."""
TAKEN = HostFigures(9.0, 2, 0.0, 0.53, busy_share=1.0, pressure_share=0.9, takers=("cc1plus 41%", "ld 9%"))
"""A machine of which others had half, as when real engines' trials were missed down to a seventeenth."""


def disturbed(records: list[RequestRecord], host: HostFigures = TAKEN, **changes: Any) -> Evidence:
    return evidence(records, host=host, **{"engines": REAL, "hosts_watched": True, **changes})


def test_a_miss_on_a_machine_that_others_filled_is_no_miss() -> None:
    verdict, reason, findings = judge(disturbed(BAD))
    assert (verdict, fired(disturbed(BAD))) == ("invalid", {"machine_disturbed": "invalid"})
    assert reason == (
        "the machine was disturbed: 53.0% of the CPU time was used by other processes (cc1plus 41%, ld 9%); "
        "all cores were in use, so the miss is not the system's"
    )
    assert findings[0].advice.startswith("stop other work")


@pytest.mark.parametrize(("records", "changes"), [
    (GOOD, {}),  # it held all the same
    (BAD, {"hosts_watched": False}),  # somebody else's server: which processes are its own?
    (BAD, {"engines": engines()}),  # emulated engines tell their own delay, and were in time
    (BAD, {"host": replace(TAKEN, other_cpu_share=0.05, busy_share=1.0)}),  # the engines' own work
    (BAD, {"host": replace(TAKEN, busy_share=0.6)}),  # a large machine with cores to spare
    (BAD, {"host": replace(TAKEN, pressure_share=0.02)}),  # nobody waited
    (BAD, {"host": replace(TAKEN, busy_share=None, pressure_share=None)}),  # not known
])  # fmt: skip
def test_harmless_disturbance_refuses_nothing(records: list[RequestRecord], changes: dict[str, Any]) -> None:
    found = disturbed(records, **changes)
    assert judge(found)[0] == ("met" if records is GOOD else "missed")
    assert fired(found).get("machine_disturbed") in ("warning", None)


def test_cpu_time_of_unknown_owner_is_not_blamed_on_others() -> None:
    why = "the process that listens at http://127.0.0.1:8000 cannot be seen"
    found = disturbed(BAD, replace(TAKEN, unknown_owner=why), hosts_watched=False)
    verdict, _, findings = judge(found)
    (finding,) = [result for result in findings if result.gate == "machine_disturbed"]
    assert (verdict, finding.level) == ("missed", "warning")
    assert finding.message == (
        "the machine was disturbed: 53.0% of the CPU time was used by processes of unknown owner "
        f"(cc1plus 41%, ld 9%); {why}"
    )
    assert finding.advice.startswith("check whether these processes belong to the server")
    starved = host_starved(replace(found, router=STARVED, client=LATE_CLIENT))
    assert "other processes" not in starved.message
    throttled = replace(TAKEN, other_cpu_share=0.02, unknown_owner=why, throttled_share=0.3)
    assert why not in judge(disturbed(BAD, throttled, hosts_watched=False))[2][0].message


def test_a_stolen_machine_refuses_a_miss_too() -> None:
    stolen = replace(TAKEN, other_cpu_share=0.04, steal_share=0.3)
    assert fired(disturbed(BAD, stolen)) == {"machine_disturbed": "invalid"}


LATE_CLIENT = ClientFigures(send_lag_p99_ms=150.0, cpu_share=0.03, run_queue_wait_share=0.4)
STARVED = RouterFigures(cpu_s=0.08, seconds=4.2, loop_lag_p99_s=0.2, lag_s=2.0, wait_s=1.9)
"""2 % of a core, late by 200 ms, and nearly all of that in the run queue."""


@pytest.mark.parametrize("client", [LATE_CLIENT, ClientFigures(0.1, 1.0, 0.5, 0.1)])
def test_a_router_that_got_no_core_is_not_the_limit(client: ClientFigures) -> None:
    found = disturbed(BAD, router=STARVED, client=client)
    verdict, reason, _ = judge(found)
    assert verdict == "invalid"
    assert fired(found) == {"host_starved": "invalid", "machine_disturbed": "invalid"}
    assert reason.startswith(
        "the host was starved of CPU: the router used 2% of a core, waited for a core 45%"
    )
    assert "cc1plus 41%" in reason


@pytest.mark.parametrize("wait_share", [0.05, 0.4])
def test_a_client_that_is_late_by_itself_is_told_beside_a_starved_router(wait_share: float) -> None:
    """A router late by 20 ms does not explain a load generator that was stopped for 140 ms."""
    client = replace(LATE_CLIENT, send_lag_p99_ms=140.0, run_queue_wait_share=wait_share)
    router = replace(STARVED, loop_lag_p99_s=0.02, lag_s=0.05, wait_s=0.05)
    found = fired(disturbed(BAD, HostFigures(0.5, 2, 0.0), router=router, client=client))
    wanted = {"host_starved": "invalid"}
    assert found == (wanted if wait_share > 0.1 else {"client_limited": "invalid", **wanted})


@pytest.mark.parametrize(("lag_share", "starved"), [(0.45, False), (0.15, True)])
def test_a_client_that_was_stopped_is_told_from_one_that_waited(lag_share: float, starved: bool) -> None:
    """It waited for a core in 12 % of the time; of a delay of 45 % that is no explanation."""
    client = replace(LATE_CLIENT, run_queue_wait_share=0.12, loop_lag_share=lag_share)
    router = replace(STARVED, loop_lag_p99_s=0.2)
    found = fired(disturbed(BAD, HostFigures(0.5, 2, 0.0), router=router, client=client))
    assert "host_starved" in found
    assert ("client_limited" in found) is not starved


def test_engines_that_fill_their_machine_are_named() -> None:
    no_takers = replace(TAKEN, other_cpu_share=0.01, takers=())
    _, reason, _ = judge(disturbed(BAD, no_takers, router=STARVED, client=LATE_CLIENT))
    assert reason.endswith("no other load was seen, so the engines used all cores")


@pytest.mark.parametrize("router", [
    replace(STARVED, wait_s=0.2),  # stopped, or blocked: it was not even ready
    replace(STARVED, wait_s=None),  # a router that does not tell
    replace(STARVED, cpu_s=4.1),  # it had all of a core
])  # fmt: skip
def test_a_router_that_is_late_by_itself_is_the_limit(router: RouterFigures) -> None:
    found = fired(disturbed(BAD, replace(TAKEN, other_cpu_share=0.0, takers=()), router=router))
    assert found == {"router_limited": "invalid"}


def test_a_little_starvation_is_a_warning_if_the_trial_holds() -> None:
    slight = replace(STARVED, loop_lag_p99_s=0.008)
    assert fired(disturbed(GOOD, HostFigures(0.5, 2, 0.0), router=slight)) == {"host_starved": "warning"}
