"""What a trial's gates may look at, as load generator, router, engines, NICs and host report it.

It is data only. None always means unknown, and trips no gate.
"""

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
"""The sources of prompt tokens as vLLM names them in ``vllm:prompt_tokens_by_source_total``."""


PROMPT_LOOK_MS: Final = 2.5
"""A client that is in time looks at its sockets each millisecond: half of the chunks that it reads together
came within twice that."""


@dataclass(frozen=True)
class ClientFigures:
    """What the load generator says of itself; of several processes the worst.

    ``cpu_share`` and ``run_queue_wait_share`` are seconds per second of one process (1 is a whole core).
    ``loop_lag_share``: seconds per second by which the event loop came too late to a timer.
    ``send_lag``: planned to real send. ``chunk_lag``: the kernel had the bytes, to when they were read.
    ``stamps``: where receive times come from: "kernel", "read" (when the program got to it) or "mixed".
    ``first_error``, ``token_error``: by how much the times of first tokens, and of all, may be too late. Of
    chunks that came one after the other and were read together the kernel reports the last one's stamp; the
    others came after the last look at their socket that found nothing, and that is all that is known.
    ``reads`` brought ``chunks``.
    """

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
        """Takes the figures it knows and leaves the others."""
        return cls(**{item.name: row[item.name] for item in fields(cls) if row.get(item.name) is not None})

    @property
    def send_ms(self) -> float:
        """How late sends were: 99 of 100 no more than this."""
        return self.send_lag_p99_ms or 0.0

    @property
    def look_ms(self) -> float:
        """By how much receive times may be late, 99 of 100 no more than this.

        With the kernel's stamps a late look harms only those that were read together with later ones.
        """
        error_ms = max(self.first_error_p99_ms or 0.0, self.token_error_p99_ms or 0.0)
        if self.stamps == "kernel":
            return error_ms
        return max(error_ms, self.loop_lag_p99_ms or 0.0, self.chunk_lag_p99_ms or 0.0)

    @property
    def reads_in_time(self) -> bool:
        """Whether what is read together came together: it was not the client that let it pile up."""
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
    """What kvbench's router says of itself: CPU seconds of its busiest process, lag over all of them.

    ``lag_s``: the sum of the lags that were measured; ``wait_s``: time in which it was ready and had no core.
    """

    cpu_s: float | None = None
    seconds: float | None = None
    processes: int = 1
    loop_lag_p99_s: float | None = None
    lag_s: float | None = None
    wait_s: float | None = None

    @property
    def wait_share(self) -> float | None:
        """Seconds per second in which its processes together waited for a core."""
        return None if self.wait_s is None or not self.seconds else self.wait_s / self.seconds

    @property
    def cpu_share(self) -> float | None:
        """CPU seconds per second of the busiest process: near 1 it can do no more."""
        return None if self.cpu_s is None or not self.seconds else self.cpu_s / self.seconds


@dataclass(frozen=True)
class NicFigures:
    """One network interface ("ip"), RDMA device ("rdma") or GPU's NVLinks ("nvlink") during the trial."""

    kind: Literal["ip", "rdma", "nvlink"]
    sent_bytes: float
    received_bytes: float
    bytes_per_s: float | None = None
    """Line rate, one way; None where the driver does not report it, as of loopback."""
    loopback: bool = False

    @property
    def most_bytes(self) -> float:
        """The larger direction: on loopback both count the same bytes."""
        return max(self.sent_bytes, self.received_bytes)


EMULATED: Final = "software emulation"
"""UCX's word for remote memory access that no transport does: both CPUs copy, message by message."""


@dataclass(frozen=True)
class LoggedTransport:
    """What the log of one process says of the KV's way. Empty: not told.

    ``transports`` with their devices, as ``rc_mlx5/mlx5_0:1``. ``operation``: "read" or "write" of remote
    memory; ``local`` and ``remote``: the memory's kind, as "cuda" or "host"; ``between``: "intra-node" or
    "inter-node"; ``how``: as "zero-copy" or "software emulation". ``line``: the log's own.
    """

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
        """Between two GPUs' memories."""
        return not {self.local, self.remote} & {"", "host"}

    def text(self) -> str:
        """In words, without the process."""
        names = " and ".join(self.transports)
        way = f"{names} by {self.how}" if self.how else names
        memory = f" from {self.remote} into {self.local} memory" if self.operation == "read" else ""
        if self.operation == "write":
            memory = f" from {self.local} into {self.remote} memory"
        where = f", {self.between}" if self.between else ""
        return f"{way}{f' ({self.operation}{memory}{where})' if self.operation else ''}"


