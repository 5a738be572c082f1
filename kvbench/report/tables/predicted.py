"""What a fitted timing profile allows to say of a predicted rate: its mark, and its least interval.

The run folder keeps, of each deployment that was simulated with a profile file, the profile's status, the
lengths that it was fitted to, and how far its held-out figures may be off (``fitted_with`` in the manifest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbench.core.records import Cell
from kvbench.report.tables.trial_values import finite
from kvbench.results.run import RunFolder

EXTRAPOLATED: Final = 1.05
"""A length beyond the fitted ones by more than this factor is extrapolated to."""


@dataclass(frozen=True)
class FitLimits:
    """``mark``: "unfit", "extrapolated" or empty; ``why``: the whole sentence; ``margin``: how far the rate
    may be off by the fit's own account, as a share of it."""

    mark: str = ""
    why: str = ""
    margin: float = 0.0


def fit_limits(run: RunFolder, cell: Cell) -> FitLimits:
    """The limits of a cell's prediction; none where nothing was fitted."""
    every = run.manifest.get("fitted_with")
    fitted = every.get(cell.connector) if isinstance(every, Mapping) else None
    if not isinstance(fitted, Mapping):
        return FitLimits()
    why = _why(fitted, cell)
    return FitLimits(why.partition(":")[0], why, max(finite(fitted.get("margin")) or 0.0, 0.0))


def _why(fitted: Mapping[str, Any], cell: Cell) -> str:
    name = fitted.get("name")
    if fitted.get("status") == "unfit":
        return f"unfit: timing profile {name} did not predict what was held out of its fit"
    parts = []
    lengths = (("prompts", "input_len", cell.input_len), ("outputs", "output_len", cell.output_len))
    for what, key, length in lengths:
        ends = fitted.get(key)
        if not isinstance(ends, Sequence) or len(ends) != 2:
            continue
        shortest, longest = (finite(end) or 0.0 for end in ends)
        if not shortest / EXTRAPOLATED <= length <= longest * EXTRAPOLATED:
            span = f"{shortest:,.0f}" if shortest == longest else f"{shortest:,.0f} to {longest:,.0f}"
            parts.append(f"{what} of {length:,} tokens (fitted: {span})")
    return f"extrapolated: timing profile {name} to {', '.join(parts)}" if parts else ""
