"""Tables and reports: every number from the raw files, nothing invented, nothing left unsaid."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from run_files import edit_json, printed
from sample_run import ENVIRONMENT, OUTPUT_LEN, PLAN, SCENARIO, capacity, make_requests, make_run, make_trial

from kvbench.core.findings.rate_change import AHEAD
from kvbench.core.findings.setups import CACHE_BLIND, cache_blind
from kvbench.core.records import Cell, Finding
from kvbench.errors import InputError, NewerSchemaError
from kvbench.report.findings.ahead import answer_text, lead_text, limits_text, rate_pairs
from kvbench.report.findings.findings import folded, gate_warnings
from kvbench.report.findings.load_rows import searched
from kvbench.report.findings.notes import ahead, notes
from kvbench.report.report import FORMATS, command, render_terminal, write_report
from kvbench.report.sections.build import build
from kvbench.report.sections.requests import by_input_len
from kvbench.report.tables.result import Answer, Row, interval_word, read_answer, summary_table
from kvbench.report.tables.router_cost import router_costs
from kvbench.report.tables.table import number, percent
from kvbench.report.tables.trial_values import VALUE_COLUMNS
from kvbench.results.provenance import EMULATED_WHY, PACED, differences, mark_of
from kvbench.results.run import CellResult, RunFolder, load_run
from kvbench.results.store import RunInfo, RunStore


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return load_run(make_run(tmp_path_factory.mktemp("full"), input_lens=(512, 2048)))


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return load_run(make_run(tmp_path_factory.mktemp("special"), input_lens=(512, 2048), special=True))


def row(name: str, lower: float | None, upper: float | None, outcome: str = "found") -> Row:
    rate = None if outcome == "none" else lower
    ends = None if outcome == "none" else lower, upper
    answer = Answer(outcome, rate, *ends, level=0.9)  # type: ignore[arg-type]
    return Row("run", Cell(name, 1024, 16), answer, dict.fromkeys(VALUE_COLUMNS), name=name)


# --- no winner ----------------------------------------------------------------------------------
def plan_of_sessions(routing: str | None, engines: int = 2, sessions: bool = True) -> dict[str, Any]:
    """plan.json as far as routing goes; without ``routing`` as written before there was a choice."""
    deployment = {} if routing is None else {"routing": routing}
    workload = {"sessions": {"source": "shape"} if sessions else None}
    instances = [{"name": f"aggregated-{number}"} for number in range(engines)]
    pair = [{"name": "prefill-0"}, {"name": "decode-0"}]
    return {
        "scenario": {"deployment": deployment, "workload": workload},
        "deployments": [{"label": "lone", "instances": instances}, {"label": "pair", "instances": pair}],
    }


def test_only_a_choice_between_engines_that_ignores_sessions_is_cache_blind() -> None:
    assert cache_blind(plan_of_sessions("round_robin"), "lone") == CACHE_BLIND
    assert cache_blind(plan_of_sessions(None), "lone") == CACHE_BLIND
    assert not cache_blind(plan_of_sessions("session"), "lone")
    assert not cache_blind(plan_of_sessions("round_robin"), "pair"), "one P and one D: no choice"
    assert not cache_blind(plan_of_sessions("round_robin", engines=1), "lone")
    assert not cache_blind(plan_of_sessions("round_robin", sessions=False), "lone")
    assert not cache_blind({}, "lone")


def test_nothing_names_a_winner_over_a_cache_blind_rate() -> None:
    rows = [row("nixl", 29.0, 31.0), replace(row("aggregated", 22.0, 24.0), no_winner=CACHE_BLIND)]
    (pair,) = rate_pairs(rows)
    assert (pair.ratio, pair.low, pair.high) == (None, None, None)
    assert pair.text() == f"no winner: aggregated: {CACHE_BLIND}"
    assert ahead(rows) == [f"1,024 in: {pair.text()}"]
    (statement,) = searched(rows)
    assert (statement.kind, statement.rule) == ("untold", "no_winner")
    assert CACHE_BLIND in statement.text
    assert answer_text(rows) == f"At 1,024 tokens in, {pair.text()}."
    both = [*rows, replace(row("tcp", 20.0, 21.0), no_winner=CACHE_BLIND)]
    (block,) = folded(searched(both))
    assert block.table is not None
    assert all("no winner" in cells[2] for cells in block.table.cells)


# --- rows ---------------------------------------------------------------------------------------
def test_a_row_shows_the_figures_of_the_trial_that_confirmed_its_rate(full: RunFolder) -> None:
    rows = summary_table(full)
    assert [(r.cell.input_len, r.cell.connector) for r in rows] == [
        (length, name) for length in (512, 2048) for name in ("aggregated", "mooncake", "nixl")
    ]
    for row, result in zip(rows, full.cells, strict=True):
        assert result.answer is not None
        trial = next(trial for trial in full.trials if trial.trial_id == result.confirmed_by)
        assert row.trial_id == trial.trial_id
        assert row.confirmed
        assert trial.request_rate == row.answer.max_request_rate == result.answer["max_request_rate"]
        assert row.answer.upper == result.answer["upper"]
        assert row.values["ttft_ms_p99"] == trial.summary["ttft_ms"]["p99"]
        assert row.values["achieved_request_rate"] == trial.summary["achieved_rate"]
        assert row.values["kv_bytes_per_request"] == trial.engine["kv_bytes_per_request"]
        assert row.trials == len(full.trials_of(row.cell))
        assert (row.findings, row.labels) == ({"invalid": 1}, ("emulated",))


def test_every_column_is_filled_by_a_real_trial(full: RunFolder) -> None:
    filled = {name for row in summary_table(full) for name, value in row.values.items() if value is not None}
    assert filled == set(VALUE_COLUMNS) - {"gpu_watts"}  # no GPU was in it


def test_outcomes_that_are_no_rate_are_said_and_not_invented(special: RunFolder) -> None:
    rows = {(r.cell.connector, r.cell.input_len): r for r in summary_table(special)}
    refused, none, censored = rows["mooncake", 512], rows["aggregated", 2048], rows["mooncake", 2048]
    assert refused.outcome == "refused"
    assert refused.rate_text().startswith("refused: corrupt: 1 of 4")
    assert (set(refused.values.values()), none.outcome) == ({None}, "none")
    assert none.answer.text() == f"none (< {number(none.answer.upper)})"
    assert (none.trial_id, set(none.values.values()), censored.outcome) == (None, {None}, "at_least")
    assert censored.answer.text().startswith("≥ ")
    assert censored.flat()["censored"] is True


def test_without_a_confirming_trial_the_highest_met_one_supports_the_answer(full: RunFolder) -> None:
    cells = [replace(result, confirmed_by=None) for result in full.cells]
    rows = summary_table(replace(full, cells=cells))
    for row in rows:
        met = [t for t in full.trials_of(row.cell) if t.verdict == "met"]
        assert row.trial_id == max(met, key=lambda t: (t.request_rate, t.trial_id)).trial_id


def test_a_cell_that_was_cut_off_shows_what_is_known(full: RunFolder) -> None:
    cell = full.cells[0].cell
    for row in summary_table(replace(full, cells=full.cells[1:], trials=full.trials_of(cell)[:2])):
        if row.cell == cell:
            assert row.outcome == "unfinished"
            assert row.answer.text() == f"{number(row.answer.lower)} [{number(row.answer.lower)}, …]"


def test_one_rate_is_not_called_a_maximum(tmp_path: Path) -> None:
    cell = Cell("tcp", 1024, 16)
    with RunStore.create(tmp_path, "one", b"", {}, {}, RunInfo(kind="bench")) as store:
        requests = make_requests(cell, capacity(cell) * 1.5, 1)
        store.add_trial(make_trial(cell, capacity(cell) * 1.5, 1, requests), requests)
        store.put_cell(CellResult(cell, "done"))
    run = load_run(store.path)
    (only,) = summary_table(run)
    assert only.outcome == "one_rate"
    assert only.answer.text() == f"at {number(capacity(cell) * 1.5)}"
    assert only.values["ttft_ms_p50"] is not None
    assert "missed" in printed(run)
    names = {path.name for path in write_report(store.path)}
    assert "distribution.svg" in names
    assert not names & {"latency.svg", "max_request_rate.svg"}
    assert "max_request_rate.svg" not in (store.path / "report.md").read_text()


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"), (0.0, "0"), (1e-9, "1e-09"), (0.01234, "0.0123"), (1.2345, "1.23"), (12.345, "12.3"),
    (123.4, "123"), (1234.5, "1234"), (math.inf, "inf"),
])  # fmt: skip
def test_numbers_as_text(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (1.0, "100"), (0.9999, "99.9"), (0.95, "95.0"), (0.0, "0.0")]
)
def test_a_share_is_100_only_when_it_is_all(value: float | None, text: str) -> None:
    assert percent(value) == text


# --- who is ahead --------------------------------------------------------------------------------
def test_rates_are_ordered_only_where_that_is_almost_sure() -> None:
    rows = [row("a", 10.0, 10.5), row("b", 12.0, 12.6), row("c", 12.3, 12.8)]
    pairs = {(pair.ahead, pair.behind): pair for pair in rate_pairs(rows)}
    assert (pairs["c", "b"].ratio, pairs["b", "a"].sure) == (None, pytest.approx(1.0, abs=0.001))
    # ln(12.6 · 12 / 10.5 / 10) / 2 ± what √2 log-normals with 90 % in a range of 1.05 spread.
    low, high = (1.2 * 1.05 ** (sign * math.sqrt(2) / 2) for sign in (-1, 1))
    assert (pairs["b", "a"].ratio, pairs["b", "a"].low) == (1.2, pytest.approx(low, rel=0.002))
    assert pairs["b", "a"].high == pytest.approx(high, rel=0.002)
    assert ahead(rows) == [
        "1,024 in: c 1.23× a [1.19, 1.26]; b 1.20× a [1.16, 1.24]; no significant difference: c and b"
    ]


def test_an_interval_above_one_never_seems_to_contain_it() -> None:
    found = ahead([row("a", 10.0, 10.5), row("b", 10.372, 10.372 * 1.05)])
    assert found == ["1,024 in: b 1.04× a [>1.00, 1.07]"]


def test_rates_of_two_lengths_are_not_put_into_one_span() -> None:
    short = [row("a", 10.0, 10.5), row("b", 10.1, 10.6)]
    long = [
        replace(entry, cell=replace(entry.cell, input_len=8192))
        for entry in (row("a", 2.0, 3.0), row("b", 2.1, 3.1))
    ]
    assert answer_text([*short, *long]) == (
        "At 1,024 and 8,192 tokens in, no significant difference between b and a "
        "(10.0 to 10.1; 2.00 to 2.10 req/s)."
    )


def test_the_posterior_of_a_search_is_what_decides_where_it_is_kept() -> None:
    wide, narrow = row("a", 10.0, 12.0), row("b", 11.0, 13.0)
    assert rate_pairs([wide, narrow])[0].ratio is None
    rates = [
        (row_, [low + place * 0.02 for place in range(41)]) for row_, low in ((wide, 10.0), (narrow, 11.5))
    ]
    kept = [replace(row_, answer=replace(row_.answer, posterior=tuple(them))) for row_, them in rates]
    (pair,) = rate_pairs(kept)
    assert (pair.ahead, pair.sure) == ("b", 1.0)
    assert pair.high == pytest.approx(12.3 / 10.0, rel=0.05)


def test_a_search_that_its_trials_ended_takes_part_with_its_posterior() -> None:
    rows = [row("a", 10.0, 10.5), row("b", 11.0, 13.0)]
    ended = replace(rows[1].answer, converged=False, exhausted=True)
    for low, leader in ((11.0, "b"), (10.0, None)):
        answer = replace(ended, posterior=tuple(low + place * 0.05 for place in range(41)))
        (pair,) = rate_pairs([rows[0], replace(rows[1], answer=answer)])
        assert (pair.ratio and pair.ahead) == leader
        assert pair.unconverged == (() if leader else ("b",))
    (pair,) = rate_pairs([rows[0], replace(rows[1], answer=replace(ended, exhausted=False))])
    assert (pair.ratio, pair.unconverged) == (None, ("b",))


def test_a_search_of_invalid_trials_takes_no_part() -> None:
    rows = [row("a", 10.0, 10.5), row("b", 20.0, 20.5), row("c", 40.0, 40.5)]
    rows = [rows[0], *(replace(row, answer=replace(row.answer, converged=False)) for row in rows[1:])]
    assert ahead(rows) == ["1,024 in: inconclusive: the searches of c and b did not converge"]
    assert all(pair.ratio is None for pair in rate_pairs(rows))
    table = by_input_len(rows)
    assert table.cells[0][-1].count("inconclusive: the search") == len(rate_pairs(rows))
    assert lead_text(rows) == (
        "At 1,024 tokens in, inconclusive: the searches of c and b did not converge (10.0 to 40.0 req/s)."
    )
    two = [rows[0], replace(rows[1], answer=replace(rows[1].answer, converged=True)), rows[2]]
    assert lead_text(two).endswith(
        "b is ahead: 2.00× a [1.92, 2.03], confidence 99 % (inconclusive: the search of c did not converge)."
    )
    (statement,) = searched(rows)
    assert (statement.kind, statement.rule) == ("untold", "unconverged")
    assert ahead(rows[:2]) == ["1,024 in: inconclusive: the search of b did not converge"]
    given = {"max_request_rate": None, "upper": 2.0, "status": "exhausted"}
    none = replace(rows[1], answer=read_answer(given))
    assert ahead([rows[0], none]) == ["1,024 in: inconclusive: the search of b did not converge"]


def test_the_head_says_how_probable_the_interval_is() -> None:
    given: dict[str, Any] = {"max_request_rate": 2.0, "lower": 1.9, "upper": 2.1, "status": "converged"}
    known, unknown = read_answer({**given, "level": 0.9}), read_answer({**given, "level": None})
    assert [known.level, unknown.level, read_answer(given).level] == [0.9, None, None]
    assert interval_word([known, Answer("at_least", 3.0, 3.0)]) == "[90 %]"
    assert interval_word([known, unknown]) == interval_word([]) == "[interval]"
    assert read_answer({**given, "posterior": [1.9, "x"]}).posterior == ()


def test_open_ended_and_missing_rates_are_compared_honestly() -> None:
    assert (
        rate_pairs([row("a", 10.0, None, "at_least"), row("b", 4.0, 5.0)])[0].text() == "a at least 2.00× b"
    )
    assert rate_pairs([row("a", 4.0, None, "at_least"), row("b", 10.0, 11.0)])[0].ratio is None
    pair = rate_pairs([row("a", 4.0, 4.2), row("b", None, 0.5, "none")])[0]
    assert pair.text() == "a sustains a rate, b none of the tested rates"
    assert rate_pairs([row("a", 4.0, 4.2), row("b", None, 8.0, "none")])[0].ratio is None
    assert rate_pairs([row("a", 4.0, 4.2), row("b", None, None, "refused")]) == []


intervals = st.tuples(st.floats(0.1, 100), st.floats(1, 2)).map(lambda t: (t[0], t[0] * t[1]))


@given(one=intervals, other=intervals)
@example(one=(2.0, 2.0), other=(1.0, 2.0))  # ends at the other's end, above which lie 5 %
@example(one=(2.0, 2.0), other=(2.0, 2.0))
def test_an_order_is_claimed_where_almost_sure(one: tuple[float, float], other: tuple[float, float]) -> None:
    (pair,) = rate_pairs([row("a", *one), row("b", *other)])
    high, low = (one, other) if pair.ahead == "a" else (other, one)
    (mean, my_spread), (others, their_spread) = map(log_normal, (high, low))
    spread = math.hypot(my_spread, their_spread)
    sure = NormalDist().cdf((mean - others) / spread) if spread else float(mean > others)
    slack = 0.03  # 41 rates stand for a posterior: one of them is 2.4 %
    if pair.ratio is not None:
        assert sure > AHEAD - slack
        assert 0.99 < pair.low <= pair.ratio <= pair.high
    else:
        assert sure < AHEAD + slack or high[0] == low[0]  # of equal rates none is ahead


def log_normal(interval: tuple[float, float]) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm, if 90 % lie in the interval."""
    low, high = map(math.log, interval)
    return (low + high) / 2, (high - low) / 2 / NormalDist().inv_cdf(0.95)


