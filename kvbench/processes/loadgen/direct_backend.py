"""P or D of direct mode, and the engine id that P's bootstrap address names."""

from __future__ import annotations

import http.client
import time
from typing import Final

from kvbench.connectors.base import PrefillPeer
from kvbench.core.plan.dispatch import BackendSpec, engine_id_in
from kvbench.errors import ServerError
from kvbench.processes.loadgen.sockets.loop import SocketLoop
from kvbench.processes.loadgen.sockets.pool import ConnectionPool
from kvbench.processes.loadgen.sockets.wire import ServerAddress

BOOTSTRAP_RETRY_S: Final = 0.1
BOOTSTRAP_ANSWER_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024


class DirectBackend:
    """P or D. ``engine_id`` is known after the bootstrap query."""

    def __init__(self, role: str, spec: BackendSpec, loop: SocketLoop) -> None:
        self.name = f"{role} {spec.url}"
        self.spec = spec
        self.server = ServerAddress(spec.url)
        self.pool = ConnectionPool(self.server, loop)
        self.engine_id = spec.engine_id

    def peer(self) -> PrefillPeer:
        spec = self.spec
        return PrefillPeer(
            spec.url, spec.bootstrap_url, self.engine_id, spec.side_address, spec.tensor_parallel_size
        )


def asked_engine_id(backend: DirectBackend, timeout_s: float) -> str:
    """The engine id that a prefill server's bootstrap address names. Raises ServerError on timeout."""
    where = ServerAddress(backend.spec.bootstrap_url)
    deadline = time.monotonic() + timeout_s
    while True:
        connection = http.client.HTTPConnection(where.host, where.port, timeout=BOOTSTRAP_ANSWER_S)
        try:
            connection.request("GET", "/query")
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES)
            engine_id = engine_id_in(body) if answer.status == 200 else ""
            problem = f"status {answer.status}" if answer.status != 200 else "the answer carries no engine_id"
        except (OSError, http.client.HTTPException) as error:
            engine_id, problem = "", str(error) or type(error).__name__
        finally:
            connection.close()
        if engine_id:
            return engine_id
        if time.monotonic() > deadline:
            raise ServerError(
                f"{backend.name}: its bootstrap address {backend.spec.bootstrap_url} told no engine id"
                f" within {timeout_s:g} s: {problem}",
                hint="is it a prefill server with this connector, and is the bootstrap port right?",
            )
        time.sleep(BOOTSTRAP_RETRY_S)
