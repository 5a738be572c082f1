"""Transfers of the backend ``mooncake`` beside the library's own C++ tool: ``make perf-microbench``.

The same transfers go through ``transfer_engine_bench`` of Mooncake's wheel and through kvbench, in changing
order; the null backend shows what kvbench costs by itself. The C++ tool never writes to its buffers, so it
would send the kernel's one page of zeros from cache. A preloaded library writes to them first, as kvbench
does to its own. It judges nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Final

from kvbench import transfer
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.transfers.records import Case, TransferOp, TransferRecord
from kvbench.errors import EXIT_FAILED, EXIT_OK, LaunchError
from kvbench.launchers.local import LocalLauncher, LocalProcess
from kvbench.microbench.cases import run_cases
from kvbench.microbench.options import Settings
from kvbench.transfer.parts.native import unpacked_folder
from tools.bench import HOST, arguments, compiled, machine_load, table, workplace

SOURCE: Final = """
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
SIZES: Final = ((1 << 20, 8), (16 << 20, 1), (64 << 10, 32), (4 << 10, 1))
"""Bytes of a block, and blocks of a call."""
OPS: Final[tuple[TransferOp, ...]] = ("write", "read")
SHARE_WANTED: Final = 0.97
"""Share of the C++ tool's bandwidth, for blocks of 1 MiB and more."""
READY_DEADLINE_S: Final = 10.0
REGISTERED_S: Final = 1.0
BUFFER_BYTES: Final = 64 << 20
LISTENING: Final = re.compile(r"P2P handshake, listening on ([\d.]+:\d+)")
COMPLETED: Final = re.compile(r"Test completed: duration ([\d.]+), batch count (\d+)")
Figures = tuple[float, float]
"""GB/s, and µs of a call."""


def preload(folder: Path) -> Path | None:
    """Compile the library that writes to the C++ tool's buffers; None without a C compiler."""
    source, library = folder / "touched.c", folder / "touched.so"
    source.write_text(SOURCE)
    return None if compiled(source, library, "-shared", "-fPIC", "-ldl") else library


class TheirTool:
    """``transfer_engine_bench``: a target that stays, and an initiator for each measurement."""

    def __init__(self, launcher: LocalLauncher, preload: Path | None) -> None:
        spec = importlib.util.find_spec("mooncake")
        places = spec.submodule_search_locations if spec else None
        self._binary = Path(places[0] if places else "") / "transfer_engine_bench"
        if not self._binary.is_file():
            raise LaunchError("the mooncake wheel's transfer_engine_bench is not there", hint="make setup")
        folders = [str(path.parent) for path in unpacked_folder().rglob("*.so.*")]
        path = os.pathsep.join(dict.fromkeys([*folders, str(self._binary.parent)]))
        self._env = {"LD_LIBRARY_PATH": path, "MC_TCP_BIND_ADDRESS": HOST}
        if preload:
            self._env["LD_PRELOAD"] = str(preload)
        self._launcher, self._number = launcher, 0
        self._target = self._start("target")
        self._segment = self._wait(self._target, LISTENING, READY_DEADLINE_S).group(1)
        # It listens before its memory is registered, and an initiator that comes in between crashes.
        time.sleep(REGISTERED_S)

    def _start(self, mode: str, **more: object) -> LocalProcess:
        options = {"mode": mode, "protocol": "tcp", "metadata_server": "P2PHANDSHAKE", **more}
        options |= {"local_server_name": HOST, "buffer_size": BUFFER_BYTES}
        argv = (str(self._binary), *(f"--{name}={value}" for name, value in options.items()))
        self._number += 1
        return self._launcher.start(ProcessSpec(f"their-{mode}-{self._number}", argv, env=self._env))

    def _wait(self, process: LocalProcess, wanted: re.Pattern[str], deadline_s: float) -> re.Match[str]:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if found := wanted.search("\n".join(process.tail(200))):
                return found
            if process.poll() not in (None, 0):
                break
            time.sleep(0.05)
        raise LaunchError(f"{process.name} did not say {wanted.pattern!r}", hint=" | ".join(process.tail(3)))

    def measure(self, case: Case, seconds: int) -> Figures:
        lengths = {"block_size": case.block_bytes, "batch_size": case.batch_size, "threads": case.threads}
        more = {"segment_id": self._segment, "operation": case.op, "duration": seconds}
        process = self._start("initiator", **lengths, **more)
        try:
            found = self._wait(process, COMPLETED, seconds + READY_DEADLINE_S)
        finally:
            process.kill()
        took, calls = float(found[1]), int(found[2])
        return calls * case.nbytes / took / 1e9, took / calls * 1e6

    def close(self) -> None:
        self._target.kill()


