"""Pairs: what they differ in, which system is reported as ahead, and how that is counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from tools.random_systems import truth
from tools.random_systems.family import LEADS, SEEDS, draw
from tools.random_systems.judge import __main__ as command
from tools.random_systems.judge.search import options_of, searched
from tools.random_systems.judge.twins import (
    FORMS,
    Pair,
    PairJob,
    compare_pair,
    pair_figures,
    slower,
    who_is_ahead,
)
from tools.random_systems.simulate import State, trial

PAIR = Pair("x", "random", "slower or faster", 1, 1.05, "A", "A", (11.0, 10.0))
QUICK = 54
"""A system of ``develop`` whose capacity is found within a few percent in a second."""
TRUE = truth.known()[draw(SEEDS["develop"], QUICK).fingerprint]


@pytest.mark.parametrize("index", range(len(LEADS)))
def test_a_slower_twin_answers_later_and_has_the_same_slo(index: int) -> None:
    system = draw(3, index)
    twin = slower(system, 1.05)
    assert options_of(twin, 1) == options_of(system, 1)
    # Few enough that nobody waits: with pauses a later request may fall behind one, but never before it.
    arrivals = np.arange(5.0) * 1e4
    lengths = [np.full(5, float(size)) for size in (system.workload.input_len, system.workload.output_len)]
    (first, last, _), (later, later_last, _) = (
        trial(model, arrivals, lengths[0], lengths[1], 0.0, 7, State()) for model in (system, twin)
    )
    assert np.all(later >= first)
    assert np.all(later_last >= last)
    assert np.any(later > first)
    assert slower(system, 1.0) == system


def test_a_slower_twin_has_a_lower_true_rate() -> None:
    system = draw(SEEDS["develop"], 1)
    rates = [truth.compute(slower(system, factor)).rates[0] for factor in (0.95, 1.0, 1.05)]
    assert rates[0] > rates[1] > rates[2]


def test_who_is_ahead_is_said_as_a_comparison_says_it(tmp_path: Path) -> None:
    system = draw(SEEDS["develop"], QUICK)
    runs = [searched(slower(system, factor), 1, tmp_path, 60.0) for factor in (1.0, 2.0)]
    assert who_is_ahead(runs) == "A"
    assert who_is_ahead(runs[::-1]) == "B"
    assert who_is_ahead([runs[0], runs[0]]) == "?"
    assert who_is_ahead([replace(runs[0], cells=[], trials=[]), runs[1]]) == "no answer"
    (cell,) = runs[0].cells
    for status, verdict in (("exhausted", "A"), ("undecided", "a search did not converge")):
        unsure = replace(cell, answer={**(cell.answer or {}), "status": status})
        assert who_is_ahead([replace(runs[0], cells=[unsure]), runs[1]]) == verdict


@pytest.mark.heavy
def test_identical_systems_are_hardly_ever_put_into_an_order(tmp_path: Path) -> None:
    """Each search has other arrivals and other dice; each two of them are twins."""
    system = draw(SEEDS["develop"], QUICK)
    runs = [searched(system, seed, tmp_path, 60.0, dice=seed) for seed in range(1, 9)]
    counts = Counter(who_is_ahead(pair) for pair in combinations(runs, 2))
    assert counts["A"] + counts["B"] <= 0.05 * counts.total()
    assert counts["?"] >= 0.5 * counts.total()


def test_a_pair_is_judged_and_kept_as_it_was() -> None:
    row = PairJob("develop", QUICK, TRUE, 0, 60.0).row()
    pair = Pair.from_json(json.loads(json.dumps(row)))
    assert pair.to_json() == row
    assert pair.form == "slower or faster"
    assert 1 / 1.1 <= pair.factor <= 1.1
    assert pair.truly == ("A" if pair.factor > 1 else "B")
    assert pair.told in ("A", "B", "?")
    assert None not in pair.rates
    again = PairJob("develop", QUICK, TRUE, 0, 60.0).row()
    assert {**again, "real_s": 0} == {**row, "real_s": 0}
    assert {PairJob("develop", QUICK, TRUE, run, 0.02).row()["form"] for run in range(4)} == set(FORMS)


def test_a_pair_without_answers_is_none() -> None:
    pair = compare_pair(draw(SEEDS["develop"], QUICK), "equal, other load", 1.0, 1, 0.02)
    assert pair.told == "too long to simulate"
    assert not pair.ordered
    assert pair.truly == ""


def test_wrong_is_any_order_of_equal_twins_and_no_order_is_none() -> None:
    equal = replace(PAIR, form="equal, other load", factor=1.0, truly="")
    untold, failed = replace(PAIR, told="?"), replace(PAIR, kind="heavy", told="no answer")
    twins = [PAIR, replace(PAIR, told="B"), equal, replace(equal, told="?"), untold, failed]
    assert [twin.wrong for twin in twins] == [False, True, True, False, False, False]
    by_name = {figure["kind"]: figure for figure in pair_figures(twins)}
    counts = {"kind": "all", "pairs": 6, "answered": 5, "ordered": 3, "wrong": 2}
    assert by_name["all"] == {**counts, "wrong_share": 2 / 3}
    assert by_name["equal, other load"]["wrong_share"] == 1.0
    assert by_name["heavy"]["wrong_share"] is None


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    words = ["--twins", "--first-system", str(QUICK), "--count", "1", "--workers", "1"]
    assert command.main([*words, "--figures", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "who is ahead of twins" in printed
    assert f"develop-{QUICK:03d}" in printed
    assert json.loads(written.read_text())["kinds"][-1]["pairs"] == 1
