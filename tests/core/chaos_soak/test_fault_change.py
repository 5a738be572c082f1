"""Two runs' repeats of a fault, by ranks: chances as counted out by hand, and by drawing."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.chaos_soak.fault_cost import fault_change, rank_chance


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (3, 5)])
def test_the_chance_is_what_all_orders_say(n, m):
    """Against an enumeration of all ways to deal the ranks."""
    values = range(n + m)
    for first in itertools.combinations(values, n):
        second = [value for value in values if value not in first]
        far = abs(sum(a > b for a in first for b in second) - n * m / 2)
        ways = 0
        for other in itertools.combinations(values, n):
            rest = [value for value in values if value not in other]
            ways += abs(sum(a > b for a in other for b in rest) - n * m / 2) >= far
        total = len(list(itertools.combinations(values, n)))
        assert rank_chance(list(first), second) == pytest.approx(ways / total)


def test_costs_that_are_far_apart_are_told_apart_and_few_are_not():
    change = fault_change([10, 11, 12, 13, 14], [20, 21, 22, 23, 24])
    assert (change.word, change.before, change.after) == ("costs more", 12, 22)
    assert fault_change([20, 21, 22, 23, 24], [10, 11, 12, 13, 14]).word == "costs less"
    assert fault_change([10, 11, 12], [20, 21, 22]).word == "no significant difference"
    assert fault_change([], [1.0]).word == "no significant difference"
    assert fault_change([0.0] * 9, [0.0] * 9).chance == 1.0


def test_equal_costs_are_taken_for_others_no_more_often_than_said():
    chance = random.Random(5)
    false_alarms = sum(
        fault_change(
            [round(chance.gauss(50, 5)) for _ in range(20)], [round(chance.gauss(50, 5)) for _ in range(20)]
        ).word
        != "no significant difference"
        for _ in range(400)
    )
    assert false_alarms <= 34  # 5 % of 400, and three standard errors


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_it_is_the_same_from_either_side(first, second):
    assert rank_chance(first, second) == pytest.approx(rank_chance(second, first))
    assert 0 <= rank_chance(first, second) <= 1
