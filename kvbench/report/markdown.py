"""report.md: a report as Markdown with GitHub's tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from kvbench.report.tables.table import Table, markdown_table
from kvbench.report.value import Block, Note, Report


def report_markdown(report: Report, figures: Collection[str] = ()) -> str:
    """The whole story of one run on one page. ``figures``: names of the pictures that lie under figures/."""
    parts = [f"# {report.titles['markdown']}", f"{report.caption}\n\n{report.goal}"]
    if report.mark is not None:
        parts.append(f"> **{report.mark.word.title()}**: {report.not_of_a_gpu}")
    for section in report.of("markdown"):
        blocks = [each for each in section.blocks if not each.picture or each.picture.name in figures]
        if section.blocks and not blocks:
            continue
        parts += [f"## {section.title}"] if section.title else []
        parts += [part for block in blocks for part in _parts(block)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _parts(block: Block) -> Iterator[str]:
    if block.title:
        yield f"### {block.title}"
    yield block.words or (block.table.words if block.table else "")
    yield bullets(block.notes)
    if block.table is not None:
        yield from _tables(block.table)
    if block.code:
        yield f"```\n{block.code}\n```"
    if block.picture is not None:
        yield f"![{block.picture.title}](figures/{block.picture.name}.png)"


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
    return text.replace("|", "\\|").replace("\n", " ")


def bullets(notes: Iterable[Note]) -> str:
    """A list; further lines of a note are quoted below it."""
    lines = []
    for note in notes:
        first, *more = note.text.strip().splitlines() or [""]
        advice = f" → {' '.join(note.advice.split())}" if note.advice else ""
        lines.append(f"- {' '.join(first.split())}{advice}")
        quoted = (" ".join(line.split()).replace("`", "'") for line in more)
        lines += [f"  - `{line}`" for line in quoted if line]  # lines of a log
    return "\n".join(lines)
