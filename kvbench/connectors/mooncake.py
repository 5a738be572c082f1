"""vLLM's MooncakeConnector: P pushes KV to D with Mooncake's Transfer Engine.

Profiles by vLLM release: 0.25 and newer: concurrent dispatch, joined by the router's ``transfer_id``; D
contacts P's side channel, whose address P's HTTP bootstrap server gives (mooncake_connector_proxy.py). 0.16
to 0.24: the same without the key ``device_name``. 0.13 to 0.15: sequential; P returns its ZMQ side channel,
one port per rank. An early request of D is lost, and D decodes unwritten blocks. Up to 0.10.0 (V0): a file
mooncake.json and a plain proxy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, field_validator

from kvbench.connectors.base import (
    KV_ROLE,
    Body,
    Connector,
    ConnectorOptions,
    ExtraKeys,
    KvOptions,
    PlainConnector,
    PrefillPeer,
    PullConnector,
    Role,
    RoomConnector,
    Seat,
    key_since,
    one_token_prefill,
)
from kvbench.core.engine_versions import Releases
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.options import nic_names
from kvbench.errors import InputError

IN_VLLM: Final = Path(__file__).parent / "in_vllm"
"""Modules for vLLM's PYTHONPATH."""
V0_PORTS: Final = 50
"""Distance of V0's two port ranges; each has 9 + 2 ports per rank."""
_FORCED: Final = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}
"""Variables that select the transport by their presence; Mooncake's protocol argument has no effect."""
SGLANG_QUEUES: Final = 4
"""SGLang's own number of transfer queues on P."""
_METADATA_SERVER: Final = re.compile(r"(?:etcd|redis|https?)://\S+|[^\s:/]+:\d{1,5}")
"""Metadata addresses; without a scheme Mooncake assumes etcd (its integration guide with vLLM)."""
V0_ONLY: Final = dict.fromkeys(("metadata_server", "kv_buffer_size"), "vLLM up to 0.10.0 does")


class MooncakeOptions(KvOptions):
    keys: ClassVar[ExtraKeys] = {
        "bootstrap_server_address": key_since((0, 32), str),
        "preferred_segment": key_since((0, 22), str),
    }
    follow: ClassVar[Mapping[str, str]] = {"mooncake_protocol": "protocol", "rdma_devices": "device_name"}

    protocol: Literal["auto", "tcp", "rdma"] = Field(
        "auto",
        description="transport; tcp and rdma are enforced by MC_FORCE_TCP and MC_FORCE_HCA. auto is "
        "Mooncake's own choice: rdma where it finds a device, else tcp; for the emulated engine tcp",
    )
    device_name: str = Field("", description="comma-separated RDMA devices; empty uses all")
    num_workers: int | None = Field(
        None,
        ge=1,
        le=64,
        description="sender threads on P; by default the engine's own choice, 10 in vLLM, for the emulated "
        "one 2",
    )
    metadata_server: str = Field(
        "",
        description="vLLM up to 0.10.0 only: etcd://, redis:// or http:// address that P and D share; "
        "host:port alone means etcd",
    )
    kv_buffer_size: float = Field(2e9, gt=0, description="vLLM up to 0.10.0 only: bytes of the lookup buffer")

    def settled(self) -> MooncakeOptions:
        protocol = "tcp" if self.protocol == "auto" else self.protocol
        return self.model_copy(update={"protocol": protocol, "num_workers": self.num_workers or 2})

    @property
    def reads_nic_variables(self) -> bool:
        return False

    @property
    def requested_protocol(self) -> str:
        return self.protocol

    @property
    def transport(self) -> str:
        """The requested transport: RDMA if devices are named; empty leaves the choice open."""
        return ("rdma" if self.device_name else "") if self.protocol == "auto" else self.protocol

    @property
    def bootstrap_address(self) -> str:
        return str(self.extra_config.get("bootstrap_server_address", ""))

    @property
    def requested_nics(self) -> tuple[str, ...]:
        return nic_names(self.device_name)

    def sending(self) -> dict[str, Any]:
        """Keys of vLLM's kv_connector_extra_config; vLLM chooses omitted ones."""
        protocol = {} if self.protocol == "auto" else {"mooncake_protocol": self.protocol}
        return {**protocol, **({} if self.num_workers is None else {"num_workers": self.num_workers})}

    @field_validator("device_name")
    @classmethod
    def _no_spaces(cls, names: str) -> str:
        if any(char.isspace() for char in names) or "" in names.split(",")[(0 if names else 1) :]:
            raise ValueError("device names are separated by commas only, as in mlx5_0,mlx5_1")
        return names


