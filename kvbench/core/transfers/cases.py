"""Cases of a microbenchmark from the user's axes: their blocks, and what was skipped and why.

A case's blocks are the tables of both sides and the block ids of each transfer in flight."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

from kvbench.core.transfers.kv_shape import MEMORY_SHARE
from kvbench.core.transfers.records import Case, Layout, Memory, TransferOp
from kvbench.core.units import KIB, MIB, size_text
from kvbench.errors import InputError


@dataclass(frozen=True)
class Pairing:
    """One transfer: block ``local[i]`` of initiator ``initiator`` and ``remote[i]`` of target ``target``."""

    initiator: int
    target: int
    local: tuple[int, ...]
    remote: tuple[int, ...]


def initiator_layout(case: Case) -> Layout:
    """Return blocks for ``threads`` transfers to each target."""
    return _layout(case, case.targets)


def target_layout(case: Case) -> Layout:
    """Return blocks for ``threads`` transfers from each initiator."""
    return _layout(case, case.initiators)


def _layout(case: Case, peers: int) -> Layout:
    blocks = peers * case.threads * case.batch_size * (2 if case.scattered else 1)
    return Layout(case.regions, _reserved(case) + blocks, case.block_bytes)


def _reserved(case: Case) -> int:
    """Return the number of blocks at the start of each region that no transfer moves. vLLM never hands out
    block 0. So the blocks of one region do not touch those of the next one, and no library can merge them."""
    return 1 if case.regions > 1 else 0


def pairings(case: Case, seed: int = 0) -> list[Pairing]:
    """Return a case's transfers, by initiator, thread and target. Contiguous blocks lie side by side in the
    same order on both sides. If they are to be merged, the order is ascending. If not, odd positions come
    before even ones, so that no library finds a neighbour to merge. Scattered blocks are every other block of
    their part, in a separate order on each side, so that no two of them touch, on either side."""
    found = []
    for initiator in range(case.initiators):
        for thread in range(case.threads):
            for target in range(case.targets):
                local = _ids(
                    case, target * case.threads + thread, f"{seed} {initiator} {thread} {target} local"
                )
                remote = _ids(
                    case, initiator * case.threads + thread, f"{seed} {initiator} {thread} {target} remote"
                )
                found.append(Pairing(initiator, target, local, remote))
    return found


def _ids(case: Case, slot: int, seed: str) -> tuple[int, ...]:
    first = _reserved(case) + slot * case.batch_size * (2 if case.scattered else 1)
    if case.scattered:
        ids = list(range(first, first + 2 * case.batch_size, 2))
        random.Random(seed).shuffle(ids)
        return tuple(ids)
    ascending = range(first, first + case.batch_size)
    return tuple(ascending) if case.merged else (*ascending[1::2], *ascending[::2])


DEFAULT_SIZES: Final = ((4 * KIB, 1), (64 * KIB, 32), (MIB, 8), (16 * MIB, 1))
"""Default (block bytes, blocks): latency, an engine's scattered blocks, merged runs, bandwidth."""
FULL_BLOCKS: Final = tuple(4 * KIB * 4**step for step in range(8))
"""4 KiB to 64 MiB."""
FULL_BATCHES: Final = (1, 8, 32, 128)
FULL_THREADS: Final = (1, 4)
FULL_LIMIT_BYTES: Final = 256 * MIB
"""Largest transfer of the full matrix: bandwidth no longer changes beyond."""

LAB_SIZES: Final = ((64 * KIB, 32), (MIB, 16))
"""Large compared with a shaper's burst, with many calls per second over one slow NIC."""
LAB_SECONDS: Final = 1.0

BASELINES: Final = ("null", "memcpy", "shm", "tcp")
"""Measured first: the tool's overhead, and reference limits."""
DEFAULT_SECONDS: Final = 0.5
FULL_SECONDS: Final = 1.0
LEAST_CALLS: Final = 20
"""Fewest calls of a case."""
MOST_SECONDS: Final = 5.0
"""Longest window of a case in seconds."""

