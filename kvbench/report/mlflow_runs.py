"""``kvbench export --format mlflow``: a run folder as runs of an MLflow experiment.

The experiment is the scenario; one MLflow run stands for the whole folder, with its report, and one below it
for each row of the result table, with the row's figures and every trial of its search as steps. MLflow's own
library writes it, which is optional, to where MLFLOW_TRACKING_URI says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.records import TrialRecord
from kvbench.errors import InputError
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.trial_values import trial_values
from kvbench.results.provenance import hardware_of, mark_of, model_of, scenario_of, slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient

INSTALL: Final = "pip install 'kvbench[mlflow]'"
STATUS: Final = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
_NAMES: Final = ("connector", "input_len", "output_len")
_TRIAL: Final = ("slo_attainment", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
_ARTIFACTS: Final = ("report.html", "report.md", "scenario.yaml", "tables/summary.csv", "tables/trials.csv")


def export(run: RunFolder, uri: str | None = None) -> tuple[str, int]:
    """Writes the run; returns the id of its MLflow run, and how many rows lie below it.

    ``uri``: where MLflow keeps its runs; by default as MLflow's own settings say. Raises InputError without
    the library, or if MLflow refuses.
    """
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
    metrics += [each for step, trial in enumerate(trials, 1) for each in _trial(trial, step)]
    _log(client, one, metrics)
    _ended(client, one, run)


def _trial(trial: TrialRecord, step: int) -> Iterable[tuple[str, float, int, int]]:
    """A trial of the search as a step of its cell's metrics."""
    values: Mapping[str, Any] = {"request_rate": trial.request_rate, **trial_values(trial)}
    when_ms = _milliseconds(trial.started_at)
    for key, value in _known({key: values.get(key) for key in ("request_rate", *_TRIAL)}):
        yield f"trial/{key}", value, when_ms, step


def _log(client: MlflowClient, run_id: str, metrics: Sequence[tuple[str, float, int, int]]) -> None:
    from mlflow.entities import Metric

    client.log_batch(run_id, metrics=[Metric(*each) for each in metrics])


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
    """Since 1970; 0 is unknown."""
    try:
        return round(datetime.fromisoformat(str(moment).replace("Z", "+00:00")).timestamp() * 1e3)
    except ValueError:
        return 0
