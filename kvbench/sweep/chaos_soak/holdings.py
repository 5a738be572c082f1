"""What a deployment's processes hold: KV blocks by their metrics; memory, descriptors, threads by /proc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from kvbench.deployment.deployment import RunningDeployment
from kvbench.hosts.procfs import family
from kvbench.hosts.telemetry import Metrics
from kvbench.sweep.chaos_soak.strikes import kv_blocks
from kvbench.sweep.trial.kv_counters import FAMILIES


@dataclass(frozen=True)
class ProcessHoldings:
    """One process with its children. ``blocks`` of its KV pool are in use, None where it does not say;
    ``expired``: requests whose KV it gave up; ``served``: those that it finished since it was started.
    """

    pid: int = 0
    rss_bytes: int = 0
    descriptors: int = 0
    threads: int = 0
    blocks: float | None = None
    pool: int | None = None
    block_tokens: int | None = None
    expired: float | None = None
    served: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Holdings:
    """Of all processes, by name. What has ended is not among them."""

    of: Mapping[str, ProcessHoldings] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {name: each.to_json() for name, each in self.of.items()}


def holdings(deployment: RunningDeployment) -> Holdings:
    """As of now; a process that has ended or does not answer has no blocks to tell of."""
    pages = deployment.metrics()
    found = {}
    for process in deployment.processes:
        if process.poll() is not None:
            continue
        page = pages.get(process.name)
        known = kv_blocks(page)
        expired = [page.total(name) for each in FAMILIES for name in each.expired] if page else []
        counted = [each for each in expired if each is not None]
        found[process.name] = ProcessHoldings(
            process.pid,
            **_of_family(process.pid),
            blocks=None if known is None else round(known[0], 3),
            pool=None if known is None else known[1],
            block_tokens=_block_tokens(page),
            expired=max(counted, default=None),
            served=None if page is None else page.total("vllm:request_success_total"),
        )
    return Holdings(found)


def _block_tokens(page: Metrics | None) -> int | None:
    size = page.label("vllm:cache_config_info", "block_size") if page is not None else ""
    return int(size) if size.isdecimal() else None


def _of_family(pid: int) -> dict[str, int]:
    """Sums over a process and its children on this machine; zeros where it is on another host."""
    sums = {"rss_bytes": 0, "descriptors": 0, "threads": 0}
    for each in family(pid):
        try:
            process = psutil.Process(each)
            with process.oneshot():
                sums["rss_bytes"] += process.memory_info().rss
                sums["descriptors"] += process.num_fds()
                sums["threads"] += process.num_threads()
        except psutil.Error:
            continue
    return sums


def stranded_blocks(before: Holdings, after: Holdings) -> dict[str, float]:
    """Blocks in use after all requests have ended, beyond those before, by process; only those above 0."""
    found = {}
    for name, each in after.of.items():
        known = before.of.get(name, ProcessHoldings())
        if each.blocks is not None and (more := each.blocks - (known.blocks or 0.0)) > 0.5:
            found[name] = round(more)
    return dict(found)


def grown_bytes(before: Holdings, after: Holdings) -> dict[str, int]:
    """By how much the memory of each process grew that is the same one as before."""
    return {
        name: each.rss_bytes - before.of[name].rss_bytes
        for name, each in after.of.items()
        if name in before.of and before.of[name].pid == each.pid
    }
