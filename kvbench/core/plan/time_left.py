"""How long a sweep will take yet: the plan's estimate, corrected by every trial that has ended.

A cell's search needs the more trials the less sure its answer is, and once it has had some, as many as narrow
its interval to the precision asked for (by the root of their number), each about as long as a trial near the
answer (``core.plan.prospect``). Before a cell's first trial its time is that of cells like it. All of it is
in the seconds of trials; what goes by besides (launches, checks, a simulation's own speed) is learnt as a
*pace*: seconds gone by for each second of trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from kvbench.core.plan.plan import Plan
from kvbench.core.plan.prospect import Prospect, prospect_of, seen_of
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.search.by_measurements import SURE

GROWS_MOST: Final = 1.15
"""By more than that what is shown does not grow within a cell: a number that jumps tells nobody anything."""
NEAR_TRIALS: Final = 3
"""The last so many trials of a cell say how long the next one will take."""
MOST_NEEDED: Final = 0.6
"""Of ``max_trials``, so many a search takes beyond the next one while it knows nothing, and evenly fewer as
it grows sure: fitted to simulated sweeps of quickstart, xpyd and seed-h200-emulated."""
LONGER: Final = 0.25
"""Power of its prompts' length by which a cell takes longer: of 0.2 to 0.5, the one that was right most often
at half time in nine simulated sweeps (quickstart, xpyd, burst-or-sustained; 7 within 30 %)."""
FROM, TO = 2.0, 6.0
"""After so many trials an interval's width begins to say how many more it takes, and says it alone."""
_TRIALS: Final = "trials"


@dataclass
class _Measured:
    """What is known of one cell."""

    records: list[TrialRecord] = field(default_factory=list)
    prospect: Prospect | None = None
    sure: float | None = None
    width: float | None = None
    ended: bool = False

    @property
    def spent_s(self) -> float:
        return math.fsum(record.duration_s for record in self.records)


