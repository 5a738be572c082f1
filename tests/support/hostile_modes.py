"""A server that answers in every way that costs its client time or memory."""

import gzip
import itertools
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kvbench.hosts.telemetry import METRICS_LINES

MIB = 2**20
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def whole(body: bytes, *headers: bytes, status: bytes = OK) -> list[bytes]:
    lines = b"".join(header + b"\r\n" for header in headers)
    return [status + lines + b"content-length: %d\r\n\r\n" % len(body), body]


def endless(*pieces: bytes) -> Iterator[bytes]:
    yield from pieces[:-1]
    yield from itertools.repeat(pieces[-1])


def slowly(head: bytes, data: bytes) -> Iterator[bytes]:
    yield head
    for byte in itertools.cycle(data):
        time.sleep(0.05)
        yield bytes([byte])


def bomb(compressor: Callable[[bytes], bytes]) -> bytes:
    return compressor(bytes(200 * MIB))


def deflated(data: bytes) -> bytes:
    return zlib.compress(data, 9)


LINES = b"a 1\n" * 5_000_000
Mode = Callable[[], Iterator[bytes] | list[bytes]]
MODES: Final[dict[str, Mode]] = {
    "endless_to_the_end": lambda: endless(OK + b"\r\n", b" " * 65536),
    "endless_chunks": lambda: endless(CHUNKED, b"10000\r\n%b\r\n" % bytes(65536)),
    "endless_headers": lambda: endless(OK, b"x-more: and more\r\n"),
    "endless_header": lambda: endless(OK + b"x-more: ", b"a" * 65536),
    "endless_status_line": lambda: endless(b"HTTP/1.1 200 ", b"a" * 65536),
    "endless_continue": lambda: endless(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "endless_chunk_size": lambda: endless(CHUNKED, b"0" * 65536),
    "endless_trailers": lambda: endless(CHUNKED + b"0\r\n", b"a: b\r\n"),
    "slow_status_line": lambda: slowly(b"", b"HTTP/1.1 200 OK" + b"a" * 10**6),
    "slow_headers": lambda: slowly(OK, b"x-more: a\r\n"),
    "slow_body": lambda: slowly(OK + b"content-length: 100000\r\n\r\n", b" "),
    "slow_chunks": lambda: slowly(CHUNKED, b"1\r\na\r\n"),
    "slow_continue": lambda: slowly(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "silence": lambda: _wait(),
    "half_an_answer": lambda: itertools.chain([OK + b"content-length: 10\r\n\r\n{"], _wait()),
    "closed_at_once": list,
    "closed_in_the_body": lambda: [OK + b"content-length: 10\r\n\r\n{"],
    "no_http": lambda: [b"SSH-2.0-OpenSSH_9.6\r\n"],
    "gzip_bomb": lambda: whole(bomb(gzip.compress), b"content-encoding: gzip"),
    "gzip_bomb_of_bombs": lambda: whole(gzip.compress(bomb(gzip.compress)), b"content-encoding: gzip, gzip"),
    "deflate_bomb": lambda: whole(bomb(deflated), b"content-encoding: deflate"),
    "packed_in_what_nobody_asked_for": lambda: whole(b"\x0b\x02\x80", b"content-encoding: br"),
    "said_to_be_packed": lambda: whole(b"{}", b"content-encoding: gzip"),
    "charset_that_unpacks": lambda: whole(bomb(deflated), b"content-type: text/plain; charset=zlib"),
    "charset_that_is_slow": lambda: whole(b"a" * 10**6 + b"-", b"content-type: text/plain; charset=punycode"),
    "charset_of_no_text": lambda: whole(b"6161", b"content-type: text/plain; charset=hex"),
    "no_utf8": lambda: whole(b"\xff\xfe" * 1000),
    "zeros": lambda: whole(bytes(10**6)),
    "deep_arrays": lambda: whole(b"[" * 10**6),
    "deep_objects": lambda: whole(b'{"data":' * 10**5),
    "wide_arrays": lambda: whole(b"[" + b"[]," * 5 * 10**6 + b"[]]"),
    "wide_arrays_below_the_limit": lambda: whole(b"[" + b"[]," * 6 * 10**5 + b"[]]"),
    "huge_number": lambda: whole(b'{"data":[{"id":' + b"9" * 10**6 + b"}]}"),
    "long_name": lambda: whole(json.dumps({"data": [{"id": "a" * 10**6}]}).encode()),
    "wrong_kinds": lambda: whole(b'{"data":{"0":{"id":7}}}'),
    "negative_length": lambda: [OK + b"content-length: -1\r\n\r\n{}"],
    "two_lengths": lambda: [OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} "],
    "huge_length": lambda: itertools.chain([OK + b"content-length: 99999999999999\r\n\r\n{}"], _wait()),
    "huge_chunk": lambda: itertools.chain([CHUNKED + b"ffffffffffffff\r\n{}"], _wait()),
    "bad_chunk": lambda: [CHUNKED + b"zz\r\n{}"],
    "unknown_transfer_encoding": lambda: [OK + b"transfer-encoding: gzip\r\n\r\n{}"],
    "redirect_to_itself": lambda: whole(b"", b"location: /", status=b"HTTP/1.1 302 Found\r\n"),
    "switching_protocols": lambda: [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n"],
    "status_999": lambda: whole(b"{}", status=b"HTTP/1.1 999 Odd\r\n"),
    "no_content": lambda: [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "http_0_9": lambda: [b"<html>"],
    "http_2": lambda: [b"HTTP/2 200\r\n\r\n"],
    "bomb_of_lines": lambda: whole(LINES),
    "lines_below_the_limit": lambda: whole(b"".join(b"m%d 1\n" % n for n in range(METRICS_LINES))),
    "one_line": lambda: whole(b'a{b="' + b'\\"' * 10**6 + b'"} 1\n'),
    "labels": lambda: whole(b"a{" + b",".join(b'l%d="1"' % n for n in range(10**5)) + b"} 1\n"),
    "long_lines": lambda: whole((b"#" + b"  " * 4000 + b"\n") * 200),
    "quotes": lambda: whole((b'a{b="' + b'\\"' * 4000 + b'"} 1\n') * 200),
    "huge_value": lambda: whole(b"a " + b"9" * 4000 + b"\n"),
    "odd_values": lambda: whole(b"a NaN\nb -Inf\nc 1e999\nd 0x10\n"),
    "open_brace": lambda: whole(b"a{\n"),
    "lone_quote": lambda: whole(b'{"} 1\n'),
    "markup": lambda: whole(b"<html><body>hello</body></html>", b"content-type: text/html"),
    "escapes": lambda: whole(b"\x1b]0;title\x07\x9b31m 1\n"),
    "quoted_escapes": lambda: whole(b'a{b="\x1b[31m"} 1\n'),
}  # fmt: skip


def _wait() -> Iterator[bytes]:
    for _ in range(200):
        time.sleep(0.05)
        yield b""


class Hostile:
    """Answers a request for /MODE/… as that mode does, for as long as the client listens."""

    def __init__(self, modes: Mapping[str, Mode]) -> None:
        self._modes = modes
        self._over = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._take)]
        self._threads[0].start()

    def _take(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            try:
                request = connection.recv(65536)
                if not request:  # a spare connection that nobody used
                    return
                mode = request.split(b"/")[1].decode()
                for piece in self._modes[mode]():
                    connection.sendall(piece)
                    if self._over.is_set() or (not piece and self._gone(connection)):
                        return
            except OSError:
                return

    def _gone(self, connection: socket.socket) -> bool:
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(timeout=10)


@contextmanager
def hostile(modes: Mapping[str, Mode] = MODES) -> Iterator[str]:
    """Its URL."""
    server = Hostile(modes)
    try:
        yield server.url
    finally:
        server.close()
