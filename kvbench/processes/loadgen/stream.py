"""Parser of one streamed answer: token events, usage, errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

from kvbench.core.foreign_text import visible
from kvbench.core.records import RequestError, abort_text, error_in

MAX_DETAIL_CHARS: Final = 300
MAX_EVENT_BYTES: Final = 1 << 20
"""Maximum size of an unfinished event. An event of 10,000 tokens with logprobs has a quarter of it."""
MAX_EVENT_LINES: Final = 100_000
_DECODE: Final = json.JSONDecoder().decode
"""json.loads would first detect the encoding of bytes; events are always UTF-8."""
MAX_TOKENS: Final = 2**31 - 1
"""A larger usage is invalid."""
EVENTS_A_TOKEN: Final = 10
SPARE_EVENTS: Final = 10_000
"""Token events allowed above one per requested token; a longer stream is an error. An endless one would delay
the load generator's sends by seconds."""
_PROMPT_IDS: Final = b'"prompt_token_ids"'
PROMPT_ID_BYTES: Final = 12
"""Maximum bytes of a prompt's token id that is sent back."""
_OTHER_FIELDS: Final = (b":", b"event:", b"id:", b"retry:")
"""Ignored comments and fields of server-sent events."""


def clip(data: bytes | str) -> str:
    """Return a server's text without terminal control characters, and short enough for a record."""
    text = visible(data.decode("utf-8", "replace") if isinstance(data, bytes) else data)
    return text if len(text) <= MAX_DETAIL_CHARS else text[:MAX_DETAIL_CHARS] + "…"


@dataclass(frozen=True)
class FirstEvent:
    """The first token event: bytes of text, whether blank, and tokens reported so far."""

    text_bytes: int
    blank: bool
    tokens: int | None
    empty_before: int