# --- the terminal --------------------------------------------------------------------------------
def test_the_terminal_table_fits_100_columns_and_says_what_matters(special: RunFolder) -> None:
    text = printed(special)
    table = text[text.index("connector") : text.index("comparison of max")]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 100
    assert "EMULATED" in text.splitlines()[1]
    assert "[interval]" in text
    assert "nccl was skipped: needs an NVIDIA driver" in text
    assert "→ kvbench doctor" in text
    assert "refused: corrupt" in text
    assert "no tested rate met the SLO" in text
    assert "trials are invalid" in text
    assert str(special.path) in text
    for row in summary_table(special):
        assert row.answer.text() in table


def test_a_limit_that_depends_on_the_length_is_named_with_its_lengths() -> None:
    limits = {("nixl", 1024): "prefill", ("mooncake", 1024): "prefill", ("mooncake", 256): "tpot"}
    rows = [
        replace(row(name, 9.0, 10.0), cell=Cell(name, length, 16), limit=limit)
        for (name, length), limit in limits.items()
    ]
    assert limits_text(rows) == (
        "Limited by: prefill queue for nixl and mooncake at 1,024, TPOT (decode steps) for mooncake at 256."
    )
    assert limits_text(rows[:2]) == "Limited by: prefill queue for nixl and mooncake."


