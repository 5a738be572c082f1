"""What one cell teaches the next: the true outputs, and where rates are likely to lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.core.canaries.pool import CanaryPool, pool_of_cell
from kvbench.core.records import Cell, Outputs
from kvbench.core.search.search import Hint
from kvbench.results.finished_cells import EarlierSessions


@dataclass
class Knowledge:
    """What earlier cells of a run have taught: the true outputs, and where rates are likely to lie."""

    reference: dict[int, Outputs]
    rates: dict[Cell, float]
    earlier: EarlierSessions = field(default_factory=EarlierSessions)
    """What the run folder had when this process took it over."""

    canaries: dict[tuple[str, int, int], CanaryPool] = field(default_factory=dict)
    """By deployment, input and output length: the right answers to canaries."""

    reference_label: str = ""
    """The deployment whose answers are the truth for the others."""

    def right_answers(self, cell: Cell) -> CanaryPool | None:
        """Those that a cell's canaries are compared with."""
        return pool_of_cell(self.canaries, cell, self.reference_label)

    def learn_answers(self, pool: CanaryPool | None) -> None:
        """Keeps right answers for further cells."""
        if pool is not None:
            self.canaries[pool.key] = pool

    def hint(self, cell: Cell, disaggregated: frozenset[str]) -> Hint | None:
        """A rate to start from: the same length on a connector of the same kind, or other lengths."""
        alike = [
            rate
            for known, rate in self.rates.items()
            if known.input_len == cell.input_len
            and (known.connector in disaggregated) == (cell.connector in disaggregated)
        ]
        if alike:
            return Hint(alike[-1], trusted=True)
        own = [
            (known.input_len, rate) for known, rate in self.rates.items() if known.connector == cell.connector
        ]
        return Hint(extrapolated(own, cell.input_len), trusted=len(own) > 1) if own else None


def extrapolated(known: Sequence[tuple[int, float]], input_len: int) -> float:
    """A rate for an input length from those of others: a request costs a fixed part and one per token.

    With two lengths known, 1/rate is taken as linear in the length. With one, the fixed part is unknown
    and the cost is taken to grow by the power 0.7, between none of it and nothing else.
    """
    length, rate = min(known, key=lambda pair: abs(pair[0] - input_len))
    others = [pair for pair in known if pair[0] != length]
    if not others:
        return float(rate * (length / input_len) ** 0.7)
    other_length, other_rate = min(others, key=lambda pair: abs(pair[0] - input_len))
    slope = (1 / rate - 1 / other_rate) / (length - other_length)
    cost = 1 / rate + slope * (input_len - length)
    return 1 / cost if slope > 0 and cost > 0 else rate
