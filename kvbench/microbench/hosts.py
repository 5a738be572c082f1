"""Places for the two sides of a microbenchmark: this host, a lab on it, another host, a scenario's hosts."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby, permutations
from pathlib import Path
from typing import Any, Final

from kvbench.core.scenario.scenario import Scenario
from kvbench.core.transfers.cases import LEAST_CALLS, MOST_SECONDS, BackendCapabilities
from kvbench.core.transfers.records import Case
from kvbench.core.units import parse_counts
from kvbench.errors import InputError, KvbenchError
from kvbench.hosts.lab.lab import Lab
from kvbench.hosts.lab.layout import LabPlan
from kvbench.hosts.nics import choice as nics
from kvbench.hosts.nics.listing import there
from kvbench.launchers.agents.remote import Fleet, RemoteLauncher
from kvbench.launchers.placement import fleet_with
from kvbench.microbench.options import MicrobenchOptions, Settings
from kvbench.microbench.sides import Side
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.transfer.parts.usable import movers, movers_on

DEFAULT_LAB_COUNTS: Final = (1, 2, 4, 8)
CALL_S: Final = 5.0
# A transfer slower than this, in bytes per second and NIC or host, counts as stuck.
SLOWEST_BYTES_PER_S: Final = 40e6


@dataclass(frozen=True)
class MicrobenchPlace:
    """Two sides, and the known properties of the network between them."""

    initiator: Side = field(default_factory=Side)
    target: Side = field(default_factory=Side)
    lab: str = ""
    burst_bytes: int | None = None
    nic_gb_per_s: float | None = None
    problem: str = ""
    """Reason why nothing can be measured there, or an empty text."""

    def settings(self, seconds: float, cases: Sequence[Case]) -> Settings:
        """Return how to measure here: a call's deadline grows with its bytes."""
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
    """Places at which the cases of a run are measured, from its options."""

    def __init__(self, options: MicrobenchOptions) -> None:
        self._options = options
        self.in_lab = options.lab or options.lab_name is not None
        self.remote = options.peer_prefix is not None
        self._lab: Lab | None = None
        self._plan: LabPlan | None = None
        self._chosen: dict[str, tuple[Sequence[nics.Nic], Sequence[nics.Nic]]] = {}
        requested = parse_counts(options.nics) if options.nics else ()
        self.counts: tuple[int, ...] = requested
        if options.lab_name is not None:
            self._lab = Lab.standing(options.lab_name)
            self._plan = self._lab.plan
        if self.in_lab:
            most = self._plan.nics if self._plan else max(requested or DEFAULT_LAB_COUNTS)
            self._plan = self._plan or LabPlan("run", most, options.rate)
            self.counts = requested or tuple(count for count in DEFAULT_LAB_COUNTS if count <= most)
            if max(self.counts) > most:
                raise InputError(
                    f"{max(self.counts)} NICs are requested, but the lab {options.lab_name!r} has {most}",
                    hint=f"kvbench lab up --nics {max(self.counts)}",
                )

    @classmethod
    def of(cls, options: MicrobenchOptions) -> MicrobenchPlaces:
        """Raises InputError for contradictory options."""
        if options.pairs or options.from_host or options.to_host:
            raise InputError("--from, --to and --pairs speak of a scenario's hosts", hint="add --scenario")
        lab = options.lab or options.lab_name is not None
        if lab and options.peer_prefix is not None:
            raise InputError("--lab makes two hosts on this machine, and --peer-prefix names another one")
        if options.lab and options.lab_name is not None:
            raise InputError("--lab makes a lab, and --lab-name uses an existing one: give one of the two")
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
    source = b""
    """Text of the scenario that names the hosts."""
    log_dir: Path
    """Folder of the workers' logs; set it before ``by_place``."""

    def __enter__(self) -> MicrobenchPlaces:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to do: ``by_place`` cleans up."""

    def movers(self) -> list[BackendCapabilities]:
        """Return every backend, with what this machine lacks for it."""
        return movers()

    def environments(self) -> dict[str, Any]:
        return {}

    @property
    def hosts(self) -> list[str]:
        return [self.peer] if self.peer else []

    @property
    def nic_gb_per_s(self) -> float | None:
        """Line rate of one NIC if known beforehand."""
        return self._plan.line_rate_gb_per_s if self._plan is not None else None

    @property
    def peer(self) -> str:
        if self._options.peer_prefix is None:
            return ""
        words = shlex.split(self._options.peer_prefix)
        return self._options.peer_host or (words[-1].rpartition("@")[2] if words else "")

    def words(self) -> list[str]:
        """Return notes about the place that are needed to read the numbers."""
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
                "both sides are on this machine: bytes pass a NIC only if its driver does not forward them "
                "within the host; each row has the NICs' bytes (two machines: --peer-prefix)"
            ]
        return ["both sides are on this machine, TCP uses its loopback (NICs: --lab, or --peer-prefix)"]

    def describe(self) -> str:
        return self._plan.describe() if self._plan is not None else ""

    def record(self) -> dict[str, Any]:
        """Return a lab's settings that determine the numbers, for the manifest."""
        return self._lab.record() if self._lab is not None else {}

    def check(self, cases: Sequence[Case]) -> None:
        """Choose the NICs of both sides. Raises InputError if there are too few."""
        requested: dict[str, int] = {}
        for case in cases:
            if case.nics and not self.in_lab:
                requested[self._kind(case)] = max(case.nics, requested.get(self._kind(case), 0))
        for kind, most in requested.items():
            which: nics.Kind = "rdma" if kind == "rdma" else "tcp"
            local = nics.choose(most, nics.find(which))
            remote = local
            if self.remote:
                prefix = shlex.split(self._options.peer_prefix or "")
                remote = nics.choose(most, there(prefix, self._python, which))
            self._chosen[kind] = (local, remote)

    def by_place(
        self, cases: Sequence[Case], stack: ExitStack
    ) -> Iterator[tuple[MicrobenchPlace, list[Case]]]:
        """Yield consecutive cases that are measured at one place; ``stack`` cleans up after them."""
        for kind, group in groupby(cases, key=self._kind):
            members = list(group)
            yield self._place(kind, members, stack), members

    def _kind(self, case: Case) -> str:
        return "lab" if case.nics and self.in_lab else kind_of(case)

    def _place(self, kind: str, cases: list[Case], stack: ExitStack) -> MicrobenchPlace:
        if kind == "lab":
            return self._lab_place(stack)
        most = max(case.nics for case in cases)
        local_nics, peer_nics = self._chosen.get(kind, ((), ()))
        local_nics, peer_nics = local_nics[:most], peer_nics[:most]
        local = Side(host=self._options.host or "127.0.0.1", nics=_plain(local_nics))
        if not self.remote:
            return MicrobenchPlace(local, Side(host=local.host, nics=_plain(peer_nics)))
        prefix = shlex.split(self._options.peer_prefix or "")
        peer = Side(self.peer, tuple(prefix), _plain(peer_nics), self._python, elsewhere=True)
        return MicrobenchPlace(local, peer)

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
    if not case.nics:
        return "without NICs"
    return "rdma" if "rdma" in case.protocol else "tcp"


