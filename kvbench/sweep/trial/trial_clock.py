"""The clock that waits and single requests go by: the wall's, or a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class TrialClock(Protocol):
    """Seconds since some moment, and waiting."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
