"""Blocks moved between two worker processes by one backend, both ways, every byte compared.

The workers are those of ``kvbench microbench``; here each step stands alone, so that it is seen which one
fails, and the environment is the check's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvbench import transfer
from kvbench.launchers.local import LocalLauncher
from kvbench.microbench.sides import Side, WorkerError, WorkerHandle, Workers
from kvbench.transfer.base import Layout
from kvbench.transfer.parts.blocks import pack_ids
from tools.gpu.result import CheckFailedError, Figures, SkippedError

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
    try:
        one, other = (
            workers.start(
                role,
                Side(),
                {
                    "role": role,
                    "backend": backend,
                    "options": {
                        "role": role,
                        "host": "127.0.0.1",
                        "memory": memory,
                        "gpu_turn": 0,
                        **options,
                    },
                    "layout": layout,
                    "memory": memory,
                    "seed": 1,
                    "side": side,
                },
            )
            for role, side in SIDES.items()
        )
        workers.hello([one, other], READY_S)
        yield _Both(workers, one, other)
    finally:
        workers.stop()


def _once(both: _Both, peer: str, op: str, remote: list[int], generation: int) -> tuple[float, str]:
    """One measured transfer of all blocks, its bytes compared. GB/s and transport."""
    for each in (both.initiator, both.target):
        both.ask(each, "fill", generation=generation)
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
