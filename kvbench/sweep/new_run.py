"""A new run folder for a scenario: its plan, the machine, the command line, the results' mark."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench import engines
from kvbench.core.plan.plan import Plan
from kvbench.core.scenario.scenario import Scenario
from kvbench.hosts import environment
from kvbench.planning.overrides import overridden
from kvbench.results.provenance import SIMULATED
from kvbench.results.store import RunInfo, RunStore


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
