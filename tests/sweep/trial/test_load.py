"""The driver of the load generator's processes: one load out of several, and none of them left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import emulated
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import below, lives
from taping import taped

from kvbench.core.load.workers import (
    CHUNKS_PER_WORKER,
    REQUESTS_PER_WORKER,
    LoadResult,
    Progress,
    Settled,
    index_of,
    merge_clients,
    merge_records,
    require_common_start,
    workers_for,
)
from kvbench.core.records import RequestRecord
from kvbench.errors import KvbenchError, ProcessDiedError, StoreError
from kvbench.launchers.local import LocalLauncher
from kvbench.sweep.trial.loadgen_driver import LoadGenerator, Spare, cause_of

pytestmark = pytest.mark.timeout(90)


# ---------------------------------------------------------------- how many
def test_a_light_load_takes_one_worker_on_any_machine() -> None:
    assert (workers_for(20, 16, 400, cores=64), workers_for(300, 80, 20_000, cores=64)) == (1, 1)


def test_a_heavy_load_takes_as_many_as_its_chunks_need_and_the_cores_allow() -> None:
    assert workers_for(1000, 1000, 100_000, cores=64) == 27
    assert workers_for(1000, 1000, 100_000, cores=8) == 7
    assert workers_for(1000, 1000, 100_000, cores=2) == 1
    assert workers_for(float("inf"), 16, 100_000, cores=8) == 7


@given(
    st.floats(1e-3, 1e6), st.integers(1, 100_000), st.integers(1, 10**6), st.integers(1, 512),
    st.integers(1, 9),
)  # fmt: skip
def test_workers_are_enough_and_never_too_many(
    rate: float, output_len: int, requests: int, cores: int, times: int
) -> None:
    count = workers_for(rate, output_len, requests, cores)
    most = max(1, min(cores - 1, requests // REQUESTS_PER_WORKER))
    assert 1 <= count <= most
    if count < most:
        assert rate * output_len / count <= CHUNKS_PER_WORKER
    assert count <= workers_for(rate * times, output_len, requests * times, cores)


# ---------------------------------------------------------------- one out of several
def record(index: int, scheduled_s: float | None = None) -> RequestRecord:
    return RequestRecord(f"kvb-any-{index}", float(index) if scheduled_s is None else scheduled_s, 8, 4)


@given(st.integers(1, 7), st.integers(0, 60))
def test_shares_join_to_the_plan_in_its_order(workers: int, planned: int) -> None:
    shares = [[record(index) for index in range(worker, planned, workers)] for worker in range(workers)]
    joined = merge_records(shares, planned)
    assert [request.scheduled_s for request in joined] == list(map(float, range(planned)))


@given(st.integers(1, 4), st.integers(2, 40), st.data())
def test_a_missing_or_double_request_is_an_error(workers: int, planned: int, data: st.DataObject) -> None:
    shares = [[record(index) for index in range(worker, planned, workers)] for worker in range(workers)]
    share = data.draw(st.sampled_from([part for part in shares if part]))
    place = data.draw(st.integers(0, len(share) - 1))
    if data.draw(st.booleans()):
        share.insert(place, share[place])
    else:
        del share[place]
    with pytest.raises(KvbenchError, match=r"not the plan|missing"):
        merge_records(shares, planned)


def test_a_stopped_plan_is_as_long_as_each_worker_got() -> None:
    shares = [[record(0), record(2)], [record(1)]]
    assert len(merge_records(shares, None)) == 3
    with pytest.raises(KvbenchError, match=r"sent 4 .* missing: 3"):
        merge_records(shares, 4)


def test_a_share_of_another_worker_is_an_error() -> None:
    with pytest.raises(KvbenchError, match="worker 1 has request 2 instead of 1"):
        merge_records([[record(0)], [record(2)]], None)
    with pytest.raises(KvbenchError, match="does not contain its index"):
        merge_records([[RequestRecord("own-name", 0.0, 1, 1)]], None)


def test_the_worst_lag_counts_and_work_is_added() -> None:
    one = {"send_lag_p99_ms": 0.2, "cpu_share": 0.3, "chunks": 10, "stamps": "kernel", "started_unix_s": 5.0}
    other = {"send_lag_p99_ms": 4.0, "cpu_share": 0.1, "chunks": 5, "stamps": "read", "started_unix_s": 5.1}
    joined = merge_clients([one, other])
    assert (joined["send_lag_p99_ms"], joined["cpu_share"], joined["chunks"]) == (4.0, 0.3, 15)
    assert (joined["stamps"], joined["started_unix_s"], joined["workers"]) == ("mixed", 5.0, 2)
    assert joined["per_worker"] == [one, other]
    assert merge_clients([one]) == {**one, "workers": 1}


def test_workers_without_a_common_start_have_no_common_times() -> None:
    require_common_start([{}, {}])
    require_common_start([{"started_monotonic_s": 7.0}, {"started_monotonic_s": 7.0}])
    with pytest.raises(KvbenchError, match=r"workers began 20\.0 ms apart"):
        require_common_start([{"started_monotonic_s": 7.0}, {"started_monotonic_s": 7.02}])


# ---------------------------------------------------------------- processes that speak the protocol
# A generator that sends nothing: it tells what its spec's "script" says, at once, after "go".
ACTOR = """
import json, sys
spec = json.load(open(sys.argv[1]))
worker, workers = spec.get("worker", 0), spec.get("workers", 1)
script = spec["script"]
mine = script[worker] if isinstance(script, list) else script
def tell(event):
    print(json.dumps(event), flush=True)
