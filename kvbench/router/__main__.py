"""``python -m kvbench.router SPEC.json``"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence

from kvbench.errors import KvbenchError
from kvbench.http1 import serve
from kvbench.router.app import Router
from kvbench.router.spec import RouterSpec
from kvbench.spawned import read_spec, run, tell

log = logging.getLogger(__name__)


async def route(spec: RouterSpec, stop: asyncio.Event) -> int:
    """Serves until ``stop``. /health answers 503 while the engine ids are asked for."""
    router = Router(spec)
    server = await serve(router.handle, spec.host, spec.port)
    log.info("listening on http://%s:%d, connector %s", spec.host, server.port, spec.connector)
    gc.collect()
    gc.freeze()
    stopping = asyncio.ensure_future(stop.wait())
    bootstrap = asyncio.ensure_future(router.bootstrap())
    try:
        await asyncio.wait({stopping, bootstrap}, return_when=asyncio.FIRST_COMPLETED)
        if bootstrap.done():
            bootstrap.result()
            await stopping
    finally:
        bootstrap.cancel()
        stopping.cancel()
        await asyncio.gather(bootstrap, stopping, return_exceptions=True)
        await server.close()
        await router.close()
    return 0


def main(argv: Sequence[str]) -> int:
    try:
        spec = read_spec(RouterSpec, argv)
    except KvbenchError as error:
        return tell("kvbench.router", error)
    return run("kvbench.router", lambda stop: route(spec, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
