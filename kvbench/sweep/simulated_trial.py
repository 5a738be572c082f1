"""One trial on virtual time, planned, judged and stored like a measured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from kvbench.connectors.base import Connector
from kvbench.core.calibration.profile_file import ProfileFile
from kvbench.core.gates.evidence import ClientFigures
from kvbench.core.load.traces import BLOCK_TOKENS, TracedRequest, shares_prefixes
from kvbench.core.load.workers import LoadResult, Progress, Settled
from kvbench.core.metrics.ttft_breakdown import Phases, hand_off_parts, ttft_breakdown
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.judging import PlannedTrial, SiteReadings
from kvbench.core.search.load_plan import TrialPlan
from kvbench.core.search.trial_requests import TrialRequests
from kvbench.core.sessions.session_load import PromptHashes
from kvbench.core.sessions.session_source import SessionSource
from kvbench.core.simulation.data import Outcome, SimulatedLoad, System, Tick
from kvbench.core.simulation.deployment import simulate
from kvbench.core.simulation.kv_cache import mix64
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.core.simulation.step_time import PROFILE_NAMES, TimingProfile
from kvbench.engines.parts.timing_files import bundled_names, profile_file, timing_of_choice
from kvbench.errors import InputError
from kvbench.planning.process_specs import profile_of
from kvbench.results.provenance import SIMULATED
from kvbench.results.run import RunFolder
from kvbench.results.store import RunStore
from kvbench.sweep.bench import IdleResult, Site
from kvbench.sweep.calibration import Surroundings, surroundings
from kvbench.sweep.trial.evidence import router_times
from kvbench.sweep.trial.trial import Trials

MODEL_PROFILES: Final = {
    ("qwen3-30b-a3b", 8): "h200-tp8-qwen3-30b-a3b",
    ("qwen2.5-7b", 1): "a10-qwen2.5-7b",
    ("qwen2.5-7b", 2): "a10-qwen2.5-7b",
    ("qwen2.5-7b", 4): "a10-qwen2.5-7b",
}
"""(model, tensor-parallel size) → timing profile that simulates a real engine."""
VLLM_MAX_NUM_SEQS: Final = 256
VLLM_BATCHED_TOKENS: Final = 8192
"""Default of vLLM on GPUs, unless the scenario sets it."""
IDLE_CLIENT: Final = ClientFigures(send_lag_p50_ms=0.0, send_lag_p99_ms=0.0, loop_lag_p99_ms=0.0)
"""Figures of a simulated client, which is never late."""


# -- what is simulated --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedDeployment:
    """A simulated deployment: planned instances, connector, KV link and overheads."""

    plan: DeploymentPlan
    connector: Connector
    around: Surroundings
    label: str = ""
    """Connector of the scenario, if it is not the plan's label."""

    @classmethod
    def of(
        cls, scenario: Scenario, plan: DeploymentPlan, label: str = "", measured: RunFolder | None = None
    ) -> SimulatedDeployment:
        """``label``: the scenario's connector, if not the plan's. ``measured``: as in ``surroundings``."""
        label = label or plan.label
        connector = profile_of(scenario, plan.connector, label)
        backend = connector.transfer_backend if connector.disaggregated else ""
        return cls(plan, connector, surroundings(scenario, label, backend, measured), label)

    def count(self, role: str) -> int:
        return sum(instance.role == role for instance in self.plan.instances)


def timing_of(scenario: Scenario, instance: str = "prefill-0") -> TimingProfile:
    """Step times of a simulated instance. Raises InputError if unknown."""
    return timing_of_choice(timing_choice(scenario, instance), scenario.deployment.ranks_of(instance).tensor)


def timing_choice(scenario: Scenario, instance: str) -> str:
    """Name or file of an instance's profile. Raises InputError if unknown."""
    deployed = scenario.deployment
    ranks = deployed.ranks_of(instance).tensor
    name = scenario.simulate.timing or deployed.engine_options.timing_profile
    name = name or MODEL_PROFILES.get((scenario.model.name, ranks), "")
    if not name:
        raise InputError(
            f"no timing profile is known for {scenario.model.name} on the {deployed.engine} engine with "
            f"tensor_parallel_size {ranks}; there are: {', '.join((*PROFILE_NAMES, *bundled_names()))}",
            hint="choose a similar one: --set simulate.timing=NAME",
        )
    return name


