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


@contextlib.contextmanager
def plain_proxy(
    launcher: LocalLauncher, program: Path, server_url: str, port: int, name: str
) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a proxy in front of a server of this machine, and the file of its CPU time in ns."""
    argv = (str(program), str(port), str(urlsplit(server_url).port))
    with running(
        launcher, ProcessSpec(name=name, argv=argv), lambda: _accepts(port), READY_DEADLINE_S
    ) as process:
        yield f"http://127.0.0.1:{port}", Path(f"/proc/{process.pid}/schedstat")


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
