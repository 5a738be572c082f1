"""The noise of a server's own greedy outputs, and what another's difference is worth beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.metrics.equal_answers import (
    MARGIN,
    Noise,
    chance,
    departure,
    detectable_fault_share,
    gap_changes,
    noise_of,
    refused_from,
)
from kvbench.core.records import Outputs, TokenChoice
from kvbench.results.finished_cells import _outputs, changed_outputs, output_row
from kvbench.sweep.trial.output_check import compare

WORDS = [f" w{number}" for number in range(12)]
TOP_K, LENGTH, PROMPTS = 5, 16, 4


def tokens(
    seed: int, noise: np.random.Generator | None, sigma: float, fault: float = 0.0
) -> tuple[TokenChoice, ...]:
    """A made-up model's greedy tokens: logits by what came before, and noise of the sums' order on them.

    ``fault``: how far a garbled KV cache moves the logits.
    """
    found: list[TokenChoice] = []
    state = seed
    for _ in range(LENGTH):
        rng = np.random.default_rng(state)
        logits = rng.normal(0, 2.0, len(WORDS))
        if fault:
            logits = logits + np.random.default_rng(state + 1).normal(0, fault, len(WORDS))
        if noise is not None:
            logits = logits + noise.normal(0, sigma, len(WORDS))
        scores = logits - math.log(np.exp(logits).sum())
        order = np.argsort(-scores)[:TOP_K]
        found.append(TokenChoice(WORDS[order[0]], {WORDS[place]: float(scores[place]) for place in order}))
        state = (state * 31 + int(order[0]) + 1) % 2**32
    return tuple(found)


def text(choices: tuple[TokenChoice, ...]) -> str:
    return "".join(choice.token for choice in choices)


def served(
    noise: np.random.Generator | None, sigma: float, *, first: int = 0, repeats: int = 0, fault: float = 0.0,
    scored: bool = True,
) -> Outputs:  # fmt: skip
    """One server's answers to the prompts, asked again ``repeats`` times."""
    rounds = []
    for _ in range(1 + repeats):
        choices = [tokens(first + prompt, noise, sigma, fault) for prompt in range(PROMPTS)]
        rounds.append(Outputs(tuple(map(text, choices)), 0.1, tuple(choices) if scored else ()))
    return Outputs(rounds[0].texts, 0.1, rounds[0].choices, tuple(rounds[1:]))


def test_a_server_that_is_exact_with_itself_asks_for_equality() -> None:
    reference = served(None, 0.0, repeats=3)
    assert noise_of(reference).exact
    assert compare(reference, served(None, 0.0)).passed
    texts = (reference.texts[0][:-3] + " w0?", *reference.texts[1:])
    equality = compare(reference, Outputs(texts, 0.1))
    assert (equality.equal, equality.within_noise, equality.passed) == (3, 0, False)
    assert equality.power == (
        "the reference repeats exactly (12 answers), so outputs must be equal: a fault that changes 53% "
        "of outputs is seen with 95 %"
    )


def runs(*, sigma: float, fault: float, scored: bool = True, count: int = 20) -> list[bool]:
    """Whether the pair passed, for so many servers."""
    rng = np.random.default_rng(7)
    passed = []
    for number in range(count):
        reference = served(rng, sigma, first=1000 * number, repeats=3, scored=scored)
        passed.append(compare(reference, served(rng, sigma, first=1000 * number, fault=fault)).passed)
    return passed


@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.05])
def test_honest_noise_is_not_called_corrupt(sigma: float) -> None:
    assert sum(runs(sigma=sigma, fault=0.0)) >= 19


@pytest.mark.parametrize(("sigma", "missed"), [(0.0, 0), (0.005, 0), (0.02, 0), (0.05, 1)])
def test_garbled_kv_shows_through_the_noise(sigma: float, missed: int) -> None:
    """With much noise a third of this model's tokens are as close: four in a row may be so by luck."""
    assert sum(runs(sigma=sigma, fault=3.0)) <= missed


