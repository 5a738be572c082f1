"""A system that is not at a search's end what it was at its beginning, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sample_run import make_run

from kvbench.core.search.replay.queues import COMPILED
from kvbench.report.findings.findings import drifts, statements
from kvbench.report.findings.notes import notes
from kvbench.report.tables.result import summary_table
from kvbench.results.run import RunFolder, load_run
from tools.random_systems.family import SEEDS, draw
from tools.random_systems.judge.search import searched

QUICK = 15
"""A system of ``develop`` whose capacity is found within a few percent in a second."""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return load_run(make_run(tmp_path_factory.mktemp("drift"), ("nixl",), (512,)))


def with_belief(run: RunFolder, at_first: float, at_last: float, took_s: float | None = 600.0) -> RunFolder:
    """The run with two posteriors that are 1 % wide, its trials so long one after the other."""
    wide = [0.995 + 0.01 * place / 40 for place in range(41)]
    (cell,) = run.cells
    assert cell.answer is not None
    kept = {
        "posterior_at_first": [at_first * factor for factor in wide],
        "posterior": [at_last * factor for factor in wide],
    }
    trials = [replace(trial, engine={**trial.engine, "starts_at_s": None}) for trial in run.trials]
    if took_s is not None:
        for trial, at_s in ((trials[0], 0.0), (trials[-1], took_s)):
            trial.engine["starts_at_s"] = at_s
    return replace(run, cells=[replace(cell, answer={**cell.answer, **kept})], trials=trials)


def drift_texts(run: RunFolder) -> list[str]:
    return [drift.text for drift in drifts(run, summary_table(run))]


def test_it_is_said_which_way_how_far_and_how_fast(sample: RunFolder) -> None:
    (slower,) = drift_texts(with_belief(sample, 10.0, 9.0))
    assert slower == (
        "nixl at 512 became slower during the search: its sustained rate fell by about 10% in 10 minutes "
        "(about 47% an hour)"
    )
    (faster,) = drift_texts(with_belief(sample, 9.0, 10.0, 7200.0))
    assert faster.endswith("rose by about 11% in 120 minutes (about 5% an hour)")
    (jump,) = drift_texts(with_belief(sample, 9.0, 14.0, 90.0))
    assert jump.endswith("rose by about 56% in 90 s")
    (timeless,) = drift_texts(with_belief(sample, 9.0, 14.0, None))
    assert "became faster" in timeless


def test_nothing_is_said_without_evidence(sample: RunFolder) -> None:
    assert drift_texts(sample) == []  # by verdicts alone there is no posterior
    assert drift_texts(with_belief(sample, 10.0, 10.02)) == []


def test_it_stands_in_every_report(sample: RunFolder) -> None:
    run = with_belief(sample, 10.0, 8.0)
    rows = summary_table(run)
    (found,) = (statement for statement in statements(run, rows) if statement.rule == "drift")
    assert (found.kind, found.level) == ("suspicious", "warning")
    assert any("became slower" in note.text for note in notes(run, rows))
    assert not any("became slower" in note.text for note in notes(run, rows, gates=False))


@pytest.mark.skipif(not COMPILED, reason="without a compiler such a search takes minutes")
@pytest.mark.parametrize(("warmup_s", "run_seed"), [(0.0, 2), (25.0, 2), (25.0, 3)])
def test_a_system_that_warms_up_in_the_middle_of_a_search_is_found_out(
    tmp_path: Path, warmup_s: float, run_seed: int
) -> None:
    """It takes half as long again at first; on virtual time. The replay leaves its first trials out, or the
    report says that it became faster."""
    system = draw(SEEDS["develop"], QUICK)
    warming = replace(system.disturbances, warmup_s=warmup_s, warmup_factor=1.5)
    run = searched(replace(system, disturbances=warming), run_seed, tmp_path, 120.0)
    (cell,) = run.cells
    assert cell.answer is not None
    replay = cell.answer["replay"]
    left_out = replay["decides"] and replay["left_out"] > 0
    became_faster = any("became faster" in text for text in drift_texts(run))
    assert (left_out or became_faster) == (warmup_s > 0)
    if left_out:
        assert cell.answer["max_request_rate"] == pytest.approx(463.4, rel=0.02)  # as without the warm-up