def test_a_real_engine_is_not_called_emulated(full: RunFolder) -> None:
    trials = [replace(trial, labels=[]) for trial in full.trials]
    run = replace(full, manifest=full.manifest | {"labels": []}, trials=trials)
    assert "mulated" not in printed(run)


def test_modelled_transfers_are_not_called_real(full: RunFolder) -> None:
    trials = [replace(trial, labels=["emulated", PACED]) for trial in full.trials]
    run = replace(full, manifest=full.manifest | {"labels": ["emulated", PACED]}, trials=trials)
    assert "EMULATED, KV PACED" in printed(run)
    assert mark_of(full).why == EMULATED_WHY
    assert "transfer times are modelled" in mark_of(run).why
    assert any(line.startswith("engine: ") for line in differences([full, run]))


def test_what_others_wrote_is_not_read_as_markup(full: RunFolder) -> None:
    run = replace(full, warnings=["a [bold]strange[/nothing] path"])
    assert "a [bold]strange[/nothing] path" in printed(run)


def test_the_screen_counts_the_warnings_that_the_page_lists(full: RunFolder, special: RunFolder) -> None:
    noted = replace(special, warnings=["line 3 of trials.jsonl is cut off"])
    counts = []
    for run in (full, special, noted):
        console = Console(file=io.StringIO(), width=100)
        render_terminal(run, console, writer="screen")
        assert isinstance(console.file, io.StringIO)
        (count,) = re.findall(r"report \((\w+) warnings?\):", console.file.getvalue())
        blocks = [block for section in build(run, writers=("html",)).sections for block in section.blocks]
        listed = [block for block in blocks if block.title.startswith("Warnings (")]
        counts.append(sum(len(block.notes) for block in listed))
        assert [block.title for block in listed] == ([f"Warnings ({count})"] if count != "no" else [])
        assert counts[-1] == (int(count) if count != "no" else 0)
        caveats = [note for block in blocks if block.title.startswith("Caveats (") for note in block.notes]
        assert not [note for block in listed for note in block.notes if note in caveats]  # none twice
    assert counts[1] > 1
    assert counts[2] == counts[1] + 1


