"""Connector profiles by engine version: configuration against recorded schemas, and the dialects."""

import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench import connectors
from kvbench.connectors.base import Connector, Neighbours, PrefillPeer, Role, Seat
from kvbench.connectors.mooncake import IN_VLLM
from kvbench.core.engine_versions import (
    NEWEST_KNOWN,
    Releases,
    dotted,
    is_newer_than_known,
    release,
    version_in,
)
from kvbench.core.physics import MODELS
from kvbench.core.ranks import Ranks
from kvbench.engines.base import Instance
from kvbench.engines.vllm import ENGINE, VllmOptions
from kvbench.errors import InputError

TABLE = yaml.safe_load((Path(__file__).parents[1] / "recorded" / "vllm" / "connectors.yaml").read_text())
"""What the sources of every release say; `make vllm-connectors` makes it anew."""
RELEASES: list[str] = TABLE["releases"].split(", ")
FIRST_V1 = (0, 9)
"""kvbench has profiles for classes of the V1 engine from here on."""
V0_SPOKEN = {"mooncake"}
"""Connectors whose class of the V0 engine kvbench starts, too."""


def there(facts: Mapping[str, str], version: str) -> str | None:
    """The one of several facts (a module, a default) that holds in a release; None if none does."""
    for fact, spans in facts.items():
        for span in spans.split(", "):
            first, _, last = span.partition(" to ")
            if release(first) <= release(version) <= release(last or first):
                return fact
    return None


def having(facts: Mapping[str, Mapping[str, str]], version: str) -> set[str]:
    return {name for name, fact in facts.items() if there(fact, version) is not None}


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
        "x-0", engine_role, 0, "10.0.0.1", 8100, 8998, "engine-x", MODELS["tiny"], "m", Ranks(), 100,
        NEIGHBOURS,
    )  # fmt: skip
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


PAIRS = [(name, version) for name in connectors.names() for version in RELEASES if supported(name, version)]


@pytest.mark.parametrize(("name", "version"), PAIRS)
def test_configuration_fits_the_schema_of_its_version(name: str, version: str) -> None:
    for role in ROLES:
        config = config_of(name, version, role)
        fields = having(TABLE["transfer_config"], version)
        assert set(config) <= fields
        assert ("kv_load_failure_policy" in config) == ("kv_load_failure_policy" in fields)
        assert config.get("kv_load_failure_policy", "fail") == "fail"
        if name != "custom":
            known = having(TABLE["extra_config"].get(config["kv_connector"], {}), version)
            assert set(config.get("kv_connector_extra_config", {})) <= known


def test_known_keys_are_those_of_each_releases_source() -> None:
    checked = 0
    for name in ("nixl", "nixl_push", "mooncake", "mooncake_store", "nccl", "lmcache", "offloading"):
        connector = connectors.get(name)
        for key, known in connector.options_model.keys.items():
            facts = TABLE["extra_config"][connector.kv_connector].get(key) or TABLE["transfer_config"][key]
            read = {
                release
                for release in RELEASES
                if there(facts, release) is not None and supported(name, release)
            }
            declared = {tag for tag in RELEASES if release(tag) in known.releases and supported(name, tag)}
            if key == "enable_cross_layers_blocks":
                declared -= {"0.29.0"}  # not in that wheel
            assert read == declared, (name, key, read ^ declared)
            checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("nixl", {"kv_lease_duration": 60, "enforce_handshake_compat": False, "of_my_own": [1]}),
        ("nixl_push", {"push_registration_timeout": 5}),
        ("mooncake", {"bootstrap_server_address": "10.0.0.9:8998"}),
        ("mooncake_store", {"load_async": False}),
        ("offloading", {"eviction_policy": "arc"}),
        ("custom", {"a": 1}),
    ],
)
def test_a_connectors_own_keys_go_through(name: str, given: dict[str, Any]) -> None:
    plain = config_of(name, "0.33.0")["kv_connector_extra_config"]
    config = config_of(name, "0.33.0", extra_config=given)["kv_connector_extra_config"]
    assert config == {**plain, **given}


