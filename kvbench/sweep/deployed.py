"""The bench of ``kvbench sweep`` and ``kvbench bench``, which starts real processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from kvbench.planning.gpu_dealing import far_device_env
from kvbench.planning.load_files import session_source
from kvbench.planning.process_specs import process_specs, unplannable, unusable
from kvbench.results.finished_cells import ELSEWHERE, host_differences
from kvbench.results.store import RunStore
from kvbench.sweep.bench import Alone, Site
from kvbench.sweep.cell import Fixed
from kvbench.sweep.display import Watcher
from kvbench.sweep.trial.canary_supply import CanarySupply, right_answers
from kvbench.sweep.trial.idle import idle_latency_s
from kvbench.sweep.trial.output_check import check_prompts, greedy_outputs, reference_outputs
from kvbench.sweep.trial.trial import TrialRunner

INVENTED: Final = "outputs were not checked: this connector's KV is invented, by design"


def scratch_prefix(path: Path) -> str:
    """Prefix of a run's temporary folders: short because they contain sockets, known for removal after a
    kill."""
    return f"kvbench-{path.name[-6:]}-"


class DeployedSite:
    """A running deployment, its trials, and its single requests."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: RunningDeployment,
        trials: TrialRunner,
        store: RunStore,
        watcher: Watcher,
        *,
        compared: bool = False,
        fixed: Fixed | None = None,
    ) -> None:
        """``compared``: other deployments' outputs are compared with this one's. ``fixed``: load to run
        instead of a search."""
        self.trace_rate, self.requests = trials.trials.trace_rate, trials.trials.requests
        self.has_direct = deployment.endpoints.direct is not None
        self.prepare, self.run, self.close = trials.prepare, trials.run, trials.close
        self._scenario = scenario
        self._deployment = deployment
        self._store = store
        self._watcher = watcher
        # A modelled engine always gives the same answer; for a real one the noise is measured.
        self._trials = trials
        self._compared = compared
        self._fixed = fixed
        self._latency_s = 0.0
        """Latency of a single idle request, or 0 if unknown."""
        self._trace = trials.trials.trace
        self._asked_again = compared and not scenario.deployment.engine_options.repeats_exactly

    def alone(self, cell: Cell) -> Alone:
        """Store the greedy outputs for a resume."""
        if not self._deployment.connector.true_outputs:
            return Alone(1.0, unchecked=INVENTED)
        self._watcher.stage(f"{cell.connector}: checking outputs at {cell.input_len} tokens")
        outputs = self._greedy(cell.input_len, cell.output_len)
        known = self._store.earlier.outputs.get((cell.connector, cell.input_len))
        # An earlier search began with its latency, and its trials are replayed.
        latency_s = (
            idle_latency_s(self._scenario, self._deployment, cell) if known is None else known.latency_s
        )
        outputs = replace(outputs, latency_s=latency_s or outputs.latency_s)
        self._deployment.reset_caches()
        self._store.add_outputs(cell.connector, cell.input_len, outputs)
        self._latency_s = outputs.latency_s
        return Alone(outputs.latency_s, outputs)

    def outputs(self, input_len: int) -> Outputs | None:
        outputs = self._greedy(input_len, self._scenario.workload.output_len)
        self._store.add_outputs(self._deployment.plan.label, input_len, outputs)
        self._latency_s = outputs.latency_s
        return outputs

    def watch_answers(self, cell: Cell, known: CanaryPool | None) -> CanaryPool | None:
        """Store the reference outputs for a resume."""
        supplies = self._trials.canaries
        if cell in supplies:
            return supplies[cell].judged_by
        if not self._deployment.connector.true_outputs or self._scenario.workload.sessions is not None:
            return None  # a canary among turns would have no conversation
        if known is None:
            self._watcher.stage(f"{cell.connector}: querying reference outputs of canaries")
            known = self._right_answers(cell)
            if known is None:
                return None
            self._store.add_canaries(known)
        own = known.proof == "reference" and known.label == self._deployment.plan.label
        supplies[cell] = CanarySupply(self._scenario, self._deployment, known, of_reference=own)
        return known

    def _right_answers(self, cell: Cell) -> CanaryPool | None:
        """Query reference outputs of canaries, or None with a note."""
        try:
            return right_answers(
                self._scenario,
                self._deployment,
                self._deployment.plan.label,
                cell,
                self._canary_budget_s,
                proof="reference" if self._compared else "own",
                scored=not self._scenario.deployment.engine_options.repeats_exactly,
                trace=self._trace,
                requests=self._fixed.requests(self._scenario, self._latency_s) if self._fixed else 0,
            )
        except ServerError as error:
            self._watcher.note(
                f"{cell.key}: outputs under load are not checked, because canaries failed: {error.message}"
            )
            return None

    @property
    def _canary_budget_s(self) -> float:
        """Longest time to query a reference: the canaries' share of the trial time."""
        search = self._scenario.search
        trials = 1 if self._store.manifest.get("kind") == "bench" else search.max_trials
        return self._scenario.checks.canary_share * trials * search.trial_s

    def last_canaries(self, cell: Cell) -> tuple[CanaryResult | None, CanaryPool | None]:
        """Store the answers and the observed noise."""
        supply = self._trials.canaries.get(cell)
        if supply is None:
            return None, None
        name = f"{cell.key}-end"
        asked = supply.ask("end_of_cell", name)
        if asked:
            self._store.add_asked_canaries(name, asked)
        pool = supply.pool
        if pool is not supply.judged_by:
            self._store.add_canaries(pool)
        return (supply.judged((), asked) if asked else None), pool

    def _greedy(self, input_len: int, output_len: int) -> Outputs:
        prompts = check_prompts(self._scenario.seed, input_len, self._scenario.model.vocab_size)
        if not self._asked_again:
            return greedy_outputs(self._deployment.complete, prompts, output_len)
        fresh = self._deployment.reset_caches
        return reference_outputs(self._deployment.complete_scored, prompts, output_len, fresh)


