"""A Slurm or Ray cluster of this machine alone, in one folder: ``python -m tools.labs slurm|ray FOLDER``.

It runs until it is interrupted and prints how to use it; ``make test-slurm`` and ``make test-ray`` test on
one. All nodes are this machine: a cluster for function, never for figures.

Slurm: munged, slurmctld and a slurmd for each node. Needs root and Debian's slurmctld, slurmd, slurm-client
and munge (22.05 and later); nothing is installed or started outside of the folder. All nodes have one host
name, one address and one /tmp. Ray: nodes with loopback addresses, in sessions of their own. Ray comes from
the environment of the Python that runs this (.venv-ray).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from kvbench.hosts.procfs import family, stat
from kvbench.launchers.parts.sockets import free_ports

STOP_DEADLINE_S: Final = 10.0
L = TypeVar("L", bound="Lab")


class Lab(ABC):
    """Context manager: the cluster, with ``env`` for whoever joins it."""

    ready_deadline_s: float

    def __init__(self, folder: Path, cpus: int = 2) -> None:
        self.folder = folder
        self._cpus = cpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    @abstractmethod
    def env(self) -> Mapping[str, str]: ...

    @abstractmethod
    def start(self) -> None:
        """Start all nodes and wait until they are ready. Raises RuntimeError with the logs' ends."""

    @abstractmethod
    def stop(self) -> None:
        """End every node, with what it has started. Safe to call twice."""

    def __enter__(self: L) -> L:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, name: str, command: Sequence[str]) -> None:
        env = {**os.environ, **self.env, "COLUMNS": "200"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _await(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.ready_deadline_s
        while not done():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(
                    f"{path.name}: {line}"
                    for path in sorted(self.folder.glob("*.log"))
                    for line in path.read_text(errors="replace").splitlines()[-8:]
                )
                raise RuntimeError(f"waited for {what}; ended: {dead or 'nothing'}\n{logs}")
            time.sleep(0.1)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


# -- Slurm

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "srun", "salloc", "squeue", "scontrol")
PACKAGES: Final = "slurmctld slurmd slurm-client munge"
FEATURES: Final = {"pre0": "prefill", "dec0": "decode"}
"""Node → the feature that a constraint can ask for."""
_MUNGE_FILES: Final = {
    "key-file": "munge.key",
    "socket": "munge.socket",
    "pid-file": "munge.pid",
    "log-file": "munged.log.own",
    "seed-file": "munge.seed",
}
_CONF: Final = """\
ClusterName=kvlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
"""
"""Words of 22.05, all of them known to later releases."""


def problem() -> str:
    """Why there can be no Slurm cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of one's own needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"{', '.join(missing)} not found: apt-get install {PACKAGES}" if missing else ""


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class SlurmLab(Lab):
    ready_deadline_s = 60.0

    @property
    def env(self) -> Mapping[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def start(self) -> None:
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
        for name in FEATURES:
            self._run(name, ["slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf")])
        self._await("all nodes to be idle", self._all_idle)

    def kill_node(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        kill(family(daemon.pid)[1:])
        kill(self._steps_of(name))
        daemon.kill()
        daemon.wait(STOP_DEADLINE_S)

    def call(self, *command: str, timeout_s: float = 30.0) -> str:
        env = {**os.environ, **self.env}
        return subprocess.run(
            command, env=env, check=True, capture_output=True, text=True, timeout=timeout_s
        ).stdout

    def stop(self) -> None:
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.SubprocessError):
                self.call("scancel", "--user=root", timeout_s=5.0)
        daemons, self._daemons = self._daemons, {}
        for name in reversed(daemons):
            pids = family(daemons[name].pid)[1:] + self._steps_of(name)
            daemons[name].terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemons[name].wait(STOP_DEADLINE_S)
            kill(pids)
            daemons[name].kill()
            daemons[name].wait(STOP_DEADLINE_S)

    def _conf(self) -> str:
        control, *ports = free_ports("127.0.0.1", [1] * (1 + len(FEATURES)))
        host = socket.gethostname().split(".")[0]
        lines = [_CONF.format(host=host, port=control, folder=self.folder)]
        for (name, feature), port in zip(FEATURES.items(), ports, strict=True):
            (self.folder / f"spool-{name}").mkdir(exist_ok=True)
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={self._cpus} RealMemory=1000 Feature={feature} State=UNKNOWN\n"
            )
        lines.append(f"PartitionName=lab Nodes={','.join(FEATURES)} Default=YES MaxTime=INFINITE State=UP\n")
        (self.folder / "state").mkdir(exist_ok=True)
        return "".join(lines)

    def _all_idle(self) -> bool:
        try:
            listed = self.call("sinfo", "--noheader", "--Node", "--format=%N %T", timeout_s=10.0)
        except subprocess.SubprocessError:
            return False
        return sorted(listed.split("\n")[:-1]) == sorted(f"{name} idle" for name in FEATURES)

    def _steps_of(self, name: str) -> list[int]:
        """A node's step daemons, which leave slurmd's process tree, with their tasks, which name the node."""
        marker = f"SLURMD_NODENAME={name}\0".encode()
        steps = [family(pid) for pid in step_daemons()]
        return [
            pid
            for step in steps
            if any(marker in _read(child, "environ") for child in step[1:])
            for pid in step
        ]


def step_daemons() -> list[int]:
    return [pid for pid in processes() if _read(pid, "cmdline").startswith(b"slurmstepd")]


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


# -- Ray

OBJECT_STORE_BYTES: Final = 100_000_000


NODES: Final = {"pre0": "prefill", "dec0": "decode"}
"""Node of Ray's → its role: a label, and a custom resource."""


class RayLab(Lab):
    """A Ray cluster. ``address`` is what drivers join."""

    ready_deadline_s = 120.0
    """A head took 8 to 17 s on two busy cores, and failed at Ray's own limit of 60 s at worst."""

    def __init__(self, folder: Path, cpus: int = 2) -> None:
        super().__init__(folder, cpus)
        self._port = 0
        self._token = secrets.token_hex(32)

    @property
    def env(self) -> Mapping[str, str]:
        """Ray listens on all addresses whatever it is given, and runs whatever comes; so it wants a token."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token, "RAY_USAGE_STATS_ENABLED": "0"}

    @property
    def address(self) -> str:
        """The head's. 127.0.0.1 itself is not taken: Ray puts the machine's outer address in its place."""
        return f"127.0.0.2:{self._port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self._port,) = free_ports("127.0.0.2", [1])
        for index, (name, role) in enumerate(NODES.items()):
            self._start(name, role, index)

    def kill_node(self, name: str) -> None:
        _kill_session(self._daemons.pop(name))

    def stop(self) -> None:
        daemons, self._daemons = self._daemons, {}
        for popen in reversed(daemons.values()):
            popen.terminate()
        for popen in daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(STOP_DEADLINE_S)
            _kill_session(popen)

    def _start(self, name: str, role: str, index: int) -> None:
        where = ["--head", f"--port={self._port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        if index:
            where = [f"--address={self.address}"]
        options = [
            f"--node-ip-address=127.0.0.{2 + index}",
            f"--node-name={name}",
            f"--num-cpus={self._cpus}",
            "--num-gpus=0",
            f"--resources={json.dumps({f'{role}_node': 1})}",
            f"--labels=role={role}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
        ]
        self._run(name, [str(Path(sys.executable).with_name("ray")), "start", "--block", *where, *options])
        log = self.folder / f"{name}.log"
        self._await(f"Ray's node {name}", lambda: b"Ray runtime started" in log.read_bytes())


def _kill_session(popen: subprocess.Popen[bytes]) -> None:
    """The process with all that it has started: Ray's daemons have groups of their own, but one session."""
    kill(pid for pid in processes() if (fields := stat(pid)) and int(fields[3]) == popen.pid)
    popen.wait(STOP_DEADLINE_S)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2 or argv[0] not in ("slurm", "ray"):
        print("usage: python -m tools.labs slurm|ray FOLDER", file=sys.stderr)
        return 2
    if argv[0] == "slurm" and (missing := problem()):
        print(missing, file=sys.stderr)
        return 1
    with (SlurmLab if argv[0] == "slurm" else RayLab)(Path(argv[1]).absolute()) as lab:
        print("export " + " ".join(f"{name}={value}" for name, value in lab.env.items()), flush=True)
        if isinstance(lab, RayLab):
            print(f"deployment.ray.address={lab.address}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
