"""``kvbench init`` for engines elsewhere: hosts by ssh, nodes of Slurm or Ray, a server that is up."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from kvbench.core.access import ServerAccess
from kvbench.core.scenario.yaml_lines import one_line
from kvbench.engines.external import url_problem
from kvbench.errors import InputError
from kvbench.planning.overrides import SMALL_VOCABULARY
from kvbench.planning.scenario_files import plain_name
from kvbench.planning.served_model import served_model
from kvbench.planning.wizard.init_machine import FoundMachine

READY_S = 1800
"""Weights are loaded from a shared file system, and CUDA graphs are captured."""


@dataclass(frozen=True)
class Elsewhere:
    """Where the engines are to run, as asked for on the command line; nothing of it set: on this machine."""

    hosts: tuple[str, ...] = ()
    scheduler: str = ""
    """``slurm`` or ``ray``."""
    base_url: str = ""
    model: str = ""
    """At ``base_url``, which may serve several."""

    @classmethod
    def asked(cls, hosts: str | None, slurm: bool, ray: bool, base_url: str | None, model: str) -> Elsewhere:
        """Raises InputError for more than one place, or hosts that cannot be read."""
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
                f"{' and '.join(given)} are several places", hint="give one: a scenario has one launcher"
            )
        if base_url and (problem := url_problem(base_url)):
            raise InputError(f"--base-url {problem}")
        names = tuple(dict.fromkeys(each.strip() for each in (hosts or "").split(",") if each.strip()))
        if hosts is not None and not names:
            raise InputError("--hosts takes names with commas between: --hosts node1,node2")
        root = (base_url or "").rstrip("/").removesuffix("/v1")
        return cls(names, "slurm" if slurm else "ray" if ray else "", root, model)

    @property
    def launcher(self) -> str:
        """The scenario's; empty where kvbench starts nothing, or starts it here."""
        return self.scheduler or ("ssh" if self.hosts else "")

    def __bool__(self) -> bool:
        return bool(self.launcher or self.base_url)

    def words(self) -> str:
        """Where that is, in words."""
        if self.hosts:
            return f"{', '.join(self.hosts)}, by ssh"
        return self.base_url or f"nodes that {self.scheduler.capitalize()} gives"

    def lines(self, ranks: int, equipment: str) -> Iterator[str]:
        """The deployment section's lines that say where. ``equipment``: Slurm's partition, if it was said."""
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
        yield "    address: auto          # the cluster that runs here, or RAY_ADDRESS"
        for role in ("prefill", "decode"):
            yield f"    {role}: {{num_gpus: {ranks}}}"

    def server_lines(self) -> Sequence[str]:
        """Model and deployment of a server that is up. Raises InputError or ServerError if it is not."""
        served = served_model(self.base_url, ServerAccess(), self.model)
        return [
            "model:",
            f"  name: {plain_name(served)}",
            f"  served_model_name: {one_line(served)}",
            f"  vocab_size: {SMALL_VOCABULARY}         # prompts are of ids below it, which any model has",
            "",
            "deployment:",
            "  engine: external         # nothing is started",
            "  engine_options:",
            f"    base_url: {one_line(self.base_url)}",
            "    # api_key_env: NAME    # the environment variable with its key",
            f"    decode_metrics_url: {one_line(self.base_url + '/metrics')}",
            "    # gpus: 8              # behind it, all together: rates are then told per GPU",
        ]


def machine_elsewhere() -> FoundMachine:
    """Nothing is known of hosts before they are asked: `kvbench doctor` asks them."""
    from kvbench import engines
    from kvbench.engines.base import Installed

    offered = [name for name in engines.names() if engines.get(name).first_scenario]
    real = sorted(offered, key=lambda name: engines.options_model(name).models_compute)
    return FoundMachine(engines={name: Installed() for name in real})


def address_of(host: str) -> str:
    """A host's address as this machine knows it; its name where that would be no address for others."""
    name = host.rpartition("@")[2]
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return name
    return name if ip_address(address).is_loopback else address