class DeployedBench:
    """Starts each deployment's processes, local or on the scenario's hosts, and stops them. ``trace``:
    requests to replay, if any. ``fixed``: load to run instead of a search."""

    alike = True

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        store: RunStore,
        watcher: Watcher,
        trace: Sequence[TracedRequest] = (),
        fixed: Fixed | None = None,
    ) -> None:
        self._scenario = scenario
        self._fixed = fixed
        self._plan = plan
        self._store = store
        self._watcher = watcher
        self._trace = trace
        wanted = scenario.workload.sessions
        self._source = session_source(wanted) if wanted is not None else None
        self._places = Places(scenario, store.run_tag, watcher.stage)
        self._processes: dict[str, dict[str, Any]] = store.processes() if store.resumed else {}

    @contextmanager
    def open(self) -> Iterator[Scenario]:
        with self._places:
            self._reach_hosts()
            yield self._scenario

    def _reach_hosts(self) -> None:
        """Connect to all hosts at once and store their facts."""
        if not self._places.remote:
            return
        where = ", ".join(self._scenario.deployment.hosts) or self._scenario.deployment.launcher
        self._watcher.stage(f"connecting to {where}")
        self._places.open()
        self._scenario = self._places.scenario
        hosts = self._places.environments()
        if self._store.earlier.hosts:
            self._compare_hosts(hosts)
            return
        here = environment.describe()
        self._store.write_environment({**here, "hosts": hosts})
        names = [here.get("hostname"), *(each.get("hostname") for each in hosts.values())]
        self._store.update(hosts=list(dict.fromkeys(str(name) for name in names)))

    def _compare_hosts(self, hosts: Mapping[str, Any]) -> None:
        """Raise StoreError if hosts have changed since the run began, unless forced."""
        earlier = self._store.earlier
        differs = host_differences(earlier.hosts, hosts)
        if differs and not earlier.forced:
            raise StoreError(
                f"{self._store.path} was started on other hosts:\n  " + "\n  ".join(differs),
                hint="resume it there, or use --force, which marks the run",
            )
        if differs:
            self._store.resumed_elsewhere(differs, ELSEWHERE)
            for each in differs:
                self._watcher.note(f"changed: {each}")

    def gives_reference(self, planned: DeploymentPlan) -> bool:
        return not (planned.reference_only and not self._scenario.deployment.engine_options.starts_processes)

    def problem(self, planned: DeploymentPlan) -> Problem | None:
        return (
            (unplannable(self._scenario, planned) or self._places.unusable(planned))
            if self._places.remote
            else unusable(self._scenario, planned)
        )

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        with self.running(planned, round_) as (launcher, deployment):
            progress = self._watcher.trial_progress
            trials = TrialRunner(
                self._scenario,
                deployment,
                self._store,
                launcher,
                progress,
                self._trace,
                source=self._source,
            )
            yield DeployedSite(
                self._scenario,
                deployment,
                trials,
                self._store,
                self._watcher,
                compared=self._is_compared_with(planned.label),
                fixed=self._fixed,
            )

    @contextmanager
    def running(
        self, planned: DeploymentPlan, round_: str = ""
    ) -> Iterator[tuple[Launcher, RunningDeployment]]:
        """Run a deployment's processes, for callers that need more than a site."""
        session = f"session-{self._store.resumed + 1}" if self._store.resumed else ""
        folder = "-".join(filter(None, (planned.label, round_, session)))
        with scratch(scratch_prefix(self._store.path), self._store.path.name) as specs:
            env = far_device_env(self._scenario, planned, self._places.gpus())
            launcher = self._places.launcher(self._store.logs / folder, specs, env)
            planned = with_ports_at(planned, self._scenario.deployment, launcher)
            self._announce(planned, launcher)
            with RunningDeployment(self._scenario, planned, launcher) as deployment:
                self._watcher.stage(f"{planned.label}: ready after {deployment.ready_s:.1f} s")
                yield launcher, deployment

    def _is_compared_with(self, label: str) -> bool:
        others = (each.label for each in self._plan.deployments if each.label != label)
        return any(self._plan.reference_of(other) == label for other in others)

    def _announce(self, planned: DeploymentPlan, launcher: Launcher) -> None:
        """Store a deployment in plan.json before its start; one that is never started is not counted."""
        if not self._scenario.deployment.engine_options.starts_processes:
            return
        specs = process_specs(self._scenario, planned, launcher.log_dir.absolute())
        self._processes[planned.label] = {spec.name: spec.to_json() for spec in specs}
        self._store.write_plan({**self._plan.to_json(), "processes": self._processes})
        count = len(planned.instances)
        self._watcher.stage(f"{planned.label}: starting {count} engine{'s' * (count > 1)}")
