"""``kvbench microbench`` as a user runs it: matrix told first, rows kept, reports, bad input, Ctrl-C."""

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Running, invoke, kvbench, the_run
from rich.console import Console
from sample_run import make_run as make_sweep
from sample_transfers import MOVERS

from kvbench.core.units import parse_counts
from kvbench.errors import InputError, LaunchError
from kvbench.hosts.nics import choice as nics
from kvbench.hosts.nics.listing import there
from kvbench.microbench.command import ask
from kvbench.microbench.hosts import MicrobenchPlaces
from kvbench.microbench.options import MicrobenchOptions
from kvbench.report import compare
from kvbench.report.report import write_report
from kvbench.transfer.parts.usable import movers

QUICK = ("--backend", "null,tcp", "--block-size", "4K,64K", "--batch-size", "4", "--seconds", "0.05")


def cases(**options: object) -> list[tuple[int, int]]:
    """(block bytes, batch) of each case that the options ask of tcp."""
    given = MicrobenchOptions(backend="tcp", op="write", **options)  # type: ignore[arg-type]
    found = ask(given, lambda: MOVERS, MicrobenchPlaces.of(given))
    return [(case.block_bytes, case.batch_size) for case in found.matrix.cases]


def test_sizes_and_batches_multiply_where_they_are_given() -> None:
    assert cases(block_size="4K,8K", batch_size="1..2") == [(4096, 1), (4096, 2), (8192, 1), (8192, 2)]
    assert cases(block_size="4K") == [(4096, 1)]
    assert len(cases()) == 4


@pytest.mark.parametrize(
    ("version", "shape", "descriptors"),
    [
        ("0.13.0", (96, 64, 2048, True), "merged into 96 descriptors"),
        ("0.24.0", (48, 128, 2048, False), "so 6144 descriptors"),
        ("0.33.0", (48, 64, 4096, True), "merged into 48 descriptors"),
    ],
)
def test_a_model_makes_the_descriptors_of_its_cache(
    version: str, shape: tuple[int, int, int, bool], descriptors: str
) -> None:
    """NIXL and Mooncake get the same ones; a store gets whole blocks in every version."""
    given = MicrobenchOptions(
        backend="nixl,mooncake,mooncake_store", model="qwen3-30b-a3b", input_len=1024, tp=8,
        vllm_version=version,
    )  # fmt: skip
    cases = ask(given, lambda: MOVERS, MicrobenchPlaces.of(given)).matrix.cases
    for case in cases:
        found = (case.regions, case.batch_size, case.block_bytes, case.merged)
        assert found == ((1, 64, 96 * 2048, False) if case.backend == "mooncake_store" else shape)
    assert {case.backend for case in cases} >= {"nixl", "mooncake"}
    assert any(descriptors in word for word in ask(given, lambda: MOVERS, MicrobenchPlaces.of(given)).words)


def test_all_ranks_start_at_once() -> None:
    given = MicrobenchOptions(backend="tcp", model="tiny", input_len=64, tp=2, all_ranks=True)
    assert {
        case.initiators for case in ask(given, lambda: MOVERS, MicrobenchPlaces.of(given)).matrix.cases
    } == {2}


@pytest.mark.parametrize("count", ["1", "1,2,4", "1..8"])
def test_a_lab_has_as_many_nics_as_are_asked_for(count: str) -> None:
    places = MicrobenchPlaces.of(MicrobenchOptions(lab=True, nics=count, rate="100mbit"))
    assert places.counts == parse_counts(count)
    assert places.describe() == f"{max(places.counts)} × 100mbit"
    assert places.nic_gb_per_s == pytest.approx(0.0125)


