"""The agent over a plain pipe: what it starts, tells and brings, and that it leaves nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import tagged, wait_until

from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import AGENT_MODULE, RUN_TAG_ENV, ProcessSpec
from kvbench.errors import InputError, LaunchError, PortInUseError, ProcessDiedError
from kvbench.files import json_row
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.agents.channel import (
    LOST,
    PROTOCOL,
    ChannelClosedError,
    HostLostError,
    Lines,
    PipeChannel,
    encode,
)
from kvbench.launchers.agents.remote import RemoteLauncher, RemoteWeb
from kvbench.launchers.parts.liveness import Liveness
from kvbench.processes.agent.jobs import LOG_BEHIND_BYTES, LogFeed
from kvbench.sweep.trial.loadgen_driver import LoadGenerator, Spare
from kvbench.version import __version__

AGENT = (sys.executable, "-m", "kvbench.processes.agent", "--tag")
TAG = f"far-test-{os.getpid()}"
ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"
GONE_S = 12.0
"""What is started on a host is gone 10 s after the connection is; the rest is this machine's slowness."""


class Site:
    """One agent and a launcher that uses it."""

    def __init__(self, folder: Path, tag: str = TAG) -> None:
        self.channel = PipeChannel("far-away", [*AGENT, tag], {RUN_TAG_ENV: tag})
        self.agent = AgentClient(self.channel, str(folder / "work"), {"WHERE": "there"})
        self.launcher = RemoteLauncher(
            {"far-away": self.agent}, lambda _: "far-away", tag, folder / "logs" / "pair"
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.agent.close()
    assert list((tmp_path / "work").iterdir()) == []


def python(code: str, name: str = "p", **more: Any) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", code), **more)


def test_lines_come_whole_however_they_are_cut() -> None:
    lines = Lines()
    assert (lines.feed(b"on"), lines.feed(b"e\n\ntwo\nthr")) == ([], [b"one", b"", b"two"])
    assert lines.feed(b"ee\n") == [b"three"]
    assert json_row(b"Welcome to this machine!") is None
    assert json_row(encode({"event": "beat"})) == {"event": "beat"}


def test_a_process_gets_its_spec_files_environment_and_log(site: Site) -> None:
    code = (
        "import json, os, sys\nprint(json.dumps([json.load(open(sys.argv[1])), dict(os.environ), sys.argv]))"
    )
    logs = str(site.launcher.log_dir.absolute())
    spec = python(code, spec={"trace_path": f"{logs}/spans"}, env={"ONE": "1"}, files={"EXTRA": {"x": [1]}})
    process = site.launcher.start(spec)
    wait_until(lambda: process.poll() is not None)
    given, env, argv = json.loads(process.log_path.read_text())
    assert process.poll() == 0
    assert (env["ONE"], env["WHERE"], env[RUN_TAG_ENV]) == ("1", "there", TAG)
    assert given["trace_path"] == f"{site.agent.folder}/logs/pair/spans"
    assert argv[1].startswith(site.agent.folder)
    assert env["EXTRA"].startswith(site.agent.folder)


def test_a_command_that_cannot_be_run_says_so(site: Site) -> None:
    process = site.launcher.start(ProcessSpec(name="none", argv=("/no/such/command",)))
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 127
    assert "No such file" in " ".join(process.tail())


def test_a_piped_process_converses_and_is_renamed(site: Site) -> None:
    process = site.launcher.start(python(ECHO), piped=True)
    process.stdin.write("grüße\n".encode())
    assert process.stdout.readline() == "eßürg\n".encode()
    process.rename("q")
    assert process.log_path == site.launcher.log_dir / "q.log"
    process.stdin.close()
    assert process.stdout.readline() == b""
    wait_until(lambda: process.poll() == 0)
    with pytest.raises(BrokenPipeError):
        process.stdin.write(b"more\n")
    site.launcher.stop([process])


def test_all_that_was_said_comes_before_the_end(site: Site) -> None:
    code = "import sys; print('x' * 300_000); print('last'); print('logged', file=sys.stderr)"
    process = site.launcher.start(python(code), piped=True)
    data = process.stdout.read()
    while chunk := process.stdout.read():
        data += chunk
    assert len(data) == 300_006
    wait_until(lambda: process.poll() == 0)
    assert process.tail() == ["logged"]
    site.launcher.stop([process])


def test_stop_takes_the_group_along_and_brings_what_was_left_beside_the_logs(site: Site) -> None:
    folder = site.launcher.log_dir.absolute()
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write('spans')\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    spec = python(code)
    process = site.launcher.start(replace(spec, argv=(*spec.argv, f"{folder}/p.spans.jsonl")))
    wait_until(lambda: process.tail() == ["ready"])
    assert len(tagged(TAG)) >= 3
    site.launcher.stop([process], grace_s=0.1)
    assert process.poll() == -signal.SIGKILL
    assert (folder / "p.spans.jsonl").read_text() == "spans"
    wait_until(lambda: tagged(TAG) == [site.channel.pid])


def test_files_ports_web_and_clock(site: Site, tmp_path: Path) -> None:
    far = site.launcher.place_of("loadgen")
    here = tmp_path / "requests.jsonl"
    here.write_bytes(bytes(range(256)) * 2000)
    far.put(here)
    here.unlink()
    assert os.path.getsize(far.path_of(here)) == 512_000
    far.fetch(here)
    assert here.read_bytes() == bytes(range(256)) * 2000
    assert not os.path.exists(far.path_of(here))
    assert abs(far.clock_ahead_s) < 0.1
    one, many = far.free_ports("127.0.0.1", [1, 5])
    assert one not in range(many, many + 5)
    assert not far.listens("127.0.0.1", one)
    serve = f"import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={one}, bind='127.0.0.1')"
    server = site.launcher.start(python(serve))
    wait_until(lambda: far.listens("127.0.0.1", one))
    with pytest.raises(PortInUseError, match=r"far-away: .*planned for a test, is in use"):
        far.require_free("127.0.0.1", [("a test", one)])
    with httpx.Client(transport=RemoteWeb({"127.0.0.1": site.agent}, ServerAccess())) as client:
        assert client.get(f"http://127.0.0.1:{one}/").status_code == 200
        assert client.post(f"http://127.0.0.1:{one}/", content=b"x").status_code == 501
        with pytest.raises(httpx.ConnectError):
            client.get(f"http://127.0.0.1:{many}/")
    site.launcher.stop([server])


def test_errors_over_there_are_errors_here(site: Site) -> None:
    with pytest.raises(LaunchError, match="far-away: this agent does not know 'juggle'"):
        site.agent.ask("juggle")
    with pytest.raises(InputError, match="no engine is called"):
        site.agent.ask("engine_version", engine="steam", options="{}")
    with pytest.raises(LaunchError, match="PermissionError"):
        site.agent.ask("read", path="/etc/passwd", offset=0)
    assert site.agent.ask("environment")["kvbench"] == __version__


def test_a_load_generator_runs_over_there(site: Site, tmp_path: Path) -> None:
    """What it says, its records and its end, with a process that waited for its spec."""
    records = tmp_path / "records.jsonl"
    spec = {
        "base_url": "http://127.0.0.1:9", "model": "m", "request_rate": 50.0, "num_requests": 5,
        "input_len": 4, "output_len": 2, "records_path": str(records), "seed": 1, "vocab_size": 1000,
    }  # fmt: skip
    spare = Spare(site.launcher)
    spare.prepare()
    generator = LoadGenerator(site.launcher, spec, "loadgen-1", spare=spare)
    result = generator.run(lambda progress: False, site.launcher.check, 20.0)
    spare.close()
    assert [record.error for record in result.records] == ["connect"] * 5
    assert not records.exists()
    assert list(Path(site.agent.files).iterdir()) == []


def test_a_frozen_process_is_seen_over_there(site: Site) -> None:
    sleep = "import time; time.sleep(600)"
    processes = [site.launcher.start(python(sleep, name=name)) for name in ("well", "engine")]
    liveness = Liveness(processes)
    liveness.start()
    os.kill(processes[1].pid, signal.SIGSTOP)
    found: list[Any] = []

    def seen() -> bool:
        found.append(liveness.problem(processes))
        return found[-1] is not None

    wait_until(seen, GONE_S)
    process, what, fix = found[-1]
    assert process is processes[1]
    assert f"on the host far-away: engine {process.pid} is frozen" in what
    assert fix == f"on far-away: find out what stops it; `kill -CONT {process.pid}` continues it"
    liveness.close()
    site.launcher.stop(processes)
    assert [child.poll() for child in processes] == [-signal.SIGTERM] * 2


def test_cpu_time_is_told_of_its_own_processes_only(site: Site) -> None:
    busy = site.launcher.start(python("n = 0\nwhile n < 3e6: n += 1\nprint('done', flush=True); input()"))
    wait_until(lambda: bool(busy.tail()))
    far = site.launcher.place_of("p")
    wait_until(lambda: busy.poll() is not None or (far.cpu_s(busy.pid) or 0) > 0)
    assert far.cpu_s(os.getpid()) is None


CANARY = "sk-canary-5d1f0c77"


def test_a_key_goes_to_the_generator_and_nowhere_else(site: Site, tmp_path: Path) -> None:
    """Over the connection into one process's environment; the server repeats it, and nobody keeps it."""
    heard: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            heard.append(str(self.headers["authorization"]))
            body = f"no such key: {heard[-1]}".encode()
            self.send_response(401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    site.launcher.with_secrets("loadgen", {"FAR_TEST_KEY": CANARY})
    other = site.launcher.start(python("import os; print(os.environ.get('FAR_TEST_KEY'))", name="router"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spec = {
            "base_url": f"http://127.0.0.1:{server.server_port}", "model": "m", "request_rate": 50.0,
            "num_requests": 5, "input_len": 4, "output_len": 2,
            "records_path": str(tmp_path / "records.jsonl"), "seed": 1, "vocab_size": 1000,
            "api_key_env": "FAR_TEST_KEY",
        }  # fmt: skip
        seen: list[bytes] = []

        def look() -> None:
            for pid in tagged(TAG):
                with contextlib.suppress(OSError):
                    seen.append(Path(f"/proc/{pid}/cmdline").read_bytes())
            seen.extend(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

        spare = Spare(site.launcher)
        spare.prepare()
        result = LoadGenerator(site.launcher, spec, "loadgen-1", spare=spare).run(
            lambda progress: False, look, 20.0
        )
        spare.close()
        server.shutdown()
    assert heard == [f"Bearer {CANARY}"] * 5
    assert len(result.records) == 5
    wait_until(lambda: other.poll() is not None)
    assert other.log_path.read_text() == "None\n"
    look()
    seen.append(Path(f"/proc/{site.channel.pid}/environ").read_bytes())
    seen.append(repr(result).encode())
    assert len(seen) > 10
    assert not [data for data in seen if CANARY.encode() in data]


def test_the_end_of_stdin_ends_everything(tmp_path: Path) -> None:
    site = Site(tmp_path)
    process = site.launcher.start(python("import time; time.sleep(600)"))
    assert process.pid in tagged(TAG)
    site.channel.close()
    wait_until(lambda: not tagged(TAG), GONE_S)
    wait_until(lambda: process.poll() in (LOST, -signal.SIGKILL))
    with pytest.raises(HostLostError, match="the host far-away is lost"):
        site.launcher.check()
    with pytest.raises(HostLostError):
        site.launcher.start(python("pass"))
    site.launcher.stop([process])
    site.agent.close()
    assert list((tmp_path / "work").iterdir()) == []


def test_a_killed_agent_takes_its_processes_along(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.launcher.start(python("import time; time.sleep(600)"))
    os.kill(site.channel.pid, signal.SIGKILL)
    wait_until(lambda: not tagged(TAG), GONE_S)
    wait_until(lambda: bool(site.agent.lost))
    assert "status -9" in site.agent.lost
    site.agent.close()


def test_a_stopped_agent_is_lost_and_a_stopped_client_is_left(tmp_path: Path) -> None:
    """Neither side hears the other any more, although no connection has ended."""
    site = Site(tmp_path)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(tmp_path / "other"), f"{TAG}-client"], stdout=subprocess.PIPE
    )
    assert client.stdout.readline() == b"started\n"
    os.kill(client.pid, signal.SIGSTOP)
    os.kill(site.channel.pid, signal.SIGSTOP)
    wait_until(lambda: bool(site.agent.lost), GONE_S)
    assert "no frame from it" in site.agent.lost
    stopped = {client.pid}
    wait_until(lambda: set(tagged(f"{TAG}-client")) <= stopped, GONE_S)
    os.kill(client.pid, signal.SIGKILL)
    client.communicate()
    os.kill(site.channel.pid, signal.SIGKILL)
    site.agent.close()


CLIENT = """
import sys, time
from pathlib import Path
sys.path[:0] = ["tests/processes/agent", "tests/support"]
from test_far import Site, python
site = Site(Path(sys.argv[1]), sys.argv[2])
site.launcher.start(python("import time; time.sleep(600)"))
print("started", flush=True)
time.sleep(600)
"""


def hello(version: str, protocol: int) -> list[str]:
    frame = {"event": "hello", "version": version, "protocol": protocol}
    return [sys.executable, "-c", f"import sys; print({json.dumps(frame)!r}, flush=True); sys.stdin.read()"]


@pytest.mark.parametrize(("version", "protocol"), [("0.0.1", PROTOCOL), (__version__, PROTOCOL + 1)])
def test_another_version_is_refused_with_both(version: str, protocol: int) -> None:
    with pytest.raises(LaunchError) as caught:
        AgentClient(PipeChannel("old", hello(version, protocol)))
    assert version in caught.value.message
    assert __version__ in caught.value.message
    assert "kvbench hosts install" in caught.value.hint


@pytest.mark.parametrize(
    ("command", "words", "hint"),
    [
        (
            [sys.executable, "-I", "-S", "-m", "kvbench.processes.agent"],
            "kvbench is not installed there",
            "pip install",
        ),
        (["sh", "-c", "exec python9 -m kvbench.processes.agent"], "python9", "deployment.hosts.NAME.python"),
        (["sh", "-c", "echo Welcome; exit 3"], r"status 3.*Welcome", "by hand"),
    ],
)
def test_no_agent_over_there_says_what_to_do(command: list[str], words: str, hint: str) -> None:
    with pytest.raises(LaunchError, match=words) as caught:
        AgentClient(PipeChannel("bare", command))
    assert hint in caught.value.hint


@pytest.mark.parametrize("package", ["kvbench", "kvbench/processes"])
def test_a_kvbench_without_that_agent_is_refused(tmp_path: Path, package: str) -> None:
    for folder in ("kvbench", package):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    command = ["sh", "-c", f"cd {tmp_path} && exec {sys.executable} -m {AGENT_MODULE}"]
    with pytest.raises(LaunchError, match=rf"another kvbench is installed there.* {__version__} ") as caught:
        AgentClient(PipeChannel("old", command))
    assert f"install kvbench {__version__} there: kvbench hosts install" in caught.value.hint
    assert "Traceback" not in caught.value.message


def test_a_channel_tells_why_it_ended() -> None:
    channel = PipeChannel("gone", ["sh", "-c", "echo one; echo why >&2; exit 7"])
    assert channel.receive(10) == b"one"
    with pytest.raises(ChannelClosedError, match=r"status 7.*why"):
        channel.receive(10)
    with pytest.raises(ChannelClosedError):
        channel.receive(0)
    channel.close()
    with pytest.raises(LaunchError, match="cannot run /no/such"):
        PipeChannel("none", ["/no/such"])


def test_a_log_that_grows_too_fast_is_cut_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    feed = LogFeed(path)
    assert feed.take(100) == ""
    path.write_text("first\n")
    assert feed.take(100) == "first\n"
    with path.open("a") as file:
        file.write("x" * (LOG_BEHIND_BYTES + 10))
    text = feed.take(10**9)
    assert f"{LOG_BEHIND_BYTES // 2 + 10} bytes of this log are left out" in text
    assert text.endswith("x" * (LOG_BEHIND_BYTES // 2))


def test_a_process_that_died_is_told_by_the_generator(site: Site, tmp_path: Path) -> None:
    spec = {"base_url": "http://127.0.0.1:9", "no_such_key": 1, "records_path": str(tmp_path / "r")}
    generator = LoadGenerator(site.launcher, spec, "loadgen-bad")
    with pytest.raises(ProcessDiedError, match="no_such_key"):
        generator.run(lambda progress: False, site.launcher.check, 20.0)