def test_warnings_of_supporting_trials_stand_beside_the_table(full: RunFolder) -> None:
    trials = [
        replace(trial, findings=[Finding("send_lag", "warning", "the client was late", "use fewer streams")])
        for trial in full.trials
    ]
    warned = replace(full, trials=trials)
    text = [note for note in notes(warned, summary_table(warned)) if "send_lag" in note.text]
    assert len(text) == 1
    assert "nixl at 512, 2,048" in text[0].text
    assert text[0].advice == "use fewer streams"
    assert "for example, the client was late" in text[0].text


def test_a_warning_counts_the_trials_that_it_does_not_list(full: RunFolder) -> None:
    behind = {row.trial_id for row in summary_table(full)}
    others = [trial.trial_id for trial in full.trials if trial.trial_id not in behind][:3]
    assert len(others) == 3
    levels = dict.fromkeys(others, "warning") | {others[0]: "invalid", next(iter(behind)): "warning"}
    trials = [
        replace(trial, findings=[Finding("send_lag", levels[trial.trial_id], "late")])  # type: ignore[arg-type]
        if trial.trial_id in levels
        else trial
        for trial in full.trials
    ]
    warned_run = replace(full, trials=trials)
    (text,) = (warning.text for warning in gate_warnings(warned_run, summary_table(full)))
    assert text.endswith("; also 3 other trials, 1 of them invalid): late")
    assert text.count(" at ") == 1


