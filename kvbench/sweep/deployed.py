"""The bench of ``kvbench sweep`` and ``kvbench bench``, which starts real processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.canaries.pool import CanaryPool
from kvbench.core.load.traces import TracedRequest
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell, Outputs
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment, with_ports_at
from kvbench.errors import Problem, ServerError, StoreError
from kvbench.files import scratch
from kvbench.hosts import environment
from kvbench.launchers.base import Launcher
from kvbench.launchers.placement import Places
from kvbench.planning.gpu_dealing import remote_device_env
from kvbench.planning.load_files import session_source
from kvbench.planning.process_specs import process_specs, unplannable, unusable
from kvbench.results.finished_cells import ELSEWHERE, host_differences
from kvbench.results.store import RunStore
from kvbench.sweep.bench import Bench, IdleResult, Site
from kvbench.sweep.cell import Fixed
from kvbench.sweep.display import Watcher
from kvbench.sweep.trial.canary_supply import CanarySupply, right_answers
from kvbench.sweep.trial.idle import idle_latency_s
from kvbench.sweep.trial.output_check import check_prompts, greedy_outputs, reference_outputs
from kvbench.sweep.trial.trial import TrialRunner

INVENTED: Final = "outputs were not checked: this connector's KV is invented, by design"


def scratch_prefix(path: Path) -> str:
    """Prefix of a run's temporary folders: short (sockets), known for removal after a kill."""
    return f"kvbench-{path.name[-6:]}-"


@dataclass
class DeployedSite:
    """A running deployment, its trials, and its single requests. ``compared``: other deployments' outputs are
    compared with this one's. ``fixed``: load to run instead of a search."""

    scenario: Scenario
    deployment: RunningDeployment
    trials: TrialRunner
    store: RunStore
    watcher: Watcher
    compared: bool = field(default=False, kw_only=True)
    fixed: Fixed | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.trace_rate, self.requests = self.trials.trials.trace_rate, self.trials.trials.requests
        self.has_direct = self.deployment.endpoints.direct is not None
        self.prepare, self.run, self.close = self.trials.prepare, self.trials.run, self.trials.close
        self._latency_s = 0.0
        """Latency of a single idle request, or 0 if unknown."""
        self._trace = self.trials.trials.trace
        # A modelled engine always gives the same answer; for a real one the noise is measured.
        self._measures_noise = self.compared and not self.scenario.deployment.engine_options.repeats_exactly

    def alone(self, cell: Cell) -> IdleResult:
        """Store the greedy outputs for a resume."""
        if not self.deployment.connector.true_outputs:
            return IdleResult(1.0, unchecked=INVENTED)
        self.watcher.stage(f"{cell.connector}: checking outputs at {cell.input_len} tokens")
        outputs = self._greedy(cell.input_len, cell.output_len)
        known = self.store.earlier.outputs.get((cell.connector, cell.input_len))
        # An earlier search began with its latency, and its trials are replayed.
        latency_s = idle_latency_s(self.scenario, self.deployment, cell) if known is None else known.latency_s
        outputs = replace(outputs, latency_s=latency_s or outputs.latency_s)
        self.deployment.reset_caches()
        self.store.add_outputs(cell.connector, cell.input_len, outputs)
        self._latency_s = outputs.latency_s
        return IdleResult(outputs.latency_s, outputs)

    def outputs(self, input_len: int) -> Outputs | None:
        outputs = self._greedy(input_len, self.scenario.workload.output_len)
        self.store.add_outputs(self.deployment.plan.label, input_len, outputs)
        self._latency_s = outputs.latency_s
        return outputs

    def watch_answers(self, cell: Cell, known: CanaryPool | None) -> CanaryPool | None:
        """Store the reference outputs for a resume."""
        supplies = self.trials.canaries
        if cell in supplies:
            return supplies[cell].judged_by
        if not self.deployment.connector.true_outputs or self.scenario.workload.sessions is not None:
            return None  # a canary among turns would have no conversation
        if known is None:
            self.watcher.stage(f"{cell.connector}: collecting reference outputs")
            known = self._right_answers(cell)
            if known is None:
                return None
            self.store.add_canaries(known)
        of_reference = known.proof == "reference" and known.label == self.deployment.plan.label
        supplies[cell] = CanarySupply(self.scenario, self.deployment, known, of_reference=of_reference)
        return known

    def _right_answers(self, cell: Cell) -> CanaryPool | None:
        """Query reference outputs of canaries, or None with a note, within their share of the trial time."""
        checks, search = self.scenario.checks, self.scenario.search
        trials = 1 if self.store.manifest.get("kind") == "bench" else search.max_trials
        try:
            return right_answers(
                self.scenario,
                self.deployment,
                self.deployment.plan.label,
                cell,
                checks.canary_share * trials * search.trial_s,
                proof="reference" if self.compared else "own",
                scored=not self.scenario.deployment.engine_options.repeats_exactly,
                trace=self._trace,
                requests=self.fixed.requests(self.scenario, self._latency_s) if self.fixed else 0,
            )
        except ServerError as error:
            self.watcher.note(
                f"{cell.key}: outputs under load are not checked, because canaries failed: {error.message}"
            )
            return None

    def last_canaries(self, cell: Cell) -> tuple[CanaryResult | None, CanaryPool | None]:
        """Store the answers and the observed noise."""
        supply = self.trials.canaries.get(cell)
        if supply is None:
            return None, None
        name = f"{cell.key}-end"
        answers = supply.ask("end_of_cell", name)
        self.store.add_extra_canaries(name, answers)
        pool = supply.pool
        if pool is not supply.judged_by:
            self.store.add_canaries(pool)
        return (supply.judged((), answers) if answers else None), pool

    def _greedy(self, input_len: int, output_len: int) -> Outputs:
        prompts = check_prompts(self.scenario.seed, input_len, self.scenario.model.vocab_size)
        if not self._measures_noise:
            return greedy_outputs(self.deployment.complete, prompts, output_len)
        fresh = self.deployment.reset_caches
        return reference_outputs(self.deployment.complete_scored, prompts, output_len, fresh)


