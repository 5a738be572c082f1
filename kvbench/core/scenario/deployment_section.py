"""Deployment and connector sections of a scenario: processes, hosts and ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from kvbench.core.physics import hardware_of
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.base import NAME_PATTERN, Section, Several, custom, error_at, known_name, typed
from kvbench.core.scenario.hosts import NODE, HostName, RayOptions, RemoteHost, Roles, SlurmOptions
from kvbench.core.scenario.options import ConnectorOptions, EngineOptions
from kvbench.core.scenario.yaml_lines import shorten

MOST_RANKS: Final = 64
_RANKS: Final = {"type": "integer", "minimum": 1, "maximum": MOST_RANKS}


def _sizes(raw: Any) -> Any:
    if isinstance(raw, int) and not isinstance(raw, bool):
        if not 1 <= raw <= MOST_RANKS:
            raise custom(f"must be 1 to {MOST_RANKS}, not {raw}")
        return (raw,)
    if not isinstance(raw, (list, tuple)) or len(set(map(str, raw))) < len(raw):
        raise custom("must be a whole number, or a list of different ones")
    return tuple(raw)


TensorParallelSizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MOST_RANKS)], ...],
    BeforeValidator(_sizes),
    PlainSerializer(lambda sizes: sizes[0] if len(sizes) == 1 else list(sizes)),
    WithJsonSchema({"anyOf": [_RANKS, {"type": "array", "items": _RANKS, "minItems": 1, "maxItems": 16}]}),
    Field(min_length=1, max_length=16),
]


class RoleRanks(Section):
    """Ranks of each instance of a role; a missing value is that of the whole deployment."""

    tensor_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="tensor-parallel ranks, if not the deployment's"
    )
    pipeline_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="pipeline-parallel ranks; by default 1"
    )
    data_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="data-parallel ranks behind its one HTTP port; by default 1"
    )
    expert_parallel: bool | None = Field(
        None, description="spread the experts over tensor- and data-parallel ranks"
    )

    @property
    def given(self) -> Mapping[str, int]:
        named = {key: getattr(self, key) for key in RoleRanks.model_fields}
        return {key: value for key, value in named.items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _count_alone(cls, raw: Any) -> Any:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return {"instances": raw}
        if not isinstance(raw, (Mapping, RoleRanks)):
            raise custom(f"must be a whole number, or a mapping with `instances`, not {shorten(raw)}")
        return raw

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> Any:
        given = {key: value for key, value in handler(self).items() if value is not None}
        return given["instances"] if set(given) == {"instances"} else given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "minimum": 1}, handler(schema)]}


class RoleSize(RoleRanks):
    """Number of instances of a role, or the ranks of each."""

    instances: int = Field(1, ge=1, le=64, description="how many")


class AggregatedSize(RoleRanks):
    """Engines without P/D; their number defaults to what P's and D's GPUs allow."""

    instances: int | None = Field(None, ge=1, le=128, description="how many")


HOST_OR_NOTHING: Final = r"^([A-Za-z0-9][A-Za-z0-9.-]{0,252})?$"

PrefixWord = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]

Routing = Literal["session", "round_robin"]
"""Choice of a request's server: by its session, if it has one, or round robin for all."""


class CommandPrefix(Section):
    """Prefix of the command of each instance of a role, such as a profiler's; it runs without a
    shell.

    ``{name}`` stands for the instance's name, ``{logs}`` for the folder of its log."""

    prefill: Several[PrefixWord] = Field((), max_length=64, description="before each prefill instance")
    decode: Several[PrefixWord] = Field((), max_length=64, description="before each decode instance")
    aggregated: Several[PrefixWord] = Field(
        (), max_length=64, description="before each engine of a deployment without P/D"
    )


