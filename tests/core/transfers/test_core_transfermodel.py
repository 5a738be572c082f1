"""The fitted transfer model: planted figures come back, nothing turns negative, weak data say so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sample_transfers import MOVERS, SPEED, make_record

from kvbench.core.transfers.cases import Axes, build
from kvbench.core.transfers.model import TransferModel, fit, fit_all, models_json, nonnegative_least_squares

SHAPES = [(1, 4096), (32, 65536 * 32), (8, 8 << 20), (1, 16 << 20), (128, 128 * 4096)]
START = st.floats(1e-6, 1e-3)
PER_DESCRIPTOR = st.floats(1e-7, 1e-4)
RATE = st.floats(0.05, 50.0)


@given(START, PER_DESCRIPTOR, RATE)
def test_planted_figures_come_back(start: float, per_descriptor: float, rate: float) -> None:
    points = [(d, float(n), start + per_descriptor * d + n / rate / 1e9) for d, n in SHAPES]
    found = fit(points)
    assert found[0] == pytest.approx(start, rel=1e-3, abs=1e-9)
    assert found[1] == pytest.approx(per_descriptor, rel=1e-2, abs=1e-9)
    assert 1e-9 / found[2] == pytest.approx(rate, rel=1e-3)
    assert max(found[3]) < 1e-6
    assert found[4]


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 1 << 28), st.floats(1e-6, 10)), min_size=3, max_size=12
    )
)
def test_nothing_is_ever_negative(points: list[tuple[int, int, float]]) -> None:
    found = fit([(float(d), float(n), s) for d, n, s in points])
    if found is None:
        assert len({n for _, n, _ in points}) < 2
        return
    assert min(found[:3]) >= 0
    assert len(found[3]) == len(points)


@given(
    st.lists(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), min_size=3, max_size=8),
    st.lists(st.floats(-5, 5), min_size=8, max_size=8),
)
def test_no_other_point_without_negatives_is_better(rows: list[list[float]], wanted: list[float]) -> None:
    matrix, aim = np.array(rows), np.array(wanted[: len(rows)])
    assume(np.linalg.cond(matrix) < 1e6)
    found = nonnegative_least_squares(matrix, aim)
    gradient = matrix.T @ (matrix @ found - aim)
    # The conditions of Karush, Kuhn and Tucker, which only an optimum meets.
    assert (found >= 0).all()
    assert (gradient > -1e-5).all()
    assert np.abs(gradient * found).max() < 1e-4


def test_descriptors_that_never_vary_are_not_given_a_cost() -> None:
    found = fit([(1.0, n, 1e-5 + n / 1e9) for n in (4e3, 1e6, 1.6e7)])
    assert found[1] == 0
    assert not found[4]
    assert found[0] == pytest.approx(1e-5)


def test_too_little_says_nothing() -> None:
    assert (fit([(1.0, 4e3, 1e-5), (1.0, 8e3, 2e-5)]), fit([(1.0, 4e3, 1e-5)] * 5)) == (None, None)


def test_models_of_a_run() -> None:
    rows = [make_record(case) for case in build(Axes(), MOVERS).cases]
    models = fit_all(rows)
    assert {model.backend for model in models} == set(SPEED) - {"null"}
    for model in models:
        start, _, rate = SPEED[model.backend]
        assert model.start_s == pytest.approx(start, rel=0.2)
        assert (model.gb_per_s, model.points) == (pytest.approx(rate, rel=0.1), 4)
        assert 0 <= model.median_error <= model.worst_error < 0.1
        record = next(r for r in rows if r.case.backend == model.backend and r.case.op == model.op)
        assert model.seconds(record.nbytes, record.descriptors) == pytest.approx(
            np.median(record.call_s), rel=0.1
        )


def test_a_model_survives_its_json() -> None:
    model = TransferModel("nixl", "tcp", "read", 4, 5e-5, 1e-6, 0.48, 4, 0.01, 0.02)
    stored = models_json([model], "run-1")
    assert TransferModel.from_json(stored["models"][0]) == model
    assert model.seconds(0.48e9, 10) == pytest.approx(1.00006)
    assert "nixl over tcp, read, 4 NICs" in model.way
    assert "bytes / 0.48 GB/s" in model.text()


def test_a_model_as_a_link_gives_the_time_of_a_whole_transfer() -> None:
    model = TransferModel("nixl", "tcp", "read", 0, 50e-6, 2e-6, 1.5)
    # 4 layers × K and V, 30 blocks of 32 KiB in all regions together.
    regions, blocks, block_bytes = 8, 30, 32768
    for merged, descriptors in ((False, regions * blocks), (True, regions)):
        gb_per_s, besides_s = model.as_link(block_bytes, regions, merged=merged)
        whole = besides_s + blocks * block_bytes / gb_per_s / 1e9
        assert whole == pytest.approx(model.seconds(blocks * block_bytes, descriptors))


def test_only_transfers_on_their_own_count() -> None:
    cases = build(Axes(backends=("tcp",), threads=(4,)), MOVERS).cases
    assert fit_all(make_record(case) for case in cases) == []
