"""Rows of figures, and the two files that are made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from .work import FIRST_TOKEN_S, GAP_S, INPUT_LEN, OUTPUT_LEN, Outcome

SCHEMA = 2
OVERLOADED_MS = 1e3
MEAN_GAPS = "\\* each request's mean gap, which hides single ones: the client keeps no others."
MEDIANS = (
    *("added_p50_ms", "added_p99_ms", "chunks_per_core_s", "cpu_s", "memory_mb"),
    *("prefill_late_p99_ms", "decode_late_p99_ms", "load_average"),
)
Row = dict[str, Any]
"""A client or a router with one level of load, as peers.json has it."""


def errors_of(outcome: Outcome) -> dict[str, float | None]:
    ttft = np.asarray(outcome.ttft_ms) - 1e3 * FIRST_TOKEN_S
    itl = np.abs(np.asarray(outcome.itl_ms) - 1e3 * GAP_S)
    both = (("ttft", ttft), ("itl", itl))
    return {f"{name}_p{at}_ms": percentile(values, at) for name, values in both for at in (50, 99)}


def percentile(values: Any, percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if len(values) else None


def overloaded(row: Row) -> bool:
    """Whether it lost requests, or made the median one wait: to measure that again shows nothing more."""
    return row["failed"] > 0 or (row["added_p50_ms"] or 0.0) > OVERLOADED_MS


def together(rows: Sequence[Row]) -> Row:
    added = [row["added_p50_ms"] for row in rows if row["added_p50_ms"] is not None]
    return {
        **rows[0],
        **{name: median([row[name] for row in rows]) for name in MEDIANS},
        "errors": {name: median([row["errors"][name] for row in rows]) for name in rows[0]["errors"]},
        **{name: sum(row[name] for row in rows) for name in ("completed", "failed")},
        "repeats": len(rows),
        "added_p50_range_ms": (min(added), max(added)) if added else None,
    }


def median(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return None if not known else round(statistics.median(known), 3)


@dataclass
class Report:
    machine: dict[str, Any]
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    clients: list[Row] = field(default_factory=list)
    routers: list[Row] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write ``peers.json`` and ``peers.md``; after each row, so that what was measured is kept."""
        folder.mkdir(parents=True, exist_ok=True)
        work = {"first_token_s": FIRST_TOKEN_S, "gap_s": GAP_S}
        work |= {"output_len": OUTPUT_LEN, "input_len": INPUT_LEN}
        data = {"schema": SCHEMA, "work": work, **asdict(self)}
        for name, text in (("peers.json", json.dumps(data, indent=1) + "\n"), ("peers.md", self.markdown())):
            partial = folder / f"{name}.part"
            partial.write_text(text)
            partial.replace(folder / name)

    def markdown(self) -> str:
        machine = self.machine
        return "\n".join(
            [
                "# kvbench and its peers on the same work\n",
                f"{machine.get('cpu') or 'unknown CPU'}, {machine['cores']} cores, "
                f"Python {machine['python']}, {machine['at']}. Load average {machine['load_before']} before, "
                f"{machine.get('load_after', 'unknown')} after.\n",
                f"Open-loop Poisson arrivals for {self.seconds:g} s, {OUTPUT_LEN} output tokens, first token "
                f"exactly {1e3 * FIRST_TOKEN_S:g} ms after the request arrived, then one each "
                f"{1e3 * GAP_S:g} ms. Errors are reported − true in ms, p50 / p99; the server's own lateness "
                "(p99 of first and further tokens) is in them and is shown beside them. Tokens per "
                "core-second are those of the load without the start, whose CPU seconds are shown too.\n",
                *_table(CLIENT_COLUMNS, self.clients),
                *([] if all(row["gaps_are"] == "gaps" for row in self.clients) else ["", MEAN_GAPS]),
                "\nThe routers run between kvbench's load generator and two exact servers, P and D, of "
                f"{1e3 * FIRST_TOKEN_S / 2:g} ms each, with NIXL's dispatch (P first, then D). TTFT added is "
                "the reported error less the median error of the same load without a router, sent just "
                "before; P's and D's own lateness is in it. Figures are medians of the repeats in turn, with "
                "the least and the most p50 of them in brackets.\n",
                *_table(ROUTER_COLUMNS, self.routers),
                "",
                *(f"- not run: {name}: {reason}" for name, reason in self.not_run),
                "- versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
                "",
            ]
        )


def _table(columns: Mapping[str, Callable[[Row], str]], rows: Sequence[Row]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]


def _one(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pair(row: Row, middle: str, high: str) -> str:
    known = row[middle] is not None and row[high] is not None
    return f"{row[middle]:.2f} / {row[high]:.2f}" if known else "-"


_BOTH: Final[Mapping[str, Callable[[Row], str]]] = {
    "ITL error": lambda row: (
        _pair(row["errors"], "itl_p50_ms", "itl_p99_ms") + " *" * (row.get("gaps_are", "gaps") != "gaps")
    ),
    "tokens per core-s": lambda row: _one(row["chunks_per_core_s"], ",.0f"),
    "done / failed": lambda row: f"{row['completed']} / {row['failed']}",
}
CLIENT_COLUMNS: Final[Mapping[str, Callable[[Row], str]]] = {
    "streams": lambda row: f"{row['streams']} ({row['rate']:.0f}/s)",
    "client": lambda row: row["client"],
    "TTFT error": lambda row: _pair(row["errors"], "ttft_p50_ms", "ttft_p99_ms"),
    **_BOTH,
    "sent late, not in TTFT (p99)": lambda row: _one(row["hidden_p99_ms"], ".1f"),
    "start CPU-s": lambda row: f"{row['start_up_cpu_s']:.2f}",
    "wall s": lambda row: f"{row['wall_s']:.1f}",
    "server late": lambda row: _pair(row, "server_late_first_p99_ms", "server_late_further_p99_ms"),
}
ROUTER_COLUMNS: Final[Mapping[str, Callable[[Row], str]]] = {
    "streams": CLIENT_COLUMNS["streams"],
    "router": lambda row: row["router"],
    "repeats": lambda row: f"{row['repeats']}",
    "TTFT added": lambda row: (
        _pair(row, "added_p50_ms", "added_p99_ms")
        + ("" if (ends := row["added_p50_range_ms"]) is None else f" ({ends[0]:.2f}–{ends[1]:.2f})")
    ),
    **_BOTH,
    "MB": lambda row: _one(row["memory_mb"], ".0f"),
    "P, D late (p99)": lambda row: _pair(row, "prefill_late_p99_ms", "decode_late_p99_ms"),
}
