"""A request in the running engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvbench.core.simulation.kv_cache import U64
from kvbench.core.simulation.scheduler import EngineRequest, StepPlan
from kvbench.processes.common.spans import Span, SpanLog


class Sink(Protocol):
    """Receives a request's tokens. Exactly one of a last ``on_token`` and ``on_error`` ends it."""

    def on_token(self, token: int, finish_reason: str | None) -> None: ...

    def on_error(self, status: int, message: str) -> None: ...


@dataclass(eq=False)
class LiveRequest:
    """A request in the running engine: the scheduler's part, its tokens and the state of its bytes."""

    request: EngineRequest
    prompt_hashes: U64
    sink: Sink
    ignore_eos: bool = False
    min_tokens: int = 0
    remote: Any = None
    hand_off_params: dict[str, Any] | None = None
    """P's answer: its kv_transfer_params."""
    tokens: list[int] = field(default_factory=list)
    token_hashes: list[int] = field(default_factory=list)
    state: int = 0
    digested: int = 0
    """Number of tokens that have been read into ``state``."""
    drawn: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    received_s: float = 0.0
    ended: bool = False
    trace: RequestTrace | None = None
    """Set for the few requests with recorded spans."""

    def last_hash(self) -> int:
        return self.token_hashes[-1] if self.token_hashes else int(self.prompt_hashes[-1])


@dataclass
class RequestTrace:
    """Times of a traced request until its spans are written."""

    request_id: str
    """The client's id, the same in all processes."""
    log: SpanLog
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """Steps before the first token: begin, end, tokens computed."""
    kv_arrived_s: float | None = None

    def moved(self, begin_s: float, op: str, result: dict[str, Any]) -> None:
        args = {"op": op, **result}
        self.log.write(self.request_id, [Span("KV transfer", begin_s, time.monotonic(), args)])

    def released(self, live: LiveRequest) -> None:
        span = Span("blocks held for D", live.last_token_s, time.monotonic())
        self.log.write(self.request_id, [span])

    def ended(self, live: LiveRequest, reason: str) -> None:
        """Write the spans at the request's end on this engine."""
        self.log.write(self.request_id, list(request_spans(live, self, reason)))


def note_step(plan: StepPlan, traces: dict[Any, RequestTrace], begin_s: float, end_s: float) -> None:
    """Record a step for its requests without a token so far. ``traces``: by request."""
    for chunk in plan.chunks:
        trace = traces.get(chunk.request)
        if trace is not None and chunk.request.output_len == 0:
            trace.steps.append((begin_s, end_s, chunk.count))


def request_spans(live: LiveRequest, trace: RequestTrace, reason: str) -> Iterator[Span]:
    """Yield the span of the whole request, then of its parts as far as it came."""
    request = live.request
    end = live.last_token_s if reason not in ("abort", "error") else time.monotonic()
    yield Span(
        "request",
        live.received_s,
        end,
        {
            "prompt_tokens": request.prompt_len,
            "output_tokens": len(live.tokens),
            "cached_tokens": request.cached_tokens,
            "external_tokens": request.external_tokens,
            "preemptions": request.preemptions,
            "end": reason,
        },
    )
    scheduled = request.first_scheduled_s
    yield Span("queue", live.received_s, end if scheduled is None else max(scheduled, live.received_s))
    if scheduled is None:
        return
    arrived = trace.kv_arrived_s
    if arrived is not None:
        yield Span("wait for KV", scheduled, arrived)
        if trace.steps:
            yield Span("wait for a step", arrived, max(arrived, trace.steps[0][0]))
    elif request.remote_kv:
        yield Span("wait for KV", scheduled, end)
    name = "prefill step" if arrived is None else "first step"
    for begin, stop, tokens in trace.steps:
        yield Span(name, begin, stop, {"tokens": tokens})
    if live.first_token_s is not None and len(live.tokens) > 1:
        yield Span("decode", live.first_token_s, live.last_token_s, {"tokens": len(live.tokens)})
