"""The selftest: errors are told from lateness, the verdict is what the figures say, and the command runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import invoke, kvbench

from kvbench.core.load.workers import LoadResult
from kvbench.core.records import RequestRecord
from kvbench.errors import InputError, LaunchError
from kvbench.launchers.local import LocalLauncher
from kvbench.sweep.selftest import (
    ALLOWED_MS,
    DURATION_S,
    Level,
    Selftest,
    descriptor_problem,
    level_of,
    parse_streams,
)
from kvbench.sweep.selftest_server import chunks_between, errors_of, exact_server, mean_open

STARTED = 1000.0


def row(number: int, at: float, writes: list[float], late_s: float = 0.0) -> dict[str, Any]:
    """A request that arrived at ``at`` seconds after the start; ``writes`` counted from its arrival."""
    arrival = STARTED + at
    return {
        "request_id": f"r-{number}", "arrival_s": arrival, "first_due_s": arrival + writes[0] - late_s,
        "gap_s": 0.01, "token_write_s": [arrival + s for s in writes], "ended_s": arrival + writes[-1],
    }  # fmt: skip


def record(number: int, at: float, ttft: float, gaps: list[float], **more: Any) -> RequestRecord:
    return RequestRecord(
        f"r-{number}", at, 8, 3, sent_s=at, first_token_s=at + ttft, last_token_s=at + ttft + sum(gaps),
        output_len=len(gaps) + 1, itl_s=gaps, **more,
    )  # fmt: skip


def test_the_servers_own_lateness_is_not_the_clients_error() -> None:
    rows = [row(0, 1.0, [0.053, 0.063, 0.075], late_s=0.003)]
    records = [record(0, 1.0, 0.0532, [0.0101, 0.0118])]
    errors = errors_of(records, rows)
    assert errors.ttft_ms == pytest.approx([0.2], abs=1e-6)
    assert errors.itl_ms == pytest.approx([0.1, 0.2], abs=1e-6)
    assert errors.late_first_ms == pytest.approx([3.0], abs=1e-6)
    assert errors.late_further_ms == pytest.approx([3.0, 5.0], abs=1e-6)
    assert (errors.failed, errors.unmatched) == (0, 0)


def test_a_late_send_is_the_clients_error() -> None:
    rows = [row(0, 1.004, [0.05, 0.06, 0.07])]
    errors = errors_of([record(0, 1.0, 0.0541, [0.01, 0.01])], rows)
    assert errors.ttft_ms == pytest.approx([4.1], abs=1e-6)


def test_what_cannot_be_compared_is_counted() -> None:
    rows = [row(number, 1.0 + number, [0.05, 0.06, 0.07]) for number in range(4)]
    records = [
        record(0, 0.5, 0.05, [0.01, 0.01]),  # before the window
        record(1, 2.0, 0.05, [0.02]),  # two tokens seen as one
        record(2, 3.0, 0.05, [0.01, 0.01], error="early_close"),
        record(9, 3.5, 0.05, [0.01, 0.01]),  # never came to the server
        RequestRecord("r-3", 4.0, 8, 3),  # no token at all
    ]
    errors = errors_of(records, rows, (1.0, 10.0))
    assert (len(errors.ttft_ms), errors.failed, errors.unmatched) == (1, 3, 1)
    assert len(errors.itl_ms) == 0


def test_streams_and_chunks_are_counted_in_the_window() -> None:
    rows = [row(number, number * 0.5, [0.25, 0.5, 1.0]) for number in range(8)]
    # From then on two are open at a time: each lasts a second, one comes each half of it.
    assert mean_open(rows, STARTED + 1.0, STARTED + 4.0) == pytest.approx(2.0)
    assert (mean_open(rows, STARTED, STARTED), chunks_between(rows, STARTED, STARTED + 0.6)) == (0.0, 2)
    assert chunks_between(rows, STARTED, STARTED + 100) == 24


def test_a_level_comes_from_the_records_and_the_log() -> None:
    gaps = [0.01, 0.01]
    times = [DURATION_S + 0.1 * number for number in range(10)]
    records = [record(number, at, 0.05, gaps) for number, at in enumerate(times)]
    log = {
        "requests": [row(number, at, [0.05, 0.06, 0.07]) for number, at in enumerate(times)],
        "chunks": 30,
        "cpu_s": 0.01,
    }
    client = {"started_monotonic_s": STARTED, "send_lag_p99_ms": 0.2, "cpu_s": 0.02, "stamps": "kernel"}
    level = level_of(10, 1.0, LoadResult(records, "complete", 3.0, client), log, 0.5)
    assert (level.requests, level.failed, level.stamps) == (10, 0, "kernel")
    assert level.ttft_error_p99_ms == pytest.approx(0.0, abs=1e-3)
    assert (level.chunks_per_core_s, level.server_chunks_per_core_s) == (1500, 3000)
    assert level.chunks_per_s == 30.0
    assert level.trusted


def level(streams: int, **changes: Any) -> Level:
    values: dict[str, Any] = {
        "streams": streams, "request_rate": streams / DURATION_S, "requests": 100, "failed": 0,
        "streams_open": float(streams), "chunks_per_s": 96.0 * streams, "ttft_error_p50_ms": 0.1,
        "ttft_error_p99_ms": 0.5, "itl_error_p50_ms": 0.1, "itl_error_p99_ms": 0.4, "unmatched": 0,
        "send_lag_p99_ms": 0.3, "stamps": "kernel", "client_cpu_s": 1.0, "chunks_per_core_s": 1000 * streams,
        "server_late_first_p99_ms": 0.1, "server_late_further_p99_ms": 0.1,
        "server_chunks_per_core_s": 200_000, "load_average": 0.1,
    }  # fmt: skip
    return Level(**{**values, **changes})


HOST: dict[str, Any] = {"cores": 2}


def test_the_verdict_names_the_most_streams_that_can_be_trusted() -> None:
    found = Selftest(HOST, (level(10), level(100), level(300)))
    assert found.best.streams == 300
    assert "Trusted with at least 300 streams" in found.verdict()
    assert f"{96 * 300 / 256:.0f} req/s of 256 output tokens" in found.verdict()
    late = Selftest(HOST, (level(10), level(100, itl_error_p99_ms=ALLOWED_MS + 1), level(300)))
    assert late.best.streams == 10
    assert "Trusted with up to 10 streams" in late.verdict()
    assert "With 100 streams gaps between tokens are wrong by 6.0 ms" in late.verdict()


@pytest.mark.parametrize(("changes", "message"), [
    ({"ttft_error_p99_ms": 7.0}, "TTFT is wrong by 7.0 ms"),
    ({"send_lag_p99_ms": 8.0}, "requests are sent late by 8.0 ms"),
    ({"failed": 3}, "3 requests failed"),
    ({"failed": 3, "server_late_further_p99_ms": 9.0}, "server was itself late by 9.0 ms"),
    ({"requests": 0, "ttft_error_p99_ms": None}, "no request ended"),
])  # fmt: skip
def test_a_host_that_is_off_at_once_cannot_be_trusted(changes: dict[str, Any], message: str) -> None:
    found = Selftest(HOST, (level(10, **changes), level(100)))
    assert found.best is None
    assert "cannot be trusted, not even with 10 streams" in found.verdict()
    assert message in found.verdict()
    assert found.to_json()["trusted_streams"] == 0


def test_streams_that_cannot_be_opened_are_named() -> None:
    assert descriptor_problem(1) == ""
    assert "open files may be needed" in descriptor_problem(10**12)
    assert "100 streams skipped" in Selftest(HOST, (), ("100 streams skipped: …",)).verdict()


@pytest.mark.parametrize("text", ["", "x", "10,", "0", "-1", "1e3", "100000"])
def test_streams_must_be_numbers(text: str) -> None:
    assert parse_streams("10,100") == [10, 100]
    with pytest.raises(InputError):
        parse_streams(text)


def test_a_server_that_does_not_start_is_a_launch_error(tmp_path: Path) -> None:
    launcher = LocalLauncher("selftest-test", tmp_path / "logs", tmp_path / "specs")
    with pytest.raises(LaunchError, match="unknown key 'prot'"), exact_server(launcher, {"prot": 1}):
        pass


def test_the_command_measures_and_writes_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "selftest.json"
    done = kvbench("selftest", "--streams", "6,12", "--seconds", "1", "--json", "--output", str(path))
    found = json.loads(done.out)
    assert json.loads(path.read_text()) == found
    # Whether this machine can be trusted now is its own affair; what is said about it must agree.
    assert done.status == (0 if found["trusted_streams"] else 1)
    assert found["verdict"]
    assert "6 streams: " in done.err
    for level, streams in zip(found["levels"], (6, 12), strict=True):
        assert level["streams"] == streams
        assert level["requests"] > 0
        assert level["failed"] == 0
        assert level["chunks_per_s"] > 0
        # Nothing is seen before it was written; the clocks are read one after the other.
        assert level["ttft_error_p50_ms"] > -0.3
        assert np.isfinite(level["itl_error_p99_ms"])


def test_the_table_is_printed_with_its_verdict() -> None:
    done = kvbench("selftest", "--streams", "5", "--seconds", "1")
    for words in ("core-second", "load average", "rusted"):
        assert words in done.out
    assert done.status in (0, 1)


def test_bad_options_are_said_at_once(tmp_path: Path) -> None:
    assert "not a list of numbers" in invoke("selftest", "--streams", "many").failed(2).err
    done = invoke("selftest", "--output", str(tmp_path / "no" / "file.json")).failed(2)
    assert "there is no folder" in done.err


def quiet(**changes: Any) -> Level:
    """A level with nothing wrong."""
    rows = [row(number, 2.0 + number, [0.05, 0.06, 0.07]) for number in range(2)]
    records = [record(number, 2.0 + number, 0.05, [0.01, 0.01]) for number in range(2)]
    client = {"started_monotonic_s": STARTED, "cpu_s": 0.5, "send_lag_p99_ms": 0.1}
    result = LoadResult(records, "complete", 4.0, client)
    log = {"requests": rows, "chunks": 6, "cpu_s": 1.0}
    return replace(level_of(10, 3.0, result, log), **changes)


def test_what_else_the_machine_did_is_told_where_figures_are_off() -> None:
    assert quiet(steal_share=0.01, other_cpu_share=0.05).disturbed == ""
    stolen = quiet(steal_share=0.13, ttft_error_p99_ms=30.0, server_late_further_p99_ms=40.0)
    assert stolen.disturbed == "13.0% of the CPU time was stolen by the hypervisor"
    assert stolen.faults() == [
        "TTFT is wrong by 30.0 ms",
        "13.0% of the CPU time was stolen by the hypervisor meanwhile",
    ]
    both = quiet(steal_share=0.13, other_cpu_share=0.4)
    assert "40.0% of the CPU time was used by other processes and 13.0% " in both.disturbed
    assert both.faults() == []  # what is right in spite of it is right