class TimeLeft:
    """Told of trials and cells as they end; says at any moment how long it will take yet, in seconds."""

    def __init__(self, plan: Plan, cells: Sequence[Cell] | None = None, *, paced: bool = True) -> None:
        """``cells``: those that are to be measured yet; by default all of the plan. ``paced``: whether a
        trial takes its own seconds; a simulation's pace is learnt first.
        """
        self._plan = plan
        self._cells = list(plan.cells if cells is None else cells)
        self._known: dict[Cell, _Measured] = {}
        self._paced = paced
        part_s = {part.name: math.sqrt(max(part.lower_s, 0.1) * max(part.upper_s, 0.1)) for part in plan.time}
        self._cell_s = part_s.get(_TRIALS, sum(part_s.values())) / max(1, len(plan.cells))
        self._besides_s = sum(part_s.values()) - part_s.get(_TRIALS, sum(part_s.values()))
        self._least_s: dict[Cell, float] = {}
        self._begun: tuple[tuple[Cell, int] | None, float] = None, 0.0
        """Of the trial under way: its cell and place there, and the time left when it began."""

    def trial_ended(self, record: TrialRecord, sure: float | None = None, width: float | None = None) -> None:
        """If known, ``sure``: how probable it is by now that the search's answer is within its precision, and
        ``width``: the relative half-width of its interval.
        """
        known = self._known.setdefault(record.cell, _Measured())
        known.records.append(record)
        known.sure, known.width = sure, width
        if known.prospect is None and (seen := seen_of(known.records)) is not None:
            slo = next(iter(self._plan.scenario.slo.by_tier().values()))
            known.prospect = prospect_of(self._plan.scenario, slo, seen)

    def cell_ended(self, cell: Cell) -> None:
        self._known.setdefault(cell, _Measured()).ended = True

    def left_s(self, elapsed_s: float, cell: Cell | None = None, in_trial_s: float = 0.0) -> float | None:
        """``elapsed_s``: since the beginning; ``in_trial_s``: since that of the trial under way, which is one
        of ``cell``. None before a first trial was near an answer: until then the plan's estimate stands.
        """
        done_s = math.fsum(each.spent_s for each in self._known.values())
        pace = self._pace(elapsed_s, done_s + in_trial_s)
        if pace is None or not any(each.prospect or each.ended for each in self._known.values()):
            return None
        others_s = pace * math.fsum(
            self._cell_left_s(each) for each in self._cells if each != cell and not self._of(each).ended
        )
        if cell is None:
            return others_s
        least_s = self._least_s.get(cell, math.inf)
        place = cell, len(self._of(cell).records)
        if self._begun[0] != place:  # a trial begins: from here on it is counted down
            whole_s = others_s + pace * self._cell_left_s(cell)
            self._begun = place, min(whole_s, GROWS_MOST * least_s)
        # What takes longer than it was thought to leaves the other cells to come.
        left_s = max(self._begun[1] - pace * in_trial_s, min(others_s, least_s))
        self._least_s[cell] = min(least_s, left_s)
        return left_s

    def _of(self, cell: Cell) -> _Measured:
        return self._known.get(cell) or _Measured()

    def _pace(self, elapsed_s: float, trials_s: float) -> float | None:
        """Seconds gone by for each second of trials; at first what the plan says of launches and checks."""
        if not self._paced:
            return elapsed_s / trials_s if trials_s > 0 else None
        whole = self._cell_s * len(self._plan.cells)
        planned = 1 + self._besides_s / max(whole, 1e-9)
        return (elapsed_s + planned * self._cell_s) / (trials_s + self._cell_s)

    def _cell_left_s(self, cell: Cell) -> float:
        known = self._of(cell)
        if not known.records:
            return self._cell_of_others_s(cell)
        own_s = self._next_trial_s(known) * self._trials_left(known)
        if known.prospect is None:
            # Far from the answer trials are short, and say nothing of those to come.
            return max(own_s, self._cell_of_others_s(cell) - known.spent_s)
        return own_s

    def _next_trial_s(self, known: _Measured) -> float:
        usual_s = [record.duration_s for record in known.records if record.purpose != "ceiling"]
        if known.prospect is None:
            return max(
                usual_s[-NEAR_TRIALS:],
                default=self._cell_s / (MOST_NEEDED * self._plan.scenario.search.max_trials),
            )
        near_s = known.prospect.trial_s
        seen = usual_s[-NEAR_TRIALS:]
        return fmean([near_s, median(seen)]) if len(usual_s) > NEAR_TRIALS else near_s

    def _trials_left(self, known: _Measured) -> float:
        """Of a cell under way, at least one."""
        search, done = self._plan.scenario.search, len(known.records)
        if search.method == "fixed":
            return max(1.0, len(search.rates) - done)
        unsure = max(0.0, 1 - (known.sure or 0.0) / SURE)
        needed = 1 + MOST_NEEDED * search.max_trials * unsure
        if known.width is not None:
            tried = sum(record.purpose != "ceiling" for record in known.records)
            weight = min(max((tried - FROM) / (TO - FROM), 0.0), 1.0)
            more = tried * ((known.width / search.precision) ** 2 - 1)
            needed = max(1.0, (1 - weight) * needed + weight * more)
        return min(needed, max(1, search.max_trials - done))

    def _cell_of_others_s(self, cell: Cell) -> float:
        """A cell's time by those that are like it: of the same length, or else of the same connector, and
        then longer, the longer its prompts are: such requests take longer, and come at a lower rate.
        """
        known = {
            other: (each.spent_s + (0.0 if each.ended else self._cell_left_s(other)))
            * (cell.input_len / other.input_len) ** LONGER
            for other, each in self._known.items()
            if each.records and (each.ended or each.prospect is not None)
        }
        alike = [time_s for other, time_s in known.items() if other.input_len == cell.input_len]
        same = [time_s for other, time_s in known.items() if other.connector == cell.connector]
        found = alike or same or list(known.values())
        return fmean(found) if found else self._cell_s
