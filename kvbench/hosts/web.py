"""The HTTP client for all requests except the load, and explanations of failures.

It ignores proxy variables and ``.netrc``: a proxy would not reach loopback or a data network, and would see
prompts and API keys. ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` apply; a server's ``ServerAccess`` may name
another file, or trust any certificate.

Requests are bounded: ``timeout_s`` is for a whole request, ``limit_bytes`` for an unpacked response. Only
status, body and media type are used; bodies are decoded as UTF-8. No other module makes an httpx client or
transport, or uses urllib.request (tests/repository/test_proxies.py)."""

from __future__ import annotations

import json
import os
import re
import ssl
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import httpcore
import httpx

from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import PROXIES
from kvbench.hosts.server_access import tls_context

TIMEOUT_S: Final = 5.0
"""Default time for a whole request, in seconds."""
LIMIT_BYTES: Final = 8 * 1024 * 1024
"""Limit of an unpacked response. vLLM's /metrics has 0.1 MB per engine."""
JSON_BYTES: Final = 2 * 1024 * 1024
"""Limit of a JSON response, which can take twenty times as much memory (``[[],[],…``)."""
ANY_SERVER: Final = ServerAccess()
_PIECE_BYTES: Final = 64 * 1024
_ZLIB_OR_GZIP: Final = 32 + zlib.MAX_WBITS


def client(
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    over: httpx.BaseTransport | None = None,
    limit_bytes: int = LIMIT_BYTES,
    access: ServerAccess = ANY_SERVER,
) -> httpx.Client:
    """Return a client for sequential requests with these headers. ``over``: another transport than sockets.
    ``access``: TLS trust; the caller adds its headers."""
    sent = {"accept-encoding": "identity", **(headers or {})}
    way = over or transport(limit_bytes, access)
    return httpx.Client(headers=sent, timeout=timeout_s, transport=way, trust_env=False)


def transport(limit_bytes: int = LIMIT_BYTES, access: ServerAccess = ANY_SERVER) -> httpx.BaseTransport:
    """Return such a client's sockets, for a client that sends some requests another way."""
    return _BoundedTransport(limit_bytes, access)


def json_of(response: httpx.Response) -> Any:
    """Return a response's JSON. Raises ValueError if it is invalid, too long or too deeply nested."""
    if len(response.content) > JSON_BYTES:
        raise ValueError(f"JSON of more than {JSON_BYTES} bytes")
    try:
        return json.loads(response.content)
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None


class _BoundedTransport(httpx.BaseTransport):
    """One connection per request, whose every step ends by the request's deadline."""

    def __init__(self, limit_bytes: int, access: ServerAccess) -> None:
        self._limit_bytes = limit_bytes
        self._access = access
        if access.ca_file:
            tls_context(access)  # a file that cannot be used is an error before the first request

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        timeouts = request.extensions.get("timeout", {})
        backend = _BoundedBackend(time.monotonic() + float(timeouts.get("read") or TIMEOUT_S))
        # The certificates take 20 ms to read.
        context = tls_context(self._access) if request.url.scheme == "https" else None
        with (
            _as_httpx(request),
            httpcore.ConnectionPool(ssl_context=context, network_backend=backend) as pool,
            pool.stream(
                request.method,
                httpcore.URL(
                    scheme=request.url.raw_scheme,
                    host=request.url.raw_host,
                    port=request.url.port,
                    target=request.url.raw_path,
                ),
                headers=request.headers.raw,
                content=request.read() or None,
                extensions={"timeout": timeouts},
            ) as answer,
        ):
            received = {name.lower(): value.decode("latin-1") for name, value in answer.headers}
            pieces = _unpack(answer.iter_stream(), received.get(b"content-encoding", "identity").lower())
            body = self._whole(pieces)
        media_type = received.get(b"content-type", "").partition(";")[0].strip()
        kept = {"content-type": media_type}
        return httpx.Response(answer.status, headers=kept, content=body, request=request)

    def _whole(self, pieces: Iterable[bytes]) -> bytes:
        body = bytearray()
        for piece in pieces:
            body += piece
            if len(body) > self._limit_bytes:
                raise httpcore.RemoteProtocolError(f"the answer is longer than {self._limit_bytes} bytes")
        return bytes(body)


