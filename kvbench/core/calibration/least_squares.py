"""Weighted least squares of a model that is computed, not known as a formula, by Levenberg and Marquardt.

The residuals are (observed − predicted) / sigma. Coefficients are kept at 0 or above: a step takes no less
time for more work. Derivatives are differences. Their step is a share of the coefficient, not a tiny number,
because a simulation changes in small jumps. The covariance is a sandwich estimator over clusters: requests
that were served together have correlated deviations, and treating them as independent would make the errors
too small (Liang and Zeger, Biometrika 73, 1986)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import InputError

F64 = NDArray[np.float64]

_SHARE: Final = 0.04
"""Step of a derivative, as a share of the coefficient, or of its scale if larger."""
_DAMPING: Final = (1e-3, 1e6)
"""First damping, and the largest before the fit stops."""
_ENOUGH: Final = 1e-4
"""Relative drop of the sum of squares below which the fit stops."""
_RIDGE: Final = 1e-12
_FLAT: Final = 1e-12


@dataclass(frozen=True)
class Estimate:
    """Result of a fit. ``covariance`` [n, n] in the coefficients' units; ``residuals`` [m] in sigmas."""

    values: F64
    covariance: F64
    residuals: F64
    rounds: int
    at_zero: tuple[bool, ...]
    """Coefficients that the data would make negative."""

    @property
    def errors(self) -> F64:
        errors: F64 = np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return errors


def least_squares(
    residuals: Callable[[F64], F64],
    start: F64,
    scales: F64,
    clusters: Sequence[int] | NDArray[np.int64],
    rounds: int = 12,
) -> Estimate:
    """Return the coefficients [n] with the least squared residuals [m]. ``scales`` [n]: a typical size of
    each coefficient. ``clusters`` [m]: cluster of each residual. Raises InputError for fewer residuals than
    coefficients."""
    values = np.maximum(np.asarray(start, dtype=float), 0.0)
    now = residuals(values)
    if len(now) < len(values):
        raise InputError(f"{len(now)} measured times cannot fit {len(values)} coefficients")
    cost, damping, rounds_done = float(now @ now), _DAMPING[0], 0
    slopes = _slopes(residuals, values, now, scales)
    while rounds_done < rounds and damping < _DAMPING[1]:
        rounds_done += 1
        tried = _step(values, slopes, now, damping, scales)
        then = residuals(tried)
        lower = float(then @ then)
        if lower >= cost:
            damping *= 8.0
            continue
        gained = (cost - lower) / cost if cost else 0.0
        values, now, cost, damping = tried, then, lower, damping / 8.0
        if gained < _ENOUGH or cost == 0.0:
            break
        slopes = _slopes(residuals, values, now, scales)
    downhill = slopes.T @ now
    at_zero = tuple(bool(value == 0.0 and slope > 0.0) for value, slope in zip(values, downhill, strict=True))
    return Estimate(values, _sandwich(slopes, now, np.asarray(clusters), scales), now, rounds_done, at_zero)


def _slopes(residuals: Callable[[F64], F64], values: F64, now: F64, scales: F64) -> F64:
    columns = []
    for index in range(len(values)):
        by = _SHARE * max(values[index], scales[index])
        moved = values.copy()
        moved[index] += by
        columns.append((residuals(moved) - now) / by)
    return np.stack(columns, axis=1)


def _step(values: F64, slopes: F64, now: F64, damping: float, scales: F64) -> F64:
    """Return one damped step; coefficients that would become negative are fixed at 0."""
    free = np.ones(len(values), dtype=bool)
    moved = values.copy()
    for _ in range(len(values)):
        part = slopes[:, free]
        rest = now + slopes[:, ~free] @ (0.0 - values[~free])
        normal = part.T @ part
        normal += damping * np.diag(np.diag(normal)) + _RIDGE * np.diag(1.0 / scales[free] ** 2)
        moved = np.zeros(len(values))
        moved[free] = values[free] - np.linalg.solve(normal, part.T @ rest)
        below = free & (moved < 0.0)
        if not below.any():
            break
        free &= ~below
        if not free.any():
            break
    return np.maximum(moved, 0.0)


def _sandwich(slopes: F64, now: F64, clusters: NDArray[np.int64], scales: F64) -> F64:
    scaled = slopes * scales
    levels, ways = np.linalg.eigh(scaled.T @ scaled)
    # A direction that the data do not determine gets a very large error, not none.
    bread = (ways / np.maximum(levels, _FLAT * max(levels.max(), 1e-300))) @ ways.T
    kinds, numbers = np.unique(clusters, return_inverse=True)
    sums = np.zeros((len(kinds), scaled.shape[1]))
    np.add.at(sums, numbers, scaled * now[:, None])
    groups, (rows, columns) = len(kinds), scaled.shape
    small = groups / max(groups - 1, 1) * (rows - 1) / max(rows - columns, 1)
    covariance = small * bread @ (sums.T @ sums) @ bread
    result: F64 = covariance * np.outer(scales, scales)
    return result
