"""One trial on virtual time: planned, judged and stored as a measured one is, but nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Final

from kvbench.connectors.base import Connector
from kvbench.core.gates.evidence import Evidence
from kvbench.core.gates.evidence_figures import ClientFigures
from kvbench.core.load.traces import BLOCK_TOKENS, TracedRequest, shares_prefixes
from kvbench.core.metrics.limit import note_limit
from kvbench.core.metrics.metrics import Summary, summarise
from kvbench.core.metrics.ttft_breakdown import Phases, hand_off_parts, ttft_breakdown
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.methods import SATURATED, judged_slo, judged_window
from kvbench.core.simulation.data import Load, Outcome, System, Tick
from kvbench.core.simulation.deployment import simulate
from kvbench.core.simulation.kv_cache import mix64
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.core.simulation.step_time import PROFILE_NAMES, TimingProfile, timing_profile
from kvbench.engines.emulated import EmulatedOptions
from kvbench.errors import InputError
from kvbench.results.provenance import SIMULATED
from kvbench.results.store import RunStore
from kvbench.sweep.calibration import Surroundings
from kvbench.sweep.trial.evidence import legs
from kvbench.sweep.trial.load_plan import Offered, Watch, ceiling_figures, planned
from kvbench.sweep.trial.loadgen_driver import LoadResult, Progress, Settled
from kvbench.sweep.trial.trial import TrialPlan, TrialRunner, live_json, steady_part, stopped_as

MODEL_PROFILES: Final = {
    ("qwen3-30b-a3b", 8): "h200-tp8-qwen3-30b-a3b",
    ("qwen2.5-7b", 1): "a10-qwen2.5-7b",
    ("qwen2.5-7b", 2): "a10-qwen2.5-7b",
    ("qwen2.5-7b", 4): "a10-qwen2.5-7b",
}
"""(model, tensor-parallel size) → the timing profile that a real engine of it is simulated with."""
VLLM_MAX_NUM_SEQS: Final = 256
VLLM_BATCHED_TOKENS: Final = 8192
VLLM_BLOCK_TOKENS: Final = 16
"""vLLM's defaults on GPUs, where the scenario does not set them."""
IDLE_CLIENT: Final = ClientFigures(send_lag_p50_ms=0.0, send_lag_p99_ms=0.0, loop_lag_p99_ms=0.0)
"""A simulated client is never late."""


# -- what is simulated --------------------------------------------------------------------------------


@dataclass(frozen=True)
class VirtualDeployment:
    """What takes a deployment's place: the planned instances, their connector, and what lies around them.

    ``endpoints`` answers what a cell asks of a real deployment: is there a way past the router?
    """

    plan: DeploymentPlan
    connector: Connector
    around: Surroundings
    endpoints: SimpleNamespace

    @classmethod
    def of(cls, plan: DeploymentPlan, connector: Connector, around: Surroundings) -> VirtualDeployment:
        return cls(plan, connector, around, SimpleNamespace(direct=None, router_metrics_url=""))

    def count(self, role: str) -> int:
        return sum(instance.role == role for instance in self.plan.instances)


def timing_of(scenario: Scenario) -> TimingProfile:
    """The step times that a scenario's engine is simulated with. Raises InputError where none is known."""
    deployed = scenario.deployment
    name = scenario.simulate.timing
    if not name and isinstance(deployed.engine_options, EmulatedOptions):
        name = deployed.engine_options.timing
    name = name or MODEL_PROFILES.get((scenario.model.name, deployed.tensor_parallel_size), "")
    if not name:
        raise InputError(
            f"no timing profile is known for {scenario.model.name} on the {deployed.engine} engine with "
            f"tensor_parallel_size {deployed.tensor_parallel_size}; there are: {', '.join(PROFILE_NAMES)}",
            hint="choose one that is like it: --set simulate.timing=NAME",
        )
    return timing_profile(name, deployed.tensor_parallel_size)


