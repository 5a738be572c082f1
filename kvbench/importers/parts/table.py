"""The rows of an import as people read them in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from kvbench.core.units import size_text
from kvbench.importers.base import ServingRow, TransferRow
from kvbench.report.tables.numbers import MISSING, number


def serving_table(rows: Sequence[ServingRow]) -> Table:
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
    table = _table(("connector", "in", "out", "how"), headings)
    for row in rows:
        figures = row.figures
        table.add_row(
            *(
                Text(cell)
                for cell in (
                    row.connector or MISSING,
                    _length(row, "input_len"),
                    _length(row, "output_len"),
                    _how(row),
                )
            ),
            number(row.request_rate),
            _count(figures.get("completed")),
            number(figures.get("duration_s")),
            number(figures.get("request_throughput")),
            number(figures.get("output_throughput")),
            _several(row, "ttft", ("mean", "median", "p99")),
            _several(row, "tpot", ("mean", "p99")),
            Text(f"{row.origin.line}"),
        )
    return table


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


def transfer_table(rows: Sequence[TransferRow]) -> Table:
    """A line a measurement."""
    table = _table(("backend", "protocol", "op"), ("block", "batch", "at a time", "GB/s", "line"))
    for row in rows:
        case = row.record.case
        table.add_row(
            *(
                Text(cell)
                for cell in (case.backend, case.protocol, MISSING if "op" in row.missing else case.op)
            ),
            MISSING if "block_bytes" in row.missing else size_text(case.block_bytes),
            MISSING if "batch_size" in row.missing else f"{case.batch_size}",
            MISSING if "threads" in row.missing else f"{case.threads}",
            number(row.record.gb_per_s),
            f"{row.origin.line}",
        )
    return table


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1))
    for word in words:
        table.add_column(word, no_wrap=True, max_width=16)
    for heading in numbers:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table
