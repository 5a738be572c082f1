"""Hosts as network namespaces: a real sshd each, a net for ssh and a data net that this machine is not on."""

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import LabError
from kvbench.hosts.lab.hosts import may_use_netns, run, tool

PORT = 2222
DEADLINE_S = 15.0
_NET = os.getpid() % 200 + 20


def no_hosts_reason() -> str:
    """Why no such hosts can be made here; empty if they can."""
    if not may_use_netns():
        return "hosts as namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    if sshd() is None or shutil.which("ssh-keygen") is None:
        return "there is no sshd here: apt-get install openssh-server"
    probe = f"kvp{os.getpid() % 100_000}"
    try:
        run([tool("ip"), "link", "add", probe, "type", "bridge"])
        run([tool("ip"), "link", "del", probe])
    except LabError as error:
        return f"no bridge can be made: {error.message}"
    return ""


def sshd() -> str | None:
    """The server's path; sshd starts itself again and wants it whole."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


@dataclass
class Hosts:
    """The hosts that stand, ``a``, ``b``, …; ``folder`` has their keys."""

    folder: Path
    names: Sequence[str]
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """On the net for ssh."""
        return f"10.78.{_NET}.{self.names.index(name) + 1}"

    def data_address(self, name: str) -> str:
        """On the data net, which this machine is not on."""
        return f"10.79.{_NET}.{self.names.index(name) + 1}"

    def namespace(self, name: str) -> str:
        return f"kvbench-ssh{os.getpid()}-{name}"

    @property
    def key(self) -> Path:
        return self.folder / "id"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def section(self, name: str, **more: Any) -> dict[str, Any]:
        """The host in a scenario's ``deployment.hosts``."""
        ssh = {
            "host": self.address(name), "port": PORT, "user": getpass.getuser(), "key": str(self.key),
            "known_hosts": str(self.known_hosts),
        }  # fmt: skip
        return {
            "address": self.data_address(name), "python": sys.executable,
            "workdir": str(self.folder / "work" / name), "ssh": {**ssh, **more.pop("ssh", {})}, **more,
        }  # fmt: skip

    def inside(self, name: str, *words: str) -> str:
        """The output of a command run in a host."""
        return run([tool("ip"), "netns", "exec", self.namespace(name), *words])

    def shape(self, rate: str) -> None:
        """Bound what each host sends on the data net, by a token bucket."""
        for name in self.names:
            where = ["-n", self.namespace(name), "qdisc", "replace", "dev", "data0", "root", "tbf"]
            run([tool("tc"), *where, "rate", rate, "burst", "256kb", "latency", "20ms"])

    def received(self, name: str) -> int:
        """Bytes that came to a host on the data net."""
        links = json.loads(self.inside(name, "ip", "-j", "-s", "link", "show", "data0"))
        return int(links[0]["stats64"]["rx"]["bytes"])

    def cut(self, name: str) -> None:
        """Pull the host's cable to the net for ssh; nobody is told."""
        run([tool("ip"), "-n", self.namespace(name), "link", "set", "ssh0", "down"])

    def heal(self, name: str) -> None:
        run([tool("ip"), "-n", self.namespace(name), "link", "set", "ssh0", "up"])


@contextlib.contextmanager
def standing(folder: Path, names: Sequence[str] = ("a", "b", "c")) -> Iterator[Hosts]:
    """Make hosts and take them away."""
    hosts = Hosts(folder, names)
    ip = tool("ip")
    bridges = [f"kvm{os.getpid() % 1_000_000}", f"kvd{os.getpid() % 1_000_000}"]
    outers: list[str] = []
    keys(hosts)
    try:
        for bridge in bridges:
            run([ip, "link", "add", bridge, "type", "bridge"])
            run([ip, "link", "set", bridge, "up"])
        run([ip, "addr", "add", f"10.78.{_NET}.254/24", "dev", bridges[0]])
        for index, name in enumerate(names):
            inside = hosts.namespace(name)
            run([ip, "netns", "add", inside])
            run([ip, "-n", inside, "link", "set", "lo", "up"])
            for kind, bridge, address in (
                ("ssh0", bridges[0], hosts.address(name)),
                ("data0", bridges[1], hosts.data_address(name)),
            ):
                outer = f"{bridge[:3]}{os.getpid() % 100_000}n{index}"
                outers.append(outer)
                run([ip, "link", "add", outer, "type", "veth", "peer", "name", kind, "netns", inside])
                run([ip, "link", "set", outer, "master", bridge, "up"])
                run([ip, "-n", inside, "addr", "add", f"{address}/24", "dev", kind])
                run([ip, "-n", inside, "link", "set", kind, "up"])
            hosts.servers[name] = start_sshd(hosts, name)
        for name in names:
            wait_listening(hosts.address(name))
        yield hosts
    finally:
        for server in hosts.servers.values():
            server.terminate()
        for server in hosts.servers.values():
            server.wait(DEADLINE_S)
        # A namespace's end is not waited for, and its interfaces with it: the next hosts have the same names.
        for outer in outers:
            with contextlib.suppress(LabError):
                run([ip, "link", "del", outer])
        for name in names:
            with contextlib.suppress(LabError):
                run([ip, "netns", "del", hosts.namespace(name)])
        for bridge in bridges:
            with contextlib.suppress(LabError):
                run([ip, "link", "del", bridge])


def keys(hosts: Hosts) -> None:
    """A key of the user's, one of each host, and the file of known hosts."""
    folder = hosts.folder
    lines = []
    for name in ("id", "stranger", *(f"host-{name}" for name in hosts.names)):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)])
    shutil.copy(folder / "id.pub", folder / "authorized_keys")
    for name in hosts.names:
        public = (folder / f"host-{name}.pub").read_text().split()
        lines.append(f"[{hosts.address(name)}]:{PORT} {public[0]} {public[1]}")
    hosts.known_hosts.write_text("\n".join(lines) + "\n")


def start_sshd(hosts: Hosts, name: str) -> subprocess.Popen[bytes]:
    Path("/run/sshd").mkdir(parents=True, exist_ok=True)  # its empty folder for privilege separation
    config = hosts.folder / f"sshd-{name}.conf"
    config.write_text(
        f"Port {PORT}\n"
        f"ListenAddress {hosts.address(name)}\n"
        f"HostKey {hosts.folder}/host-{name}\n"
        f"AuthorizedKeysFile {hosts.folder}/authorized_keys\n"
        "ClientAliveInterval 1\nClientAliveCountMax 3\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
        f"PidFile none\nSubsystem sftp internal-sftp\n"
    )
    with (hosts.folder / f"sshd-{name}.log").open("wb") as log:
        return subprocess.Popen(
            [tool("ip"), "netns", "exec", hosts.namespace(name), str(sshd()), "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def wait_listening(address: str, port: int = PORT) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
