"""A P/D pipeline on virtual time, fast enough for thousands of searches.

A request passes three stations: prefill (FIFO servers, round robin), the transfer (a FIFO link), and decode
(slots; all requests in the batch advance at one speed, which depends on their number). The first token comes
one decode step after a request gets a slot, as in a P/D pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from tools.random_systems.queues import fifo

FloatArray = npt.NDArray[np.float64]
MANY: int = 1 << 20
NEVER_S = 1e9
"""End of a request that is never served."""


@dataclass(frozen=True)
class Step:
    """Time of a decode step, in seconds: affine in the batch size, and ``factor`` times as long for sizes in
    ``band`` (a badly tuned kernel shape)."""

    base_s: float
    each_s: float = 0.0
    band: tuple[int, int] = (MANY, MANY)
    factor: float = 1.0

    @property
    def constant(self) -> bool:
        return not self.each_s and self.factor == 1.0

    def __call__(self, size: int) -> float:
        step = self.base_s + self.each_s * size
        return step * self.factor if self.band[0] <= size <= self.band[1] else step


@dataclass(frozen=True)
class System:
    """One virtual system and its SLO. Times in seconds, rates in requests per second.

    ``drift``: (relative amplitude, period in seconds) of a sine on the prefill time. ``variation``:
    coefficient of variation of a log-normal prefill time. ``failing``: share of requests that fail at any
    rate. ``truth``: source of the true rate: "md1" by formula, "runs" by long runs as the highest
    root (a lower rate may miss where there is a dip), "above" or "below" if it is outside the search's
    limits. ``hard``: too few requests in 60 latencies to measure the rate to 5 %; marked, but counted like
    the others.
    """

    name: str
    about: str
    prefill_s: float
    tokens: int
    step: Step
    ttft_s: float
    tpot_s: float = math.inf
    attainment: float = 0.95
    prefill_servers: int = 1
    transfer_s: float = 0.0
    slots: int = MANY
    burstiness: float = 1.0
    variation: float = 0.0
    failing: float = 0.0
    drift: tuple[float, float] = (0.0, 1.0)
    truth: Literal["md1", "runs", "above", "below"] = "runs"
    hard: bool = False
    min_rate: float = 0.05
    max_rate: float = 200.0

    @property
    def idle_s(self) -> float:
        """End-to-end latency of one request alone."""
        return self.prefill_s + self.transfer_s + self.tokens * self.step(1)


@dataclass(frozen=True)
class Outcomes:
    """Result of each request, in order of arrival; times in seconds since the trial's start."""

    arrived_s: FloatArray
    first_s: FloatArray
    end_s: FloatArray
    failed: npt.NDArray[np.bool_]
    tokens: int

    @property
    def ttft_s(self) -> FloatArray:
        return self.first_s - self.arrived_s

    @property
    def e2el_s(self) -> FloatArray:
        return self.end_s - self.arrived_s

    @property
    def tpot_s(self) -> FloatArray:
        return (self.end_s - self.first_s) / max(self.tokens - 1, 1)

    def load(self, system: System) -> FloatArray:
        """Return each request's worst value / limit; up to 1 meets the SLO, inf is a failure."""
        worst = np.maximum(self.ttft_s / system.ttft_s, self.tpot_s / system.tpot_s)
        return np.where(self.failed, np.inf, worst)


@dataclass(frozen=True)
class Found:
    rate: float | None
    status: str
    trials: int
    measured_s: float
    bounds: tuple[float | None, float | None] | None = None


def arrivals(shape: float, rate: float, seconds: float, rng: np.random.Generator) -> FloatArray:
    """Draw open-loop arrivals for ``seconds``, with gamma gaps as in kvbench's generator."""
    n = max(8, math.ceil(rate * seconds * 1.1 + 6 * math.sqrt(rate * seconds / shape) + 10))
    at: FloatArray = np.cumsum(rng.gamma(shape, 1 / (rate * shape), n))
    return at[: max(2, int(np.searchsorted(at, seconds)))]


def offsets(system: System, rate: float, seconds: float, rng: np.random.Generator) -> FloatArray:
    return arrivals(system.burstiness, rate, seconds, rng)


