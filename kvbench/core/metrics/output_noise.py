"""Greedy outputs that differ: is it the KV, or do the numbers of the server itself differ so from time to
time?

On GPUs sums depend on their order, and that on what else is in the batch: in bf16 two likeliest tokens that
are close may change places. So the reference is asked again, alone and in batches, and its own differences
are the measure: by log-probabilities where it tells them, else by how often its texts differ. A reference
that is exact with itself asks for exact equality.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvbench.core.records import Outputs, TokenChoice

MARGIN: Final = 2.0
"""A gap of two log-probabilities may change by this many times the most that was seen: a few rounds do not
show the largest change there is."""
SIGNIFICANCE: Final = 0.05


@dataclass(frozen=True)
class Noise:
    """How far a server's answers to the same prompts differ. ``asked`` answers were compared with the first
    ones, ``differed`` of them had another text. ``nats``: the most that the gap between a token and its
    rival changed; None without log-probabilities. ``close``: the share of tokens whose gap is within
    ``MARGIN`` of that.
    """

    asked: int = 0
    differed: int = 0
    nats: float | None = None
    close: float | None = None

    @property
    def exact(self) -> bool:
        """The server agrees with itself to the last digit that it tells, or was not asked again."""
        return not self.differed and not self.nats

    @property
    def allowed_nats(self) -> float:
        return MARGIN * (self.nats or 0.0)


def noise_of(reference: Outputs) -> Noise:
    """By the reference's ``repeats``."""
    asked = differed = 0
    changes: list[float] = []
    for again in reference.repeats:
        for place, text in enumerate(again.texts):
            asked += 1
            differed += text != reference.texts[place]
            if reference.choices and again.choices:
                changes += gap_changes(reference.choices[place], again.choices[place])
    if not changes:
        return Noise(asked, differed)
    nats = max(changes)
    gaps = [gap for one in reference.choices for each in one if (gap := gap_of(each)) is not None]
    close = sum(gap <= MARGIN * nats for gap in gaps) / len(gaps) if gaps else None
    return Noise(asked, differed, nats, close)


def gap_of(choice: TokenChoice) -> float | None:
    """Log-probability of the token less that of the likeliest other; None if there is no other."""
    own = choice.logprobs.get(choice.token)
    others = [value for token, value in choice.logprobs.items() if token != choice.token]
    return None if own is None or not others else own - max(others)


def gap_changes(first: Sequence[TokenChoice], again: Sequence[TokenChoice]) -> Iterator[float]:
    """By how much the gap between each token and its rival changed, as far as both have the same text before
    it.

    Where another token was chosen, that is the rival.
    """
    for one, other in zip(first, again, strict=False):
        rival = other.token if other.token != one.token else _likeliest_other(one)
        values = [each.logprobs.get(token) for each in (one, other) for token in (one.token, rival)]
        if None not in values:
            own, beside, own_again, beside_again = (value or 0.0 for value in values)
            yield abs((own - beside) - (own_again - beside_again))
        if other.token != one.token:
            return


def _likeliest_other(choice: TokenChoice) -> str:
    others = {token: value for token, value in choice.logprobs.items() if token != choice.token}
    return max(others, key=lambda token: others[token], default="")


def departure(choices: Sequence[TokenChoice], text: str) -> float | None:
    """The gap (nats) at the first token at which ``text`` leaves the chosen ones; None if that cannot be
    found.

    Of what ``text`` goes on with instead the likeliest; a token that is not among those told is less likely
    than all of them, and the gap at least that wide.
    """
    before = ""
    for each in choices:
        if text.startswith(before + each.token):
            before += each.token
            continue
        own = each.logprobs.get(each.token)
        if own is None or not text.startswith(before):
            return None
        taken = [
            value
            for token, value in each.logprobs.items()
            if token and token != each.token and text.startswith(before + token)
        ]
        return own - (max(taken) if taken else min(each.logprobs.values()))
    return None


def chance(differ: int, of: int, noise: Noise) -> float:
    """How probable it is that so many of so few differ, or more, if they do as often as the reference's own.

    Fisher's exact test, one-sided.
    """
    total, marked = of + noise.asked, differ + noise.differed
    ways = sum(
        math.comb(marked, k) * math.comb(total - marked, of - k) for k in range(differ, min(of, marked) + 1)
    )
    return ways / math.comb(total, of)


def refused_from(of: int, noise: Noise, below: float = SIGNIFICANCE) -> int | None:
    """The least number of differing texts that is no chance; None if no number is."""
    return next((n for n in range(1, of + 1) if chance(n, of, noise) < below), None)


def seen_share(of: int) -> float:
    """What share of the outputs a fault must change to be seen in ``of`` of them with 95 % probability."""
    return 1.0 - math.pow(SIGNIFICANCE, 1 / max(1, of))
