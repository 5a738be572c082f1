"""Faults of a lab's NICs, each with a counter of affected packets. ``pull``: the link goes down at B, A sees
no carrier. ``partition``: packets vanish in both directions. ``reset``: TCP connections are answered with a
reset. ``slow``: a lower rate. ``loss``: a share of packets vanishes in each direction. Sockets see no error
from pull, partition and loss: only a deadline ends a wait."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from kvbench.errors import InputError, LabError
from kvbench.hosts.lab import state as labstate
from kvbench.hosts.lab.hosts import Host
from kvbench.hosts.lab.lab import Lab
from kvbench.hosts.lab.layout import SIDES, parse_rate, parse_share, route_line, shape_line
from kvbench.hosts.lab.state import Fault

KINDS: Final = ("pull", "partition", "reset", "slow", "loss")
DEFAULT_AMOUNTS: Final = {"slow": "", "loss": "1%"}
LINK_DEADLINE_S: Final = 5.0
POLL_S: Final = 0.02

_LOSS_STEPS: Final = 100_000
_MAX_SEGMENTS: Final = 65_535
"""The kernel's limit of segments in one packet that is segmented late."""
_COUNTER: Final = re.compile(r"counter packets (\d+)")


@dataclass(frozen=True)
class FaultReport:
    """State of a fault. ``packets``: affected packets; for pull, 1 while A has no carrier."""

    fault: Fault
    packets: int
    healed: bool = False

    def words(self) -> str:
        """Return text such as ``loss 1% on nic3: met 83 packets``."""
        what = " ".join(part for part in (self.fault.kind, self.fault.amount) if part)
        what = f"{what} on nic{self.fault.nic}" + (", healed" if self.healed else "")
        if self.fault.kind == "pull":
            lost = "A had no carrier" if self.healed else "A has no carrier"
            return f"{what}: {lost if self.packets else 'A has a carrier again, restored by someone else'}"
        if self.packets == 0:
            return f"{what}: no packet met it" + ("" if self.healed else " yet")
        return f"{what}: met {self.packets} packet{'s' if self.packets != 1 else ''}"


def place(lab: Lab, kind: str, nic: int, amount: str = "") -> FaultReport:
    """Plant a fault on a NIC and check its rule; it replaces one of its kind. Raises InputError for
    impossible requests, LabError when the rule does not work; then nothing is left of it."""
    fault = Fault(kind, nic, _amount(lab, kind, nic, amount))
    with _locked_faults(lab):
        if _placed(lab, kind, nic) is not None:
            _take_away(lab, fault)
            lab.state.faults = [old for old in lab.state.faults if (old.kind, old.nic) != (kind, nic)]
        try:
            _ACTIONS[kind].place(lab, fault)
            fault.seen_before = _ACTIONS[kind].count(lab, fault) if kind == "slow" else 0
        except BaseException:
            with suppress(LabError):
                _take_away(lab, fault)
            raise
        lab.state.faults.append(fault)
    return report(lab, fault)


def heal(lab: Lab, kind: str, nic: int) -> FaultReport:
    """Remove a fault and check the NIC. Raises InputError if there is no such fault, LabError."""
    _check(lab, kind, nic)
    with _locked_faults(lab):
        fault = _placed(lab, kind, nic)
        if fault is None:
            there = ", ".join(f"{old.kind} on nic{old.nic}" for old in lab.state.faults)
            raise InputError(
                f"there is no fault {kind!r} on nic{nic}", hint=f"there is: {there or 'no fault'}"
            )
        last = report(lab, fault)
        _take_away(lab, fault)
        lab.state.faults = [old for old in lab.state.faults if old is not fault]
    return FaultReport(fault, last.packets, healed=True)


def report(lab: Lab, fault: Fault) -> FaultReport:
    """Return the current effect of a planted fault."""
    return FaultReport(fault, max(0, _ACTIONS[fault.kind].count(lab, fault) - fault.seen_before))


def _check(lab: Lab, kind: str, nic: int) -> None:
    if kind not in KINDS:
        raise InputError(f"unknown fault {kind!r}", hint=f"there are: {', '.join(KINDS)}")
    if not 0 <= nic < lab.plan.nics:
        raise InputError(f"the lab {lab.plan.name!r} has no NIC {nic}", hint=f"0 to {lab.plan.nics - 1}")


def _amount(lab: Lab, kind: str, nic: int, amount: str) -> str:
    _check(lab, kind, nic)
    if kind == "loss":
        parse_share(amount or DEFAULT_AMOUNTS["loss"])
        return amount or DEFAULT_AMOUNTS["loss"]
    if kind == "slow":
        if not amount:
            return f"{lab.plan.bits_per_s * 0.3 / 1e6:g}mbit"
        if parse_rate(amount) > lab.plan.bits_per_s:
            raise InputError(f"{amount} is not slower than the lab's {lab.plan.rate}")
        return amount
    if amount:
        raise InputError(f"the fault {kind!r} takes no amount", hint="slow takes a rate, loss a percentage")
    return ""


@contextmanager
def _locked_faults(lab: Lab) -> Iterator[None]:
    """Lock the lab's file, yield its faults, and write them back if all went well."""
    with labstate.locked():
        state = labstate.load(lab.plan.name)
        if state is None:
            raise LabError(f"the lab {lab.plan.name!r} has been taken down")
        lab.state.faults = state.faults
        yield
        lab.state.save()


def _placed(lab: Lab, kind: str, nic: int) -> Fault | None:
    return next((old for old in lab.state.faults if (old.kind, old.nic) == (kind, nic)), None)


