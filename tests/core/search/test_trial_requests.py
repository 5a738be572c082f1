"""Request records as arrays: what a trial saw before it ended, and nothing that came later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvbench.core.search.trial_requests import COLUMNS, Goal, Latencies, Objective, TrialRequests
from kvbench.core.slo import Limit, Slo

NONE = float("nan")


def columns(*rows: tuple[float, float, float, float, float, float, str]) -> dict[str, Any]:
    """(scheduled, first, last, output tokens, asked for, untimed, error) of each request."""
    found: dict[str, Any] = {name: np.array([row[at] for row in rows]) for at, name in enumerate(COLUMNS)}
    return {**found, "error": np.array([row[-1] for row in rows], dtype=object)}


def of(*rows: tuple[float, float, float, float, float, float, str], end_s: float = 10.0) -> TrialRequests:
    return TrialRequests.of(columns(*rows), rate=2.0, end_s=end_s, burstiness=1.0)


def test_requests_come_in_order_of_arrival_with_their_further_tokens() -> None:
    found = of((1.0, 1.5, 3.0, 8, 8, 1, ""), (0.0, 0.5, 2.0, 8, 8, 2, ""))
    assert (found.arrived_s.tolist(), found.tokens.tolist()) == ([0.0, 1.0], [6.0, 7.0])
    assert (found.end_s, found.failed, len(found)) == (10.0, 0, 2)


def test_nothing_after_the_last_send_counts() -> None:
    """Requests in flight then ended without further load, or by a simulator as if it had continued."""
    found = of(
        (0.0, 0.5, 2.0, 8, 8, 1, ""),
        (5.0, 9.5, 9.8, 8, 8, 1, ""),
        (9.2, NONE, NONE, 0, 8, 1, "cancelled"),
        end_s=9.0,
    )
    assert found.end_s == 9.0
    assert found.arrived_s.tolist() == [0.0, 5.0]
    assert np.isnan(found.first_s).tolist() == np.isnan(found.last_s).tolist() == [False, True]
    assert found.tokens.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("error", ["timeout", "http_error", "aborted"])
def test_a_trial_tells_of_the_time_before_its_first_failure(error: str) -> None:
    found = of((0.0, 0.5, 2.0, 8, 8, 1, ""), (3.0, NONE, NONE, 0, 8, 1, error), (4.0, 4.5, 6.0, 8, 8, 1, ""))
    assert (found.end_s, found.failed, len(found)) == (3.0, 1, 1)


def test_a_few_failed_requests_do_not_end_a_trial() -> None:
    rows = [(0.02 * at, 0.02 * at + 0.5, 0.02 * at + 1.0, 8, 8, 1, "") for at in range(400)]
    rows[200] = (4.0, NONE, NONE, 0, 8, 1, "timeout")
    found = of(*rows)
    assert (found.end_s, found.failed, len(found)) == (10.0, 1, 399)


def test_a_mean_is_of_the_requests_that_have_the_metric() -> None:
    """An answer of one token has no TPOT; the share that must be answered stands beside the mean."""
    objective = Objective.of(Slo(attainment=0.9, limits=(Limit.parse("tpot mean <= 50"),)).all_criteria())
    assert objective == Objective((Goal("mean", 0.9, (("tpot_ms", 0.05),)),))
    arrived, first, tokens = np.zeros(3), np.full(3, 0.5), np.array([4.0, 0.0, 4.0])
    times = Latencies.of(arrived, first, first + 0.04 * tokens, tokens)
    assert objective.worst(times) == pytest.approx(0.2)
