"""Compare the pair's greedy outputs with those of an aggregated server before any timing.

Lost, swapped or corrupted KV blocks still give fluent text. Prompts end inside a block and at its border. A
cell is refused if outputs differ by more than the reference's own noise (core/metrics/equal_answers.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from kvbench.core.load.arrivals import trial_seed
from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.metrics.equal_answers import (
    SIGNIFICANCE,
    Noise,
    chance,
    departure,
    detectable_fault_share,
    noise_of,
    refused_from,
)
from kvbench.core.records import Outputs
from kvbench.deployment.single_requests import Completion
from kvbench.sweep.trial.idle import TrialClock, WallClock

PROMPTS_PER_LENGTH = 2
OUTPUT_TOKENS = 16
"""Longest output; never more than the workload's, for which the server certainly has room."""
BATCHES: Final = 2
"""Number of repeats of all prompts at once for a reference."""
OFF_BORDER = 7
"""Tokens by which the second kind of prompt is shorter, for a partly filled last block."""


@dataclass(frozen=True)
class Equality:
    """Number of compared and equal greedy outputs, and one that differs. ``within_noise``: differences that
    the reference shows itself. ``power``: text about the criterion and its blind spots."""

    checked: int
    equal: int
    example: str = ""
    within_noise: int = 0
    power: str = ""

    @property
    def passed(self) -> bool:
        return self.equal + self.within_noise == self.checked

    def to_json(self) -> dict[str, Any]:
        counts = {"checked": self.checked, "equal": self.equal}
        return {**counts, "within_noise": self.within_noise, "power": self.power} if self.power else counts


def check_prompts(seed: int, input_len: int, vocab_size: int) -> list[list[int]]:
    """Prompts of one input length, equal for all connectors of a run."""
    prompt_seed = trial_seed(seed, f"equality-{input_len}", 0)
    prompts = token_prompts(2 * PROMPTS_PER_LENGTH, PromptShape(input_len, vocab_size), prompt_seed).tolist()
    shorter = max(1, input_len - OFF_BORDER)
    return [prompt[:shorter] if index % 2 else prompt for index, prompt in enumerate(prompts)]


def greedy_outputs(
    complete: Callable[[Sequence[int], int], str],
    prompts: Sequence[Sequence[int]],
    output_len: int,
    clock: TrialClock | None = None,
) -> Outputs:
    """Request each prompt's greedy continuation in turn. ``clock``: real time by default."""
    clock = clock or WallClock()
    texts, times = [], []
    for prompt in prompts:
        began = clock.now()
        texts.append(complete(prompt, min(OUTPUT_TOKENS, output_len)))
        times.append(clock.now() - began)
    return Outputs(tuple(texts), sorted(times)[len(times) // 2])


class Scored(Protocol):
    """Greedy continuations of concurrent prompts, with tokens if reported."""

    def __call__(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Sequence[Completion]: ...


def reference_outputs(
    ask: Scored, prompts: Sequence[Sequence[int]], output_len: int, fresh: Callable[[], None]
) -> Outputs:
    """Greedy reference outputs, and how the server differs from itself: alone, alone again (from its prefix
    cache, as D has received KV), and ``BATCHES`` times all at once. ``fresh`` empties the caches before
    each."""
    length = min(OUTPUT_TOKENS, output_len)

    def alone() -> Outputs:
        found: list[Completion] = []
        times = []
        for prompt in prompts:
            began = time.monotonic()
            found += ask([prompt], length)
            times.append(time.monotonic() - began)
        return join_outputs(found, sorted(times)[len(times) // 2])

    first, again = alone(), alone()
    repeats = [again]
    for _ in range(BATCHES):
        fresh()
        began = time.monotonic()
        repeats.append(join_outputs(ask(prompts, length), time.monotonic() - began))
    return replace(first, repeats=tuple(repeats))


def join_outputs(
    found: Sequence[Completion], latency_s: float = 0.0, repeats: Sequence[Outputs] = ()
) -> Outputs:
    """Join completions. ``repeats``: of the first of the same prompts."""
    choices = tuple(answer.choices for answer in found) if any(answer.choices for answer in found) else ()
    return Outputs(tuple(answer.text for answer in found), latency_s, choices, tuple(repeats))


def compare(reference: Outputs, got: Outputs) -> Equality:
    """Compare outputs of the same prompts: exactly if the reference is exact, else by its noise."""
    noise = noise_of(reference)
    pairs = list(zip(reference.texts, got.texts, strict=True))
    different = [place for place, (wanted, answered) in enumerate(pairs) if wanted != answered]
    gaps = {place: _gap(reference, got, place) for place in different}
    wrong = different
    if not noise.exact:
        wrong = [place for place in different if (gap := gaps[place]) is None or gap > noise.allowed_nats]
        unplaced = [place for place in wrong if gaps[place] is None]
        if noise.differed and chance(len(unplaced), len(pairs), noise) >= SIGNIFICANCE:
            wrong = [place for place in wrong if place not in unplaced]
    example = ""
    if wrong:
        wanted, answered = pairs[wrong[0]]
        gap = gaps[wrong[0]]
        at = f", where its first token had {gap:.2g} nats on the other" if gap is not None else ""
        example = f"aggregated answered {wanted[:60]!r}, the pair {answered[:60]!r}{at}"
    power = _power(len(pairs), noise) if reference.repeats else ""
    return Equality(len(pairs), len(pairs) - len(different), example, len(different) - len(wrong), power)


def _gap(reference: Outputs, got: Outputs, place: int) -> float | None:
    """Reference's preference in nats for its own token where texts differ, or None."""
    text = got.texts[place]
    if any(again.texts[place] == text for again in reference.repeats):
        return 0.0
    return departure(reference.choices[place], text) if reference.choices else None


def _power(checked: int, noise: Noise) -> str:
    """Describe what the judgement rests on, and what it cannot detect."""
    seen = f"a fault that changes {detectable_fault_share(checked):.0%} of outputs is seen with 95 %"
    if noise.exact:
        return f"the reference repeats exactly ({noise.compared} answers), so outputs must be equal: {seen}"
    self_noise = f"the reference differs from itself in {noise.differed} of {noise.compared} answers"
    if noise.nats is not None:
        close = f"; {noise.close:.0%} of its tokens are as close" if noise.close is not None else ""
        return (
            f"{self_noise}, with gaps up to {noise.nats:.2g} nats: another token is accepted within "
            f"{noise.allowed_nats:.2g} nats{close}; elsewhere {seen}"
        )
    least = refused_from(checked, noise)
    threshold = (
        f"{least} of {checked} outputs have to differ"
        if least
        else f"even {checked} of {checked} would not suffice"
    )
    return f"{self_noise}, and reports no log-probabilities: {threshold} to exceed its own noise"
