"""Differences between the load methods: number of requests, judged window, and meaning of a verdict.

- ``sustained``: limits over the steady window; a growing queue is a miss (core/gates/gates.py).
- ``equal_rate``: the same, at a given rate.
- ``burst``: means over all requests of five seconds' arrivals; needs no steady state (burst.py).
- ``fixed``: a given rate, always "measured"; marked *saturated* if the system did not keep up.
- ``closed_loop``: a constant number of requests in flight instead of a rate; always "measured".
- ``trace``: recorded arrivals; judged as sustained if there is an SLO, else "measured".
- ``soak``: one window of a constant rate over hours; as ``fixed``.
- ``chaos``: a fault during a constant rate; its cost is judged in core/chaos_soak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvbench.core.gates.evidence import Evidence
from kvbench.core.gates.gates import UNSUSTAINED, judge
from kvbench.core.metrics.metrics import Summary, Window
from kvbench.core.records import Finding, Method, RequestRecord, VerdictKind
from kvbench.core.search.burst import burst_requests
from kvbench.core.search.live_config import Decision
from kvbench.core.slo import Slo, burst_slo

SATURATED: Final = "saturated"
"""Label of a trial whose rate was above the system's capacity."""
BEHIND: Final = 0.90
"""Share of arrivals below which the completions of the same time mean saturation."""
STEADY_GATES: Final = frozenset(
    {"growing_queue", "too_few_requests", "too_short", "not_steady", "slot_capped", "one_batch"}
)
"""Gates that require a steady state or enough requests; other methods do not."""


def planned_requests(method: Method, rate: float, trial_s: float, least: int, most: int) -> int:
    if method == "burst":
        return burst_requests(rate)
    return max(least, min(most, round(rate * trial_s)))


def judged_slo(method: Method, slo: Slo) -> Slo:
    return burst_slo(slo) if method == "burst" else slo


def judged_window(method: Method, records: Sequence[RequestRecord]) -> Window | None:
    """Return the window of all arrivals of a burst or a closed loop, or None for the steady window."""
    times = [record.scheduled_s for record in records]
    whole = method in ("burst", "closed_loop")
    return Window(min(times), max(times)) if whole and times else None


def joined_verdict(
    method: Method, evidence: Evidence, decision: Decision | None, *, searched: bool
) -> tuple[VerdictKind, str, list[Finding]]:
    """Return verdict, reason and findings by the gates and the live rule together. Gates decide what is
    invalid or unsustained; otherwise the live rule decides. Requests that ended after its last look ran
    without load, so they prove nothing, but a "met" that they contradict is undecided."""
    verdict, reason, findings = verdict_of(method, evidence, searched=searched)
    if decision is None or verdict not in ("met", "missed"):
        return verdict, reason, findings
    if decision.verdict == verdict:
        return verdict, f"{decision.reason}, after {decision.at_s:.1f} s", findings
    if decision.verdict == "met":
        unsustained = any(finding.gate in UNSUSTAINED for finding in findings)
        return ("missed" if unsustained else "undecided"), reason, findings
    return decision.verdict, decision.reason, findings


def verdict_of(
    method: Method, evidence: Evidence, *, searched: bool
) -> tuple[VerdictKind, str, list[Finding]]:
    """Return verdict, reason and findings of a trial. ``searched``: a search needs its verdict."""
    verdict, reason, findings = judge(evidence)
    if method == "burst":
        findings = [_soften(finding) for finding in findings if finding.gate != "growing_queue"]
        refusal = _refusal(findings)
        if refusal is not None:
            return "invalid", refusal.message, findings
        return ("met" if evidence.summary.attained else "missed"), means_text(evidence.summary), findings
    if method == "closed_loop":
        # Each slot waits for its response, so no queue can grow.
        findings = [_soften(finding) for finding in findings if finding.gate != "growing_queue"]
        refusal = _refusal(findings)
        return ("measured", "", findings) if refusal is None else ("invalid", refusal.message, findings)
    if method in ("fixed", "soak") or not searched:
        findings = [_soften(finding) for finding in findings]
        refusal = _refusal(findings)
        if refusal is not None:
            return "invalid", refusal.message, findings
        return "measured", saturation(evidence.summary, findings), findings
    return verdict, reason, findings


def _soften(finding: Finding) -> Finding:
    soft = finding.gate in STEADY_GATES and finding.level == "invalid"
    return replace(finding, level="warning") if soft else finding


def _refusal(findings: Sequence[Finding]) -> Finding | None:
    return next((finding for finding in findings if finding.level == "invalid"), None)


def means_text(summary: Summary) -> str:
    """Return the means that the burst method judges: ``mean TTFT 4120 ms (limit 5000), …``."""
    parts = []
    for criterion in summary.criteria:
        if criterion.kind == "mean":
            value = "none answered" if criterion.value is None else f"{criterion.value:.4g} ms"
            parts.append(f"{criterion.text}: {value}")
    return "burst; " + ", ".join(parts) if parts else "burst; no limit"


def saturation(summary: Summary, findings: Sequence[Finding]) -> str:
    """Return why a rate exceeds the system's capacity; "" if it does not. The queue grows (the gate's
    finding); or many requests ran into their deadline; or clearly fewer requests ended than arrived in a
    steady window of more than three latencies."""
    growth = next((finding for finding in findings if finding.gate == "growing_queue"), None)
    if growth is not None:
        return growth.message
    late = summary.failed.get("timeout", 0) + summary.failed.get("no_answer", 0)
    if late > 0.01 * summary.planned:
        return f"{late} of {summary.planned} requests were not answered within their deadline"
    behind = summary.arrived - summary.left
    latency_s = (summary.e2el_ms.p50 or summary.e2el_ms.mean or math.inf) / 1e3
    if (
        summary.left < BEHIND * summary.arrived
        and behind > 3 * math.sqrt(summary.arrived)
        and summary.window.length_s > 3 * latency_s
    ):
        return f"{summary.left} requests ended in the time in which {summary.arrived} arrived"
    return ""
