"""The section ``workload.sessions`` of a scenario file: multi-turn load, and where its sessions come from."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from kvbench.core.scenario.base import Section

MOST_TOKENS: Final = 10_000_000


class SessionShape(Section):
    """Sessions without a corpus: the median of each amount, and how widely they differ."""

    turns: int = Field(8, ge=2, le=10_000, description="requests of a session")
    shared_prefix_len: int = Field(
        512, ge=0, le=MOST_TOKENS, description="tokens of tools and system prompt, the same in all sessions"
    )
    first_len: int = Field(512, ge=1, le=MOST_TOKENS, description="tokens of the first prompt behind them")
    added_len: int = Field(
        128, ge=1, le=MOST_TOKENS, description="tokens that each later prompt adds, beside the answer before"
    )
    output_len: int = Field(64, ge=1, le=1_000_000, description="tokens of an answer")
    think_time_s: float = Field(2.0, ge=0, le=1e6, description="from an answer to the next turn")
    spread: float = Field(
        0.5, ge=0, le=3, description="standard deviation of the logarithm of each amount but the prefix"
    )


class Sessions(Section):
    """Sessions in place of single requests: they begin open loop, their turns follow answers."""

    source: Literal["shape", "recorded", "fitted"] = Field(
        "shape",
        description="shape: made after `shape`; recorded: those of the corpus at `path`, in random order; "
        "fitted: made after them, no two alike",
    )
    path: str = Field("", max_length=4096, description="the corpus, from where kvbench is started")
    format: Literal["auto", "agentic", "mooncake", "aiperf", "sharegpt", "lengths"] = Field(
        "auto", description="of the corpus; docs/sessions.md says what each is"
    )
    answers: Literal["own", "recorded"] = Field(
        "own",
        description="what a prompt has of the answers before it: the server's own, whose KV it may still "
        "have, or recorded ones",
    )
    think_scale: float = Field(1.0, ge=0, le=1000, description="think times are multiplied by it")
    max_think_s: float | None = Field(None, ge=0, le=1e7, description="the longest think time, then")
    length_scale: float = Field(
        1.0, gt=0, le=1000, description="lengths are multiplied by it, blocks of prompts by whole tokens"
    )
    max_turns: int | None = Field(None, ge=1, le=1_000_000, description="what comes after is left out")
    max_input_len: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="a session ends before its first prompt that is longer"
    )
    shape: SessionShape | None = Field(None, description="of source shape; its defaults where it is absent")
    longest: int = Field(
        0, ge=0, le=20_000_000, description="tokens of its longest request; found when the source is read"
    )
    longest_output: int = Field(
        0, ge=0, le=20_000_000, description="tokens of its longest answer; found when the source is read"
    )
