"""No table cuts a number: at every width a terminal's figures are those of the table, whole."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvbench.core.fitted_table import FittedColumn, Grid
from kvbench.report.sections.build import build
from kvbench.report.tables.table import Table
from kvbench.report.terminal import print_sections
from kvbench.report.value import Block, ReportSection
from kvbench.results.run import load_run

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
RUNS = [path.parent for path in sorted(REFERENCE.glob("*/manifest.json"))]
WIDTHS = (60, 80, 100, 120, 160)


def printed(table: Table, width: int, *, terminal: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    print_sections([ReportSection("", "", [Block(table=table)])], console)
    return out.getvalue()


def tables_of(path: Path) -> Iterator[Table]:
    for section in build(load_run(path), writers=("terminal",)).of("terminal"):
        for block in section.blocks:
            if block.table is not None and any(column.brief for column in block.table.columns):
                yield block.table


def words(text: str) -> list[str]:
    return re.findall(r"[^\s─]+", text)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_what_is_shown_of_a_reference_run_is_whole_at_every_width(path: Path) -> None:
    shown = list(tables_of(path))
    assert shown
    for table in shown:
        known = {word for cells in table.cells for cell in cells for word in words(cell)}
        named = {word for title in table.groups.values() for word in words(title)}
        for width in WIDTHS:
            text = printed(table, width)
            shown_words = {word.rstrip("¹²³⁴⁵⁶⁷⁸⁹⁰") for word in words(text) if word[0].isdigit()}
            titles = {word for column in table.columns for word in words(column.title)}
            assert shown_words - {""} <= known | titles | named
            apart = ("columns left out: ", "Latencies and rates: ", *filter(None, table.groups.values()))
            rows = [line for line in text.splitlines() if not line.startswith(apart)]
            assert all(len(line.rstrip("¹²³⁴⁵⁶⁷⁸⁹⁰ ")) <= width for line in rows), (width, text)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_without_a_terminal_the_width_decides_nothing(path: Path) -> None:
    for table in tables_of(path):
        narrow, wide = (printed(table, width, terminal=False) for width in (20, 400))
        assert narrow == wide
        assert "no room for" not in wide
        for cells in table.cells:
            for column, cell in zip(table.columns, cells, strict=True):
                assert not column.brief or set(words(cell)) <= set(words(wide))


COLUMNS = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=9), st.integers(0, 3)), min_size=1, max_size=6
)


@given(COLUMNS, st.integers(1, 5), st.integers(10, 90), st.data())
def test_every_cell_stands_whole_in_its_line_or_its_column_is_named(
    columns: list[tuple[str, int]], rows: int, width: int, data: st.DataObject
) -> None:
    cells = [
        [data.draw(st.text("0123456789.", min_size=1, max_size=12)) for _ in columns] for _ in range(rows)
    ]
    titles = [f"{title}{place}" for place, (title, _) in enumerate(columns)]
    grid = Grid(
        [FittedColumn(title, rank=rank) for title, (_, rank) in zip(titles, columns, strict=True)], cells
    )
    fitted = grid.fitted(width)
    in_blocks = not any(line.kind == "rule" for line in fitted.lines)
    text = "\n".join(line.text for line in fitted.lines)
    for place, title in enumerate(titles):
        left_out = title in fitted.left_out
        assert left_out <= (columns[place][1] > 0)
        assert left_out or title in text
        for row in cells:
            assert left_out or row[place] in words(text)
    assert not (in_blocks and fitted.left_out)
    if not in_blocks:
        assert all(len(line.text) <= width for line in fitted.lines)
        assert [line.row for line in fitted.lines if line.row >= 0] == list(range(rows))
    # What is dropped is never wanted more than what stays.
    kept = [rank for (_, rank), title in zip(columns, titles, strict=True) if title not in fitted.left_out]
    assert not fitted.left_out or min(
        rank for (_, rank), title in zip(columns, titles, strict=True) if title in fitted.left_out
    ) >= max(kept, default=0)


def test_titles_end_on_one_line_and_words_fold_at_blanks() -> None:
    columns = [FittedColumn("a", "left"), FittedColumn("max\nrate"), FittedColumn("why", "left", fold=12)]
    grid = Grid(columns, [["x", "12.5", "the time was up at last"]])
    assert [line.text for line in grid.fitted(None).lines][-1] == "x  12.5  the time was up at last"
    lines = [line.text for line in grid.fitted(25).lines]
    assert lines == [
        "    max", "a  rate  why", "─────────────────────", "x  12.5  the time was", "         up at last",
    ]  # fmt: skip