def test_gates_that_saw_nothing_are_named_once_for_all_that_lack_the_same(full: RunFolder) -> None:
    lacking = {"no /metrics": ["warm_cache", "output_miscounted"], "no usage": ["wrong_prompt_length"]}
    trials = [replace(trial, summary={**trial.summary, "unseen": lacking}) for trial in full.trials]
    *rest, last = trials  # which knows more: a gate is named if it was blind in all that count
    last = replace(last, summary={**last.summary, "unseen": {"no /metrics": ["warm_cache"]}})
    blind = replace(full, trials=[*rest, last])
    rows = summary_table(blind)
    found = [note.text for note in notes(blind, rows) if "checks not run" in note.text]
    assert found
    assert all(": warm_cache" in text and "(no /metrics)" in text for text in found), found
    assert len(found) <= len({row.name for row in rows})
    for name in ("terminal", "markdown", "html", "notebook"):
        report = build(blind, writers=(name,))  # type: ignore[arg-type]
        blocks = [block for section in report.sections for block in section.blocks]
        assert any("checks not run" in n.text for block in blocks for n in block.notes), name
    assert not [note for note in notes(full, rows) if "not run" in note.text]  # of an older kvbench


def test_a_command_imports_matplotlib_without_its_lists_of_properties() -> None:
    words = "from kvbench.report.report import skip_property_lists; skip_property_lists(); "
    words += "from matplotlib.text import Text; print('bbox' in Text.__init__.__doc__)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_run_with_nothing_in_it_is_reported(tmp_path: Path) -> None:
    path = make_run(tmp_path, connectors=(), status="interrupted")
    files = {file.name for file in write_report(path)}
    assert files == {"summary.csv", "trials.csv", "summary.json", "report.md", "report.html"}
    assert "no cell was measured" in printed(load_run(path))
    assert "interrupted" in (path / "report.md").read_text()
    run = load_run(path)
    run.plan["cells"] = [{}, {}]
    assert "0 of 2 cells are finished" in [note.text for note in notes(run, [])]
    assert (path / "tables" / "summary.csv").read_text() == ""


