"""Corpora of sessions in their formats. A mistake is reported with its file and line.

- ``agentic``: coding agents' conversations, as kv-cache-tester writes and AgentX replays them. One object per
  conversation: ``block_size`` tokens, ``hash_id_scope`` (``local``: ids are the conversation's own;
  ``global``: the corpus's), ``tool_tokens`` and ``system_tokens`` with which its prompts begin, and
  ``requests``: each with ``t`` (s), ``in`` and ``out`` tokens, ``hash_ids`` (one per block of its prompt),
  ``api_time`` (s, until its answer's end) and ``think_time`` (s before it). An entry of type ``subagent`` has
  requests of its own, on the same clock; the request after it waited for them. Sources:
  github.com/callanjfox/kv-cache-tester docs/trace_replay_tester.md, and ai-dynamo/aiperf
  docs/tutorials/weka-trace.md, which replays the same files. ``think_time`` counts from the last answer with
  a known end. If the previous answer has no ``api_time``, or after sub-agents, the smaller of ``think_time``
  and the time since they were sent is used.
- ``aiperf``: one object per session with ``session_id`` and ``turns``: each with ``text``, ``delay`` (ms) and
  ``output_length``; a leading turn of role ``system`` is part of the first prompt (ai-dynamo/aiperf
  docs/tutorials/custom-dataset.md, multi_turn).
- ``sharegpt``: one object per session with ``conversations``: messages with ``from`` and ``value``. A message
  from ``gpt`` is an answer, all before it is its prompt. There are no times.
- ``lengths``: one object per turn with ``session_id``, ``input_len`` (the whole prompt), ``output_len``, and
  where known ``think_time_s``, and ``offset_s`` of a session's first turn. A session's turns are in order.
- ``mooncake``: each request is a session of one turn (``core/load/traces.py``).

Tokens of texts are estimated: a token for every four bytes of UTF-8. If only lengths are known, blocks are
those of a growing conversation: a prompt begins with the previous prompt, unless it is too short for that
prompt and its answer; then it is unrelated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np

from kvbench.core.load.traces import BLOCK_TOKENS, LONGEST, TracedRequest
from kvbench.core.sessions.corpus import ASSUMED_BLOCK_TOKENS, Blocks, BlockScope, Corpus, Session, Turn
from kvbench.errors import InputError

_LATEST_S: Final = 1e12


@dataclass(frozen=True)
class CorpusRow:
    """``values`` as read at ``where`` (``file:line``, or deeper). Each method raises InputError."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, value: object, where: str) -> CorpusRow:
        """Return the row. Raises InputError if it is no JSON object."""
        if not isinstance(value, dict):
            raise InputError(f"{where}: must be a JSON object")
        return cls(value, where)

    def tokens(self, name: str, least: int = 1) -> int:
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= LONGEST:
            raise InputError(
                f"{self.where}: {name} must be a whole number from {least} to {LONGEST}, "
                f"not {self._quote(name)}"
            )
        return value

    def seconds(self, name: str, unit_s: float = 1.0) -> float | None:
        """Return a time in seconds from one in units of ``unit_s``."""
        value = self.values.get(name)
        if value is None:
            return None
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not known or not 0 <= value * unit_s <= _LATEST_S:
            raise InputError(f"{self.where}: {name} must be a time of at least 0, not {self._quote(name)}")
        return float(value) * unit_s

    def rows(self, name: str) -> list[CorpusRow]:
        value = self.values.get(name)
        if not isinstance(value, list):
            raise InputError(f"{self.where}: {name} must be a list, not {self._quote(name)}")
        return [CorpusRow.of(row, f"{self.where}, {name}[{index}]") for index, row in enumerate(value)]

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise InputError(f"{self.where}: {name} must be a text, not {self._quote(name)}")
        return value

    def name(self, *names: str, otherwise: str) -> str:
        found = (self.values[name] for name in names if self.values.get(name) is not None)
        return str(next(found, otherwise))[:80]

    def _quote(self, name: str) -> str:
        return f"{str(self.values[name])[:40]!r}" if name in self.values else "missing"


DEEPEST: Final = 8
"""Deepest nesting of sub-agents."""
_SHARED: Final = ("tool_tokens", "system_tokens")


@dataclass
class _Left:
    """Counts of entries that are missing in the sessions, or incomplete."""

    early_subagents: int = 0
    without_blocks: int = 0


@dataclass
class _Clock:
    """Time until which a session's next request had to wait."""

    free_s: float | None = None
    measured: bool = False
    """Whether that is the end of one answer, as recorded."""
    turns: list[Turn] = field(default_factory=list)


