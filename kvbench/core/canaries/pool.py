"""Prompts whose right answers are known, and who said so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.metrics.output_noise import Noise, noise_of
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import Outputs

COMPARED_TOKENS: Final = 256
"""Of longer answers so many are compared: they are asked for twice, and what KV is wrong shows early."""
TELLING_CHARS: Final = 12
"""Shorter answers may be equal by chance, and name nobody."""
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""What half of a character reads as, at the end of a text that was cut between two tokens."""

Proof = Literal["reference", "own"]
"""Who gave the answers that are right: an aggregated server, or, the weaker proof, the same one when idle."""


@dataclass(frozen=True)
class CanaryPool:
    """``answers``: greedy ones to the first of ``size`` prompts of one length, in their order.

    ``label``: the deployment that gave them. ``under_load``: how its own answers under load differed from
    them, as far as that was looked at.
    """

    label: str
    input_len: int
    output_len: int
    seed: int
    size: int
    vocab_size: int
    answers: Outputs
    proof: Proof = "reference"
    under_load: Noise = field(default_factory=Noise)

    @property
    def compared_len(self) -> int:
        """Tokens of an answer that are compared."""
        return min(COMPARED_TOKENS, self.output_len)

    @property
    def whole(self) -> bool:
        """Answers are compared to their end."""
        return self.compared_len == self.output_len

    @property
    def prompts(self) -> NDArray[np.int32]:
        """Token ids, shape (size, input_len)."""
        return canary_prompts(self.size, self.input_len, self.vocab_size, self.seed)

    def right(self, number: int) -> str:
        """What every right answer to a prompt begins with."""
        text = self.answers.texts[number]
        return text if self.whole else text.rstrip(_UNFINISHED)

    @property
    def noise(self) -> Noise:
        """How the server that gave the answers differs from itself: asked again, and under load."""
        return joined(noise_of(self.answers), self.under_load)

    def telling(self) -> dict[str, int]:
        """Right answer → its prompt's number, of those that no other prompt has and chance does not give."""
        rights = [self.right(number) for number in range(len(self.answers.texts))]
        alike = Counter(rights)
        return {
            text: number
            for number, text in enumerate(rights)
            if alike[text] == 1 and len(text) >= TELLING_CHARS
        }


def canary_seed(seed: int, input_len: int, output_len: int) -> int:
    """Of the prompts of one cell's lengths: the same for every connector of a run."""
    return trial_seed(seed, f"canaries-{input_len}-{output_len}", 0)


def canary_prompts(size: int, input_len: int, vocab_size: int, seed: int) -> NDArray[np.int32]:
    """Token ids, shape (size, input_len). Raises InputError as ``token_prompts`` does."""
    return token_prompts(size, PromptShape(input_len, vocab_size), seed)


def joined(one: Noise, other: Noise) -> Noise:
    """Both together: answers add up, and of the changes of gaps the greater one counts."""
    nats = [each.nats for each in (one, other) if each.nats is not None]
    return Noise(
        one.asked + other.asked,
        one.differed + other.differed,
        max(nats) if nats else None,
        one.close if one.close is not None else other.close,
    )
