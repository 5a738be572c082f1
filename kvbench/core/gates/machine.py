"""Gates on the machine: did it belong to this trial?"""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.core.gates.evidence import Evidence, GateLimits
from kvbench.core.gates.evidence_figures import HostFigures
from kvbench.core.gates.transfer import RDMA_TRANSPORTS
from kvbench.core.records import Finding


def machine_disturbed(evidence: Evidence) -> Finding | None:
    """The machine worked for this trial alone, and at its full speed.

    evidence: CPU time of other processes, stolen by the hypervisor, withheld by the cgroup's limit; thermal
    events of CPUs; slowdowns of GPUs for heat or power; traffic on the data NICs beyond this trial's.
    A miss is refused where others had the CPU that the engines lacked: the machine was full, processes
    waited, and others or the hypervisor took more than a tenth. Processes of kvbench's and of the
    deployment's are no others, nor are kernel threads.
    limits: else it warns only. Whether it did harm to kvbench's own parts and to emulated engines, these tell
    (client_limited, host_starved, emulator_behind). Of a server on this machine that kvbench did not start,
    the processes that listen and their children are its own; the owner of other CPU time is unknown.
    """
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
        + "; with all cores in use a miss is not the system's" * starved
        + (f"; {host.unknown_owner}" if unknown else ""),
        "find out whether these processes work for the server; " * unknown
        + "stop other work on this machine, see to its cooling and power, and measure again",
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
    """A miss on a full machine of which others had too much, where no engine tells its own delay."""
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
    """What took more of the CPU time than it may, in words."""
    others = "processes of unknown owner" if host.unknown_owner else "other processes"
    for what, share, limit in (
        (f"used by {others}", host.other_cpu_share, limits.other_cpu_share),
        ("stolen by the hypervisor", host.steal_share, limits.steal_share),
    ):
        if share is not None and share > limit:
            who = f" ({', '.join(host.takers)})" * bool(host.takers and share == host.other_cpu_share)
            yield f"{share:.1%} of the CPU time was {what}{who}"
    if host.throttled_share is not None and host.throttled_share > limits.throttled_share:
        yield f"the cgroup's CPU limit held this run back for {host.throttled_share:.1%} of the time"


def _heat(evidence: Evidence) -> Iterator[str]:
    if evidence.host.thermal_events:
        yield f"CPUs slowed down for heat {evidence.host.thermal_events:.0f} times"
    if evidence.host.gpu_slowdowns:
        yield f"GPUs slowed down ({'; '.join(evidence.host.gpu_slowdowns)})"


def _traffic(evidence: Evidence) -> Iterator[str]:
    """Traffic of others on the KV's NICs. On loopback this run's own HTTP cannot be told apart."""
    moved = evidence.kv_bytes
    if moved is None or not evidence.engines_here:
        return
    rdma = evidence.transport_asked.lower() in RDMA_TRANSPORTS
    data = {
        name: nic
        for name, nic in evidence.nics.items()
        if not nic.loopback and (name in evidence.nics_asked or (rdma and nic.kind == "rdma"))
    }
    # Sender and receiver are both here: each byte of KV is counted going out and coming in.
    foreign = sum(nic.sent_bytes + nic.received_bytes for nic in data.values()) - 2 * moved
    if foreign > max(evidence.limits.foreign_bytes, evidence.limits.foreign_share * 2 * moved):
        yield f"{foreign / 1e6:.0f} MB of other traffic on {', '.join(data)}"
