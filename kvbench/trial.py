"""One trial: one rate offered to one cell once, with all that is needed to judge the number."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from kvbench import connectors
from kvbench.core.evidence import ClientFigures, EngineFigures, Evidence, HostFigures
from kvbench.core.gates import early_verdict, judge
from kvbench.core.metrics import Slo, Summary, summarise
from kvbench.core.plan import trial_seed
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario import Scenario
from kvbench.deployment import Deployment
from kvbench.launchers.local import LocalLauncher
from kvbench.load import LoadGenerator, LoadResult, Progress
from kvbench.store import RunStore
from kvbench.telemetry import HostReading, Metrics, Sampler, difference, quantile, read_host

DRAIN_DEADLINE_S = 30.0
DEADLINE_SLACK_S = 20.0
_KV = "kvbench:kv_transfer"
_LAG = "kvbench:emulator_step_lag_seconds"
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


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

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Offer the load, judge it, store it. Raises KvbenchError if a process died or hung."""
        self.deployment.wait_drained(DRAIN_DEADLINE_S)
        started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        pages_before, host_before = self.deployment.metrics(), read_host()
        sampler = Sampler(plan.trial_id, self.deployment.pids(), self.deployment.endpoints.metrics_urls)
        with sampler:
            load, stopped_as = self._offer(plan)
        host_after = read_host()
        self.deployment.wait_drained(DRAIN_DEADLINE_S)
        pages_after = self.deployment.metrics()
        figures = engine_figures(pages_before, pages_after)
        summary = summarise(load.records, self._slo, plan.rate, load.duration_s)
        evidence = self._evidence(
            plan, load, summary, figures, stopped_as, host_figures(host_before, host_after), pages_after
        )
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
            engine=engine_summary(pages_before, pages_after, figures, load),
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
            "records_path": str(self._store.path / f".records-{plan.trial_id}.jsonl"),
            "slo": {"ttft_ms": scenario.slo.ttft_ms, "tpot_ms": scenario.slo.tpot_ms},
        }

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
        connector = connectors.get(self.deployment.plan.connector)
        options = self.scenario.connector_options(self.deployment.plan.label)
        emulated = self.scenario.deployment.engine == "emulated"
        moves = connector.disaggregated and emulated
        return Evidence(
            records=load.records,
            summary=summary,
            slo=self._slo,
            client=ClientFigures.from_json(load.client),
            engines=figures,
            host=host,
            kv_bytes_per_request=self._kv_bytes(plan.cell.input_len) if moves else None,
            transport_asked=connector.transport_asked(options) if moves else "",
            transport_ran=transport_of(pages) if moves else "",
            stopped_as=stopped_as,
        )

    def _kv_bytes(self, input_len: int) -> float:
        shape, deployment = self.scenario.model.shape, self.scenario.deployment
        block_tokens = int(getattr(deployment.engine_options, "block_tokens", 16))
        per_block = shape.block_bytes(block_tokens, deployment.tensor_parallel_size) * shape.regions()
        return float(shape.blocks(input_len, block_tokens) * per_block)


def engine_figures(
    before: Mapping[str, Metrics | None], after: Mapping[str, Metrics | None]
) -> dict[str, EngineFigures]:
    """Counter growth per role, summed over its instances. A role that lacks a page is left out whole:
    a part of its counts would look like lost requests.
    """
    roles: dict[str, list[tuple[Metrics, Metrics]]] = {}
    incomplete = set()
    for name, page in after.items():
        role, start = name.split("-")[0], before.get(name)
        if page is None or start is None:
            incomplete.add(role)
        else:
            roles.setdefault(role, []).append((start, page))
    return {
        role: _figures_of(pages)
        for role, pages in roles.items()
        if role != "router" and role not in incomplete
    }


def _figures_of(pages: Sequence[tuple[Metrics, Metrics]]) -> EngineFigures:
    def grown(name: str, **labels: str) -> float | None:
        known = [
            value for start, end in pages if (value := difference(start, end, name, **labels)) is not None
        ]
        return sum(known) if known else None

    lags = [lag for start, end in pages if (lag := quantile(start, end, _LAG, 0.99)) is not None]
    by_source = {source: grown("vllm:prompt_tokens_by_source_total", source=source) for source in _SOURCES}
    return EngineFigures(
        prompt_tokens=grown("vllm:prompt_tokens_total"),
        prefix_queries=grown("vllm:prefix_cache_queries_total"),
        prefix_hits=grown("vllm:prefix_cache_hits_total"),
        prompt_tokens_by_source={source: count for source, count in by_source.items() if count is not None},
        requests=grown("vllm:request_success_total"),
        preemptions=grown("vllm:num_preemptions_total"),
        kv_transfers=grown(f"{_KV}_seconds_count"),
        kv_bytes=grown(f"{_KV}_bytes_sum"),
        kv_failures=grown(f"{_KV}_failures_total"),
        step_lag_s=grown(f"{_LAG}_sum"),
        steps=grown(f"{_LAG}_count"),
        step_lag_p99_s=max(lags, default=None),
        busy_s=grown("kvbench:emulator_busy_seconds_total"),
    )


def engine_summary(
    before: Mapping[str, Metrics | None],
    after: Mapping[str, Metrics | None],
    figures: Mapping[str, EngineFigures],
    load: LoadResult,
) -> dict[str, Any]:
    """The engine columns of the result table; None where the servers do not tell."""
    transfers = sum(role.kv_transfers or 0 for role in figures.values())
    moved = sum(role.kv_bytes or 0 for role in figures.values())

    def grown(name: str) -> float:
        return sum(
            difference(before.get(key), page, name) or 0.0 for key, page in after.items() if key != "router"
        )

    def hit_rate(role: str) -> float | None:
        known = figures.get(role)
        return None if known is None else known.hit_rate

    lag = [role.step_lag_s / role.steps * 1e3 for role in figures.values() if role.steps and role.step_lag_s]
    whole = figures.get("aggregated")
    return {
        "kv_bytes_per_request": moved / transfers if transfers else None,
        "kv_transfer_ms_per_request": grown(f"{_KV}_seconds_sum") / transfers * 1e3 if transfers else None,
        "kv_descriptors_per_request": grown(f"{_KV}_descriptors_sum") / transfers if transfers else None,
        "kv_transfers": transfers or None,
        "transport": transport_of(after),
        "prefix_hit_rate_prefill": whole.hit_rate if whole is not None else hit_rate("prefill"),
        "prefix_hit_rate_decode": hit_rate("decode"),
        "emulator_step_lag_ms_mean": max(lag) if lag else None,
        "client": dict(load.client),
        "roles": {role: known.to_json() for role, known in figures.items()},
    }


def transport_of(pages: Mapping[str, Metrics | None]) -> str:
    """The transport that the engines say really ran; empty if none of them tells.

    The passive side of a transfer knows only what was configured; the active side's word counts.
    """
    named = {page.label("kvbench:transport_info", "transport") for page in pages.values() if page is not None}
    proven = {name for name in named if name and not name.endswith("(configured)")}
    return ",".join(sorted(proven or named - {""}))


def host_figures(before: HostReading, after: HostReading) -> HostFigures:
    """Load average before the trial; shares of all CPU time stolen, or used by others, during it."""
    cores = os.cpu_count() or 1
    seconds = max(1e-9, (after.time_s - before.time_s) * cores)
    others = (after.cpu_s - before.cpu_s) - (after.own_cpu_s - before.own_cpu_s)
    return HostFigures(
        before.load_average,
        cores,
        max(0.0, after.steal_s - before.steal_s) / seconds,
        max(0.0, others) / seconds,
    )
