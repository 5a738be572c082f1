"""The simulator compared against loads that others measured: ``kvbench simulate --against``."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from commands import invoke, kvbench, not_spoilt, the_run
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.findings.load_row import LoadRow
from kvbench.core.findings.suspicions import not_kept_up
from kvbench.core.records import Cell, TrialRecord
from kvbench.errors import InputError
from kvbench.planning.scenario_files import load_scenario
from kvbench.report.findings.load_rows import load_rows
from kvbench.results.run import load_run
from kvbench.sweep.against import compared, systems_of
from kvbench.sweep.deviation import (
    FIGURES,
    Deviation,
    arrivals,
    deviations_of,
    label_of,
    lines_of,
    off,
    place_of,
    rows_of,
)

ROOT = Path(__file__).parents[3]
NOTES = ROOT / "results/reference/seed-notes"
PAGE = ROOT / "results/reference/seed-pr10884"


def held_against_notes(connector: str, lengths: tuple[int, ...]) -> dict[tuple[int, str], Deviation]:
    scenario, _ = load_scenario(f"seed-h200-{connector}", ())
    system = dict(systems_of(scenario))[connector]
    found: dict[tuple[int, str], Deviation] = {}
    for row in rows_of(load_run(NOTES), scenario):
        if row.cell.input_len in lengths:
            deviations, _, _ = compared(row, system, scenario)
            found |= {(row.cell.input_len, deviation.figure): deviation for deviation in deviations}
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
    outliers = off(list(found.values()))
    assert outliers[0].startswith("nixl at 32,768, 35 req/s: p90_ttft_ms -")
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
        found, _, _ = compared(row, systems[label_of(row, scenario)], scenario)
        ratios = {deviation.figure: deviation.ratio for deviation in found}
        assert ratios["mean_ttft_ms"] == pytest.approx(1, abs=0.15), place_of(row)
        assert ratios["duration_s"] == pytest.approx(1, abs=0.02), place_of(row)


def test_kv_that_moves_beside_the_steps_does_not_explain_the_page() -> None:
    scenario, _ = load_scenario("seed-a10-tp4", ["simulate.hand_off=beside", "workload.input_len=[1024]"])
    systems = dict(systems_of(scenario))
    (row, *_) = (row for row in rows_of(load_run(PAGE), scenario) if row.request_rate == 6)
    found, _, _ = compared(row, systems[label_of(row, scenario)], scenario)
    ratios = {deviation.figure: deviation.ratio for deviation in found}
    assert ratios["mean_ttft_ms"] < 0.7
    assert ratios["mean_tpot_ms"] < 0.3


def test_a_row_is_found_by_its_protocol_and_nics() -> None:
    scenario, _ = load_scenario("seed-a10-tp4", ())
    labels = {
        (row.axes["protocol"], row.axes["nics"], label_of(row, scenario)) for row in load_rows(load_run(PAGE))
    }
    assert labels == {
        ("rdma", 2, "mooncake-2-nics"), ("rdma", 1, "mooncake-1-nic"), ("tcp", "TCP", "mooncake-tcp"),
    }  # fmt: skip


def test_the_arrivals_of_vllms_client() -> None:
    row = next(row for row in load_rows(load_run(PAGE)) if row.request_rate == 2)
    early, late = arrivals(row, 7, "vllm-0.6"), arrivals(row, 7, "vllm")
    assert len(early) == len(late) == 200
    assert early[:2] == pytest.approx(
        [0.0, 0.39794], abs=1e-4
    )  # numpy's first exponential after seed(0), halved
    assert (late[-1], row.get("duration_s")) == (pytest.approx(100), pytest.approx(early[-1], rel=0.02))


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
    done = invoke(
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
    assert ([trial.method for trial in run.other_trials], run.labels) == (["fixed"], ["simulated"])


# --- offered for real --------------------------------------------------------------------------------
LOAD = ("workload.input_len=[256]", "search.trial_s=4", "search.min_requests=20")


def slower(scale: int) -> tuple[str, ...]:
    return (*LOAD, "deployment.base_port=0", f"deployment.engine_options.time_scale={scale}")


def test_a_run_is_offered_for_real_and_told_at_the_speed_that_is_meant(tmp_path: Path) -> None:
    """Listed rates on virtual time are the run; a real server that is half as fast gets them, too."""
    server, reported, made = ("--connector", "aggregated"), tmp_path / "told", tmp_path / "made"
    listed = (*LOAD, "search.method=fixed", "search.rates=[8]")
    invoke("simulate", "quickstart", *server, "--output", str(reported), sets=listed).succeeded()
    (measured,) = reported.iterdir()

    def offered(scale: int) -> TrialRecord:
        words = (*server, "--against", str(measured), "--output", str(made / str(scale)))
        done = kvbench("bench", "quickstart", *words, sets=slower(scale))
        printed.append(done.text)
        (trial,) = the_run(made / str(scale)).other_trials
        assert trial.verdict == "invalid" or done.status == 0, done.text
        return trial

    printed: list[str] = []
    trial, scale = not_spoilt(offered, (2, 4, 8))
    run = the_run(made / str(scale))
    scenario, _ = load_scenario("quickstart", [*slower(scale), "connectors=[aggregated]"])
    (row,) = rows_of(load_run(measured), scenario)
    records = run.request_records(trial.trial_id)
    sent = [record.scheduled_s for record in records]
    assert sent == pytest.approx([scale * arrival for arrival in arrivals(row, scenario.seed)], abs=1e-6)
    assert {record.requested_output_len for record in records} == {row.cell.output_len}
    assert f"EMULATED · quickstart against {measured.name}: emulated / reported" in printed[-1]
    with open(run.path / "tables/against.csv", newline="") as file:
        lines = {line["figure"]: line for line in csv.DictReader(file)}
    whole = trial.summary["whole_run"]
    assert float(lines["duration_s"]["emulated"]) == pytest.approx(whole["duration_s"] / scale)
    assert float(lines["request_throughput"]["emulated"]) == pytest.approx(
        scale * whole["request_throughput"]
    )
    assert float(lines["mean_tpot_ms"]["emulated"]) == pytest.approx(whole["tpot_ms"]["mean"] / scale)
    assert float(lines["mean_tpot_ms"]["told"]) == row.get("mean_tpot_ms")
    text = (run.path / "against.md").read_text("utf-8")
    assert f"ran {scale} times slower" in text
    assert "emulated / told" in text


def test_a_load_of_another_run_has_its_own_rate() -> None:
    done = invoke("bench", "quickstart", "--against", str(NOTES), "--rate", "3").failed(2)
    assert "does not accept --rate" in done.err


@given(st.floats(0.01, 1e4), st.dictionaries(st.sampled_from(FIGURES), st.floats(1e-3, 1e6), min_size=1))
def test_a_slower_system_is_brought_back(scale: float, figures: dict[str, float]) -> None:
    cell = Cell("tcp", 64, 4)
    row = LoadRow("row", "run", cell, 2.0, 10, dict(figures))
    slow = {
        name: value / scale if name == "request_throughput" else value * scale
        for name, value in figures.items()
    }
    found = deviations_of(row, [slow], scale)
    assert [deviation.figure for deviation in found] == [name for name in FIGURES if name in figures]
    assert all(deviation.ratio == pytest.approx(1) and not deviation.outside for deviation in found)
    assert not deviations_of(row, [], scale)


def test_the_reference_run_on_the_emulated_engine_agrees_with_virtual_time() -> None:
    """The same load eight times slower with real processes has the figures of the model at full speed."""
    folder = ROOT / "results/reference/seed-h200-emulated"
    with open(folder / "tables/against.csv", newline="") as file:
        measured = {row["figure"]: float(row["emulated"]) for row in csv.DictReader(file)}
    simulated = held_against_notes("mooncake", (1024,))
    assert set(measured) == set(FIGURES)
    for figure, value in measured.items():
        assert value == pytest.approx(simulated[1024, figure].reproduced, rel=0.05), figure
    (trial,) = load_run(folder).other_trials
    scale = load_run(folder).manifest["against"]["time_scale"]
    assert trial.summary["whole_run"]["duration_s"] / scale == pytest.approx(measured["duration_s"])


def test_one_scenario_may_stand_for_all_sizes_of_a_page() -> None:
    run = load_run(PAGE)
    scenario, _ = load_scenario("seed-a10-tp1", ["deployment.tensor_parallel_size=[1, 2, 4]"])
    rows = rows_of(run, scenario)
    assert {row.axes["tp"] for row in rows} == {1, 2, 4}
    for row in rows:
        label = label_of(row, scenario)
        assert label.endswith(f"-tp{row.axes['tp']}")
        assert scenario.deployed(label).ranks_of("prefill-0").tensor == row.axes["tp"]
