"""The plan of faults: the same seed gives the same, and what cannot be done is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.chaos_soak.fault_plan import (
    JITTER_S,
    LAB_KINDS,
    POSSIBLE,
    FaultTimes,
    PlannedFault,
    WantedFault,
    faults_of,
    plan_faults,
    usual_faults,
)
from kvbench.errors import InputError

ONE_PAIR = {"prefill": 1, "decode": 1, "router": 1}
seeds = st.integers(0, 2**31 - 1)
targets = st.fixed_dictionaries(
    {}, optional={name: st.integers(1, 4) for name in ("prefill", "decode", "router")}
)


@given(seeds, st.integers(1, 5), targets)
def test_the_same_seed_gives_the_same_plan_and_each_fault_as_often_as_asked(seed, repeats, counts):
    wanted = usual_faults(counts)
    plan = plan_faults(wanted, counts, FaultTimes(), repeats, seed)
    assert plan == plan_faults(wanted, counts, FaultTimes(), repeats, seed)
    assert [fault.number for fault in plan] == list(range(1, len(plan) + 1))
    for case in wanted:
        planned = [fault for fault in plan if (fault.kind, fault.target) == (case.kind, case.target)]
        assert sorted(fault.repeat for fault in planned) == list(range(1, repeats + 1))
        assert all(0 <= fault.index < counts[fault.target] for fault in planned)
        assert all(5.0 <= fault.at_s <= 5.0 + JITTER_S for fault in planned)
        assert all(fault.most_s >= fault.at_s + fault.down_s + fault.after_s for fault in planned)
    assert faults_of([fault.to_json() for fault in plan]) == plan


def test_two_seeds_give_two_orders_and_moments():
    wanted = usual_faults(ONE_PAIR)
    first, second = (plan_faults(wanted, ONE_PAIR, FaultTimes(), 2, seed) for seed in (1, 2))
    assert [fault.name for fault in first] != [fault.name for fault in second]
    assert [fault.at_s for fault in first] != [fault.at_s for fault in second]
    # And within one plan a repeat is no copy of the one before.
    half = len(wanted)
    assert [fault.name for fault in first[:half]] != [fault.name for fault in first[half:]]


def test_a_fault_s_own_times_leave_the_others_where_they_were():
    untimed = [WantedFault.parse(text) for text in ("kill:prefill", "freeze:decode", "restart:router")]
    timed = [WantedFault.parse(text) for text in ("kill:prefill", "freeze:decode@9+2", "restart:router")]
    plain, moved = (plan_faults(faults, ONE_PAIR, FaultTimes(), 1, 7) for faults in (untimed, timed))
    for before, after in zip(plain, moved, strict=True):
        assert (before == after) == (before.kind != "freeze")
    (frozen,) = [fault for fault in moved if fault.kind == "freeze"]
    assert (frozen.at_s, frozen.down_s) == (9, 2)


def test_what_is_killed_stays_dead_and_what_is_started_again_gets_its_time():
    times = FaultTimes(before_s=1, down_s=2, after_s=3, ready_s=40)
    wanted = [WantedFault.parse(text) for text in ("kill:prefill", "restart:prefill", "lease:prefill")]
    plan = {fault.kind: fault for fault in plan_faults(wanted, ONE_PAIR, times, 1, 1)}
    assert plan["kill"].down_s == 0
    assert plan["restart"].most_s == pytest.approx(plan["restart"].at_s + 2 + 40 + 3)
    assert plan["lease"].after_s > 30  # a lease ends after 30 s


def test_the_usual_faults_need_no_lab_and_the_lab_s_need_one():
    plain, lab = usual_faults(ONE_PAIR), usual_faults({**ONE_PAIR, "nic": 2}, lab=True)
    assert {fault.kind for fault in plain} == set(POSSIBLE) - set(LAB_KINDS)
    assert {(fault.kind, fault.target) for fault in lab} > {(fault.kind, fault.target) for fault in plain}
    assert {fault.target for fault in lab if fault.kind == "pull"} == {"nic"}
    assert "metadata" not in {fault.target for fault in plain}


def test_names_of_faults_and_of_whom_they_are_done_to():
    assert WantedFault.parse(" freeze:decode-1@5+3.5 ") == WantedFault("freeze", "decode", 1, 5.0, 3.5)
    assert WantedFault.parse("kill:router").text == "kill:router"
    assert WantedFault.parse("kill:decode-2").text == "kill:decode-2"
    fault = PlannedFault(1, 1, "pull", "nic", 1, 5, 3, 12, 20)
    assert (fault.name, fault.process) == ("pull nic", "nic1")
    assert PlannedFault(1, 1, "kill", "router", 0, 5, 0, 12, 17).process == "router"
    assert PlannedFault(1, 1, "kill", "prefill", 3, 5, 0, 12, 17).process == "prefill-3"


@pytest.mark.parametrize(("text", "message"), [
    ("melt:prefill", "unknown fault 'melt'"),
    ("pull:prefill", "pull is not possible for 'prefill'"),
    ("lease:decode", "lease is not possible for 'decode'"),
    ("kill", "is not a fault"),
    ("kill:prefill@soon", "is not a fault"),
])  # fmt: skip
def test_what_is_no_fault_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        WantedFault.parse(text)


@pytest.mark.parametrize(("text", "message"), [
    ("kill:metadata", "has no metadata"), ("kill:decode-1", "there are 1, counted from 0"),
    ("slow:nic", "has no nic"),
])  # fmt: skip
def test_a_target_that_is_not_there_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        plan_faults([WantedFault.parse(text)], ONE_PAIR, FaultTimes(), 1, 1)


@pytest.mark.parametrize("name", ["before_s", "down_s", "after_s"])
def test_times_are_above_zero(name):
    with pytest.raises(InputError, match=name):
        FaultTimes(**{name: 0})
