"""The contract of an engine: what serves tokens, which process to start for a role, and its command line."""

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
"""Environment variables by their names."""


@dataclass(frozen=True)
class Instance:
    """One engine instance of a deployment, with everything its process depends on."""

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
    """The longest input plus output of the workload."""
    neighbours: Neighbours = field(default_factory=Neighbours)
    nodes: tuple[str, ...] = ()
    """The addresses of the hosts that it spans, its own first; none or one for one host."""
    group_port: int | None = None
    """Where its processes meet, on the first of them; the port after it joins its data-parallel ranks."""
    devices: tuple[str, ...] = ()
    """The GPUs that it is dealt; none where nobody deals them out."""
    wire_ranks: int = 1
    """Tensor parallel ranks for which KV goes over the wire: those of the D instances."""

    def on_node(self, number: int) -> Instance:
        """The instance as its process on one of its hosts sees it: with that host's address."""
        return replace(self, host=self.nodes[number], engine_id=self._engine_id_on(number))

    def _engine_id_on(self, number: int) -> str:
        """Hosts with data-parallel ranks of their own have an id each: older vLLM (0.13) makes a rank's id
        from its number on its host alone.
        """
        first = number - number % max(1, len(self.nodes) // self.ranks.data)
        return f"{self.engine_id}{NODE}{first}" if first else self.engine_id

    @property
    def rank_engine_ids(self) -> tuple[str, ...]:
        """The engine id of each data-parallel rank, as vLLM makes it."""
        ranks = self.ranks.data
        if ranks == 1:
            return (self.engine_id,)
        return tuple(f"{self._engine_id_on(self._host_of(rank))}_dp{rank}" for rank in range(ranks))

    @property
    def rank_side_addresses(self) -> tuple[str, ...]:
        """``host:port`` of each data-parallel rank's side channel, where each has one."""
        hosts = self.nodes or (self.host,)
        return tuple(f"{hosts[self._host_of(r)]}:{(self.side_port or 0) + r}" for r in range(self.ranks.data))

    def _host_of(self, rank: int) -> int:
        """The index of the first host of a data-parallel rank."""
        return rank * max(1, len(self.nodes)) // self.ranks.data

    @property
    def side_address(self) -> str:
        """``host:port`` of its side channel; empty without one."""
        return f"{self.host}:{self.side_port}" if self.side_port else ""

    @property
    def device_env(self) -> dict[str, str]:
        """The variable by which CUDA shows a process the GPUs that it is dealt."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}

    @property
    def seat(self) -> Seat:
        """The instance as its connector sees it."""
        return Seat(self.role, self.rank, self.host, self.side_port, self.ranks.tensor, self.neighbours)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def bootstrap_url(self) -> str:
        return f"http://{self.host}:{self.side_port}" if self.side_port else ""


@dataclass(frozen=True)
class OptionsContext:
    """What an engine's options meet in a scenario, so that it can warn."""

    connectors: Mapping[str, tuple[Connector, ConnectorOptions]] = field(default_factory=dict)
    """Label → profile and options."""
    hosts: frozenset[str] = frozenset()
    max_concurrency: float | None = None
    """Requests in flight at the first rate if each just meets its SLO; None if that is not known."""


@dataclass(frozen=True)
class Installed:
    """An engine as it is found on this machine."""

    command: str = ""
    """Its path; empty for kvbench's own."""
    version: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Versions by distribution in its environment."""


@dataclass(frozen=True)
class FirstScenario:
    """What `kvbench init` asks of an engine: what to offer as answers, and the lines that are its own."""

    model: str
    input_len: str
    output_len: int
    ttft_ms: float
    tpot_ms: float
    trial_s: float
    ready_s: int
    title: str = ""
    """What is looked for on the machine, as people call it; empty: kvbench brings it."""
    loads_model: bool = False
    """It serves a model from files: a folder or an id is asked for, not a shape alone."""

    def found(self) -> Installed | None:
        """It, if this machine has it."""
        return Installed()

    def has(self, connector: Connector) -> bool:
        """Whether it could run that connector on some machine; else the connector is not spoken of."""
        return bool(connector.transfer_backend) or not connector.disaggregated

    def options(self, installed: Installed) -> EngineOptions | None:
        """Options to check connectors with, so that nothing is asked that is known."""
        return None

    def lacks(self, connector: Connector, installed: Installed) -> Problem | None:
        """What the connector needs beside the engine, if it is not there."""
        return None

    def option_lines(
        self, model: str, longest: int, installed: Installed, gpus: Sequence[str]
    ) -> Sequence[str]:
        """The lines of ``engine_options``, not indented, with a comment where the choice wants one.

        ``longest``: tokens of the longest request; ``gpus``: the indices of the machine's.
        """
        return ()


class Engine(ABC):
    """Turns an instance into a process, and says where to ask it what.

    In what it differs from other engines beside that, its options say (``EngineOptions``).
    """

    name: ClassVar[str]
    labels: ClassVar[tuple[str, ...]] = ()
    """Words that every table, plot and file of a result must carry, such as "emulated"."""
    options_model: ClassVar[type[EngineOptions]] = EngineOptions
    launch_s: ClassVar[tuple[float, float]] = (0.5, 3.0)
    """How long a deployment takes to get ready, at least and at most; for the plan's estimate."""

    first_scenario: ClassVar[FirstScenario | None] = None
    """For `kvbench init`; None: it does not offer this engine."""

    cache_reset_path: ClassVar[str] = "/reset_prefix_cache"
    """A POST there empties the prefix cache."""

    def labels_of(self, options: EngineOptions) -> tuple[str, ...]:
        """The engine's labels, and those that its options add."""
        return self.labels

    def router_lie(self, options: EngineOptions) -> str:
        """What the router is to lie about, to see it caught (core/gates/lies.py); empty: nothing."""
        return ""

    @abstractmethod
    def check(self, connector: Connector, options: EngineOptions | None = None) -> Problem | None:
        """Why this engine cannot run with that connector here, or None."""

    def version(self, options: EngineOptions) -> str:
        """The version that chooses the connectors' profiles; empty takes the newest ones."""
        return ""

    @abstractmethod
    def process(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> ProcessSpec:
        """The process to start for one instance."""

    def processes(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> list[ProcessSpec]:
        """The processes of one instance: one, or one on each host that it spans; the first answers HTTP.

        Raises InputError where an instance cannot span hosts.
        """
        if len(instance.nodes) > 1:
            raise InputError(
                f"an instance of the {self.name} engine runs on one host, unlike {instance.name}"
            )
        return [self.process(instance, connector, connector_options, options)]

    def gpus(self, options: EngineOptions, role: Role, rank: int, ranks: Ranks) -> GpuNeed:
        """What an instance with these ranks needs of its host's GPUs."""
        return GpuNeed(0)

    def kv_pool_bytes(self, instance: Instance, options: EngineOptions) -> int:
        """Memory of one instance's KV pool, as far as kvbench decides it; 0 if it does not."""
        return 0

    def warnings(self, options: EngineOptions, setting: OptionsContext | None = None) -> Sequence[str]:
        """Settings known to be ignored or harmful."""
        return ()


VERSION_TIMEOUT_S: Final = 120.0
"""vLLM imports PyTorch to report its version: seconds on a quiet machine, a minute on a busy one."""


def argv_of(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments by name: true is a bare flag, false its ``--no-`` form, null leaves it out.

    A list gives several words after the name, a mapping becomes JSON.
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{flag}", *(_word(each) for each in value)]
        else:
            words += [f"--{flag}", _word(value)]
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def owned_flags(given: Mapping[str, Any], owned: Sequence[str]) -> list[str]:
    """The names among ``given`` that kvbench sets itself."""
    return [name for name in given if name.replace("_", "-").lstrip("-") in owned]


def found_command(command: str, env: Mapping[str, str]) -> str | None:
    """The executable that a command's first word means, or None."""
    return shutil.which(command, path=env.get("PATH", os.environ.get("PATH")))


def whole(arguments: Mapping[str, Any], *names: str) -> int:
    """The first of these arguments that is given as a number above 0; 1 if none is."""
    for name in names:
        with contextlib.suppress(TypeError, ValueError):
            if (number := int(arguments.get(name, 0))) > 0:
                return number
    return 1


def asked_version(command: tuple[str, ...], env: Mapping[str, str]) -> str:
    """The version that ``command --version`` reports, asked once in a process's life.

    Raises MissingLibraryError if there is no such command, LaunchError if it reports none in time.
    """
    answer = _ask_version(command, tuple(sorted(env.items())))
    if isinstance(answer, KvbenchError):
        raise answer
    return answer


@lru_cache(maxsize=16)
def _ask_version(command: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> str | KvbenchError:
    """The version, or the error to raise: a command that hangs is not asked twice either."""
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
            output, said = process.communicate(timeout=VERSION_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # not yet reaped, so the group is still its own
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return LaunchError(
                f"{shown} told no version within {VERSION_TIMEOUT_S:g} s",
                hint="set deployment.engine_options.version",
            )
    version = version_in(output)
    if process.returncode != 0 or not version:
        last = [line for line in (said or output).splitlines() if line.strip()][-3:]
        return LaunchError(
            f"{shown} told no version (status {process.returncode})"
            + "".join(f"\n  {line}" for line in last),
            hint="set deployment.engine_options.version, or repair that installation",
        )
    return version
