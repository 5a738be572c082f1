"""Hosts from a Ray cluster: a placement group for the run, and on each of its nodes an actor with an agent.

The cluster is the user's: kvbench joins it and never starts one. Placement group and actors are owned by
this process and not detached, so Ray ends them when it is gone, however it went; the agent, a child of its
actor, then reads the end of its stdin. Ray is imported inside functions only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvbench.core.plan.processes import RUN_TAG_ENV
from kvbench.core.scenario.schedulers import RayOptions
from kvbench.errors import LaunchError, MissingLibraryError
from kvbench.launchers.agents.channel import CLOSE_GRACE_S, SEND_DEADLINE_S, TAIL_LINES, Inbox, ended_words
from kvbench.launchers.parts.ray_bundles import Bundle, bundles_of, listed, missing, placed, unique_names

CONNECT_DEADLINE_S: Final = 5.0
START_DEADLINE_S: Final = 120.0
"""A node under load takes half a minute to start a worker process."""
WAIT_S: Final = 1.0
UNSENT: Final = 64
"""Lines on their way; more wait for the oldest."""


def problem() -> str:
    """What is missing for Ray here; empty if nothing is."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed here"


class RayNodesOf:
    """Context manager: the nodes of one run by role.

    ``tell`` hears what is waited for. Raises MissingLibraryError without Ray, LaunchError if there is no
    cluster, another version of Ray or Python, or not what is asked for within ``options.wait_s``.
    """

    def __init__(
        self,
        options: RayOptions,
        run_tag: str,
        tell: Callable[[str], None] = lambda words: None,
        *,
        loadgen_only: bool = False,
    ) -> None:
        self.hosts: Mapping[str, tuple[str, ...]] = {}
        """Role → its nodes, in the order in which instances are dealt to them."""
        self._options = options
        self._run_tag = run_tag
        self._tell = tell
        self._bundles = bundles_of(options, loadgen_only=loadgen_only)
        self._group: Any = None
        self._bundle_of: dict[str, int] = {}
        self._addresses: dict[str, str] = {}
        self._joined = False

    def __enter__(self) -> RayNodesOf:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Join the cluster and set the nodes aside."""
        if missing_here := problem():
            raise MissingLibraryError(
                missing_here, hint="pip install 'kvbench[ray]', in the cluster's version"
            )
        self._join()
        self._reserve()

    def channel(self, host: str, command: str) -> ActorChannel:
        """The shell command on that node, with its stdin and stdout as a channel. Raises LaunchError."""
        if host not in self._bundle_of:
            raise LaunchError(f"no Ray node of this run is called {host}")
        return ActorChannel(host, self._actor(self._bundle_of[host]), command, self._run_tag)

    def address(self, host: str) -> str:
        """The node's address as Ray knows it."""
        return self._addresses[host]

    def close(self) -> None:
        """Give the nodes back, and leave the cluster. Safe to call twice."""
        if not self._joined and self._group is None:
            return
        import ray
        from ray.util import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)
        if self._joined:
            self._joined = False
            ray.shutdown()

    # -- the cluster --------------------------------------------------------------------------------

    def _join(self) -> None:
        import ray

        if ray.is_initialized():
            return  # a notebook's own; it stays
        address = self._options.address
        if address.startswith("ray://"):
            raise LaunchError(
                f"{address}: kvbench joins a cluster as a node's driver, not through Ray Client",
                hint="start kvbench on a node of the cluster, with deployment.ray.address: auto",
            )
        _require_answer(address)
        try:
            ray.init(
                address=address,
                namespace=f"kvbench-{self._run_tag}",
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except ConnectionError as error:
            if "Authentication" in _causes(error):
                raise LaunchError(
                    f"the Ray cluster at {address} does not let us in: its token is missing here, or another",
                    hint="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or its _PATH) as its nodes have them",
                ) from error
            raise no_cluster(address, _first_line(error)) from error
        except Exception as error:
            text = _first_line(error)
            hint = "look with `ray status`"
            if "ersion" in text:
                hint = "install the cluster's versions of Ray and Python here"
            raise LaunchError(f"cannot join the Ray cluster at {address}: {text}", hint=hint) from error
        self._joined = True

    def _reserve(self) -> None:
        import ray
        from ray.util import placement_group, placement_group_table

        more: dict[str, Any] = {}
        if any(bundle.labels for bundle in self._bundles):
            if "bundle_label_selector" not in inspect.signature(placement_group).parameters:
                raise LaunchError(
                    f"Ray {ray.__version__} cannot choose nodes by labels",
                    hint="ask for custom resources under deployment.ray, or install a newer Ray",
                )
            more["bundle_label_selector"] = [dict(bundle.labels) for bundle in self._bundles]
        spread = self._options.spread
        self._group = placement_group(
            [dict(bundle.resources) for bundle in self._bundles],
            strategy="STRICT_SPREAD" if spread else "PACK",
            **more,
        )
        self._wait_reserved()
        landed = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = {str(node["NodeID"]): node for node in ray.nodes()}
        here = [str(landed[index]) for index in range(len(self._bundles))]
        names = unique_names(
            {
                node: str(nodes[node].get("NodeName") or nodes[node]["NodeManagerAddress"])
                for node in dict.fromkeys(here)
            }
        )
        for index, node in enumerate(here):
            self._bundle_of.setdefault(names[node], index)
            self._addresses[names[node]] = str(nodes[node]["NodeManagerAddress"])
        self.hosts = placed(self._bundles, [names[node] for node in here])

    def _wait_reserved(self) -> None:
        import ray

        began = time.monotonic()
        last = ""
        while not self._group.wait(timeout_seconds=WAIT_S):
            waited_s = time.monotonic() - began
            nodes = ray.nodes()
            lacking = missing(self._bundles, nodes, spread=self._options.spread)
            words = "; ".join(lacking) or "the cluster has what is asked for, and it is in use"
            if words != last:
                last = words
                self._tell(f"Ray: {words}")
            if waited_s > self._options.wait_s:
                raise LaunchError(
                    f"the Ray cluster has not given what is asked for in {waited_s:.0f} s: {words} "
                    f"(it has {listed(nodes)})",
                    hint="start nodes with `ray start --address=… --resources='{\"NAME\": 1}'`, ask for "
                    "less in deployment.ray, or raise deployment.ray.wait_s",
                )

    def _actor(self, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted: Bundle = self._bundles[bundle]
        own = {name: amount for name, amount in wanted.resources.items() if name not in ("CPU", "GPU")}
        remote = ray.remote(concurrency_groups={"send": 1, "receive": 1})(_agent_actor())
        return remote.options(
            num_cpus=wanted.resources.get("CPU", 0),
            num_gpus=wanted.resources.get("GPU", 0),
            resources=own,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
        ).remote()


class ActorChannel:
    """A channel over an actor that runs the agent as its child. Raises LaunchError."""

    def __init__(self, host: str, actor: Any, command: str, run_tag: str) -> None:
        import ray

        self.host = host
        self._actor = actor
        self._inbox = Inbox(host)
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._unsent: list[Any] = []
        try:
            started = actor.start.remote(command, {RUN_TAG_ENV: run_tag})
            failure = ray.get(started, timeout=START_DEADLINE_S)
        except Exception as error:
            ray.kill(actor)
            raise LaunchError(
                f"the Ray node {host} starts no agent: {_first_line(error)}",
                hint="look with `ray list actors`",
            ) from error
        if failure:
            ray.kill(actor)
            raise LaunchError(f"the Ray node {host} starts no agent: {failure}")
        self._reader = threading.Thread(target=self._read, name=f"channel-{host}", daemon=True)
        self._reader.start()

    @property
    def ended(self) -> str:
        return self._inbox.ended

    def send(self, line: bytes) -> None:
        import ray

        with self._sending:
            if self._inbox.ended or self._closing.is_set():
                raise self._inbox.closed()
            self._unsent.append(self._actor.send.remote(line + b"\n"))
            if len(self._unsent) < UNSENT:
                return
            done, self._unsent = ray.wait(self._unsent, num_returns=UNSENT // 2, timeout=SEND_DEADLINE_S)
            if not done:
                raise self._inbox.stuck()

    def receive(self, timeout_s: float) -> bytes | None:
        return self._inbox.receive(timeout_s)

    def close(self) -> None:
        import ray

        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(Exception):  # the actor or the cluster may be gone
            ray.get(self._actor.close.remote(CLOSE_GRACE_S / 2), timeout=CLOSE_GRACE_S)
        with contextlib.suppress(Exception):
            ray.kill(self._actor)
        self._reader.join(timeout=2.0)
        self._inbox.close()

    def _read(self) -> None:
        import ray

        while True:
            try:
                lines, ended = ray.get(self._actor.receive.remote(WAIT_S))
            except Exception as error:
                lines, ended = [], f"the agent on {self.host} ended with its actor: {_first_line(error)}"
            else:
                ended = ended and ended_words(self.host, ended[0], ended[1])
            for line in lines:
                self._inbox.put(line)
            if ended:
                self._inbox.finish(ended)
                return


def _agent_actor() -> type:
    """The actor's class. Made in a function, so that Ray sends its code: kvbench may be missing there.

    It uses the standard library alone for the same reason.
    """
    import ray

    class KvbenchAgent:
        def __init__(self) -> None:
            self.child: Any = None
            self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            self.said: list[str] = []
            self.over = False

        def start(self, command: str, env: dict[str, str]) -> str:
            import subprocess
            import sys

            # The cluster's own Python comes first: it is the one that has kvbench, if one has.
            path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
            try:
                self.child = subprocess.Popen(
                    ["sh", "-c", command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, "PATH": path, **env},
                    start_new_session=True,
                )
            except OSError as error:
                return str(error)
            for each in (self.read_out, self.read_err):
                threading.Thread(target=each, daemon=True).start()
            return ""

        def read_out(self) -> None:
            for line in self.child.stdout:
                self.lines.put(line.rstrip(b"\n"))
            self.child.wait()
            self.lines.put(None)

        def read_err(self) -> None:
            for line in self.child.stderr:
                self.said = [*self.said[1 - TAIL_LINES :], line.decode("utf-8", "replace").strip()]

        @ray.method(concurrency_group="send")  # type: ignore[untyped-decorator]
        def send(self, data: bytes) -> None:
            with contextlib.suppress(OSError, ValueError):  # its end is told by ``receive``
                self.child.stdin.write(data)
                self.child.stdin.flush()

        @ray.method(concurrency_group="receive")  # type: ignore[untyped-decorator]
        def receive(self, timeout_s: float) -> tuple[list[bytes], tuple[int, list[str]] | None]:
            lines: list[bytes] = []
            size = 0
            if not self.over:
                with contextlib.suppress(queue.Empty):
                    line = self.lines.get(timeout=timeout_s)
                    while line is not None:
                        lines.append(line)
                        size += len(line)
                        if size > 1 << 20:
                            break
                        line = self.lines.get_nowait()
                    self.over = line is None
            return lines, ((self.child.returncode, self.said) if self.over else None)

        def close(self, grace_s: float) -> None:
            import signal
            import subprocess

            with contextlib.suppress(OSError, ValueError):
                self.child.stdin.close()
            try:
                self.child.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)

    return KvbenchAgent


def _require_answer(address: str) -> None:
    """Raises LaunchError if nothing listens there: Ray itself would try for two minutes.

    Where ``auto`` looks is Ray's own business; it is asked by ray.init, unless one of the usual places tells.
    """
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
        with contextlib.suppress(OSError):
            address = address or current.read_text().strip()
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_DEADLINE_S).close()
    except OSError as error:
        raise no_cluster(address, error.strerror or str(error)) from error


def no_cluster(address: str, why: str) -> LaunchError:
    """The error for a cluster that does not answer."""
    return LaunchError(
        f"no Ray cluster answers at {address}: {why}",
        hint="start one with `ray start --head` on one node and `ray start --address=HEAD:6379` on the "
        "others, or name it in deployment.ray.address",
    )


def _causes(error: BaseException | None) -> str:
    """The names of an error's class and of those that led to it."""
    names = []
    while error is not None:
        names.append(f"{type(error).__name__} {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(names)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300]
