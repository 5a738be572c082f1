"""The sections of a scenario file as checked, frozen values, each field with its bounds and meaning.

Durations are seconds and limits milliseconds, as the names' suffixes say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kvbench.core.physics.hardware import hardware_of
from kvbench.core.physics.model_shapes import MODELS, KvDtype, ModelShape
from kvbench.core.scenario.base import (
    NAME_PATTERN,
    Section,
    as_tuple,
    custom,
    error_at,
    known_name,
    typed,
)
from kvbench.core.scenario.checks import nearest
from kvbench.core.scenario.hosts import NODE, FarHost, HostName, Roles
from kvbench.core.scenario.options import ConnectorOptions, EngineOptions
from kvbench.core.scenario.schedulers import RayOptions, SlurmOptions
from kvbench.core.scenario.yaml_lines import quoted, shorten

HOST_OR_NOTHING: Final = r"^([A-Za-z0-9][A-Za-z0-9.-]{0,252})?$"

PrefixWord = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class ModelChoice(Section):
    """The model: a preset's name, a preset with changes, or a full shape."""

    name: str = Field(pattern=NAME_PATTERN, description="the model's name in tables")
    layers: int = Field(
        0, ge=0, le=1000, description="transformer layers; 0 if unknown, which an external server allows"
    )
    kv_heads: int = Field(0, ge=0, le=1024, description="KV heads (GQA); 0 with MLA")
    head_dim: int = Field(0, ge=0, le=4096, description="width of one KV head; 0 with MLA")
    kv_dtype: KvDtype = Field("bf16", description="element type of the KV cache")
    mla_dim: int = Field(0, ge=0, le=65536, description="latent width per layer (MLA); 0 with GQA")
    vocab_size: int = Field(32_000, ge=256, le=10_000_000, description="prompts are drawn from these ids")
    active_parameters: float | None = Field(
        None,
        gt=0,
        le=1e14,
        description="parameters that a prompt token meets, without embeddings; known for presets",
    )
    served_model_name: str = Field(
        "",
        validate_default=True,
        max_length=200,
        description="the name that requests carry; by default the model's name",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            raw = {"preset": raw}
        if not isinstance(raw, Mapping) or "preset" not in raw:
            return raw
        preset = raw["preset"]
        if not isinstance(preset, str) or preset not in MODELS:
            shown = preset if isinstance(preset, str) else json.dumps(preset)
            text = f"no model preset is called {quoted(shown)}; {nearest(str(preset), MODELS)}"
            raise error_at(("preset",), text)
        shape = {key: value for key, value in asdict(MODELS[preset]).items() if key != "source"}
        return shape | {key: value for key, value in raw.items() if key != "preset"}

    @model_validator(mode="after")
    def _has_width(self) -> ModelChoice:
        if self.layers and not self.mla_dim and not (self.kv_heads and self.head_dim):
            raise custom("needs kv_heads and head_dim (GQA), or mla_dim (MLA)")
        return self

    @field_validator("served_model_name")
    @classmethod
    def _served_or_own_name(cls, served: str, info: ValidationInfo) -> str:
        return served or str(info.data.get("name", "unnamed"))

    @property
    def shape(self) -> ModelShape:
        """What the KV cache and the compute model need to know."""
        fields = self.model_dump(exclude={"served_model_name", "active_parameters"})
        preset = MODELS.get(self.name)
        return ModelShape(**fields, source=preset.source if preset else "")


class CommandPrefix(Section):
    """Words put before the command of each instance of a role, such as a profiler's; never through a shell.

    ``{name}`` in a word stands for the instance's name, ``{logs}`` for the folder of its log.
    """

    prefill: tuple[PrefixWord, ...] = Field((), max_length=64, description="before each prefill instance")
    decode: tuple[PrefixWord, ...] = Field((), max_length=64, description="before each decode instance")
    aggregated: tuple[PrefixWord, ...] = Field(
        (), max_length=64, description="before each engine of a deployment without P/D"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_tuple(cls, raw: Any) -> Any:
        return tuple(raw) if isinstance(raw, list) else raw


class Deployment(Section):
    """What is launched for each connector."""

    engine: str = Field("emulated", description="what serves tokens")
    launcher: Literal["local", "ssh", "slurm", "ray"] = Field(
        "local",
        description="where processes run: this machine, hosts reached by ssh, or nodes of Slurm or Ray",
    )
    slurm: SlurmOptions | None = Field(None, description="the job, for launcher: slurm")
    ray: RayOptions | None = Field(None, description="the nodes, for launcher: ray")
    hosts: dict[HostName, FarHost] = Field(
        default_factory=dict, max_length=256, description="the hosts, by names of your choice; not for local"
    )
    roles: Roles = Field(default_factory=Roles, description="which role runs on which of the hosts")
    prefill: int = Field(1, ge=1, le=64, description="prefill instances (x in xPyD)")
    decode: int = Field(1, ge=1, le=64, description="decode instances (y in xPyD)")
    aggregated: int | None = Field(
        None,
        ge=1,
        le=128,
        description="engines of a deployment without P/D, behind the router where there are several; by "
        "default as many as prefill and decode instances together, so that both have the same hardware",
    )
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="tensor-parallel ranks per instance")
    router_processes: int = Field(
        1, ge=1, le=64, description="processes of the router on its port; each keeps one core busy at most"
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
        "", max_length=80, description="GPUs of one instance, such as 8xH200; found by itself where it can be"
    )
    nic_gbit: float | None = Field(
        None, gt=0, le=1e6, description="line rate of one instance's data NICs together, in Gbit/s, if known"
    )
    base_port: int = Field(
        21000, ge=0, le=65535, description="first of the ports in use; 0: free ones are chosen at launch"
    )
    ready_timeout_s: float = Field(30.0, gt=0, le=7200, description="deadline for all processes to be ready")
    trace: bool = Field(
        False, description="write down the spans of the first requests of each trial, for `kvbench timeline`"
    )
    prefix: CommandPrefix = Field(
        default_factory=CommandPrefix,
        description="words before the instances' commands, such as a profiler's",
    )
    engine_options: SerializeAsAny[EngineOptions] = Field(
        default_factory=EngineOptions, validate_default=True, description="options of the engine"
    )

    @property
    def aggregated_engines(self) -> int:
        """How many engines a deployment without P/D has."""
        return self.aggregated or self.prefill + self.decode

    def host_of(self, role: str) -> str:
        """The address of a role's first instance; the router is on ``host``."""
        return self.address_of(f"{role}-0")

    def address_of(self, process: str) -> str:
        """The address of a process by its name, such as ``decode-1`` or ``router``; helpers: the router's."""
        if self.hosts:
            return self.hosts[self.host_name(process)].address
        role = self._seat(process).partition("-")[0]
        return {"prefill": self.prefill_host, "decode": self.decode_host}.get(role) or self.host

    def host_name(self, process: str) -> str:
        """The name of the host of a process. Only where hosts are named."""
        return self.roles.host_of(self._seat(process))

    def nodes_of(self, instance: str) -> tuple[str, ...]:
        """The hosts that an instance spans, by their names; none where no hosts are named."""
        return self.roles.nodes(self._seat(instance)) if self.hosts else ()

    def _seat(self, process: str) -> str:
        """Whose place a process takes: engines without P/D stand where P and D would, on the same devices."""
        role, _, end = process.partition("-")
        number, sign, node = end.partition(NODE)
        if role != "aggregated" or self.roles.aggregated or not number.isdecimal():
            return process
        place = int(number) % (self.prefill + self.decode)
        own = f"prefill-{place}" if place < self.prefill else f"decode-{place - self.prefill}"
        return f"{own}{sign}{node}"

    @property
    def used_hosts(self) -> dict[str, FarHost]:
        """The hosts that some role runs on, by name."""
        named = [*self.roles.of("prefill"), *self.roles.of("decode"), *self.roles.of("aggregated")]
        named += [*self.roles.of("router"), *self.roles.of("loadgen")]
        if not self.engine_options.starts_processes:
            named = list(self.roles.of("loadgen"))
        return {name: self.hosts[name] for name in dict.fromkeys(named) if name in self.hosts}

    @property
    def several_hosts(self) -> bool:
        """Whether instances run on more than one host, or elsewhere than on ``host``."""
        if self.hosts:
            return len({*self.roles.of("prefill"), *self.roles.of("decode")}) > 1
        return any(self.host_of(role) != self.host for role in ("prefill", "decode"))

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
        if not info.context:
            return raw
        return typed(info.data.get("engine"), raw, info.context.engines, EngineOptions())


class ConnectorChoice(Section):
    """A connector with its options; written as its name, or as a mapping with ``name``."""

    name: str = Field(description="the connector")
    label: str = Field("", validate_default=True, description="its name in tables; by default `name`")
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
        own = {key: raw[key] for key in ("name", "label") if key in raw}
        return own | {"options": {key: value for key, value in raw.items() if key not in own}}

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
        if not info.context:
            return raw
        return typed(info.data.get("name"), raw, info.context.connectors, ConnectorOptions())


def _one_or_more(raw: Any) -> Any:
    return (raw,) if isinstance(raw, (int, float, str)) else as_tuple(raw)


InputLen = Annotated[int, Field(ge=1, le=10_000_000)]
_INPUT_LEN_SCHEMA: Final = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": 10_000_000},
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 10_000_000},
            "minItems": 1,
            "maxItems": 64,
            "uniqueItems": True,
        },
    ]
}


