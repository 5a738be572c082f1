"""How late turns of sessions are sent, many sessions at once: ``make perf-turns``. It judges nothing.

Sessions begin within ten seconds of each other on the exact server; each turn is due think time after its
last token. Turns that open a session, whose times are planned, are apart from later ones. On a machine that
is not idle look at the waits for a core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvbench.core.records import RequestRecord
from kvbench.core.scenario.sections import Sessions, SessionShape
from kvbench.core.sessions.session_load import SessionLoad, session_load
from kvbench.core.sessions.session_source import source_of
from kvbench.planning.load_files import write_session_load
from kvbench.processes.common.record_file import read_records
from tools.bench import arguments, machine_load, table, workplace
from tools.perf_loadgen import Ran, ran

BEGIN_S = 10.0
SEND_LAG_P99_MS = 1.0


def main() -> None:
    chosen = arguments(
        __doc__,
        sessions=(1000, "at once"),
        turns=(6, "of each"),
        think_s=(5.0, "think time, the median"),
        first_len=(2048, "tokens of the first prompt, the median"),
    )
    load = many_sessions(chosen.sessions, chosen.turns, chosen.think_s, chosen.first_len)
    with workplace("turns") as (folder, launcher):
        path = folder / "sessions.npz"
        write_session_load(path, load)
        found = ran(folder, launcher, {**PLAN, "requests": load.requests, "sessions_path": str(path)})
        records = read_records(folder / "records")
    title = f"{chosen.sessions:,} sessions at once, {load.requests:,} turns"
    print(table("sent late (ms)", "turns|P50|P90|P99|most", list(rows(records)), title))
    print(words(found, records))


PLAN = {"rate": 1.0, "input_len": 1, "output_len": 1, "timeout_s": 60.0}


def many_sessions(count: int, turns: int, think_s: float, first_len: int) -> SessionLoad:
    """Sessions of a shape that begin evenly within ten seconds, with answers that are made up."""
    shape = SessionShape(turns=turns, first_len=first_len, think_time_s=think_s, output_len=32, spread=0.3)
    source = source_of(Sessions(shape=shape, answers="recorded", max_turns=2 * turns), None)
    sessions, scope, block_tokens = source.sessions(count, 1)
    offsets = np.linspace(0.0, BEGIN_S, count).tolist()
    return session_load(sessions, offsets, scope, block_tokens, own_answers=False)


def rows(records: Sequence[RequestRecord]) -> Iterator[list[str]]:
    for name, which in (("first turns", [0]), ("later turns", range(1, 1_000_000))):
        late = [
            1e3 * (record.sent_s - record.scheduled_s)
            for record in records
            if record.sent_s and record.turn in which
        ]
        yield [name, f"{len(late):,}", *(f"{lag:.3f}" for lag in np.quantile(late, (0.5, 0.9, 0.99, 1.0)))]


def words(found: Ran, records: Sequence[RequestRecord]) -> str:
    client = found.client
    failed = sum(not record.ok for record in records)
    waited = client["run_queue_wait_share"] or 0.0
    return (
        f"send lag P99 {client['send_lag_p99_ms']:.3f} ms of {SEND_LAG_P99_MS:g} ms allowed; "
        f"{failed} failed; at most {client['streams_peak']} streams; "
        f"the generator took {client['cpu_share']:.0%} of a "
        f"core, and waited for one for {waited:.1%} of its time; its memory grew by {found.grown_mb:.0f} MB; "
        f"{machine_load()}"
    )


if __name__ == "__main__":
    main()
