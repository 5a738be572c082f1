"""Source of a load's sessions: recorded ones in random order, or generated ones, all different."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.scenario.sections import Sessions, SessionShape
from kvbench.core.sessions.corpus import BlockScope, Corpus, Session, Turn
from kvbench.core.sessions.generator import SessionModel, fitted_model
from kvbench.core.sessions.session_load import SessionLoad, session_load
from kvbench.errors import InputError

FILLED: Final = 0.95
"""Share of a session's sent requests after which a load has filled."""
SHAPES: Final = 512
SAMPLE: Final = 1000
"""Number of sessions generated from a shape, to draw from and to compute a source's means."""
_STREAM: Final = 6
"""Random stream, separate from all others."""
SHAPE_BLOCK: Final = 16
"""Block size in tokens without a corpus: the engines' usual one."""
MOST_BLOCKS: Final = 50_000_000
"""Most blocks of a trial's prompts: 400 MB of ids."""


@dataclass(frozen=True, eq=False)
class SessionSource:
    """Either ``corpus``, or ``model`` to generate sessions from. ``own_answers``: as in ``session_load``."""

    corpus: Corpus | None
    model: SessionModel | None
    own_answers: bool
    scale: tuple[float, float | None] = (1.0, None)
    """Factor on think times, and the longest one in seconds."""
    longest_output: int = 1
    """Longest answer in tokens."""
    max_turns: int | None = None
    """Longest conversation in turns."""

    @property
    def longest_input(self) -> int:
        return self.model.longest if self.model is not None else max(t.input_len for t in self.turns)

    def sessions(self, count: int, seed: int) -> tuple[list[Session], BlockScope, int]:
        """Return ``count`` sessions, the scope of their block ids, and tokens per block."""
        if self.model is not None:
            found = self.model.generate(count, seed).corpus()
        else:
            assert self.corpus is not None
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed])))
            held = self.corpus.sessions
            rounds = [rng.permutation(len(held)) for _ in range(-(-count // len(held)))]
            chosen = [held[index] for index in np.concatenate(rounds)[:count].tolist()]
            found = replace(self.corpus, sessions=tuple(chosen))
        paced = {
            id(session): _cut(_paced(session, *self.scale, self.longest_output), self.max_turns, None)
            for session in found.sessions
        }
        return [paced[id(session)] for session in found.sessions], found.scope, found.block_tokens

    @cached_property
    def sample(self) -> list[Session]:
        """Return the sessions behind its means: all recorded ones, or many generated ones."""
        return self.sessions(len(self.corpus.sessions) if self.corpus is not None else SAMPLE, 0)[0]

    @cached_property
    def turns(self) -> list[Turn]:
        return [turn for session in self.sample for _, turn in session.requests()]

    @property
    def requests_each(self) -> float:
        """Return the mean requests per session, sub-agents included."""
        return len(self.turns) / len(self.sample)

    @property
    def dispersion(self) -> float:
        """Return variance / mean of the requests over a long time for Poisson sessions: E[k²] / E[k]."""
        counts = np.array([sum(1 for _ in session.requests()) for session in self.sample], float)
        return float((counts**2).mean() / counts.mean())

    def filled_s(self, latency_s: float) -> float:
        """Return when sessions end about as fast as they begin, if an answer takes ``latency_s``."""
        due = [time_s for session in self.sample for time_s in due_times(session, latency_s)]
        return float(np.quantile(due, FILLED))

    def load(self, session_rate: float, count: int, burstiness: float, seed: int) -> SessionLoad:
        """Return the requests of a trial of ``count`` sessions. Raises InputError if prompts do not fit."""
        sessions, scope, block_tokens = self.sessions(count, seed)
        blocks = sum(len(turn.blocks) for session in sessions for _, turn in session.requests())
        if blocks > MOST_BLOCKS:
            raise InputError(
                f"the prompts of a trial of {count:,} sessions have {blocks:,} blocks; at most "
                f"{MOST_BLOCKS:,} fit",
                hint="lower workload.sessions.length_scale or max_turns, or search.max_requests",
            )
        offsets = planned_offsets(session_rate, count, burstiness, seed)
        return session_load(sessions, offsets.tolist(), scope, block_tokens, own_answers=self.own_answers)


def due_times(session: Session, latency_s: float, begin_s: float = 0.0) -> Iterator[float]:
    """Yield each request's send time, if each answer takes ``latency_s``."""
    now = begin_s
    for index, turn in enumerate(session.turns):
        now += turn.think_time_s if index or begin_s else 0.0
        yield now
        now += latency_s
        ends = [now]
        for subagent in turn.subagents:
            below = list(due_times(subagent, latency_s, now))
            yield from below
            ends += [each_s + latency_s for each_s in below]
        now = max(ends)


def source_of(wanted: Sessions, corpus: Corpus | None) -> SessionSource:
    """Return the sessions of a scenario. Raises InputError if its limits leave none."""
    scale = wanted.think_scale, wanted.max_think_s
    own_answers = wanted.answers == "own"
    if corpus is None:
        corpus = shaped(wanted.shape or SessionShape())
    corpus = limited(corpus, wanted.length_scale, wanted.max_turns, wanted.max_input_len)
    if not corpus.sessions:
        raise InputError(
            "no session fits within workload.sessions.max_input_len", hint="raise it, or lower length_scale"
        )
    most = max(turn.output_len for session in corpus.sessions for _, turn in session.requests())
    if wanted.source == "recorded":
        return SessionSource(corpus, None, own_answers, scale, most, wanted.max_turns)
    return SessionSource(None, fitted_model(corpus), own_answers, scale, most, wanted.max_turns)


def limited(corpus: Corpus, factor: float, max_turns: int | None, max_input_len: int | None) -> Corpus:
    """Return the corpus with lengths times ``factor``, rounded to whole blocks."""
    size = max(1, round(corpus.block_tokens * factor))
    sessions = []
    for session in corpus.sessions:
        scaled = _scaled(session, corpus.block_tokens, size)
        short = _cut(scaled, max_turns, max_input_len)
        sessions += [short] if short.turns else []
    return replace(corpus, sessions=tuple(sessions), block_tokens=size)


def _scaled(session: Session, size: int, wanted: int) -> Session:
    if size == wanted:
        return session
    turns = []
    for turn in session.turns:
        whole, rest = divmod(turn.input_len, size)
        turns.append(
            replace(
                turn,
                input_len=max(1, whole * wanted + rest * wanted // size),
                output_len=max(1, round(turn.output_len * wanted / size)),
                subagents=tuple(_scaled(subagent, size, wanted) for subagent in turn.subagents),
            )
        )
    return replace(session, turns=tuple(turns), shared_len=session.shared_len // size * wanted)


def _cut(session: Session, max_turns: int | None, max_input_len: int | None) -> Session:
    turns: list[Turn] = []
    for turn in session.turns[:max_turns]:
        if max_input_len is not None and turn.input_len > max_input_len:
            break
        below = tuple(_cut(subagent, max_turns, max_input_len) for subagent in turn.subagents)
        turns.append(replace(turn, subagents=below))
    return replace(session, turns=tuple(turns))


def _paced(session: Session, factor: float, most_s: float | None, most_tokens: int) -> Session:
    """Return the session with think times × ``factor`` (at most ``most_s``), and limited answers."""
    limit = math.inf if most_s is None else most_s
    turns = [
        replace(
            turn,
            think_time_s=min(turn.think_time_s * factor, limit),
            output_len=min(turn.output_len, most_tokens),
            subagents=tuple(_paced(subagent, factor, most_s, most_tokens) for subagent in turn.subagents),
        )
        for turn in session.turns
    ]
    return replace(session, turns=tuple(turns))


def shaped(shape: SessionShape) -> Corpus:
    """Return the same sessions for a shape: each prompt is the previous one, its answer, and new tokens."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, 0])))

    def draw(median: float, count: int, least: float = 1.0) -> Sequence[float]:
        drawn = median * np.exp(shape.spread * rng.standard_normal(count))
        found: list[float] = np.maximum(least, np.rint(drawn) if least else drawn).tolist()
        return found

    sessions, fresh = [], 0
    for number, count in enumerate(draw(shape.turns, SHAPES)):
        n = max(1, int(count))
        input_len = shape.shared_prefix_len + int(draw(shape.first_len, 1)[0])
        added, answers = draw(shape.added_len, n), draw(shape.output_len, n)
        thinks = draw(shape.think_time_s, n, 0.0) if shape.think_time_s else [0.0] * n
        turns, sent_s = [], 0.0
        for index in range(n):
            blocks = np.arange(fresh, fresh + input_len // SHAPE_BLOCK)
            think_s = thinks[index] if index else 0.0
            sent_s += think_s
            turns.append(Turn(input_len, int(answers[index]), think_s, sent_s, blocks))
            input_len += int(answers[index] + added[index])
        fresh += len(turns[-1].blocks)
        sessions.append(Session(str(number), 0.0, tuple(turns), shape.shared_prefix_len))
    return Corpus(tuple(sessions), SHAPE_BLOCK, "session")
