"""Connectors: configuration, environment, and the pure handshake functions."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from kvbench import connectors, transfer
from kvbench.connectors.base import TELLING, PrefillPeer, moves_gpu_memory
from kvbench.core.ranks import Ranks
from kvbench.errors import InputError

CLIENT_BODY = {
    "model": "tiny", "prompt": [1, 2, 3], "max_tokens": 16, "min_tokens": 16, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
PEER = PrefillPeer("http://127.0.0.1:1", "http://127.0.0.1:8998", "engine-1")
PAIRS = [name for name in connectors.names() if connectors.get(name).disaggregated]
WITH_PARAMETERS = ("mooncake", "multi", "nixl", "nixl_push", "tcp")
"""Pairs whose requests carry kv_transfer_params; the others find the KV by tokens or request id."""
PULLING = ("multi", "nixl", "nixl_push", "tcp")


def test_the_files_of_the_folder_are_the_connectors() -> None:
    assert {"aggregated", "mooncake", "nixl", "tcp"} <= set(connectors.names())
    assert not {"base", "plain", "pull", "rooms", "ucx", "versions", "in_vllm"} & set(connectors.names())


def test_unknown_connector_is_refused_with_what_there_is() -> None:
    with pytest.raises(InputError) as caught:
        connectors.get("moonkake")
    assert "mooncake" in caught.value.hint


@pytest.mark.parametrize("name", connectors.names())
def test_contract(name: str) -> None:
    connector = connectors.get(name)
    options = connector.options_model()
    assert (connector.name, connector.disaggregated) == (name, connector.dispatch != "none")
    config = connector.kv_transfer_config("prefill", "e", options)
    assert (config is not None) == bool(connector.kv_connector)
    assert not connector.disaggregated or config is not None
    if config is not None:
        assert config["kv_role"] == "kv_producer"
        assert json.loads(json.dumps(config)) == config
        assert connector.transfer_backend in ("", *transfer.names())
    assert connector.profile() is connector or type(connector.profile()) is type(connector)
    for role in ("prefill", "decode"):
        assert (connector.side_ports(role, Ranks(2)) > 0) == (role in connector.side_port_roles)
    assert all(isinstance(value, str) for value in connector.env("decode", options, 5600).values())


@pytest.mark.parametrize("name", PAIRS)
def test_prefill_makes_one_token_and_leaves_the_body_alone(name: str) -> None:
    body = dict(CLIENT_BODY)
    request = connectors.get(name).prefill_request(body, "request-1", PEER)
    assert body == CLIENT_BODY
    assert request["max_tokens"] == request["min_tokens"] == 1
    assert request["stream"] is False
    assert "stream_options" not in request  # servers refuse it on a request that is not streamed
    assert request["ignore_eos"] is True  # an end-of-sequence token on P would cancel the hand-off
    assert ("kv_transfer_params" in request) == (name in WITH_PARAMETERS)
    if name in WITH_PARAMETERS:
        assert request["kv_transfer_params"]["do_remote_decode"] is True
        assert request["kv_transfer_params"]["do_remote_prefill"] is False


@pytest.mark.parametrize("name", PULLING)
def test_pull_passes_the_parameters_of_prefill_on_untouched(name: str) -> None:
    connector = connectors.get(name)
    params = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "unknown_to_us": {"x": 1}}
    request = connector.decode_request(CLIENT_BODY, {"kv_transfer_params": params}, "request-1", PEER)
    assert request == {**CLIENT_BODY, "kv_transfer_params": params}


@pytest.mark.parametrize("name", PULLING)
def test_pull_names_what_prefill_did_not_answer(name: str) -> None:
    connector = connectors.get(name)
    assert connector.missing_in_prefill_response({"choices": []}) == ("kv_transfer_params",)
    params = {"remote_block_ids": [[1]], "remote_engine_id": "e", "remote_host": "h", "remote_port": None}
    assert connector.missing_in_prefill_response({"kv_transfer_params": params}) == (
        "kv_transfer_params.remote_port",
    )
    whole = {**params, "remote_port": 5600}
    assert not connector.missing_in_prefill_response({"kv_transfer_params": whole})


def test_mooncake_joins_the_two_requests_by_a_transfer_id() -> None:
    connector = connectors.get("mooncake")
    prefill = connector.prefill_request(CLIENT_BODY, "request-1", PEER)
    decode = connector.decode_request(CLIENT_BODY, None, "request-1", PEER)
    assert prefill["kv_transfer_params"]["transfer_id"] == decode["kv_transfer_params"]["transfer_id"]
    assert decode["kv_transfer_params"]["remote_bootstrap_addr"] == PEER.bootstrap_url
    assert decode["kv_transfer_params"]["remote_engine_id"] == PEER.engine_id
    assert decode["stream"] is True


@pytest.mark.parametrize(("protocol", "present", "absent"), [("tcp", "TCP", "HCA"), ("rdma", "HCA", "TCP")])
def test_mooncake_forces_its_transport_by_presence_alone(protocol: str, present: str, absent: str) -> None:
    connector = connectors.get("mooncake")
    env = connector.env("prefill", connector.options_model(protocol=protocol), 8998)
    assert env[f"MC_FORCE_{present}"] == "1"
    assert f"MC_FORCE_{absent}" not in env  # set to 0 it would count as set


@pytest.mark.parametrize("name", ["nixl", "nixl_push"])
def test_what_is_not_asked_is_left_to_nixl_and_its_engine(name: str) -> None:
    connector = connectors.get(name)
    plain = connector.options_model()
    assert set(connector.env("decode", plain, 5600)) == {"VLLM_NIXL_SIDE_CHANNEL_PORT", *TELLING}
    assert connector.extra_config("decode", plain) == {"backends": ["UCX"]}
    assert connector.requested_transport(plain) == ""
    options = connector.options_model(ucx_tls="rc,cuda", num_threads=0)
    assert connector.env("decode", options, 5600)["UCX_TLS"] == "rc,cuda"
    assert connector.extra_config("decode", options)["num_threads"] == 0


@pytest.mark.parametrize("version", ["0.13.0", "0.17.1", "0.32.0"])
def test_what_is_not_asked_is_left_to_mooncake_and_its_engine(version: str) -> None:
    """vLLM's own are rdma and 10 workers (connectors.md of its releases 0.13 and 0.33)."""
    options = connectors.get("mooncake").options_model()
    connector = connectors.get("mooncake").profile(version, options)
    assert not [name for name in connector.env("prefill", options, 8998) if name.startswith("MC_")]
    assert connector.extra_config("prefill", options) == {}
    assert connector.requested_transport(options) == ""


