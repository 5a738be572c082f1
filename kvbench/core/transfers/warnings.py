"""What makes a transfer row weaker than it looks: rules over what was seen, without any I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from kvbench.core.transfers.records import TransferRecord, TransferWarning

MIN_CALLS: Final = 20
MIN_WINDOW_S: Final = 0.2
MANY_CALLS: Final = 1000
"""So many calls are enough even in a short window."""
BUSY_SHARE: Final = 0.9
BUSY_CALL_S: Final = 2e-3
"""Shorter calls are waited for by asking without rest, so their CPU time says nothing about the library."""
OTHERS_SHARE: Final = 0.15
STEAL_SHARE: Final = 0.02
BURST_SHARE: Final = 0.05
CARRIED_SHARE: Final = 0.9
EVEN_SHARE: Final = 0.1

_MEANS: Final[Mapping[str, Sequence[str]]] = {
    "tcp": ("tcp", "socket"),
    "rdma": ("rdma", "rc_", "dc_", "ud_", "rc/", "verbs", "mlx5", "ib/"),
    "cma": ("cma",),
    "shm": ("shm", "sysv", "posix", "memfd"),
    "posix": ("posix", "file"),
}
"""What a transport's name contains if it is the protocol that was asked for."""


@dataclass(frozen=True)
class CaseConditions:
    """What the coordinator saw around a row, beside the row itself."""

    cores: int = 0
    load_before: float | None = None
    """Load average before the first case, so without our own work."""
    others_cpu_s: float = 0.0
    """CPU time of everybody else on the initiators' host in the window."""
    steal_s: float = 0.0
    burst_bytes: int | None = None
    """What the shaper of one NIC lets through at once."""
    memcpy_gb_per_s: float | None = None
    moves_bytes: bool = True
    carried: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Side → NIC → bytes in the window, the asked ones and all others."""
    asked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Side → the NICs that were asked for."""


def warnings(record: TransferRecord, seen: CaseConditions) -> list[TransferWarning]:
    """All that apply to a measured row."""
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
        message = f"other processes took {share:.0%} of this machine's CPU time meanwhile"
        yield TransferWarning("machine_busy", message, advice, {"others_cpu_s": seen.others_cpu_s})
    if room and seen.steal_s > STEAL_SHARE * room:
        message = f"the hypervisor took {seen.steal_s / room:.0%} of this machine's CPU time meanwhile"
        yield TransferWarning("cpu_stolen", message, advice, {"steal_s": seen.steal_s})


def _few_repeats(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    short = record.window_s < MIN_WINDOW_S and record.calls < MANY_CALLS
    if record.calls < MIN_CALLS or short:
        message = f"only {record.calls} calls in {record.window_s:.2f} s"
        evidence = {"calls": record.calls, "window_s": record.window_s}
        yield TransferWarning("few_repeats", message, "give each case more seconds (--seconds)", evidence)


def _burst(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    if not seen.burst_bytes:
        return
    nics = max(record.case.nics, 1)
    moved = record.calls * record.nbytes / nics
    evidence = {"burst_bytes": seen.burst_bytes, "bytes_per_nic": moved}
    if seen.burst_bytes > BURST_SHARE * moved:
        message = (
            f"the shaper's burst is {seen.burst_bytes / moved:.0%} of what passed each NIC" if moved else ""
        )
        advice = "give the case more seconds: the rate is flattered by what passed unshaped"
        yield TransferWarning("near_burst", message or "nothing passed the NICs", advice, evidence)
    elif record.nbytes <= 2 * seen.burst_bytes * nics:
        message = f"one transfer ({record.nbytes:,} bytes) is not much larger than the shaper's burst"
        advice = "its latency may be that of the unshaped link; take larger or more blocks"
        yield TransferWarning("near_burst", message, advice, evidence)


def _busy_waiting(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    if record.initiator_cpu_s is None or not record.window_s or not record.call_s:
        return
    share = record.initiator_cpu_s / record.window_s / max(record.case.initiators, 1)
    speed, limit = record.gb_per_s, seen.memcpy_gb_per_s
    below = speed is None or limit is None or speed < limit
    copies = record.case.backend in ("memcpy", "shm", "null")
    if share >= BUSY_SHARE and below and not copies and median(record.call_s) > BUSY_CALL_S:
        message = f"the library keeps {share:.1f} cores busy at the initiator, and is slower than memcpy"
        advice = "it waits by polling: on a machine with few cores that time is missing elsewhere"
        yield TransferWarning("busy_waiting", message, advice, {"cpu_share": share})


def _nics(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    total = record.calls * record.nbytes
    for side, names in seen.asked.items():
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
            message = f"at the {side} only {moved / total:.0%} of the bytes passed the NICs asked for{went}"
            advice = "see which device or transport the library chose; `kvbench doctor` lists them"
            yield TransferWarning("bytes_elsewhere", message, advice, evidence)
        elif idle:
            used = len(names) - len(idle)
            message = f"at the {side} {used} of {len(names)} NICs carried bytes; idle: {', '.join(idle)}"
            advice = "the library did not spread this transfer: more streams, blocks or another op may"
            yield TransferWarning("idle_nics", message, advice, evidence)


def _transport(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    asked, ran = record.case.protocol, record.transport
    if not seen.moves_bytes or not ran or asked not in _MEANS:
        return
    if "(configured)" in ran:
        message = f"the library does not say which transport ran; {asked} was asked for"
        yield TransferWarning("transport_unproven", message, "", {"transport": ran})
    elif not any(name in ran.lower() for name in _MEANS[asked]):
        message = f"{asked} was asked for, and {ran} ran"
        yield TransferWarning("other_transport", message, "see `kvbench doctor`", {"transport": ran})


def _verified(record: TransferRecord, seen: CaseConditions) -> Iterator[TransferWarning]:
    if record.verified is None and seen.moves_bytes:
        yield TransferWarning("not_verified", "its bytes were not compared", "", {})
