"""What is derived from a microbenchmark's run folder: terminal table, report.md, tables/, figures/."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from kvbench.core.transfers.model import fit_all, models_json
from kvbench.core.transfers.records import TransferRecord, pairs_of
from kvbench.files import said_clearly, write_bytes, write_csv, write_json
from kvbench.report.findings.findings import by_kind, statements
from kvbench.report.findings.transfers import answers, changes_text, models_text
from kvbench.report.plots.transfer import write_transfer_plots
from kvbench.report.tables.result import MISSING, number
from kvbench.report.tables.transfers import HEADER, LEGEND, Line, Tabled, flat_row, tabled
from kvbench.report.transfers import compare
from kvbench.report.transfers.host_pairs import CAPTION, PairMatrix, pair_matrices
from kvbench.results.provenance import caption, differences
from kvbench.results.run import Run

MODEL_FILE: Final = "transfer_model.json"
WIDTH: Final = 100
_BUSY: Final = "machine_busy"
_PICTURES: Final = {
    "bandwidth": "Bandwidth by block size",
    "nic_scaling": "Bandwidth by number of NICs",
    "call_time": "Time of one transfer",
}
_SUPERSCRIPT: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_COLOURS: Final = {"FAILED": "red", "WRONG": "bold red"}


def render_all(runs: Sequence[Run], console: Console) -> None:
    """Prints the report of each run; of several, each beside the first one."""
    for place, run in enumerate(runs):
        render(run, console, runs[0] if place else None)


# --- files -----------------------------------------------------------------------------------------


def write(run: Run, formats: Sequence[str] = ("md", "csv", "json", "png", "svg")) -> list[Path]:
    """Writes what is derived into the run folder; returns the files written."""
    records = run.transfer_records()
    # The pictures are of one pair of hosts; of several the matrix tells.
    figures = [kind for kind in formats if kind in ("png", "svg")] if len(pairs_of(records)) < 2 else []
    tables = run.path / "tables"
    written: list[Path] = []
    with said_clearly(run.path):
        tables.mkdir(exist_ok=True)
        written += write_transfer_plots(run, run.path / "figures", figures) if figures else []
        models = fit_all(records)
        if "csv" in formats:
            write_csv(tables / "transfers.csv", [flat_row(record, records) for record in records])
            write_csv(tables / "transfer_model.csv", [model.to_json() for model in models])
            written += [tables / "transfers.csv", tables / "transfer_model.csv"]
        if "json" in formats:
            write_json(tables / "transfers.json", _summary(run, records))
            write_json(tables / MODEL_FILE, models_json(models, run.run_id))
            written += [tables / "transfers.json", tables / MODEL_FILE]
        written += compare.write(run, formats)
        if "md" in formats:
            write_bytes(run.path / "report.md", markdown(run, records).encode("utf-8", "replace"))
            written.append(run.path / "report.md")
    return written


def _summary(run: Run, records: Sequence[TransferRecord]) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "status": run.manifest.get("status"),
        "rows": [flat_row(record, records) for record in records],
        "answers": answers(records),
        "left_out": _left_out(run),
    }


def _left_out(run: Run) -> list[dict[str, Any]]:
    """What the matrix dropped because it makes no sense; what is absent has a row of its own."""
    told = run.plan.get("left_out")
    return [item for item in told if not item.get("absent")] if isinstance(told, list) else []


def _left_lines(run: Run) -> list[str]:
    return [f"{item.get('what')}: {item.get('reason')}" for item in _left_out(run)]


def markdown(run: Run, records: Sequence[TransferRecord]) -> str:
    """The report as Markdown with GitHub's tables."""
    table = tabled(records)
    labs = sorted({record.lab for record in records if record.lab})
    mark = f" (lab: {', '.join(labs)})" if labs else ""
    parts = [
        f"# KV transfer microbenchmark{mark}",
        caption(run),
        f"Status of the run: {run.manifest.get('status')}.",
    ]
    parts += [_bullets(run.plan.get("words") or []), "## Findings"]
    for words, found in by_kind(statements(run)).items():
        parts.append(f"### {words}\n\n{_bullets(each.text for each in found)}")
    for name, title in _PICTURES.items():
        if (run.path / "figures" / f"{name}.png").is_file():
            parts.append(f"## {title}\n\n![{title}](figures/{name}.png)")
    matrices = pair_matrices(records)
    if matrices:
        parts += ["## From host to host", f"{CAPTION}."]
    for matrix in matrices:
        parts += [f"**{_escaped(matrix.title)}**", _markdown_matrix(matrix)]
    parts.append("## Every case")
    for group in table.groups:
        parts += [f"**{_escaped(group.title)}**", _markdown_table(group.lines)]
    parts.append(f"{LEGEND}.")
    parts.append(_section("Notes", [f"- {note}" for note in table.footnotes]))
    parts.append(_section("Failed", [f"- {error}" for error in table.errors]))
    parts.append(_section("Not run", [f"- {line}" for line in (*table.skipped, *_left_lines(run))]))
    parts.append(_section("Transfer models", [f"- {line}" for line in models_text(records)]))
    parts.append(_section("Warnings on the folder", [f"- {warning}" for warning in run.warnings]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(heading: str, lines: Sequence[str]) -> str:
    return f"## {heading}\n\n" + "\n".join(_escaped(line) for line in lines) if lines else ""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _markdown_table(lines: Sequence[Line]) -> str:
    header = [*HEADER, "notes"]
    rows = [header, ["---", "---", *["--:"] * (len(header) - 4), "---", "---"]]
    for line in lines:
        rows.append([*map(_escaped, line.cells), ", ".join(map(str, line.notes))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _markdown_matrix(matrix: PairMatrix) -> str:
    rows = [matrix.header, ["---", *["--:"] * len(matrix.hosts)], *matrix.lines]
    return "\n".join(f"| {' | '.join(map(_escaped, row))} |" for row in rows)


def _escaped(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


# --- the terminal ----------------------------------------------------------------------------------


def render(run: Run, console: Console, before: Run | None = None) -> None:
    """Prints the table of a run, what it answers, and how it differs from an earlier one."""
    records = run.transfer_records()
    table = tabled(records)
    _say(console, "")
    labs = sorted({record.lab for record in records if record.lab})
    _say(console, f"KV TRANSFERS{' · LAB ' + ', '.join(labs) if labs else ''}", "bold")
    _say(console, caption(run), "dim")
    _list(console, run.plan.get("words") or [])
    if table.groups:
        _print_table(table, console)
    else:
        _say(console, "no case was measured")
    _print_matrices(pair_matrices(records), console)
    for heading, lines in _sections(run, records, table):
        if lines:
            _say(console, heading, "bold")
            _list(console, lines)
    if before is not None:
        _compared(before, run, records, console)
    _say(console, f"files: {run.path} (report.md, tables/, figures/, transfers.parquet, logs/)")


def _sections(
    run: Run, records: Sequence[TransferRecord], table: Tabled
) -> Iterator[tuple[str, Sequence[str]]]:
    yield (
        "notes",
        table.footnotes,
    )
    yield "failed", table.errors
    yield "not run", [*table.skipped, *_left_lines(run)]
    yield "transfer models (time of one transfer, fitted)", models_text(records)
    yield "answers", answers(records)
    yield "the folder", run.warnings


def _print_table(table: Tabled, console: Console) -> None:
    lines = [line for group in table.groups for line in group.lines]
    widths = [
        max(len(row[place]) for row in (HEADER, *(line.cells for line in lines)))
        for place in range(len(HEADER))
    ]
    _say(console, "\n" + _aligned(HEADER, widths), "bold")
    for group in table.groups:
        _say(console, group.title, "cyan")
        for line in group.lines:
            marks = " ".join(str(note).translate(_SUPERSCRIPT) for note in line.notes)
            text = Text(_aligned(line.cells, widths), style=_COLOURS.get(line.cells[-1], ""))
            text.append(f" {marks}" if marks else "", style="yellow")
            console.print(text, soft_wrap=True)
    _list(console, [LEGEND], bullet="")


def _print_matrices(matrices: Sequence[PairMatrix], console: Console) -> None:
    for matrix in matrices:
        rows = [matrix.header, *matrix.lines]
        widths = [max(len(row[place]) for row in rows) for place in range(len(matrix.header))]
        _say(console, f"from host to host · {matrix.title}", "bold")
        for row in rows:
            first, *others = row
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            _say(console, "  " + "  ".join([first.ljust(widths[0]), *cells]))
    if matrices:
        _list(console, [CAPTION], bullet="")


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = (0, 1, len(cells) - 1)
    parts = [
        cell.ljust(width) if place in left else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  " + "  ".join(parts).rstrip()


def _compared(before: Run, run: Run, records: Sequence[TransferRecord], console: Console) -> None:
    differing = [line for line in differences([before, run]) if not line.startswith("seed")]
    if differing:
        _say(console, f"the two runs differ in {'; '.join(differing)}", "red")
    _say(console, f"beside {before.run_id} (GB/s: then → now, ratio with its 99 % interval)", "bold")
    earlier = before.transfer_records()
    if any(warning.kind == _BUSY for record in (*earlier, *records) for warning in record.warnings):
        _say(console, "  the machine was busy in one of the runs, so a change may be other work's", "yellow")
    lines = []
    for change, text in changes_text(earlier, records):
        rates = f"{_rate(change.before_gb_per_s)} → {_rate(change.after_gb_per_s)}"
        lines.append(f"{text} ({rates})")
    _list(console, lines)


def _rate(value: float | None) -> str:
    return MISSING if value is None else number(value)


def _list(console: Console, items: Iterable[str], bullet: str = "• ") -> None:
    width = min(console.width, WIDTH)
    for item in items:
        lines = textwrap.wrap(item, width - 4, break_on_hyphens=False, break_long_words=False)
        _say(console, f"  {bullet}" + ("\n  " + " " * len(bullet)).join(lines))


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
