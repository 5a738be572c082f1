"""Which requests of a load are canaries."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.canaries.pool import AFTER_FAILURE, SPARES, canary_places, place_canaries, wanted_canaries


@given(
    requests=st.integers(1, 3000), share=st.floats(0.001, 0.3), least=st.integers(0, 30),
    early=st.integers(1, 4000), seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_places_are_in_the_load_ascending_and_enough_of_them_early(
    requests: int, share: float, least: int, early: int, seed: int
) -> None:
    places = canary_places(requests, share, least, early, seed)
    assert places == sorted(set(places))
    assert all(0 <= place < requests for place in places)
    soon = min(early, requests)
    assert sum(place < soon for place in places) == wanted_canaries(soon, share, least)
    assert len(places) >= wanted_canaries(requests, share, least)
    assert places == canary_places(requests, share, least, early, seed)


def test_they_are_spread_over_all_of_the_load() -> None:
    places = canary_places(5000, 0.02, 10, 60, 3)
    assert 105 <= len(places) <= 115
    assert max(b - a for a, b in pairwise(places)) < 105
    assert sum(place < 60 for place in places) == 10


def test_no_share_no_canaries() -> None:
    assert canary_places(1000, 0.0, 10, 60, 1) == []


@given(places=st.integers(0, 60), numbers=st.integers(0, 90))
def test_each_prompt_has_one_place_and_some_are_kept_for_failures(places: int, numbers: int) -> None:
    at = [7 * place for place in range(places)]
    found = place_canaries(at, range(numbers))
    used = found.numbers
    assert len(set(used)) == len(used) <= numbers
    assert set(found.at) <= set(at)
    assert len(found.spares) <= SPARES
    if numbers >= places + AFTER_FAILURE:
        assert set(found.at) == set(at)
        assert len(found.spares) == min(SPARES, numbers - places)


def test_too_few_prompts_are_spread_over_the_whole_trial() -> None:
    found = place_canaries(range(0, 1000, 10), range(12))
    assert (min(found.at), max(found.at), len(found.spares)) == (0, 990, AFTER_FAILURE)


def test_a_pool_for_one_trial_fills_its_places_and_keeps_what_follows_one_failure() -> None:
    places = canary_places(320, 0.02, 10, 40, 3)
    found = place_canaries(places, range(len(places) + AFTER_FAILURE))
    assert (list(found.at), len(found.spares)) == (places, AFTER_FAILURE)