def _options(options: ConnectorOptions) -> MooncakeOptions:
    assert isinstance(options, MooncakeOptions)
    return options


def _transport(options: ConnectorOptions) -> str:
    return _options(options).transport


class _Settings(Connector):
    name = "mooncake"
    title = "Mooncake (Transfer Engine, P pushes)"
    kv_connector = "MooncakeConnector"
    options_model = MooncakeOptions
    ignored_env: ClassVar[tuple[str, ...]] = ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE")
    """Variables of Mooncake's store, which this connector never reads."""
    unread: ClassVar[Mapping[str, str]] = V0_ONLY
    history = "MooncakeConnector is in vLLM up to 0.10.0 (V0 engine), and again from 0.13 on"

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        forced = _FORCED.get(_options(options).protocol)
        env = {forced: "1"} if forced else {}
        if side_port is not None:
            env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(side_port)
        return env

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        found = [
            f"{name} is set, but vLLM's MooncakeConnector never reads it: use the connector's options"
            for name in self.ignored_env
            if name in env
        ]
        requested = _options(options).protocol
        for protocol, variable in _FORCED.items():
            if requested not in ("auto", protocol) and variable in env:
                found.append(f"{variable} is set, which overrides the option protocol whatever its value")
        return found

    def requested_transport(self, options: ConnectorOptions) -> str:
        return _transport(options)


class _Chosen(_Settings):
    """Device lists for releases without the option, via kvbench's class in vLLM."""

    def kv_transfer_config(
        self, role: Role, engine_id: str, options: ConnectorOptions, seat: Seat | None = None
    ) -> dict[str, Any] | None:
        config = super().kv_transfer_config(role, engine_id, options, seat)
        assert config is not None
        if _options(options).device_name:
            config["kv_connector"] = "KvbenchMooncakeConnector"
            config["kv_connector_module_path"] = "kvbench_vllm_mooncake"
            config["kv_connector_extra_config"]["rdma_devices"] = _options(options).device_name
        return config

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        env = super().env(role, options, side_port)
        return {**env, "PYTHONPATH": str(IN_VLLM)} if _options(options).device_name else env


class MooncakeV0(PlainConnector, _Settings):
    """Profile for vLLM 0.6.4 to 0.10.0: one P and D, an external metadata server."""

    releases = Releases((0, 6, 4), (0, 10, 1))
    v0_engine = True
    unread: ClassVar[Mapping[str, str]] = {
        "extra_config": "its file mooncake.json has no such keys",
        "num_workers": "it has one sender",
    }
    side_port_roles: tuple[Role, ...] = ("prefill", "decode")
    ignored_env = ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE", "VLLM_MOONCAKE_BOOTSTRAP_PORT")

    def side_ports(self, role: str, ranks: Ranks) -> int:
        if ranks.tensor > (V0_PORTS - 9) // 2:
            raise InputError(f"Mooncake in vLLM up to 0.10.0 takes at most {(V0_PORTS - 9) // 2} ranks")
        return V0_PORTS if role in self.side_port_roles else 0

    def kv_transfer_config(
        self, role: Role, engine_id: str, options: ConnectorOptions, seat: Seat | None = None
    ) -> dict[str, Any] | None:
        return {
            "kv_connector": self.kv_connector,
            "kv_role": KV_ROLE[role],
            "kv_rank": 1 if role == "decode" else 0,
            "kv_parallel_size": 2,
            "kv_buffer_size": _options(options).kv_buffer_size,
        }

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        # From 0.8 on the V1 engine is the default, which has no such connector.
        return {"VLLM_USE_V1": "0"}

    def files(self, options: ConnectorOptions, seat: Seat) -> dict[str, dict[str, Any]]:
        return {"MOONCAKE_CONFIG_PATH": v0_config(_options(options), seat)}


