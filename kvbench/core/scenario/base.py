"""What the sections of a scenario file are made of: their base class, errors in their place, typed options.

The options of connectors and engines are typed by them; their models come in as a ``Registry``, in
pydantic's validation context, since core knows neither. Options that have not been given or not been checked
are instances of the base classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvbench.core.scenario.checks import nearest
from kvbench.core.scenario.options import ConnectorOptions, EngineOptions
from kvbench.core.scenario.yaml_lines import Location, quoted, shorten

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
"""Names and labels become parts of file names."""


@dataclass(frozen=True)
class Registry:
    """The option models of the connectors and engines that a scenario may name."""

    connectors: Mapping[str, type[ConnectorOptions]]
    engines: Mapping[str, type[EngineOptions]]


class Section(BaseModel):
    """A mapping of the file: unknown keys, numbers in quotes and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Options = TypeVar("Options", EngineOptions, ConnectorOptions)


def custom(text: str) -> PydanticCustomError:
    """A validator's error in our own words."""
    # The text goes in as data: braces in what the user wrote are not placeholders.
    return PydanticCustomError("kvbench", "{text}", {"text": text})


def error_at(location: Location, text: str) -> ValidationError:
    """An error that pydantic merges with the others, at a place below the one being validated."""
    detail = InitErrorDetails(type=custom(text), loc=location, input=None)
    return ValidationError.from_exception_data("scenario", [detail])


def typed(name: object, raw: object, known: Mapping[str, type[Options]], none: Options) -> Options:
    """Options checked by the model of their connector or engine. JSON, so that lists become tuples."""
    if isinstance(raw, type(none)) and raw != none:
        return raw
    if not isinstance(name, str) or name not in known:
        return none  # the name itself is refused where it stands
    data = {} if raw is None or raw == none else raw
    return known[name].model_validate_json(json.dumps(data), strict=True)


def known_name(kind: str, name: str, known: Mapping[str, Any]) -> str:
    if name not in known:
        raise custom(f"no {kind} is called {quoted(name)}; {nearest(name, known)}")
    return name


def as_tuple(raw: Any) -> Any:
    """YAML knows lists only; frozen values hold tuples."""
    return tuple(raw) if isinstance(raw, list) else raw


def whole_number(raw: Any) -> Any:
    """A literal compares by value, and so takes `true` and 1.0 for 1."""
    if type(raw) is not int:
        raise custom(f"must be a whole number, not {shorten(raw)}")
    return raw
