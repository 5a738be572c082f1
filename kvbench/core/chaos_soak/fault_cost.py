"""Cost of a fault, from the requests offered at a fixed rate around it. Pure.

A request is *good* if it met the SLO (without limits per request: if fully answered), *late* if fully
answered too late, *hung* if still open at its deadline, *lost* if it failed otherwise, and *wrong* if its
answer is known to be wrong. Lost goodput is the expected number of good requests (by the share before the
fault) minus the actual one; divided by the rate it is in seconds.

Attainment has *recovered* at the first request from which every window of requests keeps the level: the SLO's
share, or the share before the fault minus two standard errors of a window if that is less. ``fault_change``
compares two runs by the ranks of their repeats."""

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
"""Status of a router that gives up a request."""
WINDOW_S: Final = 2.0
"""Seconds of requests in one window of the attainment."""
LEAST_WINDOW, MOST_WINDOW = 5, 50
"""Fewest and most requests in a window."""
STANDARD_ERRORS: Final = 2.0


@dataclass(frozen=True)
class RequestOutcome:
    """One request: when it was due, when it ended (or None), its fate."""

    due_s: float
    over_s: float | None
    fate: Fate

    @property
    def good(self) -> bool:
        return self.fate == "good"


def outcome_of(record: RequestRecord, slo: Slo, wrong: Collection[str] = ()) -> RequestOutcome:
    """Return a request's outcome. ``wrong``: ids of requests with known wrong answers."""
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
    """Cost over the requests open at the fault or due later; times in seconds after it. ``held_before``:
    share of good ones among the ``before`` that ended before it, or None. ``back_s``: recovery, None if not
    observed. ``goodput_lost``: requests; ``lost_s``: seconds of the rate."""

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
        """Return whether the rate was sustained before the fault; otherwise its cost is unknown."""
        if self.held_before is None:
            return False
        error = math.sqrt(self.target * (1 - self.target) / self.before)
        return self.held_before >= self.target - STANDARD_ERRORS * error - 1e-9

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fates": dict(self.fates), "lost_s": self.lost_s, "was_held": self.was_held}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> FaultCost:
        """Parse a row. Raises KeyError or TypeError if it is malformed."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def fault_cost(outcomes: Iterable[RequestOutcome], rate: float, target: float, struck_s: float) -> FaultCost:
    """Return the cost. ``rate``: offered requests per second; ``target``: the SLO's share."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.due_s)
    before = [outcome for outcome in ordered if outcome.over_s is not None and outcome.over_s <= struck_s]
    before += [case for case in ordered if case.over_s is None and _failed_before(case, before, struck_s)]
    known = set(map(id, before))
    touched = [outcome for outcome in ordered if id(outcome) not in known]
    held = sum(outcome.good for outcome in before) / len(before) if before else None
    window = max(LEAST_WINDOW, min(MOST_WINDOW, round(rate * WINDOW_S)))
    level = level_of(target, held, window)
    after = [outcome for outcome in touched if outcome.due_s >= struck_s]
    back = _back_at(after, window, level)
    until_s = math.inf if back is None else after[back].due_s if back else struck_s
    # The first window that keeps the level may begin with requests that were not good.
    last = len(after) if back is None else back + window
    meant = [*(outcome for outcome in touched if outcome.due_s < struck_s), *after[:last]]
    share = 1.0 if held is None else held
    lost = sum(share - outcome.good for outcome in meant)
    counts = Counter(outcome.fate for outcome in touched)
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
    records: Iterable[RequestRecord], slo: Slo, rate: float, struck_s: float, wrong: Collection[str] = ()
) -> FaultCost:
    """Return the cost of a fault at ``struck_s``. ``wrong``: ids with wrong answers."""
    return fault_cost(outcomes_of(records, slo, wrong), rate, min(slo.shares), struck_s)


def outcomes_of(
    records: Iterable[RequestRecord], slo: Slo, wrong: Collection[str] = ()
) -> list[RequestOutcome]:
    """Return each request's fate, except those that kvbench cancelled."""
    known = [record for record in records if record.error != "cancelled"]
    return [outcome_of(record, slo, frozenset(wrong)) for record in known]


def _failed_before(one: RequestOutcome, before: Sequence[RequestOutcome], struck_s: float) -> bool:
    """Return whether a failed request failed before the fault: requests due later had already ended."""
    return bool(before) and one.due_s < struck_s and one.due_s < before[-1].due_s - _longest(before)


def _longest(outcomes: Sequence[RequestOutcome]) -> float:
    return max((outcome.over_s or outcome.due_s) - outcome.due_s for outcome in outcomes)


def level_of(target: float, held: float | None, window: int) -> float:
    """Return the share of good requests that a window must keep."""
    if held is None:
        return target
    error = math.sqrt(held * (1 - held) / window)
    return max(0.0, min(target, held - STANDARD_ERRORS * error))


