"""Hosts from a Ray cluster: a placement group per run, and an actor with an agent on each node.

kvbench joins the user's cluster and never starts one. Ray ends group and actors with this process, which owns
them; the agent then reads the end of stdin. Ray is imported inside functions only; requests and missing
resources are computed without it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbench.core.scenario.hosts import SCHEDULED_ROLES, RayNodes, RayOptions
from kvbench.errors import LaunchError, MissingLibraryError
from kvbench.launchers.parts.ray_actor import ActorChannel, agent_actor, first_line


@dataclass(frozen=True)
class Bundle:
    """One node's share of a placement group, for a role."""

    role: str
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def words(self) -> str:
        amounts = [f"{name} {amount:g}" for name, amount in self.resources.items()]
        labels = [f"label {name}={value}" for name, value in self.labels.items()]
        return f"{self.role}: {', '.join([*amounts, *labels])}"


def bundles_of(options: RayOptions, *, loadgen_only: bool = False) -> list[Bundle]:
    """Return a bundle per node of each role with its own nodes."""
    bundles = []
    for role in ("loadgen",) if loadgen_only else SCHEDULED_ROLES:
        wanted: RayNodes | None = getattr(options, role) or (RayNodes() if loadgen_only else None)
        if wanted is not None:
            amounts = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
            resources = {name: amount for name, amount in amounts.items() if amount}
            # An empty bundle cannot be placed.
            resources = resources or {"CPU": 0.01}
            bundles += [Bundle(role, resources, dict(wanted.labels))] * wanted.nodes
    return bundles


