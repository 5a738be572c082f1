"""LMCacheConnectorV1: P stores KV chunks in an LMCache server, D loads them by hash. kvbench starts the
server, or LMCache uses a given address. D computes late chunks and the incomplete last one. Untested: LMCache
needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

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


class LmcacheOptions(KvOptions):
    keys: ClassVar[ExtraKeys] = {"use_layerwise": key_since((0, 17), bool)}

    remote_url: str = Field(
        "", description="the store, such as redis://host:6379; by default an LMCache server is started"
    )
    chunk_size: int = Field(256, ge=16, description="tokens per chunk; a multiple of the block size")
    server_command: tuple[str, ...] = Field(
        ("lmcache_server",), min_length=1, description="how the LMCache server is started"
    )
    use_native: bool = Field(False, description="the adapter inside vLLM instead of LMCache's own")


class Lmcache(PlainConnector):
    name = "lmcache"
    title = "LMCache (shared store)"
    kv_connector = "LMCacheConnectorV1"
    whole_prompt = False
    gpu_only = True
    service_ports = 1
    options_model = LmcacheOptions
    releases = Releases((0, 9))
    history = "kvbench knows LMCacheConnectorV1 from vLLM 0.9 on"

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, LmcacheOptions)
        return {"use_native": True} if options.use_native else {}

    def seat_env(self, options: ConnectorOptions, seat: Seat) -> dict[str, str]:
        assert isinstance(options, LmcacheOptions)
        services = seat.neighbours.services
        url = options.remote_url or (f"lm://{services[0]}" if services else "")
        return {
            "LMCACHE_REMOTE_URL": url,
            "LMCACHE_REMOTE_SERDE": "naive",
            "LMCACHE_CHUNK_SIZE": str(options.chunk_size),
            "LMCACHE_LOCAL_CPU": "False",
            # Chunks are found by hashes, which Python salts differently in each process.
            "PYTHONHASHSEED": "0",
        }

    def services(self, options: ConnectorOptions, host: str, ports: Sequence[int]) -> list[ProcessSpec]:
        assert isinstance(options, LmcacheOptions)
        if options.remote_url:
            return []
        return [
            ProcessSpec(
                name="lmcache-server",
                argv=(*options.server_command, host, str(ports[0])),
                port=ports[0],
                one_thread=False,
                host=host,
            )
        ]


CONNECTOR = Lmcache()
