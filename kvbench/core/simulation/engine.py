"""The engine model on a counter instead of a clock: the same scheduler and step times, no waiting.

``StepEngine`` is one engine among others: ``kvbench.core.simulation.deployment`` owns the counter and gets
from the engine when its step ends. Between two changes of its batch an engine that only decodes repeats the
same step. These steps are planned in one go, and cut short if something happens meanwhile: a trial costs by
its requests and not by its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvbench.core.gates.evidence import EXTERNAL, LOCAL_CACHE_HIT, LOCAL_COMPUTE, EngineFigures
from kvbench.core.load.dispatch import server_of_session
from kvbench.core.metrics.limit import Use
from kvbench.core.metrics.ttft_breakdown import Phases
from kvbench.core.records import RequestRecord
from kvbench.core.simulation.kv_cache import BlockPool
from kvbench.core.simulation.scheduler import EngineConfig, EngineRequest, Scheduler, StepPlan
from kvbench.core.simulation.step_time import TimingProfile

_LONGEST_RUN: Final = 64
"""Steps planned together; more would mostly be cut off."""


class CountingPool(BlockPool):
    """A block pool that only counts: the same answers for requests that share no prefix, in O(1)."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(1, enable_prefix_caching=False)
        self.num_blocks = num_blocks
        self._left = num_blocks

    @property
    def free_blocks(self) -> int:
        return self._left

    @property
    def usage(self) -> float:
        return 1.0 - self._left / self.num_blocks

    def can_take(self, cached: Sequence[int], fresh: int) -> bool:
        return self._left >= fresh

    def take(self, cached: Sequence[int], fresh: int) -> list[int]:
        if fresh > self._left:
            raise ValueError(f"{fresh} blocks wanted, {self._left} free")
        self._left -= fresh
        return [0] * fresh

    def release(self, blocks: Iterable[int]) -> None:
        self._left += len(list(blocks))
        if self._left > self.num_blocks:
            raise ValueError("more blocks were given back than taken")


class _Gauges:
    """Time integrals of what an engine's gauges would show."""

    def __init__(self) -> None:
        self.sums = [0.0] * 5
        self.peaks = [0.0] * 3
        self._now = (0.0,) * 5
        self._since = 0.0

    def note(self, time_s: float, values: tuple[float, float, float, float, float]) -> None:
        """Record from now on: running, waiting, KV use, slots full, KV full."""
        span = time_s - self._since
        if span > 0.0:
            self.sums = [total + span * value for total, value in zip(self.sums, self._now, strict=True)]
            self._since = time_s
        self._now = values
        self.peaks = [max(peak, value) for peak, value in zip(self.peaks, values, strict=False)]


