"""A sweep's metrics arrive at an OpenTelemetry collector, sent by the real SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.metrics", reason="pip install opentelemetry-sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otlp")

from kvbench.core.load.workers import Progress
from kvbench.core.records import Cell, TrialRecord
from kvbench.results.run import CellResult
from kvbench.sweep.display import Silent
from kvbench.sweep.otlp import OtlpWatcher, meter
from kvbench.sweep.strategies import Standing

CELL = Cell("nixl", 1024, 16)


@pytest.fixture
def collector() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """(its URL, metric → attributes' text → value): of each series the last that came."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    seen: dict[str, dict[str, Any]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportMetricsServiceRequest.FromString(body)
            for resource in request.resource_metrics:
                about = {
                    attribute.key: attribute.value.string_value for attribute in resource.resource.attributes
                }
                seen["about"] = about
                for metric in (entry for scope in resource.scope_metrics for entry in scope.metrics):
                    points = [*metric.gauge.data_points, *metric.sum.data_points]
                    for point in points:
                        words = sorted(
                            f"{attribute.key}={attribute.value.string_value or attribute.value.int_value}"
                            for attribute in point.attributes
                        )
                        value = point.as_double or point.as_int
                        seen.setdefault(metric.name, {})[" ".join(words)] = value
            self.send_response(200 if self.path == "/v1/metrics" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_a_sweep_tells_arrives_in_base_units(collector: tuple[str, dict[str, dict[str, Any]]]) -> None:
    url, seen = collector
    summary = {"slo_attainment": 0.95, "ttft_ms": {"p50": 120.0, "p99": None}, "request_goodput": 19.0}
    record = TrialRecord("t1", CELL, 20.0, 1, "met", "", summary=summary)
    with meter(url, "run-1", "quickstart") as otlp_meter:
        watcher = OtlpWatcher(Silent(), otlp_meter)
        watcher.trial_progress(CELL, 20.0, 100, Progress(sent=40, done=30, met=27, missed=3, in_flight=10))
        watcher.trial_finished(record, Standing(18.0, 23.0, 0.5))
        watcher.trial_finished(TrialRecord("t2", CELL, 22.0, 1, "missed", ""), None)
        watcher.cell_finished(CellResult(CELL, "done", {"max_request_rate": 20.5}))
    where = "connector=nixl input_len=1024 output_len=16"
    assert (seen["about"]["kvbench.run"], seen["kvbench.request_rate"]) == ("run-1", {where: 22.0})
    assert seen["kvbench.requests.in_flight.live"] == {where: 10}
    assert seen["kvbench.slo_attainment.live"] == {where: 0.9}
    assert seen["kvbench.ttft"] == {f"{where} statistic=p50": 0.12}
    assert seen["kvbench.max_request_rate_lower"] == {where: 18.0}
    assert seen["kvbench.max_request_rate"] == {where: 20.5}
    counted = {key.split("verdict=")[1]: value for key, value in seen["kvbench.trials"].items()}
    assert counted == {"met": 1, "missed": 1}


def test_a_collector_that_is_not_there_stops_nothing() -> None:
    with meter("http://127.0.0.1:9", "run-1", "quickstart") as otlp_meter:
        watcher = OtlpWatcher(Silent(), otlp_meter)
        watcher.cell_finished(CellResult(CELL, "done", {"max_request_rate": 20.5}))
