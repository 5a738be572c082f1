"""What became of a rate: by posteriors where there are few runs, by their scatter where there are repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.findings.rate_change import (
    FALSE_ALARMS,
    PossibleRates,
    Searched,
    confidence_of,
    known,
    rate_change,
    spread_of,
    within,
)


def searched(rate: float, spread: float = 0.1) -> Searched:
    """An answer whose interval reaches so far on both sides, as a share."""
    return Searched(rate, within(rate / (1 + spread), rate * (1 + spread), 0.9))


def side(*rates: float, spread: float = 0.1) -> list[Searched]:
    return [searched(rate, spread) for rate in rates]


@pytest.mark.parametrize(("after", "spread", "became"), [
    (50.0, 0.05, "worse"), (120.0, 0.05, "better"), (100.5, 0.01, "unchanged"), (100.0, 0.2, "inconclusive"),
    (90.0, 0.1, "inconclusive"),
])  # fmt: skip
def test_two_runs_are_judged_by_their_posteriors(after: float, spread: float, became: str) -> None:
    change = rate_change(side(100.0, spread=spread), side(after, spread=spread))
    assert (change.became, change.ratio) == (became, pytest.approx(after / 100))
    assert change.low <= change.ratio <= change.high
    assert change.degrees is None


@given(
    st.lists(st.floats(1, 1000), min_size=3, max_size=41),
    st.lists(st.floats(1, 1000), min_size=3, max_size=41),
)
def test_the_other_way_round_it_is_the_opposite(one: Sequence[float], other: Sequence[float]) -> None:
    pair = (
        Searched(math.sqrt(min(one) * max(one)), known(sorted(one))),
        Searched(max(other), known(sorted(other))),
    )
    there, back = rate_change([pair[0]], [pair[1]]), rate_change([pair[1]], [pair[0]])
    assert (there.ratio, there.lower) == (pytest.approx(1 / back.ratio), pytest.approx(back.higher))
    assert there.became == {"better": "worse", "worse": "better"}.get(back.became, there.became)


def test_a_rate_that_none_holds_any_more_is_worse() -> None:
    nothing = Searched(None, within(None, 2.0))
    change = rate_change(side(100.0), [nothing])
    assert (change.became, change.ratio, change.scatter) == ("worse", 0.0, None)
    assert change.alarms(0.05)
    assert (rate_change([nothing], side(100.0)).became, change.seen(0.1, 0.05)) == ("better", None)
    assert change.repeats_for(0.1, 0.05) is None


def test_a_side_without_an_upper_end_is_no_alarm() -> None:
    open_ended = Searched(100.0, within(100.0, None))
    assert rate_change(side(99.0), [open_ended]).became == "inconclusive"
    assert rate_change(side(50.0, spread=0.01), [open_ended]).became == "better"
    assert not rate_change([open_ended], side(99.0)).alarms(0.0)
    assert rate_change(side(119.0, 120.0, 121.0, 120.5), [open_ended]).became == "inconclusive"


def test_five_runs_are_judged_by_their_scatter() -> None:
    # Each search allows for ± 40 %, but the repeats differ by 1 %.
    before, after = side(99.0, 100.0, 101.0, 100.5, spread=0.4), side(93.0, spread=0.4)
    change = rate_change(before, after)
    assert (change.degrees, change.became) == (3, "worse")
    assert change.scatter == pytest.approx(np.std(np.log([99, 100, 101, 100.5]), ddof=1))
    assert rate_change(before[:1], after).became == "inconclusive"


def test_copies_of_a_run_are_no_repeats() -> None:
    one = searched(100.0)
    copies = rate_change([one] * 4, side(99.0))
    assert copies == rate_change([one], side(99.0))
    assert copies.runs == (1, 1)


def test_an_alarm_is_sure_and_larger_than_what_is_allowed() -> None:
    change = rate_change(side(100.0, spread=0.01), side(96.0, spread=0.01))
    assert change.became == "worse"
    assert change.alarms(0.0)
    assert change.alarms(0.03)
    assert not change.alarms(0.05)
    weak = rate_change(side(100.0), side(90.0))
    assert not weak.alarms(0.05)


def test_many_cells_ask_for_more() -> None:
    assert confidence_of(10) > confidence_of(1) > 1 - FALSE_ALARMS
    change = rate_change(side(100.0, spread=0.1), side(84.5, spread=0.1))
    assert change.alarms(0.05, cells=1)
    assert not change.alarms(0.05, cells=100)


def answers(rng: np.random.Generator, count: int, rate: float, scatter: float = 0.04) -> list[Searched]:
    return [searched(float(rate * math.exp(scatter * rng.standard_normal())), 0.3) for _ in range(count)]


@pytest.mark.parametrize(("before", "after"), [(4, 1), (3, 3), (2, 4)])
def test_repeats_give_few_false_alarms_and_the_power_that_is_told(before: int, after: int) -> None:
    rng = np.random.default_rng(5)
    pairs, cells = 400, 3
    false, seen, powers = 0, 0, []
    for _ in range(pairs):
        same = [rate_change(answers(rng, before, 50), answers(rng, after, 50)) for _ in range(cells)]
        false += any(change.alarms(0.05, cells) for change in same)
        lost = rate_change(answers(rng, before, 50), answers(rng, after, 45))
        seen += lost.alarms(0.05)
        powers.append(lost.seen(0.1, 0.05))
    assert false / pairs <= FALSE_ALARMS
    # It is told as what it is at least with 80 %.
    assert np.mean([share <= seen / pairs + 0.03 for share in powers if share is not None]) >= 0.75


def test_so_many_repeats_as_are_told_see_the_loss() -> None:
    rng = np.random.default_rng(6)
    change = rate_change(answers(rng, 20, 50), answers(rng, 20, 50))
    repeats = change.repeats_for(0.1, 0.05)
    assert repeats is not None
    pairs = 300
    seen = sum(
        rate_change(answers(rng, repeats, 50), answers(rng, repeats, 45)).alarms(0.05) for _ in range(pairs)
    )
    assert 0.76 <= seen / pairs <= 0.99
    fewer = change.repeats_for(0.2, 0.05)
    assert fewer <= repeats
    assert change.repeats_for(0.05, 0.05) is None


def test_two_repeats_each_are_pooled() -> None:
    one, other = side(100.0, 100.2), side(80.0, 80.2)
    change = rate_change(one, other)
    assert (change.degrees, change.runs) == (None, (2, 2))
    assert change.ratio == pytest.approx(math.sqrt(80 * 80.2 / (100 * 100.2)))
    assert change.lower > rate_change(one[:1], other[:1]).lower - 1e-6


def test_a_spread_is_that_of_the_logarithm() -> None:
    assert spread_of(known([90.0, 100.0, 110.0])) == pytest.approx(np.std(np.log([90, 100, 110])))
    assert (spread_of(within(1.0, 2.0)), spread_of(PossibleRates((1.0,), (math.inf,)))) == (None, None)
