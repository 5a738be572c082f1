"""Records of a measurement: one request, one trial. Seconds inside, milliseconds at the edge.

All ``*_s`` times of a request are seconds since the trial's start on the load generator's monotonic clock;
None means that it did not happen or was not recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

SCHEMA_VERSION: Final = 1

# Classes of failure of one request. "" is success. "cancelled" is a request that kvbench itself ended because
# its trial was stopped; it is neither met nor missed. "no_answer" had no part of an answer when its time was
# up, "timeout" a part of one. "early_close" ended in order but too soon, "half_event" in the middle of an
# event, "reset" by a broken connection. "aborted" is an answer that the server gave up.
RequestError = Literal[
    "",
    "connect",
    "timeout",
    "http_error",
    "early_close",
    "bad_stream",
    "half_event",
    "reset",
    "redirect",
    "no_answer",
    "error_body",
    "aborted",
    "wrong_length",
    "cancelled",
]

UNENDED: Final = ("timeout", "no_answer", "cancelled")
"""Failure classes of requests that were open when kvbench stopped waiting."""

ABORTED: Final = ("abort", "error")
"""``finish_reason`` values of aborted answers in vLLM and SGLang."""


def abort_text(choices: Any) -> str:
    """Return the text of an abort in ``choices``; empty if none."""
    for choice in choices if isinstance(choices, list) else ():
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if reason in ABORTED:
            return f'the server aborted the answer (finish_reason "{reason}")'
    return ""


def error_in(answer: dict[str, Any]) -> str:
    """Return the error in a JSON answer, in OpenAI's format or vLLM's older one; empty without one."""
    if error := answer.get("error"):
        return str(error.get("message") or error) if isinstance(error, dict) else str(error)
    if answer.get("object") == "error":
        return str(answer.get("message") or answer)
    return ""


# "undecided": inconclusive within the trial's time. "measured": valid, without an SLO.
VerdictKind = Literal["met", "missed", "undecided", "measured", "invalid"]

Method = Literal[
    "sustained", "burst", "fixed", "closed_loop", "trace", "equal_rate", "imported", "chaos", "soak"
]
"""How a trial's load was offered.

- "sustained" and "trace" measure how much a system holds.
- "closed_loop" offers a number of concurrent requests and no rate (its ``request_rate`` is 0).
- "chaos" and "soak" offer a fixed rate, with a fault or for hours.
- "imported" is another tool's result (importers/)."""
MAIN_METHODS: Final = ("sustained", "trace")
HELD_METHODS: Final = ("chaos", "soak")
"""Methods at a fixed rate; their run kinds have the same names."""

ROUTER_TIMES: Final = (
    "router_received_s",
    "prefill_sent_s",
    "prefill_answered_s",
    "decode_sent_s",
    "decode_first_byte_s",
)
"""The router's times of a request, in its response headers (``timing_header``) and in a RequestRecord."""
TIMING_REQUEST_HEADER: Final = "x-kvbench-timing"


def timing_header(name: str) -> str:
    """Return the response header of one of ROUTER_TIMES, in seconds on the router's monotonic clock."""
    return "x-kvbench-" + name.removesuffix("_s").replace("_", "-")


@dataclass
class RequestRecord:
    """One request as the load generator recorded it. ``router_received_s`` to ``decode_first_byte_s`` are
    times of kvbench's router on the same machine, on the generator's clock. In direct mode all but
    ``router_received_s`` are the generator's."""

    request_id: str
    scheduled_s: float
    input_len: int
    requested_output_len: int
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_len: int = 0
    itl_s: Sequence[float] = field(default_factory=list)
    """A list, or an array of floats at a quarter of the memory."""
    status: int = 0
    error: RequestError = ""
    error_detail: str = ""
    router_received_s: float | None = None
    prefill_sent_s: float | None = None
    prefill_answered_s: float | None = None
    decode_sent_s: float | None = None
    decode_first_byte_s: float | None = None
    sent_kernel_s: float | None = None
    """Time at which the kernel passed the request's last byte to the network device."""
    stamps: Literal["", "kernel", "read"] = ""
    """Source of receive times: the kernel's stamps, or the client's reads."""
    prompt_tokens: int | None = None
    """Prompt length in the server's usage."""
    text_crc: int | None = None
    """CRC-32 of the answer's text, to recognise equal answers."""
    text_bytes: int | None = None
    """Length of the text in UTF-8."""
    first_event_s: float | None = None
    """First event of the stream, possibly without text."""
    untimed_tokens: float = 1.0
    """Tokens not timed between the first and the last text (core/metrics/untimed_tokens.py)."""
    empty_events: int = 0
    """Events without text."""
    first_blank: bool = False
    """Whether the first text was only blanks."""
    canary: int | None = None
    """Number of its canary prompt (core/canaries)."""
    text: str = ""
    """A canary's answer, else empty."""
    session: int | None = None
    """Number of its session in the trial."""
    turn: int | None = None
    """Index in its conversation; sub-agents count separately."""
    session_s: float | None = None
    """Session duration up to this answer, for the session's last request."""
    cached_tokens: int | None = None
    """Prompt tokens that were in the prefix cache."""

    @property
    def ok(self) -> bool:
        return self.error == ""

    @property
    def ttft_s(self) -> float | None:
        """First token − scheduled send (as in wrk2: waiting to be sent counts)."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def first_event_ttft_s(self) -> float | None:
        """First event, possibly without text − scheduled send."""
        return None if self.first_event_s is None else self.first_event_s - self.scheduled_s

    @property
    def ttft_sent_s(self) -> float | None:
        if self.first_token_s is None or self.sent_s is None:
            return None
        return self.first_token_s - self.sent_s

    @property
    def e2el_s(self) -> float | None:
        """Last token − scheduled send."""
        return None if self.last_token_s is None else self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(e2el − ttft) / (output_len − 1), less for bundled tokens; undefined if all came at once."""
        if self.first_token_s is None or self.last_token_s is None or self.output_len <= self.untimed_tokens:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_len - self.untimed_tokens)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))  # not asdict: a trial may hold a million gaps, which that copies one by one

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> RequestRecord:
        return cls(**row)


