"""One side of a measured transfer: its memory, its endpoint, and the answers to requests (``worker.py``)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvbench import transfer
from kvbench.errors import TransferError
from kvbench.processes.transfer_worker import memory
from kvbench.processes.transfer_worker.measure import Limits, measure, pack_times
from kvbench.transfer.base import Layout, Ticket
from kvbench.transfer.parts.blocks import unpack_ids
from kvbench.transfer.parts.nativelog import NativeLog
from kvbench.transfer.parts.usage import children_cpu_s, counters


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
        # Read by the library when it is loaded; a prefix command may not pass the environment on.
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
        """What the coordinator gets at the start."""
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
        """Do what a request asks for. Raises KvbenchError, or whatever a library raises."""
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
        """In a thread, since it may wait for the peer, while the library makes its progress here."""
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
        """Whatever the library has to do meanwhile."""
        self.endpoint.progress()
