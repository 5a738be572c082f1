"""Profile files: coefficients of a timing profile with errors and sources.

YAML, checked like a scenario: every mistake with its line. Coefficients are milliseconds (see COEFFICIENTS).
``kvbench calibrate`` writes these files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from kvbench.core.scenario.base import NAME_PATTERN, Section, custom, whole_number
from kvbench.core.scenario.checks import explain, keys_below, nearest
from kvbench.core.scenario.yaml_lines import Location, Mistake, Where, plain, quoted, read_yaml
from kvbench.core.simulation.step_time import TimingProfile
from kvbench.errors import InputError

COEFFICIENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "front_end_ms": "HTTP and tokenising before the engine sees a request; outside the steps",
        "front_end_token_ms": "front end time per prompt token",
        "prefill_step_ms": "base time of a step with prompt tokens",
        "prefill_request_ms": "per prompt, in the step of its first chunk",
        "prefill_token_ms": "per prompt token",
        "prefill_attention_ms": "times n², for a prompt of n tokens",
        "decode_step_ms": "base time of a step with decodes",
        "decode_seq_ms": "per sequence in the decode batch",
        "decode_context_ms": "per context token that a decode reads",
        "transfer_ms": "fixed time of one request's KV transfer",
        "transfer_token_ms": "KV transfer time per prompt token",
    }
)
NEEDED: Final = ("prefill_token_ms", "decode_step_ms")
"""Coefficients required for any prediction."""
_AGREES: Final = 0.02
"""Relative rounding allowed between an error and its variance in the covariance."""
_VERSION: Final = 1


class Coefficient(Section):
    """A value with its standard error, or with a ``source`` if it was not fitted."""

    value: float = Field(ge=0, le=1e6)
    error: float | None = Field(None, ge=0, le=1e9)
    source: str = Field("", max_length=500)

    @model_validator(mode="after")
    def _with_source(self) -> Coefficient:
        if self.error is None and not self.source:
            raise custom("a value without an `error` needs a `source`")
        return self


class Covariance(Section):
    """Covariance of the fitted coefficients, in their squared units: ``rows`` [n, n] in ``order``."""

    order: list[str] = Field(min_length=1, max_length=len(COEFFICIENTS))
    rows: list[list[float]] = Field(min_length=1, max_length=len(COEFFICIENTS))


class FittedTo(Section):
    requests: int = Field(ge=1)
    inputs: list[str] = Field(min_length=1, max_length=64, description="runs or files")
    input_len: list[int] = Field(min_length=2, max_length=2, description="shortest and longest prompt")
    output_len: list[int] = Field(min_length=2, max_length=2)


class Checked(Section):
    """A held-out figure: predicted / measured, and its allowed deviation from 1."""

    ratio: float = Field(ge=0, le=1e9)
    stated: float = Field(gt=0, le=10)

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1.0) <= self.stated


class HeldOut(Section):
    """Held-out requests and their prediction."""

    by: str = Field(min_length=1, max_length=200, description="how the held-out requests were chosen")
    requests: int = Field(ge=1)
    figures: dict[str, Checked] = Field(min_length=1, max_length=32)


class ProfileFile(Section):
    version: int
    name: str = Field(pattern=NAME_PATTERN)
    source: str = Field(min_length=1, max_length=2000)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    engine: str = Field(min_length=1, max_length=200, description="the measured engine, with its version")
    machine: str = Field(min_length=1, max_length=500)
    scenario_sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    tensor_parallel_size: int | None = Field(None, ge=1, description="the measured size")
    num_kv_tokens: int | None = Field(None, ge=1, description="KV memory of one instance, in tokens")
    status: Literal["fit", "unfit", "unchecked"] = Field(description="held-out prediction")
    cannot_explain: list[str] = Field(default_factory=list, max_length=64)
    fitted_to: FittedTo | None = None
    held_out: HeldOut | None = Field(None, validate_default=True)
    coefficients: dict[str, Coefficient]
    covariance: Covariance | None = Field(None, validate_default=True)

    @field_validator("version", mode="before")
    @classmethod
    def _known_version(cls, raw: Any) -> Any:
        if whole_number(raw) != _VERSION:
            raise custom(f"this kvbench reads version {_VERSION}, not {raw}")
        return raw

    @field_validator("held_out")
    @classmethod
    def _agrees(cls, held: HeldOut | None, info: ValidationInfo) -> HeldOut | None:
        _raise(_unsound_check(held, info.data.get("status"), info.data.get("cannot_explain")))
        return held

    @field_validator("coefficients")
    @classmethod
    def _known(cls, raw: dict[str, Coefficient]) -> dict[str, Coefficient]:
        _raise(_unsound_names(raw))
        return raw

    @field_validator("covariance")
    @classmethod
    def _covers(cls, covariance: Covariance | None, info: ValidationInfo) -> Covariance | None:
        if (known := info.data.get("coefficients")) is not None:
            _raise(_unsound_covariance(known, covariance))
        return covariance

    def value(self, name: str) -> float:
        """Return a coefficient in milliseconds; 0 if absent."""
        return self.coefficients[name].value if name in self.coefficients else 0.0

    @property
    def margin(self) -> float:
        """Return the larger of the stated and the observed error of predictions; 0 without both."""
        figures = self.held_out.figures.values() if self.held_out else ()
        return max((max(figure.stated, abs(figure.ratio - 1.0)) for figure in figures), default=0.0)

    def reach(self) -> dict[str, Any]:
        """Return what a run folder stores to mark predictions: status, lengths, margin."""
        fitted = self.fitted_to
        return {
            "name": self.name,
            "status": self.status,
            "margin": self.margin,
            "input_len": fitted.input_len if fitted else None,
            "output_len": fitted.output_len if fitted else None,
        }

    @property
    def moves_kv(self) -> bool:
        return "transfer_token_ms" in self.coefficients

    def timing(self, tensor_parallel_size: int = 1) -> TimingProfile:
        """Return the step times. Raises InputError for another tensor parallel size."""
        if self.tensor_parallel_size not in (None, tensor_parallel_size):
            raise InputError(
                f"timing {self.name} has no tensor_parallel_size {tensor_parallel_size}",
                hint=f"it was measured with {self.tensor_parallel_size}; calibrate again for another size",
            )
        return timing_of_values(
            {name: coefficient.value for name, coefficient in self.coefficients.items()}, self
        )


@dataclass(frozen=True)
class LinearContext:
    """Decode attention proportional to the batch's context tokens."""

    token_ms: float

    def __call__(self, seqs: int, mean_context: float) -> float:
        return self.token_ms * seqs * mean_context


