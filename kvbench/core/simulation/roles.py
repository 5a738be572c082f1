"""What a simulation keeps of one request on its way, of the engines of one role, and of the KV transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.core.gates.evidence_figures import EXTERNAL, LOCAL_CACHE_HIT, LOCAL_COMPUTE, EngineFigures
from kvbench.core.metrics.ttft_breakdown import Phases
from kvbench.core.plan.dispatch import server_of_session
from kvbench.core.records import RequestRecord
from kvbench.core.simulation.engine import StepEngine
from kvbench.core.simulation.step import EngineRequest


@dataclass
class Moved:
    """KV transfers: how many, their bytes, and the seconds from when each could have begun to its end."""

    count: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0


@dataclass(eq=False)
class Flow:
    """One request on its way. ``whole`` is what the client asked for: D's part, or an aggregated server's.

    ``index``: which one it is in the order of sending; ``place``: in the load.
    """

    index: int
    record: RequestRecord
    whole: EngineRequest
    last: StepEngine
    place: int
    part: EngineRequest | None = None
    first: StepEngine | None = None
    times: list[float] = field(default_factory=list)
    settled: bool = False
    in_first: bool = False
    in_last: bool = False
    prefilled: bool = False
    asked: bool = False
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
        """What the engines' counters would show. ``moved``: the KV transfers; None without P/D."""
        stats = [engine.scheduler.stats for engine in self.engines]
        return EngineFigures(
            prompt_tokens=self.prompt_tokens,
            prefix_queries=sum(each.prefix_queries for each in stats),
            prefix_hits=sum(each.prefix_hits for each in stats),
            prompt_tokens_by_source={
                LOCAL_COMPUTE: self.prompt_tokens - self.cached - self.external,
                LOCAL_CACHE_HIT: self.cached,
                EXTERNAL: self.external,
            },
            requests=self.requests,
            preemptions=sum(each.preemptions for each in stats),
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
