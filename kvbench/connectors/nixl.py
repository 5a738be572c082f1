"""vLLM's NixlConnector: D pulls KV from P with a NIXL READ over UCX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvbench.connectors.base import (
    ConnectorOptions,
    PullConnector,
    Role,
    RoomConnector,
    UcxOptions,
    ucx_warnings,
)
from kvbench.core.engine_versions import Release, Releases, dotted, release
from kvbench.core.ranks import Ranks

SMALLER_DECODE_SINCE: Final[Release] = (0, 14)
"""First release without the error "Decode TP cannot be smaller than prefill TP"."""


class NixlOptions(UcxOptions):
    """Options of the nixl connector."""


class SglangNixl(RoomConnector):
    """Variables: SGLang 0.5.23, disaggregation/nixl."""

    name = "nixl"
    title = "NIXL (SGLang)"
    options_model = NixlOptions

    def engine_args(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        return {"disaggregation-transfer-backend": "nixl"}

    def options_problem(self, options: ConnectorOptions) -> str:
        assert isinstance(options, NixlOptions)
        if len(options.backends) > 1:
            return f"SGLang opens one NIXL backend, not {', '.join(options.backends)}: name one"
        if options.num_threads is not None and options.backends != ("UCX",):
            return f"num_threads is for UCX, and SGLang's backend is {options.backends[0]}: leave it out"
        return super().options_problem(options)

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        assert isinstance(options, NixlOptions)
        env = {**options.env(), "SGLANG_DISAGGREGATION_NIXL_BACKEND": options.backends[0]}
        if options.num_threads is not None:
            parameters = json.dumps({"num_threads": str(options.num_threads)})
            env["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] = parameters
        return env

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        return ucx_warnings(options, env)

    def requested_transport(self, options: ConnectorOptions) -> str:
        assert isinstance(options, NixlOptions)
        return options.ucx_tls


class _Pull(PullConnector):
    """D pulls from P; both bind a side channel for metadata. P's response fields are copied to D."""

    name = "nixl"
    title = "NIXL (UCX, D pulls)"
    kv_connector = "NixlConnector"
    kv_operation = "read"
    transfer_backend = "nixl"
    options_model = NixlOptions
    history = "NixlConnector is in vLLM 0.9 and newer"

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, NixlOptions)
        return options.nixl_config()

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        assert isinstance(options, NixlOptions)
        return {**options.env(), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        return ucx_warnings(options, env)

    def ranks_problem(self, version: str, prefill: Ranks, decode: Ranks) -> str:
        if version and release(version) < SMALLER_DECODE_SINCE and decode.tensor < prefill.tensor:
            return (
                f"NIXL of vLLM {version} moves no KV from TP {prefill.tensor} to fewer ranks (TP "
                f"{decode.tensor}): D's TP may not be below P's before vLLM {dotted(SMALLER_DECODE_SINCE)}"
            )
        return ""

    def requested_transport(self, options: ConnectorOptions) -> str:
        assert isinstance(options, NixlOptions)
        return options.ucx_tls


class NixlPerRank(_Pull):
    """Profile for vLLM 0.9 to 0.11.0: workers serve metadata at port + data rank × TP + rank."""

    releases = Releases((0, 9), (0, 11, 1))
    side_port_per_rank = True

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        return {}  # it reads no num_threads, and up to 0.10 no backends: UCX, as later ones by default

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        assert isinstance(options, NixlOptions)
        ignored = [] if options.num_threads is None else ["num_threads is read by vLLM 0.11.1 and newer only"]
        ignored += [] if options.backends == ("UCX",) else ["backends are read by vLLM 0.11 and newer only"]
        return [*super().warnings(options, env), *ignored]


class Nixl(_Pull):
    """Profile since 0.11.1: one side channel per data-parallel rank, at port + rank."""

    releases = Releases((0, 11, 1))
    older = (NixlPerRank,)
    side_port_per_data_rank = True
    sglang = SglangNixl


CONNECTOR = Nixl()
