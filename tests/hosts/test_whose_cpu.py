"""Whose CPU time it was: this run's, the system's under test, or that of others."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from kvbench.hosts import procfs
from kvbench.hosts.devices import cpu_pressure_s
from kvbench.hosts.telemetry import HostReading, host_figures
from kvbench.sweep.trial.readings import unknown_owner

BURN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
MEASURE = """
import json, subprocess, sys, time
from kvbench.hosts import procfs
from kvbench.hosts.telemetry import host_figures
from kvbench.hosts.telemetry import read_host

foreign, burn = int(sys.argv[1]), sys.argv[2]
with subprocess.Popen([sys.executable, "-c", burn], start_new_session=True) as mine:
    before, began = read_host(), procfs.processes()
    while True:
        table = procfs.processes()
        if min(table[pid].cpu_s - began[pid].cpu_s for pid in (foreign, mine.pid)) >= 0.3:
            break
        time.sleep(0.05)
    after, tested = read_host(), read_host(also=[foreign])
    mine.kill()
names = {pid for pid, _ in after.others}
print(json.dumps({
    "foreign_is_other": foreign in names,
    "mine_is_other": mine.pid in names,
    "tested_is_other": foreign in {pid for pid, _ in tested.others},
    "own": after.run_cpu_s - before.run_cpu_s,
    "with_tested": tested.run_cpu_s - after.run_cpu_s,
    "busy": host_figures(before, after).busy_share,
}))
"""


def test_a_burner_of_ours_is_ours_and_another_s_is_another_s() -> None:
    """Which processes are whose, not how fast they are: CPU seconds are asked of the kernel for each."""
    with subprocess.Popen([sys.executable, "-c", BURN]) as foreign:
        try:
            command = [sys.executable, "-c", MEASURE, str(foreign.pid), BURN]
            done = subprocess.run(command, capture_output=True, check=True, timeout=90)
        finally:
            foreign.kill()
    result = json.loads(done.stdout)
    assert result["foreign_is_other"]
    assert not result["mine_is_other"]
    assert not result["tested_is_other"]  # a server of somebody else's that is under test is no disturbance
    assert result["own"] >= 0.3
    assert result["with_tested"] >= 0.3
    assert result["busy"] > 0


def reading(pid: int, parent: int, session: int, cpu_s: float = 0.0) -> procfs.ProcessReading:
    return procfs.ProcessReading(pid, parent, session, f"p{pid}", 7, cpu_s, 0.0)


def test_an_orphaned_worker_still_belongs_to_its_server() -> None:
    table = {
        process.pid: process
        for process in (
            reading(10, 1, 10),  # the server, leading a session
            reading(11, 10, 10),
            reading(12, 11, 12),  # a child in a session of its own
            reading(13, 1, 10),  # a worker whose parent has ended
            reading(14, 13, 10),
            reading(20, 1, 20),
            reading(21, 20, 20),
        )
    }
    assert procfs.belonging(table, [10, 99]) == {10, 11, 12, 13, 14}
    assert procfs.belonging(table, [11]) == {11, 12}  # whose session somebody else leads


def test_who_took_the_cpu_is_named() -> None:
    before = HostReading(0.5, 0, 0, 0, 10.0, pressure_s=5.0, others={(7, 1): ("cc1plus", 1.0)})
    cores = os.cpu_count() or 1
    after = HostReading(
        0.5, 0, 8.0 * cores, 2.0 * cores, 20.0, pressure_s=9.0,
        others={(7, 1): ("cc1plus", 1.0 + 4.0 * cores), (8, 5): ("ld", 1.5 * cores), (9, 6): ("sh", 0.01)},
    )  # fmt: skip
    figures = host_figures(before, after)
    assert (figures.other_cpu_share, figures.busy_share, figures.pressure_share) == (0.6, 0.8, 0.4)
    assert figures.takers == ("cc1plus 40%", "ld 15%")


def test_a_server_on_this_machine_is_found_by_its_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert procfs.listening([f"http://127.0.0.1:{port}/metrics"]).pids == (os.getpid(),)
        assert procfs.listening([f"http://localhost:{port}"]).pids == (os.getpid(),)
        both = procfs.listening([f"http://localhost:{port}", "http://192.0.2.7:1"])
        assert both.urls == (f"http://localhost:{port}",)
        assert both.unseen == ()
    assert procfs.listening([f"http://192.0.2.7:{port}"]) == procfs.Listeners()
    assert procfs.listening([]) == procfs.Listeners()


def test_the_owner_of_cpu_time_beside_a_server_of_others_on_this_machine_is_unknown() -> None:
    """Its workers need not be children of the process that listens, and that may not be visible at all."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # no listener can be seen there, as of a container or another user
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        found = procfs.listening([url])
    assert (found.pids, found.unseen) == ((), (url,))
    assert f"the process that listens at {url} cannot be seen" in unknown_owner(found)
    assert "its workers need not be children" in unknown_owner(procfs.Listeners((7,), (url,)))
    assert unknown_owner(procfs.Listeners()) == ""  # on another machine, or started by kvbench


def test_waiting_is_counted_where_the_kernel_does(tmp_path: Path) -> None:
    text = "some avg10=99.45 avg60=99.17 avg300=90.66 total=17112776934\nfull avg10=0.00 total=0\n"
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/pressure/cpu").write_text(text, "utf-8")
    assert cpu_pressure_s(tmp_path) == 17112.776934
    assert cpu_pressure_s(tmp_path / "absent") is None