class Deployment(Section):
    """Processes of each connector."""

    engine: str = Field("emulated", description="what serves tokens")
    launcher: Literal["local", "ssh", "slurm", "ray"] = Field(
        "local",
        description="where processes run: this machine, hosts reached by ssh, or nodes of Slurm or Ray",
    )
    slurm: SlurmOptions | None = Field(None, description="the job, for launcher: slurm")
    ray: RayOptions | None = Field(None, description="the nodes, for launcher: ray")
    hosts: dict[HostName, RemoteHost] = Field(
        default_factory=dict, max_length=256, description="the hosts, by names of your choice; not for local"
    )
    roles: Roles = Field(default_factory=Roles, description="which role runs on which of the hosts")
    prefill: RoleSize = Field(
        default_factory=RoleSize, description="prefill instances (x in xPyD): how many, or a mapping"
    )
    decode: RoleSize = Field(
        default_factory=RoleSize, description="decode instances (y in xPyD): how many, or a mapping"
    )
    aggregated: AggregatedSize | None = Field(
        None,
        description="engines of a deployment without P/D, behind the router if there are several; by default "
        "as many as prefill and decode instances together, each with the ranks of the instance that it "
        "replaces, so that both use equal hardware",
    )
    tensor_parallel_size: TensorParallelSizes = Field(
        (1,),
        description="tensor-parallel ranks per instance; with a list each connector is measured at each size",
    )
    router_processes: int = Field(
        1, ge=1, le=64, description="router processes that share its port; each uses at most one core"
    )
    routing: Routing = Field(
        "session",
        description="how the router chooses the engines of a session's turns: always the same ones "
        "(session), or the next in turn, whatever they have cached (round_robin); single requests go in turn",
    )
    host: str = Field(
        "127.0.0.1", pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$", description="address to listen on"
    )
    prefill_host: str = Field(
        "", pattern=HOST_OR_NOTHING, description="where prefill instances run, if not on host; printed only"
    )
    decode_host: str = Field(
        "", pattern=HOST_OR_NOTHING, description="where decode instances run, if not on host; printed only"
    )
    hardware: str = Field(
        "", max_length=80, description="GPUs of one instance, such as 8xH200; detected if possible"
    )
    price_per_gpu_hour: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="price of one GPU for an hour, in any currency: tables then have costs",
    )
    nic_gbit: float | None = Field(
        None, gt=0, le=1e6, description="line rate of one instance's data NICs together, in Gbit/s, if known"
    )
    base_port: int = Field(
        21000, ge=0, le=65535, description="first of the ports in use; 0: free ones are chosen at launch"
    )
    ready_timeout_s: float = Field(
        30.0,
        gt=0,
        le=7200,
        description="deadline for all processes to be ready; by default 600 for engines that load weights",
    )
    trace: bool = Field(
        False, description="store spans of the first requests of each trial, for `kvbench export timeline`"
    )
    prefix: CommandPrefix = Field(
        default_factory=CommandPrefix, description="command prefix of the instances, such as a profiler"
    )
    engine_options: SerializeAsAny[EngineOptions] = Field(
        default_factory=EngineOptions, validate_default=True, description="options of the engine"
    )

    @property
    def aggregated_engines(self) -> int:
        """Number of engines of a deployment without P/D."""
        aggregated = self.aggregated
        if aggregated is None or aggregated.instances is not None:
            return aggregated.instances if aggregated is not None and aggregated.instances else self._engines
        return max(1, self.pair_gpus // self.ranks_of("aggregated-0").gpus)

    @property
    def pair_gpus(self) -> int:
        """GPUs of P and D together, one per rank."""
        sizes = {"prefill-0": self.prefill.instances, "decode-0": self.decode.instances}
        return sum(count * self.ranks_of(name).gpus for name, count in sizes.items())

    @property
    def _engines(self) -> int:
        return self.prefill.instances + self.decode.instances

    def ranks_of(self, instance: str) -> Ranks:
        """Return the ranks of an instance.

        A list of tensor parallel sizes gives its first; ``Scenario.deployed`` gives each connector its own.
        """
        role = instance.partition("-")[0]
        size: RoleRanks | None = {"prefill": self.prefill, "decode": self.decode}.get(role, self.aggregated)
        if size is None or not size.given:
            size = self.decode if self._place(instance).startswith("decode") else self.prefill
        args = self.engine_options.ranks_in_args(role)
        return Ranks(
            size.tensor_parallel_size or self.tensor_parallel_size[0],
            size.pipeline_parallel_size or args.get("pipeline_parallel_size", 1),
            size.data_parallel_size or args.get("data_parallel_size", 1),
            bool(size.expert_parallel or args.get("expert_parallel")),
        )

    @property
    def wire_ranks(self) -> int:
        """Tensor parallel ranks that receive KV: D's, since each fetches its own part."""
        return self.ranks_of("decode-0").tensor

    def host_of(self, role: str) -> str:
        """Return the address of a role's first instance; the router runs on ``host``."""
        return self.address_of(f"{role}-0")

    def address_of(self, process: str) -> str:
        """Return the address of a process such as ``decode-1`` or ``router``; helpers run with the router."""
        if self.hosts:
            return self.hosts[self.host_name(process)].address
        role = self._seat(process).partition("-")[0]
        return {"prefill": self.prefill_host, "decode": self.decode_host}.get(role) or self.host

    def host_name(self, process: str) -> str:
        """Return the name of a process's host; valid only with named hosts."""
        return self.roles.host_of(self._seat(process))

    def nodes_of(self, instance: str) -> tuple[str, ...]:
        """Return the names of the hosts that an instance spans; empty without named hosts."""
        return self.roles.nodes(self._seat(instance)) if self.hosts else ()

    def _seat(self, process: str) -> str:
        """Return the process whose host this one takes, unless engines without P/D have their own hosts."""
        return process if self.roles.aggregated else self._place(process)

    def _place(self, process: str) -> str:
        """Return the process whose devices this one takes: engines without P/D replace P and D."""
        role, _, end = process.partition("-")
        number, sign, node = end.partition(NODE)
        if role != "aggregated" or not number.isdecimal():
            return process
        index, prefill = int(number) % self._engines, self.prefill.instances
        replaced = f"prefill-{index}" if index < prefill else f"decode-{index - prefill}"
        return f"{replaced}{sign}{node}"

    @property
    def used_hosts(self) -> dict[str, RemoteHost]:
        """The hosts that have a role, by name."""
        named = [*self.roles.of("prefill"), *self.roles.of("decode"), *self.roles.of("aggregated")]
        named += [*self.roles.of("router"), *self.roles.of("loadgen")]
        if not self.engine_options.starts_processes:
            named = list(self.roles.of("loadgen"))
        return {name: self.hosts[name] for name in dict.fromkeys(named) if name in self.hosts}

    @property
    def several_hosts(self) -> bool:
        """Return whether instances run on several hosts, or on another one than ``host``."""
        if self.hosts:
            return len({*self.roles.of("prefill"), *self.roles.of("decode")}) > 1
        return any(self.host_of(role) != self.host for role in ("prefill", "decode"))

    @model_validator(mode="after")
    def _ranks_fit(self) -> Deployment:
        """Refuse ranks that an engine does not support, and values set twice."""
        if self.routing != "session" and not self.engine_options.starts_processes:
            text = f"kvbench starts no router for the {self.engine} engine: leave routing out"
            raise error_at(("routing",), text)
        named = {"prefill": self.prefill, "decode": self.decode, "aggregated": self.aggregated}
        for role, size in named.items():
            for key in size.given if size is not None else ():
                if key == "tensor_parallel_size":
                    continue
                if self.engine_options.tensor_parallel_only:
                    text = f"an instance of the {self.engine} engine supports tensor parallel ranks only"
                    raise error_at((role, key), text)
                if key in self.engine_options.ranks_in_args(role):
                    raise error_at((role, key), "the engine's arguments also set it: keep one of them")
        self._hosts_fit()
        for name in self.engine_options.instances_named:
            role, _, number = name.partition("-")
            size = named[role]
            count = self._engines if size is None or size.instances is None else size.instances
            if int(number) >= count:
                text = f"no instance is called {name}: {role} has {count}, counted from 0"
                raise error_at(("engine_options", "instance_args"), text)
        if len(self.tensor_parallel_size) > 1 and all(
            "tensor_parallel_size" in size.given for size in (self.prefill, self.decode)
        ):
            raise error_at(
                ("tensor_parallel_size",), "a list has no effect if prefill and decode set their own sizes"
            )
        aggregated = self.aggregated
        if aggregated is not None and aggregated.instances is None and len(self.tensor_parallel_size) == 1:
            gpus = self.ranks_of("aggregated-0").gpus
            if self.pair_gpus % gpus:
                raise error_at(
                    ("aggregated",),
                    f"engines of {gpus} GPUs each do not make up the {self.pair_gpus} of prefill and decode: "
                    "say how many `instances`",
                )
        return self

    def _hosts_fit(self) -> None:
        """Raise if an instance's ranks do not divide among its hosts.

        As with vLLM's ``--nnodes``, a data-parallel rank takes whole hosts, or a host takes whole ranks."""
        for role in ("prefill", "decode", "aggregated"):
            size: RoleRanks | None = getattr(self, role)
            tensors = (size.tensor_parallel_size,) if size and size.tensor_parallel_size else None
            for group in getattr(self.roles, role) if self.hosts else ():
                for tensor in tensors or self.tensor_parallel_size:
                    ranks = replace(self.ranks_of(f"{role}-0"), tensor=tensor)
                    on_each, rest = divmod(ranks.gpus, len(group))
                    whole = ranks.gpus // ranks.data
                    if rest or (on_each % whole and whole % on_each):
                        text = f"{ranks.text()} does not divide among {', '.join(group)}"
                        raise error_at(("roles", role), f"deployment.roles.{role}: {text}")

    @field_validator("engine")
    @classmethod
    def _engine_known(cls, name: str, info: ValidationInfo) -> str:
        return known_name("engine", name, info.context.engines) if info.context else name

    @field_validator("hardware")
    @classmethod
    def _hardware_known(cls, text: str) -> str:
        try:
            if text:
                hardware_of(text)
            return text
        except ValueError as error:
            raise custom(str(error)) from None

    @field_validator("base_port")
    @classmethod
    def _unprivileged(cls, port: int) -> int:
        if 0 < port < 1024:
            raise custom(f"must be 0, or 1024 to 65535, not {port}: lower ports belong to the system")
        return port

    @field_validator("engine_options", mode="before")
    @classmethod
    def _typed_options(cls, raw: Any, info: ValidationInfo) -> Any:
        return typed(info, "engine", raw, "engines", EngineOptions())


COMMON_KEYS: Final = ("name", "label", "tensor_parallel_size")
"""Keys of a connector's entry that are no options."""


class ConnectorChoice(Section):
    """A connector with its options, written as its name or as a mapping with ``name``."""

    name: str = Field(description="the connector")
    label: str = Field("", validate_default=True, description="its name in tables; by default `name`")
    tensor_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="of its deployment, if not deployment.tensor_parallel_size"
    )
    options: SerializeAsAny[ConnectorOptions] = Field(
        default_factory=ConnectorOptions, validate_default=True, description="options of the connector"
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            return {"name": raw}
        if not isinstance(raw, Mapping) or isinstance(raw.get("options"), BaseModel):
            return raw
        common = {key: raw[key] for key in COMMON_KEYS if key in raw}
        return common | {"options": {key: value for key, value in raw.items() if key not in common}}

    @field_validator("name")
    @classmethod
    def _connector_known(cls, name: str, info: ValidationInfo) -> str:
        return known_name("connector", name, info.context.connectors) if info.context else name

    @field_validator("label")
    @classmethod
    def _label_or_name(cls, label: str, info: ValidationInfo) -> str:
        label = label or str(info.data.get("name", "unnamed"))
        if not re.fullmatch(NAME_PATTERN[1:-1], label):
            raise custom(f"a label has letters, digits, `.`, `_` and `-`, unlike {label!r}")
        return label

    @field_validator("options", mode="before")
    @classmethod
    def _typed_options(cls, raw: Any, info: ValidationInfo) -> Any:
        return typed(info, "name", raw, "connectors", ConnectorOptions())
