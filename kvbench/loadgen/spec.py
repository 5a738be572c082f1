"""The load generator's spec, and the requests it plans, as bytes."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.core.arrivals import planned_offsets
from kvbench.core.prompts import PromptShape, token_prompts
from kvbench.errors import InputError
from kvbench.http1 import Pool


@dataclass(frozen=True)
class Slo:
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
    extra_body: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, Any] = field(default_factory=dict)
    progress_interval_s: float = 0.25
    wait_for_go: bool = False

    def limits(self) -> Slo:
        """The SLO of the progress lines. Raises InputError."""
        unknown = set(self.slo) - {"ttft_ms", "tpot_ms"}
        if unknown:
            raise InputError(f"the spec: unknown key 'slo.{min(unknown)}'")
        for key, value in self.slo.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise InputError(f"the spec: 'slo.{key}' must be a number of milliseconds")
        return Slo(**self.slo)

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
        if "chat" in self.path:
            raise InputError(
                f"{self.path} takes no token ids", hint="use /v1/completions, which every such server has"
            )
        self.limits()

    def expected_streams(self) -> int:
        """Connections to open beforehand: what the SLO would have under way, and half more."""
        limits = self.limits()
        seconds = ((limits.ttft_ms or 1000.0) + (limits.tpot_ms or 50.0) * self.output_len) / 1000.0
        if math.isinf(self.request_rate):
            return self.num_requests
        expected = math.ceil(1.5 * self.request_rate * min(seconds, self.timeout_s))
        return min(self.num_requests, max(64, expected))


@dataclass(frozen=True)
class PlannedRequest:
    """One request, ready to be written to a connection at ``offset_s`` after the trial's start."""

    request_id: str
    offset_s: float
    data: bytes


def planned_requests(spec: LoadSpec, pool: Pool) -> list[PlannedRequest]:
    """All requests of the trial in scheduled order; a pure function of the spec but for the request ids."""
    offsets = planned_offsets(spec.request_rate, spec.num_requests, spec.burstiness, spec.seed)
    shape = PromptShape(spec.input_len, spec.vocab_size, spec.shared_prefix_len)
    prompts = token_prompts(spec.num_requests, shape, spec.seed)
    digits = [str(number) for number in range(spec.vocab_size)]
    head, tail = _body_around_prompt(spec)
    run = uuid.uuid4().hex[:12]
    plan = []
    for index, (offset, prompt) in enumerate(zip(offsets.tolist(), prompts, strict=True)):
        request_id = f"kvb-{run}-{index}"
        body = head + ",".join([digits[token] for token in prompt.tolist()]).encode() + tail
        headers: Mapping[str, str] = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            **spec.headers,
            "x-request-id": request_id,
        }
        plan.append(PlannedRequest(request_id, offset, pool.request("POST", spec.path, headers, body)))
    return plan


def _body_around_prompt(spec: LoadSpec) -> tuple[bytes, bytes]:
    body = {
        "model": spec.model,
        "max_tokens": spec.output_len,
        "min_tokens": spec.output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **spec.extra_body,
    }
    body.pop("prompt", None)
    text = json.dumps(body, separators=(",", ":"))
    return f'{text[:-1]},"prompt":['.encode(), b"]}"
