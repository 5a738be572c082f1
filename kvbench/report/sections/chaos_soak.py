"""The sections of the reports of a chaos run and of a soak."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.report.chaos_soak.fault_rows import (
    answers_text,
    fault_groups,
    fault_table,
    gist_text,
    notices_rows,
)
from kvbench.report.chaos_soak.soak_rows import drift_table, soak_trials, verdict_lines
from kvbench.report.sections.any_run import drawings
from kvbench.report.sections.facts import Material
from kvbench.report.tables.table import of_texts
from kvbench.report.value import Block, Note, ReportSection
from kvbench.results.provenance import caption


def fault_head(of: Material) -> Iterator[ReportSection]:
    """What was held, on which machine; how many answers were checked."""
    run, groups = of.one.run, fault_groups(of.one.run)
    lines = [Block(words=caption(run), style="dim"), Block(words=answers_text(groups))]
    yield ReportSection("head", "", lines, apart=True)


def fault_answer(of: Material) -> Iterator[ReportSection]:
    """The gist, a sentence a pair, and the picture."""
    groups = fault_groups(of.one.run)
    said = [Note(text) for text in (answers_text(groups), *gist_text(groups))]
    pictures = [Block(picture=each) for each in drawings(of.one.run)]
    yield ReportSection("answer", "Answer", [Block(notes=said), *pictures], ("markdown", "html"))
    yield ReportSection(
        "answer", "", [Block(notes=[Note(each) for each in gist_text(groups)])], ("terminal",)
    )


def fault_section(of: Material) -> Iterator[ReportSection]:
    """One row a fault."""
    groups = fault_groups(of.one.run)
    if not groups:
        yield ReportSection("faults", "", [Block(words="no fault has been done yet")])
        return
    made = fault_table(groups)
    yield ReportSection("faults", made.title, [Block(words=made.words, table=made)], ("markdown", "html"))
    yield ReportSection("faults", "", [Block(table=made)], ("terminal", "notebook"))


def notices(of: Material) -> Iterator[ReportSection]:
    """Which log said what, and when, of each fault's first repeat."""
    rows = notices_rows(fault_groups(of.one.run))
    shown = of_texts("", ["pair", "fault", "who", "after (s)", "what was said"], rows, "left")
    words = "Each fault's first repeat; kvbench is what would have ended a sweep's cell."
    blocks = [Block(words=words, table=shown)] if rows else []
    yield ReportSection("notices", "Who noticed", blocks)


def soak_head(of: Material) -> Iterator[ReportSection]:
    """Where it was held."""
    yield ReportSection("head", "", [Block(words=caption(of.one.run), style="dim")], apart=True)


def soak_answer(of: Material) -> Iterator[ReportSection]:
    """The verdict, and the picture."""
    run = of.one.run
    said = [Note(text) for text in verdict_lines(run)]
    pictures = [Block(picture=each) for each in drawings(run)]
    yield ReportSection("answer", "Answer", [Block(notes=said), *pictures], ("markdown", "html"))
    yield ReportSection("answer", "", [Block(notes=said)], ("terminal",))


def soak_section(of: Material) -> Iterator[ReportSection]:
    """One row a thing that may drift."""
    run = of.one.run
    if not soak_trials(run):
        return
    made = drift_table(run)
    yield ReportSection("drift", made.title, [Block(words=made.words, table=made)], ("markdown", "html"))
    yield ReportSection("drift", "", [Block(table=made)], ("terminal", "notebook"))
