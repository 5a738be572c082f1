"""Gates on the KV transfer (bytes, transport, NICs) and on hardware limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.gates.evidence import EMULATED, Evidence, span
from kvbench.core.records import Finding

RDMA_TRANSPORTS: Final = frozenset({"rdma", "ib", "rc", "dc", "ud", "rc_x", "dc_x", "ud_x", "rc_v", "ud_v"})
_LOCAL_TRANSPORTS: Final = frozenset({"cuda", "cuda_copy", "gdr_copy", "self"})
"""UCX transports that work only within a machine, listed besides the network transport."""
_UCX_FAMILIES: Final = {
    "ib": ("rc", "dc", "ud", "gga"),
    "rc_x": ("rc_mlx5",),
    "dc_x": ("dc_mlx5",),
    "ud_x": ("ud_mlx5",),
    "rc_v": ("rc_verbs",),
    "ud_v": ("ud_verbs",),
    "sm": ("posix", "sysv", "xpmem", "cma", "knem"),
    "shm": ("posix", "sysv", "xpmem", "cma", "knem"),
    "cuda": ("cuda_copy", "cuda_ipc", "gdr_copy"),
}
"""UCX transports behind the short names of UCX_TLS."""
LEAST_BYTES: Final = 1e6
"""Fewest KV bytes that stand out from other traffic of a NIC."""


def kv_bytes_wrong(evidence: Evidence) -> Finding | None:
    """Exactly the KV of the requests moved: not less, not twice. evidence: bytes that the connector counted
    against model shape × blocks × requests (within 1 %). limits: only warns where the engine's block layout
    is not kvbench's own; needs known shapes."""
    per_request, moved = evidence.kv_bytes_per_request, evidence.kv_bytes
    if per_request is None or moved is None:
        return None
    fewest, largest = evidence.expected(
        per_token=False, tolerance=evidence.limits.count_tolerance, fresh=True
    )
    least, most = fewest * (per_request - evidence.kv_bytes_tolerance), largest * per_request
    if least <= moved <= most:
        return None
    return Finding(
        "kv_bytes_wrong",
        "invalid" if evidence.kv_bytes_certain or not moved else "warning",
        f"{moved / 1e6:.1f} MB of KV moved where {span(least / 1e6, most / 1e6, 1)} MB were expected",
        "prompts were cached, recomputed or moved twice; also check the model's KV size in the scenario",
        {"kv_bytes": moved, "expected": [least, most]},
    )


def plain_transport(name: str) -> str:
    """Return the bare transport: ``ucx:tcp/lo`` is tcp, ``ucx:rc_mlx5/mlx5_0:1`` is rc_mlx5."""
    bare = name.strip().lower().removesuffix(" (configured)").partition("/")[0]
    return bare.rpartition(":")[2]


def _is_among(ran: str, names: Sequence[str]) -> bool:
    """Return whether a transport was requested, by itself or by its family."""
    return any(ran == name or ran.startswith((f"{name}_", *_UCX_FAMILIES.get(name, ()))) for name in names)


def is_another_transport(ran: str, requested: str) -> bool:
    """Return whether a transport ran that was not requested. An empty request allows all."""
    names = [name.strip().lower() for name in requested.split(",") if name.strip()]
    if not names or "auto" in names or "all" in names:
        return False
    return any(not _is_among(plain_transport(name), names) for name in ran.split(",") if name.strip())


def wrong_transport(evidence: Evidence) -> Finding | None:
    """The KV moved over the requested transport, or without a request not over a slow fallback.

    evidence: the transport in the transfer library's log and in the engine's; for RDMA also the byte counters
    of RDMA devices and NICs. A log that proves that GPU memory was accessed by software emulation, or over
    TCP, refuses the trial unless only TCP was requested. limits: counters count only if the engines run on
    this machine, and from 1 MB of KV; loopback inside one RDMA device may be missing from its counters.
    Between hosts without RDMA, unrequested TCP is a warning."""
    requested = [name.strip().lower() for name in evidence.requested_transport.split(",") if name.strip()]
    free = not requested or "auto" in requested or "all" in requested
    logged = ",".join(name for transport in evidence.logged_transports for name in transport.transports)
    for ran in dict.fromkeys((evidence.transport_ran, logged)):
        if is_another_transport(ran, evidence.requested_transport):
            return Finding(
                "wrong_transport",
                "invalid",
                f"the KV moved over {ran}, but {evidence.requested_transport} was requested",
                "see `kvbench doctor` and the transfer library's log for the reason",
                {"asked": evidence.requested_transport, "ran": ran},
            )
    return _slow_fallback(evidence, requested) or (
        _unrequested_tcp(evidence) if free else _not_over_rdma(evidence, requested)
    )


