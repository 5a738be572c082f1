"""How late turns of sessions are sent, many sessions at once: ``make perf-turns``. It judges nothing.

Sessions begin within ten seconds of each other on the exact server, and each turn is due think time after its
last token. How late it went out is told of turns that open a session, whose times are planned, and of all
later ones. On a machine that is not idle look at the waits for a core.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kvbench.core.records import RequestRecord
from kvbench.core.scenario.sections import Sessions, SessionShape
from kvbench.core.sessions.session_load import SessionLoad, session_load
from kvbench.core.sessions.session_source import source_of
from kvbench.planning.load_files import write_session_load
from kvbench.processes.common.record_file import read_records
from tools.perf_loadgen import Ran, ran

BEGIN_S = 10.0
SEND_LAG_P99_MS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000, help="at once")
    parser.add_argument("--turns", type=int, default=6, help="of each")
    parser.add_argument("--think-s", type=float, default=5.0, help="think time, the median")
    parser.add_argument("--first-len", type=int, default=2048, help="tokens of the first prompt, the median")
    chosen = parser.parse_args()
    load = many_sessions(chosen.sessions, chosen.turns, chosen.think_s, chosen.first_len)
    with tempfile.TemporaryDirectory(prefix="kvbench-turns-") as name:
        path = Path(name) / "sessions.npz"
        write_session_load(path, load)
        found = ran(Path(name), {**PLAN, "num_requests": load.requests, "sessions_path": str(path)})
        records = read_records(Path(name) / "records")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        table(list(rows(records)), f"{chosen.sessions:,} sessions at once, {load.requests:,} turns")
    )
    console.print(words(found, records), markup=False, highlight=False, soft_wrap=True)


PLAN = {"request_rate": 1.0, "input_len": 1, "output_len": 1, "timeout_s": 60.0}


def many_sessions(count: int, turns: int, think_s: float, first_len: int) -> SessionLoad:
    """Sessions of a shape that begin evenly within ten seconds, with answers that are made up."""
    shape = SessionShape(turns=turns, first_len=first_len, think_time_s=think_s, output_len=32, spread=0.3)
    source = source_of(Sessions(shape=shape, answers="recorded", max_turns=2 * turns), None)
    sessions, scope, block_tokens = source.sessions(count, 1)
    offsets = np.linspace(0.0, BEGIN_S, count).tolist()
    return session_load(sessions, offsets, scope, block_tokens, own_answers=False)


def rows(records: Sequence[RequestRecord]) -> Iterator[tuple[str, int, list[float]]]:
    """Name, number and quantiles in ms of how late turns were sent."""
    for name, which in (("first turns", [0]), ("later turns", range(1, 1_000_000))):
        late = [
            1e3 * (each.sent_s - each.scheduled_s) for each in records if each.sent_s and each.turn in which
        ]
        yield name, len(late), np.quantile(late, (0.5, 0.9, 0.99, 1.0)).tolist()


def table(found: Sequence[tuple[str, int, list[float]]], title: str) -> Table:
    made = Table(title=title)
    for head in ("sent late (ms)", "turns", "P50", "P90", "P99", "most"):
        made.add_column(head, justify="left" if head == "sent late (ms)" else "right")
    for name, count, quantiles in found:
        made.add_row(name, f"{count:,}", *(f"{each:.3f}" for each in quantiles))
    return made


def words(found: Ran, records: Sequence[RequestRecord]) -> str:
    client, load = found.client, os.getloadavg()
    failed = sum(not each.ok for each in records)
    waited = client["run_queue_wait_share"] or 0.0
    return (
        f"send lag P99 {client['send_lag_p99_ms']:.3f} ms of {SEND_LAG_P99_MS:g} ms allowed; "
        f"{failed} failed; at most {client['streams_peak']} streams; "
        f"the generator took {client['cpu_share']:.0%} of a "
        f"core, and waited for one for {waited:.1%} of its time; its memory grew by {found.grown_mb:.0f} MB; "
        f"load average {load[0]:.2f} {load[1]:.2f} {load[2]:.2f} on {os.cpu_count()} cores at the end"
    )


if __name__ == "__main__":
    main()
