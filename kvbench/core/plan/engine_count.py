"""Hardware of a deployment: engines, and GPUs where known. Pure.

Deployments of unequal size are not compared by their rates. GPUs are counted by the devices given to the
processes, else by the ranks of each instance; for modelled compute by the plan (one per rank); for servers
that kvbench did not start by ``engine_options.gpus``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from kvbench.core.physics import hardware_of
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.options import EngineOptions

Unit = Literal["engine", "GPU"]
_RANK_ARGUMENTS: Final = ("pipeline-parallel-size", "data-parallel-size", "pp-size", "dp-size")
"""Arguments of vLLM and SGLang that multiply an engine's GPUs, in addition to tensor parallelism."""


@dataclass(frozen=True)
class Size:
    """Engines (instances) and GPUs of a deployment; None means unknown."""

    engines: int | None = None
    gpus: int | None = None

    def count(self, unit: Unit) -> int | None:
        return self.engines if unit == "engine" else self.gpus

    def text(self) -> str:
        """``2 engines``, ``2 engines on 16 GPUs``."""
        if self.engines is None:
            return counted(self.gpus, "GPU") if self.gpus else "an unknown number of engines"
        return counted(self.engines, "engine") + (f" on {counted(self.gpus, 'GPU')}" if self.gpus else "")


def counted(count: int, unit: Unit) -> str:
    """``1 engine``, ``2 engines``."""
    return f"{count} {unit}{'' if count == 1 else 's'}"


def unit_of(sizes: Iterable[Size]) -> Unit:
    """Return the unit of a table's rates: GPUs if known for every sized run, else engines."""
    known = [size for size in sizes if size != Size()]
    return "GPU" if known and all(size.gpus for size in known) else "engine"


def unequal(one: Size, other: Size) -> Unit | None:
    """Return the unit in which two sizes differ: GPUs if both are known, else engines."""
    if one.gpus and other.gpus:
        return "GPU" if one.gpus != other.gpus else None
    return "engine" if one.engines != other.engines else None


def first_unequal(sizes: Iterable[Size]) -> tuple[Size, Size] | None:
    distinct = list(dict.fromkeys(sizes))
    return next((pair for pair in combinations(distinct, 2) if unequal(*pair)), None)


# --- from a run folder ------------------------------------------------------------------------------


def size_in(
    plan: Mapping[str, Any], environment: Mapping[str, Any], label: str, engine: type[EngineOptions]
) -> Size:
    """Return the size of a run's deployment, from its plan.json and environment.json and its engine. Imported
    runs have none; external servers have only what the scenario states."""
    names = instance_names(plan, label)
    if not engine.starts_processes:
        return Size(None, _external_gpus(plan))
    if not names:
        return Size()
    if engine.models_compute:
        return Size(len(names), _planned_gpus(plan, label, names))
    return Size(len(names), _gpus(plan, environment, label, names) if engine.uses_gpus else None)


def price_per_gpu_hour(plan: Mapping[str, Any]) -> float | None:
    price = _mapping(_mapping(plan.get("scenario")).get("deployment")).get("price_per_gpu_hour")
    return float(price) if isinstance(price, (int, float)) and price > 0 else None


def engine_name(plan: Mapping[str, Any]) -> str:
    """Return the engine's name in plan.json, or the default engine."""
    deployment = _mapping(_mapping(plan.get("scenario")).get("deployment"))
    return str(deployment.get("engine", "emulated"))


def instance_names(plan: Mapping[str, Any], label: str) -> list[str]:
    """Return the instances of a deployment in plan.json, prefill first."""
    planned = plan.get("deployments")
    for deployment in planned if isinstance(planned, (list, tuple)) else ():
        members = deployment.get("instances") if isinstance(deployment, Mapping) else None
        if isinstance(members, (list, tuple)) and deployment.get("label") == label:
            return [str(one.get("name")) for one in members if isinstance(one, Mapping)]
    return []


def ranks_in(plan: Mapping[str, Any], label: str) -> dict[str, int]:
    """Return the GPUs of each instance in plan.json, one per rank; 0 where the ranks are no numbers."""
    deployment = _mapping(_mapping(plan.get("scenario")).get("deployment"))
    options, per_instance = _mapping(deployment.get("engine_options")), _listed_ranks(plan, label)
    return {
        name: per_instance.get(name) or _ranks(deployment, options, name.partition("-")[0])
        for name in instance_names(plan, label)
    }


