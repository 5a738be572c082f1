"""How long one request may take: what the SLO allows it, and the client's deadline, which follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvbench.core.slo import Slo

LEAST_S: Final = 60.0
LONGEST_TIMEOUT_S: Final = 86_400.0
TIMES: Final = 3.0
"""The deadline is at least so long, and so many times what the SLO allows: a limit on a percentile or a mean
lets single requests take longer, and what is cut counts as failed."""


def allowed_s(slos: Iterable[Slo], output_len: int) -> float:
    """How long a request of so many output tokens may take and still keep a limit; 0 without one."""
    return min(max((slo.longest_ms(output_len) / 1e3 for slo in slos), default=0.0), LONGEST_TIMEOUT_S)


def default_timeout_s(allowed: float) -> float:
    """The deadline where none is set."""
    return min(max(LEAST_S, TIMES * allowed), LONGEST_TIMEOUT_S)


def timeout_problem(data: Mapping[str, Any]) -> str:
    """What is wrong with a deadline that was set, of plain data that may be incomplete or wrong; else ""."""
    workload, slo = data.get("workload"), data.get("slo")
    if not isinstance(workload, Mapping) or not isinstance(slo, Mapping):
        return ""
    trace, own_s = workload.get("trace"), workload.get("request_timeout_s")
    lengths = [
        workload.get("output_len"),
        trace.get("longest_output") if isinstance(trace, Mapping) else None,
    ]
    output_len = max((each for each in lengths if isinstance(each, int)), default=1)
    if not isinstance(own_s, (int, float)) or isinstance(own_s, bool):
        return ""
    try:
        allowed = allowed_s(_slos(slo), output_len)
    except (TypeError, ValueError):
        return ""  # a mistake of its own
    if own_s >= allowed:
        return ""
    return (
        f"workload.request_timeout_s ({own_s:g}) is less than the {allowed:.6g} s that the SLO allows one "
        "request, so answers that are in time would be cut off; leave it out, or set at least that"
    )


def _slos(slo: Mapping[str, Any]) -> list[Slo]:
    tiers = slo.get("tiers") or {"": slo}
    listed = [{**tier, "limits": _listed(tier.get("limits"))} for tier in tiers.values()]
    return [Slo.from_json(each) for each in listed]


def _listed(limits: Any) -> Any:
    return [limits] if isinstance(limits, (str, Mapping)) else limits
