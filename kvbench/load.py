"""Drives one load generator process: hands it its spec, follows its progress, stops it, reads its records."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.core.processes import ProcessSpec
from kvbench.core.records import RequestRecord
from kvbench.errors import KvbenchError, ProcessDiedError
from kvbench.launchers.local import LocalLauncher, LocalProcess

PREPARE_DEADLINE_S = 60.0
"""Encoding prompts and opening connections; 5,000 prompts of 32k tokens take about 20 s."""
STOP_DEADLINE_S = 10.0
POLL_S = 0.05


@dataclass(frozen=True)
class Progress:
    """What the generator counts while it runs."""

    t_s: float = 0.0
    sent: int = 0
    done: int = 0
    met: int = 0
    missed: int = 0
    in_flight: int = 0
    waiting_first: int = 0


@dataclass(frozen=True)
class LoadResult:
    """Records of every planned request that was sent or due, and the client's own figures."""

    records: list[RequestRecord]
    reason: str
    duration_s: float
    client: Mapping[str, float] = field(default_factory=dict)


class LoadGenerator:
    """One run of ``python -m kvbench.loadgen``."""

    def __init__(self, launcher: LocalLauncher, spec: Mapping[str, Any], name: str = "loadgen") -> None:
        self._spec = dict(spec)
        self._launcher = launcher
        self._name = name
        self._deadline = 0.0

    def run(
        self, on_progress: Callable[[Progress], bool], check: Callable[[], None], deadline_s: float
    ) -> LoadResult:
        """Offer the load. ``on_progress`` returns True to stop early; ``check`` raises if a server died.

        Raises ProcessDiedError if the generator itself ends early, KvbenchError past the deadline.
        """
        process = self._launcher.start(
            ProcessSpec(
                name=self._name,
                argv=(sys.executable, "-m", "kvbench.loadgen"),
                spec={**self._spec, "wait_for_go": True},
            ),
            piped=True,
        )
        try:
            return self._converse(process, on_progress, check, deadline_s)
        finally:
            self._launcher.stop([process])

    def _converse(
        self,
        process: LocalProcess,
        on_progress: Callable[[Progress], bool],
        check: Callable[[], None],
        deadline_s: float,
    ) -> LoadResult:
        self._deadline = time.monotonic() + PREPARE_DEADLINE_S
        stopping = False
        for event in self._events(process, check):
            kind = event.get("event")
            if kind == "ready":
                self._deadline = time.monotonic() + deadline_s
                _say(process, "go")
            elif kind == "progress":
                progress = Progress(
                    **{key: event[key] for key in Progress.__dataclass_fields__ if key in event}
                )
                if on_progress(progress) and not stopping:
                    stopping = True
                    grace_s = float(self._spec.get("stop_grace_s", 0.0))
                    self._deadline = min(self._deadline, time.monotonic() + grace_s + STOP_DEADLINE_S)
                    _say(process, "stop")
            elif kind == "end":
                return LoadResult(
                    records=read_records(Path(str(self._spec["records_path"]))),
                    reason=str(event.get("reason", "")),
                    duration_s=float(event.get("duration_s", 0.0)),
                    client=dict(event.get("client", {})),
                )
        raise AssertionError("unreachable: the event stream ends by an end event or an error")

    def _events(self, process: LocalProcess, check: Callable[[], None]) -> Iterator[dict[str, Any]]:
        fd = process.stdout.fileno()
        os.set_blocking(fd, False)
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while True:
                if time.monotonic() > self._deadline:
                    raise KvbenchError(
                        "the load generator did not finish within its deadline",
                        hint=f"see {process.log_path}",
                    )
                check()
                if not selector.select(POLL_S):
                    continue
                data = os.read(fd, 65_536)
                if not data:
                    raise ended_early(process)
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)


def ended_early(process: LocalProcess) -> ProcessDiedError:
    """The error for a generator that closed its output without an end event."""
    deadline = time.monotonic() + 2
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = "\n".join(f"  {line}" for line in process.tail())
    return ProcessDiedError(
        f"the load generator ended early (status {process.poll()}); its last lines:\n{lines}",
        hint=f"the whole log is {process.log_path}",
    )


def _say(process: LocalProcess, word: str) -> None:
    with contextlib.suppress(OSError):  # it has just ended; its end event or its exit status tells why
        process.stdin.write(word.encode() + b"\n")
        process.stdin.flush()


def read_records(path: Path) -> list[RequestRecord]:
    """The generator's JSON lines as records."""
    with path.open("rb") as file:
        return [RequestRecord.from_json(json.loads(line)) for line in file if line.strip()]
