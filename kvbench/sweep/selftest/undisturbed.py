"""A pass of a benchmark is measured again if the machine did other work meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvbench.core.gates.client import cpu_taken
from kvbench.core.gates.evidence import GateLimits, HostFigures
from kvbench.hosts.telemetry import host_figures, read_host

Found = TypeVar("Found")

TRIES: Final = 3


@dataclass(frozen=True)
class LeastDisturbed(Generic[Found]):
    """What was found, what else the machine did meanwhile, and how many passes it took."""

    found: Found
    host: HostFigures
    tries: int


def disturbance(host: HostFigures) -> str:
    """What took the CPU meanwhile, in words; empty if the machine was left alone, as gates see it."""
    return " and ".join(cpu_taken(host, GateLimits()))


def least_disturbed(
    measure: Callable[[str], Found], label: str, say: Callable[[str], None]
) -> LeastDisturbed[Found]:
    """The first pass that nothing disturbed; of ``TRIES`` disturbed ones the one that was least.

    ``measure`` gets a name of its own for each pass, ``say`` why there is another.
    """
    passes: list[tuple[Found, HostFigures]] = []
    while len(passes) < TRIES:
        before = read_host(slowdowns=False)
        found = measure(f"{label}-{len(passes)}")
        host = host_figures(before, read_host(slowdowns=False))
        passes.append((found, host))
        disturbed = disturbance(host)
        if not disturbed:
            return LeastDisturbed(found, host, len(passes))
        say(f"{label}: {disturbed}{', so it is measured again' if len(passes) < TRIES else ''}")
    found, host = min(
        passes, key=lambda each: (each[1].steal_share or 0.0) + (each[1].other_cpu_share or 0.0)
    )
    return LeastDisturbed(found, host, TRIES)
