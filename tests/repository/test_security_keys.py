"""API keys and passwords: they come from the environment, reach the server, and stand nowhere else."""

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from commands import argv, kvbench, the_run
from hostile import DONE, HOST, TOKEN, USAGE

from kvbench.engines.external import url_problem
from kvbench.errors import InputError
from kvbench.hosts.environment import recorded_env
from kvbench.hosts.server_access import WITHHELD, bearer, redact
from kvbench.processes import http1
from kvbench.processes.http1 import ReceivedRequest, Response
from kvbench.report.bundle import BundleOptions, bundle
from kvbench.results.store import RunStore

CANARY = "kvb-Canary_4711.x~Zq+9/="
VARIABLE = "TEST_SERVER_KEY"
LOOK_S = 0.3
EVERY = 7
"""Of so many requests with the right key one is refused, with the key in the answer, as some servers do."""


class Guarded:
    """An OpenAI-compatible server that wants the key, and says of each request whether it had it."""

    def __init__(self) -> None:
        self.right = self.wrong = 0
        self.port = 0

    def handle(self, request: ReceivedRequest, response: Response) -> None:
        if request.headers.get("authorization") != f"Bearer {CANARY}":
            self.wrong += 1
            response.send(401, b'{"error": {"message": "no key"}}')
            return
        self.right += 1
        if request.method == "GET":
            models = {"data": [{"id": "guarded"}]}
            response.send(200 if request.path == "/v1/models" else 404, json.dumps(models).encode())
        elif b'"stream":true' not in request.body:
            response.send(200, b'{"choices": [{"text": "same"}]}')
        elif self.right % EVERY == 0:
            padding = "x" * (self.right % 300)  # so that the cut of a long message comes inside the key, too
            response.send(401, f"{padding} Incorrect API key provided: {CANARY} {padding}".encode())
        else:
            response.start_stream()
            for event in (TOKEN, TOKEN, TOKEN, USAGE, DONE):
                response.write(event)
            response.end()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    server = Guarded()
    started = threading.Event()
    ends: list[Callable[[], Any]] = []

    async def main() -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(over.set))
        listening = await http1.serve(server.handle, HOST, 0)
        server.port = listening.port
        started.set()
        await over.wait()
        await listening.close()

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    assert started.wait(10)
    yield server
    ends[0]()
    thread.join(10)


def command_lines(pid: int) -> str:
    """The command lines of a process and all its descendants now."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
    return "\n".join(found)


def bytes_below(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file, and the texts that are packed inside a Parquet file."""
    import pyarrow.parquet as pq

    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes()
            if path.suffix == ".parquet":
                yield f"{path} unpacked", repr(pq.read_table(path).to_pylist()).encode()


def test_a_key_reaches_the_server_and_stands_nowhere(guarded: Guarded, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ["bench", "--base-url", f"http://{HOST}:{guarded.port}", "--api-key-env", VARIABLE]
    words += ["--rate", "40", "--input-len", "16", "--output-len", "3", "--ttft-ms", "5000"]
    words += ["--output", str(tmp_path / "results")]
    sets = ("search.trial_s=1", "search.min_requests=40", "slo.attainment=0.5")
    seen = ""
    log = tmp_path / "printed"
    with log.open("wb") as printed:
        process = subprocess.Popen(
            argv(*words, sets=sets),
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, VARIABLE: CANARY, "VLLM_API_KEY": CANARY, "TMPDIR": str(temporary)},
        )
        while process.poll() is None:
            time.sleep(LOOK_S)
            seen += command_lines(process.pid)
            for path in temporary.glob("kvbench-*"):
                with contextlib.suppress(OSError):
                    assert stat.S_IMODE(path.stat().st_mode) == 0o700
                    assert all(CANARY.encode() not in data for _, data in bytes_below(path))
    run = the_run(tmp_path / "results")
    assert guarded.right > 40, log.read_text()
    assert guarded.wrong == 0
    (trial,) = run.all_trials
    details = run.requests(trial.trial_id)["error_detail"]
    assert any(WITHHELD in detail for detail in details), "the server's echo was kept without the key"
    assert "kvbench.processes.loadgen" in seen
    bundled = bundle(run.path, BundleOptions(output=tmp_path / "bundle.tar.gz"))
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    for name, data in [("/proc", seen.encode()), ("bundle", repr(bundled).encode()), *bytes_below(tmp_path)]:
        for part in (CANARY, CANARY[:12], CANARY[8:]):
            assert part.encode() not in data, name
    assert json.loads((run.path / "environment.json").read_text())["env"]["VLLM_API_KEY"] == "(not recorded)"


def test_a_key_that_is_missing_or_unsendable_is_said_without_it(
    monkeypatch: pytest.MonkeyPatch, guarded: Guarded
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert bearer("") == {}
    with pytest.raises(InputError, match=f"{VARIABLE}.*is not set"):
        bearer(VARIABLE)
    for bad in ("secret\n", "secret\r\nx-evil: 1", "sécret", "two words"):
        monkeypatch.setenv(VARIABLE, bad)
        with pytest.raises(InputError) as caught:
            bearer(VARIABLE)
        assert "cret" not in str(caught.value)
    monkeypatch.setenv(VARIABLE, CANARY)
    assert bearer(VARIABLE) == {"authorization": f"Bearer {CANARY}"}
    assert redact(f"no: {CANARY}!", (VARIABLE,)) == f"no: {WITHHELD}!"
    for kept in range(4, len(CANARY)):
        assert redact(f"no: {CANARY[:kept]}…", (VARIABLE,)) == f"no: {WITHHELD}"
    assert redact("nothing of it", (VARIABLE,)) == "nothing of it"


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2hunter2@router:8000", "https://hunter2hunter2@router",
        "http://router:8000\r\nx-evil: 1", "http://router:99999", "http://[::1", "ftp://router", "http://",
        "http://ro uter",
    ],
)  # fmt: skip
def test_a_url_with_a_login_or_a_line_break_is_refused_unseen(url: str) -> None:
    problem = url_problem(url)
    assert problem
    assert "hunter2" not in problem
    if "hunter2" in url:
        assert "api_key_env" in problem


def test_the_command_refuses_a_login_in_a_url_without_showing_it(tmp_path: Path) -> None:
    url = "http://user:hunter2hunter2@127.0.0.1:9"
    words = ["--rate", "1", "--input-len", "8", "--output-len", "2", "--ttft-ms", "1"]
    done = kvbench("bench", "--base-url", url, *words, "--output", str(tmp_path)).failed(2)
    assert "hunter2" not in done.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_API_KEY", "VLLM_HF_TOKEN", "MC_STORE_SECRET", "UCX_PASSWORD", "NCCL_PASSWD", "MC_CREDENTIALS",
        "VLLM_AUTHORIZATION",
    ],
)  # fmt: skip
def test_secrets_are_not_recorded_whatever_they_begin_with(name: str) -> None:
    assert CANARY not in json.dumps(recorded_env({name: CANARY, "PATH": CANARY, "HF_TOKEN": CANARY}))


def test_run_folders_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with RunStore.create(tmp_path / "results", "modes", b"", {}, {}) as store:
            pass
    finally:
        os.umask(before)
    for path in [store.path, *store.path.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & 0o027, f"{path} has {mode:o}"
        assert mode & 0o600 == 0o600
