"""Connector profiles by engine version: configuration against recorded schemas, and the dialects."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench import connectors
from kvbench.connectors.base import Connector, Neighbours, PrefillPeer, Role, Seat
from kvbench.connectors.mooncake import IN_VLLM
from kvbench.core.physics.model_shapes import MODELS
from kvbench.core.plan.engine_versions import (
    NEWEST_KNOWN,
    Releases,
    dotted,
    is_newer_than_known,
    release,
    version_in,
)
from kvbench.engines.base import Instance
from kvbench.engines.vllm import ENGINE, VllmOptions
from kvbench.errors import InputError

# Fields of KVTransferConfig, as the class has them in the source of each release.
_OLD = {"kv_connector", "kv_buffer_device", "kv_buffer_size", "kv_role", "kv_rank", "kv_parallel_size"}
_OLD |= {"kv_ip", "kv_port", "kv_connector_extra_config"}
_V1 = _OLD | {"engine_id", "kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy"}
SCHEMA = {
    "0.8.5": _OLD,
    "0.13.0": _V1,
    "0.14.1": _V1,
    "0.16.0": _V1,
    "0.17.1": _V1,
    "0.23.0": _V1,
    "0.24.0": _V1,
    "0.28.0": _V1,
    "0.32.0": _V1 - {"kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"},
}
# What the factory of each release has registered, of the classes that kvbench names.
REGISTERED = {
    "0.8.5": {"MooncakeConnector"},
    "0.13.0": {
        "MooncakeConnector",
        "NixlConnector",
        "P2pNcclConnector",
        "LMCacheConnectorV1",
        "MultiConnector",
    }
    | {"OffloadingConnector", "DecodeBenchConnector", "ExampleConnector"},
}
REGISTERED["0.14.1"] = REGISTERED["0.16.0"] = REGISTERED["0.17.1"] = REGISTERED["0.13.0"]
REGISTERED["0.23.0"] = REGISTERED["0.17.1"] | {"MooncakeStoreConnector"}
REGISTERED["0.24.0"] = (REGISTERED["0.23.0"] - {"P2pNcclConnector"}) | {"NixlPushConnector"}
REGISTERED["0.28.0"] = REGISTERED["0.32.0"] = REGISTERED["0.24.0"]
# Keys of kv_connector_extra_config that each class reads.
_MOONCAKE_16 = {"num_workers", "mooncake_protocol"}
_NIXL = {"backends", "num_threads", "enforce_handshake_compat"}
EXTRA = {
    ("mooncake", "0.16.0"): _MOONCAKE_16,
    ("mooncake", "0.24.0"): _MOONCAKE_16,
    ("mooncake", "0.32.0"): _MOONCAKE_16 | {"device_name", "bootstrap_server_address"},
    ("nixl", "0.13.0"): _NIXL,
    ("nixl", "0.32.0"): _NIXL | {"kv_lease_duration"},
    ("nixl_push", "0.32.0"): _NIXL | {"push_registration_timeout"},
    ("nccl", "0.13.0"): {"proxy_ip", "proxy_port", "http_port", "send_type", "mem_pool_size_gb"}
    | {"nccl_num_channels"},
    ("offloading", "0.13.0"): {"num_cpu_blocks", "block_size", "spec_name", "eviction_policy"},
    ("offloading", "0.32.0"): {"cpu_bytes_to_use", "block_size", "spec_name", "eviction_policy"},
    ("decode_bench", "0.32.0"): {"fill_mean", "fill_std", "startup_fill"},
    ("example", "0.32.0"): {"shared_storage_path"},
}

NEIGHBOURS = Neighbours(("10.0.0.1:13003",), ("10.0.0.2:13053",), ("10.0.0.1:50051",))
ROLES: tuple[Role, ...] = ("prefill", "decode")
BODY = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {"a": 1}}
PEER = PrefillPeer("http://10.0.0.1:8100", "http://10.0.0.1:8998", "engine-p", "10.0.0.1:14579")


def seat(role: Role = "prefill", **changes: Any) -> Seat:
    return Seat(**({"role": role, "rank": 0, "host": "10.0.0.1", "side_port": 8998} | changes))


def options_for(connector: Connector, **given: Any) -> Any:
    if connector.name == "mooncake":
        given = {"metadata_server": "etcd://10.0.0.1:2379", **given}
    return connector.options_model(**given)


def config_of(name: str, version: str, role: Role = "prefill", **given: Any) -> dict[str, Any]:
    """What an engine of that version would get on its command line."""
    known = connectors.get(name)
    options = options_for(known, **given)
    engine_role: Role = role if known.profile(version, options).disaggregated else "aggregated"
    instance = Instance(
        "x-0", engine_role, 0, "10.0.0.1", 8100, 8998, "engine-x", MODELS["tiny"], "m", 1, 100, NEIGHBOURS
    )
    config = ENGINE.kv_transfer_config(
        instance, known.profile(version, options), options, VllmOptions(model="m", version=version)
    )
    assert config is not None
    return config


def supported(name: str, version: str) -> bool:
    try:
        connectors.get(name).profile(version)
    except InputError:
        return False
    return name != "aggregated"


PAIRS = [(name, version) for name in connectors.names() for version in SCHEMA if supported(name, version)]


@pytest.mark.parametrize(("name", "version"), PAIRS)
def test_configuration_fits_the_schema_of_its_version(name: str, version: str) -> None:
    for role in ROLES:
        config = config_of(name, version, role)
        assert set(config) <= SCHEMA[version]
        if name != "custom":
            assert config["kv_connector"] in REGISTERED[version]
        known = EXTRA.get((name, version))
        assert known is None or set(config["kv_connector_extra_config"]) <= known
        assert ("kv_load_failure_policy" in config) == ("kv_load_failure_policy" in SCHEMA[version])
        assert config.get("kv_load_failure_policy", "fail") == "fail"


def test_every_release_has_its_connectors() -> None:
    for version, registered in REGISTERED.items():
        ours = {connectors.get(name).profile(version).kv_connector for name, at in PAIRS if at == version}
        assert registered <= ours | {"SharedStorageConnector"}


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("nccl", "0.24.0", "removed in 0.24"),
        ("nccl", "0.32.0+cpu", "removed in 0.24"),
        ("nixl_push", "0.23.0", "0.24 and newer"),
        ("mooncake", "0.12.0", "again from 0.13"),
        ("mooncake_store", "0.17.1", "from vLLM 0.21"),
        ("tcp", "0.32.0", "emulated engine only"),
        ("multi", "sglang", "mooncake and nixl"),
    ],
)
def test_a_connector_that_an_engine_lacks_is_named_with_its_history(
    name: str, version: str, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        connectors.get(name).profile(version)
    assert said in f"{caught.value.message} {caught.value.hint}"


def test_an_unknown_newer_version_takes_the_newest_profile() -> None:
    assert type(connectors.get("mooncake").profile("0.99.1")) is type(connectors.get("mooncake"))
    assert is_newer_than_known("0.99.1")
    assert not is_newer_than_known(f"{dotted(NEWEST_KNOWN)}.7")
    assert not is_newer_than_known("sglang")


# ---------------------------------------------------------------- mooncake


@pytest.mark.parametrize("version", ["0.13.0", "0.15.1"])
def test_mooncake_over_zmq_is_sequential_and_takes_a_port_for_each_rank(version: str) -> None:
    profile = connectors.get("mooncake").profile(version)
    assert profile.dispatch == "sequential"
    assert (profile.side_ports("prefill", 8), profile.side_ports("decode", 8)) == (8, 0)
    first = profile.prefill_request(BODY, "id-1", PEER)
    assert first["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 8998}
    assert not profile.missing_in_prefill_response({"kv_transfer_params": params})
    assert profile.decode_request(BODY, {"kv_transfer_params": params}, "id-1", PEER) == {
        **BODY,
        "kv_transfer_params": params,
    }
    assert profile.missing_in_prefill_response({"kv_transfer_params": None}) == ("kv_transfer_params",)
    assert profile.backend_request_id("id-1", PEER, "") == "id-1"  # what joins the two sides


@pytest.mark.parametrize("version", ["0.16.0", "0.23.0", "0.24.0", "0.33.0"])
def test_mooncake_over_a_bootstrap_server_is_concurrent(version: str) -> None:
    profile = connectors.get("mooncake").profile(version)
    assert profile.dispatch == "concurrent"
    assert profile.needs_bootstrap
    assert profile.side_ports("prefill", 8) == 1
    params = profile.decode_request(BODY, None, "id-1", PEER)["kv_transfer_params"]
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "id-1",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "engine-p",
    }


@pytest.mark.parametrize("version", ["0.13.0", "0.24.0"])
def test_a_device_list_comes_through_a_class_of_our_own_where_vllm_has_no_key(version: str) -> None:
    config = config_of("mooncake", version, protocol="rdma", device_name="mlx5_0,mlx5_1")
    assert config["kv_connector"] == "KvbenchMooncakeConnector"
    assert config["kv_connector_extra_config"]["rdma_devices"] == "mlx5_0,mlx5_1"
    assert (IN_VLLM / f"{config['kv_connector_module_path']}.py").is_file()
    profile = connectors.get("mooncake").profile(version)
    options = options_for(profile, protocol="rdma", device_name="mlx5_0")
    assert profile.env("decode", options, None, "10.0.0.2")["PYTHONPATH"] == str(IN_VLLM)
    assert "PYTHONPATH" not in profile.env("decode", options_for(profile), None, "10.0.0.2")


def test_a_device_list_is_a_key_of_vllm_from_0_25_on() -> None:
    config = config_of("mooncake", "0.25.1", protocol="rdma", device_name="mlx5_0")
    assert config["kv_connector"] == "MooncakeConnector"
    assert config["kv_connector_extra_config"]["device_name"] == "mlx5_0"


@pytest.mark.parametrize("names", ["mlx5_0, mlx5_1", "mlx5_0,", ",mlx5_0", " "])
def test_device_lists_are_separated_by_commas_alone(names: str) -> None:
    with pytest.raises(ValidationError, match="commas alone"):
        options_for(connectors.get("mooncake"), device_name=names)


# The names of vLLM's modules, with just enough in them to see what the class does to the engine.
_STAND_IN = """
class TransferEngine:
    def initialize(self, hostname, metadata, protocol, device_name):
        print("initialize", protocol, device_name)
        return 0
