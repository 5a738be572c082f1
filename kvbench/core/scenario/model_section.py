"""The model section of a scenario file: a preset's name, a preset with changes, or a full shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvbench.core.physics.model_shapes import MODELS, KvDtype, ModelShape
from kvbench.core.scenario.base import (
    NAME_PATTERN,
    Section,
    custom,
    error_at,
)
from kvbench.core.scenario.checks import nearest
from kvbench.core.scenario.yaml_lines import quoted


class ModelChoice(Section):
    """The model: a preset's name, a preset with changes, or a full shape."""

    name: str = Field(pattern=NAME_PATTERN, description="the model's name in tables")
    layers: int = Field(
        0, ge=0, le=1000, description="transformer layers; 0 if unknown, which an external server allows"
    )
    kv_heads: int = Field(0, ge=0, le=1024, description="KV heads (GQA); 0 with MLA")
    head_dim: int = Field(0, ge=0, le=4096, description="width of one KV head; 0 with MLA")
    kv_dtype: KvDtype = Field("bf16", description="element type of the KV cache")
    mla_dim: int = Field(0, ge=0, le=65536, description="latent width per layer (MLA); 0 with GQA")
    vocab_size: int = Field(32_000, ge=256, le=10_000_000, description="prompts are drawn from these ids")
    active_parameters: float | None = Field(
        None,
        gt=0,
        le=1e14,
        description="parameters that a prompt token meets, without embeddings; known for presets",
    )
    served_model_name: str = Field(
        "",
        validate_default=True,
        max_length=200,
        description="the name that requests carry; by default the model's name",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            raw = {"preset": raw}
        if not isinstance(raw, Mapping) or "preset" not in raw:
            return raw
        preset = raw["preset"]
        if not isinstance(preset, str) or preset not in MODELS:
            shown = preset if isinstance(preset, str) else json.dumps(preset)
            text = f"no model preset is called {quoted(shown)}; {nearest(str(preset), MODELS)}"
            raise error_at(("preset",), text)
        shape = {key: value for key, value in asdict(MODELS[preset]).items() if key != "source"}
        return shape | {key: value for key, value in raw.items() if key != "preset"}

    @model_validator(mode="after")
    def _has_width(self) -> ModelChoice:
        if self.layers and not self.mla_dim and not (self.kv_heads and self.head_dim):
            raise custom("needs kv_heads and head_dim (GQA), or mla_dim (MLA)")
        return self

    @field_validator("served_model_name")
    @classmethod
    def _served_or_own_name(cls, served: str, info: ValidationInfo) -> str:
        return served or str(info.data.get("name", "unnamed"))

    @property
    def shape(self) -> ModelShape:
        """What the KV cache and the compute model need to know."""
        fields = self.model_dump(exclude={"served_model_name", "active_parameters"})
        preset = MODELS.get(self.name)
        return ModelShape(**fields, source=preset.source if preset else "")
