"""The findings of runs of every kind, in one vocabulary: against the tables that they are made from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from run_files import QUICKSTART, VLLM_CPU
from sample_run import make_run

import kvbench
from kvbench.core.findings.findings import KIND_WORDS, Statement
from kvbench.core.records import Finding
from kvbench.core.transfers.records import TransferRecord
from kvbench.errors import StoreError
from kvbench.report.findings.ahead import rate_pairs
from kvbench.report.findings.findings import as_notes, by_kind, refusals, statements
from kvbench.report.findings.transfers import transfer_statements
from kvbench.report.report import report_markdown
from kvbench.report.sections.build import build
from kvbench.report.tables.result import summary_table
from kvbench.results.run import load_run

REFERENCE = Path(__file__).parents[3] / "results/reference"
RUNS = sorted(path.parent for path in REFERENCE.glob("*/manifest.json"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_kind_of_run_says_who_is_ahead_or_that_it_cannot_be_told(path: Path) -> None:
    run = load_run(path)
    found = statements(run)
    assert {statement.kind for statement in found} & {"ahead", "untold"}
    assert {statement.kind for statement in found} <= KIND_WORDS.keys()
    headings = by_kind(found)
    assert sum(map(len, headings.values())) == len(found)
    text = report_markdown(build(run, writers=("markdown",)))
    places = [text.index("## Findings"), *(text.index(f"### {words} (") for words in headings)]
    assert places == sorted(places)
    # Who is ahead, and what cannot be told, is a table where there are several, not a sentence each.
    for note in as_notes([statement for statement in found if statement.kind not in ("ahead", "untold")]):
        assert " ".join(note.text.split()).replace("|", "\\|")[:80] in text.replace("\\\\|", "\\|")


@pytest.mark.parametrize("path", [REFERENCE / "quickstart", VLLM_CPU], ids=lambda path: path.name)
def test_what_is_said_of_searched_rates_is_in_the_table(path: Path) -> None:
    """Rates are compared where the numbers of engines are equal, else those per engine."""
    run = load_run(path)
    rows = summary_table(run)
    known = {(row.cell.connector, row.cell.input_len): row for row in rows}
    checked = 0
    for statement in statements(run):
        if statement.rule not in ("rate_ahead", "unequal_size"):
            continue
        length = int(statement.text.split(" in,")[0].replace(",", ""))
        for one, ratio, other, low, high in re.findall(
            r"(\w+) ([\d.]+)× (\w+) \[>?([\d.]+), ([\d.]+)\]", statement.text
        ):
            ahead, behind = known[one, length], known[other, length]
            fair = ahead.size == behind.size
            assert fair == (statement.kind == "ahead")
            counts = (1, 1) if fair else (ahead.size.engines or 0, behind.size.engines or 0)
            rates = [
                (row.answer.max_request_rate or 0.0) / count
                for row, count in zip((ahead, behind), counts, strict=True)
            ]
            assert float(ratio) == pytest.approx(rates[0] / rates[1], abs=0.006)
            assert float(low) <= float(ratio) <= float(high)
            for end in ("lower", "upper"):
                assert getattr(ahead.answer, end) / counts[0] > getattr(behind.answer, end) / counts[1]
            checked += 1
    assert checked == sum(pair.ratio is not None for pair in rate_pairs(rows)) > 0


def test_a_folder_from_before_says_how_many_engines_it_had() -> None:
    """One engine without P/D against P and D: 1.9 times by the rates, which nobody says any more."""
    rows = summary_table(load_run(VLLM_CPU))
    assert {row.cell.connector: row.size.engines for row in rows} == {
        "aggregated": 1, "nixl": 2, "nixl_push": 2, "mooncake": 2,
    }  # fmt: skip
    assert {row.size.gpus for row in rows} == {None}
    found = statements(load_run(VLLM_CPU))
    ahead = " ".join(statement.text for statement in found if statement.kind == "ahead")
    assert "aggregated" not in ahead
    unequal = [statement for statement in found if statement.rule == "unequal_size"]
    assert [statement.kind for statement in unequal] == ["untold"] * 3
    for statement in unequal:
        assert "not directly comparable: 2 engines (" in statement.text
        assert " against 1 engine (aggregated); per engine: " in statement.text
        assert "deployment.aggregated" in statement.advice


def test_a_run_of_one_connector_says_that_nobody_is_compared() -> None:
    found = statements(load_run(REFERENCE / "burst-or-sustained"))
    (alone,) = (statement for statement in found if statement.rule == "alone")
    assert alone.text == "no comparison: aggregated is the only connector in this run"
    (burst,) = (statement for statement in found if statement.rule == "burst_and_sustained")
    assert "29.5 req/s, 2.50 times the sustained 11.8" in burst.text


def test_what_makes_a_number_void_stands_before_who_is_ahead() -> None:
    ahead = Statement("ahead", "a", "one is ahead")
    warned, void = (
        Statement("suspicious", "w", "w", level="warning"),
        Statement("suspicious", "v", "v", level="invalid"),
    )
    assert list(by_kind([warned, ahead])) == [KIND_WORDS["ahead"], KIND_WORDS["suspicious"]]
    assert list(by_kind([ahead, void])) == [KIND_WORDS["suspicious"], KIND_WORDS["ahead"]]


def test_refused_trials_and_warnings_are_suspicious_with_their_advice() -> None:
    found = [statement for statement in statements(load_run(VLLM_CPU)) if statement.kind == "suspicious"]
    those, late = found
    assert those.text.startswith(
        "2 of 60 trials are invalid and count neither as met nor as missed (client_limited 2)"
    )
    assert late.rule == "client_limited"
    assert late.advice
    assert set(late.places) <= {trial.trial_id for trial in load_run(VLLM_CPU).trials}


def test_a_trial_refused_for_several_reasons_is_one_trial() -> None:
    run = load_run(VLLM_CPU)
    one = next(trial for trial in run.trials if trial.verdict == "invalid")
    late = next(finding for finding in one.findings if finding.level == "invalid")
    one.findings += [replace(late, gate="host_starved"), replace(late, gate="host_starved")]
    (refusal,) = refusals(run)
    assert "(client_limited 2, host_starved 1; some for several reasons)" in refusal.text
    assert list(refusal.evidence) == ["client_limited", "host_starved"]


def test_wrong_data_in_a_transfer_is_told_first() -> None:
    records = load_run(REFERENCE / "microbench").transfer_records()
    assert not any(statement.kind == "suspicious" for statement in transfer_statements(records))
    last: TransferRecord = records[-1]
    last.verified = False
    headings = by_kind(transfer_statements(records))
    assert next(iter(headings)) == KIND_WORDS["suspicious"]
    assert "WRONG DATA in 1 case(s)" in headings[KIND_WORDS["suspicious"]][0].text


def test_the_api_has_the_same_findings() -> None:
    table = kvbench.load(QUICKSTART).findings
    texts = {statement.text for statement in statements(load_run(QUICKSTART))}
    assert texts <= set(table.message)
    assert {"ahead", "untold"} <= set(table.kind)


def test_a_folder_of_runs_is_no_run_and_the_hint_names_the_last_of_them(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run folder") as raised:
        load_run(tmp_path)
    assert raised.value.hint == "give a folder in results/"
    for name in ("20260101T000000Z-a-1", "20260102T000000Z-b-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match="is not a run folder") as raised:
        load_run(tmp_path)
    assert raised.value.hint == f"it holds 2 run folder(s), the last by name is {tmp_path / name}"


def test_trials_that_others_spoilt_are_suspicious_with_what_was_seen(tmp_path: Path) -> None:
    """A run folder whose trials were refused for the machine: the worst of them stands in the report."""
    run = load_run(make_run(tmp_path))
    disturbed = "the machine was disturbed: 53.0% of the CPU time was used by other processes (cc1plus 41%)"
    for trial in run.trials:
        trial.verdict, trial.findings = "met", []
    for share, trial in zip((0.2, 0.53), run.trials, strict=False):
        trial.verdict = "invalid"
        message = disturbed if share > 0.5 else "less"
        trial.findings.append(
            Finding("machine_disturbed", "invalid", message, "stop it", {"other_cpu_share": share})
        )
    (found,) = (
        statement for statement in statements(run) if statement.rule in ("refused", "machine_disturbed")
    )
    assert (found.kind, found.level, found.advice) == ("suspicious", "warning", "stop it")
    assert disturbed in found.text
    assert set(found.places) == {trial.trial_id for trial in run.trials[:2]}
