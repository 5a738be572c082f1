"""Whether a fit predicts held-out requests, and what it cannot explain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.calibration.fit import FittedTiming, ServedLoad, fit
from kvbench.core.calibration.least_squares import F64
from kvbench.core.calibration.profile_file import Checked, HeldOut

Mask = NDArray[np.bool_]

TOLERANCES: Final = MappingProxyType(
    {"ttft_mean": 0.10, "ttft_p99": 0.15, "tpot_mean": 0.03, "tpot_p99": 0.06}
)
"""Allowed deviation of predicted / measured from 1, if the fit itself were exact."""
FOR_P99: Final = 50
"""Fewest requests for a P99."""
_DRAWS: Final = 6
"""Draws of coefficients per prediction."""
_SIGMAS: Final = 2.0
"""Width of the allowed deviation in standard deviations of the draws."""
_ODD: Final = 0.25
"""Deviation from which a third of the requests (by length or time) is reported."""


@dataclass(frozen=True)
class CheckedFit:
    """A fit with the prediction of its held-out requests."""

    fitted: FittedTiming
    held_out: HeldOut
    cannot_explain: list[str]

    @property
    def holds(self) -> bool:
        return all(figure.holds for figure in self.held_out.figures.values())


def later_part(served: Sequence[ServedLoad], share: float) -> list[Mask]:
    """Return the requests to fit: all except the last ``share`` of each load."""
    masks = []
    for load in served:
        n = len(load.load.offsets_s)
        masks.append(np.arange(n) < n - round(share * n))
    return masks


def checked_fit(served: Sequence[ServedLoad], used: Sequence[Mask], by: str) -> CheckedFit:
    """Fit to the ``used`` requests of each load, and predict the others."""
    found = fit(served, used)
    rest = [load.known & ~mask for load, mask in zip(served, used, strict=True)]
    measured = _figures(served, rest, None)
    predicted = _figures(served, rest, found.values)
    drawn = [_figures(served, rest, values) for values in found.draws(_DRAWS, 1)]
    figures = {}
    for name, value in measured.items():
        spread = float(np.std([draw[name] for draw in drawn])) / value
        figures[name] = Checked(
            ratio=round(predicted[name] / value, 4), stated=round(TOLERANCES[name] + _SIGMAS * spread, 4)
        )
    held = HeldOut(by=by, requests=int(sum(mask.sum() for mask in rest)), figures=figures)
    return CheckedFit(found, held, _unexplained_loads(served, rest, found, figures))


def _figures(
    served: Sequence[ServedLoad], masks: Sequence[Mask], values: Mapping[str, float] | None
) -> dict[str, float]:
    """Return mean and, with enough requests, P99 in seconds: measured, or predicted with ``values``."""
    ttft, tpot = [], []
    for load, mask in zip(served, masks, strict=True):
        times = load.measured if values is None else load.predicted(values)
        ttft.append(times.ttft_s[mask])
        tpot.append(times.tpot_s(load.output_len)[mask])
    firsts, gaps = np.concatenate(ttft), np.concatenate(tpot)
    gaps = gaps[np.isfinite(gaps)]
    figures = {"ttft_mean": float(firsts.mean())}
    if len(firsts) >= FOR_P99:
        figures["ttft_p99"] = float(np.percentile(firsts, 99))
    if len(gaps):
        figures["tpot_mean"] = float(gaps.mean())
    if len(gaps) >= FOR_P99:
        figures["tpot_p99"] = float(np.percentile(gaps, 99))
    return figures


def _unexplained_loads(
    served: Sequence[ServedLoad], rest: Sequence[Mask], found: FittedTiming, figures: Mapping[str, Checked]
) -> list[str]:
    odd = [
        f"{name} of the held-out requests: predicted / measured is {figure.ratio:.2f}, allowed deviation "
        f"{figure.stated:.0%}"
        for name, figure in figures.items()
        if not figure.holds
    ]
    thirds: tuple[tuple[str, Callable[[ServedLoad], F64]], ...] = (
        ("prompts of {:.0f} to {:.0f} tokens", lambda load: load.input_len),
        ("requests sent at {:.1f} to {:.1f} s", lambda load: np.asarray(load.load.offsets_s)),
    )
    for load, mask in zip(served, rest, strict=True):
        if mask.sum() < 9:
            continue
        predicted = load.predicted(found.values).ttft_s
        for template, values_of in thirds:
            order = np.flatnonzero(mask)[np.argsort(values_of(load)[mask], kind="stable")]
            for part in np.array_split(order, 3):
                ratio = float(np.median(predicted[part]) / np.median(load.measured.ttft_s[part]))
                if abs(ratio - 1) > _ODD:
                    where = template.format(values_of(load)[part].min(), values_of(load)[part].max())
                    odd.append(f"{load.name}: median TTFT of {where}: predicted / measured is {ratio:.2f}")
    if found.undetermined:
        odd.append(f"this load does not determine these coefficients: {', '.join(found.undetermined)}")
    return odd
