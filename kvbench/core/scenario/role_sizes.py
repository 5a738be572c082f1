"""How many instances a role has, and how many ranks each: a number, or a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from kvbench.core.scenario.base import Section, custom
from kvbench.core.scenario.yaml_lines import shorten

MOST_RANKS: Final = 64
_RANKS: Final = {"type": "integer", "minimum": 1, "maximum": MOST_RANKS}


def _sizes(raw: Any) -> Any:
    """One tensor parallel size as a list of one."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        if not 1 <= raw <= MOST_RANKS:
            raise custom(f"must be 1 to {MOST_RANKS}, not {raw}")
        return (raw,)
    if not isinstance(raw, (list, tuple)) or len(set(map(str, raw))) < len(raw):
        raise custom("must be a whole number, or a list of different ones")
    return tuple(raw)


TensorParallelSizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MOST_RANKS)], ...],
    BeforeValidator(_sizes),
    PlainSerializer(lambda sizes: sizes[0] if len(sizes) == 1 else list(sizes)),
    WithJsonSchema({"anyOf": [_RANKS, {"type": "array", "items": _RANKS, "minItems": 1, "maxItems": 16}]}),
    Field(min_length=1, max_length=16),
]


class RoleRanks(Section):
    """The ranks of each instance of a role; what is not said is as for all of the deployment."""

    tensor_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="tensor-parallel ranks, if not the deployment's"
    )
    pipeline_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="pipeline-parallel ranks; by default 1"
    )
    data_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="data-parallel ranks behind its one HTTP port; by default 1"
    )
    expert_parallel: bool | None = Field(
        None, description="spread the experts over tensor- and data-parallel ranks"
    )

    @property
    def said(self) -> Mapping[str, int]:
        """The ranks that it names."""
        named = {key: getattr(self, key) for key in RoleRanks.model_fields}
        return {key: value for key, value in named.items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _count_alone(cls, raw: Any) -> Any:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return {"instances": raw}
        if not isinstance(raw, (Mapping, RoleRanks)):
            raise custom(f"must be a whole number, or a mapping with `instances`, not {shorten(raw)}")
        return raw

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> Any:
        said = {key: value for key, value in handler(self).items() if value is not None}
        return said["instances"] if set(said) == {"instances"} else said

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "minimum": 1}, handler(schema)]}


class RoleSize(RoleRanks):
    """How many instances a role has, as a number, or with the ranks of each."""

    instances: int = Field(1, ge=1, le=64, description="how many")


class AggregatedSize(RoleRanks):
    """The same for engines without P/D; without ``instances`` as many as P's and D's GPUs make."""

    instances: int | None = Field(None, ge=1, le=128, description="how many")