def figures(row: TransferRecord) -> Figures:
    if row.status != "ok":
        raise LaunchError(f"{row.case.key}: {row.error}", hint=" | ".join(row.log[-2:]))
    return row.gb_per_s or 0.0, row.window_s / row.calls * 1e6


def compare(tool: TheirTool, repeats: int, seconds: int, logs: Path) -> list[list[str]]:
    """Measure all cases so often, kvbench's and theirs in turn; return the table's rows."""
    cases = [Case("mooncake", "tcp", op, block, batch) for block, batch in SIZES for op in OPS]
    settings = Settings(seconds=seconds, max_seconds=2 * seconds)
    rows = run_cases(cases * repeats, settings=settings, log_dir=logs)
    ours: dict[Case, list[Figures]] = {case: [] for case in cases}
    theirs: dict[Case, list[Figures]] = {case: [] for case in cases}
    try:
        for repeat in range(repeats):
            for case in cases:
                if repeat % 2:
                    ours[case].append(figures(next(rows)))
                theirs[case].append(tool.measure(case, seconds))
                if repeat % 2 == 0:
                    ours[case].append(figures(next(rows)))
    finally:
        rows.close()  # type: ignore[attr-defined]
    return [_cells(case, ours[case], theirs[case]) for case in cases]


def _cells(case: Case, ours: list[Figures], theirs: list[Figures]) -> list[str]:
    ratios = [own[0] / other[0] for own, other in zip(ours, theirs, strict=True)]
    rates, times = (
        [statistics.median(pair[which] for pair in of) for of in (ours, theirs)] for which in (0, 1)
    )
    return [
        *(case.op, f"{case.block_bytes >> 10} KiB × {case.batch_size}", *(f"{rate:.3f}" for rate in rates)),
        f"{statistics.median(ratios):.3f} ({min(ratios):.2f}–{max(ratios):.2f})",
        *(f"{time:.1f}" for time in times),
    ]


def main() -> int:
    chosen = arguments(
        __doc__,
        repeats=(5, "of each case"),
        seconds=(1, "of each measurement"),
        untouched=(False, "leave their buffers unwritten"),
    )
    print(f"load average {os.getloadavg()[0]:.2f} before")
    with workplace("perf-microbench") as (folder, launcher):
        logs = folder / "logs"
        null = Case("null", transfer.get("null").protocols[0], "write", SIZES[-1][0], 1)
        try:
            (row,) = run_cases([null], log_dir=logs)
            library = None if chosen.untouched else preload(folder)
            tool = TheirTool(launcher, library)
            try:
                rows = compare(tool, chosen.repeats, chosen.seconds, logs)
            finally:
                tool.close()
            titles = "block × batch|ours GB/s|theirs GB/s|ratio (min–max)|ours µs|theirs µs"
            caption = f"wanted: a ratio of {SHARE_WANTED} or more for blocks of 1 MiB and more"
            print(table("op", titles, rows, "mooncake over TCP beside transfer_engine_bench", caption))
            print(f"their buffers were {'' if library else 'not '}written to before")
            print(f"null backend: {figures(row)[1]:.2f} µs per call; {machine_load()}")
        except LaunchError as error:
            print(error)
            return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
