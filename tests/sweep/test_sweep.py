"""`kvbench sweep` and `bench` as a user runs them: emulated pairs, run folders, exit codes, trouble."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import EASY, Running, invoke, kvbench, tagged_processes, the_run, wait_until

from kvbench import files, transfer
from kvbench.core.records import Outputs
from kvbench.results.run import RunFolder
from kvbench.sweep.trial.output_check import compare

pytestmark = pytest.mark.timeout(300)


def sweep(results: Path, *words: str, sets: tuple[str, ...] = ()) -> tuple[int, str, RunFolder]:
    done = kvbench("sweep", "quickstart", "--output", str(results), *words, sets=(*EASY, *sets))
    return done.status, done.text, the_run(results)


def cells_of(run: RunFolder) -> dict[str, str]:
    return {result.cell.connector: result.status for result in run.cells}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, RunFolder]:
    """One whole sweep over every connector that can run here."""
    results = tmp_path_factory.mktemp("results")
    able = [name for name in ("mooncake", "nixl") if transfer.check(name) is None]
    words = [part for name in ("aggregated", "tcp", *able) for part in ("--connector", name)]
    return sweep(results, *words)


def test_a_sweep_ends_well_and_says_what_it_found(finished: tuple[int, str, RunFolder]) -> None:
    status, text, run = finished
    assert status == 0, text
    assert run.manifest["status"] == "complete"
    assert set(cells_of(run).values()) == {"done"}
    assert "≥ 20" in text
    assert "EMULATED" in text
    assert str(run.path.name) in text


def test_every_pair_answers_as_the_aggregated_server(finished: tuple[int, str, RunFolder]) -> None:
    _, _, run = finished
    for result in run.cells:
        if result.cell.connector == "aggregated":
            continue
        assert result.equal_outputs["equal"] == result.equal_outputs["checked"] > 0


def test_kv_really_moved_whole_and_by_the_transport_asked_for(finished: tuple[int, str, RunFolder]) -> None:
    _, _, run = finished
    for trial in run.trials:
        if trial.cell.connector == "aggregated":
            continue
        # 64 tokens of 2 KiB each, in 4 blocks of 16 tokens
        assert trial.engine["kv_bytes_per_request"] == 64 * 2048
        # A trial that ends when its verdict is sure leaves requests behind whose KV had moved already.
        assert trial.summary["completed"] <= trial.engine["kv_transfers"] <= trial.summary["sent"]
        assert "tcp" in trial.engine["transport"]
        decode = trial.engine["roles"]["decode"]["prompt_tokens_by_source"]
        assert decode.get("local_compute", 0) == 0


def test_where_the_first_token_s_time_goes_adds_up(finished: tuple[int, str, RunFolder]) -> None:
    _, _, run = finished
    for trial in run.trials:
        parts = trial.engine["ttft_breakdown_ms"]
        known = {name: value for name, value in parts.items() if value is not None}
        total = trial.engine["ttft_ms_mean_of_all"]
        assert sum(known.values()) == pytest.approx(total, rel=0.02), (trial.trial_id, parts)
        if trial.cell.connector == "aggregated":
            assert set(known) == {"router", "prefill_queue", "prefill"}
            continue
        assert trial.engine["kv_source"].startswith("kvbench:kv_transfer_seconds of ")
        unknown = {"decode_queue"} if trial.cell.connector == "mooncake" else set()
        assert set(parts) - set(known) == unknown
        rows = run.requests(trial.trial_id)
        rows = rows[rows.error == ""]  # a trial whose verdict is sure leaves some behind, without these times
        assert len(rows)
        assert (rows.router_received_s >= rows.sent_s - 1e-3).all()
        assert (rows.decode_first_byte_s <= rows.first_token_s + 1e-3).all()
        if trial.cell.connector == "mooncake":  # asked at once, P's answer may come after D's last token
            rows = rows[rows.prefill_answered_s.notna()]
            assert len(rows)
        assert (rows.prefill_answered_s > rows.prefill_sent_s).all()
    assert "TTFT breakdown" in (run.path / "report.md").read_text()
    assert (run.path / "figures" / "ttft_breakdown.svg").is_file()


def test_the_run_folder_is_whole(finished: tuple[int, str, RunFolder]) -> None:
    _, _, run = finished
    for name in ("scenario.yaml", "plan.json", "environment.json", "report.md", "tables/summary.csv"):
        assert (run.path / name).stat().st_size > 0, name
    for name in ("max_request_rate", "goodput"):
        assert "emulated" in (run.path / "figures" / f"{name}.svg").read_text().lower()
    assert "emulated" in (run.path / "report.md").read_text().lower()
    plan = json.loads((run.path / "plan.json").read_text())
    assert {"prefill-0", "decode-0", "router"} == set(plan["processes"]["tcp"])
    for trial in run.trials:
        assert len(run.requests(trial.trial_id)) == trial.summary["sent"] >= 20
        assert trial.labels == ["emulated"]
    assert not tagged_processes(run)
    assert not list(run.path.glob(".records*"))


def test_reports_come_back_from_raw_files_alone(finished: tuple[int, str, RunFolder]) -> None:
    _, _, run = finished
    before = (run.path / "report.md").read_bytes()
    (run.path / "report.md").unlink()
    done = kvbench("report", str(run.path))
    assert (done.status, (run.path / "report.md").read_bytes()) == (0, before)


def test_an_slo_that_nothing_can_meet_is_exit_3(tmp_path: Path) -> None:
    # So far from being met that no delay of a busy machine may have caused the miss.
    slow = ("deployment.engine_options.time_scale=20", "slo.ttft_ms=30")
    status, text, run = sweep(tmp_path, "--connector", "aggregated", sets=(*slow, "search.min_rate=20"))
    assert status == 3, text
    (result,) = run.cells
    assert result.answer["status"] == "slo_unattainable"
    assert "none" in text


def test_bench_measures_one_rate(tmp_path: Path) -> None:
    done = kvbench(
        "bench", "quickstart", "--rate", "5", "--connector", "aggregated", "--output", str(tmp_path),
        sets=EASY,
    )  # fmt: skip
    assert done.status == 0, done.text
    (trial,) = the_run(tmp_path).trials
    assert (trial.request_rate, trial.summary["completed"]) == (5, 20)


def test_a_taken_port_is_refused_with_a_hint_and_leaves_no_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        words = ("sweep", "quickstart", "--connector", "aggregated", "--output", str(tmp_path / "runs"))
        done = invoke(*words, sets=(f"deployment.base_port={port}",))
    assert done.status == 1
    assert f"cannot start: ports in use: {port}" in done.err
    assert "deployment.base_port=0" in done.err
    assert not (tmp_path / "runs").exists()


def test_a_pair_that_never_gets_ready(tmp_path: Path) -> None:
    status, text, run = sweep(tmp_path, "--connector", "tcp", sets=("deployment.ready_timeout_s=0.01",))
    assert status == 1
    assert "not ready after 0.01 s" in text
    assert cells_of(run) == {"tcp": "failed"}
    assert not tagged_processes(run)


def test_a_missing_library_skips_its_connector_and_no_other(tmp_path: Path) -> None:
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('libfancy.so.1: cannot open')\n")
    words = ("--connector", "aggregated", "--connector", "nixl")
    done = kvbench(
        "sweep", "quickstart", "--output", str(tmp_path / "r"), *words, sets=EASY,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    run = the_run(tmp_path / "r")
    assert done.status == 0, done.text
    assert cells_of(run) == {"aggregated": "done", "nixl": "skipped"}
    assert "nixl is skipped" in done.text
    assert "libfancy.so.1" in done.text


def test_a_server_killed_in_a_trial_fails_its_cell_and_no_other(tmp_path: Path) -> None:
    sets = (*EASY, "search.trial_s=5", "workload.input_len=[64,128]")
    words = (
        "sweep", "quickstart", "--connector", "aggregated", "--connector", "tcp", "--output", str(tmp_path),
    )  # fmt: skip
    with Running(*words, sets=sets) as running:
        running.wait_for("checking outputs at 64 tokens")
        run = the_run(tmp_path)
        wait_until(lambda: len(the_run(tmp_path).trials) > 0)
        engine, _ = [
            process
            for process in tagged_processes(run)
            if "kvbench.processes.emulator" in " ".join(process.cmdline())
        ]
        engine.kill()
        done = running.finish()
    run = the_run(tmp_path)
    assert done.status == 1, done.text
    assert re.search(r" in +failed: aggregated-[01] was killed by signal 9  \(\d of", done.text)
    assert [result.status for result in run.cells if result.cell.connector == "tcp"] == ["done", "done"]
    assert "failed" in {result.status for result in run.cells if result.cell.connector == "aggregated"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_a_readable_run_and_no_process(tmp_path: Path, number: int) -> None:
    words = ("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path))
    with Running(*words, sets=(*EASY, "search.trial_s=10", "search.min_requests=100")) as running:
        running.wait_for("tcp: checking outputs")
        wait_until(
            lambda: any("loadgen" in " ".join(p.cmdline()) for p in tagged_processes(the_run(tmp_path)))
        )
        running.signal(number)
        done = running.finish()
    assert done.status == 130, done.text
    run = the_run(tmp_path)
    assert run.manifest["status"] == "interrupted"
    assert not tagged_processes(run)
    assert (run.path / "report.md").exists()


def test_trials_removed_in_mid_run_are_not_lost_unsaid(tmp_path: Path) -> None:
    words = ("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path))
    with Running(*words, sets=EASY) as running:
        running.wait_for("tcp: checking outputs")
        run = the_run(tmp_path)
        (run.path / "trials.jsonl").unlink()
        done = running.finish()
    assert done.status == 1, done.text
    assert "trials.jsonl was removed or replaced while it was written" in " ".join(done.text.split())
    assert json.loads((run.path / "manifest.json").read_text())["status"] == "failed"


def test_nothing_survives_a_kill(tmp_path: Path) -> None:
    words = ("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path))
    with Running(*words, sets=(*EASY, "search.trial_s=10", "search.min_requests=100")) as running:
        running.wait_for("tcp: checking outputs")
        run = the_run(tmp_path)
        assert tagged_processes(run)
        running.signal(signal.SIGKILL)
        wait_until(lambda: list(files.left()))
        assert kvbench("stop", "--run", run.run_id).out.count(" removed") == 1
    wait_until(lambda: not tagged_processes(run))
    assert the_run(tmp_path).manifest["status"] == "interrupted"


def test_different_outputs_are_told() -> None:
    equality = compare(Outputs(("a b", "c d"), 0.1), Outputs(("a b", "c x"), 0.1))
    assert not equality.passed
    assert (equality.checked, equality.equal) == (2, 1)
    assert "c x" in equality.example


class TestBaseUrl:
    """Servers that somebody else has started."""

    def options(self, url: str, results: Path) -> list[str]:
        lengths = ["--input-len", "64", "--output-len", "4", "--ttft-ms", "20000", "--output", str(results)]
        lengths += ["--set", "search.trial_s=2"]
        return ["--base-url", url, *lengths]

    def test_any_openai_server_can_be_measured(self, tmp_path: Path) -> None:
        launched = Running(
            "launch", "quickstart", "--connector", "aggregated", sets=("deployment.base_port=0",)
        )
        try:
            url = launched.wait_for("requests").split()[-1]
            done = kvbench("bench", "--rate", "20", *self.options(url.removesuffix("/completions"), tmp_path))
        finally:
            launched.signal(signal.SIGINT)
            ended = launched.finish()
        assert done.status == 0, done.text
        assert ended.status == 0, ended.text
        run = the_run(tmp_path)
        assert run.labels == []
        (trial,) = run.trials
        assert trial.summary["completed"] == 60
        assert "EMULATED" not in done.text

    def test_a_server_that_is_not_there(self, tmp_path: Path) -> None:
        done = kvbench("sweep", *self.options("http://127.0.0.1:9", tmp_path)).failed(1)
        assert "GET http://127.0.0.1:9/v1/models failed" in done.err
        assert "hint: nothing listens on port 9 there: is it up?" in done.err

    def test_a_server_that_answers_500(self, tmp_path: Path) -> None:
        code = (
            "import http.server, json\n"
            "class Broken(http.server.BaseHTTPRequestHandler):\n"
            "    def do_GET(self):\n"
            "        body = json.dumps({'data': [{'id': 'm'}]}).encode()\n"
            "        self.send_response(200); self.send_header('Content-Length', len(body))\n"
            "        self.end_headers()\n"
            "        self.wfile.write(body)\n"
            "    def do_POST(self):\n"
            "        self.send_response(500); self.send_header('Content-Length', 4); self.end_headers()\n"
            "        self.wfile.write(b'oops')\n"
            "    def log_message(self, *args): pass\n"
            "server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Broken)\n"
            "print(server.server_port, flush=True)\n"
            "server.serve_forever()\n"
        )
        server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            port = int(server.stdout.readline())
            done = kvbench("sweep", *self.options(f"http://127.0.0.1:{port}", tmp_path))
        finally:
            server.kill()
            server.communicate()
        assert done.status == 1
        assert "answered 500 Internal Server Error: oops" in " ".join(done.text.split())
        assert cells_of(the_run(tmp_path)) == {"m": "failed"}

    def test_what_is_missing_is_named(self) -> None:
        done = invoke("sweep", "--base-url", "http://127.0.0.1:9").failed(2)
        assert "--input-len" in done.err
        assert "--ttft-ms, --tpot-ms or --slo" in done.err

    @pytest.mark.parametrize("load", [("--rate", "4"), ("--concurrency", "2")])
    def test_one_load_needs_no_slo(self, load: tuple[str, str]) -> None:
        url = ("--base-url", "http://127.0.0.1:9", "--input-len", "8", "--output-len", "2")
        done = invoke("bench", *url, *load)
        assert "GET http://127.0.0.1:9/v1/models failed" in done.err
