"""``kvbench compare``: runs before and after, or rows side by side, in the requested format."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvbench.core.findings.findings import KIND_WORDS
from kvbench.core.foreign_text import markdown_words, visible
from kvbench.errors import EXIT_OK, InputError
from kvbench.files import said_clearly, write_bytes
from kvbench.report.before_after import (
    WHAT,
    SettingChange,
    cell_changes,
    change_rows,
    counts_text,
    setting_changes,
)
from kvbench.report.ci_verdict import CiVerdict
from kvbench.report.findings.load_rows import AXES
from kvbench.report.findings.notes import answer_counts
from kvbench.report.report import print_transfers
from kvbench.report.side_by_side import (
    Compared,
    are_microbenchmarks,
    changes_as_text,
    compared_runs,
    load_tables,
)
from kvbench.report.tables.fault_rows import held_comparison
from kvbench.report.tables.table import FORMATS, WRITERS, Column, Table, json_text, rows_of
from kvbench.report.terminal import print_changed_files, print_sections
from kvbench.report.value import Block, Note, ReportSection
from kvbench.results.provenance import caption, check_comparable, mark_of, scenario_of
from kvbench.results.run import RunFolder, load_run

NOT_COMPARABLE: Final = "NOT COMPARABLE, combined by --force"
_STYLES: Final[Mapping[str, str]] = {"invalid": "red", "warning": "yellow"}


@dataclass(frozen=True)
class CompareOptions:
    """Display options. ``by``: compared axis; ``sort`` and ``group``: further axes.

    ``before``: number of runs that repeat the one before; 0 means the first of two. ``ci``: only the verdict
    for a pipeline, with an alarm from a loss of ``worse_than`` (a share); ``junit``, ``comment``: files for
    it."""

    by: str = ""
    sort: tuple[str, ...] = ()
    group: str = ""
    format: str = "terminal"
    force: bool = False
    before: int = 0
    ci: bool = False
    worse_than: float = 0.05
    junit: Path | None = None
    comment: Path | None = None

    @property
    def rows_asked(self) -> bool:
        """Return whether rows side by side are requested."""
        return bool(self.by or self.sort or self.group)

    def check(self) -> None:
        """Raises InputError for an unknown axis or format."""
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


def command(paths: Sequence[Path], asked: CompareOptions, console: Console) -> int:
    """Print the comparison of the runs; return the exit code, ``EXIT_WORSE`` for an alarm.

    Raises InputError for runs that are not comparable, unless forced."""
    asked.check()
    runs = [load_run(path) for path in paths]
    print_changed_files(runs, console if asked.format == "terminal" else None)
    for_sweeps = asked.ci or asked.before or asked.junit or asked.comment
    if (held := held_comparison(runs)) is not None:
        if for_sweeps or asked.rows_asked:
            raise InputError("runs at a fixed rate are compared as a whole: omit --ci, --before and the axes")
        _held(held, runs, asked).write(asked.format, console)
        return EXIT_OK
    micro = are_microbenchmarks(runs)
    if not micro and (found := _before_after(runs, asked)) is not None:
        page, alarm = found
        if alarm is None or not asked.ci or asked.format != "terminal":
            page.write(asked.format, console)
        else:
            console.file.write("".join(f"{visible(line)}\n" for line in alarm.lines()))
        return alarm.exit_code if alarm is not None and asked.ci else EXIT_OK
    if for_sweeps:
        raise InputError(
            "these runs have no search, so there is no highest rate to compare",
            hint="give two sweeps, the one before first, or several with --before N",
        )
    if not micro:
        rows_page(compare_runs(runs, asked), asked).write(asked.format, console)
    elif asked.format == "terminal":
        print_transfers(runs, console)
    else:
        console.file.write(changes_as_text(runs, asked.format))
    return EXIT_OK


@dataclass(frozen=True)
class ComparisonPage:
    """A comparison in every format. ``heads``: a line per run; ``differing``: why the runs are not
    comparable; ``said``: conclusions, or differing settings; ``about``: explains the tables; ``document``:
    its JSON."""

    heads: Sequence[str]
    differing: Sequence[str]
    said: Sequence[Block]
    tables: Sequence[Table]
    answers: Sequence[Table]
    document: Mapping[str, Any]
    about: str = ""

    def write(self, format_: str, console: Console) -> None:
        if format_ != "terminal":
            # Not through the console: it would wrap lines that programs read.
            console.file.write(self.text(format_))
            return
        none = Block(words="\nno load was measured whose figures could be compared")
        blocks = [
            *(Block(words=line, style="dim") for line in self.heads),
            *(Block(words=line, style="bold red") for line in self._not_comparable),
            *self.said,
            *([Block(f"\n{each.title}", table=each) for each in self.tables] or [none]),
            *([Block(notes=[Note(self.about, style="dim")], bullets=False)] if self.about else []),
            *(Block(f"\n{each.title}", table=each) for each in self.answers),
        ]
        print_sections([ReportSection("compared", "", blocks)], console)

    @property
    def _not_comparable(self) -> list[str]:
        return [f"{NOT_COMPARABLE}: {line}" for line in self.differing]

    def text(self, format_: str) -> str:
        """Return the text of a file format. CSV has only the rows; others have the conclusions first."""
        if format_ == "csv":
            return WRITERS["csv"](self.tables)
        if format_ == "json":
            return json_text(self.document)
        parts = [[line] for line in (*self.heads, *self._not_comparable)]
        for block in self.said:
            parts.append([f"{block.title.strip()}:", *(f"- {note.text}" for note in block.notes)])
        shown = WRITERS[format_]([*self.tables, *self.answers])
        if format_ == "latex":
            return "".join(f"% {' '.join(line.split())}\n" for part in parts for line in part) + shown
        parts += [[self.about]] if self.about else []
        return "\n\n".join(["\n".join(map(markdown_words, part)) for part in parts] + [shown])


def _settings(changes: Sequence[SettingChange]) -> Block:
    notes = [Note(each.text()) for each in changes] or [Note("nothing")]
    return Block("\nWhat was set otherwise", notes=notes)


def _answers(sides: Sequence[tuple[str, Sequence[RunFolder]]]) -> list[Table]:
    """Return the results of checked answers side by side; empty without any."""
    found = answer_counts(sides)
    return [found] if found is not None else []


def _held(table: Table, runs: Sequence[RunFolder], asked: CompareOptions) -> ComparisonPage:
    """Return two runs at a fixed rate."""
    settings = setting_changes(runs[:1], runs[1:])
    answers = _answers([("before", runs[:1]), ("after", runs[1:])])
    document = {
        "runs": [run.run_id for run in runs],
        "settings": [each._asdict() for each in settings],
        "answers": answers[0].rows if answers else [],
        "rows": rows_of([table]),
    }
    heads = [f"{run.run_id} · {caption(run)}" for run in runs]
    differing = check_comparable(runs, force=asked.force)
    return ComparisonPage(heads, differing, [_settings(settings)], [table], answers, document, table.words)


def _before_after(
    runs: Sequence[RunFolder], asked: CompareOptions
) -> tuple[ComparisonPage, CiVerdict | None] | None:
    """Compare two sweeps, or repeats of both: differing settings, and the change of each highest rate. If
    requested, add the verdict for a pipeline and write its files. Raises InputError for runs that are not
    comparable, unless forced, and for an impossible number of repeats."""
    if asked.rows_asked or not (len(runs) == 2 or asked.before):
        return None
    if not 0 <= asked.before < len(runs):
        raise InputError(
            f"--before {asked.before} of {len(runs)} runs leaves none after",
            hint="give the runs before first, then those after",
        )
    count = asked.before or 1
    sides = [("before", runs[:count]), ("after", runs[count:])]
    (_, before), (_, after) = sides
    if not all(any(run.cells and run.manifest.get("kind") != "bench" for run in side) for _, side in sides):
        return None
    differing = check_comparable(runs, force=asked.force)
    cells = cell_changes(before, after)
    if not cells:
        return None
    settings, answers = setting_changes(before, after), _answers(sides)
    document: dict[str, Any] = {word: [run.run_id for run in side] for word, side in sides} | {
        "settings": [each._asdict() for each in settings],
        "not_comparable": list(differing),
        "cells": [each.flat() for each in cells],
        "answers": [row for table in answers for row in table.rows],
    }
    alarm = None
    if asked.ci or asked.junit or asked.comment:
        alarm = CiVerdict(cells, settings, asked.worse_than, f"kvbench {scenario_of(after[0])}")
        for path, text in ((asked.junit, alarm.junit), (asked.comment, alarm.comment)):
            if path is not None:
                with said_clearly(path):
                    write_bytes(path, text().encode())
        document |= {"alarm": bool(alarm.worse), "verdict": alarm.verdict(), "power": alarm.power()}
    table = replace(change_rows(cells), title=counts_text(cells))
    if asked.format == "csv":
        table = replace(table, columns=[Column(key, key) for key in cells[0].flat()])
    heads = [f"{word}: {run.run_id} · {caption(run)}" for word, side in sides for run in side]
    page = ComparisonPage(heads, differing, [_settings(settings)], [table], answers, document, f"{WHAT}.")
    return page, alarm


def compare_runs(runs: Sequence[RunFolder], asked: CompareOptions | None = None) -> Compared:
    """Return the requested comparison. Raises InputError if the runs are not comparable."""
    asked = asked or CompareOptions()
    asked.check()
    return compared_runs(runs, asked.by, force=asked.force)


def rows_page(compared: Compared, asked: CompareOptions) -> ComparisonPage:
    """Return rows side by side, as one table or one per level of ``group``, and conclusions by kind."""
    tables = load_tables(compared.rows, compared.by, asked.sort, asked.group, len(compared.runs) > 1)
    if asked.format == "terminal":
        tables = [_brief(table) for table in tables]
    answers = _answers([(name or run.run_id, [run]) for run, name in compared.named])
    heads = []
    for run, name in compared.named:
        mark = mark_of(run)
        marked = f"{mark.word.upper()}: " if mark is not None else ""
        heads.append(f"{name}: {marked}{caption(run)}" if name else f"{marked}{caption(run)}")
    said = []
    for kind, words in KIND_WORDS.items():
        found = [each for each in compared.statements if each.kind == kind]
        notes = [Note(each.text, each.advice, _STYLES.get(each.level, "")) for each in found]
        said += [Block(words, notes=notes)] if notes else []
    document = {
        "runs": [{"name": name, "run": run.run_id} for run, name in compared.named],
        "by": compared.by,
        "not_comparable": list(compared.differing),
        "conclusions": [statement.to_json() for statement in compared.statements],
        "answers": [row for table in answers for row in table.rows],
        "rows": rows_of(tables),
    }
    return ComparisonPage(heads, compared.differing, said, tables, answers, document)


def _brief(table: Table) -> Table:
    """Return the columns that have a value, under narrow headings, for a terminal."""
    columns = [
        replace(
            column,
            title="\n".join(textwrap.wrap(column.title, 10, break_long_words=False)),
            brief=column.brief and any(row.get(column.key) not in (None, "") for row in table.rows),
        )
        for column in table.columns
    ]
    return replace(table, columns=columns)