def v0_config(options: MooncakeOptions, seat: Seat) -> dict[str, Any]:
    """Content of mooncake.json, equal for P and D. Raises InputError for what V0 does not support."""
    around = seat.neighbours
    if len(around.prefill) != 1 or len(around.decode) != 1:
        raise InputError("Mooncake in vLLM up to 0.10.0 joins one P and one D only")
    if not _METADATA_SERVER.fullmatch(options.metadata_server):
        raise InputError(
            "Mooncake in vLLM up to 0.10.0 needs a metadata server",
            hint="set the option metadata_server to etcd://…, redis://…, http://…/metadata, or host:port of "
            "an etcd, and start it",
        )
    if options.protocol == "rdma" and not options.device_name:
        raise InputError("Mooncake in vLLM up to 0.10.0 needs device_name with protocol rdma")
    return {
        "prefill_url": around.prefill[0],
        "decode_url": around.decode[0],
        "metadata_server": options.metadata_server,
        "protocol": "tcp" if options.protocol == "auto" else options.protocol,  # V0's own default
        "device_name": options.device_name,
    }


class MooncakeZmq(PullConnector, _Chosen):
    """Profile for vLLM 0.14 and 0.15; the router gives P and D the same request id."""

    releases = Releases((0, 14), (0, 16))
    side_port_roles: tuple[Role, ...] = ("prefill",)
    side_port_per_rank = True
    answer_fields = ("remote_host", "remote_port")

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        return _options(options).sending()

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(body, {"do_remote_decode": True, "do_remote_prefill": False})


class MooncakeRdma(MooncakeZmq):
    """Profile for vLLM 0.13, fixed to "rdma"; the environment forces the transport."""

    releases = Releases((0, 13), (0, 14))

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        found = super().extra_config(role, options)
        return {key: value for key, value in found.items() if key != "mooncake_protocol"}


class SglangMooncake(RoomConnector):
    """Variables and defaults: SGLang 0.5.23, disaggregation/mooncake."""

    name = "mooncake"
    title = "Mooncake (SGLang)"
    options_model = MooncakeOptions
    unread: ClassVar[Mapping[str, str]] = {**RoomConnector.unread, **V0_ONLY}

    def options_problem(self, options: ConnectorOptions) -> str:
        chosen = _options(options)
        if chosen.protocol == "tcp" and chosen.device_name:
            return "SGLang ignores device_name with protocol tcp: leave one of them out"
        return super().options_problem(options)

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        chosen = _options(options)
        env = {}
        if chosen.protocol != "auto":
            env = {_FORCED[chosen.protocol]: "1", "MOONCAKE_PROTOCOL": chosen.protocol}
        if chosen.num_workers and role == "prefill":  # dealt to its queues, of which there may not be more
            env["SGLANG_DISAGGREGATION_THREAD_POOL_SIZE"] = str(chosen.num_workers)
            env["SGLANG_DISAGGREGATION_QUEUE_SIZE"] = str(min(SGLANG_QUEUES, chosen.num_workers))
        return env

    def requested_transport(self, options: ConnectorOptions) -> str:
        return _transport(options)

    def engine_args(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        chosen = _options(options)
        backend = "mooncake_tcp" if chosen.protocol == "tcp" else "mooncake"
        devices = {"disaggregation-ib-device": chosen.device_name} if chosen.device_name else {}
        return {"disaggregation-transfer-backend": backend, **devices}


class _Bootstrap(_Settings):
    """Concurrent dispatch over P's HTTP bootstrap server."""

    dispatch = "concurrent"
    needs_bootstrap = True
    side_port_roles: tuple[Role, ...] = ("prefill",)

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        return _options(options).sending()

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(
            body, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": request_id}
        )

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": request_id,
            "remote_bootstrap_addr": peer.bootstrap_url,
            "remote_engine_id": peer.engine_id,
        }
        return {**body, "kv_transfer_params": params}


class MooncakeNoDevices(_Chosen, _Bootstrap):
    """Profile for vLLM 0.16 to 0.24."""

    releases = Releases((0, 16), (0, 25))


class Mooncake(_Bootstrap):
    """P pushes to D; P serves a bootstrap address."""

    transfer_backend = "mooncake"
    releases = Releases((0, 25))
    older = (MooncakeNoDevices, MooncakeZmq, MooncakeRdma, MooncakeV0)
    sglang = SglangMooncake

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        config = super().extra_config(role, options)
        if _options(options).device_name:
            config["device_name"] = _options(options).device_name
        return config


CONNECTOR = Mooncake()
