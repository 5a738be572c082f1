"""Runs side by side, as ``kvbench.compare`` gives them: who is ahead, and what cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Final

import pandas as pd

from kvbench.core.findings.ahead import Pair
from kvbench.errors import InputError
from kvbench.report.findings.ahead import RatePair
from kvbench.report.notebook import frames
from kvbench.report.notebook.display import html_table, markdown_table
from kvbench.report.notebook.run import Run, load
from kvbench.report.side_by_side import Changes, are_microbenchmarks, compared_runs
from kvbench.report.tables.numbers import number
from kvbench.results.provenance import caption

_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ROW_COLUMNS: Final = ("figure", "place", "one", "other", "ratio", "low", "high", "told", "text")
_CASE: Final = ("backend", "protocol", "op", "block_bytes", "batch_size", "nics")


class Comparison:
    """Runs side by side: who is ahead and by how much, and what cannot be told from this data.

    ``rows``: a pair and figure each; ``ratio`` is one / other with its interval ``low`` to ``high``, ``told``
    whether it can be told from 1. Of microbenchmarks a case each, ``ratio`` is after / before.
    ``differing``: in what the runs are not comparable, if they were put together all the same.
    """

    def __init__(self, members: Mapping[str, Run], rows: pd.DataFrame, differing: Sequence[str]) -> None:
        self.members = dict(members)
        self.rows = rows
        self.differing = list(differing)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """The runs' own summaries under each other; ``run`` is the letter."""
        parts = [run.summary.assign(run=letter) for letter, run in self.members.items()]
        # An all-empty column of one run says nothing about a column's type.
        return pd.concat([part.dropna(axis="columns", how="all") for part in parts], ignore_index=True)

    def _heading(self) -> list[str]:
        lines = [f"{letter}: {caption(run.folder)}" for letter, run in self.members.items()]
        if self.differing:
            lines.append(
                "NOT COMPARABLE, put together all the same: they differ in " + "; ".join(self.differing)
            )
        return lines

    def __repr__(self) -> str:
        return "\n".join([*self._heading(), *self.rows["text"].astype(str)])

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        names = [name for name in self.rows.columns if name != "text"]
        rows = [
            [number(float(cell)) if isinstance(cell, float) else str(cell) for cell in row]
            for row in self.rows[[*names, "text"]].itertuples(index=False)
        ]
        return [*names, "in words"], rows

    def _repr_html_(self) -> str:
        lines = "<br>".join(escape(line) for line in self._heading())
        return f"<div><small>{lines}</small>\n{html_table(*self._shown())}\n</div>"

    def _repr_markdown_(self) -> str:
        return "\n\n".join([*self._heading(), markdown_table(*self._shown())]) + "\n"


def compare(*members: Run | Path | str, by: str = "", force: bool = False) -> Comparison:
    """Compares the connectors of one run, or several runs; of two microbenchmarks each case they share.

    Two searched rates are ordered only where one is the higher with a probability of 95 %, and both searches
    converged; two loads only where they were alike and an interval of their ratio is known. ``by``: the axis
    by which loads are compared (connector, nics, protocol, tp, run, …). Raises InputError for runs that are
    not comparable (another model, SLO or workload) unless ``force``.
    """
    loaded = [load(member) for member in members]
    if not loaded or len(loaded) > len(_LETTERS):
        raise InputError(f"give 1 to {len(_LETTERS)} runs to compare, not {len(loaded)}")
    named = dict(zip(_LETTERS, loaded, strict=False))
    folders = [run.folder for run in loaded]
    if are_microbenchmarks(folders):
        if len(loaded) != 2:
            raise InputError(f"two microbenchmarks are compared, not {len(loaded)}")
        return Comparison(named, _changed(Changes.between(*folders)), [])
    compared = compared_runs(folders, by, force=force)
    found = [*map(_searched, compared.searched), *_offered(compared.offered)]
    return Comparison(named, frames.frame(found, ROW_COLUMNS), compared.differing)


def _searched(pair: RatePair) -> dict[str, Any]:
    """Two searched rates; of unequal numbers of engines, those per engine. ``one`` is ahead if told."""
    return {
        "figure": "max_request_rate" + (f"_per_{pair.per.lower()}" if pair.per else ""),
        "place": f"{pair.input_len:,} in, {pair.output_len:,} out",
        "one": pair.ahead,
        "other": pair.behind,
        "ratio": pair.ratio,
        "low": pair.low,
        "high": pair.high,
        "told": pair.ratio is not None,
        "text": pair.text(),
    }


def _offered(found: Iterable[Pair]) -> Iterator[dict[str, Any]]:
    """Two loads that were offered as such: a row each figure, whether anything can be told of it or not."""
    for pair in found:
        names = {"place": pair.place, "one": pair.one, "other": pair.other}
        if pair.unequal:
            yield {"figure": "", **names, "told": False, "text": f"cannot be told: {pair.reason()}"}
        for each in pair.ratios:
            told = each.significant and not pair.why_not
            yield {
                "figure": each.figure,
                **names,
                "ratio": each.ratio,
                "low": each.low,
                "high": each.high,
                "told": told,
                "text": each.text() if told else f"cannot be told: {pair.reason()}",
            }


def _changed(changes: Changes) -> pd.DataFrame:
    """A row for each case of the later run and the earlier one."""
    names = (*_CASE, "before_gb_per_s", "after_gb_per_s")
    rows = [
        {**{name: getattr(change.case, name) for name in _CASE}, **asdict(change), "text": change.text()}
        for change, _ in changes.cases
    ]
    found = frames.frame(rows, (*names, "ratio", "low", "high", "text"))
    return found.drop(columns=["case", "why"], errors="ignore")
