"""``kvbench watch``: a run folder as it grows, in the terminal or as a live page on this machine.

It only reads the folder, so it can be started, stopped and started again at any time, and several may watch.
It ends when the run does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvbench.errors import EXIT_FAILED, EXIT_OK
from kvbench.report.tables.numbers import MISSING, number, percent
from kvbench.report.watch.page import serving
from kvbench.report.watch.state import RunWatch, Seen, TrialLine

LOOK_S: Final = 0.5
"""How often the folder's files are looked at; they are read only if they have changed."""
LINGER_S: Final = 2.5
"""How long the live page stays after the run's end, so that an open one shows how it ended."""
LOG_LINES: Final = 12
BAR_WIDTH: Final = 30
_COLOURS: Final = {
    "met": "green",
    "missed": "red",
    "invalid": "yellow",
    "undecided": "cyan",
    "measured": "green",
}


def command(path: Path, console: Console, *, serve: bool = False, port: int = 0) -> int:
    """Watch until the run ends; returns 0 for a run that ended well, 1 for one that did not.

    Raises StoreError for a folder that is none, LaunchError if the page's port is taken.
    """
    watch = RunWatch(path)
    watch.look()
    if serve:
        with serving(watch, port) as url:
            console.print(f"live page of {path}: {url} (this machine only; Ctrl-C ends it)", markup=False)
            code = _follow(watch, console)
            time.sleep(LINGER_S)
            return code
    return _follow(watch, console)


def _follow(watch: RunWatch, console: Console) -> int:
    seen = watch.look()
    if console.is_terminal:
        with Live(_screen(seen), console=console, auto_refresh=False) as live:
            while seen.running:
                time.sleep(LOOK_S)
                seen = watch.look()
                live.update(_screen(seen), refresh=True)
            live.update(_screen(seen), refresh=True)
    else:
        printed = 0
        while True:
            for line in seen.log[printed:]:
                console.print(_log_line(line))
            printed = len(seen.log)
            if not seen.running:
                break
            time.sleep(LOOK_S)
            seen = watch.look()
    console.print(f"the run is {seen.status}{f': {seen.error}' if seen.error else ''}", markup=False)
    return EXIT_OK if seen.status == "complete" else EXIT_FAILED


# --- what is seen ----------------------------------------------------------------------------------


def _screen(seen: Seen) -> RenderableType:
    head = Text(seen.title, style="bold")
    bar = Table.grid(padding=(0, 1))
    total = max(1, seen.cells_planned)
    bar.add_row(
        Text(f"{seen.unit} {seen.cells_done}/{seen.cells_planned or '?'}"),
        ProgressBar(total=total, completed=min(seen.cells_done, total), width=BAR_WIDTH),
        Text(f"{len(seen.log)} measured, {seen.elapsed}{seen.left}", style="dim"),
    )
    parts: list[RenderableType] = [head, Text(seen.caption, style="dim"), bar]
    if seen.curve:
        parts.append(Panel(_curve(seen.curve), title=Text(f"curve of {seen.cell}"), title_align="left"))
    if seen.load:
        parts.append(_pairs("last trial", seen.load))
    if seen.nics:
        parts.append(_pairs("NICs, MB/s sent / received", seen.nics))
    log = Table.grid()
    for line in seen.log[-LOG_LINES:]:
        log.add_row(_log_line(line))
    parts.append(Panel(log, title="verdicts", title_align="left"))
    return Group(*parts)


def _curve(lines: Sequence[TrialLine]) -> RenderableType:
    """The trials of the cell that is being searched, by rate, with a bar for the share within the SLO."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("req/s", "within SLO %", "", "TTFT P50", "TTFT P99", "TPOT P50", "verdict"):
        table.add_column(
            Text(heading), justify="left" if heading in ("", "verdict") else "right", no_wrap=True
        )
    for line in sorted(lines, key=lambda line: line.request_rate):
        share = line.slo_attainment
        table.add_row(
            number(line.request_rate),
            percent(share),
            ProgressBar(total=1.0, completed=share or 0.0, width=20) if share is not None else MISSING,
            number(line.ttft_ms_p50),
            number(line.ttft_ms_p99),
            number(line.tpot_ms_p50),
            Text(line.verdict, style=_COLOURS.get(line.verdict, "")),
        )
    return table


def _pairs(title: str, pairs: Sequence[tuple[str, str]]) -> RenderableType:
    """Names with their values in one line: the queues, or the NICs."""
    text = Text(f"{title}: ", style="dim")
    for place, (name, value) in enumerate(pairs):
        text.append(" · " if place else "", style="dim")
        text.append(f"{name} ", style="dim")
        text.append(value)
    return text


def _log_line(line: TrialLine) -> Text:
    return Text.assemble(
        (f"{line.at:>7}  ", "dim"),
        f"{line.connector:<11} {line.where:>10} {line.speed:>12}  ",
        f"{percent(line.slo_attainment):>5} %  " if line.slo_attainment is not None else "         ",
        (f"{line.verdict:<9}", _COLOURS.get(line.verdict, "")),
        (f" {line.reason}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
