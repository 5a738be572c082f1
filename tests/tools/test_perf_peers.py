"""The comparison with peers: commands are ended and counted, reports are read, and one run is real."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import lives

from tools.bench import ROOT
from tools.perf_peers import clients, report, work

WORK = work.Work(10, 7.5, 2)


def test_a_commands_descendants_are_counted_and_ended(tmp_path: Path) -> None:
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    code = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {burn!r}])\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
    )
    cost = work.run_command([sys.executable, "-c", code], tmp_path, 30.0)
    assert cost.cpu_s >= 0.3
    assert not lives(int((tmp_path / "output.log").read_text()))


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    code = "print('ok'); raise SystemExit('error: no such thing')"
    with pytest.raises(work.PeerError, match=r"status 1.*no such thing"):
        work.run_command([sys.executable, "-c", code], tmp_path, 30.0)
    with pytest.raises(work.PeerError, match="No such file"):
        work.run_command([tmp_path / "none"], tmp_path, 30.0)


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(work.PeerError, match="not done after 1 s"):
        work.run_command([sys.executable, "-c", code], tmp_path, 1.0)
    assert time.monotonic() - began < 50


def test_what_vllm_reports_is_read(tmp_path: Path) -> None:
    result = {"ttfts": [0.051, 0.0], "itls": [[0.01, 0.012], []], "errors": ["", "reset"], "completed": 1}
    (tmp_path / "result.json").write_text(json.dumps(result))
    outcome = clients.vllm_outcome(WORK, tmp_path)
    assert outcome.ttft_ms == [51.0]
    assert outcome.itl_ms == [10.0, 12.0]
    assert (outcome.completed, outcome.failed) == (1, 1)


def test_what_aiperf_reports_is_read(tmp_path: Path) -> None:
    (tmp_path / "aiperf").mkdir()
    good = {
        "metadata": {"request_start_ns": 3_000_000, "credit_issued_ns": 1_000_000},
        "metrics": {"time_to_first_token": {"value": 52.0}, "inter_chunk_latency": {"value": [10.0, 11.0]}},
    }
    rows = [good, {**good, "error": {"code": 500}}]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "aiperf" / "profile_export.jsonl").write_text(text)
    outcome = clients.aiperf_outcome(WORK, tmp_path)
    assert (outcome.ttft_ms, outcome.itl_ms, outcome.hidden_ms) == ([52.0], [10.0, 11.0], [2.0])
    assert (outcome.completed, outcome.failed) == (1, 1)


def test_what_guidellm_reports_is_read(tmp_path: Path) -> None:
    request = {
        "time_to_first_token_ms": 55.0,
        "inter_token_latency_ms": 10.1,
        "info": {"timings": {"request_start": 10.004, "targeted_start": 10.0}},
    }
    result = {"benchmarks": [{"requests": {"successful": [request, request]}}]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    outcome = clients.guidellm_outcome(WORK, tmp_path)
    assert (outcome.ttft_ms, outcome.itl_ms) == ([55.0, 55.0], [10.1, 10.1])
    assert outcome.hidden_ms == pytest.approx([4.0, 4.0])
    assert outcome.gaps_are != "gaps"


def test_errors_are_against_the_schedule() -> None:
    outcome = work.Outcome([50.0, 51.0, 52.0], [9.0, 10.0, 12.0], 3, 0)
    errors = report.errors_of(outcome)
    assert errors["ttft_p50_ms"] == pytest.approx(1.0)
    assert errors["itl_p50_ms"] == pytest.approx(1.0)
    assert errors["itl_p99_ms"] == pytest.approx(1.98)
    nothing = report.errors_of(work.Outcome([], [], 0, 3))
    assert nothing["ttft_p50_ms"] is None


@pytest.mark.heavy
def test_a_real_run_writes_both_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.perf_peers", "--only", "kvbench,router:kvbench"]
    command += ["--streams", "4", "--seconds", "1", "--repeats", "2", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "peers.json").read_text())
    assert found["not_run"] == []
    (client,) = found["clients"]
    assert (client["client"], client["completed"], client["failed"]) == ("kvbench", 3, 0)
    # Nothing is seen before it was due.
    assert client["errors"]["ttft_p50_ms"] > -0.3
    assert [row["router"] for row in found["routers"]] == ["none", "kvbench"]
    assert all((row["completed"], row["repeats"]) == (6, 2) for row in found["routers"])
    for row in found["routers"]:
        least, most = row["added_p50_range_ms"]
        assert least <= row["added_p50_ms"] <= most
    text = (tmp_path / "peers.md").read_text()
    assert "| kvbench |" in text
    assert "load average" in text.lower()


def test_unknown_peers_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.perf_peers", "--only", "nobody"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "unknown: nobody" in done.stdout
