"""Every fault of the table is seen, named in time, and the others go on. The heavy half: ``make faults``."""

import ast
import asyncio
import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import EASY, argv, kvbench, the_run, wait_until
from faults import FAULTS, GROUPS, STRIKES, FarSiege, Seen, Siege, Struck
from hostile import DONE, GOOD, HEAD, HOST, LAST, TOKEN, USAGE, Step, chunk, follow, plain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sshhosts import Hosts, no_hosts_reason, standing

from kvbench import connectors
from kvbench.core.plan.processes import ProcessSpec
from kvbench.deployment.liveness import ProcessWatch
from kvbench.errors import ProcessHungError
from kvbench.launchers.local import LocalLauncher
from kvbench.processes.loadgen.sockets.clock import SLACK_NS, arrivals
from kvbench.results.run import RunFolder
from tests.microbench.test_microbench import NIC_FAULTS
from tests.repository.test_security_source import tree_of
from tools.faults import DOC_PATH, JSON_PATH, document

ROOT = Path(__file__).parents[2]
QUICK = ("prefill_killed", "decode_frozen", "child_aborts", "port_taken")
HEAVY = tuple(key for key in STRIKES if key not in QUICK)

pytestmark = pytest.mark.timeout(400)

Outcome = tuple[int, dict[str, Struck]]


