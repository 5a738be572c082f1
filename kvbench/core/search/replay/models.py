"""Models of a server (a queue for first tokens, then decode steps), and their likelihood by departures."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, Literal, Protocol

import numpy as np

from kvbench.core.search.replay import queues
from kvbench.core.search.replay.queues import BoolArray, FloatArray
from kvbench.core.search.trial_requests import Latencies, Objective, TrialRequests
from kvbench.core.stats import NORMAL_90, t_quantile

UNKNOWN_AFTER: Final = 0.995
"""Quantile of the TTFT: requests that arrived less than this before a trial's end are left out, since only
the short ones have ended."""
UNKNOWN_MOST: Final = 0.02
"""Largest share of the work that may be in requests longer than any that ended."""
LEAST: Final = 1e-9
FITS, SAME_GROWTH = 6, 1e-3
"""Largest number of fits of the decode steps, and the relative difference of two that are the same."""
BLOCKS: Final = 8
"""Number of parts of a trial that a bootstrap draws: successive requests are correlated."""


Kind = Literal["fifo", "sharing"]


@dataclass(frozen=True)
class QueueFamily:
    """How first tokens are served: in order by ``servers``, or sharing them; after a fixed ``delay_s``."""

    kind: Kind
    servers: float
    delay_s: float = 0.0

    def text(self) -> str:
        many = f"{self.servers:g} server{'s' if self.servers != 1 else ''}"
        if self.kind == "sharing":
            return f"{many}, shared evenly"
        return f"{many} in order of arrival, {self.delay_s * 1e3:.3g} ms fixed"

    def work(self, trial: TrialRequests) -> tuple[FloatArray, FloatArray]:
        """Return work in seconds and log speed at departure of each request; NaN if unknown."""
        work, log_speed = self._work(trial, trial.first_s)
        return np.where(_early(trial), work, math.nan), log_speed

    def _work(self, trial: TrialRequests, first_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        if self.kind == "sharing":
            return queues.shared_work(trial.arrived_s, first_s, self.servers)
        work = queues.fifo_work(trial.arrived_s, first_s - self.delay_s, int(self.servers))
        return work, np.zeros(len(work))

    def unfinished(self, trial: TrialRequests) -> FloatArray:
        """Return the work in seconds that was done for each request in service when the trial ended."""
        unseen = np.isnan(trial.first_s)
        work, _ = self._work(trial, np.where(unseen, trial.end_s, trial.first_s))
        return work[unseen & _early(trial) & (work > 0)]

    def first_s(self, arrived_s: FloatArray, work_s: FloatArray) -> FloatArray:
        if self.kind == "fifo":
            return queues.fifo(arrived_s, work_s, int(self.servers)) + self.delay_s
        return queues.shared(arrived_s, work_s, self.servers)


def _early(trial: TrialRequests) -> BoolArray:
    """Return which requests arrived so early that the long ones among them ended, too."""
    seen = ~np.isnan(trial.first_s)
    tail_s = float(np.quantile((trial.first_s - trial.arrived_s)[seen], UNKNOWN_AFTER)) if seen.any() else 0.0
    return trial.arrived_s <= trial.end_s - (tail_s if tail_s < 0.5 * trial.end_s else 0.0)


@dataclass(frozen=True)
class Decode:
    """Seconds per token: alone + each × (other decoding requests) + prefill × (prompts computed per token).
    ``noise``: sorted measured / modelled time of many requests."""

    alone_s: float
    each_s: float
    prefill_s: float
    noise: FloatArray

    @classmethod
    def fitted(cls, trials: Sequence[TrialRequests]) -> Decode | None:
        """Fit the decode steps to all requests with a last token; None if there are too few."""
        found, growth = cls._fitted(trials, 0.0), 0.0
        for _ in range(FITS):
            if found is None or math.isclose(found.growth, growth, rel_tol=SAME_GROWTH):
                break
            growth = found.growth
            found = cls._fitted(trials, growth) or found
        return found

    def resampled(self, trials: Sequence[TrialRequests], pick: FloatArray) -> Decode:
        """Fit the decode steps again. ``pick``: weights of the blocks that a bootstrap drew."""
        return self._fitted(trials, self.growth, pick) or self

    @property
    def growth(self) -> float:
        """Time that another decoding request adds, as a share of that of a token alone."""
        return self.each_s / self.alone_s

    @classmethod
    def _fitted(
        cls, trials: Sequence[TrialRequests], growth: float, pick: FloatArray | None = None
    ) -> Decode | None:
        """Fit the decode steps by least squares with each request's mean number of others over its tokens,
        which ``growth`` gives: tokens come at a lower rate while there are more."""
        parts = [_decode_rows(trial, growth) for trial in trials]
        rows = np.concatenate([part[0] for part in parts])
        values = np.concatenate([part[1] for part in parts])
        if len(values) < 20:
            return None
        weights: FloatArray = np.ones(len(values))
        if pick is not None:
            blocks = np.concatenate([index * BLOCKS + part[2] for index, part in enumerate(parts)])
            weights = np.sqrt(pick[blocks.astype(np.int64)])
        found = _non_negative(rows * weights[:, None], values * weights)
        if found[0] <= 0:
            return None
        noise = np.sort(values / np.maximum(rows @ found, LEAST))
        return cls(float(found[0]), float(found[1]), float(found[2]), noise)

    def last_s(
        self, first_s: FloatArray, tokens: FloatArray, prefill_s: FloatArray, chance: FloatArray
    ) -> FloatArray:
        """Return the times of the last tokens. ``prefill_s``: time in which each prompt blocks decoding."""
        order = np.argsort(first_s, kind="stable")
        last_s = np.empty(len(first_s))
        if self.prefill_s > 0:
            begins = first_s[order] - prefill_s[order]
            first, last = queues.engine(
                begins, prefill_s[order], tokens[order], self.alone_s, self.each_s, len(order)
            )
            spans = last - first
        else:
            spans = (
                queues.shared(first_s[order], tokens[order], math.inf, self.alone_s, self.each_s)
                - first_s[order]
            )
        last_s[order] = first_s[order] + spans
        positions = (chance * len(self.noise)).astype(np.int64)
        return first_s + (last_s - first_s) * self.noise[positions]


@lru_cache(maxsize=64)
def _decode_rows(trial: TrialRequests, growth: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (1, others decoding, prompts per token), seconds per token, and block of the trial, for each
    request with a last token and more than one. ``growth``: as of ``Decode``."""
    known = ~np.isnan(trial.first_s)
    first, last = np.sort(trial.first_s[known]), np.sort(trial.last_s[~np.isnan(trial.last_s)])
    ended = known & ~np.isnan(trial.last_s) & (trial.tokens > 0) & (trial.last_s > trial.first_s)
    begin, end, tokens = trial.first_s[ended], trial.last_s[ended], trial.tokens[ended]
    if not len(begin):
        return np.empty((0, 3)), np.empty(0), np.empty(0)
    times = np.concatenate([first, last])
    order = np.argsort(times, kind="stable")
    times = times[order]
    present = np.cumsum(np.where(order < len(first), 1.0, -1.0))
    others = np.maximum(present[:-1] - 1.0, 0.0)
    generated = np.diff(times) / (1.0 + growth * others)
    totals = (np.concatenate([[0.0], np.cumsum(amounts)]) for amounts in (generated * others, generated))
    over, count = (np.interp(end, times, total) - np.interp(begin, times, total) for total in totals)
    prompts = np.searchsorted(first, end, "right") - np.searchsorted(first, begin, "right")
    rows = np.column_stack([np.ones(len(begin)), over / count, prompts / tokens])
    block = np.minimum((begin / max(trial.end_s, LEAST) * BLOCKS).astype(np.int64), BLOCKS - 1)
    return rows, (end - begin) / tokens, block


