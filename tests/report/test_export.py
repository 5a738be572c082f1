"""``kvbench export``: every known figure, in base units, in formats that their readers take."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from run_files import edit_json, imported
from sample_run import make_run

from kvbench.errors import InputError
from kvbench.report.export import FORMATS, command, samples
from kvbench.report.tables.result import summary_table
from kvbench.results.run import RunFolder, load_run

RECORDED = Path(__file__).parents[1] / "recorded" / "seeds"
LINE = re.compile(
    r'^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{(?P<labels>(?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (?P<value>\S+)$'
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return load_run(make_run(tmp_path_factory.mktemp("export"), special=True))


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return imported(tmp_path_factory.mktemp("notes"), RECORDED / "notes.txt")


def exported(run: RunFolder, name: str) -> str:
    out = io.StringIO()
    command(run.path, name, None, Console(file=out, width=40))
    return out.getvalue()


def test_prometheus_lines_are_well_formed_and_each_metric_is_told_once(run: RunFolder) -> None:
    lines = exported(run, "prometheus").splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    values = [LINE.match(line) for line in lines if not line.startswith("#")]
    assert all(values)
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series)) == len(samples(run))


def test_figures_are_the_summarys_in_seconds(run: RunFolder) -> None:
    p99_s = {
        (sample.labels["connector"], sample.labels["input_len"]): sample.value
        for sample in samples(run)
        if sample.metric.name == "ttft_seconds" and sample.labels["statistic"] == "p99"
    }
    rows = {
        (row.cell.connector, str(row.cell.input_len)): row.values["ttft_ms_p99"]
        for row in summary_table(run)
        if row.values["ttft_ms_p99"] is not None
    }
    assert p99_s == {key: pytest.approx((value or 0) / 1e3) for key, value in rows.items()}
    refused = [row for row in summary_table(run) if row.answer.max_request_rate is None]
    assert refused
    rates = {
        (sample.labels["connector"], sample.labels["input_len"])
        for sample in samples(run)
        if sample.metric.name == "max_request_rate_per_second"
    }
    assert not rates & {(row.cell.connector, str(row.cell.input_len)) for row in refused}


def test_otlp_has_one_gauge_a_metric_at_the_runs_end(run: RunFolder) -> None:
    data = json.loads(exported(run, "otel-json"))
    (scope,) = data["resourceMetrics"][0]["scopeMetrics"]
    points = [point for metric in scope["metrics"] for point in metric["gauge"]["dataPoints"]]
    assert len(points) == len(samples(run))
    assert all(re.fullmatch(r"\d{19}", point["timeUnixNano"]) for point in points)
    units = {metric["name"]: metric["unit"] for metric in scope["metrics"]}
    assert (units["kvbench.ttft"], units["kvbench.slo_attainment"]) == ("s", "1")
    names = [metric["name"] for metric in scope["metrics"]]
    assert len(names) == len(set(names))


def test_csv_opens_in_a_spreadsheet(run: RunFolder) -> None:
    text = exported(run, "csv")
    assert text.startswith("\ufeff")
    rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
    assert [float(row["value"]) for row in rows] == [sample.value for sample in samples(run)]


def test_read_in_rows_are_exported_by_their_trial(notes: RunFolder) -> None:
    points = [
        sample
        for sample in samples(notes)
        if sample.metric.name == "offered_ttft_seconds" and sample.labels["statistic"] == "mean"
    ]
    assert (len(points), points[0].value) == (10, pytest.approx(3.79844))
    assert points[0].labels["request_rate"] == "80"


def test_to_a_file_and_unknown_formats(run: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    command(run.path, "prometheus", file, Console(file=io.StringIO()))
    assert file.read_text() == FORMATS["prometheus"](run)
    with pytest.raises(InputError) as caught:
        command(run.path, "xml", None, Console(file=io.StringIO()))
    assert "otel-json" in (caught.value.hint or "")


def test_names_of_others_cannot_break_a_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path, connectors=("mooncake",), input_lens=(512,))
    edit_json(folder / "manifest.json", scenario='a"b\\c\nd')
    lines = [
        line for line in exported(load_run(folder), "prometheus").splitlines() if not line.startswith("#")
    ]
    assert all(LINE.match(line) for line in lines)


def test_each_row_of_a_microbenchmark_is_a_series_of_its_own(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "recorded" / "written" / "ib_write_bw.txt"
    lines = exported(imported(tmp_path, file, file), "prometheus").splitlines()
    moved = [line for line in lines if line.startswith("kvbench_transfer_bytes_per_second{")]
    assert len({line.rsplit(" ", 1)[0] for line in moved}) == len(moved) > 1
