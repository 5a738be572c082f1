"""The SLO of a scenario in its forms, and the settings of its search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvbench.core import slo as slos
from kvbench.core.scenario.base import NAME_PATTERN, Section, Several, custom

_LIMIT_SCHEMA: Final = {
    "type": "array",
    "maxItems": 32,
    "items": {
        "anyOf": [
            {"type": "string", "description": "such as `ttft_ms p90 <= 5000`"},
            {
                "type": "object",
                "properties": {
                    "metric": {"enum": [*slos.METRICS, *slos.SESSION_METRICS]},
                    "statistic": {"type": "string", "default": "each"},
                    "limit": {"type": "number", "exclusiveMinimum": 0},
                },
                "required": ["metric", "limit"],
                "additionalProperties": False,
            },
        ]
    },
}


def _short_limits(raw: Any) -> Any:
    """Return each entry in its checked short form, so that equal limits compare equal."""
    if isinstance(raw, (str, Mapping)):
        raw = [raw]
    if not isinstance(raw, (list, tuple)):
        return raw
    found = []
    for entry in raw:
        if isinstance(entry, Mapping) and (unknown := set(entry) - {"metric", "statistic", "limit"}):
            raise custom(f"a limit has metric, statistic and limit, but no `{min(map(str, unknown))}`")
        try:
            found.append(slos.Limit.from_json(entry))
        except ValueError as error:
            raise custom(str(error)) from None
    for place in slos.same_metric_twice(found):
        raise custom(f"`{found[place].short()}` repeats the metric and the statistic of another limit")
    return tuple(limit.short() for limit in found)


Limits = Annotated[tuple[str, ...], BeforeValidator(_short_limits), WithJsonSchema(_LIMIT_SCHEMA)]
TierName = Annotated[str, Field(pattern=NAME_PATTERN)]


class Tier(Section):
    """One of several SLOs that the same trials measure."""

    ttft_ms: float | None = Field(None, gt=0, le=1e7, description="limit of the time to the first token")
    tpot_ms: float | None = Field(None, gt=0, le=1e7, description="limit of the time per further token")
    attainment: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of requests that must meet every limit; by default slo.attainment",
    )
    limits: Limits = Field((), max_length=32, description="further ones: `metric statistic <= milliseconds`")


class Slo(Section):
    """The limits: for each request of a share, for a percentile, for a mean, or in tiers."""

    ttft_ms: float | None = Field(None, gt=0, le=1e7, description="limit of the time to the first token")
    tpot_ms: float | None = Field(None, gt=0, le=1e7, description="limit of the time per further token")
    attainment: float = Field(0.95, gt=0, lt=1, description="share of requests that must meet every limit")
    limits: Limits = Field((), max_length=32, description="further ones: `metric statistic <= milliseconds`")
    tiers: dict[TierName, Tier] = Field(
        default_factory=dict, max_length=8, description="several SLOs by name, answered from the same trials"
    )

    @property
    def given(self) -> bool:
        return bool(self.tiers) or self.whole().has_limits

    def whole(self) -> slos.Slo:
        """The SLO without tiers; it has no limits if none is set."""
        return slos.Slo.from_json(self.model_dump())

    def by_tier(self) -> dict[str, slos.Slo]:
        """Each tier's SLO, the strictest first; without tiers the SLO under the name ""."""
        if not self.tiers:
            return {"": self.whole()}
        tiers = {
            name: slos.Slo.from_json({**tier.model_dump(), "attainment": tier.attainment or self.attainment})
            for name, tier in self.tiers.items()
        }
        return {name: tiers[name] for name in slos.by_strictness(tiers)}

    def main(self) -> slos.Slo:
        """The SLO, or the strictest tier's."""
        return next(iter(self.by_tier().values()))


Method = Literal["sustained", "burst", "fixed", "trace"]
Rate = Annotated[float, Field(gt=0, le=1e6)]


class Search(Section):
    """Settings of the search for the highest rate. Rates are requests per second."""

    method: Method = Field(
        "sustained",
        description="sustained: the highest sustained rate; burst: n = 5 × rate requests and their means, "
        "as done by hand; fixed: the rates of `rates`, without an SLO; trace: replay of workload.trace",
    )
    compare_burst: bool = Field(False, description="also measure by the burst method, in a separate table")
    rates: Several[Rate] = Field(
        (), max_length=64, description="the rates of method fixed, each measured once"
    )
    equal_rate: bool = Field(
        True,
        description="after the search, offer all connectors of an input length the lowest rate measured, "
        "with the same requests",
    )
    start_rate: float | None = Field(None, gt=0, le=1e6, description="first rate; estimated if absent")
    min_rate: float = Field(0.01, gt=0, le=1e6, description="lowest rate that counts as a result")
    max_rate: float = Field(
        10_000.0,
        gt=0,
        le=1e6,
        description="highest rate that is tried; if it is met, the result is a lower bound (censored)",
    )
    precision: float = Field(0.05, ge=0.001, le=1, description="relative width of the result's interval")
    trial_s: float = Field(20.0, gt=0, le=86_400, description="seconds of arrivals in one trial")
    max_trial_s: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="longest trial of a search, in seconds of arrivals (a trial ends once its verdict is "
        "certain); by default derived from its latencies, at least trial_s",
    )
    min_requests: int = Field(60, ge=1, le=10_000_000, description="fewest requests of a trial")
    max_requests: int = Field(20_000, ge=1, le=10_000_000, description="most requests of a trial")
    max_trials: int = Field(16, ge=1, le=1000, description="most trials of one cell")
    budget_s: float | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="seconds of the trials of all searches of a sweep: cells share them equally, and a cell "
        "that ends early leaves its time to later ones",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="confidence of a trial's verdict")
