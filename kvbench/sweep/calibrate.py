"""``kvbench calibrate --from``: fit a timing profile, and check it on held-out requests."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from kvbench.core.calibration.fit import FittedTiming, ServedLoad, Times
from kvbench.core.calibration.held_out import CheckedFit, checked_fit, later_part
from kvbench.core.calibration.profile_file import (
    Coefficient,
    Covariance,
    FittedTo,
    ProfileFile,
    profile_text,
    timing_of_values,
)
from kvbench.core.fitted_table import Grid, columns_of
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.simulation.data import System
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError
from kvbench.files import write_bytes
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
from kvbench.sweep.verify.cross_checks import scenario_of

MOST_REQUESTS: Final = 200
"""Maximum requests of one load; the next ones are simulated because they slow these down, but not fitted."""
_AFTER: Final = 60
MOST_LOADS: Final = 8
"""Maximum loads of one run, spread over its rates."""
_BLOCK_TOKENS: Final = 16
_ENOUGH: Final = "KV memory is assumed to suffice for every sequence"


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine, for records without them; None: as recorded, or vLLM's default."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    instances: int | None = None
    num_kv_tokens: int | None = None


@dataclass(frozen=True)
class CalibrationInput:
    """Loads to fit to, and limits of the engine that served them."""

    loads: list[ServedLoad]
    inputs: list[str]
    engine: str = ""
    machine: str = ""
    scenario_sha256: str = ""
    tensor_parallel_size: int | None = None
    num_kv_tokens: int | None = None
    """KV memory of one engine, in tokens; None if unknown or if values differ."""
    notes: list[str] = field(default_factory=list)


def read_inputs(paths: Sequence[Path], limits: EngineLimits) -> CalibrationInput:
    """Read all paths. Raises InputError for one without single requests, or of another engine."""
    read_ones = [
        _of_run(path, limits) if (path / "manifest.json").is_file() else _of_file(path, limits)
        for path in paths
    ]
    sizes = {one.tensor_parallel_size for one in read_ones}
    engines = {one.engine for one in read_ones if one.engine}
    for what, found in (("tensor parallel sizes", sizes), ("engines", engines)):
        if len(found) > 1:
            raise InputError(
                f"--from has several {what}: {', '.join(sorted(map(str, found)))}",
                hint="a profile is of one engine in one version: calibrate them one by one",
            )
    first = read_ones[0]
    memories = {one.num_kv_tokens for one in read_ones}
    return replace(
        first,
        num_kv_tokens=first.num_kv_tokens if len(memories) == 1 else None,
        loads=[load for one in read_ones for load in one.loads],
        inputs=[name for one in read_ones for name in one.inputs],
        scenario_sha256=first.scenario_sha256 if len(read_ones) == 1 else "",
        notes=[note for one in read_ones for note in one.notes],
    )


# -- run folders -------------------------------------------------------------------------------------


def _of_run(path: Path, limits: EngineLimits) -> CalibrationInput:
    run = load_run(path)
    if run.manifest.get("kind") not in ("sweep", "bench"):
        raise InputError(
            f"{path} is a run of kind {run.manifest.get('kind')}, without measurements of an engine",
            hint="give --from a run of `kvbench sweep` or `kvbench bench`, or records of single requests",
        )
    scenario = scenario_of(run)
    if scenario.workload.trace is not None:
        raise InputError(
            f"{path} replayed a trace, whose shared prompt prefixes are not in the requests' records",
            hint="calibrate with a run of random prompts",
        )
    systems = _systems(scenario)
    loads, memories = [], set[int]()
    for label in systems:
        trials = [trial for trial in run.trials if trial.cell.connector == label and _usable(trial)]
        if scenario.deployment.engine_options.kv_blocks(scenario.workload.longest) is None:
            sizes = [(trial.engine.get("num_kv_tokens") or {}).values() for trial in trials]
            found = {min(map(int, of_roles)) for of_roles in sizes if of_roles} - {0}
            tokens = limits.num_kv_tokens or min(found, default=0)
            config = systems[label].config
            if blocks := tokens // config.block_tokens:
                systems[label] = replace(systems[label], config=replace(config, num_blocks=blocks))
            memories |= {tokens} if trials else set()
        for trial in _spread(trials):
            name = f"{label}, {trial.cell.input_len} in, {trial.request_rate:g} req/s"
            loads.append(_cut(name, systems[label], run.request_records(trial.trial_id)))
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


def _systems(scenario: Scenario) -> dict[str, System]:
    """Return label → system, without the step times to fit."""
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
    """Pick at most MOST_LOADS trials: the lowest and highest rate of each length first."""
    ordered = sorted(trials, key=lambda trial: (trial.cell.input_len, trial.request_rate))
    if len(ordered) <= MOST_LOADS:
        return ordered
    picked = np.unique(np.linspace(0, len(ordered) - 1, MOST_LOADS).round().astype(int))
    return [ordered[at] for at in picked]


def _cut(name: str, system: System, records: Sequence[RequestRecord]) -> ServedLoad:
    ordered = sorted(records, key=lambda record: record.scheduled_s)
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
            f"{path} has totals only; a fit needs single requests",
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
    """KV memory of one engine in tokens, as given or recorded."""
    tokens = limits.num_kv_tokens or settings.get("num_kv_tokens")
    return int(tokens) if tokens else None


def _system(
    settings: Mapping[str, Any], limits: EngineLimits, notes: list[str], rows: Sequence[ServingRow]
) -> System:
    def chosen(name: str, default: int) -> int:
        given = getattr(limits, name, None) or settings.get(name)
        if given is None:
            notes.append(f"{name} is not recorded: {default} is assumed")
        return int(given or default)

    seqs = chosen("max_num_seqs", VLLM_MAX_NUM_SEQS)
    budget = chosen("max_num_batched_tokens", VLLM_BATCHED_TOKENS)
    instances = limits.instances or int(settings.get("data_parallel_size") or 1)
    longest = (
        max(request.input_len + request.output_len for row in rows for request in row.requests)
        + _BLOCK_TOKENS
    )
    blocks = seqs * -(-longest // _BLOCK_TOKENS)
    if tokens := _kv_tokens(settings, limits):
        blocks = tokens // _BLOCK_TOKENS
        if blocks * _BLOCK_TOKENS < longest - _BLOCK_TOKENS:
            raise InputError(
                f"a KV memory of {tokens:,} tokens cannot hold a request of {longest - _BLOCK_TOKENS:,}, "
                "but one was served",
                hint="give the KV memory of one engine, in tokens: --num-kv-tokens",
            )
    else:
        notes.append(_ENOUGH)
    config = EngineConfig(_BLOCK_TOKENS, blocks, seqs, budget, longest, enable_prefix_caching=False)
    return System(timing_of_values({}), config, prefill=0, decode=instances)


_DIGITS: Final = 6
_SHOWN: Final = 8
"""Maximum printed lines about loads that a profile does not explain."""
_COVARIANCE_DIGITS: Final = 12
"""Digits of the stored covariance; strongly correlated coefficients need this many to keep it valid."""


@dataclass(frozen=True)
class CalibrateOptions:
    """Command-line options. ``held_out``: share of each load's last requests kept for the check."""

    sources: Sequence[Path]
    output: Path
    name: str = ""
    engine: str = ""
    machine: str = ""
    held_out: float = 1 / 3
    limits: EngineLimits = field(default_factory=EngineLimits)


