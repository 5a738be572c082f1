"""The checks, in the order in which they run: what is cheap and says most comes first."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import time
from ctypes import CDLL
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvbench.errors import KvbenchError
from kvbench.hosts.devices import nics, output_of, rdma
from kvbench.microbench.sides import WorkerError
from tools.gpu import driver
from tools.gpu.moved import moved, refused
from tools.gpu.noise import noise
from tools.gpu.pair import pair
from tools.gpu.result import Check, CheckFailedError, Figures

LIBRARIES: Final = (
    *("libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.12", "libcudart.so.13", "libnccl.so.2"),
    *("libibverbs.so.1", "libmlx5.so.1", "libnuma.so.1", "libcurl.so.4"),
)
PACKAGES: Final = (
    *(
        "torch",
        "nixl",
        "nixl-cu12",
        "nixl-cu13",
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
    ),
    *("mooncake-transfer-engine-non-cuda", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "pydantic"),
)
SMI: Final = (
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "pci.bus_id",
    "compute_mode",
    "mig.mode.current",
)
MULTI_RANK: Final = (2, 30)
"""From this NCCL on two ranks may share a GPU (kvbench/transfer/nccl.py)."""
TCP_REFUSALS: Final = ("does not enable CUDA memory support", "detected as host")
"""Why NIXL refuses GPU memory over TCP alone: at its agent's start from 1.5 on, earlier at registration."""
COPIED_BYTES: Final = 64 << 20


def facts(folder: Path) -> Figures:
    """What this machine is; nothing of it can fail."""
    del folder
    smi = output_of(["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv"], 10.0)
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "nvidia_smi": (smi or "").strip().splitlines(),
        "topology": (output_of(["nvidia-smi", "topo", "-m"], 10.0) or "").strip().splitlines(),
        "devices": sorted(each.name for each in Path("/dev").glob("nvidia*")),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "libraries": {name: _loads(name) for name in LIBRARIES},
        "nics": [each["name"] for each in nics(Path("/"))],
        "rdma": [each["name"] for each in rdma()],
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if re.match(r"UCX_|NCCL_|MC_|CUDA_|NVIDIA_", k)
        },
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _loads(name: str) -> str:
    try:
        CDLL(name)
    except OSError as error:
        return str(error)[:160]
    return "loads"


def cuda_memory(folder: Path) -> Figures:
    """kvbench's own GPU buffer: patterns written, read back and compared; GB/s of both copies."""
    from kvbench.processes.transfer_worker.memory import Content, CudaMemory, difference, fill
    from kvbench.transfer.base import Layout

    del folder
    layout = Layout(2, 32, 1 << 20)
    memory, content = CudaMemory(layout.nbytes), Content(1, 1)
    fill(memory, layout, content)
    blocks = list(range(layout.blocks))
    if wrong := difference(memory, layout, blocks, content, blocks):
        raise CheckFailedError(wrong)
    memory.put(5, np.bitwise_xor(memory.get(5, 1), np.uint8(1)))
    if not difference(memory, layout, blocks, content, blocks):
        raise CheckFailedError("one bit was changed, and the comparison did not see it")
    found: dict[str, Any] = {**driver.version(), "address": hex(memory.address)}
    data = memory.get(0, COPIED_BYTES)
    for name, copy in (
        ("to host GB/s", lambda: memory.get(0, COPIED_BYTES)),
        ("to GPU GB/s", lambda: memory.put(0, data)),
    ):
        copy()
        began = time.perf_counter()
        copy()
        found[name] = round(COPIED_BYTES / (time.perf_counter() - began) / 1e9, 2)
    return found


def nccl(folder: Path) -> Figures:
    """Two ranks on one GPU: moved from 2.30 on; an older one has to refuse it by its own error."""
    try:
        return moved("nccl", "cuda", folder)
    except (WorkerError, KvbenchError) as error:
        said = "\n".join([error.message, *getattr(error, "log", [])])
        found = _nccl_version()
        if found and found < MULTI_RANK and "duplicate gpu" in said.lower():
            return {"version": found, "refused": said[-500:]}
        raise CheckFailedError(f"NCCL {'.'.join(map(str, found))}: {said}") from error


def _nccl_version() -> tuple[int, ...]:
    if importlib.util.find_spec("torch") is None:
        return ()
    from kvbench.transfer.nccl import load

    return tuple(int(part) for part in load()["version"].split(".")[:2])


CHECKS: Final = (
    Check("facts", facts, gpu=False),
    Check("nixl_host", lambda folder: moved("nixl", "host", folder, {"protocol": "tcp"}), 90, gpu=False),
    Check("mooncake_host", lambda folder: moved("mooncake", "host", folder), 90, gpu=False),
    Check("pair_host", lambda folder: pair("host", "tcp", folder), 110, gpu=False),
    Check("nvml", lambda folder: driver.nvml_codes()),
    Check("cuda_memory", cuda_memory),
    Check("nixl_gpu_ipc", lambda folder: moved("nixl", "cuda", folder, {"protocol": "cuda_ipc"}), 90),
    Check("nixl_gpu_tcp", lambda folder: moved("nixl", "cuda", folder, {"protocol": "tcp"}), 90),
    Check("nixl_gpu_all", lambda folder: moved("nixl", "cuda", folder, environment={"UCX_TLS": "all"}), 90),
    Check(
        "nixl_gpu_tcp_refused",
        lambda folder: refused("nixl", "cuda", folder, {"UCX_TLS": "tcp"}, TCP_REFUSALS),
        90,
    ),
    Check("pair_gpu", lambda folder: pair("cuda", "cuda,tcp", folder), 110),
    Check("mooncake_gpu", lambda folder: moved("mooncake", "cuda", folder), 90),
    Check("nccl", nccl, 90),
    Check("bf16_noise", lambda folder: noise(), 120),
)
