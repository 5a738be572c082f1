"""Is this trial a valid measurement, and what is its verdict?

A trial is **met** if the share of its requests that kept the SLO reaches the target by *point estimate* and
the queue does not grow, else **missed**; if a gate refuses it, **invalid**. The interval does not decide: 95
% at 95 % confidence takes 59 requests without a miss, so "met only if proven" would fail most quick trials
(60 to 200 requests) of a system that attains 97 %. The point estimate errs both ways alike, only where the
truth is within a few per cent of the target, which is a narrow band of rates. The interval is reported (for
the *effective* number of requests), and the search confirms its answer by an independent trial.

A late client, an engine behind its model, or others on the machine make latencies *longer*. A trial that
meets the SLO all the same is met with a warning; a missed one is refused if the delay may be the cause. Gross
delays refuse both.

A gate is a function Evidence → Finding | None. An unknown figure (None) trips no gate. Its docstring says
what an honest trial proves there, by which evidence and limits; ``gate_table`` reads it. A gate that needs
more than the requests' records has a row in ``NEEDS``; without that evidence its silence proves nothing
(``unseen``).
"""

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
"""In the order of importance: the first refusal becomes the verdict's reason."""
BY_REQUESTS: Final[tuple[Gate, ...]] = (
    streaming.failed_requests,
    streaming.wrong_length,
    answers.wrong_prompt_length,
    answers.empty_answers,
    answers.repeated_answers,
    streaming.shedding,
    steady.too_few_requests,
    steady.growing_queue,
    steady.one_batch,
    steady.not_steady,
    steady.too_short,
)
"""Those that look at nothing but the requests and the SLO, and so find the same whenever they look."""


@dataclass(frozen=True)
class GateText:
    """What a gate's docstring says: what an honest trial proves, by what evidence, within what limits."""

    name: str
    proves: str
    evidence: str
    limits: str


CORRUPT: Final = GateText(
    "corrupt",
    "Greedy outputs through the pair equal those of the aggregated server, or differ no more than its own.",
    "The texts of a few prompts, asked for before a cell's first trial; of a real engine also the aggregated "
    "server's log-probabilities, and how its answers differ when it is asked again, alone and together.",
    "A cell that fails is refused whole; what breaks only under load is left to wrong_answers, and what the "
    "noise covers is not seen.",
)
"""The one check that is made once for a cell and not in every trial."""


BACKLOG: Final = GateText(
    "backlog",
    "It begins on an idle system, with nothing left of the trial before.",
    "The instances' gauges of running and waiting requests; without them, single requests as fast as before "
    "the first trial.",
    "A system that others use meanwhile is refused; without gauges, what one instance of many has left may "
    "not be seen.",
)
"""Looked at before a trial, which is not begun then."""


def gate_table() -> list[GateText]:
    """All gates, in the order of importance."""
    return [CORRUPT, BACKLOG, *(gate_text(gate) for gate in GATES)]


def gate_text(gate: Gate) -> GateText:
    """Reads a gate's docstring: what it proves comes first, then ``evidence:`` and ``limits:``."""
    text = " ".join(inspect.cleandoc(gate.__doc__ or "").replace("``", "`").split())
    rest, _, limits = text.partition(" limits: ")
    proves, _, evidence = rest.partition(" evidence: ")
    return GateText(gate.__name__, *(_sentence(part) for part in (proves, evidence, limits)))


def _sentence(text: str) -> str:
    return text if text.startswith("kvbench") else text[:1].upper() + text[1:]


UNSUSTAINED: Final = frozenset({"growing_queue", "slot_capped"})
"""Findings that make a miss of a trial whose requests were all in time: it could not have gone on so."""


def judge(evidence: Evidence) -> tuple[VerdictKind, str, list[Finding]]:
    """(verdict, reason in plain words, findings of all gates) of one trial."""
    findings = _findings(evidence)
    refusal = next((finding for finding in findings if finding.level == "invalid"), None)
    if refusal is not None:
        return "invalid", refusal.message, findings
    unsustained = next((finding for finding in findings if finding.gate in UNSUSTAINED), None)
    if evidence.attained and unsustained is not None:
        return "missed", unsustained.message, findings
    return ("met" if evidence.attained else "missed"), _reason(evidence), findings


