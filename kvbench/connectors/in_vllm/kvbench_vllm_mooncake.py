"""Mooncake in vLLM 0.13 to 0.24 with selectable RDMA devices; loaded by vLLM, not kvbench.

These releases call ``TransferEngine.initialize`` with an empty device list, which uses all devices, even
without a route. This class is vLLM's connector with a list from ``kv_connector_extra_config.rdma_devices``.
It needs no change in vLLM's installation, only this folder on PYTHONPATH:

--kv-transfer-config '{"kv_connector": "KvbenchMooncakeConnector", "kv_connector_module_path":
"kvbench_vllm_mooncake", ...}'"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = (
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake_connector",  # 0.13 to 0.15
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector",  # from 0.16 on
)
_CLASS = "KvbenchMooncakeConnector"


def connector_class() -> type[Any]:
    """Return vLLM's MooncakeConnector, whose worker starts the engine with the device list."""
    module = _vllm_module()

    class KvbenchMooncakeConnector(module.MooncakeConnector):  # type: ignore[misc, name-defined]
        """MooncakeConnector on the devices of ``rdma_devices``."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            transfer = vllm_config.kv_transfer_config
            devices = str(transfer.get_from_extra_config("rdma_devices", ""))
            original = module.TransferEngine
            module.TransferEngine = engine_on(original, devices)
            try:
                super().__init__(vllm_config, role, kv_cache_config)
            finally:
                module.TransferEngine = original

    return KvbenchMooncakeConnector


def engine_on(engine: type[Any], devices: str) -> type[Any]:
    """Return Mooncake's TransferEngine with ``devices`` as the default list."""

    class EngineOnDevices(engine):  # type: ignore[misc]
        def initialize(self, hostname: str, metadata: str, protocol: str, device_name: str) -> int:
            return int(super().initialize(hostname, metadata, protocol, device_name or devices))

    return EngineOnDevices


def _vllm_module() -> Any:
    missing = None
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error
    raise ImportError("this vLLM has no MooncakeConnector where 0.13 to 0.24 have it") from missing


def __getattr__(name: str) -> type[Any]:
    # vLLM is imported on the first access to the class, which is created once.
    if name != _CLASS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = connector_class()
    globals()[_CLASS] = made
    return made
