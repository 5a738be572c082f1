"""Evidence for a trial's gates, from load generator, router, engines, NICs and host.

Data only. None means unknown and triggers no gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final, Literal

from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.metrics.metrics import Summary, ended_at, judge_criteria, judged_records
from kvbench.core.metrics.queue_growth import QueueGrowth, QueueReadings, queue_growth
from kvbench.core.physics import PrefillWork
from kvbench.core.records import Finding, Method, RequestRecord
from kvbench.core.slo import Slo

LOCAL_COMPUTE: Final = "local_compute"
LOCAL_CACHE_HIT: Final = "local_cache_hit"
EXTERNAL: Final = "external_kv_transfer"
"""Sources of prompt tokens in ``vllm:prompt_tokens_by_source_total``."""


PROMPT_LOOK_MS: Final = 2.5
"""Upper median of the wait of chunks read together, in ms; a client on time reads every ms."""


@dataclass(frozen=True)
class ClientFigures:
    """The load generator's figures about itself; of several processes the worst.

    ``cpu_share``, ``run_queue_wait_share``: seconds per second of one process (1 is a whole core).
    ``loop_lag_share``: seconds per second by which timers of the event loop were late. ``send_lag``: planned
    to real send. ``chunk_lag``: from the kernel receiving bytes to reading them. ``stamps``: source of
    receive times, "kernel", "read" or "mixed". ``first_error``, ``token_error``: largest error of the times
    of first tokens, and of all. When several chunks are read together the kernel reports the last one's
    stamp; the others arrived after the previous empty read of their socket. ``reads`` read ``chunks``."""

    send_lag_p50_ms: float | None = None
    send_lag_p99_ms: float | None = None
    loop_lag_p99_ms: float | None = None
    cpu_share: float | None = None
    send_lag_max_ms: float | None = None
    chunk_lag_p99_ms: float | None = None
    chunk_lag_max_ms: float | None = None
    loop_lag_max_ms: float | None = None
    loop_stalls: float | None = None
    run_queue_wait_share: float | None = None
    loop_lag_share: float | None = None
    stamps: str = ""
    gc_collections: float | None = None
    first_error_p99_ms: float | None = None
    first_error_max_ms: float | None = None
    token_error_p50_ms: float | None = None
    token_error_p99_ms: float | None = None
    token_error_max_ms: float | None = None
    reads: float | None = None
    chunks: float | None = None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ClientFigures:
        """Read the known figures of a client's row."""
        return cls(**{item.name: row[item.name] for item in fields(cls) if row.get(item.name) is not None})

    @property
    def send_ms(self) -> float:
        return self.send_lag_p99_ms or 0.0

    @property
    def look_ms(self) -> float:
        """Return the P99 lateness of receive times; kernel stamps are late only for joint reads."""
        error_ms = max(self.first_error_p99_ms or 0.0, self.token_error_p99_ms or 0.0)
        if self.stamps == "kernel":
            return error_ms
        return max(error_ms, self.loop_lag_p99_ms or 0.0, self.chunk_lag_p99_ms or 0.0)

    @property
    def reads_in_time(self) -> bool:
        """Return whether chunks that were read together also arrived together."""
        return (self.token_error_p50_ms or 0.0) <= PROMPT_LOOK_MS

    @property
    def worst_send_ms(self) -> float:
        return max(self.send_lag_max_ms or 0.0, self.send_ms)

    @property
    def worst_look_ms(self) -> float:
        error_ms = max(self.first_error_max_ms or 0.0, self.token_error_max_ms or 0.0, self.look_ms)
        if self.stamps == "kernel":
            return error_ms
        return max(error_ms, self.loop_lag_max_ms or 0.0, self.chunk_lag_max_ms or 0.0)


@dataclass(frozen=True)
class RouterFigures:
    """Figures of kvbench's router: CPU seconds of its busiest process, lag over all processes. ``lag_s``: sum
    of the measured lags; ``wait_s``: time ready without a core."""

    cpu_s: float | None = None
    seconds: float | None = None
    processes: int = 1
    loop_lag_p99_s: float | None = None
    lag_s: float | None = None
    wait_s: float | None = None

    @property
    def wait_share(self) -> float | None:
        """Return the share of time in which its processes waited for a core."""
        return None if self.wait_s is None or not self.seconds else self.wait_s / self.seconds

    @property
    def cpu_share(self) -> float | None:
        """Return the busiest process's CPU seconds per second: near 1 it is saturated."""
        return None if self.cpu_s is None or not self.seconds else self.cpu_s / self.seconds


