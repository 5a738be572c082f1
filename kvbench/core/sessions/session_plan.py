"""Sessions as a load has them: arrays, so that a million turns take megabytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvbench.core.sessions.corpus import Blocks, Corpus, Session, Turn

Ints32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SessionPlan:
    """One entry a turn, a session's turns in a row. Lengths are tokens, times seconds."""

    block_tokens: int
    first: NDArray[np.int64]
    """Where each session's turns begin; one more than sessions."""
    shared_len: Ints32
    """Of each session: its prompts begin with so many tokens that all sessions with this number share."""
    input_len: Ints32
    kept_len: Ints32
    """Tokens with which it begins as an earlier prompt of its session did: whole blocks of the
    latest that is so long."""
    output_len: Ints32
    think_time_s: NDArray[np.float32]
    """From the answer before."""

    @property
    def sessions(self) -> int:
        return len(self.first) - 1

    @property
    def turns(self) -> int:
        return len(self.input_len)

    def corpus(self) -> Corpus:
        """The same with block ids, as if it had been recorded on a server that answers at once."""
        shared, fresh, sessions = dict[int, Blocks](), 0, []
        for length in np.unique(self.shared_len).tolist():
            shared[length] = np.arange(fresh, fresh + length // self.block_tokens)
            fresh += len(shared[length])
        for place, (begin, end) in enumerate(pairwise(self.first.tolist())):
            held = [shared[int(self.shared_len[place])]]
            turns, sent_s = [], 0.0
            for turn in range(begin, end):
                kept, added = self._kept(turn, held)
                held.append(np.concatenate([kept, np.arange(fresh, fresh + added)]))
                fresh += added
                sent_s += float(self.think_time_s[turn])
                lengths = int(self.input_len[turn]), int(self.output_len[turn])
                turns.append(Turn(*lengths, float(self.think_time_s[turn]), sent_s, held[-1]))
            sessions.append(Session(str(place), 0.0, tuple(turns), int(self.shared_len[place])))
        return Corpus(tuple(sessions), self.block_tokens, "corpus")

    def _kept(self, turn: int, held: list[Blocks]) -> tuple[Blocks, int]:
        """The blocks that are kept, of the latest prompt that is long enough, and how many are new.

        A first prompt keeps what its session shares with others, the first of ``held``.
        """
        whole, kept = (int(each[turn]) // self.block_tokens for each in (self.input_len, self.kept_len))
        kept = len(held[0]) if len(held) == 1 else kept
        parent = next((each for each in reversed(held) if len(each) >= kept), held[0])
        return parent[:kept], whole - kept
