"""A queue that grows, found in the records of whole trials on virtual systems whose highest rate is known."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.core.gates.evidence import Evidence
from kvbench.core.gates.steady import growing_queue
from kvbench.core.metrics.metrics import summarise
from kvbench.core.records import RequestRecord
from kvbench.core.slo import Slo
from tools.perf_search.pipeline import System, offsets, run_open
from tools.perf_search.systems import SYSTEMS
from tools.perf_search.truth import fingerprint, known

SEEDS = 6


def grows(system: System, load: float, latencies: float, seed: int) -> bool:
    """Whether the gate says so of one trial at ``load`` times the true rate, so many latencies long."""
    truth = known()[fingerprint(system)]
    rng = np.random.default_rng([5, seed])
    rate = truth.rate * load
    seconds = max(600 / rate, latencies * truth.latency_s)
    outcomes = run_open(system, offsets(system, rate, seconds, rng), rng)
    times = zip(outcomes.arrived_s.tolist(), outcomes.first_s.tolist(), outcomes.end_s.tolist(), strict=True)
    records = [
        RequestRecord(
            str(i), at, 1, system.tokens, sent_s=at, first_token_s=first, last_token_s=last,
            output_len=system.tokens,
        )
        for i, (at, first, last) in enumerate(times)
    ]  # fmt: skip
    slo = Slo(ttft_ms=1e3 * system.ttft_s, attainment=system.attainment)
    summary = summarise(records, slo, rate, float(outcomes.end_s.max()))
    return growing_queue(Evidence(records, summary, slo)) is not None


@pytest.mark.parametrize("name", ["md1", "md1-wide", "jitter", "slots", "cliff"])
def test_a_queue_grows_above_the_true_rate_and_nowhere_below(name: str) -> None:
    system = SYSTEMS[name]
    found = {load: [grows(system, load, 6, seed) for seed in range(SEEDS)] for load in (0.8, 0.97, 1.3)}
    assert not any(found[0.8] + found[0.97])
    assert sum(found[1.3]) >= 0.5 * SEEDS, found[1.3]