@pytest.fixture(scope="module")
def quick_siege(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Siege(tmp_path_factory.mktemp("siege"), [(key, STRIKES[key]) for key in QUICK]).run()


@pytest.fixture(scope="module")
def long_siege(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Siege(tmp_path_factory.mktemp("siege"), [(key, STRIKES[key]) for key in HEAVY]).run()


def _judge(outcome: Outcome, key: str, fault: Seen) -> None:
    status, struck = outcome
    one = struck[key]
    refused = key.endswith("_slow")
    assert one.result.status == ("refused" if refused else "failed")
    assert one.result.hint
    if refused:
        assert [trial.verdict for trial in one.trials] == ["invalid"]
    elif re.search(r"was killed|is frozen", FAULTS[key].expected) and "loadgen" not in key:
        # No log says why, so all of them are quoted.
        others = {"router", "prefill-0", "decode-0"} - {f"{key.split('_')[0]}-0", key.split("_")[0]}
        assert all(f"\n  {name}: " in one.result.reason for name in others), one.result.reason
    # What was printed at the time is also what is kept.
    words = f"{one.result.reason} ({one.result.hint})"
    assert re.search(FAULTS[key].expected, " ".join(one.text().split())), one.text()
    first = next(seconds for seconds, line in one.lines if re.search(rf"{key}( failed|.* invalid)", line))
    # The next pair came up, and the last one, which nothing struck, was measured.
    assert one.next_began
    (well,) = struck["well"].trials
    assert well.summary["completed"] >= 50
    assert status == 1
    fault.check(words, first)


@pytest.mark.parametrize("key", [pytest.param(key, marks=pytest.mark.fault(key)) for key in QUICK])
def test_a_struck_pair_fails_by_name_and_the_others_are_measured(
    key: str, quick_siege: Outcome, fault: Seen
) -> None:
    _judge(quick_siege, key, fault)


@pytest.mark.heavy
@pytest.mark.parametrize("key", [pytest.param(key, marks=pytest.mark.fault(key)) for key in HEAVY])
def test_the_longer_siege(key: str, long_siege: Outcome, fault: Seen) -> None:
    _judge(long_siege, key, fault)


# A server that hangs
HANGS = """
import http.server, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(3600 if hangs.is_set() else 0)
        self.send_response(404)
        self.end_headers()
hangs = threading.Event()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
threading.Thread(target=lambda: (sys.stdin.readline(), hangs.set())).start()
server.serve_forever()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher("test-faults", tmp_path / "logs", tmp_path / "specs")


@pytest.mark.fault("server_hangs")
def test_a_server_that_runs_and_answers_nothing_is_seen(launcher: LocalLauncher, fault: Seen) -> None:
    process = launcher.start(ProcessSpec("server-0", (sys.executable, "-c", HANGS)), piped=True)
    try:
        port = int(os.read(process.stdout.fileno(), 100))
        process.spec = ProcessSpec("server-0", process.spec.argv, ready_url=f"http://127.0.0.1:{port}/health")
        watch = ProcessWatch("emulated", connectors.get("aggregated"), "")
        watch.follow(process.spec, process.log_path)
        watch.started([process])
        try:
            with pytest.raises(ProcessHungError) as caught:
                _check_until(watch, process, after=lambda: _say(process), fault=fault)
        finally:
            watch.close()
    finally:
        launcher.stop([process], 0.1)
    fault.check(caught.value.message)
    assert "py-spy" in caught.value.hint


def _say(process: object) -> None:
    process.stdin.write(b"hang\n")  # type: ignore[attr-defined]
    process.stdin.flush()  # type: ignore[attr-defined]


def _check_until(watch: ProcessWatch, process: object, after: Callable[[], None], fault: Seen) -> None:
    """Look for a second, in which nothing may be found; then let the fault happen and look on."""
    began, struck = time.monotonic(), False
    while time.monotonic() - began < 30:
        watch.check([process])  # type: ignore[list-item]
        if not struck and time.monotonic() - began > 1:
            struck = True
            after()
            fault.struck()
        time.sleep(0.05)


# What is needed of the machine
FLOOD = """
import os
os.write(2, b"the first line\\n")
block = (b"x" * 99 + b"\\n") * 10_000
for _ in range(160):
    os.write(2, block)
os.write(2, b"the last line\\n")
"""


@pytest.mark.fault("log_flood")
def test_a_flood_of_a_log_does_not_fill_the_disk(launcher: LocalLauncher, fault: Seen) -> None:
    process = launcher.start(ProcessSpec("flood", (sys.executable, "-c", FLOOD)))
    fault.struck()
    wait_until(lambda: process.poll() is not None, 60)
    size = process.log_path.stat().st_size
    assert size < 65 * 2**20, "head, tail and one line"
    data = process.log_path.read_bytes()
    assert data.startswith(b"the first line\n")
    assert data.endswith(b"the last line\n")
    (marker,) = re.findall(rb"\[kvbench: .* kept\]", data)
    missing = int(re.search(rb"\d+", marker)[0])  # type: ignore[index]
    assert missing + size - len(marker) - 2 == 160 * 1_000_000 + 29
    assert b"\0" not in data
    assert process.tail(1) == ["the last line"]
    fault.check(marker.decode())


# Where the wall clock may be read in what measures: for dates that are told, and to put stamps of the kernel,
# which are of that clock, on the monotonic one (processes/loadgen/sockets/clock.py and
# processes/exact_server/server.py see when it is set).
_DATES = {
    "processes/emulator/answers.py": 1, "processes/emulator/lies/answers.py": 1,
    "processes/emulator/metrics.py": 1, "processes/emulator/handoffs/pull.py": 1,
    "processes/emulator/server.py": 1, "processes/exact_server/server.py": 1,
    "processes/loadgen/sockets/clock.py": 1, "processes/loadgen/run.py": 1, "microbench/cases.py": 1,
    "sweep/trial/trial.py": 1,
}  # fmt: skip
_MEASURING = (
    *(
        f"processes/{name}"
        for name in ("loadgen", "http1", "router", "emulator", "exact_server", "transfer_worker")
    ),
    *("transfer", "microbench", "core"),
)
_MODULES = (
    *("sweep/cell", "sweep/sweep", "sweep/trial/loadgen_driver", "sweep/trial/trial"),
    "sweep/trial/readings",
    *("sweep/selftest_server", "hosts/telemetry"),
    *("launchers/parts/liveness", "deployment/liveness", "deployment/deployment"),
)


def _wall_clock_reads(path: Path) -> list[int]:
    """Lines that read the wall clock: time.time, time_ns, datetime.now, utcnow, today."""
    names = {"time": {"time", "time_ns"}, "datetime": {"now", "utcnow", "today"}, "date": {"today"}}
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", "") or getattr(node.value, "attr", "")
            if node.attr in names.get(owner, ()):
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for name in node.names if name.name in names["time"]]
    return found


def test_the_reader_of_clocks_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import time\nfrom time import time_ns\na = time.time()\nb = time.monotonic()\n"
        "c = datetime.datetime.now()\nd = datetime.now()\n"
    )
    assert sorted(_wall_clock_reads(path)) == [2, 3, 5, 6]


def test_what_measures_reads_the_wall_clock_for_dates_only() -> None:
    package = ROOT / "kvbench"
    paths = [path for folder in _MEASURING for path in (package / folder).rglob("*.py")]
    paths += [package / f"{name}.py" for name in _MODULES]
    found = {str(path.relative_to(package)): len(_wall_clock_reads(path)) for path in paths}
    assert {name: count for name, count in found.items() if count} == _DATES


@pytest.mark.fault("clock_stepped")
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step_s=st.integers(-(10**6), 10**6), read_ns=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_a_clock_that_is_set_moves_no_figure(step_s: int, read_ns: list[int], fault: Seen) -> None:
    # The kernel's stamps are of a clock that was set after its distance from the monotonic one was measured.
    fault.struck()
    sent_ns, offset_ns = 10**12, 1_700_000_000 * 10**9
    read_ns = sorted(sent_ns + delay_ns for delay_ns in read_ns)
    rows = [divmod(at_ns + offset_ns + step_s * 10**9, 10**9) for at_ns in read_ns]
    times = b"".join(
        struct.pack("=qqqq", *stamp, at_ns, sent_ns) for stamp, at_ns in zip(rows, read_ns, strict=True)
    )
    arrived, *_ = arrivals(times, sent_ns, offset_ns)
    came_ns = memoryview(arrived).cast("q")
    assert all(sent_ns - SLACK_NS <= came <= at_ns for came, at_ns in zip(came_ns, read_ns, strict=True))
    fault.check("nothing, as only the monotonic clock is measured with")


# What a server may answer
BEHAVIOURS: dict[str, list[Step]] = {
    "server_silent": ["hang"],
    "endless_headers": [b"HTTP/1.1 200 OK\r\n", *([b"x-more: " + b"y" * 1000 + b"\r\n"] * 3000)],
    "giant_event": [HEAD, *([chunk(b"data: " + b"x" * 60_000)] * 400), "close"],
    "bad_utf8": [HEAD, chunk(b'data: {"choices":[{"index":0,"text":"\xff\xfe"}]}\n\n'), chunk(DONE), LAST],
    "wrong_length": [HEAD, chunk(TOKEN), chunk(USAGE.replace(b"3", b"1")), chunk(DONE), LAST],
    "well": GOOD,
}
LENGTHS = {16 * (place + 1): key for place, key in enumerate(BEHAVIOURS)}
LATE = 512
WHOLE = plain("200 OK", b'{"choices":[{"index":0,"text":"a b c"}],"usage":{"completion_tokens":3}}')


class Hostile:
    """A server whose answer to a stream depends on the prompt's length, in a thread of its own."""

    def __enter__(self) -> str:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        assert started.wait(10)
        return f"http://{HOST}:{self._port}"

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._end = asyncio.Event()
            server = await asyncio.start_server(self._serve_one, HOST, 0)
            self._port = server.sockets[0].getsockname()[1]
            started.set()
            await self._end.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self._loop.run_until_complete(serve())
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                sized = re.search(rb"content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(sized[1]))) if sized else {}
                length = len(body.get("prompt", ()))
                steps = BEHAVIOURS[LENGTHS[length]] if length in LENGTHS else [2.0, *GOOD]
                if not body.get("stream"):
                    steps = [WHOLE]
                if not await follow(steps, reader, writer):
                    break
        writer.close()


EXTERNAL = """
version: 1
model: tiny
deployment: {{engine: external, engine_options: {{base_url: '{url}'}}}}
connectors: [aggregated]
"""
HOSTILE_SETS = (
    *(f"workload.input_len={list(LENGTHS)}",), "workload.output_len=3", "workload.request_timeout_s=3",
    "slo.ttft_ms=2000", "slo.attainment=0.5", "search.trial_s=1", "search.min_requests=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunFolder]:
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / "hostile.yaml"
    with Hostile() as url:
        path.write_text(EXTERNAL.format(url=url))
        words = ("bench", str(path), "--rate", "10", "--output", str(folder / "r"))
        return kvbench(*words, sets=HOSTILE_SETS, env={"COLUMNS": "4000"}).text, the_run(folder / "r")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.fault(key)) for key in BEHAVIOURS if key != "well"]
)
def test_what_a_server_answers_is_told_in_the_trial_s_line(
    key: str, hostile_run: tuple[str, RunFolder], fault: Seen
) -> None:
    text, run = hostile_run
    length = next(length for length, name in LENGTHS.items() if name == key)
    line = next(line for line in text.splitlines() if re.search(rf"aggregated +{length} in", line))
    (trial,) = [candidate for candidate in run.trials if candidate.cell.input_len == length]
    assert trial.verdict in ("invalid", "missed")
    (well,) = [candidate for candidate in run.trials if candidate.cell.input_len == max(LENGTHS)]
    assert well.summary["completed"] == 10
    assert re.search(FAULTS[key].expected, " ".join(text.split()))
    assert trial.verdict in line
    fault.check(f"{trial.verdict}: {trial.reason}", trial.duration_s)


# File systems that are full, in a mount namespace of their own
SMALL = 'mount -t tmpfs -o size={size} none "$0" && exec "$@"'


def _in_small(folder: str, size: str, *words: str, sets: tuple[str, ...] = ()) -> str:
    """Runs a command of kvbench with a small file system at a folder; what it printed."""
    return _inside_small(folder, size, [], words, sets)


def _inside_small(
    folder: str, size: str, before: list[str], words: tuple[str, ...], sets: tuple[str, ...]
) -> str:
    """The same with a program ``before`` it that runs it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare here")
    command = [unshare, "--map-root-user", "--mount", "sh", "-c", SMALL.format(size=size), folder]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no mount namespace here: {tried.stderr.strip()}")
    done = subprocess.run(
        [*command, *before, *argv(*words, sets=sets)], capture_output=True, text=True, timeout=90, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.heavy
@pytest.mark.fault("disk_full")
def test_a_full_disk_is_told(tmp_path: Path, fault: Seen) -> None:
    words = ("bench", "quickstart", "--rate", "20", "--connector", "tcp", "--output", str(tmp_path))
    fault.struck()
    fault.check(_in_small(str(tmp_path), "56k", *words, sets=EASY))


@pytest.mark.heavy
@pytest.mark.fault("shm_full")
def test_full_shared_memory_is_told_by_doctor(tmp_path: Path, fault: Seen) -> None:
    fault.struck()
    text = _in_small("/dev/shm", "64k", "doctor")
    (line,) = [row for row in text.splitlines() if "free in /dev/shm" in row]
    assert "warn" in line or "⚠" in line or "!" in line
    fault.check(line)


FILLED = """
import os, subprocess, sys, threading, time
from pathlib import Path

results, command = Path(sys.argv[1]), sys.argv[2:]
begun = threading.Event()

def fill():
    while not list(results.glob("*/logs/tcp/loadgen-*-01.log")):
        time.sleep(0.02)
    with open("/dev/shm/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError as error:
            print("struck:", error.strerror, flush=True)

threading.Thread(target=fill, daemon=True).start()
sys.exit(subprocess.run(command).returncode)
"""


@pytest.mark.heavy
@pytest.mark.fault("shm_fills_up")
def test_shared_memory_that_fills_up_in_a_trial_harms_nothing(tmp_path: Path, fault: Seen) -> None:
    results = tmp_path / "r"
    words = ("bench", "quickstart", "--rate", "20", "--connector", "tcp", "--output", str(results))
    sets = (*EASY, "search.trial_s=3", "search.min_requests=60")
    fault.struck()
    output = _inside_small("/dev/shm", "1m", [sys.executable, "-c", FILLED, str(results)], words, sets)
    assert "struck: No space left on device" in output
    (trial,) = the_run(results).trials
    assert trial.verdict == "met", output
    fault.check(f"{trial.summary['completed']} of {trial.summary['sent']} requests completed", 0.0)


# NICs between P and D
PAIR_NIC_FAULTS = {"pair_nic_pulled": "pull", "pair_nic_partitioned": "partition", "pair_nic_slowed": "slow"}


@pytest.fixture(scope="module")
def pair_siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """P, D and the rest on three hosts with a data net of their own; its faults strike D's NIC there."""
    if reason := no_hosts_reason():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("far")
    with standing(folder) as hosts:

        def strike(kind: str) -> Callable[[Siege], None]:
            return lambda siege: spoil(hosts, kind)

        strikes = [(key, strike(kind)) for key, kind in PAIR_NIC_FAULTS.items()]
        yield FarSiege(folder, strikes, hosts, lambda: spoil(hosts, "")).run()


PARTITION = "add table inet cut; add chain inet cut in { type filter hook input priority 0 ; }; "
PARTITION += "add rule inet cut in iifname data0 drop"


def spoil(hosts: Hosts, kind: str) -> None:
    """Plants a fault on a NIC of the data net, P's host's where it is slow, else D's; none: heals."""
    hosts.inside("b", "ip", "link", "set", "data0", "down" if kind == "pull" else "up")
    hosts.inside(
        "b", "nft", PARTITION if kind == "partition" else "add table inet cut; delete table inet cut"
    )
    shape = (
        ("tbf", "rate", "1mbit", "burst", "8kb", "latency", "1s")
        if kind == "slow"
        else ("pfifo", "limit", "999")
    )
    hosts.inside("a", "tc", "qdisc", "replace", "dev", "data0", "root", *shape)


@pytest.mark.heavy
@pytest.mark.parametrize("key", [pytest.param(key, marks=pytest.mark.fault(key)) for key in PAIR_NIC_FAULTS])
def test_a_nic_between_prefill_and_decode_that_fails_in_a_trial(
    key: str, pair_siege: Outcome, fault: Seen
) -> None:
    _, struck = pair_siege
    one = struck[key]
    assert one.result is not None
    (well,) = struck["well"].trials
    assert well.summary["completed"] >= 50
    first = next(
        seconds for seconds, line in one.lines if re.search(rf"{key}( failed|.* (invalid|missed))", line)
    )
    (trial,) = one.trials
    assert trial.verdict in ("invalid", "missed")
    # A pair that stands still has more than one gate against it; all of them are in the report.
    findings = sorted(trial.findings, key=lambda finding: finding.gate != "kv_failures")
    fault.check("; ".join(dict.fromkeys([*(finding.message for finding in findings), trial.reason])), first)


# A load generator without descriptors
@pytest.mark.heavy
@pytest.mark.fault("out_of_files_client")
def test_a_load_generator_without_descriptors_is_no_miss_of_the_server(tmp_path: Path, fault: Seen) -> None:
    path = tmp_path / "silent.yaml"
    with Hostile() as url:
        path.write_text(EXTERNAL.format(url=url))
        command = argv(
            *("bench", str(path), "--rate", "100", "--output", str(tmp_path / "r")),
            sets=(*HOSTILE_SETS, f"workload.input_len=[{LATE}]", "search.trial_s=2"),
        )
        words = ["sh", "-c", 'ulimit -n 90; exec "$@"', "sh", *command]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=90, check=False,
            env={**os.environ, "COLUMNS": "4000"},
        )  # fmt: skip
    (trial,) = the_run(tmp_path / "r").trials
    assert trial.verdict == "invalid"
    assert re.search(FAULTS["out_of_files_client"].expected, " ".join((done.stdout + done.stderr).split()))
    fault.check(f"{trial.verdict}: {trial.reason}", trial.duration_s)


# The table
def test_the_table_is_made_of_what_the_tests_saw() -> None:
    rows = json.loads(JSON_PATH.read_text())
    assert [row["key"] for row in rows] == list(FAULTS)
    assert DOC_PATH.read_text() == document(rows, GROUPS)
    for row in rows:
        fault = FAULTS[row["key"]]
        assert row["outcome"] in ("seen", "not run"), row
        assert (row["done"], row["then"], row["within_s"]) == (fault.done, fault.then, fault.within_s)
        if row["outcome"] == "seen":
            assert row["seconds"] <= row["within_s"]
            assert row["said"]
            assert row["tests"]


def test_every_fault_is_in_one_class() -> None:
    assert sorted(key for keys in GROUPS.values() for key in keys) == sorted(FAULTS)


def test_every_fault_has_a_test() -> None:
    marked = set(QUICK) | set(HEAVY) | set(BEHAVIOURS) | set(NIC_FAULTS) | set(PAIR_NIC_FAULTS)
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        marked |= set(re.findall(r'mark\.fault\("(\w+)"\)', path.read_text()))
    assert marked - {"well"} == FAULTS.keys()
