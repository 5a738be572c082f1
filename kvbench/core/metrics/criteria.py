"""Whether requests meet an SLO, one by one and together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from kvbench.core.records import RequestRecord
from kvbench.core.slo import (
    METRICS,
    SESSION_METRICS,
    Criterion,
    CriterionKind,
    Slo,
    latencies_ms,
    misses_allowed,
)
from kvbench.core.stats import autocorrelation_time, share_interval

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class CriterionResult:
    """One criterion of the SLO over the judged requests. ``value`` of a share is in 0…1, of a mean in ms.
    ``n``: requests that were counted; None values: nothing could be. ``met`` goes by the point estimate."""

    text: str
    kind: CriterionKind
    target: float
    value: float | None
    lower: float | None
    upper: float | None
    n: int
    met: bool


def met(record: RequestRecord, slo: Slo, ended_s: float | None = None) -> bool | None:
    """Return True (met), False (missed) or None (cancelled before a decision). ``ended_s``: end of the trial
    that cancelled it, in seconds since its start."""
    broken = misses(record, slo, ended_s)
    if broken:
        return False
    return None if record.error == "cancelled" else True


def misses(record: RequestRecord, slo: Slo, ended_s: float | None = None) -> tuple[str, ...]:
    """Return a miss's causes: "ttft", "tpot", "e2el" or its failure class. Empty if it is no miss."""
    if record.error not in ("", "cancelled"):
        return (record.error,)
    values, decided = _latencies(record, ended_s)
    broken = (
        limit.metric.removesuffix("_ms")
        for limit in slo.each
        if limit.metric in values and not limit.kept(values[limit.metric])
        if decided or values[limit.metric] is not None
    )
    return tuple(dict.fromkeys(broken))


def missed_text(causes: Mapping[str, int]) -> str:
    """Return ``1 missed TPOT, 7 missed TTFT, 2 failed (timeout)``."""
    latencies = {metric.removesuffix("_ms") for metric in (*METRICS, *SESSION_METRICS)}
    return ", ".join(
        f"{count} missed {cause.upper()}" if cause in latencies else f"{count} failed ({cause})"
        for cause, count in sorted(causes.items())
    )


def _latencies(record: RequestRecord, ended_s: float | None) -> tuple[dict[str, float | None], bool]:
    """Return a request's latencies in ms, and whether they are final; a cancelled one's are lower bounds."""
    ttft_s, tpot_s, e2el_s = record.ttft_s, record.tpot_s, record.e2el_s
    cancelled = record.error == "cancelled"
    if cancelled:
        tpot_s = e2el_s = None
    if cancelled and ended_s is not None:
        e2el_s = max(0.0, ended_s - record.scheduled_s)
        if ttft_s is None:
            ttft_s = e2el_s
        if record.first_token_s is not None and record.requested_output_len > 1:
            # The least that its TPOT can become: all missing tokens in the very next moment.
            tpot_s = (ended_s - record.first_token_s) / (record.requested_output_len - 1)
    turn, session_s = record.turn, record.session_s
    values = latencies_ms(ttft_s, tpot_s, e2el_s, record.ok or cancelled, turn, session_s)
    return values, not cancelled


def judge_criteria(
    judged: Sequence[RequestRecord], slo: Slo, ended_s: float | None, confidence: float = CONFIDENCE
) -> tuple[CriterionResult, ...]:
    """Each criterion of the SLO over the judged requests, with its two-sided interval. A cancelled request
    counts in a share if it had broken a limit by then, and not at all otherwise; in a mean it does not count.
    Neighbours depend on each other: intervals are for the effective number."""
    return tuple(_judged_by(criterion, judged, ended_s, confidence) for criterion in slo.all_criteria())


def _judged_by(
    criterion: Criterion, judged: Sequence[RequestRecord], ended_s: float | None, confidence: float
) -> CriterionResult:
    seen = []
    for record in judged:
        values, decided = _latencies(record, ended_s)
        if decided:
            seen.append(criterion.observe(values, record.ok))
        elif criterion.kind == "share" and any(
            values.get(limit.metric) is not None and not limit.kept(values[limit.metric])
            for limit in criterion.limits
        ):
            seen.append(0.0)
    data = np.array([value for value in seen if not math.isnan(value)])
    n = len(data)
    about: dict[str, Any] = {"text": criterion.text(), "kind": criterion.kind, "n": n}
    about["target"] = criterion.target
    if not n:
        return CriterionResult(**about, value=None, lower=None, upper=None, met=False)
    value = float(data.mean())
    effective = n / autocorrelation_time(data.tolist())
    if criterion.kind == "share":
        lower, upper = share_interval(value * effective, effective, confidence)
        good = n - round(value * n) <= misses_allowed(n, criterion.target)
        return CriterionResult(**about, value=value, lower=lower, upper=upper, met=good)
    error = float(data.std(ddof=1)) / math.sqrt(max(effective, 1.0)) if n > 1 else math.inf
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * error if n > 1 else None
    return CriterionResult(
        **about,
        value=value,
        lower=None if half is None else value - half,
        upper=None if half is None else value + half,
        met=value <= criterion.target,
    )
