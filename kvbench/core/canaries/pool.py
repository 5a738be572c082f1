"""Prompts whose right answers are known, who said so, and which requests of a load ask them.

They are spread over all of it, with enough in a trial that ends soon.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal, get_args

import numpy as np

from kvbench.core.load.traces import traced_prompt
from kvbench.core.metrics.equal_answers import LONG_BYTES, LONG_TOKENS, Noise, noise_of
from kvbench.core.records import Cell, Outputs

COMPARED_TOKENS: Final = 256
"""Of longer answers so many are compared: wrong KV shows early, and the reference is asked for less."""
TELLING_CHARS: Final = 12
"""Shorter answers may be equal by chance, and name nobody."""
SHARED_SHARE: Final = 0.25
"""A server does not answer by the prompt where so many of those that were asked again got a text of several
prompts and another one besides. An honest one whose texts are all shared, one in twenty of which changes, has
as many in 1 of 250 cells (binomial, 24 prompts, a third of them asked twice again)."""
LEAST_SHARED: Final = 4
"""And at least so many: of a few prompts a quarter is one or two."""
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""What half of a character reads as, at the end of a text: a stream may leave it out."""

Proof = Literal["reference", "own"]
"""Who gave the answers that are right: an aggregated server, or, the weaker proof, the same one when idle."""


@dataclass(frozen=True)
class CanaryPool:
    """``answers``: greedy ones to prompts of these ``lengths`` (tokens in, tokens out), in their order.

    ``label``: the deployment that gave them; ``cell_lengths``: those of the cells that they are for.
    ``under_load``: how that deployment's own answers under load differed from them, as far as that was
    looked at. ``places``: of a trace, the request that each has the lengths of.
    """

    label: str
    cell_lengths: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]
    seed: int
    vocab_size: int
    answers: Outputs
    proof: Proof = "reference"
    under_load: Noise = field(default_factory=Noise)
    places: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.answers.texts)

    @property
    def key(self) -> tuple[str, int, int]:
        """Deployment, input and output length."""
        return (self.label, *self.cell_lengths)

    def whole(self, number: int) -> bool:
        """Whether an answer is compared to its end."""
        return self.lengths[number][1] <= COMPARED_TOKENS

    def prompt(self, number: int) -> list[int]:
        """Token ids."""
        return canary_prompt(self.lengths[number][0], self.seed, number, self.vocab_size)

    def right(self, number: int) -> str:
        """What every right answer to a prompt begins with."""
        return self.answers.texts[number].rstrip(_UNFINISHED)

    @cached_property
    def noise(self) -> Noise:
        """How the server that gave the answers differs from itself: asked again, and under load."""
        return joined(noise_of(self.answers), self.under_load)

    @cached_property
    def crossed(self) -> tuple[tuple[int, tuple[int, ...], str], ...]:
        """(canary, whose answer it got, that text) of idle answers that are other canaries'.

        A server that answers a prompt in two ways, one of which is the answer to a single other prompt, has
        sent somebody else's answer. Noise does not make a whole text of another prompt. A long text of
        several others may be honest, as of a model that repeats itself. It is wrong where it comes to
        ``SHARED_SHARE`` of the prompts in one asking and not in the next.
        """
        texts = [
            [text, *(again.texts[number] for again in self.answers.repeats if number < len(again.texts))]
            for number, text in enumerate(self.answers.texts)
        ]
        owners: dict[str, set[int]] = {}
        for number, found in enumerate(texts):
            for text in found:
                owners.setdefault(text, set()).add(number)
        changed = [
            (number, tuple(sorted(owners[text] - {number})), text)
            for number, found in enumerate(texts)
            for text in dict.fromkeys(found)
            if len(set(found)) > 1 and len(text) >= TELLING_CHARS
        ]
        single = [
            (number, others, text)
            for number, others, text in changed
            if len(others) == 1 and texts[others[0]].count(text) >= texts[number].count(text)
        ]
        shared = [
            (number, others, text)
            for number, others, text in changed
            if len(others) > 1 and self.lengths[number][1] >= LONG_TOKENS and len(text) >= LONG_BYTES
        ]
        asked_again = sum(len(found) > 1 for found in texts)
        least = max(LEAST_SHARED, math.ceil(SHARED_SHARE * asked_again))
        enough = len({number for number, _, _ in shared}) >= least
        return (*single, *(shared if enough else ()))

    @cached_property
    def telling(self) -> Mapping[str, int]:
        """Right answer → its prompt's number, of those that no other prompt has and chance does not give."""
        rights = [self.right(number) for number in range(len(self))]
        alike = Counter(rights)
        return {
            text: number
            for number, text in enumerate(rights)
            if alike[text] == 1 and len(text) >= TELLING_CHARS
        }

    def to_json(self) -> dict[str, Any]:
        """All but the answers."""
        row: dict[str, Any] = {
            "label": self.label,
            "input_len": self.cell_lengths[0],
            "output_len": self.cell_lengths[1],
            "seed": self.seed,
            "vocab_size": self.vocab_size,
            "proof": self.proof,
        }
        if self.places:
            row |= {"places": list(self.places), "lengths": [list(each) for each in self.lengths]}
        if self.under_load.asked:
            row["under_load"] = {
                "asked": self.under_load.asked,
                "differed": self.under_load.differed,
                "nats": self.under_load.nats,
            }
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any], answers: Outputs) -> CanaryPool:
        """Raises KeyError, TypeError or ValueError for what is none."""
        cell_lengths = int(row["input_len"]), int(row["output_len"])
        places = tuple(int(each) for each in row.get("places") or ())
        lengths = [(int(one), int(other)) for one, other in row.get("lengths") or ()]
        if row["proof"] not in get_args(Proof):
            raise ValueError(f"proof is {str(row['proof'])[:40]!r}")
        if places and not len(places) == len(lengths) == len(answers.texts):
            raise ValueError("places, lengths and answers are not as many")
        known = row.get("under_load") or {}
        nats = known.get("nats")
        return cls(
            str(row["label"]),
            cell_lengths,
            tuple(lengths) or (cell_lengths,) * len(answers.texts),
            int(row["seed"]),
            int(row["vocab_size"]),
            answers,
            row["proof"],
            Noise(
                int(known.get("asked", 0)),
                int(known.get("differed", 0)),
                None if nats is None else float(nats),
            ),
            places,
        )


