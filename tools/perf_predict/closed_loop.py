"""A closed loop between two of its loads: TPOT and TTFT from the lowest and the highest one measured.

So many requests are always under way. One takes TTFT, and TPOT for each of its output tokens, so that
X = concurrency / (TTFT + output_len × TPOT) requests a second come through (Little), and the decode batch is
what of them decodes, n = X × output_len × TPOT. A step of the batch takes a + b × n ** BATCH_POWER; prefills
take the share X × input_len × k of the time, in which nothing is decoded (engines that do both), so that
TPOT = (a + b × n ** BATCH_POWER) / (1 − X × input_len × k). k is PREFILL_SHARE of what the lowest load's TTFT
is a token: the rest is the front end, waiting for a step, and prompts that came at the same time. a and b
follow from the two loads. Where they say that b is negative, it is 0, and k what remains.

TTFT between them is a straight line over the concurrency; there is nothing in two figures that says when
prompts begin to wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFILL_SHARE: Final = 0.3
BATCH_POWER: Final = 0.8
"""Both chosen on one half of the InferenceX configurations, by the hash of their settings; figures are of the
other half (docs/prediction.md)."""
_MOST_PREFILL: Final = 0.95
_ROUNDS: Final = 80
_APART_POWER: Final = 0.7


@dataclass(frozen=True)
class Measured:
    """One load of a configuration: requests under way, and times in ms."""

    concurrency: float
    ttft_ms: float
    tpot_ms: float


def straight(low: Measured, high: Measured, concurrency: float, name: str) -> float:
    """What a line between the two gives: the rival."""
    share = (concurrency - low.concurrency) / (high.concurrency - low.concurrency)
    begin, end = float(getattr(low, name)), float(getattr(high, name))
    return begin + share * (end - begin)


@dataclass(frozen=True)
class ClosedLoop:
    """A configuration as two of its loads show it. ``apart``: P and D are, so prefills hold no step up."""

    low: Measured
    high: Measured
    input_len: float
    output_len: float
    apart: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low.concurrency < self.high.concurrency:
            raise ValueError("two loads are needed, the lower one first")

    @property
    def power(self) -> float:
        return _APART_POWER if self.apart else BATCH_POWER

    def tpot_ms(self, concurrency: float) -> float:
        """Predicted, within what the two loads show; raises ValueError outside of them."""
        if not self.low.concurrency <= concurrency <= self.high.concurrency:
            raise ValueError(f"{concurrency:g} is not between the loads that were measured")
        base, slope, prefill_ms = self._coefficients()
        found = straight(self.low, self.high, concurrency, "tpot_ms")
        ttft = self.ttft_ms(concurrency)
        least, most = sorted((self.low.tpot_ms, self.high.tpot_ms))
        for _ in range(_ROUNDS):
            at = Measured(concurrency, ttft, found)
            busy = min(_MOST_PREFILL, self._through(at) * self.input_len * prefill_ms)
            found = (found + (base + slope * self._batch(at)) / (1.0 - busy)) / 2
            found = min(max(found, least), most)
        return found

    def ttft_ms(self, concurrency: float) -> float:
        """Predicted."""
        return straight(self.low, self.high, concurrency, "ttft_ms")

    def _through(self, at: Measured) -> float:
        """Requests per ms."""
        return at.concurrency / (at.ttft_ms + self.output_len * at.tpot_ms)

    def _batch(self, at: Measured) -> float:
        decoding = self._through(at) * self.output_len * at.tpot_ms
        return float(decoding**self.power)

    def _coefficients(self) -> tuple[float, float, float]:
        """a and b, and ms of prefill a prompt token."""
        prefill_ms = 0.0 if self.apart else PREFILL_SHARE * self.low.ttft_ms / self.input_len
        base, slope = self._step(prefill_ms)
        if slope < 0 and not self.apart:
            # TPOT × (1 − X × input_len × k) is the same at both.
            spread = [self._through(at) * self.input_len * at.tpot_ms for at in (self.low, self.high)]
            grown = self.high.tpot_ms - self.low.tpot_ms
            prefill_ms = max(0.0, grown / (spread[1] - spread[0])) if spread[1] > spread[0] else 0.0
            base, slope = self._step(prefill_ms)
        return base, slope, prefill_ms

    def _step(self, prefill_ms: float) -> tuple[float, float]:
        steps, batches = [], []
        for at in (self.low, self.high):
            busy = min(_MOST_PREFILL, self._through(at) * self.input_len * prefill_ms)
            steps.append(at.tpot_ms * (1.0 - busy))
            batches.append(self._batch(at))
        slope = (steps[1] - steps[0]) / (batches[1] - batches[0]) if batches[1] != batches[0] else 0.0
        return steps[0] - slope * batches[0], slope
