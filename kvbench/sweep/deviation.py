"""Compare loads of a run with the same loads on another system, figure by figure.

``reported``: the run's figures. ``reproduced``: simulated (``kvbench simulate --against``) or measured
(``kvbench bench --against``, perhaps on an engine slower by a known factor)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from kvbench.core.findings.ahead import level_text
from kvbench.core.findings.load_row import LoadRow
from kvbench.core.findings.suspicions import not_kept_up
from kvbench.core.foreign_text import markdown_words
from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.files import store_errors, write_bytes
from kvbench.report.findings.load_rows import load_rows
from kvbench.report.tables.table import markdown_table, number, of_texts, write_csv
from kvbench.report.terminal import print_table
from kvbench.results.provenance import SIMULATED, capitalized
from kvbench.results.run import RunFolder

OUTSIDE: Final = 0.10
"""Largest deviation that counts as equal, as a share of the reported figure."""
FIGURES: Final = (
    "duration_s",
    "request_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p90_ttft_ms",
    "mean_tpot_ms",
)
_WORDS: Final = ("duration", "req/s", "TTFT mean", "TTFT P50", "TTFT P90", "TPOT mean")
_SHORT: Final = {SIMULATED: "sim"}


@dataclass(frozen=True)
class Deviation:
    """One figure of one row: the reported value and one reproduced value per arrival sequence."""

    row: LoadRow
    figure: str
    reported: float
    reproduced: float
    least: float
    most: float

    @property
    def ratio(self) -> float:
        return self.reproduced / self.reported

    @property
    def outside(self) -> bool:
        return abs(self.ratio - 1) > OUTSIDE

    def flat(self, word: str) -> dict[str, Any]:
        """Return a CSV line; ``word`` is the column of the reproduced value."""
        return {
            "connector": self.row.cell.connector,
            "protocol": self.row.axes.get("protocol"),
            "input_len": self.row.cell.input_len,
            "request_rate": self.row.request_rate,
            "tp": self.row.axes.get("tp"),
            "nics": self.row.axes.get("nics"),
            "requests": self.row.requests,
            "figure": self.figure,
            "told": self.reported,
            word: self.reproduced,
            "ratio": self.ratio,
            "least": self.least,
            "most": self.most,
            "outside": self.outside,
            "kept_up": not_kept_up(self.row) is None,
            "source": self.row.origin,
        }


@dataclass(frozen=True)
class Account:
    """A whole comparison. ``word``: simulated, emulated or measured; ``how``: how the load was sent."""

    run: RunFolder
    scenario: Scenario
    found: Sequence[Deviation]
    word: str
    how: str

    @property
    def short(self) -> str:
        """The word, shortened for a column head."""
        return _SHORT.get(self.word, self.word)


def deviations_of(row: LoadRow, drawn: Sequence[Mapping[str, Any]], scale: float = 1.0) -> list[Deviation]:
    """Compare the row with one reproduction per arrival sequence, in ``vllm bench serve``'s terms. ``scale``:
    the system's slowdown; times are divided by it and rates multiplied."""
    found = []
    for figure in FIGURES:
        reported, factor = row.get(figure), scale if figure == "request_throughput" else 1 / scale
        reproduced = [float(figures[figure]) * factor for figures in drawn if figures.get(figure) is not None]
        if reported and reproduced:
            mean = math.fsum(reproduced) / len(reproduced)
            found.append(Deviation(row, figure, reported, mean, min(reproduced), max(reproduced)))
    return found


# --- which loads -----------------------------------------------------------------------------------


def rows_of(run: RunFolder, scenario: Scenario) -> list[LoadRow]:
    """Loads of a run that match the scenario. Raises InputError if there is none."""
    labels = [connector.label for connector in scenario.connectors]
    workload, sizes = scenario.workload, scenario.deployment.tensor_parallel_size
    rows = [
        row
        for row in load_rows(run)
        if label_of(row, scenario)
        and row.cell.input_len in workload.input_len
        and row.cell.output_len == workload.output_len
        and row.axes.get("tp") in (None, *sizes)
        and row.requests
        and row.request_rate
        and math.isfinite(row.request_rate)
    ]
    if not rows:
        raise InputError(
            f"{run.path} has no load with the connectors ({', '.join(sorted(labels))}), lengths and "
            f"tensor_parallel_size ({', '.join(map(str, sizes))}) of {scenario.name}",
            hint="give a run of `kvbench import`, or one of listed rates",
        )
    return rows


def label_of(row: LoadRow, scenario: Scenario) -> str:
    """Return the row's connector in the scenario, by label or by name, protocol and NICs; or ""."""
    labels = {connector.label for connector in scenario.connectors}
    if row.cell.connector in labels:
        return row.cell.connector
    for connector in scenario.connectors:
        if connector.tensor_parallel_size not in (None, row.axes.get("tp")):
            continue
        protocol = connector.options.requested_protocol
        nics = 0 if protocol is None else len(connector.options.requested_nics)
        if (connector.name, protocol) == (row.cell.connector, row.axes.get("protocol")) and (
            row.axes.get("nics") == nics or not nics
        ):
            return connector.label
    return ""


def arrivals(row: LoadRow, seed: int, kind: str = "drawn") -> list[float]:
    """Return send times in seconds. *drawn*: Poisson arrivals, scaled to end at n / rate. *vllm*: arrivals of
    ``vllm bench serve`` with seed 0 from numpy's global generator, scaled likewise. *vllm-0.6*: those of
    ``benchmark_serving.py``, not scaled; the first request is sent at once."""
    assert row.requests is not None
    assert row.request_rate is not None
    if kind == "drawn":
        offsets = planned_offsets(row.request_rate, row.requests, 1.0, seed)
    else:
        offsets = np.cumsum(np.random.RandomState(0).exponential(1 / row.request_rate, row.requests))
    if kind == "vllm-0.6":
        return [0.0, *(float(offset) for offset in offsets[:-1])]
    return [float(offset) for offset in offsets * (row.requests / row.request_rate / offsets[-1])]


