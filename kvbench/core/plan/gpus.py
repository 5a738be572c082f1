"""The GPUs of each instance of a deployment: dealt out in turn, none twice. Pure: what there is comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.core.plan.plan import DeploymentPlan, InstancePlan
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


def dealt(
    planned: DeploymentPlan, needs: Mapping[str, GpuNeed], pool: GpuPool | None, ranks: int
) -> DeploymentPlan:
    """The deployment with GPUs for those of its instances that ``needs`` names, in the order of the plan.

    ``pool`` None: as many as it takes, from number 0 on. ``ranks``: the tensor parallel size, for messages.
    What the scenario names for one instance is dealt to no other. Raises InputError if they are too few.
    """
    waiting = [each for each in planned.instances if each.name in needs and needs[each.name].named is None]
    wanted = sum(needs[each.name].count for each in waiting)
    taken = {name for need in needs.values() for name in need.named or ()}
    there = tuple(str(number) for number in range(wanted + len(taken))) if pool is None else pool.devices
    free = [device for device in there if device not in taken]
    if wanted > len(free):
        assert pool is not None
        raise _too_few(planned.label, waiting, needs, len(free), pool, ranks)
    given: dict[str, tuple[str, ...]] = {}
    for each in waiting:
        count = needs[each.name].count
        given[each.name], free = tuple(free[:count]), free[count:]
    instances = (replace(each, devices=given.get(each.name, each.devices)) for each in planned.instances)
    return replace(planned, instances=tuple(instances))


def _too_few(
    label: str,
    waiting: Sequence[InstancePlan],
    needs: Mapping[str, GpuNeed],
    free: int,
    pool: GpuPool,
    ranks: int,
) -> InputError:
    counts: dict[str, int] = {}
    for each in waiting:
        counts[each.role] = counts.get(each.role, 0) + 1
    wanted = sum(needs[each.name].count for each in waiting)
    each_takes = {needs[each.name].count for each in waiting}
    more = f", {each_takes.pop()} GPUs each" if each_takes != {ranks} and len(each_takes) == 1 else ""
    rest = "" if free == len(pool.devices) else f", and {free} of them left beside those that are named"
    roles = " + ".join(f"{count} {role}" for role, count in counts.items())
    return InputError(
        f"{label} needs {wanted} GPU{'s' * (wanted > 1)}: {roles} × TP {ranks}{more}; {pool.source} "
        f"{len(pool.devices)}{rest}",
        hint="lower tensor_parallel_size, prefill or decode; to let instances share GPUs, name them in "
        "engine_options (prefill_devices, decode_devices)",
    )
