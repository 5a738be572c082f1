"""Corpora in other formats: AIPerf's multi-turn files, ShareGPT's, lengths alone, and Mooncake's traces.

- ``aiperf``: an object a session with ``session_id`` and ``turns``: each with ``text``, ``delay`` (ms)
  and ``output_length``; a leading turn of role ``system`` is part of the first prompt (ai-dynamo/aiperf
  docs/tutorials/custom-dataset.md, multi_turn).
- ``sharegpt``: an object a session with ``conversations``: messages with ``from`` and ``value``. What ``gpt``
  says is an answer, all that came before it its prompt. There are no times in it.
- ``lengths``: an object a turn with ``session_id``, ``input_len`` (the whole prompt), ``output_len``, and
  where known ``think_time_s``, and ``offset_s`` of a session's first turn. Turns of a session stand in
  their order.
- ``mooncake``: each request is a session of one turn (``core/load/trace_formats.py``).

Tokens of texts are estimated: a token for every four bytes of UTF-8. Blocks of what has lengths alone are
those of a conversation that grows: a prompt begins with the prompt before it, unless it is too short for that
prompt and its answer; then it begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from kvbench.core.load.traces import BLOCK_TOKENS, TracedRequest
from kvbench.core.sessions.corpus import ASSUMED_BLOCK_TOKENS, Blocks, Corpus, Session, Turn
from kvbench.core.sessions.corpus_row import CorpusRow
from kvbench.errors import InputError

BYTES_A_TOKEN: Final = 4
_ANSWERS: Final = frozenset({"gpt", "assistant", "chatgpt", "bard", "bing"})
"""Who answers in ShareGPT's files; all others ask, or are what is told to the model."""
_INSTRUCTIONS: Final = "system"
"""The role of an AIPerf turn that is no request, but stands before all of its session."""

_ESTIMATED: Final = f"tokens are estimated from the texts, one for {BYTES_A_TOKEN} bytes"
_GROWN: Final = (
    f"blocks of {ASSUMED_BLOCK_TOKENS} tokens follow from the lengths: each prompt begins with the one "
    "before it; what sessions share is not known"
)
_NO_TIMES: Final = "the file has no times: think times are 0, and sessions begin together"


class _Lengths(NamedTuple):
    """A turn before it has blocks."""

    input_len: int
    output_len: int
    think_time_s: float


def mooncake_corpus(requests: Sequence[TracedRequest]) -> Corpus:
    """Each request by itself, at its time; what they share is in their block ids."""
    sessions = []
    for place, each in enumerate(requests):
        whole = each.input_len // BLOCK_TOKENS
        blocks = np.array((each.blocks or ())[:whole], np.int64)
        turn = Turn(each.input_len, each.output_len, 0.0, 0.0, blocks)
        sessions.append(Session(str(place), each.offset_s, (turn,)))
    note = "the trace does not say which requests are one conversation's: each is a session of one turn"
    return Corpus(tuple(sessions), BLOCK_TOKENS, "corpus", (note,))


def aiperf_corpus(rows: Iterable[CorpusRow], output_len: int | None = None) -> Corpus:
    """AIPerf's multi-turn sessions. ``output_len``: of answers without a length. Raises InputError."""
    sessions = []
    for row in rows:
        turns = row.rows("turns")
        known, lengths = 0, list[_Lengths]()
        if turns and turns[0].values.get("role") == _INSTRUCTIONS:
            known, turns = _tokens(turns[0].text("text")), turns[1:]
        for turn in turns:
            known += _tokens(turn.text("text"))
            answer = _answer_len(turn, output_len)
            delay_s = turn.seconds("delay", 1e-3) or 0.0
            lengths.append(_Lengths(known, answer, delay_s if lengths else 0.0))
            known += answer
        sessions.append(_session(row.name("session_id", otherwise=row.where), 0.0, lengths))
    return _grown(sessions, _ESTIMATED)


def _answer_len(turn: CorpusRow, otherwise: int | None) -> int:
    if "output_length" in turn.values or otherwise is None:
        try:
            return turn.tokens("output_length")
        except InputError as error:
            raise InputError(
                error.message, hint="give --output-len for answers without a length of their own"
            ) from None
    return otherwise


def sharegpt_corpus(rows: Iterable[CorpusRow]) -> Corpus:
    """Conversations of ShareGPT's form; those without an answer are left out. Raises InputError."""
    sessions, silent = [], 0
    for row in rows:
        known, asked, lengths = 0, False, []
        for message in row.rows("conversations"):
            tokens = _tokens(message.text("value"))
            if asked and message.values.get("from") in _ANSWERS:
                lengths.append(_Lengths(known, tokens, 0.0))
                asked = False
            else:
                asked = True
            known += tokens
        if lengths:
            sessions.append(_session(row.name("id", otherwise=row.where), 0.0, lengths))
        silent += not lengths
    left = [f"{silent} conversations without an answer are left out"] if silent else []
    return _grown(sessions, _ESTIMATED, _NO_TIMES, *left)


def lengths_corpus(rows: Iterable[CorpusRow]) -> Corpus:
    """Turns by their lengths. Raises InputError."""
    found: dict[str, list[_Lengths]] = {}
    starts: dict[str, float] = {}
    for row in rows:
        if row.values.get("session_id") is None:
            raise InputError(f"{row.where}: session_id is missing")
        name = row.name("session_id", otherwise="")
        turns = found.setdefault(name, [])
        starts.setdefault(name, row.seconds("offset_s") or 0.0)
        think_s = row.seconds("think_time_s") or 0.0
        turns.append(_Lengths(row.tokens("input_len"), row.tokens("output_len"), think_s if turns else 0.0))
    return _grown([_session(name, starts[name], turns) for name, turns in found.items()])


def _grown(sessions: Sequence[Session], *notes: str) -> Corpus:
    return Corpus(tuple(sessions), ASSUMED_BLOCK_TOKENS, "session", (*notes, _GROWN))


def _session(name: str, start_s: float, lengths: Sequence[_Lengths]) -> Session:
    """Answers take no time here: only think times are known."""
    turns, sent_s = [], 0.0
    for each, blocks in zip(lengths, grown_blocks([each[:2] for each in lengths]), strict=True):
        sent_s += each.think_time_s
        turns.append(Turn(each.input_len, each.output_len, each.think_time_s, sent_s, blocks))
    return Session(name, start_s, tuple(turns))


def grown_blocks(
    lengths: Sequence[tuple[int, int]], block_tokens: int = ASSUMED_BLOCK_TOKENS
) -> list[Blocks]:
    """Blocks of a conversation that grows, of the lengths of its prompts and answers."""
    fresh, held, known, found = count(), list[int](), 0, []
    for input_len, output_len in lengths:
        if input_len < known:
            held = []
        whole = input_len // block_tokens
        held += [next(fresh) for _ in range(whole - len(held))]
        found.append(np.array(held, np.int64))
        known = input_len + output_len
    return found


def _tokens(text: str) -> int:
    return max(1, -(-len(text.encode()) // BYTES_A_TOKEN))