def _take_away(lab: Lab, fault: Fault) -> None:
    _ACTIONS[fault.kind].heal(lab, fault)


# Pull


def _pull(lab: Lab, fault: Fault) -> None:
    name = lab.plan.interface(fault.nic)
    lab.host("B").run("ip", "link", "set", name, "down")
    _await_link(lab, name, up=False)


def _plug_in(lab: Lab, fault: Fault) -> None:
    name, host = lab.plan.interface(fault.nic), lab.host("B")
    # A link that goes down loses its routes; only the kernel's routes come back.
    route = route_line(lab.plan, "B", fault.nic, lab.state.congestion)
    host.run("ip", "-batch", "-", lines=[f"link set {name} up", route])
    _await_link(lab, name, up=True)


def _await_link(lab: Lab, name: str, *, up: bool) -> None:
    deadline = time.monotonic() + LINK_DEADLINE_S
    while ("LOWER_UP" in _link(lab.host("A"), name)["flags"]) is not up:
        if time.monotonic() > deadline:
            raise LabError(f"{name} of host A did not {'get' if up else 'lose'} its carrier")
        time.sleep(POLL_S)


def _link(host: Host, name: str) -> dict[str, Any]:
    links: list[dict[str, Any]] = json.loads(host.run("ip", "-j", "link", "show", name))
    return links[0]


def _carrier_lost(lab: Lab, fault: Fault) -> int:
    return int("LOWER_UP" not in _link(lab.host("A"), lab.plan.interface(fault.nic))["flags"])


# Partition, reset and loss: rules of nftables, the same in both hosts


def _table(fault: Fault) -> str:
    return f"{'netdev' if fault.kind == 'loss' else 'inet'} kvbench_{fault.kind}_nic{fault.nic}"


def _rules(fault: Fault, name: str) -> list[str]:
    table = _table(fault)
    if fault.kind == "loss":
        steps = max(1, round(parse_share(fault.amount) * _LOSS_STEPS))
        chain = f'in {{ type filter hook ingress device "{name}" priority 0; }}'
        rule = f"numgen random mod {_LOSS_STEPS} < {steps} counter drop"
    else:
        chain = "in { type filter hook input priority -300; }"
        rule = f'iifname "{name}" counter drop'
        if fault.kind == "reset":  # resets pass, so that both ends get them
            rule = f'iifname "{name}" meta l4proto tcp tcp flags & rst == 0 counter reject with tcp reset'
    return [f"add table {table}", f"add chain {table} {chain}", f"add rule {table} in {rule}"]


def _add_rules(lab: Lab, fault: Fault) -> None:
    name = lab.plan.interface(fault.nic)
    for side in SIDES:
        host = lab.host(side)
        if fault.kind == "loss":  # so that the share is one of packets on the wire, not of 64 KiB aggregates
            host.run("ip", "link", "set", name, "gso_max_segs", "1")
        host.run("nft", "-f", "-", lines=_rules(fault, name))
        _counter(host, fault)


def _drop_rules(lab: Lab, fault: Fault) -> None:
    for side in SIDES:
        host, table = lab.host(side), _table(fault)
        if fault.kind == "loss":
            segments = str(_MAX_SEGMENTS)
            host.run("ip", "link", "set", lab.plan.interface(fault.nic), "gso_max_segs", segments)
        # Add it first (no error if it exists), so that deleting cannot fail.
        host.run("nft", "-f", "-", lines=[f"add table {table}", f"delete table {table}"])


def _counter(host: Host, fault: Fault) -> int:
    """Return the packets that matched the rule. Raises LabError without such a rule."""
    found = _COUNTER.search(host.run("nft", "list", "table", *_table(fault).split()))
    if found is None:
        raise LabError(f"the rule of the fault {fault.kind!r} does not exist")
    return int(found[1])


def _count_rules(lab: Lab, fault: Fault) -> int:
    return sum(_counter(lab.host(side), fault) for side in SIDES)


# Slow


def _slow(lab: Lab, fault: Fault) -> None:
    _shape(lab, fault.nic, fault.amount)


def _full_speed(lab: Lab, fault: Fault) -> None:
    _shape(lab, fault.nic, lab.plan.rate)


def _shape(lab: Lab, nic: int, rate: str) -> None:
    for side in SIDES:
        host = lab.host(side)
        host.run("tc", "-batch", "-", lines=[shape_line(lab.plan, nic, rate=rate, change=True)])
        found = _qdisc(host, lab.plan.interface(nic))["options"]["rate"] * 8
        if abs(found / parse_rate(rate) - 1) > 0.01:
            raise LabError(f"nic{nic} of host {side} has a rate of {found:.0f} bit/s, not {rate}")


def _qdisc(host: Host, name: str) -> dict[str, Any]:
    qdiscs: list[dict[str, Any]] = json.loads(host.run("tc", "-j", "-s", "qdisc", "show", "dev", name))
    return qdiscs[0]


def _sent_packets(lab: Lab, fault: Fault) -> int:
    name = lab.plan.interface(fault.nic)
    return sum(int(_qdisc(lab.host(side), name)["packets"]) for side in SIDES)


@dataclass(frozen=True)
class _Action:
    place: Callable[[Lab, Fault], None]
    heal: Callable[[Lab, Fault], None]
    count: Callable[[Lab, Fault], int]


_RULES: Final = _Action(_add_rules, _drop_rules, _count_rules)
_ACTIONS: Final = {
    "pull": _Action(_pull, _plug_in, _carrier_lost),
    "slow": _Action(_slow, _full_speed, _sent_packets),
    "partition": _RULES,
    "reset": _RULES,
    "loss": _RULES,
}
