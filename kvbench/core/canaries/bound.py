"""What so many checked answers prove: the bound of the share that is wrong, and what would have been seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvbench.core.metrics.output_noise import SIGNIFICANCE, Noise, refused_from, seen_share
from kvbench.core.stats import binomial_cdf, upper_bound

CONFIDENCE: Final = 1.0 - SIGNIFICANCE
DOUBTED_BELOW: Final = 1e-4
"""A trial of a server that differs from itself is refused where chance alone would do it so rarely: a run has
dozens of trials, and must not be refused by one of them for nothing."""
UNSEEN_BELOW: Final = 0.01
"""The same of a server that was asked again and did not differ, which tells no log-probabilities: that noise
was there all the same, and not seen, is unlikely by itself."""
_BISECTIONS: Final = 40


def wrong_share_bound(wrong: int, checked: int) -> float:
    """The share of wrong answers is below this with 95 %, by the exact binomial; 1 if none was checked."""
    return upper_bound(wrong, checked, CONFIDENCE)


def percent_text(share: float) -> str:
    """A share as per cent, rounded up to two digits below 10 % and one below 1 %, so that it stays true."""
    percent = 100.0 * share
    if percent <= 0:
        return "0 %"
    digits = 0 if percent >= 10 else 1
    while percent < 1 and percent * 10**digits < 1:
        digits += 1
    return f"{math.ceil(percent * 10**digits - 1e-9) / 10**digits:.{digits}f} %"


def bound_text(wrong: int, checked: int) -> str:
    """For example ``0 of 1,040 wrong: fewer than 0.3 % (95 %)``."""
    if not checked:
        return "no answers were checked"
    told = f"{wrong:,} of {checked:,} wrong"
    return f"{told}: fewer than {percent_text(wrong_share_bound(wrong, checked))} (95 %)"


def doubted_below(noise: Noise) -> float:
    """With so small a chance it is no noise."""
    return DOUBTED_BELOW if noise.differed else UNSEEN_BELOW


def found_share(of: int, noise: Noise, *, singly: bool) -> float:
    """What share of answers a fault must change to be seen in ``of`` of them with 95 %; 1 if none would be.

    ``singly``: each answer is judged for itself, since the right ones are exact or have log-probabilities.
    """
    if of < 1:
        return 1.0
    if singly:
        return seen_share(of)
    least = refused_from(of, noise, doubted_below(noise))
    return 1.0 if least is None else found_in_any([(of, least)])


def found_in_any(tests: Sequence[tuple[int, int]]) -> float:
    """What share of answers a fault must change for one of some trials to be refused, with 95 %; 1 if none.

    ``tests``: of each trial, the answers checked, and how many different ones refuse it.
    """
    possible = [(of, least) for of, least in tests if 0 < least <= of]
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS if possible else 0):
        middle = (low + high) / 2
        unseen = math.prod(binomial_cdf(least - 1, of, middle) for of, least in possible)
        if 1.0 - unseen < CONFIDENCE:
            low = middle
        else:
            high = middle
    return high
