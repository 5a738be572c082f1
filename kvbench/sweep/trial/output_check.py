"""Before anything is timed: does the pair answer the same tokens as one aggregated server?

A transfer that loses, swaps or garbles KV blocks still answers fluently and fast. Greedy outputs are
compared on prompts that end inside a block and at its border; a cell whose outputs differ is refused, unless
they differ no more than the reference from itself (core/metrics/equal_answers.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.metrics.equal_answers import (
    SIGNIFICANCE,
    Noise,
    chance,
    departure,
    noise_of,
    refused_from,
    seen_share,
)
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import Outputs
from kvbench.deployment.single_requests import Completion
from kvbench.sweep.trial.idle import TrialClock, WallClock

PROMPTS_PER_LENGTH = 2
OUTPUT_TOKENS = 16
"""At most; never more than the workload's, which the server is known to have room for."""
BATCHES: Final = 2
"""How often a reference is asked for all prompts at once."""
OFF_BORDER = 7
"""How much shorter the second kind of prompt is, so that its last block is partly filled."""


@dataclass(frozen=True)
class Equality:
    """How many greedy outputs were compared, how many were equal, and one that was not.

    ``within_noise``: others that differ as the reference differs from itself. ``power``: in words, by what
    it was judged and what would not be seen.
    """

    checked: int
    equal: int
    example: str = ""
    within_noise: int = 0
    power: str = ""

    @property
    def passed(self) -> bool:
        return self.equal + self.within_noise == self.checked

    def to_json(self) -> dict[str, Any]:
        told = {"checked": self.checked, "equal": self.equal}
        return {**told, "within_noise": self.within_noise, "power": self.power} if self.power else told


def check_prompts(seed: int, input_len: int, vocab_size: int) -> list[list[int]]:
    """The prompts of one input length: the same for every connector of a run."""
    own_seed = trial_seed(seed, f"equality-{input_len}", 0)
    prompts = token_prompts(2 * PROMPTS_PER_LENGTH, PromptShape(input_len, vocab_size), own_seed).tolist()
    shorter = max(1, input_len - OFF_BORDER)
    return [prompt[:shorter] if index % 2 else prompt for index, prompt in enumerate(prompts)]


def greedy_outputs(
    complete: Callable[[Sequence[int], int], str],
    prompts: Sequence[Sequence[int]],
    output_len: int,
    clock: TrialClock | None = None,
) -> Outputs:
    """Ask for each prompt's greedy continuation, one after the other. ``clock``: by default the wall's."""
    clock = clock or WallClock()
    texts, times = [], []
    for prompt in prompts:
        began = clock.now()
        texts.append(complete(prompt, min(OUTPUT_TOKENS, output_len)))
        times.append(clock.now() - began)
    return Outputs(tuple(texts), sorted(times)[len(times) // 2])


class Scored(Protocol):
    """Greedy continuations of prompts that are asked for together, with their tokens where they are told."""

    def __call__(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Sequence[Completion]: ...


def reference_outputs(
    ask: Scored, prompts: Sequence[Sequence[int]], output_len: int, fresh: Callable[[], None]
) -> Outputs:
    """The greedy outputs of a server that others are compared with, and how it differs from itself.

    Alone, alone again (from its prefix cache, as D has the KV of others), and ``BATCHES`` times all together;
    ``fresh`` empties its caches before each of these.
    """
    length = min(OUTPUT_TOKENS, output_len)

    def alone() -> Outputs:
        found: list[Completion] = []
        times = []
        for prompt in prompts:
            began = time.monotonic()
            found += ask([prompt], length)
            times.append(time.monotonic() - began)
        return joined_outputs(found, sorted(times)[len(times) // 2])

    first, again = alone(), alone()
    repeats = [again]
    for _ in range(BATCHES):
        fresh()
        began = time.monotonic()
        repeats.append(joined_outputs(ask(prompts, length), time.monotonic() - began))
    return replace(first, repeats=tuple(repeats))


def joined_outputs(
    found: Sequence[Completion], latency_s: float = 0.0, repeats: Sequence[Outputs] = ()
) -> Outputs:
    """Completions as outputs. ``repeats``: of the first of the same prompts, asked again."""
    choices = tuple(each.choices for each in found) if any(each.choices for each in found) else ()
    return Outputs(tuple(each.text for each in found), latency_s, choices, tuple(repeats))


def compare(reference: Outputs, got: Outputs) -> Equality:
    """Compare outputs of the same prompts: exactly where the reference is exact, else by its own noise."""
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
    """By how much (nats) the reference preferred its own token where the other text leaves it; None if
    unknown.

    0 if the reference itself has answered so.
    """
    text = got.texts[place]
    if any(again.texts[place] == text for again in reference.repeats):
        return 0.0
    return departure(reference.choices[place], text) if reference.choices else None


def _power(checked: int, noise: Noise) -> str:
    """What the judgement rests on, and what it would not see."""
    seen = f"a fault that changes {seen_share(checked):.0%} of outputs is seen with 95 %"
    if noise.exact:
        return f"the reference is exact with itself ({noise.asked} answers), so equality is: {seen}"
    own = f"the reference differs from itself in {noise.differed} of {noise.asked} answers"
    if noise.nats is not None:
        close = f"; {noise.close:.0%} of its tokens are as close" if noise.close is not None else ""
        return (
            f"{own}, its gaps by up to {noise.nats:.2g} nats: another token is honest where it was within "
            f"{noise.allowed_nats:.2g}{close}; elsewhere {seen}"
        )
    least = refused_from(checked, noise)
    told = f"{least} of {checked} have to differ" if least else f"not even {checked} of {checked} would tell"
    return f"{own}, and tells no log-probabilities: {told} before it is more than its own noise"
