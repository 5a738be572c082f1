"""From bytes to events: the fast way and the general one, however the bytes are cut into reads."""

import json
import select
import socket
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hostile import DONE, HEAD, LAST, TOKEN, USAGE, chunk, sse
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbench.connectors.base import one_token_prefill
from kvbench.processes.loadgen.answer import Known, ServerAnswer, usual_in_python
from kvbench.processes.loadgen.sockets.clock import READS, TIMES, arrivals
from kvbench.processes.loadgen.sockets.loop import NEVER_NS
from kvbench.processes.loadgen.sockets.wire import NO_STAMP
from kvbench.processes.loadgen.stream import (
    EVENTS_A_TOKEN,
    MAX_EVENT_BYTES,
    SPARE_EVENTS,
    StreamReader,
    without_prompt_ids,
)


class GeneralAnswer(ServerAnswer):
    """The general way only."""

    __slots__ = ()

    def _regular(self) -> bool:
        return False


class PythonAnswer(ServerAnswer):
    """The fast way without its compiled part."""

    __slots__ = ()
    usual = staticmethod(usual_in_python)


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The data in reads of these sizes, and the rest in one."""
    ends = [*(end for end in accumulate(sizes) if end < len(data)), len(data)]
    return [data[start:end] for start, end in pairwise([0, *ends])]


def taken(
    data: bytes, sizes: Sequence[int], batches: Sequence[int] = (), kind: type[ServerAnswer] = ServerAnswer
) -> dict[str, Any]:
    """What an Answer says of these bytes, in reads of these sizes, the reads taken in such batches."""
    reads: list[bytes | int] = [*cut(data, sizes)]
    answer, start = kind(), 0
    for size in [*batches, len(reads)]:
        batch = reads[start : start + size]
        answer.take(batch, stamps_of(range(start, start + len(batch))))
        start += size
        if answer.complete or answer.malformed:
            break
    return fields_of(answer)


def stamps_of(times: Iterable[int]) -> memoryview:
    return memoryview(array("q", times))


def fields_of(answer: ServerAnswer) -> dict[str, Any]:
    stream = answer.stream
    stream.finish(whole=answer.complete)
    return {
        "status": answer.status, "complete": answer.complete,
        "reusable": answer.keep_alive and not answer.surplus, "malformed": bool(answer.malformed),
        "tokens": list(stream.token_stamps), "after": list(stream.empty_after),
        "text": (stream.text_so_far, stream.first_event), "empty": stream.empty_events,
        "usage": stream.completion_tokens, "prompt": stream.prompt_tokens, "done": stream.done,
        "half": stream.half, "error": (stream.error, stream.detail), "first": answer.first_body_ns,
        "body": b"" if stream.token_stamps else bytes(answer.body),
    }  # fmt: skip


def event(text: str, **changes: Any) -> bytes:
    fields = {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": None}], **changes}
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def chat(delta: dict[str, Any], **changes: Any) -> bytes:
    """An event of a chat, as vLLM writes it."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    fields = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice], **changes}
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def called(**function: str) -> bytes:
    return chat({"tool_calls": [{"index": 0, "function": function}]})


