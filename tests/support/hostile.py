"""Hostile servers, and trials of the load generator against them inside the test's process."""

import asyncio
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from kvbench.core.records import RequestRecord
from kvbench.processes.loadgen.__main__ import prepare_dispatch
from kvbench.processes.loadgen.plan import planned_requests
from kvbench.processes.loadgen.run import LoadRun
from kvbench.processes.loadgen.schedules import PlannedSchedule
from kvbench.processes.loadgen.sockets.loop import SocketLoop
from kvbench.processes.loadgen.spec import LoadSpec

HOST = "127.0.0.1"
OUTPUT_LEN = 3
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"text":" a"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: str, body: bytes, headers: str = "content-type: application/json\r\n") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


Step = bytes | float | str
"""What a hostile server does: send bytes, wait seconds, "close", "reset", or "hang"."""

GOOD: list[Step] = [
    HEAD, chunk(TOKEN), 0.01, chunk(TOKEN), 0.01, chunk(TOKEN), chunk(USAGE), chunk(DONE), LAST,
]  # fmt: skip


async def follow(steps: list[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Does the steps; returns whether the connection may serve again."""
    for step in steps:
        if isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
        elif isinstance(step, float):
            await asyncio.sleep(step)
        elif step == "hang":
            await reader.read()
            return False
        elif step == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        elif step == "close":
            return False
    return True


async def hostile(steps: list[Step], tls: ssl.SSLContext | None = None) -> tuple[asyncio.AbstractServer, str]:
    """A server that answers every request by the same steps, and its URL."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                if not await follow(steps, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, HOST, 0, ssl=tls)
    return server, f"http{'s' if tls else ''}://{HOST}:{server.sockets[0].getsockname()[1]}"


def spec_for(url: str, **changes: Any) -> LoadSpec:
    values: dict[str, Any] = {
        "base_url": url, "model": "tiny", "request_rate": 200.0, "num_requests": 4, "seed": 7,
        "input_len": 8, "output_len": OUTPUT_LEN, "vocab_size": 1000, "records_path": "unused",
        "timeout_s": 1.0, **changes,
    }  # fmt: skip
    return LoadSpec(**values)


class StopAt:
    """Stops a trial at a time of the monotonic clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def is_set(self) -> bool:
        return time.monotonic() >= self.at


def trial_here(
    spec: LoadSpec, stop_after_s: float = math.inf, warm: int = 2
) -> tuple[list[RequestRecord], dict[str, Any], list[dict[str, Any]]]:
    """A trial on this thread: records, end event, progress events."""
    loop = SocketLoop()
    plan = planned_requests(spec)
    pools, begin = prepare_dispatch(spec, plan, loop)
    for pool in pools:
        pool.warm(warm)
    progress: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> bool:
        progress.append(line)
        return True

    trial = LoadRun(spec, PlannedSchedule(spec, plan), loop, pools, report, begin)
    end = trial.run(StopAt(time.monotonic() + stop_after_s))
    progress += trial.last_lines()
    for pool in pools:
        pool.close()
    assert [pool.size for pool in pools] == [0] * len(pools), "a connection is left over"
    loop.close()
    return trial.records, end, progress


async def run_trial(
    url: str, stop_after_s: float = math.inf, warm: int = 2, **changes: Any
) -> tuple[list[RequestRecord], dict[str, Any], list[dict[str, Any]]]:
    """A trial on a thread beside the servers' event loop."""
    run = asyncio.to_thread(trial_here, spec_for(url, **changes), stop_after_s, warm)
    return await asyncio.wait_for(run, 20)


def on_loop(main: Callable[[], Awaitable[Any]]) -> Any:
    async def closing() -> Any:
        result = await main()
        await asyncio.sleep(0.02)  # the server's side notices the closed connections
        return result

    return uvloop.run(closing())


def against(steps: list[Step], **changes: Any) -> list[RequestRecord]:
    """The records of a trial against a server that does the steps; its counts must agree with them."""

    async def main() -> list[RequestRecord]:
        server, url = await hostile(steps)
        records, end, progress = await run_trial(url, **changes)
        server.close()
        assert end["reason"] == "complete"
        settled = [entry for line in progress for entry in line["settled"]]
        assert sorted(entry[0] for entry in settled) == list(range(len(records)))
        assert {entry[0]: entry[4] for entry in settled} == dict(enumerate(r.error for r in records))
        last = progress[-1]
        assert last["sent"] == last["done"] == len(records)
        assert last["met"] == sum(record.ok for record in records)
        assert last["missed"] == sum(not record.ok for record in records)
        return records

    records: list[RequestRecord] = on_loop(main)
    return records


def sse(*events: bytes, newline: bytes = b"\n") -> bytes:
    return b"".join(events).replace(b"\n", newline)


STREAM = sse(TOKEN, TOKEN, TOKEN, USAGE, DONE)


@contextmanager
def in_background(steps: list[Step]) -> Iterator[str]:
    """A hostile server on a thread of its own; its URL."""
    started, over = threading.Event(), threading.Event()
    found: list[str] = []

    async def main() -> None:
        server, url = await hostile(steps)
        found.append(url)
        started.set()
        while not over.is_set():
            await asyncio.sleep(0.01)
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=5) if others else None

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait(5)
    try:
        yield found[0]
    finally:
        over.set()
        thread.join()
