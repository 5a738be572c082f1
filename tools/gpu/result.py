"""What one check says: its name, how it ended, figures, and an error's text; a JSON line each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]
Figures = Mapping[str, Any]


class SkippedError(Exception):
    """What a check needs is not here; the reason."""


class CheckFailedError(Exception):
    """What was seen is not what should be; ``figures`` say what was seen all the same."""

    def __init__(self, text: str, figures: Figures | None = None) -> None:
        super().__init__(text)
        self.figures = dict(figures or {})


@dataclass(frozen=True)
class Result:
    """One line of the output."""

    name: str
    status: Status
    seconds: float
    figures: Figures = field(default_factory=dict)
    text: str = ""
    """Why it was skipped, or the error."""

    def line(self) -> str:
        return json.dumps(asdict(self), default=str)


@dataclass(frozen=True)
class Check:
    """One check, run in a process of its own: the scratch folder → figures.

    ``run`` raises SkippedError or CheckFailedError.
    """

    name: str
    run: Callable[[Path], Figures]
    deadline_s: float = 60.0
    gpu: bool = True
    """Whether it is skipped where there is no NVIDIA driver."""
