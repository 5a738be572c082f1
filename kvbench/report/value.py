"""What a report is before it is written: sections of findings, tables and pictures, built once from a run.

The terminal, report.md, report.html and notebooks are written from this value alone. What only some of them
show is marked with their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvbench.report.tables.table import Rows, Table
from kvbench.results.provenance import Mark

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvbench.report.plots.style import Theme

Writer = Literal["terminal", "markdown", "html", "notebook"]
WRITERS: Final[tuple[Writer, ...]] = ("terminal", "markdown", "html", "notebook")


@dataclass(frozen=True)
class Note:
    """One sentence, and what to do about it. ``style``: how a terminal shows it."""

    text: str
    advice: str = ""
    style: str = ""


@dataclass(frozen=True)
class Drawing:
    """A picture of one run. ``alt``: what it shows, for those who do not see it."""

    name: str
    title: str
    alt: str
    draw: Callable[[Theme], Figure | None]
    """None where the run has no data for it."""


@dataclass(frozen=True)
class Block:
    """A part of a section: words, sentences, a table, code, or a picture, under a title or none.

    ``folded``: whether a page opens it on a click only, ``bulk``: whether paper leaves it out. ``style``: how
    a terminal shows its words; ``bullets``: whether its notes are a list.
    """

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
    writers: Sequence[Writer] = WRITERS


@dataclass(frozen=True)
class ReportSection:
    """``title`` may be empty: then its blocks stand without a heading. ``apart``: after an empty line."""

    anchor: str
    title: str
    blocks: Sequence[Block]
    writers: Sequence[Writer] = WRITERS
    apart: bool = False


@dataclass(frozen=True)
class Report:
    """A run, ready to be written. ``files``: name of a CSV under tables/, without its ending → its rows;
    ``documents``: the same of JSON files.
    """

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
        """What is said beside the mark of a run that no real engine served."""
        return f"{self.mark.why}. These are not figures of a GPU." if self.mark else ""

    def of(self, writer: Writer) -> list[ReportSection]:
        """The sections of one writer, in their order, with its own blocks."""
        return [
            ReportSection(
                each.anchor, each.title, [block for block in each.blocks if writer in block.writers],
                each.writers, each.apart,
            )
            for each in self.sections
            if writer in each.writers
        ]  # fmt: skip
