"""Real vLLM runs that LLMServingSim publishes beside its simulations, predicted from their first requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.calibration.fit import Times, fit
from kvbench.core.calibration.held_out import later_part
from kvbench.sweep.calibrate import EngineLimits, read_inputs

F64 = NDArray[np.float64]
STATISTICS: Final = ("TTFT Mean", "TTFT P99", "TPOT Mean", "TPOT P99")
_THEIRS: Final = re.compile(r"^(T[TP][FO]T \w+)\s+[\d.]+\s+[\d.]+\s+([+-][\d.]+)%", re.MULTILINE)


@dataclass(frozen=True)
class Predicted:
    """Of one run: predicted / measured − 1 by statistic. ``theirs``: LLMServingSim's, of the whole run."""

    name: str
    fitted: int
    rest: dict[str, float]
    whole: dict[str, float]
    theirs: dict[str, float]


def predicted(folder: Path, share: float) -> Predicted:
    """Fits to the first ``share`` of the requests; predicts the others, and all of them from their arrivals.

    Raises InputError for a folder that is none of theirs.
    """
    (served,) = read_inputs([folder], EngineLimits()).loads
    (used,) = later_part([served], 1.0 - share)
    found = served.predicted(fit([served], [used]).values)

    def errors(mask: NDArray[np.bool_]) -> dict[str, float]:
        measured, ours = (_statistics(times, served.output_len, mask) for times in (served.measured, found))
        return {name: ours[name] / measured[name] - 1.0 for name in STATISTICS}

    summary = folder / "summary.txt"
    text = summary.read_text(encoding="utf-8", errors="replace") if summary.is_file() else ""
    theirs = {name: float(error) / 100 for name, error in _THEIRS.findall(text) if name in STATISTICS}
    return Predicted(folder.name, int(used.sum()), errors(served.known & ~used), errors(served.known), theirs)


def _statistics(times: Times, output_len: F64, mask: NDArray[np.bool_]) -> dict[str, float]:
    ttft, tpot = times.ttft_s[mask], times.tpot_s(output_len)[mask]
    tpot = tpot[np.isfinite(tpot)]
    values = (ttft.mean(), np.percentile(ttft, 99), tpot.mean(), np.percentile(tpot, 99))
    return dict(zip(STATISTICS, map(float, values), strict=True))
