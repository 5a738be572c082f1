"""The load generator's spec."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvbench.core.access import ServerAccess
from kvbench.core.load.dispatch import CHATS, COMPLETIONS
from kvbench.core.load.prompts import ChatLength
from kvbench.errors import InputError
from kvbench.processes.common.entry import parse_spec


@dataclass(frozen=True)
class LatencyLimits:
    """Limits in milliseconds; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class LoadSpec:
    """One trial's load. Lengths in tokens; ``timeout_s`` counts from a request's scheduled send.
    ``stop_grace_s``: time for active requests of a stopped trial before they are cancelled."""

    base_url: str
    model: str
    request_rate: float
    num_requests: int
    seed: int
    input_len: int
    output_len: int
    vocab_size: int
    records_path: str
    path: str = COMPLETIONS
    burstiness: float = 1.0
    timeout_s: float = 30.0
    stop_grace_s: float = 0.0
    shared_prefix_len: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """``${NAME}`` in a value is that environment variable's."""
    api_key_env: str = ""
    """Environment variable whose value goes into each request's Authorization header."""
    ca_file: str = ""
    insecure: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, Any] = field(default_factory=dict)
    progress_interval_s: float = 0.25
    wait_for_go: bool = False
    worker: int = 0
    workers: int = 1
    """This process sends the plan's requests number ``worker``, ``worker + workers``, and so on."""
    requests_path: str = ""
    """File of requests (JSON lines) that replaces request_rate, num_requests and the lengths."""
    sessions_path: str = ""
    """File of a session load (npz of ``core/sessions/session_load.py``) that replaces rate and lengths."""
    offsets_s: list[float] = field(default_factory=list)
    """Planned sends in seconds, ascending, if not derived from a rate."""
    concurrency: int = 0
    """Number of active requests in a closed loop; 0 means planned times."""
    duration_s: float = 0.0
    chat_overhead_tokens: float = 0.0
    chat_tokens_per_word: float = 1.0
    """Chat: prompt tokens per word of the message."""
    canaries: Any = None
    """An object: the requests with known answers (``CanarySpec``)."""
    direct: Any = None
    """An object: connector, prefill and decode servers, for dispatch by the generator."""

    @property
    def access(self) -> ServerAccess:
        return ServerAccess(self.api_key_env, self.headers, self.ca_file, self.insecure)

    @property
    def chat(self) -> ChatLength | None:
        """Return a message's length; None: prompts are token ids."""
        if self.path != CHATS:
            return None
        return ChatLength(self.chat_overhead_tokens, self.chat_tokens_per_word)

    def limits(self) -> LatencyLimits:
        """Return the SLO of the progress lines. Raises InputError."""
        if unknown := set(self.slo) - {"ttft_ms", "tpot_ms"}:
            raise InputError(f"the spec: unknown key 'slo.{min(unknown)}'")
        for key, value in self.slo.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise InputError(f"the spec: 'slo.{key}' must be a number of milliseconds")
        return LatencyLimits(**self.slo)

    def check(self) -> None:
        if self.output_len < 1:
            raise InputError(f"output_len must be at least 1, it is {self.output_len}")
        if not self.timeout_s > 0 or math.isinf(self.timeout_s):
            raise InputError(f"timeout_s must be above 0 and finite, it is {self.timeout_s}")
        if self.seed < 0:
            raise InputError(f"seed must not be negative, it is {self.seed}")
        if not self.progress_interval_s > 0:
            raise InputError(f"progress_interval_s must be above 0, it is {self.progress_interval_s}")
        if not 0 <= self.worker < self.workers:
            raise InputError(f"worker must be 0 to {self.workers - 1}, it is {self.worker}")
        if self.concurrency and self.concurrency < self.workers:
            raise InputError(f"concurrency {self.concurrency} is less than the {self.workers} workers")
        if self.offsets_s and not self._offsets_fit():
            raise InputError(f"the spec: offsets_s must be {self.num_requests} ascending times in seconds")
        if self.sessions_path and (self.workers > 1 or self.concurrency or self.path != COMPLETIONS):
            raise InputError("the spec: sessions are sent by one worker, open loop, as completions")
        if self.direct is not None and not isinstance(self.direct, dict):
            raise InputError("the spec: 'direct' must be an object, or null")
        if not self.chat_tokens_per_word > 0:
            raise InputError(f"chat_tokens_per_word must be above 0, it is {self.chat_tokens_per_word}")
        self.limits()

    @property
    def slots(self) -> int:
        """This worker's share of ``concurrency``; 0 without a closed loop."""
        return self.concurrency // self.workers + (self.worker < self.concurrency % self.workers)

    def _offsets_fit(self) -> bool:
        numbers = all(
            isinstance(offset, (int, float)) and not isinstance(offset, bool) and 0 <= offset < math.inf
            for offset in self.offsets_s
        )
        return (
            numbers and len(self.offsets_s) == self.num_requests and sorted(self.offsets_s) == self.offsets_s
        )

    def expected_streams(self, requests: int, seconds: float) -> int:
        """Return the number of connections to open: 1.5 times the concurrency at the SLO."""
        if self.concurrency:
            return min(requests, self.slots)
        limits = self.limits()
        lasting_s = ((limits.ttft_ms or 1000.0) + (limits.tpot_ms or 50.0) * self.output_len) / 1000.0
        rate = requests / seconds if seconds > 0 else math.inf
        expected = 1.5 * rate * min(lasting_s, self.timeout_s)
        return min(requests, max(64, math.ceil(min(expected, requests))))


@dataclass(frozen=True)
class CanarySpec:
    """``at``: pairs of an index in the plan and a prompt's number. ``spares``: numbers of prompts of the
    plan's lengths, for use after a failure."""

    seed: int
    at: list[list[int]]
    spares: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, data: Any) -> CanarySpec:
        """Parse the spec's object; empty without one. Raises InputError."""
        if data is None:
            return cls(0, [])
        spec = parse_spec(cls, data, "the spec's canaries")
        pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in spec.at)
        numbers = [number for pair in spec.at for number in pair] if pairs else [-1]
        if not all(type(number) is int and number >= 0 for number in [*numbers, *spec.spares]):
            raise InputError("the spec's canaries: `at` has pairs of whole numbers, `spares` whole numbers")
        return spec
