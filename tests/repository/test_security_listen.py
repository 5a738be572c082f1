"""Everything listens on the loopback device alone unless told otherwise, and says so when it does not."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import EASY, Running, argv

from kvbench import transfer
from kvbench.planning.doctor.doctor import KNOWN_LIMITS, connector_checks
from kvbench.planning.process_specs import engine_warnings, is_loopback
from kvbench.planning.scenario_files import load_scenario

LISTEN = "0A"
DEADLINE_S = 90.0


def listeners(pid: int) -> dict[str, str]:
    """Addresses outside the loopback device that a process or a descendant listens on → its command line."""
    found = {}
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                words = " ".join(process.cmdline())
                for address in _addresses(process.pid):
                    maps = Path(f"/proc/{process.pid}/maps").read_text()
                    if maps and not _is_local(address):  # without maps it is ending
                        found[address] = f"{words} {'with mooncake' if '/mooncake' in maps else ''}"
    return found


def _addresses(pid: int) -> Iterator[str]:
    inodes = set()
    for name in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(name))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and f"socket:[{words[9]}]" in inodes:
                yield words[1]


def _is_local(address: str) -> bool:
    """Whether an address of /proc/net/tcp{,6} is one of the loopback device."""
    digits = bytes.fromhex(address.partition(":")[0])
    number = ip_address(b"".join(digits[at : at + 4][::-1] for at in range(0, len(digits), 4)))
    if isinstance(number, IPv6Address) and number.ipv4_mapped:
        number = number.ipv4_mapped
    return number.is_loopback


def test_the_look_sees_who_listens_everywhere() -> None:
    code = "import socket; _ = socket.create_server(('0.0.0.0', 0)); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"up\n"
        assert list(listeners(process.pid))
        process.communicate(b"\n")
    assert _is_local("0100007F:1F90")
    assert _is_local("0000000000000000FFFF00000100007F:1F90")
    assert not _is_local("00000000:1F90")
    assert not _is_local("00000000000000000000000000000000:1F90")


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_a_deployment_listens_on_loopback_alone(connector: str) -> None:
    """Engines, their side channels and transfer processes, and the router."""
    problem = transfer.check(connector)
    if problem is not None:
        pytest.skip(problem.reason)
    running = Running("launch", "quickstart", "--connector", connector, sets=EASY)
    try:
        running.wait_for("Ctrl-C stops it")
        assert len(psutil.Process(running.pid).children(recursive=True)) >= 5
        found = listeners(running.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.signal(signal.SIGINT)
        running.finish()
    known = {address for address, words in found.items() if words.endswith("with mooncake")}
    assert set(found) - known == set(), found
    assert not known or connector == "mooncake"  # said in README and by the doctor


def test_transfer_processes_listen_on_loopback_alone(tmp_path: Path) -> None:
    """Initiators, targets, their control doors, and the servers that stores need, while they measure."""
    backends = [name for name in ("tcp", "nixl", "mooncake_store") if transfer.check(name) is None]
    words = ["microbench", "--backend", ",".join(backends), "--block-size", "64K", "--batch-size", "4"]
    process = subprocess.Popen(
        [*argv(*words, "--output", str(tmp_path))], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    found: dict[str, Any] = {}
    deadline = time.monotonic() + DEADLINE_S
    seen: set[int] = set()
    while process.poll() is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(psutil.Error):
            seen |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        found |= listeners(process.pid)
        time.sleep(0.1)
    assert process.returncode == 0
    assert len(seen) >= 2 * len(backends)
    assert {words for words in found.values() if not words.endswith("with mooncake")} == set()


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("localhost", True), ("0.0.0.0", False), ("10.1.2.3", False)],
)
def test_what_listens_elsewhere_says_so(host: str, local: bool) -> None:
    scenario, _ = load_scenario("quickstart", [f"deployment.host={host}"])
    warnings = [note for note in engine_warnings(scenario) if "any client of that address" in note]
    assert is_loopback(host) is local
    assert bool(warnings) is not local
    assert local or host in warnings[0]


def test_the_doctor_says_what_a_library_does_against_our_will() -> None:
    if transfer.check("mooncake") is not None:
        pytest.skip("Mooncake is not installed")
    details = {check.name: check.detail for check in connector_checks()}
    assert details["connector mooncake"].endswith(KNOWN_LIMITS["mooncake"])
    assert "all interfaces" in KNOWN_LIMITS["mooncake"]
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert "Mooncake's TCP transport listens on all interfaces" in readme
