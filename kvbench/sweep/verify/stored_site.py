"""Repeat a run's searches with its stored trials, and compare requests and answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvbench import connectors
from kvbench.core.canaries.answer_kinds import CanaryAnswer, CanaryResult, judge_canaries
from kvbench.core.canaries.pool import CanaryPool, gave_answers, pool_of_cell
from kvbench.core.load.traces import TracedRequest
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell, Outputs, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan, rate_of
from kvbench.core.search.trial_requests import TrialRequests
from kvbench.errors import KvbenchError
from kvbench.results.checksums import Damage
from kvbench.results.finished_cells import earlier_sessions, ends_cell, extra_canaries
from kvbench.results.run import CELLS, TRIALS, CellResult, RunFolder, requests_to_replay
from kvbench.sweep.bench import CellWork, IdleResult, Knowledge, Site, TrialBudget
from kvbench.sweep.calibration import measured_run
from kvbench.sweep.cell import Fixed, searched_cells
from kvbench.sweep.deployed import INVENTED
from kvbench.sweep.display import Silent
from kvbench.sweep.simulated_trial import SimulatedDeployment, alone_s, system_of
from kvbench.sweep.verify.cross_checks import as_read, json_differences

ANSWER_PRECISION: Final = 1e-4
"""Relative tolerance: posteriors are grid sums, which machines round differently."""
MAX_SHOWN: Final = 5


class UnansweredError(KvbenchError):
    """A search needs a trial that the folder lacks."""


@dataclass
class StoredSite(Site):
    """A former deployment; its trials come from the folder."""

    trials: Mapping[str, TrialRecord]
    known_idle: IdleResult
    trace_rate: float = 0.0
    has_direct: bool = True
    canaries: CanaryPool | None = None
    extra_canaries: Mapping[str, Sequence[CanaryAnswer]] = field(default_factory=dict)
    plans: dict[str, TrialPlan] = field(default_factory=dict)
    otherwise: list[Damage] = field(default_factory=list)
    """Stored trials that differ from the request."""
    requests_of: Callable[[TrialRecord], TrialRequests | None] = lambda record: None

    def alone(self, cell: Cell) -> IdleResult:
        """Stored result of the idle requests."""
        return self.known_idle

    def requests(self, record: TrialRecord) -> TrialRequests | None:
        return self.requests_of(record)

    def last_canaries(self, cell: Cell) -> tuple[CanaryResult | None, None]:
        extra = self.extra_canaries.get(f"{cell.key}-end")
        if self.canaries is None or not extra:
            return None, None
        return judge_canaries(self.canaries, (), extra, of_reference=gave_answers(self.canaries, cell)), None

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Return a stored trial. Raises UnansweredError if missing."""
        record = self.trials.get(plan.trial_id)
        if record is None:
            raise UnansweredError(f"{plan.trial_id} at {plan.rate:g} req/s ({plan.purpose})")
        self.plans[plan.trial_id] = plan
        if record.purpose != plan.purpose or not math.isclose(record.request_rate, plan.rate, rel_tol=1e-9):
            stored, now = (f"{rate:g} req/s" for rate in (record.request_rate, plan.rate))
            words = f"{plan.trial_id} is not what its search requests there"
            self.otherwise.append(
                Damage(TRIALS, words, f"{stored} ({record.purpose})", f"{now} ({plan.purpose})")
            )
        return record


@dataclass
class Repeat:
    """A cell's search, repeated with its stored trials. ``missing``: first trial that the folder lacks."""

    cell: Cell
    stored: Sequence[CellResult]
    site: StoredSite
    work: CellWork
    found: list[CellResult] = field(default_factory=list)
    missing: str = ""

    def run(self, *, is_reference: bool) -> None:
        try:
            self.found = self.work.run(self.cell, is_reference=is_reference)
        except UnansweredError as error:
            self.missing = error.message

    def go_on(self, seconds: float, knowledge: Knowledge) -> None:
        """Repeat further trials. An interrupted run may lack some; its answer is then the earlier one."""
        with suppress(UnansweredError):
            found = self.work.further(self.cell, seconds)
            if found and all(_as_long(trial, found) for trial in self.stored if trial.main):
                self.found = found
                knowledge.budget.end(found[0])


