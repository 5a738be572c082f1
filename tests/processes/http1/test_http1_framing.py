"""The watcher of chunked framing: it passes on what came, knows the end, and is never fooled."""

import itertools
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.processes.http1.splicing import LAST_CHUNK, MAX_SIZE_LINE_BYTES, ChunkWatch, FramingError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

payloads = st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n0\r\n\r\n"), max_size=8)
extensions = st.sampled_from([b"", b"", b";a", b";a=b;c", b';name="a b"'])
trailers = st.sampled_from([b"", b"", b"Server-Timing: a\r\n", b"A: 1\r\nB:\r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A chunked body without its last chunk, and that chunk."""
    chunks = b"".join(
        (b"%X" if draw(st.booleans()) else b"%x") % len(payload)
        + draw(extensions)
        + b"\r\n"
        + payload
        + b"\r\n"
        for payload in draw(payloads)
    )
    return chunks, draw(st.sampled_from([b"0", b"000"])) + b"\r\n" + draw(trailers) + b"\r\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in itertools.pairwise(at)]


def watched(reads: list[bytes]) -> tuple[bytes, bool]:
    watch = ChunkWatch()
    return b"".join(watch.feed(read) for read in reads), watch.complete


cuts = st.lists(st.integers(0, 10_000), max_size=12)


@given(bodies(), cuts)
def test_all_but_the_last_chunk_is_passed_on_as_it_came(body: tuple[bytes, bytes], cut: list[int]) -> None:
    chunks, last = body
    assert watched(pieces(chunks + last, cut)) == (chunks, True)


@given(bodies(), cuts, st.data())
def test_what_is_cut_short_is_never_complete(
    body: tuple[bytes, bytes], cut: list[int], data: st.DataObject
) -> None:
    whole = b"".join(body)
    kept = whole[: data.draw(st.integers(0, len(whole) - 1))]
    passed, complete = watched(pieces(kept, cut))
    assert not complete
    assert kept.startswith(passed)


class Strict:
    """What a real parser makes of the same bytes."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def parsed(data: bytes) -> Strict:
    sink = Strict()
    parser: Any = httptools.HttpResponseParser(sink)
    parser.feed_data(HEAD + data)
    return sink


@given(bodies(), cuts, st.data())
def test_garbled_bytes_are_refused_or_a_parser_reads_the_same(
    body: tuple[bytes, bytes], cut: list[int], data: st.DataObject
) -> None:
    whole = bytearray(b"".join(body))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b"\r", b"\n", b"f", b"0"])
        )
        if not whole:
            return
    try:
        passed, complete = watched(pieces(bytes(whole), cut))
    except FramingError:
        return
    assert bytes(whole).startswith(passed)
    if complete:
        # The client gets what was passed on and a last chunk: it must come to the same.
        one, other = parsed(bytes(whole)), parsed(passed + LAST_CHUNK)
        assert one.complete
        assert other.complete
        assert one.body == other.body


@pytest.mark.parametrize(
    "reads",
    [
        [b"zz\r\n"], [b"\r\n"], [b" 3\r\nabc\r\n"], [b"+3\r\nabc\r\n"], [b"0x3\r\nabc\r\n"], [b"1_0\r\n"],
        [b"-1\r\n"], [b"3\nabc\n"], [b"3\r\nabcd\r\n"], [b"3\r\nabc", b"d\r\n"], [b"3\r\nabc\r", b"d"],
        [b"3\r\nabc", b"\rx"], [b"3\r\nab", b"cd"], [b"fffffffffffffffff\r\n"],
        [b"3;" + b"a" * MAX_SIZE_LINE_BYTES], [b"data: {}\n\n"], [b"HTTP/1.1 200 OK\r\n"],
        [b"0\r\n\r\nmore"], [b"0\r\n", b"\r\n", b"more"], [b"0\r\nno trailer\r\n\r\n"],
        [b"0\r\na: " + b"b" * 70_000],
    ],
)  # fmt: skip
def test_no_chunks(reads: list[bytes]) -> None:
    with pytest.raises(FramingError):
        watched(reads)


def test_a_read_of_whole_chunks_is_passed_on_without_a_copy() -> None:
    data = b"5\r\nhello\r\n3\r\nabc\r\n"
    assert ChunkWatch().feed(data) is data
