"""Which requests are sent when: at planned times, or think time after the answers that they wait for.

A request without ``after`` is sent at its planned time, whatever becomes of the others (open loop). One that
waits for others is sent ``think_time_s`` after the last of them has been answered; where one of them failed,
it is not sent at all, nor what waits for it: its session is given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import InputError

_STREAM: Final = 1
"""Sets the arrivals' random numbers apart from the prompts', so that neither moves the other."""


def planned_offsets(
    request_rate: float, num_requests: int, burstiness: float, seed: int
) -> NDArray[np.float64]:
    """Seconds from the trial's start to each planned send, ascending; the first comes after a first gap.

    Gaps are gamma distributed with shape ``burstiness`` and mean 1 / request_rate: 1 is a Poisson
    process, below 1 burstier, infinite a constant gap. They are not stretched so that the last one
    falls on num_requests / request_rate: that would take the variation of a Poisson count away. An
    infinite rate plans everything for the start. Raises InputError for impossible values.
    """
    if num_requests < 0:
        raise InputError(f"num_requests must not be negative, it is {num_requests}")
    if not request_rate > 0:
        raise InputError(f"request_rate must be above 0, it is {request_rate}")
    if not burstiness > 0:
        raise InputError(f"burstiness must be above 0, it is {burstiness}")
    if math.isinf(request_rate):
        return np.zeros(num_requests)
    if math.isinf(burstiness):
        return np.arange(1, num_requests + 1) / request_rate
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed])))
    gaps = random.gamma(burstiness, 1.0 / (request_rate * burstiness), num_requests)
    return np.cumsum(gaps)


@dataclass(frozen=True)
class Following:
    """What each request of a load waits for, by places in the load; empty of those with a planned time.

    ``session``: of each request the number of its session; ``turn``: which one of its conversation, from 0;
    a sub-agent's are counted by themselves. ``last``: whether it is the last one of its session's own.
    """

    after: Sequence[Sequence[int]]
    think_time_s: Sequence[float]
    session: Sequence[int]
    turn: Sequence[int]
    last: Sequence[bool]


class Sends:
    """Tells what is to be sent next, as requests are sent and answered. Times are seconds of the trial."""

    def __init__(self, offsets_s: Sequence[float], following: Following | None = None) -> None:
        self._offsets_s = offsets_s
        self._following = following
        after = following.after if following is not None else [()] * len(offsets_s)
        self._planned = iter([place for place, each in enumerate(after) if not each])
        self._missing = [len(each) for each in after]
        self._next: dict[int, list[int]] = {}
        for place, each in enumerate(after):
            for earlier in each:
                self._next.setdefault(earlier, []).append(place)
        self._left = len(offsets_s)
        self._begun_s: dict[int, float] = {}
        self._answered_s: dict[int, float] = {}
        """Of requests that wait the latest answer so far: answers may be noticed in another order."""

    @property
    def left(self) -> bool:
        """Whether any request is still to be sent, now or once something is answered."""
        return self._left > 0

    def planned(self) -> tuple[float, int] | None:
        """Time and place of the next request that has a planned time; each is told once."""
        place = next(self._planned, None)
        return None if place is None else (self._offsets_s[place], place)

    def sent(self, place: int, now_s: float) -> None:
        self._left -= 1
        if self._following is not None:
            self._begun_s.setdefault(self._following.session[place], now_s)

    def begun_s(self, place: int) -> float | None:
        """When the session of a request began; None where there are no sessions."""
        return None if self._following is None else self._begun_s[self._following.session[place]]

    def answered(self, place: int, now_s: float) -> list[tuple[float, int]]:
        """Times and places of the requests that waited for nothing else any more."""
        found = []
        for later in self._next.get(place, ()):
            self._missing[later] -= 1
            latest_s = max(now_s, self._answered_s.pop(later, now_s))
            if self._missing[later] > 0:
                self._answered_s[later] = latest_s
            elif not self._missing[later] and self._following is not None:
                found.append((latest_s + self._following.think_time_s[later], later))
        return found

    def failed(self, place: int) -> None:
        """It has no answer: what waits for it is given up."""
        for later in self._below(place):
            self._missing[later] = -1
            self._left -= 1

    def _below(self, place: int) -> Iterator[int]:
        """All that waits for a request, directly or not, and is not given up yet; each once."""
        seen, todo = set[int](), [place]
        while todo:
            for later in self._next.get(todo.pop(), ()):
                if later not in seen and self._missing[later] > 0:
                    seen.add(later)
                    todo.append(later)
                    yield later
