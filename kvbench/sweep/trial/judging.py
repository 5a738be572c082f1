"""Judge and record a trial, measured or simulated: from what came of its load to its line in the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

import numpy as np

from kvbench.core.gates.evidence import ClientFigures, EngineFigures, Evidence
from kvbench.core.gates.gates import unseen
from kvbench.core.load.traces import expected_hits, shares_prefixes
from kvbench.core.metrics.limit import note_limit
from kvbench.core.metrics.metrics import Window, summarise
from kvbench.core.records import Finding, TrialRecord, VerdictKind
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.live_config import Decision, TurnsLive
from kvbench.core.search.methods import SATURATED, joined_verdict, judged_slo, judged_window
from kvbench.core.sessions.session_load import sent_places, session_figures
from kvbench.results.store import RunStore
from kvbench.sweep.trial.load_plan import Offered, PlannedTrial, TrialPlan, ceiling_figures
from kvbench.sweep.trial.loadgen_driver import LoadResult

_OF_A_TIER = ("slo_attainment", "attainment_lower", "attainment_upper", "request_goodput", "missed_by")


@dataclass(frozen=True)
class Judgement:
    """What a trial says. ``summary``: its figures as JSON, with those of each tier and of the live rule."""

    verdict: VerdictKind
    reason: str
    findings: list[Finding]
    summary: dict[str, Any]

    @property
    def labels(self) -> list[str]:
        return [SATURATED] if self.verdict == "measured" and self.reason else []


def evidence_of(scenario: Scenario, trial: PlannedTrial, load: LoadResult) -> Evidence:
    """What the gates see of the load alone, with its figures over the steady part."""
    method, decision = trial.plan.method, trial.watch.main_decision
    window = judged_window(method, load.records) or steady_part(decision) or _filled_part(trial)
    turns = trial.offered.turns
    slo = judged_slo(method, scenario.slo.main())
    return Evidence(
        records=load.records,
        summary=summarise(load.records, slo, trial.plan.rate, load.duration_s, window),
        slo=slo,
        client=ClientFigures.from_json(load.client),
        worded=scenario.load.endpoint == "chat",
        dummy_weights=scenario.deployment.engine_options.answers_alike,
        reuse_expected=turns is not None or (bool(trial.trace) and shares_prefixes(trial.trace)),
        filled_s=0.0 if turns is None else turns.filled_s,
        dispersion=None if turns is None else turns.dispersion,
        stopped_as=stopped_as(load, decision),
        method="sustained" if method == "equal_rate" else method,
    )


def judged(scenario: Scenario, trial: PlannedTrial, load: LoadResult, evidence: Evidence) -> Judgement:
    """The verdict of gates and live rule together. ``evidence``: the trial's ``evidence_of``, and more."""
    watch, flood = trial.watch, trial.offered.flood
    verdict, reason, findings = _verdict(scenario, trial.plan, evidence, load, watch.main_decision)
    summary = evidence.summary.to_json()
    if len(scenario.slo.by_tier()) > 1:
        summary["tiers"] = _by_tier(scenario, trial, evidence, load)
    summary["unseen"] = unseen(evidence)
    if watch.decision is not None:
        summary["live"] = live_json(watch.decision)
    if flood is not None:
        summary |= ceiling_figures(load.records, flood, watch.flooded_s)
    return Judgement(verdict, reason, findings, summary)


def void(
    scenario: Scenario,
    plan: TrialPlan,
    finding: Finding,
    store: RunStore,
    engine: Mapping[str, Any] | None = None,
) -> TrialRecord:
    """Stores a trial in which nothing was offered, and why. ``engine``: as in ``ended_record``."""
    nothing = summarise([], judged_slo(plan.method, scenario.slo.main()), plan.rate, 0.0, None)
    judgement = Judgement("invalid", finding.message, [finding], nothing.to_json())
    record = ended_record(begun_record(scenario, plan, store), judgement, engine or {})
    return stored(scenario, record, LoadResult([], "", 0.0), store)


def begun_record(scenario: Scenario, plan: TrialPlan, store: RunStore) -> TrialRecord:
    """The record of a trial that begins now: all but its outcome."""
    return TrialRecord(
        trial_id=plan.trial_id,
        cell=plan.cell,
        request_rate=plan.rate,
        seed=plan.seed(scenario.seed),
        verdict="invalid",
        reason="",
        purpose=plan.purpose,
        started_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        labels=list(store.manifest.get("labels", [])),
        method=plan.method,
    )


def ended_record(
    begun: TrialRecord, judgement: Judgement, engine: Mapping[str, Any], duration_s: float = 0.0
) -> TrialRecord:
    """The record with its outcome. ``engine``: the columns that stand beside the summary."""
    return replace(
        begun,
        verdict=judgement.verdict,
        reason=judgement.reason,
        duration_s=duration_s,
        summary=judgement.summary,
        engine=dict(engine),
        findings=judgement.findings,
        labels=[*begun.labels, *judgement.labels],
    )


