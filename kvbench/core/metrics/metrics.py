"""Figures of a trial from its request records: latencies, rates, attainment, steady window.

- **Met and missed.** A request meets the SLO if it succeeded and keeps every limit that is set on each
  request (core/slo.py). A failed, late or wrong-length request is a miss. TPOT is undefined for one token;
  such a request keeps the TPOT limit. Limits on a percentile or a mean are judged over the trial's requests.
  A request that kvbench cancelled when it stopped the trial is *undecided*, or a miss if it could no longer
  have met a limit. Otherwise a trial stopped for long waits would be judged by the fast requests alone.
- **Steady window.** Verdict, rates and latencies are taken from it. It begins after the warm-up and ends with
  the last arrival. The warm-up is the first 10 % of the arrivals, or one median end-to-end latency if that is
  longer, but never more than 30 % of the arrivals. Fewer than 20 arrivals have no warm-up. A request belongs
  to the window if it was *scheduled* in it; a completion or a token counts for a rate if it *happened* in it.
- **Rates of the whole run** (``run_*``) follow ``vllm bench serve``: all completed requests over the
  whole duration, ramp and drain included. They are lower than the load that was carried.
- **Percentiles** interpolate linearly (numpy's default). They are None below 2 (P50), 10 (P90) or 50
  (P99) values. Fewer than 100 values put P99 between the two largest: read it as a maximum."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from kvbench.core.metrics.untimed_tokens import peak_output
from kvbench.core.records import UNENDED, RequestRecord
from kvbench.core.slo import (
    METRICS,
    SESSION_METRICS,
    Criterion,
    CriterionKind,
    Slo,
    latencies_ms,
    misses_allowed,
)
from kvbench.core.stats import StepSeries, Trend, autocorrelation_time, share_interval, trend

CONFIDENCE: Final = 0.95
WARMUP_SHARE: Final = 0.10
WARMUP_SHARE_MAX: Final = 0.30
WARMUP_MIN_REQUESTS: Final = 20


@dataclass(frozen=True)
class Window:
    """Steady part of a trial in seconds since its start, both ends included."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return max(0.0, self.end_s - self.start_s)

    def has(self, time_s: float | None) -> bool:
        return time_s is not None and self.start_s <= time_s <= self.end_s


def ended_at(records: Sequence[RequestRecord], duration_s: float) -> float | None:
    """Return when the trial was stopped, or None if no request was cancelled."""
    return duration_s if any(record.error == "cancelled" for record in records) else None


def steady_window(records: Sequence[RequestRecord], ended_s: float | None = None) -> Window:
    """Return the window from the end of warm-up to the last arrival (see the module)."""
    arrivals = sorted(
        record.scheduled_s for record in records if ended_s is None or record.scheduled_s <= ended_s
    )
    if not arrivals:
        return Window(0.0, 0.0)
    n = len(arrivals)
    if n < WARMUP_MIN_REQUESTS:
        return Window(arrivals[0], arrivals[-1])
    latencies = [record.e2el_s for record in records if record.ok and record.e2el_s is not None]
    latency_s = float(np.median(latencies)) if latencies else 0.0
    by_count = arrivals[math.ceil(WARMUP_SHARE * n)]
    at_most = arrivals[math.floor(WARMUP_SHARE_MAX * n)]
    return Window(min(max(by_count, arrivals[0] + latency_s), at_most), arrivals[-1])


def judged_records(records: Sequence[RequestRecord], window: Window) -> list[RequestRecord]:
    """Return the requests of the verdict in order of scheduled sends."""
    inside = (record for record in records if window.has(record.scheduled_s))
    return sorted(inside, key=lambda record: record.scheduled_s)


def waiting_series(records: Sequence[RequestRecord], ended_s: float | None = None) -> StepSeries:
    """Return the number of requests waiting for their first token, from their scheduled send."""
    return _open_requests(records, ended_s, "first_token_s")


def in_flight_series(records: Sequence[RequestRecord], ended_s: float | None = None) -> StepSeries:
    """Return the number of requests between scheduled send and last token."""
    return _open_requests(records, ended_s, "last_token_s")


