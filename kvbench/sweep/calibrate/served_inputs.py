"""What a profile is fitted to: trials of our run folders, and single requests that other tools recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvbench.core.calibration.fit import ServedLoad, Times
from kvbench.core.calibration.profile_file import timing_of_values
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.simulation.data import System
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.errors import InputError
from kvbench.importers.base import ServingRow
from kvbench.importers.parts.importing import read
from kvbench.planning.plan import plan_of
from kvbench.results.checksums import sha256_of
from kvbench.results.run import RunFolder, load_run
from kvbench.sweep.simulated_trial import (
    VLLM_BATCHED_TOKENS,
    VLLM_MAX_NUM_SEQS,
    SimulatedDeployment,
    system_of,
)
from kvbench.sweep.verify.stored_scenario import scenario_of

MOST_REQUESTS: Final = 200
"""Of one load; what is sent after them is simulated for a while, since it slows them down, and not fitted."""
_AFTER: Final = 60
MOST_LOADS: Final = 8
"""Of one run, spread over its rates."""
_BLOCK_TOKENS: Final = 16
_ENOUGH: Final = "KV memory is taken as enough for every sequence"


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine whose records do not say them; None: what the records say, or vLLM's default."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    instances: int | None = None
    num_kv_tokens: int | None = None
    """KV memory of one engine, in tokens."""


@dataclass(frozen=True)
class CalibrationInput:
    """Loads to fit to, and what is known of the engine that served them."""

    loads: list[ServedLoad]
    inputs: list[str]
    engine: str = ""
    machine: str = ""
    scenario_sha256: str = ""
    tensor_parallel_size: int | None = None
    num_kv_tokens: int | None = None
    """KV memory of one engine, in tokens; None where it is not known or several differ."""
    notes: list[str] = field(default_factory=list)


def read_inputs(paths: Sequence[Path], limits: EngineLimits) -> CalibrationInput:
    """All that the paths hold. Raises InputError for one without single requests, or of another engine."""
    read_ones = [
        _of_run(path, limits) if (path / "manifest.json").is_file() else _of_file(path, limits)
        for path in paths
    ]
    sizes = {each.tensor_parallel_size for each in read_ones}
    engines = {each.engine for each in read_ones if each.engine}
    for what, found in (("tensor parallel sizes", sizes), ("engines", engines)):
        if len(found) > 1:
            raise InputError(
                f"--from has several {what}: {', '.join(sorted(map(str, found)))}",
                hint="a profile is of one engine in one version: calibrate them one by one",
            )
    first = read_ones[0]
    memories = {each.num_kv_tokens for each in read_ones}
    return replace(
        first,
        num_kv_tokens=first.num_kv_tokens if len(memories) == 1 else None,
        loads=[load for each in read_ones for load in each.loads],
        inputs=[name for each in read_ones for name in each.inputs],
        scenario_sha256=first.scenario_sha256 if len(read_ones) == 1 else "",
        notes=[note for each in read_ones for note in each.notes],
    )


# -- run folders -------------------------------------------------------------------------------------


def _of_run(path: Path, limits: EngineLimits) -> CalibrationInput:
    run = load_run(path)
    if run.manifest.get("kind") not in ("sweep", "bench"):
        raise InputError(
            f"{path} is a run of kind {run.manifest.get('kind')}: nothing of an engine was measured in it",
            hint="give --from a run of `kvbench sweep` or `kvbench bench`, or records of single requests",
        )
    scenario = scenario_of(run)
    if scenario.workload.trace is not None:
        raise InputError(
            f"{path} replayed a trace: what its prompts share is not in the requests' records",
            hint="calibrate with a run of drawn prompts",
        )
    systems = _systems(scenario)
    loads, memories = [], set[int]()
    for label in systems:
        trials = [each for each in run.trials if each.cell.connector == label and _usable(each)]
        if scenario.deployment.engine_options.kv_blocks(scenario.workload.longest) is None:
            found = {tokens for trial in trials if (tokens := _measured_kv_tokens(trial))}
            tokens = limits.num_kv_tokens or min(found, default=0)
            systems[label] = _with_kv_memory(systems[label], tokens)
            memories |= {tokens} if trials else set()
        loads += [_of_trial(run, trial, systems[label]) for trial in _spread(trials)]
    if not loads:
        raise InputError(f"{path} has no valid trial with requests", hint="see its report for why")
    ranks = scenario.deployment.ranks_of("prefill-0").tensor
    return CalibrationInput(
        loads,
        [run.run_id],
        engine=scenario.deployment.engine,
        machine=_machine(run),
        scenario_sha256=sha256_of(run.scenario_text.encode()),
        tensor_parallel_size=ranks,
        num_kv_tokens=(max(memories) or None) if len(memories) == 1 else None,
        notes=[_ENOUGH] if 0 in memories else [],
    )


def _measured_kv_tokens(trial: TrialRecord) -> int:
    """KV memory of one engine, in tokens, as its metrics told: of several roles the least; 0 if unknown."""
    return min((int(tokens) for tokens in (trial.engine.get("num_kv_tokens") or {}).values()), default=0)


def _with_kv_memory(system: System, tokens: int) -> System:
    """The system with as many blocks as hold so many tokens; unchanged where the number is unknown."""
    blocks = tokens // system.config.block_tokens
    return replace(system, config=replace(system.config, num_blocks=blocks)) if blocks else system


def _systems(scenario: Scenario) -> dict[str, System]:
    """By label: what served, without its step times, which are looked for."""
    untimed = scenario.model_copy(
        update={"simulate": scenario.simulate.model_copy(update={"timing": "quick", "hand_off": "beside"})}
    )
    return {
        planned.label: system_of(untimed, SimulatedDeployment.of(untimed, planned))
        for planned in plan_of(untimed).deployments
    }


def _usable(trial: TrialRecord) -> bool:
    return trial.verdict != "invalid" and trial.cell.input_len > 0


def _spread(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """At most MOST_LOADS trials: of each length those of the lowest and highest rate first."""
    ordered = sorted(trials, key=lambda each: (each.cell.input_len, each.request_rate))
    if len(ordered) <= MOST_LOADS:
        return ordered
    picked = np.unique(np.linspace(0, len(ordered) - 1, MOST_LOADS).round().astype(int))
    return [ordered[at] for at in picked]


def _of_trial(run: RunFolder, trial: TrialRecord, system: System) -> ServedLoad:
    name = f"{trial.cell.connector}, {trial.cell.input_len} in, {trial.request_rate:g} req/s"
    return _cut(name, system, run.request_records(trial.trial_id))


def _cut(name: str, system: System, records: Sequence[RequestRecord]) -> ServedLoad:
    ordered = sorted(records, key=lambda each: each.scheduled_s)
    whole = ServedLoad.of(name, system, ordered[: MOST_REQUESTS + _AFTER])
    if len(ordered) <= MOST_REQUESTS:
        return whole
    ttft, decode = whole.measured.ttft_s.copy(), whole.measured.decode_s.copy()
    ttft[MOST_REQUESTS:] = decode[MOST_REQUESTS:] = np.nan
    return replace(whole, measured=Times(ttft, decode))


def _machine(run: RunFolder) -> str:
    cpu = run.environment.get("cpu")
    model = cpu.get("model") if isinstance(cpu, Mapping) else None
    return str(model or "not recorded")


# -- others' records ---------------------------------------------------------------------------------


def _of_file(path: Path, limits: EngineLimits) -> CalibrationInput:
    imported = read(path)
    rows = [row for row in imported.reading.serving if row.requests]
    if not rows:
        raise InputError(
            f"{path} has sums and no single requests: nothing can be fitted to it",
            hint="give a result of --save-detailed, aiperf's folder with profile_export.jsonl, or a run",
        )
    settings: Mapping[str, Any] = rows[0].settings
    notes: list[str] = []
    system = _system(settings, limits, notes, rows)
    origin = rows[0].origin
    version = settings.get("vllm_version")
    return CalibrationInput(
        [ServedLoad.of(row.origin.text(), system, row.requests) for row in rows],
        [f"{path.name} ({imported.format})"],
        engine=f"vllm {version}" if version else "",
        machine="",
        tensor_parallel_size=settings.get("tensor_parallel_size"),
        num_kv_tokens=_kv_tokens(settings, limits),
        notes=[*notes, *([f"recorded by {origin.tool}"] if origin.tool else [])],
    )


def _kv_tokens(settings: Mapping[str, Any], limits: EngineLimits) -> int | None:
    """KV memory of one engine, in tokens: as given, or as recorded; None where it is not known."""
    tokens = limits.num_kv_tokens or settings.get("num_kv_tokens")
    return int(tokens) if tokens else None


def _system(
    settings: Mapping[str, Any], limits: EngineLimits, notes: list[str], rows: Sequence[ServingRow]
) -> System:
    def chosen(name: str, default: int) -> int:
        given = getattr(limits, name, None) or settings.get(name)
        if given is None:
            notes.append(f"{name} is not recorded: {default} is taken")
        return int(given or default)

    seqs = chosen("max_num_seqs", VLLM_MAX_NUM_SEQS)
    budget = chosen("max_num_batched_tokens", VLLM_BATCHED_TOKENS)
    instances = limits.instances or int(settings.get("data_parallel_size") or 1)
    longest = max(each.input_len + each.output_len for row in rows for each in row.requests) + _BLOCK_TOKENS
    blocks = seqs * -(-longest // _BLOCK_TOKENS)
    if tokens := _kv_tokens(settings, limits):
        blocks = tokens // _BLOCK_TOKENS
        if blocks * _BLOCK_TOKENS < longest - _BLOCK_TOKENS:
            raise InputError(
                f"a KV memory of {tokens:,} tokens holds no request of {longest - _BLOCK_TOKENS:,}, and one "
                "was served",
                hint="give the KV memory of one engine, in tokens: --num-kv-tokens",
            )
    else:
        notes.append(_ENOUGH)
    config = EngineConfig(_BLOCK_TOKENS, blocks, seqs, budget, longest, enable_prefix_caching=False)
    return System(timing_of_values({}), config, prefill=0, decode=instances)
