"""Load generator processes: how many, their reports, and the merge into one trial. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvbench.core.records import RequestRecord
from kvbench.errors import KvbenchError


@dataclass(frozen=True)
class Settled:
    """A request with its final outcome. ``index``: in the plan; times in seconds, None if it did not get
    there. ``turn``, ``session_s``: as in a RequestRecord."""

    index: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None
    error: str = ""
    turn: int | None = None
    session_s: float | None = None


@dataclass(frozen=True)
class Progress:
    """Counts of the running generator. ``settled``: outcomes since the last progress."""

    t_s: float = 0.0
    sent: int = 0
    done: int = 0
    met: int = 0
    missed: int = 0
    in_flight: int = 0
    waiting_first: int = 0
    lag_ms: float = 0.0
    settled: tuple[Settled, ...] = ()
    offsets_s: tuple[float, ...] = ()
    """Due times of the requests sent since the last progress, if not planned: turns of sessions."""
    prepared: int | None = None
    """Number of prepared requests, or None once the load runs."""

    @classmethod
    def from_json(cls, event: Mapping[str, Any]) -> Progress:
        known = {key: event[key] for key in cls.__dataclass_fields__ if key in event}
        known["settled"] = tuple(Settled(*fields) for fields in event.get("settled", ()))
        known["offsets_s"] = tuple(event.get("offsets_s", ()))
        return cls(**known)


@dataclass(frozen=True)
class LoadResult:
    """Records of every planned request that was sent or due, and client figures."""

    records: list[RequestRecord]
    reason: str
    duration_s: float
    client: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cancelled(self) -> int:
        """Number of requests dropped when the load was stopped."""
        return sum(record.error == "cancelled" for record in self.records)


def sum_progress(latest: Sequence[Progress], fresh: Progress) -> Progress:
    """Sum the workers' latest counts; ``fresh`` is the newest report."""
    return Progress(
        t_s=max(progress.t_s for progress in latest),
        sent=sum(progress.sent for progress in latest),
        done=sum(progress.done for progress in latest),
        met=sum(progress.met for progress in latest),
        missed=sum(progress.missed for progress in latest),
        in_flight=sum(progress.in_flight for progress in latest),
        waiting_first=sum(progress.waiting_first for progress in latest),
        lag_ms=max(progress.lag_ms for progress in latest),
        settled=fresh.settled,
        offsets_s=fresh.offsets_s,
    )


CHUNKS_PER_WORKER: Final = 40_000.0
"""Streamed chunks per second and process: under half of what one core records in Python (about 100,000, `make
perf-loadgen`), which leaves room for slower cores, bursts and the kernel."""
CHUNKS_PER_REQUEST: Final = 50.0
"""Cost of sending a request and settling its record, in chunks (of 5 to 6 µs)."""
REQUESTS_PER_WORKER: Final = 100
"""Fewest requests per process that pay for its start."""
APART_S: Final = 1e-3
"""Largest difference of the workers' start times, in seconds."""

_ADDED: Final = frozenset(
    {"cpu_s", "chunks", "reads", "streams_peak", "connections", "loop_stalls", "gc_collections"}
)
_EARLIEST: Final = frozenset({"started_monotonic_s", "started_unix_s"})


def workers_for(request_rate: float, output_len: int, num_requests: int, cores: int) -> int:
    """Return the processes for ``request_rate`` requests per second with ``output_len`` chunks each, at least
    1. One core stays free. Servers that merge tokens send fewer chunks than assumed."""
    chunks_per_s = request_rate * (output_len + CHUNKS_PER_REQUEST)
    wanted = chunks_per_s / CHUNKS_PER_WORKER
    most = min(cores - 1, num_requests // REQUESTS_PER_WORKER)
    # An infinite rate sends everything at once: as many as may be.
    return max(1, most if wanted >= most else math.ceil(wanted))


def workers_over(request_rate: float, output_len: int, num_requests: int, cores: Sequence[int]) -> int:
    """Return the same over hosts with these ``cores``: each gets 1 to cores − 1."""
    if len(cores) == 1:
        return workers_for(request_rate, output_len, num_requests, cores[0])
    room = len(cores) * max(1, min(cores) - 1)
    wanted = workers_for(request_rate, output_len, num_requests, room + 1)
    return max(1, min(max(wanted, len(cores)), num_requests))


def merge_clients(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge all workers' figures into one client's; with several, ``per_worker`` keeps each. Counts, CPU
    seconds and streams are added (peaks are an upper bound). Otherwise the worst counts. Differing texts
    become "mixed"."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for figure in figures for key in figure):
        values = [figure[key] for figure in figures if figure.get(key) is not None]
        joined[key] = _merge(key, values) if values else None
    joined["workers"] = len(figures)
    if len(figures) > 1:
        joined["per_worker"] = [dict(figure) for figure in figures]
    return joined


def _merge(key: str, values: Sequence[Any]) -> Any:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        if key in _ADDED:
            return sum(values)
        return min(values) if key in _EARLIEST else max(values)
    return values[0] if all(value == values[0] for value in values) else "mixed"


def index_of(record: RequestRecord) -> int:
    """Return the index in the plan, which ends the request id. Raises KvbenchError for another form."""
    digits = record.request_id.rpartition("-")[2]
    if not digits.isdecimal():
        raise KvbenchError(
            f"the load generator's record {record.request_id!r} does not contain its index in the plan"
        )
    return int(digits)


def merge_records(shares: Sequence[Sequence[RequestRecord]], planned: int | None) -> list[RequestRecord]:
    """Merge the workers' records in the plan's order. Worker k of n has requests k, k + n, k + 2n, …: each
    share must be a prefix of these, and complete if ``planned`` requests were sent (None: stopped). Raises
    KvbenchError."""
    placed = {}
    for worker, share in enumerate(shares):
        for position, record in enumerate(share):
            index, wanted = index_of(record), worker + position * len(shares)
            if index != wanted:
                raise KvbenchError(
                    f"the load generator's records do not match the plan: worker {worker} has request "
                    f"{index} instead of {wanted}, so one is missing, duplicated or another worker's",
                    hint="the trial is invalid; see the load generator's logs",
                )
            placed[index] = record
    if planned is not None and len(placed) != planned:
        missing = sorted(set(range(planned)) - set(placed))
        raise KvbenchError(
            f"the load generator sent {planned} requests and has records of {len(placed)}; missing: "
            + ", ".join(str(index) for index in missing[:10]),
            hint="the trial is invalid; see the load generator's logs",
        )
    # Of a closed loop, whose workers go on at their own pace, not that of the numbers.
    return sorted((placed[index] for index in sorted(placed)), key=lambda record: record.scheduled_s)


def turn_records(share: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return a session load's records in scheduled order. Answers determine which turns are sent, so only
    duplicates are errors. Raises KvbenchError."""
    counts = Counter(map(index_of, share))
    if double := [index for index, count in counts.items() if count > 1]:
        raise KvbenchError(f"the load generator has several records of request {double[0]} of a session")
    return sorted(share, key=lambda record: record.scheduled_s)


def require_common_start(clients: Sequence[Mapping[str, Any]]) -> None:
    """Raise KvbenchError if the workers' clocks do not share a start."""
    starts = [float(start) for client in clients if (start := client.get("started_monotonic_s")) is not None]
    if starts and max(starts) - min(starts) > APART_S:
        raise KvbenchError(
            f"the load generator's workers began {(max(starts) - min(starts)) * 1e3:.1f} ms apart",
            hint="the machine is too busy to start them together: use --workers 1, or free CPU",
        )