def test_noise_differs_from_the_first_equality_check() -> None:
    """The made-up servers do differ from themselves: else the test above would say nothing."""
    rng = np.random.default_rng(7)
    found = [noise_of(served(rng, 0.05, first=1000 * n, repeats=3)) for n in range(40)]
    assert sum(noise.differed > 0 for noise in found) > 20
    assert all(noise.nats and 0.05 < noise.nats < 1.0 for noise in found)


def test_without_log_probabilities_the_number_of_differences_decides() -> None:
    assert sum(runs(sigma=0.02, fault=0.0, scored=False)) >= 18
    quiet = Outputs(("a", "b", "c", "d"), 0.1, (), (Outputs(("a", "b", "c", "x"), 0.1),) * 3)
    equality = compare(quiet, Outputs(("a", "b", "x", "d"), 0.1))
    assert (equality.passed, equality.within_noise) == (True, 1)
    assert "reports no log-probabilities: 4 of 4 outputs have to differ" in equality.power
    assert not compare(quiet, Outputs(("q", "r", "s", "t"), 0.1)).passed


def test_an_answer_that_the_reference_gave_too_is_honest() -> None:
    reference = Outputs(("a b", "c"), 0.1, (), (Outputs(("a x", "c"), 0.1),))
    equality = compare(reference, Outputs(("a x", "c"), 0.1))
    assert (equality.equal, equality.within_noise) == (1, 1)


NEAR = TokenChoice(" cat", {" cat": -0.70, " dog": -0.72, " a": -3.0})
FAR = TokenChoice(" sat", {" sat": -0.01, " ran": -5.0, " b": -6.0})


@pytest.mark.parametrize(
    ("answer", "gap"),
    [(" dog runs", 0.02), (" cat ran", 4.99), (" cat flew", 5.99), (" cat sat down", None), (" emu", 2.3)],
)
def test_the_gap_is_that_of_the_first_other_token(answer: str, gap: float | None) -> None:
    found = departure((NEAR, FAR), answer)
    assert found == (None if gap is None else pytest.approx(gap))


def test_a_gap_s_change_is_of_the_same_two_tokens() -> None:
    again = TokenChoice(" dog", {" cat": -0.75, " dog": -0.69, " a": -3.0})
    assert list(gap_changes((NEAR, FAR), (again, FAR))) == [pytest.approx(0.08)]
    assert list(gap_changes((NEAR,), (NEAR,))) == [0.0]
    assert list(gap_changes((NEAR,), (TokenChoice(" emu", {" emu": -0.1}),))) == []


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12))
def test_chances_are_chances(of: int, repeats: int, differed: int) -> None:
    noise = Noise(repeats, min(repeats, differed))
    values = [chance(n, of, noise) for n in range(of + 1)]
    assert values[0] == pytest.approx(1.0)
    assert values == sorted(values, reverse=True)
    least = refused_from(of, noise)
    assert least is None or (values[least] < 0.05 <= values[least - 1])


def test_the_power_of_a_few_prompts_is_known() -> None:
    assert detectable_fault_share(4) == pytest.approx(1 - 0.05**0.25)
    assert (refused_from(4, Noise(12, 0)), refused_from(4, Noise(12, 12))) == (3, None)
    assert Noise(12, 1, nats=0.1).allowed_nats == pytest.approx(MARGIN * 0.1)


def test_what_a_reference_said_of_itself_is_kept_for_who_goes_on() -> None:
    reference = served(np.random.default_rng(3), 0.2, repeats=2)
    row = output_row("aggregated", 512, reference)
    (kept,) = dict(_outputs([row])).values()
    assert kept == reference
    other = output_row("aggregated", 512, served(np.random.default_rng(4), 0.2))
    assert noise_of(reference).differed
    assert changed_outputs([row, other]) == []
