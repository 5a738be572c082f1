"""Searches of one simulated cell, as it is or with all its times longer."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvbench.core.scenario.scenario import Scenario
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import load_run
from kvbench.sweep.simulate import simulated
from kvbench.sweep.simulated_trial import SimulatedDeployment

ROOT: Final = Path(__file__).resolve().parents[2]
MEMORY: Final = Path("/dev/shm")
"""Run folders are synced with each line; in memory that costs nothing."""
SCENARIO: Final = "quickstart"
_NO_PART: Final = (
    "report",
    "cli",
    "core/findings",
    "hosts",
    "launchers",
    "processes",
    "transfer",
    "importers",
)


@dataclass(frozen=True)
class SearchJob:
    """One search of a cell of the quickstart scenario.

    ``sets``: what of the scenario is set besides, as PATH=VALUE. ``factor``: by how much all times are
    longer: steps, links, overheads, trials, and the SLO's limits, so that the true rate is exactly so much
    lower.
    """

    connector: str
    input_len: int
    run_seed: int
    factor: float = 1.0
    sets: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return " ".join(
            (self.connector, str(self.input_len), f"{self.factor:g}", str(self.run_seed), *self.sets)
        )

    def row(self) -> dict[str, Any]:
        """The search's answer, as the run folder has it."""
        sets = (f"seed={self.run_seed}", *self.sets)
        cli = CliOptions(SCENARIO, sets, (self.connector,), input_len=str(self.input_len))
        if self.factor != 1.0:
            cli = CliOptions(
                SCENARIO, (*sets, *longer(cli, self.factor)), cli.connectors, input_len=cli.input_len
            )
        folder = MEMORY if MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="searched-", dir=folder) as there:
            (cell,) = load_run(simulated(cli, Path(there))).cells
        return {
            "connector": self.connector,
            "factor": self.factor,
            "seed": self.run_seed,
            "sets": list(self.sets),
            "answer": cell.answer,
        }


def longer(cli: CliOptions, factor: float) -> tuple[str, ...]:
    """What makes every time of the scenario's simulation so much longer."""
    scenario, _ = resolve(cli)
    planned = next(each for each in plan_of(scenario).deployments if each.label in cli.connectors)
    around = SimulatedDeployment.of(scenario, planned).around
    own = scenario.simulate.time_scale or scenario.deployment.engine_options.time_factor
    times = {
        "simulate.time_scale": own * factor,
        "simulate.router_ms": around.overheads.router_ms * factor,
        "simulate.front_end_ms": around.overheads.front_end_ms * factor,
        "simulate.turn_ms": around.overheads.turn_ms * factor,
        "simulate.arrival_ms": around.overheads.arrival_ms * factor,
        "simulate.kv_gb_per_s": around.link.gb_per_s / factor,
        "simulate.kv_latency_ms": around.link.latency_ms * factor,
        **_goals(scenario, factor),
    }
    return tuple(f"{name}={value:.12g}" for name, value in times.items())


def _goals(scenario: Scenario, factor: float) -> dict[str, float]:
    slo, search = scenario.slo, scenario.search
    given = {
        "slo.ttft_ms": slo.ttft_ms,
        "slo.tpot_ms": slo.tpot_ms,
        "search.trial_s": search.trial_s,
        "search.max_trial_s": search.max_trial_s,
    }
    found = {name: value * factor for name, value in given.items() if value is not None}
    return {**found, "search.max_rate": search.max_rate / factor} if search.max_rate else found


@cache
def code_version() -> str:
    """Of all code that an answer depends on: answers of other code are not taken over."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    package = ROOT / "kvbench"
    left_out = tuple(str(package / name) for name in _NO_PART)
    for path in sorted(package.rglob("*.py")):
        if not str(path).startswith(left_out):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
