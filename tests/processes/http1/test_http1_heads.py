"""Usual heads, read in C, against httptools: what is taken is taken the same, all else is left."""

from typing import Any

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import damaged, fuzz, stored

from kvbench.processes.http1.splicing import HEADS, usual_request, usual_response

pytestmark = pytest.mark.skipif(
    HEADS is None, reason="kvbench.processes.http1._heads was not compiled, or is refused"
)

REQUEST = (
    b"POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nX-Request-Id:  r 1\r\ncontent-length: 3\r\n\r\nabc"
)
ANSWER = b"HTTP/1.1 200 OK\r\nserver: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
REQUESTS = [
    REQUEST,
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\naccept: */*\r\nuser-agent: a (b; c)\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n{}",
    b"POST /v1/x HTTP/1.1\r\nexpect: 100-continue\r\nupgrade: h2c\r\ncontent-length: +2\r\n\r\n{}",
]
ANSWERS = [
    ANSWER,
    b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 \r\ncontent-length: 0\r\nkeep-alive: timeout=5\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\ntransfer-encoding: gzip, chunked\r\ncontent-length: 2\r\n\r\n{}",
]


class Parsed:
    """What httptools tells of some bytes."""

    def __init__(self, parser: Any, data: bytes) -> None:
        self.url, self.headers, self.body = b"", {}, b""
        self.names: list[str] = []
        self.heads = self.ends = 0
        self.keep_alive = False
        self.parser = parser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.names.append(name.decode("latin-1").lower())
        self.headers[self.names[-1]] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.heads += 1
        self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ends += 1


def check_request(data: bytes) -> bool:
    """Compares; whether it was a usual request."""
    found = usual_request(data)
    if found is None:
        return False
    method, path, query, headers, body = found
    parsed = Parsed(httptools.HttpRequestParser, data)
    assert parsed.heads == parsed.ends == 1
    assert parsed.parser.get_method().decode() == method
    assert parsed.url.decode() in (path, f"{path}?{query}")
    assert parsed.parser.get_http_version() == "1.1"
    assert parsed.keep_alive
    assert (parsed.headers, parsed.body) == (headers, body)
    assert len(parsed.names) == len(headers)
    return True


def check_answer(data: bytes) -> bool:
    """Compares; whether it began with a usual head."""
    found = usual_response(data)
    if found is None:
        return False
    status, headers, end = found
    parsed = Parsed(httptools.HttpResponseParser, data[:end])
    assert parsed.heads == 1
    assert parsed.keep_alive
    assert (parsed.parser.get_status_code(), parsed.headers) == (status, headers)
    assert len(parsed.names) == len(headers)
    assert data[:end].endswith(b"\r\n\r\n")
    if "transfer-encoding" in headers:
        assert parsed.ends == 0
    else:
        parsed = Parsed(httptools.HttpResponseParser, data)
        assert (parsed.ends, parsed.body) == (1, data[end:])
    return True


@given(data=damaged(REQUESTS))
@stored("request", "data")
@fuzz(600)
def test_a_request_is_read_as_httptools_reads_it_or_left_to_it(data: bytes) -> None:
    check_request(data)


@given(data=damaged(ANSWERS))
@stored("answer", "data")
@fuzz(600)
def test_an_answer_s_head_is_read_as_httptools_reads_it_or_left_to_it(data: bytes) -> None:
    check_answer(data)


VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=20)
HEADERS = st.dictionaries(st.sampled_from(["Accept", "x-a", "X_b", "Authorization", "2"]), VALUES, max_size=5)


@settings(deadline=None, max_examples=120)
@given(headers=HEADERS, body=st.binary(max_size=50), target=st.sampled_from(["/", "/v1/c", "/a?b=c?d", "/?"]))
def test_what_clients_and_servers_send_is_usual(headers: dict[str, str], body: bytes, target: str) -> None:
    lines = "".join(f"{name}: {value.strip() or 'x'}\r\n" for name, value in headers.items())
    tail = f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body
    assert check_request(f"POST {target} HTTP/1.1\r\n".encode() + tail)
    assert check_answer(b"HTTP/1.1 200 OK\r\n" + tail)
    chunked = f"HTTP/1.1 200 OK\r\n{lines}Transfer-Encoding: chunked\r\n\r\n".encode()
    assert check_answer(chunked)
    assert check_answer(chunked + b"1\r\na\r\n")


@pytest.mark.parametrize(
    "data",
    [
        REQUEST[:-1], REQUEST + b"d", REQUEST * 2, REQUEST.replace(b"POST", b"PUT"),
        REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"), REQUEST.replace(b"Host: x", b"Host: x\r\nhost: y"),
        REQUEST.replace(b"Host: x", b"Host:"), REQUEST.replace(b"Host: x", b"Host: x "),
        REQUEST.replace(b"Host: x", b"Host: \xc3\xa9"), REQUEST.replace(b"Host", b"H" * 70),
        REQUEST.replace(b"Host: x", b"Host: " + b"x" * 20_000),
        REQUEST.replace(b"Host: x", b"Connection: keep-alive"),
        REQUEST.replace(b"Host: x", b"Expect: 100-continue"),
        REQUEST.replace(b"Host: x", b"Transfer-Encoding: chunked"),
        REQUEST.replace(b"length: 3", b"length: 0x3"), b"", b"POST /",
    ],
)  # fmt: skip
def test_what_is_not_usual_is_left_to_httptools(data: bytes) -> None:
    assert usual_request(REQUEST) is not None
    assert usual_request(data) is None


@pytest.mark.parametrize(
    "data",
    [
        ANSWER.replace(b"chunked", b"gzip, chunked"), ANSWER.replace(b"200", b"100"),
        ANSWER.replace(b"200", b"304"), ANSWER.replace(b"200", b"2000"),
        ANSWER.replace(b"server: x", b"content-length: 3"),
        ANSWER.replace(b"server: x", b"connection: close"),
        ANSWER.replace(b"Transfer-Encoding: chunked", b"x: y"),
        ANSWER.replace(b"Transfer-Encoding: chunked", b"content-length: 3"), ANSWER[:40], b"HTTP/1.1 200",
    ],
)  # fmt: skip
def test_an_answer_s_head_that_is_not_usual_is_left_to_httptools(data: bytes) -> None:
    assert usual_response(ANSWER) is not None
    assert usual_response(data) is None


def test_only_bytes_are_taken() -> None:
    for call in (usual_request, usual_response):
        with pytest.raises(TypeError):
            call("text")  # type: ignore[arg-type]
