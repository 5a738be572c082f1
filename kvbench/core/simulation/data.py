"""Input and output of a simulation: links, overheads, a system, a load; ticks, an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbench.core.gates.evidence import EngineFigures
from kvbench.core.load.arrivals import Following
from kvbench.core.metrics.limit import Use
from kvbench.core.metrics.ttft_breakdown import Phases
from kvbench.core.records import RequestRecord
from kvbench.core.scenario.deployment_section import Routing
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.core.simulation.step_time import TimingProfile


@dataclass(frozen=True)
class Link:
    """A KV link of one instance: 10⁹ bytes per second, and milliseconds that each transfer takes besides."""

    gb_per_s: float = 100.0
    latency_ms: float = 0.5

    def busy_s(self, nbytes: float) -> float:
        return nbytes / (self.gb_per_s * 1e9)


@dataclass(frozen=True)
class Overheads:
    """Milliseconds that a request spends outside the model's queues and steps. ``router_ms``: client and
    router, before P. ``front_end_ms``: HTTP and tokens, in each engine that it passes. ``turn_ms``: the
    router's turn from P's answer to D. ``arrival_ms``: from the KV's arrival to D's scheduler knowing it."""

    router_ms: float = 0.0
    front_end_ms: float = 0.0
    turn_ms: float = 0.0
    arrival_ms: float = 0.0


@dataclass(frozen=True)
class System:
    """The simulated servers: ``prefill`` × P and ``decode`` × D, or ``decode`` aggregated servers if
    ``prefill`` is 0. ``block_bytes``: KV bytes of one block over all layers and ranks, as transferred."""

    timing: TimingProfile
    config: EngineConfig = field(default_factory=EngineConfig)
    decode_config: EngineConfig | None = None
    decode_timing: TimingProfile | None = None
    prefill: int = 1
    decode: int = 1
    time_scale: float = 1.0
    dispatch: Literal["sequential", "concurrent"] = "sequential"
    link: Link = field(default_factory=Link)
    overheads: Overheads = field(default_factory=Overheads)
    block_bytes: float = 0.0
    hand_off: Literal["beside", "blocking"] = "beside"
    """Whether KV moves during the engines' steps, or between P's steps and in place of D's steps."""
    routing: Routing = "session"


@dataclass(frozen=True)
class SimulatedLoad:
    """Planned sends in scheduled order. ``hashes``: of each prompt's full blocks, then its answer's, if
    blocks are shared. ``following``: requests that wait for others; their offsets and positions are ignored.
    """

    offsets_s: Sequence[float]
    input_len: Sequence[int]
    output_len: Sequence[int]
    timeout_s: float = 60.0
    hashes: Sequence[list[int]] | None = None
    following: Following | None = None

    @classmethod
    def alike(
        cls, offsets_s: Sequence[float], input_len: int, output_len: int, timeout_s: float = 60.0
    ) -> SimulatedLoad:
        """Return requests that differ only in their time."""
        n = len(offsets_s)
        return cls(offsets_s, [input_len] * n, [output_len] * n, timeout_s)


@dataclass
class Tick:
    """What is known at a moment of a trial. ``settled`` and ``first`` hold the indices that were settled, or
    got their first token, since the last tick; ``waiting`` those without one, oldest first."""

    t_s: float
    records: Sequence[RequestRecord]
    settled: Sequence[int]
    first: Sequence[int]
    waiting: Sequence[int]
    in_flight: int
    sent_before: int = 0
    """Requests sent before the last tick."""


@dataclass
class Outcome:
    """A simulated trial. ``phases``, ``figures``, ``use`` are by role: prefill and decode, or aggregated."""

    records: list[RequestRecord]
    duration_s: float
    stopped: bool
    figures: dict[str, EngineFigures] = field(default_factory=dict)
    phases: dict[str, Phases] = field(default_factory=dict)
    use: dict[str, Use] = field(default_factory=dict)
    transfers: int = 0
    transfer_s: float = 0.0
    """Sum over all transfers, from the moment they could begin to their end."""
    transfer_bytes: float = 0.0
    link_busy_share: float = 0.0
