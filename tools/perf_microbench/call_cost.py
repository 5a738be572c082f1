"""What our Python path adds to one small Mooncake transfer: beside the library's own blocking call, in turns.

Both in one process, on one engine and one connection, call by call in random order, so that what else the
machine does meets both alike. ``python -m tools.perf_microbench.call_cost`` prints ``{op: {way: median µs}}``
as JSON; the process loads the native library, so ``measured`` starts another one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from kvbench import transfer
from kvbench.processes.transfer_worker.measure import Waiter, sharp_sleeps
from kvbench.processes.transfer_worker.memory import HostMemory
from kvbench.transfer.base import Endpoint, Layout, Op

BLOCK_BYTES = 4096
SECONDS = 3.0
IN_A_ROW = 3
DEADLINE_S = 60.0
LAYOUT = Layout(1, 4, BLOCK_BYTES)
Costs = dict[str, dict[str, float]]


def measured(seconds: float = SECONDS) -> Costs:
    """Op → way ("ours", "blocking") → median µs of a call, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.perf_microbench.call_cost", str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=DEADLINE_S + 2 * seconds,
        check=True,
    )
    found: Costs = json.loads(done.stdout)
    return found


def _opened(role: str) -> tuple[Endpoint, HostMemory]:
    backend = transfer.get("mooncake")
    os.environ.update(backend.env({}))
    endpoint, memory = backend.open({"role": role}), HostMemory(LAYOUT.nbytes)
    endpoint.register(memory.address, LAYOUT)
    return endpoint, memory


def _ours(endpoint: Endpoint, op: Op) -> Callable[[], None]:
    ticket, wait, clock = endpoint.prepare("peer", op, [0], [0]), Waiter(endpoint).wait, time.perf_counter_ns

    def call() -> None:
        began = clock()
        endpoint.start(ticket)
        while not endpoint.poll(ticket):
            wait(clock() - began)

    return call


def _pair(
    endpoint: Endpoint, op: Op, blocking: Callable[..., int], spot: tuple[Any, ...]
) -> dict[str, Callable[[], object]]:
    return {"ours": _ours(endpoint, op), "blocking": lambda: blocking(*spot)}


def _in_turns(ways: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    took: dict[str, list[int]] = {name: [] for name in ways}
    until, names = time.perf_counter() + seconds, list(ways)
    while time.perf_counter() < until:
        random.shuffle(names)
        for name in names:
            for _ in range(IN_A_ROW):
                began = time.perf_counter_ns()
                ways[name]()
                took[name].append(time.perf_counter_ns() - began)
    return {name: statistics.median(times) / 1e3 for name, times in took.items()}


def _target() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    endpoint, _memory = _opened("target")
    print(json.dumps({**endpoint.describe(), "id": "peer", "layout": LAYOUT.to_json()}), file=out, flush=True)
    sys.stdin.read()


def main(seconds: float) -> None:
    """Measure both ops and print them."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    argv = [sys.executable, "-m", "tools.perf_microbench.call_cost", "target"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as target:
        assert target.stdout is not None
        peer: dict[str, Any] = json.loads(target.stdout.readline())
        sharp_sleeps()
        endpoint, memory = _opened("initiator")
        endpoint.connect(peer, DEADLINE_S)
        engine: Any = endpoint._lanes[0].engine  # type: ignore[attr-defined]
        spot = (peer["segments"][0], memory.address, peer["address"], BLOCK_BYTES)
        costs = {
            "write": _in_turns(_pair(endpoint, "write", engine.transfer_sync_write, spot), seconds),
            "read": _in_turns(_pair(endpoint, "read", engine.transfer_sync_read, spot), seconds),
        }
        print(json.dumps(costs), file=out, flush=True)
        target.kill()
    # Not sys.exit: the library's destructors may wait for threads.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["target"]:
        _target()
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
