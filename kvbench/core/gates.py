"""Is this trial a valid measurement, and what is its verdict?

The verdict rule, and why
-------------------------
A trial is **met** if the judged share of its requests (metrics.py: steady window) reaches the target by the
*point estimate* and the queue does not grow; else it is **missed**; if a gate refuses it, it is **invalid**.

Why not ask the interval? To prove 95 % at 95 % confidence takes 59 requests without one miss, or 124 with
two. A quick trial has 60 to 200, so "met only if proven" would let a system that truly attains 97 % fail
most of its trials, and the search would settle far below the truth; "missed only if disproven" errs the
other way. The point estimate errs both ways alike, and only in the narrow band where the truth lies within
a few per cent of the target; near capacity attainment falls from 1 to 0 within 5 to 10 % of the rate, so
the band is narrow in rate, too. The price: a single verdict inside that band is nearly a coin toss. So the
interval is always reported (for the *effective* number of requests), the reason says when it cannot decide,
and the search confirms its answer by an independent trial. Longer trials narrow the band.

Doubt and direction: a late client or an emulated engine behind its model makes latencies *longer*. A trial
that meets the SLO all the same is met, with a warning; a missed one is refused if the delay may be the
cause. Gross delays refuse both, as the latencies themselves would be wrong.

Each gate is a function Evidence → Finding | None. An unknown figure (None) trips no gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from kvbench.core import gates_work
from kvbench.core.evidence import ClientFigures, EngineFigures, Evidence, GateLimits, HostFigures
from kvbench.core.metrics import CONFIDENCE, WARMUP_SHARE, Slo, ended_at, judged_records, met
from kvbench.core.records import Finding, VerdictKind
from kvbench.core.stats import log_evidence_below

__all__ = [
    "GATES",
    "ClientFigures",
    "EngineFigures",
    "Evidence",
    "GateLimits",
    "HostFigures",
    "early_verdict",
    "judge",
]

Gate = Callable[[Evidence], Finding | None]

EARLY_DESIGN_EFFECT: Final = 4.0
"""Neighbouring requests share their fate; the live rule counts four of them as one independent one."""


def client_limited(evidence: Evidence) -> Finding | None:
    """The load generator sent late, or saw answers late."""
    limits, slo, client = evidence.limits, evidence.slo, evidence.client
    send, loop = client.send_lag_p99_ms or 0.0, client.loop_lag_p99_ms or 0.0
    allowed = max(limits.client_lag_ms, limits.client_lag_share * (slo.ttft_ms or 0.0))
    if max(send, loop) <= allowed:
        return None
    gross = max(10 * limits.client_lag_ms, limits.client_lag_max_share * (slo.ttft_ms or 0.0))
    refused = max(send, loop) > gross
    if not evidence.attained and not refused:
        refused = _attained_with(evidence, _loosened(slo, send + loop, loop, evidence))
    return Finding(
        "client_limited",
        "invalid" if refused else "warning",
        f"the load generator was late: sends by {send:.1f} ms and its event loop by {loop:.1f} ms (P99); "
        f"{allowed:.1f} ms are allowed",
        "free CPU on the load generator's machine, give it a machine of its own, or offer a lower rate",
        {
            "send_lag_p99_ms": client.send_lag_p99_ms,
            "loop_lag_p99_ms": client.loop_lag_p99_ms,
            "allowed_ms": allowed,
            "cpu_share": client.cpu_share,
        },
    )


def _loosened(slo: Slo, ttft_ms: float, gap_ms: float, evidence: Evidence) -> Slo:
    """The SLO with the client's lag forgiven in full; TPOT shares one late look over all gaps."""
    gaps = max((record.requested_output_len for record in evidence.records), default=2) - 1
    return replace(
        slo,
        ttft_ms=None if slo.ttft_ms is None else slo.ttft_ms + ttft_ms,
        tpot_ms=None if slo.tpot_ms is None else slo.tpot_ms + gap_ms / max(1, gaps),
    )


def _attained_with(evidence: Evidence, slo: Slo) -> bool:
    summary = evidence.summary
    ended_s = ended_at(evidence.records, summary.duration_s)
    verdicts = [met(record, slo, ended_s) for record in judged_records(evidence.records, summary.window)]
    decided = [verdict for verdict in verdicts if verdict is not None]
    return decided.count(False) <= slo.misses_allowed(len(decided))


