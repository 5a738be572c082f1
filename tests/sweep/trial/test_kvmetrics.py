"""Where each engine tells its KV transfers, and the proof that real servers' counters give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_pages import Server, zeros

from kvbench.core.gates.evidence import EngineFigures, Evidence
from kvbench.core.gates.gates import judge
from kvbench.core.load.workers import LoadResult
from kvbench.core.metrics.metrics import Slo, summarise
from kvbench.core.records import RequestRecord
from kvbench.hosts.telemetry import Metrics, parse_metrics
from kvbench.sweep.trial.evidence import engine_figures, engine_summary
from kvbench.sweep.trial.kv_counters import (
    KvLogs,
    RoleKv,
    Served,
    kv_columns,
    logged_kv,
    moved_requests,
    role_kv,
)

N, INPUT = 60, 1024
MIB = float(2**20)
SLO = Slo(ttft_ms=500, tpot_ms=50, attainment=0.9)
MOVED = {"nixl": (N, 0.3, N * MIB, N * 16.0)}
NONE_MOVED = {"nixl": (0, 0.0, 0.0, 0.0)}

# As vLLM 0.32 writes them: Mooncake's P and NIXL's D.
MOONCAKE_LINE = (
    "(APIServer pid=24709) INFO 11-21 15:00:15 [metrics.py:103] KV Transfer metrics: "
    "Num successful transfers=40, Avg xfer time (ms)=8.0, P90 xfer time (ms)=14.2, "
    "Avg MB per transfer=1.5, Throughput (MB/s)=125.0, Avg number of descriptors=6.0, "
    "Num failed transfers=0, Num failed recvs=0, Num KV expired reqs=0"
)
NIXL_LINE = (
    "(APIServer pid=13792) INFO 11-21 14:50:15 [metrics.py:103] KV Transfer metrics: "
    "Num successful transfers=37, Avg xfer time (ms)=2.86, P90 xfer time (ms)=6.528, "
    "Avg post time (ms)=0.662, P90 post time (ms)=1.931, Avg MB per transfer=0.574, "
    "Throughput (MB/s)=200.809, Avg number of descriptors=2.3, Num failed transfers=0, "
    "Num KV expired reqs=0, Num notifs after expiry=0"
)


def records(count: int = N, input_len: int = INPUT) -> list[RequestRecord]:
    return [
        RequestRecord(
            f"r{i}", i / 20, input_len, 16, i / 20, i / 20 + 0.1, i / 20 + 0.3, 16, [0.0133] * 15, 200
        )
        for i in range(count)
    ]


def pair(p: Server, d: Server) -> tuple[dict[str, Metrics | None], dict[str, Metrics | None]]:
    """Pages before and after; what both servers did before the trial must not matter."""
    warm = {"prompts": 7, "transfers": {}, "counters": {}, "local": 0, "aborted": 0, "prefix_hits": 0}
    before = {"prefill-0": replace(p, **warm), "decode-0": replace(d, **warm)}
    after = {
        name: replace(server, prompts=server.prompts + 7)
        for name, server in (("prefill-0", p), ("decode-0", d))
    }
    return (
        {name: server.page() for name, server in before.items()},
        {name: server.page() for name, server in after.items()},
    )


def honest(**d: Any) -> tuple[dict[str, Metrics | None], dict[str, Metrics | None]]:
    p = Server(N, INPUT, "prefill", transfers=NONE_MOVED, counters=zeros("nixl"))
    return pair(p, Server(N, INPUT, **{"transfers": MOVED, "counters": zeros("nixl"), **d}))


def judged(
    pages: tuple[dict[str, Metrics | None], dict[str, Metrics | None]],
    requests: list[RequestRecord] | None = None,
    **changes: Any,
) -> tuple[str, dict[str, str]]:
    """The verdict, and the level of each finding by gate."""
    offered = requests or records()
    evidence = Evidence(
        records=offered, summary=summarise(offered, SLO, 20.0, 3.5), slo=SLO, engines=engine_figures(*pages),
        kv_bytes_per_request=MIB, kv_bytes_certain=False,
    )  # fmt: skip
    verdict, _, findings = judge(replace(evidence, **changes))
    return verdict, {finding.gate: finding.level for finding in findings if finding.gate != "too_short"}


def columns(pages: tuple[dict[str, Metrics | None], dict[str, Metrics | None]]) -> dict[str, Any]:
    return engine_summary(*pages, engine_figures(*pages), LoadResult(records(), "complete", 3.5))


class TestColumns:
    def test_nixl_pull_is_told_by_decode(self) -> None:
        row = columns(honest())
        assert row["kv_source"] == "vllm:nixl_xfer_time_seconds of decode"
        assert row["kv_bytes_per_request"] == MIB
        assert row["kv_transfer_ms_per_request"] == pytest.approx(5.0)
        assert row["kv_descriptors_per_request"] == 16

    def test_nixl_push_is_told_by_prefill(self) -> None:
        p = Server(N, INPUT, "prefill", transfers=MOVED)
        row = columns(pair(p, Server(N, INPUT, transfers=NONE_MOVED)))
        assert row["kv_source"] == "vllm:nixl_xfer_time_seconds of prefill"
        assert row["kv_bytes_per_request"] == MIB

    def test_each_tensor_parallel_rank_counts_its_own_part(self) -> None:
        moved = {"nixl": (N * 8, 0.3 * 8, N * MIB, N * 16.0 * 8)}
        row = columns(honest(transfers=moved))
        assert row["kv_bytes_per_request"] == MIB
        assert row["kv_transfer_ms_per_request"] == pytest.approx(5.0)
        assert row["kv_descriptors_per_request"] == 128

    def test_aborted_requests_do_not_blow_up_the_others(self) -> None:
        # 4 requests were aborted after their KV had come, 6 before.
        moved = {"nixl": (N + 4, 0.3, (N + 4) * MIB, 0.0)}
        assert columns(honest(transfers=moved, aborted=10))["kv_bytes_per_request"] == MIB

    def test_mooncake_moves_several_requests_at_once(self) -> None:
        p = Server(N, INPUT, "prefill", transfers={"mooncake": (40, 0.32, N * MIB, 240.0)})
        row = columns(pair(p, Server(N, INPUT, transfers={"mooncake": (0, 0.0, 0.0, 0.0)})))
        assert row["kv_source"] == "vllm:mooncake_xfer_time_seconds of prefill"
        assert row["kv_bytes_per_request"] == MIB
        assert row["kv_transfer_ms_per_request"] == pytest.approx(8.0)
        assert row["kv_descriptors_per_request"] == 4

    def test_batches_are_not_divided_when_requests_were_aborted(self) -> None:
        kv = RoleKv("x", transfers=40.0, seconds=0.32, nbytes=N * MIB, descriptors=240.0)
        assert kv_columns({"prefill": kv}, Served(N + 1, 1))["kv_bytes_per_request"] == MIB
        row = kv_columns({"prefill": kv}, Served(N + 20, 20))
        assert row["kv_bytes_per_request"] is None
        assert row["kv_transfer_ms_per_request"] == pytest.approx(8.0)

    def test_what_nobody_tells_is_missing_and_not_zero(self) -> None:
        row = columns(pair(Server(N, INPUT, "prefill"), Server(N, INPUT)))
        assert row["kv_source"] == ""
        names = ("kv_bytes_per_request", "kv_transfer_ms_per_request", "kv_descriptors_per_request")
        assert {row[name] for name in (*names, "kv_transfers")} == {None}
        partly = columns(honest(transfers={"nixl": (N, 0.3, 0.0, 0.0)}))
        assert partly["kv_bytes_per_request"] is None
        assert partly["kv_transfer_ms_per_request"] == pytest.approx(5.0)

    def test_the_emulated_engines_own_family_comes_first(self) -> None:
        page = parse_metrics(
            "kvbench:kv_transfer_seconds_count 4\nkvbench:kv_transfer_seconds_sum 0.2\n"
            "kvbench:kv_transfer_bytes_sum 400\nkvbench:kv_transfer_descriptors_sum 8\n"
            "kvbench:kv_transfer_failures_total 1\nvllm:nixl_num_kv_expired_reqs_total 2\n"
            "vllm:nixl_xfer_time_seconds_count 4\nvllm:nixl_num_failed_transfers_total 1\n"
        )
        kv = role_kv([(Metrics(), page)])
        assert (kv.source, kv.transfers, kv.nbytes) == ("kvbench:kv_transfer_seconds", 4, 400)
        assert (kv.failures, kv.expired) == (1, 2)


class TestLogLines:
    def test_mooncakes_line(self) -> None:
        kv = logged_kv(["noise", MOONCAKE_LINE, MOONCAKE_LINE.replace("failed recvs=0", "failed recvs=2")])
        assert (kv.transfers, kv.failures, kv.expired) == (80, 2, 0)
        assert (kv.seconds, kv.nbytes) == (pytest.approx(0.64), pytest.approx(80 * 1.5 * MIB))
        row = kv_columns({"prefill": kv}, Served(120))
        assert row["kv_source"] == "log line 'KV Transfer metrics' of prefill"
        assert row["kv_transfer_ms_per_request"] == pytest.approx(8.0)
        assert row["kv_bytes_per_request"] == pytest.approx(MIB)
        assert row["kv_descriptors_per_request"] == pytest.approx(4.0)

    def test_nixls_line(self) -> None:
        kv = logged_kv([NIXL_LINE])
        assert (kv.transfers, kv.descriptors) == (37, pytest.approx(37 * 2.3))

    def test_lines_that_may_lack_transfers_give_means_only(self) -> None:
        row = kv_columns({"prefill": logged_kv([MOONCAKE_LINE], whole=False)}, Served(60))
        assert row["kv_transfer_ms_per_request"] == pytest.approx(8.0)
        assert row["kv_bytes_per_request"] is None

    def test_no_such_line_tells_nothing(self) -> None:
        assert logged_kv(["INFO Avg prompt throughput: 1.0 tokens/s"]) == RoleKv()

    @given(st.text(max_size=200))
    def test_any_words_after_it_are_survived(self, words: str) -> None:
        kv = logged_kv([f"INFO KV Transfer metrics: {words}"])
        assert (kv.transfers or 0.0) >= 0 or "-" in words

    def test_collected_from_growing_logs_by_role(self, tmp_path: Path) -> None:
        log = tmp_path / "prefill-0.log"
        log.write_text(MOONCAKE_LINE + "\n")  # from before: not ours
        logs = KvLogs({"prefill-0": log, "decode-0": tmp_path / "missing.log"})
        assert logs.take() == {}
        with log.open("a") as file:
            file.write(f"noise\n{MOONCAKE_LINE}\n{MOONCAKE_LINE[:80]}")
            file.flush()
            assert logs.poll() == 1
            file.write(f"{MOONCAKE_LINE[80:]}\n")
        taken = logs.take()
        assert (list(taken), taken["prefill"].transfers) == (["prefill"], 80)
        assert logs.take() == {}

    def test_failures_in_the_log_count_and_byte_counts_prove_nothing(self) -> None:
        pages = pair(Server(N, INPUT, "prefill"), Server(N, INPUT))
        failing = logged_kv([MOONCAKE_LINE.replace("failed transfers=0", "failed transfers=3")])
        figures = engine_figures(*pages, {"prefill": failing})
        assert (figures["prefill"].kv_failures, figures["prefill"].kv_bytes) == (3, None)
        row = engine_summary(*pages, figures, LoadResult(records(), "complete", 3.5), {"prefill": failing})
        assert row["kv_bytes_per_request"] == pytest.approx(MIB)


class TestProof:
    """The gates on real servers' counters."""

    def test_an_honest_pair_trips_nothing(self) -> None:
        assert judged(honest()) == ("met", {})

    def test_decode_that_computes_by_itself(self) -> None:
        verdict, gates = judged(honest(local=N * INPUT, transfers=NONE_MOVED))
        assert (verdict, gates["decode_recomputed"]) == ("invalid", "invalid")

    @pytest.mark.parametrize(("input_len", "local"), [(1024, 1), (1000, 1000 % 128), (300, 45)])
    def test_the_last_token_or_partial_block_may_be_decodes_own(self, input_len: int, local: int) -> None:
        p = Server(N, input_len, "prefill", transfers=NONE_MOVED)
        d = Server(N, input_len, local=N * local, transfers={"nixl": (N, 0.3, N * MIB, 0.0)})
        assert judged(pair(p, d), records(N, input_len), kv_bytes_tolerance=MIB / 8) == ("met", {})

    def test_no_block_size_excuses_a_whole_prompt(self) -> None:
        p = Server(N, 64, "prefill", transfers=NONE_MOVED)
        d = Server(N, 64, local=N * 64, transfers=NONE_MOVED)
        verdict, gates = judged(pair(p, d), records(N, 64), kv_bytes_per_request=None)
        assert (verdict, gates["decode_recomputed"]) == ("invalid", "invalid")

    def test_versions_without_tokens_by_source(self) -> None:
        p = Server(N, INPUT, "prefill", by_source=False)
        assert judged(pair(p, Server(N, INPUT, by_source=False)), kv_bytes_per_request=None) == ("met", {})
        d = Server(N, INPUT, local=N * 900, by_source=False)
        verdict, gates = judged(pair(p, d), kv_bytes_per_request=None)
        assert (verdict, gates["decode_recomputed"]) == ("invalid", "invalid")

    @pytest.mark.parametrize(
        "name", ["failed_transfers", "failed_notifications", "notifications_after_expiry"]
    )
    def test_failed_transfers(self, name: str) -> None:
        counters = {**zeros("nixl"), f"vllm:nixl_num_{name}": 1.0}
        verdict, gates = judged(honest(counters=counters))
        assert (verdict, gates["kv_failures"]) == ("invalid", "invalid")

    def test_expired_kv_refuses_unless_requests_had_been_cancelled(self) -> None:
        counters = {**zeros("nixl"), "vllm:nixl_num_kv_expired_reqs": 2.0}
        p = Server(N, INPUT, "prefill", transfers=NONE_MOVED, counters=counters)
        pages = pair(p, Server(N, INPUT, transfers=MOVED))
        assert judged(pages) == ("invalid", {"kv_expired": "invalid"})
        assert judged(pages, kv_may_expire=5.0) == ("met", {"kv_expired": "note"})

    def test_bytes_that_do_not_fit_the_scenarios_model_warn(self) -> None:
        assert judged(honest(), kv_bytes_per_request=2 * MIB) == ("met", {"kv_bytes_wrong": "warning"})
        verdict, gates = judged(honest(transfers=NONE_MOVED))
        assert (verdict, gates["kv_bytes_wrong"]) == ("invalid", "invalid")

    def test_a_partial_block_may_stay_behind(self) -> None:
        moved = {"nixl": (N, 0.3, N * MIB * 7 / 8, 0.0)}
        assert judged(honest(transfers=moved), kv_bytes_tolerance=MIB / 8) == ("met", {})
        assert judged(honest(transfers=moved))[1] == {"kv_bytes_wrong": "warning"}

    def test_the_block_size_is_read_from_the_page(self) -> None:
        before, after = honest()
        figures = engine_figures(before, after)
        assert {role.block_tokens for role in figures.values()} == {128}
        assert isinstance(figures["decode"], EngineFigures)


@given(st.integers(1, 500), st.integers(1, 8), st.integers(0, 40), st.floats(0, 1))
def test_parts_of_a_request_are_found_out(finished: int, parts: int, aborted: int, share: float) -> None:
    """However many of a few aborted requests had moved their KV, the bytes of one are right."""
    aborted = min(aborted, finished // 10)
    moved = finished + round(share * aborted)
    kv = RoleKv("x", transfers=moved * parts, batches=False)
    assert moved_requests(kv, Served(finished + aborted, aborted)) == moved


def test_a_restart_of_one_of_several_instances_shows_in_its_own_counters() -> None:
    def page(prompts: int) -> Metrics:
        return parse_metrics(f"vllm:prompt_tokens_total {prompts}\n")

    before = {"decode-0": page(500), "decode-1": page(500)}
    found = engine_figures(before, {"decode-0": page(200), "decode-1": page(1400)})
    assert found["decode"].prompt_tokens == 600
    assert found["decode"].restarts == 1
