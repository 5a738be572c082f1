"""Runs side by side: one comparison, for ``kvbench compare``, for a notebook, and for microbenchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvbench.core.findings.ahead import Pair, pairs
from kvbench.core.findings.findings import Statement
from kvbench.core.findings.load_row import LoadRow
from kvbench.core.transfers.stats import Change
from kvbench.errors import InputError, KvbenchError
from kvbench.report.compared import change_table
from kvbench.report.findings.ahead import RatePair, rate_pairs
from kvbench.report.findings.load_rows import conclusions, default_axis, load_rows, searched_rows
from kvbench.report.findings.transfers import changes_text
from kvbench.report.tables.result import summary_table
from kvbench.report.tables.table import WRITERS, Column, as_json, of_values
from kvbench.report.tables.transfers import flat_row
from kvbench.results.provenance import check_comparable, differences
from kvbench.results.run import RunFolder, load_run


def short_name(place: int) -> str:
    """A, B, … of the runs in one table."""
    return chr(65 + place) if place < 26 else f"R{place + 1}"


def are_microbenchmarks(runs: Sequence[RunFolder], hint: str = "") -> bool:
    """What kind the runs are of. Raises InputError where some are of one and some of the other."""
    kinds = {run.manifest.get("kind") == "microbench" for run in runs}
    if kinds == {True, False}:
        raise InputError(
            "a microbenchmark of transfers and a run of requests have no table in common", hint=hint
        )
    return True in kinds


# --- runs of requests ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """Runs of requests: conclusions, rows, and in what runs that were forced together differ.

    ``names`` set the runs apart, empty for a single one; ``by``: the axis that is compared.
    """

    runs: Sequence[RunFolder]
    names: Sequence[str]
    by: str
    rows: Sequence[LoadRow]
    differing: Sequence[str] = ()

    @property
    def named(self) -> list[tuple[RunFolder, str]]:
        return list(zip(self.runs, self.names, strict=True))

    @cached_property
    def statements(self) -> list[Statement]:
        """What the rules say of all runs together."""
        return conclusions(self.runs, self.names, self.by)

    @cached_property
    def searched(self) -> list[RatePair]:
        """Each two rates that were searched."""
        return rate_pairs([row for run, name in self.named for row in summary_table(run, name)])

    @cached_property
    def offered(self) -> list[Pair]:
        """Each two loads that were offered as such."""
        return pairs([row for run, name in self.named for row in load_rows(run, name)], self.by)


def compared_runs(runs: Sequence[RunFolder], by: str = "", *, force: bool = False) -> Compared:
    """The runs together. ``by``: the axis to compare, by default the first in which loads differ.

    Raises InputError where they are not comparable, unless ``force``.
    """
    differing = check_comparable(runs, force=force)
    names = [short_name(place) if len(runs) > 1 else "" for place in range(len(runs))]
    rows = [
        row
        for run, name in zip(runs, names, strict=True)
        for row in (*searched_rows(run, name), *load_rows(run, name, errors=False))
    ]
    return Compared(runs, names, by or default_axis(row for row in rows if not row.answer), rows, differing)


# --- microbenchmarks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """One microbenchmark beside an earlier one, case by case, with what came of each in words."""

    before: RunFolder
    after: RunFolder
    cases: Sequence[tuple[Change, str]]

    @classmethod
    def between(cls, before: RunFolder, after: RunFolder) -> Changes:
        return cls(before, after, changes_text(before.transfer_records(), after.transfer_records()))

    @property
    def differing(self) -> list[str]:
        return differences([self.before, self.after])


def earlier_of(run: RunFolder) -> RunFolder | None:
    """The run that a microbenchmark was to be compared with, where it is still there."""
    earlier = run.plan.get("compared_with")
    if not isinstance(earlier, str) or not Path(earlier).is_dir():
        return None
    try:
        return load_run(Path(earlier))
    except KvbenchError:
        return None


def changes_as_text(runs: Sequence[RunFolder], format_: str) -> str:
    """Each microbenchmark beside the first one, in a format for files; of a single run, its rows."""
    first, *others = runs
    if others:
        changes = [Changes.between(first, run) for run in others]
        found = [
            change_table(f"{each.after.run_id} beside {each.before.run_id}", each.cases) for each in changes
        ]
    else:
        records = first.transfer_records()
        rows = [flat_row(record, records) for record in records]
        found = [of_values(first.run_id, [Column(key, key) for key in (rows[0] if rows else ())], rows)]
    if format_ == "json":
        return as_json(found, {"runs": [run.run_id for run in runs], "differ_in": differences(runs)})
    return WRITERS[format_](found)
