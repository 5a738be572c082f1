"""Warnings about a row of figures without single requests, mainly for imported rows.

Each rule is a function LoadRow → Finding | None, and silent without its figures. "invalid": the number is not
what it claims to be; "warning": needs care; "note": worth knowing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from kvbench.core.findings.load_row import LoadRow, figure_text
from kvbench.core.gates.transfer import MARGIN
from kvbench.core.records import Finding
from kvbench.core.search.data import BURST_S
from kvbench.core.slo import Limit

PERCENTILES: Final = (50, 90, 99)
ARRIVAL_ERRORS: Final = 3.0
"""Allowed standard deviations, sqrt(k) / rate: chance exceeds them once in 700 times."""


def impossible_prefill(row: LoadRow) -> Finding | None:
    """Prompts were computed no faster than the GPUs can. Served in order at peak speed, the k-th request at
    rate r is ready no sooner than k × s after the first (s: time of one prompt), so its TTFT is at least k ×
    s - k / r. Percentiles below that, with three standard deviations for random arrivals, mean that prompts
    were not computed."""
    setting, rate, n = row.setting, row.request_rate, row.requests
    if setting.work is None or rate is None or not n or not math.isfinite(rate) or row.method == "trace":
        return None
    flop = setting.work.flop(row.cell.input_len)
    for peak, how in ((setting.prefill_flops, "any precision"), (setting.prefill_flops_16bit, "16 bits")):
        if not peak:
            continue
        one_s = flop / (peak * MARGIN)
        for percent in PERCENTILES:
            reported, k = row.get(f"p{percent}_ttft_ms"), n * percent / 100
            least_s = k * one_s - (k + ARRIVAL_ERRORS * math.sqrt(k)) / rate
            if reported is not None and reported / 1e3 < least_s:
                return _impossible(row, flop, peak, how, (percent, reported, least_s))
    return None


def _impossible(row: LoadRow, flop: float, peak: float, how: str, bound: tuple[int, float, float]) -> Finding:
    percent, reported, least_s = bound
    rate = row.request_rate or 0.0
    precision = "" if how == "any precision" else f" in {how}, as the weights are"
    return Finding(
        "impossible_prefill",
        "invalid",
        f"prompts were not computed: {figure_text(rate)} prompts a second of {row.cell.input_len:,} "
        f"tokens are {figure_text(rate * flop / 1e15)} PFLOP/s, {figure_text(rate * flop / peak)} times the "
        f"{figure_text(peak / 1e15)} PFLOP/s peak of {row.setting.hardware or 'the GPUs'}{precision}. "
        f"Served in order, P{percent} TTFT would be at least {figure_text(least_s * 1e3)} ms; "
        f"reported: {figure_text(reported)} ms",
        "prompts came from a prefix cache: empty it before each load and use new prompts",
        {
            "excess": rate * flop / (row.setting.prefill_flops or peak),
            "flop": flop,
            "peak": peak,
            "precision": how,
            "percentile": percent,
            "told_ms": reported,
            "least_s": least_s,
        },
    )


Rule = Callable[[LoadRow], "Finding | None"]

LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
BURST_LIKE: Final = 0.5
"""Arrivals shorter than this share of the mean end-to-end latency are a burst."""
KEPT_UP: Final = 0.95
"""Least share of completed to arrived requests."""
TOLERANCE: Final = 0.01
"""Tolerance between figures of one row: tables round."""
P99_LEAST: Final = 100
"""Fewest requests for a P99."""
SPLIT: Final = 5.0
"""P90 / P50 of TTFT from which some requests waited and some did not."""


def burst(row: LoadRow) -> Finding | None:
    """The load lasted longer than a request; otherwise it was one batch."""
    arrivals_s, e2el_s, duration_s = row.arrivals_s, row.e2el_s, row.get("duration_s")
    if arrivals_s is None or e2el_s is None or row.requests is None or row.request_rate is None:
        return None
    if row.requests < 2 or arrivals_s >= BURST_LIKE * e2el_s:
        return None
    times = row.requests / row.request_rate
    name = f"n = {row.requests} = {figure_text(times)} × rate"
    drain = completed = ""
    if duration_s is not None:
        drain_s = figure_text(duration_s - arrivals_s)
        drain = f"; the run lasted {figure_text(duration_s)} s, {drain_s} s of it drain"
    if done := row.get("request_throughput"):
        completed = (
            f"; {figure_text(done)} were completed per second, "
            f"{figure_text(row.request_rate / done)} times fewer than offered"
        )
    burst_of = "five-second burst" if abs(arrivals_s - BURST_S) < 0.05 * BURST_S else "burst"
    return Finding(
        "burst",
        "invalid",
        f"a {burst_of}: {name}, so all requests arrived within {figure_text(arrivals_s)} s, while one took "
        f"{figure_text(e2el_s)} s on average{drain}{completed}. {figure_text(row.request_rate)} req/s is the "
        "size of a batch, not a sustained rate",
        "offer the load for several end-to-end latencies: send more requests at the same rate",
        {
            "excess": e2el_s / arrivals_s,
            "arrivals_s": arrivals_s,
            "e2el_s": e2el_s,
            "duration_s": duration_s,
            "requests": row.requests,
        },
    )


def slot_cap(row: LoadRow) -> Finding | None:
    """Requests in flight fit into the engine's slots; otherwise the rest waited for others."""
    open_at_once, n = row.get("peak_concurrent_requests"), row.requests
    p50, p90 = row.get("p50_ttft_ms"), row.get("p90_ttft_ms")
    if open_at_once is None or not n or row.setting.judged:
        return None
    seen = decoded_at_once(row)
    slots = row.setting.slots
    slots_text = f"max_num_seqs = {slots}" if slots else ""
    if slots is None:
        if seen is None or p50 is None or p90 is None or p90 < SPLIT * p50 or seen > 0.9 * open_at_once:
            return None
        slots = round(seen)
        slots_text = f"about {slots} slots, according to the table"
    if open_at_once <= slots:
        return None
    waited = open_at_once - slots
    text = (
        f"{figure_text(open_at_once)} requests were open at once with {slots_text}: "
        f"{figure_text(waited)} ({waited / n:.0%}) had to wait for another one to end"
    )
    if seen is not None:
        text += f"; peak output × ITL implies about {figure_text(seen)} decoded at a time"
    if p50 is not None and p90 is not None and p90 > SPLIT * p50:
        text += f"; TTFT is {figure_text(p50)} ms at P50 and {figure_text(p90)} ms at P90"
    return Finding(
        "slot_cap",
        "warning",
        text,
        "TTFT shows how long others decode, not how fast prefill or the KV transfer is: raise "
        "max_num_seqs or send fewer requests at once",
        {
            "excess": waited / n,
            "open_at_once": open_at_once,
            "slots": slots,
            "decoded_at_once": seen,
            "waited": waited,
        },
    )


