"""What a user sees while a microbenchmark runs: a bar with the time left, or a line for each case."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.core.transfers.stats import call_times
from kvbench.core.units import duration_text
from kvbench.report.live_bar import LiveBar
from kvbench.report.tables.numbers import number
from kvbench.report.tables.transfers import case_text, time_text


class CaseProgress:
    """Shows how far it is. ``estimate_s``: of all cases, corrected by how long those so far took."""

    def __init__(self, console: Console, cases: int, estimate_s: float) -> None:
        self._console = console
        self._cases = cases
        self._estimate_s = estimate_s
        self._done = 0
        self._started = time.monotonic()
        self._bar = LiveBar(console, "cases", cases)

    def __enter__(self) -> CaseProgress:
        self._started = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def on_stage(self, index: int, case: Case, stage: str) -> None:
        """Progress within a case, as ``run_cases`` reports it."""
        self._bar.say(f"{case_text(case)}: {stage}", self._left())

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def finished(self, record: TransferRecord) -> None:
        """A case has its row: failures are reported at once, others only where no bar shows them."""
        self._done += 1
        if record.status == "error":
            self._say(f"{_where(record)}{case_text(record.case)}: {record.error}", "red")
        elif not self._bar.shown:
            self._say(f"{_where(record)}{case_text(record.case)}: {_figures(record)}", "")
        self._bar.count(self._done, self._left())

    def _say(self, text: str, style: str) -> None:
        seconds = int(time.monotonic() - self._started)
        clock = f"{seconds // 60}:{seconds % 60:02d}  {self._done}/{self._cases}  "
        self._console.print(Text(clock + text, style=style), soft_wrap=True)

    def _left(self) -> str:
        gone = time.monotonic() - self._started
        share = self._done / max(1, self._cases)
        # The estimate counts less the more cases have shown how long one takes.
        whole = self._estimate_s if not self._done else (1 - share) * self._estimate_s + gone
        return f"about {duration_text(max(0.0, whole - gone))} left"


def _where(record: TransferRecord) -> str:
    return f"{record.pair}: " if record.pair else ""


def _figures(record: TransferRecord) -> str:
    if record.status == "skipped":
        return f"not run: {record.error}"
    p50 = call_times(record.call_s).p50
    rate = "" if record.gb_per_s is None else f"{number(record.gb_per_s)} GB/s, "
    return f"{rate}median {time_text(p50)}"
