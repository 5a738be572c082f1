"""Recorded conversations of coding agents, as kv-cache-tester writes and AgentX replays them.

A JSON object a conversation: ``block_size`` tokens, ``hash_id_scope`` (``local``: ids are the conversation's
own; ``global``: the corpus's), ``tool_tokens`` and ``system_tokens`` with which its prompts begin, and
``requests``: each with ``t`` (s), ``in`` and ``out`` tokens, ``hash_ids`` (one a block of its prompt),
``api_time`` (s, until its answer's end) and ``think_time`` (s before it). An entry of
type ``subagent`` has requests of its own, on the same clock; the request after it waited for them.
Sources: github.com/callanjfox/kv-cache-tester docs/trace_replay_tester.md, and ai-dynamo/aiperf
docs/tutorials/weka-trace.md, which replays the same files.

``think_time`` counts from the last answer whose end is known. Where the answer before has no ``api_time``, or
sub-agents came between, the time since they were sent is a bound, and the smaller of both is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from kvbench.core.sessions.corpus import Blocks, BlockScope, Corpus, Session, Turn
from kvbench.core.sessions.corpus_row import CorpusRow
from kvbench.errors import InputError

DEEPEST: Final = 8
"""Sub-agents of sub-agents."""
_SHARED: Final = ("tool_tokens", "system_tokens")


@dataclass
class _Left:
    """What is not in the sessions, or not whole."""

    early_subagents: int = 0
    without_blocks: int = 0


@dataclass
class _Clock:
    """Until when a session's next request had to wait."""

    free_s: float | None = None
    measured: bool = False
    """Whether that is the end of one answer, as recorded."""
    turns: list[Turn] = field(default_factory=list)


def agentic_corpus(rows: Sequence[CorpusRow]) -> Corpus:
    """Sessions that all begin at once: a recording's clock is its own. Raises InputError."""
    left = _Left()
    sessions, sizes, scopes = [], set(), set()
    for row in rows:
        block_tokens = row.tokens("block_size")
        sizes.add(block_tokens)
        scopes.add(row.values.get("hash_id_scope", "local"))
        turns = _turns(row.rows("requests"), 0.0, block_tokens, left)
        if turns:
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
    """A corpus without sub-agents in this format, an object a session. Block ids are the corpus's own."""
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
            "block ids are each session's own: what sessions share (tools, system prompt) is not "
            "counted as offered"
        )
    if left.early_subagents:
        notes.append(f"{left.early_subagents} sub-agents before any request of their session are left out")
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
    """``begin_s``: the session's begin on the recording's clock; ``parent_s``: its parent's answer."""
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
    first_s = next((at for each in inner if (at := each.seconds("t")) is not None), None)
    if first_s is None:
        return
    turns = _turns(inner, first_s, block_tokens, left, clock.free_s, depth + 1)
    before = clock.turns[-1]
    name = row.name("agent_id", "subagent_type", otherwise="subagent")
    below = Session(name, max(0.0, first_s - begin_s), turns)
    clock.turns[-1] = replace(before, subagents=(*before.subagents, below))
    ends = [(each.seconds("t") or 0.0) + (each.seconds("api_time") or 0.0) for each in inner]
    clock.free_s, clock.measured = max([clock.free_s or 0.0, *ends]), False


def _blocks(row: CorpusRow, block_tokens: int, left: _Left) -> Blocks:
    ids = row.values.get("hash_ids")
    if ids is None:
        left.without_blocks += 1
        return np.zeros(0, np.int64)
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 2**63 for each in ids):
        raise InputError(f"{row.where}: hash_ids must be a list of whole numbers of at least 0")
    whole, odd = divmod(row.tokens("in"), block_tokens)
    if len(ids) > whole + bool(odd):
        raise InputError(
            f"{row.where}: {len(ids)} hash_ids stand for more than its {row.tokens('in')} prompt tokens "
            f"({block_tokens} a block)"
        )
    return np.array(ids[:whole], np.int64)
