"""Where a run's numbers come from: model, SLO, hardware, emulated or real; which runs may share a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from kvbench.errors import InputError
from kvbench.runs import Run

EMULATED: Final = "emulated"
EMULATED_WHY: Final = "compute timing is modelled, the KV bytes and their transfer are real"


@dataclass(frozen=True)
class Slo:
    """The limits a request has to meet, and the share of requests that must; None where not known."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float | None = None

    def text(self) -> str:
        limits = [
            f"{name} ≤ {limit:g} ms"
            for name, limit in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
            if limit
        ]
        if not limits:
            return "no SLO"
        share = f" for {self.attainment * 100:g} % of requests" if self.attainment else ""
        return " and ".join(limits) + share


def resolved(run: Run, key: str) -> Any:
    """A part of what was asked for, from the plan or else from the scenario file; None if neither has it."""
    scenario = run.plan.get("scenario")
    for place in (run.plan, scenario if isinstance(scenario, Mapping) else {}, _scenario_file(run)):
        if place.get(key) is not None:
            return place[key]
    return None


def _scenario_file(run: Run) -> Mapping[str, Any]:
    try:
        data = yaml.safe_load(run.scenario_text)
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, Mapping) else {}


def slo_of(run: Run) -> Slo:
    data = resolved(run, "slo")
    if not isinstance(data, Mapping):
        return Slo()
    return Slo(*(_number(data.get(key)) for key in ("ttft_ms", "tpot_ms", "attainment")))


def model_of(run: Run) -> str:
    model = resolved(run, "model")
    if isinstance(model, Mapping):
        model = model.get("name") or model.get("model")
    return str(model) if model else ""


def is_emulated(run: Run) -> bool:
    return EMULATED in run.labels or any(EMULATED in trial.labels for trial in run.trials)


def scenario_of(run: Run) -> str:
    return str(run.manifest.get("scenario") or resolved(run, "name") or "unnamed")


def started(run: Run) -> str:
    """``2026-11-21 13:30 UTC``, or nothing if the manifest does not say."""
    text = str(run.manifest.get("started_at") or "")
    return f"{text[:10]} {text[11:16]} UTC" if len(text) >= 16 else text


def host_of(run: Run) -> str:
    hosts = run.manifest.get("hosts") or []
    name = run.environment.get("hostname") or run.environment.get("host")
    return ", ".join(str(host) for host in hosts) or (str(name) if name else "")


def hardware_of(run: Run) -> str:
    """CPU, cores and GPUs in one line, as far as environment.json says."""
    cpu = run.environment.get("cpu")
    details: Mapping[str, Any] = cpu if isinstance(cpu, Mapping) else {"model": cpu}
    model = str(details.get("model") or details.get("name") or "")
    cores = details.get("usable_cores") or details.get("cores")
    parts = [f"{cores} × {model}" if cores and model else model or (f"{cores} CPUs" if cores else "")]
    gpus = run.environment.get("gpus")
    if isinstance(gpus, Sequence) and not isinstance(gpus, str):
        names = [str(gpu.get("name", gpu)) if isinstance(gpu, Mapping) else str(gpu) for gpu in gpus]
        parts += [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return ", ".join(part for part in parts if part) or "hardware not recorded"


def caption(run: Run) -> str:
    """What every picture and table carries: scenario, model, version, hardware, date."""
    parts = [
        scenario_of(run),
        model_of(run),
        f"kvbench {run.manifest.get('kvbench', '?')}",
        host_of(run),
        hardware_of(run),
        started(run),
    ]
    return " · ".join(part for part in parts if part)


def identity(run: Run) -> dict[str, Any]:
    """What has to be equal before two runs' rows may stand in one table."""
    deployment = resolved(run, "deployment")
    # The emulated engine's options set its speed; a real engine's are what one may want to compare.
    options = deployment.get("engine_options") if isinstance(deployment, Mapping) else None
    return {
        "model": model_of(run),
        "engine": EMULATED if is_emulated(run) else "real",
        "engine options": options if is_emulated(run) else None,
        "SLO": slo_of(run).text(),
        "host": host_of(run),
        "hardware": hardware_of(run),
        "seed": run.manifest.get("seed"),
        "schema": run.schema,
    }


def differences(runs: Sequence[Run]) -> list[str]:
    """One line per thing in which the runs differ, such as ``seed: 1 / 2``."""
    identities = [identity(run) for run in runs]
    lines = []
    for key in identities[0] if identities else ():
        values = [item[key] for item in identities]
        if any(value != values[0] for value in values):
            lines.append(f"{key}: " + " / ".join(str(value) for value in values))
    return lines


def check_comparable(runs: Sequence[Run], *, force: bool = False) -> list[str]:
    """The differences that make runs not comparable. Raises InputError unless ``force``."""
    found = differences(runs)
    if found and not force:
        raise InputError(
            "these runs are not comparable; they differ in " + "; ".join(found),
            hint="report them one by one, or add --force to put them in one table that says so",
        )
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