# --- files ---------------------------------------------------------------------------------------
def test_all_derived_files_come_back_the_same(tmp_path: Path) -> None:
    path = make_run(tmp_path, input_lens=(512,))
    written = write_report(path)
    assert {file.suffix.lstrip(".") for file in written} == set(FORMATS)
    before = {file: file.read_bytes() for file in written}
    shutil.rmtree(path / "tables")
    shutil.rmtree(path / "figures")
    (path / "report.md").unlink()
    assert (write_report(path), {file: file.read_bytes() for file in written}) == (written, before)


def test_csv_and_json_hold_the_rows(tmp_path: Path) -> None:
    path = make_run(tmp_path, input_lens=(512, 2048), special=True)
    write_report(path, ("csv", "json"))
    run = load_run(path)
    rows = summary_table(run)
    with open(path / "tables" / "summary.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [line["connector"] for line in read] == [row.cell.connector for row in rows]
    for line, row in zip(read, rows, strict=True):
        for name, value in row.flat().items():
            assert line[name] == ("" if value is None else str(value))
    with open(path / "tables" / "trials.csv", newline="") as file:
        assert [line["trial_id"] for line in csv.DictReader(file)] == [trial.trial_id for trial in run.trials]
    data = json.loads((path / "tables" / "summary.json").read_text())
    assert data["rows"] == [row.flat() for row in rows]
    assert data["labels"] == ["emulated"]
    assert data["slo"] == {"ttft_ms": 250, "tpot_ms": 15, "attainment": 0.95}
    assert [c["text"] for c in data["comparisons"]] == [pair.text() for pair in rate_pairs(rows)]


def test_the_markdown_report_tells_the_whole_story(tmp_path: Path) -> None:
    path = make_run(tmp_path, input_lens=(512, 2048), special=True)
    write_report(path)
    text = (path / "report.md").read_text()
    run = load_run(path)
    for trial in run.trials:
        assert f"| {trial.trial_id} |" in text
    for words in (
        "(emulated)",
        "## Who is ahead",
        "kvbench sweep quickstart",
        "Example CPU 9000",
        "use a quieter",
    ):
        assert words in text
    for picture in ("max_request_rate", "latency"):
        assert f"](figures/{picture}.svg)" in text
    widths = {}
    for number_, line in enumerate(text.splitlines()):
        if line.startswith("|"):
            cells = line.replace("\\|", "").count("|")
            assert widths.get(number_ - 1, cells) == cells
            widths[number_] = cells


def test_text_from_outside_does_not_break_a_markdown_table(full: RunFolder) -> None:
    from kvbench.report.tables.table import markdown_table

    assert markdown_table(["a"], [["x|y\nz"]]).splitlines()[2] == "| x\\|y z |"


# --- several runs --------------------------------------------------------------------------------
def test_comparable_runs_share_a_table(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, ("mooncake",), (512,)) for name in ("a", "b")]
    out = io.StringIO()
    command(paths, Console(file=out, width=100))
    text = out.getvalue()
    assert "no significant difference: mooncake@A and mooncake@B" in text
    assert "NOT COMPARABLE" not in text
    assert all((path / "report.md").is_file() for path in paths)


