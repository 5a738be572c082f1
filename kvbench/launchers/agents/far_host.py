"""The place of a process on another host: its files, clock and ports, and HTTP from there."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from kvbench.core.access import ServerAccess
from kvbench.hosts import web
from kvbench.launchers.agents.agent_client import AgentClient

_HEADERS: Final = ("content-type", "accept", "authorization")


class FarPlace:
    """``launchers.base.Far`` by an agent."""

    def __init__(self, agent: AgentClient) -> None:
        self._agent = agent

    @property
    def host(self) -> str:
        return self._agent.name

    @property
    def clock_ahead_s(self) -> float:
        return self._agent.clock_ahead_s()

    @property
    def cores(self) -> int:
        return self._agent.cores

    def cpu_s(self, pid: int) -> float | None:
        reported = self._agent.ask("cpu_s", pid=pid)["cpu_s"]
        return None if reported is None else float(reported)

    def path_of(self, path: Path) -> str:
        return f"{self._agent.files}/{path.name}"

    def put(self, path: Path) -> None:
        self._agent.put(path, path.name)

    def fetch(self, path: Path) -> None:
        self._agent.fetch(path.name, path)

    def forget(self, path: Path) -> None:
        self._agent.say("forget", path=path.name)

    def require_free(self, address: str, ports: Sequence[tuple[str, int]]) -> None:
        self._agent.ask("require_free", address=address, ports=[list(each) for each in ports])

    def free_ports(self, address: str, counts: Sequence[int]) -> list[int]:
        return [int(port) for port in self._agent.ask("free_ports", address=address, counts=counts)["ports"]]

    def listens(self, address: str, port: int) -> bool:
        return bool(self._agent.ask("listens", address=address, port=port)["listens"])


class FarWeb(httpx.BaseTransport):
    """HTTP that the agents do on their hosts: this machine need not reach the data network.

    ``agent_of`` names the agent by the address in the URL; others are asked from here.
    """

    def __init__(self, agent_of: Mapping[str, AgentClient], access: ServerAccess) -> None:
        self._agent_of = agent_of
        self._own = web.transport(access=access)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        agent = self._agent_of.get(request.url.host)
        if agent is None:
            return self._own.handle_request(request)
        timeout_s = float(request.extensions.get("timeout", {}).get("read") or 10.0)
        answer = agent.ask(
            "http",
            deadline_s=timeout_s + 10.0,
            method=request.method,
            url=str(request.url),
            headers=[[name, value] for name, value in request.headers.items() if name in _HEADERS],
            body=base64.b64encode(request.read()).decode(),
            timeout_s=timeout_s,
        )
        if "http_error" in answer:
            kind = getattr(httpx, str(answer["http_error"]), httpx.TransportError)
            raise kind(str(answer["text"]), request=request)
        return httpx.Response(
            int(answer["status"]),
            headers=dict(answer["headers"]),
            content=base64.b64decode(answer["body"]),
            request=request,
        )

    def close(self) -> None:
        self._own.close()