def test_every_backend_is_known_to_the_matrix() -> None:
    found = {mover.name: mover for mover in movers()}
    assert {"null", "memcpy", "shm", "tcp", "mooncake", "mooncake_store", "nixl", "nccl", "gloo"} <= set(
        found
    )
    assert not found["null"].nics
    assert found["memcpy"].loopback_only
    assert found["mooncake_store"].one_nic == ("tcp",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "pigeon"}, "unknown transfer backend 'pigeon'"),
        ({"block_size": "4 apples"}, "is not a size"),
        ({"threads": "none"}, "is not a whole number"),
        ({"op": "swap"}, "--op knows no 'swap'"),
        ({"memory": "tape"}, "--memory knows no 'tape'"),
        ({"model": "tiny", "block_size": "4K"}, "cannot both be given"),
        ({"model": "llama-3.1-70b", "input_len": 10_000_000}, "needs .* GB of buffers"),
        ({"lab": True, "peer_prefix": "ssh b"}, "names another one"),
        ({"lab": True, "lab_name": "kv"}, "give one of the two"),
        ({"lab": True, "rate": "quick"}, "quick"),
        ({"peer_prefix": "ssh b"}, "the other machine has to reach this one"),
        ({"peer_host": "10.0.0.2"}, "speak of another machine"),
        ({"backend": "tcp", "nics": "63"}, "63 NICs requested"),
        ({"lab_name": "nowhere"}, "there is no lab 'nowhere'"),
        ({"backend": "tcp", "block_size": "64G"}, "its buffers need"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(given: dict[str, Any], message: str) -> None:
    options = MicrobenchOptions(**given)
    with pytest.raises(InputError, match=message):
        ask(options, lambda: MOVERS, MicrobenchPlaces.of(options))


def test_bad_input_ends_with_its_own_exit_code_and_no_folder(tmp_path: Path) -> None:
    done = invoke("microbench", "--model", "qwen3-8b", "--input-len", "99999999", "--output", str(tmp_path))
    assert done.status == 2, done.text
    assert "the largest --input-len that fits is" in done.err
    assert not list(tmp_path.iterdir())


def test_a_run_of_requests_is_no_run_to_compare_with(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, ("tcp",), (512,))
    done = invoke("microbench", *QUICK, "--compare", str(sweep), "--output", str(tmp_path / "results"))
    assert done.status == 2
    assert "is not a microbenchmark" in done.err


def test_a_dry_run_prints_the_matrix_and_the_time_and_starts_nothing(tmp_path: Path) -> None:
    done = invoke("microbench", *QUICK, "--dry-run", "--output", str(tmp_path)).succeeded()
    assert "8 cases, 2 pairs of workers, 0.05 s each: about" in done.out
    assert "tcp             tcp     read   64 KiB × 4" in done.out
    assert not list(tmp_path.iterdir())


def test_a_run_is_measured_stored_reported_and_compared(tmp_path: Path) -> None:
    kvbench("microbench", *QUICK, "--output", str(tmp_path)).succeeded()
    run = the_run(tmp_path)
    rows = run.transfer_records()
    assert run.manifest["status"] == "complete"
    assert [row.status for row in rows] == ["ok"] * 8
    for row in rows:
        assert row.verified is (True if row.case.backend == "tcp" else None)
        assert row.logical_bytes == row.nbytes == 4 * row.case.block_bytes
        assert row.calls == len(row.call_s) >= 20
    assert (run.path / "report.md").is_file()
    assert json.loads((run.path / "tables" / "transfer_model.json").read_text())["run"] == run.run_id
    again = kvbench("microbench", *QUICK, "--compare", str(run.path), "--output", str(tmp_path / "second"))
    assert again.status == 0, again.text
    assert f"compared with {run.run_id}" in again.out
    assert "tcp, write 64 KiB × 4:" in again.out
    second = the_run(tmp_path / "second")
    table = json.loads((second.path / "tables" / "comparison.json").read_text())
    assert table["runs"] == [run.run_id, second.run_id]
    assert len(table["rows"]) == 8
    assert all(
        row["before_gb_per_s"] and row["after_gb_per_s"] for row in table["rows"] if row["backend"] == "tcp"
    )
    as_csv = second.path / "tables" / "comparison.csv"
    printed = io.StringIO()
    compare.command([run.path, second.path], compare.CompareOptions(format="csv"), Console(file=printed))
    assert printed.getvalue() == as_csv.read_text()
    as_csv.unlink()
    assert as_csv in write_report(second.path, ("csv",))
    assert printed.getvalue() == as_csv.read_text()
    assert not (run.path / "tables" / "comparison.csv").exists()


def test_the_targets_may_stand_behind_a_prefix(tmp_path: Path) -> None:
    elsewhere = (
        "--host", "127.0.0.1", "--peer-prefix", "env KVBENCH_ELSEWHERE=1", "--peer-host", "127.0.0.1",
    )  # fmt: skip
    quick = ("--backend", "tcp", "--block-size", "64K", "--op", "read", "--seconds", "0.05")
    done = kvbench("microbench", *quick, *elsewhere, "--output", str(tmp_path)).succeeded()
    (row,) = the_run(tmp_path).transfer_records()
    assert row.verified
    assert "targets at 127.0.0.1 (env KVBENCH_ELSEWHERE=1)" in done.out


def test_the_nics_behind_a_prefix_are_listed_and_trouble_is_said() -> None:
    here = nics.find("tcp")
    found = there(["env"], sys.executable, "tcp")
    assert {nic.name for nic in found.usable} == {nic.name for nic in here.usable}
    assert found.left_out == here.left_out
    with pytest.raises(LaunchError, match="exit code 1"):
        there(["false"], sys.executable, "tcp")
    with pytest.raises(LaunchError, match="cannot be started"):
        there(["/nowhere/at/all"], sys.executable, "tcp")


def test_ctrl_c_keeps_the_rows_so_far(tmp_path: Path) -> None:
    words = ("--backend", "null", "--block-size", "4K..512M", "--seconds", "0.5", "--output", str(tmp_path))
    running = Running("microbench", *words)
    try:
        running.wait_for("2/36")
        running.signal(signal.SIGINT)
        done = running.finish()
    finally:
        running.kill()
    assert done.status == 130
    assert "of 36 cases are kept" in done.out
    run = the_run(tmp_path)
    assert run.manifest["status"] == "interrupted"
    assert 2 <= len(run.transfer_records()) < 36
    assert (run.path / "report.md").is_file()
