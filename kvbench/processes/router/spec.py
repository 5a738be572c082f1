"""The router's spec and its backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvbench import connectors
from kvbench.connectors.base import Connector, PrefillPeer, peer_at
from kvbench.core.load.dispatch import BackendSpec, server_of_session
from kvbench.errors import InputError
from kvbench.processes.common.entry import parse_spec
from kvbench.processes.http1 import Pool, Splicing

_KNOWN_PATHS: Final = 16
"""Number of paths with a cached request head; clients may send any others."""


@dataclass(frozen=True)
class RouterSpec:
    """Where to listen, which connector's dispatch to use, and the backends."""

    port: int
    connector: str
    decode: list[Any]
    prefill: list[Any] = field(default_factory=list)
    host: str = "127.0.0.1"
    request_timeout_s: float = 60.0
    bootstrap_timeout_s: float = 30.0
    """Time for the prefill servers to start and report their engine ids."""
    version: str = ""
    """The engine's version, which selects the connector's dialect; empty: the newest."""
    options: dict[str, Any] = field(default_factory=dict)
    """The connector's options, for dialects that depend on them."""
    processes: int = 1
    """Processes that share the port; each uses one core at most."""
    routing: str = "session"
    """Choice of servers: ``core.scenario.deployment_section.Routing``."""
    compiled: bool = True
    """Forward streams by compiled code if available; false: by Python."""
    lie: str = ""
    trace_path: str = ""
    """File for the spans of each trial's first requests; empty: none."""

    def profile(self) -> Connector:
        """Return the connector whose dispatch functions are used. Raises InputError."""
        return connectors.profile(self.connector, self.version, self.options, "the spec's options")

    def backends(
        self, role: str, connector: Connector, splicing: Splicing | None = None
    ) -> list[RouterBackend]:
        """Return a role's servers. Raises InputError if the connector cannot use them."""
        items = self.prefill if role == "prefill" else self.decode
        found = [
            RouterBackend(role, parse_spec(BackendSpec, item, f"the spec's {role}[{index}]"), splicing)
            for index, item in enumerate(items)
        ]
        if not found and (role == "decode" or connector.disaggregated):
            raise InputError(f"the spec: connector {connector.name!r} needs at least one {role} server")
        if role == "prefill" and connector.needs_engine_id and not all(b.engine_ids for b in found):
            raise InputError(f"the spec: connector {connector.name!r} needs engine_ids for each prefill")
        if role == "prefill" and connector.needs_bootstrap and not all(b.bootstrap_url for b in found):
            raise InputError(f"the spec: connector {connector.name!r} needs a bootstrap_url for each prefill")
        return found


class RouterBackend:
    """A server with its connections. ``engine_ids`` of its ranks are known after the bootstrap query."""

    def __init__(self, role: str, spec: BackendSpec, splicing: Splicing | None = None) -> None:
        self.role = role
        self.url = spec.url
        self.bootstrap_url = spec.bootstrap_url
        self.side_address = spec.side_address
        self.engine_ids = tuple(spec.engine_ids)
        self.spec = spec
        self._turn = 0
        self.pool = Pool(spec.url, splicing=splicing)
        self._begun: dict[str, bytes] = {}

    @property
    def name(self) -> str:
        return f"{self.role} {self.url}"

    def request(self, path: str, headers: Mapping[str, str], request_id: str, body: bytes) -> bytes:
        begun = self._begun.get(path)
        if begun is None or headers or not request_id.isprintable():
            all_headers = {"content-type": "application/json", **headers, "x-request-id": request_id}
            data = self.pool.request("POST", path, all_headers, body)
            if len(self._begun) < _KNOWN_PATHS and not headers:
                self._begun[path] = data[: data.index(b"x-request-id: ")]
            return data
        name = request_id.encode("latin-1", "replace")
        return b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (begun, name, len(body), body)

    def next_peer(self, session: str | None = None) -> PrefillPeer:
        """The rank that takes the next request; of a session always the same."""
        if session and len(self.engine_ids) > 1:
            return peer_at(self.spec, self.engine_ids, server_of_session(session, len(self.engine_ids)))
        self._turn += 1
        return peer_at(self.spec, self.engine_ids, self._turn - 1)
