"""Figures and warnings of a measured transfer's row, and comparison of two runs. No I/O.

A row has percentiles, bandwidth against limits, CPU cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

import numpy as np

from kvbench.core.stats import sectioned, t_quantile
from kvbench.core.transfers.records import Case, TransferRecord, TransferWarning

PERCENTILES: Final[Mapping[str, float]] = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
LIMIT_BACKENDS: Final[Mapping[str, str]] = {"memcpy": "memcpy", "tcp": "tcp"}
"""Column → backend that is a limit to the other rows of the same run."""
WITHIN_ONE_HOST: Final = frozenset({"memcpy", "shm"})
"""Backends faster than any network, without a TCP limit."""
CONFIDENCE: Final = 0.99
"""High, because a matrix has dozens of cases."""
MOST_SECTIONS: Final = 20
"""Most sections of neighbouring calls for the standard error."""
CALLS_PER_SECTION: Final = 2
LEAST_CALLS: Final = 5 * CALLS_PER_SECTION


@dataclass(frozen=True)
class CallTimes:
    """Times of single calls in seconds; None with too few calls."""

    calls: int = 0
    mean: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    p999: float | None = None


def calls_needed(share: float) -> int:
    """Fewest calls for a percentile: one of them at least has to lie beyond it; the median needs three."""
    return max(3, math.ceil(round(1 / (1 - share), 6)))


def call_times(times_s: Sequence[float]) -> CallTimes:
    """Figures of the calls' times; a percentile is a time that really occurred (the next higher one)."""
    data = np.sort(np.asarray(times_s, np.float64))
    if not len(data):
        return CallTimes()
    known = {
        name: float(np.quantile(data, share, method="higher"))
        for name, share in PERCENTILES.items()
        if len(data) >= calls_needed(share)
    }
    return CallTimes(len(data), float(data.mean()), float(data[0]), float(data[-1]), **known)


@dataclass(frozen=True)
class Figures:
    """Figures of one row. Shares: 1.0 is the whole limit; None without such a limit."""

    times: CallTimes
    gb_per_s: float | None = None
    of_line_rate: float | None = None
    of_memcpy: float | None = None
    of_tcp: float | None = None
    cpu_s_per_gb: float | None = None
    """CPU-seconds of both sides for 10⁹ bytes."""


def figures(record: TransferRecord, run: Iterable[TransferRecord] = ()) -> Figures:
    """Return the figures of a row, with the limits measured in the same ``run`` between its hosts."""
    if record.status != "ok":
        return Figures(CallTimes())
    limits: dict[str, float] = {}
    if record.line_rate_gb_per_s:
        limits["line"] = record.line_rate_gb_per_s
    found = _limit_rates(record.case, (other for other in run if other.pair == record.pair))
    limits |= {column: found[name] for column, name in LIMIT_BACKENDS.items() if name in found}
    rate = record.gb_per_s

    def share(limit: str) -> float | None:
        backend = record.case.backend
        if rate is None or limit not in limits or backend == LIMIT_BACKENDS.get(limit):
            return None
        if limit == "tcp" and backend in WITHIN_ONE_HOST:
            return None
        return rate / limits[limit]

    moved = record.calls * record.nbytes
    spent = [cpu for cpu in (record.initiator_cpu_s, record.target_cpu_s) if cpu is not None]
    return Figures(
        call_times(record.call_s),
        rate,
        share("line"),
        share("memcpy"),
        share("tcp"),
        sum(spent) / (moved / 1e9) if spent and moved and rate is not None else None,
    )


def _limit_rates(case: Case, run: Iterable[TransferRecord]) -> dict[str, float]:
    """Return GB/s of the same transfer by each limit backend, from the row with the most equal axes."""
    best: dict[str, tuple[int, float]] = {}
    for other in run:
        name = other.case.backend
        if name not in LIMIT_BACKENDS.values() or other.status != "ok" or not other.gb_per_s:
            continue
        if _shape(other.case) != _shape(case):
            continue
        # A limit over NICs must use as many NICs.
        if other.case.nics not in (0, case.nics):
            continue
        likeness = (other.case.nics == case.nics) + (other.case.merged == case.merged)
        if name not in best or likeness > best[name][0]:
            best[name] = (likeness, other.gb_per_s)
    return {name: rate for name, (_, rate) in best.items()}


def _shape(case: Case) -> tuple[object, ...]:
    sides = (case.initiators, case.targets)
    size = (case.block_bytes, case.batch_size, case.regions)
    return (*size, case.op, case.threads, sides, case.memory, case.scattered)


# --- two runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One case in two runs. ``ratio``: after / before in calls per second, None if not significant."""

    case: Case
    before_gb_per_s: float | None
    after_gb_per_s: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    """99 % interval from the spread of the calls, or None with too few."""
    before_p50_s: float | None = None
    after_p50_s: float | None = None
    why: str = ""
    """Reason without a ratio."""
    pair: str = ""
    """The pair of hosts, if named."""

    def text(self) -> str:
        if self.ratio is None:
            return self.why
        word = "faster" if self.ratio > 1 else "slower"
        return f"{self.ratio:.2f}× [{self.low:.2f}, {self.high:.2f}] {word}"