def require_types(record: object) -> None:
    """Raise TypeError if a field of a record from a file has the wrong JSON type."""
    cls = type(record)
    if cls not in _JSON_TYPES:
        _JSON_TYPES[cls] = {name: _kinds(hint) for name, hint in get_type_hints(cls).items()}
    for name, kinds in _JSON_TYPES[cls].items():
        value = getattr(record, name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name} is {str(value)[:40]!r}")


_JSON_TYPES: Final[dict[type, dict[str, tuple[type, ...]]]] = {}
"""Allowed JSON types by record class and field."""


def _kinds(hint: Any) -> tuple[type, ...]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return tuple(kind for arg in get_args(hint) for kind in _kinds(arg))
    if origin is Literal:
        return (str,)
    if hint is float:
        return (int, float, type(None))
    return (origin or hint,)


@dataclass(frozen=True)
class Finding:
    """A gate's finding. ``level``: "invalid" (refuses the trial), "warning" or "note"."""

    gate: str
    level: Literal["invalid", "warning", "note"]
    message: str
    advice: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One cell of the result table: a connector and an input length."""

    connector: str
    input_len: int
    output_len: int

    @property
    def key(self) -> str:
        return f"{self.connector}-{self.lengths_key}"

    @property
    def lengths_key(self) -> str:
        """Key shared by all connectors at these lengths."""
        return f"in{self.input_len}-out{self.output_len}"


@dataclass
class TrialRecord:
    """One trial: one rate offered to one cell once. A line of ``trials.jsonl``."""

    trial_id: str
    cell: Cell
    request_rate: float
    seed: int
    verdict: VerdictKind
    reason: str
    purpose: str = ""
    started_at: str = ""
    duration_s: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    method: Method = "sustained"

    def verdict_of(self, tier: str) -> VerdictKind:
        """Return the verdict for one SLO tier; "" is the trial's own."""
        of_tier = (self.summary.get("tiers") or {}).get(tier) if tier else None
        verdict: VerdictKind = self.verdict if of_tier is None else of_tier["verdict"]
        return verdict

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> TrialRecord:
        data = {key: value for key, value in row.items() if key != "schema"}
        data["cell"] = Cell(**data["cell"])
        data["findings"] = [Finding(**finding) for finding in data.get("findings", [])]
        record = cls(**data)
        for part in (record, record.cell, *record.findings):
            require_types(part)
        if not all(isinstance(label, str) for label in record.labels):
            raise TypeError(f"labels are {str(record.labels)[:40]!r}")
        if record.verdict not in get_args(VerdictKind):
            raise ValueError(f"verdict is {record.verdict[:40]!r}")
        for name in ("request_rate", "duration_s"):
            # None is written where a number is not finite; NaN never.
            if (value := getattr(record, name)) is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {str(value)[:40]}")
        return record


@dataclass(frozen=True)
class TokenChoice:
    """A token's text, and the log-probabilities (nats) of the most likely texts at its position."""

    token: str
    logprobs: Mapping[str, float]


@dataclass(frozen=True)
class Outputs:
    """Greedy outputs for one input length, and the median time of one request in seconds. ``choices``: each
    text's tokens, () if the server does not report them. ``repeats``: the same prompts repeated, alone and
    together, which shows the server's own noise."""

    texts: tuple[str, ...]
    latency_s: float
    choices: tuple[tuple[TokenChoice, ...], ...] = ()
    repeats: tuple[Outputs, ...] = ()