def agentic_corpus(rows: Sequence[CorpusRow]) -> Corpus:
    """Return sessions that begin at once: each recording has its own clock. Raises InputError."""
    left = _Left()
    sessions, sizes, scopes = [], set(), set()
    for row in rows:
        block_tokens = row.tokens("block_size")
        sizes.add(block_tokens)
        scopes.add(row.values.get("hash_id_scope", "local"))
        if turns := _turns(row.rows("requests"), 0.0, block_tokens, left):
            shared = sum(row.tokens(key, least=0) for key in _SHARED if key in row.values)
            sessions.append(Session(row.name("id", otherwise=row.where), 0.0, turns, shared))
    if len(sizes) != 1 or len(scopes) != 1:
        raise InputError(
            f"its conversations have blocks of {', '.join(map(str, sorted(sizes))) or 'no'} tokens "
            f"and ids that are {' and '.join(sorted(map(str, scopes))) or 'of no scope'}: they "
            "cannot be counted together",
            hint="give conversations of one block_size and hash_id_scope",
        )
    scope = _scope(str(scopes.pop()))
    return Corpus(tuple(sessions), sizes.pop(), scope, tuple(_notes(left, scope)))


def agentic_lines(corpus: Corpus) -> Iterator[dict[str, Any]]:
    """Yield a corpus without sub-agents in this format, one object per session, with its own block ids."""
    for session in corpus.sessions:
        yield {
            "id": session.name,
            "block_size": corpus.block_tokens,
            "hash_id_scope": "global" if corpus.scope == "corpus" else "local",
            "tool_tokens": 0,
            "system_tokens": session.shared_len,
            "requests": [
                {
                    "t": session.start_s + turn.sent_s,
                    "type": "s",
                    "in": turn.input_len,
                    "out": turn.output_len,
                    "hash_ids": turn.blocks.tolist(),
                    "api_time": 0.0,
                    "think_time": turn.think_time_s,
                }
                for turn in session.turns
            ],
        }


def _scope(word: str) -> BlockScope:
    known: dict[str, BlockScope] = {"local": "session", "global": "corpus"}
    if word not in known:
        raise InputError(f"hash_id_scope must be local or global, not {word[:40]!r}")
    return known[word]


def _notes(left: _Left, scope: BlockScope) -> list[str]:
    notes = []
    if scope == "session":
        notes.append(
            "block ids are local to each session: content shared by sessions (tools, system prompt) is not "
            "counted as offered reuse"
        )
    if left.early_subagents:
        notes.append(f"{left.early_subagents} sub-agents before their session's first request are left out")
    if left.without_blocks:
        notes.append(f"{left.without_blocks} requests have no hash_ids: their blocks are not counted")
    return notes


def _turns(
    rows: Sequence[CorpusRow],
    begin_s: float,
    block_tokens: int,
    left: _Left,
    parent_s: float | None = None,
    depth: int = 0,
) -> tuple[Turn, ...]:
    """Return turns. ``begin_s``: session's begin on the recording's clock; ``parent_s``: parent's answer."""
    clock = _Clock(free_s=parent_s)
    for row in rows:
        if row.values.get("type") == "subagent":
            _join_subagent(row, clock, begin_s, block_tokens, left, depth)
            continue
        sent_s, served_s = row.seconds("t"), row.seconds("api_time")
        if sent_s is None:
            raise InputError(f"{row.where}: t (s) is missing")
        clock.turns.append(
            Turn(
                input_len=row.tokens("in"),
                output_len=row.tokens("out", least=0),
                think_time_s=_think_time(row, sent_s, clock),
                sent_s=max(0.0, sent_s - begin_s),
                blocks=_blocks(row, block_tokens, left),
            )
        )
        clock.free_s, clock.measured = sent_s + (served_s or 0.0), served_s is not None
    return tuple(clock.turns)


def _think_time(row: CorpusRow, sent_s: float, clock: _Clock) -> float:
    recorded = row.seconds("think_time")
    if clock.free_s is None:
        return 0.0
    since = max(0.0, sent_s - clock.free_s)
    if recorded is None:
        return since
    return recorded if clock.measured else min(recorded, since)


def _join_subagent(
    row: CorpusRow, clock: _Clock, begin_s: float, block_tokens: int, left: _Left, depth: int
) -> None:
    inner = row.rows("requests")
    if not clock.turns or depth >= DEEPEST:
        left.early_subagents += 1
        return
    first_s = next((at for request in inner if (at := request.seconds("t")) is not None), None)
    if first_s is None:
        return
    turns = _turns(inner, first_s, block_tokens, left, clock.free_s, depth + 1)
    before = clock.turns[-1]
    name = row.name("agent_id", "subagent_type", otherwise="subagent")
    below = Session(name, max(0.0, first_s - begin_s), turns)
    clock.turns[-1] = replace(before, subagents=(*before.subagents, below))
    ends = [(request.seconds("t") or 0.0) + (request.seconds("api_time") or 0.0) for request in inner]
    clock.free_s, clock.measured = max([clock.free_s or 0.0, *ends]), False


