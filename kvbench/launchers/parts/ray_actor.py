"""Channel over a Ray actor with the agent as its child. Ray is imported inside functions only."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Any, Final

from kvbench.core.plan.processes import RUN_TAG_ENV
from kvbench.errors import LaunchError
from kvbench.launchers.agents.channel import CLOSE_GRACE_S, SEND_DEADLINE_S, TAIL_LINES, Inbox, ended_words

START_DEADLINE_S: Final = 120.0
"""Longest start of an actor, in seconds; a busy node takes half a minute."""
RECEIVE_S: Final = 1.0
UNSENT: Final = 64
"""Maximum lines in transit; further ones wait for the oldest."""


class ActorChannel:
    """Channel over an actor with the agent as its child. Raises LaunchError."""

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
                f"the Ray node {host} starts no agent: {first_line(error)}", hint="see `ray list actors`"
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
                lines, ended = ray.get(self._actor.receive.remote(RECEIVE_S))
            except Exception as error:
                lines, ended = [], f"the agent on {self.host} ended with its actor: {first_line(error)}"
            else:
                ended = ended and ended_words(self.host, ended[0], ended[1])
            for line in lines:
                self._inbox.put(line)
            if ended:
                self._inbox.finish(ended)
                return


def agent_actor() -> type:
    """Create the actor's class. Ray sends the code of a class defined in a function, as the node may lack
    kvbench; it uses the standard library only."""
    import ray

    child: Any = _child()

    class KvbenchAgent(child):  # type: ignore[misc]
        over: bool

        @ray.method(concurrency_group="send")  # type: ignore[untyped-decorator]
        def send(self, data: bytes) -> None:
            with contextlib.suppress(OSError, ValueError):  # its end is reported by ``receive``
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
            return lines, ((self.child.returncode, self.tail) if self.over else None)

    return KvbenchAgent


def _child() -> type:
    """Create the part of the actor's class that handles the agent process."""

    class Child:
        def __init__(self) -> None:
            self.child: Any = None
            self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            self.tail: list[str] = []
            self.over = False

        def start(self, command: str, env: dict[str, str]) -> str:
            import subprocess
            import sys

            # The cluster's own Python comes first, as it most likely has kvbench.
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
            for target in (self.read_out, self.read_err):
                threading.Thread(target=target, daemon=True).start()
            return ""

        def read_out(self) -> None:
            for line in self.child.stdout:
                self.lines.put(line.rstrip(b"\n"))
            self.child.wait()
            self.lines.put(None)

        def read_err(self) -> None:
            for line in self.child.stderr:
                self.tail = [*self.tail[1 - TAIL_LINES :], line.decode("utf-8", "replace").strip()]

        def close(self, grace_s: float) -> None:
            import signal
            import subprocess

            with contextlib.suppress(OSError, ValueError):
                self.child.stdin.close()
            try:
                self.child.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)

    return Child


def first_line(error: BaseException) -> str:
    """First line of a Ray error, which may have pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300]
