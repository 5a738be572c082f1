"""How the offered load grows with the load generator's workers: ``make perf-workers``. It judges nothing.

Each worker offers the same rate, from one plan and one start, to exact servers. First all on this machine;
then each through an agent, as on several hosts (beyond this machine's cores the figures are about sharing).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.agents.channel import PipeChannel
from kvbench.launchers.agents.remote import RemoteLauncher
from kvbench.launchers.base import Launcher
from kvbench.sweep.selftest_server import exact_server
from kvbench.sweep.trial.loadgen_driver import LoadGenerator
from tools.bench import arguments, load_spec, machine_load, table, workplace

WORKERS: Final = (1, 2, 3, 4)
LEAST_SHARE: Final = 0.95
DEADLINE_S: Final = 120.0


Row = dict[str, Any]
"""Figures of one number of workers: requests a second that went out, and how late."""


def offered(launcher: Launcher, url: str, folder: Path, workers: int, rate: float, seconds: float) -> Row:
    """Offer one load by some workers, each of which is to send ``rate`` requests a second.

    The rate is over the planned sends, from the first to the last real one, against the plan's own span.
    """
    more = {"input_len": 64, "output_len": 4, "slo": {"ttft_ms": 1000.0, "tpot_ms": 1000.0}, "seed": 7}
    records, planned_rate = folder / f"records-{workers}", workers * rate
    spec = load_spec(url, records, planned_rate, round(planned_rate * seconds), **more)
    generator = LoadGenerator(launcher, spec, workers=workers)
    load = generator.run(lambda progress: False, lambda: None, DEADLINE_S)
    sent = sorted(record.sent_s for record in load.records if record.sent_s is not None)
    scheduled = sorted(record.scheduled_s for record in load.records)
    planned, real = ((len(times) - 1) / (times[-1] - times[0]) for times in (scheduled, sent))
    starts = [float(one["started_monotonic_s"]) for one in load.client.get("per_worker", [load.client])]
    return {
        "where": "hosts" if launcher.hosts else "here",
        "workers": workers,
        "planned": planned_rate,
        "sent": planned_rate * real / planned,
        "lag_p99_ms": float(load.client["send_lag_p99_ms"]),
        "cpu_share": float(load.client["cpu_share"]),
        "apart_ms": (max(starts) - min(starts)) * 1e3,
    }


def cells(row: Row, one: Row) -> list[str]:
    """Return the figures for the table; ``one`` is the row of one worker."""
    share = row["sent"] / (row["workers"] * one["sent"])
    rates = f"{row['planned']:g}", f"{row['sent']:.1f}", f"{share:.3f}"
    late = f"{row['lag_p99_ms']:.2f}", f"{row['cpu_share']:.0%}", f"{row['apart_ms']:.2f}"
    return [row["where"], str(row["workers"]), *rates, *late, "ok" if share >= LEAST_SHARE else "UNDER"]


@contextlib.contextmanager
def hosts(folder: Path, count: int) -> Iterator[RemoteLauncher]:
    """So many agents on this machine, each of which is a host to kvbench."""
    agents: dict[str, AgentClient] = {}
    try:
        for index in range(count):
            command = [sys.executable, "-m", "kvbench.processes.agent", "--tag", "perf-workers"]
            channel = PipeChannel(f"host{index}", command)
            agents[f"host{index}"] = AgentClient(channel, str(folder))

        def host_of(name: str) -> str:
            worker = name.rpartition("-w")[2]
            return f"host{int(worker) % count if worker.isdecimal() else 0}"

        addresses: dict[str, AgentClient] = {}
        yield RemoteLauncher(agents, host_of, "perf-workers", folder / "logs", addresses)
    finally:
        for agent in agents.values():
            agent.close()


def measured(rate: float, seconds: float) -> Iterator[Row]:
    with (
        workplace("perf-workers") as (folder, launcher),
        exact_server(launcher, {"first_token_s": 0.01, "gap_s": 0.002}) as server,
    ):
        for workers in WORKERS:
            yield offered(launcher, server.url, folder, workers, rate, seconds)
        for workers in WORKERS:
            with hosts(folder, workers) as remote:
                yield offered(remote, server.url, folder, workers, rate, seconds)


def main() -> None:
    chosen = arguments(
        __doc__,
        rate=(400.0, "requests a second of each worker"),
        seconds=(10.0, "measured with each number of workers"),
    )
    rows = list(measured(chosen.rate, chosen.seconds))
    one = {row["where"]: row for row in reversed(rows)}
    titles = (
        "workers|req/s planned|req/s sent|of linear|send lag p99, ms|busiest worker's core|starts apart, ms|"
    )
    print(table("where", titles, [cells(row, one[row["where"]]) for row in rows]))
    print(machine_load())


if __name__ == "__main__":
    main()