@dataclass(frozen=True)
class EngineFigures:
    """How far the counters of all engines of one role grew during the trial (after − before).

    Token counts are of prompts. ``step_lag_s`` is the sum of the emulated engine's delays behind its own
    timing model over ``steps`` steps that kept it busy for ``busy_s``; 99 of 100 steps came no later than
    ``step_lag_p99_s``. ``kv_expired`` counts requests whose KV was given up before it was fetched.
    ``block_tokens`` is no count: the engines' KV block size, None where they do not report it or differ.
    ``generation_tokens`` are output tokens, ``kv_seconds`` the sum of the transfers' times. ``restarts``:
    instances that started anew. ``running_peak``: sequences that ran at once on one instance, at most;
    of the ``queued_samples`` in which others waited there, ``full_samples`` had just that many running.
    ``transfer_lag_s`` and ``transfer_lag_p99_s`` are the same delays of transfers that a model paces, which
    were to take ``paced_s`` together; None where none are paced.
    """

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
    """``max_num_seqs`` of one instance, where it is known."""
    instances: int = 1
    served: tuple[float, ...] = ()
    """Requests that each instance has finished, or tokens where it does not count these; () if unknown."""
    cache_tokens: float | None = None
    """Tokens whose KV the caches of all its instances hold together; None if one does not tell."""

    @property
    def computed_tokens(self) -> float | None:
        """Prompt tokens that were really computed here."""
        if self.prompt_tokens_by_source:
            return self.prompt_tokens_by_source.get(LOCAL_COMPUTE, 0.0)
        if self.prompt_tokens is None or self.prefix_hits is None:
            return None
        return self.prompt_tokens - self.prefix_hits

    @property
    def hit_rate(self) -> float | None:
        """Prompt tokens found in the prefix cache, as a share of those looked up."""
        if self.prefix_hits is None or not self.prefix_queries:
            return None
        return self.prefix_hits / self.prefix_queries

    @property
    def lag_share(self) -> float | None:
        """Share of the busy time that was delay behind the model."""
        return self.step_lag_s / self.busy_s if self.step_lag_s is not None and self.busy_s else None

    @property
    def transfer_lag_share(self) -> float | None:
        """Delay of paced transfers, as a share of the time they were to take."""
        return self.transfer_lag_s / self.paced_s if self.transfer_lag_s and self.paced_s else None

    def to_json(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "prompt_tokens_by_source": dict(self.prompt_tokens_by_source)}


@dataclass(frozen=True)
class HostFigures:
    """The machine during the trial, as shares of all its cores' time.

    ``other_cpu_share`` was used by processes that are not this run's, ``steal_share`` by the hypervisor;
    ``throttled_share`` is how long the cgroup's CPU limit held this run back, in seconds per second.
    ``load_average`` (1 minute, before the trial) is kept to be looked at: it counts this run's own work.
    ``thermal_events``: times that a CPU slowed down for heat. ``gpu_slowdowns``: why GPUs slowed down.
    ``busy_share``: used by anybody, the hypervisor included. ``pressure_share``: seconds per second in which
    some process was ready to run and had no core (the kernel's PSI). ``takers``: who the others are.
    """

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
    """Why the owner of ``other_cpu_share`` is unknown: it may be the server's own work. Empty: it is not."""
    nics: Mapping[str, NicFigures] = field(default_factory=dict)
    """Interfaces and RDMA devices by name."""
    gpu_watts: Mapping[str, float] = field(default_factory=dict)
    """Mean power of each GPU that counts its energy, by its number and again by its UUID."""


@dataclass(frozen=True)
class GateLimits:
    """Where the gates draw their lines. Shares are of 1."""

    client_lag_ms: float = 5.0
    client_lag_share: float = 0.02
    """A client lag counts above the larger of these: 5 ms, or 2 % of the TTFT limit."""
    client_lag_max_share: float = 0.20
    """A lag this large against the TTFT limit refuses the trial whatever its verdict."""
    engine_lag_share: float = 0.20
    engine_lag_max_share: float = 0.50
    """Emulated steps: sum of their delays as a share of the time that they kept the engine busy. A late
    step is caught up by the next, so a share of it reaches no latency unless an engine is late for good.
    """
    warm_cache_share: float = 0.01
    count_tolerance: float = 0.01
    decode_local_tokens: float = 16.0
    """Tokens per request that decode may compute, and the tokens of a last, partial block beside them,
    which a connector need not move. Never more than half of a prompt."""
    wrong_length_share: float = 0.01
    output_tolerance: float = 0.02
    """Output tokens that the server counted, against those it said it sent."""
    other_cpu_share: float = 0.10
    steal_share: float = 0.02
    throttled_share: float = 0.02
    run_queue_wait_share: float = 0.10
    """A process that was ready without a core for so much of the time was late for that."""
    waited_lag: float = 0.5
    """A lag of which this part was spent waiting for a core is nobody's but who had the cores."""
    busy_share: float = 0.80
    pressure_share: float = 0.10
    """A machine that was busier, and on which somebody waited for a core for longer, had no room: what others
    took was taken from the system under test."""
    router_cpu_share: float = 0.90
    shed_share: float = 0.005
    """Requests turned away: more of them make the others' latencies those of a lower rate."""
    capacity_margin: float = 0.05
    full_samples: float = 4.0
    full_share: float = 0.80
    """A slot limit shows if so many samples, and this share of those with a queue, are at one peak."""
    drift_errors: float = 4.0
    nic_share: float = 0.10
    """A NIC that carried less than this part of its equal share carried nothing of the KV."""
    foreign_bytes: float = 64e6
    foreign_share: float = 0.20
    """Other traffic on a data NIC counts above both: bytes, and a share of this trial's own."""