def _non_negative(rows: FloatArray, values: FloatArray) -> FloatArray:
    """Solve least squares with coefficients of at least 0."""
    active = list(range(rows.shape[1]))
    while True:
        found = np.zeros(rows.shape[1])
        found[active] = np.linalg.lstsq(rows[:, active], values, rcond=None)[0]
        below = [index for index in active if found[index] < 0]
        if not below:
            return found
        active.remove(min(below, key=lambda index: found[index] * rows[:, index].std()))
        if not active:
            return found


class Model(Protocol):
    """A model that can replay a load."""

    def capacity(self, tokens: FloatArray) -> float:
        """Return the highest request rate. ``tokens``: output tokens of each request after the first."""

    @property
    def longest(self) -> int:
        """Largest number of requests of the load that finds the rate."""

    def text(self) -> str:
        """Return a description."""

    def times(self, arrived_s: FloatArray, tokens: FloatArray, chance: FloatArray) -> Latencies:
        """Return the latencies of these arrivals. ``chance``: uniform numbers, shape (2, requests)."""

    def resampled(self, trials: Sequence[TrialRequests], rng: np.random.Generator) -> Model:
        """Return the model of a bootstrap sample of the trials."""


@dataclass(frozen=True)
class QueueModel:
    """A family with the work of the requests served (sorted seconds), and the decode steps if they matter."""

    family: QueueFamily
    work_s: FloatArray
    decode: Decode | None = None
    longest: int = 1_000_000

    def capacity(self, tokens: FloatArray) -> float:
        return self.family.servers / float(self.work_s.mean())

    def text(self) -> str:
        return self.family.text()

    def times(self, arrived_s: FloatArray, tokens: FloatArray, chance: FloatArray) -> Latencies:
        work = self.work_s[(chance[0] * len(self.work_s)).astype(np.int64)]
        first_s = self.family.first_s(arrived_s, work)
        last_s = first_s
        if self.decode is not None:
            share = self.decode.prefill_s / max(float(self.work_s.mean()), LEAST)
            last_s = self.decode.last_s(first_s, tokens, work * min(share, 1.0), chance[1])
        return Latencies.of(arrived_s, first_s, last_s, tokens)

    def resampled(self, trials: Sequence[TrialRequests], rng: np.random.Generator) -> QueueModel:
        work = np.sort(rng.choice(self.work_s, len(self.work_s)))
        decode = self.decode and self.decode.resampled(trials, blocks(trials, rng))
        return replace(self, work_s=work, decode=decode)


