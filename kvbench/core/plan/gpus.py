"""Assignment of a host's GPUs to the processes of a deployment, each GPU once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.errors import InputError


@dataclass(frozen=True)
class GpuNeed:
    """GPUs that one instance takes: a count, unless the scenario names them."""

    count: int
    named: tuple[str, ...] | None = None
    """GPUs that the scenario names; instances may share them."""


@dataclass(frozen=True)
class GpuPool:
    """GPUs of a host, by number or UUID. ``source``: where the list comes from, for messages."""

    devices: tuple[str, ...]
    source: str = "this host has"


@dataclass(frozen=True)
class GpuWant:
    """A process that needs GPUs: an instance, or its part on one host."""

    process: str
    role: str
    host: str
    need: GpuNeed


def pool_of(visible: str | None, listed: int, host: str = "") -> GpuPool | None:
    """Return the GPUs that a host's processes may use; None if unknown. CUDA_VISIBLE_DEVICES decides if set,
    even if empty; else the number that nvidia-smi lists. ``host`` is empty for this machine."""
    owner = f"host {host}" if host else "this host"
    if visible is not None:
        names = [word.strip() for word in visible.split(",")]
        # As in CUDA, devices after the first nonexistent one are ignored.
        end = names.index("-1") if "-1" in names else len(names)
        source = f"CUDA_VISIBLE_DEVICES{f' of {owner}' if host else ''} names"
        return GpuPool(tuple(name for name in names[:end] if name), source)
    return GpuPool(tuple(map(str, range(listed))), f"{owner} has") if listed else None


def deal(
    label: str, wants: Sequence[GpuWant], pools: Mapping[str, GpuPool | None]
) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of each process that the scenario names none for, in the order of ``wants``.

    GPUs that the scenario names are given to no other process. If a host's pool is unknown, its GPUs are
    numbered from 0, and a single process gets none. An empty pool (hidden on purpose) gives none. Raises
    InputError if there are too few."""
    given: dict[str, tuple[str, ...]] = {}
    for host in dict.fromkeys(want.host for want in wants):
        host_wants, pool = [want for want in wants if want.host == host], pools.get(host)
        if len(host_wants) > 1 if pool is None else pool.devices:
            given |= _on_one_host(label, host_wants, pool)
    return given


def _on_one_host(label: str, wants: Sequence[GpuWant], pool: GpuPool | None) -> dict[str, tuple[str, ...]]:
    waiting = [want for want in wants if want.need.named is None]
    wanted = sum(want.need.count for want in waiting)
    taken = {name for want in wants for name in want.need.named or ()}
    there = tuple(map(str, range(wanted + len(taken)))) if pool is None else pool.devices
    free = [device for device in there if device not in taken]
    if pool is not None and wanted > len(free):
        left = "" if len(free) == len(there) else f", {len(free)} of them not named by the scenario"
        raise InputError(
            f"{label} needs {wanted} GPU{'s' * (wanted > 1)} ({_wants_text(waiting)}), and {pool.source} "
            f"{len(there)}{left}",
            hint="lower tensor_parallel_size, prefill or decode; to let instances share GPUs, name them in "
            "engine_options (prefill_devices, decode_devices)",
        )
    given = {}
    for want in waiting:
        given[want.process], free = tuple(free[: want.need.count]), free[want.need.count :]
    return given


def _wants_text(wants: Iterable[GpuWant]) -> str:
    """Return ``prefill 4 × 2, decode 2 × 4``: processes × GPUs of each."""
    counts: dict[tuple[str, int], int] = {}
    for want in wants:
        kind = (want.role, want.need.count)
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{role} {number} × {count}" for (role, count), number in counts.items())
