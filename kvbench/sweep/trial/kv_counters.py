"""Read number, size and duration of KV transfers from each engine; the only module with those metrics' names.

Order: kvbench's own family (emulated engine), the NIXL and Mooncake histograms of vLLM, vLLM's periodic log
line for connectors without metrics (Mooncake before 0.33). Only the active side counts: D if it pulls, P if
it pushes. Figures that are not reported are None, never 0.

vLLM counts one transfer per rank (NIXL), or per rank and batch (Mooncake). Bytes and descriptors are divided
by requests: for NIXL transfers / parts per request, as aborted requests moved KV too; for Mooncake finished
requests. The time is one transfer's, as ranks transfer concurrently."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvbench.hosts.log_tail import LogReader
from kvbench.hosts.telemetry import Metrics, difference

Pages = Sequence[tuple[Metrics, Metrics]]
"""(before, after) of each instance of one role."""


@dataclass(frozen=True)
class Family:
    """Metric names of one family; histograms are without suffixes."""

    seconds: str
    nbytes: str
    descriptors: str
    failed: tuple[str, ...]
    expired: tuple[str, ...]
    batches: bool = False
    """Whether a transfer may hold several requests."""


def _vllm(prefix: str, *failed: str, batches: bool = False) -> Family:
    return Family(
        seconds=f"vllm:{prefix}_xfer_time_seconds",
        nbytes=f"vllm:{prefix}_bytes_transferred",
        descriptors=f"vllm:{prefix}_num_descriptors",
        failed=tuple(f"vllm:{prefix}_num_{name}_total" for name in failed),
        expired=(f"vllm:{prefix}_num_kv_expired_reqs_total",),
        batches=batches,
    )


# A read after its blocks were freed counts as failed: its data may be wrong.
_NIXL: Final = _vllm("nixl", "failed_transfers", "failed_notifications", "notifications_after_expiry")
_MOONCAKE: Final = _vllm("mooncake", "failed_transfers", "failed_recvs", batches=True)
FAMILIES: Final = (
    Family(
        seconds="kvbench:kv_transfer_seconds",
        nbytes="kvbench:kv_transfer_bytes",
        descriptors="kvbench:kv_transfer_descriptors",
        failed=("kvbench:kv_transfer_failures_total",),
        expired=(*_NIXL.expired, *_MOONCAKE.expired, "kvbench:kv_xfer_num_kv_expired_reqs_total"),
    ),
    _NIXL,
    _MOONCAKE,
)


@dataclass(frozen=True)
class RoleKv:
    """KV transfers counted by the instances of one role during a trial. ``source``: the metric."""

    source: str = ""
    transfers: float | None = None
    seconds: float | None = None
    nbytes: float | None = None
    descriptors: float | None = None
    failures: float | None = None
    expired: float | None = None
    batches: bool = True
    whole: bool = True
    """False if transfers may be missing; then only per-transfer means are valid."""


def grown(pages: Pages, name: str, **labels: str) -> float | None:
    """Growth of a counter over all instances, or None if none reports it."""
    known = [value for start, end in pages if (value := difference(start, end, name, **labels)) is not None]
    return sum(known) if known else None


def role_kv(pages: Pages) -> RoleKv:
    """Read the first family that counted something, else the first one reported."""
    counts = [(family, grown(pages, f"{family.seconds}_count")) for family in FAMILIES]
    known = [(family, count) for family, count in counts if count is not None]
    if not known:
        return RoleKv()
    family, count = next((pair for pair in known if pair[1]), known[0])
    return RoleKv(
        source=family.seconds,
        transfers=count,
        seconds=grown(pages, f"{family.seconds}_sum"),
        nbytes=grown(pages, f"{family.nbytes}_sum"),
        descriptors=grown(pages, f"{family.descriptors}_sum"),
        failures=_sum(grown(pages, name) for name in family.failed),
        expired=_sum(grown(pages, name) for name in family.expired),
        batches=family.batches,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


ABORTED_SHARE: Final = 0.02
"""Share of aborted requests above which batched transfers are not divided by requests."""


@dataclass(frozen=True)
class Served:
    """Requests finished by the servers, and aborted ones among them."""

    ended: float = 0.0
    aborted: float = 0.0


def served_requests(pages: Pages) -> Served:
    ended = grown(pages, "vllm:request_success_total")
    aborted = grown(pages, "vllm:request_success_total", finished_reason="abort")
    return Served(ended or 0.0, aborted or 0.0)


def moved_requests(kv: RoleKv, served: Served) -> float | None:
    """Number of requests behind those transfers, or None."""
    if not kv.whole or not kv.transfers:
        return None
    if kv.batches:
        # It is unknown whether the KV of aborted requests had moved.
        finished = served.ended - served.aborted
        return finished if finished and served.aborted <= ABORTED_SHARE * served.ended else None
    # Some aborted requests moved their KV: counting half of them rounds the number of parts correctly.
    likely = served.ended - served.aborted / 2
    return kv.transfers / max(1, round(kv.transfers / likely)) if likely else kv.transfers


def kv_columns(roles: Mapping[str, RoleKv], served: Served) -> dict[str, Any]:
    """KV columns of a trial, from the role that moved the most."""
    role, kv = max(roles.items(), key=lambda item: item[1].transfers or 0.0, default=("", RoleKv()))
    columns: dict[str, Any] = {
        "kv_bytes_per_request": None,
        "kv_transfer_ms_per_request": None,
        "kv_descriptors_per_request": None,
        "kv_transfers": kv.transfers or None,
        "kv_source": "",
    }
    if not kv.transfers:
        return columns
    requests = moved_requests(kv, served)
    columns["kv_source"] = f"{kv.source} of {role}"
    if kv.seconds is not None:
        columns["kv_transfer_ms_per_request"] = kv.seconds / kv.transfers * 1e3
    if requests:
        columns["kv_bytes_per_request"] = kv.nbytes / requests if kv.nbytes else None
        columns["kv_descriptors_per_request"] = kv.descriptors / requests if kv.descriptors else None
    return columns


# --- the log line ----------------------------------------------------------------------------------

LOG_SOURCE: Final = "log line 'KV Transfer metrics'"
LOG_INTERVAL_ENV: Final = "VLLM_LOG_STATS_INTERVAL"
DEFAULT_LOG_INTERVAL_S: Final = 10.0  # vLLM's
_SUMS: Final = ("transfers", "seconds", "nbytes", "descriptors", "failures", "expired")
_LINE: Final = re.compile(r"KV Transfer metrics: (.+)$")
_PAIR: Final = re.compile(r"([A-Z][A-Za-z0-9 /()]*)=(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def logged_kv(lines: Iterable[str], *, whole: bool = True) -> RoleKv:
    """Sum such log lines; each counts since the one before."""
    sums: dict[str, Any] = dict.fromkeys(_SUMS, 0.0)
    seen = False
    for line in lines:
        match = _LINE.search(line)
        if match is None:
            continue
        pairs = {name.strip(): float(value) for name, value in _PAIR.findall(match[1])}
        count = pairs.get("Num successful transfers", 0.0)
        seen = True
        sums["transfers"] += count
        sums["seconds"] += count * pairs.get("Avg xfer time (ms)", 0.0) / 1e3
        sums["nbytes"] += count * pairs.get("Avg MB per transfer", 0.0) * 2**20
        sums["descriptors"] += count * pairs.get("Avg number of descriptors", 0.0)
        sums["failures"] += pairs.get("Num failed transfers", 0.0) + pairs.get("Num failed recvs", 0.0)
        sums["expired"] += pairs.get("Num KV expired reqs", 0.0)
    return RoleKv() if not seen else replace(RoleKv(LOG_SOURCE, whole=whole), **sums)


class KvLogs:
    def __init__(self, logs: Mapping[str, Path]) -> None:
        """``logs``: instance name (it starts with its role) → its log."""
        self._readers = {name: LogReader(path) for name, path in logs.items()}
        self._lines: dict[str, list[str]] = {}

    def poll(self) -> int:
        """Read on; return the number of such lines since the last ``take``."""
        for name, reader in self._readers.items():
            if found := [line for line in reader.drain() if _LINE.search(line)]:
                self._lines.setdefault(name.split("-")[0], []).extend(found)
        return sum(map(len, self._lines.values()))

    def take(self, *, whole: bool = True) -> dict[str, RoleKv]:
        """Return role → counts since the last call."""
        self.poll()
        lines, self._lines = self._lines, {}
        return {role: logged_kv(role_lines, whole=whole) for role, role_lines in lines.items()}
