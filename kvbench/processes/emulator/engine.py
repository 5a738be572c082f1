"""The engine's steps on the wall clock: schedule, write and read KV bytes, wait, deliver tokens.

A step ends at its start plus the modelled time, and its tokens leave at that moment. After a delay the next
step starts at the scheduled end, so the process catches up; its lateness is counted per step
(``kvbench:emulator_step_lag_seconds``). ``Alarm`` waits to within 50 µs; asyncio's timers count milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvbench.core.simulation.kv_cache import block_hashes
from kvbench.core.simulation.scheduler import EngineConfig, EngineRequest, Scheduler, Status, StepPlan
from kvbench.core.simulation.step_time import TimingProfile
from kvbench.processes.emulator.kvbytes import EOS_TOKEN, KvCompute, Work
from kvbench.processes.emulator.metrics import EngineMetrics
from kvbench.processes.emulator.running_request import LiveRequest, RequestTrace, note_step

_TFD_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME: Final = 1


class _TimerSpec(ctypes.Structure):
    """struct itimerspec: interval and first expiry, each in seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """A timerfd on the monotonic clock, for one waiter at a time."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_alarm)

    async def until(self, moment_s: float) -> None:
        """Return at ``moment_s`` of ``time.monotonic()``, or after one turn of the loop if that is past."""
        if moment_s <= time.monotonic():
            await asyncio.sleep(0)
            return
        waiter = self._waiter = self._loop.create_future()
        seconds = int(moment_s)
        spec = _TimerSpec(0, 0, seconds, int((moment_s - seconds) * 1e9) + 1)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        await waiter

    def _on_alarm(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self.ring()

    def ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


log = logging.getLogger(__name__)

# More KV bytes than this (about half a millisecond of work) go to a thread.
_INLINE_BYTES: Final = 1 << 20


@dataclass
class RunningEngine:
    """One model instance. ``submit`` and ``abort`` are called from the event loop; ``run`` is its task."""

    config: EngineConfig
    timing: TimingProfile
    time_scale: float
    compute: KvCompute
    metrics: EngineMetrics

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.active: dict[EngineRequest, LiveRequest] = {}
        self._traces: dict[EngineRequest, RequestTrace] = {}
        self.on_load: Callable[[LiveRequest], None] = _no_hand_off
        """Called when a remote request's blocks are reserved: fetch its KV, then call ``kv_arrived``."""
        self.on_prefilled: Callable[[LiveRequest], None] = _no_hand_off
        """Called when a held request has ended, before its last ``on_token``."""
        self.on_dropped: Callable[[LiveRequest], None] = lambda live: None
        """Called when a request ends before its hand-off was done."""
        self._work = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-bytes")
        self._wake = asyncio.Event()
        self._wake_s = 0.0
        self._sleeping: Alarm | None = None
        self._now = time.monotonic()
        self.metrics.gauges = self.gauges

    # -- requests -------------------------------------------------------------------------------

    def submit(self, live: LiveRequest) -> None:
        """Queue a request. Raises InputError if it can never fit."""
        now = time.monotonic()
        live.received_s = now
        request = live.request
        request.hashes = block_hashes(live.prompt_hashes, self.config.block_tokens)
        overhead = 0.0
        if not request.remote_kv:
            overhead = self.timing.overhead_s(self.time_scale, request.prompt_len)
        request.arrival_s = now + overhead
        self.scheduler.add(request)
        self.active[request] = live
        if live.trace is not None:
            self._traces[request] = live.trace
        self.wake()

    def abort(self, live: LiveRequest) -> None:
        """Drop a request after its client has gone; free its blocks once no transfer uses them."""
        if live.ended:
            return
        self._end(live, "abort")
        self.scheduler.abort(live.request)
        self.on_dropped(live)
        self.wake()

    async def kv_arrived(self, live: LiveRequest) -> None:
        """Read the arrived prompt KV of a loading request and add the request to the batch."""
        request = live.request
        await self._in_thread(lambda: self.compute.read(live, request.prompt_len))
        if live.trace is not None:
            live.trace.kv_arrived_s = time.monotonic()
        self.scheduler.kv_arrived(request)
        self.wake()

    def kv_failed(self, live: LiveRequest) -> None:
        """End a loading request: its KV will not arrive, and its blocks are no longer written."""
        self.scheduler.kv_failed(live.request)
        self.wake()

    def fail(self, live: LiveRequest, message: str) -> None:
        """End a request with an error; the caller frees its blocks."""
        if not live.ended:
            self._end(live, "error")
            live.sink.on_error(500, message)

    def release(self, live: LiveRequest) -> None:
        """Free a held request's blocks: its KV was taken, or its lease ended."""
        if live.request.status is Status.HELD:
            self.scheduler.release(live.request)
            if live.trace is not None:
                live.trace.released(live)
            self.wake()

    def wake(self) -> None:
        if not self._wake.is_set():
            self._wake_s = time.monotonic()
            self._wake.set()
            if self._sleeping is not None:
                self._sleeping.ring()

    def gauges(self) -> dict[str, float]:
        scheduler, stats = self.scheduler, self.scheduler.stats
        waiting = len(scheduler.waiting) + len(scheduler.ready) + len(scheduler.loading)
        return {
            "vllm:num_requests_running": len(scheduler.running),
            "vllm:num_requests_waiting": waiting,
            "vllm:kv_cache_usage_perc": scheduler.pool.usage,
            "vllm:prefix_cache_queries_total": stats.prefix_queries,
            "vllm:prefix_cache_hits_total": stats.prefix_hits,
            "vllm:external_prefix_cache_queries_total": stats.external_queries,
            "vllm:external_prefix_cache_hits_total": stats.external_hits,
            "vllm:num_preemptions_total": stats.preemptions,
        }

    # -- steps ------------------------------------------------------------------------------------

    async def run(self) -> None:
        alarm = Alarm()
        try:
            while True:
                plan = self.scheduler.schedule(self._now)
                for victim in plan.preempted:
                    live = self.active[victim]
                    live.state = live.digested = 0
                for request in plan.loads:
                    self.on_load(self.active[request])
                if plan.chunks:
                    await self._step(plan, alarm)
                elif not plan.preempted:
                    await self._idle(alarm)
        finally:
            alarm.close()
            self._work.shutdown(wait=False, cancel_futures=True)

    async def _step(self, plan: StepPlan, alarm: Alarm) -> None:
        duration = self.timing.step_s(plan.load, self.time_scale)
        end = self._now + duration
        runs, singles = self._split(plan)
        tokens = sum(chunk.start + chunk.count - live.digested for live, chunk in runs)
        if tokens * self.compute.pool.token_bytes > _INLINE_BYTES:
            await self._in_thread(lambda: self.compute.runs(runs))
        else:
            self.compute.runs(runs)
        self.compute.singles(singles)
        sampling = [self.active.get(chunk.request) for chunk in plan.chunks if chunk.samples]
        self.compute.draw([live for live in sampling if live is not None])
        await alarm.until(end)
        if self._traces:
            note_step(plan, self._traces, self._now, end)
        self._now = end
        self.metrics.steps += 1
        self.metrics.busy_s += duration
        self._emit(plan)
        self.metrics.step_lag.observe(max(0.0, time.monotonic() - end))

    async def _idle(self, alarm: Alarm) -> None:
        self._wake.clear()
        arrival = self.scheduler.next_ready_s()
        if arrival is not None and arrival > self._now:
            # Announced but not queued: in the front end, or received while catching up.
            self._sleeping = alarm
            await alarm.until(arrival)
            self._sleeping = None
            woken = self._wake.is_set() and self._wake_s < arrival
            self._now = max(self._now, self._wake_s) if woken else arrival
            return
        await self._wake.wait()
        self._now = max(self._now, self._wake_s)

    def _split(self, plan: StepPlan) -> tuple[list[Work], list[Work]]:
        """Split a step into chunks computed one by one and decode tokens computed together."""
        runs: list[Work] = []
        singles: list[Work] = []
        for chunk in plan.chunks:
            live = self.active[chunk.request]
            if live.digested >= chunk.start + chunk.count:
                continue  # its bytes came from another engine and have been read
            single = chunk.count == 1 and live.digested == chunk.start >= chunk.request.prompt_len
            (singles if single else runs).append((live, chunk))
        return runs, singles

    def _emit(self, plan: StepPlan) -> None:
        now = time.monotonic()
        sampled = self.scheduler.complete(plan)
        gaps: dict[float, int] = {}
        for request in sampled:
            live = self.active[request]
            token = live.drawn
            live.tokens.append(token)
            if live.first_token_s is None:
                self._first_token(live, now)
            else:
                gap = now - live.last_token_s
                gaps[gap] = gaps.get(gap, 0) + 1
            live.last_token_s = now
            reason = "stop" if token == EOS_TOKEN else None
            if reason is None and request.output_len >= request.max_tokens:
                reason = "length"
            if reason is not None:
                self.scheduler.finish(request)
                self._end(live, reason)
                if request.hold_kv:
                    self.on_prefilled(live)
            live.sink.on_token(token, reason)
        self.metrics.generation_tokens += len(sampled)
        for gap, times in gaps.items():  # sequences of one batch mostly share their gap
            self.metrics.itl.observe(gap, times)

    def _first_token(self, live: LiveRequest, now: float) -> None:
        live.first_token_s = now
        request, metrics = live.request, self.metrics
        metrics.prompt_tokens += request.prompt_len
        metrics.by_source["local_cache_hit"] += request.cached_tokens
        metrics.by_source["external_kv_transfer"] += request.external_tokens
        local = request.prompt_len - request.cached_tokens - request.external_tokens
        metrics.by_source["local_compute"] += local
        metrics.ttft.observe(now - live.received_s)

    def _end(self, live: LiveRequest, reason: str) -> None:
        live.ended = True
        del self.active[live.request]
        if live.trace is not None:
            del self._traces[live.request]
            live.trace.ended(live, reason)
        metrics, request = self.metrics, live.request
        metrics.success[reason] += 1
        if live.first_token_s is None or request.first_scheduled_s is None or reason in ("abort", "error"):
            return
        first, last, scheduled = live.first_token_s, live.last_token_s, request.first_scheduled_s
        metrics.e2e.observe(last - live.received_s)
        metrics.queue.observe(max(0.0, scheduled - live.received_s))
        metrics.prefill.observe(first - scheduled)
        metrics.decode.observe(last - first)
        metrics.inference.observe(last - scheduled)
        if len(live.tokens) > 1:
            metrics.tpot.observe((last - first) / (len(live.tokens) - 1))

    def _in_thread(self, work: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._work, work)


def _no_hand_off(live: LiveRequest) -> None:
    raise AssertionError("a request needs a hand-off and this engine has none")
