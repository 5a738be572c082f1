"""Counts of canaries for a trial, a cell or a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.core.canaries.answer_kinds import CanaryResult, bound_text
from kvbench.core.records import TrialRecord


@dataclass(frozen=True)
class Tally:
    """Counts of answers. ``noisy``: within the reference's own variation. ``own``: compared with the server's
    own idle answers. ``at_end``: requested after a cell's last trial."""

    checked: int = 0
    wrong: int = 0
    noisy: int = 0
    unanswered: int = 0
    own: int = 0
    at_end: int = 0
    wrong_at_end: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    @classmethod
    def of_result(cls, result: CanaryResult | None, *, at_end: bool = False) -> Tally:
        if result is None:
            return cls()
        known = cls._of(result.to_json())
        return known + cls(at_end=known.checked, wrong_at_end=known.wrong) if at_end else known

    @classmethod
    def of_trial(cls, record: TrialRecord) -> Tally:
        """Return the stored tally of a trial; empty without canaries."""
        row = record.engine.get("canaries")
        return cls._of(row) if isinstance(row, Mapping) else cls()

    @classmethod
    def of_trials(cls, records: Iterable[TrialRecord]) -> Tally:
        return sum((cls.of_trial(record) for record in records), cls())

    @classmethod
    def from_json(cls, row: Mapping[str, Any] | None) -> Tally:
        return cls(*(_count(row, name) for name in cls.__dataclass_fields__)) if row else cls()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "says": self.text()} if self.checked else {}

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> Tally:
        checked, wrong, noisy, unanswered = (
            _count(row, name) for name in ("checked", "wrong", "noisy", "unanswered")
        )
        return cls(checked, wrong, noisy, unanswered, checked if row.get("proof") == "own" else 0)

    def text(self) -> str:
        """Return for example ``0 of 1,040 wrong: at most 0.3 % (95 % confidence)``, and its weaknesses."""
        weak = []
        if self.noisy:
            weak.append(f"{self.noisy:,} differ, within the reference's own variation")
        if self.own:
            which = "" if self.own == self.checked else f" {self.own:,} of them"
            weak.append(f"compared{which} with the server's own idle outputs, a weaker check")
        return "; ".join([bound_text(self.wrong, self.checked), *weak])


def _values(tally: Tally) -> tuple[int, ...]:
    return tuple(vars(tally).values())


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    return value if isinstance(value, int) and value >= 0 else 0
