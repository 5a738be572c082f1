"""The sections of a soak's report."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.report.held.soak_rows import drift_table, soak_trials, verdict_lines
from kvbench.report.sections.any_run import drawings
from kvbench.report.sections.facts import Material
from kvbench.report.value import Block, Note, ReportSection
from kvbench.results.provenance import caption


def head(of: Material) -> Iterator[ReportSection]:
    """Where it was held."""
    yield ReportSection("head", "", [Block(words=caption(of.one.run), style="dim")], apart=True)


def answer(of: Material) -> Iterator[ReportSection]:
    """The verdict, and the picture."""
    run = of.one.run
    said = [Note(text) for text in verdict_lines(run)]
    pictures = [Block(picture=each) for each in drawings(run)]
    yield ReportSection("answer", "Answer", [Block(notes=said), *pictures], ("markdown", "html"))
    yield ReportSection("answer", "", [Block(notes=said)], ("terminal",))


def table(of: Material) -> Iterator[ReportSection]:
    """One row a thing that may drift."""
    run = of.one.run
    if not soak_trials(run):
        return
    made = drift_table(run)
    yield ReportSection("drift", made.title, [Block(words=made.words, table=made)], ("markdown", "html"))
    yield ReportSection("drift", "", [Block(table=made)], ("terminal", "notebook"))
