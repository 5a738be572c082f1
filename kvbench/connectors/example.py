"""vLLM's ExampleConnector: P writes each layer's KV to files, D reads them; the slowest baseline. Chunked
prefill crashes D's engine (shape mismatch), so inputs must fit max_num_batched_tokens, else `warnings`
reports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kvbench.connectors.base import ConnectorOptions, KvOptions, PlainConnector, Role
from kvbench.core.engine_versions import Releases


class ExampleOptions(KvOptions):
    shared_storage_path: str = Field(
        "kvbench-kv", min_length=1, description="folder that P and D both see; it grows and is not emptied"
    )


class SharedStorage(PlainConnector):
    """Profile for vLLM 0.9.1 to 0.12, under its former name."""

    name = "example"
    title = "files (ExampleConnector)"
    kv_connector = "SharedStorageConnector"
    whole_prompt = False
    options_model = ExampleOptions
    releases = Releases((0, 9, 1), (0, 13))

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, ExampleOptions)
        return {"shared_storage_path": options.shared_storage_path}

    def engine_args(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        return {"disable-hybrid-kv-cache-manager": True}

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        return [
            "the file connector cannot load chunked prefills: keep input_len below max-num-batched-tokens"
        ]


class SharedStorageFirst(SharedStorage):
    """Profile for vLLM 0.9.0, whose parser lacks the argument."""

    releases = Releases((0, 9), (0, 9, 1))

    def engine_args(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        return {}


class Example(SharedStorage):
    """Profile for vLLM 0.13 and newer."""

    kv_connector = "ExampleConnector"
    releases = Releases((0, 13))
    older = (SharedStorage, SharedStorageFirst)
    history = "kvbench knows the file connector from vLLM 0.9 on"


CONNECTOR = Example()
