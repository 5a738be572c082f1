"""Prometheus text as written here is what Prometheus' own parser reads."""

from prometheus_client.parser import text_string_to_metric_families

from kvbench.core.exposition import family, histogram


def test_prometheus_own_parser_reads_what_is_written() -> None:
    labels = {"path": 'a "quoted"\\ name\nin two lines', "engine": "0"}
    lines = [
        *family("kv_bytes_total", "counter", [(labels, 3), ({}, 0.1)], "Bytes \\ of\nKV."),
        *family("running", "gauge", [(labels, 1e-9)]),
        *histogram("step_seconds", labels, (0.5, 1), (2, 0, 1), 7.25, "Length of a step."),
    ]
    read = {metric.name: metric for metric in text_string_to_metric_families("\n".join(lines) + "\n")}
    assert {name: metric.type for name, metric in read.items()} == {
        "kv_bytes": "counter",
        "running": "gauge",
        "step_seconds": "histogram",
    }
    assert read["kv_bytes"].documentation == "Bytes \\ of\nKV."
    assert [(sample.labels, sample.value) for sample in read["kv_bytes"].samples] == [
        (labels, 3.0),
        ({}, 0.1),
    ]
    assert [(sample.labels, sample.value) for sample in read["running"].samples] == [(labels, 1e-9)]
    bounds = {sample.labels.get("le", sample.name): sample.value for sample in read["step_seconds"].samples}
    assert bounds == {
        "0.5": 2.0,
        "1.0": 2.0,
        "+Inf": 3.0,
        "step_seconds_count": 3.0,
        "step_seconds_sum": 7.25,
    }
    assert all(labels.items() <= sample.labels.items() for sample in read["step_seconds"].samples)
