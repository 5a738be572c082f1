"""All hosts of a run: an agent on each, from the first need of it to the end of the run.

A host that was lost is tried again when it is needed again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from kvbench.core.plan.processes import AGENT_MODULE, RUN_TAG_ENV
from kvbench.core.scenario.hosts import RemoteHost
from kvbench.core.scenario.scenario import Deployment
from kvbench.errors import KvbenchError, LaunchError
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.agents.channel import Channel
from kvbench.launchers.agents.remote import RemoteLauncher

Connect = Callable[[str, str], Channel]
"""Host name, shell command that is to run there → channel. Raises LaunchError."""

AT_ONCE: Final = 32


class Fleet(Mapping[str, AgentClient]):
    """The agents of a run by host name. As a context manager it closes all of them at the end.

    ``close_too`` is called last, such as for what the channels share.
    """

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
        """Have an agent on each of these hosts, or on all in use. Raises LaunchError with all trouble."""
        wanted = list(self._deployment.used_hosts if names is None else names)
        missing = [name for name in wanted if name not in self._agents or self._agents[name].lost]
        if not missing:
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(self._tried, missing))
        problems = [each for each in found if isinstance(each, KvbenchError)]
        for name, agent in zip(missing, found, strict=True):
            if isinstance(agent, AgentClient):
                self._agents[name] = agent
        if problems:
            raise LaunchError(
                "; ".join(each.message for each in problems),
                hint="; ".join(dict.fromkeys(each.hint for each in problems if each.hint)),
            )

    def launcher(self, log_dir: Path, env: Mapping[str, Mapping[str, str]] | None = None) -> RemoteLauncher:
        """A launcher for one deployment; every host that is used is connected first. Raises LaunchError."""
        self.require()
        hosts = self._deployment.hosts
        addresses = {hosts[name].address: agent for name, agent in self._agents.items()}
        launcher = RemoteLauncher(
            dict(self._agents), self._deployment.host_name, self.run_tag, log_dir, addresses
        )
        return launcher.with_env(env or {})

    def environments(self) -> dict[str, Any]:
        """What each host is, by name; the trouble where that cannot be asked."""
        return self._asked("environment")

    def gpus(self) -> dict[str, Any]:
        """The GPUs of each host as its agent sees them, by name; the trouble where that cannot be asked."""
        return self._asked("gpus")

    def _asked(self, what: str) -> dict[str, Any]:
        def describe(name: str) -> Any:
            try:
                return self._agents[name].ask(what, 60.0)
            except KvbenchError as error:
                return {"error": error.message}

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(self._agents, pool.map(describe, self._agents), strict=True))

    def close(self) -> None:
        """End all agents, and with them all that they have started."""
        agents, self._agents = list(self._agents.values()), {}
        if agents:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda agent: agent.close(), agents))
        self._close_too()

    def _tried(self, name: str) -> AgentClient | KvbenchError:
        old = self._agents.get(name)
        try:
            if old is not None:
                old.close()
            host = self._deployment.hosts[name]
            channel = self._connect(name, agent_command(host, self.run_tag))
            return AgentClient(channel, host.workdir, environment_of(host))
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def agent_command(host: RemoteHost, run_tag: str) -> str:
    """The shell command that starts an agent on a host. Its environment comes later, over the channel."""
    agent = f"-m {AGENT_MODULE} --tag {shlex.quote(run_tag)}"
    begin = f"cd / && exec env {RUN_TAG_ENV}={shlex.quote(run_tag)}"
    if host.python:
        return f"{begin} {in_shell(host.python)} {agent}"
    own = in_shell(f"{host.workdir}/venv/bin/python")
    return f"if [ -x {own} ]; then {begin} {own} {agent}; else {begin} python3 {agent}; fi"


def in_shell(path: str) -> str:
    """A path as a shell's word, whose leading ``~`` still means the home folder."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + shlex.quote(path[1:]) if len(path) > 1 else '"$HOME"'
    return shlex.quote(path)


def environment_of(host: RemoteHost) -> dict[str, str]:
    """What all processes of a host get: its NICs for the libraries that ask the environment, and its own."""
    env: dict[str, str] = {}
    if host.nics:
        names = ",".join(host.nics)
        rdma = all(name.startswith(("mlx", "bnxt", "irdma", "efa", "rocep", "ibp")) for name in host.nics)
        env = {"UCX_NET_DEVICES": ",".join(f"{name}:1" if rdma else name for name in host.nics)}
        env |= {"NCCL_IB_HCA": names} if rdma else {"NCCL_SOCKET_IFNAME": names, "GLOO_SOCKET_IFNAME": names}
    return {**env, **host.env}
