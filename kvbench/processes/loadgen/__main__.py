"""``python -m kvbench.processes.loadgen SPEC.json``; with ``-`` the spec is the first line of stdin."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.core.plan.processes import LOADGEN_MODULE
from kvbench.errors import InputError, KvbenchError, StoreError
from kvbench.processes.common.entry import parse_spec, print_error, read_spec, shorten_slice, sleep_exactly
from kvbench.processes.common.record_file import write_records
from kvbench.processes.loadgen.control import STDIN, Orders, Preparation, Reporter, print_event
from kvbench.processes.loadgen.in_flight import InFlightRequest, InFlightRun
from kvbench.processes.loadgen.plan import (
    PlannedRequest,
    Spares,
    TokenEncoder,
    planned_requests,
    plant_canaries,
    prepare,
)
from kvbench.processes.loadgen.run import LoadRun
from kvbench.processes.loadgen.schedules import Begin, PlannedSchedule
from kvbench.processes.loadgen.sockets.loop import SocketLoop
from kvbench.processes.loadgen.sockets.pool import ConnectionPool
from kvbench.processes.loadgen.sockets.wire import ServerAddress
from kvbench.processes.loadgen.spec import LoadSpec

log = logging.getLogger(LOADGEN_MODULE)

RESERVED_FDS = 64
SPEC_BYTES = 65_536


def generate(spec: LoadSpec) -> int:
    """Prepare, wait for "go" if requested, run the trial, write the records. Return the exit code."""
    loop = SocketLoop()
    orders = Orders(loop)
    run = session_run(spec, loop) if spec.sessions_path else planned_run(spec, loop)
    gc.collect()
    gc.freeze()
    gc.disable()
    print_event({"event": "ready"})
    if spec.wait_for_go:
        orders.wait_for_go()
    end = run.run(orders, orders.start_at)
    for line in run.last_lines():
        print_event(line)
    try:
        write_records(Path(spec.records_path), run.records)
    except OSError as error:  # the log may be on the same full disk, so report it on stdout
        print_event({"event": "unwritten", "why": error.strerror or str(error)})
        return StoreError.exit_code
    print_event(end)
    return 0


def planned_run(spec: LoadSpec, loop: SocketLoop) -> LoadRun:
    """Return the run of requests that are known beforehand."""
    watched = Preparation().watched
    plan = planned_requests(spec, watched)
    spares = plant_canaries(spec, plan)
    pools, begin = prepare_dispatch(spec, watched([*plan, *spares]), loop)
    warm(spec, len(plan), plan[-1].offset_s if plan else 0.0, pools)
    schedule = PlannedSchedule(spec, plan, Spares(spares))
    return LoadRun(spec, schedule, loop, pools, Reporter().report, begin)


def session_run(spec: LoadSpec, loop: SocketLoop) -> LoadRun:
    # A slow import that only sessions need.
    from kvbench.processes.loadgen.session_schedule import SessionPrompts, SessionSchedule, read_session_load

    load = read_session_load(spec.sessions_path)
    prompts = SessionPrompts(load, spec.vocab_size, spec.seed, TokenEncoder(spec.vocab_size).items)
    prompts.prepare()
    pools, begin = prepare_dispatch(spec, (), loop)
    warm(spec, load.requests, float(load.session_offsets_s[-1]), pools)
    schedule = SessionSchedule(load, prompts)
    return LoadRun(spec, schedule, loop, pools, Reporter().report, schedule.filling(begin))


def prepare_dispatch(
    spec: LoadSpec, plan: Iterable[PlannedRequest], loop: SocketLoop
) -> tuple[list[ConnectionPool], Begin]:
    """Make the bytes of all planned requests, for one server, or for P and D in direct mode. Later requests
    get their bytes when they begin."""
    if spec.direct is not None:
        # Only for direct mode: importing the connectors takes about 0.1 s.
        from kvbench.processes.loadgen.direct import DirectDispatch

        dispatch = DirectDispatch(spec, loop)
        dispatch.find()
        dispatch.prepare(plan)
        return dispatch.pools, dispatch.begin
    server = ServerAddress(spec.base_url, spec.access)
    server.resolve()
    prepare(spec, plan, server)

    def begin(run: InFlightRun, request: PlannedRequest, scheduled_s: float) -> InFlightRequest:
        if not request.parts:
            prepare(spec, (request,), server)
        return InFlightRequest(run, request, scheduled_s)

    return [ConnectionPool(server, loop)], begin


def warm(spec: LoadSpec, requests: int, seconds: float, pools: Sequence[ConnectionPool]) -> None:
    if not requests:
        return
    streams = spec.expected_streams(requests, seconds)
    share = -(-streams // len(pools))
    count = descriptors_for(share * len(pools)) // len(pools)
    for pool in pools:
        if (error := pool.warm(min(share, max(1, count)))) is not None:
            # The trial's requests will meet and record the same error.
            log.warning("cannot open %d connections to %s beforehand: %s", share, pool.server.url, error)


def descriptors_for(streams: int) -> int:
    """Raise the limit of file descriptors for that many streams; return how many are possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = streams * 2 + RESERVED_FDS  # twice, because streams pile up on a server that falls behind
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning("only %d file descriptors are allowed, %d may be needed (ulimit -n)", soft, wanted)
        return max(1, soft - RESERVED_FDS)
    return streams


def spec_from_stdin() -> LoadSpec | None:
    """Read the spec from stdin's first line; None if stdin ends before. Nothing may follow before "ready"."""
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(STDIN, SPEC_BYTES)
        if not more:
            return None
        data += more
    try:
        return parse_spec(LoadSpec, json.loads(data))
    except ValueError as error:
        raise InputError(f"cannot read the spec on stdin: {error}") from error


def main(argv: Sequence[str]) -> int:
    shorten_slice()
    sleep_exactly()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        spec = spec_from_stdin() if list(argv) == ["-"] else read_spec(LoadSpec, argv)
        if spec is None:
            return 0
        spec.check()
        return generate(spec)
    except KvbenchError as error:
        return print_error(LOADGEN_MODULE, error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
