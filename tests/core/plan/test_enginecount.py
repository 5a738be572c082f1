"""Engines and GPUs of a deployment: counted from a run folder, and no rates compared across unequal ones."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import sample_run
from commands import EASY, invoke, kvbench, the_run
from hypothesis import given
from hypothesis import strategies as st
from run_files import VLLM_CPU, printed
from sample_run import PLAN, make_run

import kvbench as notebook
from kvbench import engines
from kvbench.core.findings.ahead import pairs
from kvbench.core.findings.load_row import LoadRow
from kvbench.core.findings.rate_change import AHEAD
from kvbench.core.metrics.ttft_breakdown import parts_of
from kvbench.core.plan.engine_count import Size, first_unequal, price_per_gpu_hour, size_in, unequal, unit_of
from kvbench.core.records import Cell, RequestRecord
from kvbench.core.scenario.scenario import scenario_schema
from kvbench.engines.vllm import VllmOptions
from kvbench.errors import ScenarioError
from kvbench.planning.gpu_dealing import remote_device_env
from kvbench.planning.plan import plan_of
from kvbench.planning.scenario_files import load_scenario, registry
from kvbench.report.compare import CompareOptions, compare_runs, rows_page
from kvbench.report.export import prometheus
from kvbench.report.findings.ahead import rate_pairs
from kvbench.report.findings.findings import statements
from kvbench.report.findings.notes import ahead
from kvbench.report.plots.rates import max_rate_figure
from kvbench.report.report import write_report
from kvbench.report.tables.result import Answer, Row, summary_table
from kvbench.report.tables.trial_values import VALUE_COLUMNS
from kvbench.results.run import RunFolder, load_run
from kvbench.sweep.verify import cross_checks

VLLM = {"engine": "vllm", "tensor_parallel_size": 4}
GPUS = {"gpus": [{"name": "NVIDIA H200"}] * 8}


def planned(deployment: dict[str, Any], processes: dict[str, Any] | None = None) -> dict[str, Any]:
    """plan.json of one pair and one lone engine."""
    names = {"nixl": ("prefill-0", "decode-0"), "aggregated": ("aggregated-0",)}
    return {
        "scenario": {"deployment": deployment},
        "deployments": [
            {"label": label, "instances": [{"name": name} for name in ids]} for label, ids in names.items()
        ],
        "processes": processes or {},
    }


def row(name: str, lower: float | None, upper: float | None, size: Size, outcome: str = "found") -> Row:
    rate = None if outcome == "none" else lower
    ends = None if outcome == "none" else lower, upper
    answer = Answer(outcome, rate, *ends, level=0.9)  # type: ignore[arg-type]
    return Row("run", Cell(name, 1024, 16), answer, dict.fromkeys(VALUE_COLUMNS), name=name, size=size)


# --- counting ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("deployment", "environment", "sizes"), [
    ({"engine": "emulated", "tensor_parallel_size": 8, "hardware": "8xH200"}, {}, (Size(2, 16), Size(1, 8))),
    ({"engine": "emulated", "tensor_parallel_size": 4}, {"gpus": []}, (Size(2, 8), Size(1, 4))),
    ({"engine": "emulated"}, GPUS, (Size(2, 2), Size(1, 1))),
    (VLLM, GPUS, (Size(2, 8), Size(1, 4))),
    (VLLM, {"gpus": []}, (Size(2), Size(1))),
    (VLLM, {"gpus": [], "hosts": {"a": GPUS}}, (Size(2, 8), Size(1, 4))),
    ({**VLLM, "hardware": "2xH200"}, GPUS, (Size(2, 4), Size(1, 2))),
    ({**VLLM, "engine_options": {"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}}, GPUS, (Size(2), Size(1))),
    ({**VLLM, "engine_options": {"decode_args": {"data_parallel_size": 2}}}, GPUS, (Size(2, 12), Size(1, 4))),
    ({"engine": "external"}, GPUS, (Size(), Size())),
    ({"engine": "external", "engine_options": {"gpus": 8}}, {}, (Size(None, 8), Size(None, 8))),
    ({"engine": "external", "engine_options": {"gpus": "eight"}}, {}, (Size(), Size())),
    ({"engine": "system", "engine_options": {"gpus": 4}}, GPUS, (Size(None, 4), Size(None, 4))),
    ({**VLLM, "tensor_parallel_size": "many"}, GPUS, (Size(2), Size(1))),
])  # fmt: skip
def test_gpus_are_counted_only_where_they_are_known(
    deployment: dict[str, Any], environment: dict[str, Any], sizes: tuple[Size, Size]
) -> None:
    plan = planned(deployment)
    engine = engines.options_model_of(plan)
    assert tuple(size_in(plan, environment, label, engine) for label in ("nixl", "aggregated")) == sizes


def test_devices_that_were_given_out_are_what_counts() -> None:
    def process(name: str, devices: str) -> dict[str, Any]:
        url = "http://10.0.0.1:80/health"
        return {"name": name, "env": {"CUDA_VISIBLE_DEVICES": devices}, "ready_url": url}

    shared = {"prefill-0": process("prefill-0", "0"), "decode-0": process("decode-0", "0")}
    assert size_in(planned(VLLM, {"nixl": shared}), GPUS, "nixl", VllmOptions) == Size(2, 1)
    apart = {**shared, "decode-0": process("decode-0", "1, 2")}
    assert size_in(planned(VLLM, {"nixl": apart}), GPUS, "nixl", VllmOptions) == Size(2, 3)
    half = {**shared, "decode-0": {"name": "decode-0"}}
    assert size_in(planned(VLLM, {"nixl": half}), GPUS, "nixl", VllmOptions) == Size(2, 8)


@pytest.mark.parametrize("plan", [{}, {"deployments": 3}, {"deployments": [{"label": "nixl"}, None]}])
def test_what_a_strangers_plan_does_not_tell_is_not_known(plan: dict[str, Any]) -> None:
    assert size_in(plan, {}, "nixl", engines.options_model_of(plan)) == Size()


sizes = st.builds(Size, st.none() | st.integers(1, 4), st.none() | st.integers(1, 8))


@given(sizes, sizes)
def test_sizes_differ_in_gpus_where_both_are_known_and_else_in_engines(one: Size, other: Size) -> None:
    unit = unequal(one, other)
    assert unit == unequal(other, one)
    assert unequal(one, one) is None
    assert (first_unequal([one, other, one]) is None) == (unit is None)
    if unit is not None:
        assert one.count(unit) != other.count(unit)
    if unit_of([one, other]) == "GPU":
        assert all(size.gpus for size in (one, other) if size != Size())


# --- who is ahead --------------------------------------------------------------------------------
def test_twice_the_engines_are_not_ahead() -> None:
    """The README's own case: 69.2 req/s on P and D, 40.2 on one engine: 1.72 by rate, 0.86 per engine."""
    rows = [row("nixl", 69.2, 73.8, Size(2)), row("aggregated", 40.2, 44.5, Size(1))]
    (pair,) = rate_pairs(rows)
    assert (pair.ahead, pair.per, pair.counts) == ("aggregated", "engine", (1, 2))
    assert pair.ratio == pytest.approx(1 / 0.86, rel=0.005)
    assert pair.text() == (
        "not directly comparable: 2 engines (nixl) against 1 engine (aggregated); per engine: "
        "aggregated 1.16× nixl [1.12, 1.26]"
    )
    assert ahead(rows) == [f"1,024 in: {pair.text()}"]


