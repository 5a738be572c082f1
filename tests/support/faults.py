"""The table of faults: what is done, what the user is told and by when; and the siege, which does them.

A test marked ``@pytest.mark.fault("key")`` proves a row of the table. On the fixture ``fault`` it says what
it saw, which becomes a property of the test; ``python -m tools.faults`` makes docs/faults.md of these.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from commands import argv
from processes import words_of
from sshhosts import Hosts

from kvbench.core.plan.processes import RUN_TAG_ENV
from kvbench.core.records import TrialRecord
from kvbench.results.run import CellResult, RunFolder, load_run

PROPERTY = "fault"
"""Name of the property with what a test saw."""


@dataclass(frozen=True)
class Fault:
    """One row: ``expected`` is what the user is told, as a regular expression, at most ``within_s`` later."""

    key: str
    done: str
    expected: str
    then: str
    """What becomes of the measurement."""
    within_s: float = 15.0


_CELL = "the cell fails; the next deployment is started and measured"
_ROW = "the case becomes an error row; new workers measure the next case"
_REFUSED = "the trial is refused and counts neither as met nor as missed; the next one is measured"
_KV_LOST = (
    "the trial is refused if KV was lost, otherwise its failed requests count as misses; "
    "the next pair is measured"
)
_NOT_ARRIVED = r"\d+ KV transfers failed|\d+ × \w+"
_CALL = "the transfer has failed; its process stays usable"

FAULTS = {
    fault.key: fault
    for fault in (
        # A deployment's processes, in a trial.
        Fault("prefill_killed", "prefill is killed", r"prefill-0 was killed by signal 9", _CELL),
        Fault("decode_killed", "decode is killed", r"decode-0 was killed by signal 9", _CELL),
        Fault("prefill_frozen", "prefill is frozen (SIGSTOP)", r"prefill-0 \d+ is frozen", _CELL),
        Fault("decode_frozen", "decode is frozen (SIGSTOP)", r"decode-0 \d+ is frozen", _CELL),
        Fault("prefill_slow", "prefill pauses again and again", r"prefill engine was behind", _REFUSED),
        Fault("decode_slow", "decode pauses again and again", r"decode engine was behind", _REFUSED),
        Fault("server_hangs", "a server runs but no longer responds", r"server-0 hangs: no response", _CELL),
        Fault("router_killed", "the router is killed", r"router was killed by signal 9", _CELL),
        Fault("router_frozen", "the router is frozen (SIGSTOP)", r"router \d+ is frozen", _CELL),
        Fault(
            "loadgen_killed", "the load generator is killed",
            r"the load generator \S+ ended early \(status -9\)", _CELL,
        ),
        Fault(
            "loadgen_frozen", "the load generator is frozen (SIGSTOP)",
            r"the load generator \S+ hangs: no report for \d+ s", _CELL,
        ),
        Fault(
            "child_aborts", "the process of an engine's transfer library aborts",
            r"the process of its transfer library has died", _CELL,
        ),
        Fault(
            "child_hangs", "the process of an engine's transfer library is frozen",
            r"decode-0's child process \d+ is frozen", _CELL,
        ),
        Fault(
            "library_hangs_in_pair",
            "an engine's transfer library never returns, although its process runs",
            r"decode-0.*the process of its transfer library hangs", _CELL,
        ),
        # What a deployment needs of its machine.
        Fault(
            "port_taken", "a port is taken between planning and binding",
            r"decode-0.*: a port that it needs is taken", _CELL,
        ),
        Fault(
            "out_of_files", "an engine reaches its limit of open files",
            r"decode-0.*: it may open no more files and sockets", _CELL,
        ),
        Fault(
            "out_of_memory", "there is no memory for the KV pool",
            r"decode-0.*: it gets no more memory of this machine", _CELL,
        ),
        Fault(
            "out_of_files_client", "the load generator reaches its limit of open connections",
            r"the load generator could not open \d+ of its connections; the first: .*Too many open files",
            _REFUSED,
        ),
        Fault(
            "disk_full", "the disk with the run folder is full", r"[Nn]o space left|is full",
            "the run ends; what was measured stays, and `--resume` continues",
        ),
        Fault(
            "shm_full", "/dev/shm is full", r"MiB free in /dev/shm",
            "`kvbench doctor` warns before a run; kvbench's own KV pools do not use /dev/shm",
        ),
        Fault(
            "shm_fills_up", "/dev/shm fills up while a pair is measured", r"60 of 60 requests",
            "the measurement continues, since kvbench stores nothing there",
        ),
        Fault(
            "log_flood", "a process writes an endless log", r"\d+ bytes of this log were not kept",
            "the measurement continues; the first 16 MiB and the last 48 MiB of the log are kept",
        ),
        Fault(
            "clock_stepped", "the system clock is changed during a measurement",
            r"only the monotonic clock",
            "measurements do not change, since the wall clock is used only for dates",
        ),
        # What a server may answer.
        Fault(
            "server_silent", "a server accepts requests and does not answer", r"\d+ × (no_answer|timeout)",
            _REFUSED,
        ),
        Fault("endless_headers", "a server sends endless headers", r"\d+ × bad_stream", _REFUSED),
        Fault("giant_event", "a server sends one gigantic event", r"\d+ × bad_stream", _REFUSED),
        Fault("bad_utf8", "a server sends invalid UTF-8", r"\d+ × bad_stream", _REFUSED),
        Fault("wrong_length", "a server sends too few tokens", r"answers had a wrong length", _REFUSED),
        # Transfers by themselves.
        Fault("side_killed", "one side of a transfer is killed", r"was killed by signal 9", _ROW),
        Fault("side_frozen", "one side of a transfer is frozen", r"the \w+ gave no answer", _ROW),
        Fault("library_aborts", "the transfer library crashes", r"killed by signal 11", _ROW),
        Fault("library_hangs", "the transfer library never returns", r"gave no answer to run", _ROW),
        Fault("library_rubbish", "a worker sends invalid responses", r"sent something unreadable", _ROW),
        Fault("peer_killed", "the peer's process is killed", r"\w", _CALL),
        Fault("peer_frozen", "the peer's process is frozen", r"did not end within [\d.]+ s", _CALL),
        Fault("master_absent", "there is no Mooncake master", r"no mooncake_master answers at", _CALL),
        Fault(
            "master_killed", "the Mooncake master is killed", r"RPC_FAIL|did not end within|connect again",
            _CALL,
        ),
        Fault(
            "metadata_absent", "there is no Mooncake metadata server (http)",
            r"no metadata server answers at", _CALL,
        ),
        Fault(
            "metadata_killed", "the Mooncake metadata server (http) is killed",
            r"no metadata server answers at", "connected engines continue; later ones get the error",
        ),
        # NICs, in the lab.
        Fault("nic_pulled", "a NIC's cable is pulled", r"did not end within|gave no answer", _ROW),
        Fault("nic_partitioned", "a NIC's packets vanish", r"did not end within|gave no answer", _ROW),
        Fault("nic_reset", "a NIC's connections are reset", r"reset|closed|lost|refused", _ROW),
        Fault("nic_slowed", "a NIC is slowed down", r"GB/s", "the row shows the lower rate"),
        # NICs of a pair whose P and D are on hosts of their own.
        Fault("pair_nic_pulled", "the NIC of D's host is pulled in a trial", _NOT_ARRIVED, _KV_LOST),
        Fault("pair_nic_partitioned", "packets to D's host vanish in a trial", _NOT_ARRIVED, _KV_LOST),
        Fault("pair_nic_slowed", "the NIC of P's host is too slow for the load", _NOT_ARRIVED, _KV_LOST),
    )
}  # fmt: skip

# Class of faults, in a word or two → its rows. docs/faults.md has a row for each, with their longest time.
GROUPS: dict[str, tuple[str, ...]] = {
    "a process is killed": ("decode_killed", "prefill_killed", "router_killed", "loadgen_killed"),
    "a process is frozen (SIGSTOP)": (
        "decode_frozen", "prefill_frozen", "router_frozen", "loadgen_frozen", "child_hangs",
    ),
    "a process pauses again and again": ("prefill_slow", "decode_slow"),
    "a server no longer responds": ("server_hangs", "server_silent"),
    "a server sends invalid responses": ("bad_utf8", "endless_headers", "giant_event", "wrong_length"),
    "a transfer library crashes": ("child_aborts", "library_aborts", "library_rubbish", "side_killed"),
    "a transfer library hangs": ("library_hangs_in_pair", "library_hangs", "side_frozen"),
    "the peer of a transfer is gone": ("peer_frozen", "peer_killed"),
    "Mooncake's master or metadata server is gone": (
        "master_absent", "master_killed", "metadata_absent", "metadata_killed",
    ),
    "a NIC is pulled, partitioned, reset, slowed": (
        "nic_pulled", "nic_partitioned", "nic_reset", "nic_slowed", "pair_nic_pulled",
        "pair_nic_partitioned", "pair_nic_slowed",
    ),
    "a port is taken": ("port_taken",),
    "no file descriptors or memory left": ("out_of_files", "out_of_files_client", "out_of_memory"),
    "a disk or /dev/shm is full": ("disk_full", "shm_full", "shm_fills_up"),
    "an endless log, a change of the clock": ("log_flood", "clock_stepped"),
}  # fmt: skip


class Seen:
    """What a test of a fault saw."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.record: dict[str, Any] = {}
        self._struck_at = time.monotonic()

    def struck(self) -> None:
        """The fault happens now."""
        self._struck_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the fault."""
        return time.monotonic() - self._struck_at

    def check(self, words: str, after_s: float | None = None) -> None:
        """The user has been told, now or ``after_s`` seconds after the fault."""
        seconds = self.elapsed_s if after_s is None else after_s
        flat = " ".join(words.split())
        match = re.search(self.fault.expected, flat)
        assert match, f"{self.fault.expected!r} is not in: {flat}"
        assert seconds <= self.fault.within_s, f"told after {seconds:.1f} s"
        self.record = {"key": self.fault.key, "seconds": round(seconds, 2), "said": _excerpt(flat, match)}


_BEGINS = ("; ", ": ", "kvbench: ", "invalid ")
_ENDS = (
    " its last lines", " last lines of the logs", " (the whole log", " (see ", " (look ", " (free ",
    "; the first",
)  # fmt: skip


def _excerpt(words: str, match: re.Match[str], most: int = 170) -> str:
    """The sentence or so in which it is said, without what differs from machine to machine."""
    before = words[: match.start()]
    begins = [before.rfind(start) + len(start) for start in _BEGINS if start in before]
    begin = max(begins, default=0)
    if match.start() - begin > most // 2:
        begin = match.start()
    ends = [place for end in _ENDS if (place := words.find(end, match.end())) >= 0]
    text = words[begin : min([*ends, begin + most])]
    more = "…" if min([*ends, len(words)]) > begin + most else ""
    return re.sub(r"/\S+/", "…/", re.sub(r"\d+-\d+-\d+ [\d:,]+ ", "", text)) + more


@pytest.fixture
def fault(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Seen]:
    """For tests with the marker ``fault``."""
    seen = Seen(FAULTS[request.node.get_closest_marker("fault").args[0]])
    yield seen
    assert seen.record, "the test saw nothing"
    record_property(PROPERTY, seen.record)


# The siege
HANG = "hang"
"""Once this file lies beside the logs, the outside package's library of that pair never returns."""
SHIM = str(Path(__file__).with_name("fault_shim.py"))
EASY = (
    "workload.input_len=[64]",
    "workload.output_len=4",
    "workload.request_timeout_s=90",  # whatever is seen sooner was not seen by a request's timeout
    "slo.ttft_ms=20000",
    "slo.tpot_ms=5000",
    "slo.attainment=0.5",
    "search.trial_s=3",
    "search.min_requests=60",
    "deployment.base_port=0",
)
RATE = 20
BEGIN_DEADLINE_S = 40.0
SEEN_DEADLINE_S = 40.0


