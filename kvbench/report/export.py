"""``kvbench export``: a run's summary as Prometheus text, OpenTelemetry metrics (JSON), CSV, or MLflow runs.

Names and units follow each system's rules: base units (seconds, bytes), a unit in the name for Prometheus, a
UCUM unit for OpenTelemetry. A missing figure has no line. In MLflow the experiment is the scenario; one run
holds the report, with a child run per row of the result table and its trials as steps. The optional MLflow
library writes to MLFLOW_TRACKING_URI."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from kvbench.core.exposition import family, page
from kvbench.core.foreign_text import spreadsheet_cell, visible
from kvbench.core.records import TrialRecord
from kvbench.errors import InputError
from kvbench.files import store_errors, write_bytes
from kvbench.report.findings.load_rows import load_rows
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.trial_values import trial_values
from kvbench.report.terminal import print_changed_files
from kvbench.results.provenance import hardware_of, mark_of, model_of, scenario_of, slo_of
from kvbench.results.run import RunFolder, load_run

if TYPE_CHECKING:
    from mlflow import MlflowClient


INSTALL: Final = "pip install mlflow-skinny"
STATUS: Final = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
_NAMES: Final = ("connector", "input_len", "output_len")
_TRIAL: Final = ("slo_attainment", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
_ARTIFACTS: Final = ("report.html", "report.md", "scenario.yaml", "tables/summary.csv", "tables/trials.csv")


def export(run: RunFolder, uri: str | None = None) -> tuple[str, int]:
    """Write the run; return the id of its MLflow run, and the number of rows below it.

    ``uri``: MLflow's store, default: MLflow's settings. Raises InputError without the library, or if MLflow
    refuses."""
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise InputError(f"--format mlflow needs MLflow: {error}", hint=INSTALL) from error
    try:
        return _written(MlflowClient(tracking_uri=uri), run)
    except MlflowException as error:
        hint = "set MLFLOW_TRACKING_URI to a server or a database, such as sqlite:///mlflow.db"
        raise InputError(f"MLflow does not take the run: {error}", hint=hint) from error


def _written(client: MlflowClient, run: RunFolder) -> tuple[str, int]:
    name = f"kvbench-{scenario_of(run)}"
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known is not None else client.create_experiment(name)
    mark = mark_of(run)
    tags = {"mlflow.source.name": "kvbench", "kvbench.run": run.run_id, "mark": mark.word if mark else ""}
    whole = _begun(client, experiment, run, run.run_id, tags)
    params = {
        "scenario": scenario_of(run), "model": model_of(run), "hardware": hardware_of(run),
        "slo": slo_of(run).text(), "kind": run.manifest.get("kind"), "seed": run.manifest.get("seed"),
        "kvbench": run.manifest.get("kvbench"),
    }  # fmt: skip
    _params(client, whole, params)
    for file in _ARTIFACTS:
        if (run.path / file).is_file():
            client.log_artifact(whole, str(run.path / file))
    rows = [row for row in summary_table(run) if row.outcome != "skipped"]
    for row in rows:
        _row(client, experiment, run, row, {**tags, "mlflow.parentRunId": whole})
    _ended(client, whole, run)
    return whole, len(rows)


def _row(client: MlflowClient, experiment: str, run: RunFolder, row: Row, tags: Mapping[str, str]) -> None:
    named = f"{row.cell.connector} {row.cell.input_len} in"
    one = _begun(client, experiment, run, named, {**tags, "outcome": row.outcome, "limit": row.limit})
    values = row.flat()
    _params(client, one, {key: values.get(key) for key in _NAMES})
    when_ms = _milliseconds(run.manifest.get("ended_at") or run.manifest.get("started_at"))
    metrics = [(key, value, when_ms, 0) for key, value in _known(values) if key not in _NAMES]
    trials = [trial for trial in run.trials_of(row.cell) if trial.purpose != "ceiling"]
    metrics += [metric for step, trial in enumerate(trials, 1) for metric in _trial(trial, step)]
    _log(client, one, metrics)
    _ended(client, one, run)


def _trial(trial: TrialRecord, step: int) -> Iterable[tuple[str, float, int, int]]:
    """Yield a trial as a step of its cell's metrics."""
    values: Mapping[str, Any] = {"request_rate": trial.request_rate, **trial_values(trial)}
    when_ms = _milliseconds(trial.started_at)
    for key, value in _known({key: values.get(key) for key in ("request_rate", *_TRIAL)}):
        yield f"trial/{key}", value, when_ms, step


