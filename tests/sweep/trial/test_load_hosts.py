"""Load generators on several hosts: one plan, one start, one trial. Each host is an agent here."""

from __future__ import annotations

from pathlib import Path

from kvbench.core.load.arrivals import planned_offsets
from kvbench.launchers.local import LocalLauncher
from kvbench.sweep.selftest_server import exact_server
from kvbench.sweep.trial.loadgen_driver import LoadGenerator
from tools.perf_workers import hosts

REQUESTS = 60
RATE = 60.0


def test_workers_on_several_hosts_share_one_plan_and_their_records_join(tmp_path: Path) -> None:
    launcher = LocalLauncher("load-hosts", tmp_path / "logs", tmp_path / "specs")
    with exact_server(launcher, {"first_token_s": 0.01, "gap_s": 0.002}) as server, hosts(tmp_path, 2) as far:
        spec = {
            "base_url": server.url, "model": "exact", "seed": 5, "vocab_size": 32_000, "request_rate": RATE,
            "num_requests": REQUESTS, "input_len": 16, "output_len": 3,
            "records_path": str(tmp_path / "records"), "slo": {"ttft_ms": 1000.0, "tpot_ms": 1000.0},
        }  # fmt: skip
        load = LoadGenerator(far, spec, workers=3).run(lambda progress: False, lambda: None, 60.0)
    assert (load.reason, [record.error for record in load.records]) == ("complete", [""] * REQUESTS)
    # Dealt out in turn, the sends are those of one generator with the whole plan, to the same moments.
    planned = planned_offsets(RATE, REQUESTS, 1.0, 5)
    began = load.records[0].scheduled_s - planned[0]
    for record, offset in zip(load.records, planned, strict=True):
        assert abs(record.scheduled_s - began - offset) < 1e-6
    workers = load.client["per_worker"]
    assert [worker["host"] for worker in workers] == ["host0", "host1", "host0"]
    assert all(abs(worker["clock_ahead_s"]) < 0.5 for worker in workers)  # one machine: one clock, measured
    starts = [worker["started_monotonic_s"] for worker in workers]
    assert max(starts) - min(starts) < 1e-3
