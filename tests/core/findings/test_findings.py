"""Conclusions by rule: what is suspicious, claims against rows, who is ahead, what cannot be told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_files
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.findings.ahead import Pair, pairs
from kvbench.core.findings.findings import Claim, Statement, check_claim, conclude, read_claims, suspicious
from kvbench.core.findings.load_row import (
    LoadRow,
    RowConditions,
    figure_text,
    has_16bit_weights,
    known_model,
    prefill_peaks,
)
from kvbench.core.findings.suspicions import (
    RULES,
    burst,
    contradictory,
    failures,
    few_requests,
    impossible_prefill,
    mean_only_slo,
    not_kept_up,
    same_twice,
    slot_cap,
    suspicions,
)
from kvbench.core.physics import PrefillWork, peak_flops, peak_flops_16bit
from kvbench.core.records import Cell
from kvbench.core.slo import Limit
from kvbench.report.findings.load_rows import claims_of, conclusions, load_rows
from kvbench.report.report import write_report
from kvbench.results.run import RunFolder, load_run

RECORDED = Path(__file__).parents[2] / "recorded" / "seeds"
# 8 × H200, Qwen3-30B-A3B: as in the recorded notes.
H200 = RowConditions(
    model="Qwen3-30B-A3B", hardware="8xH200", slots=256,
    limits=(Limit("ttft_ms", "each", 5000.0), Limit("tpot_ms", "each", 50.0)),
    work=PrefillWork(2.7e9, 48 * 32 * 128), prefill_flops=8 * 1979e12, prefill_flops_16bit=8 * 990e12,
)  # fmt: skip


def make_row(connector: str = "a", length: int = 1024, rate: float | None = 10.0, **more: Any) -> LoadRow:
    """An honest row: 1,000 requests at 10 per second that took a second each."""
    figures = {
        "completed": 1000.0, "failed": 0.0, "duration_s": 101.0, "request_throughput": 1000 / 101.0,
        "mean_ttft_ms": 100.0, "median_ttft_ms": 90.0, "p90_ttft_ms": 150.0, "p99_ttft_ms": 200.0,
        "mean_tpot_ms": 9.0, "median_tpot_ms": 9.0, "p99_tpot_ms": 11.0, "mean_e2el_ms": 1000.0,
        "median_e2el_ms": 990.0, "p99_e2el_ms": 1300.0,
    }  # fmt: skip
    figures |= more.pop("figures", {})
    axes = {"connector": connector, "input_len": length, "rate": rate, **more.pop("axes", {})}
    made: dict[str, Any] = {"requests": 1000, "axes": axes, "setting": RowConditions(), **more}
    key = f"{connector}-{length}-{rate}-{figures['mean_ttft_ms']}"
    return LoadRow(key, "run", Cell(connector, length, 101), rate, figures=figures, **made)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunFolder]:
    """The recorded pages, read in."""
    folder, known = tmp_path_factory.mktemp("imported"), dict[str, RunFolder]()

    def of(name: str) -> RunFolder:
        if name not in known:
            known[name] = run_files.imported(folder / name, RECORDED / f"{name}.txt", name=name)
        return known[name]

    return of


def found(statements: list[Statement], rule: str) -> Statement:
    (match,) = [statement for statement in statements if statement.rule == rule]
    return match


# --- the notes -------------------------------------------------------------------------------------
def test_the_notes_rows_say_what_is_wrong_with_them(imported: Callable[[str], RunFolder]) -> None:
    statements = conclusions([imported("notes")])
    of_burst = found(statements, "burst")
    assert len(of_burst.places) == 10
    assert "five-second burst: n = 225 = 5 × rate" in of_burst.text
    assert "lasted 54.8 s, 49.8 s of it drain" in of_burst.text
    assert of_burst.level == "invalid"
    slots = found(statements, "slot_cap")
    assert len(slots.places) == 8
    assert not any("32,768" in place for place in slots.places)
    assert "400 requests were open at once with max_num_seqs = 256: 144 (36%) had to wait" in slots.text
    means = found(statements, "mean_only_slo")
    assert "TTFT mean 3,798 ≤ 5,000 ms, but P90 11,270, P99 12,450" in means.text
    assert len(means.places) == 8
    prefill = found(statements, "impossible_prefill")
    assert [place.split(",")[0] for place in prefill.places] == [
        "mooncake at 16", "mooncake at 32", "nixl at 16", "nixl at 32"
    ]  # fmt: skip
    assert "8xH200" in prefill.text
    assert prefill.level == "invalid"
    rates = found(statements, "other_rates")
    assert "nixl at 32,768, 35 req/s, script: 30" in rates.text


def test_at_32k_impossible_at_any_precision_at_16k_in_16_bits(imported: Callable[[str], RunFolder]) -> None:
    rows = {(row.cell.connector, row.cell.input_len): row for row in load_rows(imported("notes"))}
    how = {
        key: finding.evidence["precision"]
        for key, row in rows.items()
        if (finding := impossible_prefill(row))
    }
    assert how[("mooncake", 32768)] == "any precision"
    assert how[("mooncake", 16384)] == how[("nixl", 16384)] == "16 bits"
    assert ("mooncake", 8192) not in how


def test_the_notes_conclusions_contradict_their_tables(imported: Callable[[str], RunFolder]) -> None:
    wrong = [
        conclusion
        for conclusion in conclusions([imported("notes")])
        if conclusion.kind == "claim" and conclusion.level == "invalid"
    ]
    words = " ".join(conclusion.text for conclusion in wrong)
    assert "mean_ttft_ms of mooncake at 32,768 is 413, not 461" in words
    assert "mean_ttft_ms of nixl at 32,768 is 846, not 2,779" in words
    assert "total_token_throughput of nixl at 32,768 is 110,775, not 129,000" in words
    assert "at 1,024 nixl is ahead by +0.1%, not 2 to 5%" in words
    assert "at 8,192 nixl is ahead by -0.7%" in words


def test_nobody_is_ahead_in_the_notes_and_32k_has_unequal_rates(imported: Callable[[str], RunFolder]) -> None:
    statements = conclusions([imported("notes")])
    assert not [result for result in statements if result.kind == "ahead"]
    unequal = next(result for result in statements if result.kind == "untold" and "32,768" in result.text)
    assert "different rates were offered, 45 and 35 req/s" in unequal.text
    alike = next(result for result in statements if result.kind == "untold" and "1,024" in result.text)
    assert "one run each" in alike.text
    assert "burst" in alike.text


def test_pr_10884_repeats_are_found_and_one_is_no_repeat(imported: Callable[[str], RunFolder]) -> None:
    run = imported("pr10884")
    statements = conclusions([run], by="nics")
    assert len(found(statements, "same_twice").places) == 2
    rows = load_rows(run)
    repeated = [pair for pair in pairs(rows, "nics") if pair.scope == "runs"]
    assert {pair.place for pair in repeated} == {"1,024 in, tp 4, 2 req/s"}
    two_nics = next(pair for pair in repeated if {pair.one, pair.other} == {"2 NICs", "TCP"})
    mean = next(ratio for ratio in two_nics.ratios if ratio.figure == "mean_ttft_ms")
    assert mean.one == pytest.approx(np.exp(np.mean(np.log([198.10, 200.64, 195.47]))))
    assert mean.low is not None
    assert mean.low < mean.ratio < (mean.high or 0)
    saturated = found(statements, "not_kept_up")
    assert all("8 req/s" in p or "4,096" in p or "8,192" in p for p in saturated.places)
    assert "0.720 of 2 req/s" in saturated.text
    assert {pair.by for pair in pairs(rows, "tp")} == {"tp"}
    assert all("rdma" in pair.one or "rdma" in pair.other for pair in pairs(rows, "protocol"))


def test_claims_that_are_words_alone_are_left_out(imported: Callable[[str], RunFolder]) -> None:
    given = imported("notes").manifest["imported"]["claims"]
    assert len(claims_of(imported("notes"))) == len(given) - 1


# --- rules -----------------------------------------------------------------------------------------
def test_an_honest_row_is_not_suspicious() -> None:
    assert (suspicions(make_row()), suspicions(replace(make_row(), setting=H200))) == ([], [])


@given(rate=st.floats(0.1, 1000), n=st.integers(2, 10_000), e2el_s=st.floats(0.01, 100))
def test_a_burst_is_a_load_shorter_than_half_a_request(rate: float, n: int, e2el_s: float) -> None:
    row = replace(make_row(rate=rate), requests=n, figures={"mean_e2el_ms": e2el_s * 1e3})
    assert (burst(row) is not None) == (n / rate < 0.5 * row.get("mean_e2el_ms") / 1e3)  # type: ignore[operator]


@given(st.integers(0, 2**32 - 1), st.floats(1.2, 4.0), st.integers(50, 400))
def test_no_server_at_60_percent_of_the_peak_is_called_impossible(seed: int, overload: float, n: int) -> None:
    """Served in their order at a share of the peak that no prefill reaches, at any overload."""
    rng = np.random.default_rng(seed)
    one_s = H200.work.flop(8192) / (0.6 * H200.prefill_flops)
    rate = overload / one_s
    sends = np.cumsum(rng.exponential(1 / rate, n))
    ends = np.zeros(n)
    for place in range(n):
        ends[place] = max(sends[place], ends[place - 1] if place else 0.0) + one_s
    p50, p90, p99 = np.percentile((ends - sends) * 1e3, [50, 90, 99])
    figures = {"median_ttft_ms": float(p50), "p90_ttft_ms": float(p90), "p99_ttft_ms": float(p99)}
    only_any = replace(H200, prefill_flops_16bit=None)
    row = replace(make_row(length=8192, rate=rate, setting=only_any), requests=n, figures=figures)
    assert impossible_prefill(row) is None


def test_prompts_from_a_cache_are_found_and_unknown_hardware_is_not_judged() -> None:
    row = make_row(length=32768, rate=45.0, setting=H200, requests=225, figures={"median_ttft_ms": 430.0})
    finding = impossible_prefill(row)
    assert finding.evidence["percentile"] == 50
    assert impossible_prefill(replace(row, setting=RowConditions(work=H200.work))) is None
    assert impossible_prefill(replace(row, setting=replace(H200, work=None))) is None
    assert impossible_prefill(replace(row, method="trace")) is None


def test_mean_only_needs_a_mean_within_and_a_percentile_beyond() -> None:
    beyond = make_row(setting=H200, figures={"p90_ttft_ms": 6000.0, "p99_ttft_ms": 9000.0})
    finding = mean_only_slo(beyond)
    assert "more than 10 %" in finding.message
    assert (
        mean_only_slo(make_row(setting=H200, figures={"mean_ttft_ms": 7000.0, "p99_ttft_ms": 9000.0})) is None
    )
    assert mean_only_slo(replace(beyond, setting=replace(H200, judged=True))) is None
    by_p99 = replace(H200, limits=(Limit("ttft_ms", "p99", 5000.0),))
    assert mean_only_slo(replace(beyond, setting=by_p99)) is None


def test_slots_are_told_or_seen_in_the_table_itself() -> None:
    figures = {"peak_concurrent_requests": 400.0, "p90_ttft_ms": 11270.0, "median_ttft_ms": 170.0}
    statement = slot_cap(make_row(requests=400, setting=H200, figures=figures))
    assert statement.evidence["waited"] == 144
    assert slot_cap(make_row(requests=400, figures=figures)) is None
    seen = figures | {"peak_output_throughput": 19567.0, "median_itl_ms": 12.75}
    itself = slot_cap(make_row(requests=400, figures=seen))
    assert itself.evidence["slots"] == 249
    few = {"peak_concurrent_requests": 256.0}
    assert slot_cap(make_row(requests=256, setting=H200, figures=few)) is None


def test_keeping_up_does_not_mind_the_last_requests_drain() -> None:
    assert not_kept_up(make_row()) is None
    short = {"duration_s": 11.0, "request_throughput": 100 / 11.0, "completed": 100.0}
    assert not_kept_up(make_row(requests=100, figures=short)) is None
    behind = make_row(figures={"duration_s": 160.0, "request_throughput": 6.25, "median_e2el_ms": 30_000.0})
    finding = not_kept_up(behind)
    assert "6.25 of 10 req/s" in finding.message


def test_what_did_not_arrive_need_not_be_completed() -> None:
    """20 req/s were planned; by chance 513 requests arrived in 30 s, 17.1 a second, and all were answered."""
    figures = {"duration_s": 30.4, "request_throughput": 513 / 30.4, "completed": 513.0}
    slow = {"mean_e2el_ms": 9_000.0, "median_e2el_ms": 9_000.0, "p99_e2el_ms": 13_000.0}
    row = make_row(rate=20.0, requests=513, figures=figures | slow)
    assert not_kept_up(row) is not None
    arrived = replace(row, arrived=513, arrived_in_s=30.0)
    assert not_kept_up(arrived) is None
    behind = replace(arrived, figures={**arrived.figures, "duration_s": 60.0, "request_throughput": 513 / 60})
    finding = not_kept_up(behind)
    assert "8.55 of 17.1 req/s completed" in finding.message


def test_sessions_wait_for_answers_so_their_rate_is_no_promise() -> None:
    behind = make_row(figures={"duration_s": 160.0, "request_throughput": 6.25, "median_e2el_ms": 30_000.0})
    assert not_kept_up(behind) is not None
    assert not_kept_up(replace(behind, sessions=True)) is None


def test_arrivals_are_counted_from_the_requests_of_a_trial() -> None:
    run = load_run(Path(__file__).parents[3] / "results" / "reference" / "seed-h200-emulated")
    (row,) = load_rows(run)
    requests = [record for record in run.request_records(row.key) if record.sent_s is not None]
    last_s = max(request.scheduled_s for request in requests)
    assert (row.arrived, row.arrived_in_s) == (len(requests), last_s)
    assert row.arrival_rate == len(requests) / last_s
    assert row.arrival_rate != row.request_rate


def test_no_winner_is_named_among_loads_that_were_routed_cache_blind() -> None:
    errors = {"mean_ttft_ms": 0.01, "mean_tpot_ms": 0.001}
    slow = make_row("b", figures={"mean_ttft_ms": 300.0}, errors=errors)
    (pair,) = pairs([make_row("a", errors=errors), slow])
    assert pair.significant
    (blind,) = pairs([make_row("a", errors=errors), replace(slow, no_winner="routed anywhere")])
    assert not blind.significant
    assert "b: routed anywhere" in blind.text()


def test_long_requests_that_take_no_longer_at_the_end_have_kept_up() -> None:
    """Requests of 9 s, offered for 10 s: two fifths of the rate was completed, and nothing was ever late."""
    figures = {"duration_s": 19.1, "request_throughput": 100 / 19.1, "p50_e2el_ms": 9_000.0}
    steady = make_row(requests=100, figures={**figures, "mean_e2el_ms": 9_000.0, "p99_e2el_ms": 9_100.0})
    assert not_kept_up(steady) is None
    grown = replace(steady, figures={**steady.figures, "p99_e2el_ms": 9_400.0})
    assert not_kept_up(grown) is not None
    assert not_kept_up(replace(grown, client_late=True)) is None


@given(
    rate=st.floats(1, 100), capacity=st.floats(0.1, 0.9), e2el_s=st.floats(0.1, 30), n=st.integers(100, 5000)
)
def test_a_queue_that_grows_is_always_seen(rate: float, capacity: float, e2el_s: float, n: int) -> None:
    """Request i of n comes at i / rate and ends at i / (rate × capacity) + its own time."""
    times = np.arange(n) / rate
    latencies = times / capacity - times + e2el_s
    duration_s = float(times[-1] + latencies[-1])
    figures = {
        "duration_s": duration_s,
        "request_throughput": n / duration_s,
        "mean_e2el_ms": float(latencies.mean()) * 1e3,
        **{f"p{p}_e2el_ms": float(np.percentile(latencies, p)) * 1e3 for p in (50, 99)},
    }
    row = replace(make_row(rate=rate), requests=n, figures=figures)
    median_s = figures["p50_e2el_ms"] / 1e3
    if burst(row) is None and median_s > 0.25 * n / rate:
        assert not_kept_up(row) is not None


def test_figures_that_contradict_each_other() -> None:
    finding = contradictory(make_row(figures={"request_throughput": 12.0, "p99_tpot_ms": 8.0}))
    assert len(finding.evidence["contradictions"]) == 2
    assert contradictory(make_row(figures={"request_throughput": 9.9})) is None  # as a table rounds


def test_failures_and_small_numbers() -> None:
    failed = failures(make_row(figures={"failed": 30.0, "completed": 970.0}))
    assert "30 of 1,000" in failed.message
    few = few_requests(make_row(requests=40, figures={"completed": 40.0}))
    assert few.level == "note"


def test_statements_join_rows_and_show_the_worst() -> None:
    slow = {"median_e2el_ms": 2e5, "p99_e2el_ms": 3e5}
    rows = [
        make_row("a", 1024, figures={"duration_s": 130.0, "request_throughput": 7.69, **slow}),
        make_row("b", 2048, figures={"duration_s": 400.0, "request_throughput": 2.5, **slow}),
    ]
    (statement,) = suspicious(rows)
    assert statement.places == ("a at 1,024, 10 req/s", "b at 2,048, 10 req/s")
    assert "for example, b at 2,048" in statement.text
    assert {rule.__name__ for rule in RULES} >= {statement.rule}


def test_rows_alike_to_the_last_digit_are_one() -> None:
    one = make_row(figures={"mean_ttft_ms": 201.77})
    assert len(same_twice([one, replace(one, key="again"), make_row()])) == 1


# --- claims ----------------------------------------------------------------------------------------
def claim(**more: Any) -> Claim:
    return Claim.from_json({"text": "said", "metric": "mean_ttft_ms", **more})


def test_claims_are_borne_out_contradicted_or_silent() -> None:
    rows = [make_row("a", figures={"mean_ttft_ms": 100.0}), make_row("b", figures={"mean_ttft_ms": 150.0})]
    ahead = check_claim(claim(ahead="a", behind="b", by_percent=[40, 60]), rows)
    assert ahead.level == "note"
    behind = check_claim(claim(ahead="b", behind="a"), rows)
    assert "b is not ahead" in behind.message
    equal = check_claim(claim(equal=True, input_len=[1024]), rows)
    assert "differ by 50.0%" in equal.message
    value = check_claim(claim(values={"a": 100.4}), rows)
    assert value.level == "note"
    assert check_claim(claim(values={"c": 1.0}), rows) is None
    assert check_claim(claim(ahead="a", behind="b", input_len=[9]), rows) is None


@pytest.mark.parametrize(
    "data", [{}, {"metric": "x"}, {"metric": "x", "values": 3}, {"metric": "x", "ahead": "a"}]
)
def test_what_is_no_claim_is_left_out(data: dict[str, Any]) -> None:
    assert read_claims([data]) == []
    with pytest.raises(ValueError, match="is not a claim"):
        Claim.from_json(data)


# --- who is ahead ----------------------------------------------------------------------------------
def one_pair(*rows: LoadRow, by: str = "connector") -> Pair:
    (pair,) = pairs(rows, by)
    return pair


def test_repeated_runs_tell_who_is_ahead() -> None:
    rows = [make_row("a", figures={"mean_ttft_ms": 100.0 + ms, "p99_ttft_ms": 200.0 + ms}) for ms in range(4)]
    rows += [
        make_row("b", figures={"mean_ttft_ms": 150.0 + ms, "p99_ttft_ms": 201.0 + ms}) for ms in range(4)
    ]
    pair = one_pair(*rows)
    assert (pair.scope, [ratio.figure for ratio in pair.significant]) == ("runs", ["mean_ttft_ms"])
    assert pair.text().startswith("1,024 in, 10 req/s: a is ahead of b: mean TTFT 33.0% lower [30.9, 35.1]")
    (ahead,) = [conclusion for conclusion in conclude(rows) if conclusion.kind == "ahead"]
    assert "for repeated runs" in ahead.advice


def test_single_requests_tell_of_two_runs_only() -> None:
    errors = {"mean_ttft_ms": 2.0, "mean_tpot_ms": 0.5}
    one, other = make_row("a", errors=errors), make_row("b", errors=errors, figures={"mean_ttft_ms": 140.0})
    pair = one_pair(one, other)
    assert pair.scope == "requests"
    assert "for these two runs, not for repeated ones" in pair.about()
    close = one_pair(one, make_row("b", errors=errors, figures={"mean_ttft_ms": 102.0}))
    assert not close.significant
    assert "every interval includes equality" in close.text()


def test_other_models_and_other_rates_are_not_compared() -> None:
    errors = {"mean_ttft_ms": 0.1}
    here = make_row("a", errors=errors, setting=RowConditions(model="x"))
    there = make_row("b", errors=errors, setting=RowConditions(model="y"), figures={"mean_ttft_ms": 300.0})
    assert "model: x / y" in one_pair(here, there).text()
    assert not one_pair(here, there).significant
    faster = make_row("b", rate=20.0, errors=errors)
    assert "different rates were offered, 10 and 20 req/s" in one_pair(here, faster).text()


def test_settings_that_differ_otherwise_make_no_pair() -> None:
    assert pairs([make_row("a", axes={"tp": 1}), make_row("b", axes={"tp": 2})]) == []
    assert len(pairs([make_row("a", axes={"nics": 8}), make_row("b", axes={"nics": "all"})])) == 1
    assert pairs([make_row("a"), make_row("b")], "rate") == []


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_equal_settings_are_seldom_told_apart(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def repeats(name: str) -> list[LoadRow]:
        return [make_row(name, figures={"mean_ttft_ms": float(rng.lognormal(4.6, 0.05))}) for _ in range(3)]

    false_alarms = sum(bool(one_pair(*repeats("a"), *repeats("b")).significant) for _ in range(60))
    assert false_alarms <= 12  # 5 % of 60 are 3; more than 12 would be a chance of one in 100,000


# --- helpers ---------------------------------------------------------------------------------------
def test_models_and_peaks_by_name() -> None:
    assert known_model("/models/Qwen/Qwen3-30B-A3B-Instruct-2507/") == "qwen3-30b-a3b"
    assert known_model("Own-Model") == "own-model"
    assert has_16bit_weights("Qwen3-30B-A3B-Instruct-2507")
    assert not has_16bit_weights("Qwen3-30B-A3B-FP8")
    assert not has_16bit_weights("gpt-oss-120b")
    assert prefill_peaks("8xH200", "Qwen3-8B") == (8 * 1979e12, 8 * 990e12)
    assert prefill_peaks("8xH200", "Qwen3-8B-FP8")[1] is None
    assert prefill_peaks("a toaster", "Qwen3-8B") == (None, None)
    for name in ("H200", "NVIDIA A100-SXM4-80GB", "A10"):
        assert (peak_flops_16bit(name) or math.inf) < (peak_flops(name) or 0)


def test_figures_in_words() -> None:
    assert [figure_text(value) for value in (0.0123, 12.34, 5.0, 30754.71, 0.0, None)] == [
        "0.0123", "12.3", "5", "30,755", "0", "–"
    ]  # fmt: skip


# --- in the report ---------------------------------------------------------------------------------
def test_a_report_of_imports_has_conclusions_rows_and_origin(imported: Callable[[str], RunFolder]) -> None:
    run = imported("notes")
    write_report(run.path, ("md", "json", "csv"))
    text = (run.path / "report.md").read_text()
    assert text.startswith("# notes: imported results")
    places = [
        text.index(words)
        for words in (
            "## Warnings",
            "## Written claims checked against the rows",
            "## Inconclusive",
            "## Imported results",
            "## Sources of the rows",
        )
    ]
    assert places == sorted(places)
    assert "notes.txt:583-619" in text
    assert run.manifest["imported"]["files"][0]["sha256"] in text
    summary = json.loads((run.path / "tables" / "summary.json").read_text())
    assert [entry["text"] for entry in summary["conclusions"]] == [
        conclusion.text for conclusion in conclusions([run])
    ]
    (run.path / "report.md").unlink()
    write_report(run.path, ("md",))
    assert (run.path / "report.md").read_text() == text
