"""The simulate section of a scenario file: figures for virtual time. Durations are milliseconds."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
)

from kvbench.core.scenario.base import (
    Section,
)


class KvLink(Section):
    """How fast one connector moves KV between two instances."""

    kv_gb_per_s: float | None = Field(None, gt=0, le=1e6, description="10⁹ KV bytes per second of one link")
    kv_latency_ms: float | None = Field(None, ge=0, le=1e6, description="what each transfer takes besides")


class Simulate(KvLink):
    """Figures for ``kvbench simulate``; what is not given is a measured default, or comes from ``--like``."""

    timing: str = Field(
        "",
        max_length=4096,
        description="timing profile, or a file of one; by default the engine's or model's",
    )
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
