"""A network of its own for a chaos run: two hosts as namespaces, one of them with the process to cut off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from kvbench.hosts.lab.lab import Lab


@dataclass(frozen=True)
class FaultPlace:
    """Where a chaos run goes on. ``status``: it has gone on elsewhere, and ended so."""

    lab: Lab | None = None
    status: int | None = None


@contextmanager
def fault_lab(words: str, console: Console) -> Iterator[FaultPlace]:
    """Without words no lab."""
    yield FaultPlace()
