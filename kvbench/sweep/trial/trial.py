"""One trial: one rate offered to one cell once, with all that is needed to judge the number."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

from kvbench.core.gates.evidence import Evidence
from kvbench.core.gates.evidence_figures import ClientFigures, EngineFigures, HostFigures
from kvbench.core.load.traces import TracedRequest, expected_hits, request_rate, shares_prefixes
from kvbench.core.load.workers import workers_over
from kvbench.core.metrics.engine_use import sampled_use
from kvbench.core.metrics.limit import note_limit
from kvbench.core.metrics.metrics import Summary, Window, summarise
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import (
    TIMING_REQUEST_HEADER,
    Cell,
    Finding,
    Method,
    Outputs,
    TrialRecord,
    VerdictKind,
)
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.live_config import Decision
from kvbench.core.search.methods import SATURATED, joined_verdict, judged_slo, judged_window
from kvbench.deployment.deployment import Deployment
from kvbench.hosts.api_key import bearer
from kvbench.hosts.telemetry import Metrics
from kvbench.launchers.base import Launcher
from kvbench.planning.trace_files import write_requests
from kvbench.results.store import RunStore
from kvbench.sweep.trial.evidence import (
    engine_figures,
    engine_summary,
    router_figures,
    transport_of,
    with_slots,
)
from kvbench.sweep.trial.host_samples import Observer
from kvbench.sweep.trial.idle import Idleness
from kvbench.sweep.trial.kv_counters import DEFAULT_LOG_INTERVAL_S, LOG_INTERVAL_ENV, KvLogs, RoleKv, role_kv
from kvbench.sweep.trial.load_plan import Offered, Wanted, Watch, ceiling_figures, planned
from kvbench.sweep.trial.loadgen_driver import LoadGenerator, LoadResult, Progress, Spare
from kvbench.sweep.trial.surroundings import slots_of, surroundings

DRAIN_DEADLINE_S = 30.0
STOP_GRACE_S = 20.0
"""A trial that is stopped early lets a real engine finish what it has: a request that is cancelled between
P and D keeps P's KV blocked for its whole lease, and is counted as a failed transfer in the next trial."""
DEADLINE_SLACK_S = 20.0
LOG_WAIT_S = 2.5
"""A KV log line that comes more seldom than this is not waited for after each trial."""


LoadMode = Literal["router", "direct"]


@dataclass(frozen=True)
class TrialPlan:
    """What is to be offered, and by which way: None is the scenario's.

    ``twin_of``: the number of the trial whose load this one repeats, request by request; it may be its own.
    Caches are emptied before such trials, since their prompts come twice. 0: a load like no other.
    ``seed_key``: what takes the cell's place in the seed, so that several connectors get the same load.
    ``searched``: the trial may end when its verdict for ``tier`` is sure; else all of it is offered.
    ``latency_s``: of one request alone, 0 if unknown.
    """

    cell: Cell
    number: int
    rate: float
    purpose: str
    mode: LoadMode | None = None
    twin_of: int = 0
    method: Method = "sustained"
    tier: str = ""
    searched: bool = True
    seed_key: str = ""
    latency_s: float = 0.0
    thorough: bool = False

    @property
    def trial_id(self) -> str:
        method = "" if self.method in ("sustained", "trace") else f"{self.method.replace('_', '-')}-"
        return f"{self.cell.key}-{method}{self.number:02d}"

    def wanted(self, seed: int) -> Wanted:
        """What is to be offered, with its seed."""
        return Wanted(
            self.cell,
            self.rate,
            seed,
            self.method,
            self.searched,
            self.purpose == "ceiling",
            self.latency_s,
            self.thorough,
            self.purpose == "confirm",
        )


