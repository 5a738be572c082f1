"""Two endpoints of one backend in this process, driven through tickets: ``python tickets.py SPEC``.

SPEC is JSON: ``backend``, ``options``, ``op``, ``local`` and ``remote``: lists of block ids, one pair a
ticket. Each ticket is started three times, all of them under way at once, over new content each time.
Printed is JSON: ``descriptors`` of each ticket, ``transport``, ``addresses`` of this process's connections,
``merged``, the descriptors by NIXL's own debug log, and ``wrong``, a list of what did not arrive as it
must. It is a process of its own, since native libraries are loaded here.
"""

import ctypes
import json
import mmap
import os
import random
import re
import sys
import time
from typing import Any

import psutil

from kvbench import transfer
from kvbench.transfer.base import Endpoint, Layout
from kvbench.transfer.parts.native import NativeLog

LAYOUT = Layout(regions=2, blocks=32, block_bytes=4096)
ROUNDS = 3
DEADLINE_S = 10.0
MERGED = re.compile(r"merged \d+ \w+ into (\d+) descriptors")
"""What NIXL writes for each transfer with NIXL_LOG_LEVEL=DEBUG."""


class Side:
    """A buffer, and the endpoint over it."""

    def __init__(self, backend: transfer.base.Backend, options: dict[str, Any], log: NativeLog) -> None:
        self.pool = mmap.mmap(-1, LAYOUT.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.endpoint: Endpoint = backend.open(options)
        self.endpoint.native_log = log.lines
        self.endpoint.register(ctypes.addressof(ctypes.c_char.from_buffer(self.pool)), LAYOUT)
        self.agent = {
            **self.endpoint.describe(),
            "backend": backend.name,
            "id": os.urandom(8).hex(),
            "layout": LAYOUT.to_json(),
        }

    def block(self, region: int, block: int) -> bytes:
        at = LAYOUT.offset(region, block)
        return self.pool[at : at + LAYOUT.block_bytes]


def connect(here: Side, there: Side) -> None:
    """The peer must make progress meanwhile, as its own process would."""
    import threading

    errors: list[Exception] = []

    def work() -> None:
        try:
            here.endpoint.connect(there.agent, DEADLINE_S)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        there.endpoint.progress()
        thread.join(0.001)
    if errors:
        raise errors[0]


def one_round(
    spec: dict[str, Any], tickets: list[Any], here: Side, there: Side, dice: random.Random
) -> list[str]:
    """New content, all tickets started, both buffers compared with what they must hold."""
    source, sink = (here, there) if spec["op"] == "write" else (there, here)
    source.pool[:] = dice.randbytes(LAYOUT.nbytes)
    sink.pool[:] = dice.randbytes(LAYOUT.nbytes)
    names = ("local", "remote") if spec["op"] == "write" else ("remote", "local")
    expected = bytearray(sink.pool[:])
    for from_ids, to_ids in zip(spec[names[0]], spec[names[1]], strict=True):
        for region in range(LAYOUT.regions):
            for a, b in zip(from_ids, to_ids, strict=True):
                at = LAYOUT.offset(region, b)
                expected[at : at + LAYOUT.block_bytes] = source.block(region, a)
    remote = [block for ids in spec["remote"] for block in ids]
    there.endpoint.offer(remote if spec["op"] == "read" else [])
    until = time.monotonic() + DEADLINE_S
    for ticket in tickets:
        here.endpoint.start(ticket)
    pending = list(tickets)
    while pending:
        for side in (here, there):
            side.endpoint.progress()
        pending = [ticket for ticket in pending if not here.endpoint.poll(ticket)]
        if time.monotonic() > until:
            return [f"{len(pending)} transfers did not end"]
    there.endpoint.collect(remote if spec["op"] == "write" else [])
    return [] if sink.pool[:] == bytes(expected) else ["the bytes differ"]


def main(spec: dict[str, Any]) -> dict[str, Any]:
    backend = transfer.get(spec["backend"])
    os.environ.update(backend.env(spec["options"]))
    log = NativeLog()
    here, there = (Side(backend, spec["options"], log) for _ in range(2))
    connect(here, there)
    tickets = [
        here.endpoint.prepare(there.agent["id"], spec["op"], local, remote)
        for local, remote in zip(spec["local"], spec["remote"], strict=True)
    ]
    dice = random.Random(1)
    wrong = [text for _ in range(ROUNDS) for text in one_round(spec, tickets, here, there, dice)]
    connections = psutil.Process().net_connections("tcp4")
    result = {
        "descriptors": [ticket.descriptors for ticket in tickets],
        "nbytes": [ticket.nbytes for ticket in tickets],
        "prepared": all(ticket.prepare_s > 0 for ticket in tickets),
        "transport": here.endpoint.transport(),
        "addresses": sorted({end.ip for c in connections if c.raddr for end in (c.laddr, c.raddr)}),
        "wrong": wrong,
        "merged": [int(count) for line in dict.fromkeys(log.lines()) for count in MERGED.findall(line)],
    }
    for ticket in tickets:
        here.endpoint.release(ticket)
    for side in (here, there):
        side.endpoint.close()
        side.endpoint.close()
    return result


if __name__ == "__main__":
    out = os.dup(1)
    answer = main(json.loads(sys.argv[1]))
    os.write(out, json.dumps(answer).encode() + b"\n")
    # Not sys.exit: destructors of native libraries may wait for threads.
    os._exit(0)
