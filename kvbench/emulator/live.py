"""A request as the running engine knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from kvbench.core.enginestep import Request
from kvbench.core.kvcache import U64
from kvbench.emulator.tracing import Trace


class Sink(Protocol):
    """Where a request's tokens go. Exactly one of a last ``on_token`` and ``on_error`` ends it."""

    def on_token(self, token: int, finish_reason: str | None) -> None: ...

    def on_error(self, status: int, message: str) -> None: ...


@dataclass(eq=False)
class Live:
    """A request as the running engine knows it: the scheduler's part, its tokens and its bytes' state."""

    request: Request
    prompt_hashes: U64
    sink: Sink
    ignore_eos: bool = False
    min_tokens: int = 0
    remote: Any = None
    """What the hand-off keeps about this request."""
    hand_off_params: dict[str, Any] | None = None
    """On P: the kv_transfer_params of the answer."""
    tokens: list[int] = field(default_factory=list)
    token_hashes: list[int] = field(default_factory=list)
    state: int = 0
    digested: int = 0
    """Tokens whose bytes have been read into ``state``."""
    drawn: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    received_s: float = 0.0
    ended: bool = False
    trace: Trace | None = None
    """Set for the few requests whose spans are written down."""

    def last_hash(self) -> int:
        return self.token_hashes[-1] if self.token_hashes else int(self.prompt_hashes[-1])
