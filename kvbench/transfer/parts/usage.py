"""What a worker's process and its host have used so far: read before and after a window."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from kvbench.hosts import devices


def children_cpu_s() -> float:
    """CPU time of the processes that this one has started, and theirs, in steps of 10 ms."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            used = child.cpu_times()
        except psutil.Error:
            continue  # it has just ended
        total += used.user + used.system
    return total


def counters() -> dict[str, Any]:
    """Clock, CPU time of this process and its children, bytes of each NIC, CPU times of the host."""
    nics = {name: asdict(reading) for name, reading in devices.nic_counters(Path("/")).items()}
    # Where /sys shows another network namespace, these are still our own.
    for name, seen in psutil.net_io_counters(pernic=True, nowrap=False).items():
        own = asdict(devices.NicReading("ip", seen.bytes_sent, seen.bytes_recv, None, name == "lo"))
        nics.setdefault(name, own)
    host = psutil.cpu_times()
    return {
        "clock_ns": time.perf_counter_ns(),
        "cpu_s": time.process_time() + children_cpu_s(),
        "nics": nics,
        "load": os.getloadavg()[0],
        "host_cpu_s": host.user + host.nice + host.system,
        "steal_s": float(getattr(host, "steal", 0.0)),
        "cores": len(os.sched_getaffinity(0)),
    }
