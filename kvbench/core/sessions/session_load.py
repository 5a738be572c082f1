"""Requests of a session load, as arrays in a load generator's file, and their figures.

Sessions start at planned times (open loop). Within one, a turn is sent think time after the previous answer
and after the last sub-agent that it waits for. Sub-agents start together after the answer of the turn that
calls them. Every copy of a recorded session has its own blocks, except for those that sessions share, so no
cache finds blocks of another copy or an earlier trial.

``session_figures`` adds concurrent sessions, TTFT by turn, and reuse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.arrivals import Following
from kvbench.core.records import RequestRecord
from kvbench.core.sessions.corpus import Blocks, BlockScope, Session, Turn, chained, offered_reuse
from kvbench.core.simulation.kv_cache import mix64_array


@dataclass(frozen=True, eq=False)
class SessionLoad:
    """Requests of a trial by their indices; each session's are consecutive. Lengths in tokens."""

    offsets_s: Sequence[float]
    """Planned time of each session's first request; NaN for others."""
    input_len: Sequence[int]
    output_len: Sequence[int]
    following: Following
    prompts: Sequence[Blocks]
    """Tree nodes (``chained``) of each prompt's whole blocks, then its answer's."""
    block_tokens: int
    goes_on: Sequence[int] = ()
    """Request whose prompt and answer each prompt begins with; -1: none."""

    @property
    def requests(self) -> int:
        return len(self.input_len)

    @cached_property
    def session_offsets_s(self) -> NDArray[np.float64]:
        """When each session begins, ascending."""
        known: NDArray[np.float64] = np.array([offset for offset in self.offsets_s if not math.isnan(offset)])
        return known

    def longest_s(self, latency_s: float) -> float:
        """Return the longest session duration if no answer takes longer than ``latency_s``."""
        times_s = np.asarray(self.following.think_time_s) + latency_s
        return float(np.bincount(self.following.session, times_s).max(initial=0.0))

    def prompt_tokens(self, sent: Sequence[int]) -> int:
        """Return the tokens in whole blocks of these requests' prompts."""
        return self.block_tokens * sum(self.input_len[index] // self.block_tokens for index in sent)

    def offered_tokens(self, sent: Sequence[int], capacities: Sequence[int | None]) -> list[int]:
        """Return the prompt tokens that caches of these capacities in tokens (None: unlimited) could find, in
        the order of sending. A prompt and its answer count from the send on; real caches find less."""
        offered = offered_reuse([self.prompts[index] for index in sent])
        most = np.array([self.input_len[index] // self.block_tokens for index in sent], np.int64)
        found = []
        for tokens in capacities:
            blocks = offered.of_prompts(len(sent), None if tokens is None else tokens // self.block_tokens)
            found.append(self.block_tokens * int(np.minimum(blocks, most).sum()))
        return found


@dataclass(frozen=True, eq=False)
class PromptHashes(Sequence[list[int]]):
    """Hash of each whole engine block of a load's prompts, computed on demand."""

    load: SessionLoad
    block_tokens: int
    """The engine's block size."""

    def __len__(self) -> int:
        return self.load.requests

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        nodes, size = self.load.prompts[index], self.block_tokens
        count = len(nodes) * self.load.block_tokens // size
        # A node stands for all tokens up to its end, so it identifies the tokens before it too.
        ends = np.arange(1, count + 1) * size - 1
        of_node = nodes[ends // self.load.block_tokens].astype(np.uint64)
        hashes: list[int] = mix64_array(mix64_array(of_node) ^ ends.astype(np.uint64)).tolist()
        return hashes


@dataclass
class _Drawn:
    """A ``SessionLoad`` under construction, request by request."""

    offsets_s: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    session: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)

    def add(self, session: Session, number: int, offset_s: float, after: tuple[int, ...] = ()) -> int:
        """Add a session, or a sub-agent that waits for ``after``; return the index of its last request."""
        last_index = -1
        for index, turn in enumerate(session.turns):
            last_index = len(self.turns)
            self.offsets_s.append(float("nan") if after else offset_s)
            self.turns.append(turn)
            self.after.append(after)
            self.session.append(number)
            self.turn.append(index)
            self.last.append(False)
            below = [
                self.add(subagent, number, 0.0, (last_index,))
                for subagent in turn.subagents
                if subagent.turns
            ]
            after = (last_index, *below)
        return last_index


def session_load(
    sessions: Sequence[Session],
    offsets_s: Sequence[float],
    scope: BlockScope,
    block_tokens: int,
    *,
    own_answers: bool,
) -> SessionLoad:
    """Return the load of sessions that begin at ``offsets_s``, one at each. A repeated session is a copy.
    ``own_answers``: if a prompt begins with the whole prompt before it, the server's answer follows; else the
    recorded one, which no server has KV of."""
    drawn = _Drawn()
    for number, (session, offset_s) in enumerate(zip(sessions, offsets_s, strict=True)):
        drawn.last[drawn.add(session, number, float(offset_s))] = True
    prompts = _nodes(drawn, sessions, scope, block_tokens)
    goes_on = [-1] * len(prompts)
    if own_answers:
        goes_on = _goes_on(drawn, prompts)
        prompts = _with_answers(drawn, prompts, goes_on, block_tokens)
    following = Following(
        drawn.after, [turn.think_time_s for turn in drawn.turns], drawn.session, drawn.turn, drawn.last
    )
    lengths = [turn.input_len for turn in drawn.turns], [max(1, turn.output_len) for turn in drawn.turns]
    return SessionLoad(drawn.offsets_s, *lengths, following, prompts, block_tokens, goes_on)


def _nodes(drawn: _Drawn, sessions: Sequence[Session], scope: BlockScope, block_tokens: int) -> list[Blocks]:
    """Return each prompt's blocks as nodes of one tree; copies are distinct."""
    copies: dict[int, int] = {}
    copy_of = []
    for session in sessions:
        copy_of.append(copies.get(id(session), 0))
        copies[id(session)] = copy_of[-1] + 1
    span = 1 + max((int(turn.blocks.max()) for turn in drawn.turns if len(turn.blocks)), default=0)
    salted = []
    for turn, number in zip(drawn.turns, drawn.session, strict=True):
        salt = number if scope == "session" else copy_of[number]
        shared = 0 if scope == "session" else sessions[number].shared_len // block_tokens
        blocks = turn.blocks[: turn.input_len // block_tokens] + salt * span
        blocks[:shared] -= salt * span
        salted.append(blocks)
    return chained(salted)[0]


def _goes_on(drawn: _Drawn, prompts: Sequence[Blocks]) -> list[int]:
    """Return each prompt's predecessor in its conversation, if it begins with all of its blocks."""
    found = []
    for later, after in enumerate(drawn.after):
        previous, next_ = prompts[after[0] if after else later], prompts[later]
        known = len(previous)
        same = len(next_) >= known and (not known or next_[known - 1] == previous[-1])
        found.append(after[0] if after and drawn.turn[later] and same else -1)
    return found


def _with_answers(
    drawn: _Drawn, prompts: Sequence[Blocks], goes_on: Sequence[int], block_tokens: int
) -> list[Blocks]:
    """Return each prompt with its answer's blocks, as far as the next prompt continues them."""
    found = list(prompts)
    for later, earlier in enumerate(goes_on):
        if earlier < 0:
            continue
        next_ = prompts[later]
        # The KV of the last token of an answer is never computed.
        until = (drawn.turns[earlier].input_len + drawn.turns[earlier].output_len - 1) // block_tokens
        if min(until, len(next_)) > len(prompts[earlier]):
            found[earlier] = next_[: min(until, len(next_))]
    return found


Arrays = Mapping[str, NDArray[Any]]


def load_arrays(load: SessionLoad) -> dict[str, NDArray[Any]]:
    """Return the load as arrays by name; lists of lists as values and ends. Prompts have no answers."""
    size, following = load.block_tokens, load.following
    prompts = [nodes[: length // size] for nodes, length in zip(load.prompts, load.input_len, strict=True)]
    goes_on = load.goes_on or [-1] * load.requests
    return {
        "block_tokens": np.array([size], np.int64),
        "offsets_s": np.asarray(load.offsets_s, np.float64),
        "input_len": np.asarray(load.input_len, np.int64),
        "output_len": np.asarray(load.output_len, np.int64),
        "goes_on": np.asarray(goes_on, np.int64),
        "think_time_s": np.asarray(following.think_time_s, np.float64),
        "session": np.asarray(following.session, np.int64),
        "turn": np.asarray(following.turn, np.int64),
        "last": np.asarray(following.last, np.bool_),
        "after": np.array([number for row in following.after for number in row], np.int64),
        "after_ends": np.cumsum([len(row) for row in following.after], dtype=np.int64),
        "nodes": np.concatenate([*prompts, np.zeros(0, np.int64)]),
        "nodes_ends": np.cumsum([len(row) for row in prompts], dtype=np.int64),
    }


def load_of_arrays(arrays: Arrays) -> SessionLoad:
    """Return the load of these arrays. Raises ValueError or KeyError if they are invalid."""
    after = [tuple(row.tolist()) for row in np.split(arrays["after"], arrays["after_ends"][:-1])]
    requests = len(arrays["input_len"])
    following = Following(
        after,
        arrays["think_time_s"].tolist(),
        arrays["session"].tolist(),
        arrays["turn"].tolist(),
        arrays["last"].tolist(),
    )
    load = SessionLoad(
        arrays["offsets_s"].tolist(),
        arrays["input_len"].tolist(),
        arrays["output_len"].tolist(),
        following,
        np.split(arrays["nodes"], arrays["nodes_ends"][:-1]),
        int(arrays["block_tokens"][0]),
        arrays["goes_on"].tolist(),
    )
    rows = (load.offsets_s, load.output_len, load.goes_on, load.prompts, *vars(following).values())
    if not requests or any(len(row) != requests for row in rows):
        raise ValueError("its columns have different lengths")
    return load


BY_TURN: Final = 64
"""Turns with a separate TTFT."""


def session_figures(
    records: Sequence[RequestRecord],
    load: SessionLoad,
    window_s: tuple[float, float],
    pool_tokens: int | None,
    found_tokens: float | None = None,
) -> dict[str, Any]:
    """Return the session figures of a trial's record; times in ms except ``session_s``, reuse as shares of
    the whole blocks of all sent prompts. ``pool_tokens``: capacity of the prompt caches, if known.
    ``found_tokens``: cached tokens of all prompts, if records lack them."""
    begin_s, end_s = window_s
    inside = [record for record in records if begin_s <= record.scheduled_s <= end_s and record.ok]
    took = [record.session_s for record in inside if record.session_s is not None]
    ttft: dict[int, list[float]] = {}
    for record in inside:
        if record.ttft_s is not None and record.turn is not None:
            ttft.setdefault(record.turn, []).append(1e3 * record.ttft_s)
    later = [value for turn, values in ttft.items() if turn for value in values]
    return {
        "begun": len({record.session for record in records if record.session is not None}),
        "ended": len(took),
        "at_once": _at_once(records, begin_s, end_s),
        "session_s": _quantiles(took),
        "first_ttft_ms": _quantiles(ttft.get(0, [])),
        "later_ttft_ms": _quantiles(later),
        "ttft_ms_by_turn": [
            [turn, len(ttft[turn]), float(np.median(ttft[turn]))] for turn in sorted(ttft) if turn < BY_TURN
        ],
        **_reuse(records, load, pool_tokens, found_tokens),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.quantile(np.asarray(values, float), (0.5, 0.9, 0.95))
    return dict(zip(("p50", "p90", "p95"), found.tolist(), strict=True))


def _at_once(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> float | None:
    """Return the mean number of concurrent sessions, think times included."""
    if end_s <= begin_s:
        return None
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    over: set[int] = set()
    for record in records:
        if record.session is None:
            continue
        starts.setdefault(record.session, record.scheduled_s)
        ends[record.session] = max(ends.get(record.session, 0.0), record.last_token_s or record.scheduled_s)
        if record.session_s is not None or not record.ok:
            over.add(record.session)
    spans = (
        min(end_s, ends[number] if number in over else end_s) - max(begin_s, start_s)
        for number, start_s in starts.items()
    )
    return sum(max(0.0, span) for span in spans) / (end_s - begin_s)


def sent_indices(records: Sequence[RequestRecord]) -> list[int]:
    """Return the indices in the load of the requests that were sent, in their order."""
    return [int(record.request_id.rpartition("-")[2]) for record in records if record.sent_s is not None]


def _reuse(
    records: Sequence[RequestRecord], load: SessionLoad, pool_tokens: int | None, found_tokens: float | None
) -> dict[str, Any]:
    """Return offered and achieved reuse over the answered requests."""
    sent = sent_indices(records)
    whole = load.prompt_tokens(sent)
    if not whole:
        return {}
    unlimited, held = load.offered_tokens(sent, (None, pool_tokens))
    known = [record.cached_tokens for record in records if record.cached_tokens is not None]
    found = found_tokens if found_tokens is not None else sum(known) if known else None
    return {
        "pool_tokens": pool_tokens,
        "offered_reuse": unlimited / whole,
        "offered_reuse_in_pool": None if pool_tokens is None else held / whole,
        "achieved_reuse": None if found is None else found / whole,
    }
