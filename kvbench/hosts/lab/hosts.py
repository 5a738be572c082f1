"""The two hosts of a lab: how they are made, entered and left, with and without root. As root a host is a
named network namespace of ``ip netns``. Without root it is a namespace inside a user namespace, kept by a
sleeping process, its holder, and entered by ``nsenter``."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvbench.errors import LabError
from kvbench.hosts.devices import children, read
from kvbench.hosts.lab.layout import LabPlan, Side
from kvbench.hosts.procfs import stat

TOOL_DEADLINE_S: Final = 15.0
HOLDER_DEADLINE_S: Final = 10.0
GRACE_S: Final = 2.0
"""Time for a process inside a lab to end after SIGTERM, in seconds."""
POLL_S: Final = 0.02
NETNS_FOLDER: Final = Path("/run/netns")

PACKAGES: Final = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
_ADMIN_DIRECTORIES: Final = ("/usr/sbin", "/sbin", "/usr/local/sbin")
"""Folders of tools that a plain user's PATH often lacks."""
_NET_ADMIN, _SYS_ADMIN = 12, 21  # bit numbers of capabilities(7)

# UCX and NCCL list NICs from /sys/class/net, which shows the namespace in which it was mounted.
_FRESH_SYSFS: Final = 'mount -t sysfs sysfs /sys || exit 125; exec "$@"'
# Exits if its parent ends before "stay", so that a killed set-up leaves no holder.
_HOLDER: Final = "echo ready; read word || exit 0; exec sleep infinity </dev/null >/dev/null 2>&1"


def tool(name: str) -> str:
    """Return the path of a system tool. Raises LabError that names the package."""
    path = shutil.which(name) or shutil.which(name, path=os.pathsep.join(_ADMIN_DIRECTORIES))
    if path is None:
        raise LabError(
            f"the lab needs the command {name!r}, which is not installed",
            hint=f"install the package {PACKAGES.get(name, name)}",
        )
    return path


def may_use_netns(root: Path = Path("/")) -> bool:
    """Whether this process may make named namespaces: root with CAP_NET_ADMIN and CAP_SYS_ADMIN."""
    status = read(root / "proc/self/status") or ""
    bits = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    wanted = 1 << _NET_ADMIN | 1 << _SYS_ADMIN
    return os.geteuid() == 0 and bits & wanted == wanted


@dataclass(frozen=True)
class LabProcess:
    """A process, distinguished from a later one with the same number."""

    pid: int
    started: int
    """Clock ticks after boot."""

    @classmethod
    def of(cls, pid: int) -> LabProcess:
        return cls(pid, _start_ticks(pid) or 0)

    @property
    def alive(self) -> bool:
        return self.started > 0 and _start_ticks(self.pid) == self.started


def _start_ticks(pid: int) -> int | None:
    fields = stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class Host:
    side: Side
    namespace: str
    """Name for ``ip netns``; without root, only a name."""
    holder: LabProcess | None = None
    """Process that keeps the namespace without root; null as root."""
    own_sysfs: bool = True
    """Whether commands see this host's NICs in /sys/class/net; some containers forbid it without root."""

    @property
    def exists(self) -> bool:
        return self.holder.alive if self.holder else (NETNS_FOLDER / self.namespace).exists()

    @property
    def reference(self) -> str:
        """Name for ``ip link … netns``."""
        return str(self.holder.pid) if self.holder else self.namespace

    def prefix(self) -> list[str]:
        """Return the command prefix that runs a command in this host, with its own /sys/class/net."""
        if self.holder is None:
            return [tool("ip"), "netns", "exec", self.namespace]
        enter = self._inside(self.holder)
        if not self.own_sysfs:
            return enter
        return [*enter, tool("unshare"), "--mount", "sh", "-c", _FRESH_SYSFS, "kvbench-lab"]

    def run(self, name: str, *words: str, lines: Sequence[str] | None = None) -> str:
        """Run a tool in this host with ``lines`` as input; return its output. Raises LabError."""
        enter = [tool("ip"), "netns", "exec", self.namespace]
        if self.holder is not None:
            enter = self._inside(self.holder)
        return run([*enter, tool(name), *words], lines)

    @staticmethod
    def _inside(holder: LabProcess) -> list[str]:
        if not holder.alive:
            raise LabError(
                "the process that keeps this lab has ended", hint="kvbench lab down, then up again"
            )
        return [tool("nsenter"), f"--target={holder.pid}", "--user", "--net", "--preserve-credentials"]

    def inode(self) -> int | None:
        """Number of the network namespace, to find its processes."""
        place = Path(f"/proc/{self.holder.pid}/ns/net") if self.holder else NETNS_FOLDER / self.namespace
        try:
            return place.stat().st_ino
        except OSError:
            return None

    def processes(self) -> list[int]:
        """Return its processes, without its holder and this process."""
        inode = self.inode()
        spared = {os.getpid(), self.holder.pid if self.holder else 0}
        return [] if inode is None else [pid for pid in _pids_in(inode) if pid not in spared]

    def remove(self) -> None:
        """End its processes and remove it with its NICs; no action if it does not exist."""
        _end(self.processes())
        if self.holder is not None:
            _end([self.holder.pid] if self.holder.alive else [])
            with contextlib.suppress(ChildProcessError):  # another process's child, or already waited for
                os.waitpid(self.holder.pid, os.WNOHANG)
        elif self.exists:
            run([tool("ip"), "netns", "del", self.namespace])

    def to_json(self) -> dict[str, Any]:
        holder = None if self.holder is None else [self.holder.pid, self.holder.started]
        return {"side": self.side, "namespace": self.namespace, "holder": holder, "own_sysfs": self.own_sysfs}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Host:
        holder = LabProcess(*data["holder"]) if data["holder"] else None
        return cls(data["side"], data["namespace"], holder, data["own_sysfs"])


