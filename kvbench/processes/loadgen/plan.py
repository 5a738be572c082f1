"""The requests of a trial, as bytes, before it starts."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.canaries.pool import AFTER_FAILURE, canary_prompt
from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.load.dispatch import SESSION_HEADER, prompt_key
from kvbench.core.load.prompts import WORDS, PromptShape, messages_json, token_prompts
from kvbench.errors import InputError
from kvbench.hosts.server_access import access_headers
from kvbench.processes.loadgen.sockets.wire import ServerAddress
from kvbench.processes.loadgen.spec import CanarySpec, LoadSpec

_CELL: Final = 8
"""Bytes per token id in the encoder's table, with its comma."""


@dataclass
class PlannedRequest:
    """One request, sent ``offset_s`` after the trial's start; ``index`` is its index in the whole plan.
    ``parts`` is the request in pieces; empty if it depends on earlier answers."""

    index: int
    request_id: str
    offset_s: float
    input_len: int
    output_len: int
    prompt: bytes
    parts: tuple[bytes, ...] = ()
    canary: int | None = None
    """Number of its prompt, if the reference output is known."""
    session: int | None = None
    turn: int | None = None
    """Index of the turn in its session."""
    session_id: str = ""
    """The session's name for the router, unique among all trials; empty without a session."""
    keeps_ids: bool = False
    """Request the token ids of its answer and keep them."""


_Wanted = tuple[int, float, int, int, NDArray[np.int32]]
"""Index, offset in seconds, input and output length, and token ids, or the words of a chat's message."""


def planned_requests(
    spec: LoadSpec, watched: Callable[[Iterator[_Wanted]], Iterator[_Wanted]] = iter
) -> list[PlannedRequest]:
    """Return this worker's requests in scheduled order, a pure function of the spec except the request ids.
    ``watched``: counts them meanwhile. Raises InputError."""
    encode = prompt_encoder(spec)
    run = uuid.uuid4().hex[:12]
    return [
        PlannedRequest(index, f"kvb-{run}-{index}", offset_s, input_len, output_len, encode(prompt))
        for index, offset_s, input_len, output_len, prompt in watched(_share(spec))
    ]


def prompt_encoder(spec: LoadSpec) -> Callable[[NDArray[np.int32]], bytes]:
    """Return a function that encodes a prompt's token ids, or its message's words, as JSON."""
    if spec.chat is None:
        return TokenEncoder(spec.vocab_size).encode
    return lambda words: messages_json(words.tolist())


def _share(spec: LoadSpec) -> Iterator[_Wanted]:
    if spec.requests_path:
        yield from _traced(spec)
        return
    offsets = (
        # In a closed loop the time is unknown until a slot is free.
        ([0.0] * spec.num_requests if spec.concurrency else spec.offsets_s)
        or planned_offsets(spec.request_rate, spec.num_requests, spec.burstiness, spec.seed).tolist()
    )
    length, vocabulary = _prompt_size(spec, spec.input_len)
    shape = PromptShape(length, vocabulary, spec.shared_prefix_len)
    prompts = token_prompts(spec.num_requests, shape, spec.seed)
    for index in range(spec.worker, spec.num_requests, spec.workers):
        yield index, offsets[index], spec.input_len, spec.output_len, prompts[index]


def _traced(spec: LoadSpec) -> Iterator[_Wanted]:
    from kvbench.core.load.traces import traced_prompt

    before_s = 0.0
    for index, (where, row) in enumerate(_rows(spec.requests_path)):
        offset_s: Any = row.get("offset_s")
        if not _is_time(offset_s) or not offset_s >= before_s:
            raise InputError(f"{where}: offset_s must be a number of seconds, and not before the last one's")
        before_s = float(offset_s)
        input_len, output_len = _length(row, "input_len", where), _length(row, "output_len", where)
        if index % spec.workers == spec.worker:
            length, vocabulary = _prompt_size(spec, input_len)
            ids = traced_prompt(length, row.get("blocks"), spec.seed, index, vocabulary)
            yield index, before_s, input_len, output_len, np.asarray(ids, np.int32)


def _prompt_size(spec: LoadSpec, input_len: int) -> tuple[int, int]:
    """Return a prompt's length in tokens or words, and the number of different ones."""
    return (input_len, spec.vocab_size) if spec.chat is None else (spec.chat.words(input_len), len(WORDS))


