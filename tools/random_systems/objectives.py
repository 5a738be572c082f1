"""Draws an SLO: a share of .5 to .999, a percentile, or a mean; limits of 1.02 to 20 × idle."""

from __future__ import annotations

from .dice import Dice, rounded
from .system import Slo, System

SHARES = (0.5, 0.8, 0.9, 0.9, 0.95, 0.95, 0.95, 0.99, 0.99, 0.999)
PERCENTILES = (50, 90, 90, 95, 99)


def draw_slo(lead: str, system: System, dice: Dice, looseness: float) -> Slo:
    """``looseness`` in [0, 1) says how loose the TTFT limit is, evenly over the logarithm.

    The limit counts from what the share asked for of lone requests keeps. About one in twenty is below that:
    there is nothing to find.
    """
    form = dice.one(("share", "share", "share", "percentile", "mean"))
    share = dice.one(SHARES) if form == "share" else dice.one(PERCENTILES) / 100
    paused = system.disturbances.pause_s / system.disturbances.pause_every_s
    if paused and dice.chance(0.6):
        share = min(share, 0.5 if paused > 0.04 else 0.8)
    work = 1.0 if form == "mean" else system.service.quantile(share)
    # The steep and the shallow: a limit that most of a queue fits in, or next to nothing.
    factor = 1.02 * (20 / 1.02) ** looseness
    least = 0.0
    if system.disturbances.drift:
        factor = max(factor, 1.8)  # so that it is not below idle once the drift is over
    if system.disturbances.pause_s:
        least = system.disturbances.pause_s * dice.between(0.3, 1.5)
    if dice.chance(0.05):
        factor, least = dice.between(0.5, 0.95), 0.0
    ttft_ms = rounded(1e3 * (factor * system.idle_ttft_s(work) + least))
    tpot_ms = _tpot_ms(lead, system, dice)
    if tpot_ms is not None and form != "mean" and dice.chance(0.15):
        ttft_ms = rounded(ttft_ms * 3)
    if form == "share":
        return Slo(ttft_ms, tpot_ms, share)
    statistic = "mean" if form == "mean" else f"p{share * 100:g}"
    limits = [f"ttft_ms {statistic} <= {ttft_ms:.12g}"]
    if tpot_ms is not None:
        limits.append(f"tpot_ms {statistic} <= {tpot_ms:.12g}")
    return Slo(None, None, 0.95, tuple(limits))


def _tpot_ms(lead: str, system: System, dice: Dice) -> float | None:
    """Binding where tokens slow down with the batch; elsewhere a limit that is always kept, or none."""
    idle, length = system.idle_tpot_s, system.workload.output_len
    if length == 1:
        return None
    if system.disturbances.drift:
        return rounded(1e3 * idle * dice.between(1.8, 4)) if dice.chance(0.5) else None
    if system.batch is not None:
        _, loaded = system.batch.loaded(system.workload.input_len, length)
        return rounded(1e3 * (idle + (loaded - idle) * dice.between(0.3, 2))) if dice.chance(0.7) else None
    if system.slope_s:
        if lead != "decode" and dice.chance(0.5):
            return None
        return rounded(1e3 * idle * dice.between(1.1, 4))
    return rounded(1e3 * idle * dice.between(1.05, 3)) if dice.chance(0.4) else None
