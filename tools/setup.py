"""Sets kvbench up in .venv: the packages, and as many native transfer libraries as this machine can have.

Standard library only, run by any Python 3.10 or newer: ``python3 tools/setup.py [--force]``. Doing it
twice is quick: a stamp in .venv says what was set up, keyed by what decides it. The Python packages
are a must; Mooncake and NIXL are not: what cannot be had is said, with the command that fixes it, and
the set-up ends well.

Environment: ``KVBENCH_NO_APT_INSTALL=1`` keeps it from installing system packages even as root;
``KVBENCH_MOONCAKE=cuda|non-cuda|none`` overrides the choice of the Mooncake wheel.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from typing import Any

if sys.version_info < (3, 10):  # noqa: UP036 - saying so on an older one is the purpose
    sys.exit(
        f"set-up failed: kvbench needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}.\n"
        "  Name a newer one: make setup PYTHON=python3.12"
    )

from setup_base import CHECK_DEADLINE_S, LOG, PYTHON, ROOT, VENV, SetupError, pip, run, say, tail
from setup_native import apt_install, install_mooncake, install_nixl, may_apt_install, wanted_mooncake

STAMP = VENV / "kvbench-setup.json"
VENV_DEADLINE_S = 300.0

# The build's own needs; installed first and used without isolation, so that they are pinned too.
BUILD_PACKAGES = ("setuptools",)
COMPILED = tuple(
    ROOT / "kvbench" / name for name in ("processes/loadgen/sockets", "processes/http1", "core/search/replay")
)

Connectors = dict[str, dict[str, str]]
"""Connector name → status, detail and fix, as kvbench.planning.doctor.doctor reports them."""


def stamp_key() -> str:
    digest = hashlib.sha256()
    # Not setup_vllm.py: the CPU lab has an environment and a stamp of its own.
    scripts = [ROOT / "tools" / name for name in ("setup.py", "setup_base.py", "setup_native.py")]
    sources = [path for folder in COMPILED for path in sorted(folder.glob("*.c"))]
    for path in [ROOT / "pyproject.toml", ROOT / "constraints.txt", *scripts, *sources]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    # The folder, because an editable installation points to it.
    digest.update(f"{venv_version()} {ROOT} {wanted_mooncake()}".encode())
    return digest.hexdigest()


def venv_version() -> str:
    """The version of .venv's Python; empty without one."""
    try:
        text = (VENV / "pyvenv.cfg").read_text()
    except OSError:
        return ""
    found = re.search(r"^version\s*=\s*(\S+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def read_stamp() -> dict[str, Any]:
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(found: Connectors) -> None:
    skipped = [name for name, check in found.items() if check["status"] != "ok"]
    STAMP.write_text(json.dumps({"key": stamp_key(), "skipped": skipped}) + "\n")


def make_venv() -> None:
    """Makes .venv with pip in it, unless there is one that works."""
    if PYTHON.exists() and run([PYTHON, "-m", "pip", "--version"], CHECK_DEADLINE_S)[0] == 0:
        ours = ".".join(map(str, sys.version_info[:2]))
        if not venv_version().startswith(f"{ours}."):
            say(f"keeping .venv with its Python {venv_version()} (`make clean` first to have {ours})")
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    if run([sys.executable, "-c", "import ensurepip, venv"], CHECK_DEADLINE_S)[0]:
        make_venv_without_ensurepip()
        return
    status, output = run([sys.executable, "-m", "venv", "--clear", VENV], VENV_DEADLINE_S)
    if status:
        raise SetupError(f"{sys.executable} could not make {VENV}:\n{tail(output)}")


def make_venv_without_ensurepip() -> None:
    """Debian's Python comes without ensurepip: add its package where one may, else borrow its pip."""
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    make = [sys.executable, "-m", "venv", "--clear", VENV]
    if may_apt_install():
        say(f"installing {package} with apt-get")
        if apt_install([package]) is None and run(make, VENV_DEADLINE_S)[0] == 0:
            return
    borrow = [sys.executable, "-m", "pip", "--python", PYTHON, "install", "pip"]
    if any(run(step, VENV_DEADLINE_S)[0] for step in ([*make, "--without-pip"], borrow)):
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment with pip in it: it lacks ensurepip.\n"
            f"  Install that part, then try again: apt-get install {package}"
        )


