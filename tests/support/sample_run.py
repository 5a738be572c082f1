"""Makes run folders that look like real ones, from a small queue model: for tests of tables and plots."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.core.metrics.metrics import Slo, summarise
from kvbench.core.records import Cell, Finding, RequestRecord, TrialRecord
from kvbench.core.search.search import RateSearch, SearchLimits
from kvbench.results.store import CellResult, RunInfo, RunStore

SCENARIO = """\
name: quickstart
model: tiny
slo: {ttft_ms: 250, tpot_ms: 15, attainment: 0.95}
"""
SLO = {"ttft_ms": 250.0, "tpot_ms": 15.0, "attainment": 0.95}
PLAN: dict[str, Any] = {"scenario": {"name": "quickstart", "model": "tiny", "slo": SLO}}
ENVIRONMENT: dict[str, Any] = {
    "hostname": "node-a",
    "cpu": {"model": "Example CPU 9000 @ 2.0 GHz", "cores": 2, "usable_cores": 2},
    "gpus": [],
    "libraries": {"nixl": "1.5.1"},
}
OUTPUT_LEN = 16
CLIENT: dict[str, Any] = {
    "send_lag_p50_ms": 0.05, "send_lag_p99_ms": 0.31, "chunk_lag_p99_ms": 0.42, "first_error_p99_ms": 0.0,
    "token_error_p99_ms": 0.21, "loop_lag_p99_ms": 0.4, "cpu_share": 0.21, "workers": 1, "stamps": "kernel",
}  # fmt: skip
# Requests per second at 1,024 tokens that each connector carries in the model.
SPEED = {"aggregated": 21.0, "mooncake": 30.0, "nixl": 28.5, "tcp": 24.0}


def capacity(cell: Cell) -> float:
    return SPEED[cell.connector] * (1024 / cell.input_len) ** 0.9


def make_requests(cell: Cell, rate: float, seed: int, count: int = 120) -> list[RequestRecord]:
    """Requests of one trial: waiting grows with the load, and without end above the capacity."""
    rng = random.Random(f"{cell.key}-{rate}-{seed}")
    load = rate / capacity(cell)
    prefill = 0.012 + cell.input_len * 18e-6
    step = 0.0055 + 0.005 * min(load, 1.3) ** 2
    records, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        waiting = rng.expovariate(1.0) * prefill * min(load, 0.93) / (1.02 - min(load, 0.93)) * 0.8
        waiting += max(0.0, load - 0.97) * now * 0.5
        first = now + prefill * rng.lognormvariate(0, 0.1) + waiting
        gaps = [step * rng.lognormvariate(0, 0.12) for _ in range(cell.output_len - 1)]
        records.append(
            RequestRecord(
                f"r{number}", now, cell.input_len, cell.output_len, now + 1e-4, first, first + sum(gaps)
            )
        )
        records[-1].itl_s, records[-1].output_len, records[-1].status = gaps, cell.output_len, 200
    return records


def breakdown(cell: Cell, ttft_ms: float) -> dict[str, float | None]:
    """Parts that add up; of the connector that asks P and D at once D's queue is not known."""
    prefill, step, transfer = (0.012 + cell.input_len * 18e-6) * 1e3, 5.5, cell.input_len * 0.0021
    if cell.connector == "aggregated":
        return {"router": 1.0, "prefill": prefill, "prefill_queue": ttft_ms - prefill - 1}
    left = max(2.0, ttft_ms - prefill - step - transfer - 1.0)
    at_once = cell.connector == "mooncake"
    return {
        "router": 1.0, "prefill_queue": 0.6 * left, "prefill": prefill,
        "hand_off": 0.4 * left if at_once else 0.1 * left, "kv_transfer": transfer,
        "decode_queue": None if at_once else 0.3 * left, "first_decode_step": step,
    }  # fmt: skip


