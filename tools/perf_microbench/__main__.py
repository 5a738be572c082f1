"""What kvbench's own path costs a transfer: ``make perf-microbench``. A benchmark, it judges nothing.

The same transfers go through Mooncake's own C++ tool (``transfer_engine_bench`` of the wheel) and through the
backend ``mooncake``, in turn and in changing order. The null backend shows what the tool costs by itself, and
the backend ``memcpy`` stands beside plain copies of the same blocks.

The C++ tool takes its buffers with numa_alloc_onnode and never writes to them. To read a page of anonymous
memory that has not been written to is to read the kernel's one page of zeros, which stays in the nearest
cache. The sender then needs about an eighth less CPU time per byte (1.19 against 1.35 CPU-seconds per GB for
8 blocks of 1 MiB, medians of 12 runs each on two busy cores), and no real transfer is like that. So its
buffers are written to once before it uses them, as kvbench's own are.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvbench import transfer
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.transfers.records import Case, TransferOp, TransferRecord
from kvbench.errors import EXIT_FAILED, EXIT_OK, LaunchError
from kvbench.launchers.local import LocalLauncher, LocalProcess
from kvbench.microbench.cases import run_cases
from kvbench.microbench.options import Settings
from kvbench.processes.transfer_worker.memory import HostMemory
from kvbench.transfer.parts.native import unpacked_folder
from tools.bench import machine_load, table

from . import call_cost

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void *numa_alloc_onnode(size_t size, int node) {
    void *(*real)(size_t, int) = (void *(*)(size_t, int))dlsym(RTLD_NEXT, "numa_alloc_onnode");
    void *memory = real ? real(size, node) : 0;
    if (memory) memset(memory, 0xCC, size);
    return memory;
}
"""


def preload(folder: Path) -> Path | None:
    """A library for LD_PRELOAD that writes to what numa_alloc_onnode gives; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, library = folder / "touched.c", folder / "touched.so"
    source.write_text(SOURCE)
    done = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return library if done.returncode == 0 else None


SIZES = ((1 << 20, 8), (16 << 20, 1), (64 << 10, 32), (4 << 10, 1))
OPS: tuple[TransferOp, ...] = ("write", "read")
SHARE_WANTED = 0.97
"""Of the C++ tool's bandwidth, for blocks of 1 MiB and more."""
OVERHEAD_WANTED_US = 5.0
MEMCPY_WANTED = 0.95
READY_DEADLINE_S = 10.0
REGISTERED_S = 1.0
BUFFER_BYTES = 64 << 20
TOUCHED = "their buffers are written to once before they are sent, as ours are"
UNTOUCHED = "their buffers are never written to: they send the kernel's one page of zeros"
LISTENING = re.compile(r"P2P handshake, listening on ([\d.]+:\d+)")
COMPLETED = re.compile(r"Test completed: duration ([\d.]+), batch count (\d+)")


@dataclass
class Pair:
    """One case: (GB/s, µs per call) of each repeat, theirs and ours."""

    case: Case
    theirs: list[tuple[float, float]] = field(default_factory=list)
    ours: list[tuple[float, float]] = field(default_factory=list)


