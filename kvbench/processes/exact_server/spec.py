"""What the exact server is given, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

from kvbench.errors import InputError
from kvbench.processes.common.entry import parse_spec

QUEUES: Final = ("none", "md1")
TROUBLES: Final = (
    "early_close",
    "half_event",
    "reset",
    "error_event",
    "wrong_usage",
    "error_body_200",
    "status",
    "redirect",
    "never_answer",
    "late",
    "empty_first",
    "blank_first",
    "empty",
    "wrong_prompt",
    "merged",
    "inflated",
    "at_once",
    "canned",
    "stale",
    "refuse",
)


@dataclass(frozen=True)
class Trouble:
    """How some requests are mistreated.

    ``early_close``, ``half_event``, ``reset`` and ``error_event`` come in place of token ``after_tokens``
    (from 0): the connection is closed; half an event ends the answer; the connection is reset; the stream
    reports an error and ends. ``wrong_usage`` reports ``usage_off`` tokens more than were sent.
    ``error_body_200``, ``redirect`` and ``status`` (number ``status``) answer at the time of the first
    token. ``never_answer`` does nothing, ``late`` comes ``late_s`` later, and ``refuse`` stops listening
    after ``connections``. ``empty_first`` sends the head and an event without text as soon as it is asked,
    ``blank_first`` one with a blank; ``empty`` sends events without text when the last token is due.
    ``wrong_prompt`` reports ``prompt_off`` prompt tokens more than came, ``merged`` puts ``per_event`` tokens
    into each event (``text`` and ``gap_s`` are an event's then), ``inflated`` sends one token where its usage
    claims ``per_event``, ``at_once`` sends all when the last token is due, ``canned`` answers every
    prompt alike, and ``stale`` with the answer to the prompt before.
    """

    kind: str
    every: int = 1
    """Each so-manyth request: the first one is in trouble, then each ``every``-th after it."""
    at: list[int] = field(default_factory=list)
    """Or only these, counted from 0 in order of arrival."""
    spared: int = 0
    """The first so many requests are in no trouble, as before any load."""
    after_tokens: int = 1
    in_flight: int = 0
    """Only while more requests than this are under way, the one in trouble included."""
    usage_off: int = -1
    prompt_off: int = -1
    per_event: int = 4
    status: int = 503
    late_s: float = 1.0
    connections: int = 0

    def hits(self, index: int, in_flight: int) -> bool:
        """Whether request number ``index`` is mistreated, with which ``in_flight`` are under way."""
        if self.kind == "refuse" or index < self.spared or in_flight <= self.in_flight:
            return False
        return index in self.at if self.at else index % self.every == 0

    def check(self) -> None:
        if self.kind not in TROUBLES:
            raise InputError(
                f"the spec: trouble {self.kind!r} is unknown", hint="one of " + ", ".join(TROUBLES)
            )
        if self.every < 1 or self.after_tokens < 0 or self.late_s < 0 or self.connections < 0:
            raise InputError("the spec: trouble.every must be at least 1, its other numbers not negative")
        if self.per_event < 1:
            raise InputError(f"the spec: trouble.per_event must be at least 1, it is {self.per_event}")


@dataclass(frozen=True)
class ExactSpec:
    """One exact server. Times in seconds; port 0 takes any free one, named in the ready event."""

    port: int = 0
    host: str = "127.0.0.1"
    model: str = "exact"
    first_token_s: float = 0.05
    """From the request's arrival to its first token. Not used with a queue."""
    gap_s: float = 0.01
    output_len: int = 16
    """For requests without max_tokens."""
    queue: str = "none"
    service_s: float = 0.0
    """With queue md1: how long the server is busy with one request, whose first token comes at the end."""
    text: str = " a"
    """Each token's text but the last one's, which depends on the prompt: other prompts, other answers."""
    spin_s: float = 0.0
    """The last so many seconds before a deadline are spent awake: exacter, and costs a core."""
    trouble: dict[str, Any] = field(default_factory=dict)
    metrics: bool = True
    """Whether there is a page /metrics; not every server has one."""
    log_path: str = ""
    """Where the log is written at the end, as JSON lines; empty: nowhere. GET /log always works."""
    log_tokens: bool = True
    """Keep each token's time, 8 bytes each; without it, only the first one's."""

    def check(self) -> None:
        """Raises InputError for what cannot be served."""
        for name in ("first_token_s", "gap_s", "service_s", "spin_s"):
            value = getattr(self, name)
            if value < 0 or not math.isfinite(value):
                raise InputError(f"the spec: {name} must be 0 or more and finite, it is {value}")
        if self.queue not in QUEUES:
            raise InputError(f"the spec: queue {self.queue!r} is unknown", hint="one of " + ", ".join(QUEUES))
        if self.queue == "md1" and not self.service_s > 0:
            raise InputError("the spec: queue md1 needs service_s above 0")
        if self.output_len < 1:
            raise InputError(f"the spec: output_len must be at least 1, it is {self.output_len}")
        if not 0 <= self.port <= 65_535:
            raise InputError(f"the spec: port must be 0 to 65535, it is {self.port}")
        self.troubles()

    def troubles(self) -> Trouble | None:
        """How requests are mistreated; None: not at all. Raises InputError."""
        if not self.trouble:
            return None
        trouble = parse_spec(Trouble, self.trouble, "the spec's trouble")
        trouble.check()
        return trouble
