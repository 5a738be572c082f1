"""The exact server's spec, checked before anything starts."""

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
    """Kinds of misbehaviour for some requests. Instead of token ``after_tokens`` (from 0): ``early_close``
    closes the connection, ``half_event`` ends the answer within an event, ``reset`` resets the connection,
    ``error_event`` reports an error and ends the stream. At the time of the first token: ``error_body_200``,
    ``redirect``, and ``status`` (HTTP number ``status``). ``never_answer`` sends nothing, ``late`` is delayed
    by ``late_s``, ``refuse`` stops listening after ``connections``. ``empty_first`` sends the head and an
    event without text on arrival, ``blank_first`` one with a blank; ``empty`` sends events without text when
    the last token is due; ``at_once`` sends all tokens then. ``wrong_usage`` reports ``usage_off`` tokens too
    many, ``wrong_prompt`` ``prompt_off`` prompt tokens too many. ``merged`` puts ``per_event`` tokens into
    each event (``text`` and ``gap_s`` apply to events), ``inflated`` sends one token but counts
    ``per_event``. ``canned`` gives all prompts the same answer, ``stale`` the answer to the prompt before."""

    kind: str
    every: int = 1
    """Affects the first request and then each ``every``-th one."""
    at: list[int] = field(default_factory=list)
    """Affects only these requests, counted from 0 in order of arrival."""
    spared: int = 0
    """Number of first requests that are not affected, as before any load."""
    after_tokens: int = 1
    in_flight: int = 0
    """Affects requests only while more than this are active, the affected one included."""
    usage_off: int = -1
    prompt_off: int = -1
    per_event: int = 4
    status: int = 503
    late_s: float = 1.0
    connections: int = 0

    def hits(self, index: int, in_flight: int) -> bool:
        """Whether request ``index`` is affected, given the number of active requests."""
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
    """Time from a request's arrival to its first token, in seconds. Not used with a queue."""
    gap_s: float = 0.01
    output_len: int = 16
    queue: str = "none"
    service_s: float = 0.0
    """Service time of queue md1, in seconds; the first token comes at its end."""
    text: str = " a"
    """Text of each token except the last one, which depends on the prompt."""
    spin_s: float = 0.0
    """Busy-wait before each deadline, in seconds: more exact, but costs a core."""
    trouble: dict[str, Any] = field(default_factory=dict)
    metrics: bool = True
    """Whether there is a page /metrics; not every server has one."""
    log_path: str = ""
    """File for the log at the end, as JSON lines; empty: none. GET /log always works."""
    log_tokens: bool = True
    """Keep each token's time, 8 bytes each; otherwise only the first one's."""

    def check(self) -> None:
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
        """The planned misbehaviour, if any. Raises InputError."""
        if not self.trouble:
            return None
        trouble = parse_spec(Trouble, self.trouble, "the spec's trouble")
        trouble.check()
        return trouble
