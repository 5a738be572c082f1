"""What a fault cost: goodput lost, time until attainment is back, what became of each request."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.chaos_soak.fault_cost import (
    FATES,
    FaultCost,
    RequestOutcome,
    fault_cost,
    fault_row,
    goodput_bins,
    level_of,
    outcome_of,
)
from kvbench.core.records import RequestRecord
from kvbench.core.slo import Slo

SLO = Slo(ttft_ms=100, tpot_ms=10)
fates = st.sampled_from(FATES)


def even(rate, seconds, bad=(), fate="lost"):
    """Requests at even distances, those due in ``bad`` intervals with another fate."""
    found = []
    for place in range(int(rate * seconds)):
        due = place / rate
        struck = any(begin <= due < end for begin, end in bad)
        found.append(
            RequestOutcome(due, None if struck and fate != "late" else due + 0.05, fate if struck else "good")
        )
    return found


def test_a_fault_of_three_seconds_costs_three_seconds_of_the_rate():
    cost = fault_cost(even(20, 30, [(10, 13)]), 20, 0.9, 9.999)
    assert cost.was_held
    assert cost.held_before == 1.0
    assert cost.fates == {"good": 341, "late": 0, "lost": 60, "hung": 0, "wrong": 0}
    assert (cost.goodput_lost, cost.lost_s) == (pytest.approx(60, abs=1), pytest.approx(3.0, abs=0.05))
    # By 90 % of 40 requests in a row, four of the lost may be in the first window that holds.
    assert 2.7 <= cost.back_s <= 3.0


def test_what_never_comes_back_is_said_and_costs_all_that_was_watched():
    cost = fault_cost(even(10, 20, [(5, 99)]), 10, 0.9, 5.0)
    assert (cost.back_s, cost.goodput_lost) == (None, pytest.approx(150))
    assert cost.watched_s == pytest.approx(14.9)


def test_a_fault_that_nobody_felt_costs_nothing():
    cost = fault_cost(even(10, 20), 10, 0.95, 5.0)
    assert (cost.back_s, cost.goodput_lost) == (0.0, 0.0)


def test_it_is_not_back_while_it_comes_and_goes():
    cost = fault_cost(even(20, 40, [(10, 12), (15, 17), (20, 22)]), 20, 0.9, 10.0)
    assert 11.7 <= cost.back_s <= 12.0


def test_too_few_requests_after_it_tell_of_no_return():
    cost = fault_cost(even(1, 14, [(10, 11)]), 1, 0.9, 10.0)
    assert len([outcome for outcome in even(1, 14) if outcome.due_s >= 10]) < cost.window
    assert cost.back_s is None


def test_requests_under_way_when_it_struck_are_its_own():
    open_ones = [
        RequestOutcome(9.5, 12.0, "late"),
        RequestOutcome(9.8, None, "hung"),
        RequestOutcome(9.9, None, "lost"),
    ]
    cost = fault_cost(
        [*even(10, 9.5), *open_ones,
         *(replace(e, due_s=e.due_s + 10, over_s=(e.over_s or 0) + 10) for e in even(10, 10))], 10, 0.9, 10.0,
    )  # fmt: skip
    assert (cost.fates["late"], cost.fates["hung"], cost.fates["lost"]) == (1, 1, 1)
    assert (cost.back_s, cost.goodput_lost) == (0.0, pytest.approx(3))


def test_a_rate_that_was_not_held_before_says_nothing_of_the_fault():
    cost = fault_cost(even(10, 20, [(0, 3)], fate="late"), 10, 0.9, 10.0)
    assert cost.held_before == pytest.approx(0.7)
    assert not cost.was_held
    # A few that were late by chance are no reason to doubt it.
    assert fault_cost(even(10, 20, [(0, 0.9)], fate="late"), 10, 0.9, 10.0).was_held
    assert not fault_cost([RequestOutcome(5.0, 5.1, "good")], 10, 0.9, 1.0).was_held


@given(st.lists(st.tuples(st.floats(0, 50), fates), max_size=120), st.floats(0, 50), st.floats(1, 40))
def test_every_request_is_counted_once_and_nothing_is_negative(drawn, struck_s, rate):
    outcomes = [
        RequestOutcome(due, None if fate in ("lost", "hung") else due + 0.1, fate) for due, fate in drawn
    ]
    cost = fault_cost(outcomes, rate, 0.9, struck_s)
    assert sum(cost.fates.values()) + cost.before == len(outcomes)
    assert cost.goodput_lost >= 0
    assert cost.goodput_lost <= sum(cost.fates.values()) + 1e-9
    assert cost.back_s is None or 0 <= cost.back_s <= max(due for due, _ in drawn)
    assert FaultCost.from_json(cost.to_json()) == cost


@given(st.lists(fates, min_size=30, max_size=90), st.integers(0, 29), st.floats(-100, 1000))
def test_when_it_happened_does_not_matter(drawn, struck, later_s):
    def made(shift):
        return [
            RequestOutcome(shift + place / 8, shift + place / 8 + 0.01, fate)
            for place, fate in enumerate(drawn)
        ]

    here, there = (fault_cost(made(shift), 8, 0.9, shift + struck / 8) for shift in (0.0, later_s))
    assert there.goodput_lost == pytest.approx(here.goodput_lost)
    assert (there.back_s is None) == (here.back_s is None)
    assert there.back_s is None or there.back_s == pytest.approx(here.back_s, abs=1e-6)


@given(st.lists(st.booleans(), min_size=40, max_size=90), st.data())
def test_one_more_good_request_never_makes_it_worse(good, data):
    place = data.draw(st.integers(0, len(good) - 1))

    def cost(flags):
        return fault_cost(
            [RequestOutcome(1 + i / 10, 1 + i / 10, "good" if ok else "late") for i, ok in enumerate(flags)],
            10,
            0.9,
            0.5,
        )

    before, after = cost(good), cost([*good[:place], True, *good[place + 1 :]])
    assert before.back_s is None or (after.back_s is not None and after.back_s <= before.back_s)
    if before.back_s is not None:
        assert after.goodput_lost <= before.goodput_lost + 1e-9


def test_the_level_is_what_was_held_and_no_more_than_the_slo():
    assert level_of(0.9, 1.0, 40) == 0.9
    assert level_of(0.95, 0.96, 40) == pytest.approx(0.96 - 2 * (0.96 * 0.04 / 40) ** 0.5)
    assert (level_of(0.9, None, 40), level_of(0.9, 0.0, 5)) == (0.9, 0.0)


def record(**more):
    times = {"first_token_s": 1.05, "last_token_s": 1.1, "output_len": 11, "status": 200}
    return RequestRecord("r", 1.0, 64, 11, sent_s=1.0, **{**times, **more})


@pytest.mark.parametrize(("of", "fate"), [
    (record(), "good"), (record(first_token_s=1.5, last_token_s=1.6), "late"),
    (record(error="http_error", status=502), "lost"), (record(error="http_error", status=504), "hung"),
    (record(error="no_answer"), "hung"), (record(error="timeout"), "hung"), (record(error="reset"), "lost"),
    (record(error="wrong_length"), "lost"),
])  # fmt: skip
def test_what_became_of_a_request(of, fate):
    assert outcome_of(of, SLO).fate == fate


def test_a_wrong_answer_is_no_good_one_however_fast():
    assert outcome_of(record(), SLO, {"r"}).fate == "wrong"
    assert outcome_of(record(error="reset"), SLO, {"r"}).fate == "lost"


@given(st.lists(st.tuples(st.floats(0, 20), fates), max_size=60))
def test_bins_hold_every_request_that_was_due_in_them(drawn):
    outcomes = [RequestOutcome(due, None, fate) for due, fate in drawn]
    bins = goodput_bins(outcomes, 0.5, 10.0)
    assert len(bins) == 20
    assert sum(sum(interval.fates.values()) for interval in bins) == sum(due < 10 for due, _ in drawn)
    for interval in bins:
        inside = [fate for due, fate in drawn if interval.start_s <= due < interval.start_s + 0.5]
        assert interval.fates["good"] == inside.count("good")


def test_repeats_together_and_those_that_never_came_back():
    one = fault_cost(even(10, 30, [(10, 12)]), 10, 0.9, 10.0)
    worse = fault_cost(even(10, 30, [(10, 14)]), 10, 0.9, 10.0)
    never = fault_cost(even(10, 30, [(10, 99)]), 10, 0.9, 10.0)
    unheld = fault_cost(even(10, 30, [(0, 9)], fate="late"), 10, 0.9, 10.0)
    row = fault_row([one, worse, never, unheld])
    assert (row.repeats, row.held, row.never) == (4, 3, 1)
    assert (row.back_worst_s, row.goodput_lost) == (worse.back_s, worse.goodput_lost)
    assert row.goodput_lost_worst == never.goodput_lost
    assert row.fates["lost"] == one.fates["lost"] + worse.fates["lost"] + never.fates["lost"]
    assert fault_row([unheld]).back_s is None
