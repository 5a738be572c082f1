"""The two-node scenarios render the commands of a set-up that has run on sixteen H200, flag by flag."""

import json
import re
import shlex
from typing import Any

import pytest
from commands import invoke

from kvbench.connectors.base import TELLING

NICS = ",".join(f"mlx5_{number}" for number in range(8))
P, D = "10.0.0.1", "10.0.0.2"

FLAGS = {
    "--tensor-parallel-size": "8", "--seed": "1024", "--max-model-len": "66560",
    "--max-num-batched-tokens": "65536", "--max-num-seqs": "256", "--trust-remote-code": "",
    "--kv-cache-dtype": "fp8", "--gpu-memory-utilization": "0.8",
}  # fmt: skip
"""Of both roles and all connectors."""
PLACE_FLAGS = {"--host", "--port", "--served-model-name"}
"""The set-up has them with other values: addresses and ports are the plan's, here and there."""

ENV = {
    "mooncake": {
        "NCCL_SOCKET_IFNAME": "bond0", "GLOO_SOCKET_IFNAME": "bond0", "NCCL_DEBUG": "version",
        "NCCL_IB_HCA": f"={NICS}", "NCCL_NVLS_ENABLE": "0", "NCCL_IB_GID_INDEX": "3",
        "VLLM_RPC_TIMEOUT": "600000", "VLLM_ENGINE_ITERATION_TIMEOUT_S": "600", "VLLM_PLUGINS": "",
    },
    "nixl": {"NCCL_SOCKET_IFNAME": "bond0", "GLOO_SOCKET_IFNAME": "bond0", "UCX_NET_DEVICES": "all"},
}  # fmt: skip
ENV["nccl"] = ENV["mooncake"]
GIVEN_UP = {"VLLM_RPC_TIMEOUT", "VLLM_ENGINE_ITERATION_TIMEOUT_S"}
"""In the set-up, and read by its vLLM 0.13; 0.33 does nothing with them."""
LEFT_OUT = {"MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE"}
"""In the set-up, but read by Mooncake's store only and never by this connector."""
ADDED = {
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache between trials
    "VLLM_NO_USAGE_STATS": "1",
}
ADDED_BY = {
    "mooncake": {"MC_FORCE_HCA"},  # RDMA or nothing
    "nixl": {"UCX_TLS", *TELLING},  # "all" is what UCX does without the variable
    "nccl": {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"},
}


def printed(name: str, connector: str | None = None) -> dict[str, list[str]]:
    """The words of each printed command, by process."""
    chosen = ["--connector", connector] if connector else []
    done = invoke("launch", name, *chosen, "--print").succeeded()
    found = {}
    for block in done.out.split("\n\n"):
        title = block.split("\n")[0].removeprefix("# ").split(",")[0]
        if title in ("prefill-0", "decode-0", "router"):
            command = re.sub(r"^KVBENCH_CODE=.*$", "", block.split("\nEOF\n")[-1], flags=re.MULTILINE)
            found[title] = shlex.split(command.replace("\\\n", ""), comments=True)
            if title == "router":
                found["router.json"] = [block.split("<<'EOF'\n")[1].split("\nEOF\n")[0]]
    return found


def parts(words: list[str]) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Environment, command and flags of a printed command."""
    env = {}
    while "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    first = next(index for index, word in enumerate(words) if word.startswith("--"))
    flags: dict[str, str] = {}
    for word in words[first:]:
        if word.startswith("--"):
            flags[word] = ""
        else:
            flags[list(flags)[-1]] = word
    return env, words[:first], flags


def both(name: str, connector: str | None = None) -> dict[str, Any]:
    commands = printed(name, connector)
    return {
        "prefill": parts(commands["prefill-0"]),
        "decode": parts(commands["decode-0"]),
        "router": json.loads(commands["router.json"][0]),
    }


CASES = ["mooncake-0.13", "nixl-0.13", "nccl-0.13", "mooncake", "nixl"]


@pytest.mark.parametrize("case", CASES)
def test_flags_and_environment(case: str) -> None:
    connector = case.split("-")[0]
    made = both(f"qwen3-30b-a3b-h200-{case}")
    for role, host in (("prefill", P), ("decode", D)):
        env, command, flags = made[role]
        assert command == ["vllm", "serve", "Qwen/Qwen3-30B-A3B-Instruct-2507"]
        assert (flags["--host"], flags["--served-model-name"]) == (host, "base_model")
        rest = {key: value for key, value in flags.items() if key not in PLACE_FLAGS}
        del rest["--kv-transfer-config"]
        assert rest == FLAGS
        dropped = set() if case.endswith("0.13") else GIVEN_UP
        kept = {name: value for name, value in ENV[connector].items() if name not in dropped}
        assert (kept | ADDED).items() <= env.items()
        assert not (LEFT_OUT | dropped) & set(env)
        side = {name for name in env if "SIDE_CHANNEL" in name or "BOOTSTRAP" in name}
        assert {env["VLLM_HOST_IP"], env["VLLM_NIXL_SIDE_CHANNEL_HOST"]} == {host}  # what others connect to
        more = set(env) - set(ENV[connector]) - set(ADDED) - side - {"VLLM_HOST_IP"} - {"PYTHONPATH"}
        assert more == ADDED_BY[connector]


@pytest.mark.parametrize("case", CASES)
def test_roles_and_router(case: str) -> None:
    made = both(f"qwen3-30b-a3b-h200-{case}")
    roles = {
        role: json.loads(made[role][2]["--kv-transfer-config"])["kv_role"] for role in ("prefill", "decode")
    }
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer"}
    router = made["router"]
    assert [server["url"] for server in router["prefill"]] == [f"http://{P}:{made['prefill'][2]['--port']}"]
    assert [server["url"] for server in router["decode"]] == [f"http://{D}:{made['decode'][2]['--port']}"]
    assert router["host"] == P
    assert router["version"] == ("0.13.0" if case.endswith("0.13") else "0.33.0")


def config(made: dict[str, Any], role: str) -> dict[str, Any]:
    found = json.loads(made[role][2]["--kv-transfer-config"])
    assert found.pop("kv_load_failure_policy") == "fail"  # said: 0.13 would compute lost KV anew
    found.pop("kv_role")
    found.pop("engine_id")
    assert isinstance(found, dict)
    return found


def test_mooncake_gets_the_list_of_nics_without_a_patch_of_vllm() -> None:
    """The set-up has patched vLLM to read `rdma_devices`; here a class of kvbench's own reads it."""
    made = both("qwen3-30b-a3b-h200-mooncake-0.13")
    for role in ("prefill", "decode"):
        assert config(made, role) == {
            "kv_connector": "KvbenchMooncakeConnector",
            "kv_connector_module_path": "kvbench_vllm_mooncake",
            "kv_connector_extra_config": {
                "rdma_devices": NICS,
                "num_workers": 10,  # vLLM's default
            },
        }
        assert "PYTHONPATH" in made[role][0]
    # P's side channel: one port for each of the eight ranks, none of them D's or the router's.
    first = int(made["prefill"][0]["VLLM_MOONCAKE_BOOTSTRAP_PORT"])
    taken = {int(made["decode"][2]["--port"]), int(made["prefill"][2]["--port"]), made["router"]["port"]}
    assert not taken & set(range(first, first + 8))


def test_nixl_has_the_side_channel_of_each_host() -> None:
    made = both("qwen3-30b-a3b-h200-nixl-0.13")
    for role, host in (("prefill", P), ("decode", D)):
        assert config(made, role) == {
            "kv_connector": "NixlConnector",
            # vLLM's defaults, said.
            "kv_connector_extra_config": {"backends": ["UCX"], "num_threads": 4},
        }
        env = made[role][0]
        assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["UCX_TLS"]) == (host, "all")
    assert len({made[role][0]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for role in ("prefill", "decode")}) == 2