@dataclass
class Struck:
    """What one fault came to: the lines that the user was shown since, each with its time after the fault."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    result: CellResult | None = None
    trials: list[TrialRecord] = field(default_factory=list)
    next_began: bool = False

    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)


class Siege:
    """``kvbench bench`` over a P/D pair for each fault, which strikes in its trial, and one left in peace.

    That the pair after a struck one is started and measured shows each time that the others go on.
    """

    def __init__(self, folder: Path, strikes: Sequence[tuple[str, Callable[[Siege], None] | None]]) -> None:
        self._strikes = list(strikes)
        self.results = folder / "results"
        path = folder / "siege.yaml"
        self.labels = [key for key, _ in strikes]
        path.write_text(self.scenario(self.labels))
        words = ("bench", str(path), "--rate", str(RATE), "--output", str(self.results))
        self._process = subprocess.Popen(
            argv(*words, sets=self.sets()), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env={**os.environ, "COLUMNS": "4000"},
        )  # fmt: skip
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def scenario(self, labels: Sequence[str]) -> str:
        return _scenario(labels)

    def sets(self) -> Sequence[str]:
        return EASY

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.append((time.monotonic(), line))

    def run(self) -> tuple[int, dict[str, Struck]]:
        """Strike by strike, to the end; the exit status, and what came of each (and of ``well``)."""
        try:
            struck = {key: self._strike(key, strike) for key, strike in self._strikes}
            status = self._process.wait(timeout=90)
            self._reader.join(timeout=10)
        finally:
            self.close()
        run = self.the_run()
        struck["well"] = Struck()
        for key, outcome in struck.items():
            outcome.result = next((cell for cell in run.cells if cell.cell.connector == key), None)
            outcome.trials = [trial for trial in run.trials if trial.cell.connector == key]
        return status, struck

    def close(self) -> None:
        """Ends it, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        self._reader.join(timeout=10)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _strike(self, key: str, strike: Callable[[Siege], None] | None) -> Struck:
        self._wait(lambda: self._has_printed(f"{key}: starting"), BEGIN_DEADLINE_S, f"{key} is not started")
        if strike is not None:
            self._wait(lambda: self._has_printed(f"{key}: ready"), BEGIN_DEADLINE_S, f"{key} is not ready")
            self._wait(self._under_load, BEGIN_DEADLINE_S, f"no trial of {key} began")
        at, before = time.monotonic(), len(self._lines)
        if strike is None:  # the shim before its engine does it
            at, before = next(
                (when, place + 1)
                for place, (when, line) in enumerate(self._lines)
                if f"{key}: starting" in line
            )
        else:
            strike(self)
        over = re.compile(rf"^\d+:\d+  (?!{key})\S+: starting|^report ", re.MULTILINE)
        self._wait(
            lambda: bool(over.search("".join(line for _, line in self._lines[before:]))),
            SEEN_DEADLINE_S,
            f"{key} was not seen",
        )
        struck = Struck(next_began=True)
        for when, line in list(self._lines[before:]):
            if over.search(line):
                break
            struck.lines.append((when - at, line))
        return struck

    def _has_printed(self, words: str) -> bool:
        return any(words in line for _, line in list(self._lines))

    def _wait(self, condition: Callable[[], bool], deadline_s: float, problem: str) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                text = "".join(line for _, line in list(self._lines))
                pytest.fail(f"{problem}{' and it ended' * ended}:\n{text}", pytrace=False)
            time.sleep(0.05)

    # what may be struck

    def the_run(self) -> RunFolder:
        (folder,) = [path for path in self.results.iterdir() if not path.name.startswith(".")]
        return load_run(folder)

    def processes(self) -> list[psutil.Process]:
        """Those of the run that live."""
        (folder,) = [path for path in self.results.iterdir() if not path.name.startswith(".")]
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(RUN_TAG_ENV, "").startswith(folder.name):
                    found.append(process)
        return found

    def logs(self, key: str) -> Path:
        """Where the processes of that pair write."""
        return self.the_run().path / "logs" / key

    def named(self, name: str) -> psutil.Process:
        """The process of that name, such as decode-0 or router: its last argument is its spec."""
        found = [
            process
            for process in self.processes()
            if "".join(words_of(process)[-1:]).endswith(f"/{name}.json")
        ]
        assert found, f"there is no {name}"
        return found[0]

    def generator(self) -> psutil.Process:
        """The load generator that has the trial: the one with connections; another one waits for the next."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # the one of the trial before is just ending
                if "kvbench.processes.loadgen" in process.cmdline() and process.net_connections(kind="tcp"):
                    found.append(process)
        assert found, "no load generator is at work"
        return found[0]

    def child(self, name: str) -> psutil.Process:
        """The process in which an engine's transfer library is."""
        return self.named(name).children()[0]

    def _under_load(self) -> bool:
        """Whether the trial's requests are being answered."""
        try:
            self.generator()
            before = self._answered()
            return bool(before) and self._answered_more(before)
        except (AssertionError, psutil.Error, httpx.HTTPError, OSError):
            return False

    def _answered_more(self, before: float, within_s: float = 0.5) -> bool:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self._answered() > before:
                return True
            time.sleep(0.02)
        return False

    def _answered(self) -> float:
        spec = json.loads(Path(self.named("decode-0").cmdline()[-1]).read_text())
        text = httpx.get(f"http://127.0.0.1:{spec['port']}/metrics", timeout=5).text
        return sum(
            float(n) for n in re.findall(r"^vllm:request_success_total\{.*\} (\S+)", text, re.MULTILINE)
        )


