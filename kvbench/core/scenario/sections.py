"""Sections of a scenario file except deployment and goals: workload, checks, load, model, sessions, simulate.

Durations are in seconds or milliseconds, as the names' suffixes say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from kvbench.core.physics import MODELS, KvDtype, ModelShape
from kvbench.core.scenario.base import NAME_PATTERN, Section, as_tuple, custom, error_at
from kvbench.core.scenario.checks import nearest
from kvbench.core.scenario.yaml_lines import quoted, shorten
from kvbench.core.slo import LONGEST_TIMEOUT_S

MOST_TOKENS: Final = 10_000_000


class SessionShape(Section):
    """Sessions without a corpus: the median and spread of each amount."""

    turns: int = Field(8, ge=2, le=10_000, description="requests of a session")
    shared_prefix_len: int = Field(
        512, ge=0, le=MOST_TOKENS, description="tokens of tools and system prompt, the same in all sessions"
    )
    first_len: int = Field(512, ge=1, le=MOST_TOKENS, description="further tokens of the first prompt")
    added_len: int = Field(
        128, ge=1, le=MOST_TOKENS, description="tokens that each later prompt adds to the previous output"
    )
    output_len: int = Field(64, ge=1, le=1_000_000, description="tokens of an answer")
    think_time_s: float = Field(2.0, ge=0, le=1e6, description="time from an answer to the next turn")
    spread: float = Field(
        0.5, ge=0, le=3, description="standard deviation of the logarithm of each amount except the prefix"
    )


class Sessions(Section):
    """Sessions instead of single requests: they start open loop; their turns follow responses."""

    source: Literal["shape", "recorded", "fitted"] = Field(
        "shape",
        description="shape: generated from `shape`; recorded: those of the corpus at `path`, in random "
        "order; fitted: generated from them, all different",
    )
    path: str = Field("", max_length=4096, description="path of the corpus, relative to the current folder")
    format: Literal["auto", "agentic", "mooncake", "aiperf", "sharegpt", "lengths"] = Field(
        "auto", description="format of the corpus; see docs/sessions.md"
    )
    answers: Literal["own", "recorded"] = Field(
        "own",
        description="answers in later prompts: the server's own, whose KV it may still "
        "have, or recorded ones",
    )
    think_scale: float = Field(1.0, ge=0, le=1000, description="think times are multiplied by it")
    max_think_s: float | None = Field(None, ge=0, le=1e7, description="the longest think time, then")
    length_scale: float = Field(
        1.0, gt=0, le=1000, description="lengths are multiplied by it, blocks of prompts by whole tokens"
    )
    max_turns: int | None = Field(None, ge=1, le=1_000_000, description="later turns are left out")
    max_input_len: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="a session ends before its first prompt that is longer"
    )
    shape: SessionShape | None = Field(None, description="for source shape; defaults if absent")
    longest: int = Field(
        0, ge=0, le=20_000_000, description="tokens of its longest request; found when the source is read"
    )
    longest_output: int = Field(
        0, ge=0, le=20_000_000, description="tokens of its longest answer; found when the source is read"
    )


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
    """A file of recorded requests, which replaces the workload's lengths and arrivals."""

    path: str = Field(
        min_length=1, max_length=4096, description="path of the file, relative to the current folder"
    )
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
    """Lengths and arrivals of requests."""

    input_len: Annotated[
        tuple[InputLen, ...], BeforeValidator(_one_or_more), WithJsonSchema(_INPUT_LEN_SCHEMA)
    ] = Field(min_length=1, max_length=64, description="prompt tokens; each length is a separate cell")
    output_len: int = Field(ge=1, le=1_000_000, description="tokens that each request generates")
    burstiness: float = Field(
        1.0, gt=0, le=1000, description="gamma shape of the arrivals: 1 is Poisson, less is burstier"
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        le=LONGEST_TIMEOUT_S,
        description="deadline of one request; by default 60 s, or a multiple of what the SLO's limits allow "
        "one request, if that is more: 3 for a P99, 6 for 90 %, 14 for a mean, 20 for a median",
    )
    trace: Trace | None = Field(
        None, description="requests from a file instead (method trace), which also sets the lengths"
    )
    sessions: Sessions | None = Field(
        None, description="multi-turn sessions in place of requests, which also set the lengths"
    )

    @property
    def longest_output(self) -> int:
        """Most output tokens of one request."""
        source = self.trace or self.sessions
        return max(self.output_len, source.longest_output if source else 0)

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output together."""
        tokens, taken = max(self.input_len) + self.output_len, self.trace or self.sessions
        return max(tokens, taken.longest) if taken else tokens


MOST_WORKERS: Final = 256
_WORKERS_SCHEMA: Final = {
    "anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": MOST_WORKERS}]
}


def _auto_or_count(raw: Any) -> Any:
    if raw == "auto" or (type(raw) is int and 1 <= raw <= MOST_WORKERS):
        return raw
    raise custom(f"must be auto, or a whole number from 1 to {MOST_WORKERS}, not {shorten(raw)}")


class Checks(Section):
    """Checks of a trial's outputs and prompts."""

    canary_share: float = Field(
        0.02,
        ge=0,
        le=0.5,
        description="share of a trial's requests whose right answers are known beforehand; 0: none",
    )
    min_canaries: int = Field(
        10, ge=0, le=1000, description="fewest canaries among a trial's first min_requests requests"
    )


