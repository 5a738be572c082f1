"""Two ways to serve the same requests: what the second adds to the first, with an interval. Pure.

The same plan (offsets, prompts) is sent both ways, so request i of one has a twin in the other, and what
they share (its place in a burst, its neighbours) falls out of their difference. Neighbouring requests
depend on each other, so the interval comes from a circular block bootstrap: blocks of neighbouring *pairs*
are drawn with replacement, until there are as many pairs as were measured, and each figure is computed
anew [Künsch 1989, Politis & Romano 1992]. It covers chance among the requests of these trials, not what
would differ if the whole trials were repeated on another day.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbench.core.stats import autocorrelation_time

FloatArray: TypeAlias = npt.NDArray[np.float64]
Pairs: TypeAlias = tuple[FloatArray, FloatArray]
"""One trial each way, shape (n,) both: element i of each is the same request."""

RESAMPLES: Final = 1000
CONFIDENCE: Final = 0.95
LEAST_PAIRS: Final = 20
"""Fewer pairs than this give no interval."""
_SEED: Final = 20

_FIGURES: Final = ("mean", "p50", "p90", "p99")
_AT_ONCE: Final = 2_000_000
"""Values that are drawn at once, which bounds the memory."""


@dataclass(frozen=True)
class Added:
    """One figure both ways, and ``added`` = with − without, between ``lower`` and ``upper``.

    ``request`` as a figure is the median over requests of what the way adds to the same request; it is no
    difference of two figures, so its ``with_`` and ``without`` are None.
    """

    figure: str
    with_: float | None
    without: float | None
    added: float
    lower: float
    upper: float

    @property
    def seen(self) -> bool:
        """Is it distinguishable from zero?"""
        return self.lower > 0 or self.upper < 0

    def to_json(self) -> dict[str, Any]:
        return {
            "figure": self.figure,
            "with": self.with_,
            "without": self.without,
            "added": self.added,
            "lower": self.lower,
            "upper": self.upper,
        }


def added(trials: Sequence[Pairs], confidence: float = CONFIDENCE) -> list[Added]:
    """Mean, P50, P90, P99 and the median of the pairs' differences, over all trials' pairs together.

    Units are those of the values. Empty with fewer than LEAST_PAIRS pairs. Raises ValueError for arrays
    that are not pairs.
    """
    if any(len(with_) != len(without) for with_, without in trials):
        raise ValueError("each request needs its twin")
    trials = [pair for pair in trials if len(pair[0])]
    if sum(len(with_) for with_, _ in trials) < LEAST_PAIRS:
        return []
    with_, without = (np.concatenate([pair[side] for pair in trials])[None, :] for side in (0, 1))
    a, b, differences = _figures(with_)[0], _figures(without)[0], _differences(with_, without)[0]
    drawn = np.concatenate([_differences(*draw) for draw in _resampled(trials)])
    tail = (1 - confidence) / 2
    lower, upper = np.quantile(drawn, [tail, 1 - tail], axis=0)
    found = [
        Added(name, float(a[place]), float(b[place]), float(differences[place]), *_ends(lower, upper, place))
        for place, name in enumerate(_FIGURES)
    ]
    last = len(_FIGURES)
    return [*found, Added("request", None, None, float(differences[last]), *_ends(lower, upper, last))]


def _ends(lower: FloatArray, upper: FloatArray, place: int) -> tuple[float, float]:
    return float(lower[place]), float(upper[place])


def _figures(values: FloatArray) -> FloatArray:
    """The figures of each row, shape (rows, len(_FIGURES))."""
    return np.column_stack([values.mean(axis=1), *np.percentile(values, [50, 90, 99], axis=1)])


def _differences(with_: FloatArray, without: FloatArray) -> FloatArray:
    """For each row: the figures' differences, and the median difference of the same request."""
    return np.column_stack([_figures(with_) - _figures(without), np.median(with_ - without, axis=1)])


def _resampled(trials: Sequence[Pairs]) -> Iterator[Pairs]:
    """RESAMPLES rows of as many pairs as there are, in portions; a block reaches into no other trial."""
    random = np.random.default_rng(_SEED)
    lengths = [block_length(with_ - without) for with_, without in trials]
    portion = max(1, _AT_ONCE // sum(len(with_) for with_, _ in trials))
    for begun in range(0, RESAMPLES, portion):
        rows = min(portion, RESAMPLES - begun)
        ones, others = [], []
        for (with_, without), length in zip(trials, lengths, strict=True):
            n = len(with_)
            starts = random.integers(0, n, (rows, math.ceil(n / length), 1))
            places = ((starts + np.arange(length)) % n).reshape(rows, -1)[:, :n]
            ones.append(with_[places])
            others.append(without[places])
        yield np.concatenate(ones, axis=1), np.concatenate(others, axis=1)


def block_length(values: FloatArray) -> int:
    """Neighbours to draw together: the usual n^(1/3), or twice their correlation time if that is more.

    At most a fifth of them, so that there is something to draw from.
    """
    n = len(values)
    wanted = max(n ** (1 / 3), 2 * autocorrelation_time(values))
    return int(max(1, min(math.ceil(wanted), n // 5)))
