"""``kvbench watch``: what it shows of a run folder, that it ends with the run, and what its page tells."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import sample_transfers
from rich.console import Console
from sample_run import ENVIRONMENT, PLAN, SCENARIO, make_requests, make_run, make_trial

from kvbench.core.records import Cell
from kvbench.errors import LaunchError, StoreError
from kvbench.report.terminal import LiveLine
from kvbench.report.watch import command, serving
from kvbench.report.watch_state import RunWatch
from kvbench.results.run import CellResult
from kvbench.results.store import RunInfo, RunStore

DEADLINE_S = 20.0
CELLS = [Cell(name, 1024, 128) for name in ("mooncake", "nixl")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    """A run that is going on: two cells planned, nothing measured yet."""
    plan = PLAN | {"cells": [{"connector": cell.connector} for cell in CELLS]}
    info = RunInfo(argv=["kvbench", "sweep"], labels=["emulated"])
    with RunStore.create(tmp_path, "quickstart", SCENARIO.encode(), plan, ENVIRONMENT, info) as made:
        yield made


def add_trial(store: RunStore, cell: Cell, rate: float, number: int = 1) -> None:
    requests = make_requests(cell, rate, number)
    trial = make_trial(cell, rate, number, requests)
    store.add_telemetry(
        [
            {"trial_id": trial.trial_id, "t_s": t, "source": "nic:eth0", "metric": metric, "value": t * speed}
            for metric, speed in (("tx_bytes", 2e6), ("rx_bytes", 5e5))
            for t in (0.5, 1.0, 2.0)
        ]
    )
    store.add_trial(trial, requests)


def test_progress_curve_and_nics_follow_the_folder(store: RunStore) -> None:
    watch = RunWatch(store.path)
    seen = watch.look()
    assert (seen.status, seen.cells_done, seen.cells_planned, seen.log) == ("running", 0, 2, ())
    add_trial(store, CELLS[0], 5.0)
    add_trial(store, CELLS[0], 9.0, 2)
    store.put_cell(CellResult(CELLS[0], "done"))
    seen = watch.look()
    assert (seen.cells_done, [line.request_rate for line in seen.curve]) == (1, [5.0, 9.0])
    assert seen.nics == (("eth0", "2.00 / 0.500"),)
    add_trial(store, CELLS[1], 7.0)
    seen = watch.look()
    assert seen.cell.startswith("nixl, 1,024 in")
    assert ([line.connector for line in seen.curve], len(seen.log)) == (["nixl"], 3)
    assert json.loads(json.dumps(seen.to_json()))["status"] == "running"
    store.finish("complete")
    assert not watch.look().running


def test_time_goes_on_while_the_folder_does_not_change(store: RunStore) -> None:
    watch = RunWatch(store.path)
    started = datetime.fromisoformat(store.manifest["started_at"].replace("Z", "+00:00"))
    assert watch.look(started + timedelta(seconds=90)).elapsed == "1:30"
    store.put_cell(CellResult(CELLS[0], "done"))
    seen = watch.look(started.astimezone(timezone.utc) + timedelta(seconds=150))
    assert (seen.elapsed, seen.live) == ("2:30", LiveLine("cells 1/2", share=0.5))


def test_it_prints_each_trial_once_and_ends_with_the_run(store: RunStore) -> None:
    console = Console(file=io.StringIO(), width=160)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(command(store.path, console)), daemon=True)
    thread.start()
    add_trial(store, CELLS[0], 5.0)
    until(lambda: "5.00 req/s" in text(console))
    add_trial(store, CELLS[0], 9.0, 2)
    until(lambda: "9.00 req/s" in text(console))
    assert thread.is_alive()
    store.finish("complete")
    thread.join(DEADLINE_S)
    assert codes == [0]
    assert text(console).count("5.00 req/s") == 1
    assert text(console).rstrip().endswith("the run is complete")


def text(console: Console) -> str:
    return console.file.getvalue()


def until(holds: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    assert callable(holds)
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_terminal_shows_all_parts_of_a_run(tmp_path: Path) -> None:
    path = make_run(tmp_path, ("mooncake",), (1024,))
    console = Console(file=io.StringIO(), width=140, height=60, force_terminal=True, color_system=None)
    assert command(path, console) == 0
    for words in (
        "EMULATED",
        "cells 1/",
        "curve of mooncake, 1,024 in",
        "verdicts",
        "met",
        "the run is complete",
    ):
        assert words in text(console), words


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_width_cuts_a_number(store: RunStore, width: int) -> None:
    for number, rate in enumerate((1234.0, 5678.0), 1):
        add_trial(store, CELLS[0], rate, number)
    store.finish("complete")
    console = Console(file=io.StringIO(), width=width, height=90, force_terminal=True, color_system=None)
    assert command(store.path, console) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text(console))
    assert max(map(len, shown.splitlines())) <= width
    flat = re.sub(r"\s+", " ", shown.translate(dict.fromkeys(map(ord, "│╭╮╰╯"), " ")))
    for line in RunWatch(store.path).look().log:
        assert line.speed in flat
        assert line.where in flat
    for rate in (" 1234 ", " 5678 "):
        assert flat.count(rate) >= 2, rate  # in the curve and in the log
    assert not re.search(r"\d…", flat)


def test_a_run_whose_process_is_gone_ends_the_watch(tmp_path: Path) -> None:
    """The watcher must not wait for a run that was killed."""
    code = (
        "import sys, os; from sample_run import *; from kvbench.results.store import *; "
        "s = RunStore.create(sys.argv[1], 'killed', b'', {}, {}); print(s.path, flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as writer:
        watch = RunWatch(Path(writer.stdout.readline().strip()))
        assert watch.look().running
        writer.send_signal(signal.SIGKILL)
        writer.wait(DEADLINE_S)
    until(lambda: not watch.look().running)
    assert watch.look().status == "interrupted"


def test_a_failed_run_says_why_and_has_its_exit_code(store: RunStore) -> None:
    store.finish("failed", "the disk is full")
    console = Console(file=io.StringIO(), width=100)
    assert command(store.path, console) == 1
    assert "the run is failed: the disk is full" in text(console)


def test_a_microbenchmark_is_watched_by_its_cases(tmp_path: Path) -> None:
    seen = RunWatch(sample_transfers.make_run(tmp_path, lab="2 × 1gbit")).look()
    assert seen.unit == "cases"
    assert seen.cells_done >= seen.cells_planned > 0
    assert any("GB/s" in line.speed for line in seen.log)
    assert {line.verdict for line in seen.log} >= {"measured", "invalid"}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run folder"):
        command(tmp_path, Console(file=io.StringIO()))


# --- the live page ---------------------------------------------------------------------------------
def get(url: str, path: str, host: str = "", method: str = "GET") -> tuple[int, dict[str, str], str]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_the_page_shows_the_run_and_nothing_else_of_the_machine(store: RunStore) -> None:
    add_trial(store, CELLS[0], 5.0)
    with serving(RunWatch(store.path)) as url:
        assert url.startswith("http://127.0.0.1:")
        status, headers, page = get(url, "/")
        assert status == 200
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert 'src="/watch.js"' in page
        assert get(url, "/watch.js")[0] == 200
        status, headers, body = get(url, "/state.json")
        assert headers["Content-Type"] == "application/json"
        assert json.loads(body)["log"][0]["request_rate"] == 5.0
        add_trial(store, CELLS[0], 9.0, 2)
        assert len(json.loads(get(url, "/state.json")[2])["log"]) == 2
        for path in (
            "/manifest.json",
            "/../manifest.json",
            "//etc/passwd",
            "/templates/",
            "/state.json?x",
            "",
        ):
            assert get(url, path or "/%2e%2e/")[0] == 404, path
        for method in ("POST", "PUT", "DELETE"):
            assert get(url, "/state.json", method=method)[0] == 501


def test_the_page_answers_no_stranger_s_host_name(store: RunStore) -> None:
    with serving(RunWatch(store.path)) as url:
        port = urlsplit(url).port
        assert get(url, "/state.json", host=f"attacker.example:{port}")[0] == 403
        assert get(url, "/state.json", host=f"localhost:{port}")[0] == 200


def test_the_page_says_so_when_the_folder_is_gone(tmp_path: Path) -> None:
    path = make_run(tmp_path, ("tcp",), (1024,))
    with serving(RunWatch(path)) as url:
        (path / "manifest.json").unlink()
        status, _, body = get(url, "/state.json")
        assert status == 503
        assert "manifest.json" in json.loads(body)["error"]


def test_a_port_that_is_taken_is_said(store: RunStore) -> None:
    with serving(RunWatch(store.path)) as url:
        port = urlsplit(url).port
        assert port is not None
        with pytest.raises(LaunchError, match="cannot listen"), serving(RunWatch(store.path), port):
            pass


def test_words_of_a_run_reach_the_page_as_text_only() -> None:
    script = (Path(__file__).parents[3] / "kvbench" / "report" / "templates" / "watch.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert word not in script
