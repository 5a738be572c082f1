"""One JSON object of a corpus, read with care: what is wrong in it is said with its file and line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvbench.core.load.trace_formats import LONGEST
from kvbench.errors import InputError

_LATEST_S: Final = 1e12


@dataclass(frozen=True)
class CorpusRow:
    """``values`` as they stand at ``where`` (``file:line``, or deeper). Each method raises InputError."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, value: object, where: str) -> CorpusRow:
        """Refuses what is no JSON object."""
        if not isinstance(value, dict):
            raise InputError(f"{where}: must be a JSON object")
        return cls(value, where)

    def tokens(self, name: str, least: int = 1) -> int:
        """A whole number of tokens."""
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= LONGEST:
            raise InputError(
                f"{self.where}: {name} must be a whole number from {least} to {LONGEST}, "
                f"not {self._said(name)}"
            )
        return value

    def seconds(self, name: str, unit_s: float = 1.0) -> float | None:
        """A time in seconds of one in units of ``unit_s``; None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not known or not 0 <= value * unit_s <= _LATEST_S:
            raise InputError(f"{self.where}: {name} must be a time of at least 0, not {self._said(name)}")
        return float(value) * unit_s

    def rows(self, name: str) -> list[CorpusRow]:
        """A list of objects."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise InputError(f"{self.where}: {name} must be a list, not {self._said(name)}")
        return [CorpusRow.of(each, f"{self.where}, {name}[{place}]") for place, each in enumerate(value)]

    def text(self, name: str) -> str:
        """A text, that may be empty."""
        value = self.values.get(name)
        if not isinstance(value, str):
            raise InputError(f"{self.where}: {name} must be a text, not {self._said(name)}")
        return value

    def name(self, *names: str, otherwise: str) -> str:
        """The first of these that is there, as a text."""
        found = (self.values[each] for each in names if self.values.get(each) is not None)
        return str(next(found, otherwise))[:80]

    def _said(self, name: str) -> str:
        return f"{str(self.values[name])[:40]!r}" if name in self.values else "missing"
