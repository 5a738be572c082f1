"""A report before it is written: sections of findings, tables and pictures, built once from a run.

The terminal, report.md, report.html and notebooks are written from this value alone. Parts that only some
writers show are marked with the writers' names. ``screen`` is what a terminal shows at the end of a sweep:
the answer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvbench.report.tables.table import Rows, Table
from kvbench.results.provenance import Mark

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Writer = Literal["screen", "terminal", "markdown", "html", "notebook"]
WRITERS: Final[tuple[Writer, ...]] = ("screen", "terminal", "markdown", "html", "notebook")
PICTURES_AS: Final = ("png", "svg")
NO_DATA: Final = "no picture: no trial has a result yet"


@dataclass(frozen=True)
class Note:
    """One sentence, and what to do about it. ``style``: how a terminal shows it."""

    text: str
    advice: str = ""
    style: str = ""


def advised_once(notes: Iterable[Note]) -> list[Note]:
    """Keep an advice that consecutive notes share only in the last of them."""
    found = list(notes)
    return [
        replace(note, advice="") if note.advice == following.advice else note
        for note, following in zip(found, [*found[1:], Note("")], strict=False)
    ]


@dataclass(frozen=True)
class Drawing:
    """A picture of one run. ``alt``: its content as text, for screen readers."""

    name: str
    title: str
    alt: str
    draw: Callable[[Any], Figure | None]
    """Draws the picture in a ``plots.style.Theme``; returns None without data."""


@dataclass(frozen=True)
class Block:
    """A part of a section: words, sentences, a table, code, or a picture, under a title or none.

    ``folded``: whether a page opens it on a click only, ``bulk``: whether paper leaves it out. ``style``: how
    a terminal shows its words; ``bullets``: whether its notes are a list; ``bare``: whether a terminal shows
    its table alone."""

    title: str = ""
    words: str = ""
    notes: Sequence[Note] = ()
    table: Table | None = None
    code: str = ""
    picture: Drawing | None = None
    folded: bool = False
    bulk: bool = False
    style: str = ""
    bullets: bool = True
    bare: bool = False
    writers: Sequence[Writer] = WRITERS

    @property
    def about(self) -> str:
        """Text of the block, or of its table, and what the table's figures describe."""
        if self.table is None:
            return self.words
        return " ".join(filter(None, [self.words or self.table.words, self.table.of_window]))


@dataclass(frozen=True)
class ReportSection:
    """A section; an empty ``title`` prints no heading. ``apart``: printed after an empty line."""

    anchor: str
    title: str
    blocks: Sequence[Block]
    writers: Sequence[Writer] = WRITERS
    apart: bool = False


@dataclass(frozen=True)
class Report:
    """A run, ready to be written. ``files``: name of a CSV under tables/, without its ending → its rows;
    ``documents``: the same of JSON files."""

    run_id: str
    path: Path
    titles: Mapping[Writer, str]
    goal: str
    caption: str
    badge: str
    mark: Mark | None
    sections: Sequence[ReportSection]
    files: Mapping[str, Rows] = field(default_factory=dict)
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def not_of_a_gpu(self) -> str:
        """Text that explains the mark of a run without a real engine."""
        if self.mark is None:
            return ""
        return f"{self.mark.why}. These are not GPU results: `per GPU` counts one GPU per planned rank."

    def shown(self, writer: Writer, drawn: Collection[str]) -> list[ReportSection]:
        """Return the sections with content, given the names of existing pictures. The answer has the first
        picture, and no other section repeats it."""
        first = next((name for name in self.pictures(writer) if name in drawn), "")
        sections = []
        for section in self.of(writer):
            kept = {first} if section.anchor == "answer" else set(drawn) - {first}
            blocks = [block for block in section.blocks if not block.picture or block.picture.name in kept]
            if blocks or not section.blocks:
                sections.append(replace(section, blocks=blocks))
        return sections

    def pictures(self, writer: Writer) -> dict[str, Drawing]:
        """Return all pictures of a writer's sections by name, in order."""
        found = (block.picture for section in self.of(writer) for block in section.blocks)
        return {picture.name: picture for picture in found if picture is not None}

    def of(self, writer: Writer) -> list[ReportSection]:
        """Return the sections of one writer in order, with its blocks."""
        return [
            ReportSection(
                section.anchor, section.title, [block for block in section.blocks if writer in block.writers],
                section.writers, section.apart,
            )
            for section in self.sections
            if writer in section.writers
        ]  # fmt: skip
