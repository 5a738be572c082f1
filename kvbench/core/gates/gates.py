"""Is this trial a valid measurement, and what is its verdict?

The verdict rule, and why
-------------------------
A trial is **met** if the judged share of its requests (core/metrics/metrics.py: steady window) reaches the
target by the *point estimate* and the queue does not grow; else it is **missed**; if a gate refuses it, it is
**invalid**.

Why not ask the interval? To prove 95 % at 95 % confidence takes 59 requests without one miss, or 124 with
two. A quick trial has 60 to 200, so "met only if proven" would let a system that truly attains 97 % fail
most of its trials, and the search would settle far below the truth; "missed only if disproven" errs the
other way. The point estimate errs both ways alike, and only in the narrow band where the truth lies within
a few per cent of the target; near capacity attainment falls from 1 to 0 within 5 to 10 % of the rate, so
the band is narrow in rate, too. The price: a single verdict inside that band is nearly a coin toss. So the
interval is always reported (for the *effective* number of requests), the reason says when it cannot decide,
and the search confirms its answer by an independent trial. Longer trials narrow the band.

Doubt and direction: a late client, an emulated engine behind its model, or others on the machine make
latencies *longer*. A trial that meets the SLO all the same is met, with a warning; a missed one is refused if
the delay may be the cause. Gross delays refuse both, as the latencies themselves would be wrong.

Each gate is a function Evidence → Finding | None. An unknown figure (None) trips no gate. Its docstring says
what an honest trial proves there, by which evidence and within which limits; ``gate_table`` reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvbench.core.gates import (
    answers,
    client,
    machine,
    physics,
    populations,
    requests,
    steady,
    streaming,
    transfer,
    work,
)
from kvbench.core.gates.evidence import Evidence, GateLimits
from kvbench.core.gates.evidence_figures import ClientFigures, EngineFigures, HostFigures
from kvbench.core.metrics.criteria import CriterionResult, missed_text
from kvbench.core.records import Finding, VerdictKind

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
    requests.failed_requests,
    requests.server_restarted,
    answers.wrong_answers,
    requests.wrong_length,
    answers.wrong_prompt_length,
    answers.empty_answers,
    streaming.inflated_usage,
    streaming.answer_at_once,
    streaming.early_first_token,
    answers.same_answers,
    answers.repeated_answers,
    answers.prompts_unread,
    streaming.impossible_answers,
    requests.shedding,
    transfer.kv_failures,
    transfer.kv_expired,
    transfer.wrong_transport,
    transfer.wrong_nics,
    work.warm_cache,
    work.prefill_skipped,
    work.decode_recomputed,
    work.work_unproven,
    transfer.kv_bytes_wrong,
    requests.requests_lost_or_repeated,
    requests.output_miscounted,
    requests.failed_elsewhere,
    physics.impossible_prefill,
    physics.impossible_transfer,
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
    populations.two_populations,
    machine.machine_disturbed,
    streaming.empty_first_event,
    streaming.tokens_per_event,
)
"""In the order of importance: the first refusal becomes the verdict's reason."""
BY_REQUESTS: Final[tuple[Gate, ...]] = (
    requests.failed_requests,
    requests.wrong_length,
    answers.wrong_prompt_length,
    answers.empty_answers,
    answers.repeated_answers,
    requests.shedding,
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
