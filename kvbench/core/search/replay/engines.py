"""Models of engines that work in steps, fitted by simulating the arrivals of the trials.

A model has a structure (number of engines, prompts per step, whether prefill is separate) and a few times.
For each structure those times are fitted that reproduce the measured latencies of every request; the
structure with the smallest error is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvbench.core.search.replay import queues
from kvbench.core.search.replay.models import BLOCKS, FEWEST, LEAST, Decode, blocks
from kvbench.core.search.replay.queues import FloatArray
from kvbench.core.search.trial_requests import Latencies, TrialRequests

IntArray = npt.NDArray[np.int64]
GAP: Final = 20.0
"""Distance between trials, as a multiple of the last one's length, so that its backlog has been served."""
ENGINES: Final = (1, 2, 4)
PROMPTS: Final = (0.5, 1.0, 2.0, 4.0, 16.0)
"""Numbers of equal engines behind one router, and limits on prompts per step (below 1: chunked prefill), with
which the fits begin; ``_neighbours`` of the best ones follow."""
STEP, TRANSFER = 0.05, 0.02
"""Shares of the lowest TTFT that a step and a transfer of a pair take, to begin a fit with."""
SHARES: Final = (0.95, 0.8, 0.5, 0.2)
"""Shares of prompt time in the lowest TTFT without its steps, to begin a fit with; the rest is delay."""
SAMPLE, MOST = 800, 8000
"""Number of requests of all trials together: to fit the first structures to, and then the best ones."""
ROUGH, KEPT, FINE = 20, 8, 100
"""Most simulations of a first fit; number of structures to keep; most simulations of their fits."""
MOVES: Final = 4
"""Number of times that structures similar to the best one are fitted."""
VARIED: Final = 4
VARIATION: Final = 0.02
"""Number of fits that then begin with other times of the best structure, and the standard deviation of these
times' logarithms: the error has many local minima, since steps begin at other times."""
HOPELESS: Final = 2.0
"""Largest error on the sample, as a multiple of the allowed one: beyond it no structure is fitted to all
requests."""
LARGEST: Final = 1.0
"""Largest error that one request contributes (difference of logarithms)."""
DIFFERENCE: Final = 0.03
"""Difference of a time's logarithm that a slope is taken over: a simulation has small steps."""
SMALL: Final = 0.01
"""Residuals below it count as squares."""
STUCK: Final = 1e3
ENOUGH: Final = 1e-3
"""A fit ends when its damping exceeds the first, or a step lowers the error by less than this share."""
BIASED: Final = 0.1
"""Largest median error of TTFT in half a trial (difference of logarithms), or the mean error of all if
larger; beyond it the model is wrong."""
Times = tuple[float, ...]
"""Seconds: step, sequence, prompt, transfer, delay. Zero: not part of the structure."""


