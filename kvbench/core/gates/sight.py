"""What each gate looks at, and which gates saw nothing in a trial: no finding of these proves anything.

``NEEDS`` is data: a gate that needs more than the records of the requests has a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvbench.core.gates import (
    answers,
    physics,
    populations,
    requests,
    steady,
    streaming,
    transfer,
    work,
)
from kvbench.core.gates.evidence import Evidence
from kvbench.core.gates.evidence_figures import EngineFigures
from kvbench.core.metrics.equal_answers import is_long
from kvbench.core.records import Finding, RequestRecord

Gate = Callable[[Evidence], Finding | None]


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
    lambda evidence: sum(each.ok for each in evidence.records) >= populations.LEAST,
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
    requests.server_restarted: Need((ANY_COUNTS,)),
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
    requests.requests_lost_or_repeated: Need((REQUEST_COUNTS,)),
    requests.output_miscounted: Need((OUTPUT_COUNTS,)),
    requests.failed_elsewhere: Need((REQUEST_COUNTS,)),
    physics.impossible_prefill: Need((FRESH_PROMPTS, PEAK)),
    physics.impossible_transfer: Need((KV_TIMES,), _paired),
    steady.slot_capped: Need((SLOTS,)),
    work.unequal_instances: Need((ANY_COUNTS, BY_INSTANCE), _perhaps_several),
    populations.two_populations: Need((FRESH_PROMPTS, MANY_ANSWERS)),
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