class FarSiege(Siege):
    """The siege of pairs whose P, D and router are on hosts of their own, reached by ssh."""

    def __init__(
        self,
        folder: Path,
        strikes: Sequence[tuple[str, Callable[[Siege], None] | None]],
        hosts: Hosts,
        heal: Callable[[], None],
    ) -> None:
        self._hosts = hosts
        self._heal = heal
        super().__init__(folder, strikes)

    def _strike(self, key: str, strike: Callable[[Siege], None] | None) -> Struck:
        try:
            return super()._strike(key, strike)
        finally:
            self._heal()

    def scenario(self, labels: Sequence[str]) -> str:
        sections = {name: self._hosts.section(name) for name in self._hosts.names}
        roles = {"prefill": "a", "decode": "b", "router": "c"}
        deployment = {
            "engine": "emulated", "base_port": 0, "launcher": "ssh", "hosts": sections, "roles": roles,
        }  # fmt: skip
        pairs = [{"name": "tcp", "label": label} for label in [*labels, "well"]]
        return json.dumps({"version": 1, "model": "tiny", "deployment": deployment, "connectors": pairs})

    def sets(self) -> Sequence[str]:
        soon = ("workload.request_timeout_s=3", "slo.ttft_ms=2000", "slo.tpot_ms=300")
        return (*EASY, *soon, "deployment.engine_options.transfer_timeout_s=2")

    def _under_load(self) -> bool:
        """Whether the trial's generator runs and KV is on its way."""
        key = next(key for key in reversed(self.labels) if self._has_printed(f"{key}: ready"))
        if not any(self.logs(key).glob("loadgen-*-01.log")):
            return False
        before = self._hosts.received("b")
        time.sleep(0.2)
        return self._hosts.received("b") - before > 2 * 64 * 2048


