"""A drawn system: its server, workload and SLO; and the virtual clock.

Times are seconds, lengths tokens, loads shares of one. Everything a system does follows from the fields,
which are plain data, as JSON.

A server that slows down as a whole does the same things in the same order, only later. So queues are
simulated in *work time*, in which the speed is always 1. The clock converts seconds to work time and back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Discipline = Literal["fifo", "sharing", "batching"]
Form = Literal["deterministic", "exponential", "lognormal", "bimodal"]

SLOW_SHARE: Final = 0.01
"""Share of slow requests in a bimodal service; each takes ``spread`` times as long as a fast one."""
NORMAL: Final = NormalDist()


@dataclass(frozen=True)
class Service:
    """Work of a request relative to the mean, which is 1. ``spread``: σ of a lognormal, or the slow factor.

    ``mixture``: (share, work factor) of request classes with equal lengths but different work, such as
    prompts with and without cache hits; the mean factor is 1.
    """

    form: Form = "deterministic"
    spread: float = 0.0
    mixture: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    @property
    def fast(self) -> float:
        """Work of a fast request in a bimodal service."""
        return 1.0 / (1.0 + SLOW_SHARE * (self.spread - 1.0))

    def draw(self, count: int, rng: np.random.Generator) -> FloatArray:
        """Draw the work of ``count`` requests. All forms start with the same draws from the generator."""
        uniform, class_draw = rng.random(count), rng.random(count)
        if self.form == "exponential":
            work = -np.log1p(-uniform)
        elif self.form == "lognormal":
            work = np.exp(self.spread * rng.standard_normal(count) - self.spread**2 / 2)
        elif self.form == "bimodal":
            work = np.where(uniform < SLOW_SHARE, self.fast * self.spread, self.fast)
        else:
            work = np.ones(count)
        shares = np.cumsum([share for share, _ in self.mixture])
        factors = np.array([factor for _, factor in self.mixture])
        index = np.minimum(np.searchsorted(shares, class_draw, side="right"), len(factors) - 1)
        return np.asarray(work * factors[index], np.float64)

    def cdf(self, work: float) -> float:
        return sum(share * self._cdf(work / factor) for share, factor in self.mixture)

    def _cdf(self, work: float) -> float:
        if work <= 0:
            return 0.0
        edge = work * (1 + 1e-12)  # a point mass counts at its position
        if self.form == "exponential":
            return -math.expm1(-work)
        if self.form == "lognormal":
            return NORMAL.cdf((math.log(work) + self.spread**2 / 2) / self.spread)
        if self.form == "bimodal":
            return (edge >= self.fast) * (1 - SLOW_SHARE) + (edge >= self.fast * self.spread) * SLOW_SHARE
        return float(edge >= 1.0)

    def mean_within(self, work: float) -> float:
        """E[min(work of a request, work)]: the integral of 1 − cdf from 0 to ``work``."""
        return sum(share * factor * self._mean_within(work / factor) for share, factor in self.mixture)

    def _mean_within(self, work: float) -> float:
        if work <= 0:
            return 0.0
        if self.form == "exponential":
            return -math.expm1(-work)
        if self.form == "lognormal":
            below = NORMAL.cdf((math.log(work) - self.spread**2 / 2) / self.spread)
            return below + work * (1 - self._cdf(work))
        if self.form == "bimodal":
            slow = min(work, self.fast * self.spread)
            return (1 - SLOW_SHARE) * min(work, self.fast) + SLOW_SHARE * slow
        return min(work, 1.0)

    def quantile(self, share: float) -> float:
        """Return the smallest work that at least ``share`` of the requests do not exceed."""
        low, high = 0.0, 1.0
        while self.cdf(high) < share:
            high *= 2
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if self.cdf(middle) >= share else (middle, high)
        return high

    @property
    def second_moment(self) -> float:
        """E[work²]; 1 for a deterministic service."""
        unmixed = {
            "deterministic": 1.0,
            "exponential": 2.0,
            "lognormal": math.exp(self.spread**2),
            "bimodal": self.fast**2 * (1 + SLOW_SHARE * (self.spread**2 - 1)),
        }[self.form]
        return unmixed * sum(share * factor**2 for share, factor in self.mixture)


@dataclass(frozen=True)
class Batch:
    """An engine with continuous batching and chunked prefill. A step takes ``step_s``, plus ``sequence_s``
    per decoding sequence, plus ``token_s`` per prompt token.

    ``slots``: most sequences; ``token_budget``: most tokens in a step; ``kv_tokens``: KV capacity in tokens.
    When the KV does not fit, the engine preempts the sequence admitted last and recomputes it later.
    """

    slots: int
    token_budget: int
    kv_tokens: int
    step_s: float
    sequence_s: float
    token_s: float

    def idle_ttft_s(self, tokens: float) -> float:
        return math.ceil(max(tokens, 1) / self.token_budget) * self.step_s + self.token_s * tokens

    def loaded(self, input_len: int, output_len: int) -> tuple[float, float]:
        """Return about (highest throughput in requests per second, step time there in seconds)."""
        fits = self.kv_tokens / (input_len + output_len / 2)
        step_tokens = 1 + input_len / output_len  # of one sequence, on average
        many = max(1.0, min(self.slots, fits, self.token_budget / step_tokens))
        step = self.step_s + self.sequence_s * many + self.token_s * input_len * many / output_len
        return many / (output_len * step), step


@dataclass(frozen=True)
class Disturbances:
    """Changes of a server's speed over time; all off by default.

    The server pauses for the last ``pause_s`` of each ``pause_every_s``. It is ``warmup_factor`` times slower
    for the first ``warmup_s`` of the virtual clock. ``drift``: relative slowdown per full minute, up to
    ``drift_most`` times. ``tenants``: Poisson load of other clients, as a share of the capacity. ``noise``:
    σ of the logarithm of a slowdown drawn for each trial.
    """

    pause_s: float = 0.0
    pause_every_s: float = 30.0
    warmup_s: float = 60.0
    warmup_factor: float = 1.0
    drift: float = 0.0
    drift_most: float = 1.5
    tenants: float = 0.0
    noise: float = 0.0

    def drift_factor(self, at_s: float) -> float:
        """Return the slowdown at a time, relative to the start."""
        return min(1.0 + self.drift * max(0, math.floor(at_s / 60.0)), self.drift_most)


@dataclass(frozen=True)
class Workload:
    input_len: int
    output_len: int
    burstiness: float


@dataclass(frozen=True)
class Slo:
    """SLO as in a scenario: limits that a share of the requests meets, or ``limits`` in the short form."""

    ttft_ms: float | None
    tpot_ms: float | None
    attainment: float
    limits: tuple[str, ...] = ()

    def text(self) -> str:
        parts = [
            f"{name} ≤ {limit:.4g} ms"
            for name, limit in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
            if limit is not None
        ]
        joint = [f"{self.attainment:.1%}: {', '.join(parts)}"] if parts else []
        return "; ".join([*joint, *self.limits])


@dataclass(frozen=True)
class System:
    """One drawn system. Without ``batch``, ``servers`` parallel servers prefill the requests, ``prefill_s``
    each on average; then these decode, ``token_s`` a token, plus ``slope_s`` for each further decoding
    request. ``aborts``: whether the server drops cancelled requests.
    """

    name: str
    kinds: tuple[str, ...]
    discipline: Discipline
    servers: int
    prefill_s: float
    service: Service
    token_s: float
    slope_s: float
    batch: Batch | None
    disturbances: Disturbances
    aborts: bool
    workload: Workload
    slo: Slo

    @property
    def capacity(self) -> float:
        """Requests per second at most, by prefill (about, with batching); not what meets the SLO."""
        if self.batch is not None:
            return self.batch.loaded(self.workload.input_len, self.workload.output_len)[0]
        return self.servers / self.prefill_s

    def idle_ttft_s(self, work: float = 1.0) -> float:
        if self.batch is not None:
            return self.batch.idle_ttft_s(max(1.0, work * self.workload.input_len))
        return work * self.prefill_s

    @property
    def idle_tpot_s(self) -> float:
        return self.token_s if self.batch is None else self.batch.step_s + self.batch.sequence_s

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that affects the true rate."""
        data = {key: value for key, value in self.to_json().items() if key not in ("name", "kinds", "aborts")}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


