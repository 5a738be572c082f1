"""Transfer backends that this machine can run, and their protocols without hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvbench import transfer
from kvbench.core.transfers.cases import BackendCapabilities
from kvbench.hosts.devices import gpus
from kvbench.hosts.nics import choice as nics


def movers() -> list[BackendCapabilities]:
    """Return every backend, with what prevents it, or one of its protocols, from running here."""
    lacks = lacking()
    return [_with(backend, lacks[backend.name]) for backend in _known()]


def lacking() -> dict[str, dict[str, Any]]:
    """Return by backend: ``problem``, empty if it runs, and ``lacking`` by protocol."""
    names = transfer.names()
    with ThreadPoolExecutor(max_workers=4) as pool:
        problems = dict(zip(names, pool.map(transfer.check, names), strict=True))
    absent = {"rdma": "no RDMA device", "gpu": "no GPU"}
    local = {"rdma": bool(nics.find("rdma").usable), "gpu": bool(gpus())}
    found = {}
    for name in names:
        problem, needs = problems[name], transfer.get(name).needs
        fix = f" (fix: {problem.fix})" if problem is not None and problem.fix else ""
        found[name] = {
            "problem": "" if problem is None else problem.reason + fix,
            "lacking": {p: absent.get(need, need) for p, need in needs.items() if not local.get(need, False)},
        }
    return found


def movers_on(hosts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[BackendCapabilities]:
    """Return every backend, with what prevents it on any of these hosts: host → its ``lacking``."""
    found = []
    for backend in _known():
        lacks: dict[str, Any] = {"problem": "", "lacking": {}}
        for host, have in hosts.items():
            state = have.get(
                backend.name, {"problem": "kvbench on that host has no such backend", "lacking": {}}
            )
            if state["problem"] and not lacks["problem"]:
                lacks["problem"] = f"{host}: {state['problem']}"
            for protocol, reason in state["lacking"].items():
                lacks["lacking"].setdefault(protocol, f"{host}: {reason}")
        found.append(_with(backend, lacks))
    return found


def _known() -> Iterator[BackendCapabilities]:
    """Yield every backend as if nothing were lacking."""
    for name in transfer.names():
        backend = transfer.get(name)
        yield BackendCapabilities(
            name,
            backend.protocols,
            backend.ops,
            nics=backend.nics,
            loopback_only=backend.loopback_only,
            memories=backend.memories,
            optional=backend.optional,
            one_nic=backend.one_nic,
        )


def _with(backend: BackendCapabilities, lacks: Mapping[str, Any]) -> BackendCapabilities:
    return replace(backend, problem=str(lacks["problem"]), lacking=dict(lacks["lacking"]))
