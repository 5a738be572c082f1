"""Where the two sides of a microbenchmark stand: this host, a lab on it, or this host and another one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from kvbench.core.transfers.cases import LEAST_CALLS, MOST_SECONDS, BackendCapabilities
from kvbench.core.transfers.records import Case
from kvbench.core.units import parse_counts
from kvbench.errors import InputError
from kvbench.hosts.lab.lab import Lab
from kvbench.hosts.lab.layout import LabPlan
from kvbench.hosts.nics import choice as nics
from kvbench.hosts.nics.listing import there
from kvbench.microbench.options import MicrobenchOptions, Settings
from kvbench.microbench.sides import Side
from kvbench.transfer.parts.usable import movers

DEFAULT_LAB_COUNTS: Final = (1, 2, 4, 8)
CALL_S: Final = 5.0
# A transfer slower than this, in bytes per second and NIC or host, is taken for stuck.
SLOWEST_BYTES_PER_S: Final = 40e6


@dataclass(frozen=True)
class MicrobenchPlace:
    """Two sides, and what is known of the way between them."""

    initiator: Side = field(default_factory=Side)
    target: Side = field(default_factory=Side)
    lab: str = ""
    burst_bytes: int | None = None
    nic_gb_per_s: float | None = None
    trouble: str = ""
    """Why nothing can be measured there; empty if it can."""

    def settings(self, seconds: float, cases: Sequence[Case]) -> Settings:
        """How to measure here: a call's deadline grows with what it moves."""
        longest = max(case.nbytes for case in cases)
        return Settings(
            seconds=seconds,
            min_calls=LEAST_CALLS,
            max_seconds=max(MOST_SECONDS, seconds),
            call_s=max(CALL_S, longest / SLOWEST_BYTES_PER_S),
            lab=self.lab,
            burst_bytes=self.burst_bytes,
            nic_gb_per_s=self.nic_gb_per_s,
        )