class TrialRunner:
    """Runs trials against one deployment and stores each as soon as it is judged."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        store: RunStore,
        launcher: Launcher,
        on_progress: Callable[[Cell, float, int, Progress], None],
        trace: Sequence[TracedRequest] = (),
        idle: Idleness | None = None,
    ) -> None:
        self.scenario = scenario
        self.deployment = deployment
        self._store = store
        self._launcher = launcher
        self._spare = Spare(launcher)
        self._on_progress = on_progress
        self._trace = trace
        self._tiers = scenario.slo.by_tier()
        self._slo = scenario.slo.main()
        self._idle = idle or Idleness(scenario, deployment)
        self._kv_logs = KvLogs({p.name: p.log_path for p in deployment.processes if p.name != "router"})
        self._may_expire = 0.0

    @property
    def trace_rate(self) -> float:
        """Requests per second of the trace as it was recorded (and scaled); 0 without one."""
        rate = request_rate(self._trace) if self._trace else 0.0
        return rate if math.isfinite(rate) else 0.0

    def prepare(self) -> None:
        """Starts a load generator for the next trial; ``close`` ends it if there is none."""
        self._spare.prepare()

    def close(self) -> None:
        self._spare.close()

    def keep_outputs(self, label: str, input_len: int, outputs: Outputs) -> None:
        """Stores a deployment's greedy outputs, for who goes on with the run."""
        self._store.add_outputs(label, input_len, outputs)

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Offer the load to an idle system, judge it, store it.

        A system that does not become idle is offered nothing: the trial is void. Raises KvbenchError if a
        process dies or hangs.
        """
        backlog = self._idle.wait(plan.cell)
        if backlog is not None:
            return self._void(plan, backlog)
        if plan.twin_of:
            self.deployment.reset_caches()
        pages_before = self.deployment.metrics()
        if self._reads_logs(pages_before):
            self._logged_kv(pages_before)
            pages_before = self.deployment.metrics()
        started_at = _utc_now()
        endpoints = self.deployment.endpoints
        sampler = Observer(self._launcher, self.deployment, plan.trial_id, bearer(endpoints.api_key_env))
        with sampler:
            load, offered, watch = self._offer(plan)
        cancelled = sum(record.error == "cancelled" for record in load.records)
        completed = sum(record.ok for record in load.records)
        self._idle.left_behind(cancelled, completed / max(load.duration_s, 1e-3))
        self._idle.drained(DRAIN_DEADLINE_S)
        pages_after = self.deployment.metrics()
        logged = self._logged_kv(pages_after)
        figures = with_slots(
            engine_figures(pages_before, pages_after, logged), sampler.rows, slots_of(self.scenario)
        )
        slo, window = judged_slo(plan.method, self._slo), judged_window(plan.method, load.records)
        decision = watch.decisions.get(next(iter(self._tiers)))
        summary = summarise(load.records, slo, plan.rate, load.duration_s, window or steady_part(decision))
        evidence = self._evidence(
            plan,
            load,
            summary,
            figures,
            stopped_as(load, decision),
            sampler.host,
            pages_after,
        )
        if self._mode(plan) != "direct":  # in which the router stands idle, and limits nothing
            router = replace(router_figures(pages_before, pages_after), seconds=load.duration_s)
            evidence = replace(evidence, router=router)
        self._may_expire = max(0.0, evidence.kv_may_expire - _lost(figures))
        verdict, reason, findings = self._verdict(plan, evidence, load, decision)
        told = summary.to_json()
        if len(self._tiers) > 1:
            told["tiers"] = self._judged_tiers(plan, evidence, load, watch)
        if watch.decision is not None:
            told["live"] = live_json(watch.decision)
        if offered.flood is not None:
            told |= ceiling_figures(load.records, offered.flood, watch.flooded_s)
        labels = list(self._store.manifest.get("labels", []))
        if verdict == "measured" and reason:
            labels.append(SATURATED)
        record = TrialRecord(
            trial_id=plan.trial_id,
            cell=plan.cell,
            request_rate=plan.rate,
            seed=self._seed(plan),
            verdict=verdict,
            reason=reason,
            purpose=plan.purpose,
            started_at=started_at,
            duration_s=load.duration_s,
            summary=told,
            engine={
                **engine_summary(pages_before, pages_after, figures, load, logged),
                "load_mode": self._mode(plan),
                **self._expected_reuse(offered, load),
            },
            findings=findings,
            labels=labels,
            method=plan.method,
        )
        use = sampled_use(sampler.rows, slots_of(self.scenario))
        record.engine["use"] = {role: each.to_json() for role, each in use.items()}
        note_limit(record, load.records, self._slo)
        self._store.add_telemetry(sampler.rows)
        self._store.add_trial(record, load.records)
        return record

    def _void(self, plan: TrialPlan, finding: Finding) -> TrialRecord:
        """Stores that a trial was not begun, and why."""
        record = TrialRecord(
            trial_id=plan.trial_id,
            cell=plan.cell,
            request_rate=plan.rate,
            seed=self._seed(plan),
            verdict="invalid",
            reason=finding.message,
            purpose=plan.purpose,
            started_at=_utc_now(),
            summary=summarise([], judged_slo(plan.method, self._slo), plan.rate, 0.0, None).to_json(),
            engine={"load_mode": self._mode(plan)},
            findings=[finding],
            labels=list(self._store.manifest.get("labels", [])),
            method=plan.method,
        )
        self._store.add_trial(record, [])
        return record

    def _offer(self, plan: TrialPlan) -> tuple[LoadResult, Offered, Watch]:
        wanted = plan.wanted(self._seed(plan))
        offered = planned(self.scenario, wanted, self._trace)
        watch = Watch(self.scenario, wanted, offered, self._tiers, plan.tier)

        def progressed(progress: Progress) -> bool:
            self._on_progress(plan.cell, plan.rate, offered.n, progress)
            return watch.progressed(progress)

        spec = self._load_spec(plan, offered.n)
        requests_path = self._store.path / f".requests-{plan.trial_id}.jsonl"
        if offered.flood is not None and offered.requests is None:
            spec["offsets_s"] = offered.offsets_s.tolist()
        if offered.requests is not None:
            write_requests(requests_path, offered.requests)
            spec["requests_path"] = str(requests_path)
        timeout_s = self.scenario.workload.request_timeout_s
        deadline_s = max(offered.length_s, offered.n / plan.rate) * 2 + timeout_s + DEADLINE_SLACK_S
        workers, name = self._workers(plan.rate, offered.n), f"loadgen-{plan.trial_id}"
        generator = LoadGenerator(self._launcher, spec, name, workers, spare=self._spare)
        try:
            return generator.run(progressed, self.deployment.check_alive, deadline_s), offered, watch
        finally:
            requests_path.unlink(missing_ok=True)

    def _verdict(
        self, plan: TrialPlan, evidence: Evidence, load: LoadResult, decision: Decision | None
    ) -> tuple[VerdictKind, str, list[Finding]]:
        asked = self.scenario.slo.given and plan.purpose != "ceiling"
        verdict, reason, findings = joined_verdict(plan.method, evidence, decision, searched=asked)
        if decision is None and load.reason == "stopped" and verdict in ("met", "missed"):
            return "undecided", "the trial ended before this could be decided", findings
        return verdict, reason, findings

    def _judged_tiers(
        self, plan: TrialPlan, evidence: Evidence, load: LoadResult, watch: Watch
    ) -> dict[str, dict[str, Any]]:
        """The trial's verdict and figures for each tier of the SLO."""
        tiers: dict[str, dict[str, Any]] = {}
        for name, slo in self._tiers.items():
            decision = watch.decisions.get(name)
            summary = summarise(load.records, slo, plan.rate, load.duration_s, steady_part(decision))
            mine = replace(evidence, slo=slo, summary=summary, stopped_as=stopped_as(load, decision))
            verdict, reason, _ = self._verdict(plan, mine, load, decision)
            known = summary.to_json()
            kept = ("slo_attainment", "attainment_lower", "attainment_upper", "request_goodput", "missed_by")
            tiers[name] = {"verdict": verdict, "reason": reason, **{key: known[key] for key in kept}}
            tiers[name]["criteria"] = known["criteria"]
            if decision is not None:
                tiers[name]["live"] = live_json(decision)
        return tiers

    def _expected_reuse(self, offered: Offered, load: LoadResult) -> dict[str, Any]:
        """What an endless prefix cache would have found of the traced requests that were sent."""
        sent = len([record for record in load.records if record.sent_s is not None])
        requests = list(offered.requests or ())[:sent]
        prompts = sum(request.input_len for request in requests)
        if not prompts or not shares_prefixes(requests):
            return {}
        return {"expected_hit_rate": sum(expected_hits(requests)) / prompts}

    def _seed(self, plan: TrialPlan) -> int:
        return trial_seed(self.scenario.seed, plan.seed_key or plan.cell.key, plan.twin_of or plan.number)

    def _workers(self, rate: float, n: int) -> int:
        wanted = self.scenario.load.workers
        if wanted == "auto":
            hosts = self.scenario.deployment.roles.of("loadgen")
            cores = [self._launcher.far(f"loadgen-w{index}").cores for index in range(len(hosts) or 1)]
            return workers_over(rate, self.scenario.workload.output_len, n, cores)
        return min(wanted, n)

    def _mode(self, plan: TrialPlan) -> LoadMode | Literal[""]:
        """By which way the requests go; empty where there is no router to go through or past."""
        if self.deployment.endpoints.direct is None:
            return ""
        return plan.mode or self.scenario.load.mode

    def _load_spec(self, plan: TrialPlan, n: int) -> dict[str, Any]:
        scenario = self.scenario
        emulated = scenario.deployment.engine == "emulated"
        endpoints, direct = self.deployment.endpoints, self._mode(plan) == "direct"
        return {
            "base_url": endpoints.base_url,
            **({"direct": endpoints.direct} if direct else {}),
            "path": "/v1/completions",
            "model": scenario.model.served_model_name,
            "request_rate": plan.rate,
            "num_requests": n,
            "burstiness": scenario.workload.burstiness,
            "seed": self._seed(plan),
            "input_len": plan.cell.input_len,
            "output_len": plan.cell.output_len,
            "vocab_size": scenario.model.vocab_size,
            "timeout_s": scenario.workload.request_timeout_s,
            "stop_grace_s": 0.0 if emulated else min(STOP_GRACE_S, scenario.workload.request_timeout_s),
            "records_path": str(self._store.path / f".records-{plan.trial_id}.jsonl"),
            "slo": {"ttft_ms": self._slo.tightest("ttft_ms"), "tpot_ms": self._slo.tightest("tpot_ms")},
            # Only our own router knows that header.
            "api_key_env": endpoints.api_key_env,
            "headers": {TIMING_REQUEST_HEADER: "1"} if endpoints.router_metrics_url and not direct else {},
        }

    def _reads_logs(self, pages: Mapping[str, Metrics | None]) -> bool:
        """Whether KV moves and no engine tells of it in its metrics."""
        told = (role_kv([(page, page)]).source for page in pages.values() if page is not None)
        return self.deployment.connector.disaggregated and not any(told)

    def _logged_kv(self, pages: Mapping[str, Metrics | None]) -> dict[str, RoleKv]:
        """What engines without KV metrics log of their transfers since the last call.

        Their lines come at intervals. If they come often, one interval is waited for, so that a trial's
        transfers are all counted and no others; if not, only means of a transfer are taken from them.
        """
        if not self._reads_logs(pages):
            return {}
        whole = self._log_interval_s() <= LOG_WAIT_S
        if whole:
            deadline = time.monotonic() + self._log_interval_s() + 0.5
            while time.monotonic() < deadline:
                self.deployment.check_alive()
                self._kv_logs.poll()
                time.sleep(0.05)
        return self._kv_logs.take(whole=whole)

    def _log_interval_s(self) -> float:
        told = [process.spec.env.get(LOG_INTERVAL_ENV, "") for process in self.deployment.processes]
        try:
            return float(next(filter(None, told), os.environ.get(LOG_INTERVAL_ENV) or DEFAULT_LOG_INTERVAL_S))
        except ValueError:
            return DEFAULT_LOG_INTERVAL_S

    def _evidence(
        self,
        plan: TrialPlan,
        load: LoadResult,
        summary: Summary,
        figures: Mapping[str, EngineFigures],
        stopped_as: Literal["", "met", "missed"],
        host: HostFigures,
        pages: Mapping[str, Metrics | None],
    ) -> Evidence:
        connector = self.deployment.connector
        options = self.scenario.connector_options(self.deployment.plan.label)
        deployed = self.scenario.deployment
        moves = connector.disaggregated and deployed.engine != "external"
        # Of a trace's requests each has a length of its own, and what is reused does not move.
        traced = bool(self._trace)
        reused = traced and shares_prefixes(self._trace)
        kv_bytes, slack = (None, 0.0) if traced else self._kv_bytes(plan.cell.input_len, figures)
        cancelled = sum(record.error == "cancelled" for record in load.records)
        may_expire = self._may_expire + cancelled
        return Evidence(
            records=load.records,
            summary=summary,
            slo=judged_slo(plan.method, self._slo),
            method="sustained" if plan.method == "equal_rate" else plan.method,
            reuse_expected=reused,
            disaggregated=connector.disaggregated,
            whole_prompt=self.deployment.connector.whole_prompt,
            client=ClientFigures.from_json(load.client),
            engines=figures,
            host=host,
            kv_bytes_per_request=kv_bytes if connector.disaggregated else None,
            kv_bytes_slack=slack,
            kv_bytes_certain=deployed.engine == "emulated",
            kv_may_expire=may_expire,
            transport_asked=connector.transport_asked(options) if moves else "",
            transport_ran=transport_of(pages) if moves else "",
            stopped_as=stopped_as,
            **surroundings(self.scenario, connector, options),
            logged=[each.finding(excused=may_expire > 0) for each in self.deployment.diagnoses()],
        )

    def _kv_bytes(self, input_len: int, figures: Mapping[str, EngineFigures]) -> tuple[float | None, float]:
        """KV bytes that one request has to move, in whole blocks, and how much of it may stay behind.

        The block size is what the engines tell. None if that, or the model's shape, is not known. Only of
        the emulated engine is it known that the last, partial block moves whole.
        """
        shape, deployed = self.scenario.model.shape, self.scenario.deployment
        blocks = {role.block_tokens for role in figures.values() if role.block_tokens}
        if not shape.known or len(blocks) != 1:
            return None, 0.0
        block_tokens = blocks.pop()
        per_block = float(shape.block_bytes(block_tokens, deployed.tensor_parallel_size) * shape.regions())
        partial = deployed.engine != "emulated" and input_len % block_tokens > 0
        return shape.blocks(input_len, block_tokens) * per_block, per_block if partial else 0.0


def _utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _lost(figures: Mapping[str, EngineFigures]) -> float:
    """Requests whose KV was given up or failed to move."""
    return sum((role.kv_expired or 0.0) + (role.kv_failures or 0.0) for role in figures.values())


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
