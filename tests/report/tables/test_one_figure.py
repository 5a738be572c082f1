"""A trial has one figure by each name: in every table, file and format of every reference run."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvbench.core.metrics.ttft_breakdown import PART_WORDS
from kvbench.core.records import TrialRecord
from kvbench.report.compare import CompareOptions, compare_runs, rows_page
from kvbench.report.notebook import frames
from kvbench.report.plots import PICTURES
from kvbench.report.sections.build import build
from kvbench.report.tables.columns import OF_WHOLE_RUN
from kvbench.report.tables.result import shared_unit, summary_table
from kvbench.report.tables.table import MISSING, STEADY, WHOLE_RUN, Table, number, percent
from kvbench.report.tables.trial_values import trial_values
from kvbench.report.tables.vllm_bench import serve_values
from kvbench.results.run import RunFolder, load_run

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
RUNS = {path.parent.name: load_run(path.parent) for path in sorted(REFERENCE.glob("*/manifest.json"))}
LATENCY = re.compile(r"(TTFT|TPOT|ITL|E2EL)\b")
STATISTICS = {"mean": "mean", "P50": "p50", "P90": "p90", "P99": "p99", "Mean": "mean", "Median": "p50"}
OTHER = {  # title → the key in files: one figure, of one window
    "met (%)": "slo_attainment",
    "met (%) [95 %]": "slo_attainment",
    "met\n%": "slo_attainment",
    "met %": "slo_attainment",
    "goodput (req/s)": "request_goodput",
    "achieved (req/s)": "achieved_request_rate",
    "output tok/s": "output_tok_per_s",
    "total tok/s": "total_tok_per_s",
    "output tok/s, whole run": "output_throughput",
    "total tok/s, whole run": "total_token_throughput",
    "req/s, whole run": "request_throughput",
    "Req Throughput (req/s), whole run": "request_throughput",
    "Output Token Throughput (tok/s), whole run": "output_throughput",
    "Total Token Throughput (tok/s), whole run": "total_token_throughput",
}
OFFERED = (
    "measured at (req/s)", "at\nreq/s", "rate", "rate (req/s)", "qps", "offered req/s",
)  # fmt: skip
"""Titles of the rate that was offered to a trial, in no window."""
A_RATE = re.compile(r"\b(req|tok)/s\b|\bper second\b")
NOT_A_TRIALS = re.compile(
    r"^max rate|^burst \(req/s\)|^sustained|^per |per (GPU|engine)|/(GPU|eng)$|sessions?/s|^before|^after"
)
"""Rates that are an answer, or divided by hardware."""
SHARES = ("slo_attainment",)


def all_tables(run: RunFolder) -> Iterator[tuple[str, Table]]:
    for section in build(run).sections:
        for block in section.blocks:
            if block.table is not None:
                yield f"{section.anchor}: {', '.join(section.writers)}", block.table
    if run.manifest.get("kind") != "microbench":
        for axis in ("", "input_len"):
            options = CompareOptions(group=axis, format="md")
            for table in rows_page(compare_runs([run], options), options).tables:
                yield "compare", table


def keys_of(title: str) -> list[str] | None:
    """The keys of a column's figures in files; None where it is no latency and no rate of a trial."""
    if title in OTHER:
        return [OTHER[title]]
    latency = LATENCY.search(title)
    if latency is None or "router" in title:
        return None
    stats = [STATISTICS[word] for word in re.findall(r"\b(?:mean|P50|P90|P99|Mean|Median)\b", title)]
    name, whole_run = latency[0].lower(), title.endswith(OF_WHOLE_RUN)
    if not stats:
        return None
    serve = {"p50": "median"}
    return [f"{serve.get(stat, stat)}_{name}_ms" if whole_run else f"{name}_ms_{stat}" for stat in stats]


