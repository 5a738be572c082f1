"""Which families explain the first tokens of all trials: by the likelihood of the departures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvbench.core.search.replay.models import QueueFamily
from kvbench.core.search.replay.queues import FloatArray
from kvbench.core.search.trial_requests import TrialRequests

SERVERS: Final = (*range(1, 17), *sorted({round(16 * 1.06**step) for step in range(1, 37)}))
"""Numbers of servers that are tried; then those between the likeliest one's neighbours."""
DELAYED: Final = 4
"""So many numbers of servers, the lowest and the likeliest, are tried with a fixed delay, too."""
SHARING: Final = (1, 2, 4, 8, 16)
NATS: Final = 12.0
"""Families whose log-likelihood is so close to the best one's are kept."""
IMPOSSIBLE: Final = 12.0
"""Nats that a request costs whose work would be below nothing."""
FEWEST: Final = 40
"""Requests that a family is judged by."""
RESOLUTION: Final = 0.01
"""Of the lowest TTFT: differences below it tell nothing."""


@dataclass(frozen=True)
class Candidate:
    """A family, its log-likelihood, and the work that it leaves of each trial (NaN: unknown)."""

    family: QueueFamily
    log_likelihood: float
    work: tuple[FloatArray, ...]


def candidates(trials: Sequence[TrialRequests]) -> list[Candidate]:
    """All families that the trials can be explained by, the most likely one first."""
    lowest_s = min(
        (float(np.nanmin(each.first_s - each.arrived_s)) for each in trials if _any_seen(each)),
        default=math.nan,
    )
    if not lowest_s > 0:
        return []
    most = max(1.5 * max(_most_present(trial) for trial in trials), 1.0)
    found = [
        _candidate(trials, QueueFamily("sharing", count), lowest_s) for count in SHARING if count <= most
    ]
    at_once = {
        count: _candidate(trials, QueueFamily("fifo", count), lowest_s) for count in SERVERS if count <= most
    }
    while True:  # between the grid's numbers, about the likeliest one
        tried = sorted(at_once)
        place = tried.index(_likeliest(at_once)[0])
        gaps = zip(tried[max(place - 1, 0) : place + 1], tried[place : place + 2], strict=False)
        between = {(low + high) // 2 for low, high in gaps if high - low > 1}
        if not between:
            break
        at_once.update({count: _candidate(trials, QueueFamily("fifo", count), lowest_s) for count in between})
    found += at_once.values()
    for count in {*_likeliest(at_once)[:DELAYED], *(each for each in tried if each <= DELAYED)}:
        found += _delayed(trials, count, lowest_s)
    return sorted((each for each in found if each is not None), key=lambda each: -each.log_likelihood)


def _likeliest(found: Mapping[int, Candidate | None]) -> list[int]:
    """The numbers of servers, the likeliest first."""
    return sorted(
        found, key=lambda count: -(-math.inf if (own := found[count]) is None else own.log_likelihood)
    )


def _candidate(trials: Sequence[TrialRequests], family: QueueFamily, lowest_s: float) -> Candidate | None:
    """None where too few requests tell something, or all of them nonsense."""
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
    """With a delay of half or most of the lowest TTFT, and the fitted one."""
    delays = {0.5 * lowest_s, 0.9 * lowest_s}
    fitted = _fitted_delay(trials, servers, lowest_s)
    if fitted is not None:
        delays.add(fitted)
    return [_candidate(trials, QueueFamily("fifo", servers, delay_s), lowest_s) for delay_s in sorted(delays)]


def _any_seen(trial: TrialRequests) -> bool:
    return bool((~np.isnan(trial.first_s)).any())


def _most_present(trial: TrialRequests) -> int:
    """The most requests that waited for their first token at once."""
    seen = np.sort(trial.first_s[~np.isnan(trial.first_s)])
    return int((np.arange(1, len(trial) + 1) - np.searchsorted(seen, trial.arrived_s, "right")).max())


def _fitted_delay(trials: Sequence[TrialRequests], servers: int, lowest_s: float) -> float | None:
    """The delay with which requests that found a free server had the same work as those that waited."""
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
    """Of positive values by a kernel density of their logarithms, each one left out of its own.

    ``resolution``: in the unit of ``work``; finer differences are rounding.
    """
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
    density = np.convolve(histogram, kernel, "same")[:bins] / count if len(kernel) <= bins else None
    if density is None:
        density = np.convolve(histogram, kernel, "full")[reach : reach + bins] / count
    places = np.clip(((logs - low) / step).astype(np.int64), 0, bins - 1)
    others = np.maximum(density[places] - float(kernel.max()) / count, 0.02 / count)
    return float((np.log(others) - logs).sum()) - IMPOSSIBLE * impossible
