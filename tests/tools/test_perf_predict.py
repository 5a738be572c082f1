"""Predictions between two loads, of what follows the model exactly, and of files that others write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import InputError
from tools.perf_predict import (
    ClosedLoop,
    Measured,
    errors_of,
    interpolate,
    main,
    predicted,
    read_rows,
    table_rows,
)

RECORDED = Path(__file__).parents[1] / "recorded" / "llmservingsim"
LOW, HIGH = Measured(4, 200.0, 8.0), Measured(64, 900.0, 21.0)
HEAD = "id,backend,mode,isl,osl,batch_size,silicon_data_source,silicon_ttft_ms,silicon_tpot_ms,tp_size"

times = st.floats(0.5, 5000.0)
loads = st.builds(Measured, st.floats(1, 64), times, times)


@given(loads, loads, st.integers(16, 32768), st.integers(2, 8192), st.booleans(), st.floats(0, 1))
def test_what_is_between_stays_between(
    low: Measured, high: Measured, input_len: int, output_len: int, apart: bool, share: float
) -> None:
    high = replace(high, concurrency=high.concurrency + 65)
    loop = ClosedLoop(low, high, input_len, output_len, apart)
    between = low.concurrency + share * (high.concurrency - low.concurrency)
    found = loop.tpot_ms(between)
    least, most = sorted((low.tpot_ms, high.tpot_ms))
    assert least <= found <= most
    assert loop.ttft_ms(between) == pytest.approx(interpolate(low, high, between, "ttft_ms"))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("input_len", [128, 1024, 8192])
def test_the_two_loads_are_met(input_len: int, apart: bool) -> None:
    loop = ClosedLoop(LOW, HIGH, input_len, 1024, apart)
    for end in (LOW, HIGH):
        assert loop.tpot_ms(end.concurrency) == pytest.approx(end.tpot_ms, rel=1e-3)


def test_a_step_that_grows_less_than_its_batch_bends_the_curve_up() -> None:
    loop = ClosedLoop(LOW, HIGH, 1024, 1024)
    assert interpolate(LOW, HIGH, 16, "tpot_ms") < loop.tpot_ms(16) < HIGH.tpot_ms


def test_only_what_lies_between_is_predicted() -> None:
    with pytest.raises(ValueError, match="not between"):
        ClosedLoop(LOW, HIGH, 1024, 1024).tpot_ms(65)
    with pytest.raises(ValueError, match="two loads"):
        ClosedLoop(HIGH, LOW, 1024, 1024)


def row(concurrency: float, ttft: object, tpot: object, *, mode: str = "agg", tp: int = 1) -> str:
    source = f"dump; silicon_concurrency={concurrency:g}; measured=x"
    return f"r,vllm,{mode},1024,512,7,{source},{ttft},{tpot},{tp}"


def test_rows_are_joined_by_their_settings_and_odd_ones_are_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [row(c, 100 + c, 8 + 0.2 * c) for c in (64, 4, 16)]
    rows += [row(16, 120, 13.2), row(8, "", 9), row(32, 90, -1)]  # a repeat, no TTFT, no time
    rows += [row(c, 100, 10, tp=2) for c in (4, 8)]  # too few
    rows += [row(c, 100 * c, 10 + c, mode="disagg") for c in (4, 8, 16, 32)]
    path.write_text("\n".join([HEAD, *rows]))
    found, notes = read_rows(path)
    assert notes == [
        "2 rows have no figure, or one that is not above 0",
        "2 loads are of configurations with fewer than three",
    ]
    together, apart = found
    assert [load.concurrency for load in together.loads] == [4, 16, 64]
    assert together.loads[1].tpot_ms == pytest.approx((11.2 + 13.2) / 2)
    assert (together.kind, apart.kind) == ("aggregated, vllm", "P/D, workers not named")
    errors = errors_of(found)
    assert [error.kind for error in errors] == [together.kind, apart.kind, apart.kind]
    assert all(error.tpot_line == pytest.approx(0, abs=1e-9) for error in errors[1:])
    assert sum(int(line[1]) for half in (0, 1) for line in table_rows(errors, half)) == 3


def test_what_has_no_such_columns_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no columns backend, mode"):
        read_rows(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot read"):
        read_rows(path)


def test_the_command_tells_what_it_finds_and_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    (tmp_path / "rows.csv").write_text("\n".join([HEAD, *(row(c, 100 + c, 8 + c) for c in (1, 2, 4))]))
    (tmp_path / "other.csv").write_text("a\n1\n")
    assert main([str(tmp_path)]) == 0
    assert "has no columns" in " ".join(capsys.readouterr().out.split())
    # Twenty requests of a recorded run: a third of them is too little, most of them are not.
    assert main([str(RECORDED)]) == 1
    assert "cannot fit 7 coefficients" in " ".join(capsys.readouterr().out.split())
    assert main([str(RECORDED), "--share", "0.75"]) == 0
    assert "TPOT P99" in capsys.readouterr().out


def test_a_recorded_run_is_predicted_beside_what_its_authors_say(tmp_path: Path) -> None:
    for path in RECORDED.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "summary.txt").write_text("TTFT Mean   7097.2   6815.7   -4.0%\nTTFT Median 1 1 +9%\n")
    found = predicted(tmp_path, 0.75)
    assert found.fitted == 15
    assert found.theirs == {"TTFT Mean": pytest.approx(-0.04)}
    assert all(abs(error) < 1.0 for error in [*found.whole.values(), *found.rest.values()])
    assert found.whole["TPOT Mean"] == pytest.approx(0.0, abs=0.1)
