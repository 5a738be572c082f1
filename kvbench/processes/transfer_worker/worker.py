"""One side of a measured transfer: ``python -m kvbench.processes.transfer_worker.worker``.

It exchanges JSON lines over stdin and stdout, also behind a prefix (``ssh host``). First comes the spec:
``role`` ("initiator" or "target"), ``backend``, ``options``, ``layout``, ``memory`` ("host", "cuda"),
``seed``, ``side`` (a number that separates the buffers of one case). The first answer is ``{"ready": {agent,
library, transport, open_s, register_s}}`` or ``{"failed": cause, "log": […]}``. Then each request ``{"n",
"cmd", …}`` has one answer ``{"n", "ok": {…}}`` or ``{"n", "error": cause, "log": […]}``:

- ``connect {peer, deadline_s}`` → ``{peer, connect_s}``; ``reshape {layout}`` → ``{agent}``, null if
  unsupported
- ``fill {generation}``; ``collect {blocks}``; ``offer {blocks}``; ``spoil {block}`` (one bit, to test the
  check)
- ``verify {blocks, source: {side, generation, blocks}}`` → ``{difference}``, empty if all bytes are right
- ``prepare {op, transfers: [{peer, local, remote}]}`` → ``{prepare_s, descriptors, nbytes, repeats}``
- ``release``; ``run {limits, start_at_ns}`` → ``{started_ns, ended_ns, calls, call_ns, cpu_s, transport}``
- ``counters`` → ``{clock_ns, cpu_s, nics, load, host_cpu_s, steal_s, cores}``; ``quit``

Between requests the library makes progress; its output never reaches stdout. End of file ends the process."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil

from kvbench import transfer
from kvbench.errors import KvbenchError, TransferError
from kvbench.hosts import devices
from kvbench.processes.transfer_worker import memory
from kvbench.processes.transfer_worker.measure import Limits, measure, pack_times, sharp_sleeps
from kvbench.transfer.base import Layout, Ticket
from kvbench.transfer.parts.blocks import unpack_ids
from kvbench.transfer.parts.native import NativeLog


def children_cpu_s() -> float:
    """CPU time of this process's descendants, in steps of 10 ms."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            used = child.cpu_times()
        except psutil.Error:
            continue  # the process has just ended
        total += used.user + used.system
    return total


def counters() -> dict[str, Any]:
    """Return clock, CPU time of this process and its children, bytes of each NIC, CPU times of the host."""
    nics = {name: asdict(reading) for name, reading in devices.nic_counters(Path("/")).items()}
    # These are of this network namespace, even if /sys shows another.
    for name, seen in psutil.net_io_counters(pernic=True, nowrap=False).items():
        counters = asdict(devices.NicReading("ip", seen.bytes_sent, seen.bytes_recv, None, name == "lo"))
        nics.setdefault(name, counters)
    host = psutil.cpu_times()
    return {
        "clock_ns": time.perf_counter_ns(),
        "cpu_s": time.process_time() + children_cpu_s(),
        "nics": nics,
        "load": os.getloadavg()[0],
        "host_cpu_s": host.user + host.nice + host.system,
        "steal_s": float(getattr(host, "steal", 0.0)),
        "cores": len(os.sched_getaffinity(0)),
    }