@pytest.mark.parametrize(
    ("name", "env", "config", "transport"),
    [
        ("nixl", {"UCX_TLS": "tcp"}, {"backends": ["UCX"], "num_threads": 0}, "tcp"),
        ("mooncake", {"MC_FORCE_TCP": "1"}, {"mooncake_protocol": "tcp", "num_workers": 2}, "tcp"),
    ],
)
def test_the_emulated_engine_is_told_what_real_ones_choose(
    name: str, env: dict[str, str], config: dict[str, Any], transport: str
) -> None:
    connector = connectors.get(name)
    settled = connector.options_model().settled()
    assert env.items() <= connector.env("prefill", settled, 8998).items()
    assert connector.extra_config("prefill", settled) == config
    assert connector.requested_transport(settled) == transport
    assert settled.settled() == settled


@pytest.mark.parametrize(
    ("tls", "moves"),
    [
        ("", True), ("all", True), ("rc,cuda", True), ("rc,cuda_copy,cuda_ipc", True), ("^tcp", True),
        ("tcp", False), ("rc,sm", False), ("^cuda_ipc,cuda", False),
    ],
)  # fmt: skip
def test_which_transports_leave_gpu_memory_out(tls: str, moves: bool) -> None:
    assert moves_gpu_memory(tls) is moves


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="rdma_devices"):
        connectors.get("mooncake").options_model(rdma_devices=["mlx5_0"])


def test_several_connectors_ask_for_what_the_first_one_does() -> None:
    raw = {"device_name": "mlx5_0", "extra_config": {"bootstrap_server_address": "10.0.0.9:8998"}}
    first = connectors.get("mooncake").options_model.model_validate(raw)
    multi = connectors.get("multi").options_model.model_validate({"first": "mooncake", "first_options": raw})
    for name in ("requested_nics", "requested_protocol", "bootstrap_address"):
        assert getattr(multi, name) == getattr(first, name)
    assert multi.requested_nics == ("mlx5_0",)
