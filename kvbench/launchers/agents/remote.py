"""Processes started by agents on other hosts, with the interface of local ones.

Logs and stdout are streamed, files copied, HTTP requests sent from the remote host. A host without its agent
is lost with all processes, which the agent kills (``launchers/agents/channel.py``); a ``Fleet`` reconnects
when the host is needed again."""

from __future__ import annotations

import base64
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx

from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import AGENT_MODULE, RUN_TAG_ENV, ProcessSpec, in_code
from kvbench.core.scenario.hosts import RemoteHost
from kvbench.core.scenario.scenario import Deployment
from kvbench.errors import KvbenchError, LaunchError
from kvbench.hosts import web
from kvbench.hosts.procfs import wait_while
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.agents.channel import LOST, Channel
from kvbench.launchers.agents.remote_process import RemoteProcess
from kvbench.launchers.base import GRACE_S, stop_in_reverse

_HEADERS: Final = ("content-type", "accept", "authorization")


class RemotePlace:
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
        self._agent.ask("require_free", address=address, ports=[list(pair) for pair in ports])

    def free_ports(self, address: str, counts: Sequence[int]) -> list[int]:
        return [int(port) for port in self._agent.ask("free_ports", address=address, counts=counts)["ports"]]

    def listens(self, address: str, port: int) -> bool:
        return bool(self._agent.ask("listens", address=address, port=port)["listens"])


class RemoteWeb(httpx.BaseTransport):
    """HTTP transport via agents, so that this machine need not reach the data network. ``agent_of``: agent by
    the URL's address; other addresses are requested locally."""

    def __init__(self, agent_of: Mapping[str, AgentClient], access: ServerAccess) -> None:
        self._agent_of = agent_of
        self._local = web.transport(access=access)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        agent = self._agent_of.get(request.url.host)
        if agent is None:
            return self._local.handle_request(request)
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
        self._local.close()


CODE: Final = str(Path(__file__).resolve().parents[3])
"""Folder of the local kvbench package."""
ENDED_S: Final = 5.0
"""Longest time until a killed process is reported, in seconds."""
POLL_S: Final = 0.01


