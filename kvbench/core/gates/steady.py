"""Gates on the load and its steadiness: is the rate sustained, by one system?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.gates.evidence import EngineFigures, Evidence
from kvbench.core.metrics.metrics import judged_records
from kvbench.core.records import Finding, RequestRecord
from kvbench.core.stats import autocorrelation_time

BATCH_MIN_REQUESTS: Final = 20
BATCH_SHARE: Final = 0.10
"""Share of requests ended before the last arrival, below which the trial is one batch."""
DRIFT_MIN_REQUESTS: Final = 40
QUARTERS: Final = 4
_MEDIAN_ERROR: Final = 1.2533 * 1.4826
"""Standard error of a median times sqrt(n), in median absolute deviations (normal sample)."""


def too_few_requests(evidence: Evidence) -> Finding | None:
    """There were enough requests that no single miss decides. evidence: at least 1 / (1 - share) requests for
    each share that the SLO requires (0.99 for a P99), unless its interval is already conclusive or another
    criterion is certainly missed. limits: a share near the target still needs many more requests; see its
    interval."""
    shares = [criterion for criterion in evidence.summary.criteria if criterion.kind == "share"]
    if evidence.stopped_as == "missed" or any(
        (share.upper or 0.0) < share.target for share in shares if share.n
    ):
        return None
    needed, share = max(((_min_requests(share.target), share) for share in shares), key=lambda pair: pair[0])
    if share.n >= needed or (share.lower is not None and share.lower >= share.target):
        return None
    return Finding(
        "too_few_requests",
        "invalid",
        f"{share.n} requests could be judged; an attainment of {share.target:.1%} cannot be judged "
        f"from fewer than {needed}",
        f"send at least {math.ceil(needed / 0.7)} requests a trial",
        {"judged": share.n, "needed": needed},
    )


def _min_requests(share: float) -> int:
    """Return the smallest number of requests that allows one miss."""
    return math.ceil(1 / (1 - share) - 1e-9) if share < 1 else 1


def too_short(evidence: Evidence) -> Finding | None:
    """The load was offered for long enough that growth could show. evidence: the steady window against 2
    median end-to-end latencies and 3 TTFT limits. limits: warns only."""
    summary = evidence.summary
    latency_s = (summary.e2el_ms.p50 or 0.0) / 1e3
    needed_s = max(2 * latency_s, 3 * (evidence.slo.tightest("ttft_ms") or 0.0) / 1e3)
    if evidence.stopped_as == "missed" or not summary.judged or summary.window.length_s >= needed_s:
        return None
    return Finding(
        "too_short",
        "warning",
        f"the steady window lasted {summary.window.length_s:.1f} s; detecting a growing queue takes about "
        f"{needed_s:.1f} s (2 × the median end-to-end latency, 3 × the TTFT limit)",
        "offer the load for longer: more requests a trial",
        {"window_s": summary.window.length_s, "needed_s": needed_s},
    )


def one_batch(evidence: Evidence) -> Finding | None:
    """Requests came and went: the number in flight is not the number sent.

    evidence: how many requests ended before the last one arrived; below 10 % the trial was one batch, and
    what it met is a batch size.
    limits: a miss still counts, since a longer load is harder; burst methods only warn."""
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
        f"{evidence.summary.peak_in_flight} were in flight at once: this is one batch, not a rate",
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
        f"the queue grows by {growth.per_s:.2f} req/s; it held {peak} requests at its peak",
        "the rate is above what the system sustains",
        {"per_s": growth.per_s, "error": growth.error, "by_chance": growth.by_chance, "peak": peak},
    )


def slot_capped(evidence: Evidence) -> Finding | None:
    """The offered load fits into the engine's slots (Little's law: rate × time in a slot ≤ slots).

    A system above that bound meets its SLO only until the queue has grown, so a met trial becomes missed with
    this reason. The result then describes the slots (max_num_seqs, or KV blocks), not the connector.

    evidence: the slots reported by the engine, or the peak of its running sequences while others wait; the
    mean time from first to last token. limits: needs the engine's gauges."""
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
            f"each {role} engine runs {slots:.0f} sequences at once{seen}; at {residence_s:.2f} s per "
            f"sequence, {max(1, engine.instances)} × {slots:.0f} slots serve at most {holds:.2f} req/s, but "
            f"{evidence.summary.offered_rate:.2f} req/s were offered: the slots are the limit, not the "
            "connector",
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
    """Return one instance's slots and how they were observed."""
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
    the rise must also exceed twice the random fluctuation of a queue at its capacity, sqrt(1.2 n) service
    times.

    evidence: latencies by their scheduled sends. limits: drifts slower than the trial is long."""
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
                f"{name} rises throughout the trial, from {medians[0]:.1f} to {medians[-1]:.1f} ms "
                f"(medians of its quarters): in the same time again it would exceed the limit of {limit:g} "
                "ms",
                "offer the load for longer, until it is steady: raise search.trial_s",
                {"metric": metric, "medians_ms": medians, "error_ms": error, "limit_ms": limit},
            )
    return None


def _quarters(values: Sequence[float]) -> tuple[list[float], float]:
    """Return the medians of the quarters, and the standard error between the outer two."""
    parts = np.array_split(np.array(values), QUARTERS)
    medians = [float(np.median(part)) for part in parts]
    # Residuals after the step from quarter to quarter: neighbours are correlated there, too.
    rest = np.concatenate([part - median for part, median in zip(parts, medians, strict=True)])
    spread = max(float(np.median(np.abs(rest))), 1e-3)
    independent = max(1.0, len(parts[0]) / autocorrelation_time(rest.tolist()))
    return medians, _MEDIAN_ERROR * spread * math.sqrt(2.0 / independent)


LEAST: Final = 60
"""Fewest values to look for two populations."""
LEAST_SHARE: Final = 0.1
LEAST_RATIO: Final = 1.3
BY_CHANCE: Final = 1e-6
"""p-value of the test."""
STRETCHES: Final = 3.0
"""Standard errors above chance from which neighbours are correlated."""
LONGEST_TURN: Final = 8
"""Longest pattern of servers that is searched."""
LEAST_TURN_SPREAD: Final = 0.5
"""Least spread of slow shares between positions of a pattern."""
PER_LENGTH: Final = 20
"""Requests of one length for a median; fewer are pooled with similar lengths."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Populations:
    """Two populations of a latency: ``slow`` per value; ``turn``: length of the pattern, or 0."""

    slow: npt.NDArray[np.bool_]
    medians: tuple[float, float]
    turn: int

    @property
    def share(self) -> float:
        """Return the share of slow values."""
        return float(self.slow.mean())


