"""What is asked of a Ray cluster, node by node, and what it lacks. Pure; ``launchers/ray.py`` asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.core.scenario.hosts import SCHEDULED_ROLES, RayNodes, RayOptions


@dataclass(frozen=True)
class Bundle:
    """One node's share of a placement group: what is set aside there, for a role."""

    role: str
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def words(self) -> str:
        """For a message."""
        amounts = [f"{name} {amount:g}" for name, amount in self.resources.items()]
        labels = [f"label {name}={value}" for name, value in self.labels.items()]
        return f"{self.role}: {', '.join([*amounts, *labels])}"


def bundles_of(options: RayOptions, *, loadgen_only: bool = False) -> list[Bundle]:
    """A bundle for each node of each role that has nodes of its own.

    ``loadgen_only``: the servers run already, and only the load generator is to be placed.
    """
    bundles = []
    for role in ("loadgen",) if loadgen_only else SCHEDULED_ROLES:
        wanted: RayNodes | None = getattr(options, role) or (RayNodes() if loadgen_only else None)
        if wanted is not None:
            amounts = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
            resources = {name: amount for name, amount in amounts.items() if amount}
            # A bundle must ask for something, or it cannot be placed.
            resources = resources or {"CPU": 0.01}
            bundles += [Bundle(role, resources, dict(wanted.labels))] * wanted.nodes
    return bundles


def placed(bundles: Sequence[Bundle], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Role → its nodes, when bundle i is on ``names[i]``. Router and load generator join P's first."""
    hosts: dict[str, tuple[str, ...]] = {}
    for bundle, name in zip(bundles, names, strict=True):
        known = hosts.get(bundle.role, ())
        hosts[bundle.role] = known if name in known else (*known, name)
    if "prefill" not in hosts:  # the servers run already
        return {"loadgen": hosts["loadgen"]}
    hosts.setdefault("router", hosts["prefill"][:1])
    hosts.setdefault("loadgen", hosts["router"][:1])
    return hosts


def missing(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]], *, spread: bool) -> list[str]:
    """What no node can give, however long one waits, in words; empty if the cluster is merely busy.

    ``nodes``: as ``ray.nodes()`` lists them, with Resources (all that the node has) and Labels.
    """
    alive = [node for node in nodes if node.get("Alive", node.get("alive"))]
    lacking = [
        f"no node has what {bundle.words()} asks for"
        for bundle in {each.words(): each for each in bundles}.values()
        if not any(_fits(bundle, node) for node in alive)
    ]
    if not lacking and spread and len(bundles) > len(alive):
        lacking.append(f"{len(bundles)} nodes are asked for, and the cluster has {len(alive)}")
    return lacking


def _fits(bundle: Bundle, node: Mapping[str, Any]) -> bool:
    has = node.get("Resources", {})
    labels = node.get("Labels", {})
    return all(has.get(name, 0) >= amount for name, amount in bundle.resources.items()) and all(
        labels.get(name) == value for name, value in bundle.labels.items()
    )


def listed(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The nodes with their resources, for a message."""
    words = []
    for node in nodes:
        if node.get("Alive", node.get("alive")):
            amounts = [
                f"{name} {amount:g}"
                for name, amount in sorted(node.get("Resources", {}).items())
                if not name.startswith(("node:", "object_store_memory", "memory", "accelerator_type:"))
            ]
            words.append(f"{node.get('NodeName') or node.get('NodeManagerAddress')}: {', '.join(amounts)}")
    return "; ".join(words) or "no nodes"


def unique_names(nodes: Mapping[str, str]) -> dict[str, str]:
    """Node id → a name of its own: the node's, with the beginning of its id where two have one name."""
    names = list(nodes.values())
    length = next((n for n in (8, 16) if len({node[:n] for node in nodes}) == len(nodes)), None)
    return {
        node: name if names.count(name) == 1 else f"{name}-{node[:length]}" for node, name in nodes.items()
    }
