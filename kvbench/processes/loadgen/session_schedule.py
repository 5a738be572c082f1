"""Session loads in the load generator: their file, the due time of each turn, and its prompt as JSON.

The first turn of a session is due at its planned time, a later one the think time after its answers. A prompt
consists of blocks, encoded once and kept, and of the server's answers. A block is a node of the tree of a
trial's prompts (``chained``). Its tokens begin with the digits of its number, scrambled with the trial's
salt: equal blocks have equal tokens, and no other block of this or another trial has them."""

from __future__ import annotations

import heapq
import math
import uuid
import zipfile
from collections.abc import Callable, Container, Iterator
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.arrivals import Sends
from kvbench.core.load.prompts import lowest_id
from kvbench.core.sessions.corpus import Blocks
from kvbench.core.sessions.session_load import SessionLoad, load_of_arrays
from kvbench.core.simulation.kv_cache import mix64, mix64_array
from kvbench.errors import InputError
from kvbench.processes.loadgen.in_flight import InFlightRequest, InFlightRun
from kvbench.processes.loadgen.plan import PlannedRequest
from kvbench.processes.loadgen.schedules import Begin

Tokens = NDArray[np.int32]

_STREAM: Final = 0x5E5510
"""Separates these tokens from those of single prompts with the same seed."""
_ODD: Final = 0x9E3779B97F4A7C15