def compare(before: Iterable[TransferRecord], after: Iterable[TransferRecord]) -> list[Change]:
    """Return each case of the second run with the same case of the first, then cases of the first only."""
    old = {(record.pair, record.case.key): record for record in before if record.status != "skipped"}
    changes = []
    for record in after:
        if record.status != "skipped":
            earlier = old.pop((record.pair, record.case.key), None)
            changes.append(replace(_change(record.case, earlier, record), pair=record.pair))
    left = [replace(_change(record.case, record, None), pair=record.pair) for record in old.values()]
    return [*changes, *left]


def _change(case: Case, before: TransferRecord | None, after: TransferRecord | None) -> Change:
    known = Change(case, _rate(before), _rate(after))
    if before is None or after is None:
        return replace(known, why="only in " + ("this run" if before is None else "the other run"))
    middle = [call_times(record.call_s).p50 for record in (before, after)]
    known = replace(known, before_p50_s=middle[0], after_p50_s=middle[1])
    for record, name in ((before, "the other run"), (after, "this run")):
        if record.status != "ok" or not _calls_per_s(record):
            return replace(known, why=f"failed in {name}")
        if len(record.call_s) < LEAST_CALLS:
            return replace(known, why=f"inconclusive: {len(record.call_s)} calls in {name}")
    ratio = _calls_per_s(after) / _calls_per_s(before)
    spread = math.exp(_spread(before.call_s, after.call_s))
    low, high = ratio / spread, ratio * spread
    if low <= 1 <= high:
        return replace(known, low=low, high=high, why="no significant difference")
    return replace(known, ratio=ratio, low=low, high=high)


def apart(one: TransferRecord, other: TransferRecord) -> bool:
    """Return whether the bandwidths of two rows differ by more than their calls' spread allows."""
    if min(len(one.call_s), len(other.call_s)) < LEAST_CALLS or not one.gb_per_s or not other.gb_per_s:
        return False
    return abs(math.log(one.gb_per_s / other.gb_per_s)) > _spread(one.call_s, other.call_s)


def _spread(one: Sequence[float], other: Sequence[float]) -> float:
    """Return half the interval of the log ratio of mean times."""
    error = math.hypot(_relative_error(one), _relative_error(other))
    degrees = min(_sections(one), _sections(other)) - 1
    return min(50.0, t_quantile(1 - (1 - CONFIDENCE) / 2, degrees) * error)