def _open_requests(records: Sequence[RequestRecord], ended_s: float | None, until: str) -> StepSeries:
    """Return the open requests over time. Requests that timed out or were cancelled stay open up to the
    trial's last known moment; others failed at once."""
    known = [time for r in records for time in (r.sent_s, r.last_token_s) if time is not None]
    last_s = ended_s if ended_s is not None else max(known, default=0.0)
    starts, ends = [], []
    for record in records:
        end = getattr(record, until)
        if end is None:
            end = last_s if record.error in UNENDED else record.sent_s
        if end is not None and end > record.scheduled_s:
            starts.append(record.scheduled_s)
            ends.append(end)
    return StepSeries.of_intervals(starts, ends)


MIN_SPAN_S: Final = 1e-3
"""Shortest time for a rate or trend, in seconds."""
MIN_VALUES: Final[Mapping[int, int]] = {50: 2, 90: 10, 99: 50}


@dataclass(frozen=True)
class Distribution:
    """Statistics of a sample, None if empty. ``n``: values."""

    n: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None], scale: float = 1.0) -> Distribution:
        """Summarise the known values times ``scale``."""
        if isinstance(values, np.ndarray):
            data = values * scale
        else:
            data = np.array([value for value in values if value is not None], dtype=np.float64) * scale
        if not len(data):
            return cls()
        known = np.percentile(data, list(MIN_VALUES)).tolist()
        p50, p90, p99 = (
            figure if len(data) >= least else None
            for figure, least in zip(known, MIN_VALUES.values(), strict=True)
        )
        return cls(len(data), float(data.mean()), p50, p90, p99, float(data.max()))


@dataclass(frozen=True)
class WholeRun:
    """All answered requests over the whole duration, ramp and drain included, as ``vllm bench serve`` counts.
    TTFT counts from the scheduled send, or (``ttft_sent_ms``) from the real one. Rates are per second."""

    duration_s: float = 0.0
    successful: int = 0
    failed: int = 0
    cancelled: int = 0
    """Requests cancelled by kvbench when it stopped the trial."""
    input_tokens: int = 0
    output_tokens: int = 0
    request_throughput: float | None = None
    output_throughput: float | None = None
    total_throughput: float | None = None
    ttft_ms: Distribution = field(default_factory=Distribution)
    ttft_sent_ms: Distribution = field(default_factory=Distribution)
    tpot_ms: Distribution = field(default_factory=Distribution)
    itl_ms: Distribution = field(default_factory=Distribution)
    e2el_ms: Distribution = field(default_factory=Distribution)

    @classmethod
    def of(cls, records: Sequence[RequestRecord], duration_s: float) -> WholeRun:
        done = [record for record in records if record.ok]
        cancelled = sum(record.error == "cancelled" for record in records)
        prompts, output = sum(r.input_len for r in done), sum(r.output_len for r in done)
        return cls(
            duration_s=duration_s,
            successful=len(done),
            failed=len(records) - len(done) - cancelled,
            cancelled=cancelled,
            input_tokens=prompts,
            output_tokens=output,
            request_throughput=_per_second(len(done), duration_s),
            output_throughput=_per_second(output, duration_s),
            total_throughput=_per_second(prompts + output, duration_s),
            **_latencies_of(done),
        )