def _findings(evidence: Evidence) -> list[Finding]:
    """Of all gates; those recorded stand for gates whose evidence is gone."""
    looking = GATES if evidence.recorded is None else BY_REQUESTS
    if evidence.recorded is not None and evidence.canaries is not None:
        looking = (*looking, answers.wrong_answers)
    found = [finding for gate in looking if (finding := gate(evidence)) is not None]
    if evidence.recorded is None:
        return [*found, *evidence.logged]
    again = {"server_errors", *(gate.__name__ for gate in looking)}
    order = [gate.__name__ for gate in GATES]
    found += [each for each in evidence.recorded if each.gate not in again]
    return sorted(found, key=lambda each: order.index(each.gate) if each.gate in order else len(order))


def _reason(evidence: Evidence) -> str:
    summary = evidence.summary
    text = "; ".join(
        f"{each.text}: {_standing(each)}" if len(summary.criteria) > 1 else _standing(each)
        for each in summary.criteria
    )
    causes = missed_text(summary.missed_by)
    text += f"; {causes}" if causes else ""
    return text + (f"; stopped early as {evidence.stopped_as}" if evidence.stopped_as else "")


def _standing(criterion: CriterionResult) -> str:
    """How one criterion stands, in words."""
    value, target = criterion.value, criterion.target
    if value is None or criterion.lower is None or criterion.upper is None:
        return f"{criterion.n} requests tell of it, too few for an interval"
    if criterion.kind == "mean":
        return f"{value:.4g} ms; interval {criterion.lower:.4g} to {criterion.upper:.4g} ms"
    text = (
        f"{round(value * criterion.n)} of {criterion.n} requests ({value:.1%}) within the SLO, "
        f"{target:.1%} asked; interval {criterion.lower:.1%} to {criterion.upper:.1%}"
    )
    return f"{text}, which does not decide" if criterion.lower < target <= criterion.upper else text


@dataclass(frozen=True)
class Source:
    """A kind of evidence. ``lacking``: in words what is not there, if ``there`` denies it."""

    lacking: str
    there: Callable[[Evidence], bool]


def _counted(known: Callable[[EngineFigures], object]) -> Callable[[Evidence], bool]:
    """Whether some role's servers tell a figure."""
    return lambda evidence: any(known(engine) is not None for engine in evidence.engines.values())


def _answered(known: Callable[[RequestRecord], object]) -> Callable[[Evidence], bool]:
    """Whether some answer tells a figure; so it is where there are no answers that could."""
    return lambda evidence: any(known(each) is not None for each in evidence.records if each.ok)


COUNTERS: Final = "no counters of the servers (/metrics)"
REQUEST_COUNTS: Final = Source(COUNTERS, _counted(lambda engine: engine.requests))
PROMPT_COUNTS: Final = Source(COUNTERS, _counted(lambda engine: engine.computed_tokens))
OUTPUT_COUNTS: Final = Source(COUNTERS, _counted(lambda engine: engine.generation_tokens))
HITS: Final = Source(COUNTERS, _counted(lambda engine: engine.hit_rate))
ANY_COUNTS: Final = Source(COUNTERS, lambda evidence: bool(evidence.engines))
BY_INSTANCE: Final = Source(
    "no counters of each instance",
    lambda evidence: any(engine.served for engine in evidence.engines.values()),
)
BY_SOURCE: Final = Source(
    "no counter of D's prompt tokens by source",
    lambda evidence: any(
        bool(engine.prompt_tokens_by_source) for role, engine in evidence.engines.items() if role == "decode"
    ),
)
SLOTS: Final = Source(
    "neither gauges of running requests nor max_num_seqs",
    lambda evidence: any(
        engine.running_peak is not None or engine.slots is not None
        for role, engine in evidence.engines.items()
        if role != "prefill"
    ),
)
KV_LOSSES: Final = Source(
    "no counters of failed and expired KV transfers",
    _counted(lambda engine: engine.kv_failures if engine.kv_expired is None else engine.kv_expired),
)
KV_BYTES: Final = Source(
    "no counter of KV bytes, or no known shape of the model's KV",
    lambda evidence: evidence.kv_bytes is not None and evidence.kv_bytes_per_request is not None,
)
KV_TIMES: Final = Source(
    "no NIC's line rate, or no counter of the transfers' times",
    lambda evidence: bool(evidence.kv_line_rate) and _counted(lambda engine: engine.kv_seconds)(evidence),
)
TRANSPORT: Final = Source("nobody tells which transport ran", lambda evidence: bool(evidence.transport_ran))
NICS: Final = Source(
    "no counters of the servers' NICs", lambda evidence: evidence.engines_here and bool(evidence.nics)
)
PEAK: Final = Source(
    "unknown GPUs or model parameters",
    lambda evidence: evidence.prefill_work is not None and bool(evidence.prefill_flops),
)
PROMPT_USAGE: Final = Source("no prompt_tokens in the usage", _answered(lambda each: each.prompt_tokens))
TEXTS: Final = Source("answers' texts were not looked at", _answered(lambda each: each.text_crc))
LENGTHS: Final = Source(
    "all prompts are of one length", lambda evidence: len({each.input_len for each in evidence.records}) > 1
)
CANARIES: Final = Source(
    "no requests whose right answers were known",
    lambda evidence: evidence.canaries is not None and evidence.canaries.checked > 0,
)
FRESH_PROMPTS: Final = Source("prompts repeat", lambda evidence: not evidence.reuse_expected)
KNOWN_REUSE: Final = Source(
    "prompts repeat", lambda evidence: not evidence.reuse_expected or evidence.reuse_offered is not None
)
EVENTS: Final = Source(
    "no times of single events", lambda e: any(len(each.itl_s) for each in e.records if each.ok)
)
EVENT_TIMES: Final = Source("no times of events without text", _answered(lambda each: each.first_event_s))
SOCKET: Final = Source(
    "nothing was sent or received", lambda evidence: any(each.stamps for each in evidence.records if each.ok)
)
IN_TIME: Final = Source("the load generator read late", lambda evidence: evidence.client.reads_in_time)
MANY_ANSWERS: Final = Source(
    "too few answers",
    lambda evidence: sum(each.ok for each in evidence.records) >= steady.LEAST,
)
LONG_ANSWERS: Final = Source(
    "answers are too short to differ",
    lambda evidence: (
        sum(each.output_len >= answers.TELLING_TOKENS for each in evidence.records if each.ok)
        >= answers.LEAST_ANSWERS
    ),
)

