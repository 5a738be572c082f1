"""The simulator held against loads that others measured: ``kvbench simulate --against``."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from commands import kvbench

from kvbench.against import (
    FIGURES,
    Held,
    arrivals,
    held,
    label_of,
    lines_of,
    off,
    place_of,
    rows_of,
    systems_of,
)
from kvbench.core.suspicions import not_kept_up
from kvbench.errors import InputError
from kvbench.loadrows import load_rows
from kvbench.runs import load_run
from kvbench.scenario_files import load_scenario

ROOT = Path(__file__).parents[1]
NOTES = ROOT / "results/reference/seed-notes"
PAGE = ROOT / "results/reference/seed-pr10884"


def held_against_notes(connector: str, lengths: tuple[int, ...]) -> dict[tuple[int, str], Held]:
    scenario, _ = load_scenario(f"seed-h200-{connector}", ())
    system = dict(systems_of(scenario))[connector]
    found: dict[tuple[int, str], Held] = {}
    for row in rows_of(load_run(NOTES), scenario):
        if row.cell.input_len in lengths:
            mine, _, _ = held(row, system, scenario)
            found |= {(row.cell.input_len, each.figure): each for each in mine}
    return found


def test_the_notes_mooncake_rows_follow_from_slots_and_steps() -> None:
    lengths = (1024, 4096, 8192, 16384, 32768)
    found = held_against_notes("mooncake", lengths)
    for length in lengths:
        for figure in ("duration_s", "request_throughput", "mean_ttft_ms", "mean_tpot_ms"):
            assert found[length, figure].ratio == pytest.approx(1, abs=0.10), (length, figure)
    assert found[32768, "p90_ttft_ms"].ratio == pytest.approx(1, abs=0.15)


def test_where_the_model_cannot_it_is_told() -> None:
    found = held_against_notes("nixl", (32768,))
    assert found[32768, "mean_tpot_ms"].ratio == pytest.approx(1, abs=0.10)
    told = off(list(found.values()))
    assert told[0].startswith("nixl at 32,768, 35 req/s: p90_ttft_ms -")
    header, lines = lines_of(list(found.values()))
    assert len(lines) == 1
    assert len(header) == len(lines[0]) == 3 + len(FIGURES)


@pytest.mark.parametrize(("ranks", "rows"), [(1, 3), (2, 3), (4, 18)])
def test_the_pages_unsaturated_rows_follow_from_the_hand_off_of_that_time(ranks: int, rows: int) -> None:
    scenario, _ = load_scenario(f"seed-a10-tp{ranks}", ())
    systems = dict(systems_of(scenario))
    kept_up = [row for row in rows_of(load_run(PAGE), scenario) if not_kept_up(row) is None]
    assert len(kept_up) == rows
    for row in kept_up:
        found, _, _ = held(row, systems[label_of(row, scenario)], scenario)
        ratios = {each.figure: each.ratio for each in found}
        assert ratios["mean_ttft_ms"] == pytest.approx(1, abs=0.15), place_of(row)
        assert ratios["duration_s"] == pytest.approx(1, abs=0.02), place_of(row)


def test_kv_that_moves_beside_the_steps_does_not_explain_the_page() -> None:
    scenario, _ = load_scenario("seed-a10-tp4", ["simulate.hand_off=beside", "workload.input_len=[1024]"])
    systems = dict(systems_of(scenario))
    (row, *_) = (row for row in rows_of(load_run(PAGE), scenario) if row.request_rate == 6)
    found, _, _ = held(row, systems[label_of(row, scenario)], scenario)
    ratios = {each.figure: each.ratio for each in found}
    assert ratios["mean_ttft_ms"] < 0.7
    assert ratios["mean_tpot_ms"] < 0.3


def test_a_row_is_found_by_its_protocol_and_nics() -> None:
    scenario, _ = load_scenario("seed-a10-tp4", ())
    told = {
        (row.axes["protocol"], row.axes["nics"], label_of(row, scenario)) for row in load_rows(load_run(PAGE))
    }
    assert told == {
        ("rdma", 2, "mooncake-2-nics"), ("rdma", 1, "mooncake-1-nic"), ("tcp", "TCP", "mooncake-tcp"),
    }  # fmt: skip


def test_the_arrivals_of_vllms_client() -> None:
    row = next(row for row in load_rows(load_run(PAGE)) if row.request_rate == 2)
    early, late = arrivals(row, 7, "vllm-0.6"), arrivals(row, 7, "vllm")
    assert len(early) == len(late) == 200
    assert early[:2] == pytest.approx(
        [0.0, 0.39794], abs=1e-4
    )  # numpy's first exponential after seed(0), halved
    assert late[-1] == pytest.approx(100)
    assert row.get("duration_s") == pytest.approx(early[-1], rel=0.02)


def test_rows_that_the_scenario_is_not_about_are_left_out() -> None:
    run = load_run(NOTES)
    scenario, _ = load_scenario("seed-h200-mooncake", ["workload.input_len=[1024]"])
    assert [(row.cell.connector, row.cell.input_len) for row in rows_of(run, scenario)] == [
        ("mooncake", 1024)
    ]
    other, _ = load_scenario("seed-h200-mooncake", ["workload.output_len=8"])
    with pytest.raises(InputError, match="has no load with the connectors"):
        rows_of(run, other)


def test_the_command_leaves_a_comparison_in_the_run(tmp_path: Path) -> None:
    done = kvbench(
        "simulate", "seed-h200-mooncake", "--against", str(NOTES), "--output", str(tmp_path),
        sets=["workload.input_len=[32768]"],
    )  # fmt: skip
    assert done.status == 0, done.text
    assert "SIMULATED · seed-h200-mooncake against seed-notes" in done.out
    (folder,) = tmp_path.iterdir()
    with open(folder / "tables/against.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["figure"] for row in rows} == set(FIGURES)
    assert all(row["source"] for row in rows)
    assert "sim / told" in (folder / "against.md").read_text("utf-8")
    run = load_run(folder)
    assert [trial.method for trial in run.other_trials] == ["fixed"]
    assert run.labels == ["simulated"]