def _lab_side(lab: Lab, name: str) -> Side:
    found = lab.nics(name)
    return Side(found[0]["address"], tuple(lab.prefix(name)), tuple(found))


def _plain(chosen: Sequence[nics.Nic]) -> tuple[dict[str, Any], ...]:
    return tuple(nic.to_json() for nic in chosen)


CHECK_S: Final = 120.0
"""Time for a host to import every transfer library from a cold disk, in seconds."""
LISTED: Final = 6


class BetweenHosts:
    """Context manager that connects to the hosts. Raises InputError for contradictory options, LaunchError if
    no pair can be reached. Any other unreachable or lost host only costs its pairs."""

    in_lab: Final = False
    remote: Final = True
    nic_gb_per_s: Final = None
    log_dir: Path
    """Folder of the workers' logs; set it before ``by_place``."""

    def __init__(self, options: MicrobenchOptions, notify: Callable[[str], None] = lambda text: None) -> None:
        for name, given in (("--lab", options.lab), ("--lab-name", options.lab_name)):
            if given:
                raise InputError(f"{name} makes hosts on this machine, and --scenario names other ones")
        for name, text in (("--peer-prefix", options.peer_prefix), ("--host", options.host)):
            if text is not None:
                raise InputError(f"{name} says where a side is, and the scenario's hosts say it too")
        if options.pairs is not None and (options.from_host or options.to_host):
            raise InputError("--pairs all takes every host with every other; leave --from and --to out")
        if options.pairs not in (None, "all"):
            hint = "all, or name two with --from and --to"
            raise InputError(f"--pairs knows no {options.pairs!r}", hint=hint)
        self._options = options
        self._notify = notify
        self._scenario, self.source = resolve(CliOptions(str(options.scenario)))
        self._tag = f"microbench-{secrets.token_hex(4)}"
        self._fleet: Fleet | None = None
        self._unreachable: dict[str, str] = {}
        self._nics: dict[tuple[str, str], list[nics.Nic]] = {}
        self.pairs: list[tuple[str, str]] = []
        self.counts: tuple[int, ...] = parse_counts(options.nics) if options.nics else ()

    def __enter__(self) -> BetweenHosts:
        self._scenario, self._fleet = fleet_with(self._scenario, self._tag, self._notify)
        try:
            self.pairs = choose_pairs(self._scenario, self._options)
            self._reach()
        except BaseException:
            self._fleet.close()
            raise
        named = [len(self._hosts[name].nics) for name in self.hosts]
        if not self._options.nics and all(named):
            self.counts = (min(named),)
        return self

    def __exit__(self, *error: object) -> None:
        if self._fleet is not None:
            self._fleet.close()

    # -- properties of the hosts --------------------------------------------------------------------

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.pairs for name in pair))

    @property
    def repeats(self) -> int:
        return len(self.pairs)

    @property
    def _hosts(self) -> Mapping[str, Any]:
        return self._scenario.deployment.hosts

    @property
    def _agents(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    def movers(self) -> list[BackendCapabilities]:
        """Return every backend, with what the hosts lack for it."""
        names = [name for name in self.hosts if name not in self._unreachable]
        with ThreadPoolExecutor(len(names)) as pool:
            lacking = list(pool.map(lambda name: self._agents[name].ask("lacking", CHECK_S), names))
        return movers_on(dict(zip(names, lacking, strict=True)))

    def environments(self) -> dict[str, Any]:
        return self._agents.environments()

    def words(self) -> list[str]:
        """Return notes about the place that are needed to read the numbers."""
        shown = [f"{initiator} → {target}" for initiator, target in self.pairs[:LISTED]]
        more = [f"… and {len(self.pairs) - LISTED} more"] if len(self.pairs) > LISTED else []
        where = ", ".join(f"{name} is {self._hosts[name].address}" for name in self.hosts)
        words = [f"initiators → targets: {', '.join([*shown, *more])} ({where})"]
        return [*words, *(f"{name} is not measured: {why}" for name, why in self._unreachable.items())]

    def describe(self) -> str:
        return ""

    def record(self) -> dict[str, Any]:
        return {}

    def check(self, cases: Sequence[Case]) -> None:
        """Choose each host's NICs. Raises InputError, listing the existing ones, if there are too few."""
        most: dict[str, int] = {}
        for case in cases:
            if case.nics:
                kind = kind_of(case)
                most[kind] = max(case.nics, most.get(kind, 0))
        for kind, count in most.items():
            for name in self.hosts:
                if name not in self._unreachable:
                    self._nics[name, kind] = self._choose_nics(name, kind, count)

    def _choose_nics(self, name: str, kind: str, count: int) -> list[nics.Nic]:
        wanted = list(self._hosts[name].nics)
        answer = self._agents[name].ask("nics", kind=kind, names=wanted)
        found = nics.Found(tuple(nics.Nic(**nic) for nic in answer["usable"]), answer["left_out"])
        try:
            chosen = nics.choose(count, found)
        except InputError as error:
            raise InputError(f"{name}: {error.message}", hint=error.hint) from error
        return list(found.usable[:count]) if wanted else chosen

    # -- measuring ----------------------------------------------------------------------------------

    def by_place(
        self, cases: Sequence[Case], stack: ExitStack
    ) -> Iterator[tuple[MicrobenchPlace, list[Case]]]:
        """Yield all cases for each pair in turn; for an unreachable pair ``problem`` has the reason."""
        for one, other in self.pairs:
            problem = self._unreachable_reason(one) or self._unreachable_reason(other)
            if problem:
                yield MicrobenchPlace(Side(name=one), Side(name=other), problem=problem), list(cases)
                continue
            for kind, group in groupby(cases, key=kind_of):
                pair = (one, other)
                yield MicrobenchPlace(self._side(one, kind, pair), self._side(other, kind, pair)), list(group)

    def _side(self, name: str, kind: str, pair: tuple[str, str]) -> Side:
        folder = self.log_dir / "-".join(pair)
        launcher = RemoteLauncher({name: self._agents[name]}, lambda _: name, self._tag, folder)
        interfaces = tuple(nic.to_json() for nic in self._nics.get((name, kind), ()))
        address = str(self._hosts[name].address)
        return Side(address, nics=interfaces, elsewhere=True, name=name, launcher=launcher)

    def _reach(self) -> None:
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(self._unreachable_reason, self.hosts))
        if not any(a not in self._unreachable and b not in self._unreachable for a, b in self.pairs):
            raise InputError(
                f"no two hosts can be reached: {'; '.join(self._unreachable.values())}",
                hint=f"kvbench doctor --hosts {self._options.scenario}",
            )

    def _unreachable_reason(self, name: str) -> str:
        """Return why a host is out of reach, or an empty text. A lost host is tried again once."""
        if name not in self._unreachable:
            try:
                self._agents.require([name])
            except KvbenchError as error:
                self._unreachable[name] = error.message
        return self._unreachable.get(name, "")


def choose_pairs(scenario: Scenario, options: MicrobenchOptions) -> list[tuple[str, str]]:
    """Return (initiators' host, targets' host) of each pair. Raises InputError."""
    deployment = scenario.deployment
    if options.pairs == "all":
        pairs = list(permutations(deployment.hosts, 2))
        if not pairs:
            raise InputError("--pairs all needs two hosts, and the scenario has one")
        return pairs
    found = []
    for flag, name, role in (("--from", options.from_host, "prefill"), ("--to", options.to_host, "decode")):
        name = name or next(iter(deployment.roles.of(role)), "")
        if name not in deployment.hosts:
            raise InputError(
                f"no host is called {name!r}" if name else f"{flag} must name a host of the scenario",
                hint=f"there are: {', '.join(deployment.hosts)}",
            )
        found.append(name)
    if found[0] == found[1]:
        raise InputError(
            f"both sides would be on {found[0]}", hint="--from HOST --to HOST name two; or --pairs all"
        )
    return [(found[0], found[1])]
