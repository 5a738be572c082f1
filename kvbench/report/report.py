"""``kvbench report``: run folders → the table in the terminal, report.md, tables/, figures/.

Everything here is derived from the raw files of a run folder: delete it, report again, and it is back,
byte for byte.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.core.metrics.limit import LIMIT_SHORT
from kvbench.core.plan.engine_count import Unit
from kvbench.core.records import SCHEMA_VERSION, TrialRecord
from kvbench.errors import InputError, StoreError
from kvbench.files import said_clearly, write_bytes, write_csv, write_json
from kvbench.report.findings.ahead import compare
from kvbench.report.findings.findings import statements
from kvbench.report.findings.notes import Note, ahead, concluded, notes
from kvbench.report.html.page import Sheets, transfer_sheets, write_html
from kvbench.report.markdown import report_markdown
from kvbench.report.plots import NO_DATA, write_plots
from kvbench.report.plots.transfer import write_transfer_plots
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.result import (
    MISSING,
    Row,
    engine_word,
    number,
    percent,
    shared_unit,
    summary_table,
    time_line,
    trial_values,
)
from kvbench.report.tables.router_cost import RouterCost, router_costs
from kvbench.report.tables.vllm_bench import Table as MethodTable
from kvbench.report.transfers import report
from kvbench.results.provenance import caption, check_comparable, mark_of, scenario_of, slo_of
from kvbench.results.run import Run, load_run

__all__ = ["FORMATS", "command", "render_terminal", "summary_table", "write_report"]

FORMATS: Final = ("md", "html", "csv", "json", "png", "svg")

WIDTH: Final = 100
"""The table in the terminal fits into so many columns."""
FILES: Final = ("report.html", "report.md", "tables/", "figures/", "trials.jsonl", "requests/", "logs/")
"""What a reader may want to look into, as far as it is there."""


def command(paths: Sequence[Path], console: Console, *, force: bool = False, dark: bool = False) -> None:
    """Writes the report of each run and prints one table of all of them; ``dark``: figures for that, too.

    Raises InputError for runs that are not comparable, unless ``force``.
    """
    runs = [load_run(path) for path in paths]
    kinds = {run.manifest.get("kind") == "microbench" for run in runs}
    if kinds == {True, False}:
        raise InputError(
            "a microbenchmark of transfers and a run of requests have no table in common",
            hint="report them one by one",
        )
    if True in kinds:
        for run in runs:
            write_report(run.path)
            if dark:
                write_transfer_plots(run, run.path / "figures", theme="dark")
        report.render_all(runs, console)
        return
    differing = check_comparable(runs, force=force)
    for run in runs:
        write_report(run.path)
        if dark:
            write_plots(run, run.path / "figures", theme="dark")
    render_terminal(runs, console, differing)


def write_report(path: Path | str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Writes what is derived from a run folder into it; returns the files written."""
    run = load_run(path)
    _require_own_folders(run.path)
    if run.manifest.get("kind") == "microbench":
        written = report.write(run, formats)
        return [*written, *_html(run, formats, transfer_sheets(run))]
    rows, costs = summary_table(run), router_costs(run)
    sheets = csv_sheets(run, rows, costs)
    figures = [kind for kind in formats if kind in ("png", "svg")]
    with said_clearly(run.path):
        written = write_plots(run, run.path / "figures", figures) if figures else []
        tables = run.path / "tables"
        tables.mkdir(exist_ok=True)
        if "csv" in formats:
            for name, lines in sheets.items():
                write_csv(tables / f"{name}.csv", lines)
                written.append(tables / f"{name}.csv")
        if "json" in formats:
            write_json(tables / "summary.json", summary_json(run, rows, costs))
            written.append(tables / "summary.json")
        if "md" in formats:
            text = report_markdown(run, rows, costs)
            write_bytes(run.path / "report.md", text.encode("utf-8", "replace"))
            written.append(run.path / "report.md")
    return [*written, *_html(run, formats, sheets, rows, costs)]


def _require_own_folders(path: Path) -> None:
    """Raises StoreError where what is derived would be written to another place."""
    for name in ("tables", "figures"):
        if (path / name).is_symlink():
            raise StoreError(
                f"{path / name} is a link, and nothing is written out of a run folder", hint="remove the link"
            )


def _html(
    run: Run,
    formats: Sequence[str],
    sheets: Sheets,
    rows: Sequence[Row] = (),
    costs: Sequence[RouterCost] = (),
) -> list[Path]:
    """Writes report.html if it is asked for; pictures that were just written as SVG are not drawn again."""
    if "html" not in formats:
        return []
    drawn = run.path / "figures" if "svg" in formats else None
    with said_clearly(run.path):
        return [write_html(run, sheets, rows, costs, drawn)]