def emulator_behind(evidence: Evidence) -> Finding | None:
    """The emulated engine could not keep its own timing model: a busy machine, no property of the system.

    Delays only lengthen latencies, so a met trial stays met. A miss is refused if it would have been met
    with the delay forgiven in full: that of P and D at the first token, that of one late step over all
    gaps in TPOT. A gross delay refuses always, since then the model is not what was measured.
    """
    limits, slo = evidence.limits, evidence.slo
    lags = {role: 1e3 * (engine.step_lag_p99_s or 0.0) for role, engine in evidence.engines.items()}
    shares = {role: engine.lag_share or 0.0 for role, engine in evidence.engines.items()}
    lag_ms, share = max(lags.values(), default=0.0), max(shares.values(), default=0.0)
    allowed = max(limits.client_lag_ms, limits.client_lag_share * (slo.ttft_ms or 0.0))
    if lag_ms <= allowed and share <= limits.engine_lag_share:
        return None
    gross = max(10 * limits.client_lag_ms, limits.client_lag_max_share * (slo.ttft_ms or 0.0))
    refused = lag_ms > gross or share > limits.engine_lag_max_share
    if not evidence.attained and not refused:
        refused = _attained_with(evidence, _loosened(slo, sum(lags.values()), lag_ms, evidence))
    role = max(lags, key=lambda name: (lags[name], shares[name]))
    return Finding(
        "emulator_behind",
        "invalid" if refused else "warning",
        f"the emulated {role} engine was behind its own timing model: {lags[role]:.1f} ms a step (P99), "
        f"{shares[role]:.0%} of its busy time; {allowed:.0f} ms and {limits.engine_lag_share:.0%} are fine",
        "free CPU on this machine, raise time_scale, or offer a lower rate",
        {"role": role, "lag_p99_ms": lags, "lag_share": shares, "allowed_ms": allowed},
    )


def failed_requests(evidence: Evidence) -> Finding | None:
    """Requests failed. They are misses; a trial in which none succeeded says nothing about latency."""
    failed = {name: count for name, count in evidence.summary.failed.items() if name != "wrong_length"}
    count = sum(failed.values())
    if not count:
        return None
    classes = ", ".join(f"{number} × {name}" for name, number in sorted(failed.items()))
    detail = next((r.error_detail for r in evidence.records if r.error in failed and r.error_detail), "")
    none_succeeded = evidence.summary.completed == 0 and "wrong_length" not in evidence.summary.failed
    message = f"server errors: {count} of {evidence.summary.sent} requests failed ({classes})"
    return Finding(
        "server_errors" if none_succeeded else "failed_requests",
        "invalid" if none_succeeded else "warning",
        message + (f"; the first: {detail}" if detail else ""),
        "none was answered, so this is no measurement: look into the servers' logs"
        if none_succeeded
        else "each failed request counts as a miss; the servers' logs say why they failed",
        {"failed": failed},
    )


def too_few_requests(evidence: Evidence) -> Finding | None:
    """So few requests that a single miss decides, and the interval does not."""
    summary, target = evidence.summary, evidence.slo.attainment
    needed = math.ceil(1 / (1 - target) - 1e-9) if target < 1 else 1
    decisive = summary.attainment_upper < target or summary.attainment_lower >= target
    if summary.judged >= needed or (summary.judged and decisive) or evidence.stopped_as == "missed":
        return None
    return Finding(
        "too_few_requests",
        "invalid",
        f"{summary.judged} requests could be judged; an attainment of {target:.1%} cannot be told "
        f"from fewer than {needed}",
        f"send at least {math.ceil(needed / 0.7)} requests a trial",
        {"judged": summary.judged, "needed": needed},
    )


def machine_disturbed(evidence: Evidence) -> Finding | None:
    """Other work ran on this machine."""
    host, limits = evidence.host, evidence.limits
    others = {
        "used by other processes": (host.other_cpu_share, limits.other_cpu_share),
        "stolen by the hypervisor": (host.steal_share, limits.steal_share),
    }
    parts = [
        f"{share:.1%} of the CPU time was {what}"
        for what, (share, limit) in others.items()
        if share is not None and share > limit
    ]
    if not parts:
        return None
    return Finding(
        "machine_disturbed",
        "warning",
        "the machine was busy: " + ", ".join(parts),
        "stop other work on this machine and measure again",
        {
            "other_cpu_share": host.other_cpu_share,
            "steal_share": host.steal_share,
            "load_average": host.load_average,
            "cpu_count": host.cpu_count,
        },
    )


def too_short(evidence: Evidence) -> Finding | None:
    """The load was offered for less than a few latencies: growth could not show."""
    summary, slo = evidence.summary, evidence.slo
    latency_s = (summary.e2el_ms.p50 or 0.0) / 1e3
    needed_s = max(2 * latency_s, 3 * (slo.ttft_ms or 0.0) / 1e3)
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


