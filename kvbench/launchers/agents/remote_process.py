"""A process on another host with the interface of a local one."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from kvbench.core.plan.processes import ProcessSpec
from kvbench.errors import KvbenchError
from kvbench.hosts.log_tail import tail_of
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.agents.channel import ENCODING

_numbers: Final = itertools.count(1)


class RemoteStdin:
    """Stdin as frames. Raises OSError once the process or its host is gone."""

    def __init__(self, process: RemoteProcess) -> None:
        self._process = process
        self._closed = False

    def write(self, data: bytes, /) -> int:
        if self._closed or self._process.poll() is not None:
            raise BrokenPipeError("the process has ended")
        try:
            self._process.agent.say("write", key=self._process.key, data=data.decode(ENCODING))
        except KvbenchError as error:
            raise BrokenPipeError(error.message) from error
        return len(data)

    def flush(self) -> None:
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(KvbenchError):
                self._process.agent.say("close_stdin", key=self._process.key)


class RemoteStdout:
    """Pipe filled by a thread, so that a slow reader blocks nothing else."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self.reader: IO[bytes] = os.fdopen(reading, "rb", buffering=0)
        self._chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._pump, name="far-stdout", daemon=True).start()

    def feed(self, data: bytes | None) -> None:
        self._chunks.put(data)

    def _pump(self) -> None:
        with os.fdopen(self._writing, "wb", buffering=0) as pipe, contextlib.suppress(OSError):
            while (data := self._chunks.get()) is not None:
                rest = memoryview(data)
                while rest:
                    rest = rest[pipe.write(rest) or 0 :]


class RemoteProcess:
    """A process started by an agent; its log and stdout are copied here."""

    def __init__(self, spec: ProcessSpec, agent: AgentClient, log_path: Path, *, piped: bool) -> None:
        self.spec = spec
        self.log_path = log_path
        self.agent = agent
        self.key = f"{next(_numbers)}-{spec.name}"
        self.pid = 0
        self.hung: tuple[str, str] | None = None
        """Symptom and hint, if the agent detected a hang."""
        self._status: int | None = None
        self._log = log_path.open("ab")
        self._logging = threading.Lock()
        self._stdin = RemoteStdin(self)
        self._stdout = RemoteStdout() if piped else None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def host(self) -> str:
        return self.agent.name

    @property
    def stdin(self) -> RemoteStdin:
        return self._stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._stdout is not None
        return self._stdout.reader

    def poll(self) -> int | None:
        """Exit status, None while it runs, or LOST with its host."""
        return self._status

    def terminate(self) -> None:
        self._order("terminate")

    def kill(self) -> None:
        """Kill its whole group; ``poll`` reports the end."""
        self._order("kill")

    def tail(self, lines: int = 12) -> list[str]:
        return tail_of(self.log_path, lines)

    def rename(self, name: str) -> None:
        with self._logging:
            self.spec = replace(self.spec, name=name)
            self.log_path = self.log_path.rename(self.log_path.with_name(f"{name}.log"))
        self._order("rename", name=name)

    def release(self) -> None:
        """Discard further stdout."""
        if self._stdout is not None:
            self._stdout.reader.close()

    # -- what its agent reports --------------------------------------------------------------------

    def logged(self, text: str) -> None:
        with self._logging:
            if not self._log.closed:
                self._log.write(text.encode())
                self._log.flush()

    def feed_stdout(self, data: bytes) -> None:
        if self._stdout is not None:
            self._stdout.feed(data)

    def ended(self, status: int) -> None:
        with self._logging:
            if self._log.closed:
                return
            self._log.close()
        self._status = status
        if self._stdout is not None:
            self._stdout.feed(None)

    def _order(self, what: str, **more: str) -> None:
        if self._status is None:
            with contextlib.suppress(KvbenchError):
                self.agent.say(what, key=self.key, **more)
