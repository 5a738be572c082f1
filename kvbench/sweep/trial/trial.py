"""One trial on a deployment: run the load, take readings, judge, store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal

from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.gates.evidence import EngineFigures, RouterFigures
from kvbench.core.load.dispatch import CHATS, COMPLETIONS
from kvbench.core.load.traces import TracedRequest
from kvbench.core.load.workers import LoadResult, Progress, workers_over
from kvbench.core.metrics.metrics import summarise
from kvbench.core.records import TIMING_REQUEST_HEADER, Cell, Finding, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.judging import PlannedTrial, SiteReadings, judge, new_record
from kvbench.core.search.load_plan import LoadMode, Offered, TrialPlan, rate_of
from kvbench.core.search.methods import judged_slo
from kvbench.core.search.trial_requests import TrialRequests
from kvbench.core.sessions.session_source import SessionSource
from kvbench.deployment.deployment import RunningDeployment
from kvbench.launchers.base import Launcher
from kvbench.planning.load_files import write_requests, write_session_load
from kvbench.results.run import requests_to_replay
from kvbench.results.store import RunStore
from kvbench.sweep.trial.canary_supply import CanarySupply
from kvbench.sweep.trial.idle import Idleness
from kvbench.sweep.trial.loadgen_driver import LoadGenerator, Spare
from kvbench.sweep.trial.readings import (
    MetricsReader,
    Observer,
    Readings,
    kv_bytes_per_request,
    slots_of,
    surroundings,
)

STOP_GRACE_S = 20.0
"""Seconds to finish requests after an early stop. A request cancelled between P and D blocks P's KV for its
lease, and counts as a failed transfer in the next trial."""
DEADLINE_SLACK_S = 20.0


@dataclass(frozen=True)
class Trials:
    scenario: Scenario
    store: RunStore
    trace: Sequence[TracedRequest] = ()
    source: SessionSource | None = None

    @property
    def trace_rate(self) -> float:
        """Requests per second of the trace, as recorded and scaled; 0 without one."""
        return rate_of(self.trace)

    def begin_trial(self, plan: TrialPlan) -> PlannedTrial:
        return PlannedTrial.of(self.scenario, plan, self.trace, self.source, self._labels, _now())

    def end_trial(self, trial: PlannedTrial, load: LoadResult, seen: SiteReadings) -> TrialRecord:
        return self._store(judge(self.scenario, trial, load, seen), load)

    def skip_trial(self, plan: TrialPlan, finding: Finding, columns: Mapping[str, Any]) -> TrialRecord:
        """Store a trial that sent nothing, with the reason."""
        nothing = summarise([], judged_slo(plan.method, self.scenario.slo.main()), plan.rate, 0.0, None)
        record = replace(
            new_record(self.scenario, plan, self._labels, _now()),
            reason=finding.message,
            findings=[finding],
            summary=nothing.to_json(),
            engine=dict(columns),
        )
        return self._store(record, LoadResult([], "", 0.0))

    def _store(self, record: TrialRecord, load: LoadResult) -> TrialRecord:
        self.store.add_trial(record, load.records)
        return record

    def requests(self, record: TrialRecord) -> TrialRequests | None:
        return requests_to_replay(self.store.path, record, self.scenario.workload.burstiness)

    @property
    def _labels(self) -> list[str]:
        return list(self.store.manifest.get("labels", ()))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


@dataclass
class TrialRunner:
    """Runs trials on a deployment. ``more_columns``: called after the drain for further columns. ``source``:
    of sessions, if any. ``canaries``: cell → canaries with known reference outputs."""

    scenario: Scenario
    deployment: RunningDeployment
    store: RunStore
    launcher: Launcher
    on_progress: Callable[[Cell, float, int, Progress], None]
    trace: Sequence[TracedRequest] = ()
    idle: Idleness | None = None
    more_columns: Callable[[], Mapping[str, Any]] = dict
    source: SessionSource | None = None
    canaries: dict[Cell, CanarySupply] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trials = Trials(self.scenario, self.store, self.trace, self.source)
        self._spare = Spare(self.launcher)
        self._idle = self.idle or Idleness(self.scenario, self.deployment)
        self._reader = MetricsReader(self.deployment)
        self._may_expire = 0.0
        """Number of cancelled requests of earlier trials with KV that may still expire."""

    def prepare(self) -> None:
        """Start a load generator for the next trial; ``close`` ends an unused one."""
        self._spare.prepare()

    def close(self) -> None:
        self._spare.close()

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Wait for an idle system, run the load, judge and store it. Raises KvbenchError."""
        if (backlog := self._idle.wait(plan.cell)) is not None:
            return self.trials.skip_trial(plan, backlog, {"load_mode": self._mode(plan)})
        if plan.paired_with:
            self.deployment.reset_caches()
        trial = self.trials.begin_trial(plan)
        self._canary_spec(trial)  # it may empty the caches with requests, which the readings must not count
        before = self._reader.before()
        with Observer(self.launcher, self.deployment, plan.trial_id) as observer:
            load = self.offer(trial)
        undrained = self._idle.drain(load)
        readings = self._reader.after(before, observer, slots_of(self.scenario))
        self.store.add_telemetry(readings.rows)
        return self.trials.end_trial(trial, load, self._site_readings(trial, load, readings, undrained))

    def _site_readings(
        self, trial: PlannedTrial, load: LoadResult, readings: Readings, undrained: Finding | None
    ) -> SiteReadings:
        canaries = self._judge_canaries(trial.plan, load)
        columns = {
            **readings.columns(load),
            "load_mode": self._mode(trial.plan),
            **({"concurrency": trial.plan.closed.concurrency} if trial.plan.closed else {}),
            **({} if canaries is None else {"canaries": canaries.to_json()}),
            **self.more_columns(),
        }
        role = readings.engines.get("prefill") or readings.engines.get("aggregated") or EngineFigures()
        pool = None if role.cache_tokens is None else int(role.cache_tokens)
        evidence = self._evidence(trial, load, readings, undrained)
        return SiteReadings({**evidence, "canaries": canaries}, columns, pool, role.prefix_hits)

    def _judge_canaries(self, plan: TrialPlan, load: LoadResult) -> CanaryResult | None:
        """Judge the trial's canaries, with extra ones after failed or cancelled requests."""
        supply = self.canaries.get(plan.cell)
        if supply is None:
            return None
        supply.used(load.records)
        failed = any(not record.ok for record in load.records)
        extra = supply.ask("after_trial", plan.trial_id, load.duration_s) if failed else []
        self.store.add_extra_canaries(plan.trial_id, extra)
        return supply.judged(load.records, extra)

    def offer(
        self,
        trial: PlannedTrial,
        over: Callable[[Progress], bool] | None = None,
        check: Callable[[], None] | None = None,
    ) -> LoadResult:
        """Only send the load. ``over``: takes progress and returns whether to end; default: the trial's rule.
        ``check``: called meanwhile; default: whether processes live. Raises KvbenchError."""
        plan, offered = trial.plan, trial.offered

        def progressed(progress: Progress) -> bool:
            self.on_progress(plan.cell, plan.rate, offered.n, progress)
            if progress.prepared is not None:
                return False
            return (over or trial.watch.progressed)(progress)

        spec = self._load_spec(trial)
        if over is not None:
            spec["stop_grace_s"] = self.scenario.request_timeout_s
        spec |= self._canary_spec(trial)
        requests_path = self.store.path / f".requests-{plan.trial_id}.jsonl"
        if plan.closed is not None:
            spec |= {"concurrency": plan.closed.concurrency, "duration_s": plan.closed.duration_s}
        if offered.saturation is not None and offered.requests is None:
            spec["offsets_s"] = offered.offsets_s.tolist()
        if offered.requests is not None:
            write_requests(requests_path, offered.requests)
            spec["requests_path"] = str(requests_path)
        if offered.sessions is not None:
            requests_path = requests_path.with_suffix(".npz")
            write_session_load(requests_path, offered.sessions)
            spec["sessions_path"] = str(requests_path)
        timeout_s = self.scenario.request_timeout_s
        deadline_s = self._longest_s(plan, offered) + timeout_s + DEADLINE_SLACK_S
        workers, name = self._workers(plan, offered), f"loadgen-{plan.trial_id}"
        generator = LoadGenerator(self.launcher, spec, name, workers, spare=self._spare)
        try:
            return generator.run(progressed, check or self.deployment.check_alive, deadline_s)
        finally:
            requests_path.unlink(missing_ok=True)

    def _canary_spec(self, trial: PlannedTrial) -> dict[str, Any]:
        """Choose the load's canaries; the same until some are sent."""
        supply = self.canaries.get(trial.plan.cell)
        return {} if supply is None else supply.spec(supply.places(trial.offered, trial.begun.seed))

    def _longest_s(self, plan: TrialPlan, offered: Offered) -> float:
        """Upper bound of the sending time."""
        if offered.sessions is not None:
            return 2 * offered.length_s + offered.sessions.longest_s(self.scenario.request_timeout_s)
        if plan.closed is None:
            return 2 * max(offered.length_s, offered.n / plan.rate)
        rounds = -(-offered.n // plan.closed.concurrency)
        return plan.closed.duration_s or rounds * self.scenario.request_timeout_s

    def _workers(self, plan: TrialPlan, offered: Offered) -> int:
        wanted, rate, n = self.scenario.load.workers, plan.rate, offered.n
        if offered.sessions is not None:
            return 1  # the sender of a turn must know the answers before it
        if plan.closed is not None:
            n = plan.closed.concurrency
            rate = n / max(plan.latency_s, 1e-3)
        if wanted == "auto":
            hosts = self.scenario.deployment.roles.of("loadgen")
            cores = [self.launcher.place_of(f"loadgen-w{index}").cores for index in range(len(hosts) or 1)]
            return workers_over(rate, self.scenario.workload.output_len, n, cores)
        return min(wanted, n)

    def _mode(self, plan: TrialPlan) -> LoadMode | Literal[""]:
        """Mode of the requests; "" without a router."""
        if self.deployment.endpoints.direct is None:
            return ""
        return plan.mode or self.scenario.load.mode

    def _load_spec(self, trial: PlannedTrial) -> dict[str, Any]:
        scenario, slo, plan = self.scenario, self.scenario.slo.main(), trial.plan
        endpoints, direct = self.deployment.endpoints, self._mode(plan) == "direct"
        sessions = trial.offered.sessions
        return {
            "base_url": endpoints.base_url,
            **({"direct": endpoints.direct} if direct else {}),
            "path": COMPLETIONS,
            **self._chat_spec(),
            "model": scenario.model.served_model_name,
            "request_rate": plan.rate,
            "num_requests": trial.offered.n if sessions is None else sessions.requests,
            "burstiness": scenario.workload.burstiness,
            "seed": trial.begun.seed,
            "input_len": plan.cell.input_len,
            "output_len": plan.cell.output_len,
            "vocab_size": scenario.model.vocab_size,
            "timeout_s": scenario.request_timeout_s,
            "stop_grace_s": stop_grace_s(scenario),
            "records_path": str(self.store.path / f".records-{plan.trial_id}.jsonl"),
            "slo": {"ttft_ms": slo.tightest("ttft_ms"), "tpot_ms": slo.tightest("tpot_ms")},
            "api_key_env": endpoints.access.api_key_env,
            # Only kvbench's router knows that header.
            "headers": {TIMING_REQUEST_HEADER: "1"}
            if endpoints.router_metrics_url and not direct
            else dict(endpoints.access.headers),
            "ca_file": endpoints.access.ca_file,
            "insecure": endpoints.access.insecure,
        }

    def _chat_spec(self) -> dict[str, Any]:
        """Chat part of the load generator's spec, if configured."""
        if self.scenario.load.endpoint != "chat":
            return {}
        length = self.deployment.chat_length()
        return {
            "path": CHATS,
            "chat_overhead_tokens": length.overhead_tokens,
            "chat_tokens_per_word": length.tokens_per_word,
        }

    def _evidence(
        self, trial: PlannedTrial, load: LoadResult, readings: Readings, undrained: Finding | None
    ) -> dict[str, Any]:
        label, connector = self.deployment.plan.label, self.deployment.connector
        scenario = self.scenario.at(label)
        options = scenario.connector_options(label)
        engine = scenario.deployment.engine_options
        moves = connector.disaggregated and engine.starts_processes
        kv_bytes, tolerance = None, 0.0
        # Their requests differ in length, and reused KV does not move.
        if not trial.trace and trial.offered.sessions is None:
            input_len = trial.plan.cell.input_len
            kv_bytes, tolerance = kv_bytes_per_request(scenario, input_len, readings.engines)
        may_expire = self._may_expire + load.cancelled
        lost = [(role.kv_expired or 0.0) + (role.kv_failures or 0.0) for role in readings.engines.values()]
        self._may_expire = max(0.0, may_expire - sum(lost))
        logged = [diagnosis.finding(excused=may_expire > 0) for diagnosis in self.deployment.diagnoses()]
        # In direct mode the router is idle and limits nothing.
        idle_router = self._mode(trial.plan) == "direct"
        return {
            "disaggregated": connector.disaggregated,
            "whole_prompt": connector.whole_prompt,
            "engines": readings.engines,
            "host": readings.host,
            "router": RouterFigures() if idle_router else readings.router(load.duration_s),
            "kv_bytes_per_request": kv_bytes if connector.disaggregated else None,
            "kv_bytes_tolerance": tolerance,
            "kv_bytes_certain": engine.kv_bytes_certain,
            "kv_may_expire": may_expire,
            "requested_transport": connector.requested_transport(options) if moves else "",
            "transport_ran": readings.transport if moves else "",
            "logged_transports": readings.logged_transports if moves else (),
            **surroundings(scenario, connector, options),
            "logged": logged if undrained is None else [*logged, undrained],
        }


def stop_grace_s(scenario: Scenario) -> float:
    """Seconds that running requests get after a stop."""
    cancels = scenario.deployment.engine_options.cancels_cleanly
    return 0.0 if cancels else min(STOP_GRACE_S, scenario.request_timeout_s)
