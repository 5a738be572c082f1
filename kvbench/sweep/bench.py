"""Interface between a sweep and its deployments, which are real, simulated or replayed.

A ``Bench`` starts deployments; a ``Site`` is a running one; ``CellWork`` is what is done with its cells:
search for rates (``cell.py``) or repeat another run's loads."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from kvbench import engines
from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.canaries.pool import CanaryPool, pool_of_cell
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell, Outputs, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan
from kvbench.core.search.search import Hint
from kvbench.core.search.trial_history import SHORTEST_S
from kvbench.core.search.trial_requests import TrialRequests
from kvbench.errors import Problem
from kvbench.hosts import environment
from kvbench.planning.overrides import overridden
from kvbench.results.finished_cells import EarlierSessions
from kvbench.results.provenance import SIMULATED
from kvbench.results.run import CellResult
from kvbench.results.store import RunInfo, RunStore


@dataclass
class TrialBudget:
    """Seconds of trials of a whole sweep. What is left is shared equally among the cells left, so a cell that
    ends early leaves its time to later ones. Only searches are limited; a trial that runs is not cut off.

    ``engines``: connector → engines (GPUs where their numbers differ), since rates are compared per engine.
    ``intervals``: ended cell → 90 % interval of its rate per engine; None without a result."""

    total_s: float = math.inf
    cells: Sequence[Cell] = ()
    engines: Mapping[str, int] = field(default_factory=dict)
    intervals: dict[Cell, tuple[float, float] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left_s = self.total_s

    @classmethod
    def of(cls, scenario: Scenario, plan: Plan) -> TrialBudget:
        if scenario.search.budget_s is None:
            return cls()
        engines = {
            planned.label: sum(instance.ranks.gpus if instance.ranks else 1 for instance in planned.instances)
            or 1
            for planned in plan.deployments
        }
        return cls(scenario.search.budget_s, plan.cells, engines)

    def share_s(self) -> float:
        """Return the equal part of each cell left."""
        return self.left_s / max(1, len(self.cells) - len(self.intervals))

    def spare_parts(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, float]]:
        """Yield these cells with equal parts of the time beyond the original parts of the cells left."""
        for number, cell in enumerate(cells if self.cells else ()):
            reserved_s = self.total_s * (1 - len(self.intervals) / len(self.cells))
            part_s = (self.left_s - reserved_s) / (len(cells) - number)
            if part_s >= SHORTEST_S:
                yield cell, part_s

    def end(self, result: CellResult) -> None:
        """Note the result of a cell that has ended."""
        found = result.answer if result.status == "done" else None
        self.intervals[result.cell] = None
        if found is not None:
            bounds = found["lower"] or 0.0, found["upper"] or math.inf
            self.intervals[result.cell] = self._per_engine(result.cell, *bounds)

    def overlaps(self, cell: Cell, lower: float, upper: float) -> bool | None:
        """Return whether a cell's interval overlaps another connector's at its lengths; None if none overlaps
        so far, but some have not ended, or none has a result."""
        lower, upper = self._per_engine(cell, lower, upper)
        rivals = [other for other in self.cells if other != cell and other.lengths_key == cell.lengths_key]
        known = [bounds for other in rivals if (bounds := self.intervals.get(other)) is not None]
        if any(low <= upper and lower <= high for low, high in known):
            return True
        return False if known and all(other in self.intervals for other in rivals) else None

    def _per_engine(self, cell: Cell, lower: float, upper: float) -> tuple[float, float]:
        count = self.engines.get(cell.connector, 1)
        return lower / count, upper / count


@dataclass
class Knowledge:
    """Results of a run's earlier cells: reference outputs, and rates to start from."""

    reference: dict[int, Outputs]
    rates: dict[Cell, float]
    earlier: EarlierSessions = field(default_factory=EarlierSessions)
    """Content of the run folder when this process opened it."""

    canaries: dict[tuple[str, int, int], CanaryPool] = field(default_factory=dict)
    """(deployment, input length, output length) → reference outputs of canaries."""

    reference_label: str = ""
    """Deployment that gives the reference outputs."""

    budget: TrialBudget = field(default_factory=TrialBudget)

    def right_answers(self, cell: Cell) -> CanaryPool | None:
        return pool_of_cell(self.canaries, cell, self.reference_label)

    def learn_answers(self, pool: CanaryPool | None) -> None:
        if pool is not None:
            self.canaries[pool.key] = pool

    def hint(self, cell: Cell, disaggregated: frozenset[str]) -> Hint | None:
        """Estimate a start rate from the same length on a similar connector, or from other lengths."""
        similar = [
            rate
            for known, rate in self.rates.items()
            if known.input_len == cell.input_len
            and (known.connector in disaggregated) == (cell.connector in disaggregated)
        ]
        if similar:
            return Hint(similar[-1], trusted=True)
        points = [
            (known.input_len, rate) for known, rate in self.rates.items() if known.connector == cell.connector
        ]
        return Hint(extrapolated(points, cell.input_len), trusted=len(points) > 1) if points else None


