"""How many processes generate the load, and how what they report becomes one trial's. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvbench.core.records import RequestRecord
from kvbench.errors import KvbenchError

CHUNKS_PER_WORKER: Final = 40_000.0
"""Streamed chunks a second that one process is given: under half of what a core can record in Python (about
100,000 on a quiet machine, `make perf-loadgen`; more where the hot path was compiled, which is not counted
on), so that a slower core, bursts and the kernel's own share leave room."""
CHUNKS_PER_REQUEST: Final = 50.0
"""What sending a request, reading its answer's head and settling its record costs, counted in chunks: 0.3 to
0.5 ms of CPU where a chunk takes 5 to 6 µs (measured against the exact server on a busy machine)."""
REQUESTS_PER_WORKER: Final = 100
"""With fewer each, starting another process costs more than it helps."""
APART_S: Final = 1e-3
"""Workers that began further apart than this have no common time zero."""

_ADDED: Final = frozenset(
    {"cpu_s", "chunks", "reads", "streams_peak", "connections", "loop_stalls", "gc_collections"}
)
_EARLIEST: Final = frozenset({"started_monotonic_s", "started_unix_s"})


def workers_for(request_rate: float, output_len: int, num_requests: int, cores: int) -> int:
    """Processes for a load of ``request_rate`` requests a second with ``output_len`` chunks each, at least 1.

    One core is always left to everything else. A server that merges tokens into one chunk makes it fewer
    chunks than this expects, never more.
    """
    chunks_per_s = request_rate * (output_len + CHUNKS_PER_REQUEST)
    wanted = chunks_per_s / CHUNKS_PER_WORKER
    most = min(cores - 1, num_requests // REQUESTS_PER_WORKER)
    # An infinite rate sends everything at once: as many as may be.
    return max(1, most if wanted >= most else math.ceil(wanted))


def workers_over(request_rate: float, output_len: int, num_requests: int, cores: Sequence[int]) -> int:
    """The same over several hosts with so many ``cores`` each, to which workers are dealt out in turn.

    Each host gets one at least, since it was named for that, and none more than its cores but one.
    """
    if len(cores) == 1:
        return workers_for(request_rate, output_len, num_requests, cores[0])
    room = len(cores) * max(1, min(cores) - 1)
    wanted = workers_for(request_rate, output_len, num_requests, room + 1)
    return max(1, min(max(wanted, len(cores)), num_requests))


def joined_client(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all workers as those of one client; each worker's own under ``per_worker`` if several.

    Counts, CPU seconds and streams are added (the streams' peaks may not have come together, so their sum
    is an upper bound). Of all else the worst counts: lags, and ``cpu_share``, since each worker has one core
    and the busiest is the one that is late. Words that differ become "mixed".
    """
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for each in figures for key in each):
        values = [each[key] for each in figures if each.get(key) is not None]
        joined[key] = _joined(key, values) if values else None
    joined["workers"] = len(figures)
    if len(figures) > 1:
        joined["per_worker"] = [dict(each) for each in figures]
    return joined


def _joined(key: str, values: Sequence[Any]) -> Any:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        if key in _ADDED:
            return sum(values)
        return min(values) if key in _EARLIEST else max(values)
    return values[0] if all(value == values[0] for value in values) else "mixed"


def index_of(record: RequestRecord) -> int:
    """A request's place in the plan, which ends its id. Raises KvbenchError for an id of another form."""
    digits = record.request_id.rpartition("-")[2]
    if not digits.isdecimal():
        raise KvbenchError(
            f"the load generator's record {record.request_id!r} does not say its place in the plan"
        )
    return int(digits)


def joined_records(shares: Sequence[Sequence[RequestRecord]], planned: int | None) -> list[RequestRecord]:
    """The workers' records as one trial's, in the plan's order, which is that of the scheduled sends.

    Worker k of n has requests k, k + n, k + 2n and so on: each share must be its beginning of these, and all
    of them if the whole plan of ``planned`` requests was sent (None: it was stopped). Raises KvbenchError.
    """
    placed = {}
    for worker, share in enumerate(shares):
        for place, record in enumerate(share):
            index, wanted = index_of(record), worker + place * len(shares)
            if index != wanted:
                raise KvbenchError(
                    f"the load generator's records are not the plan: worker {worker} has request {index} "
                    f"where {wanted} belongs, so one is missing, double or another worker's",
                    hint="the trial cannot be counted; the generator's logs may tell more",
                )
            placed[index] = record
    if planned is not None and len(placed) != planned:
        missing = sorted(set(range(planned)) - set(placed))
        raise KvbenchError(
            f"the load generator sent {planned} requests and has records of {len(placed)}; missing: "
            + ", ".join(str(index) for index in missing[:10]),
            hint="the trial cannot be counted; the generator's logs may tell more",
        )
    # Of a closed loop, whose workers go on at their own pace, not that of the numbers.
    return sorted((placed[index] for index in sorted(placed)), key=lambda record: record.scheduled_s)


def turn_records(share: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records of a load of sessions in scheduled order. Which of its turns are sent depends on answers,
    so that no number of them is expected; none may come twice. Raises KvbenchError.
    """
    places = Counter(map(index_of, share))
    if double := [place for place, count in places.items() if count > 1]:
        raise KvbenchError(f"the load generator has several records of request {double[0]} of a session")
    return sorted(share, key=lambda record: record.scheduled_s)


def require_common_start(clients: Sequence[Mapping[str, Any]]) -> None:
    """Raises KvbenchError if the workers' times do not count from one moment."""
    starts = [float(start) for each in clients if (start := each.get("started_monotonic_s")) is not None]
    if starts and max(starts) - min(starts) > APART_S:
        raise KvbenchError(
            f"the load generator's workers began {(max(starts) - min(starts)) * 1e3:.1f} ms apart",
            hint="the machine is too busy to start them together: use fewer (--workers 1), or free CPU",
        )
