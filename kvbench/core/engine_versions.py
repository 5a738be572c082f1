"""Engine versions: parsing, comparison, ranges of profiles. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvbench.errors import InputError

Release = tuple[int, ...]

NEWEST_KNOWN: Final[Release] = (0, 33)
"""Newest vLLM release whose source the profiles were checked against."""

_NUMBERS: Final = re.compile(r"(?<![\d.])v?(\d{1,4}(?:\.\d{1,4}){1,3})(?![\d])")


@dataclass(frozen=True)
class Releases:
    """Releases from ``first`` (included) to ``until`` (excluded); None: no end."""

    first: Release = (0,)
    until: Release | None = None

    def __contains__(self, wanted: Release) -> bool:
        return self.first <= wanted and (self.until is None or wanted < self.until)

    def __str__(self) -> str:
        low = "any" if self.first == (0,) else f"{dotted(self.first)} and newer"
        if self.until is None:
            return f"vLLM {low}"
        since = "" if self.first == (0,) else f"{dotted(self.first)} and newer, "
        return f"vLLM {since}before {dotted(self.until)}"


def release(text: str) -> Release:
    """Return a version's numbers: "v0.6.4.post1" is (0, 6, 4). Raises InputError if there are none."""
    found = _NUMBERS.search(text)
    if found is None:
        raise InputError(f"{text[:80]!r} is not a version", hint='expected for example "0.32.0"')
    return tuple(int(part) for part in found[1].split("."))


def version_in(output: str) -> str:
    """Return the version in ``vllm --version``'s output: on the last line that has one; or empty."""
    for line in reversed(output.splitlines()):
        if found := re.fullmatch(r"(?:vllm\s+)?v?(\d+(?:\.\d+)+\S*)", line.strip(), re.IGNORECASE):
            return found[1]
    return ""


def is_sglang(version: str) -> bool:
    """Return whether it is "sglang" or for example "sglang-0.5.23"."""
    return version.startswith("sglang")


def is_newer_than_known(version: str) -> bool:
    return not is_sglang(version) and release(version)[:2] > NEWEST_KNOWN


def dotted(parts: Release) -> str:
    """Return (0, 24) as "0.24"."""
    return ".".join(map(str, parts))