class Load(Section):
    workers: Annotated[
        int | Literal["auto"], BeforeValidator(_auto_or_count), WithJsonSchema(_WORKERS_SCHEMA)
    ] = Field("auto", description="processes that send requests; auto: as many as the load needs")
    endpoint: Literal["completions", "chat"] = Field(
        "completions",
        description="completions: /v1/completions with token ids of exact length; chat: /v1/chat/completions "
        "with a message of as many words as the server counts for that length",
    )
    mode: Literal["router", "direct"] = Field(
        "router",
        description="requests go through the router, or the load generator sends them to P and D directly",
    )


class ModelChoice(Section):
    """The model: a preset's name, a preset with changes, or a full shape."""

    name: str = Field(pattern=NAME_PATTERN, description="the model's name in tables")
    layers: int = Field(
        0, ge=0, le=1000, description="transformer layers; 0 if unknown, which an external server allows"
    )
    kv_heads: int = Field(0, ge=0, le=1024, description="KV heads (GQA); 0 with MLA")
    head_dim: int = Field(0, ge=0, le=4096, description="width of one KV head; 0 with MLA")
    kv_dtype: KvDtype = Field("bf16", description="element type of the KV cache")
    mla_dim: int = Field(0, ge=0, le=65536, description="latent width per layer (MLA); 0 with GQA")
    vocab_size: int = Field(32_000, ge=256, le=10_000_000, description="prompts use token ids below it")
    active_parameters: float | None = Field(
        None,
        gt=0,
        le=1e14,
        description="parameters used for a prompt token, without embeddings; known for presets",
    )
    served_model_name: str = Field(
        "",
        validate_default=True,
        max_length=200,
        description="the name that requests carry; by default the model's name",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            raw = {"preset": raw}
        if not isinstance(raw, Mapping) or "preset" not in raw:
            return raw
        preset = raw["preset"]
        if not isinstance(preset, str) or preset not in MODELS:
            shown = preset if isinstance(preset, str) else json.dumps(preset)
            text = f"no model preset is called {quoted(shown)}; {nearest(str(preset), MODELS)}"
            raise error_at(("preset",), text)
        shape = {key: value for key, value in asdict(MODELS[preset]).items() if key in cls.model_fields}
        return shape | {key: value for key, value in raw.items() if key != "preset"}

    @model_validator(mode="after")
    def _has_width(self) -> ModelChoice:
        if self.layers and not self.mla_dim and not (self.kv_heads and self.head_dim):
            raise custom("needs kv_heads and head_dim (GQA), or mla_dim (MLA)")
        return self

    @field_validator("served_model_name")
    @classmethod
    def _served_or_model_name(cls, served: str, info: ValidationInfo) -> str:
        return served or str(info.data.get("name", "unnamed"))

    @property
    def shape(self) -> ModelShape:
        """Shape that the KV cache and the compute model use."""
        fields = self.model_dump(exclude={"served_model_name", "active_parameters"})
        preset = MODELS.get(self.name)
        shape = ModelShape(**fields, source=preset.source if preset else "")
        if preset is None or preset.layers != self.layers:
            return shape
        return replace(shape, sliding_layers=preset.sliding_layers, sliding_window=preset.sliding_window)


class KvLink(Section):
    """Speed of one connector's KV between two instances."""

    kv_gb_per_s: float | None = Field(None, gt=0, le=1e6, description="10⁹ KV bytes per second of one link")
    kv_latency_ms: float | None = Field(None, ge=0, le=1e6, description="what each transfer takes besides")


class Simulate(KvLink):
    """Settings of ``kvbench simulate``; a missing value is a measured default, or comes from ``--like``."""

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
        None, ge=0, le=1e6, description="time from the KV's arrival until D's scheduler knows it"
    )
    hand_off: Literal["beside", "blocking"] = Field(
        "beside",
        description="KV moves during the engines' steps; or (blocking) only between P's steps while D "
        "is idle, as in vLLM 0.6",
    )
    arrivals: Literal["drawn", "vllm", "vllm-0.6"] = Field(
        "drawn",
        description="arrivals for --against: several random Poisson sequences, or the one sequence that "
        "`vllm bench serve`, or vLLM 0.6's benchmark_serving.py, sends with its default seed",
    )
    connectors: dict[str, KvLink] = Field(
        default_factory=dict, max_length=32, description="figures of single connectors, by their labels"
    )