def _as_long(stored: CellResult, found: Sequence[CellResult]) -> bool:
    """Return whether both answers have equally many trials, or one is missing."""
    answers = stored.answer, found[0].answer if found else None
    return answers[0] is None or answers[1] is None or answers[0]["trials"] == answers[1]["trials"]


class Searches:
    def __init__(
        self,
        run: RunFolder,
        scenario: Scenario,
        plan: Plan,
        fixed: Fixed | None,
        trace: Sequence[TracedRequest],
    ) -> None:
        self._run, self._scenario, self._plan, self._fixed = run, scenario, plan, fixed
        earlier = earlier_sessions(run, scenario.search.method)
        self._outputs = earlier.outputs
        self._pools, self._extra_canaries = earlier.canaries, extra_canaries(run.canaries)
        # A failed cell that succeeded later gave the others no hint at their time.
        self.repeatable = not earlier.had_failures
        self._trace_rate = rate_of(trace)
        self.plans: dict[str, TrialPlan] = {}
        self.unknown: list[Cell] = []
        """Cells with a search that cannot be repeated, as its start is not stored."""

    def damages(self) -> Iterator[Damage]:
        """Find answers and trials that do not follow from the trials before."""
        references: dict[str, dict[int, Outputs]] = {}
        for (label, input_len), outputs in self._outputs.items():
            references.setdefault(label, {})[input_len] = outputs
        of_all = Knowledge({}, {}, budget=TrialBudget.of(self._scenario, self._plan))
        for planned in self._plan.deployments:
            reference = references.setdefault(self._plan.reference_of(planned.label), {})
            knowledge = replace(of_all, reference=reference)
            cells = self._plan.cells_of(planned.label)
            repeats = [repeat for cell in cells if (repeat := self._repeat(planned, cell, knowledge))]
            done = {
                repeat.cell: repeat for repeat in repeats if repeat.found and repeat.found[0].status == "done"
            }
            for cell, seconds in knowledge.budget.spare_parts(list(done)):
                done[cell].go_on(seconds, knowledge)
            for repeat in repeats:
                yield from self._check_cell(repeat)

    def _results(self) -> list[CellResult]:
        return [*self._run.cells, *self._run.other_cells]

    def _repeat(self, planned: DeploymentPlan, cell: Cell, knowledge: Knowledge) -> Repeat | None:
        """Repeat a cell's search; None if there is none, or its start is not stored."""
        stored = [result for result in self._results() if result.cell == cell]
        trials = {
            trial.trial_id: trial
            for trial in self._run.all_trials
            if trial.cell == cell and trial.method != "equal_rate"
        }
        wanted = bool(trials) or any(result.status in ("done", "refused") for result in stored)
        idle = self._idle_result(planned, cell) if wanted else None
        repeat = None
        if idle is not None:
            site = self._site(cell, trials, idle)
            work = searched_cells(self._scenario, self._plan, Silent(), self._fixed)(site, knowledge)
            repeat = Repeat(cell, stored, site, work)
            repeat.run(is_reference=planned.label == self._plan.reference_of(planned.label))
        else:
            self.unknown += [cell] if wanted else []
            knowledge.budget.left_s -= math.fsum(trial.duration_s for trial in trials.values())
        found = repeat.found if repeat else []
        for row in stored:
            rate = (row.answer or {}).get("max_request_rate")
            if row.main and not found:
                knowledge.budget.end(row)
            if row.main and row.status == "done" and rate is not None and _as_long(row, found):
                knowledge.rates[cell] = rate
        if found:
            knowledge.budget.end(found[0])
        return repeat

    def _site(self, cell: Cell, trials: Mapping[str, TrialRecord], idle: IdleResult) -> StoredSite:
        burstiness = self._scenario.workload.burstiness
        return StoredSite(
            trials,
            idle,
            self._trace_rate,
            canaries=pool_of_cell(self._pools, cell, self._plan.reference_of(cell.connector)),
            extra_canaries=self._extra_canaries,
            requests_of=lambda record: requests_to_replay(self._run.path, record, burstiness),
        )

    def _check_cell(self, repeat: Repeat) -> Iterator[Damage]:
        site, found = repeat.site, repeat.found
        finished = [result for result in repeat.stored if result.status in ("done", "refused")]
        if repeat.missing and finished:
            yield Damage(
                CELLS, f"{repeat.cell.key} has an answer, but its search still requests {repeat.missing}"
            )
        self.plans |= site.plans
        yield from site.otherwise
        for name in site.trials.keys() - site.plans.keys():
            if found:
                yield Damage(TRIALS, f"{name} is not requested by its search")
        for result in finished if found else ():
            yield from self._check_result(result, found)
        stored = {(result.method, result.tier) for result in finished}
        for result in found if self._is_complete(repeat, finished) else ():
            if (result.method, result.tier) not in stored:
                yield Damage(CELLS, f"{_name(result)}: this answer follows from the trials, but is missing")

    def _is_complete(self, repeat: Repeat, finished: Sequence[CellResult]) -> bool:
        """Return whether a cell has all its lines. Its last line marks it as complete. A complete run has all
        lines, except of cells that failed or were skipped when the run was resumed."""
        if any(ends_cell(result, self._scenario.search.method) for result in finished):
            return True
        skipped = [row.get("connector") for row in self._run.skipped]
        failed = any(result.status == "failed" for result in repeat.stored)
        complete = self._run.manifest.get("status") == "complete"
        return complete and not failed and repeat.cell.connector not in skipped

    def _check_result(self, stored: CellResult, found: Sequence[CellResult]) -> Iterator[Damage]:
        again = [result for result in found if (result.method, result.tier) == (stored.method, stored.tier)]
        name = _name(stored)
        if not again:
            yield Damage(CELLS, f"{name}: no such answer follows from the trials")
            return
        now = replace(again[0], extra=stored.extra)
        if now.answer is not None and stored.answer is not None:
            kept = {"replay": stored.answer["replay"]} if "replay" in stored.answer else {}
            now = replace(now, answer={**{k: v for k, v in now.answer.items() if k != "replay"}, **kept})
        if len(self._run.manifest.get("sessions") or ()) > 1:  # each session compares its own outputs
            now = replace(now, equal_outputs=stored.equal_outputs)
        rows = as_read(stored.to_json()), as_read(now.to_json())
        differs = json_differences(*rows, precision=ANSWER_PRECISION)
        for path, then, value in list(differs)[:MAX_SHOWN]:
            yield Damage(CELLS, f"{name}: {path} does not follow from the trials", then, value)

    def _idle_result(self, planned: DeploymentPlan, cell: Cell) -> IdleResult | None:
        """Idle result at a search's start, or None if not stored."""
        if self._run.manifest.get("kind") == "simulate":
            like = (self._run.manifest.get("asked") or {}).get("like")
            with suppress(KvbenchError):
                measured = measured_run(Path(like)) if like else None
                deployment = SimulatedDeployment.of(self._scenario, planned, "", measured)
                return IdleResult(alone_s(system_of(self._scenario, deployment), cell))
            return None
        if not connectors.get(planned.connector).true_outputs:
            return IdleResult(1.0, unchecked=INVENTED)
        found = self._outputs.get((cell.connector, cell.input_len))
        return None if found is None else IdleResult(found.latency_s, found)


def _name(result: CellResult) -> str:
    return " ".join(filter(None, (result.cell.key, result.method, result.tier)))
