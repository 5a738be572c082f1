"""``kvbench compare``: runs before and after, or rows side by side, in the requested format."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
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
    CellChange,
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
from kvbench.report.tables.table import FORMATS, WRITERS, Column, Table, as_json, json_text
from kvbench.report.terminal import print_changed_files, print_sections
from kvbench.report.value import Block, Note, ReportSection
from kvbench.results.provenance import caption, check_comparable, mark_of, scenario_of
from kvbench.results.run import RunFolder, load_run

NOT_COMPARABLE: Final = "NOT COMPARABLE, put together by --force"
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


def command(paths: Sequence[Path], asked: CompareOptions, console: Console) -> int:
    """Print the comparison of the runs; return the exit code, ``EXIT_WORSE`` for an alarm.

    Raises InputError for runs that are not comparable, unless forced."""
    asked.check()
    runs = [load_run(path) for path in paths]
    print_changed_files(runs, console if asked.format == "terminal" else None)
    if (held := held_comparison(runs)) is not None:
        return _write_held(held, runs, asked, console)
    micro = are_microbenchmarks(runs)
    if not micro and (found := before_after(runs, asked)) is not None:
        return found.write(asked, console)
    if asked.ci or asked.before or asked.junit or asked.comment:
        raise InputError(
            "nothing was searched in these runs, so that no highest rate can have changed",
            hint="give two sweeps, the one before first, or several with --before N",
        )
    if micro and asked.format == "terminal":
        print_transfers(runs, console)
    elif micro:
        console.file.write(changes_as_text(runs, asked.format))
    elif asked.format == "terminal":
        _print(compare_runs(runs, asked), asked, console)
    else:
        # Not through the console: it would wrap lines that programs read.
        console.file.write(as_text(compare_runs(runs, asked), asked))
    return EXIT_OK


def _write_held(table: Table, runs: Sequence[RunFolder], asked: CompareOptions, console: Console) -> int:
    """Write two runs at a fixed rate in the requested format. Raises InputError for missing figures."""
    if asked.ci or asked.before or asked.junit or asked.comment or asked.rows_asked:
        raise InputError("runs at a held rate are compared as a whole: leave --ci, --before and the axes out")
    differing = check_comparable(runs, force=asked.force)
    settings = setting_changes(runs[:1], runs[1:])
    answers = _answers([("before", runs[:1]), ("after", runs[1:])])
    if asked.format != "terminal":
        more: dict[str, Any] = {
            "runs": [run.run_id for run in runs],
            "settings": [each._asdict() for each in settings],
        }
        more |= {"answers": answers[0].rows if answers else []}
        shown = [table] if asked.format == "csv" else [table, *answers]
        text = as_json([table], more) if asked.format == "json" else WRITERS[asked.format](shown)
        console.file.write(text)
        return EXIT_OK
    blocks = [
        *(Block(words=f"{run.run_id} · {caption(run)}", style="dim") for run in runs),
        *(Block(words=f"{NOT_COMPARABLE}: {line}", style="bold red") for line in differing),
        Block(
            "\nWhat was set otherwise", notes=[Note(each.text()) for each in settings] or [Note("nothing")]
        ),
        Block(f"\n{table.title}", table=table),
        *([Block(notes=[Note(table.words, style="dim")], bullets=False)] if table.words else []),
        *_blocks(answers),
    ]
    print_sections([ReportSection("held", "", blocks)], console)
    return EXIT_OK


def _answers(sides: Sequence[tuple[str, Sequence[RunFolder]]]) -> list[Table]:
    """Return the results of checked answers side by side; empty without any."""
    found = answer_counts(sides)
    return [found] if found is not None else []


def _blocks(tables_: Sequence[Table]) -> list[Block]:
    return [Block(f"\n{each.title}", table=each) for each in tables_]


def compare_runs(runs: Sequence[RunFolder], asked: CompareOptions | None = None) -> Compared:
    """Return the requested comparison. Raises InputError if the runs are not comparable."""
    asked = asked or CompareOptions()
    asked.check()
    return compared_runs(runs, asked.by, force=asked.force)


# --- before and after ------------------------------------------------------------------------------


@dataclass(frozen=True)
class BeforeAfter:
    """Two runs, or repeats of both: what was set otherwise, and what became of each highest rate."""

    before: Sequence[RunFolder]
    after: Sequence[RunFolder]
    settings: Sequence[SettingChange]
    cells: Sequence[CellChange]
    differing: Sequence[str] = ()

    def write(self, asked: CompareOptions, console: Console) -> int:
        """Print the comparison or only the verdict, and write the requested files. Returns the exit code."""
        alarm = self.alarm(asked)
        if alarm is not None:
            for path, text in ((asked.junit, alarm.junit), (asked.comment, alarm.comment)):
                if path is not None:
                    with said_clearly(path):
                        write_bytes(path, text().encode())
        if asked.format != "terminal":
            console.file.write(self.as_text(asked.format, alarm))
        elif alarm is not None and asked.ci:
            console.file.write("".join(f"{visible(line)}\n" for line in alarm.lines()))
        else:
            print_sections([self.section()], console)
        return alarm.exit_code if alarm is not None and asked.ci else EXIT_OK

    def alarm(self, asked: CompareOptions) -> CiVerdict | None:
        """Return the verdict for a pipeline, if requested."""
        if not (asked.ci or asked.junit or asked.comment):
            return None
        return CiVerdict(self.cells, self.settings, asked.worse_than, f"kvbench {scenario_of(self.after[0])}")

    @property
    def heads(self) -> list[str]:
        sides = (("before", self.before), ("after", self.after))
        return [f"{word}: {run.run_id} · {caption(run)}" for word, side in sides for run in side]

    @property
    def answers(self) -> list[Table]:
        return _answers([("before", self.before), ("after", self.after)])

    def section(self) -> ReportSection:
        differing = [Block(words=f"{NOT_COMPARABLE}: {line}", style="bold red") for line in self.differing]
        changes = [Note(each.text()) for each in self.settings] or [Note("nothing")]
        blocks = [
            *(Block(words=line, style="dim") for line in self.heads),
            *differing,
            Block("\nWhat was set otherwise", notes=changes),
            Block(f"\n{counts_text(self.cells)}", table=change_rows(self.cells)),
            Block(notes=[Note(f"{WHAT}.", style="dim")], bullets=False),
            *_blocks(self.answers),
        ]
        return ReportSection("before_after", "", blocks)

    def as_text(self, format_: str, alarm: CiVerdict | None = None) -> str:
        """Return the text of a file format; CSV has the cells alone."""
        table = change_rows(self.cells)
        if format_ == "csv":
            return WRITERS["csv"](
                [replace(table, columns=[Column(key, key) for key in self.cells[0].flat()])]
            )
        if format_ == "json":
            more: dict[str, Any] = {
                "before": [run.run_id for run in self.before],
                "after": [run.run_id for run in self.after],
                "settings": [each._asdict() for each in self.settings],
                "not_comparable": list(self.differing),
                "cells": [each.flat() for each in self.cells],
                "answers": [row for table in self.answers for row in table.rows],
            }
            if alarm is not None:
                more |= {"alarm": bool(alarm.worse), "verdict": alarm.verdict(), "power": alarm.power()}
            return json_text(more)
        said = [*self.heads, *(f"{NOT_COMPARABLE}: {line}" for line in self.differing)]
        lines = ["What was set otherwise:", *(f"- {each.text()}" for each in self.settings)]
        if format_ == "latex":
            commented = "".join(f"% {' '.join(line.split())}\n" for line in [*said, *lines])
            return commented + WRITERS["latex"]([table, *self.answers])
        head = "\n\n".join(map(markdown_words, said))
        return "\n\n".join(
            [
                head,
                "\n".join(map(markdown_words, lines)),
                WRITERS["md"]([table]),
                f"{WHAT}.\n",
                *([WRITERS["md"](self.answers)] if self.answers else []),
            ]
        )


def before_after(runs: Sequence[RunFolder], asked: CompareOptions) -> BeforeAfter | None:
    """Return the runs before and after: two sweeps, or repeats whose number is given.

    Raises InputError for runs that are not comparable, unless forced, and for a number that does not fit."""
    if asked.rows_asked or not (len(runs) == 2 or asked.before):
        return None
    if not 0 <= asked.before < len(runs):
        raise InputError(
            f"--before {asked.before} of {len(runs)} runs leaves none after",
            hint="give the runs before first, then those after",
        )
    count = asked.before or 1
    before, after = runs[:count], runs[count:]
    if not all(
        any(run.cells and run.manifest.get("kind") != "bench" for run in side) for side in (before, after)
    ):
        return None
    differing = check_comparable(runs, force=asked.force)
    cells = cell_changes(before, after)
    return BeforeAfter(before, after, setting_changes(before, after), cells, differing) if cells else None


# --- as text ---------------------------------------------------------------------------------------


def tables(compared: Compared, asked: CompareOptions) -> list[Table]:
    """Return the rows as one table, or one per level of ``group``."""
    return load_tables(compared.rows, compared.by, asked.sort, asked.group, len(compared.runs) > 1)


def as_text(compared: Compared, asked: CompareOptions) -> str:
    """Return the comparison in a file format. CSV has only the rows; others have the conclusions first."""
    found = tables(compared, asked)
    if asked.format == "csv":
        return WRITERS["csv"](found)
    if asked.format == "json":
        more: dict[str, Any] = {
            "runs": [{"name": name, "run": run.run_id} for run, name in compared.named],
            "by": compared.by,
            "not_comparable": list(compared.differing),
            "conclusions": [statement.to_json() for statement in compared.statements],
            "answers": [row for table in _answers_of(compared) for row in table.rows],
        }
        return as_json(found, more)
    said = [*_captions(compared), *(f"{NOT_COMPARABLE}: {line}" for line in compared.differing)]
    lines = [f"- {statement.text}" for statement in compared.statements]
    if asked.format == "latex":
        return "".join(f"% {' '.join(line.split())}\n" for line in [*said, *lines]) + WRITERS["latex"](
            [*found, *_answers_of(compared)]
        )
    shown = WRITERS["md"]([*found, *_answers_of(compared)])
    return "\n".join([*map(markdown_words, [*said, "", *lines, ""]), shown])


def _answers_of(compared: Compared) -> list[Table]:
    return _answers([(name or run.run_id, [run]) for run, name in compared.named])


def _captions(compared: Compared) -> Iterable[str]:
    for run, name in compared.named:
        mark = mark_of(run)
        marked = f"{mark.word.upper()}: " if mark is not None else ""
        yield f"{name}: {marked}{caption(run)}" if name else f"{marked}{caption(run)}"


# --- the terminal ----------------------------------------------------------------------------------


def _print(compared: Compared, asked: CompareOptions, console: Console) -> None:
    """Print the conclusions by kind, then the rows."""
    heads = [Block(words=line, style="dim") for line in _captions(compared)]
    heads += [Block(words=f"{NOT_COMPARABLE}: {line}", style="bold red") for line in compared.differing]
    conclusions = []
    for kind, words in KIND_WORDS.items():
        mine = [each for each in compared.statements if each.kind == kind]
        notes = [Note(each.text, each.advice, _STYLES.get(each.level, "")) for each in mine]
        conclusions += [Block(words, notes=notes)] if notes else []
    shown = [Block(f"\n{table.title}", table=_brief(table)) for table in tables(compared, asked)]
    none = Block(words="\nno load was measured whose figures could be compared")
    blocks = [*heads, *conclusions, *(shown or [none]), *_blocks(_answers_of(compared))]
    print_sections([ReportSection("compared", "", blocks)], console)


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
