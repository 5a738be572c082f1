"""Runs side by side, as ``kvbench.compare`` gives them: who is ahead, and what cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Final

import pandas as pd

from kvbench.core.findings.ahead import Pair, pairs
from kvbench.core.transfers.stats import compare as compare_transfers
from kvbench.errors import InputError
from kvbench.report.findings.ahead import Comparison as Searched
from kvbench.report.findings.ahead import compare as compare_rows
from kvbench.report.findings.load_rows import default_axis, load_rows
from kvbench.report.notebook import frames
from kvbench.report.notebook.display import html_table, markdown_table
from kvbench.report.notebook.run import Run, load
from kvbench.report.tables.result import number, summary_table
from kvbench.results.provenance import caption, check_comparable

_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ROW_COLUMNS: Final = ("figure", "place", "one", "other", "ratio", "low", "high", "told", "text")


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

    Two searched rates are ordered only where their intervals are apart; two loads only where they were alike
    and an interval of their ratio is known. ``by``: the axis by which loads are compared (connector, nics,
    protocol, tp, run, …). Raises InputError for runs that are not comparable (another model, SLO, machine,
    seed, …) unless ``force``.
    """
    loaded = [load(member) for member in members]
    if not loaded or len(loaded) > len(_LETTERS):
        raise InputError(f"give 1 to {len(_LETTERS)} runs to compare, not {len(loaded)}")
    named = dict(zip(_LETTERS, loaded, strict=False))
    raw = {run.kind == "microbench" for run in loaded}
    if raw == {True, False}:
        raise InputError("a microbenchmark of transfers and a run of requests have no table in common")
    if raw == {True}:
        return Comparison(named, _transfer_rows(loaded), [])
    differing = check_comparable([run.folder for run in loaded], force=force)
    rows = [
        row
        for letter, run in named.items()
        for row in summary_table(run.folder, letter if len(named) > 1 else "")
    ]
    letters = list(named) if len(named) > 1 else [""]
    offered = [
        row for letter, run in zip(letters, loaded, strict=True) for row in load_rows(run.folder, letter)
    ]
    axis = by or default_axis(offered)
    found = [*(_searched(each) for each in compare_rows(rows)), *_offered(pairs(offered, axis))]
    return Comparison(named, frames.frame(found, ROW_COLUMNS), differing)


def _searched(pair: Searched) -> dict[str, Any]:
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
        if pair.unequal:
            names = {"figure": "", "place": pair.place, "one": pair.one, "other": pair.other}
            yield {**names, "told": False, "text": f"cannot be told: {pair.reason()}"}
        for each in pair.ratios:
            told = each.told and not pair.why_not
            yield {
                "figure": each.figure,
                "place": pair.place,
                "one": pair.one,
                "other": pair.other,
                "ratio": each.ratio,
                "low": each.low,
                "high": each.high,
                "told": told,
                "text": each.text() if told else f"cannot be told: {pair.reason()}",
            }


def _transfer_rows(loaded: Sequence[Run]) -> pd.DataFrame:
    if len(loaded) != 2:
        raise InputError(f"two microbenchmarks are compared, not {len(loaded)}")
    before, after = (run.folder.transfer_records() for run in loaded)
    names = (
        "backend",
        "protocol",
        "op",
        "block_bytes",
        "batch_size",
        "nics",
        "before_gb_per_s",
        "after_gb_per_s",
    )
    rows = [
        {
            **{name: getattr(change.case, name) for name in names[:6]},
            **asdict(change),
        }
        | {"text": change.text()}
        for change in compare_transfers(before, after)
    ]
    found = frames.frame(rows, (*names, "ratio", "low", "high", "text"))
    return found.drop(columns=["case", "why"], errors="ignore")
