"""How much hardware a deployment has: engines, and GPUs where that is known. Pure.

Two deployments of unequal size are not compared by their rates: twice the engines hold about twice the
load, whatever moves the KV cache between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from kvbench.core.physics.hardware import hardware_of
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.options import EngineOptions

Unit = Literal["engine", "GPU"]
_RANK_ARGUMENTS: Final = ("pipeline-parallel-size", "data-parallel-size", "pp-size", "dp-size")
"""What multiplies the GPUs of one engine beside its tensor parallelism, as vLLM and SGLang call it."""


@dataclass(frozen=True)
class Size:
    """Engines (instances) that a deployment has, and GPUs of all of them together; None is not known."""

    engines: int | None = None
    gpus: int | None = None

    def count(self, unit: Unit) -> int | None:
        """How many of that unit it has."""
        return self.engines if unit == "engine" else self.gpus

    def text(self) -> str:
        """``2 engines``, ``2 engines on 16 GPUs``."""
        if self.engines is None:
            return "an unknown number of engines"
        return counted(self.engines, "engine") + (f" on {counted(self.gpus, 'GPU')}" if self.gpus else "")


def counted(count: int, unit: Unit) -> str:
    """``1 engine``, ``2 engines``."""
    return f"{count} {unit}{'' if count == 1 else 's'}"


def unit_of(sizes: Iterable[Size]) -> Unit:
    """What rates are divided by in one table: GPUs if they are known of all whose size is, else engines."""
    known = [size for size in sizes if size.engines is not None]
    return "GPU" if known and all(size.gpus for size in known) else "engine"


def unequal(one: Size, other: Size) -> Unit | None:
    """In what two sizes differ: GPUs where both are known, else engines; None if they do not differ.

    Of two unknown sizes nothing can be said, and they count as equal; an unknown one and a known one differ.
    """
    if one.gpus and other.gpus:
        return "GPU" if one.gpus != other.gpus else None
    return "engine" if one.engines != other.engines else None


def first_unequal(sizes: Iterable[Size]) -> tuple[Size, Size] | None:
    """Two of the sizes that differ; None if none do."""
    distinct = list(dict.fromkeys(sizes))
    return next((pair for pair in combinations(distinct, 2) if unequal(*pair)), None)


# --- from a run folder ------------------------------------------------------------------------------


def size_in(
    plan: Mapping[str, Any], environment: Mapping[str, Any], label: str, engine: type[EngineOptions]
) -> Size:
    """The size of one deployment of a run, from its plan.json and environment.json as data, and its engine.

    Nothing is known of servers that kvbench did not start, nor of folders that were read in.
    """
    names = instance_names(plan, label)
    if not names or not engine.starts_processes:
        return Size()
    return Size(len(names), _gpus(plan, environment, label, names) if engine.uses_gpus else None)


def engine_name(plan: Mapping[str, Any]) -> str:
    """The engine's name in plan.json; the default one where it names none."""
    deployment = _mapping(_mapping(plan.get("scenario")).get("deployment"))
    return str(deployment.get("engine", "emulated"))


def instance_names(plan: Mapping[str, Any], label: str) -> list[str]:
    """The instances of one deployment by plan.json, prefill first; none where it does not say."""
    planned = plan.get("deployments")
    for each in planned if isinstance(planned, (list, tuple)) else ():
        members = each.get("instances") if isinstance(each, Mapping) else None
        if isinstance(members, (list, tuple)) and each.get("label") == label:
            return [str(one.get("name")) for one in members if isinstance(one, Mapping)]
    return []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _gpus(
    plan: Mapping[str, Any], environment: Mapping[str, Any], label: str, names: list[str]
) -> int | None:
    deployment = _mapping(_mapping(plan.get("scenario")).get("deployment"))
    options = _mapping(deployment.get("engine_options"))
    env = _mapping(options.get("env"))
    on_cpu = any(str(name).startswith("VLLM_CPU_") for name in env)
    if on_cpu or not _has_gpus(environment):
        return None
    named = _named_devices(_mapping(_mapping(plan.get("processes")).get(label)), names)
    if named is not None:
        return named
    try:
        return len(names) * hardware_of(str(deployment.get("hardware") or "")).count
    except ValueError:
        each = [_ranks(deployment, options, name.partition("-")[0]) for name in names]
        return sum(each) if all(each) else None


def _has_gpus(environment: Mapping[str, Any]) -> bool:
    hosts = [environment, *map(_mapping, _mapping(environment.get("hosts")).values())]
    return any(host.get("gpus") for host in hosts)


def _named_devices(processes: Mapping[str, Any], names: list[str]) -> int | None:
    """Distinct devices that the processes of all instances were given; None if some were given none."""
    found: set[tuple[str, str]] = set()
    for name in names:
        mine = [_mapping(spec) for each, spec in processes.items() if each.partition(NODE)[0] == name]
        given = [str(_mapping(spec.get("env")).get("CUDA_VISIBLE_DEVICES") or "") for spec in mine]
        if not mine or not all(given):
            return None
        for spec, devices in zip(mine, given, strict=True):
            # One without an URL of its own is on a further host of its instance.
            place = urlsplit(str(spec.get("ready_url") or "")).hostname or str(spec.get("name"))
            found |= {(place, device.strip()) for device in devices.split(",")}
    return len(found)


def _ranks(deployment: Mapping[str, Any], options: Mapping[str, Any], role: str) -> int:
    """GPUs of one engine; 0 where what is written gives no number."""
    given = {
        str(key).replace("_", "-"): value
        for source in ("engine_args", f"{role}_args")
        for key, value in _mapping(options.get(source)).items()
    }
    ranks = 1
    for factor in (
        deployment.get("tensor_parallel_size", 1),
        *(given.get(key, 1) for key in _RANK_ARGUMENTS),
    ):
        ranks *= factor if isinstance(factor, int) and factor > 0 else 0
    return ranks