def csv_sheets(run: Run, rows: Sequence[Row], costs: Sequence[RouterCost]) -> Sheets:
    """The rows of each file under tables/, by its name without the ending."""
    sheets: dict[str, Sequence[Mapping[str, Any]]] = {
        "summary": [row.flat() for row in rows],
        "trials": [trial_row(trial) for trial in run.all_trials],
        **{beside.name: beside.rows for beside in method_tables(run)},
    }
    if costs:
        sheets["router_cost"] = [row for cost in costs for row in cost.rows()]
    return sheets


def summary_json(run: Run, rows: Sequence[Row], costs: Sequence[RouterCost] = ()) -> dict[str, Any]:
    """The summary for programs; names and units as in the CSV."""
    slo = slo_of(run)
    return {
        "schema": SCHEMA_VERSION,
        "run": run.run_id,
        "scenario": scenario_of(run),
        "status": run.manifest.get("status"),
        "labels": run.labels,
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "attainment": slo.attainment},
        "rows": [row.flat() for row in rows],
        "methods": {beside.name: list(beside.rows) for beside in method_tables(run)},
        "router_cost": [row for cost in costs for row in cost.rows()],
        "comparisons": [vars(each) | {"text": each.text()} for each in compare(rows)],
        "conclusions": [statement.to_json() for statement in statements(run, rows)],
        "notes": [vars(note) for note in notes(run, rows)],
    }


def trial_row(trial: TrialRecord) -> dict[str, Any]:
    """One trial as one line of tables/trials.csv."""
    return {
        "trial_id": trial.trial_id,
        "connector": trial.cell.connector,
        "input_len": trial.cell.input_len,
        "output_len": trial.cell.output_len,
        "method": trial.method,
        "purpose": trial.purpose,
        "request_rate": trial.request_rate,
        "verdict": trial.verdict,
        "reason": trial.reason,
        "started_at": trial.started_at,
        "duration_s": trial.duration_s,
        "seed": trial.seed,
        **trial_values(trial),
        "transport": trial.engine.get("transport"),
        "kv_source": trial.engine.get("kv_source"),
        "load_mode": engine_word(trial, "load_mode"),
        "client_stamps": engine_word(trial, "client.stamps"),
        "findings": "; ".join(f"{finding.level}: {finding.gate}" for finding in trial.findings),
        "labels": ";".join(trial.labels),
    }


# --- the terminal ----------------------------------------------------------------------------------


def render_terminal(runs: Run | Sequence[Run], console: Console, differing: Sequence[str] = ()) -> None:
    """Prints the table of one or several runs, who is ahead, the notes, and where the files are.

    ``differing``: in what the runs are not comparable, if they were put together all the same.
    """
    runs = [runs] if isinstance(runs, Run) else list(runs)
    several = len(runs) > 1
    named = [(_short_name(place) if several else "", run) for place, run in enumerate(runs)]
    rows = [row for name, run in named for row in summary_table(run, name)]
    rows.sort(key=lambda row: (row.cell.input_len, row.cell.output_len))
    _line(console, "")
    for name, run in named:
        _line(console, f"{name}  {title(run)}" if several else title(run), style="bold")
        _line(console, caption(run), style="dim")
    shown = [row for row in rows if row.outcome != "skipped"]
    if shown:
        console.print(_table(shown, names={run.run_id: name for name, run in named} if several else {}))
    elif not any(method_tables(run) for _, run in named):
        _line(console, f"\nno cell was measured; {NO_DATA}")
    for name, run in named:
        for said in filter(None, (client_line(run), time_line(run))):
            _line(console, f"{name}  {said}" if several else said, style="dim")
    _line(console, "")
    if differing:
        _line(console, "NOT COMPARABLE, put together by --force: the runs differ in", style="bold red")
        _list(console, [Note(line) for line in differing])
    for name, run in named:
        for words, told in concluded(run).items():
            _section(console, f"{words.lower()}, {name}" if several else words.lower(), told)
    for name, run in named:
        for beside in (each for each in method_tables(run) if each.in_terminal):
            _line(console, f"{beside.title} in {name}" if several else beside.title, style="bold")
            console.print(_beside(beside))
    _section(console, "who is ahead (max request rate, from the intervals)", [Note(t) for t in ahead(rows)])
    for name, run in named:
        costs = [Note(cost.text()) for cost in router_costs(run)]
        _section(console, f"what the router adds in {name}" if several else "what the router adds", costs)
    for name, run in named:
        mine = [row for row in rows if row.run_id == run.run_id]
        _section(console, f"notes on {name}" if several else "notes", notes(run, mine))
    for _, run in named:
        there = [name for name in FILES if (run.path / name.rstrip("/")).exists()]
        _line(console, f"files: {run.path} ({', '.join(there)})")