class _BoundedStream(httpcore.NetworkStream):
    """A stream that ends by a time of the monotonic clock, however slowly the other end sends."""

    def __init__(self, stream: httpcore.NetworkStream, end: float) -> None:
        self._stream = stream
        self._end = end

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(self._end, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(self._end, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left_s = _left_s(self._end, httpcore.ConnectTimeout)
        return _BoundedStream(self._stream.start_tls(ssl_context, server_hostname, left_s), self._end)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _BoundedBackend(httpcore.SyncBackend):
    """Connections that end by a time of the monotonic clock; name resolution is not included."""

    def __init__(self, end: float) -> None:
        self._end = end

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(self._end, httpcore.ConnectTimeout)
        return _BoundedStream(
            super().connect_tcp(host, port, left_s, local_address, socket_options), self._end
        )


def _left_s(end: float, late: type[httpcore.TimeoutException]) -> float:
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise late("the answer took too long as a whole")
    return left_s


def _unpack(pieces: Iterable[bytes], coding: str) -> Iterator[bytes]:
    """Yield an unpacked body in small pieces, whatever its compression."""
    if coding == "identity":
        yield from pieces
        return
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise httpcore.RemoteProtocolError(
            f"the answer is packed by {coding[:40]!r}, which was not requested"
        )
    unpacking = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        for piece in pieces:
            left = piece
            while left and not unpacking.eof:
                yield unpacking.decompress(left, _PIECE_BYTES)
                left = unpacking.unconsumed_tail
    except zlib.error as error:
        raise httpcore.RemoteProtocolError(f"the answer cannot be unpacked: {error}") from error


@contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    """Convert httpcore's errors to httpx's errors of the same names."""
    try:
        yield
    except (
        httpcore.TimeoutException,
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.ProxyError,
    ) as error:
        kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__)
        raise kind(str(error), request=request) from error


_OF_STATUS: Final = {
    401: "the server requires an API key: name its environment variable with --api-key-env NAME",
    403: "the API key is not allowed to do this: check its permissions and --api-key-env",
    404: "nothing is at that path: the base URL ends where /v1 begins, as http://host:8000; servers "
    "with chat only need --endpoint chat",
    405: "the path does not accept this method: is it the base URL of the OpenAI API?",
    413: "the prompt is too large: use a smaller --input-len, or raise the proxy's limit",
    422: "the server does not know one of the request's fields: is it OpenAI-compatible?",
    429: "the server has a rate limit: raise it, or connect behind its gateway",
}
_SERVER_FAILED: Final = "the server failed, or its proxy has no server: see its log"


def status_hint(status: int, sent_key: bool = False) -> str:
    """Return the likely meaning of a status; empty without one."""
    if status == 401 and sent_key:
        return "the server refuses the key that was sent: is it the right one, without a line end?"
    if 300 <= status < 400:
        return "give the redirect's target URL: redirects are not followed"
    return _OF_STATUS.get(status, _SERVER_FAILED if status >= 500 else "")


def status_text(status: int) -> str:
    """Return text such as ``401 Unauthorized``; the number alone for an unknown status."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def failure_hint(url: str, error: Exception) -> str:
    """Return the likely cause of a request without an answer."""
    text = " ".join(str(cause) for cause in _causes(error))
    parts = urlsplit(url)
    if "CERTIFICATE_VERIFY_FAILED" in text or any(
        isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)
    ):
        return (
            "its certificate is not trusted: give its CA file with --ca-file FILE, or skip verification "
            "with --insecure"
        )
    if re.search(r"WRONG_VERSION_NUMBER|HTTP_REQUEST|RECORD_LAYER_FAILURE", text):
        return f"the server does not use TLS: try http://{parts.netloc}"
    if "SSL" in text or "TLS" in text:
        return "TLS failed before the request: incompatible versions, or a required client certificate"
    if isinstance(error, httpx.TimeoutException):
        return "nothing answered in time: is it still loading its model, or does a firewall drop packets?"
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)):
        tls = f" If the server uses TLS: https://{parts.netloc}" if parts.scheme == "http" else ""
        return "what listens there does not speak HTTP: is the port right?" + tls
    if re.search(r"Name or service not known|nodename|Temporary failure|No address", text):
        return f"the host {parts.hostname} is unknown: is it spelt correctly?{_past_the_proxy()}"
    if "refused" in text:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"nothing listens on port {port} there: is it up?{_past_the_proxy()}"
    return f"is the server running there, and can this machine reach it?{_past_the_proxy()}"


def _past_the_proxy() -> str:
    if not any(os.environ.get(cased) for name in PROXIES for cased in (name, name.upper())):
        return ""
    return (
        " kvbench connects directly and ignores the configured proxy: run it behind the proxy, or use a "
        "TCP tunnel such as ssh -L"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
