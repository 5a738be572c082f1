"""Is a run gone on with under the conditions that it was begun under? Compared by environment.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

ELSEWHERE: Final = "resumed elsewhere"
"""Label of a run whose later part was measured on another machine or by other software."""

_OF_THE_MACHINE: Final = (
    ("kvbench", ""),
    ("hostname", ""),
    ("kernel", ""),
    ("cpu", "model"),
    ("cpu", "cores"),
    ("cpu", "usable_cores"),
    ("cpu", "cgroup_limit"),
    ("memory", "total_bytes"),
    ("python", "version"),
)
_DEVICES: Final = {"gpus": ("name", "driver_version"), "nics": ("name", "speed_mbit"), "rdma": ("name",)}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it was, in words: kvbench's version, machine, devices, libraries, settings."""
    for name, before, after in _facts(then, now):
        if before != after:
            yield f"{name}: {_shown(before)} then, {_shown(after)} now"


def host_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The same of the hosts that a launcher reaches, by their names in the scenario.

    A host that is not used any more, or is new, is a difference, too. Nothing is known of hosts that the
    run had not reached yet: then there is none.
    """
    if not then:
        return []
    found = [f"host {name}: not used any more" for name in then if name not in now]
    found += [f"host {name}: not used then" for name in now if name not in then]
    for name in now:
        if name in then:
            found += [f"host {name}, {each}" for each in differences(then[name] or {}, now[name] or {})]
    return found


def _facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(what, as it was, as it is)."""
    for part, key in _OF_THE_MACHINE:
        yield f"{part} {key}".strip(), _fact(then, part, key), _fact(now, part, key)
    for part, shown in _DEVICES.items():
        yield part, _devices(then, part, shown), _devices(now, part, shown)
    for part in ("libraries", "env"):
        before, after = then.get(part) or {}, now.get(part) or {}
        for name in sorted({*before, *after}):
            yield name, before.get(name), after.get(name)


def _fact(machine: Mapping[str, Any], part: str, key: str) -> Any:
    facts = machine.get(part)
    return (facts or {}).get(key) if key else facts


def _devices(machine: Mapping[str, Any], part: str, keys: tuple[str, ...]) -> list[str]:
    """Physical devices in words; virtual network interfaces come and go."""
    found = [each for each in machine.get(part) or () if part != "nics" or each.get("pci_address")]
    return sorted(" ".join(str(each.get(key)) for key in keys if each.get(key)) for each in found)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