@dataclass(frozen=True)
class Summary:
    """The figures of one trial. Rates are per second; latencies in milliseconds; times in seconds. The first
    block counts all requests of the trial; everything after ``window`` is of the steady window only, except
    ``run_*``, the peaks and ``duration_s``."""

    offered_rate: float
    duration_s: float
    planned: int
    sent: int
    completed: int
    failed: Mapping[str, int]
    cancelled: int
    met: int
    missed: int
    undecided: int

    window: Window
    judged_met: int
    judged_missed: int
    judged_undecided: int
    missed_by: Mapping[str, int]
    """Judged misses by cause: "ttft", "tpot" (possibly both) or failure class."""

    slo_attainment: float | None
    """judged_met / (judged_met + judged_missed); None if nothing was decided, or if the SLO sets no limit
    on single requests, only on percentiles and means (``criteria``)."""
    attainment_lower: float
    attainment_upper: float
    attainment_confidence: float
    effective_n: float
    """Effective sample size of the judged requests (correlated ones count less); base of the interval."""

    achieved_rate: float | None
    """Requests completed in the window / its length."""
    request_goodput: float | None
    """Requests within the SLO completed in the window / its length."""
    output_tok_per_s: float | None
    total_tok_per_s: float | None
    """Output tokens; the total includes prompts of requests with their first token in the window."""
    run_request_rate: float | None
    run_output_tok_per_s: float | None
    run_total_tok_per_s: float | None

    ttft_ms: Distribution = field(default_factory=Distribution)
    ttft_sent_ms: Distribution = field(default_factory=Distribution)
    tpot_ms: Distribution = field(default_factory=Distribution)
    itl_ms: Distribution = field(default_factory=Distribution)
    e2el_ms: Distribution = field(default_factory=Distribution)
    first_event_ms: Distribution = field(default_factory=Distribution)
    """Scheduled send to first event, which may have no text."""

    peak_waiting: int = 0
    peak_in_flight: int = 0
    peak_output_tok_per_s: float | None = None
    """Most output tokens of one second of the whole run, counted from the first send."""
    waiting_trend: Trend | None = None
    """Slope of the number of waiting requests in the window."""
    criteria: tuple[CriterionResult, ...] = ()
    """Result of each SLO criterion over the judged requests."""
    arrived: int = 0
    left: int = 0
    """Requests that were scheduled in the window and ended well inside it."""
    whole_run: WholeRun = field(default_factory=WholeRun)

    @property
    def judged(self) -> int:
        return self.judged_met + self.judged_missed

    @property
    def attained(self) -> bool:
        return bool(self.criteria) and all(criterion.met for criterion in self.criteria)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    records: Sequence[RequestRecord],
    slo: Slo,
    offered_rate: float,
    duration_s: float,
    window: Window | None = None,
) -> Summary:
    """Return all figures of a trial. ``records``: one per planned request. ``offered_rate``: offered requests
    per second. ``duration_s``: trial's start to end, drain included. ``window``: steady window, computed from
    the records by default."""
    ended_s = ended_at(records, duration_s)
    window = steady_window(records, ended_s) if window is None else window
    judged = judged_records(records, window)
    done = [record for record in judged if record.ok]
    decided = [verdict for record in judged if (verdict := met(record, slo, ended_s)) is not None]
    attained = sum(decided)
    effective_n = len(decided) / autocorrelation_time([float(verdict) for verdict in decided])
    share = attained / len(decided) if decided else None
    lower, upper = share_interval((share or 0.0) * effective_n, effective_n, CONFIDENCE)
    waiting = waiting_series(records, ended_s)
    return Summary(
        offered_rate=offered_rate,
        duration_s=duration_s,
        **_counts(records, slo, ended_s),
        window=window,
        judged_met=attained,
        judged_missed=len(decided) - attained,
        judged_undecided=len(judged) - len(decided),
        missed_by=dict(Counter(cause for record in judged for cause in misses(record, slo, ended_s))),
        slo_attainment=share if slo.joint else None,
        attainment_lower=lower,
        attainment_upper=upper,
        attainment_confidence=CONFIDENCE,
        effective_n=effective_n,
        **_rates(records, slo, duration_s, window),
        **_latencies_of(done),
        first_event_ms=Distribution.of((record.first_event_ttft_s for record in done), 1e3),
        peak_waiting=waiting.peak(),
        peak_in_flight=in_flight_series(records, ended_s).peak(),
        peak_output_tok_per_s=peak_output(records),
        waiting_trend=trend(waiting, window.start_s, window.end_s) if window.length_s >= MIN_SPAN_S else None,
        criteria=judge_criteria(judged, slo, ended_s),
        arrived=len(judged),
        left=sum(record.ok and window.has(record.last_token_s) for record in records),
        whole_run=WholeRun.of(records, duration_s),
    )


