"""The checks, in the order in which they run: what is cheap and says most comes first.

``moved``: blocks between two worker processes of ``kvbench microbench`` by one backend, both ways, every byte
compared. Each step is a request of its own, so that it is seen which one fails, and the environment is the
check's.

``noise``: how far bf16 lets greedy outputs differ when nothing but the batch size does. A model of random
weights, as wide as small ones are, is made by a seed; nothing is downloaded. The same prompts are decoded
greedily one by one (the reference) and in batches of other sizes. Where a token differs, the reference's
margin between its first and second choice there says whether noise could do it.

``pair``: the emulated pair through ``kvbench bench``, its KV in host memory or on the GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvbench import transfer
from kvbench.errors import KvbenchError
from kvbench.hosts.devices import nics, output_of, rdma
from kvbench.launchers.local import LocalLauncher
from kvbench.microbench.sides import Side, WorkerError, WorkerHandle, Workers
from kvbench.transfer.base import Layout
from kvbench.transfer.parts.blocks import pack_ids
from tools.bench import output_of as command_output

from . import driver
from .result import Check, CheckFailedError, Figures, SkippedError

BLOCK_BYTES: Final = 1 << 20
BLOCKS: Final = 64
READY_S: Final = 40.0
STEP_S: Final = 20.0
LIMITS: Final = {"seconds": 1.0, "min_calls": 3, "max_calls": 500, "max_seconds": 8.0, "call_deadline_s": 8.0}
SIDES: Final = {"initiator": 1, "target": 2}
_ALL: Final = list(range(BLOCKS))
_SHUFFLED: Final = [(7 * block + 3) % BLOCKS for block in _ALL]
"""7 has no factor of BLOCKS in common, so each block is met once; neighbours are none any more."""


@dataclass
class _Both:
    workers: Workers
    initiator: WorkerHandle
    target: WorkerHandle

    def ask(self, who: WorkerHandle, command: str, **content: Any) -> dict[str, Any]:
        return self.workers.ask([(who, command, content)], STEP_S)[0]


def moved(
    backend: str,
    memory: str,
    folder: Path,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Figures:
    """Write and read, whole and in shuffled blocks: GB/s and transport of each.

    Raises CheckFailedError where bytes are wrong, or where a wrong byte is not noticed; WorkerError where the
    library refuses; SkippedError where it is not here.
    """
    problem = transfer.check(backend)
    if problem is not None:
        # The wheels for CUDA load only where the driver is; there they must.
        broken = memory == "cuda" and "not installed" not in problem.reason
        raise (CheckFailedError if broken else SkippedError)(f"{backend}: {problem.reason}")
    os.environ.update(environment or {})
    figures: dict[str, Any] = {"memory": memory}
    with _started(backend, memory, folder, dict(options or {})) as both:
        figures["library"] = " ".join(both.initiator.hello["library"].values())
        figures["register_ms"] = round(both.initiator.hello["register_s"] * 1e3, 2)
        peer = both.ask(both.initiator, "connect", peer=both.target.hello["agent"], deadline_s=STEP_S / 2)
        for generation, (op, remote) in enumerate(
            (("write", _ALL), ("read", _ALL), ("write", _SHUFFLED), ("read", _SHUFFLED)), 1
        ):
            name = op if remote is _ALL else f"{op} shuffled"
            done = _once(both, str(peer["peer"]), op, remote, generation)
            figures[f"{name} GB/s"], figures[f"{op} transport"] = done
    return figures


def refused(
    backend: str, memory: str, folder: Path, environment: Mapping[str, str], reasons: Sequence[str]
) -> Figures:
    """The same where it must not go: the library's error has to contain one of ``reasons``.

    Raises CheckFailedError.
    """
    try:
        figures = moved(backend, memory, folder, environment=environment)
    except WorkerError as error:
        said = "\n".join([error.message, *error.log])
        if not any(reason.lower() in said.lower() for reason in reasons):
            raise CheckFailedError(f"refused, but for none of {', '.join(reasons)}: {said}") from error
        return {"refused": error.message, "log": error.log}
    raise CheckFailedError(f"{backend} moved {memory} memory with {dict(environment)}", figures)


@contextmanager
def _started(backend: str, memory: str, folder: Path, options: Mapping[str, Any]) -> Iterator[_Both]:
    workers = Workers(LocalLauncher("gpu-checks", folder / "logs", folder / "specs"))
    layout = Layout(1, BLOCKS, BLOCK_BYTES).to_json()
    spec = {"backend": backend, "layout": layout, "memory": memory, "seed": 1}
    own = {"host": "127.0.0.1", "memory": memory, "gpu_turn": 0, **options}
    try:
        one, other = (
            workers.start(
                role, Side(), {**spec, "role": role, "side": side, "options": {**own, "role": role}}
            )
            for role, side in SIDES.items()
        )
        workers.hello([one, other], READY_S)
        yield _Both(workers, one, other)
    finally:
        workers.stop()


def _once(both: _Both, peer: str, op: str, remote: list[int], generation: int) -> tuple[float, str]:
    """One measured transfer of all blocks, its bytes compared. GB/s and transport."""
    for worker in (both.initiator, both.target):
        both.ask(worker, "fill", generation=generation)
    ours, theirs = pack_ids(_ALL), pack_ids(remote)
    prepared = {"op": op, "transfers": [{"peer": peer, "local": ours, "remote": theirs}]}
    both.ask(both.initiator, "prepare", **prepared)
    run = both.ask(both.initiator, "run", limits=LIMITS)
    both.ask(both.initiator, "release")
    if op == "write":
        where, blocks, side, source = both.target, theirs, SIDES["initiator"], ours
    else:
        where, blocks, side, source = both.initiator, ours, SIDES["target"], theirs
    wanted = {"blocks": blocks, "source": {"side": side, "generation": generation, "blocks": source}}
    if difference := both.ask(where, "verify", **wanted)["difference"]:
        raise CheckFailedError(f"{op}: {difference}")
    both.ask(where, "spoil", block=BLOCKS - 1)
    if not both.ask(where, "verify", **wanted)["difference"]:
        raise CheckFailedError(f"{op}: one bit was changed, and the comparison did not see it")
    seconds = (run["ended_ns"] - run["started_ns"]) / 1e9
    return round(run["calls"] * BLOCKS * BLOCK_BYTES / seconds / 1e9, 2), str(run["transport"])


LAYERS: Final = 8
WIDTH: Final = 1024
HEADS: Final = 16
VOCAB: Final = 8192
PROMPTS: Final = 32
PROMPT_TOKENS: Final = 64
NEW_TOKENS: Final = 32
BATCHES: Final = (1, 2, 4, 8, 16, 32)
SEED: Final = 1


def noise(device: str = "cuda", dtype: str = "bfloat16", sizes: dict[str, int] | None = None) -> Figures:
    """By batch size: share of outputs that differ from one by one, where they begin to, margins there (nats).

    Raises SkippedError without torch; CheckFailedError where one by one gives other outputs the second time.
    """
    if importlib.util.find_spec("torch") is None:
        raise SkippedError("torch is not installed")
    torch: Any = importlib.import_module("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise SkippedError(f"torch {torch.__version__} finds no usable GPU")
    torch.manual_seed(SEED)
    model = _model(torch, device, getattr(torch, dtype), sizes or {})
    prompts = torch.randint(0, VOCAB, (PROMPTS, PROMPT_TOKENS), device=device)
    with torch.inference_mode():
        reference, margins = _decoded(torch, model, prompts, 1)
        figures: dict[str, Any] = {
            "torch": str(torch.__version__),
            "dtype": dtype,
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "margin_nats_median": round(float(margins.float().median()), 5),
        }
        for batch in BATCHES:
            figures[f"batch {batch}"] = _against(
                reference, margins, _decoded(torch, model, prompts, batch)[0]
            )
    if figures["batch 1"]["outputs_that_differ"]:
        raise CheckFailedError("the same prompts one by one give other outputs the second time", figures)
    return figures


def _against(reference: Any, margins: Any, tokens: Any) -> dict[str, Any]:
    differ = tokens != reference
    rows = differ.any(dim=1)
    if not bool(rows.any()):
        return {"outputs_that_differ": 0.0}
    firsts = differ.int().argmax(dim=1)[rows]
    there = margins[rows].gather(1, firsts[:, None]).float()
    return {
        "outputs_that_differ": round(float(rows.float().mean()), 4),
        "first_token": int(firsts.min()),
        "margin_nats_max": round(float(there.max()), 5),
        "margin_nats_median": round(float(there.median()), 5),
    }


def _model(torch: Any, device: str, dtype: Any, sizes: dict[str, int]) -> Any:
    """Embedding, transformer layers, logits; causal, without a KV cache: each step reads the whole prefix."""
    width = sizes.get("width", WIDTH)
    layer = torch.nn.TransformerEncoderLayer(
        width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    parts = {
        "embed": torch.nn.Embedding(VOCAB, width),
        "stack": torch.nn.TransformerEncoder(layer, sizes.get("layers", LAYERS), enable_nested_tensor=False),
        "head": torch.nn.Linear(width, VOCAB, bias=False),
    }
    for parameter in parts["stack"].parameters():  # the layers start as copies of one
        if parameter.dim() > 1:
            torch.nn.init.xavier_uniform_(parameter)
    return {name: part.to(device=device, dtype=dtype).eval() for name, part in parts.items()}


def _decoded(torch: Any, model: Any, prompts: Any, batch: int) -> tuple[Any, Any]:
    """Greedy tokens and the margin at each: (prompts, new tokens) both."""
    tokens, margins = [], []
    for rows in prompts.split(batch):
        known, gaps = rows, []
        for _ in range(NEW_TOKENS):
            mask = torch.nn.Transformer.generate_square_subsequent_mask(
                known.shape[1], device=known.device, dtype=next(model["stack"].parameters()).dtype
            )
            hidden = model["stack"](model["embed"](known), mask=mask, is_causal=True)
            scores = torch.log_softmax(model["head"](hidden[:, -1]).float(), dim=-1)
            best = scores.topk(2, dim=-1)
            gaps.append(best.values[:, 0] - best.values[:, 1])
            known = torch.cat([known, best.indices[:, :1]], dim=1)
        tokens.append(known[:, -NEW_TOKENS:])
        margins.append(torch.stack(gaps, dim=1))
    return torch.cat(tokens), torch.cat(margins)


NEEDED: Final = ("pandas", "pyarrow", "httptools", "uvloop", "prometheus_client", "jinja2", "typer", "rich")
DEADLINE_S: Final = 100.0
RATE: Final = 10
SCENARIO: Final = """\
version: 1
model: tiny
deployment:
  engine: emulated
  base_port: 0
  ready_timeout_s: 40
  engine_options: {{timing: quick, memory: {memory}}}
