"""In what runs before and runs after were set otherwise: scenario, versions, machine.

A key that an older run does not know has the value that it had by default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError

from kvbench import connectors, engines
from kvbench.core.scenario.deployment_section import OWN_KEYS
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.report.tables.numbers import MISSING
from kvbench.results.provenance import SIMULATED, hardware_of, host_of, mark_of, model_of, slo_of
from kvbench.results.run import RunFolder

_SAID_ELSEWHERE: Final = ("version", "description", "connectors", "simulate", "model", "slo")


class SettingChange(NamedTuple):
    """One setting that differs, as text; of repeats with unlike values all of them."""

    name: str
    before: str
    after: str

    def text(self) -> str:
        return f"{self.name}: {self.before} → {self.after}"


def setting_changes(before: Sequence[RunFolder], after: Sequence[RunFolder]) -> list[SettingChange]:
    """Only the settings that differ, those of the scenario first. Neither side is empty."""
    sides = [[_settings(run) for run in side] for side in (before, after)]
    names = dict.fromkeys(name for side in sides for each in side for name in each)
    # Of a connector that one side lacks it is enough to say so.
    lacking = set.symmetric_difference(
        *({name.split(".")[0] for each in side for name in each} for side in sides)
    )
    found = []
    for name in names:
        if "." in name and name.split(".")[0] in lacking:
            continue
        one, other = (list(dict.fromkeys(each.get(name, MISSING) for each in side)) for side in sides)
        if set(one) != set(other):
            found.append(SettingChange(name, " / ".join(one), " / ".join(other)))
    return found


def _settings(run: RunFolder) -> dict[str, str]:
    """All that was set, by its dotted name; and what it was measured with, and where."""
    scenario = run.plan.get("scenario")
    given = dict(scenario) if isinstance(scenario, Mapping) else {}
    found = {"model": model_of(run), "SLO": slo_of(run).text()}
    filled = _filled(given, defaults_of(Scenario))
    deployment = filled.get("deployment")
    if isinstance(deployment, Mapping):
        options = _mapping(deployment.get("engine_options"))
        own = _filled(options, defaults_of(engines.options_model_of(run.plan)))
        filled["deployment"] = {**deployment, "engine_options": own}
    simulated = run.manifest.get("kind") == "simulate" or SIMULATED in run.labels
    kept = {name: value for name, value in filled.items() if name not in _SAID_ELSEWHERE}
    kept |= {"simulate": filled.get("simulate")} if simulated else {}
    kept["scenario"] = kept.pop("name", "")
    found |= {name: _text(value) for name, value in _flat(kept)}
    found |= {f"model.{name}": _text(value) for name, value in _flat(_mapping(given.get("model")))}
    settles = not engines.options_model_of(run.plan).chooses_transport
    found |= _connectors(given.get("connectors"), settles)
    return {name: text for name, text in (found | _circumstances(run)).items() if text}


def _circumstances(run: RunFolder) -> dict[str, str]:
    mark, git = mark_of(run), _mapping(run.manifest.get("git"))
    environment = run.environment
    libraries = _mapping(environment.get("libraries"))
    return {
        "measured on": mark.word if mark is not None else "real engines",
        "seed": _text(run.manifest.get("seed")),
        "host": host_of(run),
        "hardware": hardware_of(run),
        "kernel": _text(environment.get("kernel")),
        "kvbench": _text(run.manifest.get("kvbench")),
        "commit": _text(git.get("commit"))[:12] + (" with changes" if git.get("dirty") else ""),
        **{name: _text(version) for name, version in libraries.items()},
    }


def _connectors(given: Any, settles: bool) -> dict[str, str]:
    """Each connector's options by its label, and which there are. ``settles``: whether what is left to a
    library is chosen before."""
    found: dict[str, str] = {}
    listed = [each for each in given if isinstance(each, Mapping)] if isinstance(given, list) else []
    for each in listed:
        name = str(each.get("name"))
        label = str(each.get("label") or name)
        own = {key: value for key, value in each.items() if key not in OWN_KEYS}
        try:
            options = connectors.get(name).options_model.model_validate_json(json.dumps(own))
            own |= (options.settled() if settles else options).model_dump(mode="json")
        except (InputError, ValidationError):  # one of another installation, or of a newer one
            pass
        found |= {f"{label}.{key}": _text(value) for key, value in _flat(own)}
    labels = ", ".join(str(each.get("label") or each.get("name")) for each in listed)
    return {"connectors": labels, **found} if labels else found


# --- defaults --------------------------------------------------------------------------------------


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    """A model's defaults as JSON has them; sections that have none of their own by their fields."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            found[name] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            found[name] = defaults_of(kind)
    return found


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with the defaults of the keys that it does not know."""
    found = {key: value for key, value in defaults.items() if key not in given}
    for key, value in given.items():
        known = defaults.get(key)
        both = isinstance(value, Mapping) and isinstance(known, Mapping)
        found[key] = _filled(value, known) if both and known else value
    return found


def _flat(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _text(value: Any) -> str:
    if value is None or value == [] or value == ():
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
