"""SGLang: commands and dispatch according to its sources. Untested, as it needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from pydantic import Field, JsonValue, field_validator

from kvbench.connectors.base import Connector, ConnectorOptions, Role
from kvbench.core.plan.gpus import GpuNeed
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.hosts import NODE
from kvbench.engines.base import (
    Engine,
    EngineOptions,
    Environment,
    Instance,
    OptionsContext,
    argv_of,
    found_command,
    overridden,
    owned_flags,
    whole,
)
from kvbench.errors import InputError, KvbenchError, Problem

_OURS: Final = (
    "model-path",
    "host",
    "port",
    "served-model-name",
    "tp-size",
    "tp",
    "disaggregation-mode",
    "disaggregation-transfer-backend",
    "disaggregation-bootstrap-port",
    "disaggregation-ib-device",
    "nnodes",
    "node-rank",
    "dist-init-addr",
)
"""Arguments derived from the scenario."""
_RANK_NAMES: Final = {
    "pipeline_parallel_size": ("pp-size", "pipeline-parallel-size", "pp"),
    "data_parallel_size": ("dp-size", "data-parallel-size", "dp"),
    "expert_parallel": ("ep-size", "expert-parallel-size", "ep"),
}
"""Further ranks → SGLang's argument names."""
NOT_RUN: Final = "kvbench prints SGLang's commands but is untested with it"


