"""Servers that a store needs, as children that always end with this process."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.errors import TransferError

MASTER_READY_S = 5.0
MASTER_TRIES = 3

# Ends with the process that started it, then becomes the server.
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def start_server(
    command: Sequence[str], env: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that is killed when this thread's process ends; its output goes to stderr."""
    launch = [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid())]
    variables = {**os.environ, **(env or {})}
    return subprocess.Popen(
        [*launch, *command], stdin=subprocess.DEVNULL, stdout=2, env=variables, cwd=folder
    )


def free_port(host: str) -> int:
    """Return a currently free TCP port. Raises TransferError."""
    try:
        with socket.create_server((host, 0)) as free:
            return int(free.getsockname()[1])
    except OSError as error:
        raise TransferError(f"cannot listen on {host}: {error}") from error


def available_bytes() -> int:
    """Return the memory available without swapping (MemAvailable of proc(5))."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def master_binary() -> Path:
    """Return the program itself, not the script that starts it."""
    spec = importlib.util.find_spec("mooncake")
    folders = (spec.submodule_search_locations if spec else None) or ["."]
    return Path(folders[0]) / "mooncake_master"


class Master:
    """A ``mooncake_master`` on free ports, which ends with this process."""

    def __init__(self, host: str) -> None:
        """Raises TransferError when it is not ready within MASTER_READY_S."""
        until = time.monotonic() + MASTER_READY_S
        for _ in range(MASTER_TRIES):
            # Another process may take the port meanwhile; then the master ends, and is tried again.
            rpc, metrics = free_port(host), free_port("127.0.0.1")
            self.address = f"{host}:{rpc}"
            self._process = self._start(host, rpc, metrics)
            while time.monotonic() < until and self._process.poll() is None:
                try:
                    socket.create_connection((host, rpc), timeout=0.2).close()
                    return
                except OSError:
                    time.sleep(0.005)
            self.close()
        raise TransferError(f"mooncake_master did not come up on {host} within {MASTER_READY_S:g} s")

    def _start(self, host: str, rpc: int, metrics: int) -> subprocess.Popen[bytes]:
        options = {
            "rpc_address": host,
            "rpc_port": rpc,
            "rpc_thread_num": 4,
            "metrics_host": "127.0.0.1",
            "metrics_port": metrics,
            "enable_metric_reporting": "false",
            "eviction_high_watermark_ratio": 0.99,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        return start_server([str(master_binary()), *arguments])

    def close(self) -> None:
        """Kill it: it stores nothing. Safe to call twice."""
        self._process.kill()
        self._process.wait()
