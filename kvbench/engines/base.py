"""Interface of an engine, which serves tokens: processes and command lines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from kvbench.connectors.base import Connector, ConnectorOptions, Neighbours, Role, Seat
from kvbench.core.engine_versions import version_in
from kvbench.core.physics import ModelShape
from kvbench.core.plan.gpus import GpuNeed
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.options import EngineOptions as EngineOptions
from kvbench.errors import InputError, KvbenchError, LaunchError, MissingLibraryError, Problem

Environment = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


@dataclass(frozen=True)
class Instance:
    """An engine instance with all that its process depends on."""

    name: str
    role: Role
    rank: int
    host: str
    port: int
    side_port: int | None
    engine_id: str
    model: ModelShape
    served_model_name: str
    ranks: Ranks
    max_tokens_per_request: int
    """Longest input plus output of the workload."""
    neighbours: Neighbours = field(default_factory=Neighbours)
    nodes: tuple[str, ...] = ()
    """Addresses of the hosts it spans, the first one serving; up to one for a single host."""
    group_port: int | None = None
    """Rendezvous port on the first host; the next ports join data-parallel ranks."""
    devices: tuple[str, ...] = ()
    """Assigned GPUs; empty if none are assigned."""
    wire_ranks: int = 1
    """Tensor-parallel ranks that receive KV: those of D."""

    def on_node(self, number: int) -> Instance:
        """The instance from one of its hosts' view, with that host's address."""
        return replace(self, host=self.nodes[number], engine_id=self._engine_id_on(number))

    def _engine_id_on(self, number: int) -> str:
        """Engine id on a host with its own data-parallel ranks (vLLM 0.13 numbers them by host)."""
        first = number - number % max(1, len(self.nodes) // self.ranks.data)
        return f"{self.engine_id}{NODE}{first}" if first else self.engine_id

    @property
    def rank_engine_ids(self) -> tuple[str, ...]:
        """Engine id of each data-parallel rank, as in vLLM."""
        ranks = self.ranks.data
        if ranks == 1:
            return (self.engine_id,)
        return tuple(f"{self._engine_id_on(self._host_of(rank))}_dp{rank}" for rank in range(ranks))

    @property
    def rank_side_addresses(self) -> tuple[str, ...]:
        """``host:port`` of each data-parallel rank's side channel, if any."""
        hosts = self.nodes or (self.host,)
        return tuple(f"{hosts[self._host_of(r)]}:{(self.side_port or 0) + r}" for r in range(self.ranks.data))

    def _host_of(self, rank: int) -> int:
        """Index of the first host of a data-parallel rank."""
        return rank * max(1, len(self.nodes)) // self.ranks.data

    @property
    def side_address(self) -> str:
        """``host:port`` of its side channel, or ""."""
        return f"{self.host}:{self.side_port}" if self.side_port else ""

    @property
    def device_env(self) -> dict[str, str]:
        """Variable that shows a process its GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}

    @property
    def seat(self) -> Seat:
        """The instance from its connector's view."""
        return Seat(self.role, self.rank, self.host, self.side_port, self.ranks.tensor, self.neighbours)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def bootstrap_url(self) -> str:
        return f"http://{self.host}:{self.side_port}" if self.side_port else ""


@dataclass(frozen=True)
class OptionsContext:
    """Scenario values that an engine's options may conflict with."""

    connectors: Mapping[str, tuple[Connector, ConnectorOptions]] = field(default_factory=dict)
    hosts: frozenset[str] = frozenset()
    max_concurrency: float | None = None
    """Requests in flight at the first rate if each just meets its SLO, or None."""


@dataclass(frozen=True)
class Installed:
    command: str = ""
    """Path of the command; empty for kvbench's own engine."""
    version: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Distribution → version in its environment."""


@dataclass(frozen=True)
class FirstScenario:
    """Defaults and scenario lines of an engine for `kvbench init`."""

    model: str
    input_len: str
    output_len: int
    ttft_ms: float
    tpot_ms: float
    trial_s: float
    ready_s: int
    title: str = ""
    """Displayed name of the software; empty if kvbench includes it."""
    loads_model: bool = False
    """Whether it loads a model from files, so init requests a folder or id."""

    def found(self) -> Installed | None:
        return Installed()

    def has(self, connector: Connector) -> bool:
        """Whether it supports that connector on some machine; others are not mentioned."""
        return bool(connector.transfer_backend) or not connector.disaggregated

    def options(self, installed: Installed) -> EngineOptions | None:
        """Options for connector checks that avoid repeated queries."""
        return None

    def lacks(self, connector: Connector, installed: Installed) -> Problem | None:
        """Missing requirements of the connector besides the engine, or None."""
        return None

    def option_lines(
        self, model: str, longest: int, installed: Installed, gpus: Sequence[str]
    ) -> Sequence[str]:
        """Lines of ``engine_options``, not indented, with comments. ``longest``: tokens of the longest
        request; ``gpus``: this machine's indices."""
        return ()


