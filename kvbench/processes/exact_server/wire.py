"""Requests in, bytes out: the parts of HTTP/1.1 and OpenAI that the exact server supports. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from zlib import crc32

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_BODY_BYTES: Final = 256 * 1024 * 1024
HEADER: Final = re.compile(
    rb"\r\n(content-length|transfer-encoding|connection|x-request-id):[ \t]*([^\r\n]*)", re.I
)
PROMPT_IDS: Final = re.compile(rb'"prompt"[ \n\t]*:[ \n\t]*\[(?=[ \n\t]*\d)')
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK: Final = b"0\r\n\r\n"
DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n"


class BadRequestError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Head:
    """A request's head. ``size``: its bytes with the empty line; ``length``: bytes of the body."""

    method: bytes
    target: bytes
    size: int
    length: int
    request_id: str
    close: bool


def parse_head(data: bytes | bytearray) -> Head | None:
    """Parse the head at the start of ``data``; None if it is incomplete. Raises BadRequestError."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > MAX_HEAD_BYTES:
            raise BadRequestError(431, f"the headers exceed {MAX_HEAD_BYTES} bytes")
        return None
    head = bytes(data[:end])
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        raise BadRequestError(400, "malformed request line")
    length, request_id, close = 0, "", words[2] == b"HTTP/1.0"
    for name, value in HEADER.findall(head):
        name = name.lower()
        if name == b"content-length":
            if not value.strip().isdigit() or int(value) > MAX_BODY_BYTES:
                raise BadRequestError(400, "unusable content-length")
            length = int(value)
        elif name == b"transfer-encoding":
            raise BadRequestError(411, "send a content-length; chunked bodies are not read")
        elif name == b"connection":
            close = close or value.strip().lower() == b"close"
        else:
            request_id = value.decode("latin-1").strip()
    return Head(words[0], words[1], end + 4, length, request_id, close)


@dataclass(frozen=True)
class WantedAnswer:
    """Content of a completion request. ``prompt_tokens`` of a text are its words, ``prompt`` is a CRC-32."""

    output_len: int | None
    prompt_tokens: int
    stream: bool
    usage: bool
    produces_kv: bool
    prompt: int = field(default=0, compare=False)


def parse_body(body: bytes) -> WantedAnswer:
    """Parse a body. Raises BadRequestError. Token ids are counted, not decoded: 200 kB take 20 µs."""
    tokens, prompt = None, 0
    if (ids := PROMPT_IDS.search(body)) is not None:
        end = body.find(b"]", ids.end())
        tokens, prompt = body.count(b",", ids.end(), end) + 1, crc32(body[ids.end() : end])
        body = body[: ids.end()] + b"0" + body[end:]
    try:
        request = json.loads(body)
        if tokens is None:
            text = request.get("prompt", "")
            tokens = len(text.split()) if isinstance(text, str) else 1
            prompt = crc32(str(text).encode("utf-8", "surrogatepass"))
        output_len = request.get("max_tokens", request.get("max_completion_tokens"))
        options = request.get("stream_options") or {}
        kv = request.get("kv_transfer_params") or {}
        if output_len is not None and (type(output_len) is not int or output_len < 1):
            raise BadRequestError(400, f"max_tokens must be a positive number, it is {output_len!r}")
        return WantedAnswer(
            output_len=output_len,
            prompt_tokens=tokens,
            stream=bool(request.get("stream")),
            usage=bool(options.get("include_usage")),
            produces_kv=bool(kv.get("do_remote_decode")),
            prompt=prompt,
        )
    except (ValueError, AttributeError) as error:
        raise BadRequestError(400, f"the body is not a completion request: {error}") from error


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(model: str, choices: list[dict[str, Any]], usage: Mapping[str, int] | None = None) -> bytes:
    """A server-sent event of a completion stream, about as long as vLLM's, as one chunk."""
    data = _completion(model, choices) | ({} if usage is None else {"usage": dict(usage)})
    return chunk(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")


def _completion(model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"id": "cmpl-exact", "object": "text_completion", "created": 0}
    return {**about, "model": model, "choices": choices}


def choice(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }


def usage_of(prompt_tokens: int, output_len: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_len,
        "completion_tokens": output_len,
    }


def error_body(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": _phrase(status), "code": status}}).encode()


def plain(
    status: int, body: bytes, *, kind: str = "application/json", headers: str = "", close: bool = False
) -> bytes:
    """A whole response. ``headers``: further lines, each with its CRLF."""
    closing = "connection: close\r\n" if close else ""
    head = f"HTTP/1.1 {status} {_phrase(status)}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{closing}{headers}\r\n".encode() + body


def whole_completion(model: str, text: str, usage: Mapping[str, int], *, produces_kv: bool) -> bytes:
    """The body of an answer that is not streamed; a prefill server adds its hand-off if requested."""
    data = {**_completion(model, [choice(text, "length")]), "usage": dict(usage)}
    if produces_kv:
        data["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "exact",
            "remote_block_ids": [0],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
        }
    return json.dumps(data, separators=(",", ":")).encode()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
