"""Send times: planned, or one think time after the answers that a request waits for.

A request without ``after`` is sent at its planned time (open loop). Otherwise it is sent ``think_time_s``
after the last awaited answer; if one of those failed, it and its successors are dropped."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import InputError

_STREAM: Final = 1
"""Random stream, separate from prompts."""


def planned_offsets(
    request_rate: float, num_requests: int, burstiness: float, seed: int
) -> NDArray[np.float64]:
    """Return the ascending seconds from trial start to each planned send, after a first gap. Gaps are gamma
    distributed with shape ``burstiness`` and mean 1 / request_rate: 1 is a Poisson process, infinite a
    constant gap. They are not stretched to num_requests / request_rate, which would remove the variance of a
    Poisson count. An infinite rate plans everything at 0."""
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
    """What each request waits for, by index; empty for planned ones. ``session``: session number; ``turn``:
    index in its conversation, sub-agents counted separately; ``last``: last request of its session."""

    after: Sequence[Sequence[int]]
    think_time_s: Sequence[float]
    session: Sequence[int]
    turn: Sequence[int]
    last: Sequence[bool]


class Sends:
    """Determines the next sends from sends and answers. Times in seconds of the trial."""

    def __init__(self, offsets_s: Sequence[float], following: Following | None = None) -> None:
        self._offsets_s = offsets_s
        self._following = following
        after = following.after if following is not None else [()] * len(offsets_s)
        self._planned = iter([index for index, parents in enumerate(after) if not parents])
        self._missing = [len(parents) for parents in after]
        self._next: dict[int, list[int]] = {}
        for index, parents in enumerate(after):
            for earlier in parents:
                self._next.setdefault(earlier, []).append(index)
        self._left = len(offsets_s)
        self._begun_s: dict[int, float] = {}
        self._answered_s: dict[int, float] = {}
        """Latest answer so far that a waiting request depends on: answers may be noticed out of order."""

    @property
    def left(self) -> bool:
        """Return whether any request is still to be sent, now or later."""
        return self._left > 0

    def planned(self) -> tuple[float, int] | None:
        """Return time and index of the next planned request; each is returned once."""
        index = next(self._planned, None)
        return None if index is None else (self._offsets_s[index], index)

    def sent(self, index: int, now_s: float) -> None:
        self._left -= 1
        if self._following is not None:
            self._begun_s.setdefault(self._following.session[index], now_s)

    def begun_s(self, index: int) -> float | None:
        """Return when the request's session began, or None without sessions."""
        return None if self._following is None else self._begun_s[self._following.session[index]]

    def answered(self, index: int, now_s: float) -> list[tuple[float, int]]:
        found = []
        for later in self._next.get(index, ()):
            self._missing[later] -= 1
            latest_s = max(now_s, self._answered_s.pop(later, now_s))
            if self._missing[later] > 0:
                self._answered_s[later] = latest_s
            elif not self._missing[later] and self._following is not None:
                found.append((latest_s + self._following.think_time_s[later], later))
        return found

    def failed(self, index: int) -> None:
        """Drop the requests that wait for a failed one."""
        for later in self._below(index):
            self._missing[later] = -1
            self._left -= 1

    def _below(self, index: int) -> Iterator[int]:
        """Yield all requests that depend on one, each once."""
        seen, todo = set[int](), [index]
        while todo:
            for later in self._next.get(todo.pop(), ()):
                if later not in seen and self._missing[later] > 0:
                    seen.add(later)
                    todo.append(later)
                    yield later


def trial_seed(seed: int, cell_key: str, number: int) -> int:
    """Return the seed of one trial in [0, 2**63): the same in every version and on every machine."""
    text = f"kvbench trial\n{seed}\n{cell_key}\n{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
