"""Send a sweep's metrics to an OpenTelemetry collector while it runs (``--otlp URL``).

Requires the optional OpenTelemetry SDK. Its thread sends: a slow collector delays no trial. Names are those
of ``kvbench export --format otel-json``; figures of a running trial end in ``.live``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.load.workers import Progress as LoadProgress
from kvbench.core.records import Cell, TrialRecord
from kvbench.errors import InputError
from kvbench.results.run import CellResult
from kvbench.sweep.display import Watcher
from kvbench.sweep.strategies import Standing
from kvbench.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter


EVERY_S: Final = 5.0
PATH: Final = "/v1/metrics"
INSTALL: Final = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_TRIAL: Final[Mapping[str, tuple[str, str, float]]] = {
    "slo_attainment": ("slo_attainment", "1", 1.0),
    "request_goodput": ("request_goodput", "{request}/s", 1.0),
    "request_throughput": ("request_throughput", "{request}/s", 1.0),
}
"""Key of a trial's summary → metric's name, unit, scale."""
_LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
_STATISTICS: Final = ("mean", "p50", "p90", "p99")


class OtlpWatcher:
    """Forwards events to another watcher, and figures to the meter."""

    def __init__(self, inner: Watcher, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self._gauges: dict[str, Any] = {}
        self._trials = meter.create_counter("kvbench.trials", "{trial}", "Trials by verdict.")
        self._cells = meter.create_counter("kvbench.cells", "{cell}", "Cells that are done, by status.")

    def stage(self, text: str) -> None:
        self._inner.stage(text)

    def note(self, text: str, *, caveat: bool = False) -> None:
        self._inner.note(text, caveat=caveat)

    def trial_progress(self, cell: Cell, rate: float, planned: int, progress: LoadProgress) -> None:
        self._inner.trial_progress(cell, rate, planned, progress)
        where = _where(cell)
        self._set("request_rate.live", "{request}/s", rate, where)
        for name, value in (
            ("planned", planned), ("sent", progress.sent), ("done", progress.done),
            ("in_flight", progress.in_flight), ("waiting_first", progress.waiting_first),
        ):  # fmt: skip
            self._set(f"requests.{name}.live", "{request}", value, where)
        if judged := progress.met + progress.missed:
            self._set("slo_attainment.live", "1", progress.met / judged, where)

    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None:
        self._inner.trial_finished(record, standing)
        where = _where(record.cell)
        self._trials.add(1, {**where, "verdict": record.verdict, "method": record.method})
        self._set("request_rate", "{request}/s", record.request_rate, where)
        for key, (name, unit, scale) in _TRIAL.items():
            self._set(name, unit, record.summary.get(key), where, scale)
        for latency in _LATENCIES:
            figures = record.summary.get(f"{latency}_ms") or {}
            for statistic in _STATISTICS:
                self._set(latency, "s", figures.get(statistic), {**where, "statistic": statistic}, 1e-3)
        if standing is not None:
            self._set("max_request_rate_lower", "{request}/s", standing.lower, where)
            self._set("max_request_rate_upper", "{request}/s", standing.upper, where)

    def cell_finished(self, result: CellResult) -> None:
        self._inner.cell_finished(result)
        where = _where(result.cell)
        self._cells.add(1, {**where, "status": result.status})
        answer = result.answer or {}
        self._set("max_request_rate", "{request}/s", answer.get("max_request_rate"), where)

    def _set(
        self, name: str, unit: str, value: Any, attributes: Mapping[str, Any], scale: float = 1.0
    ) -> None:
        """Set a figure's current value; unknown ones are omitted."""
        if isinstance(value, (int, float)):
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"kvbench.{name}", unit)
            self._gauges[name].set(value * scale, attributes)


def _where(cell: Cell) -> dict[str, Any]:
    return {"connector": cell.connector, "input_len": cell.input_len, "output_len": cell.output_len}


@contextmanager
def meter(url: str, run_id: str, scenario: str) -> Iterator[Meter]:
    """Yield a meter that sends to the collector every few seconds and at the end. ``url``: OTLP over HTTP,
    such as ``http://127.0.0.1:4318``. Raises InputError without the SDK."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        raise InputError(f"--otlp needs the OpenTelemetry SDK: {error}", hint=INSTALL) from error
    about = {"service.name": "kvbench", "service.version": __version__}
    resource = Resource.create({**about, "kvbench.run": run_id, "kvbench.scenario": scenario})
    base = url.rstrip("/")
    exporter = OTLPMetricExporter(base if base.endswith(PATH) else base + PATH)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=EVERY_S * 1e3)
    provider = MeterProvider([reader], resource)
    try:
        yield provider.get_meter("kvbench", __version__)
    finally:
        provider.shutdown()