@dataclass(frozen=True)
class Evidence:
    """Everything known about one trial. ``engines`` maps a role to its figures.

    Roles are "prefill" and "decode", or "aggregated" alone. ``kv_bytes_per_request`` is what has to move
    for one request of this cell; None when nothing moves or the size is unknown. ``kv_bytes_slack`` of it may
    stay behind (a last, partial block). ``kv_bytes_certain``: the size was computed from what runs, not
    from what the scenario says of it. ``kv_may_expire``: requests that were cancelled so far, whose KV may
    be given up in this trial. ``transport_asked`` may name several, by commas. ``stopped_as`` is the live
    verdict that ended the trial early, if one did. ``logged``: what the processes' logs say.

    ``nics_asked``: those that the KV is meant to use. ``engines_here``: all engines run on this machine.
    ``kv_line_rate``: bytes per second that the NICs of one instance carry at most. ``prefill_work`` and
    ``prefill_flops``: what a prompt costs, and what all prefill instances together can compute at most per
    second.
    """

    records: Sequence[RequestRecord]
    summary: Summary
    slo: Slo
    client: ClientFigures = field(default_factory=ClientFigures)
    engines: Mapping[str, EngineFigures] = field(default_factory=dict)
    host: HostFigures = field(default_factory=HostFigures)
    kv_bytes_per_request: float | None = None
    kv_bytes_slack: float = 0.0
    kv_bytes_certain: bool = True
    kv_may_expire: float = 0.0
    transport_asked: str = ""
    transport_ran: str = ""
    logged_transports: Sequence[LoggedTransport] = ()
    """What the processes' logs prove of the way that KV takes."""
    reuse_expected: bool = False
    reuse_offered: float | None = None
    """Of a load of sessions: prompt tokens that an unlimited prefix cache could have found, at most."""
    disaggregated: bool = False
    """P computes the prompts, and D the answers."""
    whole_prompt: bool = True
    """The connector hands over the KV of every token; one of whole blocks leaves the rest to decode."""
    worded: bool = False
    """Prompts are chats of words, so that their lengths in tokens are near what was asked for, not equal."""
    dummy_weights: bool = False
    """The model's weights are made up, as the scenario says: its answers may be all alike."""
    stopped_as: Literal["", "met", "missed"] = ""
    logged: Sequence[Finding] = ()
    recorded: Sequence[Finding] | None = None
    """What all gates found in its time: of a trial that is over, whose requests alone are still there."""
    router: RouterFigures = field(default_factory=RouterFigures)
    nics_asked: Sequence[str] = ()
    engines_here: bool = False
    hosts_watched: bool = False
    """``host`` tells of the machines that the engines run on, and which processes are theirs."""
    kv_line_rate: float | None = None
    prefill_work: PrefillWork | None = None
    prefill_flops: float | None = None
    hardware: str = ""
    method: Method = "sustained"
    """How the load was meant; what other methods do without is softened in core/search/methods.py."""
    limits: GateLimits = field(default_factory=GateLimits)
    filled_s: float = 0.0
    """Of a load of sessions: after so long they end about as fast as they begin; a queue is seen then."""
    dispersion: float | None = None
    """Of a load of sessions: variance over mean of the requests in a long time."""
    canaries: CanaryResult | None = None
    """What came of the requests whose right answers are known; None: there were none."""

    @property
    def attained(self) -> bool:
        """Does everything that the SLO asks hold, by the point estimates?"""
        if self.stopped_as:
            return self.stopped_as == "met"
        return self.summary.attained

    @cached_property
    def queue_growth(self) -> QueueGrowth | None:
        """By how much the queue for the first token grew while load was offered, if it did."""
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
        """Would the judged requests attain another SLO?"""
        summary = self.summary
        judged = judged_records(self.records, summary.window)
        criteria = judge_criteria(judged, slo, ended_at(self.records, summary.duration_s))
        return bool(criteria) and all(criterion.met for criterion in criteria)

    @property
    def nics(self) -> Mapping[str, NicFigures]:
        """This machine's, by name."""
        return self.host.nics

    @property
    def kv_bytes(self) -> float | None:
        """KV bytes that moved. Both ends may count the same bytes: the larger figure is the whole."""
        return max((e.kv_bytes for e in self.engines.values() if e.kv_bytes is not None), default=None)

    def expected(
        self, *, per_token: bool, tolerance: float = 0.0, fresh: bool = False
    ) -> tuple[float, float]:
        """(least, most) requests, or prompt tokens, that each role's servers handled.

        At least what was answered, at most what was sent: a request that failed or was cancelled on the
        way may or may not have got that far. ``fresh``: canaries that were asked before need not have come
        that far either, since their KV may be cached.
        """
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
    """A range in words, as one number if both ends read the same."""
    low, high = f"{least:.{digits}f}", f"{most:.{digits}f}"
    return low if low == high else f"{low} to {high}"
