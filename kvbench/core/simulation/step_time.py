"""Timing profiles: how long one engine step takes, from what it computes.

A step computes some prompt tokens (prefill chunks, each with the context before it) and one
token for each sequence of the decode batch. Its time is

    step = base + prefill + decode          (the larger base, where both kinds are in one step)

with a prefill cost that does not depend on how a prompt is cut into chunks (besides the base),
and a decode cost from the batch size and its contexts. ``overhead_ms`` is what a request waits
in the front end (tokenising, scheduling) before the engine sees it; it occupies no step.

Every constant names its source. A time's unit is in its name (``_ms``, ``_s``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from kvbench.errors import InputError

_H200_SMS: Final = 132  # streaming multiprocessors: one wave of attention work


@dataclass(frozen=True)
class StepLoad:
    """Work of one step. ``prefill`` holds (new tokens, context before them) per chunk."""

    prefill: Sequence[tuple[int, int]] = ()
    decode_seqs: int = 0
    decode_context: int = 0
    """Context tokens summed over the decode batch."""


@dataclass(frozen=True)
class TimingProfile:
    """Coefficients of the step-time model; see the module's docstring."""

    name: str
    source: str
    overhead_ms: float
    prefill_base_ms: float
    prefill_seq_ms: float
    prefill_token_ms: float
    prefill_attention_ms: float
    """Per squared token: a prompt of n tokens costs n² times this."""
    decode_base_ms: float
    decode_seq_ms: float
    decode_context_ms: Callable[[int, float], float]
    """(sequences, mean context) → milliseconds of attention over the whole batch."""
    overhead_token_ms: float = 0.0
    """Per prompt token, on top of ``overhead_ms``."""

    def prefill_ms(self, tokens: int, context: int) -> float:
        """Return the time of a prefill chunk after ``context`` tokens, without the base time."""
        end = context + tokens
        start_cost = self.prefill_seq_ms if context == 0 else 0.0
        attention = self.prefill_attention_ms * (end * end - context * context)
        return start_cost + self.prefill_token_ms * tokens + attention

    def decode_ms(self, seqs: int, context: int) -> float:
        """Return the decode batch's time without the step's base; ``context`` is summed over sequences."""
        if not seqs:
            return 0.0
        return self.decode_seq_ms * seqs + self.decode_context_ms(seqs, context / seqs)

    def step_s(self, load: StepLoad, time_scale: float = 1.0) -> float:
        """Return the seconds that a step takes; 0 for an empty one."""
        base = 0.0
        if load.prefill:
            base = self.prefill_base_ms
        if load.decode_seqs:
            base = max(base, self.decode_base_ms)
        total = base + sum(self.prefill_ms(tokens, context) for tokens, context in load.prefill)
        total += self.decode_ms(load.decode_seqs, load.decode_context)
        return total * time_scale / 1000.0

    def decode_step_s(self, seqs: int, context: int, time_scale: float = 1.0) -> float:
        """Return ``step_s`` of a step that only decodes, as most do, without the cost of a StepLoad."""
        base = max(0.0, self.decode_base_ms) if seqs else 0.0
        return (base + self.decode_ms(seqs, context)) * time_scale / 1000.0

    def overhead_s(self, time_scale: float = 1.0, tokens: int = 0) -> float:
        """Return the seconds from a request's arrival to the engine seeing it."""
        return (self.overhead_ms + self.overhead_token_ms * tokens) * time_scale / 1000.0


