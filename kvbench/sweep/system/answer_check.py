"""What a simulator answers to a trial, checked: nonsense is told by its place, and never measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast, get_args

from kvbench.core.records import RequestError

ERRORS: Final = frozenset(get_args(RequestError)) - {"cancelled"}
"""What a request may end as; who cancels is kvbench alone."""
SLACK_S: Final = 1e-6
"""What floats may differ by."""


@dataclass(frozen=True)
class SystemAnswer:
    """Of each request in planned order, seconds since the trial's start; None: never.

    ``events_s``: its tokens' times, empty where they are not told.
    """

    first_token_s: Sequence[float | None]
    last_token_s: Sequence[float | None]
    events_s: Sequence[Sequence[float]]
    errors: Sequence[RequestError]


def read_answer(line: bytes, arrivals_s: Sequence[float]) -> SystemAnswer:
    """Raises ValueError that says what is wrong with it, and of which request (counted from 0)."""
    try:
        data = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("no JSON: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("no UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError("no JSON object")
    unknown = set(data) - {"first_token_s", "last_token_s", "events_s", "error"}
    if unknown:
        raise ValueError(f"keys that mean nothing: {', '.join(sorted(map(repr, unknown)))}")
    count = len(arrivals_s)
    first = [_time(each, "first_token_s", at) for at, each in enumerate(_list(data, "first_token_s", count))]
    last = [_time(each, "last_token_s", at) for at, each in enumerate(_list(data, "last_token_s", count))]
    errors = [_error(each, at) for at, each in enumerate(_list(data, "error", count, needed=False))]
    events = [_events(each, at) for at, each in enumerate(_list(data, "events_s", count, needed=False))]
    for at, arrival_s in enumerate(arrivals_s):
        _require_order(at, arrival_s, first[at], last[at], errors[at])
        if events[at]:
            _require_events(at, events[at], first[at], last[at])
    return SystemAnswer(first, last, events, errors)


def _no_number(name: str) -> float:
    raise ValueError(f"{name}, which is no time")


def _list(data: dict[str, Any], name: str, count: int, *, needed: bool = True) -> list[Any]:
    found = data.get(name)
    if found is None and not needed:
        return [None] * count
    if not isinstance(found, list):
        raise ValueError(f"no list {name}")
    if len(found) != count:
        raise ValueError(f"{len(found)} entries in {name} for {count} requests")
    return found


def _time(value: Any, name: str, at: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}[{at}] is {str(value)[:40]!r}, no time")
    try:
        time_s = float(value)
    except OverflowError:
        time_s = math.inf
    if not math.isfinite(time_s):
        raise ValueError(f"{name}[{at}] is not finite")
    if time_s < 0:
        raise ValueError(f"{name}[{at}] is negative: {time_s:g}")
    return time_s


def _error(value: Any, at: int) -> RequestError:
    if value is None or value == "":
        return ""
    if not isinstance(value, str) or value not in ERRORS:
        known = ", ".join(sorted(ERRORS - {""}))
        raise ValueError(f"error[{at}] is {str(value)[:40]!r}; there are: {known}")
    return cast(RequestError, value)


def _events(value: Any, at: int) -> list[float]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"events_s[{at}] is no list")
    times = [_time(each, f"events_s[{at}]", place) for place, each in enumerate(value)]
    if None in times:
        raise ValueError(f"events_s[{at}] has a null in it")
    return [each for each in times if each is not None]


def _require_order(
    at: int, arrival_s: float, first_s: float | None, last_s: float | None, error: RequestError
) -> None:
    if first_s is not None and first_s < arrival_s - SLACK_S:
        raise ValueError(f"first_token_s[{at}] is {first_s:g}, before its arrival at {arrival_s:g}")
    if last_s is None:
        return
    if first_s is not None and last_s < first_s - SLACK_S:
        raise ValueError(f"last_token_s[{at}] is {last_s:g}, before its first token at {first_s:g}")
    if first_s is None and not error:
        raise ValueError(f"last_token_s[{at}] is {last_s:g}, and it has no first token")
    if last_s < arrival_s - SLACK_S:
        raise ValueError(f"last_token_s[{at}] is {last_s:g}, before its arrival at {arrival_s:g}")


def _require_events(at: int, events_s: Sequence[float], first_s: float | None, last_s: float | None) -> None:
    if any(later < earlier for earlier, later in pairwise(events_s)):
        raise ValueError(f"events_s[{at}] does not ascend")
    if first_s is None or abs(events_s[0] - first_s) > SLACK_S:
        raise ValueError(f"events_s[{at}] does not begin with first_token_s[{at}]")
    if last_s is not None and abs(events_s[-1] - last_s) > SLACK_S:
        raise ValueError(f"events_s[{at}] does not end with last_token_s[{at}]")