def timing_of_values(values: Mapping[str, float], about: ProfileFile | None = None) -> TimingProfile:
    """Return step times from coefficients by name; missing ones are 0."""
    return TimingProfile(
        name=about.name if about else "fitted",
        source=about.source if about else "",
        overhead_ms=values.get("front_end_ms", 0.0),
        overhead_token_ms=values.get("front_end_token_ms", 0.0),
        prefill_base_ms=values.get("prefill_step_ms", 0.0),
        prefill_seq_ms=values.get("prefill_request_ms", 0.0),
        prefill_token_ms=values.get("prefill_token_ms", 0.0),
        prefill_attention_ms=values.get("prefill_attention_ms", 0.0),
        decode_base_ms=values.get("decode_step_ms", 0.0),
        decode_seq_ms=values.get("decode_seq_ms", 0.0),
        decode_context_ms=LinearContext(values.get("decode_context_ms", 0.0)),
    )


# -- what makes sense --------------------------------------------------------------------------------


def _raise(found: Iterator[tuple[Location, str]]) -> None:
    if details := [InitErrorDetails(type=custom(text), loc=at, input=None) for at, text in found]:
        raise ValidationError.from_exception_data("profile", details)


def _unsound_names(known: Mapping[str, Coefficient]) -> Iterator[tuple[Location, str]]:
    for name in known:
        if name not in COEFFICIENTS:
            yield (name,), f"is not a coefficient; {nearest(name, COEFFICIENTS)}"
    for name in NEEDED:
        if name not in known:
            yield (), f"needs {quoted(name)}: {COEFFICIENTS[name]}"


