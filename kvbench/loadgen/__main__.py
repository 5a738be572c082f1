"""``python -m kvbench.loadgen SPEC.json``"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.core.records import RequestRecord
from kvbench.errors import InputError, ServerError
from kvbench.http1 import Pool
from kvbench.loadgen.control import Orders, report, tell
from kvbench.loadgen.spec import LoadSpec, planned_requests
from kvbench.loadgen.trial import Trial
from kvbench.spawned import read_spec, run
from kvbench.spawned import tell as tell_error

log = logging.getLogger(__name__)

RESERVED_FDS = 64


async def generate(spec: LoadSpec, stop: asyncio.Event) -> int:
    """Prepares, waits for "go" if asked to, runs the trial, writes the records. Returns the exit code."""
    orders = Orders(stop)
    pool = Pool(spec.base_url)
    try:
        await pool.resolve()
    except OSError as error:
        raise ServerError(f"cannot find the host of {spec.base_url}: {error}") from error
    plan = planned_requests(spec, pool)
    # Many connections opened long before the first send could be closed as idle by the server, so
    # they are opened last, and again after a long wait for "go" only as far as they are missing.
    connections = min(spec.expected_streams(), descriptors_for(spec.expected_streams()))
    await _warm(pool, connections)
    trial = Trial(spec, plan, pool, report)
    gc.collect()
    gc.freeze()
    gc.disable()
    tell({"event": "ready"})
    if spec.wait_for_go:
        await orders.wait_for_go()
    end = await trial.run(stop)
    gc.enable()
    await asyncio.to_thread(write_records, Path(spec.records_path), trial.records)
    orders.close()
    await pool.close()
    tell(end)
    return 0


async def _warm(pool: Pool, count: int) -> None:
    try:
        await pool.warm(count)
    except OSError as error:
        # The trial's own requests will meet the same and record it.
        log.warning("cannot open %d connections beforehand: %s", count, error)


def descriptors_for(streams: int) -> int:
    """Raises the limit of file descriptors for that many streams; returns how many there can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = streams * 2 + RESERVED_FDS  # twice, because streams pile up on a server that falls behind
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning("only %d file descriptors are allowed, %d may be needed (ulimit -n)", soft, wanted)
        return max(1, soft - RESERVED_FDS)
    return streams


def write_records(path: Path, records: Sequence[RequestRecord]) -> None:
    """JSON lines in scheduled order, renamed into place."""
    partial = path.with_name(path.name + ".part")
    with partial.open("w") as file:
        for record in records:
            # Not to_json(): asdict copies every list of gaps first.
            file.write(json.dumps(vars(record), separators=(",", ":")) + "\n")
    os.replace(partial, path)


def main(argv: Sequence[str]) -> int:
    try:
        spec = read_spec(LoadSpec, argv)
        spec.check()
    except InputError as error:
        return tell_error("kvbench.loadgen", error)
    return run("kvbench.loadgen", lambda stop: generate(spec, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
