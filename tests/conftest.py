"""After each test: no child process, no open descriptor or socket and no shared memory of ours is left.

And after all: what was not tested here, for want of what; which tests passed only when they were run again;
after a failure, the slowest tests and the load of the machine.

Only what appeared during the test counts, and it gets a moment to go away by itself, so that a
session-wide server or another process of this machine is never blamed on a test.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import suites
from faults import fault  # noqa: F401 - a fixture of all
from hypothesis import HealthCheck, settings
from loops import pytest_pyfunc_call  # noqa: F401 - runs tests that are coroutines

from kvbench import files
from kvbench.core.plan.processes import unproxied

# Nothing may depend on how fast the machine is, and generated examples are slow on a busy one. They are the
# same in each run, so that a commit that passed once passes again; `make fuzz` draws new ones.
settings.register_profile(
    "kvbench",
    deadline=None,
    max_examples=30,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvbench")

# Collections of garbage were a tenth of all work.
gc.set_threshold(20_000, 20, 20)

# The tests' own clients ask servers on loopback, which a proxy of the user's could not reach.
os.environ.update(unproxied(os.environ, ("127.0.0.1", "localhost")))

# Processes that tests start read compiled modules instead of compiling all of kvbench each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

suites.watch()

# A place of their own for temporary files: what is left there is theirs. pytest's own stay where they were.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
tempfile.tempdir = tempfile.mkdtemp(prefix="kvt-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
os.environ["TMPDIR"] = tempfile.tempdir
Path(tempfile.tempdir).chmod(0o711)  # tests that are another user have folders of theirs in it
atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# A shell that starts the tests in the background lets them ignore Ctrl-C, and nohup a hang-up; so would all
# processes that they start.
if threading.current_thread() is threading.main_thread():
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)

LOAD_AT_START = os.getloadavg()
SLOWEST = 10
"""Number of slow tests that a failed run names."""

GRACE_S = 10.0
"""Taken by a failure alone: on a busy machine a process that was told to end may wait long for its core."""
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SHARED_MEMORY = Path("/dev/shm")

# Kept by Python's multiprocessing for the life of the process that first needs them.
KEPT_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Descriptors that stay open rightly: terminals, devices, and what a loaded library keeps.
KEPT_DESCRIPTORS = re.compile(r"/dev/(?!shm/)|/proc/|/sys/|.*\.(so|py|pyc|ttf|json)\b")


# Reasons for which a test is rightly not part of this run, or nothing to test at all.
ON_REQUEST = re.compile(r"make (test-\w+|vllm-cpu|fuzz)\b|runs with KVBENCH_\w+=1")
NOT_A_LACK = re.compile(r"\bmoves? (no )?bytes\b|copies memory|has its own tests|^\w+ is installed here")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark real tests, and begin with what takes longest: one worker runs each file alone. First the core."""
    suites.mark(items)
    items.sort(key=lambda item: (item.get_closest_marker("core") is None, "tests/sweep" not in item.nodeid))


def pytest_collection_finish() -> None:
    """Keep what was collected out of garbage collections, of which it would be most of the work."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    suites.unmarked_starts(item)  # what collection started is no test's


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if started := suites.unmarked_starts(item):
        pytest.fail(
            f"{item.nodeid} starts processes and lacks the marker `real`: give it @pytest.mark.real, or list "
            f"the function that starts them in tests/support/suites.py. Started: {'; '.join(started)}",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Add what was skipped for want of what, above the line with which pytest ends."""
    yield
    _report_reruns(terminalreporter)
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        _report_slowest(terminalreporter)
    reasons = Counter(_reason(report) for report in terminalreporter.getreports("skipped"))
    count = sum(number for reason, number in reasons.items() if ON_REQUEST.search(reason))
    lacks = {
        reason: number
        for reason, number in reasons.most_common()
        if not ON_REQUEST.search(reason) and not NOT_A_LACK.search(reason)
    }
    if count:
        terminalreporter.line(f"not asked for: {count} tests that have make targets of their own (make help)")
    if lacks:
        terminalreporter.line(f"skipped for want of what this machine lacks: {sum(lacks.values())} tests")
        for reason, number in lacks.items():
            terminalreporter.line(f"  {number} × {reason}")


