"""Log of the exact server's requests and lateness, and the pages that show it; CLOCK_MONOTONIC seconds."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvbench.processes.exact_server import wire
from kvbench.processes.exact_server.spec import ExactSpec

MAX_UNSENT_BYTES: Final = 64 * 1024 * 1024
"""A client that leaves more than this unread is dropped. Also the limit of a log."""


class ExactClient:
    """One client. One request at a time is served; further bytes wait in ``buffer``."""

    __slots__ = ("buffer", "fd", "head", "kernel", "sock", "stamp", "stream", "then", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.buffer = bytearray()
        self.unsent = bytearray()
        self.head: wire.Head | None = None
        self.stream: ServedStream | None = None
        self.stamp = 0.0
        self.kernel = False
        self.then = "keep"

    def keep(self, data: bytes) -> int:
        """Replaces ``send`` while the client does not read."""
        self.unsent += data
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise ConnectionError("the client does not read")
        return len(data)


class ServedStream:
    """One request from arrival to end. ``due`` is the deadline of the next write; ``writes`` has the time
    just before each write, in order."""

    __slots__ = (
        "arrival",
        "connection",
        "due",
        "ended",
        "first_due",
        "head",
        "index",
        "kernel",
        "last",
        "last_tokens",
        "outcome",
        "output_len",
        "plain",
        "prompt_tokens",
        "request_id",
        "scripted",
        "send",
        "then",
        "writes",
    )

    def __init__(self, index: int, request_id: str, arrival: float, kernel: bool) -> None:
        self.index = index
        self.request_id = request_id
        self.arrival = arrival
        self.kernel = kernel
        self.connection: ExactClient | None = None
        self.prompt_tokens = self.output_len = self.plain = self.last_tokens = 0
        self.first_due = self.due = self.ended = 0.0
        self.head = self.last = b""
        self.then = "keep"
        self.outcome = "open"
        self.scripted = "complete"
        self.send: Callable[[bytes], int] = len
        self.writes = array("d")

    def row(self, gap_s: float, *, tokens: bool) -> dict[str, Any]:
        return {
            "index": self.index,
            "request_id": self.request_id,
            "kernel_stamp": self.kernel,
            "arrival_s": self.arrival,
            "first_due_s": self.first_due,
            "gap_s": gap_s,
            "first_write_s": self.writes[0] if self.writes else None,
            "prompt_tokens": self.prompt_tokens,
            "output_len": self.output_len,
            "outcome": self.outcome,
            "ended_s": self.ended or None,
            **({"token_write_s": self.writes.tolist()} if tokens else {}),
        }

    def lateness(self, gap_s: float) -> Iterator[float]:
        """Yield write − due of each write, in seconds."""
        due = self.first_due
        for index, written in enumerate(self.writes):
            yield written - due - index * gap_s


HISTOGRAM_MS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, math.inf)


def lateness(streams: Sequence[ServedStream], gap_s: float) -> dict[str, Any]:
    """Return lateness of first and further writes: percentiles in ms, and a histogram with upper bounds."""
    first, further = [], []
    for stream in streams:
        late = [value * 1e3 for value in stream.lateness(gap_s)]
        first += late[:1]
        further += late[1:]
    return {"first": _figures(first), "further": _figures(further)}


def _figures(late_ms: list[float]) -> dict[str, Any]:
    late_ms.sort()
    counts, before = [], 0
    for bound in HISTOGRAM_MS:
        count = bisect_right(late_ms, bound)
        counts.append([bound if math.isfinite(bound) else None, count - before])
        before = count
    return {
        "n": len(late_ms),
        "p50_ms": _percentile(late_ms, 50),
        "p99_ms": _percentile(late_ms, 99),
        "max_ms": _percentile(late_ms, 100),
        "histogram_ms": counts,
    }


def _percentile(ordered: Sequence[float], percent: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 4)


def metrics_text(model: str, counts: dict[str, float]) -> bytes:
    """Counters and gauges in Prometheus's format, under vLLM's names where they exist."""
    kinds = {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:prompt_tokens_total": "counter",
        "vllm:generation_tokens_total": "counter",
        "vllm:request_success_total": "counter",
        "vllm:prefix_cache_queries_total": "counter",
        "vllm:prefix_cache_hits_total": "counter",
        "vllm:num_preemptions_total": "counter",
        "exact_requests_total": "counter",
        "exact_connections_total": "counter",
    }
    lines = []
    for name, kind in kinds.items():
        label = ',finished_reason="length"' if name == "vllm:request_success_total" else ""
        lines += [
            f"# TYPE {name} {kind}",
            f'{name}{{model_name="{model}"{label}}} {float(counts.get(name, 0))}',
        ]
    return ("\n".join(lines) + "\n").encode()


class Ledger:
    """Every request in order of arrival, and counts. ``chunks`` counts writes: one token each, some more."""

    def __init__(self, spec: ExactSpec, kernel_stamps: bool) -> None:
        self._spec = spec
        self._kernel_stamps = kernel_stamps
        self.streams: list[ServedStream] = []
        self.chunks = self.more_tokens = self.connections = 0
        self._open = self._peak = self._completed = self._prompt_tokens = 0
        self._started = time.monotonic()
        self._cpu = time.process_time()

    @property
    def open(self) -> int:
        return self._open

    def began(self, stream: ServedStream) -> None:
        self.streams.append(stream)
        self._prompt_tokens += stream.prompt_tokens
        self._open += 1
        self._peak = max(self._peak, self._open)

    def ended(self, outcome: str) -> None:
        self._open -= 1
        self._completed += outcome == "complete"

    def page(self, method: bytes, path: str, query: str, queue: tuple[int, bool]) -> tuple[int, str, bytes]:
        """Return status, content type and body of any page except completions."""
        spec = self._spec
        if method == b"POST" and path == "/reset_prefix_cache":
            return 200, "application/json", b"{}"
        if method != b"GET":
            return 404, "application/json", wire.error_body(404, f"there is no {path} on this server")
        if path in ("/health", "/ping", "/version"):
            body = json.dumps({"version": "exact", "status": "ok"}).encode()
            return 200, "application/json", body
        if path == "/v1/models":
            model = {"id": spec.model, "object": "model", "owned_by": "kvbench", "max_model_len": 1_048_576}
            return 200, "application/json", json.dumps({"object": "list", "data": [model]}).encode()
        if path == "/metrics" and spec.metrics:
            return 200, "text/plain; version=0.0.4", metrics_text(spec.model, self._counts(*queue))
        if path == "/log":
            rows = [] if "summary" in query else self._rows(tokens="tokens=0" not in query)
            return 200, "application/json", json.dumps({**self._summary(), "requests": rows}).encode()
        return 404, "application/json", wire.error_body(404, f"there is no {path} on this server")

    def write(self, path: Path) -> None:
        """Write JSON lines: the summary, then one line per request; renamed into place."""
        partial = path.with_name(path.name + ".part")
        with partial.open("w") as file:
            file.write(json.dumps({"summary": self._summary()}) + "\n")
            for row in self._rows(tokens=self._spec.log_tokens):
                file.write(json.dumps(row) + "\n")
        os.replace(partial, path)

    def _rows(self, *, tokens: bool) -> list[dict[str, Any]]:
        return [stream.row(self._spec.gap_s, tokens=tokens) for stream in self.streams]

    def _summary(self) -> dict[str, Any]:
        return {
            "model": self._spec.model,
            "kernel_stamps": self._kernel_stamps,
            "started_s": self._started,
            "now_s": time.monotonic(),
            "cpu_s": round(time.process_time() - self._cpu, 6),
            "chunks": self.chunks,
            "streams_open": self._open,
            "streams_peak": self._peak,
            "connections": self.connections,
            "lateness": lateness(self.streams, self._spec.gap_s),
        }

    def _counts(self, waiting: int, busy: bool) -> dict[str, float]:
        # A queue still serves dropped requests, so fewer may be open than wait.
        return {
            "vllm:num_requests_running": max(self._open - waiting, int(busy)),
            "vllm:num_requests_waiting": waiting,
            "vllm:prompt_tokens_total": self._prompt_tokens,
            "vllm:generation_tokens_total": self.chunks + self.more_tokens,
            "vllm:request_success_total": self._completed,
            "vllm:prefix_cache_queries_total": self._prompt_tokens,
            "exact_requests_total": len(self.streams),
            "exact_connections_total": self.connections,
        }
