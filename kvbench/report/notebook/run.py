"""A run folder, or several side by side, in a notebook or a script: tables, pictures, summary.

A folder may be of any kind and in any state; what it does not have is missing, never invented. Pictures are
``run.plot.latency()``, or ``run.plot.latency(ax=axes)``."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import pandas as pd

from kvbench.core.findings.ahead import Pair
from kvbench.core.foreign_text import markdown_words
from kvbench.core.records import Method
from kvbench.errors import InputError
from kvbench.report.findings.ahead import RatePair
from kvbench.report.notebook import frames
from kvbench.report.sections.build import build
from kvbench.report.side_by_side import Changes, are_microbenchmarks, compared_runs
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.table import number
from kvbench.report.value import Block, Report
from kvbench.results.provenance import SIMULATED, caption, mark_of, slo_of
from kvbench.results.run import RunFolder, load_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvbench.report.plots import Picture, Theme


class Draw(Protocol):
    def __call__(self, theme: Theme = "light", ax: Axes | None = None) -> Figure: ...


class Plots:
    """The pictures of a run by name, each a function that returns a matplotlib figure.

    The names are those of the files in figures/; ``list(run.plot)`` has those that the run has data for. With
    ``ax`` a picture replaces those Axes, without title and notes, and the returned figure is theirs; a
    picture with several panels divides them, so they must be a subplot. Raises InputError where the run has
    no data for a picture."""

    max_request_rate: Draw
    latency: Draw
    loads: Draw
    goodput: Draw
    ttft_breakdown: Draw
    distribution: Draw
    in_flight: Draw
    pareto: Draw
    nic_share: Draw
    burst: Draw
    bandwidth: Draw
    nic_scaling: Draw
    call_time: Draw

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __call__(self, name: str, theme: Theme = "light", ax: Axes | None = None) -> Figure:
        """Draw the picture of that name. Raises InputError for an unknown name, or without data for it."""
        pictures = self._pictures()
        if name not in pictures:
            raise InputError(f"there is no picture called {name!r}", hint=f"there are: {', '.join(pictures)}")
        figure = pictures[name].draw(self._folder, theme, ax)
        if figure is None:
            raise InputError(
                f"{self._folder.run_id} has no data for the picture {name!r}",
                hint="list(run.plot) names the pictures that it has data for",
            )
        return _showable(figure) if ax is None else figure

    def __getattr__(self, name: str) -> Draw:
        if name.startswith("_") or name not in self._pictures():
            raise AttributeError(
                f"a run of this kind has no picture {name!r}; it has: {', '.join(dir(self))}"
            )

        def draw(theme: Theme = "light", ax: Axes | None = None) -> Figure:
            return self(name, theme, ax)

        picture = self._pictures()[name]
        draw.__name__, draw.__qualname__ = name, f"Plots.{name}"
        draw.__doc__ = (
            f"{picture.title}. {picture.alt}\n\n"
            "``theme``: light or dark. ``ax``: the Axes to draw in, by default a new figure.\n"
            "Returns the figure. Raises InputError where the run has no data for it."
        )
        return draw

    def __dir__(self) -> list[str]:
        return list(self._pictures())

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the pictures that the run has data for."""
        return iter(
            [
                name
                for name, picture in self._pictures().items()
                if picture.draw(self._folder, "light") is not None
            ]
        )

    def _pictures(self) -> Mapping[str, Picture]:
        from kvbench.report.plots import pictures_of

        return {name: picture for name, picture in pictures_of(self._folder).items() if picture.filed}


def _showable(figure: Figure) -> Figure:
    """Return a figure that a notebook shows without pyplot's global state."""

    def png() -> bytes:
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=80, metadata={"Software": "kvbench"})
        return file.getvalue()

    vars(figure)["_repr_png_"] = png
    return figure


MOST_ROWS: Final = 40
MOST_NOTES: Final = 8


