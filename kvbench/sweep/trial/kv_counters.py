"""Where each engine reports how many KV transfers it made, how large they were and how long they took.

The one place that knows those names. Candidates in order: kvbench's own uniform family (the emulated
engine), NIXL's and Mooncake's histograms of vLLM, and the log line that vLLM writes every few seconds for
connectors without metrics (Mooncake before 0.33). The side that moves the bytes reports: D where it pulls,
P where it pushes; the other side's counters stay at zero. What an engine does not report is None, never 0.

vLLM counts a transfer per tensor-parallel rank (NIXL), or per rank and batch of requests (Mooncake). So its
bytes and descriptors are divided by requests: for NIXL by transfers over the whole number of parts that a
request has, since aborted requests have moved KV, too; for Mooncake by the requests that were finished. Its
time is that of one transfer, which is how long a request waits, as ranks move their parts at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvbench.hosts.log_tail import LogReader
from kvbench.hosts.telemetry import Metrics, difference

Pages = Sequence[tuple[Metrics, Metrics]]
"""Before and after, of each instance of one role."""


@dataclass(frozen=True)
class Family:
    """Names of one family; ``seconds``, ``nbytes``, ``descriptors`` are histograms, without suffixes."""

    seconds: str
    nbytes: str
    descriptors: str
    failed: tuple[str, ...]
    expired: tuple[str, ...]
    batches: bool = False
    """A transfer may hold several requests."""


def _vllm(prefix: str, *failed: str, batches: bool = False) -> Family:
    return Family(
        seconds=f"vllm:{prefix}_xfer_time_seconds",
        nbytes=f"vllm:{prefix}_bytes_transferred",
        descriptors=f"vllm:{prefix}_num_descriptors",
        failed=tuple(f"vllm:{prefix}_num_{name}_total" for name in failed),
        expired=(f"vllm:{prefix}_num_kv_expired_reqs_total",),
        batches=batches,
    )


# A read after its blocks had been given away counts as failed: its data may be wrong.
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
    """What the instances of one role counted of KV transfers during a trial. ``source`` is the metric."""

    source: str = ""
    transfers: float | None = None
    seconds: float | None = None
    nbytes: float | None = None
    descriptors: float | None = None
    failures: float | None = None
    expired: float | None = None
    batches: bool = True
    whole: bool = True
    """False if some transfers may be missing, so that only means of a transfer can be trusted."""


def grown(pages: Pages, name: str, **labels: str) -> float | None:
    """Growth of a counter over all instances; None if none of them reports it."""
    known = [value for start, end in pages if (value := difference(start, end, name, **labels)) is not None]
    return sum(known) if known else None


def role_kv(pages: Pages) -> RoleKv:
    """By the first family that counted something; failing that by the first that is there at all."""
    there = [(family, grown(pages, f"{family.seconds}_count")) for family in FAMILIES]
    known = [(family, count) for family, count in there if count is not None]
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
"""With more aborted requests than this, transfers in batches are not divided by requests."""


@dataclass(frozen=True)
class Served:
    """Requests that the servers finished, and how many of them were aborted."""

    ended: float = 0.0
    aborted: float = 0.0


def served_requests(pages: Pages) -> Served:
    """What the servers of one role count of requests."""
    ended = grown(pages, "vllm:request_success_total")
    aborted = grown(pages, "vllm:request_success_total", finished_reason="abort")
    return Served(ended or 0.0, aborted or 0.0)


def moved_requests(kv: RoleKv, served: Served) -> float | None:
    """How many requests' KV those transfers were; None if that is not known."""
    if not kv.whole or not kv.transfers:
        return None
    if kv.batches:
        # Of aborted requests nobody knows whether their KV had moved.
        finished = served.ended - served.aborted
        return finished if finished and served.aborted <= ABORTED_SHARE * served.ended else None
    # Of the aborted some have moved their KV: with half of them the number of parts rounds right.
    likely = served.ended - served.aborted / 2
    return kv.transfers / max(1, round(kv.transfers / likely)) if likely else kv.transfers


def kv_columns(roles: Mapping[str, RoleKv], served: Served) -> dict[str, Any]:
    """The KV columns of a trial: of the role that moved the most."""
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
    """The sums over all such lines. Each counts what came since the one before it."""
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
    if not seen:
        return RoleKv()
    return replace(RoleKv(LOG_SOURCE, whole=whole), **sums)


class KvLogs:
    """Collects the log lines of each role between two calls of ``take``."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        """``logs``: instance name (it starts with its role) → its log."""
        self._readers = {name: LogReader(path) for name, path in logs.items()}
        self._lines: dict[str, list[str]] = {}

    def poll(self) -> int:
        """Read on; the number of such lines since the last ``take``."""
        for name, reader in self._readers.items():
            found = [line for line in reader.drain() if _LINE.search(line)]
            if found:
                self._lines.setdefault(name.split("-")[0], []).extend(found)
        return sum(map(len, self._lines.values()))

    def take(self, *, whole: bool = True) -> dict[str, RoleKv]:
        """What each role's lines have reported since the last call."""
        self.poll()
        lines, self._lines = self._lines, {}
        return {role: logged_kv(mine, whole=whole) for role, mine in lines.items()}