CHATS = st.one_of(
    st.sampled_from([" a", " token", ""]).map(lambda text: chat({"content": text})),
    st.sampled_from([" a", " b", ""]).map(lambda text: chat({"reasoning": text})),
    # As vLLM 0.13 does: the same text under two names, and the second one null beside content.
    st.sampled_from([" a", " b"]).map(lambda text: chat({"reasoning": text, "reasoning_content": text})),
    st.sampled_from([" a", " b"]).map(lambda text: chat({"content": text, "reasoning_content": None})),
    st.sampled_from(["{", "12", ""]).map(lambda text: called(arguments=text)),
    st.sampled_from(
        [
            chat({"role": "assistant", "content": ""}), called(name="f", arguments=""),
            called(name="f", arguments="f"), chat({"content": " a"}, metadata={"content": " a"}),
            chat({"reasoning": " a"}, metadata={"content": " a"}),
            chat({"reasoning": " a"}, metadata={"content": " b"}),
            chat({"content": " a", "reasoning": " a"}), chat({"content": " a", "tool_calls": None}),
            chat({"content": None, "tool_calls": [None, {"function": None}]}),
        ]
    ),
)  # fmt: skip
EVENTS = st.one_of(
    CHATS,
    st.sampled_from([" a", " token", "", "x" * 300]).map(event),
    st.text(max_size=6).map(event),
    st.sampled_from(
        [
            TOKEN, USAGE, DONE, event("é漢"), event('"text":"'), event("\\"),
            event("", usage={"completion_tokens": 2}),
            event("x", usage={"completion_tokens": 3, "text": ""}), event("x", error={"message": "no"}),
            event("x", object="error", message="old"), event("x", choices=[]),
            event("", choices=[{"index": 0, "text": "", "finish_reason": "abort"}]),
            event("", choices=[{"index": 0, "text": " a", "finish_reason": "abort"}]),
            event("", choices=[{"finish_reason": "error", "index": 0, "text": " a"}]), b": comment\n\n",
            b"event: a\ndata: {}\n\n", b"data: {nope\n\n", b"data: [1]\n\n",
            b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"a\xff","finish_reason":null}]}\n\n',
            b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"a\x07","finish_reason":null}]}\n\n',
            b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"","finish_reason":null}]},"text":""}]}\n\n',
            b'data: {"\\"text":"b","choices":[1],"x":"y"}\n\n', b"data: half", b"\n", b"\n\n\r\n",
            TOKEN + TOKEN, sse(TOKEN, newline=b"\r\n"), sse(TOKEN, newline=b"\r"),
        ]
    ),
)  # fmt: skip
PIECES = st.one_of(
    EVENTS.map(chunk),
    EVENTS.map(chunk),
    EVENTS.map(chunk),
    EVENTS.map(lambda data: b"%X\r\n%b\r\n" % (len(data), data)),
    EVENTS.map(lambda data: b"%04x;a=b\r\n%b\r\n" % (len(data), data)),
    EVENTS.map(lambda data: b"%x\r\n%b\r\n" % (len(data) + 1, data)),
    EVENTS.map(lambda data: b"%x\r\n%b\r\n" % (max(0, len(data) - 2), data)),
    EVENTS.map(lambda data: chunk(data[:9]) + (chunk(data[9:]) if data[9:] else b"")),
    st.sampled_from(
        [b"0x5\r\nhello\r\n", b"5 \r\nhello\r\n", b"3\r\nhello\r\n", b"zz\r\n\n\n\r\n", b"-1\r\n"]
    ),
)
SIZES = st.lists(st.one_of(st.integers(1, 40), st.integers(60, 220)), max_size=40)
ENDS = st.sampled_from([LAST, LAST, b"", LAST + LAST, LAST + chunk(TOKEN), b"0\r\nt: 1\r\n\r\n"])
USAGE_FIRST = [chunk(chat({"content": " a"})), chunk(USAGE), b"5;a=b\r\nx: 1\n\r\n", LAST]
"""Whose last chunk the fast way leaves to the general one, after the usage."""
TWO_USAGES = [chunk(event("", usage={"completion_tokens": 2})), chunk(USAGE), chunk(event("")), LAST]


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], list[int]]:
    """The chunks of a stream and its end, and reads that end where they do, now and then elsewhere."""
    parts = [*draw(st.lists(PIECES, max_size=14)), draw(ENDS)]
    sizes, left = [], [len(part) for part in parts]
    while left:
        together = draw(st.sampled_from([1, 1, 1, 2, 3]))
        sizes.append(sum(left[:together]) + draw(st.sampled_from([0, 0, 0, 0, -3, -1, 1, 5])))
        del left[:together]
    return parts, [max(1, size) for size in sizes]


@settings(max_examples=60)
@given(streams(), st.lists(st.integers(1, 8), max_size=10), st.booleans())
@example((TWO_USAGES, list(map(len, TWO_USAGES))), [], True)
@example(([chunk(event(" a")), LAST, LAST, chunk(event(" a"))], [len(chunk(event(" a"))), 5, 5]), [], False)
@example(
    ([chunk(event(" a"))] * 5 + [chunk(USAGE) + chunk(DONE) + LAST], [len(chunk(event(" a")))] * 5), [], False
)
def test_the_fast_way_says_what_the_general_one_says(
    stream: tuple[list[bytes], list[int]], batches: list[int], closing: bool
) -> None:
    head = HEAD[:-2] + b"connection: close\r\n\r\n" if closing else HEAD
    data, sizes = head + b"".join(stream[0]), [len(head), *stream[1]]
    wanted = taken(data, sizes, batches, GeneralAnswer)
    assert taken(data, sizes, batches) == wanted
    assert taken(data, sizes, batches, PythonAnswer) == wanted


