"""Faults of a chaos run: target, time and duration, drawn from a seed before the run.

| kind | what happens | end |
|---|---|---|
| kill | SIGKILL to the process, without a restart | never |
| restart | SIGKILL; after ``down_s`` the same command is started again on the same ports | started again |
| freeze | SIGSTOP to the process and its children | SIGCONT |
| lease | requests are sent to P that D never fetches: P keeps their KV until its lease ends | by the lease |
| pool | the same until P's KV pool is full; on D long generations | they end |
| partition | packets of the process are dropped in both directions (only in the lab) | removed |
| pull | the link of a NIC goes down, as when a cable is pulled (only in the lab) | link up |
| slow | a NIC's rate is limited (only in the lab) | full rate |"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from kvbench.core.load.arrivals import trial_seed
from kvbench.errors import InputError

FaultKind = Literal["kill", "restart", "freeze", "lease", "pool", "partition", "pull", "slow"]
FaultTarget = Literal["prefill", "decode", "router", "metadata", "nic"]
"""Targets of faults. ``metadata``: the connector's helper process, such as Mooncake's master."""

KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
TARGETS: Final[tuple[FaultTarget, ...]] = get_args(FaultTarget)
LAB_KINDS: Final = ("partition", "pull", "slow")
"""Kinds that require a lab network."""
_PROCESSES: Final[tuple[FaultTarget, ...]] = ("prefill", "decode", "router", "metadata")
POSSIBLE: Final[Mapping[FaultKind, tuple[FaultTarget, ...]]] = {
    "kill": _PROCESSES,
    "restart": _PROCESSES,
    "freeze": _PROCESSES,
    "lease": ("prefill",),
    "pool": ("prefill", "decode"),
    "partition": (*_PROCESSES, "nic"),
    "pull": ("nic",),
    "slow": ("nic",),
}
LEASE_S: Final = 30.0
"""How long P keeps unfetched KV, in seconds: vLLM's kv_lease_duration, and the emulated engine's."""
JITTER_S: Final = 1.0
"""Range of the random fault time, in seconds: repeats must not all hit the same request."""
_WORDS: Final = re.compile(
    r"(?P<kind>[a-z]+):(?P<target>[a-z]+)(?:-(?P<index>\d+))?"
    r"(?:@(?P<at>\d+(?:\.\d+)?))?(?:\+(?P<down>\d+(?:\.\d+)?))?"
)
_FORM: Final = "KIND:TARGET[-INDEX][@SECONDS][+SECONDS], such as restart:prefill or freeze:decode-1@5+3"


@dataclass(frozen=True)
class FaultTimes:
    """Seconds before, during and after a fault; ``ready_s``: longest start of a restarted process."""

    before_s: float = 5.0
    down_s: float = 3.0
    after_s: float = 12.0
    ready_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value <= 86_400:
                raise InputError(f"{name} must be above 0 and at most a day, not {value:g}")


@dataclass(frozen=True)
class WantedFault:
    kind: FaultKind
    target: FaultTarget
    index: int | None = None
    at_s: float | None = None
    down_s: float | None = None

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.target}" + (f"-{self.index}" if self.index is not None else "")

    @classmethod
    def parse(cls, text: str) -> WantedFault:
        """Parse ``freeze:decode-1@5+3``. Raises InputError."""
        match = _WORDS.fullmatch(text.strip())
        if match is None:
            raise InputError(f"{text!r} is not a fault", hint=f"write {_FORM}")
        kind = next((name for name in KINDS if name == match["kind"]), None)
        if kind is None:
            raise InputError(f"{text!r}: unknown fault {match['kind']!r}", hint=f"{', '.join(KINDS)}")
        target = next((name for name in POSSIBLE[kind] if name == match["target"]), None)
        if target is None:
            raise InputError(
                f"{text!r}: {kind} is not possible for {match['target']!r}",
                hint=f"possible targets: {', '.join(POSSIBLE[kind])}",
            )
        at, down, index = match["at"], match["down"], match["index"]
        return cls(
            kind,
            target,
            None if index is None else int(index),
            None if at is None else float(at),
            None if down is None else float(down),
        )


@dataclass(frozen=True)
class PlannedFault:
    """One fault: a trial on a separate deployment. ``at_s``: time after the load's start; ``down_s``:
    duration, 0 if permanent; ``after_s``: observation from the end (or from readiness after a restart);
    ``most_s``: longest load. ``number`` and ``repeat`` count from 1."""

    number: int
    repeat: int
    kind: FaultKind
    target: FaultTarget
    index: int
    at_s: float
    down_s: float
    after_s: float
    most_s: float

    @property
    def name(self) -> str:
        """Return the display name: ``restart prefill``."""
        return f"{self.kind} {self.target}"

    @property
    def process(self) -> str:
        """Return the process, such as ``prefill-1`` or ``router``; for a NIC ``nic0``."""
        if self.target == "nic":
            return f"nic{self.index}"
        return self.target if self.target in ("router", "metadata") else f"{self.target}-{self.index}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> PlannedFault:
        """Parse a row. Raises KeyError or TypeError if it is malformed."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def usual_faults(counts: Mapping[FaultTarget, int], *, lab: bool = False) -> list[WantedFault]:
    """Return all possible faults. ``counts``: number of each target."""
    return [
        WantedFault(kind, target)
        for kind in KINDS
        if lab or kind not in LAB_KINDS
        for target in POSSIBLE[kind]
        if counts.get(target, 0)
    ]


