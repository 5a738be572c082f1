"""JSON Schema of the scenario format, for completion and checks in editors.

Pydantic derives it from the sections. Short forms (a model or connector as a plain name, options next to
``name``) are added here."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from kvbench.core.physics import MODELS
from kvbench.core.scenario.base import NAME_PATTERN, Registry
from kvbench.core.scenario.deployment_section import ConnectorChoice, Deployment

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def scenario_schema_of(scenario: type[BaseModel], registry: Registry) -> dict[str, Any]:
    """Return the schema of a scenario file whose connectors and engines are in the registry."""
    schema = scenario.model_json_schema()
    defs = schema["$defs"]
    properties = schema["properties"]
    schema["required"] = [key for key in schema["required"] if key != "name"]
    for key in ("workload", "slo", "search", "load", "simulate", "deployment"):
        description = scenario.model_fields[key].description
        properties[key] = {"$ref": f"#/$defs/{key.title()}", "description": description}
    properties["model"] = _model(defs.pop("ModelChoice"), defs)
    properties["connectors"] |= {"items": {"anyOf": _connectors(registry, defs)}}
    for name in ("Slo", "Tier"):
        has_limits = {"required": ["limits"], "properties": {"limits": {"minItems": 1}}}
        defs[name]["anyOf"] = [_has_number("ttft_ms"), _has_number("tpot_ms"), has_limits]
    has_tiers = {"required": ["tiers"], "properties": {"tiers": {"minProperties": 1}}}
    defs["Slo"]["anyOf"].append(has_tiers)
    _needs_by_method(schema, defs)
    _engine_options(defs["Deployment"], registry, defs)
    for unused in ("ConnectorChoice", "ConnectorOptions", "EngineOptions"):
        defs.pop(unused, None)
    return {"$schema": _DIALECT, "title": "kvbench scenario", **_without(schema, "title")}


def _without(schema: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def _has_number(key: str) -> dict[str, Any]:
    return {"required": [key], "properties": {key: {"type": "number"}}}


def _needs_by_method(schema: dict[str, Any], defs: dict[str, Any]) -> None:
    """Require an SLO except for fixed rates and replays, and lengths or a trace."""
    unsearched = {"required": ["method"], "properties": {"method": {"enum": ["fixed", "trace"]}}}
    schema["anyOf"] = [{"required": ["slo"]}, {"required": ["search"], "properties": {"search": unsearched}}]
    lengths = ["input_len", "output_len"]
    workload = defs["Workload"]
    workload["required"] = [key for key in workload["required"] if key not in lengths]
    traced = {"required": ["trace"], "properties": {"trace": {"type": "object"}}}
    workload["anyOf"] = [{"required": lengths}, traced]


def _model(shape: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a preset's name, a preset with changes, or a full shape."""
    preset = {"enum": list(MODELS), "description": "a model shape that kvbench knows"}
    defs["ModelShape"] = shape
    defs["ModelPreset"] = {
        **shape,
        "description": "A preset with changes.",
        "properties": {"preset": preset, **shape["properties"]},
        "required": ["preset"],
    }
    return {
        "description": "a preset's name, a preset with changes, or a full shape",
        "anyOf": [preset, {"$ref": "#/$defs/ModelPreset"}, {"$ref": "#/$defs/ModelShape"}],
    }


def _options(model: type[BaseModel], prefix: str, defs: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an options model, with its definitions moved to the top under a prefix."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    for name, definition in schema.pop("$defs", {}).items():
        defs[f"{prefix}.{name}"] = definition
    return schema


def _connectors(registry: Registry, defs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas of a connector's entry: a name, or a mapping with the name."""
    label = {
        "type": "string",
        "description": "its name in tables; by default the connector's",
        "pattern": NAME_PATTERN,
    }
    ranks = ConnectorChoice.model_json_schema()["properties"]["tensor_parallel_size"]
    ways: list[dict[str, Any]] = [{"enum": list(registry.connectors), "description": "a connector"}]
    for name, model in registry.connectors.items():
        options = _options(model, f"connector.{name}", defs)
        defs[f"connector.{name}"] = {
            **options,
            "title": name,
            "type": "object",
            "properties": {
                "name": {"const": name, "description": "the connector"},
                "label": label,
                "tensor_parallel_size": ranks,
                **options.get("properties", {}),
            },
            "required": ["name", *options.get("required", [])],
            "additionalProperties": False,
        }
        ways.append({"$ref": f"#/$defs/connector.{name}"})
    return ways


def _engine_options(deployment: dict[str, Any], registry: Registry, defs: dict[str, Any]) -> None:
    """Type ``engine_options`` by ``engine``, and list the engines."""
    default = Deployment.model_fields["engine"].default
    properties = deployment["properties"]
    properties["engine"] |= {"enum": list(registry.engines)}
    properties["engine_options"] = {"type": "object", "description": "options of the engine"}
    deployment["allOf"] = []
    for name, model in registry.engines.items():
        defs[f"engine.{name}"] = options = _options(model, f"engine.{name}", defs)
        chosen: dict[str, Any] = {"properties": {"engine": {"const": name}}}
        if name != default:  # without `engine:` the default's options are meant
            chosen["required"] = ["engine"]
        then: dict[str, Any] = {"properties": {"engine_options": {"$ref": f"#/$defs/engine.{name}"}}}
        if options.get("required"):
            then["required"] = ["engine_options"]
        deployment["allOf"].append({"if": chosen, "then": then})
