"""Processes on other hosts: an agent on each starts them, and this end makes them look as if they were here.

Logs are written here as they come, stdout is a pipe here, files go there and back, HTTP is asked from there.
A host whose agent is gone is lost with all its processes: the agent has killed them, or is about to
(``launchers/agents/channel.py``).
"""

from __future__ import annotations

import base64
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx

from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import ProcessSpec
from kvbench.errors import KvbenchError, LaunchError
from kvbench.hosts import web
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.agents.channel import LOST
from kvbench.launchers.agents.remote_process import RemoteProcess
from kvbench.launchers.base import GRACE_S, stop_in_reverse

_HEADERS: Final = ("content-type", "accept", "authorization")


class RemotePlace:
    """``launchers.base.Place`` by an agent."""

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


class RemoteWeb(httpx.BaseTransport):
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


CODE: Final = str(Path(__file__).resolve().parents[3])
"""The folder from which kvbench is imported here."""
ENDED_S: Final = 5.0
"""A process that was killed is known to be gone after so long at the latest."""
POLL_S: Final = 0.01


class RemoteLauncher:
    """Starts each process on the host that ``host_of`` names for it; logs come to ``log_dir``.

    ``agents`` by host name stay with whoever made them. ``addresses``: whose the addresses are at which
    servers are asked; they are then asked from there.
    """

    def __init__(
        self,
        agents: Mapping[str, AgentClient],
        host_of: Callable[[str], str],
        run_tag: str,
        log_dir: Path,
        addresses: Mapping[str, AgentClient] | None = None,
    ) -> None:
        self.run_tag = run_tag
        self._addresses = dict(addresses or {})
        self.log_dir = log_dir
        self._agents = agents
        self._host_of = host_of
        self._folder = log_dir.name
        self._env: dict[str, Mapping[str, str]] = {}
        self._secrets: dict[str, Mapping[str, str]] = {}

    def with_env(self, env: Mapping[str, Mapping[str, str]]) -> RemoteLauncher:
        """Environment of single processes by name: what the place gives them, such as its GPUs."""
        self._env = dict(env)
        return self

    def with_secrets(self, role: str, env: Mapping[str, str]) -> RemoteLauncher:
        """Environment of a role's processes that nobody else is to see. It goes with the order to start one,
        over the connection, and stands in no spec, file or log.
        """
        self._secrets[role] = dict(env)
        return self

    def start(self, spec: ProcessSpec, *, piped: bool = False) -> RemoteProcess:
        """Start one process on its host. Raises LaunchError if it cannot be run, HostLostError."""
        agent = self._agent(spec.name)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        process = RemoteProcess(spec, agent, self.log_path(spec), piped=piped)
        try:
            agent.adopt(process)
            answer = agent.ask(
                "start",
                key=process.key,
                folder=self._folder,
                piped=piped,
                one_thread=spec.one_thread,
                beside=list(spec.beside),
                spec=self._translated(spec, agent).to_json(),
                secrets=dict(self._secrets.get(spec.name.partition("-")[0], {})),
            )
        except KvbenchError:
            agent.forget(process)
            process.ended(LOST)
            process.release()
            raise
        process.pid = int(answer["pid"])
        return process

    def log_path(self, spec: ProcessSpec) -> Path:
        """Where a process's output goes, here."""
        return self.log_dir / f"{spec.name}.log"

    def stop(self, processes: Sequence[RemoteProcess], grace_s: float = GRACE_S) -> None:
        """Stop in reverse order of start: ask, wait at most ``grace_s`` altogether, then force."""
        try:
            stop_in_reverse(processes, grace_s)
        finally:
            self._wait_gone(processes)
            for process in processes:
                process.release()
        self._bring_extras({process.host for process in processes})

    def check(self) -> None:
        """Raises HostLostError if one of its hosts is gone."""
        for agent in self._agents.values():
            agent.check()

    def place_of(self, name: str) -> RemotePlace:
        return RemotePlace(self._agent(name))

    def web(self, access: ServerAccess) -> RemoteWeb:
        """HTTP to the servers of these hosts, done over there."""
        return RemoteWeb(self._addresses, access)

    def host_of(self, name: str) -> str:
        """The host that a process of this name belongs on."""
        return self._host_of(name)

    def env_of(self, spec: ProcessSpec) -> Mapping[str, str]:
        """Its own, and what it was dealt."""
        return {**spec.env, **self._env.get(spec.name, {})}

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._agents)

    def ask_hosts(
        self, what: str, more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        """The answers of all hosts to one question, by name. Raises what the first of them raises."""
        with ThreadPoolExecutor(len(self._agents)) as pool:
            answers = pool.map(
                lambda name: self._agents[name].ask(what, **(more or {}).get(name, {})), self._agents
            )
            return dict(zip(self._agents, answers, strict=True))

    def _agent(self, name: str) -> AgentClient:
        host = self._host_of(name)
        agent = self._agents.get(host)
        if agent is None:
            raise LaunchError(f"{name} belongs on the host {host}, which is not connected")
        return agent

    def _wait_gone(self, killed: Sequence[RemoteProcess]) -> None:
        deadline = time.monotonic() + ENDED_S
        while any(process.poll() is None for process in killed) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _bring_extras(self, hosts: set[str]) -> None:
        """Brings what processes left beside their logs. What cannot be had is no reason to fail."""
        for host in hosts:
            agent = self._agents[host]
            with contextlib.suppress(KvbenchError):
                for there in agent.ask("list", folder=self._folder)["names"]:
                    agent.fetch(str(there), self.log_dir / Path(str(there)).name)

    def _translated(self, spec: ProcessSpec, agent: AgentClient) -> ProcessSpec:
        """The process as it is over there: that host's Python, its folder of kvbench, its folder of logs."""
        far_logs = f"{agent.folder}/logs/{self._folder}"
        words = {str(self.log_dir.absolute()): far_logs, str(self.log_dir): far_logs, CODE: agent.code}

        def changed(value: Any) -> Any:
            if isinstance(value, str):
                for near, far in words.items():
                    if near in value and near != ".":
                        value = value.replace(near, far)
                return value
            if isinstance(value, Mapping):
                return {key: changed(each) for key, each in value.items()}
            if isinstance(value, (list, tuple)):
                return [changed(each) for each in value]
            return value

        return replace(
            spec,
            argv=tuple(agent.python if word == sys.executable else changed(word) for word in spec.argv),
            env={**changed(spec.env), **self._env.get(spec.name, {})},
            spec=changed(spec.spec) if spec.spec is not None else None,
            files={name: changed(content) for name, content in spec.files.items()},
        )