class Clock:
    """Seconds of the virtual clock ↔ seconds of undisturbed work.

    ``noise``: (start of a trial, slowdown until the next), ascending; 1 before the first.
    """

    def __init__(self, disturbances: Disturbances, noise: Sequence[tuple[float, float]] = ()) -> None:
        self._pause_s, self._every_s = disturbances.pause_s, disturbances.pause_every_s
        knots = {0.0} | {start for start, _ in noise if start > 0}
        if disturbances.warmup_factor != 1.0:
            knots.add(disturbances.warmup_s)
        if disturbances.drift:
            minutes = round((disturbances.drift_most - 1) / disturbances.drift)
            knots |= {60.0 * minute for minute in range(1, minutes + 2)}
        ordered = np.array(sorted(knots))
        slowness = np.array(
            [
                (disturbances.warmup_factor if at < disturbances.warmup_s else 1.0)
                * disturbances.drift_factor(at)
                * next((factor for start, factor in reversed(noise) if start <= at), 1.0)
                for at in ordered.tolist()
            ]
        )
        self._active = self._unpaused(ordered)
        self._speed = 1.0 / slowness
        self._done = np.concatenate(([0.0], np.cumsum(np.diff(self._active) * self._speed[:-1])))

    def work(self, at_s: FloatArray) -> FloatArray:
        """Return the work done until ``at_s``. Warm-up and drift do not affect times before 0."""
        active = self._unpaused(np.asarray(at_s, np.float64))
        knot = np.maximum(np.searchsorted(self._active, active, side="right") - 1, 0)
        return np.asarray(self._done[knot] + (active - self._active[knot]) * self._speed[knot])

    def seconds(self, work: FloatArray) -> FloatArray:
        """Return when that work is done: the inverse of ``work``. NaN and inf stay unchanged."""
        knot = np.maximum(np.searchsorted(self._done, work, side="right") - 1, 0)
        knot = np.minimum(knot, len(self._done) - 1)
        active = self._active[knot] + (work - self._done[knot]) / self._speed[knot]
        if not self._pause_s:
            return np.asarray(active)
        uptime_s = self._every_s - self._pause_s
        with np.errstate(invalid="ignore"):
            periods = np.ceil(active / uptime_s) - 1  # work that ends with its period ends before the pause
            seconds = active + periods * self._pause_s
        return np.asarray(np.where(np.isinf(active), active, seconds))

    def _unpaused(self, at_s: FloatArray) -> FloatArray:
        if not self._pause_s:
            return at_s
        uptime_s = self._every_s - self._pause_s
        periods = np.floor(at_s / self._every_s)
        return np.asarray(periods * uptime_s + np.minimum(at_s - periods * self._every_s, uptime_s))