def test_gpus_are_what_is_compared_where_they_are_known() -> None:
    (pair,) = rate_pairs([row("a", 20.0, 21.0, Size(2, 16)), row("b", 15.0, 16.0, Size(2, 8))])
    assert pair.text().startswith("not directly comparable: 16 GPUs (a) against 8 GPUs (b); per GPU: b 1.5")
    (fair,) = rate_pairs([row("a", 20.0, 21.0, Size(2, 8)), row("b", 10.0, 11.0, Size(1, 8))])
    assert fair.text() == "a 2.00× b [1.85, 2.06]"


def test_nothing_is_invented_for_what_nobody_counted() -> None:
    (pair,) = rate_pairs([row("url", 20.0, 21.0, Size()), row("b", 10.0, 11.0, Size(2))])
    assert pair.ratio is None
    assert pair.text() == "not directly comparable: 2 engines (b) against an unknown number of engines (url)"
    (both,) = rate_pairs([row("url", 20.0, 21.0, Size()), row("other", 10.0, 11.0, Size())])
    assert both.text() == "url 2.00× other [1.85, 2.06]"
    (same,) = rate_pairs([row("url", 20.0, 21.0, Size(None, 8)), row("b", 10.0, 11.0, Size(2, 8))])
    assert same.text() == "url 2.00× b [1.85, 2.06]"
    (more,) = rate_pairs([row("url", 20.0, 21.0, Size(None, 8)), row("b", 16.0, 16.5, Size(2, 4))])
    assert more.text().endswith("8 GPUs (url) against 4 GPUs (b); per GPU: b 1.60× url [1.54, 1.63]")