def blocks(trials: Sequence[TrialRequests], rng: np.random.Generator) -> FloatArray:
    """Return how often a bootstrap draws each of the ``BLOCKS`` parts of each trial."""
    count = BLOCKS * len(trials)
    return np.bincount(rng.integers(0, count, count), minlength=count).astype(np.float64)


def judged_part(trial: TrialRequests, objective: Objective) -> BoolArray:
    """Return which requests of a trial arrived early enough to meet or miss their limits before its end."""
    longest_s = max(min(goal.longest_s, math.inf) for goal in objective.goals)
    if not math.isfinite(longest_s):
        known = trial.last_s - trial.arrived_s
        known = known[~np.isnan(known)]
        longest_s = float(np.quantile(known, 0.95)) * 1.1 if len(known) else math.inf
    return trial.arrived_s <= trial.end_s - min(longest_s, trial.end_s / 2)


ADJACENT: Final = 16
SERVERS: Final = (
    *range(1, ADJACENT + 1),
    *(round(ADJACENT * 1.12**step) for step in range(1, 19)),
)
SHARING: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of servers to try first. Those next to the most likely one follow; of servers that work in order of
arrival, only from ``ADJACENT`` on."""
DELAYED: Final = 4
"""This many of the lowest and of the most likely numbers of servers are also tried with a fixed delay."""
NATS: Final = 12.0
"""Largest distance of a family's log-likelihood from the best one's."""
IMPOSSIBLE: Final = 12.0
"""Nats that a request with negative work costs."""
FEWEST: Final = 40
"""Minimum number of requests to judge a family by."""
RESOLUTION: Final = 0.01
"""Resolution of work, as a share of the lowest TTFT."""


@dataclass(frozen=True)
class Candidate:
    """A family, its log-likelihood, and the work of each trial's requests under it (NaN: unknown)."""

    family: QueueFamily
    log_likelihood: float
    work: tuple[FloatArray, ...]


def candidates(trials: Sequence[TrialRequests]) -> list[Candidate]:
    """Return all families that can explain the trials, the most likely one first."""
    lowest_s = float(np.fmin.reduce(np.concatenate([trial.first_s - trial.arrived_s for trial in trials])))
    if not lowest_s > 0:
        return []
    most = max(1.5 * max(float(_waiting(trial).max()) for trial in trials), 1.0)

    def of(kind: Kind, servers: int) -> Candidate | None:
        return _candidate(trials, QueueFamily(kind, servers), lowest_s)

    sharing = _by_servers(partial(of, "sharing"), SHARING, 1, most)
    at_once = _by_servers(partial(of, "fifo"), SERVERS, ADJACENT, most)
    found = [*sharing.values(), *at_once.values()]
    for count in {*_likeliest(at_once)[:DELAYED], *(number for number in at_once if number <= DELAYED)}:
        found += _delayed(trials, count, lowest_s)
    known = (candidate for candidate in found if candidate is not None)
    return sorted(known, key=lambda candidate: -candidate.log_likelihood)


