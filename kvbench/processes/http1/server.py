"""The server side: keep-alive, pipelining (served in order), chunked streams, bounded buffers.

    server = await serve(handler, "127.0.0.1", 0)
    ...
    await server.close()

``handler(request, response)`` may be a plain function or a coroutine function. It may hand the
response on and return: the response counts as answered when ``send`` or ``end`` was called.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import Final

from kvbench.errors import PortInUseError
from kvbench.processes.http1.connection import Connection, Handler

BACKLOG: Final = 4096


class Server:
    """A listening server; ``port`` is the real one when 0 was asked for."""

    def __init__(
        self, servers: Sequence[asyncio.AbstractServer], port: int, connections: set[Connection]
    ) -> None:
        self._servers = servers
        self._connections = connections
        self.port = port

    async def close(self, grace_s: float = 0.5) -> None:
        """Stops listening, lets answers under way finish for ``grace_s``, then drops the rest."""
        for server in self._servers:
            server.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        for connection in list(self._connections):
            if not connection.busy:
                connection.close()
        while any(connection.busy for connection in self._connections) and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        while self._connections and loop.time() < deadline + 1.0:
            await asyncio.sleep(0.001)


async def serve(handler: Handler, host: str, port: int, *, listening: Sequence[socket.socket] = ()) -> Server:
    """Listens on ``host:port`` (0 takes any free port), or on bound sockets. Raises PortInUseError."""
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()

    def accept() -> Connection:
        return Connection(handler, connections)

    if listening:
        servers = [await loop.create_server(accept, sock=each, backlog=BACKLOG) for each in listening]
        return Server(servers, listening[0].getsockname()[1], connections)
    try:
        server = await loop.create_server(accept, host, port, backlog=BACKLOG, reuse_address=True)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"port {host}:{port} is in use", hint="choose another port, or stop what listens there"
            ) from error
        raise
    return Server([server], server.sockets[0].getsockname()[1], connections)
