"""Recorded sessions: their turns, lengths, times, sub-agents and blocks, and the reuse that they offer.

A session is a sequence of turns. Each turn's prompt is the conversation so far and something new; it is sent
think time after the answer before it. Sub-agents are concurrent sessions: they begin once a turn is answered,
and the turn after that waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Blocks: TypeAlias = NDArray[np.int64]
BlockScope = Literal["session", "corpus"]

ASSUMED_BLOCK_TOKENS: Final = 64
"""Block size for corpora with only lengths, as in recorded agentic traces."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One request of a session. ``input_len`` and ``output_len`` are tokens; ``think_time_s`` is the time
    from the answer before (and the sub-agents' last) until it is sent; ``sent_s`` when it was sent, counted
    from the session's begin. ``blocks``: ids of its prompt's whole blocks."""

    input_len: int
    output_len: int
    think_time_s: float
    sent_s: float
    blocks: Blocks
    subagents: tuple[Session, ...] = ()
    """Started after its answer; the next turn waits for them."""


@dataclass(frozen=True, eq=False)
class Session:
    """One conversation. ``start_s``: when it began, counted from the corpus's, or its parent's, begin."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]
    shared_len: int = 0
    """Tokens of tools and system prompt at the beginning of its prompts, if recorded."""

    def requests(self) -> Iterator[tuple[float, Turn]]:
        """Yield each request, sub-agents' included, with its send time from the corpus's begin."""
        for turn in self.turns:
            yield self.start_s + turn.sent_s, turn
            for subagent in turn.subagents:
                for sent_s, below in subagent.requests():
                    yield self.start_s + sent_s, below

    def subagent_count(self) -> int:
        return sum(1 + subagent.subagent_count() for turn in self.turns for subagent in turn.subagents)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Recorded sessions. ``scope``: whether equal block ids of two sessions are the same tokens."""

    sessions: tuple[Session, ...]
    block_tokens: int
    scope: BlockScope
    notes: tuple[str, ...] = ()
    """Caveats of the corpus, as sentences."""


class TimedPrompts(NamedTuple):
    """Prompts in the order in which they were sent, as nodes of one tree (``chained``)."""

    prompts: list[Blocks]
    session: list[int]
    """Index of each prompt's session in the corpus."""


def prompts_by_time(corpus: Corpus) -> TimedPrompts:
    """Return all prompts as they were sent; sessions without recorded times start together."""
    found: list[tuple[float, int, Blocks]] = []
    first = 0
    for index, session in enumerate(corpus.sessions):
        sent = list(session.requests())
        blocks = [turn.blocks for _, turn in sent]
        if corpus.scope == "session":
            blocks, nodes = chained(blocks)
            blocks = [block + first for block in blocks]
            first += nodes
        found += [(sent_s, index, block) for (sent_s, _), block in zip(sent, blocks, strict=True)]
    found.sort(key=lambda row: row[0])
    prompts = [blocks for _, _, blocks in found]
    if corpus.scope == "corpus":
        prompts, _ = chained(prompts)
    return TimedPrompts(prompts, [index for _, index, _ in found])


def chained(prompts: Sequence[Blocks]) -> tuple[list[Blocks], int]:
    """Renumber ids to 0 … n - 1 (also returned: n), so that equal ids mean equal tokens after equal prefixes.
    A prefix cache finds a block only after the same blocks; an id with two predecessors becomes two."""
    if not prompts:
        return [], 0
    lengths = [len(prompt) for prompt in prompts]
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


@dataclass(frozen=True, eq=False)
class OfferedReuse:
    """Blocks that caches could reuse, as runs of found blocks: one entry per run in each of four arrays."""

    blocks: int
    distinct: int
    """Distinct blocks: an unlimited cache's final content."""
    prompt: NDArray[np.int64]
    """Prompt of the run."""
    depth: NDArray[np.int64]
    """Stack distance of its first block, from 1; later ones are deeper by one each."""
    length: NDArray[np.int64]
    """Blocks of the run."""

    def found(self, capacity: int | None = None) -> int:
        """Return the blocks that a cache of ``capacity`` blocks finds; None: unlimited."""
        return int(self._found(capacity).sum())

    def share(self, capacity: int | None = None) -> float:
        """Return the found share of all blocks."""
        return self.found(capacity) / self.blocks if self.blocks else 0.0

    def of_prompts(self, prompts: int, capacity: int | None = None) -> NDArray[np.int64]:
        """Return the found blocks per prompt."""
        sums = np.zeros(prompts, np.int64)
        np.add.at(sums, self.prompt, self._found(capacity))
        return sums

    def _found(self, capacity: int | None) -> NDArray[np.int64]:
        if capacity is None:
            return self.length
        return np.clip(capacity - self.depth + 1, 0, self.length)


def offered_reuse(prompts: Sequence[Blocks]) -> OfferedReuse:
    """Count what a prefix cache of each size could find in prompts as they arrive (ids from ``chained``).

    The cache is read when a prompt arrives, holds whole blocks, and evicts the least recently used ones, the
    last block of a prompt first (as vLLM). One pass counts for every capacity (Mattson's stack distances, IBM
    Systems Journal 9(2), 1970): a block at position n of the stack of recent use is found by every cache of
    at least n blocks.

    Blocks with the same last user are the end of that prompt and are consecutive on the stack. So a prompt's
    blocks are a few runs, each of which takes one query of a tree of sums over the prompts."""
    nodes = 1 + max((int(prompt.max()) for prompt in prompts if len(prompt)), default=-1)
    user = np.full(nodes, -1, np.int64)  # the last prompt that had this block
    live = _Sums(len(prompts))  # blocks by their last user
    runs: list[tuple[int, int, int]] = []
    for index, prompt in enumerate(prompts):
        users = user[prompt]
        known = users[: int(np.count_nonzero(users >= 0))]
        starts = np.flatnonzero(np.diff(known, prepend=-1)).tolist()
        lengths = np.diff([*starts, len(known)]).tolist()
        owners = [int(known[start]) for start in starts]
        runs += [
            (index, live.after(owner) + 1, length) for owner, length in zip(owners, lengths, strict=True)
        ]
        for owner, length in zip(owners, lengths, strict=True):
            live.add(owner, -length)
        live.add(index, len(prompt))
        user[prompt] = index
    table = np.array(runs, np.int64).reshape(-1, 3)
    return OfferedReuse(
        blocks=sum(len(prompt) for prompt in prompts),
        distinct=int(np.count_nonzero(user >= 0)),
        prompt=table[:, 0],
        depth=table[:, 1],
        length=table[:, 2],
    )


class _Sums:
    """Sums over a list that changes, in O(log n) (Fenwick, Software: Practice and Experience 24, 1994)."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self._total = 0

    def add(self, index: int, amount: int) -> None:
        self._total += amount
        index += 1
        while index < len(self._tree):
            self._tree[index] += amount
            index += index & -index

    def after(self, index: int) -> int:
        """Return the sum over the elements after this index."""
        index += 1
        until = 0
        while index:
            until += self._tree[index]
            index &= index - 1
        return self._total - until


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
    """Blocks that a cache of this size could have found. Shares are of all blocks of the corpus."""

    tokens: int | None
    """None: unlimited."""
    alone: float
    """One cache per session."""
    together: float
    """One cache for all sessions, at recorded times."""


@dataclass(frozen=True, eq=False)
class CorpusFigures:
    """Figures of a corpus, each computed once on demand."""

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
        """Reuse with one cache for all sessions."""
        return offered_reuse(self.prompts.prompts)

    @cached_property
    def alone(self) -> list[OfferedReuse]:
        """Reuse with one cache per session."""
        found = []
        for session in self.corpus.sessions:
            sent = sorted(session.requests(), key=lambda request: request[0])
            found.append(offered_reuse(chained([turn.blocks for _, turn in sent])[0]))
        return found

    def share_alone(self, blocks: int | None = None) -> float:
        """Return the share of blocks found if each session has a cache of ``blocks`` blocks."""
        every = sum(reuse.blocks for reuse in self.alone)
        return sum(reuse.found(blocks) for reuse in self.alone) / every if every else 0.0

    def capacities(self, tokens: Sequence[int]) -> list[CapacityRow]:
        """Return a row per capacity, the unlimited one last. Partial blocks do not count."""
        rows = []
        for capacity in (*tokens, None):
            blocks = None if capacity is None else capacity // self.corpus.block_tokens
            rows.append(CapacityRow(capacity, self.share_alone(blocks), self.together.share(blocks)))
        return rows

    def usual_capacities(self) -> list[int]:
        """Default cache sizes in tokens: 1, 2, 5 × 10ⁿ from a hundredth of all distinct tokens to the size
        that holds all."""
        all_of_it = self.together.distinct * self.corpus.block_tokens
        steps = [step * 10**power for power in range(3, 15) for step in (1, 2, 5)]
        inside = [step for step in steps if all_of_it / 100 <= step < all_of_it]
        return inside + [step for step in steps if step >= max(1, all_of_it)][:1]

    def unseen(self) -> list[int]:
        """Prompt tokens of each request that no earlier prompt of its session had: the work that a perfect
        cache of prompts leaves. An answer first appears in the next prompt."""
        found = []
        for session, offered in zip(self.corpus.sessions, self.alone, strict=True):
            sent = [turn for _, turn in sorted(session.requests(), key=lambda request: request[0])]
            known = offered.of_prompts(len(sent)).tolist()
            size = self.corpus.block_tokens
            found += [turn.input_len - size * blocks for turn, blocks in zip(sent, known, strict=True)]
        return found

    def spreads(self) -> dict[str, Spread]:
        """Name → spread. Lengths in tokens, times in seconds."""
        sessions = self.corpus.sessions
        shares = [reuse.share() for reuse in self.alone if reuse.blocks]
        columns: dict[str, Sequence[float]] = {
            "turns": [len(session.turns) for session in sessions],
            "prompt_tokens": [turn.input_len for turn in self.turns],
            "unseen_tokens": self.unseen(),
            "output_tokens": [turn.output_len for turn in self.turns],
            "think_time_s": [turn.think_time_s for session in sessions for turn in session.turns[1:]],
            "session_s": [session.turns[-1].sent_s for session in sessions],
            "session_reuse": shares,
        }
        return {name: spread(values) for name, values in columns.items() if len(values)}


def spread(values: Sequence[float]) -> Spread:
    """Quantiles as numpy's default interpolates them. ``values`` must not be empty."""
    return Spread(*(float(quantile) for quantile in np.quantile(np.asarray(values, float), QUANTILES)))