def run_open(system: System, at: FloatArray, rng: np.random.Generator, clock_s: float = 0.0) -> Outcomes:
    """Serve requests that arrive at ``at``; ``clock_s``: time since the search began (for the drift)."""
    ready = _transferred(_prefill(system, at, rng, clock_s), system.transfer_s)
    if system.step.constant and system.slots >= MANY:
        step = system.step(1)
        first, end = ready + step, ready + system.tokens * step
    else:
        first, end = _decode(system, ready)
    failed = rng.random(len(at)) < system.failing if system.failing else np.zeros(len(at), bool)
    return Outcomes(at, first, end, failed, system.tokens)


def _prefill(system: System, at: FloatArray, rng: np.random.Generator, clock_s: float) -> FloatArray:
    work = np.full(len(at), system.prefill_s)
    if system.variation:
        sigma = math.sqrt(math.log1p(system.variation**2))
        work *= rng.lognormal(-(sigma**2) / 2, sigma, len(at))
    amplitude, period = system.drift
    if amplitude:
        work *= 1 + amplitude * np.sin(2 * np.pi * (at + clock_s) / period)
    done = np.empty_like(at)
    for server in range(system.prefill_servers):
        assigned = slice(server, None, system.prefill_servers)
        done[assigned] = fifo(1, at[assigned], work[assigned])
    return done


def _transferred(at: FloatArray, seconds: float) -> FloatArray:
    """Return ends of service at a FIFO station, ``seconds`` each; arrivals may be out of order."""
    if not seconds:
        return at
    order = np.argsort(at, kind="stable")
    done = np.empty_like(at)
    done[order] = fifo(1, at[order], np.full(len(at), seconds))
    return done


def _decode(system: System, ready: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (first token, last token) of each request; requests get slots in the order of readiness."""
    order = np.argsort(ready, kind="stable")
    firsts, ends = np.empty(len(ready)), np.empty(len(ready))
    firsts[order], ends[order] = _batch(system, ready[order].tolist())
    return firsts, ends


def _batch(
    system: System, ready: list[float], ended: Callable[[float], None] = lambda at: None
) -> tuple[list[float], list[float]]:
    """Return (first token, last token) of requests, in the order in which they are ready for decode.

    ``ended`` is called with each end, in order, and may add to ``ready``.
    """
    steps, tokens, slots = cache(lambda size: system.step(max(1, size))), system.tokens, system.slots
    first, end, done_at = list[float](), list[float](), list[float]()
    now = clock = 0.0  # ``clock``: tokens of a request in the batch since the start
    head = tail = 0
    while head < len(ready):
        size = tail - head
        step = steps(size)
        finish = now + (done_at[head] - clock) * step if size else math.inf
        if tail < len(ready) and size < slots and ready[tail] <= finish:
            if ready[tail] > now:
                clock += (ready[tail] - now) / step if size else 0.0
                now = ready[tail]
            done_at.append(clock + tokens)
            first.append(now + steps(size + 1))
            tail += 1
            continue
        now, clock = finish, done_at[head]
        end.append(now)
        head += 1
        ended(now)
    return first, end


def run_closed(
    system: System, concurrency: int, seconds: float, rng: np.random.Generator, requests: int | None = None
) -> Outcomes:
    """Serve ``concurrency`` users; each sends its next request when the previous one has ended.

    Users send nothing after ``seconds``, nor beyond ``requests``. Their first requests are spread over the
    idle latency. All requests count.
    """
    sigma = math.sqrt(math.log1p(system.variation**2))
    arrived = (np.arange(concurrency) * system.idle_s / concurrency).tolist()
    ready: list[float] = []
    free, link = [0.0] * system.prefill_servers, 0.0

    def admit(index: int) -> None:
        nonlocal link
        server, at = index % system.prefill_servers, arrived[index]
        work = system.prefill_s * (rng.lognormal(-(sigma**2) / 2, sigma) if sigma else 1.0)
        work *= 1 + system.drift[0] * math.sin(2 * math.pi * at / system.drift[1])
        free[server] = max(free[server], at) + work
        link = max(link, free[server]) + system.transfer_s
        ready.append(max(link, ready[-1] if ready else 0.0))

    most = MANY if requests is None else requests
    del arrived[most:]
    for index in range(len(arrived)):
        admit(index)

    def ended(now: float) -> None:
        if now < seconds and len(arrived) < most:
            arrived.append(now)
            admit(len(arrived) - 1)

    first, end = _batch(system, ready, ended)
    failed = rng.random(len(end)) < system.failing
    return Outcomes(np.array(arrived[: len(end)]), np.array(first), np.array(end), failed, system.tokens)
