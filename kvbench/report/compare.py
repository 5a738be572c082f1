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
from kvbench.files import store_errors, write_bytes
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
from kvbench.report.tables.fault_rows import fixed_rate_comparison
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
    def wants_rows(self) -> bool:
        return bool(self.by or self.sort or self.group)

    def check(self) -> None:
        """Raise InputError for an unknown axis or format."""
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


def command(paths: Sequence[Path], options: CompareOptions, console: Console) -> int:
    """Print the comparison of the runs; return the exit code, ``EXIT_WORSE`` for an alarm.

    Raises InputError for runs that are not comparable, unless forced."""
    options.check()
    runs = [load_run(path) for path in paths]
    print_changed_files(runs, console if options.format == "terminal" else None)
    sweeps_only = options.ci or options.before or options.junit or options.comment
    if (fixed_rate := fixed_rate_comparison(runs)) is not None:
        if sweeps_only or options.wants_rows:
            raise InputError("runs at a fixed rate are compared as a whole: omit --ci, --before and the axes")
        _fixed_rate_page(fixed_rate, runs, options).write(options.format, console)
        return EXIT_OK
    micro = are_microbenchmarks(runs)
    if not micro and (compared := _before_after_page(runs, options)) is not None:
        page, alarm = compared
        if alarm is None or not options.ci or options.format != "terminal":
            page.write(options.format, console)
        else:
            console.file.write("".join(f"{visible(line)}\n" for line in alarm.lines()))
        return alarm.exit_code if alarm is not None and options.ci else EXIT_OK
    if sweeps_only:
        raise InputError(
            "these runs have no search, so there is no highest rate to compare",
            hint="give two sweeps, the one before first, or several with --before N",
        )
    if not micro:
        rows_page(compare_runs(runs, options), options).write(options.format, console)
    elif options.format == "terminal":
        print_transfers(runs, console)
    else:
        console.file.write(changes_as_text(runs, options.format))
    return EXIT_OK


@dataclass(frozen=True)
class ComparisonPage:
    """A comparison in every format. ``heads``: a line per run; ``differing``: why the runs are not
    comparable; ``conclusions``: also differing settings; ``about``: explanation of the tables; ``document``:
    its JSON."""

    heads: Sequence[str]
    differing: Sequence[str]
    conclusions: Sequence[Block]
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
            *self.conclusions,
            *([Block(f"\n{table.title}", table=table) for table in self.tables] or [none]),
            *([Block(notes=[Note(self.about, style="dim")], bullets=False)] if self.about else []),
            *(Block(f"\n{answer.title}", table=answer) for answer in self.answers),
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
        for block in self.conclusions:
            parts.append([f"{block.title.strip()}:", *(f"- {note.text}" for note in block.notes)])
        shown = WRITERS[format_]([*self.tables, *self.answers])
        if format_ == "latex":
            return "".join(f"% {' '.join(line.split())}\n" for part in parts for line in part) + shown
        parts += [[self.about]] if self.about else []
        return "\n\n".join(["\n".join(map(markdown_words, part)) for part in parts] + [shown])


def _settings(changes: Sequence[SettingChange]) -> Block:
    notes = [Note(change.text()) for change in changes] or [Note("nothing")]
    return Block("\nWhat was set otherwise", notes=notes)


def _answer_tables(sides: Sequence[tuple[str, Sequence[RunFolder]]]) -> list[Table]:
    """Return the results of checked answers side by side; empty without any."""
    found = answer_counts(sides)
    return [found] if found is not None else []


def _fixed_rate_page(table: Table, runs: Sequence[RunFolder], options: CompareOptions) -> ComparisonPage:
    """Return the page that compares two runs at a fixed rate."""
    settings = setting_changes(runs[:1], runs[1:])
    answers = _answer_tables([("before", runs[:1]), ("after", runs[1:])])
    document = {
        "runs": [run.run_id for run in runs],
        "settings": [setting._asdict() for setting in settings],
        "answers": answers[0].rows if answers else [],
        "rows": rows_of([table]),
    }
    heads = [f"{run.run_id} · {caption(run)}" for run in runs]
    differing = check_comparable(runs, force=options.force)
    return ComparisonPage(heads, differing, [_settings(settings)], [table], answers, document, table.words)


