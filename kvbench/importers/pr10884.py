"""The page of vLLM's pull request 10884, as text: three tables of results of Mooncake's first connector.
Titles such as ``Varying tp (input length = 1024, qps = 2, output length =6)`` name the constants; the first
column is the variable, the second the RDMA NICs or ``TCP``. The page repeats the tables, once
machine-translated: the first appearance is used, and later ones are compared with it, cell by cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbench.importers.base import Imported, LeftOut, Origin, ServingRow, number, peek, read_lines
from kvbench.importers.parts.vllm_result import DEFINITIONS

FORMAT: Final = "the page of vLLM PR 10884 (three tables)"
RANK: Final = 5
TOOL: Final = "vLLM's benchmark_serving.py"
CONNECTOR: Final = "mooncake"

COLUMNS: Final = {
    "Successful Requests": "completed",
    "Duration (s)": "duration_s",
    "Total Input Tokens": "total_input_tokens",
    "Total Generated Tokens": "total_output_tokens",
    "Req Throughput (req/s)": "request_throughput",
    "Output Token Throughput (tok/s)": "output_throughput",
    "Total Token Throughput (tok/s)": "total_token_throughput",
    **{
        f"{word} {latency} (ms)": f"{word.lower()}_{latency.lower()}_ms"
        for latency in ("TTFT", "TPOT", "ITL")
        for word in ("Mean", "Median", "P99")
    },
}
"""Columns after ``Setting`` and ``num_rdma_nic``, in order → names of the values."""
HEADER: Final = " ".join(("Setting", "num_rdma_nic", *COLUMNS))

_TITLE: Final = re.compile(r"^Varying (?P<axis>tp|qps|input length) \((?P<kept>[^)]*)\)$")
_KEPT: Final = re.compile(r"(?P<name>input length|output length|length|qps|tp)\s*=\s*(?P<value>\d+)")
_ROW: Final = re.compile(
    rf"^(?P<setting>\S.*?=\s*\d+|\d+) (?P<nics>\d+|TCP)(?P<figures>(?: -?\d+(?:\.\d+)?){{{len(COLUMNS)}}})$"
)
_VALUE: Final = re.compile(r"(\d+)\s*$")
_GPUS: Final = re.compile(r"Here we use (?P<count>\d+)x .*\[(?P<name>[A-Z]\d+)\]")


@dataclass
class _Row:
    line: int
    setting: int | None
    nics: str
    figures: list[str]


@dataclass
class _Table:
    """One appearance of a table. ``axis``: empty for a title that is not English."""

    line: int
    title: str
    axis: str = ""
    kept: dict[str, int] = field(default_factory=dict)
    header_line: int = 0
    header: str = ""
    rows: list[_Row] = field(default_factory=list)


def recognise(path: Path) -> bool:
    text = peek(path)
    return "num_rdma_nic" in text and any(_TITLE.match(line) for line in text.splitlines())


def read(path: Path) -> Imported:
    """Return a row for each row of the three tables; see the module's docstring for repeats."""
    lines = read_lines(path)
    reading = Imported(definitions=dict(DEFINITIONS))
    tables = _tables(lines)
    firsts: list[_Table] = []
    for place, table in enumerate(tables):
        if not table.axis or any(first.axis == table.axis for first in firsts):
            continue
        if table.header != HEADER:
            text = f"the columns of the table {table.title!r} are not those of the page: {table.header[:120]}"
            reading.leave_out(table.header_line, f"{text}; left out", path.name)
            continue
        firsts.append(table)
        end = tables[place + 1].line if place + 1 < len(tables) else len(lines) + 1
        reading.problems += _torn_row(lines, table, end, path.name)
        reading.rows += [_row(table, row, path.name) for row in table.rows]
    repeats = [table for table in tables if table not in firsts and table.rows]
    _compare(firsts, repeats, reading, path.name)
    _same_figures(reading, path.name)
    for line, text in enumerate(lines, start=1):
        if (found := _GPUS.search(text)) and "gpus" not in reading.about:
            reading.about |= {"gpus": [found["name"]] * int(found["count"]), "gpus_line": line}
    return reading


