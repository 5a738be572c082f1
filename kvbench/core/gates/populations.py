"""Gate on latencies of two kinds: is it one system that answers, or a fast and a slow one?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.gates.evidence import Evidence
from kvbench.core.metrics.metrics import judged_records
from kvbench.core.records import Finding

LEAST: Final = 60
LEAST_SHARE: Final = 0.1
LEAST_RATIO: Final = 1.3
"""Of the two medians."""
BY_CHANCE: Final = 1e-6
"""A test that would err more seldom than once in a million trials."""
STRETCHES: Final = 3.0
"""Standard errors by which neighbours are more alike than by chance."""
LONGEST_TURN: Final = 8
"""Servers taken in turn that are looked for."""
LEAST_TURN_SPREAD: Final = 0.5
"""Between the shares of slow requests at two places of a turn."""
PER_LENGTH: Final = 20
"""Requests of one length, of which a median is taken; fewer are compared with their neighbours in length."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Populations:
    """Two kinds of a latency: ``slow`` tells of each value. Medians in the values' unit; ``turn``: slow ones
    come at the same places of so many requests in a row, 0 if they come in no such order.
    """

    slow: npt.NDArray[np.bool_]
    medians: tuple[float, float]
    turn: int

    @property
    def share(self) -> float:
        """Of the slow ones."""
        return float(self.slow.mean())


def two_populations(evidence: Evidence) -> Finding | None:
    """Latencies are those of one system, and not of a fast and a slow one.

    evidence: TTFT (less what goes with the prompt's length) and TPOT of 60 requests and more. They fall into
    two kinds if on a log scale the middle third between two medians is emptier than a single hill allows:
    against the same width at the smaller kind, with an error of 1 in a million. Slow ones that come in turn,
    as each second request does behind two servers, are a warning: prompts do not come in turn.
    limits: a note where they come in no such order, as caches and preemption may part them, too; silent where
    they come in stretches, as of a queue, bursts and pauses, and where the kinds overlap.
    """
    if evidence.reuse_expected:
        return None
    judged = judged_records(evidence.records, evidence.summary.window)
    records = sorted((each for each in judged if each.ok), key=lambda each: each.sent_s or each.scheduled_s)
    ttft = [(each.ttft_s, float(each.input_len)) for each in records]
    tpot = [(each.tpot_s, 0.0) for each in records]
    found = []
    for name, values in (("TTFT", ttft), ("TPOT", tpot)):
        known = [(value, length) for value, length in values if value is not None and value > 0]
        if len(known) >= LEAST:
            kinds = populations([value for value, _ in known], [length for _, length in known])
            found += [] if kinds is None else [(name, kinds)]
    if not found:
        return None
    name, kinds = max(found, key=lambda each: each[1].turn > 0)
    fast_ms, slow_ms = (1e3 * each for each in kinds.medians)
    order = f", each {kinds.turn} requests in the same order" if kinds.turn else ""
    return Finding(
        "two_populations",
        "warning" if kinds.turn else "note",
        f"{name} is of two kinds: {fast_ms:.4g} ms at the median of {1 - kinds.share:.0%} of the requests, "
        f"{slow_ms:.4g} ms of the other {kinds.share:.0%}{order}",
        "servers that are taken in turn are not alike: measure each alone, and look what slows one of them"
        if kinds.turn
        else "prompts that a cache knows, preemption or unequal servers part latencies so: perhaps one kind "
        "alone meets the SLO",
        {"metric": name, "fast_ms": fast_ms, "slow_ms": slow_ms, "slow_share": kinds.share,
         "turn": kinds.turn},
    )  # fmt: skip