def _sections(times_s: Sequence[float]) -> int:
    return min(MOST_SECTIONS, len(times_s) // CALLS_PER_SECTION)


def _calls_per_s(record: TransferRecord) -> float:
    """Return calls per second: bandwidth for equal transfers, known even without bytes."""
    return record.calls / record.window_s if record.window_s > 0 else 0.0


def _rate(record: TransferRecord | None) -> float | None:
    return record.gb_per_s if record is not None and record.status == "ok" else None


def _relative_error(times_s: Sequence[float]) -> float:
    mean, error = sectioned(np.asarray(times_s, np.float64), _sections(times_s), None)
    return error / mean if mean > 0 else math.inf


MIN_CALLS: Final = 20
MIN_WINDOW_S: Final = 0.2
MANY_CALLS: Final = 1000
"""Calls that suffice even in a short window."""
BUSY_SHARE: Final = 0.9
"""Cores busy from which polling is reported."""
BUSY_CALL_S: Final = 2e-3
"""Shorter calls are polled, so their CPU time says nothing about the library."""
OTHERS_SHARE: Final = 0.15
STEAL_SHARE: Final = 0.02
BURST_SHARE: Final = 0.05
CARRIED_SHARE: Final = 0.9
EVEN_SHARE: Final = 0.1

_MEANS: Final[Mapping[str, Sequence[str]]] = {
    "tcp": ("tcp", "socket"),
    "rdma": ("rdma", "rc_", "dc_", "ud_", "rc/", "verbs", "mlx5", "ib/"),
    "cma": ("cma",),
    "cuda_ipc": ("cuda_ipc",),
    "p2p": ("p2p",),
    "shm": ("shm", "sysv", "posix", "memfd"),
    "posix": ("posix", "file"),
}
"""Parts of transport names per requested protocol."""


@dataclass(frozen=True)
class CaseConditions:
    """The coordinator's conditions of a row."""

    cores: int = 0
    load_before: float | None = None
    """Load average before the first case, without kvbench's work."""
    others_cpu_s: float = 0.0
    """Other processes' CPU time on the initiators' host in the window."""
    steal_s: float = 0.0
    burst_bytes: int | None = None
    """Burst of one NIC's shaper in bytes."""
    memcpy_gb_per_s: float | None = None
    moves_bytes: bool = True
    carried: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Side → NIC → bytes in the window, for requested and all other NICs."""
    requested_nics: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Side → requested NICs."""


def warnings(record: TransferRecord, seen: CaseConditions) -> list[TransferWarning]:
    rules = (_busy_machine, _few_repeats, _burst, _busy_waiting, _nics, _transport, _verified)
    return [warning for rule in rules for warning in rule(record, seen)]


def _busy_machine(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    room = seen.cores * record.window_s
    advice = "repeat it on a quiet machine"
    if seen.load_before is not None and seen.cores and seen.load_before > seen.cores:
        evidence = {"load_average": seen.load_before, "cores": seen.cores}
        message = f"the load average was {seen.load_before:.1f} on {seen.cores} cores before the first case"
        yield TransferWarning("machine_busy", message, advice, evidence)
    elif room and seen.others_cpu_s > OTHERS_SHARE * room:
        share = seen.others_cpu_s / room
        message = f"other processes took {share:.0%} of this machine's CPU time in the window"
        yield TransferWarning("machine_busy", message, advice, {"others_cpu_s": seen.others_cpu_s})
    if room and seen.steal_s > STEAL_SHARE * room:
        message = f"the hypervisor took {seen.steal_s / room:.0%} of this machine's CPU time in the window"
        yield TransferWarning("cpu_stolen", message, advice, {"steal_s": seen.steal_s})


def _few_repeats(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    short = record.window_s < MIN_WINDOW_S and record.calls < MANY_CALLS
    if record.calls < MIN_CALLS or short:
        message = f"only {record.calls} calls in {record.window_s:.2f} s"
        evidence = {"calls": record.calls, "window_s": record.window_s}
        yield TransferWarning("few_repeats", message, "measure each case for longer (--seconds)", evidence)


def _burst(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    if not seen.burst_bytes:
        return
    nics = max(record.case.nics, 1)
    moved = record.calls * record.nbytes / nics
    evidence = {"burst_bytes": seen.burst_bytes, "bytes_per_nic": moved}
    if seen.burst_bytes > BURST_SHARE * moved:
        message = (
            f"the shaper's burst is {seen.burst_bytes / moved:.0%} of the bytes per NIC" if moved else ""
        )
        advice = "measure the case for longer (--seconds): the unshaped burst inflates the rate"
        yield TransferWarning("near_burst", message or "no bytes passed the NICs", advice, evidence)
    elif record.nbytes <= 2 * seen.burst_bytes * nics:
        message = f"one transfer ({record.nbytes:,} bytes) is not much larger than the shaper's burst"
        advice = "its latency may be that of the unshaped link; use larger or more blocks"
        yield TransferWarning("near_burst", message, advice, evidence)


def _busy_waiting(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    if record.initiator_cpu_s is None or not record.window_s or not record.call_s:
        return
    share = record.initiator_cpu_s / record.window_s / max(record.case.initiators, 1)
    speed, limit = record.gb_per_s, seen.memcpy_gb_per_s
    below = speed is None or limit is None or speed < limit
    copies = record.case.backend in ("memcpy", "shm", "null")
    if share >= BUSY_SHARE and below and not copies and median(record.call_s) > BUSY_CALL_S:
        message = f"the library keeps {share:.1f} cores busy at the initiator and is slower than memcpy"
        advice = "it waits by polling, which takes CPU from other processes on a machine with few cores"
        yield TransferWarning("busy_waiting", message, advice, {"cpu_share": share})


def _nics(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    total = record.calls * record.nbytes
    for side, names in seen.requested_nics.items():
        if not names or not seen.moves_bytes or not total:
            continue
        carried = seen.carried.get(side, {})
        share = total / len(names)
        idle = [name for name in names if carried.get(name, 0) < EVEN_SHARE * share]
        moved = sum(carried.get(name, 0) for name in names)
        evidence = {"side": side, "asked": list(names), "carried": dict(carried), "bytes": total}
        if moved < CARRIED_SHARE * total:
            others = {name: count for name, count in carried.items() if name not in names}
            where = max(others, key=lambda name: others[name], default="")
            went = f"; {where} carried {others[where] / total:.0%}" if where and others[where] else ""
            message = f"at the {side} only {moved / total:.0%} of the bytes passed the requested NICs{went}"
            advice = "check which device or transport the library chose; `kvbench doctor` lists them"
            yield TransferWarning("bytes_elsewhere", message, advice, evidence)
        elif idle:
            used = len(names) - len(idle)
            message = f"at the {side} {used} of {len(names)} NICs carried bytes; idle: {', '.join(idle)}"
            advice = "the library did not spread this transfer; try more streams or blocks, or another op"
            yield TransferWarning("idle_nics", message, advice, evidence)


def _transport(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    requested, ran = record.case.protocol, record.transport
    if not seen.moves_bytes or not ran or requested not in _MEANS:
        return
    if "(configured)" in ran:
        message = f"the library does not report its transport; {requested} was requested"
        yield TransferWarning("transport_unproven", message, "", {"transport": ran})
    elif not any(name in ran.lower() for name in _MEANS[requested]):
        message = f"{requested} was requested, but {ran} ran"
        yield TransferWarning("other_transport", message, "see `kvbench doctor`", {"transport": ran})


def _verified(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    if record.verified is None and seen.moves_bytes:
        yield TransferWarning("not_verified", "the received bytes were not verified", "", {})