def two_populations(evidence: Evidence) -> Finding | None:
    """Latencies are those of one system, and not of a fast and a slow one.

    evidence: TTFT (without the part that depends on the prompt's length) and TPOT of 60 requests and more.
    They fall into two kinds if on a log scale the middle third between two medians is emptier than a single
    hill allows: against the same width at the smaller kind, with an error of 1 in a million. If slow ones
    come in a regular pattern, such as every second request behind two servers, it is a warning, since prompts
    have no pattern. limits: a note without a pattern, since caches and preemption also cause two kinds; not
    reported if slow ones come in series, as with queues, bursts and pauses, or if the kinds overlap."""
    if evidence.reuse_expected:
        return None
    judged = judged_records(evidence.records, evidence.summary.window)
    records = sorted((row for row in judged if row.ok), key=lambda row: row.sent_s or row.scheduled_s)
    ttft = [(record.ttft_s, float(record.input_len)) for record in records]
    tpot = [(record.tpot_s, 0.0) for record in records]
    found = []
    for name, values in (("TTFT", ttft), ("TPOT", tpot)):
        known = [(value, length) for value, length in values if value is not None and value > 0]
        if len(known) >= LEAST:
            kinds = populations([value for value, _ in known], [length for _, length in known])
            found += [] if kinds is None else [(name, kinds)]
    if not found:
        return None
    name, kinds = max(found, key=lambda pair: pair[1].turn > 0)
    fast_ms, slow_ms = (1e3 * median for median in kinds.medians)
    order = f", in a pattern that repeats every {kinds.turn} requests" if kinds.turn else ""
    return Finding(
        "two_populations",
        "warning" if kinds.turn else "note",
        f"{name} has two populations: {fast_ms:.4g} ms at the median of {1 - kinds.share:.0%} of the "
        f"requests, {slow_ms:.4g} ms of the other {kinds.share:.0%}{order}",
        "the servers used in turn are not equal: measure each one alone and check the slow one"
        if kinds.turn
        else "cached prompts, preemption or unequal servers can cause this: possibly only one population "
        "meets the SLO",
        {"metric": name, "fast_ms": fast_ms, "slow_ms": slow_ms, "slow_share": kinds.share,
         "turn": kinds.turn},
    )  # fmt: skip


