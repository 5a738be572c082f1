"""What so many checked answers prove."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.canaries.answer_kinds import (
    NOISE_P_VALUE,
    bound_text,
    detectable_share,
    found_in_any,
    noise_p_value,
    percent_text,
    wrong_share_bound,
)
from kvbench.core.metrics.equal_answers import Noise, chance, refused_from
from kvbench.core.stats import binomial_cdf


def test_the_issue_s_own_words() -> None:
    assert bound_text(0, 1040) == "0 of 1,040 wrong: at most 0.3 % (95 % confidence)"
    assert bound_text(0, 0) == "no answers were checked"
    assert bound_text(0, 10) == "0 of 10 wrong: at most 26 % (95 % confidence)"


@given(checked=st.integers(1, 5000), data=st.data())
def test_the_bound_is_the_exact_binomial_s(checked: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, checked - 1))
    bound = wrong_share_bound(wrong, checked)
    assert binomial_cdf(wrong, checked, bound) == pytest.approx(0.05, abs=1e-6)
    if not wrong:
        assert bound == pytest.approx(1 - 0.05 ** (1 / checked), rel=1e-6)


@given(st.floats(1e-6, 1.0))
def test_rounding_never_claims_more_than_is_known(share: float) -> None:
    text = percent_text(share)
    assert float(text.removesuffix(" %")) >= 100 * share - 1e-6


def test_noise_costs_power_and_says_so() -> None:
    exact, noisy = Noise(100, 0), Noise(100, 20)
    least = refused_from(50, noisy, NOISE_P_VALUE)
    assert least > 10
    assert chance(least, 50, noisy) < NOISE_P_VALUE <= chance(least - 1, 50, noisy)
    assert detectable_share(50, exact, singly=True) == pytest.approx(1 - 0.05 ** (1 / 50))
    share = detectable_share(50, noisy, singly=False)
    assert 1 - binomial_cdf(least - 1, 50, share) == pytest.approx(0.95, abs=1e-6)
    assert detectable_share(200, exact, singly=True) < 0.015
    assert detectable_share(4, Noise(10, 9), singly=False) == 1.0
    assert detectable_share(50, exact, singly=True) < detectable_share(50, exact, singly=False) < share


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
@pytest.mark.parametrize(("again", "of"), [(32, 3), (32, 13), (60, 110)])
def test_honest_noise_that_nobody_saw_hardly_ever_refuses(rate: float, again: int, of: int) -> None:
    """However often it differs: neither that it was not seen before, nor that it was, makes it a fault."""
    refused = 0.0
    for differed in range(again + 1):
        noise = Noise(again, differed)
        seen = binomial_cdf(differed, again, rate) - binomial_cdf(differed - 1, again, rate)
        least = refused_from(of, noise, noise_p_value(noise))
        if least is not None:
            refused += seen * (1 - binomial_cdf(least - 1, of, rate))
    assert refused < 0.005


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 8)), max_size=6))
def test_several_trials_see_what_one_of_them_sees_and_more(tests: list[tuple[int, int]]) -> None:
    share = found_in_any(tests)
    possible = [(of, least) for of, least in tests if 0 < least <= of]
    if not possible:
        assert share == 1.0
        return
    unseen = 1.0
    for of, least in possible:
        unseen *= binomial_cdf(least - 1, of, share)
    assert unseen == pytest.approx(0.05, abs=1e-6)
    assert all(share <= found_in_any([test]) + 1e-9 for test in possible)
    if all(least == 1 for _, least in possible):
        assert share == pytest.approx(1 - 0.05 ** (1 / sum(of for of, _ in possible)), rel=1e-6)
