"""Canaries of one cell on one deployment: their right answers, their places in each load, and those that are
asked for beside it.

A prompt is asked once for as long as caches last: KV that a server still has would prove nothing. When none
is left the caches are emptied; where nobody can do that, the same are asked again, and fewer of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from kvbench.core.canaries.answer_kinds import (
    AskedCanary,
    CanaryResult,
    When,
    judged_canaries,
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
    placed,
    wanted_canaries,
)
from kvbench.core.load.traces import TracedRequest, expected_hits
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import Cell, Outputs, RequestRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.single_requests import Completion
from kvbench.errors import ServerError
from kvbench.sweep.trial.load_plan import Offered
from kvbench.sweep.trial.output_check import joined_outputs

TOGETHER: Final = 8
"""Prompts that are asked for again at once, and again one by one, to see how a server differs from itself."""
LONGEST_S: Final = 30.0
"""Seconds that all idle answers of a cell take at most, those that are asked for again included."""
LEAST_IDLE: Final = 4
"""Idle answers that are asked for in any case, however slow the server is."""
AFTER_TRIAL: Final = 2
"""At most so many canaries after a trial in which requests failed or were cancelled."""
AT_END: Final = 8
"""And after the last one of a cell."""
BESIDE: Final = 0.5
"""All that are asked for beside the load are at most this part of the share, but one each time."""
LEAST_REPEATED: Final = 2
"""Of prompts that are asked again and again, a trial has no more than the share, but so many."""
MOST: Final = 512


class AskedDeployment(Protocol):
    """What is asked of a deployment."""

    @property
    def empties_caches(self) -> bool: ...
    def reset_caches(self) -> None: ...
    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, scored: bool
    ) -> list[Completion]: ...


def right_answers(
    scenario: Scenario,
    deployment: AskedDeployment,
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
    """Asks an idle deployment for the answers that canaries are compared with, one request at a time.

    So a fault that needs several requests at once is not in the right answers. For ``budget_s`` all are asked
    for that a trial may need; after that what the least trial needs (``requests``: what a trial is known to
    send), and some that may follow a failure. ``LONGEST_S`` ends it once there are ``LEAST_IDLE``.
    ``scored``: with log-probabilities, and again. None where no canaries are wanted. Raises ServerError.
    """
    checks, search = scenario.checks, scenario.search
    if not checks.canary_share:
        return None
    more = AFTER_FAILURE if proof == "reference" else SPARES
    shortest = requests or search.min_requests
    share, fewest = checks.canary_share, checks.min_canaries
    least = len(canary_places(shortest, share, fewest, search.min_requests, 0)) + more
    most = wanted_canaries(search.max_requests, share, fewest) + SPARES
    wanted = min(MOST, max(least, most))
    places = _trace_places(scenario, trace)[:wanted]
    lengths = [(trace[place].input_len, trace[place].output_len) for place in places]
    lengths = lengths or [(cell.input_len, cell.output_len)] * wanted
    seed = trial_seed(scenario.seed, f"canaries-{cell.input_len}-{cell.output_len}", 0)
    vocab_size = scenario.model.vocab_size

    def asked(numbers: Sequence[int]) -> list[Completion]:
        most_tokens = max(min(COMPARED_TOKENS, lengths[number][1]) for number in numbers)
        prompts = [canary_prompt(lengths[number][0], seed, number, vocab_size) for number in numbers]
        return deployment.complete_all(prompts, most_tokens, scored=scored)

    began = clock()
    part = 0.5 if scored else 1.0  # of the time: the rest is for asking again
    found = _asked_alone(
        asked, (min(least, len(lengths)), len(lengths)), part * budget_s, part * LONGEST_S, clock
    )
    seconds, count = clock() - began, len(found)
    repeats = _asked_again(deployment, asked, lengths[:count], clock) if scored else []
    deployment.reset_caches()
    return CanaryPool(
        label,
        (cell.input_len, cell.output_len),
        tuple(lengths[:count]),
        seed,
        vocab_size,
        joined_outputs(found, seconds / max(1, count), repeats),
        proof,
        places=tuple(places[:count]),
    )


def _asked_alone(
    asked: Callable[[Sequence[int]], list[Completion]],
    least_most: tuple[int, int],
    budget_s: float,
    longest_s: float,
    clock: Callable[[], float],
) -> list[Completion]:
    """Prompts one at a time: the most within the budget, else the least within the longest time."""
    least, most = least_most
    found: list[Completion] = []
    began = clock()
    while len(found) < most:
        seconds = clock() - began
        wanted = most if seconds <= budget_s else least
        if len(found) >= (LEAST_IDLE if seconds > max(budget_s, longest_s) else wanted):
            break
        found += asked([len(found)])
    return found


def _asked_again(
    deployment: AskedDeployment,
    asked: Callable[[Sequence[int]], list[Completion]],
    lengths: Sequence[tuple[int, int]],
    clock: Callable[[], float],
) -> list[Outputs]:
    """The first prompts alone, as far as a quarter of the time reaches, and all of them beside others."""
    began = clock()
    alone: list[Completion] = []
    for number in range(min(TOGETHER, len(lengths))):
        if alone and clock() - began > LONGEST_S / 4:
            break
        alone += asked([number])
    deployment.reset_caches()
    again = {
        number: answer
        for batch in _others_together(lengths)
        for number, answer in zip(batch, asked(batch), strict=True)
    }
    return [joined_outputs(alone), joined_outputs([again[number] for number in sorted(again)])]


def _others_together(lengths: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """All prompts in other batches than before, so that each is computed beside others."""
    count = len(lengths)
    step = max(1, count // TOGETHER)
    order = [number for start in range(step) for number in range(start, count, step)]
    for begin in range(0, count, TOGETHER):
        batch = order[begin : begin + TOGETHER]
        alike: dict[int, list[int]] = {}
        for number in batch:
            alike.setdefault(lengths[number][1], []).append(number)
        yield from alike.values()


def _trace_places(scenario: Scenario, trace: Sequence[TracedRequest]) -> list[int]:
    """Requests of a trace that share no prompt with those before them, at the places of canaries."""
    if not trace:
        return []
    fresh = [place for place, hit in enumerate(expected_hits(trace)) if not hit]
    checks, early = scenario.checks, scenario.search.min_requests
    found = canary_places(len(fresh), checks.canary_share, checks.min_canaries, early, scenario.seed)
    return [fresh[each] for each in found]


class CanarySupply:
    """The canaries of one cell's trials. ``results``: what came of them, trial by trial.

    ``of_reference``: the deployment is the one that gave the right answers.
    """

    def __init__(
        self,
        scenario: Scenario,
        deployment: AskedDeployment,
        pool: CanaryPool,
        *,
        of_reference: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results: list[CanaryResult] = []
        self._scenario = scenario
        self._deployment = deployment
        self._pool = pool
        self._of_reference = of_reference
        self._clock = clock
        self._fresh = list(range(len(pool)))
        self._sent = self._beside = 0
        """Requests of the cell's loads, and canaries beside them."""
        self._holds_kv = False
        """Caches could not be emptied, since KV of requests that were dropped is held."""
        self._repeats = not deployment.empties_caches and pool.proof == "own"

    @property
    def pool(self) -> CanaryPool:
        """With what these trials have shown, if they are the reference's own."""
        return noise_under_load(self._pool, self.results) if self._of_reference else self._pool

    @property
    def judged_by(self) -> CanaryPool:
        """As answers are judged by it."""
        return self._pool

    def places(self, offered: Offered, seed: int) -> CanaryPlaces:
        """Where the canaries of a load are, with prompts that no cache has."""
        checks, search = self._scenario.checks, self._scenario.search
        if self._pool.places:
            return self._places_in_trace(offered)
        least = LEAST_REPEATED if self._repeats else checks.min_canaries
        found = canary_places(offered.n, checks.canary_share, least, search.min_requests, seed)
        wanted = len(found) + SPARES + AFTER_TRIAL
        if len(self._fresh) < wanted:
            self._refill()
        return placed(found, self._fresh[: len(found) + SPARES])

    def _places_in_trace(self, offered: Offered) -> CanaryPlaces:
        self._refill()
        requests = offered.requests or ()
        at = {
            place: number
            for number, place in enumerate(self._pool.places)
            if number in self._fresh
            and place < len(requests)
            and (requests[place].input_len, requests[place].output_len) == self._pool.lengths[number]
        }
        return CanaryPlaces(at)

    def spec(self, places: CanaryPlaces) -> dict[str, Any]:
        """What the load generator is told."""
        if not places.numbers:
            return {}
        at = [[place, number] for place, number in sorted(places.at.items())]
        return {"canaries": {"seed": self._pool.seed, "at": at, "spares": list(places.spares)}}

    def _refill(self) -> None:
        """All prompts may be asked again: caches are emptied, or it does not matter."""
        if len(self._fresh) == len(self._pool):
            return
        if not self._repeats:
            if self._holds_kv or not self._deployment.empties_caches:
                return
            try:
                self._deployment.reset_caches()
            except ServerError:
                self._holds_kv = True
                return
        self._fresh = list(range(len(self._pool)))

    def used(self, records: Sequence[RequestRecord]) -> None:
        """What a load has sent is not fresh any more."""
        self._sent += sum(each.sent_s is not None for each in records)
        sent = {each.canary for each in records if each.canary is not None and each.sent_s is not None}
        self._fresh = [number for number in self._fresh if number not in sent]

    def ask(self, when: When, name: str, began_s: float = 0.0) -> list[AskedCanary]:
        """Asks for some beside a load. ``began_s``: when, in seconds since the trial's start."""
        allowed = int(BESIDE * self._scenario.checks.canary_share * self._sent) - self._beside
        count = min(AFTER_TRIAL if when == "after_trial" else AT_END, max(1, allowed))
        if len(self._fresh) < count:
            self._refill()
        numbers = self._fresh[-count:] if self._fresh else []
        same = [n for n in numbers if self._pool.lengths[n][1] == self._pool.lengths[numbers[0]][1]]
        if not same:
            return []
        self._fresh = [number for number in self._fresh if number not in same]
        self._beside += len(same)
        prompts = [self._pool.prompt(number) for number in same]
        length = min(COMPARED_TOKENS, self._pool.lengths[same[0]][1])
        began = self._clock()
        try:
            answers = self._deployment.complete_all(prompts, length, scored=False)
        except ServerError:
            return []  # it is no wrong answer; what failed shows in the trials
        ended_s = began_s + self._clock() - began
        return [
            AskedCanary(
                number, answer.text, f"{name}-{when.replace('_', '-')}-{number}", began_s, ended_s, when
            )
            for number, answer in zip(same, answers, strict=True)
        ]

    def judged(self, records: Sequence[RequestRecord], asked: Sequence[AskedCanary] = ()) -> CanaryResult:
        """What came of them, which is kept."""
        result = judged_canaries(
            self._pool, records, asked, of_reference=self._of_reference, repeated=self._repeats
        )
        self.results.append(result)
        return result