def populations(values: Sequence[float], lengths: Sequence[float] = ()) -> Populations | None:
    """The two kinds of positive values, in the order of sending; None if one hill may hold them all.

    ``lengths``: of each prompt; what goes with them is taken out first. The cut between the kinds is the one
    with the least variance inside them (Otsu 1979), on a log scale.
    """
    logs: FloatArray = np.log(np.asarray(values, np.float64))
    rest = logs - _with_length(logs, np.asarray(lengths, np.float64)) if len(lengths) else logs
    cut = _cut(np.sort(rest))
    slow = rest > cut
    share = float(slow.mean())
    if not LEAST_SHARE <= share <= 1 - LEAST_SHARE:
        return None
    low, high = float(np.median(rest[~slow])), float(np.median(rest[slow]))
    if high - low < math.log(LEAST_RATIO) or not _parted(rest, low, high):
        return None
    turn = _turn(slow)
    if not turn and _in_stretches(slow):
        return None
    medians = float(np.exp(np.median(logs[~slow]))), float(np.exp(np.median(logs[slow])))
    return Populations(slow, medians, turn)


def _cut(ordered: FloatArray) -> float:
    """Between the two parts that differ the most."""
    n = len(ordered)
    sums, count = np.cumsum(ordered)[:-1], np.arange(1, n)
    between = (sums[-1] + ordered[-1]) * count / n - sums
    best = int(np.argmax(between**2 / (count * (n - count))))
    return float(ordered[best] + ordered[best + 1]) / 2


def _parted(values: FloatArray, low: float, high: float) -> bool:
    """Whether a valley between two medians is too deep for a single hill.

    A density with one peak is nowhere between two places lower than at the lower of them. So each value of
    the valley or of the smaller peak, in windows of one width, would be in the valley as likely as not.
    """
    width = (high - low) / 3
    inside = [int(np.sum(np.abs(values - place) <= width / 2)) for place in (low, (low + high) / 2, high)]
    valley, peak = inside[1], min(inside[0], inside[2])
    return peak > valley and _at_most(valley, valley + peak) < BY_CHANCE


def _at_most(least: int, n: int) -> float:
    """P(X ≤ least) of a fair coin thrown n times, at most (Chernoff); least < n / 2."""
    heads = least / n
    entropy = sum(-each * math.log(each) for each in (heads, 1 - heads) if each > 0)
    return math.exp(n * (entropy - math.log(2)))


def _with_length(logs: FloatArray, lengths: FloatArray) -> FloatArray:
    """The median of the values at each length, or among its neighbours in length."""
    if len(np.unique(lengths)) == 1:
        return np.zeros_like(logs)
    order = np.argsort(lengths, kind="stable")
    found = np.empty_like(logs)
    for part in np.array_split(order, max(1, len(logs) // PER_LENGTH)):
        found[part] = np.median(logs[part])
    return found


def _in_stretches(slow: npt.NDArray[np.bool_]) -> bool:
    """Whether neighbours are alike more often than by chance: then it is the time that parts them, as queues,
    bursts and pauses do.
    """
    share, pairs = float(slow.mean()), len(slow) - 1
    alike = share**2 + (1 - share) ** 2
    found = float((slow[1:] == slow[:-1]).mean())
    return found - alike > STRETCHES * math.sqrt(alike * (1 - alike) / pairs)


def _turn(slow: npt.NDArray[np.bool_]) -> int:
    """After how many requests the slow ones come again, if they come in turn; else 0.

    Each place of a turn has its share of slow ones; by chance they differ as a χ² of turn − 1 degrees says,
    whose tail is bounded here by Chernoff's (x/d · e^(1 − x/d))^(d/2). Queues and pauses make neighbours
    alike, but no places of a turn.
    """
    share, best, widest = float(slow.mean()), 0, LEAST_TURN_SPREAD
    for turn in range(2, LONGEST_TURN + 1):
        places = [slow[place::turn] for place in range(turn)]
        shares = [float(each.mean()) for each in places]
        squares = sum(
            len(each) * (mine - share) ** 2 / (share * (1 - share))
            for each, mine in zip(places, shares, strict=True)
        )
        free, spread = turn - 1, max(shares) - min(shares)
        ratio = max(1.0, squares / free)
        by_chance = free / 2 * (math.log(ratio) + 1 - ratio)
        if by_chance < math.log(BY_CHANCE / LONGEST_TURN) and spread >= widest + 0.01 * (best > 0):
            best, widest = turn, spread
    return best