def extrapolated(known: Sequence[tuple[int, float]], input_len: int) -> float:
    """Extrapolate the rate to another input length. Two known lengths: 1/rate is linear in the length. One:
    the cost grows with the power 0.7 of the length, between a fixed cost (0) and a purely linear one (1)."""
    length, rate = min(known, key=lambda pair: abs(pair[0] - input_len))
    others = [pair for pair in known if pair[0] != length]
    if not others:
        return float(rate * (length / input_len) ** 0.7)
    other_length, other_rate = min(others, key=lambda pair: abs(pair[0] - input_len))
    slope = (1 / rate - 1 / other_rate) / (length - other_length)
    cost = 1 / rate + slope * (input_len - length)
    return 1 / cost if slope > 0 and cost > 0 else rate


@dataclass(frozen=True)
class IdleResult:
    """Result of single requests on the idle site. ``outputs`` is None if they are not compared; ``unchecked``
    gives the reason if a check was expected."""

    latency_s: float
    outputs: Outputs | None = None
    unchecked: str = ""


class Site(Protocol):
    """One running deployment. The defaults suit a site without processes."""

    @property
    def trace_rate(self) -> float:
        """Requests per second of the scenario's trace, or 0 without a trace."""

    @property
    def has_direct(self) -> bool:
        """Whether its servers are reachable without its router."""
        return False

    def prepare(self) -> None:
        """Start what the next trial needs; ``close`` ends it."""
        return

    def close(self) -> None:
        return

    def alone(self, cell: Cell) -> IdleResult:
        """Measure latency and greedy outputs of single requests. Raises KvbenchError."""

    def outputs(self, input_len: int) -> Outputs | None:
        return None

    def watch_answers(self, cell: Cell, known: CanaryPool | None) -> CanaryPool | None:
        """Make some requests of the cell's next trials canaries, and return their reference outputs. Without
        ``known`` outputs the idle site is queried and its answers are stored. Returns None if there are none.
        Raises KvbenchError."""
        return None

    def last_canaries(self, cell: Cell) -> tuple[CanaryResult | None, CanaryPool | None]:
        """Return the result of canaries after a cell's last trial, and reference outputs if any."""
        return None, None

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Run, judge and store a trial. Raises KvbenchError if the deployment fails."""

    def requests(self, record: TrialRecord) -> TrialRequests | None:
        return None


class Bench(Protocol):
    """Starts the deployments of a plan, one after the other. The defaults suit simulations."""

    @property
    def alike(self) -> bool:
        """Whether a rate measured on one deployment is a good start for another."""
        return True

    def open(self) -> AbstractContextManager[Scenario]:
        """Connect to what all deployments share, and yield the scenario as then known. Raises LaunchError, or
        StoreError if a run cannot be resumed here."""

    def gives_reference(self, planned: DeploymentPlan) -> bool:
        """Whether a deployment is started only for its reference outputs."""
        return False

    def problem(self, planned: DeploymentPlan) -> Problem | None:
        """Return why a deployment cannot start here, or None if it can or only its start will show."""
        return None

    def up(self, planned: DeploymentPlan, round_: str = "") -> AbstractContextManager[Site]:
        """Run a deployment within the context. Raises KvbenchError. ``round_``: repeated start."""


class CellWork(Protocol):
    def run(self, cell: Cell, *, is_reference: bool) -> list[CellResult]:
        """Return a cell's results, the main one first. ``is_reference``: others are compared with it."""

    def further(self, cell: Cell, seconds: float) -> list[CellResult]:
        """Continue a search with this time; return its new results, or none."""
        return []


CellWorkOf: TypeAlias = Callable[[Site, Knowledge], CellWork]


def create_store(
    output: Path,
    scenario: Scenario,
    source: bytes,
    plan: Plan,
    kind: str,
    asked: Mapping[str, Any] | None = None,
) -> RunStore:
    """Create a run folder with plan and machine. ``kind``: sweep, bench or simulate. ``asked``: what a resume
    needs besides the plan (``Fixed``'s fields, or nothing), or None if the run cannot be resumed."""
    machine = environment.describe()
    engine = engines.get(scenario.deployment.engine)
    simulated = kind == "simulate"
    return RunStore.create(
        output,
        scenario.name,
        source,
        plan.to_json(),
        machine,
        RunInfo(
            kind=kind,
            argv=["kvbench", *(shlex.quote(word) for word in sys.argv[1:])],
            seed=scenario.seed,
            git=machine.get("git"),
            hosts=[str(machine.get("hostname"))],
            labels=(SIMULATED,) if simulated else engine.labels_of(scenario.deployment.engine_options),
            asked=asked,
            overridden=overridden(source.decode("utf-8-sig", "replace"), scenario.resolved()),
        ),
    )
