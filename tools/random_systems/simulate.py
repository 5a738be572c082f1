"""Simulate a trial on a drawn system, with the backlog of earlier trials.

The state holds the requests, with their drawn work and the times at which clients cancelled. Each trial
simulates the unfinished requests again, together with its new ones, on the same clock. So one simulation
serves all disciplines, and the backlog is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from .queues import batching, fifo, shared
from .system import Clock, Discipline, FloatArray, System, Workload

BoolArray = npt.NDArray[np.bool_]
Selection = BoolArray | npt.NDArray[np.intp]

TENANT_BLOCK: Final = 256
"""Mean number of co-tenant requests in a block of the virtual clock."""
TENANT_LEAD: Final = 50.0
"""Lead of the co-tenants before the first request, in mean service times or idle TTFTs."""
_DRAWS, _NOISE, _TENANTS = 1, 2, 3


@dataclass(frozen=True)
class Jobs:
    """Requests in the order of arrival, one array per field; times in seconds of the virtual clock.

    ``work``: relative to a nominal request; ``gone_s``: when the server drops the request, inf for never.
    """

    arrived_s: FloatArray
    work: FloatArray
    input_len: FloatArray
    output_len: FloatArray
    gone_s: FloatArray

    def __len__(self) -> int:
        return len(self.arrived_s)

    def pick(self, which: Selection) -> Jobs:
        return Jobs(*(getattr(self, col.name)[which] for col in fields(self)))

    @staticmethod
    def join(parts: Sequence[Jobs]) -> Jobs:
        return Jobs(*(np.concatenate([getattr(part, col.name) for part in parts]) for col in fields(Jobs)))

    @classmethod
    def identical(cls, arrived_s: FloatArray, work: FloatArray, load: Workload) -> Jobs:
        """Return a workload's requests, which no client cancels."""
        lengths = [np.full(len(work), float(length)) for length in (load.input_len, load.output_len)]
        return cls(arrived_s, work, lengths[0], lengths[1], np.full(len(work), math.inf))


NO_JOBS: Final = Jobs.identical(np.empty(0), np.empty(0), Workload(1, 1, 1.0))


@dataclass(frozen=True)
class State:
    """Requests that earlier trials left. The last ``fresh`` of ``jobs`` belong to the previous trial."""

    jobs: Jobs = NO_JOBS
    done_s: FloatArray = field(default_factory=lambda: np.empty(0))
    """When each request ends without further cancellations; inf for never."""
    fresh: int = 0
    starts_at_s: float = 0.0
    salt: int | None = None
    """Seed of the first trial; gives each search other co-tenants."""
    noise: tuple[tuple[float, float], ...] = ()


def trial(
    system: System,
    arrivals_s: FloatArray,
    input_len: FloatArray,
    output_len: FloatArray,
    starts_at_s: float,
    seed: int,
    state: State,
) -> tuple[FloatArray, FloatArray, State]:
    """Return (first token, last token, state after the trial); seconds from its start, NaN for never.

    ``arrivals_s``: from the trial's start, in any order. Raises ValueError if virtual time goes backwards.
    """
    if starts_at_s < state.starts_at_s:
        raise ValueError(f"a trial starts at {starts_at_s:g} s, the one before at {state.starts_at_s:g} s")
    salt = seed if state.salt is None else state.salt
    noise = state.noise
    if system.disturbances.noise:
        rng = np.random.default_rng([seed, _NOISE])
        noise = (*noise, (starts_at_s, math.exp(system.disturbances.noise * float(rng.standard_normal()))))
    count = len(arrivals_s)
    work = system.service.draw(count, np.random.default_rng([seed, _DRAWS]))
    order = np.argsort(arrivals_s, kind="stable")
    new = Jobs(starts_at_s + arrivals_s, work, input_len, output_len, np.full(count, math.inf)).pick(order)
    old = state.jobs if np.any(state.done_s > starts_at_s) else NO_JOBS
    jobs = Jobs.join([old, new])
    in_order = np.argsort(jobs.arrived_s, kind="stable")
    first, last = np.empty(len(jobs)), np.empty(len(jobs))
    first[in_order], last[in_order] = run(
        system, Clock(system.disturbances, noise), jobs.pick(in_order), salt
    )
    # The state keeps the trial's numbering, by which ``end`` finds the cancelled requests.
    back = np.argsort(order)
    first_s, last_s = first[len(old) :][back] - starts_at_s, last[len(old) :][back] - starts_at_s
    kept = Jobs.join([old, new.pick(back)])
    done_s = np.concatenate([last[: len(old)], last[len(old) :][back]])
    done_s = np.where(np.isnan(done_s), kept.gone_s, done_s)
    if system.batch is not None:  # requests that never fit leave no backlog
        done_s[(done_s == math.inf) & (kept.input_len + kept.output_len > system.batch.kv_tokens)] = -math.inf
    return first_s, last_s, State(kept, done_s, count, starts_at_s, salt, noise)