def _before_after_page(
    runs: Sequence[RunFolder], options: CompareOptions
) -> tuple[ComparisonPage, CiVerdict | None] | None:
    """Compare two sweeps, or repeats of both: differing settings, and the change of each highest rate. If
    requested, add the verdict for a pipeline and write its files. Raises InputError for runs that are not
    comparable, unless forced, and for an impossible number of repeats."""
    if options.wants_rows or not (len(runs) == 2 or options.before):
        return None
    if not 0 <= options.before < len(runs):
        raise InputError(
            f"--before {options.before} of {len(runs)} runs leaves none after",
            hint="give the runs before first, then those after",
        )
    count = options.before or 1
    sides = [("before", runs[:count]), ("after", runs[count:])]
    (_, before), (_, after) = sides
    if not all(any(run.cells and run.manifest.get("kind") != "bench" for run in side) for _, side in sides):
        return None
    differing = check_comparable(runs, force=options.force)
    cells = cell_changes(before, after)
    if not cells:
        return None
    settings, answers = setting_changes(before, after), _answer_tables(sides)
    document: dict[str, Any] = {word: [run.run_id for run in side] for word, side in sides} | {
        "settings": [setting._asdict() for setting in settings],
        "not_comparable": list(differing),
        "cells": [cell.flat() for cell in cells],
        "answers": [row for table in answers for row in table.rows],
    }
    alarm = None
    if options.ci or options.junit or options.comment:
        alarm = CiVerdict(cells, settings, options.worse_than, f"kvbench {scenario_of(after[0])}")
        for path, text in ((options.junit, alarm.junit), (options.comment, alarm.comment)):
            if path is not None:
                with store_errors(path):
                    write_bytes(path, text().encode())
        document |= {"alarm": bool(alarm.worse), "verdict": alarm.verdict(), "power": alarm.power()}
    table = replace(change_rows(cells), title=counts_text(cells))
    if options.format == "csv":
        table = replace(table, columns=[Column(key, key) for key in cells[0].flat()])
    heads = [f"{word}: {run.run_id} · {caption(run)}" for word, side in sides for run in side]
    page = ComparisonPage(heads, differing, [_settings(settings)], [table], answers, document, f"{WHAT}.")
    return page, alarm


def compare_runs(runs: Sequence[RunFolder], options: CompareOptions | None = None) -> Compared:
    """Return the requested comparison. Raises InputError if the runs are not comparable."""
    options = options or CompareOptions()
    options.check()
    return compared_runs(runs, options.by, force=options.force)


def rows_page(compared: Compared, options: CompareOptions) -> ComparisonPage:
    """Return rows side by side, as one table or one per level of ``group``, and conclusions by kind."""
    tables = load_tables(compared.rows, compared.by, options.sort, options.group, len(compared.runs) > 1)
    if options.format == "terminal":
        tables = [_brief(table) for table in tables]
    answers = _answer_tables([(name or run.run_id, [run]) for run, name in compared.named])
    heads = []
    for run, name in compared.named:
        mark = mark_of(run)
        marked = f"{mark.word.upper()}: " if mark is not None else ""
        heads.append(f"{name}: {marked}{caption(run)}" if name else f"{marked}{caption(run)}")
    conclusions = []
    for kind, words in KIND_WORDS.items():
        found = [statement for statement in compared.statements if statement.kind == kind]
        notes = [Note(finding.text, finding.advice, _STYLES.get(finding.level, "")) for finding in found]
        conclusions += [Block(words, notes=notes)] if notes else []
    document = {
        "runs": [{"name": name, "run": run.run_id} for run, name in compared.named],
        "by": compared.by,
        "not_comparable": list(compared.differing),
        "conclusions": [statement.to_json() for statement in compared.statements],
        "answers": [row for table in answers for row in table.rows],
        "rows": rows_of(tables),
    }
    return ComparisonPage(heads, compared.differing, conclusions, tables, answers, document)


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