class MicrobenchPlaces:
    """Where the cases of a run are measured, from its options."""

    def __init__(self, options: MicrobenchOptions) -> None:
        self._options = options
        self.in_lab = options.lab or options.lab_name is not None
        self.remote = options.peer_prefix is not None
        self._lab: Lab | None = None
        self._plan: LabPlan | None = None
        self._chosen: dict[str, tuple[Sequence[nics.Nic], Sequence[nics.Nic]]] = {}
        given = parse_counts(options.nics) if options.nics else ()
        self.counts: tuple[int, ...] = given
        if options.lab_name is not None:
            self._lab = Lab.standing(options.lab_name)
            self._plan = self._lab.plan
        if self.in_lab:
            most = self._plan.nics if self._plan else max(given or DEFAULT_LAB_COUNTS)
            self._plan = self._plan or LabPlan("run", most, options.rate)
            self.counts = given or tuple(count for count in DEFAULT_LAB_COUNTS if count <= most)
            if max(self.counts) > most:
                raise InputError(
                    f"{max(self.counts)} NICs are asked for, and the lab {options.lab_name!r} has {most}",
                    hint=f"kvbench lab up --nics {max(self.counts)}",
                )

    @classmethod
    def of(cls, options: MicrobenchOptions) -> MicrobenchPlaces:
        """Raises InputError for options that contradict each other."""
        if options.pairs or options.from_host or options.to_host:
            raise InputError("--from, --to and --pairs speak of a scenario's hosts", hint="add --scenario")
        lab = options.lab or options.lab_name is not None
        if lab and options.peer_prefix is not None:
            raise InputError("--lab makes two hosts on this machine, and --peer-prefix names another one")
        if options.lab and options.lab_name is not None:
            raise InputError(
                "--lab makes a lab, and --lab-name takes one that stands already: give one of the two"
            )
        if options.peer_prefix is not None and options.host is None:
            raise InputError(
                "the other machine has to reach this one", hint="give this machine's address with --host"
            )
        if options.peer_prefix is None and (options.peer_host or options.peer_python):
            raise InputError(
                "--peer-host and --peer-python speak of another machine", hint="add --peer-prefix"
            )
        return cls(options)

    repeats = 1
    """How often the matrix is measured."""
    source = b""
    """The scenario that the place is from."""
    log_dir: Path
    """Where the workers' logs go; to be set before ``by_place``."""

    def __enter__(self) -> MicrobenchPlaces:
        return self

    def __exit__(self, *error: object) -> None:
        """What is made for the cases ends with ``by_place``."""

    def movers(self) -> list[BackendCapabilities]:
        """Every backend, with what this machine lacks for it."""
        return movers()

    def environments(self) -> dict[str, Any]:
        """There are no hosts with agents."""
        return {}

    @property
    def hosts(self) -> list[str]:
        """The other machines."""
        return [self.peer] if self.peer else []

    @property
    def nic_gb_per_s(self) -> float | None:
        """Line rate of one NIC where it is known beforehand."""
        return self._plan.line_rate_gb_per_s if self._plan is not None else None

    @property
    def peer(self) -> str:
        """The other machine's address; empty if there is none."""
        if self._options.peer_prefix is None:
            return ""
        words = shlex.split(self._options.peer_prefix)
        return self._options.peer_host or (words[-1].rpartition("@")[2] if words else "")

    def words(self) -> list[str]:
        """What has to be known of the place to read the numbers."""
        if self._plan is not None:
            return [
                f"lab: two network namespaces on this machine, {self._plan.describe()} between them; cases "
                "without NICs run on the machine itself"
            ]
        if self.remote:
            return [
                f"initiators here ({self._options.host}), targets at {self.peer} "
                f"({self._options.peer_prefix})"
            ]
        if self.counts:
            return [
                "both sides stand on this machine: bytes pass a NIC only where its driver does not hand them "
                "over within the host; each row says what the NICs carried (two machines: --peer-prefix)"
            ]
        return ["both sides stand on this machine, TCP passes its loopback (NICs: --lab, or --peer-prefix)"]

    def describe(self) -> str:
        return self._plan.describe() if self._plan is not None else ""

    def record(self) -> dict[str, Any]:
        """What decides the numbers of a lab, for the manifest."""
        return self._lab.record() if self._lab is not None else {}

    def check(self, cases: Sequence[Case]) -> None:
        """Choose the NICs of both sides. Raises InputError, with all that there are, for more than that."""
        asked: dict[str, int] = {}
        for case in cases:
            if case.nics and not self.in_lab:
                asked[self._kind(case)] = max(case.nics, asked.get(self._kind(case), 0))
        for kind, most in asked.items():
            which: nics.Kind = "rdma" if kind == "rdma" else "tcp"
            own = nics.choose(most, nics.find(which))
            others = own
            if self.remote:
                prefix = shlex.split(self._options.peer_prefix or "")
                others = nics.choose(most, there(prefix, self._python, which))
            self._chosen[kind] = (own, others)

    def by_place(
        self, cases: Sequence[Case], stack: ExitStack
    ) -> Iterator[tuple[MicrobenchPlace, list[Case]]]:
        """Cases in a row that are measured at one place; ``stack`` ends what is made for them."""
        for kind, group in groupby(cases, key=self._kind):
            members = list(group)
            yield self._place(kind, members, stack), members

    def _kind(self, case: Case) -> str:
        return "lab" if case.nics and self.in_lab else kind_of(case)

    def _place(self, kind: str, cases: list[Case], stack: ExitStack) -> MicrobenchPlace:
        if kind == "lab":
            return self._lab_place(stack)
        most = max(case.nics for case in cases)
        own, others = self._chosen.get(kind, ((), ()))
        own, others = own[:most], others[:most]
        here = Side(host=self._options.host or "127.0.0.1", nics=_plain(own))
        if not self.remote:
            return MicrobenchPlace(here, Side(host=here.host, nics=_plain(others)))
        prefix = shlex.split(self._options.peer_prefix or "")
        peer = Side(self.peer, tuple(prefix), _plain(others), self._python, elsewhere=True)
        return MicrobenchPlace(here, peer)

    @property
    def _python(self) -> str:
        return self._options.peer_python or sys.executable

    def _lab_place(self, stack: ExitStack) -> MicrobenchPlace:
        if self._lab is None:
            most = max(self.counts)
            self._lab = stack.enter_context(Lab.up(most, self._options.rate))
        lab = self._lab
        nic_rate = lab.line_rate_gb_per_s
        return MicrobenchPlace(
            _lab_side(lab, "A"), _lab_side(lab, "B"), lab.describe(), lab.burst_bytes, nic_rate
        )


def kind_of(case: Case) -> str:
    """The kind of NICs that a case needs."""
    if not case.nics:
        return "without NICs"
    return "rdma" if "rdma" in case.protocol else "tcp"


def _lab_side(lab: Lab, name: str) -> Side:
    own = lab.nics(name)
    return Side(own[0]["address"], tuple(lab.prefix(name)), tuple(own))


def _plain(chosen: Sequence[nics.Nic]) -> tuple[dict[str, Any], ...]:
    return tuple(nic.to_json() for nic in chosen)
