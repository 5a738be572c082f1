"""Signs of life: who answers, who answers late, and who never does; and what /proc says of processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from kvbench.hosts.procfs import cpu_s, family, is_stopped
from kvbench.launchers.parts.liveness import Heartbeat


def until(condition: Callable[[], bool], deadline_s: float = 15.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_any_answer_counts_and_a_late_one_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as well, socket.create_server(("127.0.0.1", 0)) as late:
        urls = {
            name: f"http://127.0.0.1:{sock.getsockname()[1]}/x"
            for name, sock in (("well", well), ("late", late))
        }
        with Heartbeat(urls, every_s=0.1) as heartbeat:
            held, _ = late.accept()
            with held:
                for _ in range(4):
                    connection, _ = well.accept()
                    with connection:
                        assert connection.recv(1000).startswith(b"GET /x HTTP/1.1\r\nhost: 127.0.0.1:")
                        connection.sendall(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")
                until(lambda: heartbeat.silent_s()["late"] > 0.3)
                held.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                until(lambda: heartbeat.silent_s()["late"] < 0.3)


def test_who_refuses_or_hangs_up_has_not_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rude:
        port = rude.getsockname()[1]
        with Heartbeat(
            {"rude": f"http://127.0.0.1:{port}", "gone": "http://127.0.0.1:9"}, every_s=0.05
        ) as heartbeat:
            for _ in range(3):
                rude.accept()[0].close()
            until(lambda: min(heartbeat.silent_s().values()) > 0.2)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="not a plain http"):
        Heartbeat({"a": "https://127.0.0.1:1"})


def test_closing_twice_and_without_a_start() -> None:
    heartbeat = Heartbeat({})
    heartbeat.close()
    heartbeat.close()
    assert heartbeat.silent_s() == {}


def test_a_family_its_state_and_its_time() -> None:
    code = (
        "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True);"
        "[None for _ in range(10**6)]; sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        child = int(process.stdout.readline())
        try:
            assert family(process.pid) == [process.pid, child]
            until(lambda: cpu_s([process.pid]) > 0)
            assert not is_stopped(child)
            os.kill(child, signal.SIGSTOP)
            until(lambda: is_stopped(child))
            assert not is_stopped(process.pid)
        finally:
            os.kill(child, signal.SIGKILL)
    assert cpu_s([process.pid]) == 0
    assert not is_stopped(process.pid)