def test_runs_that_differ_are_refused_unless_forced_and_then_marked(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / str(seed), ("mooncake",), (512,), seed=seed) for seed in (1, 2)]
    edit_json(paths[1] / "plan.json", model="other")
    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(InputError, match=r"differ in model: tiny / other .*--force"):
        command(paths, console)
    command(paths, console, force=True)
    assert "NOT COMPARABLE" in console.file.getvalue()
    assert "model: tiny / other" in console.file.getvalue()


@pytest.mark.parametrize("change", [
    {"environment": {"cpu": {"model": "Y", "cores": 4}}},
    {"manifest": {"hosts": ["elsewhere"], "seed": 7, "labels": ["emulated"]}},
    {"schema": 2},
    {"plan": {**PLAN, "load": {"mode": "direct"}}},
])  # fmt: skip
def test_another_machine_seed_or_option_may_share_a_table(full: RunFolder, change: dict[str, object]) -> None:
    from kvbench.results.provenance import differences

    assert differences([full, replace(full, **change)]) == []  # type: ignore[arg-type]
    assert differences([full, replace(full, plan={"model": "other"})]) != []


def test_emulated_and_real_runs_do_not_share_a_table(full: RunFolder) -> None:
    from kvbench.results.provenance import differences

    trials = [replace(trial, labels=[]) for trial in full.trials]
    real = replace(full, manifest=full.manifest | {"labels": []}, trials=trials)
    assert "engine: emulated / real" in differences([full, real])


def test_a_run_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = make_run(tmp_path, (), ())
    edit_json(path / "manifest.json", schema=99)
    with pytest.raises(NewerSchemaError):
        command([path], Console(file=io.StringIO()))


# ---------------------------------------------------------------- router overhead
def both_ways(
    folder: Path, shift_s: float = 0.003, verdict: str = "met", other_plan: bool = False
) -> RunFolder:
    """A bench whose one cell was offered each of two loads through the router and directly."""
    info = RunInfo(kind="bench", labels=["emulated"])
    store = RunStore.create(folder, "quickstart", SCENARIO.encode(), PLAN, ENVIRONMENT, info)
    cell, rate = Cell("nixl", 1024, OUTPUT_LEN), 12.0
    for place, (way, seed) in enumerate((("router", 1), ("direct", 1), ("direct", 3), ("router", 3)), 1):
        requests = make_requests(cell, rate, seed + (other_plan and way == "direct"))
        for request in requests if way == "router" else ():
            assert request.first_token_s is not None
            request.first_token_s += shift_s
        if place == 2:
            requests[50].error = "timeout"
        trial = make_trial(cell, rate, place, requests)
        trial.seed, trial.engine["load_mode"] = seed, way
        if place == 4:
            trial.verdict, trial.reason = verdict, "the load generator was late"  # type: ignore[assignment]
        store.add_trial(trial, requests)
    store.put_cell(CellResult(cell, "done"))
    store.finish("complete")
    return load_run(store.path)


