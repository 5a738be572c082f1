"""``kvbench init`` for engines elsewhere: ssh hosts, Slurm or Ray nodes, a running server. Also detects this
machine's engines, devices and connectors."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from kvbench import connectors, engines
from kvbench.core.access import ServerAccess
from kvbench.core.scenario.yaml_lines import one_line
from kvbench.engines.base import FirstScenario, Installed
from kvbench.engines.external import url_problem
from kvbench.errors import InputError
from kvbench.hosts.devices import gpus, rdma
from kvbench.hosts.version_rules import Check
from kvbench.planning.overrides import SMALL_VOCABULARY, served_model
from kvbench.planning.scenario_files import plain_name

PREFERRED: Final = ("aggregated", "mooncake", "nixl", "nixl_push", "tcp")
"""Connectors offered by init, which compare P/D directly; stores, caches and meters are left to experts."""


@dataclass(frozen=True)
class FoundMachine:
    gpus: Sequence[Mapping[str, Any]] = ()
    nics: Sequence[str] = ()
    """RDMA devices with an active port."""
    efa: bool = False
    """Whether these are EFA, where UCX emulates NIXL's operations in software."""
    engines: Mapping[str, Installed] = field(default_factory=dict)
    """Engines offered by `kvbench init`, real ones first."""

    def installed(self, engine: str) -> Installed:
        return self.engines.get(engine, Installed())


def look_around() -> FoundMachine:
    """Detect this machine; unreadable parts are omitted."""
    active = [device for device in rdma() if any(port["state"] == "ACTIVE" for port in device["ports"])]
    usable = active if Path("/dev/infiniband").is_dir() else []
    efa = any(device["driver"] == "efa" for device in usable)
    return FoundMachine(gpus() or (), [str(nic["name"]) for nic in usable], efa, _installed())


def _installed() -> dict[str, Installed]:
    offered = {name: first for name in engines.names() if (first := engines.get(name).first_scenario)}
    found = {name: installed for name, first in offered.items() if (installed := first.found()) is not None}
    return dict(sorted(found.items(), key=lambda item: engines.options_model(item[0]).models_compute))


def first_scenario(engine: str) -> FirstScenario:
    """Defaults of an engine for `kvbench init`. Raises InputError for an unsupported one."""
    if (first := engines.get(engine).first_scenario) is None:
        raise InputError(f"`kvbench init` does not offer the {engine} engine")
    return first


def preferred(engine: str) -> list[Check]:
    """Preferred connectors that an engine can run on some machine."""
    known = [connectors.get(name) for name in PREFERRED if name in connectors.names()]
    return [Check(connector.name, "ok", "") for connector in filter(first_scenario(engine).has, known)]


def able_connectors(engine: str, machine: FoundMachine) -> list[Check]:
    first, installed = first_scenario(engine), machine.installed(engine)
    known = [connectors.get(name) for name in PREFERRED if name in connectors.names()]
    options = first.options(installed)
    found = []
    for connector in filter(first.has, known):
        problem = engines.get(engine).check(connector, options) or first.lacks(connector, installed)
        found.append(Check.unless(problem, connector.name, ""))
    return found


READY_S = 1800
"""Start limit in seconds, for weights on a shared file system and CUDA graph capture."""