def _log(client: MlflowClient, run_id: str, metrics: Sequence[tuple[str, float, int, int]]) -> None:
    from mlflow.entities import Metric

    client.log_batch(run_id, metrics=[Metric(*metric) for metric in metrics])


def _begun(client: MlflowClient, experiment: str, run: RunFolder, name: str, tags: Mapping[str, str]) -> str:
    started = _milliseconds(run.manifest.get("started_at"))
    known = {key: value for key, value in tags.items() if value}
    begun = client.create_run(experiment, start_time=started, tags=known, run_name=name)
    return str(begun.info.run_id)


def _ended(client: MlflowClient, run_id: str, run: RunFolder) -> None:
    ended = _milliseconds(run.manifest.get("ended_at") or run.manifest.get("started_at"))
    status = STATUS.get(str(run.manifest.get("status")), "FINISHED")
    client.set_terminated(run_id, status=status, end_time=ended)


def _params(client: MlflowClient, run_id: str, params: Mapping[str, Any]) -> None:
    for key, value in params.items():
        if value not in (None, ""):
            client.log_param(run_id, key, value)


def _known(values: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield key, float(value)


def _milliseconds(moment: Any) -> int:
    """Return milliseconds since 1970; 0 is unknown."""
    try:
        return round(datetime.fromisoformat(str(moment).replace("Z", "+00:00")).timestamp() * 1e3)
    except ValueError:
        return 0


PREFIX: Final = "kvbench"
_STATISTICS: Final = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True)
class Metric:
    """One kind of figure. ``unit``: UCUM, for OpenTelemetry; ``scale``: factor from kvbench's unit to it."""

    name: str
    help: str
    unit: str = "1"
    scale: float = 1.0


@dataclass(frozen=True)
class Sample:
    metric: Metric
    labels: Mapping[str, str]
    value: float


_LATENCIES: Final = {
    latency: Metric(f"{latency}_seconds", f"{words}.", "s", 1e-3)
    for latency, words in {
        "ttft": "Time to the first token, from the scheduled send",
        "tpot": "Time per output token after the first",
        "itl": "Time between tokens",
        "e2el": "Time to the last token, from the scheduled send",
    }.items()
}
_PLAIN: Final = {
    "max_request_rate": Metric(
        "max_request_rate_per_second", "Highest request rate that meets the SLO.", "{request}/s"
    ),
    "lower": Metric("max_request_rate_lower_per_second", "Lower end of its interval.", "{request}/s"),
    "upper": Metric("max_request_rate_upper_per_second", "Upper end of its interval.", "{request}/s"),
    "max_request_rate_per_engine": Metric(
        "max_request_rate_per_engine_per_second", "Highest request rate by engine.", "{request}/s"
    ),
    "max_request_rate_per_gpu": Metric(
        "max_request_rate_per_gpu_per_second", "Highest request rate per GPU, if known.", "{request}/s"
    ),
    "request_goodput_per_gpu": Metric(
        "request_goodput_per_gpu_per_second", "Goodput by GPU, where known.", "{request}/s"
    ),
    "output_tok_per_s_per_gpu": Metric(
        "output_tokens_per_gpu_per_second", "Output tokens per GPU, if known.", "{token}/s"
    ),
    "cost_per_1k_requests": Metric("cost_per_1k_requests", "Cost by the scenario's price of a GPU hour."),
    "cost_per_1m_output_tokens": Metric(
        "cost_per_1m_output_tokens", "Cost by the scenario's price of a GPU hour."
    ),
    "watts_per_gpu": Metric("watts_per_gpu", "Mean power of a GPU, if known.", "W"),
    "joules_per_output_token": Metric("joules_per_output_token", "Energy of all GPUs per output token.", "J"),
    "engines": Metric("engines", "Engines that served it.", "{engine}"),
    "gpus": Metric("gpus", "GPUs of these, where known.", "{gpu}"),
    "slo_attainment": Metric("slo_attainment_ratio", "Share of requests that met every limit of the SLO."),
    "achieved_request_rate": Metric(
        "achieved_request_rate_per_second", "Requests completed, steady part.", "{request}/s"
    ),
    "request_goodput": Metric(
        "request_goodput_per_second", "Requests completed that met the SLO.", "{request}/s"
    ),
    "output_tok_per_s": Metric("output_tokens_per_second", "Output tokens.", "{token}/s"),
    "total_tok_per_s": Metric("total_tokens_per_second", "Prompt and output tokens.", "{token}/s"),
    "kv_bytes_per_request": Metric("kv_bytes_per_request", "KV cache moved for a request.", "By"),
    "kv_transfer_ms_per_request": Metric(
        "kv_transfer_seconds_per_request", "Time of a request's KV transfer.", "s", 1e-3
    ),
    "trials": Metric("trials", "Trials behind the answer.", "{trial}"),
    "findings": Metric("findings", "Gate findings of the trials.", "{finding}"),
}
# Figures of single loads over the whole duration, named as in ``vllm bench serve``.
_OFFERED: Final = {
    "request_throughput": Metric(
        "offered_request_throughput_per_second", "Requests completed over the whole load.", "{request}/s"
    ),
    "output_throughput": Metric(
        "offered_output_tokens_per_second", "Output tokens over the whole load.", "{token}/s"
    ),
    "completed": Metric("offered_requests_completed", "Requests answered of the load.", "{request}"),
    "failed": Metric("offered_requests_failed", "Requests of the load that failed.", "{request}"),
    "duration_s": Metric("offered_duration_seconds", "From the first send to the last answer.", "s"),
}
_RUN_INFO: Final = Metric("run_info", "What was measured; always 1.")
_COMPLETE: Final = Metric("run_complete", "1 if the run is complete.")
_TRANSFER: Final = Metric("transfer_bytes_per_second", "Bytes moved per second.", "By/s", 1e9)


