"""The log patterns, from ``log_patterns.yaml``: what is written when something is wrong, why, and a hint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final, Literal

import yaml

Level = Literal["fatal", "refuse", "warning"]
"""fatal: no measurement can come of this deployment · refuse: the trial is no measurement ·
warning: reported beside the numbers."""


@dataclass(frozen=True)
class Pattern:
    """One entry. ``words``: regular expressions, of which one is found in the line.

    ``engine`` is what its options call ``logs_like``, ``connector`` a part of that one's class name; empty
    scopes mean any. ``asked``: only if that transport was asked for. ``fatal_after``: so many within one
    trial are fatal. ``of_cancelled``: requests that kvbench cancelled may be all there is to it, so then it
    weighs less. ``once``: it happens once in a process's life, however many lines speak of it.
    """

    key: str
    level: Level
    words: list[str]
    cause: str
    hint: str
    engine: str = ""
    connector: str = ""
    role: str = ""
    asked: str = ""
    fatal_after: int = 0
    of_cancelled: bool = False
    once: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile("|".join(self.words))


_TABLE: Final = Path(__file__).with_suffix(".yaml")


@cache
def patterns() -> dict[str, Pattern]:
    """The table by its keys, in its order."""
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return {key: Pattern(key, **entry) for key, entry in table.items()}
