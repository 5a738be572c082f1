"""The engine as a model: a continuous-batching scheduler over a paged KV cache, on virtual time.

The order of work is vLLM's (its v1 scheduler): in each step the running sequences come first, then
waiting ones in order of arrival, all within a budget of tokens and of sequences; long prompts are
cut into chunks; when blocks run out, the sequence that was admitted last goes back to the front of
the queue and is computed again. For P/D, a request whose KV comes from elsewhere gets its blocks
first and waits outside the batch until they are filled (``kv_arrived``); one whose KV goes elsewhere
keeps its blocks after its end until ``release``.

Nothing here reads a clock or does I/O: a caller asks ``schedule(now)`` for a plan, lets
``timing.step_s(plan.load)`` pass, and calls ``complete(plan)``. ``kvbench.core.simulation.engine`` does that
on a counter; the emulated engine does it on the wall clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kvbench.core.simulation.kv_cache import BlockPool
from kvbench.core.simulation.step_time import StepLoad
from kvbench.errors import InputError


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"  # blocks reserved, KV on its way (vLLM: WAITING_FOR_REMOTE_KVS)
    READY = "ready"  # KV arrived, waits for a place in the batch
    RUNNING = "running"
    HELD = "held"  # ended, blocks kept for another engine
    FINISHED = "finished"


@dataclass(eq=False)
class EngineRequest:
    """One sequence. ``hashes``: of its full blocks, extended by the code that generates tokens."""

    request_id: str
    prompt_len: int
    max_tokens: int
    arrival_s: float = 0.0
    hashes: list[int] = field(default_factory=list)
    remote_kv: bool = False
    hold_kv: bool = False

    status: Status = Status.WAITING
    num_tokens: int = 0
    """Prompt and output tokens known so far."""
    num_computed: int = 0
    """Tokens with KV in ``blocks``."""
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    external_tokens: int = 0
    first_scheduled_s: float | None = None
    preemptions: int = 0
    aborted: bool = False

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.prompt_len

    @property
    def output_len(self) -> int:
        return self.num_tokens - self.prompt_len


@dataclass(slots=True)  # not frozen: each step creates hundreds, and frozen ones cost three times as much
class Chunk:
    """``count`` tokens of one request from position ``start``; ``samples`` if a token follows."""

    request: EngineRequest
    start: int
    count: int
    samples: bool

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.start > 0


@dataclass
class StepPlan:
    """Work of one step. ``loads``: requests with KV that may now be fetched into their blocks."""

    chunks: list[Chunk] = field(default_factory=list)
    loads: list[EngineRequest] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)

    @property
    def load(self) -> StepLoad:
        prefill: list[tuple[int, int]] = []
        decode_seqs = decode_context = 0
        for chunk in self.chunks:
            if chunk.is_decode:
                decode_seqs += 1
                decode_context += chunk.start
            else:
                prefill.append((chunk.count, chunk.start))
        return StepLoad(prefill, decode_seqs, decode_context)


@dataclass(frozen=True)
class EngineConfig:
    block_tokens: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32_768
    enable_prefix_caching: bool = True


@dataclass
class SchedulerStats:
    """Counters in tokens, as vLLM counts them: once per request, not again after a preemption."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    preemptions: int = 0


