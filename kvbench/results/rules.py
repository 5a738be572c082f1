"""By which code a run was judged: what two kvbenches of one version may differ in."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

_JUDGES: Final = ("core", "sweep")
"""Rooms whose code decides what a trial's requests say, and which rate follows from its trials."""


@cache
def rules_digest() -> str:
    """SHA-256 of that code, by its modules' names and text."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for module in sorted(path for room in _JUDGES for path in (package / room).rglob("*.py")):
        digest.update(module.relative_to(package).as_posix().encode() + b"\0")
        digest.update(module.read_bytes() + b"\0")
    return digest.hexdigest()
