"""How much of a role's engines was in use during a trial: busy time, slots, queue, KV pool. Pure.

A simulated trial knows it exactly; of a measured one it comes from samples of the engines' gauges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final


@dataclass
class Use:
    """How much of the engines of one role was in use; times are shares of the trial, counts are per engine.

    ``slots_full_share``: all slots taken and somebody waiting. ``kv_full_share``: the first in the queue
    found too few free KV blocks. None is unknown, as on a real server that does not report it.
    """

    engines: int = 1
    busy_share: float | None = None
    running_mean: float | None = None
    running_peak: float | None = None
    waiting_mean: float | None = None
    waiting_peak: float | None = None
    kv_use_mean: float | None = None
    kv_use_peak: float | None = None
    slots: int | None = None
    slots_full_share: float | None = None
    kv_full_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Use:
        """Takes the figures it knows and leaves the others."""
        known = cls.__dataclass_fields__
        return cls(**{key: row[key] for key in known if row.get(key) is not None})


RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
KV_USE: Final = "vllm:kv_cache_usage_perc"
_KV_FULL: Final = 0.97
"""A request needs many blocks at once, so that a pool is full before its last block is taken."""


def sampled_use(rows: Iterable[Mapping[str, Any]], slots: int | None) -> dict[str, Use]:
    """The use by role from samples of gauges: rows with ``t_s``, ``source``, ``metric``, ``value``.

    A source is an instance's name, which begins with its role. ``slots``: max_num_seqs, where it is known.
    Roles without samples are left out.
    """
    moments: dict[str, dict[tuple[float, str], dict[str, float]]] = {}
    for row in rows:
        role = str(row["source"]).split("-")[0].split("/")[0]
        if row["metric"] in (RUNNING, WAITING, KV_USE) and role in ("prefill", "decode", "aggregated"):
            place = (float(row["t_s"]), str(row["source"]))
            moments.setdefault(role, {}).setdefault(place, {})[str(row["metric"])] = float(row["value"])
    return {role: _use_of_samples(seen, slots) for role, seen in moments.items()}


def _use_of_samples(seen: Mapping[tuple[float, str], Mapping[str, float]], slots: int | None) -> Use:
    running, waiting, kv = (
        [each[name] for each in seen.values() if name in each] for name in (RUNNING, WAITING, KV_USE)
    )
    queued = [each for each in seen.values() if each.get(WAITING, 0.0) > 0]
    full = None if slots is None else sum(each.get(RUNNING, 0.0) >= slots for each in queued)
    return Use(
        engines=len({source for _, source in seen}),
        running_mean=fmean(running) if running else None,
        running_peak=max(running, default=None),
        waiting_mean=fmean(waiting) if waiting else None,
        waiting_peak=max(waiting, default=None),
        kv_use_mean=fmean(kv) if kv else None,
        kv_use_peak=max(kv, default=None),
        slots=slots,
        slots_full_share=None if full is None else full / len(seen),
        kv_full_share=sum(each.get(KV_USE, 0.0) >= _KV_FULL for each in queued) / len(seen) if kv else None,
    )
