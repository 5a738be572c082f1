"""Parses an answer's bytes into events: a fast path for the usual shape, and a general path for all.

In the usual shape every chunk of a stream holds one whole event, and reads end with chunks. The fast path
checks each chunk's size against its length, and decodes an event as JSON only if it differs from an earlier
one in more than a plain string (``Known``). Everything else, and each answer's head and end, goes through
httptools and the StreamReader, which can take over and give back at any chunk. Both paths give the same
result."""

from __future__ import annotations

import json
import re
from array import array
from itertools import chain, repeat
from typing import Any, Final, cast

import httptools

from kvbench.processes.loadgen.sockets.clock import READS
from kvbench.processes.loadgen.stream import StreamReader, text_in

EVENT_END: Final = b"\n\n\r\n"
"""End of an event and of its chunk."""
LAST_CHUNK: Final = b"0\r\n\r\n"
MAX_KNOWN: Final = 32
"""Maximum number of remembered reads per stream: a server may repeat a chunk often."""
MAX_LENGTHS: Final = 64
"""Maximum number of chunk lengths with a remembered beginning."""

_HEX: Final = re.compile(rb"[0-9a-fA-F]{1,7}")
_TEXTS: Final = (b'"text":"', b'"content":"', b'"reasoning":"', b'"reasoning_content":"', b'"arguments":"')
"""Prefixes of the text of a completion, or of a chat's delta."""
_PROBE: Final = "another text"
_NEVER_KNOWN: Final = (b"completion_tokens", b"prompt_tokens", b"\\")
_PLAIN: Final = bytes(set(range(0x20, 0x7F)) - set(b'"\\'))


class UnusualError(Exception):
    """A chunk that the fast path cannot parse."""


class Known:
    """Cache of a stream's parsed reads, so that repeated ones are parsed once."""

    def __init__(self, stream: StreamReader) -> None:
        self._stream = stream
        self._seen: dict[bytes, tuple[int, bytes]] = {}
        """Read → number of its token events, and their text."""
        self.begin = b""
        self.before: dict[int, bytes] = {}
        """The same after its chunk size, by the length of a read of one such chunk."""
        self.after = EVENT_END
        self.end: bytes | None = None
        self._plain = False
        """Whether the chunks of a read may be skipped when repeated."""
        self._text = b""

    @property
    def text_so_far(self) -> int:
        """The stream's text (CRC-32 and length) in one number."""
        return self._stream.text_so_far

    @text_so_far.setter
    def text_so_far(self, text: int) -> None:
        self._stream.text_so_far = text

    def add_text(self, text: bytes) -> None:
        """Add the text of an event that was not decoded."""
        self._stream.add_text(text)

    def tokens_in(self, read: bytes) -> int:
        """Process a read and return its number of token events. Raises UnusualError unless the read is whole
        chunks with one whole event each."""
        seen = self._seen.get(read)
        if seen is not None and self.end is None:
            count, text = seen
            self._stream.add_text(text)
            return count
        chunks = read.split(EVENT_END)
        rest = chunks.pop()
        if not chunks or rest not in (b"", LAST_CHUNK) or self.end is not None:
            raise UnusualError
        count, self._plain, self._text = 0, True, b""
        stream = self._stream
        before = stream.text_so_far, stream.empty_events, stream.first_event
        empty_after, after = stream.empty_after, len(stream.empty_after)
        usage = stream.completion_tokens, stream.prompt_tokens
        try:
            for chunk in chunks:
                count += self._is_token(chunk)
        except UnusualError:  # the general path parses all of it again
            stream.text_so_far, stream.empty_events, stream.first_event = before
            stream.empty_after = empty_after[:after]
            stream.completion_tokens, stream.prompt_tokens = usage
            raise
        if rest:
            self.end = read
        elif self._plain and len(self._seen) < MAX_KNOWN:
            self._seen[read] = count, self._text
        return count

    def _is_token(self, chunk: bytes) -> bool:
        """Whether a chunk, without its last four bytes, holds a token event."""
        size, mark, event = chunk.partition(b"\r\n")
        whole = mark and _HEX.fullmatch(size) and int(size, 16) == len(event) + 2
        if not whole or event[:5] != b"data:" or b"\n" in event or b"\r" in event:
            raise UnusualError
        stream = self._stream
        if (text := self._known_text(event)) is not None:
            if not text:
                stream.add_empty()
                self._plain = False
                return False
            if len(self.before) < MAX_LENGTHS:
                self.before[len(chunk) + len(EVENT_END)] = size + mark + self.begin
            stream.add_text(text)
            self._text += text
            return True
        usage, problem, done = stream.completion_tokens, stream.error, stream.done
        token = stream.event(event[5:].removeprefix(b" "))
        changed = (usage, problem, done) != (stream.completion_tokens, stream.error, stream.done)
        # Each event with a usage must be parsed, so it cannot be skipped.
        skipped = stream.token_ids is None  # the same holds for token ids
        if skipped and token and not changed and not any(name in event for name in _NEVER_KNOWN):
            self._learn(event)
            self._text += stream.text.encode("utf-8", "surrogatepass")
        else:
            self._plain = False
        return token

    def _known_text(self, event: bytes) -> bytes | None:
        """Return the text of an event that otherwise equals a decoded token event, else None."""
        begins, ends = self.begin, self.after[: -len(EVENT_END)]
        if not begins or len(event) < len(begins) + len(ends):
            return None
        if not event.startswith(begins) or not event.endswith(ends):
            return None
        text = event[len(begins) : len(event) - len(ends)]
        return None if text.translate(None, _PLAIN) else text

    def _learn(self, event: bytes) -> None:
        """Find the bytes around the text of a token event by inserting another text, and remember them."""
        text = self._stream.text.encode("utf-8", "surrogatepass")
        for opening in _TEXTS:
            start = event.find(opening + text + b'"') + len(opening)
            end = start + len(text)
            if start < len(opening) or text.translate(None, _PLAIN):
                continue
            if _reads_as_text(event[:start], event[end:]):
                self.begin, self.after = event[:start], event[end:] + EVENT_END
                self.before.clear()
                return


