"""Are answers right while something is done to a system? Prompts whose answers are known, asked beside it.

An aggregated server answered them at idle. They are asked through the router, one at a time, each once until
all have been asked: a prompt that D has in its prefix cache would show nothing of the transfer.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.plan.dispatch import COMPLETIONS
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import Outputs
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.completions import completion_of, greedy_body
from kvbench.deployment.deployment import RunningDeployment
from kvbench.hosts import web
from kvbench.hosts.server_access import access_headers
from kvbench.launchers.base import Launcher
from kvbench.sweep.trial.output_check import OUTPUT_TOKENS, compare, greedy_outputs, reference_outputs

EVERY_S: Final = 0.5
PROMPTS: Final = 48
"""How many prompts have known answers: so many are asked in 24 seconds."""


def probe_prompts(scenario: Scenario, input_len: int) -> list[list[int]]:
    """The prompts of a run: the same for each of its pairs, and whenever it is gone on with."""
    shape = PromptShape(input_len, scenario.model.vocab_size)
    prompts = token_prompts(PROMPTS, shape, trial_seed(scenario.seed, f"probes-{input_len}", 0))
    return [[int(token) for token in prompt] for prompt in prompts]


def right_answers(scenario: Scenario, deployment: RunningDeployment, input_len: int) -> Outputs:
    """What a deployment answers to them at idle; of a real engine also how it differs from itself."""
    prompts, length = probe_prompts(scenario, input_len), scenario.workload.output_len
    if scenario.deployment.engine_options.models_compute:
        return greedy_outputs(deployment.complete, prompts, length)
    return reference_outputs(deployment.complete_scored, prompts, length, deployment.reset_caches)


@dataclass
class AnswerProbe:
    """Asks in a thread of its own while it is a context. ``reference``: right answers; None asks nothing."""

    scenario: Scenario
    deployment: RunningDeployment
    launcher: Launcher
    input_len: int
    reference: Outputs | None
    checked: int = 0
    unanswered: int = 0
    wrong: list[tuple[float, str]] = field(default_factory=list)
    """When (monotonic), and what was answered instead of what."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._prompts = probe_prompts(self.scenario, self.input_len)

    def __enter__(self) -> AnswerProbe:
        if self.reference is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self.scenario.request_timeout_s + 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "checked": self.checked,
            "unanswered": self.unanswered,
            "wrong": len(self.wrong),
            "examples": [words for _, words in self.wrong[:3]],
        }

    def ask(self, places: Iterable[int]) -> None:
        """Asks some of them now, by their numbers, from zero round and round."""
        for place in places if self.reference is not None else ():
            self._ask(place % len(self._prompts))

    def _run(self) -> None:
        for place in itertools.cycle(range(len(self._prompts))):
            if self._stop.wait(EVERY_S):
                return
            self._ask(place)

    def _ask(self, place: int) -> None:
        length = min(OUTPUT_TOKENS, self.scenario.workload.output_len)
        body = greedy_body(self.scenario.model.served_model_name, {"prompt": self._prompts[place]}, length)
        access = self.deployment.endpoints.access
        over, timeout_s = self.launcher.web(access), self.scenario.request_timeout_s
        try:
            with web.client(
                headers=access_headers(access), timeout_s=timeout_s, over=over, access=access
            ) as to:
                response = to.post(f"{self.deployment.endpoints.base_url}{COMPLETIONS}", json=body)
            if response.status_code != 200:
                self.unanswered += 1
                return
            text = completion_of(web.json_of(response)).text
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            self.unanswered += 1
            return
        self.checked += 1
        reference = self.reference
        assert reference is not None
        if text == reference.texts[place]:
            return
        texts = (*reference.texts[:place], text, *reference.texts[place + 1 :])
        equality = compare(reference, replace(reference, texts=texts, repeats=()))
        if not equality.passed:
            self.wrong.append((time.monotonic(), equality.example))
