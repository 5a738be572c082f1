"""A chaos run's plan and costs once more: do they follow from its seed and from its requests?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from kvbench.core.held_rate.fault_cost import FaultCost, cost_of
from kvbench.core.held_rate.fault_plan import faults_of
from kvbench.errors import StoreError
from kvbench.results.checksums import Damage
from kvbench.results.provenance import slo_of
from kvbench.results.run import MANIFEST, TRIALS, RunFolder
from kvbench.sweep.verify.json_differences import as_read, json_differences

MOST_SAID: Final = 3


def held_damages(run: RunFolder, checked: Counter[str]) -> Iterator[Damage]:
    """What of a run at a held rate does not follow from what it was asked, and from its requests."""
    if run.manifest.get("kind") == "chaos":
        yield from _of_chaos(run, checked)


def _of_chaos(run: RunFolder, checked: Counter[str]) -> Iterator[Damage]:
    try:
        asked = run.manifest["asked"]
        planned = {
            f"{label} {fault.number}": fault
            for label, rows in asked["faults"].items()
            for fault in faults_of(rows)
        }
    except (KeyError, TypeError, AttributeError) as error:
        yield Damage(MANIFEST, f"asked.faults is no plan of faults: {error}")
        return
    for trial in run.all_trials:
        if trial.method != "chaos":
            continue
        stored: dict[str, Any] = trial.summary.get("chaos") or {}
        number = int(trial.trial_id.rpartition("-")[2])
        fault = planned.get(f"{trial.cell.connector} {number}")
        if fault is None or stored.get("fault") != fault.to_json():
            yield Damage(TRIALS, f"{trial.trial_id}: its fault is not the one that was planned")
            continue
        try:
            requests = run.request_records(trial.trial_id)
            struck_s = float(stored["struck_s"])
            FaultCost.from_json(stored["cost"])
        except (StoreError, KeyError, TypeError, ValueError):
            yield Damage(TRIALS, f"{trial.trial_id}: what its fault cost cannot be recomputed")
            continue
        checked["faults"] += 1
        cost = cost_of(
            requests, slo_of(run).main(), trial.request_rate, struck_s, stored.get("wrong_ids") or ()
        )
        now = as_read(json.loads(json.dumps(cost.to_json())))
        for path, then, value in list(json_differences(stored["cost"], now, "cost"))[:MOST_SAID]:
            what = f"{trial.trial_id}: {path} does not follow from requests/{trial.trial_id}.parquet"
            yield Damage(TRIALS, what, then, value)