def test_what_the_router_adds_is_told_with_its_interval(tmp_path: Path) -> None:
    run = both_ways(tmp_path)
    (cost,) = router_costs(run)
    request = cost.of("request")
    assert request.added == pytest.approx(3.0, abs=1e-4)
    p50 = cost.of("p50")
    assert (p50.with_ - p50.without, cost.left_out) == (pytest.approx(3.0, abs=1e-4), 1)
    assert cost.requests > 150
    write_report(run.path, ("md", "csv", "json"))
    text = (run.path / "report.md").read_text()
    assert "## Router overhead" in text
    assert "+3.00 ms [3.00, 3.00]" in text
    assert "through the router" in printed(run)
    rows = (run.path / "tables" / "router_cost.csv").read_text().splitlines()
    assert [row.split(",")[4] for row in rows] == ["figure", "mean", "p50", "p90", "p99", "request"]


def test_a_refused_trial_gives_no_router_cost(tmp_path: Path) -> None:
    (cost,) = router_costs(both_ways(tmp_path, verdict="invalid"))
    assert cost.added == ()
    assert "not a valid measurement: the load generator was late" in cost.text()


def test_trials_of_other_plans_are_not_compared(tmp_path: Path) -> None:
    (cost,) = router_costs(both_ways(tmp_path, other_plan=True))
    assert cost.added == ()
    assert "different plans" in cost.text()


def test_one_way_alone_has_no_router_cost(full: RunFolder) -> None:
    assert router_costs(full) == []
    text = printed(full)
    assert "router overhead" not in text
    assert (
        "client (P99, worst trial): sends 0.310 ms late, reads 0.420 ms late; kernel stamps; 1 process"
        in text
    )


def test_the_report_shows_the_load_generator(full: RunFolder) -> None:
    write_report(full.path, ("md",))
    text = (full.path / "report.md").read_text()
    assert "## Load generator" in text
    assert "| nixl | 512 |" in text.split("## Load generator")[1]
    assert "0.0500 / 0.310" in text


def test_no_table_has_a_formula_of_others(tmp_path: Path) -> None:
    cell = Cell("nixl", 512, OUTPUT_LEN)
    with RunStore.create(tmp_path, "quickstart", SCENARIO.encode(), PLAN, ENVIRONMENT, RunInfo()) as store:
        requests = make_requests(cell, 10.0, 1)
        reason = '=HYPERLINK("http://example.org";"open")\nsecond line'
        trial = replace(make_trial(cell, 10.0, 1, requests), reason=reason, labels=["@SUM(1)"])
        store.add_trial(trial, requests)
    write_report(store.path, ["csv"])
    with open(store.path / "tables/trials.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["reason"] == "'" + reason.replace("\n", " ")
    assert (row["labels"], float(row["request_rate"])) == ("'@SUM(1)", 10.0)
    for path in store.path.glob("tables/*.csv"):
        lines = csv.reader(io.StringIO(path.read_text("utf-8")))
        assert not [cell for line in lines for cell in line if cell.startswith(("=", "@", "+"))]


@pytest.mark.parametrize("name", ["chaos", "soak-emulated"])
def test_a_run_of_a_constant_rate_ends_with_its_result(name: str, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "results" / "reference" / name, tmp_path / name)
    shown, brief = (Console(file=io.StringIO(), width=200) for _ in range(2))
    render_terminal(load_run(tmp_path / name), shown)
    command([tmp_path / name], brief, brief=True)
    assert isinstance(shown.file, io.StringIO)
    assert isinstance(brief.file, io.StringIO)
    assert shown.file.getvalue() in brief.file.getvalue()
