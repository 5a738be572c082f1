"""Is the system idle again? A trial that begins on what another one left behind measures that, too.

Servers may go on with requests that the client has dropped, for minutes. Their own gauges show when all is
done. Where they have none, a single request does: it is as fast again as before the first trial. Time is the
wall's, or a virtual clock's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, Protocol

from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import Cell, Finding
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.slo import TIMES
from kvbench.errors import ServerError
from kvbench.sweep.trial.loadgen_driver import LoadResult


class TrialClock(Protocol):
    """Seconds since some moment, and waiting."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


DRAIN_DEADLINE_S: Final = 30.0
"""For how long the engines may end what a trial has left there, before its figures are read."""
DEADLINE_S: Final = 60.0
DEADLINE_MOST_S: Final = 600.0
"""For how long is waited at least, and at most where the last trial left more than that behind; longer where
the SLO allows a single request more."""
POLL_S: Final = 0.05
FIRST_REQUESTS: Final = 3
AGREE: Final = 2
"""So many single requests show how fast one is, and so many in a row must be as fast again: behind a router
each may reach another instance."""
SLOWER: Final = 1.5
SLACK_S: Final = 0.02
"""As fast: at most so many times the first ones' median, and so many seconds more."""
BACKLOG: Final = "backlog"


ALONE_REQUESTS: Final = 3
ALONE_S: Final = 10.0
"""Streamed requests that show the idle latency, by their median; no further one is sent after these seconds,
since a trial lasts 20 latencies and these should be a small part of it."""


class StreamingDeployment(Protocol):
    """A deployment that answers single requests by streams."""

    def streamed_s(self, prompt: Sequence[int], max_tokens: int) -> float: ...


def idle_latency_s(scenario: Scenario, deployment: StreamingDeployment, cell: Cell) -> float | None:
    """Return the seconds of one request of a cell on the idle system, streamed as in a trial.

    The prompts are new, so no prefix cache has them. A server may answer requests that are not streamed much
    faster. None if a request fails: trials report why.
    """
    seed = trial_seed(scenario.seed, f"alone-{uuid.uuid4().hex}", 0)
    shape = PromptShape(cell.input_len, scenario.model.vocab_size)
    times: list[float] = []
    try:
        for prompt in token_prompts(ALONE_REQUESTS, shape, seed).tolist():
            if sum(times) < ALONE_S:
                times.append(deployment.streamed_s(prompt, cell.output_len))
    except ServerError:
        return None
    return median(times)


class ServedDeployment(Protocol):
    """What is asked of a deployment."""

    def under_way(self) -> float | None: ...
    def complete(self, prompt: Sequence[int], max_tokens: int) -> str: ...
    def check_alive(self) -> None: ...


