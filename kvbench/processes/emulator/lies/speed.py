"""Lies about prompts and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvbench.core.simulation.kv_cache import U64, BlockPool
from kvbench.core.simulation.step_time import StepLoad, TimingProfile
from kvbench.processes.emulator.lies.wrapping import Turns, role, wrap
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.emulator.server import EngineServer

CAP: Final = 2
DRIFT_PER_S: Final = 1.5
REST_S: Final = 1.0
LATE_S: Final = 0.12


def warm_cache(server: EngineServer) -> None:
    engine = server.engine
    if role(server) == "decode":  # it must still get all of its KV, or that would be another lie
        engine.scheduler.config = replace(engine.config, enable_prefix_caching=False)
        engine.scheduler.pool = BlockPool(engine.config.num_blocks, False)

    def same(original: Callable[[U64, str], U64], tokens: U64, salt: str) -> U64:
        return original(np.ones_like(tokens), salt)

    wrap(engine.compute, "hash_prompt", same)


def _faster(timing: TimingProfile, factor: float) -> TimingProfile:
    names = ("prefill_base_ms", "prefill_seq_ms", "prefill_token_ms", "prefill_attention_ms", "overhead_ms")
    return replace(timing, **{name: getattr(timing, name) * factor for name in names})


def impossible_speed(server: EngineServer) -> None:
    server.engine.timing = _faster(server.engine.timing, 1e-3)


def skip_prefill(server: EngineServer) -> None:
    if role(server) == "decode":
        return
    server.engine.timing = _faster(server.engine.timing, 0.0)

    def first_token(original: Callable[[LiveRequest, float], None], live: LiveRequest, now: float) -> None:
        live.request.external_tokens = live.request.prompt_len - live.request.cached_tokens - 1
        original(live, now)

    wrap(server.engine, "_first_token", first_token)


class _Drifting:
    """A timing profile that slows down while load lasts, and recovers when it rests."""

    def __init__(self, timing: TimingProfile) -> None:
        self._timing = timing
        self._begun = self._last = 0.0

    def step_s(self, load: StepLoad, time_scale: float = 1.0) -> float:
        now = time.monotonic()
        if now - self._last > REST_S:
            self._begun = now
        self._last = now
        return self._timing.step_s(load, time_scale) * (1 + DRIFT_PER_S * (now - self._begun))

    def overhead_s(self, time_scale: float = 1.0, tokens: int = 0) -> float:
        return self._timing.overhead_s(time_scale, tokens)


def slow_drift(server: EngineServer) -> None:
    if role(server) != "prefill":
        setattr(server.engine, "timing", _Drifting(server.engine.timing))  # noqa: B010 - it is no profile


def late_engine(server: EngineServer) -> None:
    turn = Turns(8)

    def draw(original: Callable[..., None], *arguments: Any) -> None:
        if turn():
            time.sleep(LATE_S)  # the whole process is late, as on a busy machine
        original(*arguments)

    wrap(server.engine.compute, "draw", draw)


def slot_cap(server: EngineServer) -> None:
    if role(server) != "prefill":
        server.engine.scheduler.config = replace(server.engine.config, max_num_seqs=CAP)


PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "warm_cache": warm_cache,
    "skip_prefill": skip_prefill,
    "impossible_speed": impossible_speed,
    "slot_cap": slot_cap,
    "slow_drift": slow_drift,
    "late_engine": late_engine,
}