def figures_of(run: RunFolder) -> dict[str, dict[str, Any]]:
    found = {
        trial.trial_id: {"request_rate": trial.request_rate, **serve_values(trial), **trial_values(trial)}
        for trial in run.all_trials
    }
    for values in found.values():
        of_parts = values["ttft_ms_mean_of_all"]
        if values["mean_ttft_ms"] is None:  # an older folder
            values["mean_ttft_ms"] = of_parts
        assert of_parts is None or of_parts == pytest.approx(values["mean_ttft_ms"])
    return found


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
                "All cases"
            ):
                unknown = A_RATE.search(title) and not NOT_A_TRIALS.search(title) and table.window
                assert not unknown, f"{title!r} has no definition here ({where})"
                continue
            if not table.trials:  # of the router or of parts, which are no trial's latencies
                assert column.title == "TTFT" or "P50" in title, (where, title)
                continue
            offered = title in OFFERED
            assert offered or table.window in (STEADY, WHOLE_RUN), (where, table.title, title)
            keys = ["request_rate"] if offered else keys_of(title)
            if keys is None:
                continue
            for trial, cells in zip(table.trials, table.cells, strict=True):
                shown = cells[place].partition(" [")[0].split(" / ")
                if not trial or {*shown} == {MISSING}:
                    continue
                assert [same_number(text) for text in shown] == [
                    same_number(text_of(key, figures[trial][key])) for key in keys
                ], (where, title, trial)
                looked += 1
    # Of transfers, of what faults cost, and of what drifts over windows no table has a trial's latencies.
    assert looked or run.manifest.get("kind") in ("microbench", "chaos", "soak")


def hover_texts(figure: Figure) -> Iterator[str]:
    for artist in figure.findobj():
        gid = artist.get_gid() or ""
        if gid.startswith("values:"):
            yield from json.loads(unquote(gid.removeprefix("values:")))[1:]


RATE = r"(?P<request_rate>[\d.]+) req/s"
HOVER = [
    re.compile(text)
    for text in (
        rf"(?P<name>.+), {RATE}: (?P<latency>TTFT|TPOT) (?P<high_of>P\d+|MEAN) (?P<high>[\d.]+) ms"
        r"(, P50 (?P<middle>[\d.]+|–); (?P<verdict>\w+))?",
        r"(?P<name>.+): (?P<arrived>[\d.]+) req/s arrived, (?P<request_goodput>[\d.]+) req/s completed "
        r"within the SLO",
        rf"(?P<name>.+), {RATE}: (?P<output_per_gpu>[\d.]+) tokens/s, (?P<each_user>[\d.]+) per user",
        r"(?P<trial_id>\S+): at most (?P<peak_in_flight>\d+) in flight",
        r"(?P<trial_id>\S+): at most (?P<peak_waiting>\d+) waiting for the first token",
        r"(?P<name>[^,]+), (?P<part>[^:]+(: \w[\w ]*)?): (?P<part_ms>[\d.]+) ms",
        r"(?P<name>[^,:]+)(, (?P<input_len>[\d,]+) tokens in)?: (result )?(?P<answer>.+) req/s",
    )
]
"""What marks of pictures say of trials and answers."""
NOT_OF_TRIALS = ("nic_share", "faults", "soak", "sessions")
"""Pictures whose marks have no figure of a trial."""


