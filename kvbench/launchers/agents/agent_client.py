"""kvbench's side of one agent: requests, process reports, and loss of the host."""

from __future__ import annotations

import base64
import contextlib
import itertools
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Final, Protocol

from kvbench.core.plan.processes import AGENT_MODULE
from kvbench.errors import KvbenchError, LaunchError
from kvbench.files import json_row
from kvbench.launchers.agents.channel import (
    BEAT_S,
    CHUNK_BYTES,
    ENCODING,
    LOST,
    LOST_S,
    PROTOCOL,
    Channel,
    ChannelClosedError,
    HostLostError,
    encode,
    error_of,
)
from kvbench.version import __version__


def another_version(host: str, hello: Mapping[str, Any]) -> LaunchError:
    """Create the error for an agent with another kvbench or protocol."""
    return LaunchError(
        f"{host} has kvbench {hello.get('version')} (protocol {hello.get('protocol')}), and here it is "
        f"{__version__} (protocol {PROTOCOL})",
        hint="all hosts need the same: kvbench hosts install SCENARIO",
    )


def no_agent(host: str, why: str, output: list[str]) -> LaunchError:
    """Create the error for an agent that did not start, with a hint for the usual causes."""
    reason = " | ".join([why, *output[-3:]])
    hint = f"try it by hand: ssh {host} PYTHON -m {AGENT_MODULE}"
    if re.search(r"No module named '?kvbench\.", reason):  # a kvbench that has no such module
        reason = f"another kvbench is installed there, and here it is {__version__} ({why})"
        hint = f"install kvbench {__version__} there: kvbench hosts install SCENARIO"
    elif "No module named" in reason and "kvbench" in reason:
        reason = f"kvbench is not installed there ({why})"
        hint = (
            "kvbench hosts install SCENARIO does it; by hand: copy the wheel there, then "
            "python3 -m venv WORKDIR/venv && WORKDIR/venv/bin/pip install kvbench-*.whl"
        )
    elif "not found" in reason or "No such file" in reason:
        hint = (
            "set deployment.hosts.NAME.python to a Python there that has kvbench; or: kvbench hosts install"
        )
    return LaunchError(f"no agent started on {host}: {reason}", hint=hint)


HELLO_DEADLINE_S: Final = 60.0
"""Longest start of an agent in seconds, with Python on a cold disk or file server."""
ANSWER_DEADLINE_S: Final = 30.0
CLOCK_ASKS: Final = 7
SILENT_S: Final = LOST_S + 2.0
"""Seconds without a frame after which a host is lost; its agent ends earlier."""


class FollowedProcess(Protocol):
    """A process started by an agent, as its client updates it."""

    hung: tuple[str, str] | None
    """Symptom and hint, if the agent detected a hang."""

    @property
    def key(self) -> str:
        """Identifier in the agent's protocol."""

    def logged(self, text: str) -> None:
        """Append to its log."""

    def feed_stdout(self, data: bytes) -> None:
        """Append to its stdout."""

    def ended(self, status: int) -> None:
        """Set the exit status of the process or its lost host; only the first call counts."""


