"""``kvbench hosts install``: install the same kvbench on every host of a scenario, in its own environment."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from rich.console import Console

from kvbench.core.scenario.hosts import RemoteHost
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError, KvbenchError, LaunchError
from kvbench.files import scratch
from kvbench.launchers.agents.remote import in_shell
from kvbench.launchers.ssh import SshConnections
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.version import __version__

BUILD_DEADLINE_S: Final = 300.0
FETCH_DEADLINE_S: Final = 900.0
INSTALL_DEADLINE_S: Final = 900.0
SOURCES: Final = Path(__file__).resolve().parents[2]
_NOT_BUILT_FROM: Final = ("results", "notebooks", "docs", "tests", "build", "dist")


@dataclass(frozen=True)
class Install:
    """Options of an installation: wheel, dependencies, extras."""

    wheel: Path | None = None
    """Wheel of kvbench; None builds one of the running version."""
    wheelhouse: Path | None = None
    """Folder with wheels of its dependencies; None uses each host's registry."""
    bring: bool = False
    """Download these wheels in the locally installed versions."""
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ready:
    wheel: Path
    extras: tuple[str, ...] = ()
    wheels: Path | None = None


def command(scenario_name: str, overrides: tuple[str, ...], wanted: Install, console: Console) -> int:
    """Copy a wheel to each host and install it in ``WORKDIR/venv``; return 1 if one failed."""
    scenario, _ = resolve(CliOptions(scenario_name, overrides))
    hosts = scenario.deployment.used_hosts
    if scenario.deployment.launcher != "ssh" or not hosts:
        raise InputError("the scenario names no hosts to install on", hint="launcher: ssh, hosts: …")
    if wanted.bring and wanted.wheelhouse is not None:
        raise InputError("--bring downloads the wheels, --wheelhouse provides them: give one of them")
    connections = SshConnections()

    def install(name: str) -> KvbenchError | str:
        try:
            return install_on(name, hosts[name], ready, connections)
        except KvbenchError as error:
            return error

    with scratch("kvbench-wheel-") as folder:
        try:
            ready = prepare(wanted, folder)
            with ThreadPoolExecutor(16) as pool:
                results = dict(zip(hosts, pool.map(install, hosts), strict=True))
        finally:
            connections.close()
    for name, result in results.items():
        text = f"failed: {result.message}\n  {result.hint}" if isinstance(result, KvbenchError) else result
        console.print(f"{name}: {text}", markup=False)
    return EXIT_FAILED if any(isinstance(outcome, KvbenchError) for outcome in results.values()) else EXIT_OK


def prepare(wanted: Install, folder: Path) -> Ready:
    """Prepare all files in ``folder``. Raises LaunchError."""
    wheel = wanted.wheel or build_wheel(folder)
    house = fetch_dependencies(wheel, wanted.extras, folder / "wheels") if wanted.bring else wanted.wheelhouse
    if house is None:
        return Ready(wheel, wanted.extras)
    wheels = sorted(house.glob("*.whl"))
    if not wheels:
        raise InputError(f"{house} has no wheels", hint="pip download --dest DIR kvbench-*.whl fills it")
    packed = folder / "kvbench-wheels.tar"
    with tarfile.open(packed, "w") as tar:
        for file in wheels:
            tar.add(file, file.name)
    return Ready(wheel, wanted.extras, packed)


def build_wheel(folder: Path) -> Path:
    """Build a wheel of the running sources. Raises LaunchError on failure."""
    if not (SOURCES / "pyproject.toml").is_file():
        raise LaunchError(
            f"{SOURCES} has no sources to build a wheel from",
            hint="give the wheel that was installed: --wheel FILE",
        )
    copy = folder / "sources"  # keeps build files out of the user's folder
    shutil.copytree(SOURCES, copy, ignore=_ignored, symlinks=True)
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    _pip(["wheel", *options, str(copy)], BUILD_DEADLINE_S)
    wheels = sorted(folder.glob("kvbench-*.whl"))
    if not wheels:
        raise LaunchError(f"building {SOURCES} created no wheel")
    return wheels[-1]


