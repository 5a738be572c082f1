"""The rows of an import as people read them in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.core.fitted_table import Grid, columns_of
from kvbench.core.units import size_text
from kvbench.importers.base import ServingRow, TransferRow
from kvbench.report.tables.numbers import MISSING, number


def serving_table(rows: Sequence[ServingRow]) -> Grid:
    """A line a row; ≈ stands before a length that is a mean."""
    headings = (
        "req/s\noffered",
        "done",
        "s",
        "req/s",
        "out\ntok/s",
        "TTFT ms\nmean / P50 / P99",
        "TPOT ms\nmean / P99",
        "line",
    )
    cells = [
        [
            row.connector or MISSING,
            _length(row, "input_len"),
            _length(row, "output_len"),
            _how(row),
            number(row.request_rate),
            _count(row.figures.get("completed")),
            number(row.figures.get("duration_s")),
            number(row.figures.get("request_throughput")),
            number(row.figures.get("output_throughput")),
            _several(row, "ttft", ("mean", "median", "p99")),
            _several(row, "tpot", ("mean", "p99")),
            f"{row.origin.line}",
        ]
        for row in rows
    ]
    ranks = {"line": 6, "s": 5, "done": 4, "out\ntok/s": 3, "out": 2}
    return Grid(columns_of("connector|in|out|how", "|".join(headings), ranks), cells)


def _length(row: ServingRow, name: str) -> str:
    """A length in tokens, with ≈ where it is a mean that was worked out."""
    text = _count(getattr(row, name))
    return f"≈{text}" if name in row.derived else text


def _how(row: ServingRow) -> str:
    settings = row.settings
    words = [f"tp {settings['tp']}"] if "tp" in settings else []
    if isinstance(settings.get("nics"), int):
        words.append(f"{settings['nics']} NIC" + ("s" if settings["nics"] != 1 else ""))
    elif settings.get("protocol"):
        words.append(str(settings["protocol"]))
    return ", ".join(words) or MISSING


def _several(row: ServingRow, latency: str, statistics: Sequence[str]) -> str:
    return " / ".join(number(row.figures.get(f"{statistic}_{latency}_ms")) for statistic in statistics)


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:g}" if value < 1e6 else f"{value:.0f}"


def transfer_table(rows: Sequence[TransferRow]) -> Grid:
    """A line a measurement."""
    cells = [
        [
            row.record.case.backend,
            row.record.case.protocol,
            _op(row),
            MISSING if "block_bytes" in row.missing else size_text(row.record.case.block_bytes),
            MISSING if "batch_size" in row.missing else f"{row.record.case.batch_size}",
            MISSING if "threads" in row.missing else f"{row.record.case.threads}",
            number(row.record.gb_per_s),
            f"{row.origin.line}",
        ]
        for row in rows
    ]
    return Grid(columns_of("backend|protocol|op", "block|batch|at a time|GB/s|line", {"line": 1}), cells)


def _op(row: TransferRow) -> str:
    """The operation, and what sets its row apart from the others: ``write, both directions together``."""
    words = [] if "op" in row.missing else [row.record.case.op]
    return ", ".join([*words, *([row.record.case.shape] if row.record.case.shape else [])]) or MISSING