# Time that a pair of workers takes to start, connect and end, by backend, and what each case takes besides
# its own window (warm-up, calibration, verification). Medians of runs on two shared cores; an estimate.
_SETUP_S: Final[Mapping[str, float]] = {
    **dict.fromkeys(("null", "memcpy", "shm", "tcp"), 0.8),
    **dict.fromkeys(("mooncake", "nixl"), 2.0),
    "mooncake_store": 3.0,
}
_SETUP_OTHER_S: Final = 4.0
_WARMUP_SHARE: Final = 0.2
_CASE_S: Final = 0.35
_FILL_BYTES_PER_S: Final = 0.5e9


@dataclass(frozen=True)
class BackendCapabilities:
    """Capabilities of a transfer backend that the matrix needs."""

    name: str
    protocols: tuple[str, ...] = ("tcp",)
    """Default first."""
    ops: tuple[TransferOp, ...] = ("read", "write")
    nics: bool = True
    loopback_only: bool = False
    memories: tuple[str, ...] = ("host",)
    optional: bool = False
    problem: str = ""
    """Why it cannot run here, or empty."""
    one_nic: tuple[str, ...] = ()
    """Protocols limited to one NIC."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Protocols that cannot run here, with reasons."""

    def usual(self) -> str:
        """Return the default protocol: RDMA if available."""
        if "rdma" in self.protocols and "rdma" not in self.lacking:
            return "rdma"
        return next((name for name in self.protocols if name not in self.lacking), self.protocols[0])


@dataclass(frozen=True)
class Axes:
    """Axes to vary. Empty ``backends`` and ``protocols``: the default ones."""

    backends: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    nics: tuple[int, ...] = (0,)
    """0 lets the library choose; TCP then uses loopback."""
    ops: tuple[TransferOp, ...] = ("write", "read")
    sizes: tuple[tuple[int, int], ...] = DEFAULT_SIZES
    """(bytes of a block, blocks of a transfer in each region)."""
    threads: tuple[int, ...] = (1,)
    initiators: tuple[int, ...] = (1,)
    targets: tuple[int, ...] = (1,)
    memory: Memory = "host"
    regions: int = 1
    whole_blocks: frozenset[str] = frozenset()
    """Backends that store a block of all regions as one piece."""
    block_pieces: int = 1
    """Pieces of a block in all regions for those backends."""
    scattered: bool = False
    shape: str = ""
    merged: bool = False
    """Whether contiguous blocks are merged; never for ``whole_blocks``."""
    all_protocols: bool = False
    remote: bool = False
    """Whether the sides are on two machines."""

    @classmethod
    def full(cls, **given: Any) -> Axes:
        """Return the large matrix; ``given`` axes replace its own."""
        sizes = tuple(
            (block, batch)
            for block, batch in product(FULL_BLOCKS, FULL_BATCHES)
            if block * batch <= FULL_LIMIT_BYTES
        )
        return cls(**{"sizes": sizes, "threads": FULL_THREADS, "all_protocols": True, **given})


@dataclass(frozen=True)
class Left:
    """What is not measured, and why. ``case``: an example. ``absent``: this machine lacks what it needs."""

    what: str
    reason: str
    case: Case
    absent: bool = False
    cases: int = 1


@dataclass(frozen=True)
class Matrix:
    """The cases in the order in which they are measured, and what was left out."""

    cases: tuple[Case, ...]
    left: tuple[Left, ...] = ()

    def groups(self) -> int:
        """Pairs of workers that have to be started."""
        return len(_groups(self.cases))

    def estimate_s(self, seconds: float, nic_gb_per_s: float | None = None) -> float:
        """Seconds that it takes, with ``seconds`` of transfers for each case; a slow NIC makes it longer."""
        return estimate_s(self.cases, seconds, nic_gb_per_s)

    def to_json(self) -> dict[str, Any]:
        return {
            "cases": [case.key for case in self.cases],
            "left_out": [
                {name: value for name, value in vars(left).items() if name != "case"} for left in self.left
            ],
        }


