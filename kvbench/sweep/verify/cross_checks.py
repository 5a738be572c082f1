"""Compare a run folder's files that requests cannot prove: labels, kinds, scenario, plan and transports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any, Final

from kvbench import connectors, engines
from kvbench.core.gates.transfer import is_another_transport
from kvbench.core.plan.engine_count import engine_name, instance_names
from kvbench.core.records import HELD_METHODS, RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import AGGREGATED, Scenario, parse_scenario
from kvbench.planning.overrides import overridden
from kvbench.planning.plan import plan_of
from kvbench.planning.scenario_files import registry
from kvbench.results.checksums import Damage
from kvbench.results.provenance import EMULATED, SIMULATED
from kvbench.results.run import CELLS, MANIFEST, TRIALS, RunFolder
from kvbench.results.store import UNVERSIONED, rules_version_of
from kvbench.sweep.cell import Fixed

SAME: Final = 1e-6
"""Relative tolerance: token gaps are 32-bit floats, and machines round sums differently."""
ABSENT: Final = "nothing"


def json_differences(
    stored: Any, recomputed: Any, path: str = "", precision: float = SAME
) -> Iterator[tuple[str, str, str]]:
    """Yield (path such as ``ttft_ms.p99``, stored, recomputed) of each differing leaf; a missing one is
    "nothing". ``precision``: relative tolerance."""
    if isinstance(stored, dict) and isinstance(recomputed, dict):
        for key in dict.fromkeys((*stored, *recomputed)):
            inside = f"{path}.{key}" if path else str(key)
            if key in stored and key in recomputed:
                yield from json_differences(stored[key], recomputed[key], inside, precision)
            elif key in stored:
                yield inside, _leaf_text(stored[key]), ABSENT
            else:
                yield inside, ABSENT, _leaf_text(recomputed[key])
    elif isinstance(stored, list) and isinstance(recomputed, list) and len(stored) == len(recomputed):
        for place, (then, now) in enumerate(zip(stored, recomputed, strict=True)):
            yield from json_differences(then, now, f"{path}[{place}]", precision)
    elif _is_number(stored) and _is_number(recomputed):
        if not math.isclose(stored, recomputed, rel_tol=precision, abs_tol=1e-9):
            yield path, _leaf_text(stored), _leaf_text(recomputed)
    elif stored != recomputed or type(stored) is not type(recomputed):
        yield path, _leaf_text(stored), _leaf_text(recomputed)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _leaf_text(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def as_read(value: Any) -> Any:
    """Return a value as it is after writing and reading."""
    return json.loads(json.dumps(value, default=str))


IMPORTED: Final = "imported"
SEARCHED_KINDS: Final = ("sweep", "bench", "simulate")
KINDS: Final = (*SEARCHED_KINDS, *HELD_METHODS, "microbench", IMPORTED)
_EMULATOR: Final = "kvbench.processes.emulator"
_NO_TRANSPORT: Final = "(configured)"


def statement_damages(run: RunFolder) -> Iterator[Damage]:
    """Compare kind and marks of a run with its plan and trials."""
    yield from _kind(run)
    yield from _marks(run)
    yield from _cells(run)


def _kind(run: RunFolder) -> Iterator[Damage]:
    kind = run.manifest.get("kind")
    if kind not in KINDS:
        yield Damage(MANIFEST, f"kind {kind!r} is none of {', '.join(KINDS)}")
        return
    methods = {trial.method for trial in run.all_trials}
    if kind == "microbench":
        wrong = methods
    elif kind == IMPORTED:
        wrong = methods - {IMPORTED}
    elif kind in HELD_METHODS:
        wrong = methods - {kind}
    else:
        wrong = methods & {IMPORTED, *HELD_METHODS}
    if wrong:
        yield Damage(MANIFEST, f"kind {kind} does not fit trials of the method {', '.join(sorted(wrong))}")


def _marks(run: RunFolder) -> Iterator[Damage]:
    """Compare EMULATED and SIMULATED with the plan's engine and the run's kind."""
    kind = run.manifest.get("kind")
    if kind in (IMPORTED, "microbench"):
        if kind == IMPORTED and IMPORTED not in run.labels:
            yield Damage(MANIFEST, f"the label {IMPORTED} is missing, which runs of other tools have")
        return
    expected = _expected_mark(run, simulated=kind == "simulate")
    reason = "the kind simulate" if expected == SIMULATED else "the engine of plan.json"
    for name, labels, where in (
        ("the run", run.labels, MANIFEST),
        *((trial.trial_id, trial.labels, TRIALS) for trial in run.all_trials),
    ):
        for mark in (EMULATED, SIMULATED):
            if (mark == expected) and mark not in labels:
                yield Damage(where, f"{name}: the label {mark} is missing, which {reason} requires")
            elif mark != expected and mark in labels:
                yield Damage(where, f"{name}: the label {mark} does not fit {reason}")


def _expected_mark(run: RunFolder, *, simulated: bool) -> str:
    if simulated:
        return SIMULATED
    name = engine_name(run.plan)
    engine = engines.get(name) if name in engines.names() else None
    started = json.dumps(run.plan.get("processes") or {}, default=str)
    return EMULATED if _EMULATOR in started or (engine and EMULATED in engine.labels) else ""


def _cells(run: RunFolder) -> Iterator[Damage]:
    planned = run.plan.get("cells")
    if not isinstance(planned, list) or run.manifest.get("kind") not in KINDS[:-2]:
        return
    known = {row.get("key") for row in planned if isinstance(row, Mapping)}
    for where, cells in (
        (CELLS, [cell.cell for cell in (*run.cells, *run.other_cells)]),
        (TRIALS, [trial.cell for trial in run.all_trials]),
    ):
        for key in dict.fromkeys(cell.key for cell in cells):
            if key not in known:
                yield Damage(where, f"{key} is not a cell of plan.json")
    if run.manifest.get("asked") is not None and run.manifest.get("kind") in SEARCHED_KINDS:
        yield from _lines_of_cells(run, sorted(map(str, known)))


def _lines_of_cells(run: RunFolder, planned: Sequence[str]) -> Iterator[Damage]:
    """Find cells of a complete run without a line, and skipped cells of a connector that was not skipped."""
    results = [*run.cells, *run.other_cells]
    if run.manifest.get("status") == "complete":
        stored = {result.cell.key for result in results}
        for key in planned:
            if key not in stored:
                yield Damage(CELLS, f"{key} is missing, although the run is complete")
    skipped = [row.get("connector") for row in run.skipped]
    for result in results:
        if result.status == "skipped" and result.cell.connector not in skipped:
            yield Damage(CELLS, f"{result.cell.key} is skipped, but {MANIFEST} has no reason for that")


FORMER_DEFAULTS: Final[Mapping[int, Mapping[str, str]]] = {
    key: {"search.max_requests": "5000"} for key in range(UNVERSIONED, 5)
}
"""Version of the rules → former defaults that have changed since, by scenario path."""


def scenario_damages(run: RunFolder, scenario: Scenario) -> Iterator[Damage]:
    """Compare scenario.yaml, manifest, labels and transports with plan.json's scenario."""
    for key, value in (("seed", scenario.seed), ("scenario", scenario.name)):
        if run.manifest.get(key) != value:
            yield Damage(MANIFEST, f"{key} is not that of plan.json", str(run.manifest.get(key)), str(value))
    if run.manifest.get("kind") != "simulate":
        engine = engines.get(scenario.deployment.engine)
        for label in engine.labels_of(scenario.deployment.engine_options):
            if label not in run.labels:
                yield Damage(
                    MANIFEST, f"the label {label} is missing, which the engine of plan.json requires"
                )
    stored = run.manifest.get("overridden")
    if "overridden" in run.manifest:
        now = overridden(run.scenario_text, scenario.resolved())
        known = stored if isinstance(stored, dict) else None
        if (known is None) != (now is None):
            yield Damage("scenario.yaml", "it does not give the scenario of plan.json")
        for path, then, value in json_differences(known or {}, now or {}):
            former = FORMER_DEFAULTS.get(rules_version_of(run.manifest), {})
            if then == ABSENT and former.get(path) == value:
                continue
            what = f"{path} is not that of plan.json, and no option changed it"
            yield Damage("scenario.yaml", what, then, value)
    yield from _plan(run, scenario)
    yield from _transports(run, scenario)


