"""Wait until the system is idle, as leftover work would distort the next trial.

Servers may continue dropped requests for minutes. Their gauges show the end; without gauges a single request
does: it is as fast as before the first trial. Time is real or virtual."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, Protocol

from kvbench.core.load.arrivals import trial_seed
from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.load.workers import LoadResult
from kvbench.core.records import Cell, Finding
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.slo import TIMES
from kvbench.errors import ServerError


class TrialClock(Protocol):
    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class WallClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


DRAIN_DEADLINE_S: Final = 30.0
"""Longest wait for the engines to drain before figures are read, in seconds."""
DEADLINE_S: Final = 60.0
DEADLINE_MOST_S: Final = 600.0
"""Shortest and longest wait for the backlog of the last trial, in seconds."""
POLL_S: Final = 0.05
FIRST_REQUESTS: Final = 3
AGREE: Final = 2
"""Requests that measure the idle latency, and requests in a row that must match it: routed requests may reach
different instances."""
SLOWER: Final = 1.5
SLACK_S: Final = 0.02
"""Tolerance of an idle request: factor of the median of the first ones, plus seconds."""
BACKLOG: Final = "backlog"


ALONE_REQUESTS: Final = 3
ALONE_S: Final = 10.0
"""Streamed requests for the median idle latency, and the time in seconds after which none is sent: a trial
lasts 20 latencies, so this must stay a small part."""


class StreamingDeployment(Protocol):
    def streamed_s(self, prompt: Sequence[int], max_tokens: int) -> float: ...


def idle_latency_s(scenario: Scenario, deployment: StreamingDeployment, cell: Cell) -> float | None:
    """Measure one idle request of a cell in seconds, streamed as in trials, since other requests may be much
    faster. Prompts are new to prefix caches. Returns None if a request fails; trials report why."""
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
    """Requests and gauges of a deployment that idleness needs."""

    def under_way(self) -> float | None: ...
    def complete(self, prompt: Sequence[int], max_tokens: int) -> str: ...
    def check_alive(self) -> None: ...


class Idleness:
    def __init__(
        self,
        scenario: Scenario,
        deployment: ServedDeployment,
        patience_s: tuple[float, float] | None = None,
        clock: TrialClock | None = None,
    ) -> None:
        """``patience_s``: least and longest wait. ``clock``: real time by default."""
        allowed_s = scenario.allowed_s
        patience_s = patience_s or (max(DEADLINE_S, allowed_s), max(DEADLINE_MOST_S, TIMES * allowed_s))
        self._clock = clock or WallClock()
        self._scenario = scenario
        self._deployment = deployment
        self._patience_s = patience_s
        self._first_s: dict[int, float] = {}
        """Input length → seconds of a single request before that length's first trial."""
        self._sent = 0
        self._salt = uuid.uuid4().hex
        self._left_s = 0.0

    def left_behind(self, requests: int, per_s: float | None) -> None:
        """Take a trial's open requests at its end, and the system's completions per second."""
        self._left_s = requests / per_s if per_s else 0.0

    def drain(self, load: LoadResult) -> Finding | None:
        """Wait until the load's leftovers are done; return a finding if they are not."""
        completed = sum(record.ok for record in load.records)
        self.left_behind(load.cancelled, completed / max(load.duration_s, 1e-3))
        if self.drained(DRAIN_DEADLINE_S):
            return None
        left = self._deployment.under_way() or 0.0
        return Finding(
            BACKLOG,
            "warning",
            f"{left:g} requests were still running or waiting {DRAIN_DEADLINE_S:g} s after the load: "
            "the engines' counters do not include them",
            "keep other clients off the system; an engine whose gauge never falls reports a wrong one",
            {"under_way": left},
        )

    @property
    def deadline_s(self) -> float:
        """Longest wait: twice the estimate for the last trial's backlog."""
        least, most = self._patience_s
        return min(max(least, 2.0 * self._left_s), most)

    def drained(self, deadline_s: float) -> bool:
        """Wait until no instance reports a request; False after the deadline."""
        return self._wait_until_drained(self._clock.now() + deadline_s)

    def wait(self, cell: Cell) -> Finding | None:
        """Wait until the system is idle; return a finding after ``deadline_s``."""
        began = self._clock.now()
        deadline = began + self.deadline_s
        if not self._wait_until_drained(deadline):
            open_requests = self._deployment.under_way() or 0.0
            return _finding(
                f"{open_requests:g} requests are running or waiting {self._clock.now() - began:.0f} s later",
                {"under_way": open_requests},
            )
        if self._deployment.under_way() is not None:
            return None
        return self._wait_until_fast(cell, began, deadline)

    def _wait_until_drained(self, deadline: float) -> bool:
        while self._deployment.under_way():
            self._deployment.check_alive()
            if self._clock.now() > deadline:
                return False
            self._clock.sleep(POLL_S)
        return True

    def _wait_until_fast(self, cell: Cell, began: float, deadline: float) -> Finding | None:
        idle_s = self._first_s.get(cell.input_len)
        if idle_s is None and self._first_s:
            # The time of this length must also be measured on the idle system.
            measured_cell = replace(cell, input_len=min(self._first_s))
            if (finding := self._wait_until_fast(measured_cell, began, deadline)) is not None:
                return finding
        if idle_s is None:
            times = [first_s for _ in range(FIRST_REQUESTS) if (first_s := self._ask(cell)) is not None]
            if times:
                self._first_s[cell.input_len] = median(times)
            return None
        took_s: float | None = None
        agreed = 0
        while agreed < AGREE:
            took_s = self._ask(cell)
            agreed = agreed + 1 if took_s is not None and took_s <= SLOWER * idle_s + SLACK_S else 0
            if not agreed and self._clock.now() > deadline:
                outcome = "failed" if took_s is None else f"took {took_s * 1e3:.0f} ms"
                return _finding(
                    f"a single request {outcome} {self._clock.now() - began:.0f} s later, where one takes "
                    f"{idle_s * 1e3:.0f} ms on the idle system",
                    {"took_s": took_s, "usual_s": idle_s},
                )
        return None

    def _ask(self, cell: Cell) -> float | None:
        """Seconds of a one-token request with a unique prompt, or None if it failed."""
        self._sent += 1
        seed = trial_seed(self._scenario.seed, f"idle-{self._salt}", self._sent)
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
        f"the system did not become idle after the previous load: {found}",
        "keep other clients off it; if it continues dropped requests, reduce the concurrent load "
        "with a lower search.max_rate",
        evidence,
    )