@dataclass(frozen=True)
class NicFigures:
    """Traffic of an interface ("ip"), RDMA device ("rdma") or GPU's NVLinks ("nvlink")."""

    kind: Literal["ip", "rdma", "nvlink"]
    sent_bytes: float
    received_bytes: float
    bytes_per_s: float | None = None
    """Line rate per direction, or None, as for loopback."""
    loopback: bool = False

    @property
    def most_bytes(self) -> float:
        """Return the larger direction: on loopback both count the same bytes."""
        return max(self.sent_bytes, self.received_bytes)


EMULATED: Final = "software emulation"
"""UCX's term for remote memory access without hardware support: both CPUs copy."""


@dataclass(frozen=True)
class LoggedTransport:
    """A KV transport in a process's log; empty fields are unknown. ``transports`` with devices, as
    ``rc_mlx5/mlx5_0:1``. ``operation``: "read" or "write"; ``local``, ``remote``: "cuda" or "host";
    ``between``: "intra-node" or "inter-node"; ``how``: "zero-copy" or "software emulation". ``line``: the log
    line."""

    process: str
    transports: tuple[str, ...]
    operation: str = ""
    between: str = ""
    local: str = ""
    remote: str = ""
    how: str = ""
    line: str = ""

    @property
    def gpu(self) -> bool:
        return not {self.local, self.remote} & {"", "host"}

    def text(self) -> str:
        names = " and ".join(self.transports)
        way = f"{names} by {self.how}" if self.how else names
        memory = f" from {self.remote} into {self.local} memory" if self.operation == "read" else ""
        if self.operation == "write":
            memory = f" from {self.local} into {self.remote} memory"
        where = f", {self.between}" if self.between else ""
        return f"{way}{f' ({self.operation}{memory}{where})' if self.operation else ''}"


@dataclass(frozen=True)
class EngineFigures:
    """Growth of the counters of all engines of one role during the trial (after − before).

    Token counts are of prompts, ``generation_tokens`` of outputs. ``step_lag_s``: sum of the emulated
    engine's delays behind its timing model over ``steps`` steps that kept it busy for ``busy_s``;
    ``step_lag_p99_s``: their P99. ``transfer_lag_s`` and ``transfer_lag_p99_s``: the same for modelled
    transfers of ``paced_s`` together. ``kv_expired``: requests whose KV was freed before it was fetched.
    ``kv_seconds``: sum of the transfers' times. ``block_tokens``: KV block size of the engines, None if
    unknown or different. ``restarts``: restarted instances. ``running_peak``: most sequences at once on one
    instance; of the ``queued_samples`` with a queue there, ``full_samples`` had that many running."""

    prompt_tokens: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    prompt_tokens_by_source: Mapping[str, float] = field(default_factory=dict)
    requests: float | None = None
    preemptions: float | None = None
    kv_transfers: float | None = None
    kv_bytes: float | None = None
    kv_failures: float | None = None
    kv_expired: float | None = None
    block_tokens: int | None = None
    step_lag_s: float | None = None
    steps: float | None = None
    step_lag_p99_s: float | None = None
    busy_s: float | None = None
    generation_tokens: float | None = None
    kv_seconds: float | None = None
    restarts: float | None = None
    running_peak: float | None = None
    queued_samples: float | None = None
    full_samples: float | None = None
    transfer_lag_s: float | None = None
    transfer_lag_p99_s: float | None = None
    paced_s: float | None = None
    slots: int | None = None
    """``max_num_seqs`` of one instance, if known."""
    instances: int = 1
    served: tuple[float, ...] = ()
    """Finished requests per instance, or tokens if requests are not counted; () if unknown."""
    cache_tokens: float | None = None
    """KV cache capacity of all instances in tokens."""

    @property
    def computed_tokens(self) -> float | None:
        if self.prompt_tokens_by_source:
            return self.prompt_tokens_by_source.get(LOCAL_COMPUTE, 0.0)
        if self.prompt_tokens is None or self.prefix_hits is None:
            return None
        return self.prompt_tokens - self.prefix_hits

    @property
    def hit_rate(self) -> float | None:
        """Return the prefix cache hits as a share of the queried tokens."""
        if self.prefix_hits is None or not self.prefix_queries:
            return None
        return self.prefix_hits / self.prefix_queries

    @property
    def lag_share(self) -> float | None:
        """Return the delay behind the model as a share of the busy time."""
        return self.step_lag_s / self.busy_s if self.step_lag_s is not None and self.busy_s else None

    @property
    def transfer_lag_share(self) -> float | None:
        """Return the delay of paced transfers as a share of their modelled time."""
        return self.transfer_lag_s / self.paced_s if self.transfer_lag_s and self.paced_s else None

    def to_json(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "prompt_tokens_by_source": dict(self.prompt_tokens_by_source)}


