"""What a fault cost, from the records of the requests that were offered at a fixed rate around it. Pure.

A request is *good* if it met the SLO (without limits on single requests: if it was answered in full), *late*
if it was answered in full too late, *hung* if nothing ended it before its deadline, *lost* if it failed
otherwise, and *wrong* if its answer is known to be wrong. The goodput that a fault cost is the requests due
while it lasted that would have been good (by the share before it), less those that were; divided by the fixed
rate it is in seconds.

Attainment is *back* with the first request from which on every window of so many requests in a row keeps the
level: the SLO's share, or the share before the fault less two standard errors of a window if that is less.
``fault_change`` compares the costs of one fault in two runs by the ranks of their repeats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import NormalDist, median
from typing import Any, Final, Literal, get_args

from kvbench.core.metrics.metrics import met
from kvbench.core.records import UNENDED, RequestRecord
from kvbench.core.slo import Slo

Fate = Literal["good", "late", "lost", "hung", "wrong"]
FATES: Final[tuple[Fate, ...]] = get_args(Fate)
GATEWAY_TIMEOUT: Final = 504
"""What a router answers when it gives a request up that P or D has not ended."""
WINDOW_S: Final = 2.0
LEAST_WINDOW, MOST_WINDOW = 5, 50
"""Requests in a row by which the attainment is judged: those of two seconds, so many at least and most."""
STANDARD_ERRORS: Final = 2.0


@dataclass(frozen=True)
class RequestOutcome:
    """One request: when it was due, when it was over (None: unknown), what became of it."""

    due_s: float
    over_s: float | None
    fate: Fate

    @property
    def good(self) -> bool:
        return self.fate == "good"


def outcome_of(record: RequestRecord, slo: Slo, wrong: Collection[str] = ()) -> RequestOutcome:
    """``wrong``: ids of the requests whose answers are known to be wrong."""
    return RequestOutcome(
        record.scheduled_s, record.last_token_s if record.ok else None, _fate(record, slo, wrong)
    )


def _fate(record: RequestRecord, slo: Slo, wrong: Collection[str]) -> Fate:
    if record.error in UNENDED or (not record.ok and record.status == GATEWAY_TIMEOUT):
        return "hung"
    if not record.ok:
        return "lost"
    if record.request_id in wrong:
        return "wrong"
    return "good" if met(record, slo) else "late"


@dataclass(frozen=True)
class FaultCost:
    """Of the requests that were open when the fault struck, or due later; times in seconds after it.

    ``held_before``: the share of good ones among the ``before`` that were over before it; None of none.
    ``back_s``: None is never, as far as it was watched. ``goodput_lost`` is in requests, ``lost_s`` the same
    in seconds of the held rate.
    """

    rate: float
    target: float
    window: int
    level: float
    before: int
    held_before: float | None
    fates: Mapping[str, int]
    back_s: float | None
    goodput_lost: float
    watched_s: float

    @property
    def lost_s(self) -> float:
        return self.goodput_lost / self.rate if self.rate else 0.0

    @property
    def was_held(self) -> bool:
        """Whether the rate was held before the fault; else nothing can be said of what that cost."""
        if self.held_before is None:
            return False
        error = math.sqrt(self.target * (1 - self.target) / self.before)
        return self.held_before >= self.target - STANDARD_ERRORS * error - 1e-9

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fates": dict(self.fates), "lost_s": self.lost_s, "was_held": self.was_held}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> FaultCost:
        """Raises KeyError or TypeError for what is none."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def fault_cost(outcomes: Iterable[RequestOutcome], rate: float, target: float, struck_s: float) -> FaultCost:
    """``rate``: requests per second that were offered; ``target``: the share that the SLO asks for."""
    ordered = sorted(outcomes, key=lambda each: each.due_s)
    before = [each for each in ordered if each.over_s is not None and each.over_s <= struck_s]
    before += [each for each in ordered if each.over_s is None and _failed_before(each, before, struck_s)]
    known = set(map(id, before))
    touched = [each for each in ordered if id(each) not in known]
    held = sum(each.good for each in before) / len(before) if before else None
    window = max(LEAST_WINDOW, min(MOST_WINDOW, round(rate * WINDOW_S)))
    level = level_of(target, held, window)
    after = [each for each in touched if each.due_s >= struck_s]
    back = _back_at(after, window, level)
    until_s = math.inf if back is None else after[back].due_s if back else struck_s
    # The first window that keeps the level may begin with some of the last that were not good.
    last = len(after) if back is None else back + window
    meant = [*(each for each in touched if each.due_s < struck_s), *after[:last]]
    share = 1.0 if held is None else held
    lost = sum(share - each.good for each in meant)
    counts = Counter(each.fate for each in touched)
    return FaultCost(
        rate=rate,
        target=target,
        window=window,
        level=level,
        before=len(before),
        held_before=held,
        fates={fate: counts[fate] for fate in FATES},
        back_s=None if back is None else max(0.0, until_s - struck_s),
        goodput_lost=max(0.0, lost),
        watched_s=max(0.0, ordered[-1].due_s - struck_s) if ordered else 0.0,
    )


