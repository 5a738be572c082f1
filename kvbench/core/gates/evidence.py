"""What a trial's gates may look at: data only. None always means unknown, and trips no gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvbench.core.canaries.answer_kinds import CanaryResult
from kvbench.core.gates.evidence_figures import (
    ClientFigures,
    EngineFigures,
    HostFigures,
    LoggedTransport,
    NicFigures,
    RouterFigures,
)
from kvbench.core.metrics.criteria import judge_criteria
from kvbench.core.metrics.metrics import Slo, Summary, ended_at, judged_records
from kvbench.core.metrics.queue_growth import QueueGrowth, QueueReadings, queue_growth
from kvbench.core.physics.hardware import PrefillWork
from kvbench.core.records import Finding, Method, RequestRecord


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