class TheirTool:
    """``transfer_engine_bench``: a target that stays, and an initiator for each measurement."""

    def __init__(self, launcher: LocalLauncher, preload: Path | None = None) -> None:
        """``preload``: a library for LD_PRELOAD, see ``preload``."""
        self._preload = preload
        found = importlib.util.find_spec("mooncake")
        folder = Path(
            found.submodule_search_locations[0] if found and found.submodule_search_locations else ""
        )
        self._binary = folder / "transfer_engine_bench"
        if not self._binary.is_file():
            raise LaunchError("the mooncake wheel's transfer_engine_bench is not there", hint="make setup")
        self._launcher = launcher
        self._target = self._start("target", [])
        self._segment = self._wait(self._target, LISTENING, READY_DEADLINE_S).group(1)
        # It listens before its memory is registered, and an initiator that comes in between crashes.
        time.sleep(REGISTERED_S)

    def _start(self, mode: str, more: list[str]) -> LocalProcess:
        libraries = [str(path.parent) for path in unpacked_folder().rglob("*.so.*")]
        argv = [
            str(self._binary),
            f"--mode={mode}",
            "--protocol=tcp",
            "--metadata_server=P2PHANDSHAKE",
            "--local_server_name=127.0.0.1",
            f"--buffer_size={BUFFER_BYTES}",
            *more,
        ]
        env = {
            "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys([*libraries, str(self._binary.parent)])),
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            **({"LD_PRELOAD": str(self._preload)} if self._preload else {}),
        }
        self._number = getattr(self, "_number", 0) + 1
        return self._launcher.start(ProcessSpec(f"their-{mode}-{self._number}", tuple(argv), env=env))

    def _wait(self, process: LocalProcess, wanted: re.Pattern[str], deadline_s: float) -> re.Match[str]:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if found := wanted.search("\n".join(process.tail(200))):
                return found
            if process.poll() not in (None, 0):
                break
            time.sleep(0.05)
        raise LaunchError(f"{process.name} did not say {wanted.pattern!r}", hint=" | ".join(process.tail(3)))

    def measure(self, case: Case, seconds: int) -> tuple[float, float]:
        process = self._start(
            "initiator",
            [
                f"--segment_id={self._segment}",
                f"--operation={case.op}",
                f"--block_size={case.block_bytes}",
                f"--batch_size={case.batch_size}",
                f"--threads={case.threads}",
                f"--duration={seconds}",
            ],
        )
        try:
            found = self._wait(process, COMPLETED, seconds + READY_DEADLINE_S)
        finally:
            process.kill()
        took, calls = float(found[1]), int(found[2])
        return calls * case.nbytes / took / 1e9, took / calls * 1e6

    def close(self) -> None:
        self._target.kill()


@contextlib.contextmanager
def their_tool(launcher: LocalLauncher, preload: Path | None) -> Iterator[TheirTool]:
    tool = TheirTool(launcher, preload)
    try:
        yield tool
    finally:
        tool.close()


def figures(row: TransferRecord) -> tuple[float, float]:
    """(GB/s, µs per call) from the window, as the C++ tool counts. Raises LaunchError for a row with an
    error."""
    if row.status != "ok":
        raise LaunchError(f"{row.case.key}: {row.error}", hint=" | ".join(row.log[-2:]))
    return row.gb_per_s or 0.0, row.window_s / row.calls * 1e6


def compare(tool: TheirTool, chosen: Any, log_dir: Path) -> list[Pair]:
    """All chosen cases, ``repeats`` times, ours and theirs in turn."""
    repeats, seconds = chosen.repeats, chosen.seconds
    sizes = [size for size in SIZES if not chosen.blocks or size[0] in chosen.blocks]
    pairs = [Pair(Case("mooncake", "tcp", op, block, batch)) for block, batch in sizes for op in OPS]
    settings = Settings(seconds=seconds, max_seconds=2 * seconds)
    ours = run_cases([pair.case for pair in pairs] * repeats, settings=settings, log_dir=log_dir)
    try:
        for repeat in range(repeats):
            for pair in pairs:
                if repeat % 2:
                    pair.ours.append(figures(next(ours)))
                pair.theirs.append(tool.measure(pair.case, seconds))
                if repeat % 2 == 0:
                    pair.ours.append(figures(next(ours)))
    finally:
        ours.close()  # type: ignore[attr-defined]
    return pairs


def middle(values: list[tuple[float, float]], which: int) -> float:
    return statistics.median(value[which] for value in values)


def print_pairs(pairs: list[Pair], null_us: float) -> None:
    """Ours beside theirs; the ratio is the median of the repeats' own ratios."""
    rows = []
    for pair in pairs:
        ratios = [a[0] / b[0] for a, b in zip(pair.ours, pair.theirs, strict=True)]
        both = (pair.ours, pair.theirs)
        rates, times = [f"{middle(of, 0):.3f}" for of in both], [f"{middle(of, 1):.1f}" for of in both]
        case = f"{pair.case.block_bytes >> 10} KiB × {pair.case.batch_size}"
        rows.append([pair.case.op, case, *rates, ratio_text(ratios), *times])
    title = "kvbench's mooncake backend beside transfer_engine_bench, TCP on this machine"
    titles = "block × batch|ours GB/s|theirs GB/s|ratio (min–max)|ours µs|theirs µs"
    print(table("op", titles, rows, title))
    print(f"wanted: a ratio of {SHARE_WANTED} or more for blocks of 1 MiB and more")
    print(f"null backend: {null_us:.2f} µs per call")


