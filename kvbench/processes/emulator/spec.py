"""The emulated engine's spec, checked before anything starts."""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvbench.core.calibration.profile_file import ProfileFile
from kvbench.core.gates.lies import Lie
from kvbench.core.physics import KvDtype, ModelShape
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.core.simulation.step_time import TimingProfile, timing_profile
from kvbench.errors import InputError
from kvbench.transfer.base import Layout

Handshake = Literal["pull", "push"]

# vLLM's connector name → handshake (pull or push) and transfer backend.
HANDOFFS: Final = MappingProxyType(
    {
        "NixlConnector": ("pull", "nixl"),
        "KvbenchTcpConnector": ("pull", "tcp"),
        "MooncakeConnector": ("push", "mooncake"),
    }
)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSpec(_Strict):
    """The fields of ``core.physics.ModelShape``."""

    name: str
    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=0)
    head_dim: int = Field(ge=0)
    kv_dtype: KvDtype = "bf16"
    mla_dim: int = Field(0, ge=0)
    vocab_size: int = Field(32_000, ge=16)
    source: str = ""

    def shape(self) -> ModelShape:
        return ModelShape(**self.model_dump())


class KvPace(_Strict):
    """Modelled duration of a KV transfer (``core.transfers.model``); 10⁹ bytes per second, None: no limit."""

    start_s: float = Field(0.0, ge=0)
    per_descriptor_s: float = Field(0.0, ge=0)
    gb_per_s: float | None = Field(None, gt=0)


class KvTransferConfig(_Strict):
    """The part of vLLM's ``--kv-transfer-config`` that the emulated engine reads."""

    kv_connector: Literal["NixlConnector", "KvbenchTcpConnector", "MooncakeConnector"]
    kv_role: Literal["kv_producer", "kv_consumer"]
    engine_id: str = Field(min_length=1)
    kv_connector_extra_config: dict[str, Any] = Field(default_factory=dict)

    @property
    def handshake(self) -> str:
        return HANDOFFS[self.kv_connector][0]

    @property
    def backend(self) -> str:
        return HANDOFFS[self.kv_connector][1]

    @property
    def is_producer(self) -> bool:
        return self.kv_role == "kv_producer"


class EngineSpec(_Strict):
    """One emulated engine process. Unknown keys are refused."""

    served_model_name: str = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65_535)
    model: ModelSpec
    tensor_parallel_size: int = Field(1, ge=1)
    kv_ranks: int | None = Field(None, ge=1)
    """Ranks of D, which receives the KV; they set the block size. None: ``tensor_parallel_size``."""
    block_tokens: int = Field(16, ge=1)
    num_blocks: int = Field(4096, ge=1)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=1)
    max_model_len: int = Field(32_768, ge=2)
    enable_prefix_caching: bool = True
    timing: str | ProfileFile = "quick"
    """A name of ``core.simulation.step_time``, or a whole profile."""
    time_scale: float = Field(1.0, gt=0)
    kv_transfer_config: KvTransferConfig | None = None
    side_channel_port: int | None = Field(None, ge=0, le=65_535)
    transfer_timeout_s: float = Field(10.0, gt=0)
    memory: Literal["host", "cuda"] = "host"
    """Memory from which peers read KV: the host pool, or GPU memory that mirrors it."""
    kv_pace: KvPace | None = None
    """Modelled transfer times; faster transfers are delayed. None: no delay."""
    reasoning_tokens: int = Field(0, ge=0)
    """Number of reasoning tokens in a chat's answer."""
    output_noise: float = Field(0.0, ge=0, le=0.5)
    """Share of tokens that differ when several sequences are computed together."""
    lie: Lie = ""
    run_tag: str = ""
    trace_path: str = ""
    """File for the spans of each trial's first requests; empty: none."""

    def engine_config(self) -> EngineConfig:
        return EngineConfig(**{field.name: getattr(self, field.name) for field in fields(EngineConfig)})

    def timing_profile(self) -> TimingProfile:
        if isinstance(self.timing, ProfileFile):
            return self.timing.timing(self.tensor_parallel_size)
        return timing_profile(self.timing, self.tensor_parallel_size)

    def layout(self) -> Layout:
        """The KV pool's shape. Raises InputError if a token's bytes are not whole 64-bit words."""
        shape = self.model.shape()
        block_bytes = shape.block_bytes(self.block_tokens, self.kv_ranks or self.tensor_parallel_size)
        if block_bytes == 0 or block_bytes % (8 * self.block_tokens):
            raise InputError(
                f"model {shape.name!r} holds {block_bytes / self.block_tokens:g} bytes per token and region",
                hint="the emulated engine needs a multiple of 8",
            )
        return Layout(shape.regions(), self.num_blocks, block_bytes)


def parse_spec(text: str | bytes, origin: str = "spec") -> EngineSpec:
    """Parse and check a spec. Raises InputError listing every mistake."""
    try:
        spec = EngineSpec.model_validate_json(text)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc']) or 'JSON'}: {item['msg']}"
            for item in error.errors()
        ]
        raise InputError(f"{origin} cannot be used: " + "; ".join(lines)) from None
    spec.layout()
    spec.timing_profile()
    needs_side = spec.kv_transfer_config is not None and (
        spec.kv_transfer_config.handshake == "pull" or spec.kv_transfer_config.is_producer
    )
    if needs_side and spec.side_channel_port is None:
        raise InputError(f"{origin} cannot be used: side_channel_port: this connector and role need one")
    return spec
