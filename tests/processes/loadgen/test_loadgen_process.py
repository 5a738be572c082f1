"""The load generator's process: spec, orders, progress, records, workers, traces."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hostile import GOOD, HEAD, HOST, TOKEN, chunk, in_background, spec_for

from kvbench.core.records import RequestRecord
from kvbench.processes.common.record_file import read_records
from kvbench.processes.loadgen.plan import planned_requests, prepare
from kvbench.processes.loadgen.sockets.clock import WAY
from kvbench.processes.loadgen.sockets.wire import ServerAddress
from kvbench.processes.loadgen.spec import LoadSpec


def write_spec(folder: Path, url: str, **changes: Any) -> Path:
    spec = vars(spec_for(url, records_path=str(folder / "records"), **changes))
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def command(path: Path) -> list[str]:
    return [sys.executable, "-m", "kvbench.processes.loadgen", str(path)]


def run(path: Path, timeout: float = 30, **more: Any) -> subprocess.CompletedProcess[str]:
    silent = subprocess.DEVNULL
    return subprocess.run(
        command(path), stdin=silent, capture_output=True, text=True, timeout=timeout, **more
    )


def start(path: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(path), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def say(process: subprocess.Popen[str], words: str) -> None:
    process.stdin.write(words + "\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return line


def records_in(folder: Path) -> list[RequestRecord]:
    return read_records(folder / "records")


def test_a_process_runs_its_spec_and_writes_records_in_order(tmp_path: Path) -> None:
    with in_background(GOOD) as url:
        done = run(write_spec(tmp_path, url, num_requests=20, slo={"ttft_ms": 900, "tpot_ms": 900}))
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0] == {"event": "ready"}
    assert {event["event"] for event in events[1:-1]} == {"progress"}
    assert (events[-2]["met"], events[-1]["event"], events[-1]["reason"]) == (20, "end", "complete")
    lags = {f"{kind}_{what}_ms" for kind in ("send_lag", "chunk_lag") for what in ("p50", "p99", "max")}
    shares = {
        "loop_lag_p99_ms", "loop_lag_max_ms", "loop_stalls", "loop_lag_share", "cpu_share",
        "run_queue_wait_share", "cpu_s",
    }  # fmt: skip
    counts = {"cpu_s", "chunks", "reads", "streams_peak", "connections"}
    client = events[-1]["client"]
    assert lags | shares | counts | {"started_monotonic_s", "started_unix_s"} <= set(client)
    assert (client["chunks"], client["gc_collections"]) == (60, 0)
    assert client["stamps"] in ("kernel", "read", "mixed")
    assert client["reads_by"] == WAY
    settled = [row for event in events[1:-1] for row in event["settled"]]
    assert sorted(row[0] for row in settled) == list(range(20))
    assert all(None not in row[1:4] and row[4] == "" for row in settled)
    records = records_in(tmp_path)
    assert [record.ok for record in records] == [True] * 20
    assert [record.scheduled_s for record in records] == sorted(record.scheduled_s for record in records)


@pytest.mark.parametrize("how", ["stop", signal.SIGTERM, signal.SIGINT])
def test_stopping_in_the_middle_still_writes_what_was_sent(tmp_path: Path, how: Any) -> None:
    with in_background([HEAD, chunk(TOKEN), "hang"]) as url:
        path = write_spec(
            tmp_path, url, num_requests=1000, request_rate=100.0, timeout_s=60.0, wait_for_go=True
        )
        process = start(path)
        assert heard(process) == {"event": "ready"}
        say(process, "go")
        while heard(process).get("sent", 0) < 3:
            pass
        if how == "stop":
            say(process, "stop")
        else:
            process.send_signal(how)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    end = json.loads(out.splitlines()[-1])
    assert (end["event"], end["reason"]) == ("end", "stopped")
    records = records_in(tmp_path)
    assert 3 <= len(records) < 1000
    assert {record.error for record in records} == {"cancelled"}


def test_nobody_left_to_say_go_ends_it(tmp_path: Path) -> None:
    with in_background(GOOD) as url:
        process = start(write_spec(tmp_path, url, wait_for_go=True))
        out, _ = process.communicate(timeout=10)  # closes its stdin
    assert json.loads(out.splitlines()[-1])["reason"] == "stopped"
    assert process.returncode == 0
    assert records_in(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"request_rat": 1}, "did you mean 'request_rate'"),
        ({"request_rate": "fast"}, "'request_rate' has an unusable value"),
        ({"request_rate": -1}, "request_rate must be above 0"),
        ({"output_len": 0}, "output_len"),
        ({"slo": {"ttft": 1}}, "slo.ttft"),
        ({"base_url": "nowhere"}, "not an http://"),
        ({"headers": {"a": "b\nc"}}, "line break"),
        ({"worker": 2, "workers": 2}, "worker must be 0 to 1"),
        ({"direct": "nixl"}, "'direct' must be an object"),
        ({"requests_path": "nowhere"}, "cannot read requests_path"),
    ],
)
def test_a_wrong_spec_is_exit_code_2(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_spec(tmp_path, f"http://{HOST}:1")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    done = run(path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_time_is_kept(tmp_path: Path) -> None:
    with in_background(GOOD) as url:
        process = start(write_spec(tmp_path, url, wait_for_go=True))
        assert heard(process) == {"event": "ready"}
        at = round(time.monotonic() + 0.3, 6)
        say(process, f"go {at}")
        out, err = process.communicate(timeout=20)
    client = json.loads(out.splitlines()[-1])["client"]
    assert client["started_monotonic_s"] == at, err
    assert client["started_unix_s"] - time.time() == pytest.approx(at - time.monotonic(), abs=0.5)
    assert [record.error for record in records_in(tmp_path)] == [""] * 4
    assert all(
        record.sent_s is not None and record.sent_s >= record.scheduled_s for record in records_in(tmp_path)
    )


def test_a_stop_before_the_start_ends_it(tmp_path: Path) -> None:
    with in_background(GOOD) as url:
        process = start(write_spec(tmp_path, url, wait_for_go=True))
        heard(process)
        say(process, f"go {time.monotonic() + 60}")
        say(process, "stop")
        out, _ = process.communicate(timeout=10)
    assert json.loads(out.splitlines()[-1])["reason"] == "stopped"
    assert records_in(tmp_path) == []


def test_a_slow_reader_gets_every_outcome(tmp_path: Path) -> None:
    with in_background(GOOD) as url:
        path = write_spec(tmp_path, url, num_requests=900, request_rate=900.0, timeout_s=30.0)
        command = [sys.executable, "-m", "kvbench.processes.loadgen", str(path)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        time.sleep(2.5)  # nothing is read until it is over
        out, _ = process.communicate(timeout=60)
    lines = out.splitlines()
    assert max(len(line) for line in lines[:-1]) < 4096
    settled = [row[0] for line in lines for row in json.loads(line).get("settled", [])]
    assert sorted(settled) == list(range(900))


def wanted_of(plan: Any) -> list[tuple[int, float, bytes]]:
    return [(item.index, item.offset_s, item.prompt) for item in plan]


def test_workers_share_the_plan() -> None:
    whole = wanted_of(planned_requests(spec_for("http://x", num_requests=11)))
    shares = [planned_requests(spec_for("http://x", num_requests=11, workers=3, worker=k)) for k in range(3)]
    assert [len(share) for share in shares] == [4, 4, 3]
    assert sorted(request for share in shares for request in wanted_of(share)) == whole


def test_the_plan_is_a_function_of_the_spec() -> None:
    url = "http://example.test/base"
    spec = spec_for(url, headers={"authorization": "Bearer x"}, extra_body={"top_p": 0.5})
    first, second = planned_requests(spec), planned_requests(spec)
    assert wanted_of(first) == wanted_of(second)
    assert not {item.request_id for item in first} & {item.request_id for item in second}
    prepare(spec, first, ServerAddress(url))
    for item in first:
        head, _, data = b"".join(item.parts).partition(b"\r\n\r\n")
        body = json.loads(data)
        assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nhost: example.test\r\n")
        assert f"content-length: {len(data)}".encode() in head
        assert len(set(body.pop("prompt"))) == 8
        assert body == {
            "model": "tiny", "max_tokens": 3, "min_tokens": 3, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "top_p": 0.5,
        }  # fmt: skip
        assert f"x-request-id: {item.request_id}\r\n".encode() in head + b"\r\n"
        assert b"authorization: Bearer x\r\n" in head


@pytest.mark.parametrize("vocab_size", [1000, 30_000_000])
def test_prompts_are_encoded_as_they_are(vocab_size: int) -> None:
    from kvbench.core.load.prompts import PromptShape, token_prompts

    plan = planned_requests(spec_for("http://x", num_requests=5, vocab_size=vocab_size))
    assert [json.loads(item.prompt) for item in plan] == token_prompts(
        5, PromptShape(8, vocab_size), 7
    ).tolist()


TRACE = [
    {"offset_s": 0.0, "input_len": 600, "output_len": 3, "blocks": [5, 9]},
    {"offset_s": 0.0, "input_len": 8, "output_len": 2, "blocks": None},
    {"offset_s": 0.05, "input_len": 700, "output_len": 3, "blocks": [5, 11]},
]


def trace(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_a_trace_takes_the_place_of_the_rate(tmp_path: Path) -> None:
    with in_background(GOOD) as url:
        done = run(write_spec(tmp_path, url, requests_path=trace(tmp_path, TRACE), timeout_s=15.0))
    assert done.returncode == 0, done.stderr
    records = records_in(tmp_path)
    assert [record.scheduled_s for record in records] == [0.0, 0.0, 0.05]
    assert [record.input_len for record in records] == [600, 8, 700]
    assert [record.requested_output_len for record in records] == [3, 2, 3]
    assert [record.error for record in records] == ["", "wrong_length", ""]


def test_requests_may_be_due_at_the_same_time(tmp_path: Path) -> None:
    rows = [{**TRACE[0], "offset_s": offset_s} for offset_s in (0.0, 0.0, 0.5, 0.5)]
    traced = LoadSpec(**vars(spec_for("http://x", requests_path=trace(tmp_path, rows))))
    assert [request.offset_s for request in planned_requests(traced)] == [0.0, 0.0, 0.5, 0.5]
    planned = LoadSpec(**vars(spec_for("http://x", num_requests=4, offsets_s=[0.0, 0.0, 0.5, 0.5])))
    planned.check()
    assert [request.offset_s for request in planned_requests(planned)] == [0.0, 0.0, 0.5, 0.5]


def test_traced_prompts_share_their_blocks(tmp_path: Path) -> None:
    spec = LoadSpec(**vars(spec_for("http://x", requests_path=trace(tmp_path, TRACE), vocab_size=5000)))
    prompts = [json.loads(item.prompt) for item in planned_requests(spec)]
    assert [len(prompt) for prompt in prompts] == [600, 8, 700]
    assert prompts[0][:512] == prompts[2][:512]
    assert prompts[0][512:] != prompts[2][512:600]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"offset_s": -1, "input_len": 1, "output_len": 1}, "line 2: offset_s"),
        ({"offset_s": 1, "input_len": 0, "output_len": 1}, "line 2: input_len"),
        ({"offset_s": 1, "input_len": 1, "output_len": 1.5}, "line 2: output_len"),
        ([1], "line 2: not a JSON object"),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, row: Any, words: str) -> None:
    path = write_spec(tmp_path, f"http://{HOST}:1", requests_path=trace(tmp_path, [TRACE[0], row]))
    done = run(path)
    assert done.returncode == 2
    assert words in done.stderr


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    from array import array

    from kvbench.processes.common.record_file import write_records

    records = [
        RequestRecord("kvb-a-0", 0.5, 8, 3, 0.5, 0.6, 0.8, 3, array("d", [0.1, 0.1]), 200, stamps="kernel"),
        RequestRecord("kvb-a-1", 1.5, 8, 3, error="connect", error_detail="no é"),
        RequestRecord("kvb-a-2", 2.5, 8, 3, 2.5, 2.6, 302.8, 3, [300.1234567, 0.0765433], 200),
    ]
    write_records(tmp_path / "records", records)
    back = records_in(tmp_path)
    assert [list(record.itl_s) for record in back] == [list(record.itl_s) for record in records]
    for record in [*back, *records]:
        record.itl_s = []
    assert back == records


def test_old_records_are_still_read(tmp_path: Path) -> None:
    record = RequestRecord("kvb-a-0", 0.5, 8, 3, 0.5, 0.6, 0.8, 3, [0.1, 0.1], 200)
    (tmp_path / "records").write_text(json.dumps(vars(record)) + "\n")
    assert records_in(tmp_path) == [record]


def test_records_cut_short_are_refused(tmp_path: Path) -> None:
    from kvbench.errors import StoreError
    from kvbench.processes.common.record_file import write_records

    write_records(tmp_path / "records", [RequestRecord("kvb-a-0", 0.5, 8, 3, itl_s=[0.1] * 5)])
    whole = (tmp_path / "records").read_bytes()
    for length in (len(whole) - 4, len(whole) // 2, 30):
        (tmp_path / "records").write_bytes(whole[:length])
        with pytest.raises(StoreError):
            records_in(tmp_path)


def test_records_that_cannot_be_written_are_reported_on_stdout(tmp_path: Path) -> None:
    """As on a full disk, on which the log cannot grow either."""

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))

    with in_background([0.01, *GOOD]) as url:
        path = write_spec(tmp_path, url, num_requests=5, request_rate=1000.0)
        done = run(path, timeout=60, preexec_fn=small)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1]) == {"event": "unwritten", "why": "File too large"}


def test_too_few_descriptors_are_told_before_the_trial(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    with in_background([0.5, *GOOD]) as url:
        path = write_spec(tmp_path, url, num_requests=150, request_rate=1000.0, timeout_s=20.0)
        done = run(path, timeout=60, preexec_fn=few)
    assert done.returncode == 0, done.stderr
    assert "only 100 file descriptors are allowed" in done.stderr
    errors = [record.error for record in records_in(tmp_path)]
    assert len(errors) == 150
    assert set(errors) == {"", "connect"}
    assert any("Too many open files" in record.error_detail for record in records_in(tmp_path))


ROOT = Path(__file__).resolve().parents[3]
EXTENSIONS = {
    name + sysconfig.get_config_var("EXT_SUFFIX")
    for name in (
        "kvbench/processes/loadgen/sockets/_reads",
        "kvbench/processes/http1/_heads",
        "kvbench/processes/http1/_splice",
        "kvbench/core/search/replay/_queues",
    )
}

needs_setuptools = pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77, reason="the build needs setuptools 77 (make setup)"
)


def wheel_of(folder: Path, compiler: str) -> set[str]:
    """The files in a wheel that is built from a copy of this checkout, with that C compiler."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("kvbench", "scenarios", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    code = "import setuptools.build_meta as build; print(build.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, "CC": compiler}, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(folder / done.stdout.splitlines()[-1]) as wheel:
        return set(wheel.namelist())


def wanted() -> set[str]:
    """All of the package with its templates, and the bundled scenarios within it."""
    files = [
        path for path in (ROOT / "kvbench").rglob("*") if path.suffix in (".py", ".pyi", ".typed", ".yaml")
    ]
    files += (ROOT / "kvbench" / "report" / "templates").iterdir()
    scenarios = [f"kvbench/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "scenarios").iterdir()]
    return {path.relative_to(ROOT).as_posix() for path in files} | set(scenarios)


def packaged(names: set[str]) -> set[str]:
    return {name for name in names if ".dist-info/" not in name}


@needs_setuptools
def test_without_a_compiler_everything_else_is_installed(tmp_path: Path) -> None:
    assert packaged(wheel_of(tmp_path, "/nonexistent/cc")) == wanted()


@needs_setuptools
@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="there is no C compiler, or no header of Python's",
)
def test_with_a_compiler_the_hot_paths_are_compiled(tmp_path: Path) -> None:
    assert packaged(wheel_of(tmp_path, "cc")) == wanted() | EXTENSIONS