for done in mine.get("preparing", []):
    tell({"event": "preparing", "done": done})
tell({"event": "ready"})
start = sys.stdin.readline().split()
assert start[0] == "go", start
if mine.get("die"):
    print("out of luck", file=sys.stderr)
    sys.exit(3)
for event in mine.get("progress", []):
    tell({"event": "progress", **event})
if mine.get("unwritten"):
    tell({"event": "unwritten", "why": "No space left on device"})
    sys.exit(1)
reason = "complete"
if mine.get("until_stop"):
    reason = {"stop\\n": "stopped"}[sys.stdin.readline()]
with open(spec["records_path"], "w") as file:
    for index in mine.get("records", range(worker, spec["num_requests"], workers)):
        row = dict(request_id=f"kvb-x-{index}", scheduled_s=index / 10, input_len=1, requested_output_len=1)
        file.write(json.dumps(row) + "\\n")
began = mine.get("began", float(start[1]) if len(start) > 1 else 0.0)
tell({"event": "end", "reason": reason, "duration_s": 1.0 + worker, "client": {"started_monotonic_s": began}})
"""
Script = Mapping[str, Any]


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher("test-load", tmp_path / "logs", tmp_path / "specs")


def drive(
    launcher: LocalLauncher,
    scripts: list[Script],
    on_progress: Callable[[Progress], bool] = lambda _: False,
    deadline_s: float = 20.0,
) -> LoadResult:
    """A load of 6 requests by one such process per script."""
    folder = launcher.log_dir.parent
    spec = {"num_requests": 6, "records_path": str(folder / ".records-x.jsonl"), "script": scripts}
    generator = LoadGenerator(launcher, spec, "actor", len(scripts), command=(sys.executable, "-c", ACTOR))
    try:
        return generator.run(on_progress, lambda: None, deadline_s)
    finally:
        assert generator.pids == []
        assert not list(folder.glob(".records*"))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_start_together_and_join(launcher: LocalLauncher, workers: int) -> None:
    result = drive(launcher, [{}] * workers)
    assert [record.scheduled_s for record in result.records] == [index / 10 for index in range(6)]
    assert (result.reason, result.duration_s, result.client["workers"]) == ("complete", workers, workers)


def test_a_long_preparation_says_how_far_it_is(launcher: LocalLauncher) -> None:
    seen: list[Progress] = []
    drive(launcher, [{"preparing": [1, 2]}, {"preparing": [3]}], lambda report: bool(seen.append(report)))
    assert max(report.prepared or 0 for report in seen) == 5
    assert all(report.sent == 0 for report in seen)


def test_progress_is_the_sum_and_settled_requests_are_told_once(launcher: LocalLauncher) -> None:
    seen: list[Progress] = []

    def look(progress: Progress) -> bool:
        seen.append(progress)
        return False

    first = {"t_s": 0.5, "sent": 2, "met": 1, "lag_ms": 0.1, "settled": [[0, 0.1, None, 0.2, ""]]}
    more = {"t_s": 0.7, "sent": 3, "met": 2, "lag_ms": 0.1, "settled": [[2, 0.1, 0.01, 0.2, ""]]}
    late = {"t_s": 0.6, "sent": 2, "missed": 1, "lag_ms": 7.0, "settled": [[1, None, None, None, "timeout"]]}
    drive(launcher, [{"progress": [first, more]}, {"progress": [late]}], look)
    last = seen[-1]
    assert (last.t_s, last.sent, last.met, last.missed, last.lag_ms) == (0.7, 5, 2, 1, 7.0)
    settled = sorted((fate for progress in seen for fate in progress.settled), key=lambda fate: fate.index)
    assert settled == [
        Settled(0, 0.1, None, 0.2, ""),
        Settled(1, None, None, None, "timeout"),
        Settled(2, 0.1, 0.01, 0.2, ""),
    ]


def test_stopping_reaches_every_worker(launcher: LocalLauncher) -> None:
    scripts: list[Script] = [
        {"until_stop": True, "records": [0, 2]},
        {"until_stop": True, "records": [1], "progress": [{}]},
    ]
    result = drive(launcher, scripts, lambda _: True)
    assert (result.reason, len(result.records)) == ("stopped", 3)


def test_one_worker_that_ends_early_ends_all_with_a_clear_error(launcher: LocalLauncher) -> None:
    with pytest.raises(ProcessDiedError, match=r"actor-w1 ended early \(status 3\): out of luck") as caught:
        drive(launcher, [{"until_stop": True}, {"die": True}])
    assert "actor-w1.log" in caught.value.hint


def test_a_full_disk_under_a_worker_is_reported_as_a_full_disk(launcher: LocalLauncher) -> None:
    """Its log may be on the same disk, and empty."""
    with pytest.raises(StoreError, match=r"actor-w1 cannot write .*: No space left on device") as caught:
        drive(launcher, [{"until_stop": True}, {"unwritten": True}])
    assert "free space" in caught.value.hint


def test_a_generator_that_fails_is_told_in_one_line(launcher: LocalLauncher) -> None:
    code = "import sys, json\nraise ValueError('the spec is for\\nsomebody else')"
    spec = {"num_requests": 1, "records_path": str(launcher.log_dir / "r")}
    generator = LoadGenerator(launcher, spec, "broken", command=(sys.executable, "-c", code))
    with pytest.raises(ProcessDiedError) as caught:
        generator.run(lambda _: False, lambda: None, 20.0)
    assert "Traceback" in (launcher.log_dir / "broken.log").read_text()
    assert caught.value.message.endswith("(status 1): ValueError: the spec is for")
    assert caught.value.hint == f"the whole log is {launcher.log_dir / 'broken.log'}"


@pytest.mark.parametrize(("lines", "cause"), [
    ([], ""),
    (["Traceback (most recent call last):", '  File "x", line 1', "OSError: [Errno 24] x"],
     "OSError: [Errno 24] x"),
    (["kvbench.errors.InputError: no", "hint: y"], "kvbench.errors.InputError: no"),
    (["kvbench.processes.loadgen: the spec: missing key 'seed'", ""],
     "kvbench.processes.loadgen: the spec: missing key 'seed'"),
    (["Killed"], "Killed"),
])  # fmt: skip
def test_the_cause_is_the_line_that_says_it(lines: list[str], cause: str) -> None:
    assert cause_of(lines) == cause


def test_a_missing_and_a_double_record_are_errors(launcher: LocalLauncher) -> None:
    with pytest.raises(KvbenchError, match="missing: 5"):
        drive(launcher, [{}, {"records": [1, 3]}])
    with pytest.raises(KvbenchError, match="has request 3 instead of 5"):
        drive(launcher, [{}, {"records": [1, 3, 3]}])


def test_workers_that_began_apart_are_an_error(launcher: LocalLauncher) -> None:
    with pytest.raises(KvbenchError, match="apart"):
        drive(launcher, [{"began": 1.0}, {"began": 1.5}])


def test_a_worker_that_never_ends_meets_the_deadline(launcher: LocalLauncher) -> None:
    with pytest.raises(KvbenchError, match="within its deadline") as caught:
        drive(launcher, [{}, {"until_stop": True}], deadline_s=1.0)
    assert "actor-w1.log" in caught.value.hint
    assert "actor-w0.log" not in caught.value.hint


# ---------------------------------------------------------------- the real generator
@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[emulated.EngineProcess]:
    with emulated.running(tmp_path_factory.mktemp("engine"), emulated.spec()) as running:
        yield running


def real_spec(url: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "base_url": url, "model": "tiny", "request_rate": 60.0, "num_requests": 40, "seed": 5,
        "input_len": 32, "output_len": 4, "vocab_size": 8192, "timeout_s": 20.0,
        "records_path": str(folder / ".records-real.jsonl"), "slo": {"ttft_ms": 10_000, "tpot_ms": 5_000},
        **changes,
    }  # fmt: skip


def offer(launcher: LocalLauncher, spec: dict[str, Any], workers: int) -> LoadResult:
    generator = LoadGenerator(launcher, spec, f"loadgen-{workers}", workers)
    return generator.run(lambda _: False, lambda: None, 40.0)


def test_two_workers_send_the_same_plan_as_one(
    launcher: LocalLauncher, engine: emulated.EngineProcess, tmp_path: Path
) -> None:
    seen = []
    for workers in (1, 2):
        with taped(engine.url) as (url, tape):
            result = offer(launcher, real_spec(url, tmp_path), workers)
        prompts = {int(request.request_id.rpartition("-")[2]): request.body["prompt"] for request in tape}
        plan = [(index_of(record), record.scheduled_s, record.error) for record in result.records]
        seen.append((prompts, plan))
        assert (len(tape), result.reason, result.client["workers"]) == (40, "complete", workers)
    assert (seen[0], len(result.client["per_worker"])) == (seen[1], 2)
    starts = {worker["started_monotonic_s"] for worker in result.client["per_worker"]}
    assert len(starts) == 1


def test_every_request_is_settled_once_whoever_sent_it(
    launcher: LocalLauncher, engine: emulated.EngineProcess, tmp_path: Path
) -> None:
    settled: list[Settled] = []

    def look(progress: Progress) -> bool:
        settled.extend(progress.settled)
        return False

    generator = LoadGenerator(launcher, real_spec(engine.url, tmp_path), workers=2)
    result = generator.run(look, lambda: None, 40.0)
    by_index = {fate.index: fate for fate in settled}
    assert sorted(by_index) == list(range(40)) == sorted(fate.index for fate in settled)
    for record in result.records:
        reported = by_index[index_of(record)]
        assert reported.ttft_s == pytest.approx(record.ttft_s, abs=1e-6)
        assert reported.e2el_s == pytest.approx(record.e2el_s, abs=1e-6)
        assert reported.error == record.error == ""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_other_and_the_load(
    launcher: LocalLauncher, engine: emulated.EngineProcess, tmp_path: Path, victim: int
) -> None:
    spec = real_spec(engine.url, tmp_path, num_requests=2000)
    generator = LoadGenerator(launcher, spec, "pair", workers=2)
    running: list[int] = []

    def kill(progress: Progress) -> bool:
        if progress.sent and not running:
            running.extend(generator.pids)
            os.kill(generator.pids[victim], signal.SIGKILL)
        return False

    with pytest.raises(ProcessDiedError, match=rf"pair-w{victim} ended early \(status -9\)"):
        generator.run(kill, lambda: None, 60.0)
    assert len(running) == 2
    assert not any(lives(pid) for pid in running)
    assert not list(tmp_path.glob(".records*"))


def test_a_stop_reaches_real_workers(
    launcher: LocalLauncher, engine: emulated.EngineProcess, tmp_path: Path
) -> None:
    generator = LoadGenerator(launcher, real_spec(engine.url, tmp_path, num_requests=2000), workers=2)
    result = generator.run(lambda progress: progress.sent >= 20, lambda: None, 60.0)
    assert result.reason == "stopped"
    assert 20 <= len(result.records) < 2000


def test_one_worker_sends_the_whole_plan(
    launcher: LocalLauncher, engine: emulated.EngineProcess, tmp_path: Path
) -> None:
    result = offer(launcher, real_spec(engine.url, tmp_path), 1)
    assert ([record.error for record in result.records], result.client["workers"]) == ([""] * 40, 1)
    assert not list(tmp_path.glob(".records*"))


def test_a_spare_that_waits_takes_the_next_load_under_its_name(
    launcher: LocalLauncher, engine: emulated.EngineProcess, tmp_path: Path
) -> None:
    spare = Spare(launcher)
    spare.prepare()
    waiting = below("kvbench.processes.loadgen")
    for name in ("first", "second"):
        pids = [process.pid for process in below("kvbench.processes.loadgen")]
        generator = LoadGenerator(launcher, real_spec(engine.url, tmp_path), name, spare=spare)
        used: list[int] = []

        def look(_: Progress, generator: LoadGenerator = generator, used: list[int] = used) -> bool:
            used.extend(generator.pids)
            return False

        result = generator.run(look, lambda: None, 60.0)
        assert result.reason == "complete"
        assert used[0] in pids, "the one that waited has sent"
        assert (launcher.log_dir / f"{name}.log").exists()
    spare.close()
    assert waiting
    assert not below("kvbench.processes.loadgen")
    assert not (launcher.log_dir / "loadgen-spare.log").exists()


def test_a_spare_that_died_is_replaced(
    launcher: LocalLauncher, engine: emulated.EngineProcess, tmp_path: Path
) -> None:
    spare = Spare(launcher)
    spare.prepare()
    (process,) = below("kvbench.processes.loadgen")
    process.kill()
    process.wait(10)
    result = LoadGenerator(launcher, real_spec(engine.url, tmp_path), "own", spare=spare).run(
        lambda _: False, lambda: None, 60.0
    )
    assert result.reason == "complete"
    spare.close()


def test_a_spare_whose_spec_is_wrong_says_so(launcher: LocalLauncher) -> None:
    spare = Spare(launcher)
    spare.prepare()
    spec = {"records_path": str(launcher.log_dir / "r"), "num_requests": 1, "nonsense": 1}
    with pytest.raises(ProcessDiedError, match="unknown key 'nonsense'"):
        LoadGenerator(launcher, spec, "wrong", spare=spare).run(lambda _: False, lambda: None, 20.0)
    spare.close()
