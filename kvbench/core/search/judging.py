"""Follow a running trial, judge a measured or simulated one, and create its stored record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvbench.core.gates.evidence import ClientFigures, Evidence
from kvbench.core.gates.gates import unseen
from kvbench.core.load.traces import TracedRequest, expected_hits, shares_prefixes
from kvbench.core.load.workers import LoadResult, Progress, Settled
from kvbench.core.metrics.limit import note_limit
from kvbench.core.metrics.metrics import Window, summarise
from kvbench.core.records import Finding, RequestRecord, TrialRecord, VerdictKind
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.ceiling import SaturationProbe
from kvbench.core.search.live_config import CriterionTarget, Decision, LiveConfig, Observation, TurnsLive
from kvbench.core.search.load_plan import Offered, TrialPlan, planned
from kvbench.core.search.methods import SATURATED, joined_verdict, judged_slo, judged_window
from kvbench.core.search.sequential_trial import LiveTrial
from kvbench.core.sessions.session_load import sent_indices, session_figures
from kvbench.core.sessions.session_source import SessionSource
from kvbench.core.slo import Criterion, Slo, latencies_ms

_OF_A_TIER = ("slo_attainment", "attainment_lower", "attainment_upper", "request_goodput", "missed_by")


class TrialWatch:
    """Follows a trial by sequential tests (``LiveTrial``), one per SLO tier. ``decisions``: decided tiers.
    The trial ends with the tier it was run for."""

    def __init__(
        self, scenario: Scenario, plan: TrialPlan, offered: Offered, tiers: Mapping[str, Slo] | None = None
    ) -> None:
        tiers = scenario.slo.by_tier() if tiers is None else tiers
        self._tiers = dict(tiers) if plan.searched and not plan.ceiling else {}
        self._tier = plan.tier if plan.tier in self._tiers else next(iter(self._tiers), "")
        self.decisions: dict[str, Decision] = {}
        self._saturation = offered.saturation
        self._saturation_ends_s: NDArray[np.float64] = np.empty(0)
        self._saturated = False
        self.saturated_s = 0.0
        """Duration of a ceiling probe without the grace period."""
        self._trials = {
            name: LiveTrial(
                LiveConfig(
                    offsets_s=offered.offsets_s,
                    rate=plan.rate,
                    latency_s=plan.latency_s,
                    ttft_limit_s=(slo.tightest("ttft_ms") or 0.0) / 1e3,
                    confidence=scenario.search.confidence,
                    full_length=plan.full_length,
                    confirms=plan.confirms,
                    least_s=plan.least_s,
                    hopeless_s=_hopeless_s(slo, plan.cell.output_len) if offered.turns is None else math.inf,
                    turns=offered.turns,
                ),
                [_target(criterion) for criterion in slo.all_criteria()],
            )
            for name, slo in self._tiers.items()
        }

    @property
    def decision(self) -> Decision | None:
        return self.decisions.get(self._tier)

    @property
    def main_decision(self) -> Decision | None:
        """Decision of the strictest tier, which gives the trial's verdict."""
        return self.decisions.get(next(iter(self._tiers), ""))

    def progressed(self, progress: Progress) -> bool:
        """Take progress; return True if the trial may end."""
        for name, live in self._trials.items():
            seen = [
                _observation(self._tiers[name], request)
                for request in progress.settled
                if request.error != "cancelled"
            ]
            decision = live.feed(
                progress.t_s, seen, progress.waiting_first, progress.sent, progress.offsets_s
            )
            if decision is not None:
                self.decisions.setdefault(name, decision)
        if self._saturation is not None:
            return self._saturation_over(self._saturation, progress)
        # "undecided" is also a decision: the time is over.
        return self.decision is not None

    def _saturation_over(self, saturation: SaturationProbe, progress: Progress) -> bool:
        if self._saturated:
            return True
        answered = (answer for answer in progress.settled if not answer.error and answer.e2el_s is not None)
        ends = [float(saturation.offsets_s[answer.index]) + (answer.e2el_s or 0.0) for answer in answered]
        self._saturation_ends_s = np.append(self._saturation_ends_s, ends)
        self.saturated_s = progress.t_s
        self._saturated = saturation.is_over(self._saturation_ends_s, progress.t_s)
        return self._saturated


@dataclass(frozen=True)
class PlannedTrial:
    """A trial with its load, stopping rule, and record so far."""

    plan: TrialPlan
    trace: Sequence[TracedRequest]
    """Source of its requests; empty if all are alike."""
    offered: Offered
    watch: TrialWatch
    begun: TrialRecord

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        plan: TrialPlan,
        trace: Sequence[TracedRequest] = (),
        source: SessionSource | None = None,
        labels: Sequence[str] = (),
        started_at: str = "",
    ) -> PlannedTrial:
        """``trace``, ``source``: the scenario's trace or sessions, if any. ``labels``: of the run."""
        trace = plan.requests or trace
        offered = planned(scenario, plan, trace, source)
        watch = TrialWatch(scenario, plan, offered)
        return cls(plan, trace, offered, watch, new_record(scenario, plan, labels, started_at))