def _reads_as_text(begin: bytes, after: bytes) -> bool:
    """Whether an event is exactly a text between these two byte strings."""
    try:
        event = json.loads(begin[5:] + _PROBE.encode() + after)
        return text_in(event["choices"]) == _PROBE
    except (ValueError, LookupError, TypeError):
        return False


def usual_in_python(reads: list[bytes | int], start: int, known: Known, counts: list[int]) -> int:
    """Count reads from ``start`` on whose chunks differ only in their texts. ``counts`` gets chunks per read.
    A chunk is ``before[len(chunk)]``, at least one character that JSON does not escape, then ``after``; it
    always fits the chunk's length. This version accepts one chunk per read, the compiled one any number."""
    before, after, tail = known.before, known.after, -len(known.after)
    for place in range(start, len(reads)):
        read = reads[place]
        assert isinstance(read, bytes)
        begins = before.get(len(read))
        if (
            begins is None
            or not read.startswith(begins)
            or not read.endswith(after)
            or not (text := read[len(begins) : tail])
            or text.translate(None, _PLAIN)
        ):
            return place - start
        known.add_text(text)
        counts.append(1)
    return len(reads) - start


def _usual_compiled(reads: list[bytes | int], start: int, known: Known, counts: list[int]) -> int:
    count: int
    so_far = known.text_so_far
    count, known.text_so_far = READS.usual(reads, start, known.begin, known.after, counts, so_far)
    return count


usual: Final = usual_in_python if READS is None else _usual_compiled


MAX_HEAD_BYTES: Final = 1 << 20
"""Limit of an answer's head, interim answers included. A read may include body, so it is generous."""
HEAD_END: Final = b"\r\n\r\n"
KEPT_BODY_BYTES: Final = 1_000_000
"""Bytes kept of a body that is not a stream, for its error message."""


