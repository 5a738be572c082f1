"""The scenario: what to measure, as checked and frozen values.

``read_scenario`` returns a ``Draft`` whose values can be changed; ``parse_scenario`` returns a checked
``Scenario`` or raises one ScenarioError with all mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from kvbench.core.physics import ModelShape
from kvbench.core.scenario.base import NAME_PATTERN, Registry, Section, Several, whole_number
from kvbench.core.scenario.checks import contradictions, explain, keys_below, locate_conflicts
from kvbench.core.scenario.deployment_section import COMMON_KEYS, ConnectorChoice, Deployment
from kvbench.core.scenario.goals import Search, Slo, Tier
from kvbench.core.scenario.json_schema import scenario_schema_of
from kvbench.core.scenario.options import ConnectorOptions
from kvbench.core.scenario.overrides import Overrides, apply_overrides, typed_overrides
from kvbench.core.scenario.sections import Checks, Load, ModelChoice, Simulate, Trace, Workload
from kvbench.core.scenario.yaml_lines import Mistake, Node, Where, plain, quoted, read_yaml
from kvbench.core.slo import allowed_s, default_timeout_s
from kvbench.errors import ScenarioError

__all__ = [
    "Checks",
    "ConnectorChoice",
    "Deployment",
    "Load",
    "ModelChoice",
    "Registry",
    "Scenario",
    "Search",
    "Simulate",
    "Slo",
    "Tier",
    "Trace",
    "Workload",
    "parse_scenario",
    "scenario_schema",
]


AGGREGATED: Final = "aggregated"


@dataclass(frozen=True)
class Sized:
    """A deployment's label, its connector's name, and its tensor parallel size."""

    label: str
    connector: str
    size: int


@dataclass(frozen=True)
class References:
    """``of``: label → label of the deployment with the reference outputs; ``added``: those not measured.

    Each tensor parallel size has its own reference, because ranks add their parts in another order."""

    of: Mapping[str, str]
    added: tuple[Sized, ...]


def references(chosen: Sequence[Sized]) -> References:
    """Return the first aggregated deployment of each size, adding one where a size has none."""
    sizes = list(dict.fromkeys(deployment.size for deployment in chosen))
    taken = {deployment.label for deployment in chosen}
    by_size: dict[int, str] = {}
    added = []
    for size in sizes:
        whole = (entry.label for entry in chosen if (entry.connector, entry.size) == (AGGREGATED, size))
        label = next(whole, "")
        if not label:
            label = _free_label("reference" if len(sizes) == 1 else f"reference-tp{size}", taken)
            added.append(Sized(label, AGGREGATED, size))
        by_size[size] = label
    return References({entry.label: by_size[entry.size] for entry in [*chosen, *added]}, tuple(added))


def _free_label(wanted: str, taken: Iterable[str]) -> str:
    """Return an unused label for a reference deployment."""
    label, number = wanted, 1
    while label in taken:
        number += 1
        label = f"{wanted}-{number}"
    return label


class Scenario(Section):
    version: Annotated[Literal[1], BeforeValidator(whole_number)] = Field(
        description="version of this file format"
    )
    name: str = Field(pattern=NAME_PATTERN, description="name of the run; by default the file's name")
    description: str = Field("", max_length=4000, description="what this scenario is for")
    model: ModelChoice = Field(description="a preset's name, a preset with changes, or a full shape")
    deployment: Deployment = Field(
        default_factory=Deployment, validate_default=True, description="what is launched for each connector"
    )
    connectors: Several[ConnectorChoice] = Field(
        min_length=1, max_length=32, description="what is compared: connector names, or mappings with options"
    )
    workload: Workload = Field(description="what requests look like and how they arrive")
    slo: Slo = Field(default_factory=Slo, description="the limits that must be met")
    search: Search = Field(default_factory=Search, description="how the highest rate is searched")
    checks: Checks = Field(default_factory=Checks, description="which answers are checked under load")
    load: Load = Field(default_factory=Load, description="how the load is generated")
    simulate: Simulate = Field(
        default_factory=Simulate, description="figures that only `kvbench simulate` uses"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="all randomness of the run comes from it")

    @field_validator("deployment", mode="before")
    @classmethod
    def _default_deployment(cls, raw: Any) -> Any:
        # Goes through the checks again, so that even default engine options get their type.
        return dict(raw) if isinstance(raw, Deployment) and not raw.model_fields_set else raw

    def deployed(self, label: str) -> Deployment:
        """Return the deployment of one connector, with its own tensor parallel size."""
        known = (*self._sized, *self.references.added)
        size = next((deployment.size for deployment in known if deployment.label == label), None)
        return (
            self.deployment.model_copy(update={"tensor_parallel_size": (size,)}) if size else self.deployment
        )

    @property
    def references(self) -> References:
        """The deployments with which each connector's outputs are compared."""
        return references(self._sized)

    @property
    def _sized(self) -> list[Sized]:
        first = self.deployment.tensor_parallel_size[0]
        return [
            Sized(connector.label, connector.name, connector.tensor_parallel_size or first)
            for connector in self.connectors
        ]

    def at(self, label: str) -> Scenario:
        """Return the scenario with the deployment of one connector only."""
        return self.model_copy(update={"deployment": self.deployed(label)})

    def connector_options(self, label: str) -> ConnectorOptions:
        """Return the typed options of a connector; those of an added reference deployment are empty."""
        for choice in self.connectors:
            if choice.label == label:
                return choice.options
        return ConnectorOptions()

    @property
    def kv_shape(self) -> ModelShape:
        """The model's shape as this engine keeps and moves its KV."""
        clips = self.deployment.engine_options.clips_windows
        return self.model.shape if clips else self.model.shape.whole

    @property
    def allowed_s(self) -> float:
        """Longest time of a request that meets an SLO of any tier, in seconds; 0 without limits."""
        return allowed_s(self.slo.by_tier().values(), self.workload.longest_output)

    @property
    def request_timeout_s(self) -> float:
        timeout_s = self.workload.request_timeout_s
        if timeout_s is not None:
            return timeout_s
        return default_timeout_s(self.slo.by_tier().values(), self.workload.longest_output)

    def resolved(self) -> dict[str, Any]:
        """Return everything with its defaults as plain data, which is valid content of a scenario file."""
        data = self.model_dump(mode="json")
        data["connectors"] = [
            {**{key: entry[key] for key in COMMON_KEYS if entry[key] is not None}, **entry["options"]}
            for entry in data["connectors"]
        ]
        return data


