"""A small HTTP/1.1 layer on asyncio.Protocol and httptools: a server, and a client for streams. Speed matters
on the measured path: no routing, no middleware, no compression. Bodies are bytes."""

from __future__ import annotations

from kvbench.processes.http1.client import ClientConnection, ReplySink
from kvbench.processes.http1.connection import Handler, Server, serve
from kvbench.processes.http1.pool import (
    Gathering,
    MalformedAnswerError,
    Pool,
    Reply,
    ReplyCollector,
    answer_of,
    failure_error,
    fetch,
    request_bytes,
)
from kvbench.processes.http1.response import ReceivedRequest, Response, error_body
from kvbench.processes.http1.splicing import ChunkWatch, Splicing

__all__ = [
    "ChunkWatch",
    "ClientConnection",
    "Gathering",
    "Handler",
    "MalformedAnswerError",
    "Pool",
    "ReceivedRequest",
    "Reply",
    "ReplyCollector",
    "ReplySink",
    "Response",
    "Server",
    "Splicing",
    "answer_of",
    "error_body",
    "failure_error",
    "fetch",
    "request_bytes",
    "serve",
]
