"""Ports: is the planned one free, and which are free where the plan leaves the choice open."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace

from kvbench.core.plan import DeploymentPlan, InstancePlan
from kvbench.errors import PortInUseError


def require_free_port(host: str, port: int, name: str) -> None:
    """Raise PortInUseError if nothing can be bound to ``host:port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise port_in_use(host, port, name) from error


def port_in_use(host: str, port: int, name: str) -> PortInUseError:
    """The error for a taken port, with the way around it."""
    return PortInUseError(
        f"port {host}:{port}, planned for {name}, is in use",
        hint="choose others with --set deployment.base_port=PORT (0: any free ones), or end what holds it",
    )


def with_ports(plan: DeploymentPlan, host: str) -> DeploymentPlan:
    """The plan with a free port wherever it leaves the choice open (port 0)."""
    with ExitStack() as held:

        def chosen(port: int | None) -> int | None:
            if port != 0:
                return port
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind((host, 0))
            return int(probe.getsockname()[1])

        def chosen_range(each: InstancePlan) -> int | None:
            if each.side_port != 0 or each.side_ports == 1:
                return chosen(each.side_port)
            return _free_range(host, each.side_ports, held)

        instances = tuple(
            replace(each, port=chosen(each.port) or 0, side_port=chosen_range(each))
            for each in plan.instances
        )
        return replace(
            plan,
            instances=instances,
            router_port=chosen(plan.router_port),
            service_ports=tuple(chosen(port) or 0 for port in plan.service_ports),
        )


def _free_range(host: str, count: int, held: ExitStack) -> int:
    """The first of ``count`` consecutive free ports, held until ``held`` closes. Raises PortInUseError."""
    for _ in range(50):
        with ExitStack() as attempt:
            first = attempt.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            first.bind((host, 0))
            start = int(first.getsockname()[1])
            try:
                for port in range(start + 1, start + count):
                    attempt.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).bind(
                        (host, port)
                    )
            except (OSError, OverflowError):
                continue
            held.push(attempt.pop_all())
            return start
    raise PortInUseError(
        f"found no {count} consecutive free ports on {host}", hint="choose with deployment.base_port"
    )