class BlockTokens:
    """Token ids of blocks 0 … ``blocks`` - 1 of ``block_tokens`` each, a function of the seed alone. Raises
    InputError if blocks are too short, or the vocabulary too small, for distinct blocks."""

    def __init__(self, vocab_size: int, block_tokens: int, blocks: int, seed: int) -> None:
        self._low = lowest_id(vocab_size)
        self._choices = vocab_size - self._low
        if self._choices < 2:
            raise InputError(f"vocab_size must be at least 2, it is {vocab_size}")
        self._bits = min(64, math.floor(block_tokens * math.log2(self._choices)))
        if blocks > 1 << self._bits:
            raise InputError(
                f"{blocks:,} blocks of {block_tokens} tokens cannot differ with {self._choices} token ids",
                hint="raise workload.sessions.length_scale, or use a larger vocab_size",
            )
        self._digits = min(block_tokens, math.ceil(self._bits / math.log2(self._choices)))
        self._salt = np.uint64(mix64(mix64(_STREAM) ^ seed))

    def of(self, blocks: NDArray[np.int64], length: int) -> Tokens:
        """Return the first ``length`` tokens of blocks, one row each."""
        keys = self._keys(blocks.astype(np.uint64))
        found = np.empty((len(keys), length), np.int32)
        left, choices = keys.copy(), np.uint64(self._choices)
        for place in range(min(length, self._digits)):
            found[:, place] = left % choices
            left //= choices
        if length > self._digits:
            places = np.arange(self._digits, length, dtype=np.uint64)
            found[:, self._digits :] = mix64_array(mix64_array(keys)[:, None] + places[None, :]) % choices
        found += np.int32(self._low)
        return found

    def _keys(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Map numbers to distinct numbers of equal size."""
        if self._bits == 64:
            return mix64_array(numbers ^ self._salt)
        found: NDArray[np.uint64] = numbers * np.uint64(_ODD) + self._salt
        return found & np.uint64((1 << self._bits) - 1)


PREPARED_BYTES: Final = 256_000_000
"""Bytes of prompts encoded before the run; the rest is encoded when needed."""

Encode = Callable[[Tokens], bytes]
"""Encodes token ids as the items of a JSON list, each followed by a comma."""


class SessionPrompts:
    """Makes the prompt of each request once the answers in it are known."""

    def __init__(self, load: SessionLoad, vocab_size: int, seed: int, encode: Encode) -> None:
        """Raises InputError if blocks cannot have distinct tokens."""
        self._load = load
        self._encode = encode
        size = load.block_tokens
        self._nodes = [
            nodes[: length // size] for nodes, length in zip(load.prompts, load.input_len, strict=True)
        ]
        self._blocks = 1 + max((int(nodes.max()) for nodes in self._nodes if len(nodes)), default=-1)
        # After the tree's blocks: one for the unique end of each prompt.
        self._tokens = BlockTokens(vocab_size, size, self._blocks + load.requests, seed)
        self._encoded: list[bytes | None] = [None] * self._blocks
        self._followers = {earlier: later for later, earlier in enumerate(load.goes_on) if earlier >= 0}
        self._ends: dict[int, Tokens] = {}
        """Continued prompts: the tokens after their blocks, then their answers."""

    def prepare(self) -> None:
        """Encode what is known before any answer, first the prompts that need none."""
        count, reserved = 0, self._answer_blocks()
        waits = [bool(row) for row in self._load.following.after]
        for place in sorted(range(len(waits)), key=waits.__getitem__):
            nodes = self._nodes[place]
            for node in self._fill(nodes[~reserved[nodes]]):
                count += len(self._encoded[node] or b"")
            if count > PREPARED_BYTES:
                return

    def _answer_blocks(self) -> NDArray[np.bool_]:
        found, load = np.zeros(self._blocks, np.bool_), self._load
        for earlier, later in self._followers.items():
            until = load.input_len[earlier] + load.output_len[earlier]
            found[self._nodes[later][len(self._nodes[earlier]) : -(-until // load.block_tokens)]] = True
        return found

    def needs_answer(self, place: int) -> bool:
        return place in self._followers

    def answered(self, place: int, token_ids: list[int]) -> None:
        """Store its answer, as the server gave it."""
        if place in self._followers:
            self._ends[place] = np.concatenate([self._ends[place], np.array(token_ids, np.int32)])

    def forget(self, place: int) -> None:
        self._ends.pop(place, None)

    def json(self, place: int) -> bytes:
        nodes, size = self._nodes[place], self._load.block_tokens
        length = self._load.input_len[place]
        behind = length - size * len(nodes)
        end_block = np.array([self._blocks + place])
        earlier = self._load.goes_on[place] if self._load.goes_on else -1
        end = self._tokens.of(end_block, behind)[0]
        if earlier >= 0:
            given, begins = self._ends.pop(earlier), len(self._nodes[earlier])
            self._put(given, nodes[begins:])
            rest = given[size * (len(nodes) - begins) :][:behind]
            end[: len(rest)] = rest
        self._fill(nodes)
        if place in self._followers:
            self._ends[place] = end
        pieces = [b"[", *map(self._block, nodes.tolist()), self._encode(end)]
        while not pieces[-1]:
            pieces.pop()
        pieces[-1] = pieces[-1][:-1]  # its comma
        return b"".join([*pieces, b"]"])  # one copy only: prompts are long

    def _block(self, node: int) -> bytes:
        return self._encoded[node] or b""

    def _put(self, given: Tokens, nodes: Blocks) -> None:
        """Fill the blocks that contain an answer and the end of the prompt before it."""
        size = self._load.block_tokens
        reached = nodes[: -(-len(given) // size)]
        for begin, node in zip(range(0, len(given), size), reached.tolist(), strict=False):
            if self._encoded[node] is not None:
                continue
            tokens = given[begin : begin + size]
            if len(tokens) < size:
                filler = self._tokens.of(np.array([node]), size)[0]
                tokens = np.concatenate([tokens, filler[len(tokens) :]])
            self._encoded[node] = self._encode(tokens)

    def _fill(self, nodes: Blocks) -> list[int]:
        """Encode blocks that are not yet encoded; return them."""
        missing = [node for node in nodes.tolist() if self._encoded[node] is None]
        if missing:
            size = self._load.block_tokens
            tokens = self._tokens.of(np.array(missing), size)
            for node, row in zip(missing, _rows(self._encode(tokens.ravel()), size), strict=True):
                self._encoded[node] = row
        return missing


def _rows(encoded: bytes, size: int) -> Iterator[bytes]:
    """Yield the bytes of each ``size`` items of a list."""
    commas = np.flatnonzero(np.frombuffer(encoded, np.uint8) == ord(","))
    ends = [0, *(commas[size - 1 :: size] + 1).tolist()]
    return (encoded[begin:end] for begin, end in pairwise(ends))


class SessionSchedule:
    ahead_s: Final = 0.05
    """A short lead: a turn of another session may become due first, and a long prompt costs memory."""
    whole: Final = True

    def __init__(self, load: SessionLoad, prompts: SessionPrompts) -> None:
        self._load = load
        self._prompts = prompts
        self._sends = Sends(load.offsets_s, load.following)
        self._run_id = uuid.uuid4().hex[:12]
        self._due: list[tuple[float, int]] = []
        self._known: dict[int, PlannedRequest] = {}
        self._planned = -1
        """Index of the next request with a planned time; it is among the due ones."""
        self._stopped = False
        self._next_planned()

    def _next_planned(self) -> None:
        found = self._sends.planned()
        self._planned = -1 if found is None else found[1]
        if found is not None:
            heapq.heappush(self._due, found)

    @property
    def unsent(self) -> int:
        return 0 if self._stopped or not self._sends.left else max(1, len(self._due))

    def upcoming(self, made: Container[int]) -> PlannedRequest | None:
        if not self._due or self._stopped:
            return None
        due_s, place = self._due[0]
        found = self._known.get(place)
        if found is None:
            load = self._load
            found = self._known[place] = PlannedRequest(
                index=place,
                request_id=f"kvb-{self._run_id}-{place}",
                offset_s=due_s,
                input_len=load.input_len[place],
                output_len=load.output_len[place],
                prompt=b"",
                session=load.following.session[place],
                turn=load.following.turn[place],
                session_id=f"kvb-{self._run_id}-{load.following.session[place]}",
                keeps_ids=self._prompts.needs_answer(place),
            )
        return found

    def take(self, planned: PlannedRequest) -> None:
        _, place = heapq.heappop(self._due)
        assert place == planned.index
        del self._known[place]
        self._sends.sent(place, planned.offset_s)
        if place == self._planned:
            self._next_planned()

    def ended(self, request: InFlightRequest, now_s: float) -> bool:
        place, record = request.place, request.record
        if not record.ok:
            self._sends.failed(place)
            self._prompts.forget(place)
            return False
        self._prompts.answered(place, request.answer_ids())
        begun_s, answered_s = self._sends.begun_s(place), record.last_token_s or now_s
        if self._load.following.last[place] and begun_s is not None:
            record.session_s = answered_s - begun_s
        due = self._sends.answered(place, answered_s)
        for turn in due:
            heapq.heappush(self._due, turn)
        return bool(due)

    def beat(self, now_s: float) -> None:
        """No action: turns wait for answers, not for time."""

    def stop(self) -> None:
        self._stopped = True
        self._due.clear()
        self._known.clear()

    def filling(self, begin: Begin) -> Begin:
        """Wrap ``begin`` for requests whose prompts contain answers and are made at the send."""

        def filled(run: InFlightRun, request: PlannedRequest, scheduled_s: float) -> InFlightRequest:
            request.prompt = self._prompts.json(request.index)
            return begin(run, request, scheduled_s)

        return filled


def read_session_load(path: str) -> SessionLoad:
    """Read the load from an npz file of ``core/sessions/session_load.py``. Raises InputError."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return load_of_arrays(arrays)
    except OSError as error:
        raise InputError(f"cannot read sessions_path {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"sessions_path {path} contains no load of sessions: {error}") from error