def _unsound_check(
    held: HeldOut | None, status: str | None, cannot_explain: list[str] | None
) -> Iterator[tuple[Location, str]]:
    if held is None and status in ("fit", "unfit"):
        yield (), f"status {status} needs held_out, which is missing"
    if held is not None and status == "fit":
        missed = sorted(name for name, figure in held.figures.items() if not figure.holds)
        if missed:
            yield ("figures",), f"status is fit, and {', '.join(missed)} is outside the stated margin"
    if status == "unfit" and cannot_explain == []:
        yield (), "status is unfit, but `cannot_explain` is empty"


def _unsound_covariance(
    known: Mapping[str, Coefficient], covariance: Covariance | None
) -> Iterator[tuple[Location, str]]:
    fitted = [name for name, coefficient in known.items() if coefficient.error is not None]
    if covariance is None:
        if fitted:
            yield ((), f"is missing: {fitted[0]} has an error, so the fit's covariance is required")
        return
    order, rows = covariance.order, covariance.rows
    if sorted(order) != sorted(fitted):
        names = ", ".join(fitted) or "none"
        yield ("order",), f"must name each coefficient that has an error once: {names}"
        return
    if len(rows) != len(order) or any(len(row) != len(order) for row in rows):
        yield ("rows",), f"must be {len(order)} rows of {len(order)} numbers"
        return
    matrix = np.array(rows)
    for index, name in enumerate(order):
        error = known[name].error or 0.0
        if abs(matrix[index, index] - error**2) > 2 * _AGREES * error**2 + 1e-300:
            text = (
                f"the variance of {name} is {matrix[index, index]:g}, which differs from its error "
                f"{error:g} squared"
            )
            yield ("rows", index), text
    size = float(np.abs(matrix).max())
    if not np.allclose(matrix, matrix.T, rtol=1e-6, atol=1e-12 * size):
        yield ("rows",), "is not symmetric"
    elif np.linalg.eigvalsh(_correlations(matrix)).min() < -1e-5:
        yield ("rows",), "is not a covariance matrix: it has a negative eigenvalue"


def _correlations(matrix: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    scale = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
    result: np.ndarray[Any, np.dtype[np.float64]] = matrix / np.outer(scale, scale)
    return result


# -- reading and writing -----------------------------------------------------------------------------


def parse_profile(text: str, path: str) -> ProfileFile:
    """Parse and check a profile. Raises InputError with every mistake as ``path:line: what``."""
    root, mistakes = read_yaml(text)
    if root is None or not isinstance(root.value, dict):
        if root is not None:
            mistakes = [Mistake(root.where, (), "must be a mapping of `key: value` lines")]
        raise _error(mistakes, path)
    profile = None
    try:
        profile = ProfileFile.model_validate(plain(root))
    except ValidationError as error:
        keys = keys_below(ProfileFile, plain(root)) | {"coefficients": list(COEFFICIENTS)}
        mistakes += explain(error, root, keys, mistakes, "the profile")
    if profile is None or mistakes:
        raise _error(mistakes, path)
    return profile


def _error(mistakes: list[Mistake], path: str) -> InputError:
    ordered = sorted(mistakes, key=lambda mistake: mistake.where.line)
    lines = list(dict.fromkeys(f"{mistake.where.show(path)}: {mistake.text}" for mistake in ordered))
    return InputError(
        "\n".join(lines or [f"{Where().show(path)}: the file is empty"]),
        hint="`kvbench calibrate` writes these files; docs/calibrate.md describes the format",
    )


def profile_text(profile: ProfileFile) -> str:
    data = profile.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    text = yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True, default_flow_style=None)
    for name, meaning in COEFFICIENTS.items():
        text = re.sub(rf"(?m)^(  {name}: .*)$", rf"  # {meaning}\n\1", text, count=1)
    return text
