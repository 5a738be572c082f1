"""report.md: a report as Markdown with GitHub's tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvbench.core.foreign_text import fenced, markdown_words, visible
from kvbench.report.tables.table import Table, markdown_table
from kvbench.report.value import Block, Note, Report


def report_markdown(report: Report, figures: Mapping[str, str] | None = None) -> str:
    """The whole story of one run on one page. ``figures``: the files under figures/ by picture's name."""
    figures = figures or {}
    parts = [f"# {_escaped(report.titles['markdown'])}"]
    parts += [f"{markdown_words(report.caption)}\n\n{markdown_words(report.goal)}"]
    if report.mark is not None:
        parts.append(f"> **{report.mark.word.title()}**: {_escaped(report.not_of_a_gpu)}")
    for section in report.shown("markdown", figures):
        parts += [f"## {_escaped(section.title)}"] if section.title else []
        parts += [part for block in section.blocks for part in _parts(block, figures)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _parts(block: Block, figures: Mapping[str, str]) -> Iterator[str]:
    if block.title:
        yield f"### {_escaped(block.title)}"
    yield markdown_words(block.about)
    yield bullets(block.notes)
    if block.table is not None:
        yield from _tables(block.table)
    if block.code:
        yield fenced(block.code)
    if block.picture is not None:
        yield f"![{_escaped(block.picture.title)}](figures/{figures[block.picture.name]})"


def _tables(table: Table) -> Iterator[str]:
    """A table for each group; footnotes have a column of their own."""
    header = [*table.header, *(["notes"] if table.marks else [])]
    rule = ["--:" if column.align == "right" else "---" for column in table.columns]
    rule += ["---"] if table.marks else []
    if not table.groups and not table.ruled:
        yield f"**{_escaped(table.title)}**"
    for title, rows, marks in table.parts():
        if title:
            yield f"**{_escaped(title)}**"
        noted = [[", ".join(map(str, each))] for each in marks] if marks else [[] for _ in rows]
        cells = [[*row, *more] for row, more in zip(rows, noted, strict=True)]
        yield markdown_table(header, cells, rule)


def _escaped(text: str) -> str:
    return markdown_words(text).replace("|", "\\|").replace("\n", " ")


def bullets(notes: Iterable[Note]) -> str:
    """A list; further lines of a note are quoted below it."""
    lines = []
    for note in notes:
        first, *more = note.text.strip().splitlines() or [""]
        advice = f" → {markdown_words(' '.join(note.advice.split()))}" if note.advice else ""
        lines.append(f"- {markdown_words(' '.join(first.split()))}{advice}")
        quoted = (" ".join(visible(line).split()).replace("`", "'") for line in more)
        lines += [f"  - `{line}`" for line in quoted if line]  # lines of a log
    return "\n".join(lines)
