"""Run one kvbench search on a drawn system in this process, and compare its answer with the truth.

From the options on it does the same as ``kvbench simulate --system``: planning, single requests, trials,
drains, waits, gates, search, run folder. But it calls the system without a pipe, and writes no report.
"""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

from kvbench.core.simulation.data import SimulatedLoad
from kvbench.errors import KvbenchError
from kvbench.files import scratch
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.report.tables.result import summary_table
from kvbench.results.provenance import SIMULATED
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import RunInfo, RunStore
from kvbench.sweep.display import Silent
from kvbench.sweep.simulator_process import SystemAnswer
from kvbench.sweep.sweep import searching_sweep
from kvbench.sweep.system import Replayed, SystemBench
from tools.bench import NEAR
from tools.jobs import Row, fast_folder
from tools.random_systems.family import draw, seed_of
from tools.random_systems.serve import nulls
from tools.random_systems.simulate import State, end, latency_s, trial
from tools.random_systems.system import System
from tools.random_systems.truth import Truth

STRIDE: Final = 0x5DEECE66D1CE4E5B
"""Distance between the seeds of different ``dice``; large, so that no two trials share a seed."""
AGAIN_S: Final = 1.0  # between repeated alarms
TOO_LONG: Final = "too long to simulate"
PROMISE: Final = "time_suffices"
"""Key, in an answer or a run's plan, that states whether the search's time suffices."""


class TooLongError(BaseException):
    """A search exceeded its real time. No ``Exception``, so that a sweep does not handle it as a failure."""


class DrawnAnswers:
    """A drawn system in this process, with the same responses as ``serve.py``.

    ``dice``: number that selects other random draws of the system.
    """

    def __init__(self, system: System, dice: int = 0) -> None:
        self._system = system
        self._dice = dice
        self._state = State()

    def answer(self, load: SimulatedLoad, seed: int, starts_at_s: float) -> SystemAnswer:
        arrivals, inputs, outputs = (
            np.asarray(values, np.float64) for values in (load.offsets_s, load.input_len, load.output_len)
        )
        trial_seed = (seed + self._dice * STRIDE) % (1 << 63)
        first, last, self._state = trial(
            self._system, arrivals, inputs, outputs, starts_at_s, trial_seed, self._state
        )
        count = len(arrivals)
        return SystemAnswer(nulls(first), nulls(last), [()] * count, [""] * count)

    def ended(self, replayed: Replayed) -> None:
        self._state = end(self._system, self._state, replayed.cut_at_s, replayed.dropped)