@dataclass
class StreamReader:
    """Parses server-sent events (LF, CRLF or CR lines, comments, events split over reads). A token event
    brings text: one whose ``choices`` have none only marks a begin or end, and must not end TTFT. Several
    tokens may share one event, so tokens are counted by ``usage``, never by events. An event gets the stamp
    of the read that completed it; stamps are in any unit."""

    token_stamps: MutableSequence[int] = field(default_factory=list)
    empty_events: int = 0
    """Events with ``choices`` and without text."""
    stamp: int = 0
    """Stamp of the read in progress."""
    empty_after: list[int] = field(default_factory=list)
    """Stamps of the events without text after the last text."""
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    text: str = ""
    text_crc: int = 0
    """CRC-32 of the answer's whole text (UTF-8), to find equal answers."""
    text_bytes: int = 0
    kept: bytearray | None = None
    token_ids: list[int] | None = None
    """The tokens' ids from the server (``return_token_ids``), if kept."""
    event_bytes: int = MAX_EVENT_BYTES
    """Maximum size of an unfinished event."""
    requested_tokens: int | None = None
    """Requested length of the answer, if known."""
    first_event: FirstEvent | None = None
    first_event_stamp: int | None = None
    """Stamp of the first event of any kind, which may precede the text."""
    done: bool = False
    half: bool = False
    """The stream ended in the middle of an event; known after ``finish``."""
    error: RequestError = ""
    detail: str = ""
    endless: bool = False
    """An event exceeds the limit: the rest of the stream is ignored."""
    _pending: bytes = b""
    _more: list[bytes] = field(default_factory=list)
    """Bytes after ``_pending`` without a line break; joined once."""
    _size: int = 0
    _data: list[bytes] = field(default_factory=list)

    @property
    def event_seen(self) -> bool:
        """Whether any completion event has come: the answer is a stream."""
        return bool(self.token_stamps) or self.empty_events > 0

    @property
    def between_events(self) -> bool:
        return not self._pending and not self._data

    def feed(self, data: bytes, stamp: int) -> None:
        self.stamp = stamp
        if self._pending:
            if b"\n" not in data and b"\r" not in data and not self._pending.endswith(b"\r"):
                self._more.append(data)
                self._size += len(data)
                if len(self._pending) + self._size > self.event_bytes:
                    self._give_up()
                return
            data = self._begun() + data
        if b"\r" in data:
            # A carriage return at the very end may be half of a CRLF.
            tail = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(tail)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail
        lines = data.split(b"\n")
        self._pending = lines.pop()
        if len(self._pending) > self.event_bytes or len(self._data) > MAX_EVENT_LINES:
            self._give_up()
        for line in lines:
            if not line:
                if self._data:
                    if self.first_event_stamp is None:
                        self.first_event_stamp = stamp
                    if self.event(b"\n".join(self._data)):
                        self.token_stamps.append(stamp)
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line.startswith(_OTHER_FIELDS):
                self._fail("bad_stream", b"not a server-sent event: " + line)
        requested, events = self.requested_tokens, len(self.token_stamps) + self.empty_events
        if requested is not None and events > EVENTS_A_TOKEN * requested + SPARE_EVENTS:
            self._give_up(f"{events:,} token events where {requested} tokens were requested")

    def finish(self, whole: bool = True) -> None:
        """Handle the answer's end; ``whole``: by its own framing. The end mark may lack its line break."""
        self._pending = self._begun()
        rest = self._pending.strip(b"\r\n")
        begun = bool(rest) and b"data:".startswith(rest)
        if rest.startswith(b"data:"):
            self._data.append(rest[5:].strip())
        elif whole and not begun and rest and not rest.startswith(_OTHER_FIELDS):
            self._fail("bad_stream", b"not a server-sent event: " + rest)
        if self._data == [b"[DONE]"]:
            self.done = True
        else:
            self.half = bool(self._data) or begun

    def event(self, data: bytes) -> bool:
        """Parse the data of one whole event; return whether it is a token event."""
        if data == b"[DONE]":
            self.done = True
            return False
        if self.token_ids is not None and not self.event_seen:
            data = without_prompt_ids(data)
        try:
            event = _DECODE(data.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            self._fail("bad_stream", b"not JSON: " + data)
            return False
        if not isinstance(event, dict):
            self._fail("bad_stream", b"not an object: " + data)
            return False
        if problem := error_in(event):
            self._fail("error_body", problem)
            return False
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._take_usage(usage)
        choices = event.get("choices")
        if not choices:
            return False
        if aborted := abort_text(choices):
            self._fail("aborted", aborted)
        if self.token_ids is not None:
            self.token_ids += token_ids_in(choices)
        text = text_in(choices)
        if not text:
            self.add_empty()
            return False
        self.text = text
        encoded = text.encode("utf-8", "surrogatepass")
        if self.first_event is None:
            self.first_event = FirstEvent(
                len(encoded), text.isspace(), self.completion_tokens, self.empty_events
            )
        self.add_text(encoded)
        return True

    def add_text(self, text: bytes) -> None:
        """Add a token event's text, which may not have been decoded."""
        self.text_crc = crc32(text, self.text_crc)
        self.text_bytes += len(text)
        self.empty_after = []
        if self.kept is not None:
            self.kept += text

    def add_empty(self) -> None:
        self.empty_events += 1
        self.empty_after.append(self.stamp)

    @property
    def tokens_after(self) -> list[int]:
        """Stamps of the tokens without text after the last text, such as ignored end-of-sequence tokens. Only
        of streams with one event per token: each event above the usage marks a begin or end."""
        extra = len(self.token_stamps) + self.empty_events - (self.completion_tokens or 0)
        return self.empty_after[: max(0, len(self.empty_after) - extra)] if extra >= 0 else []

    @property
    def text_so_far(self) -> int:
        """CRC-32 and length of the text in one number, as in the compiled log: CRC + length · 2³²."""
        return self.text_bytes << 32 | self.text_crc

    @text_so_far.setter
    def text_so_far(self, text: int) -> None:
        if text >> 32 != self.text_bytes:
            self.empty_after = []
        self.text_bytes, self.text_crc = text >> 32, text & 0xFFFFFFFF
        if self.kept is not None:
            del self.kept[self.text_bytes :]

    def _take_usage(self, usage: dict[str, Any]) -> None:
        for name in ("completion_tokens", "prompt_tokens"):
            count = usage.get(name)
            if not isinstance(count, int):
                continue
            if count > MAX_TOKENS:
                digits = str(count)
                number = digits if len(digits) < 30 else f"a number of {len(digits)} digits"
                self._fail("bad_stream", f"the usage's {name} is {number}, which no answer can have")
            else:
                setattr(self, name, count)

    def _begun(self) -> bytes:
        begun = b"".join([self._pending, *self._more])
        self._more, self._size = [], 0
        return begun

    def _give_up(self, why: str = "") -> None:
        most = f"an event of more than {self.event_bytes >> 20} MiB, or of as many lines"
        self._fail("bad_stream", why or most)
        self._begun()
        self._pending, self._data, self.endless = b"", [], True

    def _fail(self, error: RequestError, detail: bytes | str) -> None:
        if not self.error:
            self.error, self.detail = error, clip(detail)


def without_prompt_ids(data: bytes) -> bytes:
    """Remove the prompt's token ids from an event. vLLM returns them with the first token; decoding 100,000
    of them would delay other sends."""
    begin = data.find(_PROMPT_IDS)
    start = data.find(b"[", begin, begin + len(_PROMPT_IDS) + 4) if begin >= 0 else -1
    end = data.find(b"]", start) if start >= 0 else -1
    return data if end < 0 else data[:start] + b"null" + data[end + 1 :]


def token_ids_in(choices: Any) -> list[int]:
    found: list[int] = []
    for choice in choices if isinstance(choices, list) else ():
        ids = choice.get("token_ids") if isinstance(choice, dict) else None
        if isinstance(ids, list) and all(type(token) is int and 0 <= token < MAX_TOKENS for token in ids):
            found += ids
    return found


def text_in(choices: Any) -> str:
    """Return the text of an event's choices, of completions or chats; empty without one."""
    parts = []
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            delta = choice.get("delta")
            pieces = [choice.get("text"), *(_delta_texts(delta) if isinstance(delta, dict) else ())]
            parts += [text for text in pieces if isinstance(text, str)]
    return "".join(parts)


def _delta_texts(delta: dict[str, Any]) -> Iterator[Any]:
    """Yield the texts of a chat's delta: answer, reasoning, tool call, refusal."""
    yield delta.get("content")
    reasoning = delta.get("reasoning")
    # vLLM up to 0.13 has the same text under both names.
    yield reasoning if isinstance(reasoning, str) else delta.get("reasoning_content")
    yield delta.get("refusal")
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield function.get("name")
            yield function.get("arguments")


def whole_body_error(body: bytes) -> tuple[RequestError, str]:
    """Classify an answer with status 200 that is not an event stream: an error in JSON, or garbage."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return "bad_stream", "not an event stream: " + clip(body)
    problem = error_in(answer) if isinstance(answer, dict) else ""
    return ("error_body", clip(problem)) if problem else ("bad_stream", "not an event stream: " + clip(body))