def _tables(lines: Sequence[str]) -> list[_Table]:
    """Return every appearance of a table: a header with ``num_rdma_nic``, its title and rows."""
    tables: list[_Table] = []
    for place, text in enumerate(lines):
        stripped = text.strip()
        if "num_rdma_nic" in stripped and len(stripped.split()) > len(COLUMNS):
            at = max((before for before in range(place) if lines[before].strip()), default=0)
            title = lines[at].strip()
            table = _Table(at + 1, title, header_line=place + 1, header=stripped)
            if found := _TITLE.match(title):
                table.axis = found["axis"]
                table.kept = {match["name"]: int(match["value"]) for match in _KEPT.finditer(found["kept"])}
            tables.append(table)
        elif tables and place + 1 == _next_line(tables[-1]) and (found := _ROW.match(stripped)):
            value = _VALUE.search(found["setting"])
            setting = int(value[1]) if value else None
            tables[-1].rows.append(_Row(place + 1, setting, found["nics"], found["figures"].split()))
    return tables


def _next_line(table: _Table) -> int:
    return (table.rows[-1].line if table.rows else table.header_line) + 1


def _torn_row(lines: Sequence[str], table: _Table, end: int, file: str) -> list[LeftOut]:
    """Report the line after a table's last row if it is a broken row."""
    line = _next_line(table)
    text = lines[line - 1].strip() if line <= len(lines) and line < end else ""
    if re.match(r"^(?:tp = |qps = )?\d+ (?:\d+|TCP)\b", text):
        what = f"a row of the table {table.title!r} does not have {len(COLUMNS)} figures; the table ends here"
        return [LeftOut(line, what, file)]
    if not table.rows:
        return [LeftOut(table.header_line, f"the table {table.title!r} has no rows", file)]
    return []


def _row(table: _Table, row: _Row, file: str) -> ServingRow:
    reported: dict[str, int | None] = {**table.kept, table.axis: row.setting}
    figures: dict[str, float] = {}
    for name, text in zip(COLUMNS.values(), row.figures, strict=True):
        if (value := number(text)) is not None:
            figures[name] = value if "." in text else int(text)
    settings: dict[str, Any] = {"protocol": "tcp" if row.nics == "TCP" else "rdma", "table": table.title}
    if row.nics != "TCP":
        settings["nics"] = int(row.nics)
    if reported.get("tp") is not None:
        settings["tp"] = reported["tp"]
    rate = reported.get("qps")
    return ServingRow(
        Origin(file, row.line, row.line, TOOL),
        figures,
        connector=CONNECTOR,
        input_len=reported.get("input length", reported.get("length")),
        output_len=reported.get("output length"),
        request_rate=None if rate is None else float(rate),
        settings=settings,
    )


def _compare(firsts: Sequence[_Table], repeats: Sequence[_Table], reading: Imported, file: str) -> None:
    """Report differences of repeated tables from the first ones, or their equality."""
    equal: list[dict[str, Any]] = []
    for place, repeat in enumerate(repeats):
        first = firsts[place % len(firsts)] if firsts else None
        if first is None or len(first.rows) != len(repeat.rows):
            text = "a repeated table has other rows than its first appearance, which is used"
            reading.leave_out(repeat.header_line, text, file)
            continue
        differing = [
            (row, other)
            for row, other in zip(first.rows, repeat.rows, strict=True)
            if (row.setting, row.nics, row.figures) != (other.setting, other.nics, other.figures)
        ]
        for row, other in differing:
            text = f"differs from its first appearance at line {row.line}, which counts"
            reading.leave_out(other.line, text, file)
        if not differing:
            equal.append({"line": repeat.line, "last_line": repeat.rows[-1].line, "repeats_line": first.line})
    if equal:
        reading.about["repeated_tables"] = equal


def _same_figures(reading: Imported, file: str) -> None:
    """Report rows of different tables with equal values in every column: one measurement, reported twice."""
    seen: dict[tuple[float, ...], ServingRow] = {}
    for row in reading.serving:
        key = tuple(row.figures.values())
        if key in seen:
            first = seen[key].origin.line
            row.settings["same_as_line"] = first
            text = f"has the values of line {first} in every column: one measurement, reported twice"
            reading.leave_out(row.origin.line, text, file)
        seen.setdefault(key, row)
