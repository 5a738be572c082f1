"""What no single value's check can see about a deployment's hosts and roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.core.scenario.yaml_lines import quoted


def host_problems(deployment: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with the hosts of a deployment, as plain data: where, and what."""
    hosts, roles = deployment.get("hosts") or {}, deployment.get("roles") or {}
    if not isinstance(hosts, Mapping) or not isinstance(roles, Mapping):
        return
    scheduler = deployment.get("launcher")
    for name in ("slurm", "ray"):
        if scheduler != name and deployment.get(name) is not None:
            yield (name,), f"deployment.{name} is for launcher: {name}"
    if scheduler in ("slurm", "ray"):
        text = f"launcher {scheduler} finds the hosts itself; say in deployment.{scheduler} what they need"
        for key, given in (("hosts", hosts), ("roles", any(roles.values()))):
            if given:
                yield (key,), text
        return
    if deployment.get("launcher", "local") == "local":
        if hosts:
            yield ("hosts",), "deployment.hosts are for a launcher that reaches them: launcher: ssh"
        return
    if not hosts:
        yield ("launcher",), f"launcher {deployment['launcher']} needs deployment.hosts and deployment.roles"
        return
    needed = ("loadgen",) if deployment.get("engine") == "external" else ("prefill", "decode")
    for role in needed:
        if not roles.get(role):
            yield ("roles",), f"deployment.roles.{role} must name a host of deployment.hosts"
    used = set()
    for role, names in roles.items():
        for name in _names_in(names):
            used.add(name)
            if name not in hosts:
                text = f"no host is called {quoted(str(name))}; there are: {', '.join(map(str, hosts))}"
                yield ("roles", str(role)), f"deployment.roles.{role}: {text}"
    yield from _spanning(deployment, roles)
    for name in used if len(used) > 1 else ():
        host = hosts.get(name)
        address = str(host.get("address", "")) if isinstance(host, Mapping) else ""
        if address == "localhost" or address.startswith("127."):
            text = f"{address} is an address of each host to itself, and there are several hosts"
            yield ("hosts", str(name), "address"), f"deployment.hosts.{name}.address: {text}"


def _names_in(names: Any) -> list[str]:
    """The names of a role's hosts, also of those that an instance spans."""
    entries = [names] if isinstance(names, str) else names or ()
    return [name for each in entries for name in ([each] if isinstance(each, str) else each or ())]


def _spanning(
    deployment: Mapping[str, Any], roles: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with instances over several hosts."""
    engine = deployment.get("engine", "emulated")
    for role in ("prefill", "decode", "aggregated"):
        entries = roles.get(role) or ()
        groups = [each for each in entries if isinstance(each, (list, tuple)) and len(each) > 1]
        size = deployment.get(role)
        own = size.get("tensor_parallel_size") if isinstance(size, Mapping) else None
        ranks = own or deployment.get("tensor_parallel_size", 1)
        for group in () if isinstance(entries, str) else groups:
            shown, where = ", ".join(map(str, group)), f"deployment.roles.{role}"
            if len(set(map(str, group))) < len(group):
                yield ("roles", role), f"{where}: [{shown}] names a host twice"
            elif engine != "vllm":
                yield ("roles", role), f"{where}: an instance of the {engine} engine runs on one host"
            elif any(isinstance(each, int) and each % len(group) for each in _each(ranks)):
                text = f"{where}: tensor_parallel_size {ranks} does not divide among {shown}"
                yield ("roles", role), text


def _each(sizes: Any) -> list[Any]:
    return list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
