"""Recorded sessions: turns, their lengths, times, sub-agents, and the blocks of their prompts.

A session is a sequence of turns. Each turn's prompt is the conversation so far and something new; it is sent
think time after the answer before it. Sub-agents are sessions beside it: they begin once a turn is answered,
and the turn after that waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Blocks: TypeAlias = NDArray[np.int64]
BlockScope = Literal["session", "corpus"]

ASSUMED_BLOCK_TOKENS: Final = 64
"""Of a corpus that has lengths alone: the size that recorded agentic traces have."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One request of a session.

    ``input_len`` and ``output_len`` are tokens; ``think_time_s`` is the time from the answer before (and the
    sub-agents' last) until it is sent; ``sent_s`` when it was sent, counted from the session's begin.
    ``blocks``: ids of its prompt's whole blocks.
    """

    input_len: int
    output_len: int
    think_time_s: float
    sent_s: float
    blocks: Blocks
    subagents: tuple[Session, ...] = ()
    """They begin after its answer, and the next turn waits for them."""


@dataclass(frozen=True, eq=False)
class Session:
    """One conversation. ``start_s``: when it began, counted from the corpus's, or its parent's, begin."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]
    shared_len: int = 0
    """Tokens of tools and system prompt at the beginning of its prompts, where the recording says so."""

    def requests(self) -> Iterator[tuple[float, Turn]]:
        """When each of its requests was sent, from the corpus's begin, and the request; sub-agents' too."""
        for turn in self.turns:
            yield self.start_s + turn.sent_s, turn
            for each in turn.subagents:
                for sent_s, below in each.requests():
                    yield self.start_s + sent_s, below

    def subagent_count(self) -> int:
        """Its sub-agents, and theirs."""
        return sum(1 + each.subagent_count() for turn in self.turns for each in turn.subagents)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Recorded sessions. ``scope``: whether equal block ids of two sessions are the same tokens."""

    sessions: tuple[Session, ...]
    block_tokens: int
    scope: BlockScope
    notes: tuple[str, ...] = ()
    """What somebody must know who reads its figures: sentences."""


class TimedPrompts(NamedTuple):
    """Prompts in the order in which they were sent, as nodes of one tree (``chained``)."""

    prompts: list[Blocks]
    session: list[int]
    """Of each prompt the place of its session in the corpus."""


def prompts_by_time(corpus: Corpus) -> TimedPrompts:
    """All prompts of a corpus as they were sent; sessions without a time of their own begin together."""
    found: list[tuple[float, int, Blocks]] = []
    first = 0
    for place, session in enumerate(corpus.sessions):
        sent = list(session.requests())
        blocks = [turn.blocks for _, turn in sent]
        if corpus.scope == "session":
            blocks, nodes = chained(blocks)
            blocks = [each + first for each in blocks]
            first += nodes
        found += [(sent_s, place, each) for (sent_s, _), each in zip(sent, blocks, strict=True)]
    found.sort(key=lambda each: each[0])
    prompts = [blocks for _, _, blocks in found]
    if corpus.scope == "corpus":
        prompts, _ = chained(prompts)
    return TimedPrompts(prompts, [place for _, place, _ in found])


def chained(prompts: Sequence[Blocks]) -> tuple[list[Blocks], int]:
    """The same prompts by new ids 0 … n - 1, and n: equal ids stand for equal tokens after equal beginnings.

    A prefix cache finds a block only behind the same blocks. Recorded ids mostly say so already; where one id
    follows two different ones, it becomes two.
    """
    if not prompts:
        return [], 0
    lengths = [len(each) for each in prompts]
    ends = np.cumsum(lengths)
    every = np.concatenate(prompts) if ends[-1] else np.zeros(0, np.int64)
    _, first, ids = np.unique(every, return_index=True, return_inverse=True)
    before = np.full(len(ids), -1, np.int64)
    before[1:] = ids[:-1]
    starts = ends[:-1][ends[:-1] < len(ids)]
    before[starts] = -1
    if np.array_equal(before, before[first][ids]):
        return np.split(ids.astype(np.int64), ends[:-1]), len(first)
    tree: dict[tuple[int, int], int] = {}
    renamed = []
    for prompt in prompts:
        node, path = -1, []
        for block in prompt.tolist():
            node = tree.setdefault((node, block), len(tree))
            path.append(node)
        renamed.append(np.array(path, np.int64))
    return renamed, len(tree)
