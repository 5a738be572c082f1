"""Verdict of a trial, and whether it is a valid measurement.

A trial is **met** if the share of requests within the SLO reaches the target by *point estimate* and the
queue does not grow, else **missed**; **invalid** if a gate refuses it. The interval does not decide: 95 % at
95 % confidence takes 59 requests without a miss, which would fail most short trials of a system that attains
97 %. The point estimate errs equally in both directions, in a narrow range of rates. The interval is reported
for the *effective* number of requests, and the search confirms its answer by another trial.

A late client, a late emulated engine or other load makes latencies *longer*: a met trial stands with a
warning, a missed one is refused if the delay may be the cause. Gross delays refuse met and missed trials.

A gate is a function Evidence → Finding | None; unknown figures (None) trigger none. Its docstring states what
an honest trial shows, with evidence and limits; ``gate_table`` reads it. A gate that needs more than request
records has a row in ``NEEDS``; without that evidence it is not run (``unseen``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvbench.core.gates import answers, client, steady, streaming, transfer, work
from kvbench.core.gates.evidence import ClientFigures, EngineFigures, Evidence, GateLimits, HostFigures
from kvbench.core.metrics.equal_answers import is_long
from kvbench.core.metrics.metrics import CriterionResult, missed_text
from kvbench.core.records import Finding, RequestRecord, VerdictKind

__all__ = [
    "GATES",
    "ClientFigures",
    "EngineFigures",
    "Evidence",
    "GateLimits",
    "GateText",
    "HostFigures",
    "gate_table",
    "judge",
]


Gate = Callable[[Evidence], Finding | None]

GATES: Final[tuple[Gate, ...]] = (
    client.own_resources,
    streaming.failed_requests,
    streaming.server_restarted,
    answers.wrong_answers,
    streaming.wrong_length,
    answers.wrong_prompt_length,
    answers.empty_answers,
    streaming.inflated_usage,
    streaming.answer_at_once,
    streaming.unknown_tpot,
    streaming.early_first_token,
    answers.same_answers,
    answers.repeated_answers,
    answers.prompts_unread,
    streaming.impossible_answers,
    streaming.shedding,
    transfer.kv_failures,
    transfer.kv_expired,
    transfer.wrong_transport,
    transfer.wrong_nics,
    work.warm_cache,
    work.prefill_skipped,
    work.decode_recomputed,
    work.work_unproven,
    transfer.kv_bytes_wrong,
    streaming.requests_lost_or_repeated,
    streaming.output_miscounted,
    streaming.failed_elsewhere,
    transfer.impossible_prefill,
    transfer.impossible_transfer,
    client.host_starved,
    client.client_limited,
    client.router_limited,
    client.emulator_behind,
    steady.too_few_requests,
    steady.slot_capped,
    steady.growing_queue,
    steady.one_batch,
    steady.not_steady,
    steady.too_short,
    work.unequal_instances,
    steady.two_populations,
    client.machine_disturbed,
    streaming.empty_first_event,
    streaming.tokens_per_event,
)
"""All gates by importance: the first refusal is the verdict's reason."""
BY_REQUESTS: Final[tuple[Gate, ...]] = (
    streaming.failed_requests,
    streaming.wrong_length,
    answers.wrong_prompt_length,
    answers.empty_answers,
    streaming.unknown_tpot,
    answers.repeated_answers,
    streaming.shedding,
    steady.too_few_requests,
    steady.growing_queue,
    steady.one_batch,
    steady.not_steady,
    steady.too_short,
)
"""Gates that use only requests and SLO, so that they can be repeated on stored trials."""


@dataclass(frozen=True)
class GateText:
    """A gate's docstring: statement, evidence, limits."""

    name: str
    proves: str
    evidence: str
    limits: str


CORRUPT: Final = GateText(
    "corrupt",
    "Greedy outputs through the pair equal those of the aggregated server, or differ no more than its own.",
    "The answers to a few prompts before a cell's first trial; with a real engine also the aggregated "
    "server's log-probabilities and how its answers vary between repeats, single and batched.",
    "A failing cell is refused as a whole. Errors that occur only under load are left to wrong_answers; "
    "errors within the noise are not detected.",
)
"""The check made once per cell."""


