"""The simulator held against loads that others measured: ``kvbench simulate --against``."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from commands import kvbench

from kvbench.against import FIGURES, Held, held, lines_of, off, rows_of, systems_of
from kvbench.errors import InputError
from kvbench.runs import load_run
from kvbench.scenario_files import load_scenario

ROOT = Path(__file__).parents[1]
NOTES = ROOT / "results/reference/seed-notes"


def held_against_notes(connector: str, lengths: tuple[int, ...]) -> dict[tuple[int, str], Held]:
    scenario, _ = load_scenario(f"seed-h200-{connector}", ())
    system = dict(systems_of(scenario))[connector]
    found: dict[tuple[int, str], Held] = {}
    for row in rows_of(load_run(NOTES), scenario):
        if row.cell.input_len in lengths:
            # Up to 16k the slots are what counts, and arrivals hardly; at 32k there are slots for all.
            draws = 3 if row.cell.input_len == 32768 else 1
            mine, _, _ = held(row, system, scenario.workload.request_timeout_s, scenario.seed, draws)
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
