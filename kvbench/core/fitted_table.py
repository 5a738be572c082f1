"""A table as text within a width, without truncation.

Titles wrap first, then low-ranked columns are dropped, and a table that is still too wide becomes one block
per row."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

Kind = Literal["head", "rule", "group", "row"]
GAP = "  "
LEAST_TITLE = 9
"""Least width, in characters, to which a title is folded."""


@dataclass(frozen=True)
class FittedColumn:
    """``rank``: higher ones are dropped first, 0 never. ``fold``: width to wrap at, 0 for never."""

    title: str
    align: Literal["left", "right"] = "right"
    rank: int = 0
    fold: int = 0


@dataclass(frozen=True)
class Line:
    """``row``: number of the row that ends here, else -1."""

    text: str
    kind: Kind
    row: int = -1


@dataclass(frozen=True)
class Fitted:
    """``left_out``: titles of dropped columns."""

    lines: Sequence[Line]
    left_out: Sequence[str] = ()

    @property
    def note(self) -> str:
        listed = ", ".join(self.left_out)
        return f"columns left out: {listed} (use a wider terminal or a file)" if listed else ""

    def text(self) -> str:
        return "\n".join([*(line.text for line in self.lines), *filter(None, [self.note])])


def columns_of(left: str, right: str = "", ranks: Mapping[str, int] | None = None) -> list[FittedColumn]:
    """Return columns from titles separated by ``|``: first texts, then numbers."""
    ranks = ranks or {}
    sides: tuple[tuple[Literal["left", "right"], str], ...] = (("left", left), ("right", right))
    return [
        FittedColumn(title, align, ranks.get(title, 0))
        for align, titles in sides
        for title in (titles.split("|") if titles else [])
    ]


@dataclass(frozen=True)
class Grid:
    """A table. ``groups``: first row → heading. ``ruled``: a line below the header and between groups."""

    columns: Sequence[FittedColumn]
    cells: Sequence[Sequence[str]]
    groups: Mapping[int, str] = field(default_factory=dict)
    ruled: bool = True
    indent: str = ""

    def fitted(self, width: int | None) -> Fitted:
        """Fit into ``width`` characters, unless a single word is longer; None: unlimited."""
        whole = replace(self, columns=[replace(column, fold=0) for column in self.columns])
        every = range(len(self.columns))
        if width is None or whole._width(every) <= width:
            return Fitted(list(whole._lines(every)))
        return replace(self, columns=[self._narrow(index) for index in every])._drop_column(width)

    def _narrow(self, index: int) -> FittedColumn:
        column = self.columns[index]
        cells = replace(self, columns=[replace(entry, title="") for entry in self.columns])
        room = max(cells._column_width(index), LEAST_TITLE)
        return replace(column, title="\n".join(_wrap(column.title, room)))

    def _drop_column(self, width: int) -> Fitted:
        shown = list(range(len(self.columns)))
        if self._width(shown) <= width:
            return Fitted(list(self._lines(shown)))
        droppable = sorted(
            (index for index in shown if self.columns[index].rank),
            key=lambda index: (-self.columns[index].rank, -index),
        )
        for index in droppable:
            shown.remove(index)
            if self._width(shown) <= width:
                left_out = [
                    _one_line(column.title) for at, column in enumerate(self.columns) if at not in shown
                ]
                return Fitted(list(self._lines(shown)), left_out)
        return Fitted(list(self._blocks(width)))

    def _width(self, shown: Sequence[int]) -> int:
        return len(self.indent) + sum(map(self._column_width, shown)) + len(GAP) * (len(shown) - 1)

    def _column_width(self, index: int) -> int:
        column = self.columns[index]
        texts = [
            *column.title.split("\n"),
            *(part for row in self.cells for part in _wrap(row[index], column.fold)),
        ]
        return max(map(_cells_of, texts), default=0)

    def _lines(self, shown: Sequence[int]) -> Iterator[Line]:
        widths = {index: self._column_width(index) for index in shown}
        for line in self._row(
            {index: self.columns[index].title.split("\n") for index in shown}, widths, head=True
        ):
            yield Line(line, "head")
        if self.ruled:
            rule = "─" * (sum(widths.values()) + len(GAP) * (len(shown) - 1))
            yield Line(self.indent + rule, "rule")
        for number, row in enumerate(self.cells):
            if number in self.groups and (self.groups[number] or number):
                yield Line(self.groups[number], "group")
            folded = {index: _wrap(row[index], self.columns[index].fold) for index in shown}
            *first, last = self._row(folded, widths)
            yield from (Line(text, "row") for text in first)
            yield Line(last, "row", number)

    def _row(
        self, parts: Mapping[int, Sequence[str]], widths: Mapping[int, int], *, head: bool = False
    ) -> Iterator[str]:
        """Yield the lines of one row; headers are bottom-aligned, cells top-aligned."""
        height = max((len(part) for part in parts.values()), default=1)
        for level in range(height):
            texts = []
            for index, lines in parts.items():
                at = level - (height - len(lines)) if head else level
                text = lines[at] if 0 <= at < len(lines) else ""
                blanks = " " * (widths[index] - _cells_of(text))
                texts.append(text + blanks if self.columns[index].align == "left" else blanks + text)
            yield (self.indent + GAP.join(texts)).rstrip()

    def _blocks(self, width: int) -> Iterator[Line]:
        """Yield a block per row: the first column, then a line per other column."""
        names = [_one_line(column.title) for column in self.columns]
        longest = min(max(map(_cells_of, names[1:]), default=0), width // 2)
        for number, row in enumerate(self.cells):
            if self.groups.get(number):
                yield Line(self.groups[number], "group")
            yield Line(f"{self.indent}{names[0]} {row[0]}".rstrip(), "head")
            texts = []
            for name, cell in zip(names[1:], row[1:], strict=True):
                room = max(width - len(self.indent) - longest - 2 * len(GAP), 20)
                for title, part in zip_longest(_wrap(name, longest), _wrap(cell, room), fillvalue=""):
                    blanks = " " * (longest - _cells_of(title))
                    texts.append(f"{self.indent}{GAP}{title}{blanks}{GAP}{part}".rstrip())
            for index, text in enumerate(texts):
                yield Line(text, "row", number if index == len(texts) - 1 else -1)


def _wrap(text: str, width: int) -> list[str]:
    """Wrap at blanks only; 0: no wrap."""
    lines = text.split("\n") or [""]
    if not width:
        return lines
    wrapped = (
        textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""] for line in lines
    )
    return [line for lines in wrapped for line in lines]


def _one_line(title: str) -> str:
    return " ".join(title.split())


def _cells_of(text: str) -> int:
    """Return a text's width in terminal columns."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(bool(unicodedata.combining(char)) for char in text)
