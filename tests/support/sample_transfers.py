"""Makes run folders of a microbenchmark that look like real ones, from a formula: for tests of its report."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.core.transfers.cases import Axes, BackendCapabilities, Matrix, build
from kvbench.core.transfers.records import Case, TransferRecord, TransferWarning
from kvbench.results.store import RunInfo, RunStore

ENVIRONMENT: dict[str, Any] = {
    "hostname": "node-a",
    "cpu": {"model": "Example CPU 9000 @ 2.0 GHz", "cores": 2, "usable_cores": 2},
}
MOVERS = (
    BackendCapabilities("null", ("none",), nics=False),
    BackendCapabilities("memcpy", ("memory",), nics=False, loopback_only=True),
    BackendCapabilities("shm", ("memory",), nics=False, loopback_only=True),
    BackendCapabilities("tcp"),
    BackendCapabilities("mooncake", ("tcp", "rdma"), lacking={"rdma": "no RDMA device"}),
    BackendCapabilities("nixl", ("tcp", "rdma", "cma"), lacking={"rdma": "no RDMA device"}),
    BackendCapabilities("mooncake_store", ("tcp", "rdma"), lacking={"rdma": "no RDMA device"}),
    BackendCapabilities("nccl", ("nccl",), memories=("cuda",), problem="no GPU"),
)
# start-up s, s per descriptor, GB/s without NICs
SPEED: dict[str, tuple[float, float, float]] = {
    "null": (2e-6, 0.0, 1e6), "memcpy": (3e-6, 1e-7, 9.0), "shm": (4e-6, 1e-7, 8.0),
    "tcp": (40e-6, 2e-6, 1.9), "mooncake": (90e-6, 4e-6, 1.4), "nixl": (55e-6, 1.5e-6, 1.7),
    "mooncake_store": (400e-6, 10e-6, 0.9),
}  # fmt: skip
LINE_GB_PER_S = 0.125


def make_record(
    case: Case, seed: int = 1, calls: int = 200, speed: float = 1.0, lab: str = ""
) -> TransferRecord:
    """A row as it would be measured: with ``speed`` 2.0 everything takes half the time."""
    rng = random.Random(f"{case.key}-{seed}")
    start, per_descriptor, rate = SPEED[case.backend]
    if case.nics:
        rate = LINE_GB_PER_S * case.nics * 0.96
    descriptors = case.regions if case.merged else case.regions * case.batch_size
    ideal = (start + per_descriptor * descriptors + case.nbytes / rate / 1e9) / speed
    times = [ideal * rng.lognormvariate(0, 0.05) for _ in range(calls)]
    window = sum(times) / case.threads
    moves = case.backend != "null"
    return TransferRecord(
        case, transport={"nixl": "tcp/lo", "mooncake": "tcp"}.get(case.backend, case.protocol),
        library={"nixl": "nixl-cu12 1.5.1", "mooncake": "mooncake 0.3.13"}.get(case.backend, "kvbench 0.1.0"),
        started_at="2026-11-21T13:30:00.000Z", nbytes=case.nbytes, logical_bytes=case.nbytes,
        descriptors=descriptors, calls=calls, window_s=window,
        gb_per_s=calls * case.nbytes / window / 1e9 if moves else None, call_s=times, open_s=0.05,
        register_s=0.01, connect_s=0.02, prepare_s=1e-5, initiator_cpu_s=window * 0.9 if moves else window,
        target_cpu_s=window * 0.5, verified=True if moves else None,
        nic_bytes={f"initiator:kv{nic}": calls * case.nbytes // case.nics for nic in range(case.nics)},
        line_rate_gb_per_s=LINE_GB_PER_S * case.nics if case.nics else None, load_average=1.2, lab=lab,
    )  # fmt: skip


def make_rows(matrix: Matrix, speed: float = 1.0, lab: str = "", seed: int = 1) -> list[TransferRecord]:
    """A row for every case and for all that is absent; one case failed, one with a warning."""
    rows = [TransferRecord(left.case, "skipped", left.reason) for left in matrix.left if left.absent]
    for place, case in enumerate(matrix.cases):
        record = make_record(case, seed, speed=speed, lab=lab)
        if case.backend == "mooncake" and case.block_bytes == 64 * 1024 and case.op == "read":
            record = TransferRecord(
                case, "error", "the call did not end within 5 s", ["E1121 worker_pool.cpp: timeout"]
            )
        elif place % 5 == 0:
            record.warnings = [
                TransferWarning("busy_machine", "load average 3.1 on 2 cores", "stop other work")
            ]
        rows.append(record)
    return rows


def make_run(
    folder: Path,
    axes: Axes | None = None,
    speed: float = 1.0,
    lab: str = "",
    status: str = "complete",
    words: Sequence[str] = (),
) -> Path:
    """A run folder of a microbenchmark."""
    matrix = build(axes or Axes(), MOVERS)
    info = RunInfo(
        kind="microbench", argv=["kvbench", "microbench"], hosts=["node-a"], labels=["lab"] if lab else []
    )
    plan = {**matrix.to_json(), "words": list(words)}
    store = RunStore.create(folder, "microbench", b"", plan, ENVIRONMENT, info)
    for record in make_rows(matrix, speed, lab):
        store.add_transfer(record)
    if status != "running":
        store.finish(status)  # type: ignore[arg-type]
    return store.path
