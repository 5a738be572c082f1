"""The SLO: limits for each request, for a percentile or for a mean, optionally in tiers.

Forms
-----
- **Joint attainment** (the default): ``ttft_ms``, ``tpot_ms`` and every limit on ``each`` request together;
  the share of requests within all of them must reach ``attainment``.
- **A percentile**: ``ttft_ms p90 <= 5000`` requires that 90 % of all requests stay within 5000 ms. An
  unanswered request counts as one beyond the limit.
- **A mean**: ``tpot_ms mean <= 50``, of the answered requests that have one. Dropped requests would lower it,
  so an SLO of means alone also requires that the share ``attainment`` is answered.

Every limit must hold. A failed, late or wrong-length request misses all but the means. The SLO determines
the client's timeout (``default_timeout_s``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

METRICS: Final = ("ttft_ms", "tpot_ms", "e2el_ms")
SESSION_METRICS: Final = ("first_ttft_ms", "later_ttft_ms", "session_ms")
"""Metrics of session loads: TTFT of a conversation's first turn, TTFT of later turns, and the time of a whole
session from its planned start to its last answer. A metric ignores requests that it does not concern."""
NO_VALUE: Final = math.nan
"""Observation of a request without a value: it failed, or its TPOT is undefined."""

_NAMES: Final = {
    "first_ttft_ms": "TTFT of first turns",
    "later_ttft_ms": "TTFT of later turns",
    "session_ms": "session time",
}
CriterionKind = Literal["share", "mean"]
_SHORT: Final = re.compile(
    r"\s*(?P<metric>[a-z0-9]+(?:_[a-z0-9]+)*)(?:\s+(?P<statistic>[a-z]+[0-9.]*))?\s*(?:<=|≤|<)\s*"
    r"(?P<limit>[0-9.]+(?:e[0-9]+)?)\s*(?:ms)?\s*",
    re.IGNORECASE,
)
_SHORT_FORM: Final = "such as `ttft_ms p90 <= 5000`: metric, statistic (each, mean, p50 … p99.9), limit in ms"


@dataclass(frozen=True)
class Limit:
    """``metric`` in milliseconds, its ``statistic`` ("each", "mean", "p90") and the ``limit`` it must keep.
    Raises ValueError for values that make no limit."""

    metric: str
    statistic: str
    limit: float

    def __post_init__(self) -> None:
        known = (*METRICS, *SESSION_METRICS)
        if self.metric not in known:
            raise ValueError(f"unknown metric {self.metric!r}; known: {', '.join(known)}")
        if self.metric == "session_ms" and self.statistic == "each":
            raise ValueError("session_ms applies to sessions, not requests: use a percentile or the mean")
        if self.statistic not in ("each", "mean") and self.share is None:
            raise ValueError(f"statistic must be each, mean, or p50 to p99.9, not {self.statistic!r}")
        if not 0 < self.limit < math.inf:
            raise ValueError(f"{self.metric} must be above 0, not {self.limit}")

    @cached_property
    def share(self) -> float | None:
        """Return the share of a percentile: 0.9 for p90; else None."""
        match = re.fullmatch(r"p(\d{1,2}(?:\.\d{1,4})?)", self.statistic)
        share = float(match[1]) / 100 if match else 0.0
        return share if 0 < share < 1 else None

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Parse ``ttft_ms p90 <= 5000``; the default statistic is each. Raises ValueError."""
        match = _SHORT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a limit; expected {_SHORT_FORM}")
        metric, statistic = match["metric"].lower(), (match["statistic"] or "each").lower()
        metric = metric if metric.endswith("_ms") else f"{metric}_ms"
        statistic = {"median": "p50", "avg": "mean", "average": "mean"}.get(statistic, statistic)
        try:
            return cls(metric, statistic, float(match["limit"]))
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None

    @classmethod
    def from_json(cls, data: Any) -> Limit:
        """Parse a mapping or the short form. Raises ValueError."""
        if isinstance(data, str):
            return cls.parse(data)
        if not isinstance(data, Mapping):
            raise ValueError(f"{data!r} is not a limit; expected {_SHORT_FORM}")
        try:
            return cls(str(data["metric"]), str(data.get("statistic", "each")), float(data["limit"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{data!r} is not a limit: {error}") from None

    def short(self) -> str:
        return f"{self.metric} {self.statistic} <= {self.limit:.12g}"

    def text(self) -> str:
        """Return ``TTFT P90 ≤ 5000 ms``."""
        name = _NAMES.get(self.metric) or self.metric.removesuffix("_ms").upper()
        middle = {"each": " ", "mean": " mean "}.get(self.statistic, f" {self.statistic.upper()} ")
        return f"{name}{middle}≤ {self.limit:g} ms"

    def kept(self, value_ms: float | None) -> bool:
        """Return whether one request keeps it; undefined TPOT (one token) does."""
        return self.metric == "tpot_ms" if value_ms is None else value_ms <= self.limit


@dataclass(frozen=True)
class Criterion:
    """One thing that must hold: a share of 0/1 observations ≥ ``target``, or a mean ≤ ``target``."""

    kind: CriterionKind
    target: float
    limits: tuple[Limit, ...] = ()
    """A share's conditions per request besides being answered; a mean's single limit."""

    def observe(self, values: Mapping[str, float | None], ok: bool) -> float:
        """Return a request's observation: 0.0 or 1.0, or its value in ms; NO_VALUE if it has none."""
        if self.kind == "mean":
            value = values.get(self.limits[0].metric) if ok else None
            return NO_VALUE if value is None else value
        concerned = [limit for limit in self.limits if limit.metric in values]
        if self.limits and not concerned:
            return NO_VALUE
        return float(ok and all(limit.kept(values[limit.metric]) for limit in concerned))

    def margin(self, values: Mapping[str, float | None], ok: bool) -> float:
        """Return the largest value / limit, at most 1 if the SLO is met; inf for a failed request."""
        if self.kind == "mean":
            return self.observe(values, ok) / self.target
        concerned = [limit for limit in self.limits if limit.metric in values]
        if self.limits and not concerned:
            return NO_VALUE
        if not ok or not all(limit.kept(None) for limit in concerned if values[limit.metric] is None):
            return math.inf
        known = [(values[limit.metric], limit.limit) for limit in concerned]
        return max((value / limit for value, limit in known if value is not None), default=0.0)

    def text(self) -> str:
        """Return ``TTFT ≤ 250 ms and TPOT ≤ 15 ms for 95 % of requests``."""
        if len(self.limits) == 1 and self.limits[0].statistic != "each":
            return self.limits[0].text()
        share = f"{self.target * 100:g} % of requests"
        if not self.limits:
            return f"{share} answered"
        return " and ".join(limit.text() for limit in self.limits) + f" for {share}"


@dataclass(frozen=True)
class Slo:
    """Limits that a trial must keep; see the module's docstring for what they mean. ``ttft_ms`` counts from
    the scheduled send. None is no limit. Raises ValueError for impossible values."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float = 0.95
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        for name, limit in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} must be above 0, not {limit}")
        if not 0.0 < self.attainment <= 1.0:
            raise ValueError(f"attainment must be above 0 and at most 1, not {self.attainment}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Slo:
        """Parse plain data of a scenario or plan, of any version. Raises ValueError."""
        ttft_ms, tpot_ms, attainment = (data.get(key) for key in ("ttft_ms", "tpot_ms", "attainment"))
        return cls(
            None if ttft_ms is None else float(ttft_ms),
            None if tpot_ms is None else float(tpot_ms),
            0.95 if attainment is None else float(attainment),
            tuple(Limit.from_json(limit) for limit in data.get("limits") or ()),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "attainment": self.attainment,
            "limits": [limit.short() for limit in self.limits],
        }

    @cached_property
    def each(self) -> tuple[Limit, ...]:
        latencies = (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms))
        joint = [Limit(metric, "each", limit) for metric, limit in latencies if limit is not None]
        return (*joint, *(limit for limit in self.limits if limit.statistic == "each"))

    @property
    def _every_limit(self) -> tuple[Limit, ...]:
        return (*self.each, *(limit for limit in self.limits if limit.statistic != "each"))

    @property
    def joint(self) -> bool:
        """Return whether single requests can meet the SLO: it has limits on each, or none at all."""
        return bool(self.each) or not self.limits

    @property
    def has_limits(self) -> bool:
        return bool(self.each or self.limits)

    def all_criteria(self) -> tuple[Criterion, ...]:
        """All criteria, the joint share first. Never empty: without limits, requests must be answered."""
        return self._criteria

    @cached_property
    def _criteria(self) -> tuple[Criterion, ...]:
        joint = self.each
        others = [limit for limit in self.limits if limit.statistic != "each"]
        shares = [Criterion("share", share, (limit,)) for limit in others if (share := limit.share)]
        means = [Criterion("mean", limit.limit, (limit,)) for limit in others if limit.statistic == "mean"]
        if joint or not shares:
            shares.insert(0, Criterion("share", self.attainment, joint))
        return (*shares, *means)

    @property
    def shares(self) -> tuple[float, ...]:
        """Required shares of requests: the attainment, or 0.99 for a P99. Never empty."""
        return tuple(criterion.target for criterion in self.all_criteria() if criterion.kind == "share")

    def criteria(self) -> tuple[tuple[CriterionKind, float], ...]:
        """(kind, target) of each criterion, in the order of ``observe``."""
        return tuple((criterion.kind, criterion.target) for criterion in self.all_criteria())

    def observe(self, values: Mapping[str, float | None], ok: bool) -> tuple[float, ...]:
        """Return a request's observation for each criterion, or NaN. ``values``: ms by metric."""
        return tuple([criterion.observe(values, ok) for criterion in self._criteria])

    def margins(self, values: Mapping[str, float | None], ok: bool) -> tuple[float, ...]:
        """Return value / limit per criterion; inf for a failed request."""
        return tuple([criterion.margin(values, ok) for criterion in self._criteria])

    def tightest(self, metric: str) -> float | None:
        """Return the lowest limit on a metric, of any statistic and turn."""
        named = (metric, *(name for name in SESSION_METRICS if name.endswith(f"_{metric}")))
        limits = [limit.limit for limit in (*self.each, *self.limits) if limit.metric in named]
        return min(limits, default=None)

    def loosened(self, ttft_ms: float, tpot_ms: float) -> Slo:
        """Return the SLO with looser limits: milliseconds added to the first token, and per further token."""
        added = {"tpot_ms": tpot_ms, **dict.fromkeys(("ttft_ms", "e2el_ms", *SESSION_METRICS), ttft_ms)}
        return replace(
            self,
            ttft_ms=None if self.ttft_ms is None else self.ttft_ms + ttft_ms,
            tpot_ms=None if self.tpot_ms is None else self.tpot_ms + tpot_ms,
            limits=tuple(replace(limit, limit=limit.limit + added[limit.metric]) for limit in self.limits),
        )

    def e2el_ms(self, output_len: int) -> float:
        """End-to-end latency of a request that just keeps its limits; a limit not given counts as nothing."""
        gaps = max(0, output_len - 1)
        parts = (self.tightest("ttft_ms") or 0.0) + (self.tightest("tpot_ms") or 0.0) * gaps
        whole = self.tightest("e2el_ms")
        return parts if whole is None else min(parts or whole, whole)

    def longest_ms(self, output_len: int) -> float:
        """End-to-end latency up to which a request may keep a limit; a limit not given counts as nothing. Of
        limits on the same metric the loosest counts, of those on each request what they allow together."""
        limits = self._every_limit
        loosest = {
            metric: max((x.limit for x in limits if x.metric == metric), default=0.0) for metric in METRICS
        }
        turns = [x.limit for x in limits if x.metric.endswith("_ttft_ms")]
        parts = max(loosest["ttft_ms"], *turns, 0.0) + loosest["tpot_ms"] * max(0, output_len - 1)
        whole = loosest["e2el_ms"]
        joint = all(limit.statistic == "each" for limit in limits)
        return min(parts, whole) if joint and parts and whole else max(parts, whole)

    def timeout_ms(self, output_len: int) -> float:
        """Return the default deadline of a request: ``longest_ms`` with each limit multiplied. If latencies
        are exponential and just meet the limit, at most the share ``RARE`` takes longer: they exceed n times
        their mean with probability exp(-n), and n times the limit of a share p with (1 - p)^n."""
        beyond = {"each": 1 - self.attainment, "mean": math.exp(-1)}
        patient = []
        for limit in self._every_limit:
            share = 1 - limit.share if limit.share else beyond[limit.statistic]
            times = math.log(RARE) / math.log(share) if share else TIMES
            patient.append(replace(limit, limit=limit.limit * max(TIMES, times)))
        return Slo(limits=tuple(patient)).longest_ms(output_len)

    def text(self) -> str:
        """Return the text without the criterion that only requires answers."""
        texts = [criterion.text() for criterion in self.all_criteria() if criterion.limits]
        return "; ".join(texts) or "no SLO"


def latencies_ms(
    ttft_s: float | None,
    tpot_s: float | None,
    e2el_s: float | None,
    ok: bool = True,
    turn: int | None = None,
    session_s: float | None = None,
) -> dict[str, float | None]:
    """Return a request's values by metric in ms. A failed turn fails its session."""
    values = {"ttft_ms": ttft_s, "tpot_ms": tpot_s, "e2el_ms": e2el_s}
    if turn is not None:
        values["later_ttft_ms" if turn else "first_ttft_ms"] = ttft_s
        if session_s is not None or not ok:
            values["session_ms"] = session_s
    return {name: None if time is None else time * 1e3 for name, time in values.items()}


def misses_allowed(n: int, share: float) -> int:
    """Return the largest number of misses among ``n`` that keeps the share."""
    # The small term prevents 0.95 × 100 = 95.00000000000001 from requiring 96.
    return n - math.ceil(share * n - 1e-9)


def burst_slo(slo: Slo) -> Slo:
    """Return the limits of the burst method: means of TTFT and TPOT in every case."""
    metrics = ((metric, slo.tightest(metric)) for metric in METRICS)
    means = tuple(Limit(metric, "mean", limit) for metric, limit in metrics if limit is not None)
    # A bisection by hand uses only the means of answered requests.
    return Slo(attainment=1e-9, limits=means)


def by_strictness(tiers: Mapping[str, Slo]) -> list[str]:
    """The tiers' names, the strictest first: where the search begins, as its rate is the lowest. Tiers may
    have no clear order (one may have the tighter TTFT, another the tighter TPOT). This order (sum of the
    limits' logarithms, a missing limit counting as a very wide one) only saves trials."""

    def width(name: str) -> tuple[float, float]:
        slo = tiers[name]
        limits = [slo.tightest(metric) for metric in ("ttft_ms", "tpot_ms")]
        return sum(math.log(limit or 1e7) for limit in limits), -slo.attainment

    return sorted(tiers, key=width)


def tiers_text(tiers: Mapping[str, Slo]) -> str:
    """Return each tier's name with its limits."""
    return " · ".join(f"{name}: {slo.text()}" for name, slo in tiers.items())


def same_metric_twice(limits: Sequence[Limit]) -> Iterable[int]:
    """Yield the indices of limits that repeat an earlier metric and statistic."""
    seen: set[tuple[str, str]] = set()
    for index, limit in enumerate(limits):
        if (limit.metric, limit.statistic) in seen:
            yield index
        seen.add((limit.metric, limit.statistic))


LEAST_S: Final = 60.0
"""Shortest deadline in seconds."""
LONGEST_TIMEOUT_S: Final = 86_400.0
TIMES: Final = 3.0
"""Least multiple of a limit for a deadline, since percentiles permit slower requests."""
RARE: Final = 1e-6
"""Largest share of exponential latencies that the default deadline cuts off."""


def allowed_s(slos: Iterable[Slo], output_len: int) -> float:
    """Return how long a request of ``output_len`` tokens may take within a limit; 0 without one."""
    return min(max((slo.longest_ms(output_len) / 1e3 for slo in slos), default=0.0), LONGEST_TIMEOUT_S)


def default_timeout_s(slos: Iterable[Slo], output_len: int) -> float:
    """Return the deadline of a request of ``output_len`` tokens in seconds."""
    longest_s = max((slo.timeout_ms(output_len) / 1e3 for slo in slos), default=0.0)
    return min(max(LEAST_S, longest_s), LONGEST_TIMEOUT_S)


def timeout_problem(data: Mapping[str, Any]) -> str:
    """Return the problem of a timeout in plain data, which may be incomplete or wrong; "" without one."""
    workload, slo = data.get("workload"), data.get("slo")
    if not isinstance(workload, Mapping) or not isinstance(slo, Mapping):
        return ""
    trace, timeout_s = workload.get("trace"), workload.get("request_timeout_s")
    lengths = [
        workload.get("output_len"),
        trace.get("longest_output") if isinstance(trace, Mapping) else None,
    ]
    output_len = max((length for length in lengths if isinstance(length, int)), default=1)
    if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
        return ""
    try:
        allowed = allowed_s(_slos(slo), output_len)
    except (TypeError, ValueError):
        return ""  # a mistake of its own
    if timeout_s >= allowed:
        return ""
    return (
        f"workload.request_timeout_s ({timeout_s:g}) is less than the {allowed:.6g} s that the SLO allows a "
        "request, so answers within the SLO would be cut off; omit it, or set at least that value"
    )


def _slos(slo: Mapping[str, Any]) -> list[Slo]:
    tiers = slo.get("tiers") or {"": slo}
    listed = [{**tier, "limits": _listed(tier.get("limits"))} for tier in tiers.values()]
    return [Slo.from_json(tier) for tier in listed]


def _listed(limits: Any) -> Any:
    return [limits] if isinstance(limits, (str, Mapping)) else limits
