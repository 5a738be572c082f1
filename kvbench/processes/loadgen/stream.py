"""What the bytes of one streamed answer mean: token events, usage, errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

from kvbench.core.foreign_text import visible
from kvbench.core.records import RequestError, abort_text

MAX_DETAIL_CHARS: Final = 300
MAX_EVENT_BYTES: Final = 1 << 20
"""Of one event that has not ended. One of 10,000 tokens with their logprobs has a quarter of that."""
MAX_EVENT_LINES: Final = 100_000
_DECODE: Final = json.JSONDecoder().decode
"""As json.loads does, which first finds out in which encoding bytes are: events are always UTF-8."""
MAX_TOKENS: Final = 2**31 - 1
"""A usage that reports more is none."""
EVENTS_A_TOKEN: Final = 10
SPARE_EVENTS: Final = 10_000
"""More token events than so many for each token that was asked for, and these, are no answer: what came of an
endless one within its deadline would keep the load generator from its sends for seconds.
"""
_PROMPT_IDS: Final = b'"prompt_token_ids"'
PROMPT_ID_BYTES: Final = 12
"""At most, of a prompt's token id that is sent back."""
_OTHER_FIELDS: Final = (b":", b"event:", b"id:", b"retry:")
"""Comments and fields of server-sent events that say nothing here."""


def clipped(data: bytes | str) -> str:
    """Server's words, without what a terminal obeys, and short enough for a record."""
    text = visible(data.decode("utf-8", "replace") if isinstance(data, bytes) else data)
    return text if len(text) <= MAX_DETAIL_CHARS else text[:MAX_DETAIL_CHARS] + "…"


@dataclass(frozen=True)
class FirstEvent:
    """The first token event: bytes of its text, whether that is nothing but blanks, and the tokens that the
    server had told by then in its usage, if it does so all along.
    """

    text_bytes: int
    blank: bool
    told_tokens: int | None
    empty_before: int
    """Events without text that came before it."""


@dataclass
class StreamReader:
    """Reads server-sent events (LF, CRLF or CR lines, comments, events split over reads).

    A token event is an event that brings text: one whose ``choices`` have none says that something began, or
    why it ended, and must not end TTFT. Several tokens may share one event, so tokens are counted by
    ``usage`` and never by events. An event gets the stamp of the read that completed it; stamps are in any
    unit.
    """

    token_stamps: MutableSequence[int] = field(default_factory=list)
    empty_events: int = 0
    """Events with ``choices`` and without text."""
    empty_after: int = 0
    """Those after the last text."""
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    """The prompt's length as the server counted it."""
    text: str = ""
    """Of the last token event that was decoded."""
    text_crc: int = 0
    """CRC-32 of the answer's whole text (UTF-8), which finds equal answers without keeping them."""
    text_bytes: int = 0
    """Its length."""
    kept: bytearray | None = None
    """The text itself; None where it is not kept."""
    token_ids: list[int] | None = None
    """The tokens' ids, as the server gives them (``return_token_ids``); None where they are not kept."""
    event_bytes: int = MAX_EVENT_BYTES
    """An event that is longer before it has ended is none."""
    asked_tokens: int | None = None
    """How many tokens the answer was to have; None if that is not known."""
    first_event: FirstEvent | None = None
    """What the first token event brought."""
    first_event_stamp: int | None = None
    """Of the first event of any kind: one that only says that something began comes before the text."""
    done: bool = False
    half: bool = False
    """The stream ended in the middle of an event; known after ``finish``."""
    error: RequestError = ""
    detail: str = ""
    endless: bool = False
    """An event grew beyond all reason: nothing more of this stream is worth reading."""
    _pending: bytes = b""
    _more: list[bytes] = field(default_factory=list)
    """What came after ``_pending`` without a line break: joined once, however many reads it took."""
    _size: int = 0
    """Its bytes."""
    _data: list[bytes] = field(default_factory=list)

    @property
    def event_seen(self) -> bool:
        """Whether any event of a completion has come: a stream it is, then."""
        return bool(self.token_stamps) or self.empty_events > 0

    @property
    def between_events(self) -> bool:
        """Nothing of a next event has been read."""
        return not self._pending and not self._data

    def feed(self, data: bytes, stamp: int) -> None:
        """Takes the bytes of one read."""
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
        asked = self.asked_tokens
        if asked is not None and len(self.token_stamps) > EVENTS_A_TOKEN * asked + SPARE_EVENTS:
            self._give_up(f"{len(self.token_stamps):,} token events where {asked} tokens were asked for")

    def finish(self, whole: bool = True) -> None:
        """The answer has ended; ``whole``: by its own framing. The end mark may lack its line break."""
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
        """Takes in the data of one whole event; returns whether it is a token event."""
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
        problem = error_in(event)
        if problem:
            self._fail("error_body", problem)
            return False
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._take_usage(usage)
        choices = event.get("choices")
        if not choices:
            return False
        aborted = abort_text(choices)
        if aborted:
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
        """A token event's text, which may have come without being decoded."""
        self.text_crc = crc32(text, self.text_crc)
        self.text_bytes += len(text)
        self.empty_after = 0
        if self.kept is not None:
            self.kept += text

    def add_empty(self) -> None:
        """An event without text."""
        self.empty_events += 1
        self.empty_after += 1

    @property
    def text_so_far(self) -> int:
        """CRC-32 and length of the text in one number, as the compiled log counts on: CRC + length · 2³²."""
        return self.text_bytes << 32 | self.text_crc

    @text_so_far.setter
    def text_so_far(self, text: int) -> None:
        if text >> 32 != self.text_bytes:
            self.empty_after = 0
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
            self.error, self.detail = error, clipped(detail)


