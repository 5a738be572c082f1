"""Canary prompts with known right answers, their source, and their positions in a load.

They are spread over the whole load, with enough of them in a trial that ends early."""

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
"""Most tokens of an answer that are compared: wrong KV shows early, and the reference costs less."""
IDENTIFYING_CHARS: Final = 12
"""Shortest answer that identifies its prompt; shorter ones may be equal by chance."""
SHARED_SHARE: Final = 0.25
"""Share of re-sent prompts with both a shared text and another one, from which a server counts as ignoring
its prompts. An honest server whose texts are all shared and vary in one of twenty reaches it in 1 of 250
cells (binomial, 24 prompts, a third sent twice again)."""
LEAST_SHARED: Final = 4
"""Least number of such prompts: a quarter of a few is one or two."""
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""Incomplete character at the end of a text: a stream may omit it."""

Proof = Literal["reference", "own"]
"""Source of the right answers: an aggregated server or, weaker, the same server when idle."""


@dataclass(frozen=True)
class CanaryPool:
    """Greedy ``answers`` to prompts with ``lengths`` (tokens in, out). ``label``: the answering deployment;
    ``cell_lengths``: the cells they are for. ``under_load``: how that deployment's answers under load
    differed. ``places``: requests of a trace with these lengths."""

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
        return (self.label, *self.cell_lengths)

    def whole(self, number: int) -> bool:
        """Return whether an answer is compared to its end."""
        return self.lengths[number][1] <= COMPARED_TOKENS

    def prompt(self, number: int) -> list[int]:
        return canary_prompt(self.lengths[number][0], self.seed, number, self.vocab_size)

    def right(self, number: int) -> str:
        return self.answers.texts[number].rstrip(_UNFINISHED)

    @cached_property
    def noise(self) -> Noise:
        """Return how the reference differs from itself, re-sent and under load."""
        return joined(noise_of(self.answers), self.under_load)

    @cached_property
    def crossed(self) -> tuple[tuple[int, tuple[int, ...], str], ...]:
        """Return (canary, owner's canaries, text) of idle answers that belong to other canaries. A text of a
        single other prompt is wrong: noise does not produce it. A text of several prompts may be honest (a
        model that repeats itself), unless it reaches SHARED_SHARE of the prompts."""
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
            if len(set(found)) > 1 and len(text) >= IDENTIFYING_CHARS
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
        repeated = sum(len(answers) > 1 for answers in texts)
        least = max(LEAST_SHARED, math.ceil(SHARED_SHARE * repeated))
        enough = len({number for number, _, _ in shared}) >= least
        return (*single, *(shared if enough else ()))

    @cached_property
    def identifying(self) -> Mapping[str, int]:
        """Map right answers that identify one prompt to its number."""
        rights = [self.right(number) for number in range(len(self))]
        alike = Counter(rights)
        return {
            text: number
            for number, text in enumerate(rights)
            if alike[text] == 1 and len(text) >= IDENTIFYING_CHARS
        }

    def to_json(self) -> dict[str, Any]:
        """Return everything except the answers."""
        row: dict[str, Any] = {
            "label": self.label,
            "input_len": self.cell_lengths[0],
            "output_len": self.cell_lengths[1],
            "seed": self.seed,
            "vocab_size": self.vocab_size,
            "proof": self.proof,
        }
        if self.places:
            row |= {"places": list(self.places), "lengths": [list(length) for length in self.lengths]}
        if self.under_load.compared:
            row["under_load"] = {
                "asked": self.under_load.compared,
                "differed": self.under_load.differed,
                "nats": self.under_load.nats,
            }
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any], answers: Outputs) -> CanaryPool:
        """Parse a row. Raises KeyError, TypeError or ValueError if it is malformed."""
        cell_lengths = int(row["input_len"]), int(row["output_len"])
        places = tuple(int(place) for place in row.get("places") or ())
        lengths = [(int(one), int(other)) for one, other in row.get("lengths") or ()]
        if row["proof"] not in get_args(Proof):
            raise ValueError(f"proof is {str(row['proof'])[:40]!r}")
        if places and not len(places) == len(lengths) == len(answers.texts):
            raise ValueError("places, lengths and answers differ in number")
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
    """Return the token ids of a unique prompt."""
    return traced_prompt(input_len, None, seed, number, vocab_size)


def pool_of_cell(
    pools: Mapping[tuple[str, int, int], CanaryPool], cell: Cell, reference: str
) -> CanaryPool | None:
    """Return a cell's pool: that of the reference, or of the cell's deployment."""
    lengths = cell.input_len, cell.output_len
    known = [pools.get((label, *lengths)) for label in (reference, cell.connector)]
    of_reference = known[0] if known[0] is not None and known[0].proof == "reference" else None
    return of_reference or known[1]


def gave_answers(pool: CanaryPool, cell: Cell) -> bool:
    """Return whether the cell's deployment gave the right answers itself."""
    return pool.proof == "reference" and pool.label == cell.connector


def joined(one: Noise, other: Noise) -> Noise:
    """Return both combined: answers add up, the larger gap change counts."""
    nats = [noise.nats for noise in (one, other) if noise.nats is not None]
    return Noise(
        one.compared + other.compared,
        one.differed + other.differed,
        max(nats) if nats else None,
        one.close if one.close is not None else other.close,
    )


_STREAM: Final = 7
"""Random stream, separate from arrivals and prompts."""
SPARES: Final = 8
"""Canaries reserved for use after a failure."""
AFTER_FAILURE: Final = 2
"""Requests after a failed one that become canaries while spares last."""


@dataclass(frozen=True)
class CanaryPlaces:
    """``at``: index in the load → prompt number. ``spares``: prompts for requests after a failure."""

    at: dict[int, int] = field(default_factory=dict)
    spares: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.at.values(), *self.spares)


def wanted_canaries(requests: int, share: float, least: int) -> int:
    """Return the number of canaries: the share, at least ``least``, at most half."""
    return min(max(math.ceil(share * requests), least), requests // 2) if share > 0 else 0


def canary_places(requests: int, share: float, least: int, early: int, seed: int) -> list[int]:
    """Return ascending indices: one random position per equal part. ``early``: requests after which the trial
    may end; ``least`` canaries come before that if possible, later ones by the share. Deterministic."""
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


def place_canaries(places: Sequence[int], numbers: Sequence[int]) -> CanaryPlaces:
    """Assign prompts to positions; left-over prompts are spares. With too few prompts, positions are thinned
    out evenly and spares for one failure remain."""
    few = min(AFTER_FAILURE, max(0, len(numbers) - 1) // 3)
    spares = min(SPARES, max(few, len(numbers) - len(places)))
    usable = len(numbers) - spares
    if usable < len(places):
        kept = np.linspace(0, len(places) - 1, usable).round().astype(int).tolist() if usable > 0 else []
        places = [places[index] for index in kept]
    at = dict(zip(places, numbers, strict=False))
    return CanaryPlaces(at, tuple(numbers[len(at) : len(at) + spares]))
