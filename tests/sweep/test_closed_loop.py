"""``kvbench bench --concurrency``: so many requests at once, and never called a rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import invoke, kvbench, the_run
from emulated import running, spec

from kvbench.processes.loadgen.plan import PlannedRequest
from kvbench.processes.loadgen.schedules import AFTER_FAILURE_S, ClosedLoop
from kvbench.processes.loadgen.spec import LoadSpec

WORKLOAD = ("--input-len", "64", "--output-len", "8")


def plan(count: int) -> list[PlannedRequest]:
    return [PlannedRequest(index, f"r{index}", 0.0, 8, 2, b"[]") for index in range(count)]


def test_a_slot_lets_the_next_request_in_and_waits_after_a_failure() -> None:
    requests = plan(5)
    loop = ClosedLoop(requests, 2, duration_s=3.0)
    never = float("inf")
    assert [request.offset_s for request in requests] == [0.0, 0.0, never, never, never]
    loop.freed(1.0, failed=True)
    loop.freed(1.05, failed=False)
    assert [request.offset_s for request in requests[2:]] == [
        1.0 + AFTER_FAILURE_S,
        1.0 + AFTER_FAILURE_S,
        never,
    ]
    loop.freed(2.0, failed=False)
    loop.freed(2.1, failed=False)
    assert requests[4].offset_s == 2.0
    assert not loop.is_over(2.9)
    assert loop.is_over(3.0)


@pytest.mark.parametrize(("concurrency", "shares"), [(5, [3, 2]), (2, [1, 1]), (0, [0, 0])])
def test_workers_share_the_slots(concurrency: int, shares: list[int]) -> None:
    whole = LoadSpec("http://h", "m", 1.0, 9, 1, 8, 2, 4000, "", concurrency=concurrency, workers=2)
    assert [replace(whole, worker=worker).slots for worker in range(2)] == shares


@pytest.mark.parametrize("workers", [1, 2])
def test_so_many_are_under_way_and_no_rate_is_named(tmp_path: Path, workers: int) -> None:
    with running(tmp_path, spec(max_num_seqs=16, time_scale=1.0)) as engine:
        done = kvbench(
            *("bench", "--base-url", engine.url, *WORKLOAD, "--concurrency", "3", "--num-requests", "40"),
            *("--workers", str(workers), "--output", str(tmp_path / "r")),
        )
    run = the_run(tmp_path / "r")
    (trial,) = run.all_trials
    rows = run.requests(trial.trial_id)
    assert (trial.method, trial.request_rate, trial.engine["concurrency"]) == ("closed_loop", 0.0, 3), (
        done.text
    )
    assert trial.verdict == "measured" or "emulator_behind" in {finding.gate for finding in trial.findings}
    assert (len(rows), set(rows["error"])) == (40, {""})
    starts, ends = rows["sent_s"].to_numpy(), rows["last_token_s"].to_numpy()
    under_way = [((starts <= moment) & (ends > moment)).sum() for moment in starts]
    assert max(under_way) == 3
    assert sorted(under_way)[len(under_way) // 2] >= 2
    assert trial.cell.connector == "tiny", "a server that is up is called by its model"
    assert trial.verdict == "invalid" or "Maximum request concurrency" in done.out
    assert "3 at once" in done.out
    assert "0.00 req/s" not in done.out
    report = (run.path / "report.md").read_text()
    assert "Closed loop" in report


def test_a_closed_loop_ends_when_its_time_is_up(tmp_path: Path) -> None:
    with running(tmp_path, spec(time_scale=1.0)) as engine:
        done = kvbench(
            *("bench", "--base-url", engine.url, *WORKLOAD, "--concurrency", "2", "--duration", "1.5"),
            *("--output", str(tmp_path / "r")),
        )
    run = the_run(tmp_path / "r")
    rows = run.requests(run.all_trials[0].trial_id)
    assert len(rows) > 4, done.text
    assert rows["sent_s"].max() <= 1.6
    assert set(rows["error"]) == {""}


@pytest.mark.parametrize(
    ("options", "count"), [(("--num-requests", "30"), 30), (("--rate", "20", "--duration", "1"), 20)]
)
def test_an_open_loop_takes_a_number_or_a_time(tmp_path: Path, options: tuple[str, ...], count: int) -> None:
    rate = () if "--rate" in options else ("--rate", "30")
    with running(tmp_path, spec()) as engine:
        done = kvbench(
            *("bench", "--base-url", engine.url, *WORKLOAD, *rate, *options),
            *("--output", str(tmp_path / "r")),
        )
    run = the_run(tmp_path / "r")
    assert len(run.requests(run.all_trials[0].trial_id)) == count, done.text


def test_a_closed_loop_offers_no_rate() -> None:
    assert "has no rate" in invoke("bench", "quickstart", "--concurrency", "4", "--rate", "3").failed(2).err