def new_record(
    scenario: Scenario, plan: TrialPlan, labels: Sequence[str] = (), started_at: str = ""
) -> TrialRecord:
    return TrialRecord(
        trial_id=plan.trial_id,
        cell=plan.cell,
        request_rate=plan.rate,
        seed=plan.seed(scenario.seed),
        verdict="invalid",
        reason="",
        purpose=plan.purpose,
        started_at=started_at,
        labels=list(labels),
        method=plan.method,
    )


def _target(criterion: Criterion) -> CriterionTarget:
    """Criterion with its limit on TTFT, else on the whole latency; both include waiting."""
    limits = {limit.metric: limit.limit / 1e3 for limit in criterion.limits}
    waits = [limits[metric] for metric in ("ttft_ms", "first_ttft_ms", "later_ttft_ms") if metric in limits]
    wait_s = min(waits, default=None)
    whole = wait_s is None and set(limits) == {"e2el_ms"}
    return CriterionTarget(criterion.kind, criterion.target, wait_s or limits.get("e2el_ms", 0.0), whole)


def _hopeless_s(slo: Slo, output_len: int) -> float:
    """Age at which an unfinished request has certainly missed a limit; infinite if unknown."""
    metrics = {limit.metric for limit in slo.each}
    certain = len(slo.each) == len(slo.limits) + sum(
        limit is not None for limit in (slo.ttft_ms, slo.tpot_ms)
    ) and ({"ttft_ms", "tpot_ms"} <= metrics or "e2el_ms" in metrics)
    return slo.e2el_ms(output_len) / 1e3 if certain else math.inf


def _observation(slo: Slo, settled: Settled) -> Observation:
    ok = settled.error == ""
    values = latencies_ms(settled.ttft_s, settled.tpot_s, settled.e2el_s, ok, settled.turn, settled.session_s)
    return settled.index, slo.observe(values, ok), slo.margins(values, ok), settled.ttft_s


def ceiling_figures(
    records: Sequence[RequestRecord], saturation: SaturationProbe, until_s: float
) -> dict[str, Any]:
    """Completions per second of a ceiling probe, and whether they are its peak, for the summary."""
    ends = [record.last_token_s for record in records if record.ok and record.last_token_s is not None]
    found = saturation.measured(ends, until_s)
    if found.completion_rate is None:
        return {}
    return {"completion_rate": found.completion_rate, "completion_steady": not found.grows}


@dataclass(frozen=True)
class SiteReadings:
    """Readings of a trial besides its load. ``evidence``: fields of ``Evidence``. ``columns``: of the record.
    ``cache_tokens``: size of the KV caches, if known. ``found_tokens``: cached prompt tokens, if the records
    lack them."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    cache_tokens: int | None = None
    found_tokens: float | None = None


def judge(scenario: Scenario, trial: PlannedTrial, load: LoadResult, seen: SiteReadings) -> TrialRecord:
    """Return a trial's record: verdict of gates and live rule, figures and findings."""
    evidence, watch, saturation = (
        evidence_of(scenario, trial, load, seen),
        trial.watch,
        trial.offered.saturation,
    )
    verdict, reason, findings = _verdict(scenario, trial, evidence, load, watch.main_decision)
    summary = evidence.summary.to_json()
    if len(scenario.slo.by_tier()) > 1:
        summary["tiers"] = _by_tier(scenario, trial, evidence, load)
    summary["unseen"] = unseen(evidence)
    if watch.decision is not None:
        summary["live"] = _live_json(watch.decision)
    if saturation is not None:
        summary |= ceiling_figures(load.records, saturation, watch.saturated_s)
    columns = {
        **seen.columns,
        **_expected_reuse(trial.offered.requests or (), load),
        **_session_columns(trial, load, evidence.summary.window, seen),
    }
    saturated = [SATURATED] if verdict == "measured" and reason else []
    record = replace(
        trial.begun,
        verdict=verdict,
        reason=reason,
        duration_s=load.duration_s,
        summary=summary,
        engine=columns,
        findings=findings,
        labels=[*trial.begun.labels, *saturated],
    )
    note_limit(record, load.records, scenario.slo.main())
    return record


def evidence_of(scenario: Scenario, trial: PlannedTrial, load: LoadResult, seen: SiteReadings) -> Evidence:
    """Evidence for the gates: the load, figures of the steady part, and the site's readings."""
    method, decision, turns = trial.plan.method, trial.watch.main_decision, trial.offered.turns
    window = _judged_part(trial, load, decision)
    slo = judged_slo(method, scenario.slo.main())
    evidence = Evidence(
        records=load.records,
        summary=summarise(load.records, slo, trial.plan.rate, load.duration_s, window),
        slo=slo,
        client=ClientFigures.from_json(load.client),
        worded=scenario.load.endpoint == "chat",
        dummy_weights=scenario.deployment.engine_options.answers_alike,
        reuse_expected=turns is not None or (bool(trial.trace) and shares_prefixes(trial.trace)),
        filled_s=0.0 if turns is None else turns.filled_s,
        dispersion=None if turns is None else turns.dispersion,
        stopped_as=_stop_verdict(load, decision),
        method="sustained" if method == "equal_rate" else method,
    )
    evidence = replace(evidence, **seen.evidence)
    return replace(evidence, reuse_offered=_offered_reuse(trial, load, evidence))


