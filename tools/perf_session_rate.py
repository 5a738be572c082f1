"""Searched rates of sessions beside what long trials show: ``make perf-session-rate``. It judges nothing.

Systems are drawn at random: sessions, speed, P and D apart or not, and which limit is in the SLO, as a
multiple of what an idle system needs. `kvbench simulate` searches each of them. Then trials of tens of
thousands of requests at rates around the answer show where the SLO stops holding: interpolated between the
rates, with the scatter of the trials as its error. Nothing of the search was chosen by these systems.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvbench.core.sessions.session_load import PromptHashes
from kvbench.core.sessions.session_source import SessionSource
from kvbench.core.simulation.data import SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate
from kvbench.core.slo import Slo, latencies_ms
from kvbench.planning.load_files import session_source
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import load_run
from kvbench.sweep.simulate import simulated
from kvbench.sweep.simulated_trial import SimulatedDeployment, system_of
from tools.bench import arguments, near, table

SCENARIO: Final = "agentic-simulated"
STEP: Final = 1.04
"""Between rates at which long trials are held."""
MOST_RATES: Final = 16
LATE: Final = 0.90
LIMITS: Final = {
    "turns": ("first_ttft_ms", "later_ttft_ms"),
    "tpot": ("tpot_ms",),
    "session": ("session_ms",),
}


@dataclass(frozen=True)
class Drawn:
    """A system of the family: its overrides, and by what its SLO limits it."""

    kind: str
    connector: str
    sets: tuple[str, ...]
    factor: float

    @classmethod
    def at(cls, seed: int, place: int) -> Drawn:
        rng = np.random.default_rng([seed, place])

        def spread(low: float, high: float) -> float:
            return float(np.exp(rng.uniform(np.log(low), np.log(high))))

        shape = {"turns": int(rng.integers(2, 9)), "shared_prefix_len": int(rng.integers(0, 513))}
        shape |= {"first_len": round(spread(256, 2048)), "added_len": round(spread(64, 512))}
        shape["output_len"] = round(spread(8, 64))
        told = ", ".join(f"{key}: {value}" for key, value in shape.items())
        told += (
            f", think_time_s: {round(spread(0.2, 2.0), 2)}, spread: {round(float(rng.uniform(0.1, 0.6)), 2)}"
        )
        sets = (f"workload.sessions.shape={{{told}}}", f"simulate.time_scale={spread(2, 8):.2f}")
        kind = list(LIMITS)[place % len(LIMITS)]
        return cls(kind, str(rng.choice(["aggregated", "nixl"])), sets, spread(1.6, 6.0))

    def cli(self, limits: Sequence[str], seed: int) -> CliOptions:
        slo = ("slo.tpot_ms=null", f"slo.limits=[{', '.join(limits)}]")
        sets = (*self.sets, *slo, f"seed={seed}")
        return CliOptions(scenario=SCENARIO, overrides=sets, connectors=(self.connector,))


@dataclass(frozen=True)
class Bench:
    slo: Slo
    source: SessionSource
    system: System

    @classmethod
    def of(cls, cli: CliOptions) -> Bench:
        scenario, _ = resolve(cli, sessions=True)
        assert scenario.workload.sessions is not None
        planned = next(entry for entry in plan_of(scenario).deployments if not entry.reference_only)
        deployment = SimulatedDeployment.of(scenario, planned)
        source = session_source(scenario.workload.sessions)
        return cls(scenario.slo.main(), source, system_of(scenario, deployment))

    def values(self, rate: float, requests: int, seed: int) -> list[tuple[dict[str, float | None], bool]]:
        """What each request says of each metric, once sessions end as fast as they begin."""
        turns = self.source.requests_each
        load = self.source.load(rate / turns, max(2, round(requests / turns)), 1.0, seed)
        hashes = PromptHashes(load, self.system.config.block_tokens)
        lengths = load.input_len, load.output_len
        sim_load = SimulatedLoad(load.offsets_s, *lengths, 1e9, hashes, load.following)
        records = simulate(self.system, sim_load).records
        begin_s, end_s = 2 * self.source.filled_s(1.0), float(load.session_offsets_s[-1])
        return [
            (latencies_ms(r.ttft_s, r.tpot_s, r.e2el_s, r.ok, r.turn, r.session_s), r.ok)
            for r in records
            if begin_s <= r.scheduled_s <= end_s
        ]

    def attained(self, rate: float, requests: int, seed: int) -> float:
        """By how much the criterion that is nearest to its share exceeds it, in log odds."""
        seen = np.array([self.slo.observe(*answer) for answer in self.values(rate, requests, seed)])
        shares = np.clip(np.nanmean(seen, axis=0), 1e-4, 1 - 1e-4)
        wanted = np.array([criterion.target for criterion in self.slo.all_criteria()])
        return float(np.min(np.log(shares / (1 - shares)) - np.log(wanted / (1 - wanted))))


def limits_of(drawn: Drawn) -> list[str]:
    """So many times what an idle system needs, as 90 of 100 requests or sessions take."""
    idle = Bench.of(drawn.cli(["tpot_ms p90 <= 1e6"], 1))
    values = idle.values(0.05, 400, 1)
    found = []
    for metric in LIMITS[drawn.kind]:
        known = [value for row, _ in values if (value := row.get(metric)) is not None]
        found.append(f"{metric} p{100 * LATE:g} <= {drawn.factor * float(np.quantile(known, LATE)):.4g}")
    return found


def truth(bench: Bench, about: float, requests: int, seeds: Sequence[int]) -> tuple[float, float]:
    """The rate at which the SLO stops holding, and its standard error as a share."""
    seen: dict[int, list[float]] = {}

    def at(step: int) -> float:
        if step not in seen:
            rate = about * STEP**step
            seen[step] = [bench.attained(rate, requests, seed) for seed in seeds]
        return float(np.mean(seen[step]))

    low = high = 0
    while at(low) < 0 and len(seen) < MOST_RATES:
        low -= 1
    while at(high) >= 0 and len(seen) < MOST_RATES:
        high += 1
    low = max(low, high - 1)
    above, below = at(low), at(high)
    if above < 0 or below >= 0:
        raise RuntimeError(f"no rate near {about:.4g} is where the SLO stops holding: {seen}")
    place = low + above / (above - below)
    scatter = float(np.std(seen[low] + [value + above - below for value in seen[high]], ddof=1))
    error = scatter / np.sqrt(len(seeds)) / (above - below) * np.log(STEP)
    return about * STEP**place, float(error)


def searched(cli: CliOptions) -> Mapping[str, Any]:
    """The answer of the product's search, with its trials and their time."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        run = load_run(simulated(cli, Path(folder)))
        (cell,) = run.cells
        seconds = sum(trial.duration_s for trial in run.trials)
        return {**(cell.answer or {}), "trials": len(run.trials), "seconds": seconds}


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(
        __doc__,
        given,
        systems=(12, "to draw"),
        first=(0, "number of the first one"),
        seed=(22, "of the systems"),
        requests=(30_000, "of a long trial"),
        repeats=(3, "long trials at each rate"),
    )
    rows, ratios, held = list[list[str]](), list[float](), 0
    for index in range(options.first, options.first + options.systems):
        drawn, began = Drawn.at(options.seed, index), time.process_time()
        limits = limits_of(drawn)
        cli = drawn.cli(limits, 1)
        answer = searched(cli)
        took_s = time.process_time() - began
        rate, lower, upper = (answer[key] for key in ("max_request_rate", "lower", "upper"))
        row = [f"{index} {drawn.connector}", ", ".join(limits)]
        if rate is None or lower is None or upper is None:
            row += [str(answer["status"]), "–", "–", "no answer"]
        else:
            true, error = truth(Bench.of(cli), rate, options.requests, range(100, 100 + options.repeats))
            inside = lower <= true * (1 + 2 * error) and true * (1 - 2 * error) <= upper
            ratios.append(rate / true)
            held += inside
            row += [f"{rate:.4g} [{lower:.4g}, {upper:.4g}]", f"{true:.4g} ± {100 * error:.1f} %"]
            row += [f"{rate / true:.3f}", f"{answer['status']}{'' if inside else ', not in the interval'}"]
        row += [str(answer["trials"]), f"{answer['seconds']:.0f}", f"{took_s:.0f}"]
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)
    print(table("system|SLO|found [90 %]|true|found / true|", "trials|load (s)|CPU (s)", rows))
    print(f"{near(ratios)}; {held} of {len(ratios)} intervals hold the true rate")


if __name__ == "__main__":
    main()
