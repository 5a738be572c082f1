"""Labs really made here, as root and without: what is in them, their faults, and that none is ever left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import argv, wait_until

from kvbench.errors import InputError, LabError
from kvbench.hosts.lab import faults as labfaults
from kvbench.hosts.lab import state as labstate
from kvbench.hosts.lab.hosts import NETNS_FOLDER, may_use_netns, tool
from kvbench.hosts.lab.lab import Lab, interface_counters, take_down
from kvbench.hosts.lab.layout import LabPlan

DEADLINE_S = 30.0
NOBODY = 65_534
TAG = f"t{os.getpid()}"
"""In the names of this process's labs, so that others of this machine are no concern."""

RECEIVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = listener.accept()
total = 0
while chunk := connection.recv(1 << 20):
    total += len(chunk)
print(total, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""
SENDER = """
import socket, sys, time
own, peer, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
connection = socket.create_connection((peer, 5000), 10, (own, 0))
start = time.monotonic()
connection.sendall(bytes(size))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - start)
"""
ECHO_UDP = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind((sys.argv[1], 5001))
print("ready", flush=True)
seen = 0
while receiver.recv(100) != b"end":
    seen += 1
print(seen)
"""
SEND_UDP = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    sender.sendto(b"x", (sys.argv[1], 5001))
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), float(sys.argv[2]))
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


def no_lab_reason(rootless: bool) -> str:
    """Why no lab of this kind can be made here; empty if it can."""
    if not rootless and not may_use_netns():
        return "named namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    try:
        with Lab.build(LabPlan(f"probe-{TAG}", 1), rootless=rootless):
            return ""
    except LabError as error:
        return str(error)


REASONS = {kind: no_lab_reason(kind == "rootless") for kind in ("named", "rootless")}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(reason), reason=f"{kind} lab: {reason}"))
    for kind, reason in REASONS.items()
]
ANY = next((kind for kind, reason in REASONS.items() if not reason), "")
needs_lab = pytest.mark.skipif(not ANY, reason=f"no lab can be made here: {REASONS}")
needs_named = pytest.mark.skipif(bool(REASONS["named"]), reason=REASONS["named"])


def namespaces() -> set[str]:
    return {path.name for path in NETNS_FOLDER.glob("kvbench-*") if str(os.getpid()) in path.name}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """State files of our own, and after each test neither one of them nor a namespace is left."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    yield runtime
    assert labstate.all_states() == []
    assert namespaces() == set()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab.build(LabPlan(TAG, 3), rootless=ANY == "rootless") as made:
        yield made


def python(lab: Lab, side: str, code: str, *words: str) -> subprocess.Popen[str]:
    command = [*lab.prefix(side), sys.executable, "-I", "-S", "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return out.strip()


def listening(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout.readline() == "ready\n"
    return process


def move(lab: Lab, nic: int, size: int) -> tuple[float, int, str]:
    """Seconds, bytes received and congestion control of one TCP connection over one NIC."""
    source, peer = (lab.nics(side)[nic]["address"] for side in ("A", "B"))
    receiver = listening(python(lab, "B", RECEIVER, peer))
    seconds = output(python(lab, "A", SENDER, source, peer, str(size)))
    total, congestion = output(receiver).split()
    return float(seconds), int(total), congestion


def connecting(lab: Lab, nic: int, deadline_s: float = 0.5) -> str:
    return output(python(lab, "A", CONNECT, lab.nics("B")[nic]["address"], str(deadline_s)))


@pytest.mark.parametrize("kind", KINDS)
def test_two_hosts_with_their_nics(kind: str) -> None:
    with Lab.build(LabPlan(TAG, 8, mtu=9000), rootless=kind == "rootless") as lab:
        for side in ("A", "B"):
            look = "ls /sys/class/net; cat /sys/class/net/nic7/mtu; pwd"
            seen = subprocess.run(
                [*lab.prefix(side), "sh", "-c", look], capture_output=True, text=True, timeout=DEADLINE_S,
                check=True,
            ).stdout.split()  # fmt: skip
            assert seen == ["lo", *(f"nic{nic}" for nic in range(8)), "9000", os.getcwd()]
        size = 1_000_000
        before = interface_counters(lab.host("A"))
        seconds, received, congestion = move(lab, 5, size)
        after = interface_counters(lab.host("A"))
        sent = {name: after[name]["sent"] - before[name]["sent"] for name in after}
        assert received == size
        assert size <= sent.pop("nic5") < 1.2 * size
        assert max(sent.values()) < 10_000
        assert congestion == lab.state.congestion
        # Shaping bounds the speed from above whatever else this machine does.
        assert seconds >= (size - lab.burst_bytes) * 8 / lab.plan.bits_per_s * 0.9
        assert lab.describe() == "8 × 1gbit, MTU 9000"
        assert lab.record()["rootless"] is (kind == "rootless")


@needs_lab
def test_a_slow_lab_is_slow(tmp_path: Path) -> None:
    plan = LabPlan(TAG, 1, "50mbit", prefix="172.20")
    with Lab.build(plan, rootless=ANY == "rootless") as lab:
        size = 3_000_000
        seconds, received, _ = move(lab, 0, size)
        assert received == size
        assert seconds >= (size - lab.burst_bytes) * 8 / plan.bits_per_s * 0.9
        assert lab.nics("B") == [{"name": "nic0", "address": "172.20.0.2"}]


# Faults
@pytest.fixture
def needs_nft() -> None:
    try:
        tool("nft")
    except LabError as error:
        pytest.skip(str(error))


@needs_lab
def test_pull(lab: Lab) -> None:
    assert labfaults.place(lab, "pull", 1).words() == "pull on nic1: A has no carrier"
    assert connecting(lab, 1) in ("TimeoutError", "OSError")
    assert connecting(lab, 0) == "ConnectionRefusedError"  # nobody listens, but the packets arrive
    assert labfaults.heal(lab, "pull", 1).words() == "pull on nic1, healed: A had no carrier"
    _, received, congestion = move(lab, 1, 100_000)
    assert (received, congestion) == (100_000, lab.state.congestion)


@needs_lab
@pytest.mark.usefixtures("needs_nft")
def test_partition(lab: Lab) -> None:
    assert labfaults.place(lab, "partition", 1).words() == "partition on nic1: no packet met it yet"
    assert (connecting(lab, 1), connecting(lab, 2)) == ("TimeoutError", "ConnectionRefusedError")
    assert labfaults.report(lab, lab.state.faults[0]).packets > 0
    labfaults.heal(lab, "partition", 1)
    assert connecting(lab, 1, DEADLINE_S) == "ConnectionRefusedError"
    assert lab.state.faults == []


@needs_lab
@pytest.mark.usefixtures("needs_nft")
def test_reset(lab: Lab) -> None:
    receiver = listening(python(lab, "B", RECEIVER, lab.nics("B")[1]["address"]))
    labfaults.place(lab, "reset", 1)
    assert connecting(lab, 1, DEADLINE_S) == "ConnectionRefusedError"
    assert labfaults.heal(lab, "reset", 1).packets > 0
    source, peer = (lab.nics(side)[1]["address"] for side in ("A", "B"))
    output(python(lab, "A", SENDER, source, peer, "10"))
    assert output(receiver).startswith("10 ")


@needs_lab
@pytest.mark.usefixtures("needs_nft")
def test_loss_counts_each_packet_that_is_lost(lab: Lab) -> None:
    address, number = lab.nics("B")[1]["address"], 150  # as many as a socket surely holds
    receiver = listening(python(lab, "B", ECHO_UDP, address))
    output(python(lab, "A", SEND_UDP, address, "1"))  # so that its address is resolved before
    labfaults.place(lab, "loss", 1, "20%")
    output(python(lab, "A", SEND_UDP, address, str(number)))
    lost = labfaults.heal(lab, "loss", 1).packets
    end = "import socket, sys; socket.socket(2, 2).sendto(b'end', (sys.argv[1], 5001))"
    output(python(lab, "A", end, address))
    seen = int(output(receiver)) - 1
    assert seen + lost == number
    assert 0 < lost < number / 2  # more than nine standard deviations above 20 %


@needs_lab
def test_slow(lab: Lab) -> None:
    assert labfaults.place(lab, "slow", 1, "20mbit").words().startswith("slow 20mbit on nic1")
    size = 1_000_000
    seconds, _, _ = move(lab, 1, size)
    assert seconds >= (size - lab.burst_bytes) * 8 / 20e6 * 0.9
    assert labfaults.report(lab, lab.state.faults[0]).packets > 0
    labfaults.place(lab, "slow", 1, "30mbit")  # in place of the other
    assert [(fault.kind, fault.amount) for fault in lab.state.faults] == [("slow", "30mbit")]
    labfaults.heal(lab, "slow", 1)
    qdiscs: list[dict[str, Any]] = json.loads(lab.host("A").run("tc", "-j", "qdisc", "show", "dev", "nic1"))
    assert qdiscs[0]["options"]["rate"] * 8 == lab.plan.bits_per_s


@needs_lab
@pytest.mark.parametrize(
    ("kind", "nic", "amount", "message"),
    [
        ("fire", 0, "", "unknown fault"), ("pull", 3, "", "has no NIC 3"),
        ("pull", -1, "", "has no NIC -1"), ("pull", 0, "1%", "takes no amount"),
        ("loss", 0, "300mbit", "not a share"), ("slow", 0, "1%", "not a NIC.s rate"),
        ("slow", 0, "2gbit", "not slower"),
    ],
)  # fmt: skip
def test_faults_that_cannot_be(lab: Lab, kind: str, nic: int, amount: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        labfaults.place(lab, kind, nic, amount)
    with pytest.raises(InputError):
        labfaults.heal(lab, kind, nic)
    assert lab.state.faults == []


# Names, owners, and what is left over
@needs_lab
def test_a_lab_in_use_is_found_by_name_and_left_alone(lab: Lab) -> None:
    name = lab.plan.name
    assert Lab.standing(name).prefix("A") == lab.prefix("A")
    with pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
        Lab.up(name=name)
    with pytest.raises(LabError, match="is using the lab"):
        take_down(name)
    with pytest.raises(InputError, match="there is no lab 'none'") as caught:
        Lab.standing("none")
    assert name in caught.value.hint
    with pytest.raises(InputError, match="no host 'C'"):
        lab.prefix("C")


@needs_lab
def test_taking_down_ends_what_runs_inside() -> None:
    with Lab.up() as lab:
        deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
        process = listening(python(lab, "B", deaf))
        assert lab.host("B").processes() == [process.pid]
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    process.stdout.close()


def fake_tc(folder: Path, line: str) -> str:
    """A PATH on which `tc` is a program that fails, or waits; returns it."""
    folder.mkdir()
    (folder / "tc").write_text(f"#!/bin/sh\n{line}\n")
    (folder / "tc").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_in_the_middle_leaves_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_tc(tmp_path / "bin", "echo no shaping here >&2; exit 2"))
    with pytest.raises(LabError, match="no shaping here"):
        Lab.build(LabPlan(TAG, 2), stays=True, rootless=kind == "rootless")


def start(words: Sequence[str], path: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv("lab", *words), env={**os.environ, "PATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_and_a_kill_in_the_middle_of_up(kind: str, tmp_path: Path) -> None:
    """Ctrl-C clears up at once; after a kill the next command finds what is left."""
    mark = tmp_path / "reached"
    path = fake_tc(tmp_path / "bin", f"touch {mark}; exec sleep 60")
    words = ["up", "--name", TAG, *(["--rootless"] if kind == "rootless" else [])]
    for number in (signal.SIGINT, signal.SIGKILL):
        mark.unlink(missing_ok=True)
        process = start(words, path)
        wait_until(mark.exists, DEADLINE_S)
        os.killpg(process.pid, number)
        process.communicate(timeout=DEADLINE_S)
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert labstate.all_states() == []
    (state,) = labstate.all_states()
    assert state.left_over
    assert not state.standing
    assert take_down("kv") == [TAG]


OWNER = """
import signal, sys
from kvbench.hosts.lab.layout import LabPlan
from kvbench.hosts.lab.lab import Lab
with Lab.build(LabPlan(sys.argv[2], 1), rootless=sys.argv[1] == "rootless"):
    print("ready", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_owners_lab_gives_way_to_the_next(kind: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind, TAG], stdout=subprocess.PIPE, text=True)
    listening(owner)
    (state,) = labstate.all_states()
    assert state.standing
    owner.kill()
    owner.communicate(timeout=DEADLINE_S)
    wait_until(lambda: state.left_over)
    if kind == "rootless":  # its holders saw its end
        wait_until(lambda: not any(host.exists for host in state.hosts.values()))
    with Lab.build(LabPlan(TAG, 2), rootless=kind == "rootless") as lab:
        assert lab.plan.nics == 2


@needs_named
def test_namespaces_without_a_file_are_found(nothing_left: Path) -> None:
    Lab.build(LabPlan(TAG, 1), stays=True)
    labstate.path_of(TAG).unlink()
    assert TAG in labstate.unrecorded()
    with pytest.raises(InputError, match="but not its file"):
        Lab.up(name=TAG)
    assert (take_down("other", everything=True), take_down(TAG)) == ([], [TAG])


# The command
def kvbench_lab(
    *words: str, prefix: Sequence[str] = (), env: dict[str, str] | None = None
) -> tuple[int, str]:
    done = subprocess.run(
        [*prefix, *argv("lab", *words)], capture_output=True, text=True, timeout=DEADLINE_S,
        env={**os.environ, **(env or {})}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@needs_lab
def test_the_whole_way_by_command() -> None:
    name = ["--name", TAG]
    kind = ["--rootless"] if ANY == "rootless" else []
    code, out = kvbench_lab("up", *name, "--nics", "2", "--rate", "100mbit", *kind)
    assert code == 0, out
    assert f"lab {TAG}: 2 × 100mbit" in out
    try:
        assert kvbench_lab("exec", *name, "A", "--", "sh", "-c", "exit 7")[0] == 7
        code, out = kvbench_lab("fault", "slow", "--nic", "1", "--amount", "10mbit", *name)
        assert (code, out) == (0, "slow 10mbit on nic1: no packet met it yet\n")
        code, out = kvbench_lab("status")
        assert code == 0
        assert "slow 10mbit on nic1" in out
        assert "10.77.1.2" in out
        status = json.loads(kvbench_lab("status", "--json")[1])
        assert status["labs"][0]["standing"] is True
        assert status["labs"][0]["line_rate_gb_per_s"] == 0.0125
        code, out = kvbench_lab("up", *name)
        assert (code, "already exists" in out) == (2, True)
    finally:
        code, out = kvbench_lab("down", *name)
    assert (code, out) == (0, f"taken down: {TAG}\n")
    assert kvbench_lab("exec", *name, "A", "--", "true")[0] == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_user_without_any_right(tmp_path: Path) -> None:
    if REASONS["rootless"] or shutil.which("setpriv") is None:
        pytest.skip(REASONS["rootless"] or "setpriv is not here (package util-linux)")
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    probe = [*prefix, sys.executable, "-c", "import kvbench.hosts.lab.lab"]
    seen = subprocess.run(probe, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if seen.returncode:
        pytest.skip(f"the user nobody cannot run this kvbench: {seen.stderr.strip().splitlines()[-1:]}")
    with tempfile.TemporaryDirectory() as runtime:
        os.chown(runtime, NOBODY, NOBODY)
        env = {"XDG_RUNTIME_DIR": runtime, "HOME": runtime}
        code, out = kvbench_lab("up", "--nics", "2", prefix=prefix, env=env)
        assert code == 0, out
        try:
            code, out = kvbench_lab("exec", "B", "--", "ls", "/sys/class/net", prefix=prefix, env=env)
            assert (code, out.split()) == (0, ["lo", "nic0", "nic1"])
        finally:
            code, out = kvbench_lab("down", prefix=prefix, env=env)
        assert (code, out) == (0, "taken down: kv\n")