def _blocks(row: CorpusRow, block_tokens: int, left: _Left) -> Blocks:
    ids = row.values.get("hash_ids")
    if ids is None:
        left.without_blocks += 1
        return np.zeros(0, np.int64)
    if not isinstance(ids, list) or not all(type(block) is int and 0 <= block < 2**63 for block in ids):
        raise InputError(f"{row.where}: hash_ids must be a list of whole numbers of at least 0")
    whole, odd = divmod(row.tokens("in"), block_tokens)
    if len(ids) > whole + bool(odd):
        raise InputError(
            f"{row.where}: {len(ids)} hash_ids cover more than its {row.tokens('in')} prompt tokens "
            f"({block_tokens} a block)"
        )
    return np.array(ids[:whole], np.int64)


BYTES_A_TOKEN: Final = 4
_ANSWERS: Final = frozenset({"gpt", "assistant", "chatgpt", "bard", "bing"})
"""Senders of answers in ShareGPT's files; all others are users or system prompts."""
_INSTRUCTIONS: Final = "system"
"""Role of an AIPerf turn that is not a request but precedes the first prompt of its session."""

_ESTIMATED: Final = f"tokens are estimated from the texts, one per {BYTES_A_TOKEN} bytes"
_GROWN: Final = (
    f"blocks of {ASSUMED_BLOCK_TOKENS} tokens are derived from the lengths: each prompt begins with the one "
    "before it; content shared by sessions is unknown"
)
_NO_TIMES: Final = "the file has no times: think times are 0, and sessions begin together"


class _Lengths(NamedTuple):
    """Lengths of a turn, before it has blocks."""

    input_len: int
    output_len: int
    think_time_s: float


def mooncake_corpus(requests: Sequence[TracedRequest]) -> Corpus:
    """Return each request as a session of one turn at its time; block ids show what they share."""
    sessions = []
    for index, request in enumerate(requests):
        whole = request.input_len // BLOCK_TOKENS
        blocks = np.array((request.blocks or ())[:whole], np.int64)
        turn = Turn(request.input_len, request.output_len, 0.0, 0.0, blocks)
        sessions.append(Session(str(index), request.offset_s, (turn,)))
    note = "the trace does not group requests into conversations: each is a session of one turn"
    return Corpus(tuple(sessions), BLOCK_TOKENS, "corpus", (note,))


def aiperf_corpus(rows: Iterable[CorpusRow], output_len: int | None = None) -> Corpus:
    """Return AIPerf's multi-turn sessions. ``output_len``: of answers without one. Raises InputError."""
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
            raise InputError(error.message, hint="set --output-len for answers without a length") from None
    return otherwise


def sharegpt_corpus(rows: Iterable[CorpusRow]) -> Corpus:
    """Return ShareGPT's conversations, except those without an answer. Raises InputError."""
    sessions, silent = [], 0
    for row in rows:
        known, prompted, lengths = 0, False, []
        for message in row.rows("conversations"):
            tokens = _tokens(message.text("value"))
            if prompted and message.values.get("from") in _ANSWERS:
                lengths.append(_Lengths(known, tokens, 0.0))
                prompted = False
            else:
                prompted = True
            known += tokens
        if lengths:
            sessions.append(_session(row.name("id", otherwise=row.where), 0.0, lengths))
        silent += not lengths
    left = [f"{silent} conversations without an answer are left out"] if silent else []
    return _grown(sessions, _ESTIMATED, _NO_TIMES, *left)


def lengths_corpus(rows: Iterable[CorpusRow]) -> Corpus:
    """Return sessions from the lengths of their turns. Raises InputError."""
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
    """Return a session in which answers take no time: only think times are known."""
    turns, sent_s = [], 0.0
    for turn, blocks in zip(lengths, grown_blocks([length[:2] for length in lengths]), strict=True):
        sent_s += turn.think_time_s
        turns.append(Turn(turn.input_len, turn.output_len, turn.think_time_s, sent_s, blocks))
    return Session(name, start_s, tuple(turns))


def grown_blocks(
    lengths: Sequence[tuple[int, int]], block_tokens: int = ASSUMED_BLOCK_TOKENS
) -> list[Blocks]:
    """Return the blocks of a growing conversation with these lengths of prompts and answers."""
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
