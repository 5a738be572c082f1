"""What is wrong with a load of sessions, by itself and with the rest of a scenario."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.core.slo import SESSION_METRICS


def session_problems(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(where, what) is wrong with sessions, by themselves and with the rest of a scenario's plain data."""
    workload, search = (_mapping(data, each) for each in ("workload", "search"))
    wanted = workload.get("sessions")
    if wanted is None:
        for place, metric in _limited(data):
            yield place, f"a limit on {metric} is for a load of sessions: give workload.sessions, or drop it"
        return
    if not isinstance(wanted, Mapping):
        return
    here, source = ("workload", "sessions"), wanted.get("source", "shape")
    if source in ("recorded", "fitted") and not wanted.get("path"):
        yield (*here, "source"), f"source {source} needs workload.sessions.path, a corpus"
    if source == "shape" and wanted.get("path"):
        yield (*here, "path"), "a corpus is for source recorded or fitted, and the source is shape"
    if source != "shape" and wanted.get("shape") is not None:
        yield (*here, "shape"), f"shape is for source shape, and the source is {source}"
    if workload.get("trace") is not None:
        yield here, "a workload has a trace or sessions, not both"
    if (method := search.get("method", "sustained")) not in ("sustained", "fixed"):
        yield ("search", "method"), f"sessions are for method sustained or fixed, and the method is {method}"
    load = _mapping(data, "load")
    if load.get("endpoint", "completions") != "completions":
        yield ("load", "endpoint"), "sessions are sent as completions of token ids: leave load.endpoint out"
    if load.get("workers", "auto") not in ("auto", 1):
        yield ("load", "workers"), "sessions are sent by one load generator: leave load.workers out"
    if search.get("compare_burst"):
        yield ("search", "compare_burst"), "the burst method offers single requests, not sessions"


def _limited(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    slo = _mapping(data, "slo")
    tiers = _mapping(slo, "tiers")
    places = [(("slo", "limits"), slo), *((("slo", "tiers", name), tiers[name]) for name in tiers)]
    for place, section in places:
        limits = section.get("limits") if isinstance(section, Mapping) else None
        for metric in SESSION_METRICS:
            if any(
                metric in str(each) for each in (limits if isinstance(limits, (list, tuple)) else [limits])
            ):
                yield place, metric


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}