def engine_config(scenario: Scenario) -> EngineConfig:
    """The limits of the scenario's engine; an emulated one's are exact, a real one's as far as it says."""
    options, wanted = scenario.deployment.engine_options, scenario.simulate
    used = scenario.workload.longest
    if isinstance(options, EmulatedOptions):
        return EngineConfig(
            options.block_tokens,
            wanted.num_blocks or options.blocks(used),
            options.max_num_seqs,
            options.max_num_batched_tokens,
            options.max_model_len or used,
            options.enable_prefix_caching,
        )
    slots = getattr(options, "max_num_seqs", None) or VLLM_MAX_NUM_SEQS
    block_tokens = getattr(options, "block_size", None) or VLLM_BLOCK_TOKENS
    return EngineConfig(
        block_tokens,
        wanted.num_blocks or (slots + slots // 2) * -(-used // block_tokens),
        slots,
        getattr(options, "max_num_batched_tokens", None) or VLLM_BATCHED_TOKENS,
        getattr(options, "max_model_len", None) or used,
        bool(getattr(options, "enable_prefix_caching", True)),
    )


def system_of(scenario: Scenario, deployment: VirtualDeployment) -> System:
    """The deployment as the simulation takes it."""
    config, shape = engine_config(scenario), scenario.model.shape
    ranks = scenario.deployment.tensor_parallel_size
    own_scale = getattr(scenario.deployment.engine_options, "time_scale", 1.0)
    return System(
        timing=timing_of(scenario),
        config=config,
        prefill=deployment.count("prefill"),
        decode=deployment.count("decode") or deployment.count("aggregated"),
        time_scale=scenario.simulate.time_scale or own_scale,
        dispatch="concurrent"
        if deployment.connector.dispatch == "concurrent" and scenario.simulate.hand_off == "beside"
        else "sequential",
        link=deployment.around.link,
        overheads=deployment.around.overheads,
        block_bytes=float(shape.block_bytes(config.block_tokens, ranks) * shape.regions()),
        hand_off=scenario.simulate.hand_off,
    )


# -- trials -------------------------------------------------------------------------------------------


class VirtualTrials(TrialRunner):
    """Runs trials of one deployment on virtual time."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: VirtualDeployment,
        store: RunStore,
        trace: Sequence[TracedRequest] = (),
    ) -> None:
        self.scenario = scenario
        self.deployment: Any = deployment
        self.system = system_of(scenario, deployment)
        self._store = store
        self._trace = trace
        self._tiers = scenario.slo.by_tier()
        self._slo = scenario.slo.main()

    def prepare(self) -> None:
        """Nothing is started."""

    def close(self) -> None:
        """Nothing was."""

    def latency_s(self, cell: Cell) -> float:
        """End-to-end latency of one request alone. Raises InputError if it never fits."""
        alone = Load.alike([0.0], cell.input_len, cell.output_len, 1e9)
        return simulate(self.system, alone).records[0].e2el_s or 0.0

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Simulate the load, judge it, store it. Raises InputError for a request that never fits."""
        started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        wanted = plan.wanted(self._seed(plan))
        offered = planned(self.scenario, wanted, self._trace)
        watch = Watch(self.scenario, wanted, offered, self._tiers, plan.tier)
        outcome = simulate(
            self.system, self._load(plan, offered), lambda tick: watch.progressed(progress_of(tick))
        )
        load = LoadResult(outcome.records, "stopped" if outcome.stopped else "complete", outcome.duration_s)
        decision = watch.decisions.get(next(iter(self._tiers)))
        slo, window = judged_slo(plan.method, self._slo), judged_window(plan.method, outcome.records)
        summary = summarise(
            outcome.records, slo, plan.rate, outcome.duration_s, window or steady_part(decision)
        )
        evidence = replace(
            self._virtual_evidence(plan, outcome, summary), stopped_as=stopped_as(load, decision)
        )
        verdict, reason, findings = self._verdict(plan, evidence, load, decision)
        told = summary.to_json()
        if len(self._tiers) > 1:
            told["tiers"] = self._judged_tiers(plan, evidence, load, watch)
        if watch.decision is not None:
            told["live"] = live_json(watch.decision)
        if offered.flood is not None:
            told |= ceiling_figures(load.records, offered.flood, watch.flooded_s)
        saturated = [SATURATED] if verdict == "measured" and reason else []
        record = TrialRecord(
            trial_id=plan.trial_id,
            cell=plan.cell,
            request_rate=plan.rate,
            seed=wanted.seed,
            verdict=verdict,
            reason=reason,
            purpose=plan.purpose,
            started_at=started_at,
            duration_s=outcome.duration_s,
            summary=told,
            engine={**self._columns(outcome), **self._expected_reuse(offered, load)},
            findings=findings,
            labels=[*self._store.manifest.get("labels", []), *saturated],
            method=plan.method,
        )
        note_limit(record, outcome.records, self._slo)
        self._store.add_trial(record, outcome.records)
        return record

    def _load(self, plan: TrialPlan, offered: Offered) -> Load:
        timeout_s, offsets = self.scenario.workload.request_timeout_s, offered.offsets_s.tolist()
        if offered.requests is None:
            return Load.alike(offsets, plan.cell.input_len, plan.cell.output_len, timeout_s)
        requests = offered.requests
        hashes = None
        if shares_prefixes(requests):
            hashes = [prompt_hashes(each, self.system.config.block_tokens) for each in requests]
        return Load(
            offsets,
            [each.input_len for each in requests],
            [each.output_len for each in requests],
            timeout_s,
            hashes,
        )

    def _virtual_evidence(self, plan: TrialPlan, outcome: Outcome, summary: Summary) -> Evidence:
        """What the gates look at. Host, router and transport are no part of a model, so they stay unknown."""
        blocks = self.scenario.model.shape.blocks(plan.cell.input_len, self.system.config.block_tokens)
        moves = bool(self.system.prefill) and not self._trace
        return Evidence(
            records=outcome.records,
            summary=summary,
            slo=judged_slo(plan.method, self._slo),
            method="sustained" if plan.method == "equal_rate" else plan.method,
            reuse_expected=bool(self._trace) and shares_prefixes(self._trace),
            client=IDLE_CLIENT,
            engines=outcome.figures,
            kv_bytes_per_request=blocks * self.system.block_bytes if moves else None,
        )

    def _columns(self, outcome: Outcome) -> dict[str, Any]:
        """What stands in a trial's record beside its summary; names and meanings as for a measured trial."""
        moves = bool(self.system.prefill)
        done = [record.ttft_s for record in outcome.records if record.ok and record.ttft_s is not None]
        ttft_s = fmean(done) if done else None
        kv_s = outcome.transfer_s / outcome.transfers if outcome.transfers else None
        prefill = outcome.phases.get("prefill") or outcome.phases.get("aggregated")
        decode: Phases | None = outcome.phases.get("decode")
        routed = legs(outcome.records, None, None) if moves else None
        first = outcome.figures.get("prefill") or outcome.figures["aggregated"]
        last = outcome.figures.get("decode")
        return {
            "kv_bytes_per_request": outcome.transfer_bytes / outcome.transfers if outcome.transfers else None,
            "kv_transfer_ms_per_request": None if kv_s is None else kv_s * 1e3,
            "kv_descriptors_per_request": None,
            "kv_transfers": outcome.transfers or None,
            "kv_source": self.deployment.around.source if moves else "",
            "transport": SIMULATED if moves else "",
            "prefix_hit_rate_prefill": first.hit_rate,
            "prefix_hit_rate_decode": None if last is None else last.hit_rate,
            "ttft_breakdown_ms": ttft_breakdown(ttft_s, prefill, decode, routed, kv_s),
            "hand_off_parts_ms": hand_off_parts(prefill, decode, routed),
            "ttft_ms_mean_of_all": None if ttft_s is None else ttft_s * 1e3,
            "roles": {role: figures.to_json() for role, figures in outcome.figures.items()},
            "use": {role: use.to_json() for role, use in outcome.use.items()},
            "link_busy_share": outcome.link_busy_share if moves else None,
        }


def progress_of(tick: Tick) -> Progress:
    """A simulation's tick as the line that a load generator would print."""
    settled = (tick.records[index] for index in tick.settled)
    return Progress(
        t_s=tick.t_s,
        sent=len(tick.records),
        done=len(tick.records) - tick.in_flight,
        in_flight=tick.in_flight,
        waiting_first=len(tick.waiting),
        settled=tuple(
            Settled(index, each.ttft_s, each.tpot_s, each.e2el_s, each.error)
            for index, each in zip(tick.settled, settled, strict=True)
        ),
    )


def prompt_hashes(request: TracedRequest, block_tokens: int) -> list[int]:
    """The chained hash of each full KV block of a traced prompt: equal where the prompts are equal so far.

    A hash id stands for 512 tokens; what lies behind the last id, or has none, is like nothing else.
    """
    ids = request.blocks or ()
    chain = mix64(request.input_len if not ids else 0)
    hashes: list[int] = []
    for index in range(request.input_len // block_tokens):
        # A KV block that reaches into the next 512 tokens depends on that id as well.
        place = (index * block_tokens + block_tokens - 1) // BLOCK_TOKENS
        known = ids[place] if place < len(ids) else hash((request.offset_s, index))
        chain = mix64(chain ^ mix64(known & ((1 << 64) - 1)) ^ index)
        hashes.append(chain)
    return hashes
