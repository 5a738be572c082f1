"""Gates on the load and on steadiness: does this trial show a rate that holds, or its first seconds?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from kvbench.core.gates.evidence import EngineFigures, Evidence
from kvbench.core.metrics.metrics import judged_records
from kvbench.core.records import Finding, RequestRecord
from kvbench.core.stats import autocorrelation_time

BATCH_MIN_REQUESTS: Final = 20
BATCH_SHARE: Final = 0.10
DRIFT_MIN_REQUESTS: Final = 40
QUARTERS: Final = 4
_MEDIAN_ERROR: Final = 1.2533 * 1.4826
"""Standard error of a median, times sqrt(n), per median absolute deviation (both for a normal sample)."""


def too_few_requests(evidence: Evidence) -> Finding | None:
    """Enough requests were judged that no single miss decides.

    evidence: 1 / (1 - share) requests at least for each share that the SLO asks (0.99 of a P99), unless its
    interval decides as it is, or another is missed for sure.
    limits: a share near the target still needs many more; the interval says how far it may lie.
    """
    shares = [each for each in evidence.summary.criteria if each.kind == "share"]
    if evidence.stopped_as == "missed" or any((each.upper or 0.0) < each.target for each in shares if each.n):
        return None
    needed, each = max(((_needed(each.target), each) for each in shares), key=lambda pair: pair[0])
    if each.n >= needed or (each.lower is not None and each.lower >= each.target):
        return None
    return Finding(
        "too_few_requests",
        "invalid",
        f"{each.n} requests could be judged; an attainment of {each.target:.1%} cannot be told "
        f"from fewer than {needed}",
        f"send at least {math.ceil(needed / 0.7)} requests a trial",
        {"judged": each.n, "needed": needed},
    )


def _needed(share: float) -> int:
    """How many requests there must be for a single miss to be allowed."""
    return math.ceil(1 / (1 - share) - 1e-9) if share < 1 else 1


def too_short(evidence: Evidence) -> Finding | None:
    """The load was offered for long enough that growth could show.

    evidence: the steady window against 2 median end-to-end latencies and 3 TTFT limits. limits: warns only.
    """
    summary = evidence.summary
    latency_s = (summary.e2el_ms.p50 or 0.0) / 1e3
    needed_s = max(2 * latency_s, 3 * (evidence.slo.tightest("ttft_ms") or 0.0) / 1e3)
    if evidence.stopped_as == "missed" or not summary.judged or summary.window.length_s >= needed_s:
        return None
    return Finding(
        "too_short",
        "warning",
        f"the steady window lasted {summary.window.length_s:.1f} s; a growing queue shows only within some "
        f"{needed_s:.1f} s (2 × the median end-to-end latency, 3 × the TTFT limit)",
        "offer the load for longer: more requests a trial",
        {"window_s": summary.window.length_s, "needed_s": needed_s},
    )


def one_batch(evidence: Evidence) -> Finding | None:
    """Requests came and went: the number in flight is not the number sent.

    evidence: how many requests ended before the last one arrived; below 10 % the trial was one batch, and
    what it met is a batch size. limits: a miss stands all the same, since a longer load is harder still;
    methods that mean to offer a burst only warn.
    """
    sent = [record for record in evidence.records if record.sent_s is not None]
    if len(sent) < BATCH_MIN_REQUESTS or evidence.stopped_as == "missed":
        return None
    last_s = max(record.scheduled_s for record in sent)
    ended = sum(record.last_token_s is not None and record.last_token_s <= last_s for record in sent)
    failed = sum(not record.ok for record in sent)
    if ended + failed >= BATCH_SHARE * len(sent):
        return None
    return Finding(
        "one_batch",
        "invalid" if evidence.attained else "warning",
        f"{ended} of {len(sent)} requests ended before the last one arrived, and "
        f"{evidence.summary.peak_in_flight} were in flight at once: this is one batch, its size is no rate",
        "offer the load for several end-to-end latencies: raise search.trial_s",
        {"ended_before_last_arrival": ended, "sent": len(sent), "last_arrival_s": last_s},
    )


def growing_queue(evidence: Evidence) -> Finding | None:
    """The number of requests that wait for their first token does not grow.

    The growth must be significant and material. Significant: more than 4 standard errors of the fit, and
    more than 2 of the slope that a random walk with this many arrivals shows by chance, whose standard
    deviation is sqrt(1.2 × rate / T): a system right at its capacity looks like one. Material: in ten
    minutes it would add more waiting than the TTFT limit. A trial that met the SLO so far is then missed.

    evidence: the trend of the waiting requests over the steady window. limits: slow growth needs long trials.
    """
    growth = evidence.queue_growth
    if growth is None:
        return None
    peak = evidence.summary.peak_waiting
    return Finding(
        "growing_queue",
        "warning",
        f"the queue grows: by {growth.per_s:.2f} requests a second, {peak} at its peak",
        "the rate is above what the system sustains",
        {"per_s": growth.per_s, "error": growth.error, "by_chance": growth.by_chance, "peak": peak},
    )


def slot_capped(evidence: Evidence) -> Finding | None:
    """The offered load fits into the engine's slots (Little's law: rate × time in a slot ≤ slots).

    A system above that bound keeps its SLO only while the queue has not grown yet; so a trial that met it is
    missed, with this reason. The number then tells of the slots (max_num_seqs, or KV blocks), not of the
    connector.

    evidence: the slots, as the engine tells them or as its running sequences stay at one peak while others
    wait there; the mean time from first to last token. limits: needs the engine's gauges.
    """
    for role in ("decode", "aggregated"):
        engine = evidence.engines.get(role)
        found = None if engine is None else _slots(engine, evidence)
        if engine is None or found is None:
            continue
        slots, seen = found
        times = [_residence_s(record) for record in evidence.records if record.ok]
        residence_s = sum(times) / len(times) if times else 0.0
        if residence_s <= 0 or evidence.summary.offered_rate <= 0:
            continue
        holds = slots * max(1, engine.instances) / residence_s
        if evidence.summary.offered_rate <= holds * (1 + evidence.limits.capacity_margin):
            continue
        return Finding(
            "slot_capped",
            "warning",
            f"{role} runs {slots:.0f} sequences at once{seen}; at {residence_s:.2f} s each that holds "
            f"{holds:.2f} requests a second, and {evidence.summary.offered_rate:.2f} were offered: the slots "
            "are the limit, not the connector",
            "raise max_num_seqs (and KV blocks) of that engine if its memory allows, or offer a lower rate",
            {
                "role": role,
                "slots": slots,
                "instances": engine.instances,
                "residence_s": residence_s,
                "holds_per_s": holds,
                "queued_samples": engine.queued_samples,
                "full_samples": engine.full_samples,
            },
        )
    return None


def _slots(engine: EngineFigures, evidence: Evidence) -> tuple[float, str] | None:
    """Slots of one instance, and how they were seen; None if that is not known."""
    limits, full, queued = evidence.limits, engine.full_samples or 0.0, engine.queued_samples or 0.0
    if engine.running_peak and full >= limits.full_samples and full >= limits.full_share * queued:
        return engine.running_peak, f" and no more while others wait ({full:.0f} of {queued:.0f} samples)"
    return None if engine.slots is None else (float(engine.slots), "")


def _residence_s(record: RequestRecord) -> float:
    return (record.last_token_s or 0.0) - (record.first_token_s or 0.0)


def not_steady(evidence: Evidence) -> Finding | None:
    """TTFT and TPOT do not climb towards their limits during the trial.

    The steady window is cut in four: the medians must rise from each quarter to the next, by more than 4
    standard errors from the first to the last, and, continued for as long again, break the limit. For TTFT
    the rise must also exceed twice what a queue at its capacity wanders by chance, sqrt(1.2 n) services.

    evidence: latencies by their scheduled sends. limits: drifts slower than the trial is long.
    """
    judged = [record for record in judged_records(evidence.records, evidence.summary.window) if record.ok]
    if not evidence.attained or evidence.stopped_as or len(judged) < DRIFT_MIN_REQUESTS:
        return None
    rate = evidence.summary.offered_rate
    wander_ms = 2e3 * math.sqrt(1.2 * len(judged)) / rate if rate > 0 else math.inf
    for metric, values, by_chance in (
        ("tpot_ms", [record.tpot_s for record in judged], 0.0),
        ("ttft_ms", [record.ttft_s for record in judged], wander_ms),
    ):
        limit = evidence.slo.tightest(metric)
        known = [1e3 * value for value in values if value is not None]
        if limit is None or len(known) < DRIFT_MIN_REQUESTS:
            continue
        medians, error = _quarters(known)
        rise = medians[-1] - medians[0]
        rising = all(later > earlier for earlier, later in pairwise(medians))
        expected = medians[-1] + rise * QUARTERS / (QUARTERS - 1)
        if rising and rise > max(evidence.limits.drift_errors * error, by_chance) and expected > limit:
            name = metric.removesuffix("_ms").upper()
            return Finding(
                "not_steady",
                "invalid",
                f"{name} climbs all through the trial, from {medians[0]:.1f} to {medians[-1]:.1f} ms "
                f"(medians of its quarters): in as long again it would break the limit of {limit:g} ms",
                "offer the load for longer, until it is steady: raise search.trial_s",
                {"metric": metric, "medians_ms": medians, "error_ms": error, "limit_ms": limit},
            )
    return None


def _quarters(values: Sequence[float]) -> tuple[list[float], float]:
    """The medians of the four quarters, and the standard error of the difference of the outer two."""
    parts = np.array_split(np.array(values), QUARTERS)
    medians = [float(np.median(part)) for part in parts]
    # What is left after the step from quarter to quarter: neighbours depend on each other there, too.
    rest = np.concatenate([part - median for part, median in zip(parts, medians, strict=True)])
    spread = max(float(np.median(np.abs(rest))), 1e-3)
    independent = max(1.0, len(parts[0]) / autocorrelation_time(rest.tolist()))
    return medians, _MEDIAN_ERROR * spread * math.sqrt(2.0 / independent)