def _pids_in(inode: int) -> list[int]:
    found = []
    for folder in children(Path("/proc")):
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # ended, or another user's
                if (folder / "ns/net").stat().st_ino == inode:
                    found.append(int(folder.name))
    return found


def _end(pids: Iterable[int]) -> None:
    """Send SIGTERM, wait, send SIGKILL, wait."""
    left = [LabProcess.of(pid) for pid in pids]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            if process.alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, number)
        deadline = time.monotonic() + GRACE_S
        while (left := [process for process in left if process.alive]) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def run(command: Sequence[str], lines: Sequence[str] | None = None) -> str:
    """Run a command with ``lines`` as input; return its output. Raises LabError with its error text."""
    text = None if lines is None else "".join(f"{line}\n" for line in lines)
    stdin: dict[str, Any] = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            list(command), capture_output=True, text=True, timeout=TOOL_DEADLINE_S, check=False, **stdin
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(command)} did not end within {TOOL_DEADLINE_S:g} s") from None
    except OSError as error:
        raise LabError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        reason = " | ".join(done.stderr.strip().splitlines()[:3]) or f"exit code {done.returncode}"
        raise LabError(f"{' '.join(command)}: {reason}")
    return done.stdout


# Making hosts


def make_named(plan: LabPlan, side: Side) -> Host:
    """Make a namespace of ``ip netns``. Raises LabError with advice if not allowed."""
    host = Host(side, plan.namespace(side))
    try:
        run([tool("ip"), "netns", "add", host.namespace])
    except LabError as error:
        raise LabError(error.message, hint="the machine must allow namespaces: " + remedy()) from error
    return host


class Holders:
    """The hosts of a lab without root, made by processes that end with this one until ``stay`` is called."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def make(self, plan: LabPlan, side: Side) -> Host:
        """Make a namespace; the second one in the user namespace of the first. Raises LabError."""
        shell = ["sh", "-c", _HOLDER]
        if self._started:
            first = f"--target={self._started[0].pid}"
            command = [tool("nsenter"), first, "--user", "--preserve-credentials"]
            command += [tool("unshare"), "--net", "--mount", *shell]
        else:
            command = [tool("unshare"), "--user", "--map-root-user", "--net", "--mount", *shell]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self._started.append(process)
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], HOLDER_DEADLINE_S)
        answer = process.stdout.readline().strip() if readable else ""
        if answer != "ready":
            process.kill()
            _, complaint = process.communicate(timeout=HOLDER_DEADLINE_S)
            words = " | ".join(complaint.strip().splitlines()[:2]) or "it did not answer"
            raise LabError(f"this user may not make a network namespace: {words}", hint=remedy())
        return Host(side, plan.namespace(side), LabProcess.of(process.pid))

    def stay(self) -> None:
        """Let the hosts outlive this process: only ``Host.remove`` ends them."""
        for process in self._started:
            assert process.stdin is not None
            process.stdin.write("stay\n")
            self._let_go(process)
            process.returncode = 0  # it keeps running: do not wait, and avoid the warning about that

    def close(self) -> None:
        """Close the pipes of ended and ending holders, and wait for them."""
        for process in self._started:
            self._let_go(process)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(GRACE_S)
        self._started = []

    @staticmethod
    def _let_go(process: subprocess.Popen[str]) -> None:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def fresh_sysfs_problem(host: Host) -> str:
    """Return why commands in this host cannot see its NICs in /sys/class/net; empty if they can."""
    try:
        run([*host.prefix(), "true"])
    except LabError as error:
        return error.message
    return ""


def remedy(root: Path = Path("/")) -> str:
    """Return advice for this user's missing permission, by the kernel's settings."""
    settings = {
        "user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=10000"),
        "kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        "kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for name, (value, command) in settings.items():
        if read(root / "proc/sys" / name) == value:
            return f"run as root: {command}"
    return "run as root; in a container start it with --privileged, or with --cap-add NET_ADMIN and SYS_ADMIN"