def prompt_len(row: LoadRow) -> int:
    """Actual prompt length, if the row reports the total: data sets are cut at whole lines."""
    total, n = row.get("total_input_tokens"), row.get("completed")
    return round(total / n) if total and n else row.cell.input_len


# --- how it is shown -------------------------------------------------------------------------------


def lines_of(found: Sequence[Deviation], short: str = "sim") -> tuple[list[str], list[list[str]]]:
    """Return header and one line per row; cells show reproduced / reported."""
    header = ["row", "input", "offered req/s", *(f"{word} {short} / told" for word in _WORDS)]
    lines = []
    for row in dict.fromkeys(deviation.row.key for deviation in found):
        by_figure = {deviation.figure: deviation for deviation in found if deviation.row.key == row}
        first = next(iter(by_figure.values())).row
        cells = [_cell(by_figure.get(figure)) for figure in FIGURES]
        lines.append([_row(first), f"{first.cell.input_len:,}", number(first.request_rate), *cells])
    return header, lines


def _cell(gap: Deviation | None) -> str:
    return "–" if gap is None else f"{number(gap.reproduced)} / {number(gap.reported)} = {_ratio(gap)}"


def _ratio(deviation: Deviation) -> str:
    return f"{deviation.ratio:.2f}" + (" !" if deviation.outside else "")


def place_of(row: LoadRow) -> str:
    """Row as text: ``mooncake rdma, 2 NICs, tp 4 at 1,024, 6 req/s``."""
    way = level_text("protocol", row) if row.axes.get("protocol") else ""
    tp = f"tp {row.axes['tp']:g}" if isinstance(row.axes.get("tp"), (int, float)) and way else ""
    more = ", ".join(word for word in (way, tp) if word)
    return row.place().replace(" at ", f" {more} at ", 1) if more else row.place()


def off(found: Sequence[Deviation], *, word: str = SIMULATED, kept_up: bool | None = None) -> list[str]:
    """Deviations outside the limit, the worst first. ``kept_up``: only rows that kept up, or only others."""
    chosen = [gap for gap in found if kept_up in (None, not_kept_up(gap.row) is None)]
    wrong = sorted((gap for gap in chosen if gap.outside), key=lambda gap: -abs(gap.ratio - 1))
    return [
        f"{place_of(gap.row)}: {gap.figure} {gap.ratio - 1:+.0%}; reported {number(gap.reported)}, "
        f"{word} "
        + (
            f"{number(gap.least)} to {number(gap.most)} over the arrival sequences"
            if gap.least < gap.most
            else number(gap.reproduced)
        )
        for gap in wrong
    ]


def _row(row: LoadRow) -> str:
    """Connector, protocol, NICs and ranks of a row, and whether it kept up with its load."""
    name = place_of(row).split(" at ", 1)[0]
    return name if not_kept_up(row) is None else f"{name} (saturated)"


def _outside(account: Account) -> Iterator[tuple[str, list[str]]]:
    """Yield headings and deviations: first rows in a steady state, which a model must match."""
    found, word = account.found, account.word
    kept, not_kept = off(found, word=word, kept_up=True), off(found, word=word, kept_up=False)
    steady = sum(not_kept_up(deviation.row) is None for deviation in found)
    if steady:
        yield f"More than {OUTSIDE:.0%} off ({len(kept)} of {steady} cells; marked !):", kept
    if steady < len(found):
        heading = (
            f"More than {OUTSIDE:.0%} off in rows that did not keep up, whose latencies depend on how "
            f"long the load lasted ({len(not_kept)} of {len(found) - steady} cells):"
        )
        yield heading, not_kept


def write_account(path: Path, account: Account) -> None:
    """Write ``against.md`` and ``tables/against.csv`` of a run folder. Raises StoreError."""
    parts = [
        f"# {account.scenario.name} against {account.run.path.name} ({account.word})",
        f"> **{capitalized(account.word)}**: {account.how}",
        markdown_words(account.scenario.description.strip()),
        markdown_table(*lines_of(account.found, account.short)),
        *(
            "\n".join([f"{words}\n", *(f"- {markdown_words(line)}" for line in lines)])
            for words, lines in _outside(account)
        ),
    ]
    with store_errors(path):
        (path / "tables").mkdir(exist_ok=True)
        write_csv(path / "tables/against.csv", [deviation.flat(account.word) for deviation in account.found])
        write_bytes(path / "against.md", ("\n\n".join(part for part in parts if part) + "\n").encode())


def show(account: Account, console: Console) -> None:
    scenario, found = account.scenario, account.found
    title = (
        f"{account.word.upper()} · {scenario.name} against {account.run.path.name}: {account.word} / reported"
    )
    console.print(f"\n{title}", style="bold", markup=False)
    shown = []
    for row in dict.fromkeys(deviation.row.key for deviation in found):
        by_figure = {deviation.figure: deviation for deviation in found if deviation.row.key == row}
        first = next(iter(by_figure.values())).row
        cells = [_ratio(by_figure[figure]) if figure in by_figure else "–" for figure in FIGURES]
        shown.append([_row(first), f"{first.cell.input_len:,}", number(first.request_rate), *cells])
    print_table(console, of_texts("", ["row", "input", "offered", *_WORDS], shown))
    for heading, lines in _outside(account):
        console.print(heading, style="bold", markup=False)
        for line in lines:
            console.print(f"  • {line}", markup=False)
    if scenario.description:
        console.print(f"why, as {scenario.name} says: {' '.join(scenario.description.split())}", markup=False)