def test_nccl_has_a_port_of_its_own_for_each_rank() -> None:
    made = both("qwen3-30b-a3b-h200-nccl-0.13")
    for role in ("prefill", "decode"):
        found = config(made, role)
        assert found.pop("kv_port") == int(made["router"][role][0]["side_address"].split(":")[1])
        assert found == {
            "kv_connector": "P2pNcclConnector",
            "kv_buffer_size": 1e9,
            "kv_connector_extra_config": {
                "send_type": "PUT_ASYNC",
                "nccl_num_channels": "8",
                "mem_pool_size_gb": 32.0,
            },
        }


def test_modern_mooncake_uses_vllms_own_keys() -> None:
    made = both("qwen3-30b-a3b-h200-mooncake")
    for role in ("prefill", "decode"):
        assert config(made, role) == {
            "kv_connector": "MooncakeConnector",
            "kv_connector_extra_config": {
                "mooncake_protocol": "rdma",
                "device_name": NICS,
                "num_workers": 10,
            },
        }
        assert "PYTHONPATH" not in made[role][0]
    port = made["prefill"][0]["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
    assert made["router"]["prefill"][0]["bootstrap_url"] == f"http://{P}:{port}"


def test_modern_nixl_pulls_and_pushes() -> None:
    for connector, name in (("nixl", "NixlConnector"), ("nixl_push", "NixlPushConnector")):
        made = both("qwen3-30b-a3b-h200-nixl", connector)
        assert config(made, "decode")["kv_connector"] == name
        assert made["router"]["connector"] == connector