@dataclass(frozen=True)
class Elsewhere:
    """Location of the engines, from the command line; empty: this machine."""

    hosts: tuple[str, ...] = ()
    scheduler: str = ""
    base_url: str = ""
    model: str = ""
    """Model at ``base_url``, which may serve several."""

    @classmethod
    def create(cls, hosts: str | None, slurm: bool, ray: bool, base_url: str | None, model: str) -> Elsewhere:
        """Create from options. Raises InputError for several places, or invalid hosts."""
        given = [
            name
            for name, value in (
                ("--hosts", hosts),
                ("--slurm", slurm),
                ("--ray", ray),
                ("--base-url", base_url),
            )
            if value
        ]
        if len(given) > 1:
            raise InputError(
                f"{' and '.join(given)} exclude each other", hint="give one: a scenario has one launcher"
            )
        if base_url and (problem := url_problem(base_url)):
            raise InputError(f"--base-url {problem}")
        names = tuple(dict.fromkeys(host.strip() for host in (hosts or "").split(",") if host.strip()))
        if hosts is not None and not names:
            raise InputError("--hosts takes comma-separated names: --hosts node1,node2")
        root = (base_url or "").rstrip("/").removesuffix("/v1")
        return cls(names, "slurm" if slurm else "ray" if ray else "", root, model)

    @property
    def launcher(self) -> str:
        """Launcher of the scenario; empty for this machine or a running server."""
        return self.scheduler or ("ssh" if self.hosts else "")

    def __bool__(self) -> bool:
        return bool(self.launcher or self.base_url)

    def words(self) -> str:
        if self.hosts:
            return f"{', '.join(self.hosts)}, by ssh"
        return self.base_url or f"nodes that {self.scheduler.capitalize()} gives"

    def lines(self, ranks: int, equipment: str) -> Iterator[str]:
        """Yield the deployment section's lines on the place. ``equipment``: Slurm's partition, if given."""
        yield f"  launcher: {self.launcher}"
        if self.hosts:
            yield from self._ssh()
        elif self.scheduler == "slurm":
            yield from self._slurm(ranks, equipment)
        else:
            yield from self._ray(ranks)

    def _ssh(self) -> Iterator[str]:
        yield "  hosts:                   # address: on the data network, where servers listen and KV goes"
        names = [plain_name(host) for host in self.hosts]
        for name, host in zip(names, self.hosts, strict=True):
            yield f"    {name}: {{address: {one_line(address_of(host))}, ssh: {{host: {one_line(host)}}}}}"
        decode = names[1:] or names
        yield f"  roles: {{prefill: {names[0]}, decode: [{', '.join(decode)}]}}"

    def _slurm(self, ranks: int, partition: str) -> Iterator[str]:
        yield "  slurm:                   # each key is the option of salloc with that name"
        yield f"    partition: {one_line(partition)}" if partition else "    # partition: gpu"
        yield '    time: "02:00:00"'
        for role in ("prefill", "decode"):
            yield f'    {role}: {{gres: "gpu:{ranks}"}}'

    def _ray(self, ranks: int) -> Iterator[str]:
        yield "  ray:"
        yield "    address: auto          # this machine's cluster, or RAY_ADDRESS"
        for role in ("prefill", "decode"):
            yield f"    {role}: {{num_gpus: {ranks}}}"

    def server_lines(self) -> tuple[Sequence[str], int | None]:
        """Model, deployment and max_model_len of a running server. Raises InputError, ServerError."""
        served, longest = served_model(self.base_url, ServerAccess(), self.model)
        lines = [
            "model:",
            f"  name: {plain_name(served)}",
            f"  served_model_name: {one_line(served)}",
            f"  vocab_size: {SMALL_VOCABULARY}         # prompts use ids below it, valid for any model",
            "",
            "deployment:",
            "  engine: external         # nothing is started",
            "  engine_options:",
            f"    base_url: {one_line(self.base_url)}",
            "    # api_key_env: NAME    # the environment variable with its key",
            f"    decode_metrics_url: {one_line(self.base_url + '/metrics')}",
            *([f"    max_model_len: {longest}"] if longest else []),
            "    # gpus: 8              # total behind it; enables rates per GPU",
        ]
        return lines, longest


def machine_elsewhere() -> FoundMachine:
    """Machine without known devices; `kvbench doctor` checks the hosts later."""
    from kvbench import engines
    from kvbench.engines.base import Installed

    offered = [name for name in engines.names() if engines.get(name).first_scenario]
    real = sorted(offered, key=lambda name: engines.options_model(name).models_compute)
    return FoundMachine(engines={name: Installed() for name in real})


def address_of(host: str) -> str:
    """Address of a host as resolved here, or its name if other hosts could not use that address."""
    name = host.rpartition("@")[2]
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return name
    return name if ip_address(address).is_loopback else address
