"""A Slurm cluster of this machine alone: munged, slurmctld and a slurmd for each node, all in one folder.

``python -m tools.slurmlab FOLDER`` runs one until it is interrupted and prints how to use it;
``make test-slurm`` tests on one. Needs root and Debian's slurmctld, slurmd, slurm-client and munge
(22.05 and later); nothing is installed or started outside of the folder. All nodes are this machine, so they
have one host name, one address and one /tmp: a cluster for function, never for figures.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "srun", "salloc", "squeue", "scontrol")
PACKAGES: Final = "slurmctld slurmd slurm-client munge"
READY_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 10.0


@dataclass(frozen=True)
class Node:
    """A node's name, and the features that a constraint can ask for."""

    name: str
    feature: str


NODES: Final = (Node("pre0", "prefill"), Node("dec0", "decode"))


def problem() -> str:
    """Why there can be no such cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of one's own needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"{', '.join(missing)} not found: apt-get install {PACKAGES}" if missing else ""


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as reserved:
        probes = [reserved.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class SlurmLab:
    """Context manager: the cluster, with ``env`` for whoever calls Slurm's commands."""

    def __init__(self, folder: Path, nodes: Sequence[Node] = NODES, cpus: int = 2) -> None:
        self.folder = folder
        self.nodes = tuple(nodes)
        self._cpus = cpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables that make Slurm's commands speak to this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def __enter__(self) -> SlurmLab:
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
        """Start everything and wait until all nodes are idle. Raises RuntimeError with what the logs say."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        (self.folder / "slurm.conf").write_text(self._conf())
        files = [f"--{name}={self.folder / file}" for name, file in _MUNGE_FILES.items()]
        self._run("munged", ["munged", "--foreground", "--force", "--num-threads=2", *files])
        self._await("munged to listen", (self.folder / "munge.socket").exists)
        self._run("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf")])
        for node in self.nodes:
            self.start_node(node.name)
        self._await("all nodes to be idle", self._all_idle)

    def start_node(self, name: str) -> None:
        """Start one node's daemon."""
        self._run(name, ["slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf")])

    def kill_node(self, name: str) -> None:
        """End a node as a power cut does: its daemon, and every step's, and what these have started."""
        daemon = self._daemons.pop(name)
        for pid in _descendants(daemon.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._steps_of(name):
            for each in (*_descendants(pid), pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        daemon.kill()
        daemon.wait(STOP_DEADLINE_S)

    def call(self, *command: str, timeout_s: float = 30.0) -> str:
        """What one of Slurm's commands prints. Raises CalledProcessError."""
        env = {**os.environ, **self.env}
        return subprocess.run(
            command, env=env, check=True, capture_output=True, text=True, timeout=timeout_s
        ).stdout

    def stop(self) -> None:
        """Cancel all jobs and end every daemon, with what it has started. Safe to call twice."""
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.SubprocessError):
                self.call("scancel", "--user=root", timeout_s=5.0)
        daemons, self._daemons = self._daemons, {}
        for name in reversed(daemons):
            pids = _descendants(daemons[name].pid) + self._steps_of(name)
            daemons[name].terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemons[name].wait(STOP_DEADLINE_S)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            daemons[name].kill()
            daemons[name].wait(STOP_DEADLINE_S)

    def _conf(self) -> str:
        """22.05's words, all of them known to later releases."""
        control, *ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().split(".")[0]
        lines = [
            "ClusterName=kvlab",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            "AuthType=auth/munge",
            "CryptoType=crypto/munge",
            f"AuthInfo=socket={self.folder}/munge.socket",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "JobAcctGatherType=jobacct_gather/none",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "KillWait=2",
            "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
        ]
        for node, port in zip(self.nodes, ports, strict=True):
            (self.folder / f"spool-{node.name}").mkdir(exist_ok=True)
            lines.append(
                f"NodeName={node.name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={self._cpus} RealMemory=1000 Feature={node.feature} State=UNKNOWN"
            )
        names = ",".join(node.name for node in self.nodes)
        lines.append(f"PartitionName=lab Nodes={names} Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "state").mkdir(exist_ok=True)
        return "\n".join(lines) + "\n"

    def _run(self, name: str, command: Sequence[str]) -> None:
        env = {**os.environ, **self.env}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _all_idle(self) -> bool:
        try:
            listed = self.call("sinfo", "--noheader", "--Node", "--format=%N %T", timeout_s=10.0)
        except subprocess.SubprocessError:
            return False
        return sorted(listed.split("\n")[:-1]) == sorted(f"{node.name} idle" for node in self.nodes)

    def _await(self, what: str, done: object) -> None:
        assert callable(done)
        deadline = time.monotonic() + READY_DEADLINE_S
        while not done():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(
                    f"{path.name}: {line}"
                    for path in sorted(self.folder.glob("*.log"))
                    for line in path.read_text(errors="replace").splitlines()[-5:]
                )
                raise RuntimeError(f"waited for {what}; ended: {dead or 'nothing'}\n{logs}")
            time.sleep(0.1)

    def _steps_of(self, name: str) -> list[int]:
        """The step daemons of a node, which leave slurmd's process tree, with tasks that name the node."""
        marker = f"SLURMD_NODENAME={name}\0".encode()
        return [pid for pid in step_daemons() if any(marker in _environ(each) for each in _descendants(pid))]


_MUNGE_FILES: Final = {
    "key-file": "munge.key",
    "socket": "munge.socket",
    "pid-file": "munge.pid",
    "log-file": "munged.log.own",
    "seed-file": "munge.seed",
}


def step_daemons() -> list[int]:
    """The daemons of all steps that run on this machine."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if (path / "cmdline").read_bytes().startswith(b"slurmstepd"):
                    found.append(int(path.name))
    return found


def _environ(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _descendants(pid: int) -> list[int]:
    """A process's children and theirs."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def main(argv: Sequence[str]) -> int:
    if missing := problem():
        print(missing, file=sys.stderr)
        return 1
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m tools.slurmlab FOLDER", file=sys.stderr)
        return 2
    with SlurmLab(Path(argv[0]).absolute()) as lab:
        print("export " + " ".join(f"{name}={value}" for name, value in lab.env.items()), flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
