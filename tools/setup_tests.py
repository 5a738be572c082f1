"""Gets what the tests need and kvbench does not: an sshd for hosts as namespaces, nft for faults in a lab.

For ``make test`` and ``make test-ssh``, after ``make setup``; a machine that only measures gets none of it.
Standard library only. Where it may, it installs the Debian packages of the commands that are not here, and
no service is started by that, neither now nor when the machine starts. Where it may not, it says what will
be skipped, and so does the end of the tests. ``KVBENCH_NO_APT_INSTALL=1`` keeps it from installing.
"""

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from setup_base import CHECK_DEADLINE_S, VENV, run, say
from setup_native import apt_install, may_apt_install

COMMANDS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "openssl": "openssl",
}
"""What the tests call → the package that has it on Debian and its relatives."""
ADMIN_DIRECTORIES = os.pathsep.join(("/usr/sbin", "/sbin", "/usr/local/sbin"))
"""Where some of them are and a plain user's PATH often does not lead."""

TRIED = VENV / "kvbench-setup-tests.txt"
"""The packages that could not be installed, so that it is not tried at every ``make test``."""

POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian's packages ask it whether they may start a service; 101 forbids it (invoke-rc.d(8))."""
FORBIDDEN = 101
OURS = "# Written by kvbench's set-up, for as long as it installs packages; it may be deleted."
SERVICES = ("ssh.service", "ssh.socket")
"""What openssh-server has started with the machine, unless that is undone."""


def missing() -> list[str]:
    return [
        name
        for name in COMMANDS
        if shutil.which(name) is None and shutil.which(name, path=ADMIN_DIRECTORIES) is None
    ]


def packages_of(commands: list[str]) -> list[str]:
    return sorted({COMMANDS[name] for name in commands})


@contextlib.contextmanager
def no_service_starts() -> Iterator[bool]:
    """Forbids services that packages would start; yields whether that holds. Another's policy stays."""
    if POLICY.exists() and OURS not in POLICY.read_text(errors="replace"):
        yield run([POLICY, "ssh", "start"], CHECK_DEADLINE_S)[0] == FORBIDDEN
        return
    POLICY.write_text(f"#!/bin/sh\n{OURS}\nexit {FORBIDDEN}\n")
    POLICY.chmod(0o755)
    try:
        yield True
    finally:
        POLICY.unlink(missing_ok=True)


def install(packages: list[str]) -> str | None:
    """Installs them without any service; None, or why it could not be done."""
    with no_service_starts() as nothing_starts:
        if not nothing_starts and "openssh-server" in packages:
            return f"{POLICY} lets packages start services, and no sshd is to run for the tests' sake"
        say(f"installing {', '.join(packages)} with apt-get, for the tests; no service is started")
        problem = apt_install(packages)
        if problem is None and "openssh-server" in packages:
            # The one where there is systemd, whether it runs or not; the other where there is none.
            run(["systemctl", "disable", *SERVICES], CHECK_DEADLINE_S)
            run(["update-rc.d", "ssh", "disable"], CHECK_DEADLINE_S)
    return problem


def set_up(force: bool) -> None:
    commands = missing()
    if not commands:
        TRIED.unlink(missing_ok=True)
        return
    packages = packages_of(commands)
    if not may_apt_install():
        problem = "only root may install packages, with apt-get and without KVBENCH_NO_APT_INSTALL"
    elif not force and TRIED.exists() and TRIED.read_text().split() == packages:
        problem = "an earlier make test could not install it"
    else:
        problem = install(packages) or ""
        commands = missing()
        if not commands:
            return
        TRIED.write_text("\n".join(packages) + "\n")
    say(f"tests that need {', '.join(commands)} will be skipped" + (f": {problem}" if problem else ""))
    say(f"  to fix it: apt-get install {' '.join(packages_of(commands))}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Get what the tests need and kvbench does not.")
    parser.add_argument("--force", action="store_true", help="try again what could not be installed")
    set_up(parser.parse_args().force)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("set-up interrupted; starting it again is safe")
