"""Rows of figures, and the two files that are made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from .work import FIRST_TOKEN_S, GAP_S, INPUT_LEN, OUTPUT_LEN, Outcome

SCHEMA = 2
OVERLOADED_MS = 1e3
MEDIANS = (
    *("added_p50_ms", "added_p99_ms", "chunks_per_core_s", "cpu_s", "memory_mb"),
    *("prefill_late_p99_ms", "decode_late_p99_ms", "load_average"),
)


@dataclass(frozen=True)
class Errors:
    """Reported − true in ms, true being the server's schedule. ITL: by how much it differs, either way."""

    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None


def errors_of(outcome: Outcome) -> Errors:
    ttft = np.asarray(outcome.ttft_ms) - 1e3 * FIRST_TOKEN_S
    itl = np.abs(np.asarray(outcome.itl_ms) - 1e3 * GAP_S)
    return Errors(percentile(ttft, 50), percentile(ttft, 99), percentile(itl, 50), percentile(itl, 99))


def percentile(values: Any, percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if len(values) else None


@dataclass(frozen=True)
class ClientRow:
    """One client with one level of load. CPU without start-up is what the load itself cost."""

    client: str
    streams: int
    rate: float
    streams_peak: int
    completed: int
    failed: int
    errors: Errors
    gaps_are: str
    hidden_p99_ms: float | None
    chunks_per_core_s: int | None
    cpu_s: float
    start_up_cpu_s: float
    wall_s: float
    server_late_first_p99_ms: float | None
    server_late_further_p99_ms: float | None
    load_average: float


@dataclass(frozen=True)
class RouterRow:
    """One router with one level of load; "none" is the same load without a router.

    Of several ``repeats`` each figure is the median, but for the requests, which are counted together.
    """

    router: str
    streams: int
    rate: float
    completed: int
    failed: int
    errors: Errors
    added_p50_ms: float | None
    added_p99_ms: float | None
    chunks_per_core_s: int | None
    cpu_s: float | None
    memory_mb: float | None
    prefill_late_p99_ms: float | None
    decode_late_p99_ms: float | None
    load_average: float
    repeats: int = 1
    added_p50_range_ms: tuple[float, float] | None = None
    """The least and the most of the repeats."""

    @property
    def overloaded(self) -> bool:
        """It lost requests, or made the median one wait: to measure that again shows nothing more."""
        return self.failed > 0 or (self.added_p50_ms or 0.0) > OVERLOADED_MS


def together(rows: Sequence[RouterRow]) -> RouterRow:
    """One row of the repeats of one router with one level of load."""
    added = [row.added_p50_ms for row in rows if row.added_p50_ms is not None]
    figures = {each.name: [getattr(row, each.name) for row in rows] for each in fields(RouterRow)}
    errors = {each.name: [getattr(row.errors, each.name) for row in rows] for each in fields(Errors)}
    return replace(
        rows[0],
        **{name: median(figures[name]) for name in MEDIANS},
        errors=Errors(**{name: median(values) for name, values in errors.items()}),
        completed=sum(figures["completed"]),
        failed=sum(figures["failed"]),
        repeats=len(rows),
        added_p50_range_ms=(min(added), max(added)) if added else None,
    )


def median(values: Sequence[Any]) -> Any:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return None if not known else round(statistics.median(known), 3)


@dataclass
class Report:
    machine: dict[str, Any]
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    clients: list[ClientRow] = field(default_factory=list)
    routers: list[RouterRow] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """``peers.json`` and ``peers.md``; called after each row, so that what was measured is kept."""
        folder.mkdir(parents=True, exist_ok=True)
        work = {
            "first_token_s": FIRST_TOKEN_S,
            "gap_s": GAP_S,
            "output_len": OUTPUT_LEN,
            "input_len": INPUT_LEN,
        }
        data = {"schema": SCHEMA, "work": work, **asdict(self)}
        for name, text in (("peers.json", json.dumps(data, indent=1) + "\n"), ("peers.md", self.markdown())):
            partial = folder / f"{name}.part"
            partial.write_text(text)
            partial.replace(folder / name)

    def markdown(self) -> str:
        machine = self.machine
        lines = [
            "# kvbench and its peers on the same work",
            "",
            f"{machine.get('cpu') or 'unknown CPU'}, {machine['cores']} cores, Python {machine['python']}, "
            f"{machine['at']}. Load average {machine['load_before']} before, "
            f"{machine.get('load_after', 'unknown')} after.",
            "",
            f"Open-loop Poisson arrivals for {self.seconds:g} s, {OUTPUT_LEN} output tokens, first token "
            f"exactly {1e3 * FIRST_TOKEN_S:g} ms after the request arrived, then one each {1e3 * GAP_S:g} "
            "ms. Errors are reported − true in ms, p50 / p99; the server's own lateness (p99 of first and "
            "further tokens) is in them and stands beside. Tokens per core-second are those of the load "
            "without the start, whose CPU seconds stand beside.",
            "",
            *self._client_lines(),
            "",
            "The routers run between kvbench's load generator and two exact servers, P and D, of "
            f"{1e3 * FIRST_TOKEN_S / 2:g} ms each, with NIXL's dispatch (P first, then D). TTFT added is the "
            "reported error less the median error of the same load without a router, sent just before; P's "
            "and D's own lateness is in it. Figures are medians of so many repeats in turn, and the least "
            "and the most p50 of them stand in brackets.",
            "",
            *self._router_lines(),
            "",
            *(f"- not run: {name}: {reason}" for name, reason in self.not_run),
            "- versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        ]
        return "\n".join(lines) + "\n"

    def _client_lines(self) -> list[str]:
        header = (
            *("streams", "client", "TTFT error", "ITL error", "sent late, not in TTFT (p99)"),
            *("tokens per core-s", "start CPU-s", "wall s", "done / failed", "server late"),
        )
        rows = [
            (
                f"{row.streams} ({row.rate:.0f}/s)",
                row.client,
                _pair(row.errors.ttft_p50_ms, row.errors.ttft_p99_ms),
                _pair(row.errors.itl_p50_ms, row.errors.itl_p99_ms)
                + ("" if row.gaps_are == "gaps" else " *"),
                _one(row.hidden_p99_ms),
                "-" if row.chunks_per_core_s is None else f"{row.chunks_per_core_s:,}",
                f"{row.start_up_cpu_s:.2f}",
                f"{row.wall_s:.1f}",
                f"{row.completed} / {row.failed}",
                _pair(row.server_late_first_p99_ms, row.server_late_further_p99_ms),
            )
            for row in self.clients
        ]
        note = ["", "\\* each request's mean gap, which hides single ones: the client keeps no others."]
        return [*_table(header, rows), *(note if any(row.gaps_are != "gaps" for row in self.clients) else [])]

    def _router_lines(self) -> list[str]:
        header = (
            *("streams", "router", "repeats", "TTFT added", "ITL error", "tokens per core-s", "MB"),
            *("done / failed", "P, D late (p99)"),
        )
        rows = [
            (
                f"{row.streams} ({row.rate:.0f}/s)",
                row.router,
                f"{row.repeats}",
                _pair(row.added_p50_ms, row.added_p99_ms) + _range(row.added_p50_range_ms),
                _pair(row.errors.itl_p50_ms, row.errors.itl_p99_ms),
                "-" if row.chunks_per_core_s is None else f"{row.chunks_per_core_s:,.0f}",
                "-" if row.memory_mb is None else f"{row.memory_mb:.0f}",
                f"{row.completed} / {row.failed}",
                _pair(row.prefill_late_p99_ms, row.decode_late_p99_ms),
            )
            for row in self.routers
        ]
        return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _one(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _pair(middle: float | None, high: float | None) -> str:
    return "-" if middle is None or high is None else f"{middle:.2f} / {high:.2f}"


def _range(values: tuple[float, float] | None) -> str:
    return "" if values is None else f" ({values[0]:.2f}–{values[1]:.2f})"