def _beside(beside: MethodTable) -> Table:
    """A method's own table, as wide as a terminal."""
    columns = beside.brief or range(len(beside.header))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1))
    for place, column in enumerate(columns):
        table.add_column(Text(beside.header[column]), justify="left" if place == 0 else "right", max_width=34)
    for cells in beside.shown:
        table.add_row(*(Text(cells[column]) for column in columns))
    return table


def _short_name(place: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[place] if place < 26 else f"R{place + 1}"


def client_line(run: Run) -> str:
    """What the load generator says of itself: the worst of all trials; empty where nothing was told."""
    trials = [(trial_values(trial), engine_word(trial, "client.stamps")) for trial in run.trials]

    def worst(column: str) -> float | None:
        return max((known for values, _ in trials if (known := values[column]) is not None), default=None)

    lag = worst("client_send_lag_ms_p99")
    if lag is None:
        return ""
    late, stamps = worst("client_chunk_lag_ms_p99"), sorted({word for _, word in trials if word})
    workers = int(worst("client_workers") or 1)
    parts = [
        f"sends {number(lag)} ms late" + (f", reads {number(late)} ms" if late is not None else ""),
        *([f"{' and '.join(stamps)} stamps"] if stamps else []),
        f"{workers} process{'es' if workers > 1 else ''}",
    ]
    return f"client (P99, worst trial): {'; '.join(parts)}"


def title(run: Run) -> str:
    """What was measured, under which SLO, and the word *emulated* or *simulated* where it was."""
    mark = mark_of(run)
    marked = f"{mark.word.upper()} · " if mark is not None else ""
    return f"{marked}{scenario_of(run)} · {slo_of(run).text()}"


def _table(rows: Sequence[Row], names: Mapping[str, str]) -> Table:
    # Two blanks between columns, not three: so a hundred columns hold one figure more.
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0)
    )
    unit = shared_unit(rows)
    if names:
        table.add_column("run", no_wrap=True)
    table.add_column("connector", no_wrap=True, max_width=14)
    per = "req/s\n/GPU" if unit == "GPU" else "req/s\n/eng"
    for heading in ("input\nlen", "max rate\nreq/s [interval]", per, "met\n%", "TTFT ms\nP50 / P99"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for heading in ("TPOT ms\nP50 / P99", "KV MB\n/req", "KV ms\n/req"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    if any(row.limit for row in rows):
        table.add_column("limit", no_wrap=True)
        limits = [Text(LIMIT_SHORT.get(row.limit, MISSING)) for row in rows]
    else:
        limits = []
    last = None
    for place, row in enumerate(rows):
        lengths = (row.cell.input_len, row.cell.output_len)
        if last not in (None, lengths):
            table.add_section()
        last = lengths
        run = [names[row.run_id]] if names else []
        table.add_row(*run, *(Text(cell) for cell in _cells(row, unit)), *limits[place : place + 1])
    return table


def _cells(row: Row, unit: Unit) -> list[str]:
    values = row.values
    size = values["kv_bytes_per_request"]
    return [
        row.cell.connector,
        f"{row.cell.input_len}",
        row.answer.text(),
        number(row.rate_per(unit)),
        percent(values["slo_attainment"]),
        pair(values["ttft_ms_p50"], values["ttft_ms_p99"]),
        pair(values["tpot_ms_p50"], values["tpot_ms_p99"]),
        number(size / 1e6 if size is not None else None),
        number(values["kv_transfer_ms_per_request"]),
    ]


def pair(one: float | None, other: float | None) -> str:
    return MISSING if one is None and other is None else f"{number(one)} / {number(other)}"


def _section(console: Console, heading: str, items: Sequence[Note]) -> None:
    if items:
        _line(console, heading, style="bold")
        _list(console, items)


def _list(console: Console, items: Iterable[Note]) -> None:
    width = min(console.width, WIDTH)
    for note in items:
        _line(console, "  • " + "\n    ".join(_wrapped(note.text, width - 4)))
        if note.advice:
            _line(console, f"    → {note.advice}", style="cyan")


def _wrapped(text: str, width: int) -> Iterator[str]:
    """The lines of a text, none of them joined: an error may quote lines of a log."""
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        yield from textwrap.wrap(
            line,
            width,
            subsequent_indent=f"{indent}  " if indent else "",
            break_on_hyphens=False,
            break_long_words=False,
        )


def _line(console: Console, text: str, style: str = "") -> None:
    """Words of others (paths, errors) are printed as they are: no markup is read into them."""
    console.print(Text(text, style=style), soft_wrap=True)