def _back_at(after: Sequence[RequestOutcome], window: int, level: float) -> int | None:
    """Return the index of recovery, or None if not observed."""
    if len(after) < window:
        return None
    good = sum(outcome.good for outcome in after[-window:])
    index = len(after) - window
    if good < level * window - 1e-9:
        return None
    while index > 0:
        good += after[index - 1].good - after[index - 1 + window].good
        if good < level * window - 1e-9:
            return index
        index -= 1
    return 0


@dataclass(frozen=True)
class GoodputBin:
    """Requests due in [start_s, start_s + width), by fate."""

    start_s: float
    fates: Mapping[str, int]


def goodput_bins(outcomes: Iterable[RequestOutcome], width_s: float, end_s: float) -> list[GoodputBin]:
    count = max(1, math.ceil(end_s / width_s - 1e-9))
    bins: list[Counter[str]] = [Counter() for _ in range(count)]
    for outcome in outcomes:
        if 0 <= outcome.due_s < end_s:
            bins[min(count - 1, int(outcome.due_s / width_s))][outcome.fate] += 1
    return [
        GoodputBin(index * width_s, {fate: found[fate] for fate in FATES}) for index, found in enumerate(bins)
    ]


@dataclass(frozen=True)
class FaultRow:
    """One fault of one deployment over its repeats. Times in seconds, goodput in requests. Medians and worst
    values cover repeats with a sustained rate before the fault; ``never`` counts those without recovery."""

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
    held = [cost for cost in costs if cost.was_held]
    backs = [cost.back_s for cost in held if cost.back_s is not None]
    lost = [cost.goodput_lost for cost in held]
    fates: Counter[str] = Counter()
    for cost in costs:
        fates.update(cost.fates)
    return FaultRow(
        repeats=len(costs),
        held=len(held),
        never=len(held) - len(backs),
        back_s=median(backs) if backs else None,
        back_worst_s=max(backs, default=None),
        goodput_lost=median(lost) if lost else None,
        goodput_lost_worst=max(lost, default=None),
        lost_s=median(cost.lost_s for cost in held) if held else None,
        fates={fate: fates[fate] for fate in FATES},
    )


ChangeWord = Literal["costs more", "costs less", "no significant difference"]
ALPHA: Final = 0.05
EXACT_MOST: Final = 400
"""Pairs of repeats up to which the p-value is exact; beyond, it is normal."""


@dataclass(frozen=True)
class FaultChange:
    """``chance``: p-value of equal costs."""

    word: ChangeWord
    before: float | None
    after: float | None
    chance: float


def fault_change(before: Sequence[float], after: Sequence[float]) -> FaultChange:
    """Compare the goodput lost per repeat; fewer than four repeats per side are inconclusive."""
    middle = [median(side) if side else None for side in (before, after)]
    chance = rank_chance(before, after)
    word: ChangeWord = "no significant difference"
    if chance < ALPHA and middle[0] is not None and middle[1] is not None:
        word = "costs more" if _wins(after, before) > len(before) * len(after) / 2 else "costs less"
    return FaultChange(word, middle[0], middle[1], chance)


def rank_chance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value of the Mann-Whitney U test."""
    n, m = len(first), len(second)
    if not n or not m:
        return 1.0
    wins = _wins(first, second)
    distance = abs(wins - n * m / 2)
    values = [*first, *second]
    if n * m <= EXACT_MOST and len(set(values)) == len(values):
        ways = _ways(n, m)
        total = math.comb(n + m, n)
        return min(
            1.0, sum(count for u, count in enumerate(ways) if abs(u - n * m / 2) >= distance - 1e-9) / total
        )
    ties = sum(values.count(value) ** 3 - values.count(value) for value in set(values))
    size = n + m
    variance = n * m / 12 * ((size + 1) - ties / (size * (size - 1)))
    if variance <= 0:
        return 1.0
    return 2 * (1 - NormalDist().cdf(max(0.0, distance - 0.5) / math.sqrt(variance)))


def _wins(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the pairs in which the first is larger; a tie counts half."""
    return sum((a > b) + 0.5 * (a == b) for a in first for b in second)


@lru_cache(64)
def _ways(n: int, m: int) -> tuple[int, ...]:
    """Return, for each number of wins from 0 to n × m, the number of orders."""
    if not n or not m:
        return (1,)
    ways = [0] * (n * m + 1)
    for u, count in enumerate(_ways(n - 1, m)):  # the largest is one of the first: it wins all m
        ways[u + m] += count
    for u, count in enumerate(_ways(n, m - 1)):  # the largest is one of the second: it loses to none
        ways[u] += count
    return tuple(ways)
