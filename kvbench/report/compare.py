"""``kvbench compare``: rows of one or several runs side by side, the conclusions first, in the format asked
for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from kvbench.core.findings.findings import KIND_WORDS, Statement
from kvbench.core.findings.load_row import LoadRow
from kvbench.core.plan.engine_count import Unit, unit_of
from kvbench.errors import InputError
from kvbench.report.findings.load_rows import AXES, conclusions, default_axis, load_rows, searched_rows
from kvbench.report.tables.formats import FORMATS, WRITERS, Column, Sheet, as_json, for_terminal
from kvbench.report.transfers import compare, report
from kvbench.results.provenance import caption, check_comparable, mark_of
from kvbench.results.run import Run, load_run

NOT_COMPARABLE: Final = "NOT COMPARABLE, put together by --force"
_WIDTH: Final = 100
_AXIS_TITLES: Final = {
    "run": "run",
    "connector": "connector",
    "mode": "way",
    "protocol": "protocol",
    "nics": "num_rdma_nic",
    "tp": "tp",
    "input_len": "input length",
    "output_len": "output length",
    "rate": "qps",
}
# Key, as in the JSON of ``vllm bench serve`` → title, as in PR 10884's tables; ✓ where a terminal shows it.
_SERVE: Final = (
    ("completed", "Successful Requests", False),
    ("failed", "Failed Requests", False),
    ("duration_s", "Duration (s)", False),
    ("total_input_tokens", "Total Input Tokens", False),
    ("total_output_tokens", "Total Generated Tokens", False),
    ("request_throughput", "Req Throughput (req/s)", True),
    ("output_throughput", "Output Token Throughput (tok/s)", True),
    ("total_token_throughput", "Total Token Throughput (tok/s)", False),
    *(
        (
            f"{word.lower()}_{latency.lower()}_ms",
            f"{word} {latency} (ms)",
            word in ("Mean", "P99") and latency != "ITL",
        )
        for latency in ("TTFT", "TPOT", "ITL")
        for word in ("Mean", "Median", "P90", "P99")
        if word != "P90" or latency != "ITL"
    ),
)


@dataclass(frozen=True)
class Asked:
    """How rows are to be shown: ``by`` is the axis that is compared; ``sort`` and ``group`` are axes, too."""

    by: str = ""
    sort: tuple[str, ...] = ()
    group: str = ""
    format: str = "terminal"
    force: bool = False

    def check(self) -> None:
        """Raises InputError for an axis or a format that there is not."""
        for option, value in (
            ("--by", self.by),
            ("--group", self.group),
            *(("--sort", axis) for axis in self.sort),
        ):
            if value and value not in AXES:
                raise InputError(
                    f"{option} {value}: there is no such axis", hint=f"there are: {', '.join(AXES)}"
                )
        if self.format not in FORMATS:
            raise InputError(f"--format {self.format}: not known", hint=f"there are: {', '.join(FORMATS)}")


@dataclass(frozen=True)
class Compared:
    """What a comparison gives: conclusions, rows, and in what runs that were forced together differ."""

    runs: Sequence[Run]
    names: Sequence[str]
    by: str
    statements: Sequence[Statement]
    rows: Sequence[LoadRow]
    differing: Sequence[str] = ()


def command(paths: Sequence[Path], asked: Asked, console: Console) -> None:
    """Prints the comparison of the runs. Raises InputError where they are not comparable, unless forced."""
    asked.check()
    runs = [load_run(path) for path in paths]
    kinds = {run.manifest.get("kind") == "microbench" for run in runs}
    if kinds == {True, False}:
        raise InputError("a microbenchmark of transfers and a run of requests have no table in common")
    if True in kinds:
        if asked.format == "terminal":
            report.render_all(runs, console)
        else:
            console.file.write(compare.as_text(runs, asked.format))
        return
    compared = compare_runs(runs, asked)
    if asked.format == "terminal":
        _render(compared, sheets(compared, asked), console)
        return
    # Not through the console: it would wrap lines that programs read.
    console.file.write(as_text(compared, asked))


def compare_runs(runs: Sequence[Run], asked: Asked | None = None) -> Compared:
    """Rows and conclusions of the runs together. Raises InputError where they are not comparable."""
    asked = asked or Asked()
    asked.check()
    differing = check_comparable(runs, force=asked.force)
    several = len(runs) > 1
    names = [
        (f"{chr(65 + place)}" if place < 26 else f"R{place + 1}") if several else ""
        for place in range(len(runs))
    ]
    rows = [row for run, name in zip(runs, names, strict=True) for row in _rows_of(run, name)]
    by = asked.by or default_axis(row for row in rows if not row.answer)
    return Compared(runs, names, by, conclusions(runs, names, by), rows, differing)


def _rows_of(run: Run, name: str) -> list[LoadRow]:
    return [*searched_rows(run, name), *load_rows(run, name, errors=False)]


# --- tables ----------------------------------------------------------------------------------------


def sheets(compared: Compared, asked: Asked) -> list[Sheet]:
    """The rows as one table, or one for each level of ``group``."""
    order = [asked.group, *asked.sort] if asked.group else list(asked.sort)
    order += [axis for axis in ("input_len", "output_len", compared.by, "rate") if axis not in order]
    rows = sorted(compared.rows, key=lambda row: [_sortable(row.axes.get(axis)) for axis in order])
    columns, unit = _columns(rows, compared, asked), _unit(rows)
    if not asked.group:
        return [Sheet("", columns, [_flat(row, unit) for row in rows])] if rows else []
    title = _AXIS_TITLES[asked.group]
    return [
        Sheet(
            f"{title} = {level if level is not None else 'not told'}",
            columns,
            [_flat(row, unit) for row in mine],
        )
        for level, mine in groupby(rows, key=lambda row: row.axes.get(asked.group))
    ]


def _sortable(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def _columns(rows: Sequence[LoadRow], compared: Compared, asked: Asked) -> list[Column]:
    """The axis compared first, then what varies, then what is the same everywhere; then the figures."""
    known = [axis for axis in AXES if any(row.axes.get(axis) is not None for row in rows)]
    if len(compared.runs) == 1:
        known = [axis for axis in known if axis != "run"]
    varying = [axis for axis in known if len({row.axes.get(axis) for row in rows}) > 1]
    first = [compared.by] if compared.by in known else []
    order = list(dict.fromkeys([*first, *varying, *known]))
    # What comes with the axis compared, level by level, needs no column of its own in a terminal.
    with_it = {axis for axis in varying if _comes_with(rows, axis, compared.by)}
    brief = {*first, *varying, "connector", "input_len"} - (with_it - {"connector"})
    if any(row.answer for row in rows):
        brief.discard("rate")
    columns = [Column(axis, _AXIS_TITLES[axis], axis in brief) for axis in order]
    if any(row.answer for row in rows):
        columns.append(Column("max_request_rate", "max rate (req/s)"))
        columns += [Column("engines", "engines", False), Column("gpus", "GPUs", False)]
        unit = _unit(rows)
        columns.append(Column(f"max_request_rate_per_{unit.lower()}", f"per {unit} (req/s)"))
    columns += [Column(key, heading, brief) for key, heading, brief in _SERVE]
    return [*columns, Column("trial_id", "trial", False), Column("source", "source", False)]


def _comes_with(rows: Sequence[LoadRow], axis: str, by: str) -> bool:
    told = {(row.axes.get(by), row.axes.get(axis)) for row in rows}
    return axis != by and len(told) == len({level for level, _ in told})


def _unit(rows: Iterable[LoadRow]) -> Unit:
    """What rates are divided by: GPUs if they are known of all rows, else engines."""
    return unit_of(row.size for row in rows)


def _flat(row: LoadRow, unit: Unit) -> dict[str, Any]:
    rate, count = row.answer_rate, row.size.count(unit)
    figures = {key: row.get(key) for key, _, _ in _SERVE}
    whole = {
        key: int(value) if value is not None and value == int(value) else value
        for key, value in figures.items()
    }
    return {
        **row.axes,
        "max_request_rate": row.answer,
        "engines": row.size.engines,
        "gpus": row.size.gpus,
        f"max_request_rate_per_{unit.lower()}": rate / count if rate is not None and count else None,
        **{
            key: whole[key] if not key.endswith(("_ms", "_s", "_throughput")) else figures[key]
            for key in figures
        },
        "trial_id": row.key,
        "source": row.origin,
    }


def as_text(compared: Compared, asked: Asked) -> str:
    """The comparison in a format for files. CSV has the rows alone; the others the conclusions first."""
    tables = sheets(compared, asked)
    if asked.format == "csv":
        return WRITERS["csv"](tables)
    if asked.format == "json":
        more = {
            "runs": [{"name": name, "run": run.run_id} for run, name in _named(compared)],
            "by": compared.by,
            "not_comparable": list(compared.differing),
            "conclusions": [statement.to_json() for statement in compared.statements],
        }
        return as_json(tables, more)
    said = [*_captions(compared), *(f"{NOT_COMPARABLE}: {line}" for line in compared.differing)]
    lines = [f"- {statement.text}" for statement in compared.statements]
    if asked.format == "latex":
        return "".join(f"% {' '.join(line.split())}\n" for line in [*said, *lines]) + WRITERS["latex"](tables)
    return "\n".join([*said, "", *lines, "", WRITERS["md"](tables)])


def _named(compared: Compared) -> Iterable[tuple[Run, str]]:
    return zip(compared.runs, compared.names, strict=True)


def _captions(compared: Compared) -> Iterable[str]:
    for run, name in _named(compared):
        mark = mark_of(run)
        marked = f"{mark.word.upper()}: " if mark is not None else ""
        yield f"{name}: {marked}{caption(run)}" if name else f"{marked}{caption(run)}"


# --- the terminal ----------------------------------------------------------------------------------


def _render(compared: Compared, tables: Sequence[Sheet], console: Console) -> None:
    for line in _captions(compared):
        console.print(Text(line, style="dim"), soft_wrap=True)
    for line in compared.differing:
        console.print(Text(f"{NOT_COMPARABLE}: {line}", style="bold red"), soft_wrap=True)
    render_statements(compared.statements, console)
    if not tables:
        console.print(Text("\nno load was measured whose figures could be compared"))
    for sheet in tables:
        console.print(Text(f"\n{sheet.title}", style="bold"))
        console.print(for_terminal(sheet))


def render_statements(statements: Sequence[Statement], console: Console) -> None:
    """Conclusions under the heading of their kind."""
    width = min(console.width, _WIDTH)
    styles: Mapping[str, str] = {"invalid": "red", "warning": "yellow"}
    for kind, words in KIND_WORDS.items():
        mine = [statement for statement in statements if statement.kind == kind]
        if mine:
            console.print(Text(words, style="bold"))
        for statement in mine:
            lines = textwrap.wrap(statement.text, width - 4, break_on_hyphens=False, break_long_words=False)
            text = Text("  • " + "\n    ".join(lines), style=styles.get(statement.level, ""))
            console.print(text, soft_wrap=True)
            if statement.advice:
                console.print(Text(f"    → {statement.advice}", style="cyan"), soft_wrap=True)