def _by_servers(
    candidate: Callable[[int], Candidate | None], counts: Sequence[int], least: int, most: float
) -> dict[int, Candidate | None]:
    """Return candidates of these numbers of servers up to ``most``, and of those next to the most likely
    number from ``least`` on."""
    found = {count: candidate(count) for count in counts if count <= most}
    while tried := sorted(count for count in found if count >= least):
        place = tried.index(_likeliest({count: found[count] for count in tried})[0])
        gaps = zip(tried[max(place - 1, 0) : place + 1], tried[place : place + 2], strict=False)
        between = {(low + high) // 2 for low, high in gaps if high - low > 1}
        if not between:
            break
        found.update({count: candidate(count) for count in between})
    return found


def _likeliest(found: Mapping[int, Candidate | None]) -> list[int]:
    """Return the numbers of servers, the most likely first."""
    return sorted(
        found, key=lambda count: -(-math.inf if (fit := found[count]) is None else fit.log_likelihood)
    )


def _candidate(trials: Sequence[TrialRequests], family: QueueFamily, lowest_s: float) -> Candidate | None:
    """Return the family's candidate, or None with too little work known or none above 0."""
    parts = [family.work(trial) for trial in trials]
    work = np.concatenate([part[0] for part in parts])
    log_speed = np.concatenate([part[1] for part in parts])
    known = ~np.isnan(work)
    if known.sum() < FEWEST or work[known].mean() <= 0:
        return None
    likelihood = log_likelihood(work[known], RESOLUTION * lowest_s) + float(log_speed[known].sum())
    likelihood -= 0.1 * math.log(family.servers)
    return Candidate(family, likelihood, tuple(part[0] for part in parts))


def _delayed(trials: Sequence[TrialRequests], servers: int, lowest_s: float) -> list[Candidate | None]:
    """Return candidates with a delay of half or most of the lowest TTFT, and the fitted one."""
    delays = {0.5 * lowest_s, 0.9 * lowest_s}
    fitted = _fitted_delay(trials, servers, lowest_s)
    if fitted is not None:
        delays.add(fitted)
    return [_candidate(trials, QueueFamily("fifo", servers, delay_s), lowest_s) for delay_s in sorted(delays)]


def _waiting(trial: TrialRequests) -> FloatArray:
    """Return how many requests wait for their first token when each one arrives, including itself."""
    ended = np.searchsorted(np.sort(trial.first_s), trial.arrived_s, "right")
    return np.asarray(np.arange(1, len(trial) + 1) - ended, np.float64)


def _fitted_delay(trials: Sequence[TrialRequests], servers: int, lowest_s: float) -> float | None:
    """Return the delay that gives requests with a free server the same work as those that waited."""
    delay_s = 0.5 * lowest_s
    for _ in range(3):
        waited, free = [], []
        for trial in trials:
            work, _ = QueueFamily("fifo", servers, delay_s).work(trial)
            start = trial.first_s - delay_s - work
            late = start > trial.arrived_s + 0.02 * lowest_s
            known = ~np.isnan(work)
            waited.append(work[known & late])
            free.append(work[known & ~late])
        after, before = np.concatenate(waited), np.concatenate(free)
        if min(len(after), len(before)) < 10:
            return None
        changed = delay_s + float(np.median(before) - np.median(after))
        changed = min(max(changed, 0.0), 0.999 * lowest_s)
        if abs(changed - delay_s) < 1e-4 * lowest_s:
            break
        delay_s = changed
    return delay_s


def log_likelihood(work: FloatArray, resolution: float) -> float:
    """Return the leave-one-out log-likelihood of positive values, by a kernel density of their logarithms.
    ``resolution``: smallest meaningful difference, in the unit of ``work``."""
    count, mean = len(work), float(work.mean())
    least = 1e-4 * mean
    logs = np.log(np.maximum(work, least))
    impossible = int((work <= least).sum())
    quartiles = np.quantile(logs, [0.25, 0.75])
    spread = min(float(logs.std()), float(quartiles[1] - quartiles[0]) / 1.34 + 1e-9)
    width = max(resolution / mean, 0.9 * spread * count**-0.2)
    low, high = float(logs.min()) - 4 * width, float(logs.max()) + 4 * width
    bins = int(min(4000, max(50, (high - low) / width * 4)))
    step = (high - low) / bins
    histogram = np.histogram(logs, bins, (low, high))[0].astype(np.float64)
    reach = int(4 * width / step) + 1
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) * step / width) ** 2)
    kernel /= kernel.sum() * step
    density = np.convolve(histogram, kernel)[reach : reach + bins] / count
    positions = np.clip(((logs - low) / step).astype(np.int64), 0, bins - 1)
    others = np.maximum(density[positions] - float(kernel.max()) / count, 0.02 / count)
    coarse = np.maximum(logs, math.log(resolution / width))  # no finer than the resolution
    return float((np.log(others) - coarse).sum()) - IMPOSSIBLE * impossible