def _plan(run: RunFolder, scenario: Scenario) -> Iterator[Damage]:
    """Compare cells and deployments with the scenario; runs of splits or loads have their own."""
    if run.manifest.get("asked") is None:
        return
    plan = json.loads(json.dumps(plan_of(scenario).to_json(), default=str))
    yield from (
        Damage("plan.json", f"{path} does not follow from its scenario", then, now)
        for key in ("cells", "reference")
        for path, then, now in json_differences(run.plan.get(key), plan[key], key)
    )
    pairs = ("label", "connector", "reference_only")
    stored, planned = (
        [{key: row.get(key) for key in pairs} for row in rows if isinstance(row, Mapping)]
        for rows in (run.plan.get("deployments") or (), plan["deployments"])
    )
    for path, then, now in json_differences(stored, planned, "deployments"):
        yield Damage("plan.json", f"{path} does not follow from its scenario", then, now)


def _transports(run: RunFolder, scenario: Scenario) -> Iterator[Damage]:
    """Find transports that the plan did not request and no trial reported."""
    if run.manifest.get("kind") == "simulate":
        for trial in run.all_trials:
            if (found := transport_of(trial)) and found != SIMULATED:
                yield Damage(TRIALS, f"{trial.trial_id}: its transport is not simulated", found, SIMULATED)
        return
    for trial in run.all_trials:
        found = transport_of(trial)
        if not found or any(finding.gate == "wrong_transport" for finding in trial.findings):
            continue
        with_label = {entry.label: entry for entry in scenario.connectors}
        choice = with_label.get(trial.cell.connector)
        if choice is None or choice.name not in connectors.names():
            continue
        connector = connectors.get(choice.name)
        plan = connector.requested_transport(choice.options) if connector.disaggregated else "none"
        if is_another_transport(found, plan):
            yield Damage(TRIALS, f"{trial.trial_id}: its transport is not the one of plan.json", found, plan)


