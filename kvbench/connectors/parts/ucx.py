"""What the connectors over NIXL share: options, UCX's environment, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from kvbench.connectors.base import ConnectorOptions
from kvbench.core.scenario.options import nic_names

TELLING: Final = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
"""Lines at start-up and at each new connection, none at transfers."""


class UcxOptions(ConnectorOptions):
    """Options of a connector over NIXL."""

    ucx_tls: str = Field(
        "",
        description="UCX_TLS: the transports UCX may use; by default its own choice, for the emulated engine "
        "tcp. GPU memory needs cuda among them",
    )
    ucx_net_devices: str = Field("", description="UCX_NET_DEVICES: comma-separated devices, or all")
    num_threads: int | None = Field(
        None,
        ge=0,
        le=64,
        description="NIXL worker threads beside the progress thread; by default the engine's own choice, "
        "4 in vLLM, for the emulated one 0",
    )

    def settled(self) -> UcxOptions:
        threads = 0 if self.num_threads is None else self.num_threads
        return self.model_copy(update={"ucx_tls": self.ucx_tls or "tcp", "num_threads": threads})

    @property
    def nics_asked(self) -> tuple[str, ...]:
        return nic_names(self.ucx_net_devices)

    def extra_config(self) -> dict[str, Any]:
        """The keys of vLLM's kv_connector_extra_config; without a number of threads vLLM takes its own."""
        threads = {} if self.num_threads is None else {"num_threads": self.num_threads}
        return {"backends": ["UCX"], **threads}

    def env(self) -> dict[str, str]:
        """UCX's environment; what is not given there it chooses: transports, and devices among all.

        UCX_TLS without cuda would make NIXL 1.0 and newer refuse GPU memory. It is to say which transports it
        took, once a connection and operation (transfer/parts/transport_lines.yaml).
        """
        wanted = {"UCX_TLS": self.ucx_tls, "UCX_NET_DEVICES": self.ucx_net_devices}
        return {**{name: value for name, value in wanted.items() if value}, **TELLING}


def moves_gpu_memory(tls: str) -> bool:
    """Whether UCX_TLS, where it is set at all, leaves UCX a transport for CUDA's or ROCm's memory."""
    words = [word.strip() for word in tls.removeprefix("^").split(",") if word.strip()]
    named = any(word == "all" or word.startswith(("cuda", "gdr", "rocm", "ze")) for word in words)
    return not words or named != tls.startswith("^")


def side_channel_env(side_port: int | None, host: str) -> dict[str, str]:
    """Where an instance tells the other side about its NIXL agent."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}


def ucx_warnings(env: Mapping[str, str]) -> list[str]:
    """Environment of the user that fights with the connector's."""
    found = []
    for name in ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE"):
        if name in env:
            found.append(f"{name} is set, but NIXL never reads it")
    if "VLLM_NIXL_ABORT_REQUEST_TIMEOUT" in env:
        found.append(
            "VLLM_NIXL_ABORT_REQUEST_TIMEOUT is read up to vLLM 0.13 only; later releases have leases"
        )
    return found