class SglangOptions(EngineOptions):
    """Options of SGLang servers; a role's arguments and environment override common ones."""

    usual_ready_timeout_s: ClassVar[float] = 600.0

    model: str = Field(..., min_length=1, description="path or id of the model that is served")
    command: tuple[str, ...] = Field(
        ("python3", "-m", "sglang.launch_server"), min_length=1, description="how SGLang is started"
    )
    untested: bool = Field(False, description="start it although kvbench has not been run with SGLang")
    engine_args: dict[str, JsonValue] = Field(
        default_factory=dict, description="arguments of sglang.launch_server for all roles, by their names"
    )
    prefill_args: dict[str, JsonValue] = Field(default_factory=dict, description="arguments of P only")
    decode_args: dict[str, JsonValue] = Field(default_factory=dict, description="arguments of D only")
    env: Environment = Field(default_factory=dict, description="environment of all roles, unchanged")
    prefill_env: Environment = Field(default_factory=dict, description="environment of P only")
    decode_env: Environment = Field(default_factory=dict, description="environment of D only")

    dummy_weights: bool = Field(
        False, description="whether weights are random, so that different prompts may have the same answer"
    )

    @field_validator("engine_args", "prefill_args", "decode_args")
    @classmethod
    def _not_ours(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := owned_flags(given, _OURS):
            raise ValueError(f"{', '.join(taken)} follow from the scenario and cannot be given here")
        return given

    @property
    def served_from(self) -> str:
        return self.model

    @property
    def answers_alike(self) -> bool:
        return self.dummy_weights or self.arguments("decode").get("load-format") == "dummy"

    @property
    def executable(self) -> str:
        return self.command[0]

    def environment(self, role: Role) -> dict[str, str]:
        return {**self.env, **{"prefill": self.prefill_env, "decode": self.decode_env}.get(role, {})}

    def ranks_in_args(self, role: str) -> dict[str, int]:
        arguments = self.arguments(role)
        found = {
            key: whole(arguments, *names)
            for key, names in _RANK_NAMES.items()
            if any(name in arguments for name in names)
        }
        if arguments.get("enable-dp-attention"):
            found["data_parallel_size"] = 1  # it splits the ranks that there are
        return found

    def arguments(self, role: str) -> dict[str, Any]:
        """User arguments of one role, with hyphens for underscores."""
        role_args = {"prefill": self.prefill_args, "decode": self.decode_args}.get(role, {})
        return {key.replace("_", "-"): value for key, value in {**self.engine_args, **role_args}.items()}


def _rank_args(ranks: Ranks, given: Mapping[str, int]) -> dict[str, Any]:
    """Arguments for ranks that the user's arguments do not set."""
    args: dict[str, Any] = {"tp-size": ranks.tensor}
    args |= {} if "pipeline_parallel_size" in given else {"pp-size": ranks.pipeline}
    args |= {} if "data_parallel_size" in given else {"dp-size": ranks.data}
    # Experts are spread over this number of tensor parallel ranks.
    args |= {"ep-size": ranks.tensor} if ranks.expert and "expert_parallel" not in given else {}
    return {key: count for key, count in args.items() if count > 1}


class Sglang(Engine):
    """Starts `sglang.launch_server`, with /health, /metrics (enabled) and /flush_cache."""

    name = "sglang"
    options_model = SglangOptions
    launch_s = (20.0, 300.0)
    cache_reset_path = "/flush_cache"

    def version(self, options: EngineOptions) -> str:
        return "sglang"

    def check(self, connector: Connector, options: EngineOptions | None = None) -> Problem | None:
        assert isinstance(options, SglangOptions)
        try:
            connector.profile("sglang")
        except KvbenchError as error:
            return Problem(error.message, error.hint)
        if not options.untested:
            return Problem(NOT_RUN, "to try it nevertheless: --set deployment.engine_options.untested=true")
        if found_command(options.command[0], options.env) is None:
            return Problem(
                f"unknown command {options.command[0]!r}",
                "install SGLang, or name its command in deployment.engine_options.command",
            )
        return None

    def gpus(self, options: EngineOptions, role: Role, rank: int, ranks: Ranks) -> GpuNeed:
        """One GPU per rank. ``base-gpu-id`` selects among visible GPUs, so it counts as the user's choice."""
        assert isinstance(options, SglangOptions)
        arguments = options.arguments(role)
        if str(arguments.get("device", "cuda")) == "cpu":
            return GpuNeed(0)
        count = ranks.gpus
        if "base-gpu-id" in arguments:
            first, step = int(arguments["base-gpu-id"]), whole(arguments, "gpu-id-step")
            return GpuNeed(count, tuple(str(first + step * number) for number in range(count)))
        visible = options.environment(role).get("CUDA_VISIBLE_DEVICES")
        return GpuNeed(count, None if visible is None else tuple(visible.replace(" ", "").split(",")))

    def processes(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> list[ProcessSpec]:
        """One server per host; the first serves. Ranks of a tensor-parallel group may be on several hosts,
        data-parallel replicas may not."""
        assert isinstance(options, SglangOptions)
        hosts = len(instance.nodes)
        if hosts < 2:
            return [self.process(instance, connector, connector_options, options)]
        if instance.ranks.data > 1:
            raise InputError(
                f"SGLang's data-parallel ranks do not span hosts, and {instance.name} has {hosts}",
                hint="set data_parallel_size to 1; attn-dp-size in engine_args divides the TP ranks",
            )
        specs = []
        for number in range(hosts):
            part = instance.on_node(number)
            spec = self.process(part, connector, connector_options, options)
            meet = {
                "nnodes": hosts,
                "node-rank": number,
                "dist-init-addr": f"{instance.nodes[0]}:{instance.group_port}",
            }
            # The user's single address cannot be right on several hosts.
            env = {**spec.env, "SGLANG_HOST_IP": part.host}
            spec = replace(spec, argv=(*spec.argv, *argv_of(meet)), env=env)
            if number:
                spec = replace(spec, name=f"{spec.name}{NODE}{number}", ready_url="", port=0)
            specs.append(spec)
        return specs

    def process(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> ProcessSpec:
        assert isinstance(options, SglangOptions)
        role = instance.role
        arguments: dict[str, Any] = {
            "model-path": options.model,
            "served-model-name": instance.served_model_name,
            "host": instance.host,
            "port": instance.port,
            **_rank_args(instance.ranks, options.ranks_in_args(role)),
            "kv-cache-dtype": "fp8_e4m3" if instance.model.kv_dtype == "fp8" else None,
            "enable-metrics": True,
            "disaggregation-mode": role if connector.disaggregated else None,
            **connector.engine_args(role, connector_options),
            "disaggregation-bootstrap-port": instance.side_port,
            **options.arguments(role),
        }
        return ProcessSpec(
            name=instance.name,
            argv=(*options.command, *argv_of(arguments)),
            env={
                # Where its ranks are reached; by default SGLang takes the default route's address.
                "SGLANG_HOST_IP": instance.host,
                **instance.device_env,
                **connector.seat_env(connector_options, instance.seat),
                **options.environment(role),
            },
            ready_url=f"{instance.url}/health",
            port=instance.port,
            one_thread=False,
            host=instance.host,
        )

    def warnings(self, options: EngineOptions, setting: OptionsContext | None = None) -> Sequence[str]:
        assert isinstance(options, SglangOptions)
        return list(dict.fromkeys(_warnings(options, setting or OptionsContext())))


def _warnings(options: SglangOptions, setting: OptionsContext) -> Iterator[str]:
    yield f"{NOT_RUN}: check every figure"
    roles: tuple[Role, ...] = ("prefill", "decode")
    for label, (connector, connector_options) in setting.connectors.items():
        for role in roles:
            users, ours = options.environment(role), connector.env(role, connector_options, 1)
            for text in (*connector.warnings(connector_options, users), *overridden(ours, users)):
                yield f"{label}: {text}"


ENGINE = Sglang()
