"""What each node's processes get: addresses, NICs, GPUs and environment. Each mistake is planted once."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml

from kvbench.core.plan.processes import ProcessSpec, nic_env
from kvbench.core.scenario.scenario import parse_scenario
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import placed_specs
from kvbench.planning.scenario_files import registry

HOSTS: dict[str, dict[str, Any]] = {
    "a": {"address": "10.0.0.1", "nics": ["mlx5_0", "mlx5_1"], "devices": [0, 1, 2, 3]},
    "b": {"address": "10.0.0.2", "nics": ["rdmap79s0"], "devices": [4, 5, 6, 7]},
    "c": {"address": "10.0.0.3", "nics": ["erdma_0"], "devices": [0, 1, 2, 3, 4, 5, 6, 7]},
}
for _name, _host in HOSTS.items():
    _host["env"] = {"OF": _name}
WHERE = {"prefill-0": ("a", 2), "prefill-0-node1": ("b", 2), "decode-0": ("c", 4), "decode-1": ("c", 4)}
"""Process → its host, and how many of its GPUs: TP 4, P over two hosts, two D on one."""
ADDRESSES = {"vllm": ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST"), "sglang": ("SGLANG_HOST_IP",)}
CASES = [
    *(("vllm", "0.33.0", name) for name in ("nixl", "nixl_push", "mooncake", "mooncake_store", "custom")),
    *(("vllm", "0.33.0", name) for name in ("multi", "lmcache")),
    *(("vllm", "0.13.0", name) for name in ("nixl", "mooncake", "nccl")),
    *(("sglang", "", name) for name in ("nixl", "mooncake")),
]


def placed(engine: str, version: str, connector: str) -> dict[str, ProcessSpec]:
    """Engine processes as they are launched."""
    text = {
        "version": 1,
        "model": "tiny",
        "deployment": {
            "engine": engine, "engine_options": {"model": "m", **({"version": version} if version else {})},
            "launcher": "ssh", "hosts": HOSTS, "roles": {"prefill": [["a", "b"]], "decode": "c"},
            "tensor_parallel_size": 4, "decode": 2,
        },
        "connectors": [connector],
        "workload": {"input_len": 64, "output_len": 4},
        "slo": {"ttft_ms": 100},
    }  # fmt: skip
    scenario = parse_scenario(yaml.safe_dump(text), "nodes.yaml", registry())
    specs, _ = placed_specs(scenario, plan_of(scenario).deployments[-1])
    return {spec.name: spec for spec in specs if spec.name.startswith(("prefill", "decode"))}


def problems(engine: str, specs: Mapping[str, ProcessSpec]) -> list[str]:
    """Every value that is not the process's own host's."""
    found, given = [], Counter[tuple[str, str]]()
    for name, (host, gpus) in WHERE.items():
        spec, machine = specs[name], HOSTS[host]
        env = {**nic_env(spec.nics, rdma=True), **spec.env}
        wanted = dict.fromkeys(ADDRESSES[engine], machine["address"])
        wanted |= {"OF": host, "NCCL_IB_HCA": "=" + ",".join(machine["nics"])}
        wanted["UCX_NET_DEVICES"] = ",".join(f"{nic}:1" for nic in machine["nics"])
        found += [f"{name}: {key} {env.get(key)}" for key, value in wanted.items() if env.get(key) != value]
        if (bound := spec.argv[spec.argv.index("--host") + 1]) != machine["address"] or spec.host != bound:
            found.append(f"{name}: --host {bound}, started on {spec.host}")
        visible = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if len(visible) != gpus or not set(visible) <= set(map(str, machine["devices"])):
            found.append(f"{name}: GPUs {visible}")
        given.update((host, gpu) for gpu in visible)
    return [*found, *(f"{host}: GPU {gpu} twice" for (host, gpu), count in given.items() if count > 1)]


@pytest.mark.parametrize(("engine", "version", "connector"), CASES)
def test_every_process_has_what_is_its_nodes(engine: str, version: str, connector: str) -> None:
    specs = placed(engine, version, connector)
    assert list(specs) == list(WHERE)
    assert problems(engine, specs) == []


def env(**changes: str | None) -> Callable[[ProcessSpec], ProcessSpec]:
    """A change of variables; None drops one."""
    return lambda spec: replace(
        spec, env={key: value for key, value in {**spec.env, **changes}.items() if value is not None}
    )


def bound_to(address: str) -> Callable[[ProcessSpec], ProcessSpec]:
    return lambda spec: replace(
        spec, argv=tuple(address if word == spec.host else word for word in spec.argv)
    )


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("prefill-0-node1", env(VLLM_HOST_IP="10.0.0.1"), ["VLLM_HOST_IP"]),
        ("prefill-0-node1", env(VLLM_HOST_IP=None), ["VLLM_HOST_IP"]),
        ("decode-0", env(VLLM_NIXL_SIDE_CHANNEL_HOST="localhost"), ["SIDE_CHANNEL_HOST"]),
        ("prefill-0-node1", bound_to("10.0.0.1"), ["--host"]),
        ("prefill-0-node1", lambda spec: replace(spec, host="10.0.0.1"), ["--host"]),
        ("prefill-0-node1", env(OF="a"), ["OF"]),
        ("prefill-0-node1", lambda spec: replace(spec, nics=("mlx5_0", "mlx5_1")), ["IB_HCA", "UCX_NET"]),
        ("prefill-0", lambda spec: replace(spec, nics=("mlx5_0",)), ["IB_HCA", "UCX_NET"]),
        ("decode-1", lambda spec: replace(spec, nics=()), ["IB_HCA", "UCX_NET"]),
        ("decode-0", env(UCX_NET_DEVICES="mlx5_0:1"), ["UCX_NET"]),
        ("prefill-0-node1", env(CUDA_VISIBLE_DEVICES="0,1"), ["GPUs"]),
        ("prefill-0", env(CUDA_VISIBLE_DEVICES="0,1,2,3"), ["GPUs"]),
        ("prefill-0", env(CUDA_VISIBLE_DEVICES=None), ["GPUs"]),
        ("decode-1", env(CUDA_VISIBLE_DEVICES="3,4,5,6"), ["c: GPU 3 twice"]),
    ],
)
def test_each_mistake_is_seen(
    name: str, wrong: Callable[[ProcessSpec], ProcessSpec], expected: list[str]
) -> None:
    specs = placed("vllm", "0.33.0", "nixl")
    found = problems("vllm", {**specs, name: wrong(specs[name])})
    assert len(found) == len(expected), found
    assert all(word in text for word, text in zip(sorted(expected), sorted(found), strict=True)), found
