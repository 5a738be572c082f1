"""What the engine model passes around: a request, a chunk of one, the plan of a step. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvbench.core.simulation.step_time import StepLoad


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    LOADING = "loading"  # blocks reserved, KV on its way (vLLM: WAITING_FOR_REMOTE_KVS)
    READY = "ready"  # KV arrived, waits for a place in the batch
    RUNNING = "running"
    HELD = "held"  # ended, blocks kept for another engine
    FINISHED = "finished"


@dataclass(eq=False)
class EngineRequest:
    """One sequence. ``hashes`` are those of its full blocks; whoever makes its tokens extends them."""

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
    """Tokens whose KV lies in ``blocks``."""
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


@dataclass(slots=True)  # not frozen: hundreds are made in each step, and frozen ones cost three times as much
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
    """What one step does. ``loads`` are requests whose KV may now be fetched into their blocks."""

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
