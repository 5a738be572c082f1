"""Whether each process of a run may open the files and sockets that the planned load needs."""

from __future__ import annotations

import math
import resource
from typing import Final

from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import LaunchError, Problem

LEAST_STREAMS: Final = 64
"""Connections that the load generator opens before any trial, at least (``LoadSpec.expected_streams``)."""
OTHER_FILES: Final = 64
"""Open files of a process besides its streams."""


def few_open_files(scenario: Scenario, rate: float = 0.0, concurrency: int = 0) -> Problem | None:
    """Return why the hard limit of open files is too low for a load; None if it is not.

    ``rate``: requests per second, 0 while a search has to find it. Each process raises its soft limit itself.
    Processes on other hosts have limits of their own.
    """
    if scenario.deployment.several_hosts:
        return None
    needed = open_files_needed(scenario, rate, concurrency)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return None
    return Problem(
        f"a process may open {hard} files and sockets (ulimit -Hn), the planned load needs {needed}",
        f"raise the hard limit (`ulimit -Hn {needed}` as root, LimitNOFILE= of a service, or "
        f"`--ulimit nofile={needed}` of a container), or offer less",
    )


def open_files_needed(scenario: Scenario, rate: float = 0.0, concurrency: int = 0) -> int:
    """Files and sockets that the busiest process has to open at once: kvbench's router has each stream on
    both sides. At a rate, so many requests are in flight as the SLO allows.
    """
    in_flight = min(math.ceil(rate * scenario.allowed_s), scenario.search.max_requests)
    streams = concurrency or max(LEAST_STREAMS, in_flight)
    sides = 2 if scenario.deployment.engine_options.starts_processes else 1
    return sides * streams + OTHER_FILES


def require_open_files(scenario: Scenario, rate: float = 0.0, concurrency: int = 0) -> None:
    """Raises LaunchError where ``few_open_files`` finds a problem."""
    problem = few_open_files(scenario, rate, concurrency)
    if problem is not None:
        raise LaunchError(problem.reason, hint=problem.fix)
