"""``kvbench export --format mlflow``: written by MLflow's own library, read back by it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from sample_run import make_run

pytest.importorskip("mlflow", reason="pip install mlflow-skinny")

from kvbench.report.export import command
from kvbench.report.report import write_report
from kvbench.report.tables.result import summary_table
from kvbench.results.run import load_run


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_there_with_its_rows_and_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    path = make_run(tmp_path / "results", ("mooncake", "nixl"), (512,))
    write_report(path, ("html", "csv"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out = io.StringIO()
    command(path, "mlflow", None, Console(file=out, width=200))
    assert "with 2 rows below it" in out.getvalue()
    client = MlflowClient()
    run, rows = load_run(path), summary_table(load_run(path))
    (experiment,) = client.search_experiments(filter_string="name LIKE 'kvbench-%'")
    found = {entry.info.run_name: entry for entry in client.search_runs([experiment.experiment_id])}
    whole = found.pop(run.run_id)
    assert (whole.info.status, whole.data.params["seed"]) == ("FINISHED", str(run.manifest["seed"]))
    assert "report.html" in {artifact.path for artifact in client.list_artifacts(whole.info.run_id)}
    assert {entry.data.tags["mlflow.parentRunId"] for entry in found.values()} == {whole.info.run_id}
    for row in rows:
        one = found[f"{row.cell.connector} {row.cell.input_len} in"]
        assert one.data.params["connector"] == row.cell.connector
        assert one.data.metrics["max_request_rate"] == pytest.approx(row.answer.max_request_rate)
        history = client.get_metric_history(one.info.run_id, "trial/request_rate")
        trials = [trial for trial in run.trials_of(row.cell) if trial.purpose != "ceiling"]
        assert [metric.value for metric in sorted(history, key=lambda metric: metric.step)] == [
            trial.request_rate for trial in trials
        ]
