"""The seam between a sweep and what it measures: deployments that run, are simulated, or replay a load.

A sweep knows a ``Bench``, which brings deployments up, and the ``Site`` of each one that is up. What is done
with a cell there is ``CellWork``: rates are searched for (``cell.py``), or the loads of another run offered.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
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
from kvbench.core.search.search import Hint
from kvbench.core.search.trial_requests import TrialRequests
from kvbench.errors import Problem
from kvbench.hosts import environment
from kvbench.planning.overrides import overridden
from kvbench.results.finished_cells import EarlierSessions
from kvbench.results.provenance import SIMULATED
from kvbench.results.run import CellResult
from kvbench.results.store import RunInfo, RunStore
from kvbench.sweep.trial.load_plan import TrialPlan


@dataclass
class Knowledge:
    """What earlier cells of a run have taught: the true outputs, and where rates are likely to lie."""

    reference: dict[int, Outputs]
    rates: dict[Cell, float]
    earlier: EarlierSessions = field(default_factory=EarlierSessions)
    """What the run folder had when this process took it over."""

    canaries: dict[tuple[str, int, int], CanaryPool] = field(default_factory=dict)
    """By deployment, input and output length: the right answers to canaries."""

    reference_label: str = ""
    """The deployment whose answers are the truth for the others."""

    def right_answers(self, cell: Cell) -> CanaryPool | None:
        """Those that a cell's canaries are compared with."""
        return pool_of_cell(self.canaries, cell, self.reference_label)

    def learn_answers(self, pool: CanaryPool | None) -> None:
        """Keeps right answers for further cells."""
        if pool is not None:
            self.canaries[pool.key] = pool

    def hint(self, cell: Cell, disaggregated: frozenset[str]) -> Hint | None:
        """A rate to start from: the same length on a connector of the same kind, or other lengths."""
        alike = [
            rate
            for known, rate in self.rates.items()
            if known.input_len == cell.input_len
            and (known.connector in disaggregated) == (cell.connector in disaggregated)
        ]
        if alike:
            return Hint(alike[-1], trusted=True)
        own = [
            (known.input_len, rate) for known, rate in self.rates.items() if known.connector == cell.connector
        ]
        return Hint(extrapolated(own, cell.input_len), trusted=len(own) > 1) if own else None


def extrapolated(known: Sequence[tuple[int, float]], input_len: int) -> float:
    """A rate for an input length from those of others: a request costs a fixed part and one per token.

    With two lengths known, 1/rate is taken as linear in the length. With one, the fixed part is unknown
    and the cost is taken to grow by the power 0.7, between none of it and nothing else.
    """
    length, rate = min(known, key=lambda pair: abs(pair[0] - input_len))
    others = [pair for pair in known if pair[0] != length]
    if not others:
        return float(rate * (length / input_len) ** 0.7)
    other_length, other_rate = min(others, key=lambda pair: abs(pair[0] - input_len))
    slope = (1 / rate - 1 / other_rate) / (length - other_length)
    cost = 1 / rate + slope * (input_len - length)
    return 1 / cost if slope > 0 and cost > 0 else rate


@dataclass(frozen=True)
class Alone:
    """What single requests on the idle site show. ``outputs``: None where they are not to be compared, and
    ``unchecked`` says why, if anybody expected it.
    """

    latency_s: float
    outputs: Outputs | None = None
    unchecked: str = ""


class Site(Protocol):
    """One deployment that is up. What has a body here is that of a site that runs no processes."""

    @property
    def trace_rate(self) -> float:
        """Requests per second of the scenario's trace; 0 without one."""

    @property
    def has_direct(self) -> bool:
        """Whether its servers can be reached without its router."""
        return False

    def prepare(self) -> None:
        """What the next trial needs may be started; ``close`` ends it."""
        return

    def close(self) -> None:
        return

    def alone(self, cell: Cell) -> Alone:
        """Latency and greedy outputs of single requests of a cell. Raises KvbenchError."""

    def outputs(self, input_len: int) -> Outputs | None:
        """Greedy outputs that others are compared with, stored; None where there are none."""
        return None

    def watch_answers(self, cell: Cell, known: CanaryPool | None) -> CanaryPool | None:
        """From now on some requests of the cell's trials are canaries. ``known``: the right answers to them.

        Without these the site is asked for them, idle as it is, and they are stored. Returns those that are
        used; None where nobody knows any. Raises KvbenchError.
        """
        return None

    def last_canaries(self, cell: Cell) -> tuple[CanaryResult | None, CanaryPool | None]:
        """What comes of some canaries after a cell's last trial; and the right answers to others', with the
        noise that the trials have shown, if they are the site's own.
        """
        return None, None

    def run(self, plan: TrialPlan) -> TrialRecord:
        """Offers a load, judges and stores the trial. Raises KvbenchError if the deployment fails."""

    def requests(self, record: TrialRecord) -> TrialRequests | None:
        """The requests of a trial as they are stored; None if they are not."""
        return None


class Bench(Protocol):
    """Where the deployments of a plan are brought up, one after the other."""

    @property
    def alike(self) -> bool:
        """Whether a rate found on one deployment says where another's may lie."""

    def open(self) -> AbstractContextManager[Scenario]:
        """Around all deployments: reaches what they share. Gives the scenario as it is known from then on.

        Raises LaunchError, or StoreError if a run cannot be gone on with here.
        """

    def gives_reference(self, planned: DeploymentPlan) -> bool:
        """Whether a deployment is to be brought up only for the outputs that others are compared with."""

    def problem(self, planned: DeploymentPlan) -> Problem | None:
        """Why a deployment cannot be brought up here; None if it can, or if its start will show it."""

    def up(self, planned: DeploymentPlan, round_: str = "") -> AbstractContextManager[Site]:
        """A deployment from start to stop. ``round_``: names a further time of the same one.

        Raises KvbenchError, at the start or from what is asked of the site.
        """


class CellWork(Protocol):
    """What is done with the cells of one site."""

    def run(self, cell: Cell, *, is_reference: bool) -> list[CellResult]:
        """What came of a cell, the main result first. ``is_reference``: others are compared with it."""


CellWorkOf: TypeAlias = Callable[[Site, Knowledge], CellWork]


def create_store(
    output: Path,
    scenario: Scenario,
    source: bytes,
    plan: Plan,
    kind: str,
    asked: Mapping[str, Any] | None = None,
) -> RunStore:
    """A new run folder with the plan and the machine in it. ``kind``: sweep, bench or simulate.

    ``asked``: what else of the load is needed to go on with it (``Fixed``'s fields, or nothing); None if a
    sweep of that plan is not all of the run, so that nobody can.
    """
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
