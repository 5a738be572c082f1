"""Start the exact server, and separate client errors from the server's own delays.

The true TTFT runs from the kernel's timestamp of the request to the moment before the first token's
``write``, by the server's log. Sending or reading late adds to the client's figure only; a late server is no
client error."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray

from kvbench.core.plan.processes import EXACT_SERVER_MODULE, ProcessSpec
from kvbench.core.records import RequestRecord
from kvbench.errors import LaunchError
from kvbench.hosts import web
from kvbench.launchers.local import LocalLauncher, LocalProcess

READY_DEADLINE_S: Final = 20.0
LOG_DEADLINE_S: Final = 120.0
LOG_BYTES: Final = 1 << 30
"""Longest log; a million token times are 20 MB of JSON."""


@dataclass(frozen=True)
class RunningExactServer:
    url: str
    kernel_stamps: bool
    process: LocalProcess

    def log(self, query: str = "") -> dict[str, Any]:
        """Return its log since the start. Raises LaunchError without an answer."""
        try:
            with web.client(timeout_s=LOG_DEADLINE_S, limit_bytes=LOG_BYTES) as client:
                answer = client.get(f"{self.url}/log{query}").raise_for_status()
            log: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise LaunchError(
                f"the exact server does not return its log: {error}", hint=f"see {self.process.log_path}"
            ) from error
        return log


@contextlib.contextmanager
def exact_server(
    launcher: LocalLauncher, spec: Mapping[str, Any], name: str = "exact"
) -> Iterator[RunningExactServer]:
    """Run an exact server within the context. Raises LaunchError if it does not start."""
    wanted = ProcessSpec(name=name, argv=(sys.executable, "-m", EXACT_SERVER_MODULE), spec=spec)
    process = launcher.start(wanted, piped=True)
    try:
        ready = _ready(process)
        yield RunningExactServer(str(ready["url"]), bool(ready["kernel_stamps"]), process)
    finally:
        launcher.stop([process])


def _ready(process: LocalProcess) -> dict[str, Any]:
    ready, _, _ = select.select([process.stdout], (), (), READY_DEADLINE_S)
    line = process.stdout.readline() if ready else b""
    if not line:
        last = "; ".join(process.tail(3)) or "no output"
        raise LaunchError(
            f"the exact server was not ready within {READY_DEADLINE_S:g} s: {last}",
            hint=f"see {process.log_path}",
        )
    event: dict[str, Any] = json.loads(line)
    return event


@dataclass(frozen=True)
class Errors:
    """Client figure minus true figure in ms, one per request or token gap. ``ttft_ms``: signed. ``itl_ms``:
    absolute difference of gaps. ``unmatched``: requests with merged tokens, so that gaps cannot be
    compared."""

    ttft_ms: NDArray[np.float64]
    itl_ms: NDArray[np.float64]
    late_first_ms: NDArray[np.float64]
    late_further_ms: NDArray[np.float64]
    failed: int
    unmatched: int


def errors_of(
    records: Sequence[RequestRecord],
    rows: Sequence[Mapping[str, Any]],
    window: tuple[float, float] = (float("-inf"), float("inf")),
) -> Errors:
    """Compare records with the server's log. ``window``: scheduled times in seconds since the start. A
    request without a first token, or unknown to the server, counts as failed."""
    known = {row["request_id"]: row for row in rows}
    ttft: list[float] = []
    itl: list[NDArray[np.float64]] = []
    late_first: list[float] = []
    late_further: list[NDArray[np.float64]] = []
    failed = unmatched = 0
    for record in records:
        if not window[0] <= record.scheduled_s <= window[1]:
            continue
        row = known.get(record.request_id)
        if not record.ok or row is None or record.ttft_s is None or not row["token_write_s"]:
            failed += 1
            continue
        writes = np.asarray(row["token_write_s"])
        ttft.append(record.ttft_s - (writes[0] - row["arrival_s"]))
        late = writes - row["first_due_s"] - np.arange(len(writes)) * row["gap_s"]
        late_first.append(float(late[0]))
        late_further.append(late[1:])
        if len(record.itl_s) == len(writes) - 1:
            itl.append(np.abs(np.asarray(record.itl_s) - np.diff(writes)))
        else:
            unmatched += 1
    return Errors(
        np.array(ttft) * 1e3,
        _join(itl) * 1e3,
        np.array(late_first) * 1e3,
        _join(late_further) * 1e3,
        failed,
        unmatched,
    )


def _join(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(parts) if parts else np.empty(0)


def percentile(values: NDArray[np.float64], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 4) if len(values) else None


def mean_open(rows: Sequence[Mapping[str, Any]], since: float, until: float) -> float:
    """Mean number of open streams between two monotonic times, by the server."""
    if until <= since:
        return 0.0
    total = 0.0
    for row in rows:
        ended = row["ended_s"] if row["ended_s"] is not None else time.monotonic()
        total += max(0.0, min(ended, until) - max(row["arrival_s"], since))
    return total / (until - since)


def chunks_between(rows: Sequence[Mapping[str, Any]], since: float, until: float) -> int:
    """Number of tokens that the server wrote between two monotonic times."""
    return sum(
        int(np.count_nonzero((times >= since) & (times <= until)))
        for times in (np.asarray(row["token_write_s"]) for row in rows)
    )