def ratio_text(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}–{max(ratios):.2f})"


def print_call_costs() -> None:
    """Our path beside the library's blocking call, which is what the C++ tool's loop amounts to."""
    for op, ways in call_cost.measured().items():
        print(
            f"4 KiB {op}, in turns in one process: ours {ways['ours']:.1f} µs, the library's blocking call "
            f"{ways['blocking']:.1f} µs: {ways['ours'] - ways['blocking']:+.1f} µs (medians); "
            f"wanted: at most {OVERHEAD_WANTED_US:g} µs"
        )


def copies(blocks: int, block_bytes: int, seconds: float) -> dict[str, float]:
    """GB/s of plain copies of these blocks, one buffer to the other, one thread."""
    size = blocks * block_bytes
    here, there = HostMemory(size), HostMemory(size)
    source, sink = here.get(0, size), there.get(0, size)
    rows = [slice(at, at + block_bytes) for at in range(0, size, block_bytes)]
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes, libc.memcpy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    views = [(sink[row], source[row]) for row in rows]
    addresses = [(there.address + row.start, here.address + row.start) for row in rows]

    def by_numpy() -> None:
        for to, of in views:
            np.copyto(to, of)

    def by_c() -> None:
        for to, of in addresses:
            libc.memcpy(to, of, block_bytes)

    return {"numpy.copyto": _rate(by_numpy, size, seconds), "C memcpy": _rate(by_c, size, seconds)}


def _rate(copy: Callable[[], None], size: int, seconds: float) -> float:
    copy()
    calls, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        copy()
        calls += 1
    return calls * size / took / 1e9


def print_copies(repeats: int, seconds: float, log_dir: Path) -> None:
    if "memcpy" not in transfer.names():
        return
    protocol, rows = transfer.get("memcpy").protocols[0], []
    for block, batch in ((1 << 20, 8), (16 << 20, 1), (64 << 20, 1)):
        case = Case("memcpy", protocol, "write", block, batch)
        ours, plain = list[float](), list[dict[str, float]]()
        for row in run_cases([case] * repeats, settings=Settings(seconds=seconds), log_dir=log_dir):
            ours.append(figures(row)[0])
            plain.append(copies(batch, block, seconds))
        ratios = [mine / max(others.values()) for mine, others in zip(ours, plain, strict=True)]
        medians = [ours, *([each[name] for each in plain] for name in plain[0])]
        middles = [f"{statistics.median(each):.2f}" for each in medians]
        rows.append([f"{block >> 20} MiB × {batch}", *middles, ratio_text(ratios)])
    titles = "block × batch|backend GB/s|numpy.copyto|C memcpy|ratio to the best"
    print(
        table(
            "",
            titles,
            rows,
            "memcpy backend beside plain copies",
            f"wanted: {MEMCPY_WANTED} of the best or more",
        )
    )


def null_call_us(log_dir: Path) -> float:
    case = Case("null", transfer.get("null").protocols[0], "write", SIZES[-1][0], 1)
    return figures(next(iter(list(run_cases([case], log_dir=log_dir)))))[1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=1, help="of each measurement")
    parser.add_argument("--blocks", type=int, nargs="+", default=[], help="only these sizes, in bytes")
    parser.add_argument("--untouched", action="store_true", help="leave their buffers unwritten")
    parser.add_argument("--keep-logs", type=Path, default=None, help="folder for the processes' output")
    chosen: Any = parser.parse_args(arguments)
    print(f"load average {os.getloadavg()[0]:.2f} before")
    with tempfile.TemporaryDirectory() as folder:
        log_dir = chosen.keep_logs or Path(folder) / "logs"
        launcher = LocalLauncher("perf-microbench", log_dir, Path(folder))
        try:
            null_us = null_call_us(log_dir)
            touched = None if chosen.untouched else preload(Path(folder))
            print(TOUCHED if touched else UNTOUCHED)
            with their_tool(launcher, touched) as tool:
                pairs = compare(tool, chosen, log_dir)
            print_pairs(pairs, null_us)
            print_call_costs()
            if not chosen.blocks:
                print_copies(chosen.repeats, chosen.seconds, log_dir)
        except LaunchError as error:
            print(error)
            return EXIT_FAILED
    print(machine_load())
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