COMPARED_ANSWERS: Final = Source(
    "answers are too short to differ",
    lambda evidence: sum(map(is_long, evidence.records)) >= answers.LEAST_ANSWERS,
)


def _paired(evidence: Evidence) -> bool:
    """P hands over KV to D."""
    return evidence.disaggregated or "prefill" in evidence.engines


def _perhaps_several(evidence: Evidence) -> bool:
    """A role has several instances, or nobody knows how many."""
    return not evidence.engines or any(each.instances > 1 for each in evidence.engines.values())


def _always(_: Evidence) -> bool:
    return True


@dataclass(frozen=True)
class Need:
    """``sources``: all of them. ``applies``: where it does not, there is nothing that the gate could see."""

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
    transfer.kv_failures: Need((KV_LOSSES,), _paired),
    transfer.kv_expired: Need((KV_LOSSES,), _paired),
    transfer.wrong_transport: Need(
        (TRANSPORT,), lambda e: bool(e.transport_asked) or (e.disaggregated and e.engines_here)
    ),
    transfer.wrong_nics: Need((NICS,), lambda evidence: bool(evidence.nics_asked)),
    work.warm_cache: Need((KNOWN_REUSE, HITS)),
    work.prefill_skipped: Need((FRESH_PROMPTS, PROMPT_COUNTS)),
    work.decode_recomputed: Need((BY_SOURCE,), lambda evidence: _paired(evidence) and evidence.whole_prompt),
    transfer.kv_bytes_wrong: Need((KV_BYTES,), _paired),
    streaming.requests_lost_or_repeated: Need((REQUEST_COUNTS,)),
    streaming.output_miscounted: Need((OUTPUT_COUNTS,)),
    streaming.failed_elsewhere: Need((REQUEST_COUNTS,)),
    transfer.impossible_prefill: Need((FRESH_PROMPTS, PEAK)),
    transfer.impossible_transfer: Need((KV_TIMES,), _paired),
    steady.slot_capped: Need((SLOTS,)),
    work.unequal_instances: Need((ANY_COUNTS, BY_INSTANCE), _perhaps_several),
    steady.two_populations: Need((FRESH_PROMPTS, MANY_ANSWERS)),
}
"""Of the gates on the servers that need more than the requests' times and outcomes."""


def unseen(evidence: Evidence) -> dict[str, list[str]]:
    """What was lacking, in words → the gates that could see nothing for it; empty if all could."""
    found: dict[str, list[str]] = {}
    for gate, need in NEEDS.items():
        if not need.applies(evidence):
            continue
        lacking = next((each.lacking for each in need.sources if not each.there(evidence)), None)
        if lacking is not None:
            found.setdefault(lacking, []).append(gate.__name__)
    return found
