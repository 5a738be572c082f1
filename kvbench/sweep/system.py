"""``kvbench simulate --system``: kvbench's search on virtual time against an external simulator.

The simulator acts as a server without /metrics, as with ``--base-url``; only requests and waits advance the
clock. Answers come from a command's process, line by line, or from code in this process. A trial replays them
as a load generator would: progress at its intervals, early stop, records."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.arrivals import trial_seed
from kvbench.core.load.traces import TracedRequest
from kvbench.core.load.workers import LoadResult, Progress, Settled
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Cell, RequestError, RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.judging import PlannedTrial, SiteReadings
from kvbench.core.search.load_plan import TrialPlan
from kvbench.core.simulation.data import SimulatedLoad
from kvbench.core.simulation.deployment import TICK_S
from kvbench.errors import ServerError
from kvbench.files import scratch
from kvbench.launchers.local import LocalLauncher
from kvbench.results.store import RunStore
from kvbench.sweep.bench import Bench, IdleResult, Site
from kvbench.sweep.deployed import scratch_prefix
from kvbench.sweep.simulated_trial import IDLE_CLIENT, TrialsSite, simulated_load
from kvbench.sweep.simulator_process import SimulatorProcess, SystemAnswer, read_answer
from kvbench.sweep.trial.idle import Idleness
from kvbench.sweep.trial.output_check import check_prompts, greedy_outputs
from kvbench.sweep.trial.trial import Trials, stop_grace_s


@dataclass(frozen=True)
class Replayed:
    """``cut_at_s``: time at which sending stopped; ``dropped``: requests cancelled at the load's end or after
    their timeout."""

    load: LoadResult
    cut_at_s: float
    dropped: list[int]


@dataclass
class Replay:
    """Replays one trial. After a stop requests get ``grace_s`` to end."""

    load: SimulatedLoad
    answer: SystemAnswer
    grace_s: float

    def __post_init__(self) -> None:
        ends = [self._end(index) for index in range(len(self.load.offsets_s))]
        self._ends_s = [end_s for end_s, _ in ends]
        self._errors = [error for _, error in ends]
        self._firsts_s = [
            end_s if first_s is None else min(max(first_s, arrival_s), end_s)
            for first_s, end_s, arrival_s in zip(
                self.answer.first_token_s, self._ends_s, self.load.offsets_s, strict=True
            )
        ]
        """Time at which each request stops waiting for its first token."""
        self._records: dict[int, RequestRecord] = {}

    def run(self, watch: Callable[[Progress], bool]) -> Replayed:
        """Replay the trial; ``watch`` gets the progress and returns True to stop."""
        arrivals = self.load.offsets_s
        sent = len(arrivals)
        end_s = max([*self._ends_s, *arrivals[-1:]], default=0.0)
        cut_s = None
        for progress in self._progress(range(sent), 0.0, end_s):
            # The end is reported even if nothing is left to stop.
            if watch(progress) and progress.t_s < end_s:
                cut_s = progress.t_s
                break
        if cut_s is None:
            records = [self._record(index) for index in range(sent)]
            return Replayed(LoadResult(records, "complete", end_s), end_s, self._dropped_requests(records))
        sent = bisect_right(arrivals, cut_s)
        last_s = cut_s + self.grace_s
        for index in range(sent):
            if self._ends_s[index] > last_s:
                self._ends_s[index], self._errors[index] = last_s, "cancelled"
                self._firsts_s[index] = min(self._firsts_s[index], last_s)
        end_s = max([cut_s, *self._ends_s[:sent]])
        for progress in self._progress(range(sent), cut_s, end_s):
            watch(progress)
        records = [self._record(index) for index in range(sent)]
        return Replayed(LoadResult(records, "stopped", end_s), cut_s, self._dropped_requests(records))

    def _progress(self, indices: Sequence[int], after_s: float, end_s: float) -> Iterator[Progress]:
        """Yield the progress after ``after_s`` at a load generator's intervals, and at the end."""
        ends = sorted(indices, key=lambda index: (self._ends_s[index], index))
        ends_s = [self._ends_s[index] for index in ends]
        firsts_s = sorted(self._firsts_s[index] for index in indices)
        offsets_s = self.load.offsets_s[: len(indices)]
        reported, tick = bisect_right(ends_s, after_s) if after_s else 0, round(after_s / TICK_S)
        while True:
            tick += 1
            now_s = min(tick * TICK_S, end_s)
            sent, done = bisect_right(offsets_s, now_s), bisect_right(ends_s, now_s)
            yield Progress(
                t_s=now_s,
                sent=sent,
                done=done,
                in_flight=sent - done,
                waiting_first=sent - bisect_right(firsts_s, now_s),
                settled=tuple([self._settle(index) for index in ends[reported:done]]),
            )
            reported = done
            if now_s >= end_s:
                return

    def _end(self, index: int) -> tuple[float, RequestError]:
        """Time and error of a request's end if it is not cancelled."""
        answer, arrival_s = self.answer, self.load.offsets_s[index]
        first_s, last_s, error = answer.first_token_s[index], answer.last_token_s[index], answer.errors[index]
        late_s = arrival_s + self.load.timeout_s
        if error:
            reported_s = last_s if last_s is not None else first_s
            end_s = arrival_s if reported_s is None else max(reported_s, arrival_s)
        else:
            end_s = late_s if last_s is None else max(last_s, arrival_s)
            if last_s is not None and end_s <= late_s:
                return end_s, ""
        if error and end_s <= late_s:
            return end_s, error
        return late_s, "no_answer" if first_s is None or first_s > late_s else "timeout"

    def _settle(self, index: int) -> Settled:
        record = self._record(index)
        return Settled(index, record.ttft_s, record.tpot_s, record.e2el_s, record.error)

    def _record(self, index: int) -> RequestRecord:
        if index not in self._records:
            self._records[index] = self._make_record(index)
        return self._records[index]

    def _make_record(self, index: int) -> RequestRecord:
        """Create the record a load generator would write; of a failed request with what had arrived."""
        load, end_s, error = self.load, self._ends_s[index], self._errors[index]
        arrival_s, tokens = load.offsets_s[index], load.output_len[index]
        record = RequestRecord(
            f"sim-{index}", arrival_s, load.input_len[index], tokens, sent_s=arrival_s, error=error
        )
        record.error_detail = self._detail(error)
        times = self._token_times(index)
        times = times[: times.searchsorted(end_s, side="right")]
        if not error:
            record.output_len, record.status = tokens, 200
        if len(times):
            record.status = 200
            record.first_token_s, record.last_token_s = float(times[0]), float(times[-1])
            record.itl_s = array("f", (times[1:] - times[:-1]).astype(np.float32).tobytes())
        if not error:
            record.last_token_s = end_s  # later than its token, if it has but one
        return record

    def _detail(self, error: RequestError) -> str:
        if error in ("timeout", "no_answer"):
            part = "nothing of an" if error == "no_answer" else "no complete"
            return f"{part} answer within {self.load.timeout_s:g} s"
        if error == "cancelled":
            return "the trial was stopped"
        return "as the system answered" if error else ""

    def _token_times(self, index: int) -> NDArray[np.float64]:
        """Times of all tokens, ascending: as given, else evenly from first to last."""
        first_s, last_s = self.answer.first_token_s[index], self.answer.last_token_s[index]
        if first_s is None:
            return np.empty(0)
        first_s = max(first_s, self.load.offsets_s[index])
        if events := self.answer.events_s[index]:
            return np.maximum(events, first_s)
        if last_s is None or self.load.output_len[index] < 2:
            return np.array([first_s])
        gaps, last_s = self.load.output_len[index] - 1, max(last_s, first_s)
        times = first_s + (last_s - first_s) * np.arange(gaps + 1.0) / gaps
        times[-1] = last_s  # as reported: a rounded sum of gaps may exceed its end
        return times

    def _dropped_requests(self, records: Sequence[RequestRecord]) -> list[int]:
        given_up = ("cancelled", "timeout", "no_answer")
        return [index for index, record in enumerate(records) if record.error in given_up]