def build(axes: Axes, backends: Sequence[BackendCapabilities], memory_bytes: int | None = None) -> Matrix:
    """Return all valid cases. ``memory_bytes``: free for buffers, all sides together. Raises InputError for
    an unknown backend and if no case remains."""
    chosen = _chosen(axes, backends)
    cases: dict[str, Case] = {}
    left: dict[tuple[str, str], Left] = {}
    for backend in chosen:
        for case, what, reason, absent in _of_backend(axes, backend, memory_bytes):
            if not reason:
                cases.setdefault(case.key, case)
                continue
            known = left.get((what, reason))
            left[what, reason] = (
                Left(what, reason, case, absent) if known is None else replace(known, cases=known.cases + 1)
            )
    if not cases and not any(row.absent for row in left.values()):
        reasons = "; ".join(f"{row.what}: {row.reason}" for row in list(left.values())[:4])
        raise InputError("nothing is left to measure: " + (reasons or "no axis has a value"))
    if axes.protocols and cases and not {case.protocol for case in cases.values()} & set(axes.protocols):
        wanted = ", ".join(axes.protocols)
        reasons = "; ".join(f"{row.what}: {row.reason}" for row in left.values() if row.case.protocol)
        raise InputError(
            f"no backend on this host moves bytes over {wanted}, only baselines are left: {reasons}",
            hint="omit --protocol to measure the available protocols",
        )
    return Matrix(tuple(sorted(cases.values(), key=_order(chosen))), tuple(left.values()))


def _chosen(axes: Axes, backends: Sequence[BackendCapabilities]) -> list[BackendCapabilities]:
    known = {backend.name: backend for backend in backends}
    for name in axes.backends:
        if name not in known:
            raise InputError(f"unknown transfer backend {name!r}", hint=f"known: {', '.join(sorted(known))}")
    # Optional backends that cannot run here are listed with their reason.
    names = axes.backends or tuple(
        backend.name for backend in backends if not backend.optional or backend.problem
    )
    first = [name for name in BASELINES if name in names]
    return [known[name] for name in dict.fromkeys([*first, *names])]


def _of_backend(
    axes: Axes, backend: BackendCapabilities, memory_bytes: int | None
) -> Iterator[tuple[Case, str, str, bool]]:
    """Yield (case, part, reason, unavailable); no reason for a valid case."""
    for protocol, reason, absent in _protocols(axes, backend):
        sample = Case(backend.name, protocol, axes.ops[0], *axes.sizes[0])
        if backend.problem:
            yield replace(sample, protocol=""), backend.name, backend.problem, True
            return
        if reason:
            yield sample, f"{backend.name} over {protocol}", reason, absent
            continue
        for case in _cases(axes, backend, protocol):
            what, reason = _sense(case, backend, axes, memory_bytes)
            yield case, what, reason, False


def _protocols(axes: Axes, backend: BackendCapabilities) -> Iterator[tuple[str, str, bool]]:
    """Yield (protocol, reason, unavailable)."""
    # A backend without NICs is a baseline and keeps its own protocol.
    given = tuple(p for p in axes.protocols if p in backend.protocols) if not backend.nics else axes.protocols
    if not given:
        names = backend.protocols if axes.all_protocols else (backend.usual(),)
        # RDMA is reported even if not requested: the table shows that this machine lacks it.
        names += ("rdma",) if "rdma" in backend.lacking and "rdma" not in names else ()
    else:
        names = given
    for name in names:
        if name not in backend.protocols:
            yield name, f"{backend.name} does not support it, only {', '.join(backend.protocols)}", False
        else:
            yield name, backend.lacking.get(name, ""), name in backend.lacking


