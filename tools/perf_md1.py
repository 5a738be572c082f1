"""Is the rate that a sweep finds the true one, in real time? ``make perf-md1``. It judges nothing.

``kvbench sweep`` drives the exact server as an M/D/1 queue (``kvbench.processes.exact_server``,
``tools.known_queues``): the highest rate at which so many first tokens are in time is known
by formula. Then the same load generator offers 1.3 times that rate, and what is printed is when the live rule
has had enough.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvbench.core.records import Cell
from kvbench.core.search.judging import TrialWatch
from kvbench.core.search.live_config import Decision
from kvbench.core.search.load_plan import TrialPlan, planned
from kvbench.core.slo import Slo
from kvbench.launchers.local import LocalLauncher
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.sweep.selftest_server import RunningExactServer, exact_server
from kvbench.sweep.trial.loadgen_driver import LoadGenerator
from tools.bench import arguments, load_spec, machine_load, near, table, workplace
from tools.known_queues import md1_max_rate

SERVICES: Final = 12
"""The TTFT limit, in services."""
GAP_S: Final = 0.004
OUTPUT_LEN: Final = 8
INPUT_LEN: Final = 16
ATTAINMENT: Final = 0.95
OVERLOAD: Final = 1.3
OVERLOAD_LIMIT_S: Final = 20.0
SWEEP_DEADLINE_S: Final = 1800.0


@dataclass(frozen=True)
class Queue:
    """An M/D/1 server and its SLO; times in seconds."""

    service_s: float

    @property
    def ttft_s(self) -> float:
        return SERVICES * self.service_s

    @property
    def max_rate(self) -> float:
        """By formula, in requests per second."""
        rate: float = md1_max_rate(self.service_s, self.ttft_s, ATTAINMENT)
        return rate

    @property
    def overload_limit_s(self) -> float:
        return OVERLOAD_LIMIT_S + 3 * self.service_s

    def spec(self) -> dict[str, Any]:
        return {"queue": "md1", "service_s": self.service_s, "gap_s": GAP_S, "log_tokens": False}


def sweep(queue: Queue, url: str, folder: Path, seed: int, precision: float = 0.05) -> Mapping[str, Any]:
    """The answer of a whole ``kvbench sweep`` of that server. Raises RuntimeError if there is none."""
    settings = (f"seed={seed}", "search.trial_s=2", f"search.precision={precision}", "search.max_trials=12")
    words = ["--base-url", url, "--output", folder, "--input-len", INPUT_LEN, "--output-len", OUTPUT_LEN]
    words += ["--attainment", ATTAINMENT, "--ttft-ms", queue.ttft_s * 1e3, "--tpot-ms", 10 * GAP_S * 1e3]
    words += [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "kvbench.cli", "sweep", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SWEEP_DEADLINE_S, check=False)
    cells = [line for path in folder.glob("*/cells.jsonl") for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in cells]
    if not found or not found[0].get("answer"):
        raise RuntimeError(f"the sweep ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    answer: Mapping[str, Any] = found[0]["answer"]
    return answer


def judged_trials(answer: Mapping[str, Any]) -> int:
    """Trials that gave a verdict, the ceiling probe among them: without those that were refused."""
    return sum(point["verdict"] != "invalid" for point in answer["curve"])


def overload(
    queue: Queue, server: RunningExactServer, launcher: LocalLauncher, folder: Path, seed: int
) -> Decision:
    """What the live rule says of 1.3 times the highest rate. Raises RuntimeError if it says nothing."""
    rate = OVERLOAD * queue.max_rate
    slo = Slo(ttft_ms=queue.ttft_s * 1e3, tpot_ms=10 * GAP_S * 1e3, attainment=ATTAINMENT)
    cli = CliOptions(
        base_url=server.url, input_len=f"{INPUT_LEN}", output_len=OUTPUT_LEN, ttft_ms=slo.ttft_ms
    )
    scenario, _ = resolve(cli)
    latency_s = queue.service_s + OUTPUT_LEN * GAP_S
    plan = TrialPlan(Cell("aggregated", INPUT_LEN, OUTPUT_LEN), seed, rate, "bisect", latency_s=latency_s)
    offered = planned(scenario, plan)
    watch = TrialWatch(scenario, plan, offered, {"": slo})
    limits = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
    lengths = {"input_len": INPUT_LEN, "output_len": OUTPUT_LEN, "vocab_size": 1000}
    records = folder / f".overload-{seed}"
    spec = load_spec(server.url, records, rate, offered.n, seed=seed, slo=limits, **lengths)
    generator = LoadGenerator(launcher, spec, f"overload-{seed}")
    generator.run(watch.progressed, lambda: None, offered.length_s + 60.0)
    if watch.decision is None:
        raise RuntimeError("the overload was offered whole, and nothing was decided")
    return watch.decision


def main() -> None:
    chosen = arguments(__doc__, repeats=(10, "sweeps"), service_ms=(4.0, "service time"))
    queue = Queue(chosen.service_ms / 1e3)
    rows, ratios, cuts = list[list[str]](), list[float](), list[float]()
    with workplace("md1") as (folder, launcher), exact_server(launcher, queue.spec()) as server:
        for seed in range(1, chosen.repeats + 1):
            answer = sweep(queue, server.url, folder / f"sweep-{seed}", seed)
            cut = overload(queue, server, launcher, folder, seed)
            rate = answer["max_request_rate"] or 0.0
            ratios.append(rate / queue.max_rate)
            cuts.append(cut.at_s if cut.verdict == "missed" else float("inf"))
            cells = (f"{rate:.4g}", f"{ratios[-1]:.3f}", answer["status"], f"{judged_trials(answer)}")
            rows.append([f"{seed}", *cells, f"{cuts[-1]:.1f}"])
            print(f"seed {seed}: found / true {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    print(f"M/D/1, {queue.service_s * 1e3:g} ms of service, 95 % within {SERVICES} services")
    print(f"true rate {queue.max_rate:.4g} req/s; {machine_load()}")
    print(table("seed", "found (req/s)|found / true|status|trials|1.3 × cut after (s)", rows))
    print(near(ratios))
    print(f"1.3 × cut after at most {max(cuts):.1f} s; limit {queue.overload_limit_s:.1f} s")


if __name__ == "__main__":
    main()
