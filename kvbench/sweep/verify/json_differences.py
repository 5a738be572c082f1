"""Where two documents differ by more than arithmetic does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

SAME: Final = 1e-6
"""Gaps between tokens are stored as 32-bit floats, and machines round sums otherwise."""
ABSENT: Final = "nothing"


def json_differences(
    stored: Any, recomputed: Any, path: str = "", precision: float = SAME
) -> Iterator[tuple[str, str, str]]:
    """(path such as ``ttft_ms.p99``, stored, recomputed) of each leaf that differs.

    ``precision``: the relative difference up to which numbers are equal. What one of them lacks stands as
    "nothing".
    """
    if isinstance(stored, dict) and isinstance(recomputed, dict):
        for key in dict.fromkeys((*stored, *recomputed)):
            inside = f"{path}.{key}" if path else str(key)
            if key in stored and key in recomputed:
                yield from json_differences(stored[key], recomputed[key], inside, precision)
            elif key in stored:
                yield inside, _shown(stored[key]), ABSENT
            else:
                yield inside, ABSENT, _shown(recomputed[key])
    elif isinstance(stored, list) and isinstance(recomputed, list) and len(stored) == len(recomputed):
        for place, (then, now) in enumerate(zip(stored, recomputed, strict=True)):
            yield from json_differences(then, now, f"{path}[{place}]", precision)
    elif _is_number(stored) and _is_number(recomputed):
        if not math.isclose(stored, recomputed, rel_tol=precision, abs_tol=1e-9):
            yield path, _shown(stored), _shown(recomputed)
    elif stored != recomputed or type(stored) is not type(recomputed):
        yield path, _shown(stored), _shown(recomputed)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def as_read(value: Any) -> Any:
    """A value as it is once it was written to a file and read."""
    return json.loads(json.dumps(value, default=str))