def without_prompt_ids(data: bytes) -> bytes:
    """An event without its prompt's token ids: vLLM sends them all back with the first token, and to decode
    100,000 of them would delay what else is to be sent.
    """
    begin = data.find(_PROMPT_IDS)
    start = data.find(b"[", begin, begin + len(_PROMPT_IDS) + 4) if begin >= 0 else -1
    end = data.find(b"]", start) if start >= 0 else -1
    return data if end < 0 else data[:start] + b"null" + data[end + 1 :]


def token_ids_in(choices: Any) -> list[int]:
    """The token ids that an event's choices bring."""
    found: list[int] = []
    for choice in choices if isinstance(choices, list) else ():
        ids = choice.get("token_ids") if isinstance(choice, dict) else None
        if isinstance(ids, list) and all(type(each) is int and 0 <= each < MAX_TOKENS for each in ids):
            found += ids
    return found


def text_in(choices: Any) -> str:
    """The text that an event's choices bring, of completions or of chats; empty if there is none."""
    parts = []
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            delta = choice.get("delta")
            pieces = [choice.get("text"), *(_of_delta(delta) if isinstance(delta, dict) else ())]
            parts += [text for text in pieces if isinstance(text, str)]
    return "".join(parts)


def _of_delta(delta: dict[str, Any]) -> Iterator[Any]:
    """What a chat's delta brings: of the answer, of the reasoning before it, of a tool's call, a refusal."""
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


def error_in(event: dict[str, Any]) -> str:
    """The error that a JSON answer reports, in OpenAI's shape or vLLM's older one; empty if there is none."""
    error = event.get("error")
    if error:
        return str(error.get("message") or error) if isinstance(error, dict) else str(error)
    if event.get("object") == "error":
        return str(event.get("message") or event)
    return ""


def whole_body_error(body: bytes) -> tuple[RequestError, str]:
    """What an answer with status 200 that is no event stream is: an error reported in JSON, or garbage."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return "bad_stream", "not an event stream: " + clipped(body)
    problem = error_in(answer) if isinstance(answer, dict) else ""
    return (
        ("error_body", clipped(problem))
        if problem
        else ("bad_stream", "not an event stream: " + clipped(body))
    )