def end(system: System, state: State, cut_at_s: float, cancelled: Sequence[int]) -> State:
    """Return the state after a trial was ended ``cut_at_s`` after its start. Later requests never arrive; the
    server drops those ``cancelled`` (numbers of the trial's requests), if it aborts.

    Raises IndexError for a number outside the trial.
    """
    old = len(state.jobs) - state.fresh
    cut = state.starts_at_s + cut_at_s
    for number in cancelled:
        if not 0 <= number < state.fresh:
            raise IndexError(f"request {number} is cancelled, of {state.fresh} in the trial")
    gone_s = state.jobs.gone_s.copy()
    if system.aborts:
        indices = old + np.asarray(cancelled, np.intp)
        gone_s[indices] = np.minimum(gone_s[indices], cut)
    arrived = state.jobs.arrived_s <= cut
    arrived[:old] = True
    jobs = replace(state.jobs, gone_s=gone_s).pick(arrived)
    # Without the dropped ones, the others end no later, except a preempted one; the next trial simulates it.
    done_s = np.minimum(state.done_s, gone_s)[arrived]
    return replace(state, jobs=jobs, done_s=done_s, fresh=int(arrived[old:].sum()))


def run(system: System, clock: Clock, jobs: Jobs, salt: int = 0) -> tuple[FloatArray, FloatArray]:
    """Return (first token, last token) in seconds of the virtual clock; ``jobs`` in the order of arrival."""
    if not len(jobs):
        return np.empty(0), np.empty(0)
    if not system.disturbances.tenants:
        return _run(system, clock, jobs)
    begin = float(jobs.arrived_s[0]) - TENANT_LEAD * max(system.prefill_s, system.idle_ttft_s())
    span = float(jobs.arrived_s[-1]) - begin + 20 * latency_s(system)
    while True:
        others = _tenants(system, begin, begin + span, salt)
        both = Jobs.join([jobs, others])
        order = np.argsort(both.arrived_s, kind="stable")
        first, last = np.empty(len(both)), np.empty(len(both))
        first[order], last[order] = _run(system, clock, both.pick(order))
        ends = last[: len(jobs)]
        if system.discipline == "fifo" and not system.slope_s:
            break  # later requests do not affect earlier ones
        if not np.any(ends > begin + span):
            break
        span = 1.5 * (float(np.nanmax(ends)) - begin)
    return first[: len(jobs)], ends


def latency_s(system: System) -> float:
    return system.idle_ttft_s() + (system.workload.output_len - 1) * system.idle_tpot_s


def _run(system: System, clock: Clock, jobs: Jobs) -> tuple[FloatArray, FloatArray]:
    first: FloatArray = np.full(len(jobs), math.nan)
    last: FloatArray = np.full(len(jobs), math.nan)
    stays = jobs.gone_s > jobs.arrived_s
    if not stays.all():
        first[stays], last[stays] = _run(system, clock, jobs.pick(stays))
        return first, last
    arrived = clock.work(jobs.arrived_s)
    gone = clock.work(jobs.gone_s) if np.isfinite(jobs.gone_s).any() else None
    if system.batch is not None:
        tokens = jobs.work * jobs.input_len
        first, last = batching(system.batch, arrived, tokens, jobs.input_len, jobs.output_len, gone)
        return clock.seconds(first), clock.seconds(last)
    work = jobs.work * (system.prefill_s / system.workload.input_len) * jobs.input_len
    first = prefill(system.discipline, system.servers, arrived, work, gone)
    last = _decode(system, first, jobs.output_len - 1.0, gone)
    return clock.seconds(first), clock.seconds(last)


def prefill(
    discipline: Discipline,
    servers: int,
    arrived: FloatArray,
    work: FloatArray,
    gone: FloatArray | None = None,
) -> FloatArray:
    if discipline == "fifo":
        return fifo(servers, arrived, work, gone)
    return shared(lambda present: min(1.0, servers / present), arrived, work, gone)


def _decode(system: System, first: FloatArray, tokens: FloatArray, gone: FloatArray | None) -> FloatArray:
    """Return when the last token comes; ``tokens``: number after the first."""
    if not system.slope_s:
        last = first + tokens * system.token_s
        return last if gone is None else np.where(last <= gone, last, math.nan)
    order = np.argsort(first, kind="stable")
    order = order[: len(first) - int(np.isnan(first).sum())]
    last = np.full(len(first), math.nan)

    def speed(present: int) -> float:
        return 1.0 / (system.token_s + system.slope_s * (present - 1))

    last[order] = shared(speed, first[order], tokens[order], None if gone is None else gone[order])
    return last


def _tenants(system: System, begin_s: float, end_s: float, salt: int) -> Jobs:
    """Return the co-tenants' requests in this time; repeated calls return the same ones."""
    rate = system.disturbances.tenants * system.capacity
    block_s = TENANT_BLOCK / rate
    at, work = [], []
    for block in range(math.floor(begin_s / block_s), math.floor(end_s / block_s) + 1):
        rng = np.random.default_rng([salt, _TENANTS, block + (1 << 40)])
        count = int(rng.poisson(TENANT_BLOCK))
        at.append((block + np.sort(rng.random(count))) * block_s)
        work.append(system.service.draw(count, rng))
    arrived_s = np.concatenate(at)
    everyone = Jobs.identical(arrived_s, np.concatenate(work), system.workload)
    return everyone.pick((arrived_s >= begin_s) & (arrived_s <= end_s))
