"""Canaries of one cell on one deployment: reference outputs, positions in each load, and extra ones.

Each prompt is sent once per cache lifetime, as cached KV proves nothing. When prompts run out the caches are
emptied; if that is impossible, fewer canaries reuse the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvbench.core.canaries.answer_kinds import (
    CanaryAnswer,
    CanaryResult,
    When,
    judge_canaries,
    noise_under_load,
)
from kvbench.core.canaries.pool import (
    AFTER_FAILURE,
    COMPARED_TOKENS,
    SPARES,
    CanaryPlaces,
    CanaryPool,
    Proof,
    canary_places,
    canary_prompt,
    place_canaries,
    wanted_canaries,
)
from kvbench.core.load.arrivals import trial_seed
from kvbench.core.load.traces import TracedRequest, expected_hits
from kvbench.core.records import Cell, Outputs, RequestRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import Offered
from kvbench.deployment.single_requests import Completion
from kvbench.errors import ServerError
from kvbench.sweep.trial.output_check import join_outputs

TOGETHER: Final = 8
"""Prompts repeated concurrently, and again one by one, to measure a server's noise."""
LONGEST_S: Final = 30.0
"""Longest time for all idle answers of a cell, with repeats, in seconds."""
LEAST_IDLE: Final = 4
"""Minimum number of idle answers, even from a slow server."""
AFTER_TRIAL: Final = 2
"""Maximum canaries after a trial with failed or cancelled requests."""
AT_END: Final = 8
"""Maximum canaries after a cell's last trial."""
EXTRA: Final = 0.5
"""Upper limit of extra canaries, as a part of the share; one each time is always allowed."""
LEAST_REPEATED: Final = 2
"""Canaries of a trial if prompts repeat; more only within the share."""
MOST: Final = 512


class QueriedDeployment(Protocol):
    @property
    def empties_caches(self) -> bool: ...
    def reset_caches(self) -> None: ...
    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, scored: bool
    ) -> list[Completion]: ...


