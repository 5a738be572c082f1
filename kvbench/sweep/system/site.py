"""``kvbench simulate --system``: the product's search on virtual time against somebody else's simulator.

The simulator stands for a server without /metrics: what a sweep with ``--base-url`` learns by waiting and by
single requests is learned here in the same way, but on a virtual clock that only requests and waits move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from kvbench.core.canaries.pool import CanaryPool
from kvbench.core.load.traces import TracedRequest
from kvbench.core.plan.plan import DeploymentPlan, trial_seed
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.simulation.data import SimulatedLoad
from kvbench.errors import ServerError
from kvbench.hosts.scratch import scratch
from kvbench.launchers.local import LocalLauncher
from kvbench.results.store import RunStore
from kvbench.sweep.bench import Alone, Site
from kvbench.sweep.deployed import scratch_prefix
from kvbench.sweep.simulated_trial import IDLE_CLIENT, simulated_load
from kvbench.sweep.system.answer_check import SystemAnswer
from kvbench.sweep.system.answering import Answering, CommandAnswers
from kvbench.sweep.system.replay import Replay, Replayed
from kvbench.sweep.system.simulator_process import SimulatorProcess
from kvbench.sweep.trial.idle import Idleness
from kvbench.sweep.trial.judging import (
    begun_record,
    ended_record,
    evidence_of,
    expected_reuse,
    judged,
    stored,
    void,
)
from kvbench.sweep.trial.load_plan import PlannedTrial, TrialPlan, rate_of
from kvbench.sweep.trial.load_progress import LoadResult
from kvbench.sweep.trial.output_check import check_prompts, greedy_outputs
from kvbench.sweep.trial.trial import stop_grace_s


class VirtualClock:
    """Seconds since the system was started, as the requests that it is asked tell."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


class AskedSystem:
    """A simulator and its clock. As a deployment it tells nothing of itself, and answers single requests."""

    def __init__(self, scenario: Scenario, answering: Answering) -> None:
        self.clock = VirtualClock()
        self._scenario = scenario
        self._answering = answering
        self._singles = 0

    def ask(self, load: SimulatedLoad, seed: int) -> SystemAnswer:
        """What becomes of a load from now on, if all of it is sent. Raises KvbenchError."""
        return self._answering.answer(load, seed, self.clock.now())

    def ended(self, replayed: Replayed) -> None:
        """Tells what came of the load that was asked last; the clock stands at its end then."""
        self._answering.ended(replayed)
        self.clock.sleep(replayed.load.duration_s)

    def under_way(self) -> None:
        """It has no gauges."""

    def check_alive(self) -> None:
        """Who is dead does not answer."""

    def complete(self, prompt: Sequence[int], max_tokens: int) -> str:
        """A single request: a trial of one arrival. Without text. Raises ServerError if it fails."""
        self._singles += 1
        timeout_s = self._scenario.request_timeout_s
        load = SimulatedLoad.alike([0.0], len(prompt), max_tokens, timeout_s)
        answer = self.ask(load, trial_seed(self._scenario.seed, "single", self._singles))
        replayed = Replay(load, answer, 0.0).run(lambda _: False)
        self.ended(replayed)
        (record,) = replayed.load.records
        if not record.ok:
            raise ServerError(
                f"a single request failed: {record.error}, {record.error_detail}",
                hint="the idle system must answer one within workload.request_timeout_s "
                f"({timeout_s:g} s); set more, if it takes longer",
            )
        return ""


class SystemSite:
    """A system that answers, and its trials."""

    has_direct = False

    def __init__(
        self, scenario: Scenario, system: AskedSystem, store: RunStore, trace: Sequence[TracedRequest] = ()
    ) -> None:
        self._scenario = scenario
        self._system = system
        self._store = store
        self._trace = trace
        self._idle = Idleness(scenario, system, clock=system.clock)

    @property
    def trace_rate(self) -> float:
        return rate_of(self._trace)

    def prepare(self) -> None:
        """It runs already."""

    def close(self) -> None:
        """The bench ends it."""

    def alone(self, cell: Cell) -> Alone:
        """By the requests that a server is asked for its greedy outputs. Raises KvbenchError."""
        prompts = check_prompts(self._scenario.seed, cell.input_len, self._scenario.model.vocab_size)
        clock = self._system.clock
        return Alone(greedy_outputs(self._system.complete, prompts, cell.output_len, clock).latency_s)

    def outputs(self, input_len: int) -> None:
        """There are none."""

    def watch_answers(self, cell: Cell, known: CanaryPool | None) -> None:
        """Nobody answers with text."""

    def last_canaries(self, cell: Cell) -> tuple[None, None]:
        """There are none."""
        return None, None

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Offers a load to the idle system, as a measured trial does; one that does not get idle is void."""
        scenario, clock = self._scenario, self._system.clock
        backlog = self._idle.wait(plan.cell)
        columns = {"starts_at_s": clock.now()}
        if backlog is not None:
            return void(scenario, plan, backlog, self._store, columns)
        begun = begun_record(scenario, plan, self._store)
        trial = PlannedTrial.of(scenario, plan, self._trace)
        load = self._offer(trial)
        self._idle.drain(load)
        evidence = replace(evidence_of(scenario, trial, load), client=IDLE_CLIENT)
        record = ended_record(
            begun,
            judged(scenario, trial, load, evidence),
            {**columns, **expected_reuse(trial.offered, load)},
            load.duration_s,
        )
        return stored(scenario, record, load, self._store)

    def _offer(self, trial: PlannedTrial) -> LoadResult:
        scenario, load = self._scenario, simulated_load(self._scenario, trial)
        answer = self._system.ask(load, trial.plan.seed(scenario.seed))
        replayed = Replay(load, answer, stop_grace_s(scenario)).run(trial.watch.progressed)
        self._system.ended(replayed)
        return replayed.load


class SystemBench:
    """Starts the scenario's simulator anew for each deployment. ``trace``: what trials replay, if any.

    ``answers``: makes what answers in this process, in place of the simulator's command.
    """

    alike = True

    def __init__(
        self,
        scenario: Scenario,
        store: RunStore,
        trace: Sequence[TracedRequest] = (),
        answers: Callable[[], Answering] | None = None,
    ) -> None:
        self._scenario = scenario
        self._store = store
        self._trace = trace
        self._answers = answers

    def open(self) -> AbstractContextManager[Scenario]:
        return nullcontext(self._scenario)

    def gives_reference(self, planned: DeploymentPlan) -> bool:
        return False  # it has no outputs

    def problem(self, planned: DeploymentPlan) -> None:
        """Whether it runs, its start will tell."""

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        simulator = self._scenario.deployment.engine_options.simulator
        told = dict(self._store.manifest.get("simulated_with") or {})
        who = f"somebody else's simulator, the command: {simulator.command}"
        self._store.update(simulated_with=told | {planned.label: who})
        with self._answering("-".join(filter(None, (planned.label, round_)))) as answering:
            yield SystemSite(self._scenario, AskedSystem(self._scenario, answering), self._store, self._trace)

    @contextmanager
    def _answering(self, name: str) -> Iterator[Answering]:
        if self._answers is not None:
            yield self._answers()
            return
        with scratch(scratch_prefix(self._store.path), self._store.path.name) as specs:
            launcher = LocalLauncher(self._store.run_tag, self._store.logs / name, specs)
            simulator = self._scenario.deployment.engine_options.simulator
            with SimulatorProcess(simulator, launcher) as process:
                yield CommandAnswers(process)