def _verdict(
    scenario: Scenario, trial: PlannedTrial, evidence: Evidence, load: LoadResult, decision: Decision | None
) -> tuple[VerdictKind, str, list[Finding]]:
    searched = scenario.slo.given and not trial.plan.ceiling
    verdict, reason, findings = joined_verdict(trial.plan.method, evidence, decision, searched=searched)
    if decision is None and load.reason == "stopped" and verdict in ("met", "missed"):
        return "undecided", "the trial ended before this could be decided", findings
    return verdict, reason, findings


def _by_tier(
    scenario: Scenario, trial: PlannedTrial, evidence: Evidence, load: LoadResult
) -> dict[str, dict[str, Any]]:
    """Verdict and figures of the trial for each SLO tier."""
    tiers: dict[str, dict[str, Any]] = {}
    for name, slo in scenario.slo.by_tier().items():
        decision = trial.watch.decisions.get(name)
        window = _judged_part(trial, load, decision)
        summary = summarise(load.records, slo, trial.plan.rate, load.duration_s, window)
        of_tier = replace(evidence, slo=slo, summary=summary, stopped_as=_stop_verdict(load, decision))
        verdict, reason, _ = _verdict(scenario, trial, of_tier, load, decision)
        known = summary.to_json()
        tiers[name] = {"verdict": verdict, "reason": reason, **{key: known[key] for key in _OF_A_TIER}}
        tiers[name]["criteria"] = known["criteria"]
        if decision is not None:
            tiers[name]["live"] = _live_json(decision)
    return tiers


def _expected_reuse(requests: Sequence[TracedRequest], load: LoadResult) -> dict[str, Any]:
    """Hit rate of an infinite prefix cache for the sent requests of a trace."""
    sent = requests[: sum(record.sent_s is not None for record in load.records)]
    prompts = sum(request.input_len for request in sent)
    if not prompts or not shares_prefixes(sent):
        return {}
    return {"expected_hit_rate": sum(expected_hits(sent)) / prompts}


def _session_columns(
    trial: PlannedTrial, load: LoadResult, window: Window, seen: SiteReadings
) -> dict[str, Any]:
    """Columns of a session load: sessions per second and concurrent, TTFT by turn, reuse."""
    offered = trial.offered
    if offered.sessions is None or offered.turns is None:
        return {}
    span_s = window.start_s, window.end_s
    found = session_figures(load.records, offered.sessions, span_s, seen.cache_tokens, seen.found_tokens)
    rates = {
        "session_rate": trial.plan.rate / offered.requests_each,
        "requests_each": offered.requests_each,
    }
    planned = {**asdict(offered.turns), "begin_s": offered.length_s}
    return {"sessions": {**rates, **found, "planned": planned}}


def rebuild_offer(record: TrialRecord) -> Offered:
    """Rebuild what a stored trial offered, as far as judging needs it; sessions are not planned again."""
    planned = (record.engine.get("sessions") or {}).get("planned")
    if not planned:
        return Offered(np.array([0.0]))
    turns = TurnsLive(**{key: value for key, value in planned.items() if key != "begin_s"})
    return Offered(np.array([0.0, float(planned["begin_s"])]), turns=turns)


def _offered_reuse(trial: PlannedTrial, load: LoadResult, evidence: Evidence) -> float | None:
    """Prompt tokens that a prefix cache could reuse at most, or None without sessions. Smaller blocks also
    find the rest of a prompt's last block."""
    sessions = trial.offered.sessions
    if sessions is None:
        return None
    sent = sent_indices(load.records)
    (offered,) = sessions.offered_tokens(sent, (None,))
    sizes = [engine.block_tokens for engine in evidence.engines.values() if engine.block_tokens]
    return offered + len(sent) * max(0, sessions.block_tokens - min(sizes, default=1))


def _judged_part(trial: PlannedTrial, load: LoadResult, decision: Decision | None) -> Window | None:
    """Part of the load that is judged; None without one."""
    turns, end_s = trial.offered.turns, trial.offered.length_s
    # The steady part of sessions begins when completions match starts, and ends with the last start.
    filled = None if turns is None else Window(min(turns.filled_s, end_s), end_s)
    return judged_window(trial.plan.method, load.records) or _steady_part(decision) or filled


def _steady_part(decision: Decision | None) -> Window | None:
    """Steady part by the live rule, or None if it did not get that far."""
    return Window(*decision.window_s) if decision is not None and decision.measured.n else None


def _stop_verdict(load: LoadResult, decision: Decision | None) -> Literal["", "met", "missed"]:
    if decision is None or decision.verdict == "undecided" or load.reason != "stopped":
        return ""
    return decision.verdict


def _live_json(decision: Decision) -> dict[str, Any]:
    """The live rule's decision as stored, also for the search."""
    return {
        "verdict": decision.verdict,
        "reason": decision.reason,
        "at_s": decision.at_s,
        "window_s": list(decision.window_s),
        "measured": decision.measured.to_json(),
    }