BACKLOG: Final = GateText(
    "backlog",
    "The trial begins on an idle system, with nothing left from the trial before.",
    "The instances' gauges of running and waiting requests; without them, single requests must be as fast as "
    "before the first trial.",
    "A system with other users is refused. Without gauges, leftover work on one of many instances may "
    "go unnoticed.",
)
"""The check before a trial starts."""


def gate_table() -> list[GateText]:
    return [CORRUPT, BACKLOG, *(gate_text(gate) for gate in GATES)]


def gate_text(gate: Gate) -> GateText:
    """Parse a gate's docstring: statement, then ``evidence:`` and ``limits:``."""
    text = " ".join(inspect.cleandoc(gate.__doc__ or "").replace("``", "`").split())
    rest, _, limits = text.partition(" limits: ")
    proves, _, evidence = rest.partition(" evidence: ")
    return GateText(gate.__name__, *(_sentence(part) for part in (proves, evidence, limits)))


def _sentence(text: str) -> str:
    return text if text.startswith("kvbench") else text[:1].upper() + text[1:]


UNSUSTAINED: Final = frozenset({"growing_queue", "slot_capped"})
"""Findings that turn a trial within the SLO into a miss: it could not have continued."""


def judge(evidence: Evidence) -> tuple[VerdictKind, str, list[Finding]]:
    """Return (verdict, reason, findings)."""
    findings = _findings(evidence)
    refusal = next((finding for finding in findings if finding.level == "invalid"), None)
    if refusal is not None:
        return "invalid", refusal.message, findings
    unsustained = next((finding for finding in findings if finding.gate in UNSUSTAINED), None)
    if evidence.attained and unsustained is not None:
        return "missed", unsustained.message, findings
    return ("met" if evidence.attained else "missed"), _reason(evidence), findings


def _findings(evidence: Evidence) -> list[Finding]:
    """Run all gates; recorded findings replace gates whose evidence is gone."""
    looking = GATES if evidence.recorded is None else BY_REQUESTS
    if evidence.recorded is not None and evidence.canaries is not None:
        looking = (*looking, answers.wrong_answers)
    found = [finding for gate in looking if (finding := gate(evidence)) is not None]
    if evidence.recorded is None:
        return [*found, *evidence.logged]
    again = {"server_errors", *(gate.__name__ for gate in looking)}
    order = [gate.__name__ for gate in GATES]
    found += [result for result in evidence.recorded if result.gate not in again]
    return sorted(found, key=lambda result: order.index(result.gate) if result.gate in order else len(order))


def _reason(evidence: Evidence) -> str:
    summary = evidence.summary
    text = "; ".join(
        f"{criterion.text}: {_standing(criterion)}" if len(summary.criteria) > 1 else _standing(criterion)
        for criterion in summary.criteria
    )
    causes = missed_text(summary.missed_by)
    text += f"; {causes}" if causes else ""
    return text + (f"; stopped early as {evidence.stopped_as}" if evidence.stopped_as else "")


def _standing(criterion: CriterionResult) -> str:
    value, target = criterion.value, criterion.target
    if value is None or criterion.lower is None or criterion.upper is None:
        return f"{criterion.n} requests are too few for an interval"
    if criterion.kind == "mean":
        return f"{value:.4g} ms; interval {criterion.lower:.4g} to {criterion.upper:.4g} ms"
    text = (
        f"{round(value * criterion.n)} of {criterion.n} requests ({value:.1%}) within the SLO, "
        f"target {target:.1%}; interval {criterion.lower:.1%} to {criterion.upper:.1%}"
    )
    return f"{text}, which includes the target" if criterion.lower < target <= criterion.upper else text


@dataclass(frozen=True)
class Source:
    """A kind of evidence. ``lacking``: description of its absence."""

    lacking: str
    there: Callable[[Evidence], bool]


def _reported(known: Callable[[EngineFigures], object]) -> Callable[[Evidence], bool]:
    """Return a test whether some role's servers report a figure."""
    return lambda evidence: any(known(engine) is not None for engine in evidence.engines.values())


