"""How a run looks in a notebook: a heading, one small table, and what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from kvbench.core.foreign_text import markdown_words
from kvbench.report.value import Block, Report
from kvbench.results.provenance import SIMULATED

MOST_ROWS: Final = 40
MOST_NOTES: Final = 8


def _head(report: Report) -> tuple[str, str, str]:
    """Title, caption and mark. Of a simulated run neither the machine nor the day says anything."""
    mark = report.mark
    origin = "" if mark is not None and mark.word.startswith(SIMULATED) else report.caption
    return report.titles["notebook"], origin, "" if mark is None else f"{mark.word}: {mark.why}"


def _blocks(report: Report) -> list[Block]:
    return [block for section in report.of("notebook") for block in section.blocks]


def _more(blocks: Sequence[Block]) -> str:
    rows = sum(len(block.table.cells) for block in blocks if block.table)
    notes = sum(len(block.notes) for block in blocks)
    parts = [
        f"{count - most} more {word}"
        for count, most, word in ((rows, MOST_ROWS, "rows"), (notes, MOST_NOTES, "notes"))
        if count > most
    ]
    return f"… and {', '.join(parts)}: see run.summary and run.findings" if parts else ""


def html_of(report: Report) -> str:
    """One block of HTML without scripts, styles of its own page, or anything fetched; all text escaped."""
    (title, origin, mark), blocks = _head(report), _blocks(report)
    parts = [f"<div><strong>{escape(title)}</strong>"]
    parts += [f"<br><small>{escape(origin)}</small>"] if origin else []
    parts += [f"<br><em>{escape(mark)}</em>"] if mark else []
    for block in blocks:
        parts += [f"<p>{escape(block.about)}</p>"] if block.about else []
        if block.table is not None:
            parts.append(html_table(block.table.header, block.table.cells[:MOST_ROWS]))
        if block.notes:
            items = "".join(f"<li>{escape(note.text)}</li>" for note in block.notes[:MOST_NOTES])
            parts.append(f"<ul>{items}</ul>")
    more = _more(blocks)
    parts += [f"<p><small>{escape(more)}</small></p>"] if more else []
    return "\n".join([*parts, "</div>"])


def markdown_of(report: Report) -> str:
    (title, origin, mark), blocks = _head(report), _blocks(report)
    parts = [f"**{_plain(title)}**", _plain(origin), f"*{_plain(mark)}*" if mark else ""]
    for block in blocks:
        parts.append(markdown_words(block.about))
        if block.table is not None:
            parts.append(markdown_table(block.table.header, block.table.cells[:MOST_ROWS]))
        parts.append("\n".join(f"- {_plain(note.text)}" for note in block.notes[:MOST_NOTES]))
    parts.append(_more(blocks))
    return "\n\n".join(part for part in parts if part) + "\n"


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As in a report, but no HTML of others begins in it."""
    lines = [list(header), ["---"] * len(header), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Words of others as text: no table cell ends in them, no HTML begins."""
    return markdown_words(text).replace("|", "\\|").replace("\n", " ")