def fitted_profile(scenario: Scenario) -> ProfileFile | None:
    """Profile file that gives the step times, or None if the model does."""
    name = scenario.simulate.timing or scenario.deployment.engine_options.timing_profile
    return profile_file(name) if name else None


def engine_config(scenario: Scenario) -> EngineConfig:
    """Limits of the scenario's engine; exact if emulated, else those the scenario sets."""
    options, wanted = scenario.deployment.engine_options, scenario.simulate
    used = scenario.workload.longest
    slots, block_tokens = options.slots or VLLM_MAX_NUM_SEQS, options.kv_block_tokens
    profile = fitted_profile(scenario)
    measured = (profile.num_kv_tokens or 0) // block_tokens if profile else 0
    enough = (slots + slots // 2) * -(-used // block_tokens)
    return EngineConfig(
        block_tokens,
        wanted.num_blocks or options.kv_blocks(used) or measured or enough,
        slots,
        options.step_tokens or VLLM_BATCHED_TOKENS,
        options.longest_request or used,
        options.caches_prefixes,
    )


def system_of(scenario: Scenario, deployment: SimulatedDeployment) -> System:
    """Convert the deployment to the simulation's system."""
    scenario = scenario.at(deployment.label or deployment.plan.label)
    config, shape = engine_config(scenario), scenario.kv_shape
    pair = deployment.count("prefill") > 0
    ranks = scenario.deployment.wire_ranks
    engine_scale = scenario.deployment.engine_options.time_factor
    return System(
        timing=timing_of(scenario, "prefill-0" if pair else "aggregated-0"),
        decode_timing=timing_of(scenario, "decode-0") if pair else None,
        config=config,
        prefill=deployment.count("prefill"),
        decode=deployment.count("decode") or deployment.count("aggregated"),
        time_scale=scenario.simulate.time_scale or engine_scale,
        dispatch="concurrent"
        if deployment.connector.dispatch == "concurrent" and scenario.simulate.hand_off == "beside"
        else "sequential",
        link=deployment.around.link,
        overheads=deployment.around.overheads,
        block_bytes=float(shape.block_bytes(config.block_tokens, ranks) * shape.regions()),
        hand_off=scenario.simulate.hand_off,
        routing=scenario.deployment.routing,
    )


# -- trials -------------------------------------------------------------------------------------------


def simulated_load(scenario: Scenario, trial: PlannedTrial) -> SimulatedLoad:
    """Convert a trial's planned requests, without the prompts' shared parts."""
    timeout_s, offsets, sessions = (
        scenario.request_timeout_s,
        trial.offered.offsets_s.tolist(),
        trial.offered.sessions,
    )
    if sessions is not None:
        lengths = sessions.input_len, sessions.output_len
        return SimulatedLoad(sessions.offsets_s, *lengths, timeout_s, following=sessions.following)
    cell, requests = trial.plan.cell, trial.offered.requests
    if requests is None:
        return SimulatedLoad.alike(offsets, cell.input_len, cell.output_len, timeout_s)
    lengths = [request.input_len for request in requests], [request.output_len for request in requests]
    return SimulatedLoad(offsets, *lengths, timeout_s)


def alone_s(system: System, cell: Cell) -> float:
    """End-to-end latency of one idle request of a cell. Raises InputError if it never fits."""
    one = SimulatedLoad.alike([0.0], cell.input_len, cell.output_len, 1e9)
    return simulate(system, one).records[0].e2el_s or 0.0


class TrialsSite(Site):
    """A site with the loads and stored requests of ``_trials``."""

    _trials: Trials

    @property
    def trace_rate(self) -> float:
        return self._trials.trace_rate

    def requests(self, record: TrialRecord) -> TrialRequests | None:
        return self._trials.requests(record)


class SimulatedSite(TrialsSite):
    def __init__(
        self,
        scenario: Scenario,
        deployment: SimulatedDeployment,
        store: RunStore,
        trace: Sequence[TracedRequest] = (),
        source: SessionSource | None = None,
    ) -> None:
        self.system = system_of(scenario, deployment)
        self._trials = Trials(scenario, store, trace, source)
        self._deployment = deployment

    def alone(self, cell: Cell) -> IdleResult:
        """End-to-end latency of one idle request. Raises InputError if it never fits."""
        return IdleResult(alone_s(self.system, cell))

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Simulate the load, judge and store it. Raises InputError for a request that never fits."""
        trial = self._trials.begin_trial(plan)
        outcome = simulate(
            self.system, self._load(trial), lambda tick: trial.watch.progressed(progress_of(tick))
        )
        load = LoadResult(outcome.records, "stopped" if outcome.stopped else "complete", outcome.duration_s)
        return self._trials.end_trial(trial, load, self._site_readings(trial, outcome))

    def _load(self, trial: PlannedTrial) -> SimulatedLoad:
        load, requests = simulated_load(self._trials.scenario, trial), trial.offered.requests
        if trial.offered.sessions is not None:
            block_tokens = self.system.config.block_tokens
            return replace(load, hashes=PromptHashes(trial.offered.sessions, block_tokens))
        if requests is None or not shares_prefixes(requests):
            return load
        hashes = [prompt_hashes(request, self.system.config.block_tokens) for request in requests]
        return replace(load, hashes=hashes)

    def _site_readings(self, trial: PlannedTrial, outcome: Outcome) -> SiteReadings:
        """Readings of a simulation; host, router and transport stay unknown."""
        system, config = self.system, self.system.config
        blocks = self._trials.scenario.model.shape.blocks(trial.plan.cell.input_len, config.block_tokens)
        moves = bool(system.prefill) and not trial.trace and trial.offered.sessions is None
        evidence = {
            "client": IDLE_CLIENT,
            "engines": outcome.figures,
            "kv_bytes_per_request": blocks * system.block_bytes if moves else None,
        }
        pool = config.num_blocks * config.block_tokens * (system.prefill or system.decode)
        return SiteReadings(evidence, self._columns(outcome), pool)

    def _columns(self, outcome: Outcome) -> dict[str, Any]:
        """Further columns of a trial's record, named as for a measured trial."""
        moves = bool(self.system.prefill)
        done = [record.ttft_s for record in outcome.records if record.ok and record.ttft_s is not None]
        ttft_s = fmean(done) if done else None
        kv_s = outcome.transfer_s / outcome.transfers if outcome.transfers else None
        prefill = outcome.phases.get("prefill") or outcome.phases.get("aggregated")
        decode: Phases | None = outcome.phases.get("decode")
        routed = router_times(outcome.records, None, None) if moves else None
        first = outcome.figures.get("prefill") or outcome.figures["aggregated"]
        last = outcome.figures.get("decode")
        return {
            "kv_bytes_per_request": outcome.transfer_bytes / outcome.transfers if outcome.transfers else None,
            "kv_transfer_ms_per_request": None if kv_s is None else kv_s * 1e3,
            "kv_descriptors_per_request": None,
            "kv_transfers": outcome.transfers or None,
            "kv_source": self._deployment.around.source if moves else "",
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
    """Convert a simulation's tick to a load generator's progress."""
    settled = (tick.records[index] for index in tick.settled)
    return Progress(
        t_s=tick.t_s,
        sent=len(tick.records),
        done=len(tick.records) - tick.in_flight,
        in_flight=tick.in_flight,
        waiting_first=len(tick.waiting),
        settled=tuple(
            Settled(index, row.ttft_s, row.tpot_s, row.e2el_s, row.error, row.turn, row.session_s)
            for index, row in zip(tick.settled, settled, strict=True)
        ),
        offsets_s=tuple(
            record.scheduled_s for record in tick.records[tick.sent_before :] if record.session is not None
        ),
    )


def prompt_hashes(request: TracedRequest, block_tokens: int) -> list[int]:
    """Chained hash of each full KV block of a traced prompt; equal prefixes have equal hashes. A hash id
    covers 512 tokens; tokens without an id are unique."""
    ids = request.blocks or ()
    chain = mix64(request.input_len if not ids else 0)
    hashes: list[int] = []
    for index in range(request.input_len // block_tokens):
        # A KV block that extends into the next 512 tokens also depends on that id.
        place = (index * block_tokens + block_tokens - 1) // BLOCK_TOKENS
        known = ids[place] if place < len(ids) else hash((request.offset_s, index))
        chain = mix64(chain ^ mix64(known & ((1 << 64) - 1)) ^ index)
        hashes.append(chain)
    return hashes
