"""A server before another one that notes what passes: who asked what, and what was answered."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvbench.processes.http1 import ReceivedRequest, Response, serve


@dataclass(frozen=True)
class Exchange:
    """One streamed completion: its X-Request-Id, the request's body, the text of the answer."""

    request_id: str
    body: dict[str, Any]
    text: str


@contextmanager
def taped(url: str) -> Iterator[tuple[str, list[Exchange]]]:
    """A server before another one that notes each request's body and the text of its streamed answer."""
    tape: list[Exchange] = []
    ready, over, found = threading.Event(), threading.Event(), []

    async def main() -> None:
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=64)) as client:

            async def handler(request: ReceivedRequest, response: Response) -> None:
                headers = {
                    "content-type": "application/json",
                    "x-request-id": request.headers["x-request-id"],
                }
                target, whole = url + request.path, b""
                async with client.stream("POST", target, content=request.body, headers=headers) as answer:
                    response.start_stream()
                    async for piece in answer.aiter_bytes():
                        whole += piece
                        response.write(piece)
                tape.append(
                    Exchange(request.headers["x-request-id"], json.loads(request.body), text_of(whole))
                )
                response.end()

            server = await serve(handler, "127.0.0.1", 0)
            found.append(f"http://127.0.0.1:{server.port}")
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.01)
            await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    try:
        yield found[0], tape
    finally:
        over.set()
        thread.join(20)


def text_of(stream: bytes) -> str:
    """What the events of a stream say together."""
    events = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] for choice in choices)
