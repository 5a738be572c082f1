"""What a scenario will cost before anything runs: KV bytes per request, requests per trial, seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvbench.core.physics.model_shapes import ModelShape
from kvbench.core.plan.prospect import prospects
from kvbench.core.plan.prospect_text import shortfall_text
from kvbench.core.scenario.scenario import Scenario, Search
from kvbench.core.search.burst import BURST_S
from kvbench.core.stats import requests_needed
from kvbench.core.transfers.kv_shape import KvTensors, kv_pieces

LAUNCH_S: Final = (0.5, 3.0)
"""An emulated pair is up within these; other engines take longer, so the caller may say."""
_CHECK_S: Final = (0.1, 1.0)
"""Greedy requests and cache reset before the first trial of a cell."""
_BRACKET_TRIALS: Final = 2


@dataclass(frozen=True)
class KvFootprint:
    """KV bytes of one request's prompt: each byte once, and summed over all ranks, in whole blocks."""

    input_len: int
    logical_bytes: int
    wire_bytes: int
    blocks: int
    descriptors: int
    """Of one rank, for blocks that were handed out in a row, after merging."""


@dataclass(frozen=True)
class TimePart:
    """A share of the time estimate, in seconds."""

    name: str
    lower_s: float
    upper_s: float
    how: str


# ---------------------------------------------------------------- bytes


def kv_footprint(
    shape: ModelShape,
    input_len: int,
    tensor_parallel_size: int,
    block_tokens: int,
    tensors: KvTensors = "apart",
) -> KvFootprint:
    """KV of a prompt of ``input_len`` tokens; the last block moves whole."""
    blocks = shape.blocks(input_len, block_tokens)
    pieces = kv_pieces(shape, tensors)
    return KvFootprint(
        input_len=input_len,
        logical_bytes=shape.kv_bytes_per_token() * input_len,
        wire_bytes=shape.wire_bytes_per_token(tensor_parallel_size) * blocks * block_tokens,
        blocks=blocks,
        descriptors=pieces.per_block * (1 if pieces.merge else blocks),
    )


def scenario_footprint(scenario: Scenario, input_len: int, ranks: int) -> KvFootprint:
    """KV of one request of the scenario, that goes to so many tensor parallel ranks."""
    options = scenario.deployment.engine_options
    return kv_footprint(scenario.model.shape, input_len, ranks, options.kv_block_tokens, options.kv_tensors)


# ---------------------------------------------------------------- time


def trial_requests(search: Search, request_rate: float) -> int:
    """Requests in one trial at a rate: ``trial_s`` seconds of them, within the scenario's limits."""
    return min(search.max_requests, max(search.min_requests, round(request_rate * search.trial_s)))


def expected_trials(search: Search) -> int:
    """Trials that a search needs at least: to bracket the answer within a factor of two, and bisect."""
    bisections = (
        math.ceil(math.log2(math.log(2) / math.log1p(search.precision))) if search.precision < 1 else 0
    )
    return min(search.max_trials, _BRACKET_TRIALS + bisections)


def _slo_e2el_s(scenario: Scenario) -> float:
    """End-to-end latency of a request that just meets its limits; a limit not given counts as nothing."""
    latency_ms = scenario.slo.main().e2el_ms(scenario.workload.output_len)
    return min(latency_ms / 1000.0, scenario.request_timeout_s)


def time_parts(
    scenario: Scenario, cells: int, deployments: int, launch_s: tuple[float, float]
) -> Iterator[TimePart]:
    """The parts of the time estimate; rules of thumb, not promises."""
    search = scenario.search
    low, high = launch_s
    limit = scenario.deployment.ready_timeout_s
    yield TimePart(
        "launch",
        deployments * min(low, limit),
        deployments * min(high, limit),
        f"{deployments} deployments × {low:g} to {high:g} s",
    )
    low, high = _CHECK_S[0], _CHECK_S[1] + _slo_e2el_s(scenario)
    how = f"{cells} cells × {low:.1f} to {high:.1f} s"
    yield TimePart("correctness checks", cells * low, cells * high, how)
    drain = _slo_e2el_s(scenario)
    if search.method == "fixed":
        arrivals = sum(trial_requests(search, rate) / rate for rate in search.rates)
        longest = arrivals + len(search.rates) * scenario.request_timeout_s
        how = f"{cells} cells × {len(search.rates)} rates, {arrivals:.3g} s of arrivals in all"
        yield TimePart("trials", cells * arrivals, cells * longest, how)
        return
    fewest, most = expected_trials(search), search.max_trials
    if search.method == "burst" or search.compare_burst:
        how = f"{cells} cells × {fewest} to {most} trials × {BURST_S:g} s and up to {drain:.1f} s to drain"
        least, longest = fewest * BURST_S, most * (BURST_S + drain + scenario.request_timeout_s)
        yield TimePart("burst", cells * least, cells * longest, how)
        if search.method == "burst":
            return
    arrivals = search.max_trial_s or search.trial_s
    if search.start_rate is not None and search.max_trial_s is None:
        arrivals = trial_requests(search, search.start_rate) / search.start_rate
    if search.equal_rate and search.method == "sustained" and len(scenario.connectors) > 1:
        again = max(0, deployments - 1)
        yield TimePart(
            "one equal rate",
            again * min(launch_s[0], limit),
            again * min(launch_s[1], limit) + cells * (max(arrivals, search.trial_s) + drain),
            f"{again} deployments once more, {cells} cells × one trial where two connectors found a rate",
        )
    yield TimePart(
        "trials",
        cells * fewest * min(arrivals, search.trial_s),
        cells * most * (max(arrivals, search.trial_s) + drain),
        f"{cells} cells × {fewest} to {most} trials × {arrivals:.3g} s and up to {drain:.1f} s to drain",
    )


def notes(scenario: Scenario) -> Iterator[str]:
    """What a user should know beforehand although it is no mistake."""
    search, slo = scenario.search, scenario.slo.main()
    if search.method in ("fixed", "burst") or not slo.has_limits:
        return
    share = max(slo.shares)
    needed = requests_needed(0, share, search.confidence)
    if search.max_requests < needed:
        yield (
            f"a trial of {search.max_requests} requests can never show an attainment of {share:g} "
            f"with confidence {search.confidence:g}: that takes {needed}; raise search.max_requests"
        )
    elif search.min_requests < needed:
        yield (
            f"a trial of fewer than {needed} requests cannot show an attainment of {share:g} with "
            f"confidence {search.confidence:g}, even with none missed; raise search.min_requests"
        )
    slowest = search.min_requests / search.trial_s
    if search.start_rate is None or search.start_rate < slowest:
        yield (
            f"below {slowest:.3g} requests/s a trial takes longer than {search.trial_s:g} s, "
            f"since it has at least {search.min_requests} requests"
        )
    expected = prospects(scenario)
    if expected and all(each.even > search.precision for each in expected):
        best = min(expected, key=lambda each: each.even)
        yield f"the precision asked for is out of reach: {shortfall_text(search, slo, best)}"
