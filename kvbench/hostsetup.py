"""``kvbench hosts install``: the same kvbench on every host of a scenario, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from rich.console import Console

from kvbench import __version__
from kvbench.core.scenario_hosts import FarHost
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError, KvbenchError, LaunchError
from kvbench.launchers.fleet import in_shell
from kvbench.launchers.ssh import SshConnections
from kvbench.request import Wish, resolve

BUILD_DEADLINE_S: Final = 300.0
INSTALL_DEADLINE_S: Final = 900.0
SOURCES: Final = Path(__file__).resolve().parent.parent


def command(scenario_name: str, overrides: tuple[str, ...], wheel: Path | None, console: Console) -> int:
    """Copy a wheel to each host and install it into ``WORKDIR/venv``; 1 if one of them failed."""
    scenario, _ = resolve(Wish(scenario_name, overrides))
    hosts = scenario.deployment.used_hosts
    if scenario.deployment.launcher != "ssh" or not hosts:
        raise InputError("the scenario names no hosts to install on", hint="launcher: ssh, hosts: …")
    connections = SshConnections()

    def install(name: str) -> KvbenchError | str:
        try:
            return installed(name, hosts[name], ready, connections)
        except KvbenchError as error:
            return error

    with tempfile.TemporaryDirectory(prefix="kvbench-wheel-") as folder:
        try:
            ready = wheel or built(Path(folder))
            with ThreadPoolExecutor(16) as pool:
                results = dict(zip(hosts, pool.map(install, hosts), strict=True))
        finally:
            connections.close()
    for name, result in results.items():
        words = f"failed: {result.message}\n  {result.hint}" if isinstance(result, KvbenchError) else result
        console.print(f"{name}: {words}", markup=False)
    return EXIT_FAILED if any(isinstance(each, KvbenchError) for each in results.values()) else EXIT_OK


def built(folder: Path) -> Path:
    """A wheel of the sources that run here. Raises LaunchError if there are none, or it cannot be built."""
    if not (SOURCES / "pyproject.toml").is_file():
        raise LaunchError(
            f"{SOURCES} has no sources to build a wheel from",
            hint="give the wheel that was installed: --wheel FILE",
        )
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(SOURCES)],
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    wheels = sorted(folder.glob("kvbench-*.whl"))
    if done.returncode or not wheels:
        raise LaunchError(f"no wheel could be built: {(done.stderr or done.stdout).strip()[-400:]}")
    return wheels[-1]


def install_commands(host: FarHost, wheel: str) -> str:
    """What is run on a host, once the wheel is there."""
    venv = in_shell(f"{host.workdir}/venv")
    python = in_shell(host.python) if host.python else "python3"
    return (
        f"{{ [ -x {venv}/bin/python ] || {python} -m venv {venv}; }}"
        f" && {venv}/bin/python -m pip install --quiet --upgrade {in_shell(wheel)}"
        f" && {venv}/bin/python -m pip install --quiet --force-reinstall --no-deps {in_shell(wheel)}"
        f" && {venv}/bin/python -c 'import kvbench; print(kvbench.__version__)'"
    )


def installed(name: str, host: FarHost, wheel: Path, connections: SshConnections) -> str:
    """Copies and installs; returns what came of it. Raises LaunchError with the commands to do it by hand."""
    there = connections.put(name, host.ssh, wheel, host.workdir)
    words = install_commands(host, there)
    status, text = connections.output(name, host.ssh, words, INSTALL_DEADLINE_S)
    if status:
        raise LaunchError(f"status {status}: {text.strip()[-400:]}", hint=f"by hand, there: {words}")
    version = text.strip().splitlines()[-1]
    if version != __version__:
        raise LaunchError(f"it has kvbench {version} now, and here it is {__version__}", hint="give --wheel")
    words = f"kvbench {version} in {host.workdir}/venv"
    if host.python:
        words += f"; now set deployment.hosts.{name}.python to that venv's bin/python, or leave it out"
    return words
