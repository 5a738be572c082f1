"""Generator of any number of sessions similar to recorded ones, all different. Pure.

The method is a smoothed bootstrap of whole sessions: each follows a random recorded one, with its turns in
order, the kept and added parts of the context, answers and think times. Each amount and the number of turns
is then multiplied by a lognormal factor (``SPREAD``); additional turns repeat some of the later ones. No
distribution is assumed, so generated sessions are not much longer than the longest recorded one. The kept
part of a turn is a share of its session's longest prompt so far. Sessions are arrays, so that a million turns
take megabytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.sessions.corpus import Blocks, Corpus, CorpusFigures, Session, Turn
from kvbench.errors import InputError

Ints32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SessionPlan:
    """One entry per turn, a session's turns in a row. Lengths are tokens, times seconds."""

    block_tokens: int
    first: NDArray[np.int64]
    """Start of each session's turns; one more entry than sessions."""
    shared_len: Ints32
    """Shared prefix length of each session: equal for all sessions with this number."""
    input_len: Ints32
    kept_len: Ints32
    """Tokens shared with an earlier prompt of the session: whole blocks of the latest long enough one."""
    output_len: Ints32
    think_time_s: NDArray[np.float32]
    """Time since the previous answer."""

    @property
    def sessions(self) -> int:
        return len(self.first) - 1

    @property
    def turns(self) -> int:
        return len(self.input_len)

    def corpus(self) -> Corpus:
        """Return the plan with block ids, as if recorded on an infinitely fast server."""
        shared, fresh, sessions = dict[int, Blocks](), 0, []
        for length in np.unique(self.shared_len).tolist():
            shared[length] = np.arange(fresh, fresh + length // self.block_tokens)
            fresh += len(shared[length])
        for index, (begin, end) in enumerate(pairwise(self.first.tolist())):
            held = [shared[int(self.shared_len[index])]]
            turns, sent_s = [], 0.0
            for turn in range(begin, end):
                kept, added = self._kept(turn, held)
                held.append(np.concatenate([kept, np.arange(fresh, fresh + added)]))
                fresh += added
                sent_s += float(self.think_time_s[turn])
                lengths = int(self.input_len[turn]), int(self.output_len[turn])
                turns.append(Turn(*lengths, float(self.think_time_s[turn]), sent_s, held[-1]))
            sessions.append(Session(str(index), 0.0, tuple(turns), int(self.shared_len[index])))
        return Corpus(tuple(sessions), self.block_tokens, "corpus")

    def _kept(self, turn: int, held: list[Blocks]) -> tuple[Blocks, int]:
        """Return the blocks kept from the latest prompt that is long enough, and the number of new ones. A
        first prompt keeps what its session shares with others, the first of ``held``."""
        whole, kept = (int(tokens[turn]) // self.block_tokens for tokens in (self.input_len, self.kept_len))
        kept = len(held[0]) if len(held) == 1 else kept
        parent = next((prompt for prompt in reversed(held) if len(prompt) >= kept), held[0])
        return parent[:kept], whole - kept


SPREAD: Final = 0.1
"""Standard deviation of the logarithm of each amount's random factor."""
_STREAM: Final = 5
"""Random stream, separate from prompts and traces."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SessionModel:
    """Recorded sessions as arrays: one entry per turn, and a session's turns in a row."""

    block_tokens: int
    first: Ints
    """Start of each session's turns; one more entry than sessions."""
    shared_len: Ints
    """Tokens of tools and system prompt per session."""
    kept_share: Floats
    """Share of the longest prompt so far."""
    unseen_len: Ints
    output_len: Ints
    think_time_s: Floats
    longest: int
    """Tokens of the longest prompt, the limit of every context."""

    @property
    def sessions(self) -> int:
        return len(self.first) - 1

    def generate(self, sessions: int, seed: int) -> SessionPlan:
        """Return sessions by model, number and seed alone. Raises InputError below 1."""
        if sessions < 1:
            raise InputError(f"{sessions} sessions cannot be generated: request at least 1")
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed])))
        donor = rng.integers(0, self.sessions, sessions)
        recorded = np.diff(self.first)[donor]
        turns = np.maximum(1, np.rint(recorded * _around_one(rng, sessions))).astype(np.int64)
        first = np.concatenate([[0], np.cumsum(turns)])
        source = self._sources(rng, donor, recorded, turns, first)
        unseen = np.maximum(1, np.rint(self.unseen_len[source] * _around_one(rng, len(source))))
        begins = first[:-1]
        shared = self.shared_len[donor]
        unseen[begins] = np.maximum(unseen[begins], shared + 1)
        input_len, kept_len = self._grow(self.kept_share[source], unseen.astype(np.int64), turns, first)
        answers = np.maximum(1, np.rint(self.output_len[source] * _around_one(rng, len(source))))
        think_s = self.think_time_s[source] * _around_one(rng, len(source))
        think_s[begins] = 0.0
        return SessionPlan(
            block_tokens=self.block_tokens,
            first=first,
            shared_len=shared.astype(np.int32),
            input_len=input_len.astype(np.int32),
            kept_len=kept_len.astype(np.int32),
            output_len=answers.astype(np.int32),
            think_time_s=think_s.astype(np.float32),
        )

    def _sources(
        self, rng: np.random.Generator, donor: Ints, recorded: Ints, turns: Ints, first: Ints
    ) -> Ints:
        """Return the recorded turn that each new one follows."""
        index = np.arange(first[-1]) - np.repeat(first[:-1], turns)
        known = np.repeat(recorded, turns)
        later = np.minimum(1 + (rng.random(len(index)) * (known - 1)).astype(np.int64), known - 1)
        found: Ints = np.repeat(self.first[:-1][donor], turns) + np.where(index < known, index, later)
        return found

    def _grow(self, kept_share: Floats, unseen: Ints, turns: Ints, first: Ints) -> tuple[Ints, Ints]:
        """Return prompt lengths and the reused part of each, turn by turn over all sessions at once."""
        size = self.block_tokens
        input_len, kept_len = unseen.copy(), np.zeros(len(unseen), np.int64)
        np.minimum(input_len, self.longest, out=input_len)
        longest = input_len[first[:-1]]
        for index in range(1, int(turns.max())):
            going = np.flatnonzero(turns > index)
            at = first[going] + index
            added = np.minimum(unseen[at], self.longest)
            kept = np.minimum(np.rint(kept_share[at] * longest[going] / size), longest[going] // size)
            kept = np.minimum(kept.astype(np.int64) * size, (self.longest - added) // size * size)
            kept_len[at], input_len[at] = kept, kept + added
            longest[going] = np.maximum(longest[going], input_len[at])
        return input_len, kept_len


def _around_one(rng: np.random.Generator, count: int) -> Floats:
    return np.exp(SPREAD * rng.standard_normal(count))


def fitted_model(corpus: Corpus) -> SessionModel:
    """Return the model of a corpus without sub-agents. Raises InputError without a session of two turns."""
    sessions = [session for session in corpus.sessions if session.turns]
    if not any(len(session.turns) > 1 for session in sessions):
        raise InputError(
            "no session has a second turn, so the corpus has no multi-turn statistics",
            hint="use a corpus with multi-turn sessions; docs/sessions.md describes the formats",
        )
    alone = Corpus(tuple(_without_subagents(session) for session in sessions), corpus.block_tokens, "session")
    turns = [turn for session in alone.sessions for turn in session.turns]
    unseen = np.array(CorpusFigures(alone).unseen(), np.int64)
    input_len = np.array([turn.input_len for turn in turns], np.int64)
    first = np.concatenate([[0], np.cumsum([len(session.turns) for session in sessions])])
    before = np.concatenate([_longest_before(input_len[start:end]) for start, end in pairwise(first)])
    return SessionModel(
        block_tokens=corpus.block_tokens,
        first=first,
        shared_len=np.array(
            [min(session.shared_len, session.turns[0].input_len) for session in sessions], np.int64
        ),
        kept_share=np.minimum(1.0, (input_len - unseen) / np.maximum(1, before)),
        unseen_len=unseen,
        output_len=np.array([turn.output_len for turn in turns], np.int64),
        think_time_s=np.array([turn.think_time_s for turn in turns]),
        longest=int(input_len.max()),
    )


def _without_subagents(session: Session) -> Session:
    turns = [Turn(t.input_len, t.output_len, t.think_time_s, t.sent_s, t.blocks) for t in session.turns]
    return Session(session.name, session.start_s, tuple(sorted(turns, key=lambda turn: turn.sent_s)))


def _longest_before(input_len: Ints) -> Ints:
    found: Ints = np.concatenate([[0], np.maximum.accumulate(input_len)[:-1]])
    return found