@dataclass(frozen=True)
class Draft:
    """A scenario as written, with the line of each value, to be changed before it is checked."""

    root: Node
    path: str
    """Path of its file, for messages."""
    mistakes: tuple[Mistake, ...] = ()

    def put(self, overrides: Overrides, typed: Mapping[str, str] = MappingProxyType({})) -> Draft:
        """Replace values of the file. ``typed``: path → option that sets it, for messages."""
        root, mistakes = apply_overrides(self.root, overrides, typed)
        return replace(self, root=root, mistakes=(*self.mistakes, *mistakes))

    def checked(self, registry: Registry) -> Scenario:
        """Return the scenario. Raises ScenarioError with one line per mistake: ``path:line: what``."""
        mistakes = list(self.mistakes)
        data = plain(self.root)
        assert isinstance(data, dict)
        data.setdefault("name", name_from_path(self.path))
        _stand_in_lengths(data)
        scenario, conflicts = None, []
        try:
            scenario = Scenario.model_validate(data, context=registry)
            conflicts = contradictions(scenario.resolved())
        except ValidationError as error:
            mistakes += explain(error, self.root, _keys_at(registry, data), mistakes)
        if scenario is None or conflicts:  # the data as written knows what the user gave
            conflicts = contradictions(_with_defaults(data)) or conflicts
        mistakes += locate_conflicts(conflicts, self.root, mistakes)
        if scenario is None or mistakes:
            raise scenario_error(mistakes, self.path)
        return _settled(_by_size(scenario, self.path))


def read_scenario(text: str, path: str) -> Draft:
    """Return the draft of a file's text. Raises ScenarioError if it is no mapping."""
    root, mistakes = read_yaml(text)
    if root is None:
        raise scenario_error(mistakes, path)
    if root.value is None:
        raise scenario_error([Mistake(Where(), (), "the file is empty")], path)
    if not isinstance(root.value, dict):
        raise scenario_error([Mistake(root.where, (), "must be a mapping of `key: value` lines")], path)
    return Draft(root, path, tuple(mistakes))


def parse_scenario(text: str, path: str, registry: Registry, overrides: Sequence[str] = ()) -> Scenario:
    """Return a checked scenario. ``overrides``: ``path=value`` texts. Raises ScenarioError."""
    return read_scenario(text, path).put(typed_overrides(overrides)).checked(registry)