def placed(bundles: Sequence[Bundle], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return role → nodes, with bundle i on ``names[i]``. Router and load generator use P's first node."""
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
    """Describe resources that no node has, or "". ``nodes``: ``ray.nodes()``."""
    alive = [node for node in nodes if node.get("Alive", node.get("alive"))]
    lacking = [
        f"no node has what {bundle.words()} requires"
        for bundle in {bundle.words(): bundle for bundle in bundles}.values()
        if not any(_fits(bundle, node) for node in alive)
    ]
    if not lacking and spread and len(bundles) > len(alive):
        lacking.append(f"{len(bundles)} nodes are requested, and the cluster has {len(alive)}")
    return lacking


def _fits(bundle: Bundle, node: Mapping[str, Any]) -> bool:
    has = node.get("Resources", {})
    labels = node.get("Labels", {})
    return all(has.get(name, 0) >= amount for name, amount in bundle.resources.items()) and all(
        labels.get(name) == value for name, value in bundle.labels.items()
    )


def describe_nodes(nodes: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for node in nodes:
        if node.get("Alive", node.get("alive")):
            amounts = [
                f"{name} {amount:g}"
                for name, amount in sorted(node.get("Resources", {}).items())
                if not name.startswith(("node:", "object_store_memory", "memory", "accelerator_type:"))
            ]
            lines.append(f"{node.get('NodeName') or node.get('NodeManagerAddress')}: {', '.join(amounts)}")
    return "; ".join(lines) or "no nodes"


def unique_names(nodes: Mapping[str, str]) -> dict[str, str]:
    """Return node id → unique name: the node's, with the start of its id if ambiguous."""
    names = list(nodes.values())
    length = next((n for n in (8, 16) if len({node[:n] for node in nodes}) == len(nodes)), None)
    return {
        node: name if names.count(name) == 1 else f"{name}-{node[:length]}" for node, name in nodes.items()
    }


CONNECT_DEADLINE_S: Final = 5.0
WAIT_S: Final = 1.0


def problem() -> str:
    """Return what is missing for Ray on this machine, or ""."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed here"


class RayNodesOf:
    """Context manager: nodes of one run by role. ``notify``: reports reasons to wait. Raises
    MissingLibraryError without Ray; LaunchError without a cluster, for other versions of Ray or Python, or
    without nodes within ``options.wait_s``."""

    def __init__(
        self,
        options: RayOptions,
        run_tag: str,
        notify: Callable[[str], None] = lambda words: None,
        *,
        loadgen_only: bool = False,
    ) -> None:
        self.hosts: Mapping[str, tuple[str, ...]] = {}
        self._options = options
        self._run_tag = run_tag
        self._notify = notify
        self._bundles = bundles_of(options, loadgen_only=loadgen_only)
        self._group: Any = None
        self._bundle_of: dict[str, int] = {}
        self._addresses: dict[str, str] = {}
        self._joined = False

    def __enter__(self) -> RayNodesOf:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Join the cluster and reserve the nodes."""
        if missing := problem():
            raise MissingLibraryError(missing, hint="pip install ray, in the cluster's version")
        self._join()
        self._reserve()

    def channel(self, host: str, command: str) -> ActorChannel:
        """Run a shell command on a node as a channel. Raises LaunchError."""
        if host not in self._bundle_of:
            raise LaunchError(f"no Ray node of this run is called {host}")
        return ActorChannel(host, self._actor(self._bundle_of[host]), command, self._run_tag)

    def address(self, host: str) -> str:
        return self._addresses[host]

    def close(self) -> None:
        if not self._joined and self._group is None:
            return
        import ray
        from ray.util import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)
        if self._joined:
            self._joined = False
            ray.shutdown()

    # -- the cluster --------------------------------------------------------------------------------

    def _join(self) -> None:
        import ray

        if ray.is_initialized():
            return  # a notebook's own; it stays
        address = self._options.address
        if address.startswith("ray://"):
            raise LaunchError(
                f"{address}: kvbench joins a cluster as a node's driver, not through Ray Client",
                hint="start kvbench on a node of the cluster, with deployment.ray.address: auto",
            )
        _require_answer(address)
        try:
            ray.init(
                address=address,
                namespace=f"kvbench-{self._run_tag}",
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except ConnectionError as error:
            if "Authentication" in _causes(error):
                raise LaunchError(
                    f"the Ray cluster at {address} refuses the connection: token missing or different",
                    hint="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or its _PATH) as its nodes have them",
                ) from error
            raise no_cluster(address, first_line(error)) from error
        except Exception as error:
            text = first_line(error)
            hint = "see `ray status`"
            if "ersion" in text:
                hint = "install the cluster's versions of Ray and Python here"
            raise LaunchError(f"cannot join the Ray cluster at {address}: {text}", hint=hint) from error
        self._joined = True

    def _reserve(self) -> None:
        import ray
        from ray.util import placement_group, placement_group_table

        options: dict[str, Any] = {}
        if any(bundle.labels for bundle in self._bundles):
            if "bundle_label_selector" not in inspect.signature(placement_group).parameters:
                raise LaunchError(
                    f"Ray {ray.__version__} cannot choose nodes by labels",
                    hint="request custom resources under deployment.ray, or install a newer Ray",
                )
            options["bundle_label_selector"] = [dict(bundle.labels) for bundle in self._bundles]
        spread = self._options.spread
        self._group = placement_group(
            [dict(bundle.resources) for bundle in self._bundles],
            strategy="STRICT_SPREAD" if spread else "PACK",
            **options,
        )
        self._wait_reserved()
        node_ids = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = {str(node["NodeID"]): node for node in ray.nodes()}
        placed_nodes = [str(node_ids[index]) for index in range(len(self._bundles))]
        names = unique_names(
            {
                node: str(nodes[node].get("NodeName") or nodes[node]["NodeManagerAddress"])
                for node in dict.fromkeys(placed_nodes)
            }
        )
        for index, node in enumerate(placed_nodes):
            self._bundle_of.setdefault(names[node], index)
            self._addresses[names[node]] = str(nodes[node]["NodeManagerAddress"])
        self.hosts = placed(self._bundles, [names[node] for node in placed_nodes])

    def _wait_reserved(self) -> None:
        import ray

        began = time.monotonic()
        last_reason = ""
        while not self._group.wait(timeout_seconds=WAIT_S):
            waited_s = time.monotonic() - began
            nodes = ray.nodes()
            lacking = missing(self._bundles, nodes, spread=self._options.spread)
            reason = "; ".join(lacking) or "the cluster has the requested resources, but they are in use"
            if reason != last_reason:
                last_reason = reason
                self._notify(f"Ray: {reason}")
            if waited_s > self._options.wait_s:
                raise LaunchError(
                    f"the Ray cluster has not granted the request in {waited_s:.0f} s: {reason} "
                    f"(it has {describe_nodes(nodes)})",
                    hint="start nodes with `ray start --address=… --resources='{\"NAME\": 1}'`, request "
                    "less in deployment.ray, or raise deployment.ray.wait_s",
                )

    def _actor(self, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted: Bundle = self._bundles[bundle]
        custom = {name: amount for name, amount in wanted.resources.items() if name not in ("CPU", "GPU")}
        remote = ray.remote(concurrency_groups={"send": 1, "receive": 1})(agent_actor())
        return remote.options(
            num_cpus=wanted.resources.get("CPU", 0),
            num_gpus=wanted.resources.get("GPU", 0),
            resources=custom,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
        ).remote()


def _require_answer(address: str) -> None:
    """Raise LaunchError if no server listens, since Ray would retry for two minutes."""
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
        with contextlib.suppress(OSError):
            address = address or current.read_text().strip()
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_DEADLINE_S).close()
    except OSError as error:
        raise no_cluster(address, error.strerror or str(error)) from error


def no_cluster(address: str, why: str) -> LaunchError:
    return LaunchError(
        f"no Ray cluster answers at {address}: {why}",
        hint="start one with `ray start --head` on one node and `ray start --address=HEAD:6379` on the "
        "others, or name it in deployment.ray.address",
    )


def _causes(error: BaseException | None) -> str:
    names = []
    while error is not None:
        names.append(f"{type(error).__name__} {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(names)
