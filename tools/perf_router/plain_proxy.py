"""The plain TCP proxy that perf_router measures beside the router, compiled when it is wanted."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kvbench.core.plan.processes import ProcessSpec
from kvbench.launchers.local import LocalLauncher
from tools.bench import running

SOURCE = Path(__file__).with_suffix(".c")
COMPILE_DEADLINE_S = 60.0
READY_DEADLINE_S = 10.0


def compiled(folder: Path) -> Path | str:
    """The program, made in ``folder``; or why it could not be made."""
    program = folder / "plain_proxy"
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    try:
        done = subprocess.run(
            [*compiler, "-O2", "-o", str(program), str(SOURCE)],
            capture_output=True,
            text=True,
            timeout=COMPILE_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler[0]}: {error}"
    return program if done.returncode == 0 else f"{compiler[0]}: {done.stderr.strip()[-200:]}"


class PlainProxy:
    """A proxy that runs; its URL, and the CPU time it has had."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self._schedstat = Path(f"/proc/{pid}/schedstat")

    @property
    def cpu_s(self) -> float:
        return int(self._schedstat.read_text().split()[0]) / 1e9


@contextlib.contextmanager
def plain_proxy(
    launcher: LocalLauncher, program: Path, server_url: str, port: int, name: str
) -> Iterator[PlainProxy]:
    """The proxy in front of a server of this machine; it ends with the launcher's process at the latest."""
    argv = (str(program), str(port), str(urlsplit(server_url).port))
    with running(
        launcher, ProcessSpec(name=name, argv=argv), lambda: _accepts(port), READY_DEADLINE_S
    ) as process:
        yield PlainProxy(f"http://127.0.0.1:{port}", process.pid)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