def cost_of(
    records: Iterable[RequestRecord],
    slo: Slo,
    rate: float,
    struck_s: float,
    wrong: Collection[str] = (),
) -> FaultCost:
    """What a fault at ``struck_s`` cost, by a trial's requests. ``wrong``: ids of those answered wrong."""
    return fault_cost(outcomes_of(records, slo, wrong), rate, min(slo.shares), struck_s)


def outcomes_of(
    records: Iterable[RequestRecord], slo: Slo, wrong: Collection[str] = ()
) -> list[RequestOutcome]:
    """What became of each request; of those that kvbench itself cut off nobody knows."""
    known = [each for each in records if each.error != "cancelled"]
    return [outcome_of(record, slo, frozenset(wrong)) for record in known]


def _failed_before(one: RequestOutcome, before: Sequence[RequestOutcome], struck_s: float) -> bool:
    """Of a request that failed nobody knows when; one that was due before others that were over was, too."""
    return bool(before) and one.due_s < struck_s and one.due_s < before[-1].due_s - _longest(before)


def _longest(outcomes: Sequence[RequestOutcome]) -> float:
    return max((each.over_s or each.due_s) - each.due_s for each in outcomes)


def level_of(target: float, held: float | None, window: int) -> float:
    """The share of good ones that a window of requests has to keep."""
    if held is None:
        return target
    error = math.sqrt(held * (1 - held) / window)
    return max(0.0, min(target, held - STANDARD_ERRORS * error))


def _back_at(after: Sequence[RequestOutcome], window: int, level: float) -> int | None:
    """The place of the first request from which on each window keeps the level; None: never, or too few were
    due to tell.
    """
    if len(after) < window:
        return None
    good = sum(each.good for each in after[-window:])
    place = len(after) - window
    if good < level * window - 1e-9:
        return None
    while place > 0:
        good += after[place - 1].good - after[place - 1 + window].good
        if good < level * window - 1e-9:
            return place
        place -= 1
    return 0


@dataclass(frozen=True)
class GoodputBin:
    """Requests that were due in [start_s, start_s + width), by what became of them."""

    start_s: float
    fates: Mapping[str, int]


def goodput_bins(outcomes: Iterable[RequestOutcome], width_s: float, end_s: float) -> list[GoodputBin]:
    """Over [0, end_s), for a picture. ``width_s`` above 0."""
    count = max(1, math.ceil(end_s / width_s - 1e-9))
    bins: list[Counter[str]] = [Counter() for _ in range(count)]
    for each in outcomes:
        if 0 <= each.due_s < end_s:
            bins[min(count - 1, int(each.due_s / width_s))][each.fate] += 1
    return [
        GoodputBin(place * width_s, {fate: found[fate] for fate in FATES}) for place, found in enumerate(bins)
    ]


