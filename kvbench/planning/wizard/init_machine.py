"""What the machine at hand can measure with: engine, devices, and the connectors that run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbench import connectors, engines
from kvbench.engines.base import FirstScenario, Installed
from kvbench.errors import InputError
from kvbench.hosts.devices import gpus, rdma

PREFERRED: Final = ("aggregated", "mooncake", "nixl", "nixl_push", "tcp")
"""Connectors that compare P/D as it is meant; others (stores, caches, meters) are for who asks for them."""


@dataclass(frozen=True)
class FoundMachine:
    """Devices, and the engines that are there."""

    gpus: Sequence[Mapping[str, Any]] = ()
    nics: Sequence[str] = ()
    """RDMA devices with an active port."""
    engines: Mapping[str, Installed] = field(default_factory=dict)
    """Those that `kvbench init` offers, by name; real ones first."""

    def installed(self, engine: str) -> Installed:
        """What is known of an engine on this machine."""
        return self.engines.get(engine, Installed())


@dataclass(frozen=True)
class Able:
    """A connector, and why it cannot run here; an empty reason means that it can."""

    name: str
    reason: str = ""
    fix: str = ""


def look_around(root: Path = Path("/")) -> FoundMachine:
    """This machine; what cannot be read is left out."""
    active = [
        str(device["name"])
        for device in rdma(root)
        if any(port["state"] == "ACTIVE" for port in device["ports"])
    ]
    usable = active if (root / "dev/infiniband").is_dir() else []
    return FoundMachine(gpus() or (), usable, _installed())


def _installed() -> dict[str, Installed]:
    offered = {name: first for name in engines.names() if (first := engines.get(name).first_scenario)}
    found = {name: there for name, first in offered.items() if (there := first.found()) is not None}
    return dict(sorted(found.items(), key=lambda each: engines.options_model(each[0]).models_compute))


def first_scenario(engine: str) -> FirstScenario:
    """What an engine says to `kvbench init`. Raises InputError for one that is not offered."""
    if (first := engines.get(engine).first_scenario) is None:
        raise InputError(f"`kvbench init` does not offer the {engine} engine")
    return first


def preferred(engine: str) -> list[Able]:
    """The preferred connectors that an engine could run on some machine."""
    known = [connectors.get(name) for name in PREFERRED if name in connectors.names()]
    return [Able(connector.name) for connector in filter(first_scenario(engine).has, known)]


def able_connectors(engine: str, machine: FoundMachine) -> list[Able]:
    """The preferred connectors that this kvbench has, each with what keeps it from running."""
    first, there = first_scenario(engine), machine.installed(engine)
    known = [connectors.get(name) for name in PREFERRED if name in connectors.names()]
    options = first.options(there)
    found = []
    for connector in filter(first.has, known):
        problem = engines.get(engine).check(connector, options) or first.lacks(connector, there)
        found.append(Able(connector.name, *((problem.reason, problem.fix) if problem else ())))
    return found
