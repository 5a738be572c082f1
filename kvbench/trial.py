"""One trial: one rate offered to one cell once, with all that is needed to judge the number."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from kvbench.core.evidence import ClientFigures, EngineFigures, Evidence, HostFigures
from kvbench.core.gates import early_verdict, judge
from kvbench.core.metrics import Slo, Summary, summarise
from kvbench.core.plan import trial_seed
from kvbench.core.records import TIMING_REQUEST_HEADER, Cell, TrialRecord
from kvbench.core.scenario import Scenario
from kvbench.deployment import Deployment
from kvbench.figures import engine_figures, engine_summary, host_figures, transport_of
from kvbench.kvmetrics import DEFAULT_LOG_INTERVAL_S, LOG_INTERVAL_ENV, KvLogs, RoleKv, role_kv
from kvbench.launchers.local import LocalLauncher
from kvbench.load import LoadGenerator, LoadResult, Progress
from kvbench.store import RunStore
from kvbench.telemetry import Metrics, Sampler, read_host

DRAIN_DEADLINE_S = 30.0
STOP_GRACE_S = 20.0
"""A trial that is stopped early lets a real engine finish what it has: a request that is cancelled between
P and D keeps P's KV blocked for its whole lease, and is counted as a failed transfer in the next trial."""
DEADLINE_SLACK_S = 20.0
LOG_WAIT_S = 2.5
"""A KV log line that comes more seldom than this is not waited for after each trial."""


@dataclass(frozen=True)
class TrialPlan:
    """What is to be offered."""

    cell: Cell
    number: int
    rate: float
    purpose: str

    @property
    def trial_id(self) -> str:
        return f"{self.cell.key}-{self.number:02d}"


class TrialRunner:
    """Runs trials against one deployment and stores each as soon as it is judged."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        store: RunStore,
        launcher: LocalLauncher,
        on_progress: Callable[[Cell, float, int, Progress], None],
    ) -> None:
        self.scenario = scenario
        self.deployment = deployment
        self._store = store
        self._launcher = launcher
        self._on_progress = on_progress
        self._slo = Slo(scenario.slo.ttft_ms, scenario.slo.tpot_ms, scenario.slo.attainment)
        self._kv_logs = KvLogs({p.name: p.log_path for p in deployment.processes if p.name != "router"})
        self._may_expire = 0.0

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Offer the load, judge it, store it. Raises KvbenchError if a process died or hung."""
        self.deployment.wait_drained(DRAIN_DEADLINE_S)
        self._logged_kv(self.deployment.metrics())
        started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        pages_before, host_before = self.deployment.metrics(), read_host()
        sampler = Sampler(plan.trial_id, self.deployment.pids(), self.deployment.endpoints.metrics_urls)
        with sampler:
            load, stopped_as = self._offer(plan)
        host_after = read_host()
        self.deployment.wait_drained(DRAIN_DEADLINE_S)
        pages_after = self.deployment.metrics()
        logged = self._logged_kv(pages_after)
        figures = engine_figures(pages_before, pages_after, logged)
        summary = summarise(load.records, self._slo, plan.rate, load.duration_s)
        evidence = self._evidence(
            plan, load, summary, figures, stopped_as, host_figures(host_before, host_after), pages_after
        )
        self._may_expire = max(0.0, evidence.kv_may_expire - _expired(figures))
        verdict, reason, findings = judge(evidence)
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
            summary=summary.to_json(),
            engine=engine_summary(pages_before, pages_after, figures, load, logged),
            findings=findings,
            labels=list(self._store.manifest.get("labels", [])),
        )
        self._store.add_telemetry(sampler.rows)
        self._store.add_trial(record, load.records)
        return record

    def _offer(self, plan: TrialPlan) -> tuple[LoadResult, Literal["", "met", "missed"]]:
        n = self._num_requests(plan.rate)
        stopped_as: Literal["", "met", "missed"] = ""

        def progressed(progress: Progress) -> bool:
            nonlocal stopped_as
            self._on_progress(plan.cell, plan.rate, n, progress)
            if stopped_as == "":
                confidence = self.scenario.search.confidence
                if early_verdict(progress.met, progress.missed, n, self._slo, confidence) == "missed":
                    stopped_as = "missed"
            return stopped_as != ""

        spec = self._load_spec(plan, n)
        deadline_s = n / plan.rate * 2 + self.scenario.workload.request_timeout_s + DEADLINE_SLACK_S
        generator = LoadGenerator(self._launcher, spec, name=f"loadgen-{plan.trial_id}")
        try:
            load = generator.run(progressed, self.deployment.check_alive, deadline_s)
        finally:
            with_records = str(spec["records_path"])
            if os.path.exists(with_records):
                os.unlink(with_records)
        return load, stopped_as if load.reason == "stopped" else ""

    def _num_requests(self, rate: float) -> int:
        search = self.scenario.search
        return max(search.min_requests, min(search.max_requests, round(rate * search.trial_s)))

    def _seed(self, plan: TrialPlan) -> int:
        return trial_seed(self.scenario.seed, plan.cell.key, plan.number)

    def _load_spec(self, plan: TrialPlan, n: int) -> dict[str, Any]:
        scenario = self.scenario
        emulated = scenario.deployment.engine == "emulated"
        return {
            "base_url": self.deployment.endpoints.base_url,
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
            "slo": {"ttft_ms": scenario.slo.ttft_ms, "tpot_ms": scenario.slo.tpot_ms},
            # Only our own router knows that header.
            "headers": {TIMING_REQUEST_HEADER: "1"} if self.deployment.endpoints.router_metrics_url else {},
        }

    def _logged_kv(self, pages: Mapping[str, Metrics | None]) -> dict[str, RoleKv]:
        """What engines without KV metrics log of their transfers since the last call.

        Their lines come at intervals. If they come often, one interval is waited for, so that a trial's
        transfers are all counted and no others; if not, only means of a transfer are taken from them.
        """
        if not self.deployment.connector.disaggregated or any(
            role_kv([(page, page)]).source for page in pages.values() if page is not None
        ):
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
        kv_bytes, slack = self._kv_bytes(plan.cell.input_len, figures)
        cancelled = sum(record.error == "cancelled" for record in load.records)
        may_expire = self._may_expire + cancelled
        return Evidence(
            records=load.records,
            summary=summary,
            slo=self._slo,
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


def _expired(figures: Mapping[str, EngineFigures]) -> float:
    return sum(role.kv_expired or 0.0 for role in figures.values())
