"""What doctor finds: on this machine, and on recorded ones that lack something."""

import io
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench import connectors
from kvbench.core.gates.gates import gate_table
from kvbench.planning.doctor import gates
from kvbench.planning.doctor.doctor import (
    Check,
    connector_checks,
    cpu_checks,
    examine,
    gpu_check,
    open_files_check,
    ports_check,
    print_checks,
    rdma_checks,
    shm_check,
)
from kvbench.planning.doctor.hosts import matrix, nic_table


def test_on_this_machine_each_finding_is_complete() -> None:
    checks = examine()
    assert all(isinstance(check, Check) and check.name and check.detail for check in checks)
    assert {check.status for check in checks} <= {"ok", "warn", "missing"}
    assert all(check.fix for check in checks if check.status != "ok")
    names = [check.name for check in checks]
    assert len(names) == len(set(names))
    assert {"python", "ports", "open files", "shared memory", "cpu", "load", "rdma", "gpu"} <= set(names)


def test_each_connector_is_looked_at_and_ours_always_work() -> None:
    checks = {check.name.removeprefix("connector "): check for check in connector_checks()}
    assert tuple(checks) == connectors.names()
    assert checks["tcp"].status == checks["aggregated"].status == "ok"


def test_a_library_that_does_not_load_is_missing_with_its_cause(tmp_path: Path) -> None:
    """The way Mooncake fails without libibverbs, in a process where its package is such a one."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    reason = "libibverbs.so.1: cannot open shared object file"
    (package / "engine.py").write_text(f"raise ImportError({reason!r})")
    code = (
        "import dataclasses, json; from kvbench.planning.doctor.doctor import connector_checks\n"
        "print(json.dumps([dataclasses.asdict(check) for check in connector_checks()]))"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=60)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["connector mooncake"]["status"] == "missing"
    assert reason in checks["connector mooncake"]["detail"]
    assert checks["connector mooncake"]["fix"]
    assert checks["connector tcp"]["status"] == "ok"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = ports_check(port, count=1)
        assert taken.status == "warn"
        assert str(port) in taken.detail
        assert "base_port" in taken.fix
    assert ports_check(port, count=1).status == "ok"


def test_ports_end_at_the_last_one() -> None:
    assert "65530-65535" in ports_check(65_530, count=100).detail


def test_few_open_files_are_warned_of() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        check = open_files_check()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert check.status == "warn"
    assert "ulimit -n" in check.fix


def test_shared_memory(tmp_path: Path) -> None:
    assert shm_check(tmp_path / "absent").status == "missing"
    assert shm_check(tmp_path).detail.endswith(str(tmp_path))


@pytest.mark.parametrize(
    ("load", "quota", "statuses"),
    [
        ("0.90 0 0", "max 100000", ["ok", "ok"]),
        ("2.10 0 0", "max 100000", ["ok", "warn"]),
        ("1.10 0 0", "200000 100000", ["ok", "warn"]),
        ("0.10 0 0", "100000 100000", ["warn", "ok"]),
    ],
)
def test_cores_and_load(tmp_path: Path, load: str, quota: str, statuses: list[str]) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text(f"{load} 1/2 3\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota)
    assert [check.status for check in cpu_checks(tmp_path, cores=4)] == statuses


def test_a_machine_that_tells_no_load(tmp_path: Path) -> None:
    assert [check.name for check in cpu_checks(tmp_path, cores=4)] == ["cpu"]


def device(state: str) -> dict[str, Any]:
    port = {"port": 1, "state": state, "rate": "400 Gb/sec", "link_layer": "InfiniBand"}
    return {"name": "mlx5_0", "ports": [port]}


def test_rdma_devices_bring_their_own_questions(tmp_path: Path) -> None:
    assert [check.name for check in rdma_checks([], tmp_path)] == ["rdma"]
    found, locked, verbs = rdma_checks([device("ACTIVE")], tmp_path)
    assert found.status == "ok"
    assert "mlx5_0:1 ACTIVE 400 Gb/sec InfiniBand" in found.detail
    assert locked.name == "locked memory"
    assert verbs.status == "missing"
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    assert [check.name for check in rdma_checks([device("DOWN")], tmp_path)] == ["rdma", "locked memory"]
    assert rdma_checks([device("DOWN")], tmp_path)[0].status == "warn"


def test_gpus() -> None:
    assert gpu_check(None).status == "warn"
    assert "needs none" in gpu_check([]).detail
    detail = gpu_check([{"name": "NVIDIA H200", "driver_version": "580"}] * 8).detail
    assert detail == ", ".join(["NVIDIA H200"] * 5) + " and 3 more, driver 580"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_width_cuts_what_a_gate_proves(width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    assert gates.command(console) == 0
    shown = stream.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    flat = " ".join(shown.split())
    for gate in gate_table():
        for words in (gate.name, gate.proves, f"evidence: {gate.evidence}", f"limits: {gate.limits}"):
            assert " ".join(words.replace("`", "").split()) in flat


def test_a_pipe_gets_the_gates_in_plain_lines() -> None:
    stream = io.StringIO()
    assert gates.command(Console(file=stream, width=160)) == 0
    lines = stream.getvalue().splitlines()
    assert not any(mark in line for line in lines for mark in ("`", "| ", "---"))
    assert {f"  {gate.proves.replace('`', '')}" for gate in gate_table()} <= set(lines)
    assert any("silent_tcp" in line and line.endswith("wrong_transport") for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_width_cuts_what_a_finding_says(width: int) -> None:
    long = "/a/long/path/to/some/library/of/a/virtual/environment/lib/python3.11/site-packages/x.so"
    pair = {"rtt_s": 0.000123, "bytes_per_s": 123.45e9}
    pairs = {
        ("a-long-host-name-1", "a-long-host-name-2"): pair,
        ("a-long-host-name-2", "a-long-host-name-1"): pair,
    }
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    assert print_checks([Check("library", "missing", long, f"remove {long}")], console) == 1
    console.print(matrix(pairs), nic_table(pairs))
    shown = stream.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    # However it is folded: each digit of two rates and two round trips, told by both tables, is there.
    assert sum(shown.count(digit) for digit in "0123456789") >= 2 * 2 * (len("12345") + len("012"))