@lru_cache(maxsize=4096)
def attention_waves(seqs: int) -> float:
    """Waves of attention work that ``seqs`` sequences make on an H200, one KV head per rank. From 0.8 · 132
    sequences on the context is not split, so whole waves count; below, each sequence may be split s ways, and
    the best split is taken. The fit's form, from the seed study's tables (Qwen3-30B-A3B, TP8, fp8 KV)."""
    if seqs >= 106:
        return float(-(-seqs // _H200_SMS))
    return min(-(-seqs * split // _H200_SMS) / split for split in range(1, 129))


def _h200_context(seqs: int, mean_context: float) -> float:
    return 0.000568 * mean_context * attention_waves(seqs)


# Prefill of Qwen3-30B-A3B on 8 H200 at 40 % of 8 · 989 TFLOP/s (assumed; no honest measurement is
# public): 2 · 3.3e9 FLOP per token for the weights, 2 · q_dim (4096) · layers (48) · n² for attention.
_H200_FLOP_PER_MS: Final = 0.40 * 8 * 989e12 / 1000.0
# First-token floor of a TP8 server, 40 ms (Mooncake's vLLM P/D page fits 44.8 ms on H800): the part
# of it that is no engine step is the front end's.
_H200_FLOOR_MS: Final = 40.0
_H200_STEP_MS: Final = 8.46


def _h200() -> TimingProfile:
    return TimingProfile(
        name="h200-tp8-qwen3-30b-a3b",
        source="decode: fit to published 8xH200 TP8 fp8 results, rows within 4 %; prefill: FLOPs at 40 %",
        overhead_ms=_H200_FLOOR_MS - _H200_STEP_MS,
        prefill_base_ms=_H200_STEP_MS,
        prefill_seq_ms=0.0,
        prefill_token_ms=2 * 3.3e9 / _H200_FLOP_PER_MS,
        prefill_attention_ms=2 * 4096 * 48 / _H200_FLOP_PER_MS,
        decode_base_ms=_H200_STEP_MS,
        decode_seq_ms=0.01315,
        decode_context_ms=_h200_context,
    )


def _h200_notes() -> TimingProfile:
    """Return the same machine in a published set of notes, whose prompts come from P's cache. First tokens at
    16k and 32k take less time than the FLOPs need on eight H200, so no prefill can be fitted. 60 ms and 6 µs
    a token are an unloaded request's wait; links of 154 GB/s and D's steps are the rest."""
    return replace(
        _h200(),
        name="h200-tp8-qwen3-30b-a3b-cached",
        source="fit to notes on 8xH200 TP8, 1k to 32k prompts in bursts: TTFT of cached prompts",
        overhead_ms=60.0,
        overhead_token_ms=0.006,
        prefill_token_ms=0.0,
        prefill_attention_ms=0.0,
    )


# Qwen2.5-7B-GPTQ-Int4 on A10, fit to the 24 unsaturated rows of vLLM's PR 10884 with its own arrivals and a
# blocking hand-off (scenarios/seed-a10-*): 37 % of the 125 TFLOP/s that an A10 has in 16 bits, and
# all-reduces at 14.5 GB/s, as PCIe gives. Decode steps are the page's median ITL.
_A10_FLOP_PER_MS: Final = 46.2e12 / 1000.0
_A10_ALL_REDUCE_BYTES_PER_MS: Final = 14.5e9 / 1000.0
_A10_DECODE_MS: Final = MappingProxyType({1: 14.0, 2: 15.4, 4: 16.6})
_A10_OVERHEAD_MS: Final = 3.9
# Two all-reduces in each of 28 layers, of 3584 16-bit numbers a token.
_A10_REDUCED_BYTES: Final = 2 * 28 * 3584 * 2
# 57344 KV bytes per token over 600 GB/s of memory bandwidth (A10 data sheet).
_A10_CONTEXT_MS: Final = 9.6e-5


def _a10(tensor_parallel_size: int) -> TimingProfile:
    if tensor_parallel_size not in _A10_DECODE_MS:
        raise InputError(
            f"timing a10-qwen2.5-7b has no tensor_parallel_size {tensor_parallel_size}",
            hint="it was measured with 1, 2 and 4",
        )
    ranks = tensor_parallel_size
    reduced = _A10_REDUCED_BYTES * 2 * (ranks - 1) / ranks / _A10_ALL_REDUCE_BYTES_PER_MS
    context_ms = _A10_CONTEXT_MS / ranks

    def context(seqs: int, mean_context: float) -> float:
        return context_ms * seqs * mean_context

    return TimingProfile(
        name="a10-qwen2.5-7b",
        source="fit to vLLM PR 10884: Qwen2.5-7B-Int4 on A10, unsaturated rows within 15 %",
        overhead_ms=_A10_OVERHEAD_MS,
        prefill_base_ms=0.0,
        prefill_seq_ms=0.0,
        # 6.53e9 weights besides the embedding; attention over the causal half of n² (28 layers, width 3584).
        prefill_token_ms=2 * 6.53e9 / (_A10_FLOP_PER_MS * ranks) + reduced,
        prefill_attention_ms=2 * 28 * 3584 / (_A10_FLOP_PER_MS * ranks),
        decode_base_ms=_A10_DECODE_MS[ranks],
        decode_seq_ms=0.05,
        decode_context_ms=context,
    )


def _quick_context(seqs: int, mean_context: float) -> float:
    return 1e-5 * seqs * mean_context


def _quick() -> TimingProfile:
    return TimingProfile(
        name="quick",
        source="invented: light enough for two cores, prefill-bound at long inputs",
        overhead_ms=0.0,
        prefill_base_ms=2.0,
        prefill_seq_ms=9.0,
        prefill_token_ms=0.017,
        prefill_attention_ms=5e-7,
        decode_base_ms=4.0,
        decode_seq_ms=0.12,
        decode_context_ms=_quick_context,
    )


PROFILE_NAMES: Final = (
    "quick", "h200-tp8-qwen3-30b-a3b", "h200-tp8-qwen3-30b-a3b-cached", "a10-qwen2.5-7b",
)  # fmt: skip


def timing_profile(name: str, tensor_parallel_size: int = 1) -> TimingProfile:
    """Return a profile by name. Raises InputError for an unknown name or parallelism."""
    if name == "quick":
        return _quick()
    if name == "h200-tp8-qwen3-30b-a3b":
        return _h200()
    if name == "h200-tp8-qwen3-30b-a3b-cached":
        return _h200_notes()
    if name == "a10-qwen2.5-7b":
        return _a10(tensor_parallel_size)
    raise InputError(f"unknown timing profile {name!r}", hint=f"known: {', '.join(PROFILE_NAMES)}")
