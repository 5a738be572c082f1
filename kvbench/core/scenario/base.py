"""Base class of the sections of a scenario file, errors with their place, and typed options.

The option models of connectors and engines come in as a ``Registry`` in pydantic's validation context, since
core knows neither."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvbench.core.scenario.checks import nearest
from kvbench.core.scenario.options import ConnectorOptions, EngineOptions
from kvbench.core.scenario.yaml_lines import Location, quoted, shorten

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
"""Pattern of names and labels, which become parts of file names."""


@dataclass(frozen=True)
class Registry:
    """Option models of the connectors and engines that a scenario may name."""

    connectors: Mapping[str, type[ConnectorOptions]]
    engines: Mapping[str, type[EngineOptions]]


class Section(BaseModel):
    """A mapping of the file; it refuses unknown keys, numbers in quotes and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


Options = TypeVar("Options", EngineOptions, ConnectorOptions)


def custom(text: str) -> PydanticCustomError:
    """Return a validator's error with kvbench's own text."""
    # The text goes in as data: braces in what the user wrote are not placeholders.
    return PydanticCustomError("kvbench", "{text}", {"text": text})


def error_at(location: Location, text: str) -> ValidationError:
    """Return an error at a place below the validated one; pydantic merges it with the others."""
    detail = InitErrorDetails(type=custom(text), loc=location, input=None)
    return ValidationError.from_exception_data("scenario", [detail])


def typed(info: ValidationInfo, key: str, raw: Any, kind: str, none: Options) -> Any:
    """Return options checked by the model of the connector or engine that ``key`` names. JSON mode turns
    lists into tuples."""
    if not info.context:
        return raw
    name, known = info.data.get(key), getattr(info.context, kind)
    if isinstance(raw, type(none)) and raw != none:
        return raw
    if not isinstance(name, str) or name not in known:
        return none  # the check of the name refuses it
    data = {} if raw is None or raw == none else raw
    return known[name].model_validate_json(json.dumps(data), strict=True)


def known_name(kind: str, name: str, known: Mapping[str, Any]) -> str:
    if name not in known:
        raise custom(f"no {kind} is called {quoted(name)}; {nearest(name, known)}")
    return name


def as_tuple(raw: Any) -> Any:
    """Return a YAML list as a tuple."""
    return tuple(raw) if isinstance(raw, list) else raw


Item = TypeVar("Item")
Several = Annotated[tuple[Item, ...], BeforeValidator(as_tuple)]
"""A list of the file, kept as a tuple."""


def whole_number(raw: Any) -> Any:
    """Refuse `true` and 1.0, which a literal 1 would accept."""
    if type(raw) is not int:
        raise custom(f"must be a whole number, not {shorten(raw)}")
    return raw