def growing_queue(evidence: Evidence) -> Finding | None:
    """More and more requests wait for their first token: the rate is above what the system sustains.

    The growth must be significant and material. Significant: more than 4 standard errors of the fit, and
    more than 2 of the slope that a random walk with this many arrivals shows by chance, whose standard
    deviation is sqrt(1.2 × rate / T): a system right at its capacity looks like one. Material: in ten
    minutes it would add more waiting than the TTFT limit.
    """
    summary, limits, slope = evidence.summary, evidence.limits, evidence.summary.waiting_trend
    if slope is None or summary.offered_rate <= 0 or summary.window.length_s <= 0:
        return None
    by_chance = math.sqrt(1.2 * summary.offered_rate / summary.window.length_s)
    significant = max(limits.growth_errors * slope.error, limits.growth_walks * by_chance)
    added_s = slope.per_s * limits.growth_horizon_s / summary.offered_rate
    if slope.per_s <= significant or added_s * 1e3 <= (evidence.slo.ttft_ms or 0.0):
        return None
    return Finding(
        "growing_queue",
        "warning",
        f"the queue grows: by {slope.per_s:.2f} requests a second, {summary.peak_waiting} at its peak",
        "the rate is above what the system sustains",
        {"per_s": slope.per_s, "error": slope.error, "by_chance": by_chance, "peak": summary.peak_waiting},
    )


GATES: Final[tuple[Gate, ...]] = (
    failed_requests,
    gates_work.counters_fell,
    gates_work.wrong_length,
    gates_work.kv_failures,
    gates_work.kv_expired,
    gates_work.wrong_transport,
    gates_work.warm_cache,
    gates_work.prefill_skipped,
    gates_work.decode_recomputed,
    gates_work.kv_bytes_wrong,
    gates_work.requests_lost_or_repeated,
    client_limited,
    emulator_behind,
    too_few_requests,
    growing_queue,
    too_short,
    machine_disturbed,
)
"""In the order of importance: the first refusal becomes the verdict's reason."""


def judge(evidence: Evidence) -> tuple[VerdictKind, str, list[Finding]]:
    """(verdict, reason in plain words, findings of all gates) of one trial."""
    findings = [finding for gate in GATES if (finding := gate(evidence)) is not None]
    findings += evidence.logged
    refusal = next((finding for finding in findings if finding.level == "invalid"), None)
    if refusal is not None:
        return "invalid", refusal.message, findings
    growth = next((finding for finding in findings if finding.gate == "growing_queue"), None)
    if evidence.attained and growth is not None:
        return "missed", growth.message, findings
    return ("met" if evidence.attained else "missed"), _reason(evidence), findings


def _reason(evidence: Evidence) -> str:
    summary, target = evidence.summary, evidence.slo.attainment
    share = summary.slo_attainment or 0.0
    text = (
        f"{summary.judged_met} of {summary.judged} requests ({share:.1%}) within the SLO, "
        f"{target:.1%} asked; interval {summary.attainment_lower:.1%} to {summary.attainment_upper:.1%}"
    )
    if summary.attainment_lower < target <= summary.attainment_upper:
        text += ", which does not decide"
    causes = ", ".join(f"{count} × {cause}" for cause, count in sorted(summary.missed_by.items()))
    text += f"; misses: {causes}" if causes else ""
    return text + (f"; stopped early as {evidence.stopped_as}" if evidence.stopped_as else "")


def early_verdict(
    done_met: int, done_missed: int, n_planned: int, slo: Slo, confidence: float = CONFIDENCE
) -> Literal["met", "missed"] | None:
    """The verdict of a trial under way, if it is certain already; it may be asked as often as one likes.

    All that is known here are totals, and the verdict leaves the warm-up (10 % of the requests planned) out.
    So misses are first laid to the warm-up, as many as it can hold; only the others count.

    - "missed" by arithmetic: more misses than the steady window may have, even if all that is still to
      come is met.
    - "missed" by evidence, for long trials: ``log_evidence_below`` against 1 / (1 - confidence). That
      bound holds at every look at once, so no alpha is split over the looks. Neighbours are not
      independent, so four requests are counted as one. Misses are known later than successes, which only
      makes the rule slower.
    - "met" by arithmetic alone: the rest may all be missed. A queue may grow behind a good share so far,
      so a trial is never cut short as met by statistics. Stopping here saves little; a caller who wants
      undistorted tails lets the trial end.
    """
    warmup = math.ceil(WARMUP_SHARE * n_planned)
    judged = n_planned - warmup
    if judged <= 0:
        return None
    counted = done_missed - min(warmup, done_missed)
    if counted > slo.misses_allowed(judged):
        return "missed"
    to_come = max(0, n_planned - done_met - done_missed)
    if done_missed + to_come <= slo.misses_allowed(judged):
        return "met"
    seen = max(counted, done_met + done_missed - warmup)
    evidence = log_evidence_below(seen - counted, seen, slo.attainment) / EARLY_DESIGN_EFFECT
    return "missed" if evidence > -math.log(1.0 - confidence) else None