@dataclass
class DeployedBench(Bench):
    """Starts each deployment's processes, local or on the scenario's hosts, and stops them. ``trace``:
    requests to replay, if any. ``fixed``: load to run instead of a search."""

    scenario: Scenario
    plan: Plan
    store: RunStore
    watcher: Watcher
    trace: Sequence[TracedRequest] = ()
    fixed: Fixed | None = None

    def __post_init__(self) -> None:
        wanted = self.scenario.workload.sessions
        self._source = session_source(wanted) if wanted is not None else None
        self._places = Places(self.scenario, self.store.run_tag, self.watcher.stage)
        self._processes: dict[str, dict[str, Any]] = self.store.processes() if self.store.resumed else {}

    @contextmanager
    def open(self) -> Iterator[Scenario]:
        with self._places:
            self._reach_hosts()
            yield self.scenario

    def _reach_hosts(self) -> None:
        """Connect to all hosts at once and store their facts."""
        if not self._places.remote:
            return
        where = ", ".join(self.scenario.deployment.hosts) or self.scenario.deployment.launcher
        self.watcher.stage(f"connecting to {where}")
        self._places.open()
        self.scenario = self._places.scenario
        hosts = self._places.environments()
        if self.store.earlier.hosts:
            self._compare_hosts(hosts)
            return
        local = environment.describe()
        self.store.write_environment({**local, "hosts": hosts})
        names = [local.get("hostname"), *(facts.get("hostname") for facts in hosts.values())]
        self.store.update(hosts=list(dict.fromkeys(str(name) for name in names)))

    def _compare_hosts(self, hosts: Mapping[str, Any]) -> None:
        """Raise StoreError if hosts have changed since the run began, unless forced."""
        earlier = self.store.earlier
        differs = host_differences(earlier.hosts, hosts)
        if differs and not earlier.forced:
            raise StoreError(
                f"{self.store.path} was started on other hosts:\n  " + "\n  ".join(differs),
                hint="resume it there, or use --force, which marks the run",
            )
        if differs:
            self.store.resumed_elsewhere(differs, ELSEWHERE)
            for difference in differs:
                self.watcher.note(f"changed: {difference}")

    def gives_reference(self, planned: DeploymentPlan) -> bool:
        return not (planned.reference_only and not self.scenario.deployment.engine_options.starts_processes)

    def problem(self, planned: DeploymentPlan) -> Problem | None:
        return (
            (unplannable(self.scenario, planned) or self._places.unusable(planned))
            if self._places.remote
            else unusable(self.scenario, planned)
        )

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        with self.running(planned, round_) as (launcher, deployment):
            progress = self.watcher.trial_progress
            others = [other.label for other in self.plan.deployments if other.label != planned.label]
            trials = TrialRunner(
                self.scenario, deployment, self.store, launcher, progress, self.trace, source=self._source
            )
            yield DeployedSite(
                self.scenario,
                deployment,
                trials,
                self.store,
                self.watcher,
                compared=planned.label in map(self.plan.reference_of, others),
                fixed=self.fixed,
            )

    @contextmanager
    def running(
        self, planned: DeploymentPlan, round_: str = ""
    ) -> Iterator[tuple[Launcher, RunningDeployment]]:
        """Run a deployment's processes, for callers that need more than a site."""
        session = f"session-{self.store.resumed + 1}" if self.store.resumed else ""
        folder = "-".join(filter(None, (planned.label, round_, session)))
        with scratch(scratch_prefix(self.store.path), self.store.path.name) as specs:
            env = remote_device_env(self.scenario, planned, self._places.gpus())
            launcher = self._places.launcher(self.store.logs / folder, specs, env)
            planned = with_ports_at(planned, self.scenario.deployment, launcher)
            self._announce(planned, launcher)
            with RunningDeployment(self.scenario, planned, launcher) as deployment:
                self.watcher.stage(f"{planned.label}: ready after {deployment.ready_s:.1f} s")
                yield launcher, deployment

    def _announce(self, planned: DeploymentPlan, launcher: Launcher) -> None:
        """Store a deployment in plan.json before its start; one that is never started is not counted."""
        if not self.scenario.deployment.engine_options.starts_processes:
            return
        specs = process_specs(self.scenario, planned, launcher.log_dir.absolute())
        self._processes[planned.label] = {spec.name: spec.to_json() for spec in specs}
        self.store.write_plan({**self.plan.to_json(), "processes": self._processes})
        count = len(planned.instances)
        self.watcher.stage(f"{planned.label}: starting {count} engine{'s' * (count > 1)}")