@dataclass(frozen=True)
class FaultRow:
    """One fault of one deployment over its repeats. Times in seconds, goodput in requests.

    Medians and worst are over the repeats in which the rate was held before the fault; a recovery that never
    came is no time, and counted in ``never``.
    """

    repeats: int
    held: int
    never: int
    back_s: float | None
    back_worst_s: float | None
    goodput_lost: float | None
    goodput_lost_worst: float | None
    lost_s: float | None
    fates: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fates": dict(self.fates)}


def fault_row(costs: Sequence[FaultCost]) -> FaultRow:
    """The repeats of one fault together."""
    held = [each for each in costs if each.was_held]
    backs = [each.back_s for each in held if each.back_s is not None]
    lost = [each.goodput_lost for each in held]
    fates: Counter[str] = Counter()
    for each in costs:
        fates.update(each.fates)
    return FaultRow(
        repeats=len(costs),
        held=len(held),
        never=len(held) - len(backs),
        back_s=median(backs) if backs else None,
        back_worst_s=max(backs, default=None),
        goodput_lost=median(lost) if lost else None,
        goodput_lost_worst=max(lost, default=None),
        lost_s=median(each.lost_s for each in held) if held else None,
        fates={fate: fates[fate] for fate in FATES},
    )


ChangeWord = Literal["costs more", "costs less", "not told apart"]
ALPHA: Final = 0.05
EXACT_MOST: Final = 400
"""Up to so many pairs of repeats the chance is counted out; beyond it is the normal one."""


@dataclass(frozen=True)
class FaultChange:
    """``chance``: that repeats of one and the same cost come out as far apart."""

    word: ChangeWord
    before: float | None
    after: float | None
    chance: float


def fault_change(before: Sequence[float], after: Sequence[float]) -> FaultChange:
    """Of the goodput that each repeat lost. With fewer than four repeats a side nothing can be told."""
    middle = [median(side) if side else None for side in (before, after)]
    chance = rank_chance(before, after)
    word: ChangeWord = "not told apart"
    if chance < ALPHA and middle[0] is not None and middle[1] is not None:
        word = "costs more" if _wins(after, before) > len(before) * len(after) / 2 else "costs less"
    return FaultChange(word, middle[0], middle[1], chance)


def rank_chance(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided chance of the rank sum of two samples from one distribution (Mann and Whitney's U)."""
    n, m = len(first), len(second)
    if not n or not m:
        return 1.0
    wins = _wins(first, second)
    far = abs(wins - n * m / 2)
    values = [*first, *second]
    if n * m <= EXACT_MOST and len(set(values)) == len(values):
        ways = _ways(n, m)
        total = math.comb(n + m, n)
        return min(
            1.0, sum(count for u, count in enumerate(ways) if abs(u - n * m / 2) >= far - 1e-9) / total
        )
    ties = sum(values.count(value) ** 3 - values.count(value) for value in set(values))
    size = n + m
    variance = n * m / 12 * ((size + 1) - ties / (size * (size - 1)))
    if variance <= 0:
        return 1.0
    return 2 * (1 - NormalDist().cdf(max(0.0, far - 0.5) / math.sqrt(variance)))


def _wins(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs in which the first is larger; a tie is half of one."""
    return sum((a > b) + 0.5 * (a == b) for a in first for b in second)


@lru_cache(64)
def _ways(n: int, m: int) -> tuple[int, ...]:
    """In how many orders of n and m values the first wins so many pairs, from 0 to n × m."""
    if not n or not m:
        return (1,)
    ways = [0] * (n * m + 1)
    for u, count in enumerate(_ways(n - 1, m)):  # the largest is one of the first: it wins all m
        ways[u + m] += count
    for u, count in enumerate(_ways(n, m - 1)):  # the largest is one of the second: it loses to none
        ways[u] += count
    return tuple(ways)