class MooncakeConnector:
    def __init__(self, vllm_config, role, kv_cache_config=None):
        TransferEngine().initialize("h", "P2PHANDSHAKE", "rdma", "")
"""
_USE = """
import kvbench_vllm_mooncake as ours, sys
assert not any(name.startswith("vllm") for name in sys.modules)
class Transfer:
    def get_from_extra_config(self, key, default): return {"rdma_devices": "mlx5_3"}.get(key, default)
class Config: kv_transfer_config = Transfer()
made = ours.KvbenchMooncakeConnector
assert made is ours.KvbenchMooncakeConnector and made.__name__ == "KvbenchMooncakeConnector"
made(Config(), "worker", None)
made.__mro__[1](Config(), "worker")
"""


@pytest.mark.parametrize("folder", ["", "mooncake"])
def test_the_class_that_vllm_loads_puts_the_devices_in_and_nothing_else(tmp_path: Path, folder: str) -> None:
    package = tmp_path / "vllm/distributed/kv_transfer/kv_connector/v1" / folder
    package.mkdir(parents=True)
    (package / "mooncake_connector.py").write_text(_STAND_IN)
    done = subprocess.run(
        [sys.executable, "-c", _USE],
        env={"PYTHONPATH": f"{IN_VLLM}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["initialize rdma mlx5_3", "initialize rdma ", ""]


# ---------------------------------------------------------------- mooncake in V0


def v0_file(**given: Any) -> dict[str, Any]:
    profile = connectors.get("mooncake").profile("0.8.5")
    return profile.files(options_for(profile, **given), seat(neighbours=NEIGHBOURS))["MOONCAKE_CONFIG_PATH"]


def test_v0_file_and_configuration() -> None:
    assert v0_file() == {
        "prefill_url": "10.0.0.1:13003",
        "decode_url": "10.0.0.2:13053",
        "metadata_server": "etcd://10.0.0.1:2379",
        "protocol": "tcp",
        "device_name": "",
    }
    for rank, role in enumerate(ROLES):
        assert config_of("mooncake", "0.6.4.post1", role) == {
            "kv_connector": "MooncakeConnector",
            "kv_role": ("kv_producer", "kv_consumer")[rank],
            "kv_rank": rank,
            "kv_parallel_size": 2,
            "kv_buffer_size": 2e9,
        }


def test_v0_ports_stay_fifty_apart() -> None:
    profile = connectors.get("mooncake").profile("0.8.4")
    assert profile.side_ports("prefill", 8) == profile.side_ports("decode", 8) == 50
    with pytest.raises(InputError, match="at most 20 ranks"):
        profile.side_ports("prefill", 32)


@pytest.mark.parametrize("server", ["redis://10.0.0.1:6379", "http://10.0.0.1:8080/metadata"])
def test_v0_takes_any_metadata_server_with_its_kind(server: str) -> None:
    assert v0_file(metadata_server=server)["metadata_server"] == server


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metadata_server": ""}, "needs a metadata server"),
        ({"metadata_server": "10.0.0.1:2379"}, "needs a metadata server"),
        ({"protocol": "rdma"}, "device_name with protocol rdma"),
    ],
)
def test_v0_refuses_what_cannot_run(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        v0_file(**given)


def test_v0_joins_one_p_and_one_d() -> None:
    profile = connectors.get("mooncake").profile("0.8.5")
    many = seat(neighbours=Neighbours(("a:1", "b:1"), ("c:1",)))
    with pytest.raises(InputError, match="one P and one D"):
        profile.files(options_for(profile), many)


def test_v0_requests_are_plain() -> None:
    profile = connectors.get("mooncake").profile("0.8.5")
    assert profile.dispatch == "sequential"
    assert "kv_transfer_params" not in profile.prefill_request(BODY, "id-1", PEER)
    assert profile.decode_request(BODY, {}, "id-1", PEER) == BODY


# ---------------------------------------------------------------- nccl

# The patterns by which P2pNcclConnector finds the other side in a request id.
_TO_DECODE, _TO_PREFILL = r"___decode_addr_(.*):(\d+)", r"___prefill_addr_(.*):(\d+)___"


@given(st.text("abcdef0123456789-:_.", min_size=1, max_size=40))
def test_nccl_addresses_are_found_in_the_request_id(own: str) -> None:
    made = connectors.get("nccl").profile("0.13.0").backend_request_id(own, PEER, "10.0.0.2:22001")
    for text in (made, f"cmpl-{made}-0"):
        to_decode, to_prefill = re.search(_TO_DECODE, text), re.search(_TO_PREFILL, text)
        assert to_decode is not None
        assert to_decode.groups() == ("10.0.0.2", "22001")
        assert to_prefill is not None
        assert to_prefill.groups() == ("10.0.0.1", "14579")


def test_nccl_binds_a_port_for_each_rank_on_both_sides() -> None:
    profile = connectors.get("nccl").profile("0.13.0")
    assert profile.side_ports("prefill", 8) == profile.side_ports("decode", 8) == 8
    assert config_of("nccl", "0.13.0")["kv_port"] == 8998
    assert "proxy_ip" not in config_of("nccl", "0.13.0")["kv_connector_extra_config"]


# ---------------------------------------------------------------- the others


def test_store_starts_its_master_and_tells_the_engines_where() -> None:
    connector = connectors.get("mooncake_store")
    options = connector.options_model()
    (master,) = connector.services(options, "10.0.0.1", (50051, 9003))
    words = " ".join(master.argv)
    assert words.startswith("mooncake_master ")
    assert "--rpc_address 10.0.0.1 --rpc_port 50051" in words
    assert master.ready_url == "http://10.0.0.1:9003/health"
    file = connector.files(options, seat(neighbours=NEIGHBOURS))["MOONCAKE_CONFIG_PATH"]
    assert file["master_server_address"] == "10.0.0.1:50051"
    assert file["metadata_server"] == "P2PHANDSHAKE"
    assert connector.env("decode", options, None, "10.0.0.1")["PYTHONHASHSEED"] == "0"


def test_lmcache_finds_its_server_or_the_users() -> None:
    connector = connectors.get("lmcache")
    here = seat(neighbours=NEIGHBOURS)
    assert connector.seat_env(connector.options_model(), here)["LMCACHE_REMOTE_URL"] == "lm://10.0.0.1:50051"
    own = connector.options_model(remote_url="redis://10.0.0.9:6379")
    assert connector.seat_env(own, here)["LMCACHE_REMOTE_URL"] == "redis://10.0.0.9:6379"
    assert connector.services(own, "10.0.0.1", (50051,)) == []


def test_multi_joins_the_first_ones_handshake_with_the_others_configurations() -> None:
    connector = connectors.get("multi")
    options = connector.options_model(first="mooncake", first_options={"num_workers": 3})
    profile = connector.profile("0.32.0", options)
    assert (profile.dispatch, profile.needs_bootstrap) == ("concurrent", True)
    assert profile.side_ports("decode", 1) == 0
    config = config_of("multi", "0.32.0", first="mooncake", first_options={"num_workers": 3})
    first, second = config["kv_connector_extra_config"]["connectors"]
    assert (first["kv_connector"], first["kv_role"]) == ("MooncakeConnector", "kv_producer")
    assert first["kv_connector_extra_config"]["num_workers"] == 3
    assert (second["kv_connector"], second["kv_role"]) == ("OffloadingConnector", "kv_both")
    assert "engine_id" not in first
    with pytest.raises(ValidationError, match="first_options of nixl: workers"):
        connector.options_model(first_options={"workers": 1})
    with pytest.raises(InputError, match="NixlPushConnector"):
        connector.profile("0.13.0", connector.options_model(first="nixl_push"))


def test_custom_takes_any_class_and_handshake() -> None:
    connector = connectors.get("custom")
    given: dict[str, Any] = {
        "kv_connector": "Mine",
        "kv_connector_module_path": "my.module",
        "extra_config": {"a": 1},
    }
    config = config_of("custom", "0.32.0", handshake="answer", **given)
    assert config["kv_connector"] == "Mine"
    assert config["kv_connector_module_path"] == "my.module"
    assert config["kv_connector_extra_config"] == {"a": 1}
    modes = [
        connector.profile("0.32.0", connector.options_model(handshake=kind, **given)).dispatch
        for kind in ("plain", "answer", "none")
    ]
    assert modes == ["sequential", "sequential", "none"]
    env = connector.env("prefill", connector.options_model(port_env="MY_PORT"), 7000, "10.0.0.1")
    assert env["MY_PORT"] == "7000"


def test_lone_servers_are_no_pairs() -> None:
    for name in ("offloading", "decode_bench"):
        connector = connectors.get(name)
        assert not connector.disaggregated
        assert connector.decode_request(BODY, None, "id-1", PEER) == BODY
        assert config_of(name, "0.32.0")["kv_role"] == "kv_both"
    assert not connectors.get("decode_bench").true_outputs


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_sglang_joins_its_requests_in_a_room(name: str) -> None:
    profile = connectors.get(name).profile("sglang-0.5.23")
    assert profile.dispatch == "concurrent"
    assert not profile.needs_bootstrap
    first = profile.prefill_request(BODY, "id-1", PEER)
    second = profile.decode_request(BODY, None, "id-1", PEER)
    room = {key: value for key, value in second.items() if key.startswith("bootstrap_")}
    assert room.items() <= first.items()
    assert (room["bootstrap_host"], room["bootstrap_port"]) == ("10.0.0.1", 14579)
    assert 0 <= room["bootstrap_room"] < 2**63
    assert profile.decode_request(BODY, None, "id-2", PEER)["bootstrap_room"] != room["bootstrap_room"]
    assert first["stream"] is False
    assert "stream_options" not in first
    assert profile.kv_transfer_config("prefill", "e", profile.options_model()) is None


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.13.0", (0, 13, 0)),
        ("v0.6.4.post1/main", (0, 6, 4)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.33.1rc2.dev7+g1234567", (0, 33, 1)),
    ],
)
def test_versions_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


@pytest.mark.parametrize("text", ["", "main", "13", "version one"])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(InputError, match="is no version"):
        release(text)


def test_the_version_is_found_below_what_a_start_says() -> None:
    assert version_in("WARNING 11-21 [x.py:7] triton 3.4.0 is missing\n0.32.0+cpu\n") == "0.32.0+cpu"
    assert version_in("vLLM 0.9.1") == "0.9.1"
    assert version_in("Traceback ...\nImportError: libcudart.so.13") == ""


def test_ranges_do_not_overlap() -> None:
    for name in connectors.names():
        connector = connectors.get(name)
        profiles = [connector.releases, *(each.releases for each in connector.older)]
        for later, earlier in pairwise(profiles):
            assert earlier.until is not None
            assert earlier.until <= later.first
    assert (0, 23, 9) in Releases((0, 10), (0, 24))
    assert (0, 24) not in Releases((0, 10), (0, 24))
    assert "aggregated" in get_args(Role)
