"""The sections of a scenario file that say what is sent and how, and what is simulated.

Durations are seconds and limits milliseconds, as the names' suffixes say.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvbench.core.scenario.base import Section, as_tuple, custom
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


class Workload(Section):
    """What requests look like and how they arrive."""

    input_len: Annotated[
        tuple[InputLen, ...], BeforeValidator(_one_or_more), WithJsonSchema(_INPUT_LEN_SCHEMA)
    ] = Field(min_length=1, max_length=64, description="prompt tokens; each length is a cell of its own")
    output_len: int = Field(ge=1, le=1_000_000, description="tokens that each request generates")
    burstiness: float = Field(
        1.0, gt=0, le=1000, description="gamma shape of the arrivals: 1 is Poisson, less is burstier"
    )
    request_timeout_s: float = Field(60.0, gt=0, le=86_400, description="deadline of one request")
    trace: Trace | None = Field(
        None, description="requests taken from a file instead (method trace); lengths are then its own"
    )

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output together."""
        own = max(self.input_len) + self.output_len
        return max(own, self.trace.longest) if self.trace else own


MOST_WORKERS: Final = 256
_WORKERS_SCHEMA: Final = {
    "anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": MOST_WORKERS}]
}


def _auto_or_count(raw: Any) -> Any:
    if raw == "auto" or (type(raw) is int and 1 <= raw <= MOST_WORKERS):
        return raw
    raise custom(f"must be auto, or a whole number from 1 to {MOST_WORKERS}, not {shorten(raw)}")


class Load(Section):
    """How the load is generated."""

    workers: Annotated[
        int | Literal["auto"], BeforeValidator(_auto_or_count), WithJsonSchema(_WORKERS_SCHEMA)
    ] = Field("auto", description="processes that send requests; auto: as many as the load needs")
    mode: Literal["router", "direct"] = Field(
        "router", description="requests go through the router, or the load generator asks P and D itself"
    )


class KvLink(Section):
    """How fast one connector moves KV between two instances."""

    kv_gb_per_s: float | None = Field(None, gt=0, le=1e6, description="10⁹ KV bytes per second of one link")
    kv_latency_ms: float | None = Field(None, ge=0, le=1e6, description="what each transfer takes besides")


class Simulate(KvLink):
    """Figures for ``kvbench simulate``; what is not given is a measured default, or comes from ``--like``."""

    timing: str = Field("", max_length=80, description="timing profile; by default the engine's or model's")
    time_scale: float | None = Field(None, gt=0, le=1000, description="factor on every modelled step")
    num_blocks: int | None = Field(
        None, ge=8, description="KV blocks per instance; by default the engine's, or enough for every slot"
    )
    router_ms: float | None = Field(None, ge=0, le=1e6, description="client and router, before P")
    front_end_ms: float | None = Field(None, ge=0, le=1e6, description="HTTP and tokens, in each engine")
    turn_ms: float | None = Field(None, ge=0, le=1e6, description="the router's turn from P's answer to D")
    arrival_ms: float | None = Field(
        None, ge=0, le=1e6, description="from the KV's arrival to D's scheduler knowing it"
    )
    hand_off: Literal["beside", "blocking"] = Field(
        "beside",
        description="KV moves beside the engines' steps; or only between P's, while D computes nothing, as "
        "in vLLM 0.6",
    )
    arrivals: Literal["drawn", "vllm", "vllm-0.6"] = Field(
        "drawn",
        description="what --against offers: several drawn Poisson arrivals, or the one sequence that `vllm "
        "bench serve`, or vLLM 0.6's benchmark_serving.py, sends with its default seed",
    )
    connectors: dict[str, KvLink] = Field(
        default_factory=dict, max_length=32, description="figures of single connectors, by their labels"
    )