class RemoteLauncher:
    """Starts each process on its ``host_of``; logs are copied to ``log_dir``. ``agents`` (by host) belong to
    the caller. ``addresses``: server addresses that are requested from their hosts."""

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
        """Return a launcher with environment per process name, such as GPUs."""
        self._env = dict(env)
        return self

    def with_secrets(self, role: str, env: Mapping[str, str]) -> RemoteLauncher:
        """Return a launcher with secret environment, which never gets into specs or logs."""
        self._secrets[role] = dict(env)
        return self

    def start(self, spec: ProcessSpec, *, piped: bool = False) -> RemoteProcess:
        """Start a process on its host. Raises LaunchError if it cannot run, HostLostError."""
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
                spec=self._translate(spec, agent).to_json(),
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
        return self.log_dir / f"{spec.name}.log"

    def stop(self, processes: Sequence[RemoteProcess], grace_s: float = GRACE_S) -> None:
        try:
            stop_in_reverse(processes, grace_s)
        finally:
            wait_while(lambda: any(process.poll() is None for process in processes), ENDED_S, POLL_S)
            for process in processes:
                process.release()
        self._fetch_extras({process.host for process in processes})

    def check(self) -> None:
        for agent in self._agents.values():
            agent.check()

    def place_of(self, name: str) -> RemotePlace:
        return RemotePlace(self._agent(name))

    def web(self, access: ServerAccess) -> RemoteWeb:
        """HTTP transport from the servers' hosts."""
        return RemoteWeb(self._addresses, access)

    def host_of(self, name: str) -> str:
        return self._host_of(name)

    def env_of(self, spec: ProcessSpec) -> Mapping[str, str]:
        return {**spec.env, **self._env.get(spec.name, {})}

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._agents)

    def ask_hosts(
        self, what: str, more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return host → answer to one question. Raises the first error."""
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

    def _fetch_extras(self, hosts: set[str]) -> None:
        """Copy files that processes left next to their logs; missing ones are no error."""
        for host in hosts:
            agent = self._agents[host]
            with contextlib.suppress(KvbenchError):
                for remote_path in agent.ask("list", folder=self._folder)["names"]:
                    agent.fetch(str(remote_path), self.log_dir / Path(str(remote_path)).name)

    def _translate(self, spec: ProcessSpec, agent: AgentClient) -> ProcessSpec:
        """Translate a spec to the host's Python, kvbench folder and log folder."""
        remote_logs = f"{agent.folder}/logs/{self._folder}"
        local_logs = (str(self.log_dir.absolute()), str(self.log_dir))
        code = in_code(CODE)

        def translate(value: Any) -> Any:
            if isinstance(value, str):
                for local in local_logs:
                    if local != ".":
                        value = value.replace(local, remote_logs)
                return code.sub(lambda _: agent.code, value)
            if isinstance(value, Mapping):
                return {key: translate(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [translate(item) for item in value]
            return value

        return replace(
            spec,
            argv=tuple(agent.python if word == sys.executable else translate(word) for word in spec.argv),
            env={**translate(spec.env), **self._env.get(spec.name, {})},
            spec=translate(spec.spec) if spec.spec is not None else None,
            files={name: translate(content) for name, content in spec.files.items()},
        )


Connect = Callable[[str, str], Channel]
"""(host name, shell command) → channel. Raises LaunchError."""

AT_ONCE: Final = 32


class Fleet(Mapping[str, AgentClient]):
    """Agents of a run by host name; a context manager that closes them, then ``close_too``."""

    def __init__(
        self,
        deployment: Deployment,
        run_tag: str,
        connect: Connect,
        close_too: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_tag = run_tag
        self._deployment = deployment
        self._connect = connect
        self._close_too = close_too
        self._agents: dict[str, AgentClient] = {}

    def require(self, names: Iterable[str] | None = None) -> None:
        """Connect these hosts, or all in use. Raises LaunchError with all problems."""
        wanted = list(self._deployment.used_hosts if names is None else names)
        missing = [name for name in wanted if name not in self._agents or self._agents[name].lost]
        if not missing:
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(self._try_connect, missing))
        problems = [problem for problem in results if isinstance(problem, KvbenchError)]
        for name, agent in zip(missing, results, strict=True):
            if isinstance(agent, AgentClient):
                self._agents[name] = agent
        if problems:
            raise LaunchError(
                "; ".join(problem.message for problem in problems),
                hint="; ".join(dict.fromkeys(problem.hint for problem in problems if problem.hint)),
            )

    def launcher(self, log_dir: Path, env: Mapping[str, Mapping[str, str]] | None = None) -> RemoteLauncher:
        """Connect the hosts and return a deployment's launcher. Raises LaunchError."""
        self.require()
        hosts = self._deployment.hosts
        addresses = {hosts[name].address: agent for name, agent in self._agents.items()}
        launcher = RemoteLauncher(
            dict(self._agents), self._deployment.host_name, self.run_tag, log_dir, addresses
        )
        return launcher.with_env(env or {})

    def environments(self) -> dict[str, Any]:
        return self._ask_all("environment")

    def gpus(self) -> dict[str, Any]:
        """Return host → its agent's GPUs, or the problem."""
        return self._ask_all("gpus")

    def _ask_all(self, what: str) -> dict[str, Any]:
        def describe(name: str) -> Any:
            try:
                return self._agents[name].ask(what, 60.0)
            except KvbenchError as error:
                return {"error": error.message}

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(self._agents, pool.map(describe, self._agents), strict=True))

    def close(self) -> None:
        agents, self._agents = list(self._agents.values()), {}
        if agents:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda agent: agent.close(), agents))
        self._close_too()

    def _try_connect(self, name: str) -> AgentClient | KvbenchError:
        old = self._agents.get(name)
        try:
            if old is not None:
                old.close()
            host = self._deployment.hosts[name]
            channel = self._connect(name, agent_command(host, self.run_tag))
            return AgentClient(channel, host.workdir, host.env, host.nics)
        except KvbenchError as error:
            return error

    def __getitem__(self, name: str) -> AgentClient:
        return self._agents[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def agent_command(host: RemoteHost, run_tag: str) -> str:
    """Shell command that starts an agent; its environment follows over the channel."""
    agent = f"-m {AGENT_MODULE} --tag {shlex.quote(run_tag)}"
    begin = f"cd / && exec env {RUN_TAG_ENV}={shlex.quote(run_tag)}"
    if host.python:
        return f"{begin} {in_shell(host.python)} {agent}"
    venv_python = in_shell(f"{host.workdir}/venv/bin/python")
    return f"if [ -x {venv_python} ]; then {begin} {venv_python} {agent}; else {begin} python3 {agent}; fi"


def in_shell(path: str) -> str:
    """Quote a path for a shell, keeping a leading ``~``."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + shlex.quote(path[1:]) if len(path) > 1 else '"$HOME"'
    return shlex.quote(path)
