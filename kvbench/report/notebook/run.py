"""A run folder to look at in a notebook or a script: its tables, its pictures, its gist.

A folder may be of any kind and in any state: running, cut off, of an older kvbench, imported, simulated, a
microbenchmark. What it does not have is missing, never invented.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pandas as pd

from kvbench.core.records import Method
from kvbench.report.notebook import frames, request_frames
from kvbench.report.notebook.display import html_of, markdown_of
from kvbench.report.notebook.plots import Plots
from kvbench.report.sections.build import build
from kvbench.report.tables.methods import method_tables
from kvbench.results.provenance import mark_of, slo_of
from kvbench.results.run import RunFolder, load_run


class Run:
    """A run folder to look at. Its tables' columns are explained by ``kvbench.columns``."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        """The folder as read: manifest, plan, environment, records."""

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def name(self) -> str:
        return self.folder.run_id

    @property
    def kind(self) -> str:
        """sweep, bench, simulate, microbench or imported."""
        return str(self.folder.manifest.get("kind") or "sweep")

    @property
    def status(self) -> str:
        """running, complete, failed or interrupted."""
        return str(self.folder.manifest.get("status") or "")

    @property
    def slo(self) -> str:
        """What had to be met, in words."""
        return slo_of(self.folder).text()

    @property
    def mark(self) -> str:
        """``emulated`` or ``simulated`` where it was; empty for real engines."""
        mark = mark_of(self.folder)
        return "" if mark is None else mark.word

    @property
    def warnings(self) -> list[str]:
        """What is not whole in the folder."""
        return list(self.folder.warnings)

    def reload(self) -> Run:
        """The same folder, read again: for a run that is still going on."""
        return load(self.path)

    # -- tables ---------------------------------------------------------------------------------

    @cached_property
    def summary(self) -> pd.DataFrame:
        """The report's main table: one row per connector and input length; per case of a microbenchmark."""
        return frames.summary(self.folder)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per finished cell, method and tier: its answer with interval, and what limits it."""
        return frames.cells(self.folder)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row a trial."""
        return frames.trials(self.folder)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request of every trial; ``read_requests`` reads less, or more columns."""
        return self.read_requests()

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        """One row a sample of counters and gauges during the trials."""
        return request_frames.telemetry(self.folder, self.folder.all_trials)

    @cached_property
    def transfers(self) -> pd.DataFrame:
        """One row a case of a microbenchmark; empty in other runs."""
        return frames.transfers(self.folder)

    @cached_property
    def calls(self) -> pd.DataFrame:
        """One row a single transfer of a microbenchmark."""
        return frames.calls(self.folder)

    @cached_property
    def models(self) -> pd.DataFrame:
        """One row a way of moving bytes: start-up + per descriptor + bytes / bandwidth, as fitted."""
        return frames.models(self.folder)

    @cached_property
    def findings(self) -> pd.DataFrame:
        """What limits the numbers: what the gates found, and notes on the whole run."""
        return frames.findings(self.folder)

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """What was measured beside the main column, by name: burst, fixed_by_rate, equal_rate, …"""
        return {table.name: frames.frame(table.rows) for table in method_tables(self.folder)}

    def read_requests(
        self,
        columns: Sequence[str] | None = None,
        *,
        trials: Sequence[str] | None = None,
        connector: str | None = None,
        input_len: int | None = None,
        method: Method | None = None,
    ) -> pd.DataFrame:
        """The requests of the trials that fit every condition; only what ``columns`` need is read from disk.

        ``columns`` may also name fields that ``requests`` leaves out, such as ``itl_s``. Raises InputError
        for a trial or column that there is not.
        """
        chosen = request_frames.chosen_trials(self.folder, trials, connector, input_len, method)
        return request_frames.requests(self.folder, chosen, columns)

    @property
    def plot(self) -> Plots:
        """The pictures: ``run.plot.latency()``; ``list(run.plot)`` names those that this run has data for."""
        return Plots(self.folder)

    # -- how it looks ---------------------------------------------------------------------------

    def __repr__(self) -> str:
        if self.kind == "microbench":
            counts = f"{len(self.folder.transfer_records())} cases"
        else:
            counts = f"{len(self.folder.all_trials)} trials, {len(self.folder.cells)} cells"
        return f"<kvbench run {self.name}: {self.kind}, {self.status}, {counts}>"

    def _repr_html_(self) -> str:
        return html_of(build(self.folder, writers=("notebook",)))

    def _repr_markdown_(self) -> str:
        return markdown_of(build(self.folder, writers=("notebook",)))


def load(path: Path | str | Run) -> Run:
    """Reads a run folder of any kind and state. Raises StoreError if it is none, or of a newer kvbench."""
    return path if isinstance(path, Run) else Run(load_run(path))
