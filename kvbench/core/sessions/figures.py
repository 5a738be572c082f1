"""What a corpus asks for: turns, lengths, times, sub-agents, and what of its blocks could be reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from kvbench.core.sessions.corpus import Corpus, TimedPrompts, Turn, chained, prompts_by_time
from kvbench.core.sessions.offered_reuse import OfferedReuse, offered_reuse

QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


class Spread(NamedTuple):
    """Quantiles of a figure over sessions or requests, at ``QUANTILES``."""

    least: float
    quarter: float
    median: float
    three_quarters: float
    tenth_highest: float
    most: float


class CapacityRow(NamedTuple):
    """What a cache of a size could have found. Shares are of all blocks of the corpus."""

    tokens: int | None
    """None: unlimited."""
    alone: float
    """Each session has a cache of that size for itself."""
    together: float
    """All sessions share one, at the times that are recorded."""


@dataclass(frozen=True, eq=False)
class CorpusFigures:
    """A corpus and what is counted of it; each count is made once, when it is asked for."""

    corpus: Corpus

    @cached_property
    def turns(self) -> list[Turn]:
        """Every request, sub-agents' too, session by session."""
        return [turn for session in self.corpus.sessions for _, turn in session.requests()]

    @cached_property
    def prompts(self) -> TimedPrompts:
        """All prompts, in the order in which they were sent."""
        return prompts_by_time(self.corpus)

    @cached_property
    def together(self) -> OfferedReuse:
        """Of one cache for all sessions."""
        return offered_reuse(self.prompts.prompts)

    @cached_property
    def alone(self) -> list[OfferedReuse]:
        """Of a cache for each session by itself."""
        found = []
        for session in self.corpus.sessions:
            sent = sorted(session.requests(), key=lambda each: each[0])
            found.append(offered_reuse(chained([turn.blocks for _, turn in sent])[0]))
        return found

    def share_alone(self, blocks: int | None = None) -> float:
        """Found blocks over all blocks, each session with a cache of so many blocks."""
        every = sum(each.blocks for each in self.alone)
        return sum(each.found(blocks) for each in self.alone) / every if every else 0.0

    def capacities(self, tokens: Sequence[int]) -> list[CapacityRow]:
        """A row a capacity, the unlimited one last. A part of a block holds nothing."""
        rows = []
        for each in (*tokens, None):
            blocks = None if each is None else each // self.corpus.block_tokens
            rows.append(CapacityRow(each, self.share_alone(blocks), self.together.share(blocks)))
        return rows

    def usual_capacities(self) -> list[int]:
        """Tokens to ask for: 1, 2, 5 × 10ⁿ from a hundredth of all distinct ones to where all fit."""
        all_of_it = self.together.distinct * self.corpus.block_tokens
        steps = [step * 10**power for power in range(3, 15) for step in (1, 2, 5)]
        inside = [each for each in steps if all_of_it / 100 <= each < all_of_it]
        return inside + [each for each in steps if each >= max(1, all_of_it)][:1]

    def unseen(self) -> list[int]:
        """Of each request the prompt tokens that no earlier prompt of its session had.

        They are what a perfect cache of prompts leaves to compute; an answer is first in the next prompt.
        """
        found = []
        for session, offered in zip(self.corpus.sessions, self.alone, strict=True):
            sent = [turn for _, turn in sorted(session.requests(), key=lambda each: each[0])]
            known = offered.of_prompts(len(sent)).tolist()
            size = self.corpus.block_tokens
            found += [turn.input_len - size * blocks for turn, blocks in zip(sent, known, strict=True)]
        return found

    def spreads(self) -> dict[str, Spread]:
        """Name → spread. Lengths in tokens, times in seconds."""
        sessions = self.corpus.sessions
        shares = [each.share() for each in self.alone if each.blocks]
        columns: dict[str, Sequence[float]] = {
            "turns": [len(each.turns) for each in sessions],
            "prompt_tokens": [each.input_len for each in self.turns],
            "unseen_tokens": self.unseen(),
            "output_tokens": [each.output_len for each in self.turns],
            "think_time_s": [each.think_time_s for session in sessions for each in session.turns[1:]],
            "session_s": [each.turns[-1].sent_s for each in sessions],
            "session_reuse": shares,
        }
        return {name: spread(values) for name, values in columns.items() if len(values)}


def spread(values: Sequence[float]) -> Spread:
    """Quantiles as numpy's default interpolates them. ``values`` must not be empty."""
    return Spread(*(float(each) for each in np.quantile(np.asarray(values, float), QUANTILES)))