def stored(scenario: Scenario, record: TrialRecord, load: LoadResult, store: RunStore) -> TrialRecord:
    """Stores a trial with its requests; what limits it is noted before."""
    note_limit(record, load.records, scenario.slo.main())
    store.add_trial(record, load.records)
    return record


def _verdict(
    scenario: Scenario, plan: TrialPlan, evidence: Evidence, load: LoadResult, decision: Decision | None
) -> tuple[VerdictKind, str, list[Finding]]:
    asked = scenario.slo.given and plan.purpose != "ceiling"
    verdict, reason, findings = joined_verdict(plan.method, evidence, decision, searched=asked)
    if decision is None and load.reason == "stopped" and verdict in ("met", "missed"):
        return "undecided", "the trial ended before this could be decided", findings
    return verdict, reason, findings


def _by_tier(
    scenario: Scenario, trial: PlannedTrial, evidence: Evidence, load: LoadResult
) -> dict[str, dict[str, Any]]:
    """The trial's verdict and figures for each tier of the SLO."""
    tiers: dict[str, dict[str, Any]] = {}
    for name, slo in scenario.slo.by_tier().items():
        decision = trial.watch.decisions.get(name)
        summary = summarise(load.records, slo, trial.plan.rate, load.duration_s, steady_part(decision))
        mine = replace(evidence, slo=slo, summary=summary, stopped_as=stopped_as(load, decision))
        verdict, reason, _ = _verdict(scenario, trial.plan, mine, load, decision)
        known = summary.to_json()
        tiers[name] = {"verdict": verdict, "reason": reason, **{key: known[key] for key in _OF_A_TIER}}
        tiers[name]["criteria"] = known["criteria"]
        if decision is not None:
            tiers[name]["live"] = live_json(decision)
    return tiers


def expected_reuse(offered: Offered, load: LoadResult) -> dict[str, Any]:
    """What an endless prefix cache would have found of the traced requests that were sent."""
    sent = len([record for record in load.records if record.sent_s is not None])
    requests = list(offered.requests or ())[:sent]
    prompts = sum(request.input_len for request in requests)
    if not prompts or not shares_prefixes(requests):
        return {}
    return {"expected_hit_rate": sum(expected_hits(requests)) / prompts}


def session_columns(
    trial: PlannedTrial,
    load: LoadResult,
    evidence: Evidence,
    requests_each: float,
    pool_tokens: int | None,
    found_tokens: float | None = None,
) -> dict[str, Any]:
    """Sessions per second and at once, TTFT by turn, reuse offered and achieved; nothing of other loads."""
    turns = trial.offered.turns
    if trial.offered.sessions is None or turns is None:
        return {}
    window = evidence.summary.window.start_s, evidence.summary.window.end_s
    found = session_figures(load.records, trial.offered.sessions, window, pool_tokens, found_tokens)
    rates = {"session_rate": trial.plan.rate / requests_each, "requests_each": requests_each}
    return {"sessions": {**rates, **found, "planned": {**asdict(turns), "begin_s": trial.offered.length_s}}}


def stored_offer(record: TrialRecord) -> Offered:
    """As much of what a stored trial offered as its judgement needs; begun sessions are not planned again."""
    planned = (record.engine.get("sessions") or {}).get("planned")
    if not planned:
        return Offered(np.array([0.0]))
    turns = TurnsLive(**{key: value for key, value in planned.items() if key != "begin_s"})
    return Offered(np.array([0.0, float(planned["begin_s"])]), turns=turns)


def offered_reuse_of(
    trial: PlannedTrial, load: LoadResult, engines: Mapping[str, EngineFigures]
) -> float | None:
    """Prompt tokens that a prefix cache could have found at most; None of a load without sessions.

    Engines whose blocks are smaller than those that are counted find the rest of each prompt's last one, too.
    """
    sessions = trial.offered.sessions
    if sessions is None:
        return None
    sent = sent_places(load.records)
    (offered,) = sessions.offered_tokens(sent, (None,))
    sizes = [each.block_tokens for each in engines.values() if each.block_tokens]
    return offered + len(sent) * max(0, sessions.block_tokens - min(sizes, default=1))


def _filled_part(trial: PlannedTrial) -> Window | None:
    """Of a load of sessions, from when they end about as fast as they begin until none begins any more."""
    turns, end_s = trial.offered.turns, trial.offered.length_s
    return None if turns is None else Window(min(turns.filled_s, end_s), end_s)


def steady_part(decision: Decision | None) -> Window | None:
    """The steady part as the live rule saw it, where it got so far as to look."""
    return Window(*decision.window_s) if decision is not None and decision.measured.n else None


def stopped_as(load: LoadResult, decision: Decision | None) -> Literal["", "met", "missed"]:
    if decision is None or decision.verdict == "undecided" or load.reason != "stopped":
        return ""
    return decision.verdict


def live_json(decision: Decision) -> dict[str, Any]:
    """What the live rule found, for the run folder and for the search."""
    return {
        "verdict": decision.verdict,
        "reason": decision.reason,
        "at_s": decision.at_s,
        "window_s": list(decision.window_s),
        "measured": decision.measured.to_json(),
    }