def _head(report: Report) -> tuple[str, str, str]:
    """Return title, caption and mark; without machine and day for a simulated run."""
    mark = report.mark
    origin = "" if mark is not None and mark.word.startswith(SIMULATED) else report.caption
    return report.titles["notebook"], origin, "" if mark is None else f"{mark.word}: {mark.why}"


def _blocks(report: Report) -> list[Block]:
    return [block for section in report.of("notebook") for block in section.blocks]


def _more(blocks: Sequence[Block]) -> str:
    rows = sum(len(block.table.cells) for block in blocks if block.table)
    notes = sum(len(block.notes) for block in blocks)
    parts = [
        f"{count - most} more {word}"
        for count, most, word in ((rows, MOST_ROWS, "rows"), (notes, MOST_NOTES, "notes"))
        if count > most
    ]
    return f"… and {', '.join(parts)}: see run.summary and run.findings" if parts else ""


def html_of(report: Report) -> str:
    """Return a block of HTML without scripts, page styles or downloads; all text is escaped."""
    (title, origin, mark), blocks = _head(report), _blocks(report)
    parts = [f"<div><strong>{escape(title)}</strong>"]
    parts += [f"<br><small>{escape(origin)}</small>"] if origin else []
    parts += [f"<br><em>{escape(mark)}</em>"] if mark else []
    for block in blocks:
        parts += [f"<p>{escape(block.about)}</p>"] if block.about else []
        if block.table is not None:
            parts.append(html_table(block.table.header, block.table.cells[:MOST_ROWS]))
        if block.notes:
            items = "".join(f"<li>{escape(note.text)}</li>" for note in block.notes[:MOST_NOTES])
            parts.append(f"<ul>{items}</ul>")
    more = _more(blocks)
    parts += [f"<p><small>{escape(more)}</small></p>"] if more else []
    return "\n".join([*parts, "</div>"])


def markdown_of(report: Report) -> str:
    (title, origin, mark), blocks = _head(report), _blocks(report)
    parts = [f"**{_plain(title)}**", _plain(origin), f"*{_plain(mark)}*" if mark else ""]
    for block in blocks:
        parts.append(markdown_words(block.about))
        if block.table is not None:
            parts.append(markdown_table(block.table.header, block.table.cells[:MOST_ROWS]))
        parts.append("\n".join(f"- {_plain(note.text)}" for note in block.notes[:MOST_NOTES]))
    parts.append(_more(blocks))
    return "\n\n".join(part for part in parts if part) + "\n"


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table as in a report, with HTML from foreign text escaped."""
    lines = [list(header), ["---"] * len(header), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    return markdown_words(text).replace("|", "\\|").replace("\n", " ")


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
        return slo_of(self.folder).text()

    @property
    def mark(self) -> str:
        """``emulated`` or ``simulated``; empty for real engines."""
        mark = mark_of(self.folder)
        return "" if mark is None else mark.word

    @property
    def warnings(self) -> list[str]:
        """Damage of the folder."""
        return list(self.folder.warnings)

    def reload(self) -> Run:
        """Return the folder read again, for a run in progress."""
        return load(self.path)

    # -- tables ---------------------------------------------------------------------------------

    @cached_property
    def summary(self) -> pd.DataFrame:
        """The report's main table: one row per connector and input length, or per microbenchmark case."""
        return frames.summary(self.folder)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per finished cell, method and tier: its answer with interval, and what limits it."""
        return frames.cells(self.folder)

    @cached_property
    def trials(self) -> pd.DataFrame:
        return frames.trials(self.folder)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request of every trial; ``read_requests`` selects rows and columns."""
        return self.read_requests()

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        """One row per sample of counters and gauges during the trials."""
        return frames.telemetry(self.folder, self.folder.all_trials)

    @cached_property
    def transfers(self) -> pd.DataFrame:
        """One row per case of a microbenchmark; empty in other runs."""
        return frames.transfers(self.folder)

    @cached_property
    def calls(self) -> pd.DataFrame:
        """One row per transfer of a microbenchmark."""
        return frames.calls(self.folder)

    @cached_property
    def models(self) -> pd.DataFrame:
        """One row per way of moving bytes: start-up + per descriptor + bytes / bandwidth, as fitted."""
        return frames.models(self.folder)

    @cached_property
    def findings(self) -> pd.DataFrame:
        """The gates' findings, and notes on the run."""
        return frames.findings(self.folder)

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables besides the main one, by name: burst, fixed_by_rate, equal_rate, …"""
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
        for a trial or column that there is not."""
        chosen = frames.chosen_trials(self.folder, trials, connector, input_len, method)
        return frames.requests(self.folder, chosen, columns)

    @property
    def plot(self) -> Plots:
        """The pictures: ``run.plot.latency()``; ``list(run.plot)`` names those that this run has data for."""
        return Plots(self.folder)

    # -- display --------------------------------------------------------------------------------

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
    """Read a run folder of any kind and state. Raises StoreError for another folder, or one of a newer
    kvbench."""
    return path if isinstance(path, Run) else Run(load_run(path))


