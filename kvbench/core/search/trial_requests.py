"""The requests of one trial as arrays: what a search replays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
COLUMNS: Final = (
    *("scheduled_s", "first_token_s", "last_token_s"),
    *("output_len", "requested_output_len", "untimed_tokens", "error"),
)
"""Of a trial's request records, what a replay needs."""


@dataclass(frozen=True)
class TrialRequests:
    """The requests of one trial in order of arrival, in seconds since its start; NaN: not seen by ``end_s``.

    ``tokens``: output tokens after the first one. ``rate``: requests per second offered. ``burstiness``: the
    gamma shape of the gaps between arrivals (1 is Poisson). ``failed``: requests that ended in an error.
    """

    rate: float
    end_s: float
    arrived_s: FloatArray
    first_s: FloatArray
    last_s: FloatArray
    tokens: FloatArray
    burstiness: float = 1.0
    failed: int = 0

    def __len__(self) -> int:
        return len(self.arrived_s)

    @classmethod
    def of(
        cls,
        columns: Mapping[str, npt.NDArray[Any]],
        rate: float,
        duration_s: float,
        stopped_s: float,
        burstiness: float,
    ) -> TrialRequests:
        """From ``COLUMNS`` of the trial's records, each an array, NaN for unknown.

        What came after the trial was stopped does not count, nor what was sent after its first failed
        request.
        """
        order = np.argsort(columns["scheduled_s"], kind="stable")
        arrived_s, first_s, last_s, got, asked, untimed = (columns[name][order] for name in COLUMNS[:-1])
        errors = columns["error"][order]
        cancelled = errors == "cancelled"
        failed = (errors != "") & ~cancelled
        end_s = min(duration_s, stopped_s) if cancelled.any() else duration_s
        if failed.any():
            end_s = min(end_s, float(arrived_s[failed][0]))
        kept = (arrived_s < end_s) & ~failed
        first_s = np.where(first_s <= end_s, first_s, math.nan)
        last_s = np.where((last_s <= end_s) & ~cancelled, last_s, math.nan)
        tokens = np.maximum(np.where(np.isnan(last_s), asked - 1, got - untimed), 0.0)
        whole = arrived_s[kept], first_s[kept], last_s[kept], tokens[kept]
        return cls(rate, end_s, *whole, burstiness, int(failed.sum()))