connectors:
  - aggregated
  - {{name: nixl, ucx_tls: "{tls}"}}
workload: {{input_len: 1024, output_len: 16}}
slo: {{ttft_ms: 2000, tpot_ms: 200, attainment: 0.9}}
search: {{trial_s: 4, min_requests: 20}}
seed: 1
"""
COUNTS: Final = ("kv_bytes_per_request", "kv_transfers", "kv_transfer_ms_per_request", "kv_transfer_failures")


def pair(memory: str, tls: str, folder: Path) -> Figures:
    """A rate that any machine holds, once as one server and once as a pair: the same outputs, KV counted.

    Raises CheckFailedError with the trial's verdict and reason, or what the command said; SkippedError.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SkippedError(f"not installed: {', '.join(missing)}")
    if problem := transfer.check("nixl"):
        raise SkippedError(f"nixl: {problem.reason}")
    scenario = folder / "pair.yaml"
    scenario.write_text(SCENARIO.format(memory=memory, tls=tls))
    words = ["bench", str(scenario), "--rate", str(RATE), "--output", str(folder / "results")]
    status, output = command_output([sys.executable, "-m", "kvbench.cli", *words], DEADLINE_S)
    paths = sorted((folder / "results").glob("*/trials.jsonl"))
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    trials = {record["cell"]["connector"]: record for record in found}  # the last of each
    figures: dict[str, Any] = {"exit code": status}
    if "nixl" not in trials:
        raise CheckFailedError(f"no trial of nixl was written:\n{output[-3000:]}", figures)
    trial = trials["nixl"]
    engine = trial.get("engine") or {}
    figures |= {
        "verdict": trial["verdict"],
        "reason": trial.get("reason", ""),
        "labels": trial.get("labels", []),
        "findings": [f"{finding['gate']}: {finding['message']}" for finding in trial.get("findings", [])],
        **{name: engine[name] for name in COUNTS if name in engine},
    }
    if trial["verdict"] != "met":
        raise CheckFailedError(f"nixl's trial is {trial['verdict']}: {trial.get('reason', '')}", figures)
    return figures