def test_a_rate_against_none_is_told_per_engine_too() -> None:
    (pair,) = rate_pairs([row("a", 8.0, 8.4, Size(2)), row("b", None, 2.0, Size(1), "none")])
    assert pair.text().endswith("per engine: a sustains a rate, b none of the tested rates")
    (open_,) = rate_pairs([row("a", 8.0, 8.4, Size(2)), row("b", None, 6.0, Size(1), "none")])
    assert open_.ratio is None


def log_normal_odds(one: Sequence[float], other: Sequence[float]) -> float:
    """P(one > other) by formula, of two log-normals whose 5 and 95 % quantiles are given."""
    middle = math.log(one[0] * one[1] / other[0] / other[1]) / 2
    spread = math.hypot(math.log(one[1] / one[0]), math.log(other[1] / other[0])) / 2 / 1.6448536
    return NormalDist().cdf(middle / max(spread, 1e-9))


intervals = st.tuples(st.floats(0.1, 100), st.floats(1.001, 2)).map(lambda t: (t[0], t[0] * t[1]))


@given(intervals, intervals, st.integers(1, 9), st.integers(1, 9))
def test_a_pair_is_compared_by_rates_only_at_equal_numbers(
    one: tuple[float, float], other: tuple[float, float], n: int, m: int
) -> None:
    (pair,) = rate_pairs([row("a", *one, Size(n)), row("b", *other, Size(m))])
    assert (pair.per is None) == (n == m)
    per = {"a": [end / n for end in one], "b": [end / m for end in other]}
    sure = log_normal_odds(per[pair.ahead], per[pair.behind])
    ratio = per[pair.ahead][0] / per[pair.behind][0]
    if abs(sure - AHEAD) > 0.01:  # the rates that stand for a posterior are 41
        assert (pair.ratio is not None) == (sure > AHEAD and ratio > 1)
    if pair.ratio is not None:
        assert (pair.ratio, pair.sure) == (pytest.approx(ratio), pytest.approx(sure, abs=0.01))
    assert ("per engine" in pair.text()) == (n != m)


def load(name: str, size: Size, ttft_ms: float) -> LoadRow:
    figures = {"mean_ttft_ms": ttft_ms, "request_throughput": 8.0}
    axes: dict[str, Any] = {"connector": name, "input_len": 1024, "rate": 8.0}
    cell = Cell(name, 1024, 16)
    errors = {"mean_ttft_ms": 0.1}
    return LoadRow(name, "run", cell, 8.0, 400, figures, axes, errors, name=name, size=size)


def test_latencies_at_one_rate_are_not_compared_across_unequal_numbers() -> None:
    (fair,) = pairs([load("a", Size(2), 50.0), load("b", Size(2), 80.0)])
    assert fair.significant
    (unfair,) = pairs([load("a", Size(2), 50.0), load("b", Size(1), 80.0)])
    assert (unfair.significant, unfair.ratios, unfair.unequal) == ((), (), True)
    assert "inconclusive from this data: they have unequal size, 2 engines against 1 engine" in unfair.text()
    assert "%" not in unfair.text()