def error_between(candidate: Candidate) -> float:
    """Return the standard error of the mean work by differences between trials beyond sampling error, as
    random effects (Hedges 1983) with equal variation in all trials. Of few trials it is larger, as Student's
    t has a wider 90 % interval than a normal distribution."""
    known = (work[~np.isnan(work)] for work in candidate.work)
    parts = [part for part in known if len(part) >= FEWEST and part.mean() > 0]
    if len(parts) < 2:
        return 0.0
    within = float(np.average([part.var() for part in parts], weights=[len(part) for part in parts]))
    sampling = within * float(np.mean([1 / len(part) for part in parts]))
    excess = float(np.var([part.mean() for part in parts], ddof=1)) - sampling
    wider = t_quantile(0.95, len(parts) - 1) / NORMAL_90
    return wider * math.sqrt(max(excess, 0.0) / len(parts)) / float(np.concatenate(parts).mean())


def whole_work(trials: Sequence[TrialRequests], candidate: Candidate) -> FloatArray:
    """Return the work of all requests served, sorted, in seconds. Of a request in service when its trial
    ended only a minimum is known. It gets the work of a longer request, drawn with a fixed seed: the estimate
    of Kaplan and Meier (1958) as a sample. If none is longer, it gets the minimum."""
    ended = np.concatenate(candidate.work)
    found: list[float] = np.sort(np.maximum(ended[~np.isnan(ended)], LEAST)).tolist()
    rng = np.random.default_rng(3)
    for done_s in -np.sort(-np.concatenate([candidate.family.unfinished(trial) for trial in trials])):
        longer = bisect_right(found, done_s)
        insort(found, found[rng.integers(longer, len(found))] if longer < len(found) else float(done_s))
    return np.array(found)


def work_objections(trials: Sequence[TrialRequests], candidate: Candidate, model: QueueModel) -> list[str]:
    """List objections to work that varies with time, queue length, successive requests, or trial."""
    objections = []
    ended = float(np.nanmax(np.concatenate(candidate.work)))
    unknown = float(model.work_s[model.work_s > ended].sum() / model.work_s.sum())
    if unknown > UNKNOWN_MOST:
        objections.append(f"{unknown:.0%} of the work is in requests longer than any that ended")
    mean, top = float(model.work_s.mean()), float(np.quantile(model.work_s, 0.99))
    for trial, work in zip(trials, candidate.work, strict=True):
        known = ~np.isnan(work)
        values = work[known]
        count = len(values)
        if count < 60:
            continue
        values = np.minimum(values, np.quantile(values, 0.99))
        error = float(values.std()) / math.sqrt(count)
        half = count // 2
        if abs(values[:half].mean() - values[half:].mean()) / mean > 0.05 + 6.6 * error / mean:
            objections.append(f"the work drifts within a trial at {trial.rate:.3g} req/s")
        queue = _waiting(trial)[known]
        many = queue > np.median(queue)
        if min(int(many.sum()), int((~many).sum())) >= 20:
            differs = abs(values[many].mean() - values[~many].mean()) / mean
            allowed = values.std() * math.sqrt(1 / many.sum() + 1 / (~many).sum()) / mean
            if differs > 0.06 + 3.3 * allowed:
                objections.append(f"the work depends on the queue at {trial.rate:.3g} req/s")
        noise = RESOLUTION * mean * np.random.default_rng(2).standard_normal(count)
        ranks = np.argsort(np.argsort(values + noise)) - count / 2
        correlation = float((ranks[1:] * ranks[:-1]).mean() / (ranks * ranks).mean())
        if correlation > 0.15 + 3.3 / math.sqrt(count) and values.std() > 0.03 * mean:
            objections.append(f"the work of successive requests is correlated at {trial.rate:.3g} req/s")
    if len(trials) > 1:
        parts = [np.minimum(work[~np.isnan(work)], top) for work in candidate.work]
        everything = np.concatenate(parts)
        for trial, part in zip(trials, parts, strict=True):
            if len(part) <= 40:
                continue
            allowed = (
                max(float(part.std()), float(everything.std())) / everything.mean() / math.sqrt(len(part))
            )
            if abs(part.mean() / everything.mean() - 1) > 0.05 + 4 * allowed:
                objections.append(f"the work at {trial.rate:.3g} req/s differs from that in the other trials")
    return objections