def _answers_have(known: Callable[[RequestRecord], object]) -> Callable[[Evidence], bool]:
    """Return a test whether some answer has a figure; true without answers."""
    return lambda evidence: any(known(record) is not None for record in evidence.records if record.ok)


COUNTERS: Final = "no server counters (/metrics)"
REQUEST_COUNTS: Final = Source(COUNTERS, _reported(lambda engine: engine.requests))
PROMPT_COUNTS: Final = Source(COUNTERS, _reported(lambda engine: engine.computed_tokens))
OUTPUT_COUNTS: Final = Source(COUNTERS, _reported(lambda engine: engine.generation_tokens))
HITS: Final = Source(COUNTERS, _reported(lambda engine: engine.hit_rate))
ANY_COUNTS: Final = Source(COUNTERS, lambda evidence: bool(evidence.engines))
BY_INSTANCE: Final = Source(
    "no counters per instance", lambda evidence: any(engine.served for engine in evidence.engines.values())
)
BY_SOURCE: Final = Source(
    "no counter of D's prompt tokens by source",
    lambda evidence: any(
        bool(engine.prompt_tokens_by_source) for role, engine in evidence.engines.items() if role == "decode"
    ),
)
SLOTS: Final = Source(
    "no gauge of running requests and no max_num_seqs",
    lambda evidence: any(
        engine.running_peak is not None or engine.slots is not None
        for role, engine in evidence.engines.items()
        if role != "prefill"
    ),
)
KV_LOSSES: Final = Source(
    "no counters of failed and expired KV transfers",
    _reported(lambda engine: engine.kv_failures if engine.kv_expired is None else engine.kv_expired),
)
KV_BYTES: Final = Source(
    "no counter of KV bytes, or unknown KV shape",
    lambda evidence: evidence.kv_bytes is not None and evidence.kv_bytes_per_request is not None,
)
KV_TIMES: Final = Source(
    "no NIC line rate, or no counter of transfer times",
    lambda evidence: bool(evidence.kv_line_rate) and _reported(lambda engine: engine.kv_seconds)(evidence),
)
TRANSPORT: Final = Source("the transport is not reported", lambda evidence: bool(evidence.transport_ran))
NICS: Final = Source(
    "no counters of the servers' NICs", lambda evidence: evidence.engines_here and bool(evidence.nics)
)
PEAK: Final = Source(
    "unknown GPUs or model parameters",
    lambda evidence: evidence.prefill_work is not None and bool(evidence.prefill_flops),
)
PROMPT_USAGE: Final = Source("no prompt_tokens in the usage", _answers_have(lambda row: row.prompt_tokens))
TEXTS: Final = Source("answers' texts not recorded", _answers_have(lambda row: row.text_crc))
LENGTHS: Final = Source(
    "all prompts have one length", lambda evidence: len({record.input_len for record in evidence.records}) > 1
)
CANARIES: Final = Source(
    "no requests with known right answers",
    lambda evidence: evidence.canaries is not None and evidence.canaries.checked > 0,
)
FRESH_PROMPTS: Final = Source("prompts repeat", lambda evidence: not evidence.reuse_expected)
KNOWN_REUSE: Final = Source(
    "prompts repeat", lambda evidence: not evidence.reuse_expected or evidence.reuse_offered is not None
)
EVENTS: Final = Source(
    "no times per event", lambda e: any(len(record.itl_s) for record in e.records if record.ok)
)
EVENT_TIMES: Final = Source("no times of events without text", _answers_have(lambda row: row.first_event_s))
SOCKET: Final = Source(
    "simulated, no network traffic",
    lambda evidence: any(record.stamps for record in evidence.records if record.ok),
)
IN_TIME: Final = Source("the load generator read late", lambda evidence: evidence.client.reads_in_time)
MANY_ANSWERS: Final = Source(
    "too few answers", lambda evidence: sum(record.ok for record in evidence.records) >= steady.LEAST
)
LONG_ANSWERS: Final = Source(
    "answers are too short to differ",
    lambda evidence: (
        sum(record.output_len >= answers.IDENTIFYING_TOKENS for record in evidence.records if record.ok)
        >= answers.LEAST_ANSWERS
    ),
)

