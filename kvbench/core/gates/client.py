"""Gates on kvbench's own processes and the machine: was one of them the limit, or busy with other work?

These causes only lengthen latencies. A trial that meets the SLO anyway is met, with a warning. A miss is
refused if subtracting the delay from every request would turn it into a hit. A gross delay refuses met and
missed trials, because the latencies themselves are wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kvbench.core.gates.evidence import Evidence, GateLimits, HostFigures
from kvbench.core.gates.transfer import RDMA_TRANSPORTS
from kvbench.core.records import Finding, RequestRecord
from kvbench.core.slo import Slo


def machine_disturbed(evidence: Evidence) -> Finding | None:
    """The machine worked for this trial alone, and at its full speed.

    evidence: CPU time of other processes, stolen by the hypervisor, withheld by the cgroup's limit; thermal
    events of CPUs; slowdowns of GPUs for heat or power; traffic on the data NICs beyond this trial's. A miss
    is refused if others used the CPU that the engines lacked: the machine was full, processes waited, and
    others or the hypervisor used more than a tenth. Processes of kvbench and the deployment, and kernel
    threads, do not count as others. limits: otherwise only a warning. kvbench's own parts and emulated
    engines report such delays themselves (client_limited, host_starved, emulator_behind). For a server on
    this machine that kvbench did not start, the listening processes and their children count as the server;
    the owner of other CPU time is unknown."""
    parts = [*cpu_taken(evidence.host, evidence.limits), *_heat(evidence), *_traffic(evidence)]
    if not parts:
        return None
    host = evidence.host
    starved = engines_starved(evidence)
    unknown = bool(host.unknown_owner) and (host.other_cpu_share or 0.0) > evidence.limits.other_cpu_share
    return Finding(
        "machine_disturbed",
        "invalid" if starved else "warning",
        "the machine was disturbed: "
        + ", ".join(parts)
        + "; all cores were in use, so the miss is not the system's" * starved
        + (f"; {host.unknown_owner}" if unknown else ""),
        "check whether these processes belong to the server; " * unknown
        + "stop other work on this machine, check cooling and power, and measure again",
        {
            "takers": list(host.takers),
            "busy_share": host.busy_share,
            "pressure_share": host.pressure_share,
            "other_cpu_share": host.other_cpu_share,
            **({"unknown_owner": host.unknown_owner} if unknown else {}),
            "steal_share": host.steal_share,
            "throttled_share": host.throttled_share,
            "thermal_events": host.thermal_events,
            "gpu_slowdowns": list(host.gpu_slowdowns),
            "load_average": host.load_average,
            "cpu_count": host.cpu_count,
        },
    )


def engines_starved(evidence: Evidence) -> bool:
    """Return whether a busy machine explains the miss, with no engine reporting its own delay."""
    host, limits = evidence.host, evidence.limits
    if not evidence.hosts_watched or (evidence.attained and evidence.queue_growth is None):
        return False
    if any(engine.step_lag_p99_s is not None for engine in evidence.engines.values()):
        return False
    taken = (host.other_cpu_share or 0.0) + (host.steal_share or 0.0)
    crowded = [
        share >= limit
        for share, limit in (
            (host.busy_share, limits.busy_share),
            (host.pressure_share, limits.pressure_share),
        )
        if share is not None
    ]
    return taken > limits.other_cpu_share and bool(crowded) and all(crowded)


def cpu_taken(host: HostFigures, limits: GateLimits) -> Iterator[str]:
    """Yield each excessive use of CPU time in words."""
    others = "processes of unknown owner" if host.unknown_owner else "other processes"
    for what, share, limit in (
        (f"used by {others}", host.other_cpu_share, limits.other_cpu_share),
        ("stolen by the hypervisor", host.steal_share, limits.steal_share),
    ):
        if share is not None and share > limit:
            who = f" ({', '.join(host.takers)})" * bool(host.takers and share == host.other_cpu_share)
            yield f"{share:.1%} of the CPU time was {what}{who}"
    if host.throttled_share is not None and host.throttled_share > limits.throttled_share:
        yield f"the cgroup's CPU limit throttled this run for {host.throttled_share:.1%} of the time"


def _heat(evidence: Evidence) -> Iterator[str]:
    if evidence.host.thermal_events:
        yield f"CPUs throttled for heat {evidence.host.thermal_events:.0f} times"
    if evidence.host.gpu_slowdowns:
        yield f"GPUs slowed down ({'; '.join(evidence.host.gpu_slowdowns)})"


def _traffic(evidence: Evidence) -> Iterator[str]:
    """Yield other traffic on the KV's NICs. On loopback kvbench's HTTP is included."""
    moved = evidence.kv_bytes
    if moved is None or not evidence.engines_here:
        return
    rdma = evidence.requested_transport.lower() in RDMA_TRANSPORTS
    data = {
        name: nic
        for name, nic in evidence.nics.items()
        if not nic.loopback and (name in evidence.requested_nics or (rdma and nic.kind == "rdma"))
    }
    # Sender and receiver are both here: each byte of KV is counted going out and coming in.
    foreign = sum(nic.sent_bytes + nic.received_bytes for nic in data.values()) - 2 * moved
    if foreign > max(evidence.limits.foreign_bytes, evidence.limits.foreign_share * 2 * moved):
        yield f"{foreign / 1e6:.0f} MB of other traffic on {', '.join(data)}"


_LACKING: Final = (
    "Too many open files|Cannot assign requested address|No buffer space available|Cannot allocate memory"
    "|No space left on device"
)
"""Errors for missing descriptors, ports, memory or disk: EMFILE, EADDRNOTAVAIL, ENOBUFS, ENOMEM, ENOSPC."""
_OS_ERROR: Final = re.compile(_LACKING)
_OF_ROUTER: Final = re.compile(rf"cannot be reached: [^\n]*({_LACKING})")
"""Response of kvbench's router when it cannot connect to a server."""
_STEP: Final = "step"
_TRANSFER: Final = "KV transfer"
_LASTS: Final = {_STEP: "its busy time", _TRANSFER: "the transfers' modelled time"}


