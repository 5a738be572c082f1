"""What a run folder says was asked."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from kvbench import engines
from kvbench.core.plan.engine_count import instance_names
from kvbench.core.scenario.scenario import AGGREGATED, Scenario, parse_scenario
from kvbench.planning.scenario_files import registry
from kvbench.results.run import RunFolder
from kvbench.sweep.cell import Fixed


def scenario_of(run: RunFolder) -> Scenario:
    """The scenario of plan.json. Raises ScenarioError where this kvbench cannot read it."""
    return parse_scenario(json.dumps(_as_it_was(run)), f"{run.path}/plan.json", registry())


def fixed_of(run: RunFolder) -> Fixed | None:
    """What was offered, if no rate was searched for."""
    asked = run.manifest.get("asked") or {}
    known = {each.name for each in fields(Fixed)}
    given = {key: value for key, value in asked.items() if key in known}
    return Fixed(**given) if given.get("rate") is not None else None


def _as_it_was(run: RunFolder) -> Any:
    """The folder's scenario; of a kvbench that knew no number of aggregated engines, with those it had."""
    scenario = run.plan.get("scenario")
    deployment = scenario.get("deployment") if isinstance(scenario, dict) else None
    if not isinstance(deployment, dict) or "aggregated" in deployment:
        return scenario
    measured = [each for each in run.plan.get("deployments") or () if not each.get("reference_only")]
    members = [instance_names(run.plan, each.get("label")) for each in measured]
    counts = [len(names) for names in members if names and names[0].startswith(AGGREGATED)]
    if not counts or not engines.options_model_of(run.plan).starts_processes:
        return scenario
    return {**dict(scenario or {}), "deployment": {**deployment, "aggregated": counts[0]}}
