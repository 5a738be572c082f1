"""A predicted rate that its fit does not support is marked; no interval is narrower than the fit's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_run import make_run

from kvbench.files import read_object, write_json
from kvbench.report.findings.ahead import answer_text, group_pairs, rate_pairs
from kvbench.report.findings.notes import ahead, notes
from kvbench.report.notebook.frames import cells
from kvbench.report.tables.result import Row, summary_table
from kvbench.results.run import MANIFEST, RunFolder, load_run

FIT: dict[str, Any] = {
    "name": "mine", "status": "fit", "margin": 0.0, "input_len": [1024, 1024], "output_len": [16, 16],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), connectors=("aggregated", "nixl"), input_lens=(256, 1024))


def rows_of(folder: Path, **changes: Any) -> tuple[RunFolder, list[Row]]:
    """The rows of the run as if both deployments had been simulated with a fitted profile."""
    manifest = read_object(folder / MANIFEST, [])
    fitted = {label: {**FIT, **changes} for label in ("aggregated", "nixl")}
    write_json(folder / MANIFEST, {**manifest, "fitted_with": fitted})
    run = load_run(folder)
    return run, summary_table(run)


def test_a_length_far_from_the_fitted_ones_is_extrapolated_to(folder: Path) -> None:
    run, rows = rows_of(folder)
    assert {(row.cell.input_len, row.answer.mark) for row in rows} == {(256, "extrapolated"), (1024, "")}
    assert all(row.answer.text().endswith(" extrapolated") for row in rows if row.cell.input_len == 256)
    assert {row.flat()["prediction"] for row in rows} == {"extrapolated", ""}
    texts = [note.text for note in notes(run, rows)]
    assert any(
        "extrapolated: timing profile mine to prompts of 256 tokens (fitted: 1,024)" in text for text in texts
    )


def test_every_number_of_an_unfit_profile_is_marked(folder: Path) -> None:
    _, rows = rows_of(folder, status="unfit")
    assert {row.answer.mark for row in rows} == {"unfit"}


def test_no_winner_is_named_by_a_marked_prediction(folder: Path) -> None:
    _, rows = rows_of(folder, status="unfit")
    assert not group_pairs(rate_pairs(rows)).ordered
    for text in (*ahead(rows), answer_text(rows)):
        assert "no winner" in text
        assert "×" not in text


def test_an_interval_is_no_narrower_than_the_margin_of_the_fit(folder: Path) -> None:
    _, sure = rows_of(folder, margin=0.0)
    run, rows = rows_of(folder, margin=0.5)
    table = cells(run).set_index(["connector", "input_len"])[["lower", "upper"]]
    for row, before in zip(rows, sure, strict=True):
        rate = row.answer.max_request_rate
        assert row.answer.lower is not None
        assert row.answer.lower <= rate / 1.5 < (before.answer.lower or 0.0)
        assert row.answer.upper >= rate * 1.5
        named = table.loc[(row.cell.connector, row.cell.input_len)]
        assert tuple(named) == (row.answer.lower, row.answer.upper)
        possible = row.answer.possible
        assert min(possible.least) < rate / 1.3
        assert max(possible.most) > rate * 1.3


def test_a_measured_run_has_no_mark(folder: Path) -> None:
    manifest = read_object(folder / MANIFEST, [])
    manifest.pop("fitted_with", None)
    write_json(folder / MANIFEST, manifest)
    assert {row.answer.mark for row in summary_table(load_run(folder))} == {""}