def _slow_fallback(evidence: Evidence, requested: Sequence[str]) -> Finding | None:
    """Report a log that proves a slow fallback (TCP, or copying by both CPUs) unless only TCP was requested.
    vllm-project/vllm issue 52607: UCX writes remote GPU memory of one node over cuda_ipc and reads it over
    TCP, at 0.5 instead of 49 GB/s; all requests are answered."""
    if [name for name in requested if name not in _LOCAL_TRANSPORTS] == ["tcp"]:
        return None
    for log in evidence.logged_transports:
        over_tcp = {plain_transport(name) for name in log.transports} == {"tcp"}
        if log.how != EMULATED and not (over_tcp and log.gpu):
            continue
        has_rdma = any(nic.kind == "rdma" for nic in evidence.nics.values())
        better = log.between != "inter-node" or not over_tcp or has_rdma
        rate = _transfer_rate(evidence)
        at = f", {rate / 1e9:.2g} GB/s by the engine's times" if rate is not None else ""
        return Finding(
            "wrong_transport",
            "invalid" if log.gpu and better else "warning",
            f"{log.process}'s KV moves over {log.text()}{at}: the transfer library found no better "
            "transport, and TCP was not requested",
            _FALLBACK_ADVICE[log.gpu and log.operation == "read" and log.between == "intra-node"],
            {**asdict(log), "asked": evidence.requested_transport, "bytes_per_s": rate},
        )
    return None


_TCP_ADVICE: Final = "if TCP is intended, set ucx_tls: tcp,cuda or protocol: tcp"
_FALLBACK_ADVICE: Final = {
    True: "without NVLink, UCX does not read GPU memory over cuda_ipc (vLLM issue 52607): use the "
    "connector nixl_push (vLLM 0.24 and newer), or set UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on; with NVLink, look "
    f"for memory that cannot be exported (PYTORCH_CUDA_ALLOC_CONF=expandable_segments); {_TCP_ADVICE}",
    False: f"see `kvbench doctor` for RDMA devices and UCX_TLS, UCX_NET_DEVICES; {_TCP_ADVICE}",
}


def _transfer_rate(evidence: Evidence) -> float | None:
    """Return the highest bytes per second of a KV transfer by an engine's counters."""
    rates = [
        engine.kv_bytes / engine.kv_seconds
        for engine in evidence.engines.values()
        if engine.kv_bytes and engine.kv_seconds
    ]
    return max(rates, default=None)


def _unrequested_tcp(evidence: Evidence) -> Finding | None:
    """Report KV on a TCP interface next to idle RDMA or NVLink, if TCP was neither requested nor logged."""
    moved = evidence.kv_bytes or 0.0
    if evidence.transport_ran not in ("", "tcp") or not evidence.engines_here or moved < LEAST_BYTES:
        return None
    faster = {name: nic for name, nic in evidence.nics.items() if nic.kind != "ip"}
    name, over_ip = _busiest_interface(evidence)
    carried = sum(nic.most_bytes for nic in faster.values())
    if not faster or carried >= 0.5 * moved or over_ip < 0.5 * moved:
        return None
    return Finding(
        "wrong_transport",
        "warning",
        f"of {moved / 1e6:.1f} MB of KV {carried / 1e6:.1f} MB went over {', '.join(faster)}, and {name} "
        f"carried {over_ip / 1e6:.1f} MB: the KV may have moved over TCP",
        f"enable the library's report (UCX_LOG_LEVEL=info, UCX_PROTO_INFO=y); {_TCP_ADVICE}",
        {"kv_bytes": moved, "faster_bytes": carried, "ip_bytes": over_ip},
    )


def _busiest_interface(evidence: Evidence) -> tuple[str, float]:
    return max(
        ((name, nic.most_bytes) for name, nic in evidence.nics.items() if nic.kind == "ip"),
        key=lambda pair: pair[1],
        default=("no NIC", 0.0),
    )


