"""All that the exact server has done, and the pages that show it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from kvbench.processes.exact_server import wire
from kvbench.processes.exact_server.log import lateness, metrics_text
from kvbench.processes.exact_server.served import ServedStream
from kvbench.processes.exact_server.spec import ExactSpec


class Ledger:
    """Every request in order of arrival, and counts. ``chunks`` are writes: a token each, some are more."""

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
        """Requests under way."""
        return self._open

    def began(self, stream: ServedStream) -> None:
        """A request has arrived."""
        self.streams.append(stream)
        self._prompt_tokens += stream.prompt_tokens
        self._open += 1
        self._peak = max(self._peak, self._open)

    def ended(self, outcome: str) -> None:
        """One that had arrived is over."""
        self._open -= 1
        self._completed += outcome == "complete"

    def page(self, method: bytes, path: str, query: str, queue: tuple[int, bool]) -> tuple[int, str, bytes]:
        """Status, content type and body of everything but completions.

        ``queue``: how many wait, and whether the server is busy.
        """
        spec = self._spec
        if method == b"POST" and path == "/reset_prefix_cache":
            return 200, "application/json", b"{}"
        if method != b"GET":
            return 404, "application/json", wire.error_body(404, f"there is no {path} here")
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
        return 404, "application/json", wire.error_body(404, f"there is no {path} here")

    def write(self, path: Path) -> None:
        """JSON lines: the summary, then a line a request; renamed into place."""
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
        # A queue goes on with what its clients have dropped, so fewer may be open than wait.
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