def read_and_taken(reads: Sequence[bytes], batches: Sequence[int]) -> dict[str, Any]:
    """What an Answer says of what is read in C, which is told what to expect after each batch."""
    answer, log, streams = ServerAnswer(), READS.Log(), READS.Streams()
    ours, theirs = socket.socketpair()
    ends = set(accumulate(batches))
    with ours, theirs, select.epoll() as epoll:
        ours.setblocking(False)
        epoll.register(ours.fileno(), select.EPOLLIN)
        streams.add(ours.fileno(), log, answer)
        for place, read in enumerate(reads, 1):
            theirs.sendall(read)
            assert streams.turn(epoll.fileno(), 1000, 1, NEVER_NS, [], []) == 1
            if place in ends or place == len(reads):
                brought, _, _, _, _, text = log.take(1000, 0, 0)
                answer.take(brought, stamps_of(range(place - len(brought), place)), text=text)
                if answer.complete or answer.malformed:
                    break
                if (expected := answer.expected()) is not None:
                    log.expect(*expected)
    return fields_of(answer)


@pytest.mark.skipif(
    READS is None, reason="kvbench.processes.loadgen.sockets._reads was not compiled, or is refused"
)
@settings(max_examples=60)
@given(streams(), st.lists(st.integers(1, 4), max_size=14))
@example(([chunk(event(f" {n}")) for n in range(9)] + [LAST], [len(chunk(event(" 0")))] * 9), [2])
@example(([chunk(event(" a"))] * 9 + [LAST], [len(chunk(event(" a")))] * 3 + [40]), [1, 1])
def test_chunks_that_are_forgotten_at_the_read_count_as_those_that_are_kept(
    stream: tuple[list[bytes], list[int]], batches: list[int]
) -> None:
    data, sizes = HEAD + b"".join(stream[0]), [len(HEAD), *stream[1]]
    reads = [part for read in cut(data, sizes) for part in cut(read, [4096] * (len(read) // 4096))]
    sizes = list(map(len, reads))
    assert read_and_taken(reads, batches) == taken(data, sizes, batches, GeneralAnswer)


@settings(max_examples=70)
@given(streams(), SIZES)
@example((USAGE_FIRST, list(map(len, USAGE_FIRST))), [len(HEAD)])
def test_where_reads_end_changes_nothing_but_the_stamps(
    stream: tuple[list[bytes], list[int]], others: list[int]
) -> None:
    data = HEAD + b"".join(stream[0])
    one, other = taken(data, [len(HEAD), *stream[1]]), taken(data, others)
    for outcome in (one, other):
        outcome["tokens"], outcome["after"] = len(outcome["tokens"]), len(outcome["after"])
        outcome["first"] = None
        outcome["error"] = outcome["error"][0]  # garbage may be quoted further from a larger read
        outcome["body"] = b""
        del outcome["reusable"]  # what comes after the end may not have been read yet
    if not one["malformed"]:  # how much of a broken chunk is seen depends on the read
        assert one == other


@given(st.binary(max_size=300), SIZES)
def test_an_answer_may_be_anything(data: bytes, sizes: list[int]) -> None:
    taken(HEAD + data, sizes)
    taken(data, sizes)


PIECE = st.lists(st.sampled_from([b"a", b"b ", b'"', b"\\", b"\n", b"\x7f", b"\xff", b"~"]), max_size=5).map(
    b"".join
)


@pytest.mark.skipif(
    READS is None, reason="kvbench.processes.loadgen.sockets._reads was not compiled, or is refused"
)
@given(
    st.lists(st.lists(PIECE, min_size=1, max_size=4), max_size=8), st.lists(PIECE, max_size=2), PIECE,
    st.integers(0, 9), st.sampled_from([b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x\n"]),
)  # fmt: skip
def test_compiled_or_not_the_same_chunks_are_usual(
    texts: list[list[bytes]], begins: list[bytes], after: bytes, start: int, line: bytes
) -> None:
    """The compiled way takes several chunks a read; chunk by chunk it agrees with the one in Python."""
    first, after = b"data: " + (begins[0] if begins else b""), after + b"\n\n\r\n"
    sized = [
        [line % (len(first + text + after) - 2) + first + text + after for text in read] for read in texts
    ]
    known = Known(StreamReader())
    known.begin, known.after = first, after
    known.before = {
        len(chunk): chunk[: chunk.index(b"data: ")] + first for read in sized[::2] for chunk in read
    }
    reads, start = [b"".join(read) for read in sized], min(start, len(sized))
    counts: list[int] = []
    found, text = READS.usual(reads, start, first, after, counts, 3 << 32 | 7)
    joined = b"".join(b"".join(read) for read in texts[start : start + found])
    assert text == (3 + len(joined)) << 32 | crc32(joined, 7)
    assert counts == [len(read) for read in sized[start : start + found]]
    for one in (one for read in sized[start : start + found] for one in read):
        # Python knows a length once it has seen it; one of an event without text it is never told.
        assert usual_in_python([one], 0, known, []) == (len(one) in known.before)
    if start + found < len(
        sized
    ):  # what it stops at, Python does not find usual either, or not its size line
        stopped: list[bytes | int] = [*sized[start + found]]
        assert usual_in_python(stopped, 0, known, []) < len(stopped) or line != b"%x\r\n"


@pytest.mark.parametrize("kind", [ServerAnswer, PythonAnswer])
def test_the_usual_stream_is_decoded_once(kind: type[ServerAnswer], monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    read = StreamReader.event
    monkeypatch.setattr(StreamReader, "event", lambda self, data: decoded.append(data) or read(self, data))
    words = [f" word{10 ** (number % 7) + number}" for number in range(200)]
    reads = [HEAD, *map(chunk, map(event, words)), chunk(USAGE) + chunk(DONE) + LAST]
    outcome = taken(b"".join(reads), list(map(len, reads)), kind=kind)
    assert (len(outcome["tokens"]), outcome["usage"], outcome["done"]) == (200, 3, True)
    assert len(decoded) == 3  # whatever the lengths of their words, one of the tokens, the usage, and the end


def test_an_event_has_the_stamp_of_the_read_that_completed_it() -> None:
    first, second = chunk(TOKEN), chunk(event(" later"))
    sizes = [len(HEAD), len(first) - 2, 2 + 5, len(second) - 5 - 3, 3]
    # The last read but one ends before the second line feed, the first one after it.
    assert taken(HEAD + first + second + chunk(USAGE) + chunk(DONE) + LAST, sizes)["tokens"] == [1, 4]


@given(st.lists(st.integers(1, 40), max_size=60), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_the_stream_reader_does_not_care_where_reads_end(sizes: list[int], newline: bytes) -> None:
    data = sse(b": hello\n\n", TOKEN, b"event: a\n", TOKEN, TOKEN, USAGE, DONE, newline=newline)
    reader = StreamReader()
    for stamp, read in enumerate(cut(data, sizes)):
        reader.feed(read, stamp)
    reader.finish()
    assert (len(reader.token_stamps), reader.completion_tokens, reader.done) == (3, 3, True)
    assert (reader.error, reader.half) == ("", False)
    assert list(reader.token_stamps) == sorted(reader.token_stamps)


@given(st.binary(max_size=300), st.integers(1, 20))
def test_the_stream_reader_survives_anything(data: bytes, size: int) -> None:
    reader = StreamReader()
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size], 0)
    reader.finish()


@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_an_answer_of_far_more_events_than_tokens_is_given_up(tokens: int | None) -> None:
    reader = StreamReader()
    reader.requested_tokens = tokens
    most = EVENTS_A_TOKEN * (tokens or 0) + SPARE_EVENTS
    reader.feed(TOKEN * most, 0)
    assert (reader.error, reader.endless, len(reader.token_stamps)) == ("", False, most)
    reader.feed(TOKEN, 1)
    assert reader.endless is (tokens is not None)
    if tokens is None:
        assert reader.error == ""
    else:
        assert reader.error == "bad_stream"
        assert reader.detail == f"{most + 1:,} token events where {tokens} tokens were requested"


def stamp_of(real_ns: int) -> bytes:
    """A ``struct scm_timestamping``."""
    return np.array([real_ns // 10**9, real_ns % 10**9, 0, 0, 0, 0], np.int64).tobytes()


def test_a_stamp_that_cannot_be_gives_way_to_the_time_of_the_read() -> None:
    offset, sent = 5 * 10**9, 1_000_000_000
    real = [1_200_000_000, 900_000_000, 1_500_000_000]  # in order; before the sending; after the read
    stamps = [*(stamp_of(real_ns + offset) for real_ns in real), NO_STAMP, NO_STAMP]
    reads = [1_250_000_000, 1_300_000_000, 1_400_000_000, 1_500_000_000, 1_600_000_000]
    wanted = [1_200_000_000, 1_300_000_000, 1_400_000_000, 1_500_000_000, 1_600_000_000]
    # Nothing lay there before: the sending; just before the read; the same, after the stamp; …
    since = [sent - 5, 1_299_000_000, 1_400_000_001, 1_500_000_000, 0]
    log = b"".join(map(TIMES.pack, stamps, reads, since))
    for times in (1, 5):  # few are not counted as many are
        came, lags, doubts, useless = arrivals(log * times, sent, offset)
        assert list(memoryview(came).cast("q")) == wanted * times
        assert list(memoryview(lags).cast("i")) == [50_000_000, 0, 0, 0, 0] * times
        assert list(memoryview(doubts).cast("i")) == [200_000_000, 1_000_000, 0, 0, 600_000_000] * times
        assert useless == 4 * times


def test_a_chat_counts_reasoning_once_and_a_tools_call_as_text() -> None:
    events = [
        chat({"role": "assistant", "content": ""}), chat({"reasoning": "ab", "reasoning_content": "ab"}),
        chat({"content": "cd", "reasoning_content": None}), called(name="f", arguments=""),
        called(arguments="{}"), chat({"content": ""}),
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}\n\n',
        DONE,
    ]  # fmt: skip
    stream = StreamReader()
    for stamp, event in enumerate(events):
        stream.feed(event, stamp)
    stream.finish()
    assert list(stream.token_stamps) == [1, 2, 3, 4]
    assert (stream.text_bytes, stream.text_crc) == (7, crc32(b"abcdf{}"))
    assert (stream.completion_tokens, stream.prompt_tokens, stream.empty_events) == (4, 9, 2)
    assert stream.done


@pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content"])
def test_a_chats_usual_chunks_are_known_by_their_delta(name: str) -> None:
    known = Known(StreamReader())
    reads: list[bytes | int] = [chunk(chat({name: text})) for text in (" a", " b", " cd")]
    for read in reads:  # the Python version must have seen each length
        assert isinstance(read, bytes)
        assert known.tokens_in(read) == 1
    counts: list[int] = []
    assert ServerAnswer.usual(reads, 1, known, counts) == 2
    assert counts == [1, 1]


def ids_event(ids: list[int] | None, **more: object) -> bytes:
    choice = {"index": 0, "text": " a", "token_ids": ids, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@given(st.lists(st.lists(st.integers(0, 2**31 - 2), max_size=4), min_size=1, max_size=5), st.data())
def test_ids_are_kept_however_the_reads_are_cut(answer: list[list[int]], data: st.DataObject) -> None:
    body = (
        ids_event(answer[0], prompt_token_ids=data.draw(st.lists(st.integers(0, 9), max_size=30)))
        + b"".join(map(ids_event, answer[1:]))
        + b"data: [DONE]\n\n"
    )
    reader, cuts = (
        StreamReader(token_ids=[]),
        sorted(data.draw(st.sets(st.integers(1, len(body)), max_size=6))),
    )
    for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        reader.feed(body[begin:end], 1)
    reader.finish()
    assert reader.token_ids == [token for ids in answer for token in ids]
    assert (reader.error, reader.done, len(reader.token_stamps)) == ("", True, len(answer))


@pytest.mark.parametrize("ids", [None, "12", [1.5], [True], [-1], [2**40], {"a": 1}])
def test_what_is_no_list_of_ids_gives_none(ids: object) -> None:
    reader = StreamReader(token_ids=[])
    reader.feed(ids_event(ids), 1)  # type: ignore[arg-type]
    assert (reader.token_ids, reader.error, len(reader.token_stamps)) == ([], "", 1)


def test_a_prompt_that_is_sent_back_is_not_decoded() -> None:
    prompt = list(range(200_000))
    first = ids_event([5], prompt_token_ids=prompt)
    assert len(first) > MAX_EVENT_BYTES
    assert json.loads(without_prompt_ids(first[6:]))["choices"][0] == {
        "index": 0, "text": " a", "token_ids": [5], "prompt_token_ids": None,
    }  # fmt: skip
    reader = StreamReader(token_ids=[], event_bytes=MAX_EVENT_BYTES + 12 * len(prompt))
    for begin in range(0, len(first), 65_536):
        reader.feed(first[begin : begin + 65_536], 1)
    assert (reader.token_ids, reader.error) == ([5], "")
    for text in (
        b"{}",
        b'{"prompt_token_ids": null}',
        b'{"prompt_token_ids": [1',
        b'{"a":"prompt_token_ids"}',
    ):
        assert without_prompt_ids(text) == text


def test_p_is_not_asked_for_ids() -> None:
    body = one_token_prefill({"prompt": [1], "return_token_ids": True, "stream_options": {}})
    assert "return_token_ids" not in body