def own_resources(evidence: Evidence) -> Finding | None:
    """kvbench's own processes had the descriptors, ports, memory and disk that the load needs.

    evidence: the operating system's errors when the load generator or kvbench's router opened a connection,
    and those that emulated engines report. Such requests are no misses of the system: one refuses the trial.
    limits: a server that kvbench did not start is part of the system under test."""
    emulated = any(engine.step_lag_p99_s is not None for engine in evidence.engines.values())
    counts = {"load generator": 0, "router": 0, "emulated engine": 0}
    first = ""
    for record in evidence.records:
        process = _starved_process(record, emulated)
        if process:
            counts[process] += 1
            first = first or record.error_detail
    lacking = {process: count for process, count in counts.items() if count}
    if not lacking:
        return None
    parts = [
        f"the load generator could not open {count} of its connections"
        if process == "load generator"
        else f"the {process} failed {count} requests"
        for process, count in lacking.items()
    ]
    return Finding(
        "own_resources",
        "invalid",
        f"kvbench's own processes lacked resources: {', '.join(parts)}; the first: {first}",
        "free memory or disk if the error says so; else raise the open-file limit in the shell that starts "
        "kvbench (`ulimit -n 65536`), or offer a lower rate",
        {"failed": lacking},
    )


def _starved_process(record: RequestRecord, emulated: bool) -> str:
    """Return the kvbench process that lacked resources for a request; empty if none."""
    if record.error == "connect" and _OS_ERROR.search(record.error_detail):
        return "load generator"
    if record.error == "http_error" and _OF_ROUTER.search(record.error_detail):
        return "router"
    if record.error == "http_error" and emulated and _OS_ERROR.search(record.error_detail):
        return "emulated engine"
    return ""


def client_limited(evidence: Evidence) -> Finding | None:
    """The load generator neither sent late nor saw answers late.

    evidence: its own lags (P99, and the largest of the trial) against 5 ms or 2 % of the TTFT limit,
    whichever is larger. If the kernel timestamps received bytes, a late read affects only chunks that were
    read together with later ones: each may have arrived as early as the previous empty read. limits: a client
    on another machine than the servers still shares their network."""
    client = evidence.client
    allowed, gross = _allowed_ms(evidence), _gross_ms(evidence)
    lag = max(client.send_ms, client.look_ms)
    if lag <= allowed:
        return None
    if router_starved(evidence) and _client_starved(evidence):
        return None  # host_starved reports both
    forgiven = (client.worst_send_ms + client.worst_look_ms, client.worst_look_ms)
    refused = lag > gross or _may_have_caused_the_miss(evidence, *forgiven)
    return Finding(
        "client_limited",
        "invalid" if refused else "warning",
        f"the load generator was late: sends by {client.send_ms:.1f} ms and reads by up to "
        f"{client.look_ms:.1f} ms (P99); {allowed:.1f} ms are allowed",
        "free CPU on the load generator's machine, use a separate machine, add workers (load.workers), "
        "or offer a lower rate",
        {
            "send_lag_p99_ms": client.send_lag_p99_ms,
            "send_lag_max_ms": client.send_lag_max_ms,
            "chunk_lag_p99_ms": client.chunk_lag_p99_ms,
            "first_error_p99_ms": client.first_error_p99_ms,
            "token_error_p99_ms": client.token_error_p99_ms,
            "reads": client.reads,
            "chunks": client.chunks,
            "loop_lag_p99_ms": client.loop_lag_p99_ms,
            "allowed_ms": allowed,
            "cpu_share": client.cpu_share,
            "run_queue_wait_share": client.run_queue_wait_share,
            "loop_lag_share": client.loop_lag_share,
            "stamps": client.stamps,
            "gc_collections": client.gc_collections,
        },
    )


