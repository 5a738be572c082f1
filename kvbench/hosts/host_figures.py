"""What a machine did during a trial, from two readings of its counters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from kvbench.core.gates.evidence import HostFigures, NicFigures
from kvbench.hosts.devices import NicReading
from kvbench.hosts.telemetry import HostReading

SLOWED_SHARE: Final = 0.01
MOST_TAKERS: Final = 3
TAKER_SHARE: Final = 0.02
"""Who took less is not named."""


def host_figures(before: HostReading, after: HostReading) -> HostFigures:
    """Load average before the trial; what the machine did for others, and what it withheld, during it."""
    cores = os.cpu_count() or 1
    elapsed_s = max(1e-9, after.time_s - before.time_s)
    capacity_s = elapsed_s * cores
    others = (after.cpu_s - before.cpu_s) - (after.own_cpu_s - before.own_cpu_s)
    throttled = _growth(before.throttled_s, after.throttled_s)
    pressure = _growth(before.pressure_s, after.pressure_s)
    used = (after.cpu_s - before.cpu_s) + (after.steal_s - before.steal_s)
    return HostFigures(
        load_average=before.load_average,
        cpu_count=cores,
        steal_share=max(0.0, after.steal_s - before.steal_s) / capacity_s,
        other_cpu_share=max(0.0, others) / capacity_s,
        throttled_share=None if throttled is None else throttled / elapsed_s,
        thermal_events=_growth(before.thermal_events, after.thermal_events),
        gpu_slowdowns=tuple(_slowdowns(before.gpu_slowed_s, after.gpu_slowed_s, elapsed_s)),
        busy_share=min(1.0, max(0.0, used) / capacity_s),
        pressure_share=None if pressure is None else min(1.0, pressure / elapsed_s),
        takers=tuple(_takers(before, after, capacity_s)),
        gpu_watts=_watts(before, after, elapsed_s),
        nics={
            name: _nic_figures(start, end)
            for name, end in after.nics.items()
            if (start := before.nics.get(name)) is not None
        },
    )


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _slowdowns(before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float) -> Iterator[str]:
    for name, seconds in after.items():
        share = (seconds - before.get(name, seconds)) / elapsed_s
        if share > SLOWED_SHARE:
            yield f"{name} for {share:.0%} of the time"


def _watts(before: HostReading, after: HostReading, elapsed_s: float) -> dict[str, float]:
    """Mean power by GPU; without those whose counter began anew."""
    grown = {
        gpu: joules - before.gpu_energy_j[gpu]
        for gpu, joules in after.gpu_energy_j.items()
        if gpu in before.gpu_energy_j
    }
    return {gpu: joules / elapsed_s for gpu, joules in grown.items() if joules >= 0}


def _takers(before: HostReading, after: HostReading, capacity_s: float) -> list[str]:
    """The names under which others took the most CPU, as ``cc1plus 31 %``; one that has ended is not seen."""
    taken: dict[str, float] = {}
    for key, (name, seconds) in after.others.items():
        grown = seconds - before.others.get(key, (name, 0.0))[1]
        taken[name] = taken.get(name, 0.0) + grown
    most = sorted(taken.items(), key=lambda pair: -pair[1])[:MOST_TAKERS]
    shares = [(name, seconds / capacity_s) for name, seconds in most]
    return [f"{name} {share:.0%}" for name, share in shares if share > TAKER_SHARE]


def _nic_figures(before: NicReading, after: NicReading) -> NicFigures:
    return NicFigures(
        after.kind,
        max(0.0, after.sent_bytes - before.sent_bytes),
        max(0.0, after.received_bytes - before.received_bytes),
        after.bytes_per_s,
        after.loopback,
    )
