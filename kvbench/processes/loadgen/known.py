"""Reads of an event stream that need not be looked into, since one that differs in its text alone was."""

from __future__ import annotations

import json
import re
from typing import Final

from kvbench.processes.loadgen.sockets.compiled import READS
from kvbench.processes.loadgen.stream import StreamReader, text_in

EVENT_END: Final = b"\n\n\r\n"
"""Where an event's end and a chunk's end meet."""
LAST_CHUNK: Final = b"0\r\n\r\n"
MAX_KNOWN: Final = 32
"""Reads that are remembered of one stream: a server may send the same chunk many times."""
MAX_LENGTHS: Final = 64
"""Lengths of chunks for which the beginning is remembered."""

_HEX: Final = re.compile(rb"[0-9a-fA-F]{1,7}")
_TEXTS: Final = (b'"text":"', b'"content":"', b'"reasoning":"', b'"reasoning_content":"', b'"arguments":"')
"""What the text of a completion, or of a chat's delta, stands behind."""
_PROBE: Final = "another text"
_NEVER_KNOWN: Final = (b"completion_tokens", b"prompt_tokens", b"\\")
_PLAIN: Final = bytes(set(range(0x20, 0x7F)) - set(b'"\\'))


class UnusualError(Exception):
    """A chunk that the fast way does not read."""


class Known:
    """What is known of a stream's reads, so that those which come often are looked at once."""

    def __init__(self, stream: StreamReader) -> None:
        self._stream = stream
        self._seen: dict[bytes, tuple[int, bytes]] = {}
        """Reads, with how many token events each brings and their text."""
        self.begin = b""
        """An event up to its text, once one was decoded."""
        self.before: dict[int, bytes] = {}
        """The same with the size of its chunk, by the length of a read of nothing else."""
        self.after = EVENT_END
        """What stands after the text."""
        self.end: bytes | None = None
        """The read that brought the end of the answer."""
        self._plain = False
        """Whether the chunks of a read may be skipped when they come again."""
        self._text = b""
        """Of the read's token events so far."""

    @property
    def text_so_far(self) -> int:
        """The stream's, in one number."""
        return self._stream.text_so_far

    @text_so_far.setter
    def text_so_far(self, text: int) -> None:
        self._stream.text_so_far = text

    def add_text(self, text: bytes) -> None:
        """The text of an event that was not decoded."""
        self._stream.add_text(text)

    def tokens_in(self, read: bytes) -> int:
        """How many token events a read brings, which are taken in.

        Raises UnusualError for a read that is not made of whole chunks with one whole event in each.
        """
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
        empty_after, told = stream.empty_after, (stream.completion_tokens, stream.prompt_tokens)
        try:
            for chunk in chunks:
                count += self._is_token(chunk)
        except UnusualError:  # the general way takes all of it again
            stream.text_so_far, stream.empty_events, stream.first_event = before
            stream.empty_after = empty_after
            stream.completion_tokens, stream.prompt_tokens = told
            raise
        if rest:
            self.end = read
        elif self._plain and len(self._seen) < MAX_KNOWN:
            self._seen[read] = count, self._text
        return count

    def _is_token(self, chunk: bytes) -> bool:
        """Whether a chunk, which lacks its last four bytes, holds a token event."""
        size, mark, event = chunk.partition(b"\r\n")
        whole = mark and _HEX.fullmatch(size) and int(size, 16) == len(event) + 2
        if not whole or event[:5] != b"data:" or b"\n" in event or b"\r" in event:
            raise UnusualError
        stream = self._stream
        text = self._known_text(event)
        if text is not None:
            if not text:
                stream.add_empty()
                self._plain = False
                return False
            self._keep_length(len(chunk), size + mark)
            stream.add_text(text)
            self._text += text
            return True
        usage, problem, done = stream.completion_tokens, stream.error, stream.done
        token = stream.event(event[5:].removeprefix(b" "))
        changed = (usage, problem, done) != (stream.completion_tokens, stream.error, stream.done)
        # A usage is read anew from each event that has one, so such an event cannot be skipped.
        skipped = stream.token_ids is None  # as ids stand beside the text
        if skipped and token and not changed and not any(name in event for name in _NEVER_KNOWN):
            self._learn(event)
            self._text += stream.text.encode("utf-8", "surrogatepass")
        else:
            self._plain = False
        return token

    def _known_text(self, event: bytes) -> bytes | None:
        """Its text if it differs from a token event that was decoded in nothing but that; else None."""
        begins, ends = self.begin, self.after[: -len(EVENT_END)]
        if not begins or len(event) < len(begins) + len(ends):
            return None
        if not event.startswith(begins) or not event.endswith(ends):
            return None
        text = event[len(begins) : len(event) - len(ends)]
        return None if text.translate(None, _PLAIN) else text

    def _keep_length(self, length: int, size: bytes) -> None:
        """A chunk of this length, whose size line is right, was a known event."""
        if len(self.before) < MAX_LENGTHS:
            self.before[length + len(EVENT_END)] = size + self.begin

    def _learn(self, event: bytes) -> None:
        """Keeps what stands around the text of a token event, found by putting another text there."""
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
    """Whether all text of such an event is what stands between these two."""
    try:
        event = json.loads(begin[5:] + _PROBE.encode() + after)
        return text_in(event["choices"]) == _PROBE
    except (ValueError, LookupError, TypeError):
        return False


def usual_in_python(reads: list[bytes | int], start: int, known: Known, counts: list[int]) -> int:
    """How many reads, from ``start`` on, are chunks whose texts alone are new.

    ``counts`` gets how many chunks are in each. A chunk is ``before[len(chunk)]``, then characters that JSON
    does not escape, at least one, then ``after``; all always fit into a chunk of that length. This way takes
    one chunk a read, the compiled one any number.
    """
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
    """The same in C; reads that were found so as they came are numbers already."""
    count: int
    so_far = known.text_so_far
    count, known.text_so_far = READS.usual(reads, start, known.begin, known.after, counts, so_far)
    return count


usual: Final = usual_in_python if READS is None else _usual_compiled