def _cases(axes: Axes, backend: BackendCapabilities, protocol: str) -> Iterator[Case]:
    nics = axes.nics if backend.nics else (0,)
    regions = axes.regions
    sizes: Sequence[tuple[int, int]] = axes.sizes
    whole, merged = axes.block_pieces, axes.merged
    if backend.name in axes.whole_blocks:
        sizes = [(block * whole, batch * regions // whole) for block, batch in sizes]
        regions, merged = 1, False
    sides = product(axes.initiators, axes.targets)
    for count, op, (block, batch), threads, (initiators, targets) in product(
        nics, axes.ops, sizes, axes.threads, sides
    ):
        yield Case(
            backend.name,
            protocol,
            op,
            block,
            batch,
            threads=threads,
            nics=count,
            initiators=initiators,
            targets=targets,
            memory=axes.memory,
            scattered=axes.scattered,
            merged=merged,
            regions=regions,
            shape=axes.shape,
        )


def _sense(case: Case, backend: BackendCapabilities, axes: Axes, memory_bytes: int | None) -> tuple[str, str]:
    """(what, why) of a combination that makes no sense; ("", "") for one that does."""
    if case.op not in backend.ops:
        return f"{case.backend} {case.op}", f"{case.backend} supports only {', '.join(backend.ops)}"
    if case.nics > 1 and case.protocol in backend.one_nic:
        return f"{case.backend} over {case.protocol} with several NICs", "it uses one address, so one NIC"
    if case.memory not in backend.memories:
        return (
            f"{case.backend} in {case.memory} memory",
            f"it supports only {' and '.join(backend.memories)} memory",
        )
    if case.protocol == "cuda_ipc" and case.memory != "cuda":
        return f"{case.backend} over cuda_ipc", "it copies between GPUs: use --memory cuda"
    if backend.loopback_only and axes.remote:
        return case.backend, "it works only within one host, and the two sides are on different hosts"
    if case.initiators > 1 and case.targets > 1:
        return (
            f"{case.initiators} initiators to {case.targets} targets",
            "one of the two sides must be single: fan-in or fan-out",
        )
    need = memory_needed(case)
    if memory_bytes is not None and need > MEMORY_SHARE * memory_bytes:
        what = f"{size_text(case.block_bytes)} × {case.batch_size * case.regions} at {case.threads} a time"
        return what, f"its buffers need {need / 1e9:.3g} GB of {memory_bytes / 1e9:.3g} GB free memory"
    return "", ""


def memory_needed(case: Case) -> int:
    """Return the bytes of all sides' buffers, as if all were on one host."""
    initiator_bytes = case.initiators * initiator_layout(case).nbytes
    return initiator_bytes + case.targets * target_layout(case).nbytes


def _order(chosen: Sequence[BackendCapabilities]) -> Any:
    order = {backend.name: position for position, backend in enumerate(chosen)}

    def key(case: Case) -> tuple[Any, ...]:
        # Workers are kept from one case to the next one of their group.
        group = _group(case, order[case.backend])
        return (*group, case.op != "write", case.threads, case.nbytes, case.block_bytes)

    return key


def _group(case: Case, backend: Any) -> tuple[Any, ...]:
    sides, streams = (case.initiators, case.targets), max(case.threads, case.nics, 1)
    # Over several NICs a library may be set up for one direction.
    op = ("write", "read").index(case.op) + 1 if case.nics > 1 else 0
    return (backend, case.protocol, case.nics, *sides, case.memory, case.merged, streams, op)


def _groups(cases: Iterable[Case]) -> dict[tuple[Any, ...], list[Case]]:
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(_group(case, case.backend), []).append(case)
    return groups


def estimate_s(cases: Iterable[Case], seconds: float, nic_gb_per_s: float | None = None) -> float:
    """Return the seconds for these cases: starting workers, filling buffers, windows, verifying."""
    total = 0.0
    for members in _groups(cases).values():
        first = members[0]
        sides = first.initiators + first.targets
        total += _SETUP_S.get(first.backend, _SETUP_OTHER_S) * max(1.0, sides / 2)
        total += max(memory_needed(case) for case in members) / _FILL_BYTES_PER_S
        for case in members:
            line = case.nics * (nic_gb_per_s or 0.0) * 1e9
            calls_s = LEAST_CALLS * case.nbytes / line if line else 0.0
            total += max(seconds, min(MOST_SECONDS, calls_s)) * (1 + _WARMUP_SHARE)
            total += _CASE_S + memory_needed(case) / _FILL_BYTES_PER_S
    return total
