"""The coordinator of raw transfers, with real workers: rows, reuse, verification, all kinds of trouble."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import outside_backends
import psutil
import pytest
from commands import wait_until
from faults import Seen
from processes import still_living

from kvbench import transfer
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.errors import KvbenchError
from kvbench.hosts.lab.faults import heal, place
from kvbench.hosts.lab.lab import Lab
from kvbench.launchers.local import LocalLauncher
from kvbench.microbench.cases import run_cases
from kvbench.microbench.options import Settings
from kvbench.microbench.sides import Side, WorkerError, WorkerHandle

QUICK = Settings(seconds=0.05, min_calls=5, max_seconds=0.5, call_s=0.5, connect_s=2.0, open_s=20.0)
WRITE = Case("tcp", "tcp", "write", 16384, 4)
READ = replace(WRITE, op="read")


def usual(name: str) -> str:
    return transfer.get(name).protocols[0]


def rows_of(*cases: Case, settings: Settings = QUICK, **more: object) -> list[TransferRecord]:
    return list(run_cases(cases, settings=settings, **more))  # type: ignore[arg-type]


def workers(role: str = "", of: int | None = None) -> list[psutil.Process]:
    """Workers below a process, by role."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "kvbench.processes.transfer_worker.worker" in command and command[-1].startswith(role):
                found.append(process)
    return found


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends of ``outside_backends`` are installed, here and in the workers."""
    outside_backends.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[1] / 'support'}")


# Rows
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.native)
        for name in transfer.names()
        if not transfer.get(name).optional
    ],
)
def test_rows_of_every_usual_backend_are_whole_and_verified(name: str) -> None:
    if problem := transfer.check(name):
        pytest.skip(f"{name}: {problem.reason} ({problem.fix})")
    case = Case(name, usual(name), "write", 16384, 4)
    rows = rows_of(case, replace(case, op="read", block_bytes=4096), replace(case, scattered=True))
    assert [row.status for row in rows] == ["ok"] * 3, [(row.error, row.log) for row in rows]
    moves = transfer.get(name).moves_bytes
    for row in rows:
        assert row.verified is (True if moves else None)
        assert row.calls == len(row.call_s) >= QUICK.min_calls
        assert (row.nbytes, row.descriptors) == (row.case.nbytes, row.case.batch_size)
        assert 0 < row.window_s < 5
        assert sum(row.call_s) <= row.window_s * 1.001
        assert row.warmup_calls > 0
        assert row.transport
        assert row.library
        assert None not in (row.open_s, row.register_s, row.connect_s, row.prepare_s, row.load_average)
        assert row.initiator_cpu_s is not None
        assert row.target_cpu_s is not None
        if moves:
            assert row.gb_per_s == pytest.approx(row.calls * row.nbytes / row.window_s / 1e9)
        else:
            assert row.gb_per_s is None
        assert TransferRecord.from_json(row.to_json()) == row


def test_threads_fan_in_fan_out_and_regions_are_verified_too() -> None:
    rows = rows_of(
        replace(WRITE, threads=3),
        replace(WRITE, initiators=2),
        replace(READ, targets=2, threads=2, scattered=True),
        replace(READ, regions=6, block_bytes=1000, merged=True),
    )
    assert [(row.status, row.verified) for row in rows] == [("ok", True)] * 4, [row.error for row in rows]
    assert rows[-1].descriptors == 6, "four contiguous blocks are one run in each region"
    assert rows[-1].nbytes == 6 * 4 * 1000


def test_cases_of_one_kind_share_their_workers_and_others_do_not() -> None:
    seen: list[set[int]] = []

    def on_stage(index: int, case: Case, stage: str) -> None:
        if stage == "measuring":
            seen.append({process.pid for process in workers()})

    rows_of(WRITE, replace(READ, block_bytes=65536), replace(WRITE, initiators=2), on_stage=on_stage)
    assert seen[0] == seen[1]
    assert (len(seen[0]), len(seen[2])) == (2, 3)
    assert not seen[2] & seen[0]


def test_a_prefix_stands_in_front_of_a_worker(tmp_path: Path) -> None:
    note = tmp_path / "note"
    prefix = ("sh", "-c", f'echo "$@" > {note}; exec "$@"', "sh")
    (row,) = rows_of(WRITE, target=Side(prefix=prefix))
    assert row.verified
    assert "kvbench.processes.transfer_worker.worker target" in note.read_text()


def test_nics_are_told_by_their_counters() -> None:
    lo = Side(nics=({"name": "lo", "address": "127.0.0.1"},))
    (row,) = rows_of(replace(WRITE, nics=1), initiator=lo, target=lo)
    assert row.nics_asked == ["lo"]
    assert row.nic_bytes["initiator:lo"] >= row.calls * row.nbytes
    assert "bytes_elsewhere" not in [warning.kind for warning in row.warnings]


def test_bytes_that_went_elsewhere_are_told() -> None:
    wrong = Side(nics=({"name": "eth77", "address": "127.0.0.1"},))
    (row,) = rows_of(replace(WRITE, nics=1), initiator=wrong, target=wrong)
    assert row.status == "ok"
    warnings = {warning.kind: warning for warning in row.warnings}
    assert "lo" in warnings["bytes_elsewhere"].message


# What cannot be, and what goes wrong: an error row, and the next case goes on
def test_what_cannot_be_is_said_and_the_matrix_goes_on() -> None:
    started: list[int] = []
    rows = rows_of(
        replace(WRITE, block_bytes=1 << 45), replace(WRITE, protocol="pigeon"),
        replace(WRITE, backend="nothing"), replace(WRITE, nics=2), replace(WRITE, memory="cuda"),
        on_stage=lambda index, case, stage: started.append(len(workers())),
    )  # fmt: skip
    assert [row.status for row in rows] == ["error"] * 5
    for row, words in zip(rows, ("of memory are free", "pigeon", "nothing", "2 NICs", "cuda"), strict=True):
        assert words in row.error
    assert not any(started), "nothing is started, let alone allocated, for any of these"
    assert rows_of(replace(WRITE, block_bytes=1 << 45), WRITE)[1].verified


def timed(cases: Iterable[TransferRecord], fault: Seen) -> list[TransferRecord]:
    """All rows; what the first one says is what is told of the fault, as soon as it is there."""
    rows = []
    for row in cases:
        if not rows:
            fault.check(row.error)
        rows.append(row)
    return rows


def at_measuring(of: str, number: signal.Signals, fault: Seen) -> Callable[[int, Case, str], None]:
    """Send a signal to the worker of a role when the first case is about to be measured."""

    def on_stage(index: int, case: Case, stage: str) -> None:
        if index == 0 and stage == "measuring":
            (process,) = workers(of)
            process.send_signal(number)
            fault.struck()

    return on_stage


@pytest.mark.fault("side_killed")
@pytest.mark.parametrize("role", ["target", "initiator"])
def test_a_killed_side_is_an_error_row(role: str, fault: Seen) -> None:
    rows = timed(
        run_cases([WRITE, READ], settings=QUICK, on_stage=at_measuring(role, signal.SIGKILL, fault)), fault
    )
    assert rows[0].status == "error"
    assert f"the {role} was killed by signal 9" in rows[0].error
    assert rows[0].gb_per_s is None
    assert rows[1].verified, "fresh workers serve the next case"


@pytest.mark.fault("side_frozen")
@pytest.mark.parametrize("role", ["target", "initiator"])
def test_a_frozen_side_is_an_error_row(role: str, fault: Seen) -> None:
    rows = timed(
        run_cases([WRITE, READ], settings=QUICK, on_stage=at_measuring(role, signal.SIGSTOP, fault)), fault
    )
    assert f"the {role} gave no answer" in rows[0].error
    assert rows[1].verified


@pytest.mark.fault("library_hangs")
@pytest.mark.usefixtures("outside")
def test_a_transfer_that_never_ends_has_a_deadline(fault: Seen) -> None:
    rows = rows_of(replace(WRITE, backend="endless"))
    fault.struck()
    rows += rows_of(replace(WRITE, backend="stuck"))
    fault.check(rows[1].error)
    assert "did not end within 0.5 s" in rows[0].error
    assert "the initiator gave no answer to run" in rows[1].error


@pytest.mark.usefixtures("outside")
def test_wrong_bytes_are_an_error_also_where_only_the_repeats_are_wrong() -> None:
    liar, lazy = (replace(WRITE, backend=name) for name in ("liar", "lazy"))
    for row in rows_of(liar, replace(liar, op="read"), lazy, replace(lazy, op="read")):
        assert (row.status, row.verified, row.gb_per_s) == ("error", False, None)
        side = "target" if row.case.op == "write" else "initiator"
        assert f"wrong bytes arrived at the {side}: region 0, block" in row.error


@pytest.mark.usefixtures("outside")
def test_what_may_be_read_only_so_often_is_offered_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_TEST_OFFERS", str(tmp_path / "offers"))
    (row,) = rows_of(replace(READ, backend="rationed"))
    assert (row.status, row.verified) == ("ok", True), row.error
    assert row.calls >= QUICK.min_calls
    assert sum(row.call_s) <= row.window_s * 1.001, "what lies between the rounds does not count"


@pytest.mark.fault("library_aborts")
@pytest.mark.usefixtures("outside")
def test_a_library_that_crashes_hangs_or_is_missing(fault: Seen) -> None:
    names = ("crashing", "lacking", "absent")
    cases = [*(replace(WRITE, backend=name) for name in names), WRITE]
    rows = timed(run_cases(cases, settings=QUICK), fault)
    rows += rows_of(replace(WRITE, backend="hanging"), settings=replace(QUICK, open_s=1.0))
    by_name = {row.case.backend: row for row in rows}
    assert "killed by signal 11" in by_name["crashing"].error
    assert any(outside_backends.LAST_WORDS in line for line in by_name["crashing"].log)
    assert "libfabric.so.1 does not load" in by_name["lacking"].error
    assert by_name["absent"].status == "skipped"
    assert by_name["absent"].error == "not installed: pip install absent"
    assert "did not get ready within 1 s" in by_name["hanging"].error
    assert by_name["tcp"].verified


@pytest.mark.usefixtures("outside")
def test_what_a_library_prints_is_no_answer() -> None:
    (row,) = rows_of(replace(WRITE, backend="chatty"))
    assert row.status == "ok"
    assert row.verified is None


@pytest.mark.fault("library_rubbish")
def test_a_worker_that_is_no_worker(fault: Seen) -> None:
    rows = timed(run_cases([WRITE], target=Side(prefix=("echo", "hello")), settings=QUICK), fault)
    assert "the target sent something unreadable: hello" in rows[0].error
    rows = rows_of(WRITE, target=Side(prefix=("false",)))
    assert "the target ended with exit code 1" in rows[0].error
    rows = rows_of(WRITE, target=Side(prefix=("no-such-command",)))
    assert "the target ended with exit code 127" in rows[0].error
    assert "no-such-command" in rows[0].log[-1]


def test_what_a_worker_said_before_it_ended_is_heard(tmp_path: Path) -> None:
    launcher = LocalLauncher("test", tmp_path / "logs", tmp_path / "specs")
    process = launcher.start(ProcessSpec("rubbish", ("echo", "hello")), piped=True)
    try:
        wait_until(lambda: process.has_exited)  # before anything is written to it
        with pytest.raises(WorkerError, match="the target sent something unreadable: hello"):
            WorkerHandle("target", process, launcher).introduce({"backend": "tcp"})
    finally:
        launcher.stop([process])


# The end
ENDLESSLY = """
from kvbench.core.transfers.records import Case
from kvbench.microbench.options import Settings
from kvbench.microbench.cases import run_cases
case = Case("shm", "shm", "write", 4096, 4)
try:
    for row in run_cases([case], settings=Settings(seconds=60, max_seconds=60),
                         on_stage=lambda index, case, stage: print(stage, flush=True)):
        print(row)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_coordinator(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESSLY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        for line in process.stdout:
            if line.strip() == "measuring":
                break
        left = workers(of=process.pid)
        assert len(left) == 2
        process.send_signal(number)
        rest = process.stdout.read()
        process.wait(10)
    if number == signal.SIGINT:
        assert "interrupted" in rest
    assert not still_living(left)


def test_a_closed_iterator_leaves_no_worker() -> None:
    rows = run_cases([WRITE, READ], settings=QUICK)
    assert next(rows).verified
    assert len(workers()) == 2
    rows.close()  # type: ignore[attr-defined]
    assert not workers()


@pytest.mark.usefixtures("outside")
def test_workers_that_never_start_are_not_waited_for_again_and_again() -> None:
    hanging = replace(WRITE, backend="hanging")
    rows = rows_of(
        hanging, hanging, hanging, replace(hanging, merged=True), settings=replace(QUICK, open_s=0.5)
    )
    assert [row.status for row in rows] == ["error"] * 4
    assert "did not get ready within 0.5 s" in rows[1].error
    assert "skipped, since the last" in rows[2].error
    assert "did not get ready within 0.5 s" in rows[3].error, "others are tried"


def test_every_nic_of_a_lab_is_seen_to_carry_its_share() -> None:
    try:
        lab = Lab.up(nics=2)
    except KvbenchError as error:
        pytest.skip(f"no lab here: {error}")
    with lab:
        ours, theirs = (Side(prefix=tuple(lab.prefix(x)), nics=tuple(lab.nics(x))) for x in "AB")
        settings = replace(QUICK, nic_gb_per_s=lab.line_rate_gb_per_s, lab=lab.describe(), call_s=5.0)
        case = replace(WRITE, nics=2, block_bytes=1 << 20)
        rows = list(run_cases([case, replace(case, op="read")], ours, theirs, settings))
    for row in rows:
        assert row.verified, row.error
        moved = row.calls * row.nbytes
        names = [nic["name"] for nic in ours.nics]
        assert row.nics_asked == names
        for side in ("initiator", "target"):
            for name in names:
                assert 0.4 * moved < row.nic_bytes[f"{side}:{name}"] < 0.7 * moved
        assert row.line_rate_gb_per_s == pytest.approx(2 * lab.line_rate_gb_per_s)
        assert row.lab == lab.describe()


# A fault → what the lab calls it.
NIC_FAULTS = {
    "nic_pulled": "pull", "nic_partitioned": "partition", "nic_reset": "reset", "nic_slowed": "slow",
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("key", [pytest.param(key, marks=pytest.mark.fault(key)) for key in NIC_FAULTS])
def test_a_nic_that_fails_while_it_is_measured(key: str, fault: Seen) -> None:
    kind = NIC_FAULTS[key]
    try:
        lab = Lab.up(nics=2)
    except KvbenchError as error:
        pytest.skip(f"no lab here: {error}")
    rows = []
    with lab:

        def on_stage(index: int, case: Case, stage: str) -> None:
            if index == 0 and stage == "measuring":
                place(lab, kind, 0, "20mbit" if kind == "slow" else "")
                fault.struck()

        ours, theirs = (Side(prefix=tuple(lab.prefix(x)), nics=tuple(lab.nics(x))) for x in "AB")
        settings = replace(QUICK, nic_gb_per_s=lab.line_rate_gb_per_s, lab=lab.describe(), call_s=3.0)
        case = replace(WRITE, nics=1, block_bytes=1 << 18)
        for row in run_cases([case, replace(case, op="read")], ours, theirs, settings, on_stage=on_stage):
            if not rows:
                after_s = fault.elapsed_s
                heal(lab, kind, 0)
            rows.append(row)
    if kind == "slow":
        assert rows[0].verified, rows[0].error
        assert rows[0].gb_per_s < rows[1].gb_per_s / 3
        fault.check(f"{rows[0].gb_per_s:.4f} GB/s", after_s)
    else:
        assert (rows[0].status, rows[0].gb_per_s) == ("error", None)
        fault.check(rows[0].error, after_s)
    assert rows[1].verified, rows[1].error
