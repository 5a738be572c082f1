"""``python -m kvbench.processes.router SPEC.json``"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

from kvbench.core.plan.processes import ROUTER_MODULE
from kvbench.errors import InputError, KvbenchError
from kvbench.processes.common.entry import (
    STOPPING,
    print_error,
    raise_open_files,
    read_spec,
    run,
    shorten_slice,
)
from kvbench.processes.common.spans import SpanLog
from kvbench.processes.http1 import serve
from kvbench.processes.router.app import Router
from kvbench.processes.router.metrics import RouterMetrics
from kvbench.processes.router.processes import fork, listening_sockets, watch
from kvbench.processes.router.spec import RouterSpec

log = logging.getLogger(ROUTER_MODULE)

NAME = ROUTER_MODULE
COLLECT_EVERY_S: Final = 10.0
"""Interval of garbage collection: about 1 ms each with 300 active requests."""


async def route(
    router: Router, spec: RouterSpec, listening: Sequence[socket.socket], stop: asyncio.Event
) -> int:
    """Serve until ``stop``. /health answers 503 while the engine ids are being queried."""
    server = await serve(router.handle, spec.host, spec.port, listening=listening)
    log.info("listening on http://%s:%d, connector %s", spec.host, server.port, spec.connector)
    gc.collect()
    gc.freeze()
    gc.disable()
    tidy = asyncio.ensure_future(collect_now_and_then())
    stopping = asyncio.ensure_future(stop.wait())
    bootstrap = asyncio.ensure_future(router.bootstrap())
    beat = asyncio.ensure_future(router.metrics.beat())
    try:
        await asyncio.wait({stopping, bootstrap}, return_when=asyncio.FIRST_COMPLETED)
        if bootstrap.done():
            bootstrap.result()
            await stopping
    finally:
        tasks = (bootstrap, stopping, beat, tidy)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.close()
        await router.close()
    return 0


async def collect_now_and_then() -> None:
    """Collect garbage, which only failures leave, so rarely that few requests wait for it."""
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        gc.collect()


def several_processes(spec: RouterSpec) -> int:
    """Run the router in ``spec.processes`` processes on one port; this process supervises them."""
    spec.backends("decode", spec.profile())  # report a spec's error once
    metrics = RouterMetrics(spec.processes)
    spans = SpanLog(spec.trace_path) if spec.trace_path else None
    sockets = listening_sockets(spec.host, spec.port, spec.processes)

    def work(number: int) -> int:
        metrics.write_as(number)
        for other in sockets[:number] + sockets[number + 1 :]:
            other.close()
        return run(NAME, lambda stop: route(Router(spec, metrics, spans), spec, [sockets[number]], stop))

    # A signal during the fork would end one worker with another exit code, and then all.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    workers = fork(spec.processes, work)
    for listener in sockets:
        listener.close()
    return run(NAME, lambda stop: watch(workers, stop))


def main(argv: Sequence[str]) -> int:
    shorten_slice()
    raise_open_files()
    try:
        spec = read_spec(RouterSpec, argv)
        if spec.processes < 1:
            raise InputError("the spec: 'processes' must be 1 or more")
        if spec.processes > 1:
            return several_processes(spec)
        return run(NAME, lambda stop: route(Router(spec), spec, (), stop))
    except KvbenchError as error:
        return print_error(NAME, error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