def trial_figures(run: RunFolder, trial: TrialRecord) -> dict[str, str]:
    """What a mark may say of a trial, by the names of the groups in ``HOVER``."""
    values, summary = trial_values(trial), trial.summary
    window = summary.get("window") or {}
    length_s = (window.get("end_s") or 0.0) - (window.get("start_s") or 0.0)
    gpus = {row.cell.connector: row.size.count(shared_unit(summary_table(run))) for row in summary_table(run)}
    output, tpot_ms = values["output_tok_per_s"], values["tpot_ms_p50"]
    found = {
        "trial_id": trial.trial_id,
        "request_rate": number(trial.request_rate),
        "verdict": trial.verdict,
        "arrived": number(summary["arrived"] / length_s if summary.get("arrived") else trial.request_rate),
        "request_goodput": number(values["request_goodput"]),
        "peak_in_flight": str(summary.get("peak_in_flight")),
        "peak_waiting": str(summary.get("peak_waiting")),
        "output_per_gpu": number(output / (gpus.get(trial.cell.connector) or 1) if output else None),
        "each_user": number(1e3 / tpot_ms if tpot_ms else None),
    }
    for latency in ("ttft", "tpot"):
        for statistic in ("mean", "p50", "p90", "p99"):
            found[f"{latency.upper()} {statistic.upper()}"] = number(values[f"{latency}_ms_{statistic}"])
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.heavy] * (name == "vllm-cpu-tiny")) for name in RUNS]
)
def test_what_marks_of_pictures_say_is_in_the_tables(name: str) -> None:
    run, looked = RUNS[name], 0
    rows = summary_table(run) if run.manifest.get("kind") != "microbench" else []
    trials = [(trial.cell.connector, trial_figures(run, trial)) for trial in run.all_trials]
    for picture, drawing in PICTURES.items():
        figure = None if picture in NOT_OF_TRIALS else drawing.draw(run)
        for text in () if figure is None else hover_texts(figure):
            match = next((found for pattern in HOVER if (found := pattern.fullmatch(text))), None)
            assert match is not None, f"{picture}: {text!r} is no known statement"
            figures = {key: value for key, value in match.groupdict().items() if value is not None}
            connector = figures.pop("name", "")
            if answer := figures.pop("answer", ""):
                length = figures.get("input_len", "").replace(",", "")
                texts = [row.answer.text() for row in rows if not length or row.cell.input_len == int(length)]
                assert answer in texts, (picture, text)
            elif part_ms := figures.get("part_ms"):
                key = next(key for key, words in PART_WORDS.items() if words == figures["part"])
                matching = [row for row in rows if row.cell.connector == connector]
                assert part_ms in [number(row.values[f"ttft_{key}_ms"]) for row in matching], (picture, text)
            else:
                latency, high_of = figures.pop("latency", ""), figures.pop("high_of", "")
                renamed = {"high": f"{latency} {high_of}", "middle": f"{latency} P50"}
                figures = {renamed.get(key, key): value for key, value in figures.items()}
                # One trial has all of it. P95 and its like are computed from the requests alone.
                assert any(
                    all(known.get(key, value) == value for key, value in figures.items())
                    for owner, known in trials
                    if not connector or connector.split()[0].rstrip(",") == owner
                ), (picture, text)
            looked += 1
        if figure is not None:
            rates = {number(trial.request_rate) for trial in run.all_trials}
            for text in (artist.get_text() for artist in figure.findobj(Text)):
                assert {*re.findall(r"measured at ([\d.]+) req/s", text)} <= rates, (picture, text)
    assert looked or run.manifest.get("kind") == "microbench"


@pytest.mark.parametrize("name", RUNS)
def test_a_trial_has_one_interval_and_one_queue_growth(name: str) -> None:
    run = RUNS[name]
    trials = {trial.trial_id: trial for trial in run.all_trials}
    growths: dict[str, set[str]] = defaultdict(set)
    for trial in run.all_trials:
        growths[trial.trial_id] |= {
            growth for finding in trial.findings for growth in re.findall(GROWTH, finding.message)
        }
    for where, table in all_tables(run):
        for trial_id, cells in zip(table.trials, table.cells, strict=False):
            for cell in cells if trial_id in trials else ():
                values = trial_values(trials[trial_id])
                bounds = [number(100 * (values[f"attainment_{end}"] or 0)) for end in ("lower", "upper")]
                for found in re.findall(r"(?<!stopping )interval ([\d.]+)% to ([\d.]+)%", cell):
                    assert [number(float(end)) for end in found] == [
                        number(round(float(bound), 1)) for bound in bounds
                    ], (where, trial_id, cell)
                growths[trial_id] |= {*re.findall(GROWTH, cell)}
    assert {trial_id: found for trial_id, found in growths.items() if len(found) > 1} == {}


GROWTH = r"queue grows:? by ([\d.]+)"


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
    names = {key for figure in figures_of(run).values() for key in figure}
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
