"""P or D of direct mode, and the engine id that P's bootstrap address names."""

from __future__ import annotations

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
    import httpx  # a tenth of a second, which only who asks need wait for

    from kvbench.hosts import web

    ServerAddress(backend.spec.bootstrap_url)  # an InputError for what is no URL
    url = httpx.URL(backend.spec.bootstrap_url).join("/query")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with web.client(timeout_s=BOOTSTRAP_ANSWER_S) as client:
                answer = client.get(url)
            engine_id = engine_id_in(answer.content) if answer.status_code == 200 else ""
            lacking = "the answer carries no engine_id"
            problem = lacking if answer.status_code == 200 else f"status {answer.status_code}"
        except httpx.HTTPError as error:
            engine_id, problem = "", str(error) or type(error).__name__
        if engine_id:
            return engine_id
        if time.monotonic() > deadline:
            raise ServerError(
                f"{backend.name}: its bootstrap address {backend.spec.bootstrap_url} told no engine id"
                f" within {timeout_s:g} s: {problem}",
                hint="is it a prefill server with this connector, and is the bootstrap port right?",
            )
        time.sleep(BOOTSTRAP_RETRY_S)