def decoded_at_once(row: LoadRow) -> float | None:
    """Return the requests decoded concurrently at the peak (Little's law: peak output tok/s × ITL)."""
    peak, gap = row.get("peak_output_throughput"), row.get("p50_itl_ms") or row.get("p50_tpot_ms")
    return peak * gap / 1e3 if peak and gap else None


def mean_only_slo(row: LoadRow) -> Finding | None:
    """Limits that hold on average also hold for nearly all requests."""
    if row.setting.judged:
        return None
    texts = [text for limit in row.setting.limits if (text := _mean_only(row, limit))]
    if not texts:
        return None
    return Finding(
        "mean_only_slo",
        "warning",
        f"within the SLO on average only: {'; '.join(texts)}",
        "judge each request: an SLO states the share of requests within the limits",
        {"limits": [limit.short() for limit in row.setting.limits]},
    )


def _mean_only(row: LoadRow, limit: Limit) -> str:
    latency = limit.metric.removesuffix("_ms")
    mean = row.get(f"mean_{limit.metric}")
    if limit.share is not None or mean is None or mean > limit.limit:
        return ""
    beyond = [
        (p, value) for p in PERCENTILES if (value := row.get(f"p{p}_{limit.metric}")) and value > limit.limit
    ]
    if not beyond:
        return ""
    figures = ", ".join(f"P{p} {figure_text(value)}" for p, value in beyond)
    name = latency.upper()
    return (
        f"{name} mean {figure_text(mean)} ≤ {figure_text(limit.limit)} ms, but {figures}: more than "
        f"{100 - beyond[0][0]} % of the requests exceeded it, up to "
        f"{figure_text(beyond[-1][1] / limit.limit)} times"
    )


def not_kept_up(row: LoadRow) -> Finding | None:
    """Completed requests per second match arrivals; otherwise latencies grow with the trial's length. Not for
    sessions: their turns wait for answers."""
    done, rate, arrivals_s, e2el_s = (
        row.get("request_throughput"),
        row.arrival_rate,
        row.arrivals_s,
        row.e2el_s,
    )
    if not done or rate is None or arrivals_s is None or e2el_s is None or burst(row) is not None:
        return None
    if row.client_late or row.sessions:
        return None
    n, duration_s = row.requests or 0, row.get("duration_s")
    drain_s = (duration_s if duration_s is not None else n / done) - arrivals_s
    median_ms = row.get("p50_e2el_ms") or _median_e2el(row)
    # The last requests alone make a run longer than its arrivals; the server still keeps up.
    ordinary = (
        median_ms is not None
        and (median_ms <= 0.25e3 * arrivals_s or _steady(row, arrivals_s))
        and drain_s * 1e3 <= 1.5 * median_ms
    )
    if done >= KEPT_UP * rate or ordinary:
        return None
    return Finding(
        "not_kept_up",
        "warning",
        f"the system did not keep up: {figure_text(done)} of {figure_text(rate)} req/s completed, and "
        f"{figure_text(drain_s)} s passed after the last arrival. Latencies depend on how long the "
        "load was offered",
        "compare completed requests per second; compare latencies only at rates that both keep up with",
        {"excess": rate / done, "completed_per_s": done, "arrived_per_s": rate, "drain_s": drain_s},
    )


