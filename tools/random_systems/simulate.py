"""What a drawn system answers to a trial, and what it carries into the next one.

The state is the requests themselves, with the work that was drawn for them and when their clients left: what
is still there when a trial begins is played again together with it, on the same clock. So there is one
simulation for all disciplines, and a backlog is exactly what it would have been.
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
Places = BoolArray | npt.NDArray[np.intp]

TENANT_BLOCK: Final = 256
"""Requests of others come in blocks of the virtual clock, each with so many on average."""
TENANT_LEAD: Final = 50.0
"""So many mean services (or idle latencies) before the first request, others are there already."""
_DRAWS, _NOISE, _TENANTS = 1, 2, 3


@dataclass(frozen=True)
class Jobs:
    """Requests in the order of arrival, an array each; times in seconds of the virtual clock.

    ``work``: relative to a nominal request; ``gone_s``: when the server drops it, inf for never.
    """

    arrived_s: FloatArray
    work: FloatArray
    input_len: FloatArray
    output_len: FloatArray
    gone_s: FloatArray

    def __len__(self) -> int:
        return len(self.arrived_s)

    def pick(self, which: Places) -> Jobs:
        return Jobs(*(getattr(self, each.name)[which] for each in fields(self)))

    @staticmethod
    def join(parts: Sequence[Jobs]) -> Jobs:
        return Jobs(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Jobs)))

    @classmethod
    def alike(cls, arrived_s: FloatArray, work: FloatArray, load: Workload) -> Jobs:
        """Those of a workload, whose clients wait for ever."""
        lengths = [np.full(len(work), float(each)) for each in (load.input_len, load.output_len)]
        return cls(arrived_s, work, lengths[0], lengths[1], np.full(len(work), math.inf))


NOBODY: Final = Jobs.alike(np.empty(0), np.empty(0), Workload(1, 1, 1.0))


@dataclass(frozen=True)
class State:
    """What is left by the trials before. ``jobs``: all that may matter still; the last ``fresh`` of them are
    those of the trial before.
    """

    jobs: Jobs = NOBODY
    done_s: FloatArray = field(default_factory=lambda: np.empty(0))
    """When each is done, as was foreseen without cancellation; inf for never."""
    fresh: int = 0
    starts_at_s: float = 0.0
    salt: int | None = None
    """The first trial's seed: sets one search's tenants apart from another's."""
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
    """(first token, last token) in seconds from the trial's start, NaN for never, and the state after it.

    ``arrivals_s`` from the trial's start, in any order. Raises ValueError if virtual time goes backwards.
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
    old = state.jobs if np.any(state.done_s > starts_at_s) else NOBODY
    jobs = Jobs.join([old, new])
    in_order = np.argsort(jobs.arrived_s, kind="stable")
    first, last = np.empty(len(jobs)), np.empty(len(jobs))
    first[in_order], last[in_order] = run(
        system, Clock(system.disturbances, noise), jobs.pick(in_order), salt
    )
    # The state keeps the trial's own numbering, so that cancelled requests are found.
    back = np.argsort(order)
    first_s, last_s = first[len(old) :][back] - starts_at_s, last[len(old) :][back] - starts_at_s
    told = Jobs.join([old, new.pick(back)])
    done_s = np.concatenate([last[: len(old)], last[len(old) :][back]])
    done_s = np.where(np.isnan(done_s), told.gone_s, done_s)
    if system.batch is not None:  # one that never fits is never done
        done_s[(done_s == math.inf) & (told.input_len + told.output_len > system.batch.kv_tokens)] = -math.inf
    return first_s, last_s, State(told, done_s, count, starts_at_s, salt, noise)


def end(system: System, state: State, cut_at_s: float, cancelled: Sequence[int]) -> State:
    """The state after a trial was ended: what was to come after ``cut_at_s`` (from its start) never came, and
    those ``cancelled`` (numbers of its requests) are dropped then, if the server does that.

    Raises IndexError for a request that the trial has not got.
    """
    old = len(state.jobs) - state.fresh
    cut = state.starts_at_s + cut_at_s
    for each in cancelled:
        if not 0 <= each < state.fresh:
            raise IndexError(f"request {each} is cancelled, of {state.fresh} in the trial")
    gone_s = state.jobs.gone_s.copy()
    if system.aborts:
        places = old + np.asarray(cancelled, np.intp)
        gone_s[places] = np.minimum(gone_s[places], cut)
    came = state.jobs.arrived_s <= cut
    came[:old] = True
    jobs = replace(state.jobs, gone_s=gone_s).pick(came)
    # Without those that left, the others are done no later, but for a preempted one; that is found anew.
    done_s = np.minimum(state.done_s, gone_s)[came]
    return replace(state, jobs=jobs, done_s=done_s, fresh=int(came[old:].sum()))


def run(system: System, clock: Clock, jobs: Jobs, salt: int = 0) -> tuple[FloatArray, FloatArray]:
    """(first token, last token) in seconds of the virtual clock; ``jobs`` in the order of arrival."""
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
        own = last[: len(jobs)]
        if system.discipline == "fifo" and not system.slope_s:
            break  # who comes later changes nothing for who came before
        if not np.any(own > begin + span):
            break
        span = 1.5 * (float(np.nanmax(own)) - begin)
    return first[: len(jobs)], own


def latency_s(system: System) -> float:
    return system.idle_ttft_s() + (system.workload.output_len - 1) * system.idle_tpot_s


def _run(system: System, clock: Clock, jobs: Jobs) -> tuple[FloatArray, FloatArray]:
    first: FloatArray = np.full(len(jobs), math.nan)
    last: FloatArray = np.full(len(jobs), math.nan)
    here = jobs.gone_s > jobs.arrived_s
    if not here.all():
        first[here], last[here] = _run(system, clock, jobs.pick(here))
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
    """When the last token comes; ``tokens``: those after the first."""
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
    """The requests of others in these seconds: the same ones whenever it is asked."""
    rate = system.disturbances.tenants * system.capacity
    block_s = TENANT_BLOCK / rate
    at, work = [], []
    for block in range(math.floor(begin_s / block_s), math.floor(end_s / block_s) + 1):
        rng = np.random.default_rng([salt, _TENANTS, block + (1 << 40)])
        many = int(rng.poisson(TENANT_BLOCK))
        at.append((block + np.sort(rng.random(many))) * block_s)
        work.append(system.service.draw(many, rng))
    arrived_s = np.concatenate(at)
    everyone = Jobs.alike(arrived_s, np.concatenate(work), system.workload)
    return everyone.pick((arrived_s >= begin_s) & (arrived_s <= end_s))