class Trace(Section):
    """A file of recorded requests. Its lengths and its arrivals take the place of the workload's own."""

    path: str = Field(min_length=1, max_length=4096, description="the file, from where kvbench is started")
    format: Literal["auto", "mooncake", "jsonl", "csv"] = Field(
        "auto",
        description="mooncake: JSON lines with timestamp (ms), input_length, output_length, hash_ids; "
        "jsonl, csv: timestamp or offset_s (s), input_len, output_len",
    )
    time_scale: float = Field(
        1.0, gt=0, le=1e6, description="the time between requests is multiplied by it: 0.5 is twice as fast"
    )
    max_requests: int = Field(100_000, ge=1, le=10_000_000, description="requests taken from its beginning")
    longest: int = Field(
        0, ge=0, le=20_000_000, description="tokens of its longest request; found when the file is read"
    )


class Workload(Section):
    """What requests look like and how they arrive."""

    input_len: Annotated[
        tuple[InputLen, ...], BeforeValidator(_one_or_more), WithJsonSchema(_INPUT_LEN_SCHEMA)
    ] = Field(min_length=1, max_length=64, description="prompt tokens; each length is a cell of its own")
    output_len: int = Field(ge=1, le=1_000_000, description="tokens that each request generates")
    burstiness: float = Field(
        1.0, gt=0, le=1000, description="gamma shape of the arrivals: 1 is Poisson, less is burstier"
    )
    request_timeout_s: float = Field(60.0, gt=0, le=86_400, description="deadline of one request")
    trace: Trace | None = Field(
        None, description="requests taken from a file instead (method trace); lengths are then its own"
    )

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output together."""
        own = max(self.input_len) + self.output_len
        return max(own, self.trace.longest) if self.trace else own


MOST_WORKERS: Final = 256
_WORKERS_SCHEMA: Final = {
    "anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": MOST_WORKERS}]
}


def _auto_or_count(raw: Any) -> Any:
    if raw == "auto" or (type(raw) is int and 1 <= raw <= MOST_WORKERS):
        return raw
    raise custom(f"must be auto, or a whole number from 1 to {MOST_WORKERS}, not {shorten(raw)}")


class Load(Section):
    """How the load is generated."""

    workers: Annotated[
        int | Literal["auto"], BeforeValidator(_auto_or_count), WithJsonSchema(_WORKERS_SCHEMA)
    ] = Field("auto", description="processes that send requests; auto: as many as the load needs")
    mode: Literal["router", "direct"] = Field(
        "router", description="requests go through the router, or the load generator asks P and D itself"
    )


class KvLink(Section):
    """How fast one connector moves KV between two instances."""

    kv_gb_per_s: float | None = Field(None, gt=0, le=1e6, description="10⁹ KV bytes per second of one link")
    kv_latency_ms: float | None = Field(None, ge=0, le=1e6, description="what each transfer takes besides")


class Simulate(KvLink):
    """Figures for ``kvbench simulate``; what is not given is a measured default, or comes from ``--like``."""

    timing: str = Field("", max_length=80, description="timing profile; by default the engine's or model's")
    time_scale: float | None = Field(None, gt=0, le=1000, description="factor on every modelled step")
    num_blocks: int | None = Field(
        None, ge=8, description="KV blocks per instance; by default the engine's, or enough for every slot"
    )
    router_ms: float | None = Field(None, ge=0, le=1e6, description="client and router, before P")
    front_end_ms: float | None = Field(None, ge=0, le=1e6, description="HTTP and tokens, in each engine")
    turn_ms: float | None = Field(None, ge=0, le=1e6, description="the router's turn from P's answer to D")
    arrival_ms: float | None = Field(
        None, ge=0, le=1e6, description="from the KV's arrival to D's scheduler knowing it"
    )
    hand_off: Literal["beside", "blocking"] = Field(
        "beside",
        description="KV moves beside the engines' steps; or only between P's, while D computes nothing, as "
        "in vLLM 0.6",
    )
    arrivals: Literal["drawn", "vllm", "vllm-0.6"] = Field(
        "drawn",
        description="what --against offers: several drawn Poisson arrivals, or the one sequence that `vllm "
        "bench serve`, or vLLM 0.6's benchmark_serving.py, sends with its default seed",
    )
    connectors: dict[str, KvLink] = Field(
        default_factory=dict, max_length=32, description="figures of single connectors, by their labels"
    )