@dataclass(frozen=True)
class HostFigures:
    """The machine during the trial; shares of all its cores' time.

    ``other_cpu_share``: used by processes of others; ``steal_share``: by the hypervisor; ``busy_share``: by
    all. ``throttled_share``: seconds per second for which the cgroup's CPU limit stopped this run.
    ``pressure_share``: seconds per second in which some process waited for a core (the kernel's PSI).
    ``load_average`` (1 minute, before the trial) includes this run's work. ``thermal_events``: how often a
    CPU slowed down for heat. ``gpu_slowdowns``: why GPUs slowed down. ``takers``: the other processes."""

    load_average: float | None = None
    cpu_count: int | None = None
    steal_share: float | None = None
    other_cpu_share: float | None = None
    throttled_share: float | None = None
    thermal_events: float | None = None
    gpu_slowdowns: tuple[str, ...] = ()
    busy_share: float | None = None
    pressure_share: float | None = None
    takers: tuple[str, ...] = ()
    unknown_owner: str = ""
    """Why the owner of ``other_cpu_share`` is unknown, or empty."""
    nics: Mapping[str, NicFigures] = field(default_factory=dict)
    gpu_watts: Mapping[str, float] = field(default_factory=dict)
    """Mean power of each GPU, by number and by UUID."""


@dataclass(frozen=True)
class GateLimits:
    """Thresholds of the gates. Shares are of 1."""

    client_lag_ms: float = 5.0
    client_lag_share: float = 0.02
    """Allowed client lag: the larger of both, the latter as a share of the TTFT limit."""
    client_lag_max_share: float = 0.20
    """Client lag, as a share of the TTFT limit, that refuses any trial."""
    engine_lag_share: float = 0.20
    engine_lag_max_share: float = 0.50
    """Delay of emulated steps as a share of the busy time; the next step catches up a late one."""
    warm_cache_share: float = 0.01
    count_tolerance: float = 0.01
    decode_local_tokens: float = 16.0
    """Tokens per request that decode may compute besides a last, partial block."""
    wrong_length_share: float = 0.01
    output_tolerance: float = 0.02
    """Deviation of counted from claimed output tokens."""
    other_cpu_share: float = 0.10
    steal_share: float = 0.02
    throttled_share: float = 0.02
    run_queue_wait_share: float = 0.10
    """Share of time ready without a core from which a process is late for that reason."""
    waited_lag: float = 0.5
    """Share of a lag spent waiting for a core from which CPU shortage is its cause."""
    busy_share: float = 0.80
    pressure_share: float = 0.10
    """CPU use and pressure above which other load slows the system under test."""
    router_cpu_share: float = 0.90
    shed_share: float = 0.005
    """Share of rejected requests from which the others' latencies belong to a lower rate."""
    capacity_margin: float = 0.05
    full_samples: float = 4.0
    full_share: float = 0.80
    """Samples, and share of the samples with a queue, at one peak that show a slot limit."""
    drift_errors: float = 4.0
    nic_share: float = 0.10
    """Share of its equal part below which a NIC carried no KV."""
    foreign_bytes: float = 64e6
    foreign_share: float = 0.20
    """Other traffic on a data NIC counts above both: bytes, and a share of the trial's traffic."""


