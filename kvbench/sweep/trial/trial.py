"""One trial on a deployment: run the load, take readings, judge, store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.gates.evidence import EngineFigures, RouterFigures
from kvbench.core.load.traces import TracedRequest
from kvbench.core.load.workers import workers_over
from kvbench.core.plan.dispatch import CHATS, COMPLETIONS
from kvbench.core.records import TIMING_REQUEST_HEADER, Cell, Finding, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.sessions.session_source import SessionSource
from kvbench.deployment.deployment import RunningDeployment
from kvbench.launchers.base import Launcher
from kvbench.planning.load_files import write_requests, write_session_load
from kvbench.results.store import RunStore
from kvbench.sweep.trial.canary_supply import CanarySupply
from kvbench.sweep.trial.idle import Idleness
from kvbench.sweep.trial.judging import SiteReadings, Trials
from kvbench.sweep.trial.load_plan import LoadMode, Offered, PlannedTrial, TrialPlan
from kvbench.sweep.trial.loadgen_driver import LoadGenerator, LoadResult, Progress, Spare
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


class TrialRunner:
    def __init__(
        self,
        scenario: Scenario,
        deployment: RunningDeployment,
        store: RunStore,
        launcher: Launcher,
        on_progress: Callable[[Cell, float, int, Progress], None],
        trace: Sequence[TracedRequest] = (),
        idle: Idleness | None = None,
        more_columns: Callable[[], Mapping[str, Any]] = dict,
        source: SessionSource | None = None,
    ) -> None:
        """``more_columns``: called after the drain for further columns. ``source``: of sessions, if any."""
        self.trials = Trials(scenario, store, trace, source)
        self._scenario = scenario
        self._deployment = deployment
        self._launcher = launcher
        self._spare = Spare(launcher)
        self._on_progress = on_progress
        self._idle = idle or Idleness(scenario, deployment)
        self._more_columns = more_columns
        self._reader = MetricsReader(deployment)
        self.canaries: dict[Cell, CanarySupply] = {}
        """Cell → canaries with known reference outputs."""
        self._may_expire = 0.0
        """Number of cancelled requests of earlier trials whose KV may still expire."""

    def prepare(self) -> None:
        """Start a load generator for the next trial; ``close`` ends an unused one."""
        self._spare.prepare()

    def close(self) -> None:
        self._spare.close()

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Wait for an idle system, run the load, judge and store it. Raises KvbenchError."""
        backlog = self._idle.wait(plan.cell)
        if backlog is not None:
            return self.trials.skip_trial(plan, backlog, {"load_mode": self._mode(plan)})
        if plan.twin_of:
            self._deployment.reset_caches()
        before = self._reader.before()
        trial = self.trials.begin_trial(plan)
        with Observer(self._launcher, self._deployment, plan.trial_id) as observer:
            load = self.offer(trial)
        undrained = self._idle.drain(load)
        readings = self._reader.after(before, observer, slots_of(self._scenario))
        self.trials.store.add_telemetry(readings.rows)
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
            **self._more_columns(),
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
        asked = supply.ask("after_trial", plan.trial_id, load.duration_s) if failed else []
        if asked:
            self.trials.store.add_asked_canaries(plan.trial_id, asked)
        return supply.judged(load.records, asked)

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
            self._on_progress(plan.cell, plan.rate, offered.n, progress)
            if progress.prepared is not None:
                return False
            return (over or trial.watch.progressed)(progress)

        spec = self._load_spec(trial)
        if over is not None:
            spec["stop_grace_s"] = self._scenario.request_timeout_s
        if (supply := self.canaries.get(plan.cell)) is not None:
            spec |= supply.spec(supply.places(offered, trial.begun.seed))
        requests_path = self.trials.store.path / f".requests-{plan.trial_id}.jsonl"
        if plan.closed is not None:
            spec |= {"concurrency": plan.closed.concurrency, "duration_s": plan.closed.duration_s}
        if offered.flood is not None and offered.requests is None:
            spec["offsets_s"] = offered.offsets_s.tolist()
        if offered.requests is not None:
            write_requests(requests_path, offered.requests)
            spec["requests_path"] = str(requests_path)
        if offered.sessions is not None:
            requests_path = requests_path.with_suffix(".npz")
            write_session_load(requests_path, offered.sessions)
            spec["sessions_path"] = str(requests_path)
        timeout_s = self._scenario.request_timeout_s
        deadline_s = self._longest_s(plan, offered) + timeout_s + DEADLINE_SLACK_S
        workers, name = self._workers(plan, offered), f"loadgen-{plan.trial_id}"
        generator = LoadGenerator(self._launcher, spec, name, workers, spare=self._spare)
        try:
            return generator.run(progressed, check or self._deployment.check_alive, deadline_s)
        finally:
            requests_path.unlink(missing_ok=True)

    def _longest_s(self, plan: TrialPlan, offered: Offered) -> float:
        """Upper bound of the sending time."""
        if offered.sessions is not None:
            return 2 * offered.length_s + offered.sessions.longest_s(self._scenario.request_timeout_s)
        if plan.closed is None:
            return 2 * max(offered.length_s, offered.n / plan.rate)
        rounds = -(-offered.n // plan.closed.concurrency)
        return plan.closed.duration_s or rounds * self._scenario.request_timeout_s

    def _workers(self, plan: TrialPlan, offered: Offered) -> int:
        wanted, rate, n = self._scenario.load.workers, plan.rate, offered.n
        if offered.sessions is not None:
            return 1  # the sender of a turn must know the answers before it
        if plan.closed is not None:
            n = plan.closed.concurrency
            rate = n / max(plan.latency_s, 1e-3)
        if wanted == "auto":
            hosts = self._scenario.deployment.roles.of("loadgen")
            cores = [self._launcher.place_of(f"loadgen-w{index}").cores for index in range(len(hosts) or 1)]
            return workers_over(rate, self._scenario.workload.output_len, n, cores)
        return min(wanted, n)

    def _mode(self, plan: TrialPlan) -> LoadMode | Literal[""]:
        """Mode of the requests; "" without a router."""
        if self._deployment.endpoints.direct is None:
            return ""
        return plan.mode or self._scenario.load.mode

    def _load_spec(self, trial: PlannedTrial) -> dict[str, Any]:
        scenario, slo, plan = self._scenario, self._scenario.slo.main(), trial.plan
        endpoints, direct = self._deployment.endpoints, self._mode(plan) == "direct"
        return {
            "base_url": endpoints.base_url,
            **({"direct": endpoints.direct} if direct else {}),
            "path": COMPLETIONS,
            **self._chat_spec(),
            "model": scenario.model.served_model_name,
            "request_rate": plan.rate,
            "num_requests": trial.offered.requests_n,
            "burstiness": scenario.workload.burstiness,
            "seed": trial.begun.seed,
            "input_len": plan.cell.input_len,
            "output_len": plan.cell.output_len,
            "vocab_size": scenario.model.vocab_size,
            "timeout_s": scenario.request_timeout_s,
            "stop_grace_s": stop_grace_s(scenario),
            "records_path": str(self.trials.store.path / f".records-{plan.trial_id}.jsonl"),
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
        if self._scenario.load.endpoint != "chat":
            return {}
        length = self._deployment.chat_length()
        return {
            "path": CHATS,
            "chat_overhead_tokens": length.overhead_tokens,
            "chat_tokens_per_word": length.tokens_per_word,
        }

    def _evidence(
        self, trial: PlannedTrial, load: LoadResult, readings: Readings, undrained: Finding | None
    ) -> dict[str, Any]:
        label, connector = self._deployment.plan.label, self._deployment.connector
        scenario = self._scenario.at(label)
        options = scenario.connector_options(label)
        engine = scenario.deployment.engine_options
        moves = connector.disaggregated and engine.starts_processes
        kv_bytes, slack = None, 0.0
        # Their requests differ in length, and reused KV does not move.
        if not trial.trace and trial.offered.sessions is None:
            input_len = trial.plan.cell.input_len
            kv_bytes, slack = kv_bytes_per_request(scenario, input_len, readings.engines)
        may_expire = self._may_expire + load.cancelled
        self._may_expire = max(0.0, may_expire - readings.kv_lost)
        logged = [each.finding(excused=may_expire > 0) for each in self._deployment.diagnoses()]
        # In direct mode the router is idle and limits nothing.
        idle_router = self._mode(trial.plan) == "direct"
        return {
            "disaggregated": connector.disaggregated,
            "whole_prompt": connector.whole_prompt,
            "engines": readings.engines,
            "host": readings.host,
            "router": RouterFigures() if idle_router else readings.router(load.duration_s),
            "kv_bytes_per_request": kv_bytes if connector.disaggregated else None,
            "kv_bytes_slack": slack,
            "kv_bytes_certain": engine.kv_bytes_certain,
            "kv_may_expire": may_expire,
            "transport_asked": connector.transport_asked(options) if moves else "",
            "transport_ran": readings.transport if moves else "",
            "logged_transports": readings.logged_transports if moves else (),
            **surroundings(scenario, connector, options),
            "logged": logged if undrained is None else [*logged, undrained],
        }


def stop_grace_s(scenario: Scenario) -> float:
    """Seconds that running requests get after a stop."""
    cancels = scenario.deployment.engine_options.cancels_cleanly
    return 0.0 if cancels else min(STOP_GRACE_S, scenario.request_timeout_s)
