"""Table of virtual systems: name, about, prefill_s, tokens, step, ttft_s, tpot_s, and special properties.

Latencies and batches are those of servers with a few hundred output tokens (100 to 300 concurrent requests
at the maximum rate), except for the two marked hard. The overall figures include all systems.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pipeline import Step, System

TABLE: Sequence[System] = (
    System(
        "md1", "M/D/1 prefill, TTFT limit 12 services", 0.05, 800, Step(0.0125), 0.6 + 0.0125, truth="md1"
    ),
    System(
        *("md1-p99", "M/D/1 prefill, 99 % within 8 services", 0.05, 1000, Step(0.0125), 0.4 + 0.0125),
        attainment=0.99,
        hard=True,
        truth="md1",
    ),
    System(
        "md1-wide",
        "M/D/1 prefill, TTFT limit 40 services: a long memory",
        *(0.1, 1000, Step(0.02), 4.0 + 0.02),
        truth="md1",
    ),
    System(
        "md1-small",
        "M/D/1 with only 20 requests under way: each latency tells little",
        *(0.02, 16, Step(0.02), 0.25 + 0.02),
        hard=True,
        truth="md1",
    ),
    System(
        "prefill",
        "bound by prefill, decode slows with the batch",
        *(0.06, 512, Step(0.012, 2e-5), 1.5, 0.05),
        slots=256,
    ),
    System(
        "transfer",
        "bound by the KV transfer behind a faster prefill",
        *(0.025, 512, Step(0.012, 1e-5), 1.0, 0.05),
        transfer_s=0.04,
    ),
    System("slots", "bound by 192 decode slots", 0.01, 512, Step(0.015), 1.0, 0.05, slots=192),
    System(
        *("tpot", "bound by TPOT, which grows with the batch", 0.02, 400, Step(0.010, 1e-4), 3.0, 0.040),
        slots=512,
    ),
    System(
        "two-stage",
        "prefill and decode slots give way at nearly the same rate",
        *(0.05, 512, Step(0.013), 1.0, 0.05),
        slots=136,
    ),
    System(
        "cliff",
        "TTFT limit of 100 services: all is well up to 1 % below the capacity",
        *(0.04, 500, Step(0.02), 4.0, 0.05),
    ),
    System(
        *("drift", "prefill 2 % slower and faster over 150 s", 0.04, 500, Step(0.02), 0.8, 0.05),
        drift=(0.02, 150.0),
    ),
    System(
        "dip",
        "attainment sinks at two thirds of the true rate, and recovers above",
        *(0.01, 400, Step(0.010, 5e-5, (100, 156), 1.49), 3.0, 0.026),
        slots=512,
    ),
    System(
        "broken-dip",
        "from two fifths of the highest rate on the SLO is broken, from three fifths on it is met again",
        *(0.01, 400, Step(0.010, 5e-5, (100, 156), 1.8), 3.0, 0.026),
        slots=512,
    ),
    System("bursty", "gamma arrivals of shape 0.35", 0.03, 500, Step(0.015), 0.8, 0.05, burstiness=0.35),
    System(
        *("jitter", "prefill times vary (log-normal, variation 1)", 0.03, 500, Step(0.015), 0.8, 0.05),
        variation=1.0,
    ),
    System(
        "failing", "2 % of all requests fail at any rate", 0.03, 500, Step(0.015), 0.5, 0.05, failing=0.02
    ),
    System("2p", "two prefill servers in turn", 0.08, 500, Step(0.015, 1e-5), 1.2, 0.05, prefill_servers=2),
    System(
        *("never", "keeps its SLO up to the highest rate allowed", 1e-4, 100, Step(0.01), 5.0, 0.05),
        truth="above",
        max_rate=60.0,
    ),
    System(
        *("always", "one request alone breaks the SLO", 0.5, 100, Step(0.01), 0.4, 0.05),
        truth="below",
        min_rate=0.2,
        max_rate=50.0,
    ),
)

SYSTEMS = {system.name: system for system in TABLE}