class Engine(ABC):
    """Converts an instance to a process; other differences are in its ``EngineOptions``."""

    name: ClassVar[str]
    labels: ClassVar[tuple[str, ...]] = ()
    """Labels for every table, plot and file of a result, such as "emulated"."""
    options_model: ClassVar[type[EngineOptions]] = EngineOptions
    launch_s: ClassVar[tuple[float, float]] = (0.5, 3.0)
    """Shortest and longest start of a deployment in seconds, for the plan."""

    first_scenario: ClassVar[FirstScenario | None] = None
    """Support for `kvbench init`, or None."""

    cache_reset_path: ClassVar[str] = "/reset_prefix_cache"
    """POST endpoint that empties the prefix cache."""

    def labels_of(self, options: EngineOptions) -> tuple[str, ...]:
        return self.labels

    def router_lie(self, options: EngineOptions) -> str:
        """Deliberate router fault for testing gates (core/gates/lies.py), or ""."""
        return ""

    @abstractmethod
    def check(self, connector: Connector, options: EngineOptions | None = None) -> Problem | None:
        """Why this engine cannot run with that connector here, or None."""

    def keeps_fetched_kv(self, options: EngineOptions) -> bool:
        """Whether an idle P keeps its cache, with KV that D has fetched, until its next request."""
        return False

    def version(self, options: EngineOptions) -> str:
        """Version that selects connector profiles; empty: newest."""
        return ""

    @abstractmethod
    def process(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> ProcessSpec: ...

    def processes(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> list[ProcessSpec]:
        """Processes of one instance, one per host; the first serves HTTP. Raises InputError."""
        if len(instance.nodes) > 1:
            raise InputError(
                f"an instance of the {self.name} engine runs on one host, unlike {instance.name}"
            )
        return [self.process(instance, connector, connector_options, options)]

    def gpus(self, options: EngineOptions, role: Role, rank: int, ranks: Ranks) -> GpuNeed:
        """GPUs that an instance with these ranks needs on its host."""
        return GpuNeed(0)

    def kv_pool_bytes(self, instance: Instance, options: EngineOptions) -> int:
        """KV pool memory of an instance, if kvbench sets it; else 0."""
        return 0

    def warnings(self, options: EngineOptions, setting: OptionsContext | None = None) -> Sequence[str]:
        """Settings that are ignored or harmful."""
        return ()


VERSION_TIMEOUT_S: Final = 120.0
"""Longest version query in seconds: vLLM imports PyTorch, which takes up to a minute on a busy machine."""


def argv_of(arguments: Mapping[str, Any]) -> list[str]:
    """Convert named arguments: true is a flag, false its ``--no-`` form, null omits it, a list gives several
    words, a mapping JSON."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{flag}", *(_word(part) for part in value)]
        else:
            words += [f"--{flag}", _word(value)]
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def owned_flags(given: Mapping[str, Any], owned: Sequence[str]) -> list[str]:
    """Names in ``given`` that kvbench sets itself."""
    return [name for name in given if name.replace("_", "-").lstrip("-") in owned]


def overridden(ours: Mapping[str, str], users: Mapping[str, str]) -> list[str]:
    """Warn about the user's variables that replace a connector's."""
    both = sorted(name for name in set(ours) & set(users) - {"PYTHONPATH"} if ours[name] != users[name])
    return [f"env sets {name}, which overrides the connector's option" for name in both]


def found_command(command: str, env: Mapping[str, str]) -> str | None:
    return shutil.which(command, path=env.get("PATH", os.environ.get("PATH")))


def whole(arguments: Mapping[str, Any], *names: str) -> int:
    """First of these arguments with a number above 0, else 1."""
    for name in names:
        with contextlib.suppress(TypeError, ValueError):
            if (number := int(arguments.get(name, 0))) > 0:
                return number
    return 1


def command_version(command: tuple[str, ...], env: Mapping[str, str]) -> str:
    """Version by ``command --version``, cached per process. Raises MissingLibraryError if the command is
    missing, LaunchError without a version in time."""
    answer = _ask_version(command, tuple(sorted(env.items())))
    if isinstance(answer, KvbenchError):
        raise answer
    return answer


@lru_cache(maxsize=16)
def _ask_version(command: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> str | KvbenchError:
    """Version, or the error to raise, so a hanging command runs once."""
    argv = [*command, "--version"]
    shown = " ".join(argv)
    try:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **dict(env)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return MissingLibraryError(
            f"cannot run {shown}: {error.strerror}",
            hint="name the command in deployment.engine_options.command",
        )
    with process:
        try:
            output, stderr = process.communicate(timeout=VERSION_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # not yet reaped, so the group id is still valid
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return LaunchError(
                f"{shown} reported no version within {VERSION_TIMEOUT_S:g} s",
                hint="set deployment.engine_options.version",
            )
    version = version_in(output)
    if process.returncode != 0 or not version:
        last = [line for line in (stderr or output).splitlines() if line.strip()][-3:]
        return LaunchError(
            f"{shown} reported no version (status {process.returncode})"
            + "".join(f"\n  {line}" for line in last),
            hint="set deployment.engine_options.version, or repair that installation",
        )
    return version
