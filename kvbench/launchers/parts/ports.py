"""Ports: is the planned one free, and which are free where the plan leaves the choice open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.scenario.scenario import Deployment
from kvbench.launchers.base import Launcher
from kvbench.launchers.parts.sockets import free_ports, port_in_use, require_free_port

__all__ = [
    "free_ports",
    "port_in_use",
    "require_free_port",
    "require_free_ports",
    "with_ports",
    "with_ports_at",
]

_HELPERS = "helpers"

Choose = Callable[[str, Sequence[int]], Sequence[int]]
"""Process name, counts → for each count the first of so many consecutive free ports."""


def with_ports(plan: DeploymentPlan, host: str) -> DeploymentPlan:
    """The plan with a free port of this machine wherever it leaves the choice open (port 0)."""
    return _with_chosen(plan, {_HELPERS: host}, lambda _, counts: free_ports(host, counts))


def with_ports_at(plan: DeploymentPlan, deployment: Deployment, launcher: Launcher) -> DeploymentPlan:
    """The same, with each process's ports chosen on the host where it will run."""
    names = [each.name for each in plan.instances] + ["router", _HELPERS]
    places = {name: f"{launcher.place_of(name).host} {deployment.address_of(name)}" for name in names}

    def choose(name: str, counts: Sequence[int]) -> Sequence[int]:
        return launcher.place_of(name).free_ports(deployment.address_of(name), counts)

    return _with_chosen(plan, places, choose)


def require_free_ports(plan: DeploymentPlan, deployment: Deployment, launcher: Launcher) -> None:
    """Raise PortInUseError if one of a deployment's ports is taken on the host where it is needed."""
    wanted: dict[str, list[tuple[str, int]]] = {"router": []}
    if plan.router_port:
        wanted["router"].append(("router", plan.router_port))
    wanted["router"] += [(f"{plan.label}'s helpers", port) for port in plan.service_ports]
    for each in plan.instances:
        ports = [(each.name, each.port), *((f"{each.name}'s side channel", p) for p in each.all_side_ports)]
        ports += [(f"{each.name}'s ranks", each.group_port)] if each.group_port else []
        wanted[each.name] = ports
    for name, needed in wanted.items():
        if needed:
            launcher.place_of(name).require_free(deployment.address_of(name), needed)


def _with_chosen(plan: DeploymentPlan, places: dict[str, str], choose: Choose) -> DeploymentPlan:
    """Asks once for all that is open in one place, so that nothing is given out twice."""
    open_: list[tuple[str, str, int]] = []
    if plan.router_port == 0:
        open_.append(("router", "port", 1))
    open_ += [(_HELPERS, str(index), 1) for index, port in enumerate(plan.service_ports) if port == 0]
    for each in plan.instances:
        if each.port == 0:
            open_.append((each.name, "port", 1))
        if each.side_port == 0:
            open_.append((each.name, "side_port", each.side_ports))
        if each.group_port == 0:
            open_.append((each.name, "group_port", 1))
    chosen: dict[tuple[str, str], int] = {}
    by_place: dict[str, list[tuple[str, str, int]]] = {}
    for name, what, count in open_:
        by_place.setdefault(places.get(name, places[_HELPERS]), []).append((name, what, count))
    for wanted in by_place.values():
        ports = choose(wanted[0][0], [count for _, _, count in wanted])
        chosen |= {(name, what): port for (name, what, _), port in zip(wanted, ports, strict=True)}
    return replace(
        plan,
        instances=tuple(
            replace(
                each,
                port=chosen.get((each.name, "port"), each.port),
                side_port=chosen.get((each.name, "side_port"), each.side_port),
                group_port=chosen.get((each.name, "group_port"), each.group_port),
            )
            for each in plan.instances
        ),
        router_port=chosen.get(("router", "port"), plan.router_port),
        service_ports=tuple(
            chosen.get((_HELPERS, str(index)), port) for index, port in enumerate(plan.service_ports)
        ),
    )