def make_trial(cell: Cell, rate: float, number: int, requests: Sequence[RequestRecord]) -> TrialRecord:
    duration = max(request.last_token_s or 0.0 for request in requests)
    summary = summarise(requests, Slo(**SLO), rate, duration).to_json()
    met = summary["slo_attainment"] >= SLO["attainment"]
    pair = cell.connector != "aggregated"
    engine = {
        "kv_bytes_per_request": cell.input_len * 2048.0 if pair else None,
        "kv_transfer_ms_per_request": cell.input_len * 0.0021 if pair else None,
        "kv_descriptors_per_request": 8.0 if pair else None,
        "kv_source": "kvbench:kv_transfer_seconds of decode" if pair else "",
        "ttft_ms_mean_of_all": summary["ttft_ms"]["mean"],
        "ttft_breakdown_ms": breakdown(cell, summary["ttft_ms"]["mean"]),
        "transport": {"mooncake": "tcp", "nixl": "ucx: tcp,self,sm"}.get(cell.connector, ""),
        "load_mode": "router" if pair else "",
        "client": CLIENT,
        "prefix_hit_rate_prefill": 0.0,
        "prefix_hit_rate_decode": 0.0 if pair else None,
    }
    return TrialRecord(
        f"{cell.key}-{number:03d}", cell, rate, number, "met" if met else "missed",
        f"attainment {summary['slo_attainment']:.3f}", "expand" if number < 4 else "bisect",
        "2026-11-21T13:30:00.000Z", 12.0, summary, engine, [], ["emulated"],
    )  # fmt: skip


def search(store: RunStore, cell: Cell, max_rate: float = 1000.0) -> CellResult:
    """A real search; its third trial is refused as invalid."""
    start = min(capacity(cell) * 0.3, max_rate)
    searching = RateSearch(SearchLimits(start, min(0.01, start), max_rate, precision=0.15, max_trials=9))
    met: dict[float, str] = {}
    number = 0
    while (probe := searching.ask()) is not None:
        number += 1
        requests = make_requests(cell, probe.rate, number)
        trial = make_trial(cell, probe.rate, number, requests)
        trial.purpose = probe.purpose
        if number == 3:
            trial.verdict, trial.reason = "invalid", "the engine fell behind its model by 12 %"
            trial.findings = [Finding("step_lag", "invalid", trial.reason, "use a quieter machine")]
        store.add_trial(trial, requests)
        searching.tell(probe.rate, trial.verdict)
        if trial.verdict == "met":
            met[probe.rate] = trial.trial_id
    answer = searching.answer()
    confirmed_by = met.get(answer.max_request_rate or 0.0)
    checked = {"checked": 4, "equal": 4}
    return CellResult(cell, "done", answer.to_json(), checked, confirmed_by=confirmed_by)


def make_run(
    folder: Path,
    connectors: Sequence[str] = ("aggregated", "mooncake", "nixl"),
    input_lens: Sequence[int] = (512, 2048, 8192),
    seed: int = 7,
    status: str = "complete",
    special: bool = False,
) -> Path:
    """A run folder. With ``special``: one cell censored, one refused, one without a rate, one skipped."""
    labels = ["emulated"]
    info = RunInfo(argv=["kvbench", "sweep", "quickstart"], seed=seed, hosts=["node-a"], labels=labels)
    store = RunStore.create(folder, "quickstart", SCENARIO.encode(), PLAN, ENVIRONMENT, info)
    cells = [Cell(name, length, OUTPUT_LEN) for length in input_lens for name in connectors]
    for index, cell in enumerate(cells):
        if special and index == 1:
            reason = "corrupt: 1 of 4 greedy outputs differs from the aggregated server's"
            checks = {"checked": 4, "equal": 3}
            store.put_cell(CellResult(cell, "refused", None, checks, reason, "look into logs/decode-0.log"))
        elif special and index == 3:
            requests = make_requests(cell, capacity(cell) * 1.3, 1)
            trial = make_trial(cell, capacity(cell) * 1.3, 1, requests)
            store.add_trial(trial, requests)
            searching = RateSearch(SearchLimits(trial.request_rate, trial.request_rate, 100.0))
            searching.tell(trial.request_rate, "missed")
            searching.tell(trial.request_rate, "missed")
            store.put_cell(CellResult(cell, "done", searching.answer().to_json()))
        elif special and index == 4:
            store.put_cell(search(store, cell, max_rate=capacity(cell) * 0.5))
        else:
            store.put_cell(search(store, cell))
    if special:
        store.skip_connector("nccl", "needs an NVIDIA driver, none is here", "kvbench doctor")
    if status != "running":
        store.finish(status)  # type: ignore[arg-type]
    return store.path