class StepEngine:
    """One engine on its owner's clock: ``begin`` a run of steps, ``cut`` it short, ``end`` it."""

    def __init__(
        self, config: EngineConfig, timing: TimingProfile, time_scale: float = 1.0, *, reuse: bool = False
    ) -> None:
        """Set up an idle engine. ``reuse``: requests have prefix hashes, so blocks have identities."""
        self.scheduler = Scheduler(config, None if reuse else CountingPool(config.num_blocks))
        self.config = config
        self.timing = timing
        self.time_scale = time_scale
        self.loads: list[EngineRequest] = []
        """Requests with KV to fetch; the owner takes them after each ``begin``."""
        self.run = 0
        """Number of the current run: ends announced for another number are ignored."""
        self.steps = 0
        self.busy_s = 0.0
        self._plan: StepPlan | None = None
        self._ends: list[float] = []
        self._began = 0.0
        self._gauges = _Gauges()

    @property
    def busy(self) -> bool:
        return self._plan is not None

    def begin(self, now: float, *, loads_first: bool = False) -> float | None:
        """Start a run of steps at ``now``; return its end, or None if there is nothing to do.
        ``loads_first``: start nothing while there are requests with KV to fetch."""
        assert self._plan is None, "end() must follow begin()"
        while True:
            plan = self.scheduler.schedule(now)
            self.loads += plan.loads
            if plan.chunks or not plan.preempted:
                break
        if loads_first and self.loads:
            self.scheduler.withdraw()
            plan.chunks.clear()
        self._note(now)
        if not plan.chunks:
            return None
        self._plan, self._began = plan, now
        load = plan.load
        end = now + self.timing.step_s(load, self.time_scale)
        self._ends = ends = [end]
        seqs, context, scale = len(plan.chunks), load.decode_context, self.time_scale
        decode_step_s = self.timing.decode_step_s
        for extra in range(1, self._alike(plan)):
            end += decode_step_s(seqs, context + extra * seqs, scale)
            ends.append(end)
        self.run += 1
        return end

    def cut(self, now: float) -> float | None:
        """End the run with the current step, because of an event at ``now``; return its new end, if any."""
        keep = bisect_left(self._ends, now) + 1
        if keep >= len(self._ends):
            return None
        del self._ends[keep:]
        self.run += 1
        return self._ends[-1]

    def end(self) -> tuple[list[EngineRequest], list[float]]:
        """End the run: return the requests with new tokens, and the tokens' times."""
        assert self._plan is not None
        plan, ends = self._plan, self._ends
        self._plan, self._ends = None, []
        self.steps += len(ends)
        self.busy_s += ends[-1] - self._began
        sampled = self.scheduler.complete(plan)
        if more := len(ends) - 1:
            pool, block_tokens = self.scheduler.pool, self.config.block_tokens
            for request in sampled:
                known = request.num_computed
                request.num_computed += more
                request.num_tokens += more
                fresh = -(-request.num_computed // block_tokens) - len(request.blocks)
                if fresh > 0:
                    request.blocks += pool.take((), fresh)
                self.scheduler.register(request, known, request.num_computed)
        return sampled, ends

    def _alike(self, plan: StepPlan) -> int:
        """Return how many steps are certain to repeat this one."""
        running = self.scheduler.running
        if len(plan.chunks) != len(running):
            return 1
        steps = _LONGEST_RUN
        for chunk in plan.chunks:
            if chunk.count != 1 or not chunk.samples:
                return 1
            steps = min(steps, chunk.request.max_tokens - chunk.request.output_len)
        block_tokens = self.config.block_tokens
        fresh = sum(
            -(-(chunk.start + steps) // block_tokens) - len(chunk.request.blocks) for chunk in plan.chunks
        )
        return steps if fresh <= self.scheduler.pool.free_blocks else 1

    def _note(self, now: float) -> None:
        scheduler = self.scheduler
        running, free = len(scheduler.running), scheduler.pool.free_blocks
        queue = scheduler.waiting
        waiting = len(queue) + len(scheduler.ready) + len(scheduler.loading)
        full = running >= self.config.max_num_seqs and bool(queue or scheduler.ready)
        short = bool(queue) and -(-queue[0].num_tokens // self.config.block_tokens) > free
        self._gauges.note(now, (running, waiting, scheduler.pool.usage, float(full), float(short)))

    def use(self, until_s: float) -> Use:
        self._gauges.note(until_s, (0.0,) * 5)
        running, waiting, kv, full, short = (total / max(until_s, 1e-9) for total in self._gauges.sums)
        peaks = self._gauges.peaks
        return Use(
            busy_share=min(1.0, self.busy_s / max(until_s, 1e-9)),
            running_mean=running,
            running_peak=peaks[0],
            waiting_mean=waiting,
            waiting_peak=peaks[1],
            kv_use_mean=kv,
            kv_use_peak=peaks[2],
            slots=self.config.max_num_seqs,
            slots_full_share=full,
            kv_full_share=short,
        )


def use_of(engines: Sequence[StepEngine], until_s: float) -> Use:
    """Return a role's use: means over its engines, maximum of the peaks."""
    uses = [engine.use(until_s) for engine in engines]
    merged = Use(engines=len(uses), slots=uses[0].slots)
    for name in Use.__dataclass_fields__:
        if name not in ("engines", "slots"):
            values = [getattr(one, name) for one in uses]
            setattr(merged, name, max(values) if name.endswith("_peak") else sum(values) / len(values))
    return merged


@dataclass
class Moved:
    """KV transfers: count, bytes, and seconds from the moment that each could begin to its end."""

    count: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0


@dataclass(eq=False)
class Flow:
    """One request under way. ``whole``: the client's request (D's part, or an aggregated server's).
    ``index``: position in the order of sending; ``load_index``: in the load."""

    index: int
    record: RequestRecord
    whole: EngineRequest
    last: StepEngine
    load_index: int
    part: EngineRequest | None = None
    first: StepEngine | None = None
    times: list[float] = field(default_factory=list)
    settled: bool = False
    in_first: bool = False
    in_last: bool = False
    prefilled: bool = False
    kv_requested: bool = False
    moving: bool = False


class Role:
    """The engines of one role, and what they have counted."""

    def __init__(self, engines: list[StepEngine]) -> None:
        self.engines = engines
        self.requests = self.prompt_tokens = self.generated = self.cached = self.external = 0
        self.queue_s = self.prefill_s = 0.0
        self.done = 0
        self.gaps = 0
        self.gap_s = 0.0

    def engine_for(self, index: int, session: int | None) -> StepEngine:
        """Return the engine that takes a request: by its session, or (None) in turn by its index."""
        count = len(self.engines)
        return self.engines[index % count if session is None else server_of_session(str(session), count)]

    def first_token(self, request: EngineRequest) -> None:
        self.prompt_tokens += request.prompt_len
        self.cached += request.cached_tokens
        self.external += request.external_tokens

    def finished(self, request: EngineRequest, times: Sequence[float]) -> None:
        scheduled = request.first_scheduled_s or 0.0
        self.done += 1
        self.queue_s += max(0.0, scheduled - request.arrival_s)
        self.prefill_s += times[0] - scheduled
        self.gaps += len(times) - 1
        self.gap_s += times[-1] - times[0]

    def phases(self) -> Phases:
        if not self.done:
            return Phases()
        gap = self.gap_s / self.gaps if self.gaps else None
        return Phases(self.queue_s / self.done, self.prefill_s / self.done, gap)

    def figures(self, moved: Moved | None) -> EngineFigures:
        """Return the figures of the engines' counters. ``moved``: KV transfers, None without P/D."""
        stats = [engine.scheduler.stats for engine in self.engines]
        return EngineFigures(
            prompt_tokens=self.prompt_tokens,
            prefix_queries=sum(stat.prefix_queries for stat in stats),
            prefix_hits=sum(stat.prefix_hits for stat in stats),
            prompt_tokens_by_source={
                LOCAL_COMPUTE: self.prompt_tokens - self.cached - self.external,
                LOCAL_CACHE_HIT: self.cached,
                EXTERNAL: self.external,
            },
            requests=self.requests,
            preemptions=sum(stat.preemptions for stat in stats),
            kv_transfers=None if moved is None else float(moved.count),
            kv_bytes=None if moved is None else moved.nbytes,
            kv_failures=None if moved is None else 0.0,
            kv_expired=None if moved is None else 0.0,
            kv_seconds=None if moved is None else moved.seconds,
            block_tokens=self.engines[0].config.block_tokens,
            step_lag_s=0.0,
            steps=sum(engine.steps for engine in self.engines),
            step_lag_p99_s=0.0,
            busy_s=sum(engine.busy_s for engine in self.engines),
            generation_tokens=self.generated,
            slots=self.engines[0].config.max_num_seqs,
            instances=len(self.engines),
        )
