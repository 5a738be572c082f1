"""One search of the product on a drawn system: in this process, or by the command that a user would type.

Both go the same way through the product from the options on: planning, single requests, trials, drains,
waits, gates, search, run folder. In this process the system is asked without a pipe, and no report is
written.
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import numpy as np

from kvbench.core.simulation.data import SimulatedLoad
from kvbench.errors import KvbenchError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.provenance import SIMULATED
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import RunInfo, RunStore
from kvbench.sweep.display import Silent
from kvbench.sweep.simulator_process import SystemAnswer
from kvbench.sweep.sweep import searching_sweep
from kvbench.sweep.system import Replayed, SystemBench

from ..simulate import State, end, trial
from ..system import FloatArray, System

ENDING_S: Final = 20.0
ROOT: Final = Path(__file__).resolve().parents[3]
MEMORY: Final = Path("/dev/shm")
"""Run folders are synced with each line; in memory that costs nothing."""


STRIDE: Final = 0x5DEECE66D1CE4E5B
"""Far apart, so that no two trials' seeds meet."""


AGAIN_S: Final = 1.0


class TooLongError(BaseException):
    """A search took more real time than it may. No ``Exception``: a sweep shall not take it for a failure."""


class DrawnAnswers:
    """A drawn system, asked in this process: what ``serve.py`` answers line by line.

    ``dice``: another number draws all anew that is random in the system.
    """

    def __init__(self, system: System, dice: int = 0) -> None:
        self._system = system
        self._dice = dice
        self._state = State()

    def answer(self, load: SimulatedLoad, seed: int, starts_at_s: float) -> SystemAnswer:
        arrivals, inputs, outputs = (
            np.asarray(each, np.float64) for each in (load.offsets_s, load.input_len, load.output_len)
        )
        own = (seed + self._dice * STRIDE) % (1 << 63)
        first, last, self._state = trial(
            self._system, arrivals, inputs, outputs, starts_at_s, own, self._state
        )
        count = len(arrivals)
        return SystemAnswer(_known(first), _known(last), [()] * count, [""] * count)

    def ended(self, replayed: Replayed) -> None:
        self._state = end(self._system, self._state, replayed.cut_at_s, replayed.dropped)


def _known(times: FloatArray) -> list[float | None]:
    if np.isfinite(times).all():
        return list(times.tolist())
    return [each if np.isfinite(each) else None for each in times.tolist()]


def options_of(system: System, run_seed: int, sets: tuple[str, ...] = ()) -> CliOptions:
    """What a user would ask for, with the search's own seed. ``sets``: further PATH=VALUE of a scenario."""
    load, slo = system.workload, system.slo
    ttft_ms, tpot_ms = (
        None if each is None else float(f"{each:.12g}") for each in (slo.ttft_ms, slo.tpot_ms)
    )
    return CliOptions(
        system="drawn",
        overrides=(f"workload.burstiness={load.burstiness:g}", f"seed={run_seed}", *sets),
        input_len=str(load.input_len),
        output_len=load.output_len,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        attainment=None if slo.limits else float(f"{slo.attainment:.12g}"),
        slo=slo.limits,
    )


def searched(
    system: System, run_seed: int, folder: Path, limit_s: float, dice: int = 0, sets: tuple[str, ...] = ()
) -> RunFolder:
    """The run folder of a search in this process, made under ``folder``. ``dice``: as of ``DrawnAnswers``;
    ``sets``: as of ``options_of``.

    Raises TooLongError after ``limit_s`` of real time (in a main thread), and KvbenchError as a sweep does.
    """
    scenario, source = resolve(options_of(system, run_seed, sets))
    plan = plan_of(scenario)
    about = RunInfo(kind="simulate", seed=scenario.seed, labels=(SIMULATED,))
    store = RunStore.create(folder, scenario.name, source, plan.to_json(), {}, about)
    bench = SystemBench(scenario, store, answers=lambda: DrawnAnswers(system, dice))
    with store, at_most(limit_s):
        searching_sweep(scenario, plan, store, Silent(), bench).run()
    return load_run(store.path)


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Raises TooLongError in what is done within it for longer than that. For a main thread."""

    def over(number: int, frame: FrameType | None) -> None:
        # What is raised in one of the garbage collector's callbacks is lost: the next alarm comes soon.
        if frame is None or frame.f_code not in {getattr(each, "__code__", None) for each in gc.callbacks}:
            raise TooLongError(f"more than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def failure(error: Exception) -> str:
    """What is said of a search that ended so: it counts as one without an answer, and ends no others."""
    return f"failed: {error.message}" if isinstance(error, KvbenchError) else f"crashed: {error!r}"


def fast_folder() -> Path | None:
    """Where run folders that nobody keeps are written fastest; None: where temporary files are."""
    return MEMORY if os.access(MEMORY, os.W_OK) else None


# -- by the command -----------------------------------------------------------------------------------


def command_of(system: System, seed: str, index: int, run_seed: int, output: Path) -> list[str]:
    """The command line that a user would type for system ``index`` of a family's seed."""
    player = [sys.executable, "-m", "tools.random_systems.serve", seed, str(index)]
    work = system.workload
    lengths = ["--input-len", str(work.input_len), "--output-len", str(work.output_len)]
    sets = ["--set", f"workload.burstiness={work.burstiness:g}", "--set", f"seed={run_seed}"]
    start = [sys.executable, "-m", "kvbench.cli", "simulate", "--system", shlex.join(player)]
    return [*start, *lengths, *system.slo.options(), *sets, "--output", str(output)]


def carried_out(command: Sequence[str], limit_s: float) -> bool:
    """Runs a command for at most so long; then ends it as Ctrl-C does, so that it ends what it started."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return False
    return True
