"""What a trial's gates may look at: data only. None always means unknown, and trips no gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from kvbench.core.metrics import Slo, Summary
from kvbench.core.records import Finding, RequestRecord

LOCAL_COMPUTE: Final = "local_compute"
LOCAL_CACHE_HIT: Final = "local_cache_hit"
EXTERNAL: Final = "external_kv_transfer"
"""The sources of prompt tokens as vLLM names them in ``vllm:prompt_tokens_by_source_total``."""


@dataclass(frozen=True)
class ClientFigures:
    """What the load generator says of itself. ``cpu_share`` is CPU seconds per second (1 is one core)."""

    send_lag_p50_ms: float | None = None
    send_lag_p99_ms: float | None = None
    loop_lag_p99_ms: float | None = None
    cpu_share: float | None = None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ClientFigures:
        """Takes the figures it knows and leaves the others."""
        return cls(**{item.name: row[item.name] for item in fields(cls) if row.get(item.name) is not None})


@dataclass(frozen=True)
class EngineFigures:
    """How far the counters of all engines of one role grew during the trial (after − before).

    Token counts are of prompts. ``step_lag_s`` is the sum of the emulated engine's delays behind its own
    timing model over ``steps`` steps that kept it busy for ``busy_s``; 99 of 100 steps came no later than
    ``step_lag_p99_s``. ``kv_expired`` counts requests whose KV was given up before it was fetched.
    ``block_tokens`` is no count: the engines' KV block size, None where they do not tell or differ.
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

    def to_json(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "prompt_tokens_by_source": dict(self.prompt_tokens_by_source)}


@dataclass(frozen=True)
class HostFigures:
    """The machine during the trial, as shares of all its cores' time.

    ``other_cpu_share`` was used by processes that are not this run's, ``steal_share`` by the hypervisor.
    ``load_average`` (1 minute, before the trial) is kept to be looked at: it counts this run's own work.
    """

    load_average: float | None = None
    cpu_count: int | None = None
    steal_share: float | None = None
    other_cpu_share: float | None = None


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
    other_cpu_share: float = 0.10
    steal_share: float = 0.02
    growth_errors: float = 4.0
    growth_walks: float = 2.0
    growth_horizon_s: float = 600.0


@dataclass(frozen=True)
class Evidence:
    """Everything known about one trial. ``engines`` maps a role to its figures.

    Roles are "prefill" and "decode", or "aggregated" alone. ``kv_bytes_per_request`` is what has to move
    for one request of this cell; None when nothing moves or the size is unknown. ``kv_bytes_slack`` of it may
    stay behind (a last, partial block). ``kv_bytes_certain``: the size was computed from what runs, not
    from what the scenario says of it. ``kv_may_expire``: requests that were cancelled so far, whose KV may
    be given up in this trial. ``transport_asked`` may name several, by commas. ``stopped_as`` is the live
    verdict that ended the trial early, if one did. ``logged``: what the processes' logs say.
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
    reuse_expected: bool = False
    whole_prompt: bool = True
    """The connector hands over the KV of every token; one of whole blocks leaves the rest to decode."""
    stopped_as: Literal["", "met", "missed"] = ""
    logged: Sequence[Finding] = ()
    limits: GateLimits = field(default_factory=GateLimits)

    @property
    def attained(self) -> bool:
        """Does the judged share of requests reach the target, by the point estimate?"""
        share = self.summary.slo_attainment
        if self.stopped_as:
            return self.stopped_as == "met"
        return share is not None and self.summary.judged_missed <= self.slo.misses_allowed(
            self.summary.judged
        )

    def expected(self, *, per_token: bool, tolerance: float = 0.0) -> tuple[float, float]:
        """(least, most) requests, or prompt tokens, that each role's servers handled.

        At least what was answered, at most what was sent: a request that failed or was cancelled on the
        way may or may not have got that far.
        """
        sent = [record for record in self.records if record.sent_s is not None]
        least = sum(record.input_len if per_token else 1 for record in sent if record.ok)
        most = sum(record.input_len if per_token else 1 for record in sent)
        return least * (1 - tolerance), most * (1 + tolerance)


def span(least: float, most: float, digits: int = 0) -> str:
    """A range in words, as one number if both ends read the same."""
    low, high = f"{least:.{digits}f}", f"{most:.{digits}f}"
    return low if low == high else f"{low} to {high}"