def command(path: Path, name: str, output: Path | None, console: Console) -> None:
    """Print a run's summary in a format, write it to a file, or send it to MLflow.

    Raises InputError for an unknown format."""
    run = load_run(path)
    print_changed_files([run])
    if name == "mlflow":
        run_id, rows = export(run)
        console.print(Text(f"MLflow run {run_id}, with {rows} rows below it"), soft_wrap=True)
        return
    if name not in FORMATS:
        known = ", ".join([*FORMATS, "mlflow"])
        raise InputError(f"--format {name}: not known", hint=f"there are: {known}")
    text = visible(FORMATS[name](run))
    if output is None:
        console.file.write(text)
        return
    with store_errors(output):
        write_bytes(output, text.encode())
    console.print(Text(f"files: {output}"), soft_wrap=True)


def samples(run: RunFolder) -> list[Sample]:
    """Return every known figure of the run's summary with its labels, in base units."""
    return [*_about(run), *_rates(run), *_loads(run), *_transfers(run)]


def _about(run: RunFolder) -> Iterable[Sample]:
    mark = mark_of(run)
    labels = {
        "run": run.run_id,
        "scenario": scenario_of(run),
        "model": model_of(run),
        "kind": str(run.manifest.get("kind") or ""),
        "version": str(run.manifest.get("kvbench") or ""),
        "status": str(run.manifest.get("status") or ""),
        "mark": mark.word if mark else "",
    }
    yield Sample(_RUN_INFO, labels, 1.0)
    yield Sample(_COMPLETE, {"run": run.run_id}, float(run.manifest.get("status") == "complete"))


def _rates(run: RunFolder) -> Iterable[Sample]:
    for row in summary_table(run):
        labels = _labels(run, row.cell.connector, row.cell.input_len, row.cell.output_len)
        values = row.flat()
        labels["outcome"] = row.outcome
        for key, metric in _PLAIN.items():
            yield from _sample(metric, labels, values.get(key))
        for latency, metric in _LATENCIES.items():
            for statistic in _STATISTICS:
                sample_labels = {**labels, "statistic": statistic}
                yield from _sample(metric, sample_labels, values.get(f"{latency}_ms_{statistic}"))


def _loads(run: RunFolder) -> Iterable[Sample]:
    for row in load_rows(run, errors=False):
        labels = _labels(run, row.cell.connector, row.cell.input_len, row.cell.output_len)
        labels |= {"trial": row.key, "method": row.method, "request_rate": f"{row.request_rate or 0:g}"}
        for key, metric in _OFFERED.items():
            yield from _sample(metric, labels, row.get(key))
        for latency, metric in _LATENCIES.items():
            for statistic in _STATISTICS:
                offered = Metric(
                    f"offered_{metric.name}", f"{metric.help[:-1]}, over the whole load.", "s", 1e-3
                )
                yield from _sample(
                    offered, {**labels, "statistic": statistic}, row.get(f"{statistic}_{latency}_ms")
                )