_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ROW_COLUMNS: Final = ("figure", "place", "one", "other", "ratio", "low", "high", "told", "text")
_CASE: Final = ("backend", "protocol", "op", "block_bytes", "batch_size", "nics")


class Comparison:
    """Runs side by side: the better one with its margin, and differences that are not significant.

    ``rows``: one per pair and figure; ``ratio`` is one / other with its interval ``low`` to ``high``,
    ``told`` whether it differs significantly from 1. Microbenchmarks have one per case, with ``ratio`` after
    / before. ``differing``: why the runs are not comparable, if compared nevertheless."""

    def __init__(self, members: Mapping[str, Run], rows: pd.DataFrame, differing: Sequence[str]) -> None:
        self.members = dict(members)
        self.rows = rows
        self.differing = list(differing)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Summaries of all runs, one below the other; ``run`` is the run's letter."""
        parts = [run.summary.assign(run=letter) for letter, run in self.members.items()]
        # An all-empty column of one run says nothing about a column's type.
        return pd.concat([part.dropna(axis="columns", how="all") for part in parts], ignore_index=True)

    def _heading(self) -> list[str]:
        lines = [f"{letter}: {caption(run.folder)}" for letter, run in self.members.items()]
        if self.differing:
            lines.append("NOT COMPARABLE, combined nevertheless: they differ in " + "; ".join(self.differing))
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
    """Compare the connectors of one run, or several runs; of two microbenchmarks the common cases.

    Two searched rates are ordered only if one is higher with a probability of 95 % and invalid trials
    ended neither search; two loads only if they were alike and their ratio has an interval. ``by``: compared
    axis (connector, nics, protocol, tp, run, …). Raises InputError for runs that are not comparable (another
    model, SLO or workload) unless ``force``."""
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
    """Return two searched rates; per engine if their numbers differ. ``one`` is ahead if ``told``."""
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
    """Yield a row per figure of two compared loads, significant or not."""
    for pair in found:
        names = {"place": pair.place, "one": pair.one, "other": pair.other}
        if pair.unequal:
            yield {"figure": "", **names, "told": False, "text": f"inconclusive: {pair.reason()}"}
        for ratio in pair.ratios:
            significant = ratio.significant and not pair.why_not
            yield {
                "figure": ratio.figure,
                **names,
                "ratio": ratio.ratio,
                "low": ratio.low,
                "high": ratio.high,
                "told": significant,
                "text": ratio.text() if significant else f"inconclusive: {pair.reason()}",
            }


def _changed(changes: Changes) -> pd.DataFrame:
    """Return a row for each case of the later run and the earlier one."""
    names = (*_CASE, "before_gb_per_s", "after_gb_per_s")
    rows = [
        {**{name: getattr(change.case, name) for name in _CASE}, **asdict(change), "text": change.text()}
        for change, _ in changes.cases
    ]
    found = frames.frame(rows, (*names, "ratio", "low", "high", "text"))
    return found.drop(columns=["case", "why"], errors="ignore")
