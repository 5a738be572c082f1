"""Options of vLLM servers in a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, JsonValue, field_validator

from kvbench.connectors.base import Role
from kvbench.core.engine_versions import release
from kvbench.core.transfers.kv_shape import WINDOWS_SINCE, KvTensors, kv_tensors
from kvbench.engines.base import EngineOptions, Environment, owned_flags, whole
from kvbench.errors import InputError

_OURS: Final = (
    "host",
    "port",
    "served-model-name",
    "tensor-parallel-size",
    "kv-transfer-config",
    "kv-buffer-device",
)
"""Arguments derived from the scenario."""
_RANK_NAMES: Final = {
    "pipeline_parallel_size": ("pipeline-parallel-size", "pp"),
    "data_parallel_size": ("data-parallel-size-local", "dpl", "data-parallel-size", "dp"),
}
"""Further ranks → vLLM's argument names; the first given one counts."""

InstanceName = Annotated[str, Field(pattern=r"^(prefill|decode|aggregated)-[0-9]{1,3}$")]


class VllmOptions(EngineOptions):
    """Options of vLLM servers; a role's arguments and environment override common ones."""

    logs_like = "vllm"
    usual_ready_timeout_s: ClassVar[float] = 600.0
    """Start limit in seconds, for weights, torch.compile and CUDA graphs without a cache."""
    profiler_env: ClassVar[Mapping[str, str]] = {"VLLM_NVTX_SCOPES_FOR_PROFILING": "1"}

    model: str = Field(..., min_length=1, description="path or id of the model that is served")
    command: tuple[str, ...] = Field(
        ("vllm",), min_length=1, description="how vLLM is started, e.g. [/opt/vllm/bin/vllm]"
    )
    version: str = Field("", description="vLLM's version; by default from --version")
    engine_args: dict[str, JsonValue] = Field(
        default_factory=dict, description="arguments of `vllm serve` for all roles, by their names"
    )
    prefill_args: dict[str, JsonValue] = Field(default_factory=dict, description="arguments of P only")
    decode_args: dict[str, JsonValue] = Field(default_factory=dict, description="arguments of D only")
    instance_args: dict[InstanceName, dict[str, JsonValue]] = Field(
        default_factory=dict,
        description="arguments of one instance only, by its name such as prefill-1; they override its role's",
    )
    env: Environment = Field(default_factory=dict, description="environment of all roles, unchanged")
    prefill_env: Environment = Field(default_factory=dict, description="environment of P only")
    decode_env: Environment = Field(default_factory=dict, description="environment of D only")
    prefill_devices: tuple[str, ...] = Field(
        (),
        description="CUDA_VISIBLE_DEVICES of each prefill instance; engines without P/D take these, then the "
        "decode instances'. By default this host's GPUs are assigned in turn",
    )
    decode_devices: tuple[str, ...] = Field((), description="CUDA_VISIBLE_DEVICES of each decode instance")
    max_model_len: int | None = Field(
        None, ge=16, description="longest input plus output; by default the model's own limit"
    )
    max_num_seqs: int | None = Field(None, ge=1, description="sequences that run at the same time")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="token budget of one step")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="share of the GPU's memory for vLLM"
    )
    block_size: int | None = Field(
        None, ge=1, le=1024, description="tokens per KV block; by default vLLM's: 16 on GPUs, 128 on CPUs"
    )
    enable_prefix_caching: bool = Field(True, description="prefix cache, on by default as in vLLM")
    kv_buffer_device: str = Field("", description="where connectors buffer KV: cuda or cpu")
    kv_load_failure_policy: str = Field(
        "fail", pattern="^(fail|recompute)$", description="what D does when KV does not arrive"
    )

    dummy_weights: bool = Field(
        False, description="whether weights are random, so that different prompts may have the same answer"
    )

    @field_validator("engine_args", "prefill_args", "decode_args")
    @classmethod
    def _not_ours(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := owned_flags(given, _OURS):
            raise ValueError(f"{', '.join(taken)} follow from the scenario and cannot be given here")
        return given

    @field_validator("instance_args")
    @classmethod
    def _not_ranks(cls, given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        ranks = (*(name for names in _RANK_NAMES.values() for name in names), "enable-expert-parallel", "ep")
        for name, arguments in given.items():
            if taken := owned_flags(arguments, (*_OURS, *ranks)):
                raise ValueError(f"{name}: {', '.join(taken)} cannot differ between instances of a role")
        return given

    @field_validator("version")
    @classmethod
    def _readable(cls, version: str) -> str:
        if version:
            try:
                release(version)
            except InputError as error:
                raise ValueError(error.message) from error
        return version

    @property
    def served_from(self) -> str:
        return self.model

    @property
    def answers_alike(self) -> bool:
        return self.dummy_weights or self.arguments("decode").get("load-format") == "dummy"

    @property
    def instances_named(self) -> tuple[str, ...]:
        return tuple(self.instance_args)

    @property
    def executable(self) -> str:
        return self.command[0]

    @property
    def kv_tensors(self) -> KvTensors:
        return kv_tensors(release(self.version)) if self.version else kv_tensors()

    @property
    def clips_windows(self) -> bool:
        known = not self.version or release(self.version) >= WINDOWS_SINCE
        return known and not self.arguments("prefill").get("disable-hybrid-kv-cache-manager")

    @property
    def asks_version(self) -> bool:
        return not self.version

    def with_version(self, version: str) -> VllmOptions:
        return self.model_copy(update={"version": version})

    def without_devices(self) -> VllmOptions:
        return self.model_copy(update={"prefill_devices": (), "decode_devices": ()})

    @property
    def gpu_memory_share(self) -> float:
        shares = [self.arguments(role).get("gpu-memory-utilization") for role in ("prefill", "decode")]
        return max((float(share) for share in shares if share), default=super().gpu_memory_share)

    @property
    def kv_block_tokens(self) -> int:
        return self._number("block-size") or (128 if self.env.get("VLLM_CPU_KVCACHE_SPACE") else 16)

    @property
    def slots(self) -> int | None:
        return self._number("max-num-seqs")

    @property
    def step_tokens(self) -> int | None:
        return self._number("max-num-batched-tokens")

    @property
    def longest_request(self) -> int | None:
        return self._number("max-model-len")

    @property
    def caches_prefixes(self) -> bool:
        on, off = "enable-prefix-caching", "no-enable-prefix-caching"
        given = [self.arguments(role) for role in ("prefill", "decode")]
        return any(args[on] is not False and not args.get(off) for args in given)

    def _number(self, name: str) -> int | None:
        """Return an argument's whole number, or None if unset, in words, or different for P and D."""
        prefill, decode = (self.arguments(role).get(name) for role in ("prefill", "decode"))
        return int(str(prefill)) if prefill == decode and str(prefill).isdecimal() else None

    def environment(self, role: Role, rank: int) -> dict[str, str]:
        role_env = {"prefill": self.prefill_env, "decode": self.decode_env}.get(role, {})
        whole = (*self.prefill_devices, *self.decode_devices)
        devices = {"prefill": self.prefill_devices, "decode": self.decode_devices}.get(role, whole)
        chosen = {"CUDA_VISIBLE_DEVICES": devices[rank]} if rank < len(devices) else {}
        return {**self.env, **chosen, **role_env}

    def ranks_in_args(self, role: str) -> dict[str, int]:
        arguments = self.arguments(role)
        found = {}
        for key, names in _RANK_NAMES.items():
            if any(name in arguments for name in names):
                found[key] = whole(arguments, *names)
        if arguments.get("enable-expert-parallel", arguments.get("ep")):
            found["expert_parallel"] = 1
        return found

    def arguments(self, role: str, instance: str = "") -> dict[str, Any]:
        """User arguments of one role or instance, with hyphens for underscores."""
        typed: dict[str, Any] = {
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            "max-num-batched-tokens": self.max_num_batched_tokens,
            "gpu-memory-utilization": self.gpu_memory_utilization,
            "block-size": self.block_size,
            "enable-prefix-caching": None if self.enable_prefix_caching else False,
        }
        role_args = {"prefill": self.prefill_args, "decode": self.decode_args}.get(role, {})
        single = self.instance_args.get(instance, {})
        given = {
            key.replace("_", "-"): value
            for args in (self.engine_args, role_args, single)
            for key, value in args.items()
        }
        return {**typed, **given}