COMPARED_ANSWERS: Final = Source(
    "answers are too short to differ",
    lambda evidence: sum(map(is_long, evidence.records)) >= answers.LEAST_ANSWERS,
)


def _is_pair(evidence: Evidence) -> bool:
    return evidence.disaggregated or "prefill" in evidence.engines


def _perhaps_several(evidence: Evidence) -> bool:
    """Return whether a role may have several instances."""
    return not evidence.engines or any(engine.instances > 1 for engine in evidence.engines.values())


def _always(_: Evidence) -> bool:
    return True


@dataclass(frozen=True)
class Need:
    """Evidence of a gate: all of ``sources``. ``applies``: whether the gate is relevant."""

    sources: tuple[Source, ...]
    applies: Callable[[Evidence], bool] = _always


NEEDS: Final[Mapping[Gate, Need]] = {
    streaming.server_restarted: Need((ANY_COUNTS,)),
    answers.wrong_answers: Need((CANARIES,)),
    answers.wrong_prompt_length: Need((SOCKET, PROMPT_USAGE)),
    answers.same_answers: Need((FRESH_PROMPTS, SOCKET, TEXTS, LONG_ANSWERS)),
    answers.repeated_answers: Need((FRESH_PROMPTS, SOCKET, TEXTS, COMPARED_ANSWERS)),
    answers.prompts_unread: Need((FRESH_PROMPTS, SOCKET, LENGTHS)),
    answers.empty_answers: Need((SOCKET, TEXTS)),
    streaming.answer_at_once: Need((SOCKET, IN_TIME)),
    streaming.impossible_answers: Need((SOCKET, IN_TIME)),
    streaming.inflated_usage: Need((SOCKET, EVENTS, TEXTS)),
    streaming.early_first_token: Need((EVENTS,)),
    streaming.empty_first_event: Need((SOCKET, EVENT_TIMES)),
    streaming.tokens_per_event: Need((EVENTS,)),
    transfer.kv_failures: Need((KV_LOSSES,), _is_pair),
    transfer.kv_expired: Need((KV_LOSSES,), _is_pair),
    transfer.wrong_transport: Need(
        (TRANSPORT,), lambda e: bool(e.requested_transport) or (e.disaggregated and e.engines_here)
    ),
    transfer.wrong_nics: Need((NICS,), lambda evidence: bool(evidence.requested_nics)),
    work.warm_cache: Need((KNOWN_REUSE, HITS)),
    work.prefill_skipped: Need((FRESH_PROMPTS, PROMPT_COUNTS)),
    work.decode_recomputed: Need((BY_SOURCE,), lambda evidence: _is_pair(evidence) and evidence.whole_prompt),
    transfer.kv_bytes_wrong: Need((KV_BYTES,), _is_pair),
    streaming.requests_lost_or_repeated: Need((REQUEST_COUNTS,)),
    streaming.output_miscounted: Need((OUTPUT_COUNTS,)),
    streaming.failed_elsewhere: Need((REQUEST_COUNTS,)),
    transfer.impossible_prefill: Need((FRESH_PROMPTS, PEAK)),
    transfer.impossible_transfer: Need((KV_TIMES,), _is_pair),
    steady.slot_capped: Need((SLOTS,)),
    work.unequal_instances: Need((ANY_COUNTS, BY_INSTANCE), _perhaps_several),
    steady.two_populations: Need((FRESH_PROMPTS, MANY_ANSWERS)),
}
"""Gates that need more than requests' times and outcomes."""


def unseen(evidence: Evidence) -> dict[str, list[str]]:
    """Return missing evidence → gates that could not run."""
    found: dict[str, list[str]] = {}
    for gate, need in NEEDS.items():
        if not need.applies(evidence):
            continue
        lacking = next((source.lacking for source in need.sources if not source.there(evidence)), None)
        if lacking is not None:
            found.setdefault(lacking, []).append(gate.__name__)
    return found
