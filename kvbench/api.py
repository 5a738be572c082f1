"""Python interface of kvbench for notebooks and scripts.

::

    import kvbench

    run = kvbench.load("results/20261121T192623Z-quickstart-d326f3")
    run.summary                    # the report's main table; all tables are pandas DataFrames
    run.trials                     # every trial                  run.cells      search results
    run.requests                   # every request                run.telemetry  counters during the trials
    run.transfers                  # a microbenchmark's cases     run.findings   warnings and caveats
    run.plot.latency()             # a matplotlib figure
    kvbench.compare(run, other)    # who is ahead, and how certain
    kvbench.simulate("xpyd")       # a run on virtual time
    kvbench.columns("requests")    # meaning of the columns

Tables are read on first use and cached."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvbench.errors import InputError
from kvbench.files import scratch
from kvbench.report.notebook import frames
from kvbench.report.notebook.run import Comparison, Plots, Run, compare, load
from kvbench.report.tables.columns import MEANINGS
from kvbench.results.run import listed_runs

if TYPE_CHECKING:
    from kvbench.planning.overrides import CliOptions

__all__ = [
    "Comparison", "Plots", "Run", "columns", "compare", "load", "runs", "simulate", "simulate_splits",
]  # fmt: skip


def runs(folder: Path | str = "results") -> pd.DataFrame:
    """Runs in a folder and its subfolders, the latest first; only manifests are read. Columns: path (for
    ``load``), kind, scenario, status, started_at (UTC), kvbench, labels, problem (why a folder cannot be
    read). Raises InputError for a missing folder."""
    names = ("path", "kind", "scenario", "status", "started_at", "kvbench", "labels", "problem")
    found = (
        asdict(run) | {"path": str(run.path), "labels": ";".join(run.labels)}
        for run in listed_runs(Path(folder))
    )
    listed = frames.frame(found, names)
    listed["started_at"] = pd.to_datetime(listed["started_at"], utc=True, errors="coerce", format="ISO8601")
    return listed.sort_values("started_at", ascending=False, kind="stable", ignore_index=True)


def columns(table: str = "") -> pd.DataFrame:
    """Meaning and unit of a table's columns; without a name those of all tables."""
    if table and table not in MEANINGS:
        raise InputError(f"no table is called {table!r}", hint=f"there are: {', '.join(MEANINGS)}")
    rows = [
        {"table": name, "column": column, "meaning": meaning}
        for name, meanings in MEANINGS.items()
        if table in ("", name)
        for column, meaning in meanings.items()
    ]
    return frames.frame(rows).drop(columns=["table"] if table else [])


# --- virtual time ----------------------------------------------------------------------------------


def simulate(
    scenario: str | Path = "quickstart",
    overrides: Mapping[str, object] | None = None,
    *,
    connectors: Sequence[str] = (),
    rate: float | None = None,
    like: Run | Path | str | None = None,
    output: Path | str | None = None,
) -> Run:
    """Simulate a sweep on virtual time: same plan, search and gates, no processes.

    ``scenario``: a bundled name or a file. ``overrides``: dotted key → value, ``{"slo.ttft_ms": 300}``.
    ``rate``: only this one (requests/s), no search. ``like``: measured run that gives KV links and overheads.
    ``output``: folder for the run; by default it is deleted with the returned run. Raises InputError if it
    cannot be simulated."""
    from kvbench.sweep.simulate import simulated

    cli = _cli_options(scenario, overrides, connectors, rate)
    with_ = None if like is None else load(like).path
    return _kept(lambda folder: simulated(cli, folder, with_), output)


def simulate_splits(
    scenario: str | Path,
    *,
    gpus: int | None = None,
    splits: str | None = None,
    overrides: Mapping[str, object] | None = None,
    connectors: Sequence[str] = (),
    like: Run | Path | str | None = None,
) -> pd.DataFrame:
    """Compare splits of P and D: one row per connector, split and input length. Simulates all splits of
    ``gpus`` instances or the listed ``splits`` (``"1:1,2:1"``). ``goodput_per_gpu`` is comparable (requests/s
    within the SLO, per GPU); ``best`` marks the best of an input length."""
    from kvbench.sweep.simulate_splits import Choice, predicted

    choice = Choice(splits, gpus, False)
    with_ = None if like is None else load(like).path
    cli = _cli_options(scenario, overrides, connectors, None)
    with scratch("kvbench-splits-") as folder:
        return frames.frame(asdict(prediction) for prediction in predicted(cli, choice, folder, with_))


def _cli_options(
    scenario: str | Path,
    overrides: Mapping[str, object] | None,
    connectors: Sequence[str],
    rate: float | None,
) -> CliOptions:
    from kvbench.planning.overrides import CliOptions

    sets = tuple(f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items())
    return CliOptions(str(scenario), sets, tuple(connectors), fixed_rate=rate)


def _kept(make: Callable[[Path], Path], output: Path | str | None) -> Run:
    """Return the run that ``make`` writes; without ``output`` its folder is deleted with it."""
    if output is not None:
        return load(make(Path(output)))
    with ExitStack() as stack:
        run = load(make(stack.enter_context(scratch("kvbench-run-"))))
        weakref.finalize(run, stack.pop_all().close)
        return run
