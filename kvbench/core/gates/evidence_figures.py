"""What each part of a trial says of itself: load generator, router, engines, NICs, host. None is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

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
