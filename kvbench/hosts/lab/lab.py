"""Two hosts as network namespaces on one machine, with N shaped NICs between them.

    with Lab.up(nics=8, rate="1gbit") as lab:
        subprocess.Popen([*lab.prefix("B"), "iperf3", "-s", "-1"])

A lab shows NIC scaling without RDMA. NICs are veth pairs with a token bucket on both ends, each in a separate
subnet. Rates, bursts and what a machine carries: see ``hosts/lab/layout.py``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from kvbench.errors import InputError, KvbenchError, LabError
from kvbench.hosts.devices import read
from kvbench.hosts.lab import state as labstate
from kvbench.hosts.lab.hosts import (
    Holders,
    Host,
    LabProcess,
    fresh_sysfs_problem,
    make_named,
    may_use_netns,
    tool,
)
from kvbench.hosts.lab.layout import SIDES, LabPlan, Side, ip_lines, tc_lines
from kvbench.hosts.lab.state import LabState

NEEDED: Final = ("ip", "tc")
NEEDED_WITHOUT_ROOT: Final = ("unshare", "nsenter")
_CONGESTION_CONTROLS: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class Lab:
    """An existing lab. As a context manager it is removed at the end."""

    def __init__(self, state: LabState, holders: Holders | None = None) -> None:
        self.state = state
        self._holders = holders

    @classmethod
    def up(cls, nics: int = 2, rate: str = "1gbit", name: str = "", mtu: int = 1500) -> Lab:
        """Make a lab for the life of this process, with a unique name by default. Raises InputError for an
        impossible shape, LabError with advice if not allowed."""
        return cls.build(LabPlan(name or f"run-{os.getpid()}", nics, rate, mtu))

    @classmethod
    def build(cls, plan: LabPlan, *, stays: bool = False, rootless: bool = False) -> Lab:
        """Make a lab of this shape; on failure everything is removed. ``stays``: it outlives this process.
        ``rootless``: use a user namespace even as root."""
        named = may_use_netns() and not rootless
        for name in (*NEEDED, *(() if named else NEEDED_WITHOUT_ROOT)):
            tool(name)
        state = LabState(
            plan,
            owner=LabProcess.of(os.getpid()),
            kernel=platform.release(),
            created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        _claim(state)
        lab = cls(state, None if named else Holders())
        try:
            lab._make_hosts()
            lab._connect_hosts()
            state.ready = True
            if stays:
                state.owner = None
            state.save()
            if stays and lab._holders is not None:
                lab._holders.stay()
                lab._holders = None
        except BaseException:
            # A failure, even during clean-up, must release the claimed name.
            with suppress(KvbenchError):
                lab.down()
            raise
        return lab

    def _make_hosts(self) -> None:
        state = self.state
        for side in SIDES:
            state.hosts[side] = (
                make_named(state.plan, side)
                if self._holders is None
                else self._holders.make(state.plan, side)
            )
            state.save()
        if self._holders is not None and (problem := fresh_sysfs_problem(state.hosts["A"])):
            state.hosts = {side: replace(host, own_sysfs=False) for side, host in state.hosts.items()}
            state.notes.append(
                "/sys shows the machine's own NICs in this lab, so UCX and NCCL do not find the lab's: "
                + problem
            )

    def _connect_hosts(self) -> None:
        plan, hosts = self.state.plan, self.state.hosts
        available = (read(_CONGESTION_CONTROLS) or "").split()
        wanted = plan.congestion if plan.congestion in available else None
        if wanted is None:
            self.state.notes.append(f"this kernel has no {plan.congestion} congestion control")
        for side, peer in (("A", "B"), ("B", "A")):
            lines = ip_lines(plan, _side(side), hosts[peer].reference, wanted)
            hosts[side].run("ip", "-batch", "-", lines=lines)
        for host in hosts.values():
            host.run("tc", "-batch", "-", lines=tc_lines(plan))
        default = read(_CONGESTION_CONTROLS.with_name("tcp_congestion_control"))
        self.state.congestion = wanted or default or "unknown"
        if note := plan.overload(len(os.sched_getaffinity(0))):
            self.state.notes.append(note)

    @classmethod
    def standing(cls, name: str = "kv") -> Lab:
        """Return the existing lab of that name. Raises InputError with the existing ones."""
        state = labstate.load(name)
        if state is not None and state.standing:
            return cls(state)
        others = [other.plan.name for other in labstate.all_states() if other.standing]
        hint = f"there is: {', '.join(others)}" if others else f"kvbench lab up --name {name}"
        raise InputError(f"there is no lab {name!r}", hint=hint)

    @property
    def plan(self) -> LabPlan:
        return self.state.plan

    @property
    def line_rate_gb_per_s(self) -> float:
        """Line rate of each NIC in one direction."""
        return self.plan.line_rate_gb_per_s

    @property
    def burst_bytes(self) -> int:
        return self.plan.burst_bytes

    def describe(self) -> str:
        """Return text such as ``8 × 1gbit``."""
        return self.plan.describe()

    def record(self) -> dict[str, Any]:
        """Return all settings that determine the results."""
        state = self.state.to_json()
        kept = ("plan", "rate_bits_per_s", "burst_bytes", "congestion", "kernel", "notes", "faults")
        rootless = any(host.holder is not None for host in self.state.hosts.values())
        return {key: state[key] for key in kept} | {"rootless": rootless}

    def host(self, side: str) -> Host:
        """Return host ``A`` or ``B``. Raises InputError."""
        return self.state.hosts[_side(side)]

    def prefix(self, side: str) -> list[str]:
        """Return the command prefix that runs a command in host ``A`` or ``B``."""
        return self.host(side).prefix()

    def nics(self, side: str) -> list[dict[str, str]]:
        """Return name and address of each NIC of a host, in order."""
        chosen = _side(side)
        return [
            {"name": self.plan.interface(nic), "address": self.plan.address(chosen, nic)}
            for nic in range(self.plan.nics)
        ]

    def down(self) -> None:
        """End its processes and remove it; no action if it does not exist."""
        try:
            with labstate.locked():
                _remove(self.state)
        finally:
            if self._holders is not None:
                self._holders.close()
                self._holders = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()


def _side(text: str) -> Side:
    for side in SIDES:
        if text.upper() == side:
            return side
    raise InputError(f"a lab has no host {text!r}", hint="its hosts are A and B")


def _claim(state: LabState) -> None:
    """Claim the name, after removing leftovers of killed processes. Raises InputError if it exists."""
    name = state.plan.name
    with labstate.locked():
        remove_left_over()
        if (other := labstate.load(name)) is not None:
            doing = f"already exists ({other.plan.describe()})"
            if other.owner is not None:
                doing = f"is in use by process {other.owner.pid}"
            raise InputError(
                f"the lab {name!r} {doing}",
                hint=f"use it, or: kvbench lab down --name {name}; or another --name",
            )
        if name in labstate.unrecorded():
            raise InputError(
                f"namespaces of a lab {name!r} exist, but not its file",
                hint=f"kvbench lab down --name {name}",
            )
        state.save()


def remove_left_over() -> list[str]:
    """Remove the labs of killed processes and return their names. The caller holds the lock."""
    names = []
    for state in labstate.all_states():
        if state.left_over:
            _remove(state)
            names.append(state.plan.name)
    return names


def _remove(state: LabState) -> None:
    hosts: dict[str, Host] = dict(state.hosts)
    if not any(host.holder for host in hosts.values()):
        # A killed set-up may have made a namespace without recording it.
        for side in SIDES:
            hosts.setdefault(side, Host(side, state.plan.namespace(side)))
    problems = []
    for host in hosts.values():
        try:
            host.remove()
        except LabError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    labstate.path_of(state.plan.name).unlink(missing_ok=True)


def take_down(name: str, everything: bool = False) -> list[str]:
    """Remove the named lab, or all of this user's, and leftovers of killed processes; return their names.
    Namespaces without a file are only removed by name: their file may be in another folder, and they may be
    in use. Raises InputError if there is no such lab but others exist."""
    with labstate.locked():
        done = remove_left_over()
        states = labstate.all_states()
        for state in states:
            if everything or state.plan.name == name:
                _refuse_half_made(state)
                _remove(state)
                done.append(state.plan.name)
        if name in labstate.unrecorded():
            _remove(LabState(LabPlan(name)))
            done.append(name)
    others = [state.plan.name for state in states]
    if not everything and name not in done and others:
        raise InputError(f"there is no lab {name!r}", hint=f"there is: {', '.join(others)}; or --all")
    return done


def _refuse_half_made(state: LabState) -> None:
    if state.owner is not None and state.owner.alive:
        raise LabError(
            f"process {state.owner.pid} is using the lab {state.plan.name!r}",
            hint="end that process; it removes its lab",
        )


def interface_counters(host: Host) -> dict[str, dict[str, int]]:
    """Return bytes sent and received by each NIC of a host since the lab was made."""
    links: Sequence[dict[str, Any]] = json.loads(host.run("ip", "-j", "-s", "link", "show"))
    return {
        nic["ifname"]: {"sent": nic["stats64"]["tx"]["bytes"], "received": nic["stats64"]["rx"]["bytes"]}
        for nic in links
        if nic["ifname"] != "lo"
    }