def test_keys_are_typed_and_noted_by_version() -> None:
    permuted = config_of("nixl", "0.33.0", extra_config={"enable_permute_local_kv": True})
    assert permuted["enable_permute_local_kv"] is True
    options = connectors.get("nixl").options_model(extra_config={"kv_lease_duration": 60, "mine": 1})
    assert list(options.key_notes("0.13.0")) == [
        "extra_config: kv_lease_duration is a key of vLLM 0.22 and newer, and this is 0.13.0",
        "extra_config: kvbench does not know the key mine; it is passed on unchanged",
    ]
    assert len(list(options.key_notes("0.33.0"))) == 1
    for name, key, value, words in (
        ("nixl", "kv_lease_duration", "60", "must be float or int, not '60'"),
        ("nixl", "kv_recompute_threshold", True, "must be int, not True"),
        ("nixl", "num_threads", 2, "follows from the option num_threads"),
        ("mooncake", "mooncake_protocol", "tcp", "follows from the option protocol"),
    ):
        with pytest.raises(ValidationError, match=words):
            connectors.get(name).options_model(extra_config={key: value})


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_has_the_connectors_that_its_factory_registers(version: str) -> None:
    for name in set(connectors.names()) - {"custom", "aggregated", "tcp"}:
        known = connectors.get(name)
        module = {
            profile.kv_connector: there(TABLE["registered"].get(profile.kv_connector, {}), version)
            for profile in (type(known), *known.older)
        }
        in_v1 = (
            any(path and path.startswith("v1.") for path in module.values()) and release(version) >= FIRST_V1
        )
        in_v0 = any(path and not path.startswith("v1.") for path in module.values()) and name in V0_SPOKEN
        assert supported(name, version) == (in_v1 or in_v0), (name, module)
        if supported(name, version):
            profile = known.profile(version)
            assert profile.v0_engine == (not (module[profile.kv_connector] or "").startswith("v1."))


def test_the_newest_known_release_is_the_tables_newest() -> None:
    assert release(RELEASES[-1])[:2] == NEWEST_KNOWN


def test_defaults_that_profiles_count_on() -> None:
    """What kvbench leaves out, or says only from some release on, since vLLM's own is what is wanted."""
    keys = TABLE["extra_config"]
    assert there(keys["NixlConnector"]["num_threads"], "0.33.0") == "4"
    assert there(keys["MooncakeConnector"]["num_workers"], "0.13.0") == "10"
    assert there(keys["MooncakeConnector"]["mooncake_protocol"], "0.33.0") == "'rdma'"
    assert there(keys["P2pNcclConnector"]["send_type"], "0.9.2") == "'PUT'"
    assert there(keys["P2pNcclConnector"]["send_type"], "0.10.0") == "'PUT_ASYNC'"
    # Without a default it is demanded.
    assert there(keys["P2pNcclConnector"]["http_port"], "0.11.0") == "(none)"
    assert there(keys["P2pNcclConnector"]["http_port"], "0.11.1") == "None"
    # NIXL's connector refuses CPUs with "cuda".
    assert there(TABLE["transfer_config"]["kv_buffer_device"], "0.17.1") == "'cuda'"


