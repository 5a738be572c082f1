"""Ticks and spans of a picture's axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Transform


def plain_ticks(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Ticks at just these values, written out in full, on a logarithmic axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    target = axes.xaxis if which == "x" else axes.yaxis
    target.set_major_locator(FixedLocator(list(values)))
    target.set_minor_locator(NullLocator())
    target.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def axis_spans(panels: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The ends of each panel's axis: from 0, unless that leaves more than half of every panel empty.

    A panel that does not begin at 0 spans a fifth of its values at least.
    """
    if any(min(values) < 0.5 * max(values) for values in panels):
        return [(0.0, max(values) * 1.1) for values in panels]
    spans = []
    for values in panels:
        low, high = min(values), max(values)
        room = max(0.15 * (high - low), (0.2 * high - (high - low)) / 2)
        spans.append((low - room, high + room))
    return spans


def at_bottom(axes: Axes) -> Transform:
    """x in data, y from 0 (the axis) to 1 (the top)."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axes.transData, axes.transAxes)


def nice_log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values (1, 2, 5 × 10ⁿ) from just below ``low`` to just above ``high``, at most ``most``."""
    inside: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= most:
            return inside
    return inside