def router_starved(evidence: Evidence) -> bool:
    """Return whether the router was late although idle, waiting for a core."""
    router, limits = evidence.router, evidence.limits
    late = 1e3 * (router.loop_lag_p99_s or 0.0) > _allowed_ms(evidence)
    if not late or router.wait_s is None or router.lag_s is None:
        return False
    return (router.cpu_share or 0.0) < limits.router_cpu_share and (
        router.wait_s >= limits.waited_lag * router.lag_s
    )


def _client_starved(evidence: Evidence) -> bool:
    """Return whether CPU shortage explains the load generator's lateness: it waited for a core for that time.
    If it does not report waiting times: it waited at all, or was at most twice as late as the router."""
    client, limits = evidence.client, evidence.limits
    waited = client.run_queue_wait_share
    if waited is not None and client.loop_lag_share is not None:
        return waited >= limits.waited_lag * client.loop_lag_share
    router_ms = 1e3 * (evidence.router.loop_lag_p99_s or 0.0)
    return (waited or 0.0) >= limits.run_queue_wait_share or max(client.send_ms, client.look_ms) <= (
        2 * router_ms
    )


def host_starved(evidence: Evidence) -> Finding | None:
    """The machine had CPU left for kvbench's own processes, which need little.

    evidence: kvbench's router was late and used less than 90 % of a core, and by the kernel's scheduler it
    waited for a core during at least half of its delay; also the load generator's lag. Reports who used the
    cores, if known: other processes or the engines. limits: silent for another router."""
    if not router_starved(evidence):
        return None
    client, router, host = evidence.client, evidence.router, evidence.host
    lag_ms = 1e3 * (router.loop_lag_p99_s or 0.0)
    client_ms = max(client.send_ms, client.look_ms)
    forgiven = (2 * lag_ms + client.worst_send_ms + client.worst_look_ms, lag_ms + client.worst_look_ms)
    refused = max(lag_ms, client_ms) > _gross_ms(evidence) or _may_have_caused_the_miss(evidence, *forgiven)
    taken = list(cpu_taken(host, evidence.limits))
    by = ", ".join(taken) if taken else "no other load was seen, so the engines used all cores"
    return Finding(
        "host_starved",
        "invalid" if refused else "warning",
        f"the host was starved of CPU: the router used {router.cpu_share or 0.0:.0%} of a core, waited for "
        f"a core {router.wait_share or 0.0:.0%} of the time and was late by {lag_ms:.1f} ms (P99), the load "
        f"generator by {client_ms:.1f} ms; {by}",
        "stop other work on this machine, or reserve cores or a machine for router and load generator; "
        "the router is not the cause",
        {
            "router_cpu_share": router.cpu_share,
            "router_wait_share": router.wait_share,
            "router_lag_p99_ms": lag_ms,
            "client_lag_p99_ms": client_ms,
            "client_wait_share": client.run_queue_wait_share,
            "other_cpu_share": host.other_cpu_share,
            "takers": list(host.takers),
            "allowed_ms": _allowed_ms(evidence),
        },
    )


