"""A trial has one figure by each name: in every table, file and format of every reference run."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.report.compare import CompareOptions, compare_runs, tables
from kvbench.report.notebook import frames
from kvbench.report.sections.build import build
from kvbench.report.tables.numbers import MISSING, number, percent
from kvbench.report.tables.table import STEADY, WHOLE_RUN, Table
from kvbench.report.tables.trial_values import trial_values
from kvbench.report.tables.vllm_bench import serve_values
from kvbench.results.run import RunFolder, load_run

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
RUNS = {path.parent.name: load_run(path.parent) for path in sorted(REFERENCE.glob("*/manifest.json"))}
LATENCY = re.compile(r"(TTFT|TPOT|ITL|E2EL)\b")
STATISTICS = {"mean": "mean", "P50": "p50", "P90": "p90", "P99": "p99", "Mean": "mean", "Median": "p50"}
OTHER = {  # title → (steady part, whole run): the keys in files
    "met (%)": ("slo_attainment", None),
    "met (%) [95 %]": ("slo_attainment", None),
    "met\n%": ("slo_attainment", None),
    "met %": ("slo_attainment", None),
    "goodput (req/s)": ("request_goodput", None),
    "achieved (req/s)": ("achieved_request_rate", None),
    "output tok/s": ("output_tok_per_s", "output_throughput"),
    "total tok/s": ("total_tok_per_s", "total_token_throughput"),
    "req/s": (None, "request_throughput"),
    "completed per second": (None, "request_throughput"),
    "Req Throughput (req/s)": (None, "request_throughput"),
}
OFFERED = ("measured at (req/s)", "at\nreq/s", "rate")
"""Titles of the rate that was offered to a trial, in no window."""
SHARES = ("slo_attainment",)


def all_tables(run: RunFolder) -> Iterator[tuple[str, Table]]:
    for section in build(run).sections:
        for block in section.blocks:
            if block.table is not None:
                yield f"{section.anchor}: {', '.join(section.writers)}", block.table
    if run.manifest.get("kind") != "microbench":
        for axis in ("", "input_len"):
            asked = CompareOptions(group=axis)
            for table in tables(compare_runs([run], asked), asked):
                yield "compare", table


def keys_of(title: str, window: str) -> list[str] | None:
    """The keys of a column's figures in files; None where it is no latency and no rate of a trial."""
    place = 0 if window == STEADY else 1
    if title in OTHER:
        key = OTHER[title][place]
        assert key, f"{title!r} is no figure of the {window or 'unnamed window'}"
        return [key]
    latency = LATENCY.match(title) or (re.match(r"(Mean|Median|P90|P99) (TTFT|TPOT|ITL)", title))
    if latency is None or "router" in title:
        return None
    name = (LATENCY.search(title) or latency)[0].lower()
    asked = [STATISTICS[word] for word in re.findall(r"\b(?:mean|P50|P90|P99|Mean|Median)\b", title)]
    if not asked or title == "TTFT mean (ms)":
        return None
    serve = {"p50": "median"}
    return [f"{name}_ms_{each}" if place == 0 else f"{serve.get(each, each)}_{name}_ms" for each in asked]


def figures_of(run: RunFolder) -> dict[str, dict[str, Any]]:
    return {
        trial.trial_id: {"request_rate": trial.request_rate, **serve_values(trial), **trial_values(trial)}
        for trial in run.all_trials
    }


@pytest.mark.parametrize("name", RUNS)
def test_every_figure_in_every_table_is_the_trials_own(name: str) -> None:
    run, looked = RUNS[name], 0
    figures = figures_of(run)
    for where, table in all_tables(run):
        if table.every_column:
            continue
        for place, column in enumerate(table.columns):
            title = column.title
            if not (LATENCY.search(title) or title in OTHER or title in OFFERED) or table.title.startswith(
                "Every case"
            ):
                continue
            if not table.trials:  # of the router or of parts, which are no trial's latencies
                assert column.title == "TTFT" or "P50" in title, (where, title)
                continue
            offered = title in OFFERED
            assert offered or table.window in (STEADY, WHOLE_RUN), (where, table.title, title)
            keys = ["request_rate"] if offered else keys_of(title, table.window)
            if keys is None:
                continue
            for trial, cells in zip(table.trials, table.cells, strict=True):
                shown = cells[place].partition(" [")[0].split(" / ")
                if not trial or shown == [MISSING]:
                    continue
                assert [same_number(each) for each in shown] == [
                    same_number(text_of(key, figures[trial][key])) for key in keys
                ], (where, title, trial)
                looked += 1
    # Of transfers, of what faults cost, and of what drifts over windows no table has a trial's latencies.
    assert looked or run.manifest.get("kind") in ("microbench", "chaos", "soak")


def text_of(key: str, value: float | None) -> str:
    return percent(value) if key in SHARES else number(value)


def same_number(text: str) -> float | str:
    return text if text == MISSING else float(text.replace(",", ""))


@pytest.mark.parametrize("name", RUNS)
def test_a_name_has_one_value_in_all_files_of_a_run(name: str) -> None:
    run = RUNS[name]
    if run.manifest.get("kind") == "microbench":
        pytest.skip("it has no trials")
    found: dict[tuple[str, str], set[Any]] = defaultdict(set)
    report = build(run)
    rows = [*(row for rows in report.files.values() for row in rows), *frames.trials(run).to_dict("records")]
    for table in (table for _, table in all_tables(run)):
        rows += [row for row in table.rows if "max_request_rate" not in row]
    known = {*figures_of(run)}
    names = {key for each in figures_of(run).values() for key in each}
    for row in rows:
        if row.get("trial_id") in known:
            for key in names & row.keys():
                value = row[key]
                if value is not None and value == value:
                    found[row["trial_id"], key].add(round(float(value), 9))
    assert found
    assert {key: values for key, values in found.items() if len(values) > 1} == {}


def test_what_kvbench_cancelled_has_not_failed() -> None:
    seen = 0
    for run in RUNS.values():
        for trial in run.all_trials:
            cancelled, failed = trial.summary.get("cancelled"), trial.summary.get("failed")
            if cancelled and isinstance(failed, dict) and trial.method != "imported":
                assert serve_values(trial)["failed"] == sum(failed.values())
                assert serve_values(trial)["cancelled"] == cancelled
                seen += 1
    assert seen


def test_the_figures_are_finite() -> None:
    for run in RUNS.values():
        for figures in figures_of(run).values():
            assert all(value is None or math.isfinite(value) for value in figures.values())