def _scenario(labels: Sequence[str]) -> str:
    pairs = "".join(f"  - {{name: tcp, label: {label}}}\n" for label in [*labels, "well"])
    prefix = json.dumps([sys.executable, SHIM, "{logs}", "{name}"])
    deployment = f"{{engine: emulated, base_port: 0, prefix: {{decode: {prefix}}}}}"
    return f"version: 1\nmodel: tiny\ndeployment: {deployment}\nconnectors:\n{pairs}"


def killed(name: str) -> Callable[[Siege], None]:
    return lambda siege: siege.named(name).kill()


def frozen(name: str) -> Callable[[Siege], None]:
    return lambda siege: siege.named(name).suspend()


def slow(name: str, seconds: float = 2.5) -> Callable[[Siege], None]:
    """It runs a fifth of the time."""

    def strike(siege: Siege) -> None:
        process = siege.named(name)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            process.suspend()
            time.sleep(0.4)
            process.resume()
            time.sleep(0.1)

    return strike


STRIKES: dict[str, Callable[[Siege], None] | None] = {
    "prefill_killed": killed("prefill-0"),
    "decode_killed": killed("decode-0"),
    "prefill_frozen": frozen("prefill-0"),
    "decode_frozen": frozen("decode-0"),
    "prefill_slow": slow("prefill-0"),
    "decode_slow": slow("decode-0"),
    "router_killed": killed("router"),
    "router_frozen": frozen("router"),
    "loadgen_killed": lambda siege: siege.generator().kill(),
    "loadgen_frozen": lambda siege: siege.generator().suspend(),
    "child_aborts": lambda siege: siege.child("decode-0").send_signal(signal.SIGABRT),
    "child_hangs": lambda siege: siege.child("decode-0").suspend(),
    "library_hangs_in_pair": lambda siege: siege.logs("library_hangs_in_pair").joinpath(HANG).touch(),
    # fault_shim.py does these, by the deployment's label.
    "port_taken": None,
    "out_of_files": None,
    "out_of_memory": None,
}