@dataclass(frozen=True)
class Evidence:
    """Everything known about one trial. ``engines`` maps a role to its figures.

    Roles are "prefill" and "decode", or "aggregated" alone. ``kv_bytes_per_request``: bytes to transfer for
    one request of this cell; None if nothing moves or the size is unknown. ``kv_bytes_tolerance``: bytes of
    it that need not move (a last, partial block). ``kv_bytes_certain``: the size follows from the running
    engine, not only from the scenario. ``kv_may_expire``: cancelled requests so far, whose KV may expire in
    this trial. ``requested_transport``: transports, comma-separated. ``stopped_as``: the live verdict
    that ended the trial early, if any. ``logged``: diagnoses of the processes' logs. ``requested_nics``: NICs
    requested for the KV. ``engines_here``: all engines run on this machine. ``kv_line_rate``: bytes per
    second that the NICs of one instance carry at most. ``prefill_work``: FLOP of a prompt; ``prefill_flops``:
    peak FLOP/s of all prefill instances together."""

    records: Sequence[RequestRecord]
    summary: Summary
    slo: Slo
    client: ClientFigures = field(default_factory=ClientFigures)
    engines: Mapping[str, EngineFigures] = field(default_factory=dict)
    host: HostFigures = field(default_factory=HostFigures)
    kv_bytes_per_request: float | None = None
    kv_bytes_tolerance: float = 0.0
    kv_bytes_certain: bool = True
    kv_may_expire: float = 0.0
    requested_transport: str = ""
    transport_ran: str = ""
    logged_transports: Sequence[LoggedTransport] = ()
    """Transports that the processes' logs prove."""
    reuse_expected: bool = False
    reuse_offered: float | None = None
    """Sessions: prompt tokens that an unlimited prefix cache could find at most."""
    disaggregated: bool = False
    """Whether P computes prompts and D answers."""
    whole_prompt: bool = True
    """Whether the connector transfers every token's KV; else decode computes the last block."""
    worded: bool = False
    """Whether prompts are chats: their token counts are approximate."""
    dummy_weights: bool = False
    """Whether weights are dummies: answers may then be equal."""
    stopped_as: Literal["", "met", "missed"] = ""
    logged: Sequence[Finding] = ()
    recorded: Sequence[Finding] | None = None
    """Findings of a stored trial, for gates whose evidence is gone."""
    router: RouterFigures = field(default_factory=RouterFigures)
    requested_nics: Sequence[str] = ()
    engines_here: bool = False
    hosts_watched: bool = False
    """Whether ``host`` covers the engines' machines and knows their processes."""
    kv_line_rate: float | None = None
    prefill_work: PrefillWork | None = None
    prefill_flops: float | None = None
    hardware: str = ""
    method: Method = "sustained"
    """Method of the load; core/search/methods.py downgrades gates for other methods."""
    limits: GateLimits = field(default_factory=GateLimits)
    filled_s: float = 0.0
    """Sessions: time after which sessions end about as fast as they begin."""
    dispersion: float | None = None
    """Sessions: variance / mean of the number of requests over a long time."""
    canaries: CanaryResult | None = None

    @property
    def attained(self) -> bool:
        """Return whether all criteria hold by point estimate."""
        return self.stopped_as == "met" if self.stopped_as else self.summary.attained

    @cached_property
    def queue_growth(self) -> QueueGrowth | None:
        """Return the growth of the first-token queue while load was offered."""
        summary = self.summary
        readings = QueueReadings.of_records(
            self.records,
            summary.window.end_s,
            summary.duration_s,
            rate=summary.offered_rate,
            latency_s=(summary.e2el_ms.p50 or 0.0) / 1e3,
            ttft_limit_s=(self.slo.tightest("ttft_ms") or 0.0) / 1e3,
        )
        if readings is not None and self.dispersion is not None:
            readings = replace(readings, dispersion=self.dispersion).since(self.filled_s)
        return None if readings is None else queue_growth(readings)

    def attained_with(self, slo: Slo) -> bool:
        """Return whether the judged requests attain ``slo``."""
        summary = self.summary
        judged = judged_records(self.records, summary.window)
        criteria = judge_criteria(judged, slo, ended_at(self.records, summary.duration_s))
        return bool(criteria) and all(criterion.met for criterion in criteria)

    @property
    def nics(self) -> Mapping[str, NicFigures]:
        return self.host.nics

    @property
    def kv_bytes(self) -> float | None:
        """Return the transferred KV bytes. Both ends may count them: the larger figure is the total."""
        return max((e.kv_bytes for e in self.engines.values() if e.kv_bytes is not None), default=None)

    def expected(
        self, *, per_token: bool, tolerance: float = 0.0, fresh: bool = False
    ) -> tuple[float, float]:
        """Return (least, most) requests, or prompt tokens, that each role handled. At least the answered
        ones, at most the sent ones. ``fresh``: excludes canaries that may be cached."""
        repeated = fresh and self.canaries is not None and self.canaries.repeated
        sent = [record for record in self.records if record.sent_s is not None]
        least = sum(
            record.input_len if per_token else 1
            for record in sent
            if record.ok and not (repeated and record.canary is not None)
        )
        most = sum(record.input_len if per_token else 1 for record in sent)
        return least * (1 - tolerance), most * (1 + tolerance)


def span(least: float, most: float, digits: int = 0) -> str:
    """Return a range in words, or one number if both ends read the same."""
    low, high = f"{least:.{digits}f}", f"{most:.{digits}f}"
    return low if low == high else f"{low} to {high}"
