"""The load generator's spec."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import InputError


@dataclass(frozen=True)
class LatencyLimits:
    """Limits in milliseconds; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class LoadSpec:
    """One trial's load. Lengths in tokens; ``timeout_s`` counts from a request's scheduled send.

    ``stop_grace_s``: how long a stopped trial lets its requests in flight go on before it cancels them.
    """

    base_url: str
    model: str
    request_rate: float
    num_requests: int
    seed: int
    input_len: int
    output_len: int
    vocab_size: int
    records_path: str
    path: str = "/v1/completions"
    burstiness: float = 1.0
    timeout_s: float = 30.0
    stop_grace_s: float = 0.0
    shared_prefix_len: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    api_key_env: str = ""
    """The environment variable whose value goes into each request's Authorization header."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, Any] = field(default_factory=dict)
    progress_interval_s: float = 0.25
    wait_for_go: bool = False
    worker: int = 0
    workers: int = 1
    """This process sends the plan's requests number ``worker``, ``worker + workers``, and so on."""
    requests_path: str = ""
    """A file of requests (JSON lines) that takes the place of request_rate, num_requests and the lengths."""
    offsets_s: list[float] = field(default_factory=list)
    """The planned sends in seconds, ascending, where they are not those of a rate."""
    direct: Any = None
    """An object: connector, prefill and decode servers, between which the generator itself dispatches."""

    def limits(self) -> LatencyLimits:
        """The SLO of the progress lines. Raises InputError."""
        unknown = set(self.slo) - {"ttft_ms", "tpot_ms"}
        if unknown:
            raise InputError(f"the spec: unknown key 'slo.{min(unknown)}'")
        for key, value in self.slo.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise InputError(f"the spec: 'slo.{key}' must be a number of milliseconds")
        return LatencyLimits(**self.slo)

    def check(self) -> None:
        """Raises InputError for values that no load can be made of."""
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
        if "chat" in self.path:
            raise InputError(
                f"{self.path} takes no token ids", hint="use /v1/completions, which every such server has"
            )
        if self.offsets_s and not self._offsets_fit():
            raise InputError(f"the spec: offsets_s must be {self.num_requests} ascending times in seconds")
        if self.direct is not None and not isinstance(self.direct, dict):
            raise InputError("the spec: 'direct' must be an object, or null")
        self.limits()

    def _offsets_fit(self) -> bool:
        numbers = all(
            isinstance(each, (int, float)) and not isinstance(each, bool) and 0 <= each < math.inf
            for each in self.offsets_s
        )
        return (
            numbers and len(self.offsets_s) == self.num_requests and sorted(self.offsets_s) == self.offsets_s
        )

    def expected_streams(self, requests: int, seconds: float) -> int:
        """Connections to open beforehand for so many requests that are sent within ``seconds``.

        It is what the SLO would have under way, and half more.
        """
        limits = self.limits()
        lasting_s = ((limits.ttft_ms or 1000.0) + (limits.tpot_ms or 50.0) * self.output_len) / 1000.0
        rate = requests / seconds if seconds > 0 else math.inf
        expected = 1.5 * rate * min(lasting_s, self.timeout_s)
        return min(requests, max(64, math.ceil(min(expected, requests))))
