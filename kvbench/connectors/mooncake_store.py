"""vLLM's MooncakeStoreConnector: P stores KV blocks in a shared pool, D loads them by hash. Engines lend the
pool's memory; a `mooncake_master` started by kvbench is its directory. D computes late blocks without an
error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvbench.connectors.base import (
    ConnectorOptions,
    ExtraKeys,
    KvOptions,
    PlainConnector,
    Role,
    Seat,
    key_since,
)
from kvbench.core.engine_versions import Releases
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.options import nic_names


class MooncakeStoreOptions(KvOptions):
    keys: ClassVar[ExtraKeys] = {
        "cache_prefix": key_since((0, 24), str),
        "custom_mem_pool": key_since((0, 31), str, bool, dict),
        "enable_cross_layers_blocks": key_since((0, 21), bool, str),
        "enable_group_semantics": key_since((0, 28), bool, str),
        "enable_lookup": key_since((0, 27), bool),
        "enable_store_tp_lcm": key_since((0, 30), bool),
        "load_async": key_since((0, 21), bool),
        "lookup_async": key_since((0, 24), bool),
        "lookup_rpc_port": key_since((0, 21), int),
        "prefill_tp_sizes": key_since((0, 30), list),
        "save_decode_cache": key_since((0, 29), bool),
        "store_tp_size": key_since((0, 30), int),
    }

    protocol: Literal["auto", "tcp", "rdma"] = Field(
        "auto",
        description="transport of the pool; tcp and rdma are enforced by MC_FORCE_TCP and MC_FORCE_HCA. auto "
        "enforces nothing: the store's file says tcp, as vLLM does by default",
    )
    device_name: str = Field("", description="comma-separated RDMA devices; empty uses all")
    global_segment_size: str = Field(
        "4GB", pattern=r"^[1-9]\d*(KB|MB|GB)$", description="memory that each rank lends to the pool"
    )
    local_buffer_size: str = Field(
        "1GB", pattern=r"^[1-9]\d*(KB|MB|GB)$", description="memory of each rank for transfers in flight"
    )
    master_command: tuple[str, ...] = Field(
        ("mooncake_master",), min_length=1, description="how the master is started; comes with Mooncake"
    )

    @property
    def reads_nic_variables(self) -> bool:
        return False

    @property
    def requested_protocol(self) -> str:
        return self.protocol

    @property
    def requested_nics(self) -> tuple[str, ...]:
        return nic_names(self.device_name)


class MooncakeStore(PlainConnector):
    """Pool between P and D, with ports for the master and its metrics."""

    name = "mooncake_store"
    title = "Mooncake Store (shared pool)"
    kv_connector = "MooncakeStoreConnector"
    whole_prompt = False
    service_ports = 2
    options_model = MooncakeStoreOptions
    releases = Releases((0, 21))
    history = (
        "kvbench knows MooncakeStoreConnector from vLLM 0.21 on; the class of that name up to 0.10.0 "
        "(V0 engine) is a different one"
    )

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        assert isinstance(options, MooncakeStoreOptions)
        forced = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}.get(options.protocol)
        # P and D find blocks by hashes, which Python salts differently in each process.
        return {**({forced: "1"} if forced else {}), "PYTHONHASHSEED": "0"}

    def files(self, options: ConnectorOptions, seat: Seat) -> dict[str, dict[str, Any]]:
        assert isinstance(options, MooncakeStoreOptions)
        services = seat.neighbours.services
        return {
            "MOONCAKE_CONFIG_PATH": {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": services[0] if services else "",
                "global_segment_size": options.global_segment_size,
                "local_buffer_size": options.local_buffer_size,
                "protocol": "tcp" if options.protocol == "auto" else options.protocol,
                "device_name": options.device_name,
            }
        }

    def services(self, options: ConnectorOptions, host: str, ports: Sequence[int]) -> list[ProcessSpec]:
        assert isinstance(options, MooncakeStoreOptions)
        rpc, metrics = ports
        listen = ("--rpc_address", host, "--rpc_port", str(rpc))
        serve_metrics = ("--metrics_host", host, "--metrics_port", str(metrics))
        return [
            ProcessSpec(
                name="mooncake-master",
                argv=(*options.master_command, *listen, *serve_metrics),
                ready_url=f"http://{host}:{metrics}/health",
                port=rpc,
                one_thread=False,
                host=host,
            )
        ]

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        names = [name for name in ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE") if name in env]
        return [f"{name} is set, but the store's settings come from its file" for name in names]

    def requested_transport(self, options: ConnectorOptions) -> str:
        assert isinstance(options, MooncakeStoreOptions)
        return "" if options.protocol == "auto" else options.protocol


CONNECTOR = MooncakeStore()
