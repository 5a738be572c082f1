"""What a user sees while a sweep runs: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.text import Text

from kvbench.core.records import Cell, TrialRecord
from kvbench.report.live_bar import LiveBar
from kvbench.results.run import CellResult
from kvbench.sweep.trial.load_progress import Progress as LoadProgress

_COLOURS = {"met": "green", "missed": "red", "invalid": "yellow", "undecided": "cyan", "measured": "green"}


def why(record: TrialRecord) -> str:
    """What a trial's line says behind its verdict: the causes of its misses, why it was refused or could not
    decide, or what a flood has found.
    """
    if record.verdict == "invalid":
        return record.reason
    if record.purpose == "ceiling":
        return _served(record)
    causes = record.summary.get("missed_by") or {}
    missed = ", ".join(f"{count} × {cause}" for cause, count in sorted(causes.items()))
    return "; ".join(filter(None, (_open(record), missed))) if record.verdict == "undecided" else missed


def _served(record: TrialRecord) -> str:
    """Of a flood: far more is offered than can be served, so that what comes out is the capacity."""
    served = record.summary.get("completion_rate") or record.summary.get("run_request_rate")
    if not isinstance(served, (int, float)) or not served:
        return "a flood to find the capacity: too little was served in its time to tell"
    steady = record.summary.get("completion_steady", True)
    return f"a flood to find the capacity: about {served:.3g} req/s served" + (
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
    def trial_finished(self, record: TrialRecord) -> None: ...
    def cell_finished(self, result: CellResult) -> None: ...


class Silent:
    """A watcher for tests and notebooks: sees everything, says nothing."""

    def stage(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def trial_progress(self, cell: Cell, rate: float, planned: int, progress: LoadProgress) -> None:
        pass

    def trial_finished(self, record: TrialRecord) -> None:
        pass

    def cell_finished(self, result: CellResult) -> None:
        pass


class Display:
    """Prints a line per trial and per cell; on a terminal with a live line and time left below them."""

    def __init__(self, console: Console, cells: int) -> None:
        self._console = console
        self._cells = cells
        self._done = 0
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
        self._live(
            f"{cell.connector} · {cell.input_len} in · {rate:.3g} req/s · "
            f"{progress.done}/{planned} done · {attainment}"
        )

    def trial_finished(self, record: TrialRecord) -> None:
        attainment = record.summary.get("slo_attainment")
        # Of a flood nothing is within the SLO, and nothing is meant to be.
        known = attainment is not None and record.purpose != "ceiling"
        share = f"{attainment:.1%} within SLO" if known else ""
        line = Text.assemble(
            f"{self._elapsed()}    {record.cell.connector:<11} {record.cell.input_len:>6} in  ",
            f"{record.request_rate:8.2f} req/s  {share:>17}  ",
            (f"{record.verdict:<7}", _COLOURS[record.verdict]),
            ("  " + why(record), "dim"),
        )
        # One print: a live line below would swallow anything printed without its line's end.
        self._console.print(line, no_wrap=self._console.is_terminal, overflow="ellipsis")

    def cell_finished(self, result: CellResult) -> None:
        self._done += 1
        self._bar.count(self._done, self._left())

    def _live(self, text: str) -> None:
        self._bar.say(text, self._left())

    def _left(self) -> str:
        if not self._done:
            return ""
        seconds = (time.monotonic() - self._started) / self._done * (self._cells - self._done)
        return f"about {int(seconds) // 60}:{int(seconds) % 60:02d} left"

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._started)
        return f"{seconds // 60}:{seconds % 60:02d}"
