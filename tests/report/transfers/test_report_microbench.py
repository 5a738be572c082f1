"""The report of a microbenchmark: rebuilt from its raw files, readable meanwhile, says what rows say."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from commands import invoke
from run_files import printed
from sample_run import make_run as make_sweep
from sample_transfers import MOVERS, make_record, make_rows, make_run

from kvbench.core.transfers.cases import Axes, build
from kvbench.core.transfers.model import fit_all
from kvbench.core.transfers.records import Case, TransferRecord, TransferWarning
from kvbench.engines.parts.vllm_options import VllmOptions
from kvbench.errors import NewerSchemaError, StoreError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.report.findings.transfers import answers
from kvbench.report.report import write_report
from kvbench.report.tables.transfers import HEADER, build_cases, flat_row
from kvbench.results.parquet import TRANSFERS, read_transfers
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import RunInfo, RunStore
from kvbench.sweep.calibration import surroundings

NICS = Axes(backends=("tcp", "nixl", "memcpy"), nics=(1, 2, 4, 8), sizes=((1 << 20, 8), (16 << 20, 1)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return load_run(make_run(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return load_run(make_run(tmp_path_factory.mktemp("lab"), NICS, lab="8 × 1gbit"))


def test_rows_come_back_as_they_were_stored(plain: RunFolder) -> None:
    stored = make_rows(build(Axes(), MOVERS))
    found = plain.transfer_records()
    assert [record.case for record in found] == [record.case for record in stored]
    for one, other in zip(found, stored, strict=True):
        assert one.call_s == pytest.approx(other.call_s, rel=1e-6)
        assert replace(one, call_s=[]) == replace(other, call_s=[])


def test_a_run_is_whole_after_each_row_and_says_when_it_was_cut_off(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, "microbench", b"", {}, {}, RunInfo(kind="microbench"))
    for count, record in enumerate(make_rows(build(Axes(), MOVERS))[:5], start=1):
        store.add_transfer(record)
        assert len(read_transfers(store.path)) == count
    (store.path / f".{TRANSFERS}.1.abcd.tmp").write_bytes(b"half a fi")
    store.finish("interrupted", "interrupted after 5 of 60 cases")
    run = load_run(store.path)
    write_report(run.path)
    assert "Status of the run: interrupted" in (run.path / "report.md").read_text()


def test_a_spoilt_or_newer_file_is_said_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path, Axes(backends=("tcp",), ops=("read",)))
    monkeypatch.setattr("kvbench.results.parquet.TRANSFER_SCHEMA", 0)
    with pytest.raises(NewerSchemaError, match="schema 1"):
        read_transfers(path)
    (path / TRANSFERS).write_bytes(b"PAR1 and nothing more")
    with pytest.raises(StoreError, match="cannot be read"):
        read_transfers(path)


def test_everything_derived_is_rebuilt_byte_for_byte(plain: RunFolder) -> None:
    names = sorted(str(path.relative_to(plain.path)) for path in write_report(plain.path))
    first = {name: (plain.path / name).read_bytes() for name in names}
    assert {
        "report.md",
        "tables/transfers.csv",
        "tables/transfer_model.json",
        "figures/bandwidth.svg",
    } <= set(names)
    for name in names:
        (plain.path / name).unlink()
    done = invoke("report", str(plain.path)).succeeded()
    assert {name: (plain.path / name).read_bytes() for name in names} == first
    assert "mooncake over tcp, read 64 KiB × 32: the call did not end within 5 s" in done.out


def test_pictures_are_there_and_not_blank(lab: RunFolder) -> None:
    pictures = [path for path in write_report(lab.path, ("png",)) if path.suffix == ".png"]
    assert {path.stem for path in pictures} == {"bandwidth", "nic_scaling", "call_time"}
    for path in pictures:
        pixels = matplotlib.image.imread(path)
        assert pixels[..., :3].std() > 0.03
        assert pixels.shape[1] >= 1200
    svg = next(
        path for path in write_report(lab.path, ("svg",)) if path.name == "nic_scaling.svg"
    ).read_text()
    for word in ("line rate × NICs", "LAB: 8 × 1gbit", "tcp", "nixl", "write", "read"):
        assert word in svg


def test_a_picture_without_data_is_not_drawn_and_an_old_one_goes(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, Axes(backends=("tcp",), sizes=((4096, 1),))))
    left = run.path / "figures" / "nic_scaling.png"
    left.parent.mkdir()
    left.write_bytes(b"old")
    assert not [path for path in write_report(run.path) if path.suffix == ".png"]
    assert not left.exists()


def test_the_terminal_tells_rows_limits_trouble_and_answers(plain: RunFolder) -> None:
    text = printed(plain)
    assert all(word in text for word in HEADER)
    assert max(len(line) for line in text.splitlines() if not line.startswith("files:")) <= 100
    assert "nccl: not run here: no GPU" in text
    assert "nixl over rdma: not run here: no RDMA device" in text
    assert "1. load average 3.1 on 2 cores → stop other work" in text
    assert "FAILED" in text
    assert "large writes (16 MiB × 1), GB/s: tcp" in text
    assert "small reads (4 KiB × 1), median: tcp 4" in text
    assert "1 of 56 cases failed" in text


def test_a_lab_is_marked_and_its_nics_are_compared_with_the_line(lab: RunFolder) -> None:
    text = printed(lab)
    assert "LAB 8 × 1gbit" in text
    assert "tcp write (16 MiB × 1): 1, 2, 4, 8 NICs give 0.9" in text
    assert "× one NIC's line rate" in " ".join(text.split())
    assert "(lab: 8 × 1gbit)" in (write_report(lab.path, ("md",))[-1]).read_text().splitlines()[0]


def test_nics_that_bring_nothing_are_named() -> None:
    case = Case("tcp", "tcp", "write", 16 << 20, 1, nics=1)
    rows = [make_record(replace(case, nics=count)) for count in (1, 2, 4)]
    rows[2].gb_per_s = rows[1].gb_per_s
    (line,) = [line for line in answers(rows) if "NICs give" in line]
    assert line.endswith("4 gain nothing over 2")


def test_bytes_that_went_elsewhere_and_wrong_ones_are_told() -> None:
    case = Case("nixl", "tcp", "write", 16 << 20, 1, nics=2)
    lost = make_record(case)
    lost.warnings = [TransferWarning("bytes_elsewhere", "the NICs carried 3 % of the bytes")]
    wrong = TransferRecord(replace(case, op="read"), "error", "wrong bytes arrived", verified=False)
    text = " ".join(answers([lost, wrong]))
    assert "took another path than requested in 1 case(s)" in text
    assert "WRONG DATA in 1 case(s), the first: nixl over tcp, read 16 MiB × 1, 2 NICs" in text


def test_a_note_of_every_row_marks_none() -> None:
    rows = [make_record(case) for case in build(Axes(backends=("tcp",)), MOVERS).cases]
    for row in rows:
        row.warnings = [TransferWarning("machine_busy", "the load average was 9", "wait")]
    rows[0].warnings.append(TransferWarning("few_repeats", "3 calls only", "--seconds"))
    table = build_cases(rows)
    assert table.footnotes == ("every row: the load average was 9 → wait", "1. 3 calls only → --seconds")
    assert table.table.marks[:8] == [(1,), *[()] * 7]


def test_notes_that_differ_in_numbers_only_are_one_with_the_range() -> None:
    rows = [make_record(case) for case in build(Axes(backends=("tcp",)), MOVERS).cases]
    for row, text in zip(
        rows, ("only 9 calls in 5.06 s", "only 18 calls in 5.05 s", "nic3 idle"), strict=False
    ):
        row.warnings = [TransferWarning("few_repeats", text)]
    table = build_cases(rows)
    assert table.footnotes == ("1. only 9–18 calls in 5.05–5.06 s", "2. nic3 idle")
    assert table.table.marks[:3] == [(1,), (1,), (2,)]


def test_equal_causes_are_told_once() -> None:
    cases = build(Axes(backends=("tcp",)), MOVERS).cases
    rows = [TransferRecord(case, "error", "the peer is gone", ["E1121 connection reset"]) for case in cases]
    (line,) = build_cases(rows).errors
    assert line == "tcp, write 4 KiB × 1 and 7 more: the peer is gone (library: E1121 connection reset)"


def test_tables_for_programs(plain: RunFolder) -> None:
    write_report(plain.path)
    rows = list(csv.DictReader((plain.path / "tables" / "transfers.csv").read_text().splitlines()))
    records = plain.transfer_records()
    assert len(rows) == len(records)
    assert list(rows[0]) == list(flat_row(records[0], records))
    summary = json.loads((plain.path / "tables" / "transfers.json").read_text())
    assert summary["rows"][-1]["backend"] == "mooncake_store"
    model = json.loads((plain.path / "tables" / "transfer_model.json").read_text())
    assert model["run"] == plain.run_id
    assert {entry["backend"] for entry in model["models"]} >= {"tcp", "nixl", "mooncake"}


def test_two_runs_beside_each_other(plain: RunFolder, tmp_path: Path) -> None:
    faster = load_run(make_run(tmp_path, speed=2.0))
    text = printed(faster, before=plain)
    for words in (
        f"compared with {plain.run_id}",
        "tcp, write 4 KiB × 1: 2.0",
        "faster",
        "failed in the other run",
    ):
        assert words in text


def test_a_simulation_takes_its_links_from_the_fitted_transfers(plain: RunFolder) -> None:
    chosen = resolve(CliOptions("quickstart"))[0]
    nixl, mooncake, other = (
        surroundings(chosen, name, name, plain) for name in ("nixl", "mooncake", "lmcache")
    )
    models = {(model.backend, model.op): model for model in fit_all(plain.transfer_records())}
    pushed, pulled = models["mooncake", "write"], models["nixl", "read"]
    regions = chosen.model.shape.regions()
    assert mooncake.link.latency_ms == pytest.approx(1e3 * pushed.seconds(0, regions), abs=1e-3)
    assert mooncake.link.gb_per_s == pytest.approx(pushed.gb_per_s, rel=1e-3)
    # NIXL merges neighbouring blocks as Mooncake's connector does, so that each region is one descriptor.
    assert nixl.link.latency_ms == pytest.approx(1e3 * pulled.seconds(0, regions), abs=1e-3)
    assert nixl.link.gb_per_s == pytest.approx(pulled.gb_per_s, rel=1e-3)
    assert nixl.overheads == surroundings(chosen, "nixl", "nixl").overheads
    assert plain.run_id in nixl.source
    assert "lmcache is not in the run" in other.source


@pytest.mark.parametrize(
    ("version", "regions", "merged"), [("0.13.0", 8, True), ("0.24.0", 8, False), ("0.33.0", 4, True)]
)
def test_a_link_is_of_the_vllm_version(plain: RunFolder, version: str, regions: int, merged: bool) -> None:
    """Halves of blocks don't merge, so that each block costs descriptors: K and V in each of 4 layers."""
    chosen = resolve(CliOptions("quickstart"))[0]
    options = VllmOptions(model="tiny", version=version)
    deployment = chosen.deployment.model_copy(update={"engine_options": options})
    link = surroundings(chosen.model_copy(update={"deployment": deployment}), "nixl", "nixl", plain).link
    models = {(model.backend, model.op): model for model in fit_all(plain.transfer_records())}
    pulled = models["nixl", "read"]
    assert link.latency_ms == pytest.approx(1e3 * pulled.seconds(0, regions if merged else 0), abs=1e-3)
    rate = pulled.gb_per_s or 0.0
    assert link.gb_per_s == pytest.approx(rate, rel=1e-3) if merged else link.gb_per_s < rate


def test_a_run_of_requests_shares_no_table_with_one_of_transfers(plain: RunFolder, tmp_path: Path) -> None:
    done = invoke("report", str(plain.path), str(make_sweep(tmp_path, ("tcp",), (512,)))).failed(2)
    assert "no table in common" in done.err