def transport_of(trial: TrialRecord) -> str:
    """Actual transport of a trial; empty if no KV moved or it is unknown."""
    found = trial.engine.get("transport")
    return "" if not isinstance(found, str) or found.endswith(_NO_TRANSPORT) else found


def mixed_transports(run: RunFolder) -> Iterator[str]:
    """Name connectors with trials that report different transports."""
    found: dict[str, dict[str, str]] = {}
    for trial in run.all_trials:
        if name := transport_of(trial):
            found.setdefault(trial.cell.connector, {}).setdefault(name, trial.trial_id)
    for connector, names in found.items():
        if len(names) > 1:
            listed = "; ".join(f"{name} in {trial}" for name, trial in names.items())
            yield f"trials of {connector} report different transports: {listed}"


def breakdown_damages(trial: TrialRecord, requests: list[RequestRecord]) -> Iterator[Damage]:
    """Compare the servers' TTFT parts with the requests' mean TTFT."""
    times = [request.ttft_s for request in requests if request.ok and request.ttft_s is not None]
    stored = trial.engine.get("ttft_ms_mean_of_all")
    if not times or stored is None:
        return
    mean_ms = fmean(times) * 1e3
    name = trial.trial_id
    if not _close(stored, mean_ms):
        what = f"{name}: engine.ttft_ms_mean_of_all does not follow from requests/{name}.parquet"
        yield Damage(TRIALS, what, f"{stored}", f"{mean_ms:.9g}")
    parts = trial.engine.get("ttft_breakdown_ms")
    if not isinstance(parts, Mapping):
        return
    known = [part for part in parts.values() if isinstance(part, (int, float))]
    cut_off = any(part == 0 for part in known)  # a negative part is stored as zero
    whole = all(parts.get(key) is not None for key in ("router", "prefill_queue", "prefill"))
    total = sum(known)
    if not cut_off and (total > mean_ms * (1 + SAME) or (whole and not _close(total, mean_ms))):
        what = f"{name}: engine.ttft_breakdown_ms does not add up to the mean TTFT of its requests"
        yield Damage(TRIALS, what, f"{total:.9g}", f"{mean_ms:.9g}")


def _close(one: Any, other: float) -> bool:
    return isinstance(one, (int, float)) and abs(one - other) <= SAME * max(1.0, abs(other))


def claim_damages(run: RunFolder) -> Iterator[Damage]:
    """Compare an answer's statements about its trials with the trials, independent of the rules."""
    trials = {trial.trial_id: trial for trial in run.all_trials}
    for result in [*run.cells, *run.other_cells]:
        answer = result.answer or {}
        name = " ".join(filter(None, (result.cell.key, result.method, result.tier)))
        if result.confirmed_by and result.confirmed_by not in trials:
            yield Damage(CELLS, f"{name} is based on {result.confirmed_by}, which is missing")
        low, rate, high = (answer.get(key) for key in ("lower", "max_request_rate", "upper"))
        if rate is not None and not ((low or 0) * (1 - 1e-9) <= rate <= (high or rate) * (1 + 1e-9)):
            yield Damage(CELLS, f"{name}: {rate} is outside its interval [{low}, {high}]")
        tries = [
            (trial.request_rate, trial.verdict) for trial in trials.values() if trial.cell == result.cell
        ]
        rates = {f"{trial_rate:.6g}" for trial_rate, _ in tries}
        for point in answer.get("curve") or ():
            if f"{point.get('rate'):.6g}" not in rates:
                yield Damage(
                    CELLS, f"{name}: its curve has a trial at {point.get('rate')} req/s, which is missing"
                )


def scenario_of(run: RunFolder) -> Scenario:
    """Scenario of plan.json. Raises ScenarioError if this kvbench cannot read it."""
    return parse_scenario(json.dumps(_with_engine_count(run)), f"{run.path}/plan.json", registry())


def fixed_of(run: RunFolder) -> Fixed | None:
    """Fixed load, or None for a search."""
    stored = run.manifest.get("asked") or {}
    known = {field.name for field in fields(Fixed)}
    values = {key: value for key, value in stored.items() if key in known}
    return Fixed(**values) if values.get("rate") is not None else None


def _with_engine_count(run: RunFolder) -> Any:
    """Return the folder's scenario; if it predates ``deployment.aggregated``, with the number it had."""
    scenario = run.plan.get("scenario")
    deployment = scenario.get("deployment") if isinstance(scenario, dict) else None
    if not isinstance(deployment, dict) or "aggregated" in deployment:
        return scenario
    measured = [row for row in run.plan.get("deployments") or () if not row.get("reference_only")]
    members = [instance_names(run.plan, row.get("label")) for row in measured]
    counts = [len(names) for names in members if names and names[0].startswith(AGGREGATED)]
    if not counts or not engines.options_model_of(run.plan).starts_processes:
        return scenario
    return {**dict(scenario or {}), "deployment": {**deployment, "aggregated": counts[0]}}