def right_answers(
    scenario: Scenario,
    deployment: QueriedDeployment,
    label: str,
    cell: Cell,
    budget_s: float,
    *,
    proof: Proof,
    scored: bool,
    trace: Sequence[TracedRequest] = (),
    requests: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> CanaryPool | None:
    """Query an idle deployment for reference outputs, one request at a time, or return None if no canaries
    are configured.

    Sequential requests keep faults of concurrency out of the reference. ``budget_s`` limits the answers for
    the largest trial; the least trial's (``requests``: if known) and a few for failures are queried beyond
    it. ``LONGEST_S`` ends all after ``LEAST_IDLE``. ``scored``: with log-probabilities and repeats. Raises
    ServerError."""
    checks, search = scenario.checks, scenario.search
    if not checks.canary_share:
        return None
    spares = AFTER_FAILURE if proof == "reference" else SPARES
    shortest = requests or search.min_requests
    share, fewest = checks.canary_share, checks.min_canaries
    least = len(canary_places(shortest, share, fewest, search.min_requests, 0)) + spares
    most = wanted_canaries(search.max_requests, share, fewest) + SPARES
    wanted = min(MOST, max(least, most))
    places = _trace_places(scenario, trace)[:wanted]
    lengths = [(trace[position].input_len, trace[position].output_len) for position in places]
    lengths = lengths or [(cell.input_len, cell.output_len)] * wanted
    seed = trial_seed(scenario.seed, f"canaries-{cell.input_len}-{cell.output_len}", 0)
    vocab_size = scenario.model.vocab_size

    def complete(numbers: Sequence[int]) -> list[Completion]:
        most_tokens = max(min(COMPARED_TOKENS, lengths[number][1]) for number in numbers)
        prompts = [canary_prompt(lengths[number][0], seed, number, vocab_size) for number in numbers]
        return deployment.complete_all(prompts, most_tokens, scored=scored)

    began = clock()
    part = 0.5 if scored else 1.0  # share of the time; the rest is for repeats
    found = _send_alone(
        complete, (min(least, len(lengths)), len(lengths)), part * budget_s, part * LONGEST_S, clock
    )
    seconds, count = clock() - began, len(found)
    repeats = _repeat_prompts(deployment, complete, lengths[:count], clock) if scored else []
    deployment.reset_caches()
    return CanaryPool(
        label,
        (cell.input_len, cell.output_len),
        tuple(lengths[:count]),
        seed,
        vocab_size,
        join_outputs(found, seconds / max(1, count), repeats),
        proof,
        places=tuple(places[:count]),
    )


def _send_alone(
    complete: Callable[[Sequence[int]], list[Completion]],
    least_most: tuple[int, int],
    budget_s: float,
    longest_s: float,
    clock: Callable[[], float],
) -> list[Completion]:
    """Send prompts one at a time: as many as the budget allows, at least the least within LONGEST_S."""
    least, most = least_most
    found: list[Completion] = []
    began = clock()
    while len(found) < most:
        seconds = clock() - began
        wanted = most if seconds <= budget_s else least
        if len(found) >= (LEAST_IDLE if seconds > max(budget_s, longest_s) else wanted):
            break
        found += complete([len(found)])
    return found


def _repeat_prompts(
    deployment: QueriedDeployment,
    complete: Callable[[Sequence[int]], list[Completion]],
    lengths: Sequence[tuple[int, int]],
    clock: Callable[[], float],
) -> list[Outputs]:
    """Repeat the first prompts alone for a quarter of the time, and all of them concurrently."""
    began = clock()
    alone: list[Completion] = []
    for number in range(min(TOGETHER, len(lengths))):
        if alone and clock() - began > LONGEST_S / 4:
            break
        alone += complete([number])
    deployment.reset_caches()
    together = {
        number: answer
        for batch in _regrouped(lengths)
        for number, answer in zip(batch, complete(batch), strict=True)
    }
    return [join_outputs(alone), join_outputs([together[number] for number in sorted(together)])]


def _regrouped(lengths: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Regroup all prompts, so that each is computed next to others."""
    count = len(lengths)
    step = max(1, count // TOGETHER)
    order = [number for start in range(step) for number in range(start, count, step)]
    for begin in range(0, count, TOGETHER):
        batch = order[begin : begin + TOGETHER]
        by_length: dict[int, list[int]] = {}
        for number in batch:
            by_length.setdefault(lengths[number][1], []).append(number)
        yield from by_length.values()


def _trace_places(scenario: Scenario, trace: Sequence[TracedRequest]) -> list[int]:
    """Canary positions in a trace: requests that share no earlier prompt."""
    if not trace:
        return []
    fresh = [position for position, hit in enumerate(expected_hits(trace)) if not hit]
    checks, early = scenario.checks, scenario.search.min_requests
    found = canary_places(len(fresh), checks.canary_share, checks.min_canaries, early, scenario.seed)
    return [fresh[index] for index in found]


@dataclass
class CanarySupply:
    """Canaries of one cell's trials. ``judged_by``: reference outputs for the answers. ``results``: one per
    trial."""

    scenario: Scenario
    deployment: QueriedDeployment
    judged_by: CanaryPool
    of_reference: bool = field(default=False, kw_only=True)
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)

    def __post_init__(self) -> None:
        self.results: list[CanaryResult] = []
        self._fresh = list(range(len(self.judged_by)))
        self._sent = self._extra = 0
        """Requests of the cell's loads, and extra canaries."""
        self._holds_kv = False
        """Caches could not be emptied, as dropped requests still hold KV."""
        self._repeats = not self.deployment.empties_caches and self.judged_by.proof == "own"

    @property
    def pool(self) -> CanaryPool:
        """Reference outputs, with the noise of these trials if they are the reference's own."""
        return noise_under_load(self.judged_by, self.results) if self.of_reference else self.judged_by

    def places(self, offered: Offered, seed: int) -> CanaryPlaces:
        """Choose canary positions and uncached prompts for a load."""
        checks, search = self.scenario.checks, self.scenario.search
        if self.judged_by.places:
            return self._places_in_trace(offered)
        least = LEAST_REPEATED if self._repeats else checks.min_canaries
        found = canary_places(offered.n, checks.canary_share, least, search.min_requests, seed)
        wanted = len(found) + SPARES + AFTER_TRIAL
        if len(self._fresh) < wanted:
            self._refill()
        return place_canaries(found, self._fresh[: len(found) + SPARES])

    def _places_in_trace(self, offered: Offered) -> CanaryPlaces:
        self._refill()
        requests = offered.requests or ()
        at = {
            index: number
            for number, index in enumerate(self.judged_by.places)
            if number in self._fresh
            and index < len(requests)
            and (requests[index].input_len, requests[index].output_len) == self.judged_by.lengths[number]
        }
        return CanaryPlaces(at)

    def spec(self, places: CanaryPlaces) -> dict[str, Any]:
        if not places.numbers:
            return {}
        at = [[position, number] for position, number in sorted(places.at.items())]
        return {"canaries": {"seed": self.judged_by.seed, "at": at, "spares": list(places.spares)}}

    def _refill(self) -> None:
        """Make all prompts usable again: empty the caches, unless repeats are acceptable."""
        if len(self._fresh) == len(self.judged_by):
            return
        if not self._repeats:
            if self._holds_kv or not self.deployment.empties_caches:
                return
            try:
                self.deployment.reset_caches()
            except ServerError:
                self._holds_kv = True
                return
        self._fresh = list(range(len(self.judged_by)))

    def used(self, records: Sequence[RequestRecord]) -> None:
        """Mark the prompts that a load sent as used."""
        self._sent += sum(record.sent_s is not None for record in records)
        sent = {
            record.canary for record in records if record.canary is not None and record.sent_s is not None
        }
        self._fresh = [number for number in self._fresh if number not in sent]

    def ask(self, when: When, name: str, began_s: float = 0.0) -> list[CanaryAnswer]:
        """Send extra canaries. ``began_s``: seconds since the trial's start."""
        allowed = int(EXTRA * self.scenario.checks.canary_share * self._sent) - self._extra
        count = min(AFTER_TRIAL if when == "after_trial" else AT_END, max(1, allowed))
        if len(self._fresh) < count:
            self._refill()
        numbers = self._fresh[-count:] if self._fresh else []
        same = [n for n in numbers if self.judged_by.lengths[n][1] == self.judged_by.lengths[numbers[0]][1]]
        if not same:
            return []
        self._fresh = [number for number in self._fresh if number not in same]
        self._extra += len(same)
        prompts = [self.judged_by.prompt(number) for number in same]
        length = min(COMPARED_TOKENS, self.judged_by.lengths[same[0]][1])
        began = self.clock()
        try:
            answers = self.deployment.complete_all(prompts, length, scored=False)
        except ServerError:
            return []  # not a wrong answer; failures show in the trials
        ended_s = began_s + self.clock() - began
        return [
            CanaryAnswer(
                number, answer.text, f"{name}-{when.replace('_', '-')}-{number}", began_s, ended_s, when
            )
            for number, answer in zip(same, answers, strict=True)
        ]

    def judged(self, records: Sequence[RequestRecord], extra: Sequence[CanaryAnswer] = ()) -> CanaryResult:
        """Judge and keep a trial's canaries."""
        result = judge_canaries(
            self.judged_by, records, extra, of_reference=self.of_reference, repeated=self._repeats
        )
        self.results.append(result)
        return result