def _transfers(run: RunFolder) -> Iterable[Sample]:
    records = run.transfer_records() if run.manifest.get("kind") == "microbench" else []
    for index, record in enumerate(records, start=1):
        case = record.case
        labels = {"run": run.run_id, "case": case.key, "backend": case.backend, "protocol": case.protocol}
        labels |= {"op": case.op, "block_bytes": str(case.block_bytes), "batch_size": str(case.batch_size)}
        # Imported rows may repeat a case; the row number makes each series unique.
        yield from _sample(_TRANSFER, labels | {"row": str(index)}, record.gb_per_s)


def _labels(run: RunFolder, connector: str, input_len: int, output_len: int) -> dict[str, str]:
    return {
        "run": run.run_id,
        "connector": connector,
        "input_len": str(input_len),
        "output_len": str(output_len),
    }


def _sample(metric: Metric, labels: Mapping[str, str], value: Any) -> Iterable[Sample]:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield Sample(metric, dict(labels), value * metric.scale)


# --- Prometheus ------------------------------------------------------------------------------------


def prometheus(run: RunFolder) -> str:
    """Return the text exposition format 0.0.4, for a textfile collector or a push gateway."""
    lines: list[str] = []
    for name, group in _by_metric(samples(run)).items():
        metric = group[0].metric
        values = [(sample.labels, sample.value) for sample in group]
        lines += family(f"{PREFIX}_{name}", "gauge", values, metric.help)
    return page(lines)


def _by_metric(found: Sequence[Sample]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in found:
        groups.setdefault(sample.metric.name, []).append(sample)
    return groups


# --- OpenTelemetry ---------------------------------------------------------------------------------


def otel_json(run: RunFolder) -> str:
    """Return one line of OTLP/JSON (an ExportMetricsServiceRequest): gauges at the end of the run."""
    found = _by_metric(samples(run))
    when = _nanoseconds(run.manifest.get("ended_at") or run.manifest.get("started_at"))
    resource = {"service.name": PREFIX, "service.version": str(run.manifest.get("kvbench") or "")}
    metrics = [
        {
            "name": f"{PREFIX}.{re.sub(r'_(seconds|bytes|per_second|ratio)(?=_|$)', '', name)}",
            "description": group[0].metric.help,
            "unit": group[0].metric.unit,
            "gauge": {
                "dataPoints": [
                    {"attributes": _attributes(point.labels), "timeUnixNano": when, "asDouble": point.value}
                    for point in group
                ]
            },
        }
        for name, group in found.items()
    ]
    scope = {"scope": {"name": PREFIX}, "metrics": metrics}
    request = {
        "resourceMetrics": [{"resource": {"attributes": _attributes(resource)}, "scopeMetrics": [scope]}]
    }
    return json.dumps(request, ensure_ascii=False) + "\n"


def _attributes(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in labels.items()]


def _nanoseconds(moment: Any) -> str:
    """Return a time as OTLP/JSON writes it, a 64-bit integer as text; 0 is unknown."""
    try:
        parsed = datetime.fromisoformat(str(moment).replace("Z", "+00:00"))
    except ValueError:
        return "0"
    return str(round(parsed.timestamp() * 1e3) * 1_000_000)


# --- CSV -------------------------------------------------------------------------------------------


def spreadsheet(run: RunFolder) -> str:
    """Return one line per figure (metric, unit, value, labels), with a byte order mark for spreadsheets."""
    import csv
    import io

    found = samples(run)
    keys = list(dict.fromkeys(key for sample in found for key in sample.labels))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(["metric", "unit", "value", *keys])
    for sample in found:
        label_cells = [spreadsheet_cell(sample.labels.get(key)) for key in keys]
        writer.writerow([sample.metric.name, sample.metric.unit, repr(sample.value), *label_cells])
    return "\ufeff" + text.getvalue()


FORMATS: Final[Mapping[str, Callable[[RunFolder], str]]] = {
    "prometheus": prometheus,
    "otel-json": otel_json,
    "csv": spreadsheet,
}
