"""The agent's loop: reads frames, writes frames, watches its processes. It never blocks for long. This one
thread starts all processes and lives as long as the agent: the kernel kills them with it
(``launchers/parts/guard.py``). Requests that may take long run in a thread pool. Another thread checks that
processes make progress, and reports a hang as an event."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from kvbench.core.plan.processes import ProcessSpec, nic_env
from kvbench.errors import KvbenchError, LaunchError
from kvbench.files import json_row
from kvbench.launchers.agents.channel import BEAT_S, LOST_S, Lines, error_frame
from kvbench.launchers.local import LocalLauncher
from kvbench.launchers.parts.liveness import STATE_S, Liveness
from kvbench.processes.agent.answers import ANSWERS, hello
from kvbench.processes.agent.jobs import AgentJob, Outbox


class LivenessThread:
    """Watches processes in a thread until ``close``. Reports the first hung one: ``{"event": "hung", "key",
    "what", "fix"}``."""

    def __init__(self, jobs: Sequence[AgentJob], outbox: Outbox) -> None:
        self._jobs = list(jobs)
        self._outbox = outbox
        self._stop = threading.Event()
        self._liveness = Liveness([job.process for job in self._jobs])
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        self._liveness.start()
        try:
            while not self._stop.wait(STATE_S):
                live = {job.process.name: job for job in self._jobs if not job.end_reported}
                found = self._liveness.problem([job.process for job in live.values()])
                if found is not None:
                    process, what, fix = found
                    key = live[process.name].key
                    self._outbox.put({"event": "hung", "key": key, "what": what, "fix": fix})
                    return
        finally:
            self._liveness.close()


TURN_S: Final = 0.1
"""Seconds between two checks of processes and logs; input is read at once."""
READ_BYTES: Final = 65_536
FLUSH_S: Final = 1.0
KILL_S: Final = 3.0
POOL_THREADS: Final = 16

Frame = Mapping[str, Any]


class Agent:
    """Serves the peer behind the file descriptors ``stdin`` and ``stdout`` until it disconnects."""

    def __init__(self, stdin: int, stdout: int, tag: str) -> None:
        self._stdin = stdin
        self._tag = tag
        self._outbox = Outbox(stdout)
        self._lines = Lines()
        self._jobs: dict[str, AgentJob] = {}
        self._launchers: dict[str, LocalLauncher] = {}
        self._samples: dict[str, Any] = {}
        self._watches: dict[str, Any] = {}
        self._folder: Path | None = None
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="answer")
        self._why_ending = ""
        self._last_input_s = self._beaten = time.monotonic()
        self._quick: dict[str, Callable[[Frame], Any]] = {
            "open": self._open,
            "start": self._start,
            "terminate": lambda frame: self._job(frame).process.terminate(),
            "rename": lambda frame: self._job(frame).rename(str(frame["name"])),
            "clock": lambda frame: {"monotonic_s": time.monotonic()},
            "close_stdin": lambda frame: self._job(frame).close_stdin(),
            "write": lambda frame: self._job(frame).write(str(frame["data"])),
            "beat": lambda frame: None,
            "unwatch": self._unwatch,
        }
        self._slow: dict[str, Callable[[Frame], Any]] = {
            "kill": lambda frame: self._job(frame).kill(),
            "watch": self._watch,
            "cpu_s": self._cpu_s,
            "sample": self._sample,
            "sampled": lambda frame: self._samples.pop(str(frame["trial_id"])).taken(),
            "list": lambda frame: {"names": self._extra_files(frame)},
            **{name: self._handler(name) for name in ANSWERS},
        }

    def run(self) -> None:
        """Serve until stdin ends, the peer is silent, or ``end`` is called; stop all processes."""
        self._outbox.put(hello())
        try:
            while not self._why_ending:
                self._turn()
        finally:
            self._clean_up()

    def end(self, why: str) -> None:
        self._why_ending = self._why_ending or why

    # -- the loop -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        live = [job for job in list(self._jobs.values()) if not job.end_reported]
        readable = {} if self._outbox.full else {job.stdout: job for job in live if job.stdout is not None}
        with_input = {job.stdin: job for job in live if job.wants_to_write}
        try:
            ready, writable, _ = select.select([self._stdin, *readable], list(with_input), [], TURN_S)
        except OSError:  # a process was just killed and its pipes closed
            return
        for handle in writable:
            with_input[handle].flush()
        for handle in ready:
            if handle != self._stdin:
                readable[handle].relay()
        if self._stdin in ready:
            self._read_input()
        now = time.monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            if not self._outbox.full:
                self._outbox.put({"event": "beat"})
        if now - self._last_input_s > LOST_S:
            self.end(f"no frame received for {LOST_S:g} s")
        for job in live:
            if not self._outbox.full:
                job.send_log()
            job.look()

    def _read_input(self) -> None:
        try:
            data = os.read(self._stdin, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end("the connection has ended")
            return
        self._last_input_s = time.monotonic()
        for line in self._lines.feed(data):
            if (frame := json_row(line)) is not None:
                self._dispatch(frame)

    def _dispatch(self, frame: Frame) -> None:
        name = str(frame.get("do"))
        if name in self._quick:
            self._answer(frame, self._quick[name])
        elif name == "stop":
            self.end("kvbench requested the stop")
        elif name in self._slow:
            self._pool.submit(self._answer, frame, self._slow[name])
        else:
            self._answer(frame, _unknown)

    def _answer(self, frame: Frame, handler: Callable[[Frame], Any]) -> None:
        number = frame.get("id")
        try:
            answer = handler(frame) or {}
        except KvbenchError as error:
            reply: dict[str, Any] = {"error": error_frame(error)}
        except Exception as error:  # no error may end the agent, and the caller waits for an answer
            reply = {"error": {"kind": "LaunchError", "message": f"{type(error).__name__}: {error}"}}
        else:
            reply = {"answer": answer}
        if number is not None:
            self._outbox.put({"id": number, **reply})

    # -- requests ---------------------------------------------------------------------------

    @property
    def _root(self) -> Path:
        if self._folder is None:
            raise LaunchError("the agent has no working folder yet: send `open` first")
        return self._folder

    def _handler(self, name: str) -> Callable[[Frame], Any]:
        return lambda frame: ANSWERS[name](self._root, frame)

    def _open(self, frame: Frame) -> dict[str, Any]:
        """Set the working folder and environment. Must be the first request, once."""
        self._pool.submit(importlib.import_module, "kvbench.hosts.telemetry")  # while engines get ready
        if nics := [str(name) for name in frame.get("nics", ())]:
            from kvbench.hosts.nics.choice import are_rdma

            os.environ.update(nic_env(nics, rdma=are_rdma(nics)))
        os.environ.update({str(name): str(value) for name, value in dict(frame.get("env", {})).items()})
        # A shell started by ssh does not have this Python's environment.
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        base = Path(str(frame["workdir"])).expanduser() if frame.get("workdir") else None
        try:
            if base is not None:
                base.mkdir(parents=True, exist_ok=True)
                os.chdir(base)
            self._folder = Path(tempfile.mkdtemp(prefix="kvbench-far-", dir=base)).absolute()
        except OSError as error:
            raise LaunchError(
                f"cannot work in {base}: {error.strerror}", hint="choose another workdir for this host"
            ) from error
        (self._folder / "files").mkdir()
        return {"folder": str(self._folder), "files": str(self._folder / "files")}

    def _launcher(self, folder: str) -> LocalLauncher:
        name = Path(folder).name or "run"
        if name not in self._launchers:
            self._launchers[name] = LocalLauncher(self._tag, self._logs(name), self._root / "specs" / name)
        return self._launchers[name]

    def _logs(self, folder: str) -> Path:
        return self._root / "logs" / (Path(folder).name or "run")

    def _start(self, frame: Frame) -> dict[str, Any]:
        values = frame["spec"]
        spec = ProcessSpec(
            name=str(values["name"]),
            argv=tuple(values["argv"]),
            env={**values["env"], **frame.get("secrets", {})},
            spec=values["spec"],
            files=values.get("files", {}),
            ready_url=str(values.get("ready_url", "")),
            one_thread=bool(frame.get("one_thread", True)),
            beside=tuple(map(str, frame.get("beside", ()))),
        )
        piped, key = bool(frame.get("piped")), str(frame["key"])
        process = self._launcher(str(frame["folder"])).start(spec, piped=piped)
        self._jobs[key] = AgentJob(key, process, self._outbox, piped=piped)
        return {"pid": process.pid}

    def _job(self, frame: Frame) -> AgentJob:
        job = self._jobs.get(str(frame.get("key")))
        if job is None:
            raise LaunchError(f"no process {frame.get('key')} was started here")
        return job

    def _extra_files(self, frame: Frame) -> list[str]:
        folder = self._logs(str(frame["folder"]))
        return sorted(str(path) for path in folder.glob("*") if path.suffix != ".log" and path.is_file())

    def _sample(self, frame: Frame) -> dict[str, Any]:
        from kvbench.hosts.telemetry import TrialSamples

        pids = {job.process.name: job.process.pid for job in self._jobs.values() if not job.end_reported}
        sample = TrialSamples(
            str(frame["trial_id"]), pids, dict(frame["metrics_urls"]), dict(frame["headers"])
        )
        self._samples[str(frame["trial_id"])] = sample
        return {}

    def _watch(self, frame: Frame) -> None:
        jobs = [self._jobs[key] for key in map(str, frame["keys"]) if key in self._jobs]
        self._watches[str(frame["watch"])] = LivenessThread(jobs, self._outbox)

    def _unwatch(self, frame: Frame) -> None:
        if (watch := self._watches.pop(str(frame["watch"]), None)) is not None:
            watch.close()

    def _cpu_s(self, frame: Frame) -> dict[str, Any]:
        from kvbench.hosts.procfs import cpu_s, family

        pids = [job.process.pid for job in self._jobs.values() if not job.end_reported]
        return {"cpu_s": cpu_s(family(int(frame["pid"]))) if int(frame["pid"]) in pids else None}

    # -- the end ------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        threads = [
            threading.Thread(target=job.kill, daemon=True)
            for job in self._jobs.values()
            if not job.end_reported
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + KILL_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._outbox.put({"event": "end", "why": self._why_ending})
        self._outbox.close(FLUSH_S)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder, ignore_errors=True)


def _unknown(frame: Frame) -> None:
    raise LaunchError(
        f"this agent does not know {frame.get('do')!r}",
        hint="do both hosts have the same version of kvbench?",
    )
