"""The system's own clock: how much work a server that is slow, or pauses, has time for until a moment.

A server that slows down as a whole does the same things in the same order, only later. So queues are
simulated in *work time*, where the speed is always 1, and seconds are turned into it and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .system import Disturbances, FloatArray


class Clock:
    """Seconds of the virtual clock ↔ seconds of undisturbed work.

    ``noise``: (start of a trial, its slowness), ascending; the last one goes on, before the first is none.
    """

    def __init__(self, disturbances: Disturbances, noise: Sequence[tuple[float, float]] = ()) -> None:
        own = disturbances
        self._pause_s, self._every_s = own.pause_s, own.pause_every_s
        knots = {0.0} | {start for start, _ in noise if start > 0}
        if own.warmup_factor != 1.0:
            knots.add(own.warmup_s)
        if own.drift:
            knots |= {60.0 * minute for minute in range(1, round((own.drift_most - 1) / own.drift) + 2)}
        ordered = np.array(sorted(knots))
        slowness = np.array(
            [
                (own.warmup_factor if at < own.warmup_s else 1.0)
                * own.drift_factor(at)
                * next((factor for start, factor in reversed(noise) if start <= at), 1.0)
                for at in ordered.tolist()
            ]
        )
        self._active = self._unpaused(ordered)
        self._speed = 1.0 / slowness
        self._done = np.concatenate(([0.0], np.cumsum(np.diff(self._active) * self._speed[:-1])))

    def work(self, at_s: FloatArray) -> FloatArray:
        """Work done until then. Times before 0 count as undisturbed by warm-up and drift."""
        active = self._unpaused(np.asarray(at_s, np.float64))
        place = np.maximum(np.searchsorted(self._active, active, side="right") - 1, 0)
        return np.asarray(self._done[place] + (active - self._active[place]) * self._speed[place])

    def seconds(self, work: FloatArray) -> FloatArray:
        """When that much work is done: the inverse. NaN and inf stay what they are."""
        place = np.maximum(np.searchsorted(self._done, work, side="right") - 1, 0)
        place = np.minimum(place, len(self._done) - 1)
        active = self._active[place] + (work - self._done[place]) / self._speed[place]
        if not self._pause_s:
            return np.asarray(active)
        lasts = self._every_s - self._pause_s
        with np.errstate(invalid="ignore"):
            periods = np.ceil(active / lasts) - 1  # what ends with a period's work ends before its pause
            seconds = active + periods * self._pause_s
        return np.asarray(np.where(np.isinf(active), active, seconds))

    def _unpaused(self, at_s: FloatArray) -> FloatArray:
        if not self._pause_s:
            return at_s
        lasts = self._every_s - self._pause_s
        periods = np.floor(at_s / self._every_s)
        return np.asarray(periods * lasts + np.minimum(at_s - periods * self._every_s, lasts))
