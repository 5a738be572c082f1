"""A Ray cluster of this machine alone, with loopback addresses: nodes in sessions of their own.

``make test-ray`` tests on one. Ray comes from the environment of the Python that runs this (.venv-ray). All
nodes are this machine: a cluster for function, never for figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

READY_DEADLINE_S: Final = 120.0
"""A head took 8 to 17 s on two busy cores, and failed at Ray's own limit of 60 s at worst."""
STOP_DEADLINE_S: Final = 10.0
OBJECT_STORE_BYTES: Final = 100_000_000


@dataclass(frozen=True)
class Node:
    """A node: its name, custom resources and labels."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


NODES: Final = (
    Node("pre0", {"prefill_node": 1}, {"role": "prefill"}),
    Node("dec0", {"decode_node": 1}, {"role": "decode"}),
)


class RayLab:
    """Context manager: the cluster. ``address`` is what drivers join."""

    def __init__(self, folder: Path, nodes: Sequence[Node] = NODES, cpus: int = 2) -> None:
        self.folder = folder
        self.nodes = tuple(nodes)
        self._cpus = cpus
        self._port = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._token = secrets.token_hex(32)

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables of whoever joins. Ray listens on all addresses whatever it is given, and runs
        whatever comes; so it wants a token.
        """
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token, "RAY_USAGE_STATS_ENABLED": "0"}

    @property
    def address(self) -> str:
        """The head's. 127.0.0.1 itself is not taken: Ray puts the machine's outer address in its place."""
        return f"127.0.0.2:{self._port}"

    def __enter__(self) -> RayLab:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all nodes and wait until the cluster lists them. Raises RuntimeError with the logs' ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            self._port = int(probe.getsockname()[1])
        for index, node in enumerate(self.nodes):
            self._start(node, index)

    def kill_node(self, name: str) -> None:
        """End a node as a power cut does, with all that runs on it."""
        _kill_all(self._running.pop(name))

    def stop(self) -> None:
        """End every node. Safe to call twice."""
        running, self._running = self._running, {}
        for popen in reversed(running.values()):
            popen.terminate()
        for popen in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(STOP_DEADLINE_S)
            _kill_all(popen)

    def _start(self, node: Node, index: int) -> None:
        where = ["--head", f"--port={self._port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        if index:
            where = [f"--address={self.address}"]
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            *where,
            f"--node-ip-address=127.0.0.{2 + index}",
            f"--node-name={node.name}",
            f"--num-cpus={self._cpus}",
            "--num-gpus=0",
            f"--resources={json.dumps(dict(node.resources))}",
            f"--labels={','.join(f'{key}={value}' for key, value in node.labels.items())}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
        ]
        log = self.folder / f"{node.name}.log"
        with log.open("ab") as file:
            self._running[node.name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env, "COLUMNS": "200"},
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_DEADLINE_S
        while b"Ray runtime started" not in log.read_bytes():
            if self._running[node.name].poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(errors="replace").splitlines()[-8:]
                raise RuntimeError(f"the Ray node {node.name} does not come up:\n" + "\n".join(lines))
            time.sleep(0.1)


def _kill_all(popen: subprocess.Popen[bytes]) -> None:
    """The process with all that it has started: Ray's daemons have groups of their own, but one session."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int((path / "stat").read_text().rpartition(")")[2].split()[3]) == popen.pid:
                    os.kill(int(path.name), signal.SIGKILL)
    popen.wait(STOP_DEADLINE_S)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m tools.raylab FOLDER", file=sys.stderr)
        return 2
    with RayLab(Path(argv[0]).absolute()) as lab:
        print("export " + " ".join(f"{name}={value}" for name, value in lab.env.items()))
        print(f"deployment.ray.address={lab.address}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