class Answering(Protocol):
    """One system since its start; calls come in the order of the virtual clock."""

    def answer(self, load: SimulatedLoad, seed: int, starts_at_s: float) -> SystemAnswer:
        """Return the outcome of a load that begins now, if sent completely. Raises KvbenchError."""

    def ended(self, replayed: Replayed) -> None:
        """Take what was sent of the last load."""


class CommandAnswers:
    """Answers of a command, by the protocol of docs/simulate.md."""

    def __init__(self, process: SimulatorProcess) -> None:
        self._process = process

    def answer(self, load: SimulatedLoad, seed: int, starts_at_s: float) -> SystemAnswer:
        line = self._process.ask(
            {
                "type": "trial",
                "seed": seed,
                "starts_at_s": starts_at_s,
                "timeout_s": load.timeout_s,
                "arrivals_s": list(load.offsets_s),
                "input_len": list(load.input_len),
                "output_len": list(load.output_len),
            }
        )
        try:
            return read_answer(line, load.offsets_s)
        except ValueError as error:
            raise self._process.bad_output(f"an invalid answer: {error}; the line", line) from error

    def ended(self, replayed: Replayed) -> None:
        self._process.send(
            {
                "type": "end",
                "cut_at_s": replayed.cut_at_s,
                "cancelled": replayed.dropped,
                "ended_at_s": replayed.load.duration_s,
            }
        )