def test_on_cpus_the_buffers_are_in_host_memory_whatever_the_releases_default() -> None:
    assert config_of("nixl", "0.13.0+cpu")["kv_buffer_device"] == "cpu"
    assert "kv_buffer_device" not in config_of("nixl", "0.13.0")


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("nccl", "0.24.0", "removed in 0.24"),
        ("nccl", "0.32.0+cpu", "removed in 0.24"),
        ("nixl_push", "0.23.0", "0.24 and newer"),
        ("nccl", "0.9.1", "PyNcclConnector, up to 0.10.0"),
        ("mooncake", "0.10.1", "up to 0.10.0"),
        ("mooncake", "0.12.0", "again from 0.13"),
        ("mooncake_store", "0.10.0", "(V0 engine)"),
        ("mooncake_store", "0.17.1", "from vLLM 0.21"),
        ("tcp", "0.32.0", "emulated engine only"),
        ("multi", "sglang", "mooncake and nixl"),
    ],
)
def test_a_connector_that_an_engine_lacks_is_named_with_its_history(
    name: str, version: str, expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        connectors.get(name).profile(version)
    assert expected in f"{caught.value.message} {caught.value.hint}"


def test_an_unknown_newer_version_takes_the_newest_profile() -> None:
    assert type(connectors.get("mooncake").profile("0.99.1")) is type(connectors.get("mooncake"))
    assert is_newer_than_known("0.99.1")
    assert not is_newer_than_known(f"{dotted(NEWEST_KNOWN)}.7")
    assert not is_newer_than_known("sglang")


# Mooncake
@pytest.mark.parametrize("version", ["0.13.0", "0.15.1"])
def test_mooncake_over_zmq_is_sequential_and_takes_a_port_for_each_rank(version: str) -> None:
    profile = connectors.get("mooncake").profile(version)
    assert profile.dispatch == "sequential"
    assert (profile.side_ports("prefill", Ranks(8)), profile.side_ports("decode", Ranks(8))) == (8, 0)
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
    assert profile.side_ports("prefill", Ranks(8)) == 1
    assert profile.decode_request(BODY, None, "id-1", PEER)["kv_transfer_params"] == {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "id-1",
        "remote_bootstrap_addr": "http://10.0.0.1:8998", "remote_engine_id": "engine-p",
    }  # fmt: skip


@pytest.mark.parametrize("version", ["0.13.0", "0.24.0"])
def test_a_device_list_comes_through_a_class_of_our_own_where_vllm_has_no_key(version: str) -> None:
    config = config_of("mooncake", version, protocol="rdma", device_name="mlx5_0,mlx5_1")
    assert config["kv_connector"] == "KvbenchMooncakeConnector"
    assert config["kv_connector_extra_config"]["rdma_devices"] == "mlx5_0,mlx5_1"
    assert (IN_VLLM / f"{config['kv_connector_module_path']}.py").is_file()
    profile = connectors.get("mooncake").profile(version)
    options = options_for(profile, protocol="rdma", device_name="mlx5_0")
    assert profile.env("decode", options, None)["PYTHONPATH"] == str(IN_VLLM)
    assert "PYTHONPATH" not in profile.env("decode", options_for(profile), None)


def test_a_device_list_is_a_key_of_vllm_from_0_25_on() -> None:
    config = config_of("mooncake", "0.25.1", protocol="rdma", device_name="mlx5_0")
    assert config["kv_connector"] == "MooncakeConnector"
    assert config["kv_connector_extra_config"]["device_name"] == "mlx5_0"


@pytest.mark.parametrize("names", ["mlx5_0, mlx5_1", "mlx5_0,", ",mlx5_0", " "])
def test_device_lists_are_separated_by_commas_alone(names: str) -> None:
    with pytest.raises(ValidationError, match="commas only"):
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
        [sys.executable, "-c", _USE], env={"PYTHONPATH": f"{IN_VLLM}:{tmp_path}"}, capture_output=True,
        text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["initialize rdma mlx5_3", "initialize rdma ", ""]


# Mooncake in V0
def v0_file(**given: Any) -> dict[str, Any]:
    profile = connectors.get("mooncake").profile("0.8.5")
    return profile.files(options_for(profile, **given), seat(neighbours=NEIGHBOURS))["MOONCAKE_CONFIG_PATH"]


def test_v0_file_and_configuration() -> None:
    assert v0_file() == {
        "prefill_url": "10.0.0.1:13003", "decode_url": "10.0.0.2:13053",
        "metadata_server": "etcd://10.0.0.1:2379", "protocol": "tcp", "device_name": "",
    }  # fmt: skip
    for rank, role in enumerate(ROLES):
        assert config_of("mooncake", "0.6.4.post1", role) == {
            "kv_connector": "MooncakeConnector", "kv_role": ("kv_producer", "kv_consumer")[rank],
            "kv_rank": rank, "kv_parallel_size": 2, "kv_buffer_size": 2e9,
        }  # fmt: skip


def test_v0_ports_stay_fifty_apart() -> None:
    profile = connectors.get("mooncake").profile("0.8.4")
    assert profile.side_ports("prefill", Ranks(8)) == profile.side_ports("decode", Ranks(8)) == 50
    with pytest.raises(InputError, match="at most 20 ranks"):
        profile.side_ports("prefill", Ranks(32))


@pytest.mark.parametrize(
    "server", ["redis://10.0.0.1:6379", "http://10.0.0.1:8080/metadata", "192.168.0.139:2379"]
)
def test_v0_takes_any_metadata_server_with_its_kind(server: str) -> None:
    assert v0_file(metadata_server=server)["metadata_server"] == server


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metadata_server": ""}, "needs a metadata server"),
        ({"metadata_server": "10.0.0.1"}, "needs a metadata server"),
        ({"metadata_server": "ftp://10.0.0.1:2379"}, "needs a metadata server"),
        ({"protocol": "rdma"}, "device_name with protocol rdma"),
    ],
)
def test_v0_refuses_what_cannot_run(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
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
def test_nccl_addresses_are_found_in_the_request_id(address: str) -> None:
    made = connectors.get("nccl").profile("0.13.0").backend_request_id(address, PEER, "10.0.0.2:22001")
    for text in (made, f"cmpl-{made}-0"):
        to_decode, to_prefill = re.search(_TO_DECODE, text), re.search(_TO_PREFILL, text)
        assert to_decode.groups() == ("10.0.0.2", "22001")
        assert to_prefill.groups() == ("10.0.0.1", "14579")


def test_nccl_binds_a_port_for_each_rank_on_both_sides() -> None:
    profile = connectors.get("nccl").profile("0.13.0")
    assert profile.side_ports("prefill", Ranks(8)) == profile.side_ports("decode", Ranks(8)) == 8
    assert config_of("nccl", "0.13.0")["kv_port"] == 8998
    assert "proxy_ip" not in config_of("nccl", "0.13.0")["kv_connector_extra_config"]


def test_nccl_starts_the_releases_that_demand_a_port_of_their_own() -> None:
    for version, demanded in {"0.9.2": True, "0.11.0": True, "0.11.1": False, "0.23.0": False}.items():
        assert ("http_port" in config_of("nccl", version)["kv_connector_extra_config"]) == demanded
    # 0.9.2 makes an int of it, later ones a float: "32.0" would end the first.
    assert config_of("nccl", "0.9.2")["kv_connector_extra_config"]["mem_pool_size_gb"] == 32.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["pins 32 GiB", "D receives into 1 GB of GPU memory", "PUT_ASYNC"]),
        ({"mem_pool_size_gb": 33, "kv_buffer_size": 5e9}, ["pins 64 GiB", "into 5 GB"]),
        ({"mem_pool_size_gb": 0.5}, ["pins 0.5 GiB"]),
        ({"send_type": "GET"}, ["P keeps KV in at most 1 GB", "drops the oldest"]),
    ],
)
def test_nccl_tells_what_memory_it_takes(given: dict[str, Any], expected: list[str]) -> None:
    connector = connectors.get("nccl")
    text = " ".join(connector.profile("0.13.0").warnings(connector.options_model(**given), {}))
    for words in expected:
        assert words in text