def _latencies_of(done: Sequence[RequestRecord]) -> dict[str, Any]:
    gaps = [np.asarray(record.itl_s, np.float64) for record in done if len(record.itl_s)]
    return {
        "ttft_ms": Distribution.of((record.ttft_s for record in done), 1e3),
        "ttft_sent_ms": Distribution.of((record.ttft_sent_s for record in done), 1e3),
        "tpot_ms": Distribution.of((record.tpot_s for record in done), 1e3),
        "itl_ms": Distribution.of(np.concatenate(gaps) if gaps else (), 1e3),
        "e2el_ms": Distribution.of((record.e2el_s for record in done), 1e3),
    }


def _counts(records: Sequence[RequestRecord], slo: Slo, ended_s: float | None) -> dict[str, Any]:
    errors = Counter(record.error for record in records)
    verdicts = Counter(met(record, slo, ended_s) for record in records)
    return {
        "planned": len(records),
        "sent": sum(record.sent_s is not None for record in records),
        "completed": errors.pop("", 0),
        "cancelled": errors.pop("cancelled", 0),
        "failed": dict(errors),
        "met": verdicts[True],
        "missed": verdicts[False],
        "undecided": verdicts[None],
    }


def _rates(records: Sequence[RequestRecord], slo: Slo, duration_s: float, window: Window) -> dict[str, Any]:
    done = [record for record in records if record.ok]
    inside = [record for record in done if window.has(record.last_token_s)]
    output = sum(_output_inside(record, window) for record in records)
    prompts = sum(record.input_len for record in records if window.has(record.first_token_s))
    all_output = sum(record.output_len for record in done)
    all_prompts = sum(record.input_len for record in done)
    return {
        "achieved_rate": _per_second(len(inside), window.length_s),
        "request_goodput": _per_second(sum(met(r, slo) is True for r in inside), window.length_s),
        "output_tok_per_s": _per_second(output, window.length_s),
        "total_tok_per_s": _per_second(output + prompts, window.length_s),
        "run_request_rate": _per_second(len(done), duration_s),
        "run_output_tok_per_s": _per_second(all_output, duration_s),
        "run_total_tok_per_s": _per_second(all_output + all_prompts, duration_s),
    }


def _per_second(count: float, seconds: float) -> float | None:
    return count / seconds if seconds >= MIN_SPAN_S else None


def _output_inside(record: RequestRecord, window: Window) -> float:
    """Return a request's output tokens in the window: the first at its time, others spread evenly."""
    if record.first_token_s is None or record.output_len < 1:
        return 0.0
    count = 1.0 if window.has(record.first_token_s) else 0.0
    last_s = record.last_token_s if record.last_token_s is not None else record.first_token_s
    length = last_s - record.first_token_s
    if length <= 0.0:
        return count * record.output_len
    shared = min(last_s, window.end_s) - max(record.first_token_s, window.start_s)
    return count + (record.output_len - 1) * max(0.0, shared) / length


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
    if misses(record, slo, ended_s):
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
            # Lowest TPOT that is still possible: all missing tokens arrive at once.
            tpot_s = (ended_s - record.first_token_s) / (record.requested_output_len - 1)
    turn, session_s = record.turn, record.session_s
    values = latencies_ms(ttft_s, tpot_s, e2el_s, record.ok or cancelled, turn, session_s)
    return values, not cancelled


def judge_criteria(
    judged: Sequence[RequestRecord], slo: Slo, ended_s: float | None
) -> tuple[CriterionResult, ...]:
    """Return each criterion over the judged requests with its two-sided interval. A cancelled request counts
    in a share if it had already exceeded a limit, and never in a mean. Intervals are for the effective sample
    size, since neighbouring requests are correlated."""
    return tuple(_judge_criterion(criterion, judged, ended_s) for criterion in slo.all_criteria())


def _judge_criterion(
    criterion: Criterion, judged: Sequence[RequestRecord], ended_s: float | None
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
        lower, upper = share_interval(value * effective, effective, CONFIDENCE)
        good = n - round(value * n) <= misses_allowed(n, criterion.target)
        return CriterionResult(**about, value=value, lower=lower, upper=upper, met=good)
    error = float(data.std(ddof=1)) / math.sqrt(max(effective, 1.0)) if n > 1 else math.inf
    half = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * error if n > 1 else None
    return CriterionResult(
        **about,
        value=value,
        lower=None if half is None else value - half,
        upper=None if half is None else value + half,
        met=value <= criterion.target,
    )
