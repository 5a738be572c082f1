"""How raw transfers are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """How to measure. Times in seconds; ``options`` are those of backends, by backend name."""

    seconds: float = 0.5
    min_calls: int = 20
    max_seconds: float = 5.0
    """A case ends after this time, also with fewer than ``min_calls`` calls."""
    open_s: float = 15.0
    connect_s: float = 5.0
    call_s: float = 5.0
    """Deadline of one transfer; more for hundreds of megabytes (``measuring.SLOWEST_BYTES_PER_S``)."""
    seed: int = 0
    verify: bool = True
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lab: str = ""
    """What a lab is called in the rows; empty on real hosts."""
    burst_bytes: int | None = None
    """What a lab's shaper lets through at once, of each NIC."""
    nic_gb_per_s: float | None = None
    """Line rate of each NIC where the driver does not know it, as in a lab."""
