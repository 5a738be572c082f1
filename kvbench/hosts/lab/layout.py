"""A lab's shape: two hosts, N NICs between them, and the lines for ``ip`` and ``tc`` that make it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import Final, Literal

from kvbench.errors import InputError

Side = Literal["A", "B"]
SIDES: Final[tuple[Side, Side]] = ("A", "B")

MAX_NICS: Final = 64
BURST_S: Final = 0.002
"""Duration of an unshaped burst, in seconds; with less the token bucket stays below its rate."""
MIN_BURST_BYTES: Final = 65_536
"""The kernel passes packets of up to this size to a token bucket, which splits larger ones."""
QUEUE: Final = "20ms"
"""Maximum queueing time of a packet at the NIC's rate; further packets are dropped."""
CORE_BITS_PER_S: Final = 5e9
"""Shaped veth traffic per core: on two cores, 2 × 5 Gbit/s gave 92 % of the rate, 4 × 5 gave 84 %."""

_RATE: Final = re.compile(r"(?<!\d)(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?", re.IGNORECASE)
_UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_PREFIX: Final = re.compile(r"\d{1,3}\.\d{1,3}")


def parse_rate(text: str) -> float:
    """Return the bits per second of a ``tc`` rate: ``1gbit``, ``300mbit``. Raises InputError."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1e6 <= rate <= 1e12:
        raise InputError(
            f"{text!r} is not a NIC's rate", hint="write it as tc does, from 1mbit to 1tbit: 300mbit, 1gbit"
        )
    return rate


def parse_share(text: str) -> float:
    """Return the share of a percentage such as ``1%`` or ``0.01%``: above 0, at most 1. Raises InputError."""
    number = text.strip().removesuffix("%").strip()
    try:
        share = float(number) / 100
    except ValueError:
        share = 0.0
    if not (text.strip().endswith("%") and 0 < share <= 1):
        raise InputError(f"{text!r} is not a share of packets", hint="write a percentage: 1%, 0.1%")
    return share


@dataclass(frozen=True)
class LabPlan:
    """Shape of a lab: ``rate`` is each NIC's in each direction; NIC i has ``PREFIX.i.1`` at A, ``.2`` at B.
    Raises InputError for an impossible shape."""

    name: str = "kv"
    nics: int = 2
    rate: str = "1gbit"
    mtu: int = 1500
    prefix: str = "10.77"
    congestion: str = "cubic"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"{self.name!r} cannot be a lab's name", hint="up to 32 lower-case letters, digits, hyphens"
            )
        if not 1 <= self.nics <= MAX_NICS:
            raise InputError(f"a lab has 1 to {MAX_NICS} NICs, not {self.nics}")
        if not 576 <= self.mtu <= 65_535:
            raise InputError(f"an MTU of {self.mtu} is not possible", hint="576 to 65535; usual: 1500, 9000")
        parse_rate(self.rate)
        try:
            unusable = not _PREFIX.fullmatch(self.prefix) or IPv4Address(f"{self.prefix}.0.1").is_loopback
        except AddressValueError:
            unusable = True
        if unusable:
            raise InputError(
                f"{self.prefix!r} is not the beginning of an IPv4 address", hint="two numbers: 10.77"
            )

    @property
    def bits_per_s(self) -> float:
        return parse_rate(self.rate)

    @property
    def line_rate_gb_per_s(self) -> float:
        """Line rate of one NIC in one direction, in 10⁹ bytes per second with all headers."""
        return self.bits_per_s / 8e9

    @property
    def burst_bytes(self) -> int:
        """Bytes that a NIC sends unshaped: transfers that are not much larger look faster than the NIC."""
        wanted = self.bits_per_s / 8 * BURST_S
        return max(MIN_BURST_BYTES, 1 << int(wanted).bit_length())

    def namespace(self, side: Side) -> str:
        return f"kvbench-{self.name}-{side}"

    def interface(self, nic: int) -> str:
        return f"nic{nic}"

    def address(self, side: Side, nic: int) -> str:
        return f"{self.prefix}.{nic}.{SIDES.index(side) + 1}"

    def describe(self) -> str:
        """Return text such as ``8 × 1gbit``, with an unusual MTU."""
        return f"{self.nics} × {self.rate}" + (f", MTU {self.mtu}" if self.mtu != 1500 else "")

    def overload(self, cores: int) -> str:
        """Return a warning if the NICs' total rate exceeds the cores' capacity; else empty."""
        if self.nics * self.bits_per_s <= cores * CORE_BITS_PER_S:
            return ""
        most = cores * CORE_BITS_PER_S / self.nics / 1e9
        return (
            f"{self.describe()} is more than {cores} cores carry: the CPU will be the limit, not the NICs; "
            f"up to {most:g}gbit each is safe"
        )


def route_line(plan: LabPlan, side: Side, nic: int, congestion: str | None) -> str:
    """Return the route over one NIC, which names the congestion control. A namespace's default may only be an
    unrestricted algorithm; a route may name any available one."""
    name, address = plan.interface(nic), plan.address(side, nic)
    line = f"route replace {plan.prefix}.{nic}.0/24 dev {name} src {address}"
    return f"{line} congctl {congestion}" if congestion else line


def ip_lines(plan: LabPlan, side: Side, peer: str, congestion: str | None) -> list[str]:
    """Return the lines for ``ip -batch`` in one host; A makes the pairs and ``peer`` names B's namespace."""
    lines = ["link set lo up"]
    for nic in range(plan.nics):
        name = plan.interface(nic)
        if side == "A":
            lines.append(
                f"link add {name} mtu {plan.mtu} type veth peer name {name} mtu {plan.mtu} netns {peer}"
            )
        lines += [
            # No link-local IPv6 address: its announcements would count as a transfer's bytes.
            f"link set {name} addrgenmode none",
            f"link set {name} up",
            f"addr add {plan.address(side, nic)}/24 dev {name} noprefixroute",
            route_line(plan, side, nic, congestion),
        ]
    return lines


def shape_line(plan: LabPlan, nic: int, *, rate: str | None = None, change: bool = False) -> str:
    """Return the token bucket of one NIC, for ``tc -batch``."""
    bits = parse_rate(rate or plan.rate)
    return (
        f"qdisc {'change' if change else 'add'} dev {plan.interface(nic)} root tbf "
        f"rate {bits:.0f}bit burst {plan.burst_bytes} latency {QUEUE}"
    )


def tc_lines(plan: LabPlan) -> list[str]:
    return [shape_line(plan, nic) for nic in range(plan.nics)]
