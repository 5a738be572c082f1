"""The GPUs of each process of a deployment: dealt out in turn on each host, none twice.

Pure: what there is comes in. ``deal`` is all there is to it, for this machine as for hosts far away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.errors import InputError


@dataclass(frozen=True)
class GpuNeed:
    """What one instance takes: so many GPUs, unless the scenario names them itself."""

    count: int
    named: tuple[str, ...] | None = None
    """Those that the scenario gives it; they may be another's, too. None: it is to be dealt some."""


@dataclass(frozen=True)
class GpuPool:
    """The GPUs of a host, by number or UUID. ``source``: who says that there are these and no more."""

    devices: tuple[str, ...]
    source: str = "this host has"


@dataclass(frozen=True)
class GpuWant:
    """A process that wants GPUs: an instance, or its part on one of the hosts that it spans."""

    process: str
    role: str
    host: str
    need: GpuNeed


def pool_of(visible: str | None, listed: int, host: str = "") -> GpuPool | None:
    """The GPUs that processes of a host may use; None if that is not known.

    What CUDA_VISIBLE_DEVICES names counts (a scheduler's choice, or the user's), also if it names none;
    else the number of those that nvidia-smi lists. ``host``: its name, empty for this machine.
    """
    whose = f"host {host}" if host else "this host"
    if visible is not None:
        names = [word.strip() for word in visible.split(",")]
        # As in CUDA: what stands behind the first that does not exist is not seen.
        end = names.index("-1") if "-1" in names else len(names)
        told = f"CUDA_VISIBLE_DEVICES{f' of {whose}' if host else ''} names"
        return GpuPool(tuple(name for name in names[:end] if name), told)
    return GpuPool(tuple(map(str, range(listed))), f"{whose} has") if listed else None


def deal(
    label: str, wants: Sequence[GpuWant], pools: Mapping[str, GpuPool | None]
) -> dict[str, tuple[str, ...]]:
    """The GPUs of each process that is to be dealt some, in the order of ``wants``, on each host by itself.

    What the scenario names for one process is dealt to no other. A pool that is None, or none, is not known:
    there they are numbered from 0 on, but who is alone needs to be given none. Of an empty pool, which is
    hidden on purpose, nothing is dealt. Raises InputError with the count where they are too few.
    """
    given: dict[str, tuple[str, ...]] = {}
    for host in dict.fromkeys(want.host for want in wants):
        mine, pool = [want for want in wants if want.host == host], pools.get(host)
        if len(mine) > 1 if pool is None else pool.devices:
            given |= _on_one_host(label, mine, pool)
    return given


def _on_one_host(label: str, wants: Sequence[GpuWant], pool: GpuPool | None) -> dict[str, tuple[str, ...]]:
    waiting = [want for want in wants if want.need.named is None]
    wanted = sum(want.need.count for want in waiting)
    taken = {name for want in wants for name in want.need.named or ()}
    there = tuple(map(str, range(wanted + len(taken)))) if pool is None else pool.devices
    free = [device for device in there if device not in taken]
    if pool is not None and wanted > len(free):
        left = "" if len(free) == len(there) else f", {len(free)} of them beside those that are named"
        raise InputError(
            f"{label} needs {wanted} GPU{'s' * (wanted > 1)} ({_counted(waiting)}), and {pool.source} "
            f"{len(there)}{left}",
            hint="lower tensor_parallel_size, prefill or decode; to let instances share GPUs, name them in "
            "engine_options (prefill_devices, decode_devices)",
        )
    given = {}
    for want in waiting:
        given[want.process], free = tuple(free[: want.need.count]), free[want.need.count :]
    return given


def _counted(wants: Iterable[GpuWant]) -> str:
    """``prefill 4 × 2, decode 2 × 4``: how many processes, each with how many GPUs."""
    counts: dict[tuple[str, int], int] = {}
    for want in wants:
        kind = (want.role, want.need.count)
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{role} {number} × {count}" for (role, count), number in counts.items())