@dataclass(frozen=True)
class EngineModel:
    """Equal engines that take turns and work in steps, as continuous batching does.

    A step takes ``step + sequence × (sequences that decode) + prompt × (prompts computed)`` and computes at
    most ``prompts``; an engine holds at most ``slots`` sequences. If ``pair``, separate engines (P) compute
    the prompts and hand them over one after another, each in ``transfer``; ``decode`` is (seconds of a token
    alone, and more for each other sequence). Each request takes ``delay`` in addition. ``error``: mean
    difference of the logarithms of simulated and measured latencies. ``noise``: measured / simulated TTFT,
    and decode time, of many requests, sorted."""

    pair: bool
    engines: int
    prompts: float
    slots: float
    seconds: Times
    decode: tuple[float, float] = (LEAST, 0.0)
    error: float = math.inf
    noise: tuple[FloatArray, FloatArray] = (np.ones(1), np.ones(1))
    longest: int = 100_000

    def text(self) -> str:
        step, sequence, prompt, transfer, _ = (1e3 * time_s for time_s in self.seconds)
        count = f"{self.engines} {'P ' if self.pair else ''}engine{'s' if self.engines > 1 else ''}"
        rest = f", transfer {transfer:.3g} ms" if self.pair else f" + {sequence:.2g} ms per sequence"
        slots = f", {self.slots:g} sequences" if self.slots < math.inf else ""
        return (
            f"{count} in steps of {step:.3g} ms + {prompt:.3g} ms per prompt{rest}, at most "
            f"{self.prompts:.3g} prompts a step{slots}"
        )

    def capacity(self, tokens: FloatArray) -> float:
        """Return the completions per second of a load that arrives at once."""
        first_s, _ = self.played(np.zeros(len(tokens)), tokens, np.arange(len(tokens)))
        return float(len(first_s) / first_s.max())

    def times(self, arrived_s: FloatArray, tokens: FloatArray, chance: FloatArray) -> Latencies:
        """Return the latencies of simulated requests. ``chance``: uniform numbers, shape (2, requests)."""
        first_s, last_s = self.played(arrived_s, tokens, np.arange(len(tokens)))
        positions = [
            (part * len(noise)).astype(np.int64) for part, noise in zip(chance, self.noise, strict=True)
        ]
        begun_s = arrived_s + (first_s - arrived_s) * self.noise[0][positions[0]]
        return Latencies.of(
            arrived_s, begun_s, begun_s + (last_s - first_s) * self.noise[1][positions[1]], tokens
        )

    def resampled(self, trials: Sequence[TrialRequests], rng: np.random.Generator) -> EngineModel:
        """Fit the model again to parts of the trials drawn with replacement."""
        load = JoinedTrials.of(trials, MOST)
        return _fitted(self, load, FINE, blocks(trials, rng)[load.part])

    def played(
        self, arrived_s: FloatArray, tokens: FloatArray, turn: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return first and last token in seconds. ``turn``: number of each request; selects its engine."""
        step, sequence, prompt, transfer, delay = self.seconds
        lengths = np.zeros(len(tokens)) if self.pair else tokens
        first_s, last_s = queues.steps(
            *(arrived_s, lengths, max(step, LEAST), sequence, prompt, self.prompts, self.slots),
            None if self.engines == 1 else queues.doubles(turn % self.engines),
        )
        if self.pair:
            order = np.argsort(first_s, kind="stable") if self.engines > 1 else slice(None)
            first = queues.fifo(first_s[order], np.full(len(tokens), transfer), 1)
            first_s[order] = first
            last_s[order] = queues.shared(first, tokens[order], math.inf, *self.decode)
        return first_s + delay, last_s + delay


@dataclass(frozen=True)
class JoinedTrials:
    """The requests of all trials on one clock, each trial long after the last one, to simulate them at once.
    ``turn``: number within the trial; ``part``: block of its trial; ``begun``, ``ended``: indices of the
    requests with a TTFT, and with a decode time, in seconds."""

    arrived_s: FloatArray
    tokens: FloatArray
    turn: IntArray
    part: IntArray
    begun: IntArray
    ended: IntArray
    ttft_s: FloatArray
    rest_s: FloatArray

    @classmethod
    def of(cls, trials: Sequence[TrialRequests], most: int = 10**9) -> JoinedTrials:
        """Join the first requests of each trial: about ``most`` of all together, at least 60 of each."""
        most = max(most // len(trials), 60)
        columns: list[tuple[npt.NDArray[Any], ...]] = []
        now_s = 0.0
        for number, trial in enumerate(trials):
            turn = np.arange(min(len(trial), most))
            part = number * BLOCKS + turn * BLOCKS // max(len(turn), 1)
            kept = slice(0, len(turn))
            ttft_s = trial.first_s[kept] - trial.arrived_s[kept]
            rest_s = np.where(trial.tokens[kept] > 0, trial.last_s[kept] - trial.first_s[kept], math.nan)
            columns.append((trial.arrived_s[kept] + now_s, trial.tokens[kept], turn, part, ttft_s, rest_s))
            now_s += GAP * max(trial.end_s, 1.0)
        joined = [np.concatenate(arrays) for arrays in zip(*columns, strict=True)]
        arrived_s, tokens, turns, parts, ttft_s, rest_s = joined
        begun = np.flatnonzero(ttft_s > 0)
        ended = np.flatnonzero((ttft_s > 0) & (rest_s > 0))
        return cls(arrived_s, tokens, turns, parts, begun, ended, ttft_s[begun], rest_s[ended])

    def compared(self, model: EngineModel) -> tuple[FloatArray, FloatArray]:
        """Return simulated / measured TTFT of ``begun``, and decode time of ``ended``."""
        first_s, last_s = model.played(self.arrived_s, self.tokens, self.turn)
        ttft_s = first_s[self.begun] - self.arrived_s[self.begun]
        rest_s = last_s[self.ended] - first_s[self.ended]
        return np.maximum(ttft_s, LEAST) / self.ttft_s, np.maximum(rest_s, LEAST) / self.rest_s


@lru_cache(maxsize=4)
def engine_model(trials: tuple[TrialRequests, ...], most_error: float = LARGEST) -> EngineModel | None:
    """Return the best fitting model, or None with a larger error or if too few first tokens were seen. The
    last ones are cached: the tiers of an SLO need the same fit. In Python alone it takes 1 to 9 s."""
    decode = Decode.fitted(trials)
    load = JoinedTrials.of(trials, MOST)
    if len(load.begun) < FEWEST:
        return None
    sample = JoinedTrials.of(trials, SAMPLE)
    most = max(map(_most_decoding, trials))
    starts = (_fitted(model, sample, ROUGH) for model in _starts(float(load.ttft_s.min()), decode, most))
    best = min((_fitted(model, sample, FINE) for model in sorted(starts, key=_error)[:KEPT]), key=_error)
    if best.error > HOPELESS * most_error:
        return None
    best, rng = _fitted(best, load, FINE), np.random.default_rng(5)
    for _ in range(MOVES):
        before = best.error
        others = (*_neighbours(best, most), *(_varied(best, rng) for _ in range(VARIED)))
        best = min(best, *(_fitted(other, load, FINE) for other in others), key=_error)
        if best.error > (1 - ENOUGH) * before:
            break
    if best.error > most_error:
        return None
    simulated, decoded = load.compared(best)
    return replace(best, noise=(np.sort(1 / simulated), np.sort(1 / decoded) if len(decoded) else np.ones(1)))


def engine_objections(trials: Sequence[TrialRequests], model: EngineModel, highest: float) -> tuple[str, ...]:
    """List the halves of trials up to the rate ``highest`` whose TTFT differs from the simulated one by more
    than its scatter. Far above the capacity a queue grows by the difference between rate and capacity, so a
    small error of the capacity is a large one of TTFT."""
    load = JoinedTrials.of(trials)
    errors = np.log(load.compared(model)[0])
    halves = load.part[load.begun] // (BLOCKS // 2)
    objections = []
    for half in np.unique(halves):
        half_errors, rate = errors[halves == half], trials[half // 2].rate
        if rate > highest or len(half_errors) < FEWEST // 2:
            continue
        if abs(float(np.median(half_errors))) > max(BIASED, model.error):
            objections.append(
                f"TTFT at {rate:.3g} req/s is {-100 * np.median(half_errors):+.0f} % off the simulated one"
            )
    return tuple(objections)


def _starts(lowest_s: float, decode: Decode | None, most: int) -> Iterator[EngineModel]:
    """Yield models to begin the fits with, by the lowest TTFT, the decode steps, and the most sequences."""
    alone_s, each_s = (0.0, 0.0) if decode is None else (decode.alone_s, decode.each_s)
    each_s = max(each_s, 0.01 * alone_s)
    step_s, transfer_s = STEP * lowest_s, TRANSFER * lowest_s
    decode_s = max(alone_s - each_s, 0.1 * alone_s)
    for engines, prompts, share in product(ENGINES, PROMPTS, SHARES):
        rest_s = lowest_s - step_s - transfer_s
        times = (step_s, 0.0, share * rest_s, transfer_s, (1 - share) * rest_s)
        yield EngineModel(True, engines, prompts, math.inf, times, (max(alone_s, LEAST), each_s))
        if decode is not None:
            rest_s = max(lowest_s - decode_s * math.ceil(1 / prompts), 0.02 * alone_s)
            times = (decode_s, each_s, share * rest_s, 0.0, (1 - share) * rest_s)
            for slots in (math.inf, float(most)) if engines == 1 else (math.inf,):
                yield EngineModel(False, engines, prompts, slots, times)


def _fitted(
    model: EngineModel, load: JoinedTrials, most: int, weights: FloatArray | None = None
) -> EngineModel:
    """Return the structure with the times of the smallest error, after about ``most`` simulations.
    ``weights``: of each request."""
    free = [index for index, time_s in enumerate(model.seconds) if time_s > 0]

    def moved(logs: FloatArray) -> EngineModel:
        seconds = list(model.seconds)
        for index, value in zip(free, np.exp(logs).tolist(), strict=True):
            seconds[index] = value
        return replace(model, seconds=(*seconds,))

    def residuals(logs: FloatArray) -> FloatArray:
        return np.clip(np.log(np.concatenate(load.compared(moved(logs)))), -LARGEST, LARGEST)

    compared = np.concatenate([load.begun, load.ended])
    used = np.ones(len(compared)) if weights is None else weights[compared]
    logs, error = _smallest(residuals, np.log([model.seconds[index] for index in free]), used, most)
    return replace(moved(logs), error=error)


def _smallest(
    residuals: Callable[[FloatArray], FloatArray], logs: FloatArray, used: FloatArray, most: int
) -> tuple[FloatArray, float]:
    """Return (parameters, mean absolute residual) by Levenberg and Marquardt. Squares are divided by the
    residual's size, so that the sum of absolute values is minimised, which limits the effect of outliers.
    ``used``: weight of each residual."""
    now, total = residuals(logs), max(float(used.sum()), LEAST)
    least, count, damping = float((np.abs(now) * used).sum()) / total, 1, 0.01
    while count < most:
        slopes = np.empty((len(now), len(logs)))
        for column in range(len(logs)):
            nearby = logs.copy()
            nearby[column] += DIFFERENCE
            slopes[:, column] = (residuals(nearby) - now) / DIFFERENCE
        weighted = slopes * (used / np.maximum(np.abs(now), SMALL))[:, None]
        square, right, before = slopes.T @ weighted, weighted.T @ now, least
        scale = np.diag(np.maximum(np.diag(square), 1e-6 * np.trace(square) + 1e-12))
        count += len(logs)
        while damping < STUCK:
            tried = logs - np.clip(np.linalg.solve(square + damping * scale, right), -1.0, 1.0)
            found = residuals(tried)
            size, count = float((np.abs(found) * used).sum()) / total, count + 1
            if size < least:
                logs, now, least, damping = tried, found, size, damping / 5
                break
            damping *= 5
        if before - least < ENOUGH * before:
            break
    return logs, least


def _error(model: EngineModel) -> float:
    return model.error


def _neighbours(model: EngineModel, most: int) -> list[EngineModel]:
    """Return similar structures: other limits on prompts, numbers of engines, or limits on sequences up to
    ``most``."""
    values = {model.prompts * factor for factor in (0.5, 0.7, 1.4, 2.0)}
    values = {float(round(value)) if value > 1.2 else value for value in values} - {model.prompts}
    found = [replace(model, prompts=value) for value in values]
    step, sequence, prompt, transfer, delay = model.seconds
    for engines in {model.engines + 1, max(model.engines - 1, 1), 2 * model.engines} - {model.engines}:
        factor = engines / model.engines
        times = (step, sequence * factor, prompt * factor, transfer, delay)
        found.append(replace(model, engines=engines, seconds=times))
    if not model.pair:
        limit = model.slots if model.slots < math.inf else max(most // model.engines, 1) + 1.0
        found += [replace(model, slots=slots) for slots in (limit - 1, limit - 2, math.inf) if slots >= 1]
    return found


def _varied(model: EngineModel, rng: np.random.Generator) -> EngineModel:
    """Return the structure with slightly different times."""
    factors = np.exp(VARIATION * rng.standard_normal(len(model.seconds)))
    return replace(model, seconds=(*(np.array(model.seconds) * factors).tolist(),))


def _most_decoding(trial: TrialRequests) -> int:
    first = np.sort(trial.first_s[~np.isnan(trial.first_s)])
    last = np.sort(trial.last_s[~np.isnan(trial.last_s)])
    present = np.arange(1, len(first) + 1) - np.searchsorted(last, first, "right")
    return int(present.max(initial=1))