# --- in the tables -------------------------------------------------------------------------------
@pytest.fixture
def uneven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of P and D against one engine, none of them on a GPU."""
    plan = planned({"engine": "vllm"})
    monkeypatch.setitem(PLAN, "deployments", plan["deployments"])
    monkeypatch.setitem(PLAN, "scenario", {**PLAN["scenario"], **plan["scenario"]})
    return load_run(make_run(tmp_path, ("aggregated", "nixl"), (512,)))


def test_every_table_has_the_rate_per_engine(uneven: RunFolder) -> None:
    pair = next(entry for entry in summary_table(uneven) if entry.cell.connector == "nixl")
    per = pair.answer.max_request_rate / 2
    write_report(uneven.path)
    with (uneven.path / "tables/summary.csv").open(encoding="utf-8") as file:
        lines = {line["connector"]: line for line in csv.DictReader(file)}
    assert float(lines["nixl"]["max_request_rate_per_engine"]) == pytest.approx(per)
    assert (lines["nixl"]["engines"], lines["aggregated"]["engines"]) == ("2", "1")
    assert (lines["nixl"]["gpus"], lines["nixl"]["max_request_rate_per_gpu"]) == ("", "")
    assert "| per engine |" in (uneven.path / "report.md").read_text("utf-8")
    assert "per engine (req/s)" in (uneven.path / "report.html").read_text("utf-8")
    assert "kvbench_max_request_rate_per_engine_per_second{" in prometheus(uneven)
    assert "per_gpu" not in prometheus(uneven)
    assert "cost" not in (uneven.path / "report.md").read_text("utf-8")
    table = rows_page(compare_runs([uneven]), CompareOptions(format="csv")).text("csv")
    (nixl,) = (line for line in csv.DictReader(io.StringIO(table)) if line["connector"] == "nixl")
    assert float(nixl["max_request_rate_per_engine"]) == pytest.approx(per)


def test_emulated_gpus_have_goodput_tokens_and_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned({"engine": "emulated", "tensor_parallel_size": 4, "price_per_gpu_hour": 1.8})
    monkeypatch.setitem(PLAN, "deployments", plan["deployments"])
    monkeypatch.setitem(PLAN, "scenario", {**PLAN["scenario"], **plan["scenario"]})
    run = load_run(make_run(tmp_path, ("aggregated", "nixl"), (512,)))
    pair = next(entry for entry in summary_table(run) if entry.cell.connector == "nixl")
    rate, tokens = pair.answer.max_request_rate, pair.values["output_tok_per_s"]
    assert rate is not None
    assert tokens is not None
    assert (pair.size, pair.price) == (Size(2, 8), 1.8)
    write_report(run.path)
    with (run.path / "tables/summary.csv").open(encoding="utf-8") as file:
        line = next(record for record in csv.DictReader(file) if record["connector"] == "nixl")
    # 8 GPUs at 1.8 an hour are 0.004 a second.
    for column, value in {
        "max_request_rate_per_gpu": rate / 8,
        "request_goodput_per_gpu": (pair.values["request_goodput"] or 0) / 8,
        "output_tok_per_s_per_gpu": tokens / 8,
        "cost_per_1k_requests": 0.004 / rate * 1e3,
        "cost_per_1m_output_tokens": 0.004 / tokens * 1e6,
    }.items():
        assert float(line[column]) == pytest.approx(value), column
    text = (run.path / "report.md").read_text("utf-8")
    for heading in ("per GPU", "goodput per GPU", "output tok/s per GPU", "cost per 1M output tokens"):
        assert f"| {heading} |" in text, heading
    page = (run.path / "report.html").read_text("utf-8")
    assert "cost per 1k requests" in page
    assert "output tok/s per GPU" in page
    assert "kvbench_cost_per_1k_requests{" in prometheus(run)
    assert {"cost_per_1k_requests", "interval_level"} <= set(notebook.load(run.path).summary.columns)


def test_known_power_is_told_by_gpu_and_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned({"engine": "emulated", "tensor_parallel_size": 4})
    monkeypatch.setitem(PLAN, "deployments", plan["deployments"])
    monkeypatch.setitem(PLAN, "scenario", {**PLAN["scenario"], **plan["scenario"]})
    without = load_run(make_run(tmp_path / "without", ("aggregated", "nixl"), (512,)))
    made = sample_run.make_trial
    monkeypatch.setattr(
        sample_run,
        "make_trial",
        lambda *given: (trial := made(*given), trial.engine.update(gpu_watts=4800.0))[0],
    )
    run = load_run(make_run(tmp_path / "with", ("aggregated", "nixl"), (512,)))
    row = next(entry.flat() for entry in summary_table(run) if entry.cell.connector == "nixl")
    assert row["watts_per_gpu"] == 600.0
    assert row["joules_per_output_token"] == pytest.approx(4800 / row["output_tok_per_s"])
    for case, there in ((run, True), (without, False)):
        write_report(case.path)
        assert ("| W per GPU | J per output token |" in (case.path / "report.md").read_text("utf-8")) == there
        assert ("J per output token" in (case.path / "report.html").read_text("utf-8")) == there
        assert ("kvbench_joules_per_output_token{" in prometheus(case)) == there


def test_a_price_that_is_none_gives_no_costs() -> None:
    with pytest.raises(ScenarioError, match="price_per_gpu_hour"):
        load_scenario("quickstart", ["deployment.price_per_gpu_hour=0"])
    for price in (None, "cheap", -1):
        assert price_per_gpu_hour({"scenario": {"deployment": {"price_per_gpu_hour": price}}}) is None
    scenario, _ = load_scenario("quickstart", ["deployment.price_per_gpu_hour=2"])
    assert price_per_gpu_hour(plan_of(scenario).to_json()) == 2.0


def test_the_terminal_has_it_too_within_100_columns(uneven: RunFolder) -> None:
    text = printed(uneven)
    assert "/eng" in text
    assert max(len(line.rstrip()) for line in text[: text.index("files:")].splitlines()) <= 100
    assert "not directly comparable: 2 engines" in " ".join(text.split())
    assert "nixl 1." not in text
    found = [statement for statement in statements(uneven) if statement.kind in ("ahead", "untold")]
    assert [statement.rule for statement in found] == ["unequal_size"]


def test_the_notebook_calls_the_ratio_what_it_is(uneven: RunFolder) -> None:
    rows = notebook.compare(uneven.path).rows
    assert list(rows["figure"]) == ["max_request_rate_per_engine"]
    assert "per engine" in rows["text"][0]
    assert "per engine" in notebook.load(uneven.path)._repr_html_()


# --- where they run ------------------------------------------------------------------------------
def test_lone_engines_take_the_places_and_devices_of_p_and_d() -> None:
    hosts = {name: {"address": f"10.0.0.{place}", "devices": [0, 1]} for place, name in enumerate("ab", 1)}
    scenario, _ = load_scenario("quickstart", [
        "deployment.launcher=ssh", f"deployment.hosts={json.dumps(hosts)}",
        "deployment.roles={prefill: a, decode: b}", "deployment.decode=2",
    ])  # fmt: skip
    deployment, whole = scenario.deployment, plan_of(scenario).deployments[0]
    names = [instance.name for instance in whole.instances]
    assert names == ["aggregated-0", "aggregated-1", "aggregated-2"]
    assert [deployment.host_name(name) for name in names] == ["a", "b", "b"]
    given = [env["CUDA_VISIBLE_DEVICES"] for env in remote_device_env(scenario, whole).values()]
    assert given == ["0", "0", "1"]
    assigned, _ = load_scenario("quickstart", [
        "deployment.launcher=ssh",
        f"deployment.hosts={json.dumps(hosts)}",
        "deployment.roles={prefill: a, decode: b, aggregated: b}",
    ])  # fmt: skip
    assert [assigned.deployment.host_name(f"aggregated-{rank}") for rank in range(2)] == ["b", "b"]


def test_on_one_host_they_take_prefills_devices_and_then_decodes() -> None:
    options = VllmOptions.model_validate(
        {"model": "m", "prefill_devices": ["0,1"], "decode_devices": ["2,3", "4,5"]}
    )
    devices = [options.environment("aggregated", rank).get("CUDA_VISIBLE_DEVICES") for rank in range(4)]
    assert devices == ["0,1", "2,3", "4,5", None]
    assert options.environment("decode", 1)["CUDA_VISIBLE_DEVICES"] == "4,5"


# --- an older folder, and a real run -------------------------------------------------------------
def test_an_older_run_goes_on_with_the_engines_that_it_had() -> None:
    run = load_run(VLLM_CPU)
    assert "aggregated" not in run.plan["scenario"]["deployment"]
    run.manifest["asked"] = {}
    run.plan["scenario"]["deployment"]["engine_options"]["version"] = "0.32.0"
    scenario = cross_checks._with_engine_count(run)
    assert scenario["deployment"]["aggregated"] == 1
    assert "aggregated" not in run.plan["scenario"]["deployment"]


def test_times_of_an_engine_behind_the_router_are_parts_of_its_ttft() -> None:
    record = RequestRecord("r", 1.0, 64, 4, sent_s=1.1, first_token_s=2.0, last_token_s=3.0)
    record.decode_sent_s, record.decode_first_byte_s = 1.2, 1.9
    parts = parts_of(record)
    assert (parts.client, parts.router) == (pytest.approx(0.1), pytest.approx(0.2))
    assert (parts.prefill, parts.after) == (pytest.approx(0.7), None)


@pytest.mark.timeout(180)
def test_two_engines_share_the_load_behind_the_router(tmp_path: Path) -> None:
    words = ("bench", "quickstart", "--rate", "20", "--connector", "aggregated", "--connector", "tcp")
    slow = "deployment.engine_options.time_scale=4"
    done = kvbench(*words, "--output", str(tmp_path), sets=(*EASY, slow))
    assert done.status in (0, 1), done.text  # on a busy machine trials are refused, and tell the same
    run = the_run(tmp_path)
    whole, pair = run.trials
    assert whole.engine["load_mode"] == pair.engine["load_mode"] == "router"
    figures = whole.engine["roles"]["aggregated"]
    assert (figures["instances"], figures["requests"]) == (2, whole.summary["planned"])
    assert figures["prompt_tokens"] == 64 * whole.summary["planned"]
    samples = run.telemetry(whole.trial_id)
    both = {source for source in samples["source"] if source.startswith("aggregated-")}
    assert (both, whole.engine["use"]["aggregated"]["engines"]) == ({"aggregated-0", "aggregated-1"}, 2)
    requests = run.requests(whole.trial_id)
    assert requests["decode_sent_s"].notna().all()
    assert requests["prefill_sent_s"].isna().all()
    (checked,) = (cell.equal_outputs for cell in run.cells if cell.cell.connector == "tcp")
    assert checked["equal"] == checked["checked"] > 0
    assert {entry.size for entry in summary_table(run)} == {Size(2, 2)}


def test_the_number_is_a_key_of_the_scenario_with_bounds() -> None:
    known = scenario_schema(registry())["$defs"]["Deployment"]["properties"]["aggregated"]
    assert "prefill and decode instances together" in known["description"]
    with pytest.raises(ScenarioError, match=r"deployment\.aggregated\.instances must be at least 1, not 0"):
        load_scenario("quickstart", ["deployment.aggregated=0"])
    with pytest.raises(ScenarioError, match=r"deployment\.aggregated: must be a whole number"):
        load_scenario("quickstart", ["deployment.aggregated=two"])
    with pytest.raises(ScenarioError, match="did you mean `aggregated`"):
        load_scenario("quickstart", ["deployment.agregated=2"])
    with pytest.raises(ScenarioError, match="counts engines that kvbench starts, and an external server is"):
        load_scenario("quickstart", [
            "deployment.engine=external", "deployment.engine_options={base_url: 'http://127.0.0.1:1'}",
            "deployment.aggregated=2",
        ])  # fmt: skip


def test_the_picture_says_how_many_engines_each_line_has(uneven: RunFolder) -> None:
    figure = max_rate_figure(uneven)
    assert figure is not None
    words = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert words[:2] == ["aggregated (1)", "nixl (2)"]
    assert "by unequal numbers of engines (n)" in figure.axes[0].get_ylabel()


def test_a_plan_says_how_many_engines_stand_against_each_other() -> None:
    for words, expected in (
        ((), "1P1D against 2 engines without P/D"),
        (("2",), "against 2"),
        (("1",), "1 engine "),
    ):
        sets = tuple(f"deployment.aggregated={count}" for count in words)
        text = invoke("plan", "quickstart", sets=sets).out
        assert expected in text
