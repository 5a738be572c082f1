"""The process that hosts one endpoint: ``python -m kvbench.processes.transfer_worker.child SPEC``.

SPEC is JSON: ``backend``, ``options``, ``layout``, ``pool_fd`` (a memory file of the layout's size),
``control_fd`` (a stream socket) and ``parent_pid``. Over the socket go JSON lines. The first one comes from
the child: ``{"ready": {agent, library, transport}}`` or ``{"failed": …}``. Requests carry an ``n`` that the
answer repeats; answers have ``ok`` or ``error``:

- ``{"n", "cmd": "connect", "peer": {…}, "deadline_s"}`` → ``{"peer": id}``
- ``{"n", "cmd": "transfer", "peer": id, "op", "local", "remote", "deadline_s"}`` → TransferResult
- ``{"n", "cmd": "forget", "peer": id}`` → ``{}``
- ``{"n", "cmd": "collect" or "offer", "blocks"}`` → ``{}``

The process ends at end of file. Imports are kept light, since each engine waits for it to be ready."""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from kvbench import transfer
from kvbench.errors import KvbenchError, MissingLibraryError
from kvbench.processes.transfer_worker.loop import LOG_LINES_IN_ERRORS, WorkerLoop
from kvbench.transfer.base import Backend, Endpoint, Layout, Op, Ticket
from kvbench.transfer.parts.native import NativeLog

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel end this process when its parent ends, whatever the library is doing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def mark_ranges(endpoint: Endpoint) -> None:
    """Show each transfer to profilers as an NVTX range, if the package nvtx is installed."""
    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ImportError:
        return
    prepare, start, poll, release = endpoint.prepare, endpoint.start, endpoint.poll, endpoint.release
    names: dict[int, str] = {}
    ranges: dict[int, Any] = {}

    def end(ticket: Ticket) -> None:
        if (begun := ranges.pop(id(ticket), None)) is not None:
            nvtx.end_range(begun)

    def marked_prepare(peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        ticket = prepare(peer, op, local, remote)
        names[id(ticket)] = f"KV {op}, {len(local)} blocks"
        return ticket

    def marked_start(ticket: Ticket) -> None:
        ranges[id(ticket)] = nvtx.start_range(message=names[id(ticket)], domain="kvbench")
        start(ticket)

    def marked_poll(ticket: Ticket) -> bool:
        done = poll(ticket)
        if done:
            end(ticket)
        return done

    def marked_release(ticket: Ticket) -> None:
        end(ticket)
        names.pop(id(ticket), None)
        release(ticket)

    marked = cast(Any, endpoint)
    marked.prepare, marked.start = marked_prepare, marked_start
    marked.poll, marked.release = marked_poll, marked_release


def open_endpoint(backend: Backend, options: dict[str, Any]) -> Endpoint:
    """Open the endpoint; with ``memory: cuda`` in the first GPU that CUDA shows."""
    if options.get("memory", "host") == "host":
        return backend.open(options)
    from kvbench.processes.transfer_worker.memory import StagedEndpoint, gpu_of_turn

    return StagedEndpoint(backend.open(options), gpu_of_turn(0))


def host(spec: dict[str, Any]) -> NoReturn:
    """Open the endpoint of a spec and serve it until the end."""
    die_with_parent(int(spec["parent_pid"]))
    # Ctrl-C reaches the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(spec["control_fd"]))
    log = NativeLog()
    try:
        layout = Layout(**spec["layout"])
        backend = transfer.get(spec["backend"])
        pool = mmap.mmap(int(spec["pool_fd"]), layout.nbytes)
        endpoint = open_endpoint(backend, spec["options"])
        endpoint.native_log = log.lines
        mark_ranges(endpoint)
        endpoint.register(ctypes.addressof(ctypes.c_char.from_buffer(pool)), layout)
        agent = {
            **endpoint.describe(),
            "backend": backend.name,
            "id": os.urandom(8).hex(),
            "layout": layout.to_json(),
        }
        library = endpoint.library()
    except Exception as error:
        time.sleep(0.02)  # the library's last lines are still in the pipe
        cause = str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}"
        failed = {"failed": cause, "log": log.since(0)[-LOG_LINES_IN_ERRORS:]}
        control.sendall(json.dumps(failed).encode() + b"\n")
        os._exit(1)
    WorkerLoop(backend, endpoint, layout, log).run(control, {"agent": agent, "library": library})
    endpoint.close()
    # Not sys.exit: destructors of native libraries wait for threads that may hang on a dead peer.
    os._exit(0)


def check(name: str) -> int:
    """Import a backend's library and print the result as one JSON line."""
    load = transfer.get(name).load
    try:
        answer: dict[str, Any] = {"library": load() if load else {}}
    except MissingLibraryError as error:
        answer = {"reason": error.message, "fix": error.hint}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--check":
        return check(arguments[1])
    try:
        spec = json.loads(arguments[0])
    except (IndexError, ValueError) as error:
        sys.stderr.write(f"expected one argument, a JSON spec: {error}\n")
        return 2
    wanted = {"backend", "options", "layout", "pool_fd", "control_fd", "parent_pid"}
    if not isinstance(spec, dict) or set(spec) != wanted:
        sys.stderr.write(f"the spec must have exactly these keys: {', '.join(sorted(wanted))}\n")
        return 2
    host(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