def command(options: CalibrateOptions, console: Console) -> int:
    """Fit, check, write, print; return 0 for a usable profile, else 1. Raises InputError."""
    if options.output.exists():
        raise InputError(f"{options.output} already exists", hint="give another --output, or remove it")
    profile = calibrate(options)
    write_bytes(options.output, profile_text(profile).encode())
    _print(profile, options.output, console)
    return EXIT_OK if profile.status == "fit" else EXIT_FAILED


def calibrate(options: CalibrateOptions) -> ProfileFile:
    """Return the fitted profile. Raises InputError for too little data."""
    source = read_inputs(options.sources, options.limits)
    used, by = _split(source.loads, options.held_out)
    checked = checked_fit(source.loads, used, by)
    return _profile(source, checked, options)


def _split(loads: Sequence[ServedLoad], share: float) -> tuple[list[NDArray[np.bool_]], str]:
    """Select the requests to fit: all lengths except the middle one, or the earlier requests of each load."""
    lengths = [float(np.median(load.input_len)) for load in loads]
    uniform = all(np.ptp(load.input_len) <= 0.1 * length for load, length in zip(loads, lengths, strict=True))
    known = sorted(set(np.round(lengths, -1).tolist()))
    if not uniform or len(known) < 3:
        return later_part(loads, share), f"the last {share:.0%} of each load"
    middle = known[len(known) // 2]
    masks: list[NDArray[np.bool_]] = [
        np.full(len(load.load.offsets_s), round(length, -1) != middle)
        for load, length in zip(loads, lengths, strict=True)
    ]
    return masks, f"the prompts of {middle:g} tokens"


def _profile(source: CalibrationInput, checked: CheckedFit, options: CalibrateOptions) -> ProfileFile:
    fitted = checked.fitted
    inputs = np.concatenate([load.input_len for load in source.loads])
    outputs = np.concatenate([load.output_len for load in source.loads])
    notes = "".join(f"; {note}" for note in dict.fromkeys(source.notes))
    engine = options.engine or source.engine or "not recorded"
    return ProfileFile(
        version=1,
        name=options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", options.output.stem).lstrip("._-") or "profile",
        source=f"kvbench calibrate, fitted to {', '.join(source.inputs)}{notes}"[:2000],
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        engine=engine[:200],
        machine=(options.machine or source.machine or "not recorded")[:500],
        scenario_sha256=source.scenario_sha256,
        tensor_parallel_size=source.tensor_parallel_size,
        num_kv_tokens=source.num_kv_tokens,
        status="fit" if checked.holds else "unfit",
        cannot_explain=checked.cannot_explain[:64],
        fitted_to=FittedTo(
            requests=fitted.requests,
            inputs=source.inputs[:64],
            input_len=[int(inputs.min()), int(inputs.max())],
            output_len=[int(outputs.min()), int(outputs.max())],
        ),
        held_out=checked.held_out,
        coefficients=_coefficients(fitted),
        covariance=Covariance(
            order=list(fitted.values),
            rows=[[_round(cell, _COVARIANCE_DIGITS) for cell in row] for row in fitted.covariance.tolist()],
        ),
    )


def _coefficients(fitted: FittedTiming) -> dict[str, Coefficient]:
    errors = fitted.errors
    return {
        name: Coefficient(value=_round(value), error=_round(errors[name]))
        for name, value in fitted.values.items()
    }


def _round(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def _print(profile: ProfileFile, path: Path, console: Console) -> None:
    rows = [
        [name, f"{fit.value:.4g}", f"{fit.error:.2g}" if fit.error is not None else "–"]
        for name, fit in profile.coefficients.items()
    ]
    table = Grid(columns_of("coefficient", "value ms|± error"), rows)
    fitted = table.fitted(console.width if console.is_terminal else None)
    console.print(fitted.text(), markup=False, highlight=False, soft_wrap=True)
    held = profile.held_out
    assert held is not None
    words = ", ".join(
        f"{name} {figure.ratio:.3f} of measured (stated within {figure.stated:.0%})"
        for name, figure in held.figures.items()
    )
    more = len(profile.cannot_explain) - _SHOWN
    lines = [
        "",
        f"held out: {held.by}, {held.requests} requests: predicted {words}",
        *(f"cannot explain: {text}" for text in profile.cannot_explain[:_SHOWN]),
        *([f"and {more} more: cannot_explain in the file"] if more > 0 else []),
        f"{path}: {profile.status.upper()}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False)
    if console.stderr:  # a program reads stdout
        sys.stdout.write(profile.model_dump_json(indent=2, exclude_none=True) + "\n")