def _not_over_rdma(evidence: Evidence, requested: Sequence[str]) -> Finding | None:
    """Report that RDMA was requested, but its counters show no KV."""
    network = [name for name in requested if name not in _LOCAL_TRANSPORTS]
    only_rdma = network and all(name.partition("_")[0] in RDMA_TRANSPORTS for name in network)
    moved = evidence.kv_bytes or 0.0
    if not only_rdma or not evidence.engines_here or not evidence.nics or moved < LEAST_BYTES:
        return None
    devices = [nic for nic in evidence.nics.values() if nic.kind == "rdma"]
    total = sum(nic.most_bytes for nic in devices)
    if devices and total >= 0.5 * moved:
        return None
    name, over_ip = _busiest_interface(evidence)
    by_ip = over_ip >= 0.5 * moved
    where = f"{total / 1e6:.1f} MB went over RDMA devices" if devices else "this host has no RDMA device"
    return Finding(
        "wrong_transport",
        "invalid" if by_ip or not devices else "warning",
        f"{evidence.requested_transport} was requested and {evidence.transport_ran or 'nothing'} reported, "
        f"but of {moved / 1e6:.1f} MB of KV {where}"
        + (f", and {name} carried {over_ip / 1e6:.1f} MB" * by_ip),
        "see `kvbench doctor` for RDMA devices and their state, or force RDMA (MC_FORCE_HCA, UCX_TLS)",
        {"asked": evidence.requested_transport, "kv_bytes": moved, "rdma_bytes": total, "ip_bytes": over_ip},
    )


def wrong_nics(evidence: Evidence) -> Finding | None:
    """The KV moved over all requested NICs, and over no other. evidence: byte counters of each NIC and RDMA
    device during the trial; a NIC with less than a tenth of its equal share carried no KV; another RDMA
    device with more than a tenth of the KV carried some of it, unless it has other traffic. limits: as for
    the transport; other traffic hides it."""
    names, moved = list(evidence.requested_nics), evidence.kv_bytes or 0.0
    if not names or not evidence.engines_here or not evidence.nics or moved < LEAST_BYTES * len(names):
        return None
    share = evidence.limits.nic_share * moved / len(names)
    carried = {name: nic.most_bytes if (nic := evidence.nics.get(name)) else 0.0 for name in names}
    idle = [name for name in names if carried[name] < share]
    least = evidence.limits.nic_share * moved
    others = {name: nic.most_bytes for name, nic in evidence.nics.items() if name not in names}
    busy = {name: most for name, most in others.items() if most >= least}
    if not idle and all(evidence.nics[name].kind != "rdma" for name in busy):
        return None
    seen = busy or len(idle) < len(names)  # else no NIC shows the bytes, so counters may miss them
    return Finding(
        "wrong_nics",
        "invalid" if idle and seen else "warning",
        f"{len(names) - len(idle)} of {len(names)} requested NICs carried KV"
        + (f"; nothing on {', '.join(idle)}" if idle else "")
        + "".join(f"; {name}, not requested, carried {most / 1e6:.1f} MB" for name, most in busy.items()),
        "check names, links and routes; UCX and Mooncake skip NICs that they cannot reach",
        {"asked": names, "bytes": carried, "others": others, "kv_bytes": moved},
    )


def kv_failures(evidence: Evidence) -> Finding | None:
    """No KV transfer failed, except those of cancelled requests. evidence: the connector's counters, against
    the requests that kvbench cancelled so far, less those whose KV expired. limits: needs the connector's
    counters or log lines."""
    failed = sum(engine.kv_failures or 0.0 for engine in evidence.engines.values())
    if failed <= 0:
        return None
    excused = failed + max(0.0, _expired_count(evidence)) <= evidence.kv_may_expire
    return Finding(
        "kv_failures",
        "note" if excused else "invalid",
        f"{failed:.0f} KV transfers failed"
        + (f"; {evidence.kv_may_expire:.0f} requests had been cancelled" if excused else ""),
        "" if excused else "see the transfer library's last lines in the engines' logs",
        {"kv_failures": failed, "may_fail": evidence.kv_may_expire},
    )


def kv_expired(evidence: Evidence) -> Finding | None:
    """Prefill released no KV before decode had fetched it, except that of cancelled requests. evidence: the
    connector's counters against the requests that were cancelled so far. limits: needs the connector's
    counters or log lines."""
    expired = _expired_count(evidence)
    if expired <= 0:
        return None
    excused = expired <= evidence.kv_may_expire
    return Finding(
        "kv_expired",
        "note" if excused else "invalid",
        f"the KV of {expired:.0f} requests expired on prefill before decode had fetched it"
        + (f"; {evidence.kv_may_expire:.0f} requests had been cancelled before" if excused else ""),
        ""
        if excused
        else "decode is overloaded or got no request: lower the rate, raise the lease, check its log",
        {"kv_expired": expired, "may_expire": evidence.kv_may_expire},
    )


