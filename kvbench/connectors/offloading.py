"""vLLM's OffloadingConnector: one server that moves KV blocks to and from host memory, without P/D. It shows
benefit or cost of a host-memory tier against the aggregated server."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from kvbench.connectors.base import ConnectorOptions, ExtraKeys, KvOptions, LoneConnector, Role, key_since
from kvbench.core.engine_versions import Releases


class OffloadingOptions(KvOptions):
    keys: ClassVar[ExtraKeys] = {
        "eviction_policy": key_since((0, 11, 1), str),
        "offload_prompt_only": key_since((0, 23), bool),
        "secondary_tiers": key_since((0, 22), list),
        "spec_module_path": key_since((0, 11), str),
        "spec_name": key_since((0, 11), str),
        "store_threshold": key_since((0, 18), int),
    }

    cpu_bytes_to_use: int = Field(
        2**30, ge=2**20, description="bytes of host memory of the whole server; vLLM 0.14 and newer"
    )
    num_cpu_blocks: int = Field(
        1024, ge=1, description="number of blocks in host memory; for vLLM before 0.14"
    )


class OffloadingBlocks(LoneConnector):
    """Profile for vLLM 0.11 to 0.13: the size is a number of blocks."""

    name = "offloading"
    title = "aggregated, KV offloaded to host memory"
    kv_connector = "OffloadingConnector"
    gpu_only = True
    options_model = OffloadingOptions
    releases = Releases((0, 11), (0, 14))

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, OffloadingOptions)
        return {"num_cpu_blocks": options.num_cpu_blocks}


class Offloading(OffloadingBlocks):
    """Profile with a size in bytes."""

    releases = Releases((0, 14))
    older = (OffloadingBlocks,)
    history = "kvbench knows OffloadingConnector from vLLM 0.11 on"

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, OffloadingOptions)
        return {"cpu_bytes_to_use": options.cpu_bytes_to_use}


CONNECTOR = Offloading()