def tensor_ranks_in(plan: Mapping[str, Any], label: str) -> dict[str, int]:
    """Return the tensor parallel ranks of each instance in plan.json."""
    common = _mapping(_mapping(plan.get("scenario")).get("deployment")).get("tensor_parallel_size", 1)
    per_instance = _ranks_by_instance(plan, label)
    found = {name: per_instance.get(name, {}).get("tensor", common) for name in instance_names(plan, label)}
    return {name: count for name, count in found.items() if isinstance(count, int)}


def _listed_ranks(plan: Mapping[str, Any], label: str) -> dict[str, int]:
    """Return the tensor parallel ranks by instance, which the plan lists if they differ."""
    return {name: math.prod(ranks.values()) for name, ranks in _ranks_by_instance(plan, label).items()}


def _ranks_by_instance(plan: Mapping[str, Any], label: str) -> dict[str, dict[str, int]]:
    """Return tensor, pipeline and data parallel ranks by instance, where the plan lists them."""
    found = {}
    for deployment in plan.get("deployments") or ():
        for one in deployment.get("instances") or () if _mapping(deployment).get("label") == label else ():
            ranks = _mapping(_mapping(one).get("ranks"))
            counts = {key: ranks.get(key) for key in ("tensor", "pipeline", "data")}
            whole = {key: count for key, count in counts.items() if isinstance(count, int)}
            if len(whole) == len(counts):
                found[str(one.get("name"))] = whole
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _gpus(
    plan: Mapping[str, Any], environment: Mapping[str, Any], label: str, names: list[str]
) -> int | None:
    env = _mapping(_options(plan).get("env"))
    on_cpu = any(str(name).startswith("VLLM_CPU_") for name in env)
    if on_cpu or not _has_gpus(environment):
        return None
    named = _named_devices(_mapping(_mapping(plan.get("processes")).get(label)), names)
    return named if named is not None else _planned_gpus(plan, label, names)


def _options(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    deployment = _mapping(_mapping(plan.get("scenario")).get("deployment"))
    return _mapping(deployment.get("engine_options"))


def _external_gpus(plan: Mapping[str, Any]) -> int | None:
    """Return the GPUs behind a server's address (``engine_options.gpus``)."""
    given = _options(plan).get("gpus")
    return given if isinstance(given, int) and given > 0 else None


def _planned_gpus(plan: Mapping[str, Any], label: str, names: list[str]) -> int | None:
    """Return the GPUs of all instances: by their hardware, else by their ranks."""
    deployment = _mapping(_mapping(plan.get("scenario")).get("deployment"))
    try:
        return len(names) * hardware_of(str(deployment.get("hardware") or "")).count
    except ValueError:
        counts = ranks_in(plan, label).values()
        return sum(counts) if all(counts) else None


def _has_gpus(environment: Mapping[str, Any]) -> bool:
    hosts = [environment, *map(_mapping, _mapping(environment.get("hosts")).values())]
    return any(host.get("gpus") for host in hosts)


def _named_devices(processes: Mapping[str, Any], names: list[str]) -> int | None:
    """Return the number of distinct devices of all instances; None if one has no devices."""
    found: set[tuple[str, str]] = set()
    for name in names:
        specs = [_mapping(spec) for process, spec in processes.items() if process.partition(NODE)[0] == name]
        given = [str(_mapping(spec.get("env")).get("CUDA_VISIBLE_DEVICES") or "") for spec in specs]
        if not specs or not all(given):
            return None
        for spec, devices in zip(specs, given, strict=True):
            # A process without a URL is on a further host of its instance.
            host = urlsplit(str(spec.get("ready_url") or "")).hostname or str(spec.get("name"))
            found |= {(host, device.strip()) for device in devices.split(",")}
    return len(found)


def _ranks(deployment: Mapping[str, Any], options: Mapping[str, Any], role: str) -> int:
    """Return the GPUs of one engine; 0 where the plan's values are no numbers."""
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
