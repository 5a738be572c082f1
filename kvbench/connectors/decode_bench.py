"""vLLM's DecodeBenchConnector: one decode server with invented prompt KV, without P or transfer. It shows D's
ceiling for any P/D pair. Its outputs are meaningless and not compared."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from kvbench.connectors.base import ConnectorOptions, KvOptions, LoneConnector, Role
from kvbench.core.engine_versions import Releases


class DecodeBenchOptions(KvOptions):
    fill_mean: float = Field(0.015, description="mean of the invented KV values")
    fill_std: float = Field(0.0, ge=0, description="their standard deviation; 0 fills with a constant")


class DecodeBench(LoneConnector):
    """One server that never prefills."""

    name = "decode_bench"
    title = "decode alone (KV invented)"
    kv_connector = "DecodeBenchConnector"
    true_outputs = False
    options_model = DecodeBenchOptions
    releases = Releases((0, 11, 1))
    history = "kvbench knows DecodeBenchConnector from vLLM 0.11.1 on"

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, DecodeBenchOptions)
        return {"fill_mean": options.fill_mean, "fill_std": options.fill_std}


CONNECTOR = DecodeBench()