def _report_reruns(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that failed at first and passed when they were run again."""
    passed = {report.nodeid for report in terminalreporter.stats.get("passed", ())}
    again = Counter(report.nodeid for report in terminalreporter.stats.get("rerun", ()))
    for name, number in again.items():
        if name in passed:
            terminalreporter.line(f"flaky: {name} failed {number} × and then passed")


def _report_slowest(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the slowest tests and the load of the machine, which explain many a failure."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration  # type: ignore[assignment]  # a float counts, too
    terminalreporter.line("slowest tests:")
    for name, took_s in seconds.most_common(SLOWEST):
        terminalreporter.line(f"  {took_s:6.1f} s  {name}")
    loads = " and ".join(f"{load[0]:.1f}" for load in (LOAD_AT_START, os.getloadavg()))
    terminalreporter.line(f"load average at start and end: {loads}, {os.cpu_count()} CPUs")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, in one line."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(text.removeprefix("Skipped: ").split())


@pytest.fixture(scope="session", autouse=True)
def _orphans_come_to_us() -> None:
    """A grandchild whose parent ends becomes a child of this process, and so is seen below."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    processes, descriptors, memory = _processes(), _descriptors(), _shared_memory()
    yield
    deadline = time.monotonic() + GRACE_S
    while left := _left(processes, descriptors, memory):
        if time.monotonic() > deadline:
            _end(_processes() - processes)
            for folder, _ in files.left():
                shutil.rmtree(folder, ignore_errors=True)
            pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)
        time.sleep(0.02)


def _left(processes: set[int], descriptors: dict[int, str], memory: set[str]) -> list[str]:
    """What is there now and was not before, in words."""
    new_processes = _processes() - processes
    left = [words for pid in sorted(new_processes) if (words := _describe(pid))]
    if _new_descriptors(descriptors):
        gc.collect()  # an object in a cycle may still hold one
        left += [f"descriptor {number} ({what})" for number, what in _new_descriptors(descriptors)]
    left += [f"{folder} of a dead process" for folder, _ in files.left()]
    left += [f"/dev/shm/{name}" for name in sorted(_shared_memory() - memory) if _is_nobodys(name)]
    return left


def _end(pids: set[int]) -> None:
    """Ends leaked processes, so that one test's leak is not the next one's trouble."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if not _is_kept(process):
                process.kill()


def _is_kept(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return any(name in command for name in KEPT_PROCESSES)


def _processes() -> set[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has no child, and so no grandchild: psutil would read all of /proc
        return set()
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _describe(pid: int) -> str:
    """A process in words; empty if it is none to complain of."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            _reap(process)
            return ""
        return "" if _is_kept(process) else f"process {pid} ({' '.join(process.cmdline())[:200]})"
    except psutil.NoSuchProcess:
        return ""


def _reap(process: psutil.Process) -> None:
    """Takes the exit status of a grandchild that came to us and has ended; nobody else would."""
    if process.ppid() == os.getpid():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this listing is gone already
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _new_descriptors(before: dict[int, str]) -> list[tuple[int, str]]:
    """Numbers that are new, or name something else now; sockets of ours that listen are among them."""
    now = _descriptors()
    tracker = _tracker_pipe()
    held = Counter(now.values())
    return [
        (number, what)
        for number, what in sorted(now.items())
        if before.get(number) != what
        and number != tracker
        and not KEPT_DESCRIPTORS.match(what)
        # A pipe with both ends here is what a library wakes its own threads with, for good (libuv, Arrow).
        and not (what.startswith("pipe:") and held[what] > 1)
    ]


def _tracker_pipe() -> int | None:
    from multiprocessing import resource_tracker

    number = getattr(getattr(resource_tracker, "_resource_tracker", None), "_fd", None)
    return number if isinstance(number, int) else None


def _shared_memory() -> set[str]:
    try:
        return set(os.listdir(SHARED_MEMORY))
    except OSError:
        return set()


def _is_nobodys(name: str) -> bool:
    """Whether no other process holds it, or a file in it: then it was left over, and most likely by us.

    Semaphores of multiprocessing live there for a moment in any Python program, and never in one of ours.
    """
    if name.startswith("sem.mp-"):
        return False
    target = str(SHARED_MEMORY / name)
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                if any(
                    held == target or held.startswith(f"{target}/")
                    for held in map(os.readlink, (process / "fd").iterdir())
                ):
                    return False
            with contextlib.suppress(OSError):
                if target in (process / "maps").read_text():
                    return False
    return (SHARED_MEMORY / name).exists()