def _steady(row: LoadRow, arrivals_s: float) -> bool:
    """Return whether the remaining load cannot explain the latencies by even growth."""
    p50_ms, p99_ms = row.get("p50_e2el_ms"), row.get("p99_e2el_ms")
    if p50_ms is None or p99_ms is None:
        return False
    return 2 * (p99_ms - p50_ms) <= 1e3 * arrivals_s * (1 / KEPT_UP - 1)


def _median_e2el(row: LoadRow) -> float | None:
    ttft, tpot = row.get("p50_ttft_ms"), row.get("p50_tpot_ms")
    return None if ttft is None or tpot is None else ttft + tpot * (row.cell.output_len - 1)


def contradictory(row: LoadRow) -> Finding | None:
    """Figures of one row agree: rates with counts over time, percentiles in order."""
    wrong = [*_wrong_rates(row), *_wrong_order(row)]
    if not wrong:
        return None
    return Finding(
        "contradictory",
        "warning",
        f"figures in one row contradict each other: {'; '.join(wrong)}",
        "the row may combine several runs, or contain a typing error",
        {"contradictions": wrong},
    )


def _wrong_rates(row: LoadRow) -> list[str]:
    seconds, completed = row.get("duration_s"), row.get("completed")
    prompts, output = row.get("total_input_tokens"), row.get("total_output_tokens")
    both = prompts + output if prompts is not None and output is not None else None
    wrong = []
    counts = (
        ("request_throughput", completed),
        ("output_throughput", output),
        ("total_token_throughput", both),
    )
    for name, count in counts:
        reported = row.get(name)
        if not seconds or not reported or count is None:
            continue
        computed = count / seconds
        # Reported values are rounded to two decimal places.
        if abs(reported - computed) > TOLERANCE * computed + 0.006:
            wrong.append(
                f"{name} {figure_text(reported)}, but {figure_text(count)} in {figure_text(seconds)} s"
            )
    return wrong


def _wrong_order(row: LoadRow) -> list[str]:
    wrong = []
    for latency in LATENCIES:
        known = [(p, value) for p in PERCENTILES if (value := row.get(f"p{p}_{latency}_ms")) is not None]
        values = [value for _, value in known]
        if values != sorted(values):
            listed = ", ".join(f"P{p} {figure_text(value)}" for p, value in known)
            wrong.append(f"{latency.upper()} falls from percentile to percentile: {listed}")
    return wrong


def failures(row: LoadRow) -> Finding | None:
    """All requests were answered; survivors' latencies are too good."""
    failed, completed = row.get("failed"), row.get("completed")
    if not failed or row.setting.judged:
        return None
    of = failed + completed if completed is not None else row.requests
    share = f" of {figure_text(of)}" if of else ""
    if completed == 0:
        return Finding(
            "failures",
            "invalid",
            f"all {figure_text(failed)} requests failed: nothing was measured",
            "check why they failed",
            {"failed": failed, "completed": completed},
        )
    return Finding(
        "failures",
        "warning",
        f"{figure_text(failed)}{share} requests failed; latencies cover only the others",
        "use goodput instead, or check why they failed",
        {"failed": failed, "completed": completed},
    )


def few_requests(row: LoadRow) -> Finding | None:
    n = row.get("completed")
    n = row.requests if n is None else n
    if not n or n >= P99_LEAST or not any(row.get(f"p99_{latency}_ms") for latency in LATENCIES):
        return None
    return Finding(
        "few_requests",
        "note",
        f"{figure_text(n)} requests: P99 is between the two largest values, so treat it as a maximum",
        f"send at least {P99_LEAST} requests",
        {"requests": n},
    )


RULES: Final[tuple[Rule, ...]] = (
    impossible_prefill,
    burst,
    contradictory,
    mean_only_slo,
    slot_cap,
    not_kept_up,
    failures,
    few_requests,
)
"""Rules by importance."""


def suspicions(row: LoadRow) -> list[Finding]:
    """Return the warnings of one row, most important first."""
    return [finding for rule in RULES if (finding := rule(row)) is not None]


def same_twice(rows: Sequence[LoadRow]) -> list[list[LoadRow]]:
    """Return groups of rows that agree in every digit: one measurement shown several times."""
    groups: dict[tuple[tuple[str, float], ...], list[LoadRow]] = {}
    for row in rows:
        latencies = tuple(
            sorted((name, value) for name, value in row.figures.items() if name.endswith("_ms"))
        )
        if len(latencies) >= 4:
            groups.setdefault((*latencies, ("", row.get("duration_s") or 0.0)), []).append(row)
    return [group for group in groups.values() if len(group) > 1]
