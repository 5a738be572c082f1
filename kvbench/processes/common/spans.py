"""Spans of time of one request in one process: written by the processes, read by the timeline. A span file is
JSON lines. The first is the process's clock: ``{"host", "monotonic_s", "unix_s"}``. Each other line is one
span: ``{"request", "name", "begin_s", "end_s", "args"}``, with times on CLOCK_MONOTONIC, which all processes
of one machine share. Nothing is written unless the spec's ``trace_path`` names a file."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbench.errors import InputError

log = logging.getLogger(__name__)

TRACED_REQUESTS: Final = 200
"""Number of traced requests per trial. All processes trace the requests numbered below this."""
MAX_BYTES: Final = 64 * 2**20
SUFFIX: Final = ".trace.jsonl"

_NUMBER: Final = re.compile(r"-(\d{1,9})$")


@dataclass(frozen=True)
class Span:
    """An activity from ``begin_s`` to ``end_s``, in seconds on one clock."""

    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Clock:
    """A process's clocks, read at one moment, and its machine."""

    host: str
    monotonic_s: float
    unix_s: float

    @property
    def offset_s(self) -> float:
        return self.unix_s - self.monotonic_s


class SpanLog:
    """Appends spans to a file. Each write goes to the file at once, so a kill loses nothing."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"trace_path {path} cannot be opened: {error.strerror}") from error
        self._left = MAX_BYTES
        clock = Clock(socket.gethostname(), time.monotonic(), time.time())
        self._append([vars(clock)])

    @staticmethod
    def wants(request_id: str) -> bool:
        """Whether a request is traced, by the number at the end of its id."""
        match = _NUMBER.search(request_id)
        return match is not None and int(match[1]) < TRACED_REQUESTS

    def write(self, request_id: str, spans: Sequence[Span]) -> None:
        """Append spans of one request. After the limit or an error, warn once and drop them."""
        self._append(
            [
                {
                    "request": request_id,
                    "name": span.name,
                    "begin_s": round(span.begin_s, 6),
                    "end_s": round(max(span.begin_s, span.end_s), 6),
                    "args": dict(span.args),
                }
                for span in spans
            ]
        )

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._fd < 0 or not rows:
            return
        data = b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
        self._left -= len(data)
        problem = "" if self._left >= 0 else f"{MAX_BYTES >> 20} MiB are full"
        try:
            while data and not problem:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            log.warning("no more spans are written: %s", problem)
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_spans(path: Path) -> tuple[Clock | None, dict[str, list[Span]]]:
    """Return a file's clock and its spans by request; skip torn or invalid lines."""
    clock: Clock | None = None
    spans: dict[str, list[Span]] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            if "request" in row:
                span = Span(str(row["name"]), float(row["begin_s"]), float(row["end_s"]), dict(row["args"]))
                spans.setdefault(str(row["request"]), []).append(span)
            elif clock is None:
                clock = Clock(str(row["host"]), float(row["monotonic_s"]), float(row["unix_s"]))
        except (ValueError, KeyError, TypeError):
            continue
    return clock, spans
