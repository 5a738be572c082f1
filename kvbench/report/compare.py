"""``kvbench compare``: rows of one or several runs side by side, the conclusions first, in the format asked
for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvbench.core.findings.findings import KIND_WORDS
from kvbench.errors import InputError
from kvbench.report.compared import load_tables
from kvbench.report.findings.load_rows import AXES
from kvbench.report.report import print_transfers
from kvbench.report.side_by_side import Compared, are_microbenchmarks, changes_as_text, compared_runs
from kvbench.report.tables.table import FORMATS, WRITERS, Table, as_json
from kvbench.report.terminal import print_sections
from kvbench.report.value import Block, Note, ReportSection
from kvbench.results.provenance import caption, mark_of
from kvbench.results.run import RunFolder, load_run

NOT_COMPARABLE: Final = "NOT COMPARABLE, put together by --force"
_STYLES: Final[Mapping[str, str]] = {"invalid": "red", "warning": "yellow"}


@dataclass(frozen=True)
class CompareOptions:
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


def command(paths: Sequence[Path], asked: CompareOptions, console: Console) -> None:
    """Prints the comparison of the runs. Raises InputError where they are not comparable, unless forced."""
    asked.check()
    runs = [load_run(path) for path in paths]
    micro = are_microbenchmarks(runs)
    if micro and asked.format == "terminal":
        print_transfers(runs, console)
    elif micro:
        console.file.write(changes_as_text(runs, asked.format))
    elif asked.format == "terminal":
        _print(compare_runs(runs, asked), asked, console)
    else:
        # Not through the console: it would wrap lines that programs read.
        console.file.write(as_text(compare_runs(runs, asked), asked))


def compare_runs(runs: Sequence[RunFolder], asked: CompareOptions | None = None) -> Compared:
    """The comparison that is asked for. Raises InputError where the runs are not comparable."""
    asked = asked or CompareOptions()
    asked.check()
    return compared_runs(runs, asked.by, force=asked.force)


# --- as text ---------------------------------------------------------------------------------------


def tables(compared: Compared, asked: CompareOptions) -> list[Table]:
    """The rows as one table, or one for each level of ``group``."""
    return load_tables(compared.rows, compared.by, asked.sort, asked.group, len(compared.runs) > 1)


def as_text(compared: Compared, asked: CompareOptions) -> str:
    """The comparison in a format for files. CSV has the rows alone; the others the conclusions first."""
    found = tables(compared, asked)
    if asked.format == "csv":
        return WRITERS["csv"](found)
    if asked.format == "json":
        more: dict[str, Any] = {
            "runs": [{"name": name, "run": run.run_id} for run, name in compared.named],
            "by": compared.by,
            "not_comparable": list(compared.differing),
            "conclusions": [statement.to_json() for statement in compared.statements],
        }
        return as_json(found, more)
    said = [*_captions(compared), *(f"{NOT_COMPARABLE}: {line}" for line in compared.differing)]
    lines = [f"- {statement.text}" for statement in compared.statements]
    if asked.format == "latex":
        return "".join(f"% {' '.join(line.split())}\n" for line in [*said, *lines]) + WRITERS["latex"](found)
    return "\n".join([*said, "", *lines, "", WRITERS["md"](found)])


def _captions(compared: Compared) -> Iterable[str]:
    for run, name in compared.named:
        mark = mark_of(run)
        marked = f"{mark.word.upper()}: " if mark is not None else ""
        yield f"{name}: {marked}{caption(run)}" if name else f"{marked}{caption(run)}"


# --- the terminal ----------------------------------------------------------------------------------


def _print(compared: Compared, asked: CompareOptions, console: Console) -> None:
    """Prints the conclusions under the headings of their kinds, then the rows."""
    heads = [Block(words=line, style="dim") for line in _captions(compared)]
    heads += [Block(words=f"{NOT_COMPARABLE}: {line}", style="bold red") for line in compared.differing]
    conclusions = []
    for kind, words in KIND_WORDS.items():
        mine = [each for each in compared.statements if each.kind == kind]
        notes = [Note(each.text, each.advice, _STYLES.get(each.level, "")) for each in mine]
        conclusions += [Block(words, notes=notes)] if notes else []
    shown = [Block(f"\n{table.title}", table=_brief(table)) for table in tables(compared, asked)]
    none = Block(words="\nno load was measured whose figures could be compared")
    print_sections([ReportSection("compared", "", [*heads, *conclusions, *(shown or [none])])], console)


def _brief(table: Table) -> Table:
    """For a terminal: only columns that have any value, under narrow headings."""
    columns = [
        replace(
            column,
            title="\n".join(textwrap.wrap(column.title, 10, break_long_words=False)),
            brief=column.brief and any(row.get(column.key) not in (None, "") for row in table.rows),
        )
        for column in table.columns
    ]
    return replace(table, columns=columns)