LIBRARIES: Final = (
    *("libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.12", "libcudart.so.13", "libnccl.so.2"),
    *("libibverbs.so.1", "libmlx5.so.1", "libnuma.so.1", "libcurl.so.4"),
)
PACKAGES: Final = (
    *(
        *("torch", "nixl", "nixl-cu12", "nixl-cu13"),
        *("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
    ),
    *("mooncake-transfer-engine-non-cuda", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "pydantic"),
)
SMI: Final = (
    *("name", "driver_version", "memory.total", "memory.used", "pci.bus_id"),
    *("compute_mode", "mig.mode.current"),
)
MULTI_RANK: Final = (2, 30)
"""From this NCCL on two ranks may share a GPU (kvbench/transfer/nccl.py)."""
TCP_REFUSALS: Final = ("does not enable CUDA memory support", "detected as host")
"""Why NIXL refuses GPU memory over TCP alone: at its agent's start from 1.5 on, earlier at registration."""
COPIED_BYTES: Final = 64 << 20


def facts(folder: Path) -> Figures:
    del folder
    first = {name: next(iter(distributions(name=name)), None) for name in PACKAGES}  # what is imported
    smi = output_of(["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv"], 10.0)
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "nvidia_smi": (smi or "").strip().splitlines(),
        "topology": (output_of(["nvidia-smi", "topo", "-m"], 10.0) or "").strip().splitlines(),
        "devices": sorted(path.name for path in Path("/dev").glob("nvidia*")),
        "packages": {name: found.version for name, found in first.items() if found},
        "libraries": {name: _loads(name) for name in LIBRARIES},
        "nics": [nic["name"] for nic in nics(Path("/"))],
        "rdma": [device["name"] for device in rdma()],
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if re.match(r"UCX_|NCCL_|MC_|CUDA_|NVIDIA_", k)
        },
    }


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
    Check("nccl_tcp", lambda folder: moved("nccl", "cuda", folder, {"protocol": "tcp"}), 90),
    Check("bf16_noise", lambda folder: noise(), 120),
)
