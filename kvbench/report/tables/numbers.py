"""Numbers as people read them: three digits, a dash for what is missing."""

from __future__ import annotations

import math
from typing import Final

MISSING: Final = "–"


def number(value: float | None) -> str:
    """About three significant digits: ``0.0123``, ``1.23``, ``12.3``, ``1235``; exponents below 10⁻⁶ only."""
    if value is None:
        return MISSING
    if not math.isfinite(value) or abs(value) < 1e-6:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def percent(value: float | None) -> str:
    """A share as per cent, with one digit: ``99.2``; 100 only when it is all."""
    if value is None:
        return MISSING
    return "100" if value >= 1 else f"{min(value * 100, 99.9):.1f}"