def canary_prompt(input_len: int, seed: int, number: int, vocab_size: int) -> list[int]:
    """Token ids of a prompt like no other."""
    return traced_prompt(input_len, None, seed, number, vocab_size)


def pool_of_cell(
    pools: Mapping[tuple[str, int, int], CanaryPool], cell: Cell, reference: str
) -> CanaryPool | None:
    """What a cell's canaries are compared with: a reference's right answers, or its deployment's own."""
    lengths = cell.input_len, cell.output_len
    known = [pools.get((label, *lengths)) for label in (reference, cell.connector)]
    of_reference = known[0] if known[0] is not None and known[0].proof == "reference" else None
    return of_reference or known[1]


def gave_answers(pool: CanaryPool, cell: Cell) -> bool:
    """Whether the cell's own deployment gave the right answers to all others."""
    return pool.proof == "reference" and pool.label == cell.connector


def joined(one: Noise, other: Noise) -> Noise:
    """Both together: answers add up, and of the changes of gaps the greater one counts."""
    nats = [each.nats for each in (one, other) if each.nats is not None]
    return Noise(
        one.asked + other.asked,
        one.differed + other.differed,
        max(nats) if nats else None,
        one.close if one.close is not None else other.close,
    )


_STREAM: Final = 7
"""Sets these random numbers apart from those of arrivals and prompts, so that none moves another."""
SPARES: Final = 8
"""Canaries that are kept for what follows a failure, beside those at their places."""
AFTER_FAILURE: Final = 2
"""So many of the next requests after a failed one are canaries, as long as there are spares."""


@dataclass(frozen=True)
class CanaryPlaces:
    """``at``: place in the load → number of its prompt in the pool, ascending. ``spares``: prompts that take
    the place of the requests after a failure.
    """

    at: dict[int, int] = field(default_factory=dict)
    spares: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.at.values(), *self.spares)


def wanted_canaries(requests: int, share: float, least: int) -> int:
    """How many of so many requests: the share, at least ``least``, at most half of them."""
    return min(max(math.ceil(share * requests), least), requests // 2) if share > 0 else 0


def canary_places(requests: int, share: float, least: int, early: int, seed: int) -> list[int]:
    """Places of canaries among 0 … ``requests`` − 1, ascending: one at random in each equal part.

    ``early``: after so many requests the trial may end. ``least`` lie before that if they find room, else in
    all of it, and later ones by the share alone. A function of its arguments.
    """
    early = min(max(1, early), requests)
    first = min(wanted_canaries(early, share, least), requests)
    rest = math.ceil(share * (requests - early)) if share > 0 else 0
    rest = max(rest, wanted_canaries(requests, share, least) - first)
    parts = [(0, early, first), (early, requests, rest)]
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed])))
    places = []
    for begin, end, count in parts:
        edges = [begin + (end - begin) * part // count for part in range(count + 1)] if count else []
        places += [int(random.integers(low, high)) for low, high in pairwise(edges) if high > low]
    return places


def placed(places: Sequence[int], numbers: Sequence[int]) -> CanaryPlaces:
    """Puts prompts at places as far as there are any; what is left over are spares.

    With too few of them every place gets its turn: they are thinned out, not cut off at the end, and there
    are spares for one failure.
    """
    few = min(AFTER_FAILURE, max(0, len(numbers) - 1) // 3)
    spares = min(SPARES, max(few, len(numbers) - len(places)))
    usable = len(numbers) - spares
    if usable < len(places):
        kept = np.linspace(0, len(places) - 1, usable).round().astype(int).tolist() if usable > 0 else []
        places = [places[each] for each in kept]
    at = dict(zip(places, numbers, strict=False))
    return CanaryPlaces(at, tuple(numbers[len(at) : len(at) + spares]))