class MeasuredSide:
    """Owns the memory and the endpoint, and answers requests."""

    def __init__(self, spec: Mapping[str, Any], log: NativeLog) -> None:
        self._log = log
        self._backend = transfer.get(str(spec["backend"]))
        options = {"role": str(spec["role"]), **spec["options"]}
        device = 0
        if spec["memory"] == "cuda":
            turn = int(options.pop("gpu_turn", 0))
            device = int(options.setdefault("cuda_device", memory.gpu_of_turn(turn)))
        # The library reads these when loaded; a prefix command may drop the environment.
        os.environ.update(self._backend.env(options))
        self._layout = Layout(**spec["layout"])
        self._content = memory.Content(int(spec["seed"]), int(spec["side"]))
        self._memory = memory.allocate(str(spec["memory"]), self._layout.nbytes, device)
        self._id = os.urandom(8).hex()
        self._tickets: list[Ticket] = []
        began = time.perf_counter()
        self.endpoint = self._backend.open(options)
        self.open_s = time.perf_counter() - began
        self.endpoint.native_log = log.lines
        began = time.perf_counter()
        self.endpoint.register(self._memory.address, self._layout)
        self.register_s = time.perf_counter() - began

    def ready(self) -> dict[str, Any]:
        return {
            "agent": self._agent(),
            "library": self.endpoint.library(),
            "transport": self.endpoint.transport(),
            "open_s": self.open_s,
            "register_s": self.register_s,
            "pid": os.getpid(),
        }

    def _agent(self) -> dict[str, Any]:
        return {
            **self.endpoint.describe(),
            "backend": self._backend.name,
            "id": self._id,
            "layout": self._layout.to_json(),
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a request. Raises KvbenchError, or a library's exception."""
        commands: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "connect": self._connect,
            "reshape": self._reshape,
            "fill": self._fill,
            "collect": self._collect,
            "offer": self._offer,
            "spoil": self._spoil,
            "verify": self._verify,
            "prepare": self._prepare,
            "release": self._release_all,
            "run": self._run,
            "counters": lambda ask: counters(),
        }
        if request["cmd"] not in commands:
            raise TransferError(f"unknown command {request['cmd']!r}")
        return commands[request["cmd"]](request)

    def _collect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.endpoint.collect(unpack_ids(request["blocks"]))
        return {}

    def _offer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.endpoint.offer(unpack_ids(request["blocks"]))
        return {}

    def _release_all(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._release()
        return {}

    def _connect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Connect in a thread, since it may wait for the peer, while the library makes progress here."""
        peer, deadline_s = request["peer"], float(request["deadline_s"])
        errors: list[Exception] = []

        def work() -> None:
            try:
                self.endpoint.connect(peer, deadline_s)
            except Exception as error:
                errors.append(error)

        began = time.perf_counter()
        thread = threading.Thread(target=work, name="connect", daemon=True)
        thread.start()
        thread.join(0.001)
        while thread.is_alive():
            if time.perf_counter() - began > deadline_s:
                raise TransferError(f"no answer from the peer within {deadline_s:g} s")
            self.endpoint.progress()
            thread.join(0.001)
        if errors:
            raise errors[0]
        return {"peer": peer["id"], "connect_s": time.perf_counter() - began}

    def _reshape(self, request: Mapping[str, Any]) -> dict[str, Any]:
        layout = Layout(**request["layout"])
        self._release()
        if layout.nbytes > self._memory.nbytes or not self.endpoint.reshape(layout):
            return {"agent": None}
        self._layout = layout
        return {"agent": self._agent()}

    def _fill(self, request: Mapping[str, Any]) -> dict[str, Any]:
        content = self._content
        self._content = memory.Content(content.seed, content.side, int(request["generation"]))
        memory.fill(self._memory, self._layout, self._content)
        return {}

    def _spoil(self, request: Mapping[str, Any]) -> dict[str, Any]:
        last = self._layout.offset(0, int(request["block"])) + self._layout.block_bytes - 1
        self._memory.put(last, np.bitwise_xor(self._memory.get(last, 1), np.uint8(1)))
        return {}

    def _verify(self, request: Mapping[str, Any]) -> dict[str, Any]:
        source = request["source"]
        content = memory.Content(self._content.seed, int(source["side"]), int(source["generation"]))
        blocks, theirs = unpack_ids(request["blocks"]), unpack_ids(source["blocks"])
        return {"difference": memory.difference(self._memory, self._layout, blocks, content, theirs)}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._release()
        took = []
        for wanted in request["transfers"]:
            local, remote = unpack_ids(wanted["local"]), unpack_ids(wanted["remote"])
            began = time.perf_counter()
            self._tickets.append(self.endpoint.prepare(wanted["peer"], request["op"], local, remote))
            took.append(time.perf_counter() - began)
        first = self._tickets[0]
        repeats = [ticket.repeats for ticket in self._tickets if ticket.repeats is not None]
        return {
            "prepare_s": took,
            "descriptors": first.descriptors,
            "nbytes": first.nbytes,
            "repeats": min(repeats, default=None),
        }

    def _release(self) -> None:
        while self._tickets:
            self.endpoint.release(self._tickets.pop())

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if not self._tickets:
            raise TransferError("nothing is prepared")
        children = children_cpu_s()
        try:
            done = measure(
                self.endpoint, self._tickets, Limits(**request["limits"]), int(request.get("start_at_ns", 0))
            )
        except BaseException:
            self._release()
            raise
        return {
            "started_ns": done.started_ns,
            "ended_ns": done.ended_ns,
            "calls": len(done.call_ns),
            "call_ns": pack_times(done.call_ns),
            "cpu_s": done.cpu_s + max(children_cpu_s() - children, 0.0),
            "transport": self.endpoint.transport(),
        }

    def progress(self) -> None:
        self.endpoint.progress()


LOG_LINES = 8
LAST_WORDS_S = 0.02
"""Delay of a library's last output in the pipe of NativeLog, in seconds."""
END_GRACE_S = 2.0
"""Time for a library to close after end of file, in seconds; then the process exits anyway."""
SPEC_KEYS = {"role", "backend", "options", "layout", "memory", "seed", "side"}


class Requests:
    """Lines of stdin, read by a thread, so that end of file ends the process even if a library hangs."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def _read(self) -> None:
        with os.fdopen(0, "rb", closefd=False) as source:
            for line in source:
                self._lines.put(line)
                os.eventfd_write(self.wake, 1)
        self._lines.put(None)
        os.eventfd_write(self.wake, 1)
        time.sleep(END_GRACE_S)
        os._exit(0)

    def next(self, block: bool) -> bytes | None:
        """Return the next line, None at the end. Raises queue.Empty."""
        return self._lines.get(block=block)


class Conversation:
    """Writes answers to the original stdout, reads requests from stdin, runs the library in between."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        self.log = NativeLog()
        self.requests = Requests()

    def say(self, message: Mapping[str, Any]) -> None:
        """Write one line; a lost reader is noticed at stdin."""
        data = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError:
            return

    def serve(self, worker: MeasuredSide) -> None:
        epoll = select.epoll()
        epoll.register(self.requests.wake, select.EPOLLIN)
        for fd in worker.endpoint.wait_fds():
            epoll.register(fd, select.EPOLLIN)
        pause = worker.endpoint.progress_interval_s
        while True:
            try:
                line = self.requests.next(block=False)
            except queue.Empty:
                # epoll counts in whole milliseconds; select on the epoll set in microseconds.
                select.select([epoll], [], [], pause)
                if any(fd == self.requests.wake for fd, _ in epoll.poll(0)):
                    os.eventfd_read(self.requests.wake)
                worker.progress()
                continue
            if line is None or not self._one(worker, line):
                return

    def _one(self, worker: MeasuredSide, line: bytes) -> bool:
        """Handle one request; an error becomes its answer. False after the last one."""
        number, mark = -1, self.log.mark()
        try:
            request = json.loads(line)
            number = int(request["n"])
            if request["cmd"] == "quit":
                self.say({"n": number, "ok": {}})
                return False
            self.say({"n": number, "ok": worker.answer(request)})
        except Exception as error:
            time.sleep(LAST_WORDS_S)
            self.say({"n": number, "error": cause_of(error), "log": self.log.since(mark)[-LOG_LINES:]})
        return True


def cause_of(error: Exception) -> str:
    return str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}".rstrip(": ")


def main() -> NoReturn:
    # Ctrl-C reaches the whole process group; the coordinator handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    talk = Conversation()
    try:
        spec = json.loads(talk.requests.next(block=True) or b"null")
        if not isinstance(spec, dict) or set(spec) != SPEC_KEYS:
            raise TransferError(f"the spec must have exactly these keys: {', '.join(sorted(SPEC_KEYS))}")
        sharp_sleeps()
        worker = MeasuredSide(spec, talk.log)
        ready = worker.ready()
    except Exception as error:
        time.sleep(LAST_WORDS_S)
        talk.say({"failed": cause_of(error), "log": talk.log.since(0)[-LOG_LINES:]})
        os._exit(1)
    talk.say({"ready": ready})
    talk.serve(worker)
    worker.endpoint.close()
    # Not sys.exit: destructors of native libraries wait for threads that may hang on a dead peer.
    os._exit(0)


if __name__ == "__main__":
    main()
