"""The judge of the search: that it asks what the command asks, goes on where it was, and counts right."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvbench.results.run import RunFolder, load_run
from tools.bench import ROOT
from tools.jobs import rows_of
from tools.random_systems import truth
from tools.random_systems.family import SEEDS, draw
from tools.random_systems.judge import __main__ as command
from tools.random_systems.judge.figures import figures, notes
from tools.random_systems.judge.search import TOO_LONG, Judged, SearchJob, judge, judged_run, promised

FOUND = Judged("x", ("drift", "slow"), 1, "converged", "found", 10.0, 12.0, 10.4, 9.0, 10.5)
CHEAP = 5
"""A system of ``develop`` whose search takes a few seconds."""


def known(index: int) -> truth.Truth:
    return truth.known()[draw(SEEDS["develop"], index).fingerprint]


# --- one search


@pytest.mark.parametrize("index", [CHEAP, *(pytest.param(case, marks=pytest.mark.heavy) for case in (1, 7))])
def test_a_search_in_this_process_says_what_the_command_says(index: int, tmp_path: Path) -> None:
    """One that converges, one whose backlog makes trials void, one that finds nothing."""
    system, true = draw(SEEDS["develop"], index), known(index)
    here = judge(system, true, 1, 60.0)
    player = [sys.executable, "-m", "tools.random_systems.serve", "develop", str(index)]
    slo, load = system.slo, system.workload
    options = {
        "--system": shlex.join(player),
        "--input-len": load.input_len,
        "--output-len": load.output_len,
        "--output": tmp_path,
        "--ttft-ms": slo.ttft_ms,
        "--tpot-ms": slo.tpot_ms,
        "--attainment": None if slo.limits else slo.attainment,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    words += [word for limit in slo.limits for word in ("--slo", limit)]
    words += ["--set", f"workload.burstiness={load.burstiness:g}", "--set", "seed=1"]
    command_line = [sys.executable, "-m", "kvbench.cli", "simulate", *words]
    subprocess.run(command_line, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=110, check=False)
    (folder,) = tmp_path.iterdir()
    assert here.trials >= 2
    assert replace(here, real_s=0.0) == judged_run(system, true, 1, load_run(folder))


@pytest.mark.heavy
def test_other_seeds_of_a_search_are_other_searches() -> None:
    system, true = draw(SEEDS["develop"], 1), known(1)
    one, again, other = (replace(judge(system, true, seed, 60.0), real_s=0.0) for seed in (1, 1, 2))
    assert one == again
    assert one.found != other.found
    assert one.ratio is not None
    assert 0.5 < one.ratio < 2


def test_a_scenario_may_be_set_otherwise() -> None:
    system, true = draw(SEEDS["develop"], CHEAP), known(CHEAP)
    assert judge(system, true, 1, 60.0, ("search.max_trials=3",)).trials == 3
    plain, other = (
        SearchJob("develop", CHEAP, true, 1, 60.0, sets) for sets in ((), ("search.max_trials=3",))
    )
    assert plain.key != other.key


def test_a_search_that_takes_too_long_is_said_so() -> None:
    system, true = draw(SEEDS["develop"], CHEAP), known(CHEAP)
    found = judge(system, true, 1, 0.05)
    assert (found.outcome, found.interval, found.trials) == (TOO_LONG, None, 0)
    assert judge(system, true, 1, 60.0).trials > 0  # the alarm is off


# --- an answer beside the truth


def test_an_answer_is_judged_by_the_rate_at_its_end() -> None:
    assert FOUND.ratio == pytest.approx(1.04)
    assert (FOUND.near, FOUND.holds, FOUND.holds_some) == (True, True, True)
    assert FOUND.half_width == pytest.approx(0.75 / 10.4)
    early = replace(FOUND, found=11.5, lower=11.0, upper=12.5)
    assert (early.near, early.holds, early.holds_some) == (False, False, True)
    assert replace(early, lower=13.0, upper=14.0).holds_some is False


@pytest.mark.parametrize(
    ("true", "reported", "found", "lower", "upper", "holds", "wrong"),
    [
        (10.0, "at_least", 9.0, 9.0, None, True, ""),
        (10.0, "at_least", 11.0, 11.0, None, False, "least"),
        (10.0, "none", None, None, 0.1, False, "none"),
        (0.05, "none", None, None, 0.1, True, ""),
        (10.0, "none", None, None, 12.0, True, ""),
        (0.0, "none", None, None, 0.1, None, ""),
        (0.0, "found", 2.0, 1.0, 3.0, False, ""),
        (10.0, "undecided", None, None, None, None, ""),
    ],
)
def test_what_is_no_interval_of_two_ends(
    true: float,
    reported: str,
    found: float | None,
    lower: float | None,
    upper: float | None,
    holds: bool | None,
    wrong: str,
) -> None:
    judged = Judged("x", ("random",), 1, "exhausted", reported, true, true, found, lower, upper)
    assert judged.holds is holds
    assert (judged.wrong_none, judged.wrong_least) == (wrong == "none", wrong == "least")
    if found is None or upper is None:
        assert judged.half_width is None


def test_what_a_plan_says_of_its_time_is_read_where_it_says_so(tmp_path: Path) -> None:
    def run(plan: dict[str, Any]) -> RunFolder:
        return RunFolder(tmp_path, 1, {}, "", plan, {}, [], [], [])

    assert promised(run({})) is None
    assert promised(run({"time_suffices": None})) is None
    assert promised(run({"time_suffices": True})) is True
    assert promised(run({"time_suffices": False})) is False


# --- many


def test_figures_count_by_kind() -> None:
    least = Judged("y", ("random",), 1, "censored", "at_least", 10.0, 10.0, 20.0, 19.0, None, trials=3)
    none = Judged("z", ("random",), 1, "slo_unattainable", "none", 0.0, 0.0, upper=0.1, trials=1)
    fooled = Judged("z", ("random",), 2, "converged", "found", 0.0, 0.0, 3.0, 2.0, 4.0, trials=1)
    failed = Judged("w", ("random",), 1, "failed: a reason", "failed", 10.0, 10.0)
    kept = replace(FOUND, promised=True, trials=4, virtual_s=100.0)
    drift, random, overall = figures([kept, least, none, fooled, failed])
    wanted = {"converged": 1, "near": 1, "held": 1, "drifting": 1, "held_some": 1, "promised": 1, "kept": 1}
    assert {**drift, **wanted, "kind": "drift"} == drift
    wanted = {"searches": 4, "converged": 1, "near": 0, "intervals": 2, "held": 0, "promised": 0}
    assert {**random, **wanted, "kind": "random", "wrong_least": 1, "right_none": 1} == random
    assert overall["middle"] == pytest.approx((1.04 + 2.0) / 2)
    assert (overall["kind"], overall["near_share"], overall["virtual_s"]) == ("all", 0.5, 0.0)
    assert overall["outcomes"]["failed"] == 1
    assert any("1 converged" in note or "2 converged" in note for note in notes(overall))
    assert [figure["kind"] for figure in figures([kept], every_kind=True)] == ["drift", "slow", "all"]


@pytest.mark.heavy
def test_rows_are_gone_on_with(tmp_path: Path) -> None:
    rows = tmp_path / "new" / "rows.jsonl"
    jobs = [SearchJob("develop", CHEAP, known(CHEAP), seed, 60.0) for seed in (1, 2)]
    (first,) = rows_of(jobs[:1], 1, "code", rows)
    whole = rows.read_text()
    rows.write_text(whole + '{"key": "search develop 5 2", "co')
    found = list(rows_of(jobs, 1, "code", rows))
    assert found[0] == first  # to the last digit of the time that it took
    assert [Judged.from_json(row).run_seed for row in found] == [1, 2]
    assert rows.read_text().startswith(whole)
    assert len(rows.read_text().splitlines()) == 2
    assert list(rows_of(jobs, 1, "code", rows)) == found
    (anew,) = rows_of(jobs[:1], 1, "other", rows)
    assert anew["real_s"] != first["real_s"]
    restored = Judged.from_json(json.loads(json.dumps(first)))
    assert asdict(restored)["kinds"] == restored.kinds


def test_what_works_for_a_judge_ends_with_it(tmp_path: Path) -> None:
    command_line = [sys.executable, "-m", "tools.random_systems.judge", "--workers", "2", "--searches", "40"]
    rows = tmp_path / "rows.jsonl"
    with subprocess.Popen(
        [*command_line, "--first-system", str(CHEAP), "--count", "1", "--rows", str(rows)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as judging:
        deadline = time.monotonic() + 60
        while not rows.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = psutil.Process(judging.pid).children(recursive=True)
        judging.kill()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, written = tmp_path / "rows.jsonl", tmp_path / "figures.json"
    words = ["--first-system", str(CHEAP), "--count", "1", "--workers", "1"]
    assert command.main([*words, "--rows", str(rows), "--figures", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "develop-005 batching 1:" in printed
    assert "outcomes: 1 " in printed
    (kind, overall) = json.loads(written.read_text())["kinds"]
    assert (kind["kind"], overall["kind"], overall["searches"]) == ("batching", "all", 1)
    with pytest.raises(SystemExit):
        command.main(["--seed", "nothing"])
    nothing = tmp_path / "truths.json"
    assert command.main([*words, "--truths", str(nothing)]) == 0
    assert "1 systems have no true rate yet" in capsys.readouterr().out


def test_nothing_is_shown_of_a_system_of_the_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system, kept = draw(SEEDS["release"], CHEAP), tmp_path / "truths.json"
    truth.keep({system.fingerprint: known(CHEAP)}, kept)
    words = ["--seed", "release", "--first-system", str(CHEAP), "--count", "1", "--limit-s", "0.2"]
    assert command.main([*words, "--workers", "1", "--truths", str(kept)]) == 0
    assert system.name not in capsys.readouterr().out


def test_quantiles_are_of_what_has_a_ratio() -> None:
    rows = [replace(FOUND, found=10.0 * (1 + place / 100)) for place in range(21)]
    (_, overall) = figures(rows)
    assert [overall[name] for name in ("low", "middle", "high")] == pytest.approx([1.01, 1.10, 1.19])
