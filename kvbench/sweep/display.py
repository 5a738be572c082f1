"""What a user sees while a sweep runs: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Protocol

from rich.console import Console
from rich.text import Text

from kvbench.core.metrics.criteria import missed_text
from kvbench.core.plan.time_left import TimeLeft
from kvbench.core.records import MAIN_METHODS, Cell, TrialRecord
from kvbench.report.terminal import LiveBar
from kvbench.results.run import CellResult
from kvbench.sweep.strategies import Standing
from kvbench.sweep.trial.loadgen_driver import Progress as LoadProgress

_COLOURS = {"met": "green", "missed": "red", "invalid": "yellow", "undecided": "cyan", "measured": "green"}
FAR: Final = 3.0
"""With a factor of so much between its ends an interval is not worth telling."""


def why(record: TrialRecord) -> str:
    """What a trial's line says behind its verdict: the causes of its misses, or that its queue grows; why it
    was refused or could not decide; or what a saturating probe has found.
    """
    if record.verdict == "invalid":
        return record.reason
    if record.purpose == "ceiling":
        return _served(record)
    causes = record.summary.get("missed_by") or {}
    missed = missed_text(causes)
    if record.verdict == "undecided":
        return "; ".join(filter(None, (_open(record), missed)))
    return missed or (record.reason if record.verdict == "missed" else "")


def _load_text(record: TrialRecord) -> str:
    """What was offered: a rate, or so many requests at once."""
    at_once = record.engine.get("concurrency")
    return f"{at_once} at once" if at_once else f"{record.request_rate:8.2f} req/s"


def _served(record: TrialRecord) -> str:
    """Of a saturating probe: more is offered than can be served, so that what comes out is the capacity."""
    served = record.summary.get("completion_rate") or record.summary.get("run_request_rate")
    if not isinstance(served, (int, float)) or not served:
        return "saturating probe to find the capacity: too little was served in its time to tell"
    steady = record.summary.get("completion_steady", True)
    return f"saturating probe to find the capacity: about {served:.3g} req/s served" + (
        "" if steady else ", still changing"
    )


def _open(record: TrialRecord) -> str:
    """Why a trial could not decide, and where its requests count as fewer than they are, as how many."""
    summary = record.summary
    judged = (summary.get("judged_met") or 0) + (summary.get("judged_missed") or 0)
    effective = summary.get("effective_n")
    if isinstance(effective, (int, float)) and effective < 0.8 * judged:
        return f"{record.reason}; the {judged} count as {effective:.0f}, since neighbours fare alike"
    return record.reason


class Watcher(Protocol):
    """Told what a sweep does; never asked anything."""

    def stage(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def trial_progress(self, cell: Cell, rate: float, planned: int, progress: LoadProgress) -> None: ...
    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None: ...
    def cell_finished(self, result: CellResult) -> None: ...


class Silent:
    """A watcher for tests and notebooks: sees everything, says nothing."""

    def stage(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def trial_progress(self, cell: Cell, rate: float, planned: int, progress: LoadProgress) -> None:
        pass

    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None:
        pass

    def cell_finished(self, result: CellResult) -> None:
        pass


class Display:
    """Prints a line per trial and per cell; on a terminal with a live line and time left below them.

    ``left``: who reckons the time left, if anybody does; ``planned``: what the plan says of it, until then.
    """

    def __init__(self, console: Console, cells: int, left: TimeLeft | None = None, planned: str = "") -> None:
        self._console = console
        self._cells = cells
        self._done = 0
        self._time_left = left
        self._planned = planned
        self._standing: tuple[Cell, Standing] | None = None
        self._started = time.monotonic()
        self._bar = LiveBar(console, "cells", cells)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        if not self._bar.shown:
            self._console.print(f"{self._elapsed()}  {text}", highlight=False, markup=False)
        else:
            self._live(text)

    def note(self, text: str) -> None:
        self._console.print(f"{self._elapsed()}  {text}", highlight=False, markup=False, style="yellow")

    def trial_progress(self, cell: Cell, rate: float, planned: int, progress: LoadProgress) -> None:
        judged = progress.met + progress.missed
        attainment = f"{progress.met / judged:.0%} within SLO" if judged else "…"
        known = self._standing[1].text() if self._standing and self._standing[0] == cell else ""
        now = f"now {rate:.3g} req/s" if rate else "closed loop"
        words = (
            f"{cell.connector} · {cell.input_len} in", known, now,
            f"{progress.done}/{planned} done", attainment,
        )  # fmt: skip
        self._bar.say(" · ".join(filter(None, words)), self._left(cell, progress.t_s))

    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None:
        if self._time_left is not None and record.method in MAIN_METHODS:
            so_far = (standing.sure, standing.width) if standing else (None, None)
            self._time_left.trial_ended(record, *so_far)
        # Far from the answer an interval says nothing.
        told = standing if standing is not None and standing.upper < FAR * standing.lower else None
        self._standing = None if told is None else (record.cell, told)
        attainment = record.summary.get("slo_attainment")
        # Of a saturating probe nothing is within the SLO, and nothing is meant to be.
        known = attainment is not None and record.purpose != "ceiling"
        share = f"{attainment:.1%} within SLO" if known else ""
        said = "; ".join(filter(None, (why(record), told.text() if told else "")))
        line = Text.assemble(
            f"{self._elapsed()}    {record.cell.connector:<11} {record.cell.input_len:>6} in  ",
            f"{_load_text(record):>14}  {share:>17}  ",
            (f"{record.verdict:<7}", _COLOURS[record.verdict]),
            ("  " + said, "dim"),
        )
        # One print: a live line below would swallow anything printed without its line's end.
        self._console.print(line, no_wrap=self._console.is_terminal, overflow="ellipsis")

    def cell_finished(self, result: CellResult) -> None:
        self._done += 1
        if self._time_left is not None:
            self._time_left.cell_ended(result.cell)
        left = self._left()
        if not self._bar.shown and left and self._done < self._cells:
            self.stage(f"{self._done} of {self._cells} cells are done, {left}")
        self._bar.count(self._done, left)

    def _live(self, text: str) -> None:
        self._bar.say(text, self._left())

    def _left(self, cell: Cell | None = None, in_trial_s: float = 0.0) -> str:
        if self._time_left is None:
            return ""
        seconds = self._time_left.left_s(time.monotonic() - self._started, cell, in_trial_s)
        if seconds is None:
            return self._planned
        return f"about {minutes(seconds)} left" if seconds >= 1 else "any moment now"

    def _elapsed(self) -> str:
        return minutes(time.monotonic() - self._started)


def minutes(seconds: float) -> str:
    """``3:07``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