class Idleness:
    """Of one deployment, from its first trial on."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: ServedDeployment,
        patience_s: tuple[float, float] | None = None,
        clock: TrialClock | None = None,
    ) -> None:
        """``patience_s``: for how long to wait at least, and at most. ``clock``: by default the wall's."""
        allowed_s = scenario.allowed_s
        patience_s = patience_s or (max(DEADLINE_S, allowed_s), max(DEADLINE_MOST_S, TIMES * allowed_s))
        self._clock = clock or WallClock()
        self._scenario = scenario
        self._deployment = deployment
        self._patience_s = patience_s
        self._first_s: dict[int, float] = {}
        """Input length → seconds of a single request before the first trial of that length."""
        self._asked = 0
        self._salt = uuid.uuid4().hex
        self._left_s = 0.0

    def left_behind(self, requests: int, per_s: float | None) -> None:
        """A trial ended with so many requests under way, of a system that completed ``per_s`` a second."""
        self._left_s = requests / per_s if per_s else 0.0

    def drain(self, load: LoadResult) -> Finding | None:
        """Lets the system end what a load has left there, and keeps how much that was; a finding if it has
        not by then: what its counters are read to say is not all.
        """
        completed = sum(record.ok for record in load.records)
        self.left_behind(load.cancelled, completed / max(load.duration_s, 1e-3))
        if self.drained(DRAIN_DEADLINE_S):
            return None
        left = self._deployment.under_way() or 0.0
        return Finding(
            BACKLOG,
            "warning",
            f"{left:g} requests were still running or waiting there {DRAIN_DEADLINE_S:g} s after the load: "
            "the engines' counters lack them",
            "let nobody else use the system meanwhile; an engine whose gauge never falls reports a wrong one",
            {"under_way": left},
        )

    @property
    def deadline_s(self) -> float:
        """For how long to wait: twice what the last trial left behind should take."""
        least, most = self._patience_s
        return min(max(least, 2.0 * self._left_s), most)

    def drained(self, deadline_s: float) -> bool:
        """Waits until no instance reports a request; at once where none reports anything. False if that took
        too long.
        """
        return self._drained(self._clock.now() + deadline_s)

    def wait(self, cell: Cell) -> Finding | None:
        """Waits until the system is idle; after ``deadline_s`` says what it found instead.

        Raises ProcessDiedError and what else ``check_alive`` raises.
        """
        began = self._clock.now()
        deadline = began + self.deadline_s
        if not self._drained(deadline):
            left = self._deployment.under_way() or 0.0
            return _finding(
                f"{left:g} requests are running or waiting there {self._clock.now() - began:.0f} s later",
                {"under_way": left},
            )
        if self._deployment.under_way() is not None:
            return None
        return self._wait_as_fast(cell, began, deadline)

    def _drained(self, deadline: float) -> bool:
        while self._deployment.under_way():
            self._deployment.check_alive()
            if self._clock.now() > deadline:
                return False
            self._clock.sleep(POLL_S)
        return True

    def _wait_as_fast(self, cell: Cell, began: float, deadline: float) -> Finding | None:
        usual_s = self._first_s.get(cell.input_len)
        if usual_s is None and self._first_s:
            # What one of this length takes shall be of the idle system, too.
            known = replace(cell, input_len=min(self._first_s))
            if (finding := self._wait_as_fast(known, began, deadline)) is not None:
                return finding
        if usual_s is None:
            times = [each for _ in range(FIRST_REQUESTS) if (each := self._ask(cell)) is not None]
            if times:
                self._first_s[cell.input_len] = median(times)
            return None
        took_s: float | None = None
        agreed = 0
        while agreed < AGREE:
            took_s = self._ask(cell)
            agreed = agreed + 1 if took_s is not None and took_s <= SLOWER * usual_s + SLACK_S else 0
            if not agreed and self._clock.now() > deadline:
                said = "failed" if took_s is None else f"took {took_s * 1e3:.0f} ms"
                return _finding(
                    f"a single request {said} {self._clock.now() - began:.0f} s later, where one takes "
                    f"{usual_s * 1e3:.0f} ms on the idle system",
                    {"took_s": took_s, "usual_s": usual_s},
                )
        return None

    def _ask(self, cell: Cell) -> float | None:
        """Seconds of one request for a single token, with a prompt like no other; None if it failed."""
        self._asked += 1
        seed = trial_seed(self._scenario.seed, f"idle-{self._salt}", self._asked)
        shape = PromptShape(cell.input_len, self._scenario.model.vocab_size)
        (prompt,) = token_prompts(1, shape, seed).tolist()
        began = self._clock.now()
        try:
            self._deployment.complete(prompt, 1)
        except ServerError:
            self._clock.sleep(POLL_S)
            return None
        return self._clock.now() - began


def _finding(found: str, evidence: dict[str, Any]) -> Finding:
    return Finding(
        BACKLOG,
        "invalid",
        f"the system was not idle again after what was offered before: {found}",
        "let nobody else use it meanwhile; if it goes on with requests that were dropped, offer less at once "
        "by a lower search.max_rate",
        evidence,
    )