class AgentClient:
    """One host's agent. Raises LaunchError if it sends no hello, or is another kvbench. ``name``: of the
    host; ``workdir``, ``env`` and ``nics``: for its processes."""

    def __init__(
        self,
        channel: Channel,
        workdir: str = "",
        env: Mapping[str, str] | None = None,
        nics: Sequence[str] = (),
    ) -> None:
        self.name = channel.host
        self._channel = channel
        self._lock = threading.Lock()
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._processes: dict[str, FollowedProcess] = {}
        self._lost = ""
        self._closing = threading.Event()
        try:
            self.hello = self._wait_hello()
        except KvbenchError:
            channel.close()
            raise
        self._last_frame_s = time.monotonic()
        self._threads = [
            threading.Thread(target=loop, name=f"agent-{self.name}", daemon=True)
            for loop in (self._listen, self._beat)
        ]
        for thread in self._threads:
            thread.start()
        try:
            opened = self.ask("open", workdir=workdir, env=dict(env or {}), nics=list(nics))
        except KvbenchError:
            self.close()
            raise
        self.folder = str(opened["folder"])
        self.files = str(opened["files"])

    @property
    def python(self) -> str:
        return str(self.hello["executable"])

    @property
    def code(self) -> str:
        """Folder of the host's kvbench package."""
        return str(self.hello["code"])

    @property
    def cores(self) -> int:
        return int(self.hello["cores"])

    @property
    def lost(self) -> str:
        return self._lost

    def check(self) -> None:
        if self._lost:
            raise HostLostError(
                f"the host {self.name} is lost: {self._lost}",
                hint="its agent ends all its processes; the next deployment reconnects",
            )

    # -- asking -------------------------------------------------------------------------------------

    def ask(self, what: str, deadline_s: float = ANSWER_DEADLINE_S, **more: Any) -> dict[str, Any]:
        """Return the agent's answer. Raises its error, HostLostError, or LaunchError after the deadline."""
        number, answer = next(self._numbers), Future[dict[str, Any]]()
        with self._lock:
            self._pending[number] = answer
        try:
            self._send({"id": number, "do": what, **more})
            return answer.result(deadline_s)
        except FutureTimeoutError:
            self.check()
            raise LaunchError(f"{self.name} did not answer {what!r} within {deadline_s:g} s") from None
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def say(self, what: str, **more: Any) -> None:
        """Send a message without an answer. Raises HostLostError."""
        self._send({"do": what, **more})

    def put(self, path: Path, name: str) -> None:
        """Copy a local file to the agent's files. Raises LaunchError, or OSError if it cannot be read."""
        with path.open("rb") as file:
            data, first = file.read(CHUNK_BYTES), True
            while data or first:
                self.ask("put", path=name, data=base64.b64encode(data).decode(), first=first)
                data, first = file.read(CHUNK_BYTES), False

    def fetch(self, remote_path: str, path: Path) -> None:
        """Move a file from the host to ``path``, atomically."""
        partial = path.with_name(path.name + ".part")
        with partial.open("wb") as file:
            while piece := base64.b64decode(self.ask("read", path=remote_path, offset=file.tell())["data"]):
                file.write(piece)
        partial.replace(path)
        self.ask("forget", path=remote_path)

    def clock_ahead_s(self) -> float:
        """Offset of the host's clock, from the fastest of several answers (± half its time)."""
        best_s, ahead_s = float("inf"), 0.0
        for _ in range(CLOCK_ASKS):
            began = time.monotonic()
            remote_s = float(self.ask("clock")["monotonic_s"])
            took_s = time.monotonic() - began
            if took_s < best_s:
                best_s, ahead_s = took_s, remote_s - (began + took_s / 2)
        return ahead_s

    def adopt(self, process: FollowedProcess) -> None:
        """Forward reports of this process from now on."""
        self.check()
        with self._lock:
            self._processes[process.key] = process

    def forget(self, process: FollowedProcess) -> None:
        with self._lock:
            self._processes.pop(process.key, None)

    def close(self) -> None:
        """End the agent with all its processes and wait for it. May be called twice."""
        if not self._closing.is_set():
            self._closing.set()
            with contextlib.suppress(KvbenchError):
                self._channel.send(encode({"do": "stop"}))
            self._channel.close()
            self._lose("it was closed")

    # -- listening ----------------------------------------------------------------------------------

    def _wait_hello(self) -> dict[str, Any]:
        deadline = time.monotonic() + HELLO_DEADLINE_S
        greeting: list[str] = []
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = self._channel.receive(left_s)
            except ChannelClosedError as error:
                raise no_agent(self.name, error.message, greeting) from error
            frame = None if line is None else json_row(line)
            if frame is not None and frame.get("event") == "hello":
                return self._checked_hello(frame)
            if line:  # a login shell may greet first
                greeting.append(line.decode("utf-8", "replace")[:200])
        raise no_agent(self.name, f"no hello within {HELLO_DEADLINE_S:g} s", greeting)

    def _checked_hello(self, hello: dict[str, Any]) -> dict[str, Any]:
        self.seen_unix_s = time.time()
        found = (hello.get("version"), hello.get("protocol"))
        if found != (__version__, PROTOCOL):
            raise another_version(self.name, hello)
        return hello

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                line = self._channel.receive(BEAT_S)
            except ChannelClosedError as error:
                self._lose(error.message)
                return
            now = time.monotonic()
            if line is not None:
                self._last_frame_s = now
                if (frame := json_row(line)) is not None:
                    self._handle_frame(frame)
            elif now - self._last_frame_s > SILENT_S:
                self._lose(f"no frame from it for {SILENT_S:g} s")
                threading.Thread(target=self._channel.close, daemon=True).start()
                return

    def _handle_frame(self, frame: Mapping[str, Any]) -> None:
        if "id" in frame:
            with self._lock:
                answer = self._pending.pop(int(frame["id"]), None)
            if answer is not None and "error" in frame:
                answer.set_exception(error_of(frame["error"], self.name))
            elif answer is not None:
                answer.set_result(dict(frame.get("answer", {})))
            return
        event = frame.get("event")
        process = self._processes.get(str(frame.get("key")))
        if event == "end":
            self._lose(f"its agent ended: {frame.get('why')}")
        if process is None:
            return
        if event == "log":
            process.logged(str(frame["text"]))
        elif event == "out":
            process.feed_stdout(str(frame["data"]).encode(ENCODING))
        elif event == "hung":
            process.hung = (str(frame["what"]), str(frame["fix"]))
        elif event == "exit":
            self.forget(process)
            process.ended(LOST if frame["status"] is None else int(frame["status"]))

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S) and not self._lost:
            with contextlib.suppress(KvbenchError):
                self._send({"do": "beat"})

    def _send(self, frame: Mapping[str, Any]) -> None:
        self.check()
        try:
            self._channel.send(encode(frame))
        except ChannelClosedError as error:
            self._lose(error.message)
            self.check()
            raise

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._lost:
                return
            self._lost = why
            unanswered, self._pending = list(self._pending.values()), {}
            processes, self._processes = list(self._processes.values()), {}
        for answer in unanswered:
            with contextlib.suppress(Exception):  # it may have been answered or cancelled meanwhile
                answer.set_exception(HostLostError(f"the host {self.name} is lost: {why}"))
        for process in processes:
            process.ended(LOST)