def _ignored(folder: str, names: list[str]) -> set[str]:
    ignored = {name for name in names if name == "__pycache__" or name.endswith((".pyc", ".so", ".egg-info"))}
    if Path(folder) == SOURCES:
        ignored |= {name for name in names if name.startswith(".") or name in _NOT_BUILT_FROM}
    return ignored


def fetch_dependencies(wheel: Path, extras: Sequence[str], folder: Path) -> Path:
    """Download dependencies of ``wheel`` in the locally installed versions; return the folder."""
    folder.mkdir()
    local = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    limits = folder / "constraints.txt"
    limits.write_text("".join(f"{name}=={version}\n" for name, version in local.items() if name != "kvbench"))
    what = str(wheel) + (f"[{','.join(extras)}]" if extras else "")
    _pip(["wheel", "--constraint", str(limits), "--wheel-dir", str(folder), what], FETCH_DEADLINE_S)
    return folder


def _pip(words: Sequence[str], deadline_s: float) -> None:
    """Run pip. Raises LaunchError with its last output."""
    command = [sys.executable, "-m", "pip", words[0], "--quiet", *words[1:]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"pip {words[0]} took longer than {deadline_s:g} s: {' '.join(command)}") from None
    if done.returncode:
        raise LaunchError(
            f"pip {words[0]} failed here: {(done.stderr or done.stdout).strip()[-400:]}",
            hint=f"by hand: {' '.join(command)}",
        )


def install_commands(host: RemoteHost, wheel: str, extras: Sequence[str] = (), wheels: str = "") -> str:
    """Commands for a host after the wheel, and the tar ``wheels`` if used, are copied."""
    venv, house = in_shell(f"{host.workdir}/venv"), in_shell(f"{host.workdir}/wheels")
    python = in_shell(host.python) if host.python else "python3"
    what = in_shell(wheel) + (shlex.quote(f"[{','.join(extras)}]") if extras else "")
    pip = f"{venv}/bin/python -m pip install --quiet"
    source = unpack = clean = ""
    if wheels:
        source = f" --no-index --find-links {house}"
        unpack = f" && rm -rf {house} && mkdir -p {house} && tar -xf {in_shell(wheels)} -C {house}"
        clean = f" && rm -rf {house} {in_shell(wheels)}"
    return (
        f"{{ [ -x {venv}/bin/python ] || {python} -m venv {venv}; }}{unpack}"
        f" && {pip}{source} --upgrade {what}"
        f" && {pip}{source} --force-reinstall --no-deps {in_shell(wheel)}{clean}"
        f" && {venv}/bin/python -c 'import kvbench; print(kvbench.__version__)'"
    )


def install_on(name: str, host: RemoteHost, ready: Ready, connections: SshConnections) -> str:
    """Copy and install; return the result. Raises LaunchError with manual commands."""
    remote_wheel = connections.put(name, host.ssh, ready.wheel, host.workdir)
    wheels = connections.put(name, host.ssh, ready.wheels, host.workdir) if ready.wheels else ""
    commands = install_commands(host, remote_wheel, ready.extras, wheels)
    status, text = connections.output(name, host.ssh, commands, INSTALL_DEADLINE_S)
    if status:
        hint = f"manually on the host: {commands}"
        if not wheels and ("Could not find a version" in text or "No matching distribution" in text):
            hint = f"if it cannot reach a registry: kvbench hosts install --bring SCENARIO; {hint}"
        raise LaunchError(f"status {status}: {text.strip()[-400:]}", hint=hint)
    version = text.strip().splitlines()[-1]
    if version != __version__:
        raise LaunchError(f"it has kvbench {version} now, and here it is {__version__}", hint="give --wheel")
    commands = f"kvbench {version} in {host.workdir}/venv"
    if host.python:
        commands += f"; now set deployment.hosts.{name}.python to that venv's bin/python, or omit it"
    return commands
