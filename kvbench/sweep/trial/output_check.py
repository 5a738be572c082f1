"""Before anything is timed: does the pair answer the same tokens as one aggregated server?

A transfer that loses, swaps or garbles KV blocks still answers fluently and fast. Greedy outputs are
compared on prompts that end inside a block and at its border; a cell whose outputs differ is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import Outputs
from kvbench.sweep.trial.trial_clock import TrialClock, WallClock

PROMPTS_PER_LENGTH = 2
OUTPUT_TOKENS = 16
"""At most; never more than the workload's, which the server is known to have room for."""
OFF_BORDER = 7
"""How much shorter the second kind of prompt is, so that its last block is partly filled."""


@dataclass(frozen=True)
class Equality:
    """How many greedy outputs were compared, how many were equal, and one that was not."""

    checked: int
    equal: int
    example: str = ""

    @property
    def passed(self) -> bool:
        return self.equal == self.checked


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


def compare(reference: Outputs, got: Outputs) -> Equality:
    """Compare outputs of the same prompts."""
    pairs = list(zip(reference.texts, got.texts, strict=True))
    different = [pair for pair in pairs if pair[0] != pair[1]]
    example = ""
    if different:
        wanted, answered = different[0]
        example = f"aggregated answered {wanted[:60]!r}, the pair {answered[:60]!r}"
    return Equality(len(pairs), len(pairs) - len(different), example)