def _by_size(scenario: Scenario, path: str) -> Scenario:
    """Return the scenario with each connector once per tensor parallel size, unless it sets its own."""
    sizes = scenario.deployment.tensor_parallel_size
    if len(sizes) == 1:
        return scenario
    chosen = [
        connector
        if connector.tensor_parallel_size
        else connector.model_copy(
            update={"label": f"{connector.label}-tp{size}", "tensor_parallel_size": size}
        )
        for size in sizes
        for connector in scenario.connectors
        if not connector.tensor_parallel_size or size == sizes[0]
    ]
    labels = [deployment.label for deployment in chosen]
    if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        text = f"the labels {', '.join(map(quoted, twice))} are those of several sizes; choose others"
        raise scenario_error([Mistake(Where(), ("connectors",), text)], path)
    return scenario.model_copy(update={"connectors": tuple(chosen)})


def _settled(scenario: Scenario) -> Scenario:
    """Return the scenario with deadlines and connector options as the engine takes them."""
    workload = scenario.workload.model_copy(update={"request_timeout_s": scenario.request_timeout_s})
    deployment = scenario.deployment
    if "ready_timeout_s" not in deployment.model_fields_set:
        usual = deployment.engine_options.usual_ready_timeout_s
        deployment = deployment.model_copy(update={"ready_timeout_s": usual})
    scenario = scenario.model_copy(update={"workload": workload, "deployment": deployment})
    if scenario.deployment.engine_options.chooses_transport:
        return scenario
    chosen = [
        connector.model_copy(update={"options": connector.options.settled()})
        for connector in scenario.connectors
    ]
    return scenario.model_copy(update={"connectors": tuple(chosen)})


def _stand_in_lengths(data: dict[str, Any]) -> None:
    """Fill in placeholder lengths: traces and sessions bring their own, known once they are read."""
    workload = data.get("workload")
    if isinstance(workload, dict) and any(workload.get(key) is not None for key in ("trace", "sessions")):
        for key in ("input_len", "output_len"):
            workload.setdefault(key, 2)


def scenario_schema(registry: Registry) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a scenario file."""
    return scenario_schema_of(Scenario, registry)


def scenario_error(mistakes: Sequence[Mistake], path: str) -> ScenarioError:
    ordered = sorted(mistakes, key=lambda mistake: (bool(mistake.where.override), mistake.where.line))
    lines = list(dict.fromkeys(f"{mistake.where.show(path)}: {_text(mistake)}" for mistake in ordered))
    if len(lines) > 50:
        lines = [*lines[:50], f"… and {len(lines) - 50} more mistakes"]
    return ScenarioError("\n".join(lines), hint="`kvbench scenarios schema` prints the format of a scenario")


def _text(mistake: Mistake) -> str:
    """Return a mistake's text, without the scenario path if an option other than ``--set`` was typed."""
    if not mistake.where.override or mistake.where.override.startswith("--set "):
        return mistake.text
    return mistake.text.removeprefix(".".join(map(str, mistake.location))).lstrip(": ")


def name_from_path(path: str) -> str:
    """Return the file's name without its suffix, reduced to valid characters."""
    stem = re.sub(r"\.ya?ml$", "", re.split(r"[/\\]", path)[-1])
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:80]
    return name or "scenario"


def _with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with the search's defaults, so that contradictions with a default are detected."""
    search = data.get("search", {})
    return {**data, "search": {**Search().model_dump(), **search} if isinstance(search, dict) else search}


def _keys_at(registry: Registry, data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the known keys of each mapping by its dotted path; connectors by their index."""
    keys = keys_below(Scenario, data)
    keys["model"] = ["preset", *ModelChoice.model_fields]
    deployment = data.get("deployment")
    engine = deployment.get("engine", "emulated") if isinstance(deployment, dict) else "emulated"
    options = registry.engines.get(engine) if isinstance(engine, str) else None
    keys["deployment.engine_options"] = list(options.model_fields) if options else []
    connectors = data.get("connectors")
    for index, connector in enumerate(connectors if isinstance(connectors, list) else []):
        name = connector.get("name") if isinstance(connector, dict) else connector
        model = registry.connectors.get(name) if isinstance(name, str) else None
        keys[f"connectors.{index}"] = [*COMMON_KEYS, *(model.model_fields if model else [])]
    return keys