class Scheduler:
    """Continuous batching over a block pool. One step at a time: ``schedule``, then ``complete``."""

    def __init__(self, config: EngineConfig, pool: BlockPool | None = None) -> None:
        """``pool``: replaces a new pool of the config's size, which takes time to create."""
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.enable_prefix_caching) if pool is None else pool
        self.stats = SchedulerStats()
        self.waiting: deque[EngineRequest] = deque()
        self.ready: deque[EngineRequest] = deque()
        self.loading: dict[str, EngineRequest] = {}
        self.held: dict[str, EngineRequest] = {}
        self.running: list[EngineRequest] = []
        self._aborted: list[EngineRequest] = []
        self._in_step = False

    # -- what happens to requests ---------------------------------------------------------------

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise InputError for a request that this engine can never serve."""
        config = self.config
        total = prompt_len + max_tokens
        if total > config.max_model_len:
            raise InputError(
                f"this engine's maximum context length is {config.max_model_len} tokens, but {prompt_len} "
                f"prompt tokens and {max_tokens} output tokens were requested",
                hint="shorten the prompt, lower max_tokens, or raise max_model_len",
            )
        needed = self._blocks(total - 1)
        if needed > config.num_blocks:
            raise InputError(
                f"the request needs {needed} KV blocks and this engine has {config.num_blocks}",
                hint="shorten it or raise num_blocks",
            )

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises InputError if it can never fit."""
        if request.prompt_len < 1 or request.max_tokens < 1:
            raise InputError("a request needs at least one prompt token and one output token")
        self.check_fits(request.prompt_len, request.max_tokens)
        self.waiting.append(request)

    def kv_arrived(self, request: EngineRequest) -> None:
        """Move a loading request to the batch: its KV has arrived, only its last token is left to compute."""
        del self.loading[request.request_id]
        if request.aborted:
            self._end(request)
            return
        request.num_computed = request.prompt_len - 1
        self.register(request, 0, request.prompt_len)
        request.status = Status.READY
        self.ready.append(request)

    def kv_failed(self, request: EngineRequest) -> None:
        """End a loading request whose KV failed, and free its blocks."""
        del self.loading[request.request_id]
        self._end(request)

    def finish(self, request: EngineRequest) -> None:
        """End a running request; its blocks are freed, or held for a hand-off."""
        self.running.remove(request)
        if request.hold_kv and not request.aborted:
            request.status = Status.HELD
            self.held[request.request_id] = request
        else:
            self._end(request)

    def release(self, request: EngineRequest) -> None:
        """Free the blocks of a held request."""
        del self.held[request.request_id]
        self._end(request)

    def abort(self, request: EngineRequest) -> None:
        """Drop a request wherever it is. One that loads keeps its blocks until its transfer has ended
        (``kv_arrived`` or ``kv_failed``), one inside a step until ``complete``."""
        if request.aborted:
            return
        request.aborted = True
        if request.status is Status.WAITING:
            self.waiting.remove(request)
            self._end(request)
        elif request.status is Status.READY:
            self.ready.remove(request)
            self._end(request)
        elif request.status is Status.HELD:
            self.release(request)
        elif request.status is Status.RUNNING and self._in_step:
            self._aborted.append(request)
        elif request.status is Status.RUNNING:
            self.finish(request)

    def next_ready_s(self) -> float | None:
        """When the head of the queue arrives, or arrived; None if nothing waits."""
        return self.waiting[0].arrival_s if self.waiting else None

    @property
    def unfinished(self) -> int:
        """Requests that still have tokens to generate."""
        return len(self.waiting) + len(self.ready) + len(self.loading) + len(self.running)

    # -- steps ------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the step that starts at ``now``; requests that arrive later are left alone."""
        assert not self._in_step, "complete() must follow schedule()"
        plan = StepPlan()
        budget = self._schedule_running(plan, self.config.max_num_batched_tokens)
        if not plan.preempted:
            self._admit(plan, budget, now)
        self._in_step = bool(plan.chunks)
        return plan

    def complete(self, plan: StepPlan) -> list[EngineRequest]:
        """Complete a step and return the requests that generated a token."""
        self._in_step = False
        for request in self._aborted:
            self.finish(request)
        self._aborted.clear()
        sampled: list[EngineRequest] = []
        for chunk in plan.chunks:
            request = chunk.request
            if request.aborted:
                continue
            request.num_computed = chunk.start + chunk.count
            self.register(request, chunk.start, request.num_computed)
            if chunk.samples:
                request.num_tokens += 1
                sampled.append(request)
        return sampled

    def withdraw(self) -> None:
        """Cancel the planned step; its sequences stay as they are."""
        self._in_step = False

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed, budget)
            if not self._grow(request, count, plan):
                break  # it had to preempt itself: nothing behind it is left
            plan.chunks.append(self._chunk(request, count))
            budget -= count
            index += 1
        return budget

    def _grow(self, request: EngineRequest, count: int, plan: StepPlan) -> bool:
        """Give a running request the blocks for ``count`` more tokens, preempting from the back."""
        fresh = self._blocks(request.num_computed + count) - len(request.blocks)
        if fresh <= 0:
            return True
        while not self.pool.can_take((), fresh):
            victim = self.running.pop()
            self._preempt(victim, plan)
            if victim is request:
                return False
        request.blocks += self.pool.take((), fresh)
        return True

    def _preempt(self, victim: EngineRequest, plan: StepPlan) -> None:
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.num_computed = 0
        victim.remote_kv = False  # the other engine's KV is gone; it is computed here now
        victim.preemptions += 1
        victim.status = Status.WAITING
        self.stats.preemptions += 1
        self.waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _admit(self, plan: StepPlan, budget: int, now: float) -> None:
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            if self.ready:
                request = self.ready.popleft()
                self._start(request, 1, plan, now)
                budget -= 1
            elif self.waiting and self.waiting[0].arrival_s <= now:
                request = self.waiting[0]
                if not self._reserve(request):
                    break  # first come, first served: nothing overtakes it
                self.waiting.popleft()
                if request.remote_kv:
                    request.status = Status.LOADING
                    request.first_scheduled_s = now
                    self.loading[request.request_id] = request
                    plan.loads.append(request)
                else:
                    count = min(request.num_tokens - request.num_computed, budget)
                    self._start(request, count, plan, now)
                    budget -= count
            else:
                break

    def _reserve(self, request: EngineRequest) -> bool:
        """Reserve blocks for all its tokens, cached ones first; at least one token is left to compute."""
        block_tokens = self.config.block_tokens
        cached = self.pool.lookup(request.hashes, (request.num_tokens - 1) // block_tokens)
        fresh = self._blocks(request.num_tokens) - len(cached)
        if not self.pool.can_take(cached, fresh):
            return False
        request.blocks = self.pool.take(cached, fresh)
        request.num_computed = len(cached) * block_tokens
        if request.first_scheduled_s is None:
            request.cached_tokens = request.num_computed
            self._count_prefix(request)
        return True

    def _count_prefix(self, request: EngineRequest) -> None:
        stats = self.stats
        if self.config.enable_prefix_caching:
            stats.prefix_queries += request.num_tokens
            stats.prefix_hits += request.cached_tokens
        if request.remote_kv:
            request.external_tokens = request.num_tokens - request.cached_tokens
            stats.external_queries += request.external_tokens
            stats.external_hits += request.external_tokens

    def _start(self, request: EngineRequest, count: int, plan: StepPlan, now: float) -> None:
        request.status = Status.RUNNING
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
        self.running.append(request)
        plan.chunks.append(self._chunk(request, count))

    def _chunk(self, request: EngineRequest, count: int) -> Chunk:
        start = request.num_computed
        return Chunk(request, start, count, samples=start + count == request.num_tokens)

    def register(self, request: EngineRequest, start: int, end: int) -> None:
        """Make the whole blocks of these tokens available to the prefix cache, if their hashes are known."""
        block_tokens = self.config.block_tokens
        full = min(end // block_tokens, len(request.hashes))
        for index in range(start // block_tokens, full):
            self.pool.register(request.blocks[index], request.hashes[index])

    def _end(self, request: EngineRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.status = Status.FINISHED

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)