def populations(values: Sequence[float], lengths: Sequence[float] = ()) -> Populations | None:
    """Return the two populations of positive values in order of sending, or None for one. ``lengths``: of the
    prompts, whose effect is removed first. The cut has the least variance inside the parts (Otsu 1979), on a
    log scale."""
    logs: FloatArray = np.log(np.asarray(values, np.float64))
    rest = logs - _with_length(logs, np.asarray(lengths, np.float64)) if len(lengths) else logs
    cut = _best_split(np.sort(rest))
    slow = rest > cut
    share = float(slow.mean())
    if not LEAST_SHARE <= share <= 1 - LEAST_SHARE:
        return None
    low, high = float(np.median(rest[~slow])), float(np.median(rest[slow]))
    if high - low < math.log(LEAST_RATIO) or not _are_separate(rest, low, high):
        return None
    turn = _turn(slow)
    if not turn and _in_stretches(slow):
        return None
    medians = float(np.exp(np.median(logs[~slow]))), float(np.exp(np.median(logs[slow])))
    return Populations(slow, medians, turn)


def _best_split(ordered: FloatArray) -> float:
    n = len(ordered)
    sums, count = np.cumsum(ordered)[:-1], np.arange(1, n)
    between = (sums[-1] + ordered[-1]) * count / n - sums
    best = int(np.argmax(between**2 / (count * (n - count))))
    return float(ordered[best] + ordered[best + 1]) / 2


def _are_separate(values: FloatArray, low: float, high: float) -> bool:
    """Return whether the valley between two medians is too deep for one peak. A unimodal density is nowhere
    between two points below the lower of them, so a value is in the valley at least as often as in an equal
    window at the smaller peak."""
    width = (high - low) / 3
    inside = [int(np.sum(np.abs(values - center) <= width / 2)) for center in (low, (low + high) / 2, high)]
    valley, peak = inside[1], min(inside[0], inside[2])
    return peak > valley and _at_most(valley, valley + peak) < BY_CHANCE


def _at_most(least: int, n: int) -> float:
    """Return Chernoff's bound of P(X ≤ least) for n fair coins; least < n / 2."""
    heads = least / n
    entropy = sum(-share * math.log(share) for share in (heads, 1 - heads) if share > 0)
    return math.exp(n * (entropy - math.log(2)))


def _with_length(logs: FloatArray, lengths: FloatArray) -> FloatArray:
    """Return the median at each length, or at similar lengths."""
    if len(np.unique(lengths)) == 1:
        return np.zeros_like(logs)
    order = np.argsort(lengths, kind="stable")
    found = np.empty_like(logs)
    for part in np.array_split(order, max(1, len(logs) // PER_LENGTH)):
        found[part] = np.median(logs[part])
    return found


def _in_stretches(slow: npt.NDArray[np.bool_]) -> bool:
    """Return whether neighbours are correlated: then time separates the values, as queues and bursts do."""
    share, pairs = float(slow.mean()), len(slow) - 1
    alike = share**2 + (1 - share) ** 2
    found = float((slow[1:] == slow[:-1]).mean())
    return found - alike > STRETCHES * math.sqrt(alike * (1 - alike) / pairs)


def _turn(slow: npt.NDArray[np.bool_]) -> int:
    """Return the period of the slow requests, or 0. By chance the shares per position vary as χ² with turn −
    1 degrees; Chernoff bounds its tail by (x/d · e^(1 − x/d))^(d/2)."""
    share, best, widest = float(slow.mean()), 0, LEAST_TURN_SPREAD
    for turn in range(2, LONGEST_TURN + 1):
        groups = [slow[position::turn] for position in range(turn)]
        shares = [float(group.mean()) for group in groups]
        squares = sum(
            len(group) * (group_share - share) ** 2 / (share * (1 - share))
            for group, group_share in zip(groups, shares, strict=True)
        )
        free, spread = turn - 1, max(shares) - min(shares)
        ratio = max(1.0, squares / free)
        by_chance = free / 2 * (math.log(ratio) + 1 - ratio)
        if by_chance < math.log(BY_CHANCE / LONGEST_TURN) and spread >= widest + 0.01 * (best > 0):
            best, widest = turn, spread
    return best
