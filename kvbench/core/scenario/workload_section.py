"""The workload, checks and load sections of a scenario file: what is sent, when, and by what.

Durations are seconds, as the names' suffixes say.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    WithJsonSchema,
)

from kvbench.core.deadlines import LONGEST_TIMEOUT_S
from kvbench.core.scenario.base import (
    Section,
    as_tuple,
    custom,
)
from kvbench.core.scenario.sessions.sessions_section import Sessions
from kvbench.core.scenario.yaml_lines import shorten


def _one_or_more(raw: Any) -> Any:
    return (raw,) if isinstance(raw, (int, float, str)) else as_tuple(raw)


InputLen = Annotated[int, Field(ge=1, le=10_000_000)]
_INPUT_LEN_SCHEMA: Final = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": 10_000_000},
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 10_000_000},
            "minItems": 1,
            "maxItems": 64,
            "uniqueItems": True,
        },
    ]
}


class Trace(Section):
    """A file of recorded requests. Its lengths and its arrivals take the place of the workload's own."""

    path: str = Field(min_length=1, max_length=4096, description="the file, from where kvbench is started")
    format: Literal["auto", "mooncake", "jsonl", "csv"] = Field(
        "auto",
        description="mooncake: JSON lines with timestamp (ms), input_length, output_length, hash_ids; "
        "jsonl, csv: timestamp or offset_s (s), input_len, output_len",
    )
    time_scale: float = Field(
        1.0, gt=0, le=1e6, description="the time between requests is multiplied by it: 0.5 is twice as fast"
    )
    max_requests: int = Field(100_000, ge=1, le=10_000_000, description="requests taken from its beginning")
    longest: int = Field(
        0, ge=0, le=20_000_000, description="tokens of its longest request; found when the file is read"
    )
    longest_output: int = Field(
        0, ge=0, le=20_000_000, description="tokens of its longest output; found when the file is read"
    )


class Workload(Section):
    """What requests look like and how they arrive."""

    input_len: Annotated[
        tuple[InputLen, ...], BeforeValidator(_one_or_more), WithJsonSchema(_INPUT_LEN_SCHEMA)
    ] = Field(min_length=1, max_length=64, description="prompt tokens; each length is a cell of its own")
    output_len: int = Field(ge=1, le=1_000_000, description="tokens that each request generates")
    burstiness: float = Field(
        1.0, gt=0, le=1000, description="gamma shape of the arrivals: 1 is Poisson, less is burstier"
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        le=LONGEST_TIMEOUT_S,
        description="deadline of one request; by default 60 s, or three times what the SLO's limits allow "
        "one request, if that is more",
    )
    trace: Trace | None = Field(
        None, description="requests taken from a file instead (method trace); lengths are then its own"
    )
    sessions: Sessions | None = Field(
        None,
        description="multi-turn sessions in place of requests (kvbench simulate); lengths are then theirs",
    )

    @property
    def longest_output(self) -> int:
        """Most tokens that one request generates."""
        own = self.trace or self.sessions
        return max(self.output_len, own.longest_output if own else 0)

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output together."""
        own, taken = max(self.input_len) + self.output_len, self.trace or self.sessions
        return max(own, taken.longest) if taken else own


MOST_WORKERS: Final = 256
_WORKERS_SCHEMA: Final = {
    "anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": MOST_WORKERS}]
}


def _auto_or_count(raw: Any) -> Any:
    if raw == "auto" or (type(raw) is int and 1 <= raw <= MOST_WORKERS):
        return raw
    raise custom(f"must be auto, or a whole number from 1 to {MOST_WORKERS}, not {shorten(raw)}")


class Checks(Section):
    """What is looked at in the load itself, beside its latencies."""

    canary_share: float = Field(
        0.02,
        ge=0,
        le=0.5,
        description="share of a trial's requests whose right answers are known beforehand; 0: none",
    )
    min_canaries: int = Field(
        10, ge=0, le=1000, description="canaries that a trial has at least in its first min_requests"
    )


class Load(Section):
    """How the load is generated."""

    workers: Annotated[
        int | Literal["auto"], BeforeValidator(_auto_or_count), WithJsonSchema(_WORKERS_SCHEMA)
    ] = Field("auto", description="processes that send requests; auto: as many as the load needs")
    endpoint: Literal["completions", "chat"] = Field(
        "completions",
        description="completions: /v1/completions with token ids of exact length; chat: /v1/chat/completions "
        "with a message of as many words as the server counts for that length",
    )
    mode: Literal["router", "direct"] = Field(
        "router", description="requests go through the router, or the load generator asks P and D itself"
    )
