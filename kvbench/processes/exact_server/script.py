"""Planned response to each request, decided on arrival, and the deadlines of all tokens. Pure."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvbench.processes.exact_server import wire
from kvbench.processes.exact_server.ledger import ServedStream
from kvbench.processes.exact_server.spec import ExactSpec, Trouble

CUT_SHORT: Final = ("early_close", "half_event", "reset", "error_event")
LAST_TEXT: Final = " 00000000"
"""Text of the last token; the prompt's CRC-32 replaces the zeros."""
INSTEAD: Final = ("error_body_200", "status", "redirect")


@dataclass(frozen=True)
class Script:
    """``head`` precedes the first bytes; then identical ``plain`` tokens, then ``last`` and its end. The last
    bytes are due ``later_gaps`` gaps and ``late_s`` seconds after the normal first token's deadline, if they
    are also the first bytes; they hold ``last_tokens`` tokens. ``never``: nothing is ever sent. ``early`` is
    sent on arrival."""

    head: bytes
    plain: int
    last: bytes
    then: Literal["keep", "close", "reset"] = "keep"
    later_gaps: int = 0
    late_s: float = 0.0
    never: bool = False
    outcome: str = "complete"
    last_tokens: int = 1
    early: bytes = b""


class Playwright:
    """Makes scripts from bytes that are prepared once."""

    def __init__(self, spec: ExactSpec) -> None:
        self._spec = spec
        self._trouble = spec.troubles()
        self.token = wire.event(spec.model, [wire.choice(spec.text)])
        # As long as the others if these are bundles of tokens.
        last_text = spec.text[len(LAST_TEXT) :] + LAST_TEXT
        self._last_token = wire.event(spec.model, [wire.choice(last_text, "length")])
        self._empty = wire.event(spec.model, [wire.choice("")])
        self._before = 0
        self._blank = wire.event(spec.model, [wire.choice(" ")])

    def script(
        self, index: int, wanted: wire.WantedAnswer, output_len: int, *, close: bool, in_flight: int = 1
    ) -> Script:
        """Return the script of request ``index`` in order of arrival. ``close``: close the connection after
        it. ``in_flight``: active requests, this one included."""
        trouble = (
            self._trouble if self._trouble is not None and self._trouble.hits(index, in_flight) else None
        )
        usage_off = trouble.usage_off if trouble is not None and trouble.kind == "wrong_usage" else 0
        prompt_off = trouble.prompt_off if trouble is not None and trouble.kind == "wrong_prompt" else 0
        usage = wire.usage_of(wanted.prompt_tokens + prompt_off, output_len + usage_off)
        last_text = LAST_TEXT
        if trouble is None or trouble.kind != "canned":
            stale = trouble is not None and trouble.kind == "stale"
            last_text = f" {self._before if stale else wanted.prompt:08x}"
        self._before = wanted.prompt
        if wanted.stream:
            script = self._stream_script(output_len, last_text, usage if wanted.usage else None)
        else:
            text = self._spec.text * (output_len - 1) + last_text
            body = wire.whole_completion(self._spec.model, text, usage, produces_kv=wanted.produces_kv)
            script = Script(b"", 0, wire.plain(200, body), later_gaps=output_len - 1, last_tokens=output_len)
        if close:
            script = replace(script, then="close")
        return script if trouble is None else self._troubled(script, trouble)

    def _stream_script(self, output_len: int, last_text: str, usage: dict[str, int] | None) -> Script:
        usage_event = b"" if usage is None else wire.event(self._spec.model, [], usage)
        last_token = self._last_token.replace(LAST_TEXT.encode(), last_text.encode())
        last = b"".join((last_token, usage_event, wire.DONE, wire.LAST_CHUNK))
        return Script(wire.STREAM_HEAD, output_len - 1, last)

    def _troubled(self, script: Script, trouble: Trouble) -> Script:
        kind = trouble.kind
        script = replace(script, outcome=kind)
        if kind == "never_answer":
            return replace(script, never=True)
        if kind == "late":
            return replace(script, late_s=trouble.late_s)
        if kind in INSTEAD:
            return replace(
                script, head=b"", plain=0, last=self._instead(trouble), later_gaps=0, last_tokens=0
            )
        if kind in CUT_SHORT:
            return self._cut_short(script, trouble)
        if kind in ("empty_first", "blank_first"):
            early = self._empty if kind == "empty_first" else self._blank
            return replace(script, head=b"", early=script.head + early)
        if kind in ("merged", "inflated"):
            return replace(script, plain=-(-(script.plain + 1) // trouble.per_event) - 1)
        if kind in ("at_once", "empty"):
            whole = self.token * script.plain + script.last
            if kind == "empty":
                whole = self._empty * (script.plain + 1) + script.last[len(self._last_token) :]
            return replace(script, plain=0, last=whole, later_gaps=script.plain, last_tokens=script.plain + 1)
        return script

    def _instead(self, trouble: Trouble) -> bytes:
        if trouble.kind == "redirect":
            return wire.plain(307, b"", headers="location: /elsewhere\r\n")
        status = 200 if trouble.kind == "error_body_200" else trouble.status
        return wire.plain(status, wire.error_body(trouble.status, "planted trouble"))

    def _cut_short(self, script: Script, trouble: Trouble) -> Script:
        kind = trouble.kind
        script = replace(script, plain=min(script.plain, trouble.after_tokens), last_tokens=0)
        if kind in ("early_close", "reset"):
            return replace(script, last=b"", then="close" if kind == "early_close" else "reset")
        if kind == "half_event":
            event = self.token.split(b"\r\n", 1)[1][:-2]
            return replace(script, last=wire.chunk(event[: len(event) // 2]) + wire.LAST_CHUNK)
        error_event = b"data: " + wire.error_body(500, "planted trouble") + b"\n\n"
        return replace(script, last=wire.chunk(error_event) + wire.DONE + wire.LAST_CHUNK)


class Timetable:
    """Deadlines of all requests' tokens, with or without a queue, in CLOCK_MONOTONIC seconds. The sender
    takes streams out and puts them back."""

    def __init__(self, spec: ExactSpec) -> None:
        self._spec = spec
        self.firsts: list[tuple[float, int, ServedStream]] = []
        """Streams before their first token: a heap of (deadline, number, stream)."""
        self.gaps: deque[ServedStream] = deque()
        """Streams after it, in order of deadlines: all have the same gap."""
        self._free_at = 0.0

    def admit(self, stream: ServedStream, script: Script) -> None:
        spec = self._spec
        stream.head, stream.plain, stream.last = script.head, script.plain, script.last
        stream.then, stream.scripted, stream.last_tokens = script.then, script.outcome, script.last_tokens
        if spec.queue == "md1":
            self._free_at = max(self._free_at, stream.arrival) + spec.service_s
            due = self._free_at
        else:
            due = stream.arrival + spec.first_token_s
        stream.first_due = stream.due = due + script.later_gaps * spec.gap_s
        if not script.never:
            heapq.heappush(self.firsts, (stream.due + script.late_s, stream.index, stream))
            stream.due += script.late_s

    def go_on(self, stream: ServedStream) -> None:
        """Insert by deadline; a request that was read late belongs before later ones."""
        gaps = self.gaps
        place = len(gaps)
        while place and gaps[place - 1].due > stream.due:
            place -= 1
        if place == len(gaps):
            gaps.append(stream)
        else:
            gaps.insert(place, stream)

    def drop(self, stream: ServedStream) -> None:
        """Remove a stream. Before its first token it stays in the heap and is skipped."""
        with contextlib.suppress(ValueError):
            self.gaps.remove(stream)

    def waiting(self, now: float) -> int:
        """Requests in the queue that are not being served yet."""
        if self._spec.queue != "md1":
            return 0
        begun = now + self._spec.service_s
        return sum(stream.first_due > begun for _, _, stream in self.firsts)

    def busy(self, now: float) -> bool:
        """Whether the queue serves a request, even a dropped one."""
        return self._spec.queue == "md1" and self._free_at > now