def plan_faults(
    wanted: Iterable[WantedFault],
    counts: Mapping[FaultTarget, int],
    times: FaultTimes,
    repeats: int,
    seed: int,
) -> list[PlannedFault]:
    """Return each wanted fault ``repeats`` times; the order in a repeat is drawn from the seed. Raises
    InputError for a missing target, or a fault after its trial's end."""
    wanted = list(wanted)
    for fault in wanted:
        _require_target(fault, counts)
    found: list[PlannedFault] = []
    for repeat in range(1, repeats + 1):
        chance = random.Random(trial_seed(seed, "faults", repeat))
        order = list(wanted)
        chance.shuffle(order)
        for fault in order:
            found.append(_plan_fault(fault, len(found) + 1, repeat, counts, times, chance))
    return found


def _plan_fault(
    wanted: WantedFault,
    number: int,
    repeat: int,
    counts: Mapping[FaultTarget, int],
    times: FaultTimes,
    chance: random.Random,
) -> PlannedFault:
    # Both are always drawn, so that the options of one fault do not change the others.
    index, jitter_s = chance.randrange(counts[wanted.target]), round(chance.random() * JITTER_S, 3)
    at_s = times.before_s + jitter_s if wanted.at_s is None else wanted.at_s
    down_s = times.down_s if wanted.down_s is None else wanted.down_s
    if wanted.kind == "kill":
        down_s = 0.0
    leased = wanted.kind in ("lease", "pool") and wanted.target == "prefill"
    after_s = times.after_s + (1.2 * LEASE_S if leased else 0.0)
    ready_s = times.ready_s if wanted.kind == "restart" else 0.0
    return PlannedFault(
        number,
        repeat,
        wanted.kind,
        wanted.target,
        index if wanted.index is None else wanted.index,
        at_s,
        down_s,
        after_s,
        at_s + down_s + ready_s + after_s,
    )


def _require_target(wanted: WantedFault, counts: Mapping[FaultTarget, int]) -> None:
    there = counts.get(wanted.target, 0)
    if not there:
        raise InputError(
            f"{wanted.text}: this deployment has no {wanted.target}", hint=f"it has {targets_text(counts)}"
        )
    if wanted.index is not None and wanted.index >= there:
        raise InputError(f"{wanted.text}: there are {there}, counted from 0")


def targets_text(counts: Mapping[FaultTarget, int]) -> str:
    return ", ".join(f"{count} {target}" for target, count in counts.items() if count)


def faults_of(rows: Sequence[Mapping[str, Any]]) -> list[PlannedFault]:
    """Read a run folder's plan. Raises KeyError or TypeError for malformed rows."""
    return [PlannedFault.from_json(row) for row in rows]