@dataclass
class VirtualClock:
    """Seconds since the system's start, advanced by its requests."""

    _now_s: float = 0.0

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


class ExternalSystem:
    """A simulator and its clock, used as a deployment without metrics."""

    def __init__(self, scenario: Scenario, answering: Answering) -> None:
        self.clock = VirtualClock()
        self._scenario = scenario
        self._answering = answering
        self._single_requests = 0

    def ask(self, load: SimulatedLoad, seed: int) -> SystemAnswer:
        """Return the outcome of a load from now on, if sent completely. Raises KvbenchError."""
        return self._answering.answer(load, seed, self.clock.now())

    def ended(self, replayed: Replayed) -> None:
        """Report what was sent of the last load, and advance the clock to its end."""
        self._answering.ended(replayed)
        self.clock.sleep(replayed.load.duration_s)

    def under_way(self) -> None:
        """There are no gauges."""

    def check_alive(self) -> None:
        """A dead simulator is detected at the next request."""

    def complete(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Run a single request as a trial. Raises ServerError if it fails."""
        self._single_requests += 1
        timeout_s = self._scenario.request_timeout_s
        load = SimulatedLoad.alike([0.0], len(prompt), max_tokens, timeout_s)
        answer = self.ask(load, trial_seed(self._scenario.seed, "single", self._single_requests))
        replayed = Replay(load, answer, 0.0).run(lambda _: False)
        self.ended(replayed)
        (record,) = replayed.load.records
        if not record.ok:
            raise ServerError(
                f"a single request failed: {record.error}, {record.error_detail}",
                hint="the idle system must answer one within workload.request_timeout_s "
                f"({timeout_s:g} s); increase it if needed",
            )
        return ""


class SystemSite(TrialsSite):
    def __init__(
        self, scenario: Scenario, system: ExternalSystem, store: RunStore, trace: Sequence[TracedRequest] = ()
    ) -> None:
        self._scenario = scenario
        self._system = system
        self._trials = Trials(scenario, store, trace)
        self._idle = Idleness(scenario, system, clock=system.clock)

    def alone(self, cell: Cell) -> IdleResult:
        """Measure a single request's latency, as for greedy outputs. Raises KvbenchError."""
        prompts = check_prompts(self._scenario.seed, cell.input_len, self._scenario.model.vocab_size)
        clock = self._system.clock
        return IdleResult(greedy_outputs(self._system.complete, prompts, cell.output_len, clock).latency_s)

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Run a load on the idle system; if it does not become idle, the trial is void."""
        backlog = self._idle.wait(plan.cell)
        columns = {"starts_at_s": self._system.clock.now()}
        if backlog is not None:
            return self._trials.skip_trial(plan, backlog, columns)
        trial = self._trials.begin_trial(plan)
        load = self._offer(trial)
        self._idle.drain(load)
        return self._trials.end_trial(trial, load, SiteReadings({"client": IDLE_CLIENT}, columns))

    def _offer(self, trial: PlannedTrial) -> LoadResult:
        scenario, load = self._scenario, simulated_load(self._scenario, trial)
        answer = self._system.ask(load, trial.begun.seed)
        replayed = Replay(load, answer, stop_grace_s(scenario)).run(trial.watch.progressed)
        self._system.ended(replayed)
        return replayed.load


@dataclass
class SystemBench(Bench):
    """Starts the scenario's simulator for each deployment. ``trace``: requests to replay, if any.
    ``answers``: creates an in-process system instead of the command."""

    scenario: Scenario
    store: RunStore
    trace: Sequence[TracedRequest] = ()
    answers: Callable[[], Answering] | None = None

    def open(self) -> AbstractContextManager[Scenario]:
        return nullcontext(self.scenario)

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        simulator = self.scenario.deployment.engine_options.simulator
        reported = dict(self.store.manifest.get("simulated_with") or {})
        source = f"external simulator, the command: {simulator.command}"
        self.store.update(simulated_with=reported | {planned.label: source})
        with self._answering("-".join(filter(None, (planned.label, round_)))) as answering:
            yield SystemSite(self.scenario, ExternalSystem(self.scenario, answering), self.store, self.trace)

    @contextmanager
    def _answering(self, name: str) -> Iterator[Answering]:
        if self.answers is not None:
            yield self.answers()
            return
        with scratch(scratch_prefix(self.store.path), self.store.path.name) as specs:
            launcher = LocalLauncher(self.store.run_tag, self.store.logs / name, specs)
            simulator = self.scenario.deployment.engine_options.simulator
            with SimulatorProcess(simulator, launcher) as process:
                yield CommandAnswers(process)