def options_of(system: System, run_seed: int, sets: tuple[str, ...] = ()) -> CliOptions:
    """Return a user's options, with the search's seed. ``sets``: further PATH=VALUE of a scenario."""
    load, slo = system.workload, system.slo
    ttft_ms, tpot_ms = (
        None if limit is None else float(f"{limit:.12g}") for limit in (slo.ttft_ms, slo.tpot_ms)
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
    """Run a search in this process; return its run folder, a child of ``folder``. ``dice``: see
    ``DrawnAnswers``; ``sets``: see ``options_of``.

    Raises TooLongError after ``limit_s`` of real time (main thread only), and KvbenchError like a sweep.
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
    """Raise TooLongError in the body after ``limit_s`` of real time. Works in the main thread only."""

    def over(number: int, frame: FrameType | None) -> None:
        # An exception in a garbage collector's callback is lost; the next alarm raises it again.
        if frame is None or frame.f_code not in {getattr(call, "__code__", None) for call in gc.callbacks}:
            raise TooLongError(f"more than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def failure(error: Exception) -> str:
    """Return the outcome of a failed search. It counts as unanswered and does not end the others."""
    return f"failed: {error.message}" if isinstance(error, KvbenchError) else f"crashed: {error!r}"


@dataclass(frozen=True)
class Judged(Row):  # type: ignore[misc]
    """Result of one search. ``true``: true rate, at the search's end if the system drifts; 0: no rate.

    ``outcome``: the search's status (``converged``, ``exhausted``, …), or why it has no answer; ``said``: the
    result table's (``found``, ``at_least``, ``none``, …). ``virtual_s``: virtual clock at the end;
    ``offered_s``: time of the trials alone; ``latencies``: ``virtual_s`` in idle end-to-end latencies.
    ``promised``: whether the plan stated that the time suffices, if it stated either. ``replay``: estimate
    from a replay of the requests (``ReplayResult.to_json``).
    """

    name: str
    kinds: tuple[str, ...]
    run_seed: int
    outcome: str
    said: str
    true: float
    true_at_first: float
    found: float | None = None
    lower: float | None = None
    upper: float | None = None
    trials: int = 0
    void: int = 0
    virtual_s: float = 0.0
    offered_s: float = 0.0
    latencies: float = 0.0
    promised: bool | None = None
    real_s: float = 0.0
    replay: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        return self.kinds[0]

    @property
    def converged(self) -> bool:
        return self.outcome == "converged"

    @property
    def ratio(self) -> float | None:
        return self.found / self.true if self.found and self.true else None

    @property
    def near(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= NEAR

    @property
    def interval(self) -> tuple[float, float] | None:
        """Range of rates that the answer allows: from x for ``≥ x``, up to x for ``none (< x)``."""
        if self.said == "none" or self.outcome == "slo_unattainable":
            return 0.0, 0.0 if self.upper is None else self.upper
        lower = self.lower if self.lower is not None else self.found
        if lower is None:
            return None
        return lower, math.inf if self.upper is None else self.upper

    @property
    def holds(self) -> bool | None:
        """Whether the interval contains the truth; None without one, or for a correct ``none``."""
        if self.interval is None or (not self.true and not self.found):
            return None
        return self.interval[0] <= self.true <= self.interval[1]

    @property
    def holds_some(self) -> bool | None:
        """Whether a drifting system's interval contains a rate that was true at some time."""
        if self.interval is None or (not self.true and not self.found):
            return None
        low, high = sorted((self.true, self.true_at_first))
        return self.interval[0] <= high and low <= self.interval[1]

    @property
    def replayed(self) -> tuple[float, float] | None:
        """The replay's interval; None if its checks reject it, or without a truth."""
        if not self.replay or self.replay["objections"] or not self.true:
            return None
        return self.replay["lower"], self.replay["upper"]

    @property
    def half_width(self) -> float | None:
        """Relative half-width of a two-sided interval."""
        if not self.found or self.interval is None or math.isinf(self.interval[1]):
            return None
        return (self.interval[1] - self.interval[0]) / 2 / self.found

    @property
    def wrong_none(self) -> bool:
        """Whether the answer is ``none``, but the true rate is above its bound."""
        return not self.found and self.holds is False

    @property
    def wrong_least(self) -> bool:
        """Whether the answer is ``≥ x``, but x is above the true rate."""
        return bool(self.found) and self.upper is None and self.holds is False

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" {self.ratio:.3f} of the truth"
        held = "" if self.holds is None else ", in" if self.holds else ", not in the interval"
        return f"{self.name} {self.kind} {self.run_seed}: {self.outcome}{ratio}{held}, {self.trials} trials"


def judge(system: System, true: Truth, run_seed: int, limit_s: float, sets: tuple[str, ...] = ()) -> Judged:
    """Search one system in this process, within ``limit_s`` of real time. ``sets``: see ``options_of``."""
    start = time.perf_counter()
    with scratch("kvbench-judge-", parent=fast_folder()) as folder:
        try:
            run = searched(system, run_seed, folder, limit_s, sets=sets)
        except TooLongError:
            found = unanswered(system, true, run_seed, TOO_LONG)
        except Exception as error:
            found = unanswered(system, true, run_seed, failure(error))
        else:
            found = judged_run(system, true, run_seed, run)
    return replace(found, real_s=round(time.perf_counter() - start, 3))


def unanswered(system: System, true: Truth, run_seed: int, why: str) -> Judged:
    return Judged(system.name, system.kinds, run_seed, why, "failed", true.rates[0], true.rates[0])


def judged_run(system: System, true: Truth, run_seed: int, run: RunFolder) -> Judged:
    rows = summary_table(run)
    if len(rows) != 1:
        return unanswered(system, true, run_seed, "failed: no trial")
    (row,) = rows
    ends = [float(one.engine.get("starts_at_s") or 0.0) + one.duration_s for one in run.trials]
    virtual_s = max(ends, default=0.0)
    return Judged(
        name=system.name,
        kinds=system.kinds,
        run_seed=run_seed,
        outcome=row.search or row.outcome,
        said=row.outcome,
        true=true.at(virtual_s) if true.exists else 0.0,
        true_at_first=true.rates[0],
        found=row.answer.max_request_rate,
        lower=row.answer.lower,
        upper=row.answer.upper,
        trials=row.trials,
        void=sum(one.verdict == "invalid" for one in run.trials),
        virtual_s=virtual_s,
        offered_s=sum(one.duration_s for one in run.trials),
        latencies=virtual_s / latency_s(system),
        promised=promised(run),
        replay=(run.cells[0].answer or {}).get("replay") if run.cells else None,
    )


def promised(run: RunFolder) -> bool | None:
    """Return whether a search's answer or plan states that its time suffices; None if it states neither."""
    answers = [cell.answer or {} for cell in run.cells]
    stated = [part[PROMISE] for part in (*answers, run.plan) if isinstance(part.get(PROMISE), bool)]
    return bool(stated[0]) if stated else None


@dataclass(frozen=True)
class DrawnJob:
    """A job on one system of a family, for at most ``limit_s`` of real time."""

    seed: str
    index: int
    true: Truth
    run_seed: int
    limit_s: float

    @property
    def system(self) -> System:
        return draw(seed_of(self.seed), self.index)


@dataclass(frozen=True)
class SearchJob(DrawnJob):
    sets: tuple[str, ...] = ()
    """Further settings of the scenario, as PATH=VALUE."""

    @property
    def key(self) -> str:
        return " ".join(("search", self.seed, str(self.index), str(self.run_seed), *self.sets))

    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = judge(
            self.system, self.true, self.run_seed, self.limit_s, self.sets
        ).to_json()
        return found