def _expired_count(evidence: Evidence) -> float:
    return sum(engine.kv_expired or 0.0 for engine in evidence.engines.values())


MARGIN: Final = 1.02
"""Tolerance for clocks and data sheets."""
STARTS: Final = 400
"""Interval starts that are tested; more find little."""
LEAST_S: Final = 1e-4


def impossible_prefill(evidence: Evidence) -> Finding | None:
    """Prefill was no faster than its GPUs can compute.

    Prompts sent after the start of an interval, with a first token before its end, were computed inside it: 2
    × parameters × tokens + attention, against the highest dense peak of all prefill GPUs. No cache, counter
    or report can hide that.

    evidence: send and first-token times of the requests. limits: silent for unknown models and GPUs
    (``model.active_parameters``, ``deployment.hardware``), and if the load reuses prefixes."""
    work, peak = evidence.prefill_work, evidence.prefill_flops
    if work is None or not peak or evidence.reuse_expected:
        return None
    times = [
        (record.sent_s, record.first_token_s, work.flop(record.input_len))
        for record in evidence.records
        if record.sent_s is not None and record.first_token_s is not None
    ]
    if not times:
        return None
    flops, flop, seconds = fastest_interval(np.array(times, dtype=np.float64))
    if flops <= peak * MARGIN:
        return None
    return Finding(
        "impossible_prefill",
        "invalid",
        f"prefill would have computed {flop / 1e12:.1f} TFLOP in {seconds * 1e3:.1f} ms, {flops / peak:.1f} "
        f"times the {peak / 1e12:.0f} TFLOP/s of {evidence.hardware or 'its GPUs'}: it did not compute them",
        "prompts come from a cache or are not computed: empty the prefix cache, use new prompts; check "
        "deployment.hardware and model.active_parameters",
        {"flop_per_s": flops, "peak": peak, "flop": flop, "seconds": seconds, "parameters": work.source},
    )


def fastest_interval(times: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return (FLOP/s, FLOP, seconds) of the fastest interval. Rows: begin and end in seconds, FLOP."""
    by_end = times[np.argsort(times[:, 1])]
    starts = np.unique(by_end[:, 0])
    if len(starts) > STARTS:
        starts = starts[np.linspace(0, len(starts) - 1, STARTS).astype(int)]
    best = (0.0, 0.0, 0.0)
    for start in starts:
        inside = by_end[by_end[:, 0] >= start]
        seconds = np.maximum(inside[:, 1] - start, LEAST_S)
        done = np.cumsum(inside[:, 2])
        index = int(np.argmax(done / seconds))
        rate = float(done[index] / seconds[index])
        if rate > best[0]:
            best = (rate, float(done[index]), float(seconds[index]))
    return best


def impossible_transfer(evidence: Evidence) -> Finding | None:
    """KV moved no faster than the NICs' line rate.

    evidence: bytes over seconds of the transfers, as the connector counts them: the mean rate of one transfer
    cannot exceed what all NICs of an instance carry together. limits: silent on loopback and inside one host,
    and where no link speed is known (``deployment.nic_gbit``)."""
    line = evidence.kv_line_rate
    if not line:
        return None
    for role, engine in evidence.engines.items():
        moved, seconds = engine.kv_bytes, engine.kv_seconds
        if not moved or seconds is None or moved <= line * seconds * MARGIN:
            continue
        rate = moved / max(seconds, 1e-9)
        return Finding(
            "impossible_transfer",
            "invalid",
            f"{moved / 1e6:.1f} MB of KV in {seconds * 1e3:.1f} ms are {rate / 1e9:.1f} GB/s: "
            f"{rate / line:.1f} times the line rate of the NICs ({line / 1e9:.1f} GB/s)",
            "the transfer times or bytes are wrong, or the KV used another path (NVLink, shared memory); "
            "check deployment.nic_gbit",
            {"role": role, "bytes_per_s": rate, "line_rate": line, "kv_bytes": moved, "kv_seconds": seconds},
        )
    return None