def _length(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {name} must be a whole number from 1 on")
    return value


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{where}: invalid JSON:  {error}") from error
                if not isinstance(row, dict):
                    raise InputError(f"{where}: not a JSON object")
                yield where, row
    except OSError as error:
        raise InputError(f"cannot read requests_path {path}: {error.strerror}") from error


class TokenEncoder:
    """Encodes token ids as a JSON list, from a table of each id's digits and comma."""

    def __init__(self, vocab_size: int) -> None:
        self._table: NDArray[np.uint64] | None = None
        if vocab_size < 10 ** (_CELL - 1):
            cells = [(b"%d," % number).ljust(_CELL, b"\0") for number in range(vocab_size)]
            self._table = np.frombuffer(b"".join(cells), np.uint64)

    def encode(self, prompt: NDArray[np.int32]) -> bytes:
        return b"[" + self.items(prompt)[:-1] + b"]"

    def items(self, tokens: NDArray[np.int32]) -> bytes:
        """Encode with a comma after each id. An answer may have ids unknown to the scenario."""
        if self._table is None or tokens.max(initial=0) >= len(self._table):
            return b"".join(b"%d," % token for token in tokens.tolist())
        return self._table[tokens].tobytes().translate(None, b"\0")


def completion_fields(spec: LoadSpec, request: PlannedRequest) -> dict[str, Any]:
    output_len = request.output_len
    body = {
        "model": spec.model,
        "max_tokens": output_len,
        "min_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **spec.extra_body,
    }
    if request.keeps_ids:
        body["return_token_ids"] = True
    body.pop(prompt_key(spec.path), None)
    return body


def request_headers(spec: LoadSpec, request_id: str, session_id: str) -> dict[str, str]:
    return {
        "content-type": "application/json",
        "accept": "text/event-stream",
        **access_headers(spec.access),
        "x-request-id": request_id,
        **({SESSION_HEADER: session_id} if session_id else {}),
    }


def request_parts(
    server: ServerAddress, path: str, headers: Mapping[str, str], fields: Mapping[str, Any], prompt: bytes
) -> tuple[bytes, ...]:
    """Return a whole request in pieces; the long prompt is neither copied nor encoded again."""
    text = json.dumps(fields, separators=(",", ":"))
    before = f'{text[:-1]},"{prompt_key(path)}":'.encode()
    length = len(before) + len(prompt) + 1
    return server.head(path, headers, length) + before, prompt, b"}"


def prepare(spec: LoadSpec, plan: Iterable[PlannedRequest], server: ServerAddress) -> None:
    bodies: dict[tuple[int, bool], dict[str, Any]] = {}
    for request in plan:
        fields = bodies.get((request.output_len, request.keeps_ids))
        if fields is None:
            fields = completion_fields(spec, request)
            bodies[request.output_len, request.keeps_ids] = fields
        headers = request_headers(spec, request.request_id, request.session_id)
        request.parts = request_parts(server, spec.path, headers, fields, request.prompt)
        request.prompt = b""


def plant_canaries(spec: LoadSpec, plan: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Set the prompts of the plan's canaries; return this worker's spares. Raises InputError."""
    known, encode = CanarySpec.of(spec.canaries), prompt_encoder(spec)
    numbers = {pair[0]: pair[1] for pair in known.at}

    def encoded(number: int, input_len: int) -> bytes:
        tokens = canary_prompt(input_len, known.seed, number, spec.vocab_size)
        if spec.chat is not None:  # encoded like the message of single requests
            tokens = list(islice(cycle(tokens), spec.chat.words(input_len)))
        return encode(np.asarray(tokens, np.int32))

    for request in plan:
        request.canary = numbers.get(request.index)
        if request.canary is not None:
            request.prompt = encoded(request.canary, request.input_len)
    if not plan:
        return []
    run_id, behind = plan[0].request_id.rpartition("-")[0], plan[-1].index + 1
    return [
        PlannedRequest(
            index=behind + place,
            request_id=f"{run_id}-spare-{number}",
            offset_s=0.0,
            input_len=spec.input_len,
            output_len=spec.output_len,
            prompt=encoded(number, spec.input_len),
            canary=number,
        )
        for place, number in enumerate(known.spares[spec.worker :: spec.workers])
    ]


class Spares:
    """Canaries that replace requests after a failure, to detect wrong reuse of its KV."""

    def __init__(self, spares: Sequence[PlannedRequest] = ()) -> None:
        self._left = list(spares)
        self._owed = 0

    def failed(self) -> None:
        self._owed = AFTER_FAILURE

    def put(self, plan: MutableSequence[PlannedRequest], place: int) -> None:
        """Replace the next request by a canary if one is owed and the lengths agree."""
        planned = plan[place]
        if not self._owed or not self._left or planned.canary is not None:
            return
        spare = self._left[0]
        if (spare.input_len, spare.output_len) == (planned.input_len, planned.output_len):
            self._owed -= 1
            del self._left[0]
            spare.index, spare.offset_s = planned.index, planned.offset_s
            # Servers identify it by the text before its index.
            spare.request_id = f"{spare.request_id}-{planned.index}"
            plan[place] = spare