class ServerAnswer:
    """Parses one answer: an event stream, or a body of which ``body_limit`` bytes are kept."""

    __slots__ = (
        "_at_boundary",
        "_head_bytes",
        "_known",
        "_may_keep_alive",
        "_parser",
        "_parts",
        "_stamp",
        "body",
        "body_limit",
        "chunked",
        "complete",
        "doubts_ns",
        "first_body_ns",
        "first_doubt_ns",
        "head_seen",
        "headers",
        "keep_alive",
        "malformed",
        "status",
        "stream",
        "surplus",
        "until_close",
    )

    usual = staticmethod(usual)

    def __init__(self, body_limit: int = 0, *, keep_text: bool = False, keep_ids: bool = False) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._stamp = 0
        self._head_bytes = 0
        self._at_boundary = False
        self._may_keep_alive = False
        self.stream = StreamReader(
            token_stamps=array("q"),
            kept=bytearray() if keep_text else None,
            token_ids=[] if keep_ids else None,
        )
        self._known = Known(self.stream)
        self.body = bytearray()
        self.body_limit = body_limit
        self.status = 0
        self.headers: dict[str, str] = {}
        self.head_seen = self.chunked = self.until_close = self.keep_alive = False
        self.complete = False
        self.surplus = False
        """More bytes than the answer arrived: the connection is out of step."""
        self.malformed = ""
        self.first_body_ns: int | None = None
        self.doubts_ns = array("i")
        """Possible lateness of each token's stamp if its read brought a later token too, in ns."""
        self.first_doubt_ns = 0

    def take(
        self,
        reads: list[bytes | int],
        stamps: memoryview,
        doubts: memoryview | None = None,
        text: int | None = None,
    ) -> None:
        """Process some reads with their times; ignored after ``malformed`` or ``complete``.

        A read is its bytes, or its number of chunks if they were as ``expected``; a stamp is an int64. A
        doubt (int32) is how much earlier than its stamp a read's first bytes may have come. ``text`` is
        ``stream.text_so_far`` up to the last read that is a number."""
        if doubts is None:
            doubts = memoryview(bytes(4 * len(reads))).cast("i")
        if text is not None and reads and isinstance(reads[0], int):
            self.stream.text_so_far = text  # numbers precede all unprocessed bytes
        position = 0
        while position < len(reads):
            if self._regular():
                position += self._take_regular(reads[position:], stamps[position:], doubts[position:])
            if position < len(reads):
                read, stamp, doubt = reads[position], stamps[position], doubts[position]
                assert isinstance(read, bytes)
                end = 0 if self.head_seen else read.find(HEAD_END) + len(HEAD_END)
                if len(HEAD_END) <= end < len(read):
                    # Bytes after the head may be the first usual chunks.
                    self._feed(read[:end], stamp, 0)
                    reads[position] = read[end:]
                else:
                    self._feed(read, stamp, doubt)
                    position += 1

    def expected(self) -> tuple[bytes, bytes, int] | None:
        """Return the known bytes around a text, and the text so far, if a chunk begins next."""
        known = self._known
        if self.stream.kept is not None:  # the compiled log keeps no text
            return None
        return (
            (known.begin, known.after, self.stream.text_so_far) if known.begin and self._regular() else None
        )

    def closed(self) -> None:
        """Handle a regular close: the end of an answer without a length."""
        if self.head_seen and self.until_close and not self.malformed:
            self.complete = True

    def release(self) -> None:
        """Break the reference cycle with the parser after the end; garbage collection is off."""
        self._parser = None

    # the fast path

    def _regular(self) -> bool:
        """Whether the next byte begins a chunk of an event stream, and an event."""
        return self._at_boundary and self.stream.between_events and not self.complete and not self.malformed

    def _take_regular(self, reads: list[bytes | int], stamps: memoryview, doubts: memoryview) -> int:
        """Process reads that are whole events in whole chunks; return their number."""
        known, position = self._known, 0
        usual_reads = self.usual if self.stream.kept is None else usual_in_python
        tokens: list[int] = []
        try:
            while position < len(reads) and known.end is None:
                plain = usual_reads(reads, position, known, tokens)
                position += plain
                if not plain:
                    self.stream.stamp = stamps[position]
                    tokens.append(known.tokens_in(cast(bytes, reads[position])))
                    position += 1
        except UnusualError:
            pass
        if known.end is not None:
            self.complete, self.keep_alive = True, self._may_keep_alive
        count = len(tokens)
        if not count:
            return 0
        if self.first_body_ns is None:
            self.first_body_ns = stamps[0]
        if self.stream.first_event_stamp is None:
            self.stream.first_event_stamp = stamps[0]
        # Usage and end mark follow all tokens, mostly in a separate read.
        with_tokens = count if tokens[-1] else count - 1
        assert isinstance(self.stream.token_stamps, array)
        if tokens.count(1) == with_tokens:
            self.stream.token_stamps.frombytes(stamps[:with_tokens].tobytes())
        else:
            for number, doubt in zip(tokens, doubts, strict=False):
                if number > 1:
                    # All its tokens share the last one's stamp.
                    if not self.stream.token_stamps:
                        self.first_doubt_ns = doubt
                    self.doubts_ns.extend(repeat(doubt, number - 1))
            self.stream.token_stamps.extend(chain.from_iterable(map(repeat, stamps[:count], tokens)))
        if not self.stream.token_stamps:  # so there was no usual read either
            chunks = b"".join(cast(list[bytes], reads[:count])).split(EVENT_END)[:-1]
            self._keep(b"".join([chunk.partition(b"\r\n")[2] + b"\n\n" for chunk in chunks]))
        return count

    # the general path

    def _feed(self, data: bytes, stamp: int, doubt_ns: int) -> None:
        if self.complete or self.malformed:
            self.surplus = True
            return
        self._stamp, before = stamp, len(self.stream.token_stamps)
        if not self.head_seen:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.malformed = f"the answer's head exceeds {MAX_HEAD_BYTES} bytes"
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.surplus = True
            if not self.complete:
                self.malformed = f"the answer is not HTTP/1.1: {error}"
        if self._parts:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._take_body(body, stamp)
            tokens = len(self.stream.token_stamps) - before
            if tokens > 1:
                self.doubts_ns.extend(repeat(doubt_ns, tokens - 1))
                if not before:
                    self.first_doubt_ns = doubt_ns
        # Within or after a size line, the last callback was another one, or the last byte is no line feed.
        self._at_boundary = self._at_boundary and self.chunked and data[-2:] == b"\r\n"

    def _take_body(self, body: bytes, stamp: int) -> None:
        if self.first_body_ns is None:
            self.first_body_ns = stamp
        streamed = self.status == 200 and not self.body_limit
        if streamed:
            self.stream.feed(body, stamp)
            if self.stream.endless:
                self.malformed = self.stream.detail
        if not streamed or not self.stream.token_stamps:
            self._keep(body)

    def _keep(self, body: bytes) -> None:
        self.body += body[: (self.body_limit or KEPT_BODY_BYTES) - len(self.body)]

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self.complete:
            self.surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status < 200:  # an interim answer, such as 100 Continue
            self.headers = {}
            return
        self.status = status
        self.head_seen = True
        self._may_keep_alive = self._parser.should_keep_alive()
        self.chunked = "chunked" in self.headers.get("transfer-encoding", "")
        framed = self.chunked or "content-length" in self.headers
        self.until_close = not framed and status not in (204, 304)
        self._at_boundary = self.chunked and status == 200 and not self.body_limit

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._parts.append(body)

    def on_chunk_header(self) -> None:
        self._at_boundary = False

    def on_chunk_complete(self) -> None:
        self._at_boundary = self.status == 200 and not self.body_limit

    def on_message_complete(self) -> None:
        self._at_boundary = False
        if self.head_seen and not self.complete:
            self.complete = True
            self.keep_alive = not self.until_close and self._parser.should_keep_alive()
