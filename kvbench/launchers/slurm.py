"""Hosts from Slurm: one job per run, and a step per node with its stdin and stdout as a channel.

The job is new, or existing (``deployment.slurm.job``, or kvbench runs inside it). A new job is owned by
``launchers/parts/slurm_guard.py``, which cancels it when kvbench is gone; steps end with their agents, which
end with their stdin."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvbench.core.plan.processes import RUN_TAG_ENV
from kvbench.core.scenario.hosts import SlurmOptions
from kvbench.errors import LaunchError
from kvbench.launchers.agents.channel import PipeChannel
from kvbench.launchers.parts.slurm_words import (
    ENDED,
    SQUEUE_FORMAT,
    Component,
    Queued,
    dropped_env,
    groups_of,
    parse_job,
    parse_pairs,
    parse_squeue,
    placed,
    salloc_command,
    srun_command,
)

_GUARD: Final = str(Path(__file__).parent / "parts" / "slurm_guard.py")
CALL_DEADLINE_S: Final = 30.0
"""Longest Slurm command, in seconds; without a controller they wait some 10 s."""
POLL_S: Final = 0.5
POLL_MOST_S: Final = 15.0
SILENT_S: Final = 120.0
SETTLE_S: Final = 6.0
END_DEADLINE_S: Final = 45.0
TAIL_LINES: Final = 8
PROGRAMS: Final = ("salloc", "srun", "scancel", "squeue", "scontrol")


def problem() -> str:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"Slurm's {', '.join(missing)} cannot be found on this machine" if missing else ""


class SlurmJob:
    """Context manager: the allocation of one run, and its nodes by role. ``notify`` gets each new reason to
    wait. Raises LaunchError without Slurm, or if the job is refused, ends or waits too long;
    KeyboardInterrupt cancels it."""

    def __init__(
        self,
        options: SlurmOptions,
        instances: tuple[int, int],
        run_tag: str,
        notify: Callable[[str], None] = lambda words: None,
        *,
        loadgen_only: bool = False,
    ) -> None:
        self.hosts: Mapping[str, tuple[str, ...]] = {}
        self._options = options
        self._instances = instances
        self._run_tag = run_tag
        self._notify = notify
        self._groups = groups_of(options, loadgen_only=loadgen_only)
        self._name = f"kvbench-{run_tag}"
        self._guard: subprocess.Popen[bytes] | None = None
        self._stderr_lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._listener: threading.Thread | None = None
        self._components: list[Component] = []
        self._of_node: dict[str, Component] = {}

    def __enter__(self) -> SlurmJob:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def job_id(self) -> str:
        """Job number; of a heterogeneous job its first component's."""
        return self._components[0].job_id if self._components else ""

    def open(self) -> None:
        """Create the allocation, or use the existing one."""
        if missing := problem():
            raise LaunchError(
                missing, hint="start kvbench on a login node, or choose deployment.launcher: ssh"
            )
        given = self._options.job or os.environ.get("SLURM_JOB_ID", "")
        if given:
            # Inside a component, the number of the whole is another variable.
            self._components = self._parts(self._options.job or os.environ.get("SLURM_HET_JOB_ID_0") or given)
            self._require_running()
        else:
            self._components = self._allocate()
        self._place()

    def channel(self, node: str, command: str) -> PipeChannel:
        """Start a step with a shell command on a node. Raises LaunchError if srun cannot start."""
        component = self._of_node.get(node)
        if component is None:
            raise LaunchError(f"the Slurm job {self.job_id} has no node {node}", hint="see `squeue --me`")
        step = srun_command(component, node, (*self._options.env, RUN_TAG_ENV), command)
        return _Step(node, step, self._run_tag, lambda: self._state_words(component))

    def address(self, node: str) -> str:
        """Address of a node in Slurm, resolved to an IP address unless it is this node's loopback."""
        pairs = parse_pairs(_output_of(["scontrol", "--oneliner", "show", "node", node]).split("\n")[0])
        name = pairs.get("NodeAddr") or node
        with contextlib.suppress(OSError):
            found = socket.gethostbyname(name)
            return name if found.startswith("127.") else found
        return name

    def close(self) -> None:
        """Release the allocation, unless it existed before. May be called twice."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        with contextlib.suppress(OSError):
            guard.stdin.close()
        try:
            guard.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._notify(f"Slurm does not answer; if the job is still there: scancel --name={self._name}")
            guard.kill()
            guard.wait()
        if self._listener is not None:
            self._listener.join(2.0)

    # -- a job of kvbench ---------------------------------------------------------------------------

    def _allocate(self) -> list[Component]:
        command = salloc_command(self._options, self._groups, self._name)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, self._name, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, args=(self._guard,), daemon=True)
        self._listener.start()
        began = answered_s = time.monotonic()
        last = ""
        while True:
            now = time.monotonic()
            try:
                queued, answered_s = self._queued(), now
            except LaunchError:  # a restarting controller does not respond for a while
                if now - answered_s > SILENT_S:
                    raise
                queued = []
            if queued and all(job.state == "RUNNING" for job in queued):
                return self._parts(queued[0].job_id.split("+")[0])
            pending = next((job for job in queued if job.state != "RUNNING"), None)
            if pending is not None and pending.words() != last:
                last = pending.words()
                self._notify(last)
            if self._guard.poll() is not None:
                self._listener.join(2.0)
                raise LaunchError(
                    f"Slurm grants no job: {' | '.join(self._stderr_lines) or 'salloc ended'}",
                    hint="check the options under deployment.slurm; `sinfo` shows partitions and features",
                )
            if now - began > self._options.pending_timeout_s:
                raise LaunchError(
                    f"after {self._options.pending_timeout_s:g} s {last or 'Slurm lists no job'}; "
                    "it is cancelled",
                    hint="raise deployment.slurm.pending_timeout_s, or request less",
                )
            # A long wait polls rarely, to spare the controller.
            time.sleep(min(POLL_S + (now - began) / 20, POLL_MOST_S))

    def _listen(self, guard: subprocess.Popen[bytes]) -> None:
        assert guard.stderr is not None
        with guard.stderr as pipe:
            for line in pipe:
                if text := line.decode("utf-8", "replace").strip():
                    self._stderr_lines.append(text.removeprefix("salloc: ").removeprefix("error: "))

    def _queued(self) -> list[Queued]:
        selection = [f"--name={self._name}", f"--user={os.getuid()}", f"--format={SQUEUE_FORMAT}"]
        return parse_squeue(_output_of(["squeue", "--noheader", *selection]))

    # -- its nodes ----------------------------------------------------------------------------------

    def _parts(self, job_id: str) -> list[Component]:
        return parse_job(_output_of(["scontrol", "--oneliner", "show", "job", job_id]))

    def _require_running(self) -> None:
        for part in self._components:
            if part.state != "RUNNING":
                raise LaunchError(
                    f"{part.words()}: it cannot be measured on", hint="name another in deployment.slurm.job"
                )

    def _place(self) -> None:
        nodes = []
        for component in self._components:
            names = _output_of(["scontrol", "show", "hostnames", component.node_list]).split()
            nodes.append(names)
            self._of_node |= dict.fromkeys(names, component)
        groups = self._groups
        if len(nodes) != len(groups):
            if len(groups) > 1 and len(nodes) == 1:
                groups, nodes = groups_of(SlurmOptions()), nodes  # a plain job is dealt out
            else:
                raise LaunchError(
                    f"the Slurm job {self.job_id} has {len(nodes)} parts, and the scenario requires "
                    f"{len(groups)}: {'; '.join(' and '.join(group.roles) for group in groups)}",
                    hint="give nodes per role under deployment.slurm to match the job's parts",
                )
        self.hosts = placed(groups, nodes, *self._instances)

    def _state_words(self, component: Component) -> str:
        """State of an ended job, once Slurm has completed it."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                shown = self._parts(component.job_id)
            except LaunchError as error:
                return error.message
            found = next((candidate for candidate in shown if candidate.job_id == component.job_id), shown[0])
            if found.state != "COMPLETING" or time.monotonic() > deadline:
                return found.words() if found.state in ENDED else ""
            time.sleep(POLL_S)


class _Step(PipeChannel):
    """Channel over srun, which reports the job's state at its end."""

    def __init__(self, node: str, command: Sequence[str], run_tag: str, state: Callable[[], str]) -> None:
        self._state = state
        unset = [word for name in dropped_env(os.environ) for word in ("-u", name)]
        super().__init__(node, ["env", *unset, *command], {RUN_TAG_ENV: run_tag})

    def _why(self) -> str:
        words = super()._why()
        state = self._state()
        return f"{words}; {state}" if state else words


def _output_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CALL_DEADLINE_S, text=True
        )
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]}: {error.strerror}", hint=" ".join(command)) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"Slurm has not answered `{' '.join(command)}` for {CALL_DEADLINE_S:g} s",
            hint="check whether its controller runs: scontrol ping",
        ) from error
    if done.returncode:
        raise LaunchError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}",
            hint="check whether Slurm's controller runs: scontrol ping",
        )
    return done.stdout