def router_limited(evidence: Evidence) -> Finding | None:
    """kvbench's router had enough CPU and was not late. evidence: CPU time per second of its busiest process
    (limit 0.9), and its event loop's lag (P99) against the client's limits. limits: silent for another
    router."""
    router, limits = evidence.router, evidence.limits
    allowed, gross = _allowed_ms(evidence), _gross_ms(evidence)
    lag_ms = 1e3 * (router.loop_lag_p99_s or 0.0)
    share = router.cpu_share or 0.0
    busy = share >= limits.router_cpu_share
    if (lag_ms <= allowed and not busy) or router_starved(evidence):
        return None
    missed = not evidence.attained or evidence.queue_growth is not None
    # A router without CPU left queues requests by an unknown time, so all of the wait may be its own.
    refused = lag_ms > gross or (busy and missed) or _may_have_caused_the_miss(evidence, 2 * lag_ms, lag_ms)
    return Finding(
        "router_limited",
        "invalid" if refused else "warning",
        f"the router was the limit: {share:.0%} of a core in its busiest process, and late by "
        f"{lag_ms:.1f} ms (P99); {limits.router_cpu_share:.0%} and {allowed:.1f} ms are allowed",
        "add router cores and processes (--set deployment.router_processes=N), or measure without it: "
        "--set load.mode=direct",
        {
            "cpu_share": router.cpu_share,
            "processes": router.processes,
            "loop_lag_p99_ms": lag_ms,
            "allowed_ms": allowed,
        },
    )


def emulator_behind(evidence: Evidence) -> Finding | None:
    """The emulated engine kept its own timing model. evidence: by how much its steps, and the KV transfers
    that a model paces, ended late (P99, and all delays as a share of the time that they were to take).
    limits: only for the emulated engine."""
    limits = evidence.limits
    lags: dict[tuple[str, str], float] = {}
    shares: dict[tuple[str, str], float] = {}
    for name, engine in evidence.engines.items():
        lags[name, _STEP] = 1e3 * (engine.step_lag_p99_s or 0.0)
        shares[name, _STEP] = engine.lag_share or 0.0
        lags[name, _TRANSFER] = 1e3 * (engine.transfer_lag_p99_s or 0.0)
        shares[name, _TRANSFER] = engine.transfer_lag_share or 0.0
    lag_ms, share = max(lags.values(), default=0.0), max(shares.values(), default=0.0)
    allowed = _allowed_ms(evidence)
    if lag_ms <= allowed and share <= limits.engine_lag_share:
        return None
    refused = lag_ms > _gross_ms(evidence) or share > limits.engine_lag_max_share
    if not evidence.attained and not refused:
        refused = evidence.attained_with(_relax(evidence, sum(lags.values()), lag_ms))
    worst = max(lags, key=lambda key: (shares[key] > limits.engine_lag_share, lags[key], shares[key]))
    role, what = worst
    advice = (
        "free CPU on this machine, raise time_scale, or offer a lower rate"
        if what == _STEP
        else "the bytes took longer than transfer_like or transfer_model predicts: choose a slower model, "
        "raise time_scale, or offer a lower rate"
    )
    return Finding(
        "emulator_behind",
        "invalid" if refused else "warning",
        f"the emulated {role} engine was slower than its timing model: a {what} ended "
        f"{lags[worst]:.1f} ms late (P99), all delays together are {shares[worst]:.0%} of {_LASTS[what]}; "
        f"{allowed:.0f} ms and {limits.engine_lag_share:.0%} are allowed",
        advice,
        {
            "role": role,
            "what": what,
            "lag_p99_ms": {name: ms for (name, kind), ms in lags.items() if kind == what},
            "lag_share": {name: share for (name, kind), share in shares.items() if kind == what},
            "allowed_ms": allowed,
        },
    )


def _allowed_ms(evidence: Evidence) -> float:
    limits = evidence.limits
    return max(limits.client_lag_ms, limits.client_lag_share * (evidence.slo.tightest("ttft_ms") or 0.0))


def _gross_ms(evidence: Evidence) -> float:
    limits = evidence.limits
    share = limits.client_lag_max_share * (evidence.slo.tightest("ttft_ms") or 0.0)
    return max(10 * limits.client_lag_ms, share)


def _may_have_caused_the_miss(evidence: Evidence, ttft_ms: float, gap_ms: float) -> bool:
    if evidence.attained:
        return evidence.queue_growth is not None  # this causes misses too, and late sends cause queues
    return evidence.attained_with(_relax(evidence, ttft_ms, gap_ms))


def _relax(evidence: Evidence, ttft_ms: float, gap_ms: float) -> Slo:
    """Return the SLO relaxed by the lag; for TPOT one late read is divided over all gaps."""
    gaps = max((record.requested_output_len for record in evidence.records), default=2) - 1
    return evidence.slo.loosened(ttft_ms, gap_ms / max(1, gaps))
