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
    """Watches processes in its own thread until ``close``. The first hung one is reported: ``{"event":
    "hung", "key", "what", "fix"}``."""

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
LAST_WORDS_S: Final = 1.0
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
        self._heard = self._beaten = time.monotonic()
        self._here: dict[str, Callable[[Frame], Any]] = {
            "open": self._open,
            "start": self._start,
            "terminate": lambda asked: self._job(asked).process.terminate(),
            "rename": lambda asked: self._job(asked).rename(str(asked["name"])),
            "clock": lambda asked: {"monotonic_s": time.monotonic()},
            "close_stdin": lambda asked: self._job(asked).close_stdin(),
            "write": lambda asked: self._job(asked).write(str(asked["data"])),
            "beat": lambda asked: None,
            "unwatch": self._unwatch,
        }
        self._beside: dict[str, Callable[[Frame], Any]] = {
            "kill": lambda asked: self._job(asked).kill(),
            "watch": self._watch,
            "cpu_s": self._cpu_s,
            "sample": self._sample,
            "sampled": lambda asked: self._samples.pop(str(asked["trial_id"])).taken(),
            "list": lambda asked: {"names": self._extra_files(asked)},
            **{name: self._answered(name) for name in ANSWERS},
        }

    def run(self) -> None:
        """Serve until stdin ends, the peer is silent, or ``end`` is called; stop all processes."""
        self._outbox.put(hello())
        try:
            while not self._why_ending:
                self._turn()
        finally:
            self._leave_nothing()

    def end(self, why: str) -> None:
        self._why_ending = self._why_ending or why

    # -- the loop -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        live = [job for job in list(self._jobs.values()) if not job.end_reported]
        talking = {} if self._outbox.full else {job.stdout: job for job in live if job.stdout is not None}
        writing = {job.stdin: job for job in live if job.wants_to_write}
        try:
            ready, writable, _ = select.select([self._stdin, *talking], list(writing), [], TURN_S)
        except OSError:  # a process was just killed and its pipes closed
            return
        for handle in writable:
            writing[handle].flush()
        for handle in ready:
            if handle != self._stdin:
                talking[handle].relay()
        if self._stdin in ready:
            self._hear()
        now = time.monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            if not self._outbox.full:
                self._outbox.put({"event": "beat"})
        if now - self._heard > LOST_S:
            self.end(f"no frame received for {LOST_S:g} s")
        for job in live:
            if not self._outbox.full:
                job.send_log()
            job.look()

    def _hear(self) -> None:
        try:
            data = os.read(self._stdin, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end("the connection has ended")
            return
        self._heard = time.monotonic()
        for line in self._lines.feed(data):
            if (frame := json_row(line)) is not None:
                self._obey(frame)

    def _obey(self, frame: Frame) -> None:
        wanted = str(frame.get("do"))
        if wanted in self._here:
            self._answer(frame, self._here[wanted])
        elif wanted == "stop":
            self.end("kvbench requested the stop")
        elif wanted in self._beside:
            self._pool.submit(self._answer, frame, self._beside[wanted])
        else:
            self._answer(frame, _unknown)

    def _answer(self, frame: Frame, how: Callable[[Frame], Any]) -> None:
        number = frame.get("id")
        try:
            answer = how(frame) or {}
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

    def _answered(self, name: str) -> Callable[[Frame], Any]:
        return lambda asked: ANSWERS[name](self._root, asked)

    def _open(self, asked: Frame) -> dict[str, Any]:
        """Set the working folder and environment. Must be the first request, once."""
        self._pool.submit(importlib.import_module, "kvbench.hosts.telemetry")  # while engines get ready
        if nics := [str(name) for name in asked.get("nics", ())]:
            from kvbench.hosts.nics.choice import are_rdma

            os.environ.update(nic_env(nics, rdma=are_rdma(nics)))
        os.environ.update({str(name): str(value) for name, value in dict(asked.get("env", {})).items()})
        # A shell started by ssh does not have this Python's environment.
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        base = Path(str(asked["workdir"])).expanduser() if asked.get("workdir") else None
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

    def _start(self, asked: Frame) -> dict[str, Any]:
        given = asked["spec"]
        spec = ProcessSpec(
            name=str(given["name"]),
            argv=tuple(given["argv"]),
            env={**given["env"], **asked.get("secrets", {})},
            spec=given["spec"],
            files=given.get("files", {}),
            ready_url=str(given.get("ready_url", "")),
            one_thread=bool(asked.get("one_thread", True)),
            beside=tuple(map(str, asked.get("beside", ()))),
        )
        piped, key = bool(asked.get("piped")), str(asked["key"])
        process = self._launcher(str(asked["folder"])).start(spec, piped=piped)
        self._jobs[key] = AgentJob(key, process, self._outbox, piped=piped)
        return {"pid": process.pid}

    def _job(self, asked: Frame) -> AgentJob:
        job = self._jobs.get(str(asked.get("key")))
        if job is None:
            raise LaunchError(f"no process {asked.get('key')} was started here")
        return job

    def _extra_files(self, asked: Frame) -> list[str]:
        folder = self._logs(str(asked["folder"]))
        return sorted(str(path) for path in folder.glob("*") if path.suffix != ".log" and path.is_file())

    def _sample(self, asked: Frame) -> dict[str, Any]:
        from kvbench.hosts.telemetry import TrialSamples

        pids = {job.process.name: job.process.pid for job in self._jobs.values() if not job.end_reported}
        sample = TrialSamples(
            str(asked["trial_id"]), pids, dict(asked["metrics_urls"]), dict(asked["headers"])
        )
        self._samples[str(asked["trial_id"])] = sample
        return {}

    def _watch(self, asked: Frame) -> None:
        jobs = [self._jobs[key] for key in map(str, asked["keys"]) if key in self._jobs]
        self._watches[str(asked["watch"])] = LivenessThread(jobs, self._outbox)

    def _unwatch(self, asked: Frame) -> None:
        if (watch := self._watches.pop(str(asked["watch"]), None)) is not None:
            watch.close()

    def _cpu_s(self, asked: Frame) -> dict[str, Any]:
        from kvbench.hosts.procfs import cpu_s, family

        pids = [job.process.pid for job in self._jobs.values() if not job.end_reported]
        return {"cpu_s": cpu_s(family(int(asked["pid"]))) if int(asked["pid"]) in pids else None}

    # -- the end ------------------------------------------------------------------------------------

    def _leave_nothing(self) -> None:
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
        self._outbox.close(LAST_WORDS_S)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder, ignore_errors=True)


def _unknown(asked: Frame) -> None:
    raise LaunchError(
        f"this agent does not know {asked.get('do')!r}",
        hint="do both hosts have the same version of kvbench?",
    )