def dev_packages() -> list[str]:
    code = (
        "import json\n"
        "try: import tomllib as toml\n"
        "except ImportError: import pip._vendor.tomli as toml\n"
        "print(json.dumps(toml.load(open('pyproject.toml', 'rb'))['dependency-groups']['dev']))"
    )
    status, output = run([PYTHON, "-c", code], CHECK_DEADLINE_S)
    if status:
        raise SetupError(f"could not read the dev group of {ROOT / 'pyproject.toml'}:\n{tail(output)}")
    return [str(name) for name in json.loads(output)]


def install_packages() -> None:
    say("installing kvbench, its Python packages and the development tools")
    # Where nothing can be compiled, one of an earlier source would stay and be used.
    for old in (path for folder in COMPILED for path in folder.glob("*.so")):
        old.unlink()
    for what in (BUILD_PACKAGES, ("--no-build-isolation", "-e", ".", *dev_packages())):
        status, output = pip("install", "-c", "constraints.txt", *what)
        if status:
            raise SetupError(
                f"pip could not install the packages that kvbench needs:\n{tail(output)}\n"
                f"  Is a package registry reachable from here? All that pip said: {LOG}"
            )


def compiled_note() -> str:
    """What to say if the hot paths could not be compiled; empty if they were."""
    names = (
        *("processes.http1._heads", "processes.http1._splice", "processes.loadgen.sockets._reads"),
        "core.search.replay._queues",
    )
    code = "import " + ", ".join(f"kvbench.{name}" for name in names)
    if run([PYTHON, "-c", code], CHECK_DEADLINE_S)[0] == 0:
        return ""
    return (
        "the hot paths were not compiled, so a load generator's worker and a router take half of the load\n"
        "and a search computes for longer between its trials\n"
        f"  to fix it: install a C compiler and Python's headers, then make setup FORCE=1 (details: {LOG})"
    )


def connectors() -> Connectors:
    """What kvbench itself says of each connector: the same as `kvbench doctor`."""
    code = (
        "import dataclasses, json, kvbench.planning.doctor.doctor as doctor\n"
        "print(json.dumps([dataclasses.asdict(check) for check in doctor.connector_checks()]))"
    )
    status, output = run([PYTHON, "-c", code], CHECK_DEADLINE_S * 2)
    if status:
        raise SetupError(f"kvbench is installed but does not work:\n{tail(output)}\n  Details: {LOG}")
    checks = json.loads(output.splitlines()[-1])
    return {check["name"].removeprefix("connector "): check for check in checks}


def report(found: Connectors, causes: dict[str, str | None]) -> None:
    """One line for what works, two for each connector that will be skipped."""
    # Those for vLLM alone need an engine that set-up does not install.
    works = [
        name
        for name, check in found.items()
        if check["status"] == "ok" and not check["detail"].endswith("not emulated")
    ]
    say(f"connectors that work here: {', '.join(works) or 'none'}")
    for name, check in found.items():
        if check["status"] != "ok":
            say(f"connector {name} will be skipped: {causes.get(name) or check['detail']}")
            fix = re.sub(r"^pip ", ".venv/bin/pip ", check["fix"])
            say(f"  to fix it: {fix or 'make setup FORCE=1'}")


def set_up() -> None:
    started = time.monotonic()
    STAMP.unlink(missing_ok=True)
    make_venv()
    install_packages()
    causes = {"mooncake": install_mooncake(), "nixl": install_nixl()}
    found = connectors()
    if note := compiled_note():
        say(note)
    report(found, causes)
    write_stamp(found)
    say(f"done in {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Set kvbench up in .venv.")
    parser.add_argument("--force", action="store_true", help="do every step again")
    force = parser.parse_args().force
    stamp = {} if force or not PYTHON.exists() else read_stamp()
    if stamp.get("key") != stamp_key():
        set_up()
    elif stamp.get("skipped"):  # it may have been fixed since
        found = connectors()
        report(found, {})
        write_stamp(found)
    else:
        say("up to date")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"set-up failed: {error}")
    except KeyboardInterrupt:
        sys.exit("set-up interrupted; starting it again is safe")