# Nixl
@pytest.mark.parametrize(("version", "expected"), [("0.11.0", "vLLM 0.11.1 and newer"), ("0.11.1", "")])
def test_threads_that_an_old_nixl_connector_does_not_ask_for_are_told(version: str, expected: str) -> None:
    profile = connectors.get("nixl").profile(version)
    text = " ".join(profile.warnings(profile.options_model(num_threads=2), {}))
    assert bool(text) == bool(expected)
    assert expected in text


# The others
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
    assert connector.env("decode", options, None)["PYTHONHASHSEED"] == "0"


def test_lmcache_finds_its_server_or_the_users() -> None:
    connector = connectors.get("lmcache")
    here = seat(neighbours=NEIGHBOURS)
    assert connector.seat_env(connector.options_model(), here)["LMCACHE_REMOTE_URL"] == "lm://10.0.0.1:50051"
    options = connector.options_model(remote_url="redis://10.0.0.9:6379")
    assert connector.seat_env(options, here)["LMCACHE_REMOTE_URL"] == "redis://10.0.0.9:6379"
    assert connector.services(options, "10.0.0.1", (50051,)) == []


def test_multi_joins_the_first_ones_handshake_with_the_others_configurations() -> None:
    connector = connectors.get("multi")
    options = connector.options_model(first="mooncake", first_options={"num_workers": 3})
    profile = connector.profile("0.32.0", options)
    assert (profile.dispatch, profile.needs_bootstrap) == ("concurrent", True)
    assert profile.side_ports("decode", Ranks()) == 0
    config = config_of("multi", "0.32.0", first="mooncake", first_options={"num_workers": 3})
    first, second = config["kv_connector_extra_config"]["connectors"]
    assert (first["kv_connector"], first["kv_role"]) == ("MooncakeConnector", "kv_producer")
    assert first["kv_connector_extra_config"]["num_workers"] == 3
    assert (second["kv_connector"], second["kv_role"]) == ("OffloadingConnector", "kv_both")
    assert "engine_id" not in first
    with pytest.raises(ValidationError, match="first_options of nixl: workers"):
        connector.options_model(first_options={"workers": 1})
    with pytest.raises(InputError, match="of the V0 engine, which has no MultiConnector"):
        connector.profile("0.9.2", options)
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
    assert (config["kv_connector"], config["kv_connector_module_path"]) == ("Mine", "my.module")
    assert config["kv_connector_extra_config"] == {"a": 1}
    modes = [
        connector.profile("0.32.0", connector.options_model(handshake=kind, **given)).dispatch
        for kind in ("plain", "answer", "none")
    ]
    assert modes == ["sequential", "sequential", "none"]
    env = connector.env("prefill", connector.options_model(port_env="MY_PORT"), 7000)
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


# Versions
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
    with pytest.raises(InputError, match="is not a version"):
        release(text)


def test_the_version_is_found_below_what_a_start_says() -> None:
    assert version_in("WARNING 11-21 [x.py:7] triton 3.4.0 is missing\n0.32.0+cpu\n") == "0.32.0+cpu"
    assert version_in("vLLM 0.9.1") == "0.9.1"
    assert version_in("Traceback ...\nImportError: libcudart.so.13") == ""


def test_ranges_do_not_overlap() -> None:
    for name in connectors.names():
        connector = connectors.get(name)
        profiles = [connector.releases, *(profile.releases for profile in connector.older)]
        for later, earlier in pairwise(profiles):
            assert earlier.until <= later.first
    assert (0, 23, 9) in Releases((0, 10), (0, 24))
    assert (0, 24) not in Releases((0, 10), (0, 24))
    assert "aggregated" in get_args(Role)
