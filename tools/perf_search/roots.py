"""The root of a curve through points, as vLLM and AIPerf look for it."""

from __future__ import annotations

import numpy as np

from .pipeline import FloatArray


def pchip_root(x: FloatArray, y: FloatArray, low: float, high: float) -> float:
    """Root of the monotone cubic (Fritsch and Carlson's slopes) through the points, between two of them."""
    h, d = np.diff(x), np.diff(y) / np.diff(x)
    slopes = np.empty_like(x)
    slopes[0], slopes[-1] = d[0], d[-1]
    for i in range(1, len(x) - 1):
        if d[i - 1] * d[i] <= 0:
            slopes[i] = 0.0
        else:
            left, right = 2 * h[i] + h[i - 1], h[i] + 2 * h[i - 1]
            slopes[i] = (left + right) / (left / d[i - 1] + right / d[i])
    i = int(np.searchsorted(x, low, side="right")) - 1
    for _ in range(60):
        middle = (low + high) / 2
        t = (middle - x[i]) / h[i]
        value = (
            (1 + 2 * t) * (1 - t) ** 2 * y[i]
            + t * (1 - t) ** 2 * h[i] * slopes[i]
            + t**2 * (3 - 2 * t) * y[i + 1]
            + t**2 * (t - 1) * h[i] * slopes[i + 1]
        )
        low, high = (middle, high) if value <= 0 else (low, middle)
    return low
