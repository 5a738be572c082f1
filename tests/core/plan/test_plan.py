"""The plan: what is launched where, in which order, and how long it may take."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.load.arrivals import trial_seed
from kvbench.core.physics import MODELS
from kvbench.core.plan.plan import (
    LAST_PORT,
    LAUNCH_S,
    Plan,
    expected_trials,
    kv_footprint,
    make_plan,
    trial_requests,
)
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.options import ConnectorOptions, EngineOptions
from kvbench.core.scenario.scenario import Registry, Scenario, Search, parse_scenario
from kvbench.errors import InputError
from kvbench.planning.plan import plan_of
from kvbench.planning.scenario_files import registry


@dataclass(frozen=True)
class Info:
    disaggregated: bool
    side_port_roles: tuple[str, ...] = ()
    service_ports: int = 0
    ports_each: int = 1

    def side_ports(self, role: str, ranks: Ranks) -> int:
        return self.ports_each if role in self.side_port_roles else 0


class Nothing(EngineOptions, ConnectorOptions):
    """A connector or engine without options."""


INFOS = {
    "aggregated": Info(False),
    "push": Info(True, ("prefill",)),
    "pull": Info(True, ("prefill", "decode")),
}
REGISTRY = Registry(connectors=dict.fromkeys(INFOS, Nothing), engines={"emulated": Nothing})


def plan(*overrides: str, connectors: str = "[push, aggregated, pull]", base_port: int | None = None) -> Plan:
    text = (
        f"version: 1\nmodel: tiny\nconnectors: {connectors}\n"
        "workload: {input_len: [64, 16], output_len: 4}\nslo: {ttft_ms: 250, tpot_ms: 20}\n"
    )
    return make_plan(parse_scenario(text, "x.yaml", REGISTRY, overrides), INFOS, base_port)


def test_cells_are_grouped_by_deployment_with_the_aggregated_first() -> None:
    made = plan()
    assert [cell.key for cell in made.cells] == [
        "aggregated-in64-out4", "aggregated-in16-out4", "push-in64-out4", "push-in16-out4", "pull-in64-out4",
        "pull-in16-out4",
    ]  # fmt: skip
    assert [deployment.label for deployment in made.deployments] == ["aggregated", "push", "pull"]
    assert made.reference == "aggregated"
    assert not any(deployment.reference_only for deployment in made.deployments)
    assert made.cells_of("push") == made.cells[2:4]


def test_processes_and_ports() -> None:
    made = plan("deployment.prefill=2", "deployment.base_port=5000")
    by_label = {deployment.label: deployment for deployment in made.deployments}
    instances = by_label["push"].instances
    assert [instance.name for instance in instances] == ["prefill-0", "prefill-1", "decode-0"]
    assert [instance.side_port is None for instance in instances] == [False, False, True]
    assert all(instance.side_port for instance in by_label["pull"].instances)
    assert [instance.name for instance in by_label["aggregated"].instances] == [
        f"aggregated-{i}" for i in range(3)
    ]
    assert sorted(made.ports) == list(range(5000, 5000 + 4 + 6 + 7))


@given(st.integers(1, 5), st.integers(1, 5), st.none() | st.integers(1, 12))
def test_aggregated_engines_are_p_plus_d_unless_given(prefill: int, decode: int, count: int | None) -> None:
    sets = (f"deployment.prefill={prefill}", f"deployment.decode={decode}")
    sets += () if count is None else (f"deployment.aggregated={count}",)
    whole, *pairs = plan(*sets).deployments
    assert len(whole.instances) == (count or prefill + decode)
    assert {instance.role for instance in whole.instances} == {"aggregated"}
    assert (whole.router_port is None) == (len(whole.instances) == 1)
    assert {len(pair.instances) for pair in pairs} == {prefill + decode}


def test_one_engine_gives_true_outputs_and_none_is_counted_behind_a_url() -> None:
    reference = plan("deployment.prefill=3", connectors="[push]").deployments[0]
    assert (reference.reference_only, len(reference.instances)) == (True, 1)
    assert reference.router_port is None
    (external,) = plan_of(external_scenario()).deployments
    assert (len(external.instances), external.router_port) == (1, None)


def test_the_router_of_a_server_behind_a_url_is_not_kvbenchs_to_choose() -> None:
    with pytest.raises(InputError, match="kvbench starts no router for the external engine"):
        external_scenario(", routing: round_robin")


def external_scenario(more: str = "") -> Scenario:
    """A server behind a URL, as `--base-url` makes it. ``more``: of its deployment."""
    text = (
        "version: 1\nmodel: {name: external}\nconnectors: [aggregated]\n"
        "deployment: {engine: external, engine_options: {base_url: 'http://127.0.0.1:1'}"
        f"{more}}}\n"
        "workload: {input_len: 64, output_len: 4}\nslo: {ttft_ms: 250}\n"
    )
    return parse_scenario(text, "x.yaml", registry())


def test_without_an_aggregated_connector_a_reference_is_added() -> None:
    made = plan(connectors="[push, {name: pull, label: reference}]")
    assert made.reference == "reference-2"
    first = made.deployments[0]
    assert (first.label, first.connector, first.reference_only) == ("reference-2", "aggregated", True)
    assert made.cells_of("reference-2") == ()
    assert made.scenario.connector_options("reference-2") is not None


def test_port_zero_leaves_all_ports_to_the_launch() -> None:
    made = plan(base_port=0)
    assert (made.ports, [deployment.router_port for deployment in made.deployments]) == ((), [0, 0, 0])
    assert made.deployments[1].instances[0].side_port == 0


def test_ports_must_fit() -> None:
    needed = len(plan().ports)
    assert max(plan(base_port=LAST_PORT - needed + 1).ports) == LAST_PORT
    with pytest.raises(InputError, match=f"at most {LAST_PORT - needed + 1}"):
        plan(base_port=LAST_PORT - needed + 2)


_CONNECTORS = st.lists(st.sampled_from(list(INFOS)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(_CONNECTORS, st.integers(1, 5), st.integers(1, 5), st.integers(1024, 60_000))
def test_unique_ports_and_equal_plans(names: list[str], prefill: int, decode: int, base_port: int) -> None:
    listed = [{"name": name, "label": f"{name}-{number}"} for number, name in enumerate(names)]
    overrides = (f"deployment.prefill={prefill}", f"deployment.decode={decode}")
    made = plan(*overrides, connectors=json.dumps(listed), base_port=base_port)
    assert sorted(made.ports) == list(range(base_port, base_port + len(made.ports)))
    assert made == plan(*overrides, connectors=json.dumps(listed), base_port=base_port)
    assert len({cell.key for cell in made.cells}) == len(names) * 2
    assert (
        not any(deployment.connector == "aggregated" for deployment in made.deployments[1:])
        or "aggregated" in names
    )


def test_json_holds_everything() -> None:
    data = json.loads(json.dumps(plan().to_json()))
    assert (data["scenario"]["slo"]["ttft_ms"], data["cells"][0]["key"]) == (250, "aggregated-in64-out4")
    assert data["deployments"][1]["instances"][0]["role"] == "prefill"
    assert data["kv_per_request"][0]["logical_bytes"] == 64 * 2048
    assert 0 < data["time_estimate"]["lower_s"] <= data["time_estimate"]["upper_s"]


# ---------------------------------------------------------------- seeds
def test_seeds_are_stable() -> None:
    """A published run must be repeatable by a later version and on another machine."""
    assert trial_seed(0, "nixl-in64-out4", 0) == 4773494262875145691
    code = "from kvbench.core.load.arrivals import trial_seed; print(trial_seed(7, 'a-in1-out1', 3))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(other.stdout) == trial_seed(7, "a-in1-out1", 3)


def test_no_two_trials_share_a_seed() -> None:
    cells = [f"{name}-in{length}-out16" for name in INFOS for length in range(1, 60)]
    seeds = [trial_seed(seed, cell, number) for seed in range(3) for cell in cells for number in range(30)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---------------------------------------------------------------- estimates
def test_kv_footprint() -> None:
    # 2 · 48 layers · 4 heads · 128 · 1 byte = 49152 per token; each head is on two of eight ranks.
    kv = kv_footprint(MODELS["qwen3-30b-a3b"], 1000, tensor_parallel_size=8, block_tokens=16)
    assert (kv.logical_bytes, kv.blocks, kv.wire_bytes) == (1000 * 49_152, 63, 63 * 16 * 98_304)
    # Neighbouring blocks merge, unless K and V are halves of each block.
    for tensors, descriptors in (("apart", 96), ("halves", 96 * 63), ("whole", 48)):
        assert kv_footprint(MODELS["qwen3-30b-a3b"], 1000, 8, 16, tensors).descriptors == descriptors


@pytest.mark.parametrize(("rate", "requests"), [(0.01, 60), (10, 200), (1e6, 20_000)])
def test_trial_requests(rate: float, requests: int) -> None:
    assert trial_requests(Search(trial_s=20), rate) == requests


@given(st.floats(0.001, 1), st.integers(1, 50))
def test_expected_trials_stay_within_the_limit(precision: float, most: int) -> None:
    expected = expected_trials(Search(precision=precision, max_trials=most))
    assert 1 <= expected <= most


def test_more_work_takes_longer() -> None:
    base, longer = plan(), plan("search.trial_s=40")
    assert longer.lower_s > base.lower_s
    assert longer.upper_s > base.upper_s
    assert plan("search.max_trials=20").upper_s > base.upper_s
    parts = {"launch", "correctness checks", "one equal rate", "trials"}
    assert {part.name for part in base.time} == parts
    assert {part.name for part in plan("search.equal_rate=false").time} == parts - {"one equal rate"}
    assert {part.name for part in plan("search.compare_burst=true").time} == {*parts, "burst"}


def test_each_part_of_the_time_is_what_it_says() -> None:
    # Six cells in three deployments; a request that keeps its limits lasts 250 ms and three gaps of 20 ms.
    made = plan("search.trial_s=30", "search.max_trials=10", "search.precision=0.1", "search.start_rate=5")
    cells, e2el_s, fewest = 6, 0.31, expected_trials(Search(precision=0.1))
    trial_s = 150 / 5
    assert {part.name: (part.lower_s, part.upper_s) for part in made.time} == {
        "launch": pytest.approx((3 * LAUNCH_S[0], 3 * LAUNCH_S[1])),
        "correctness checks": pytest.approx((cells * 0.1, cells * (1.0 + e2el_s))),
        "one equal rate": pytest.approx((2 * LAUNCH_S[0], 2 * LAUNCH_S[1] + cells * (trial_s + e2el_s))),
        "trials": pytest.approx((cells * fewest * trial_s, cells * 10 * (trial_s + e2el_s))),
    }


@pytest.mark.parametrize(("precision", "bisections"), [(0.05, 4), (0.2, 2), (0.5, 1), (1.0, 0)])
def test_a_search_brackets_and_halves_until_it_is_sharp(precision: float, bisections: int) -> None:
    assert expected_trials(Search(precision=precision, max_trials=50)) == 2 + bisections


def test_listed_rates_cost_what_they_offer() -> None:
    fixed = plan("search.method=fixed", "search.rates=[10, 20]", "search.trial_s=30", "slo={}")
    (trials,) = [part for part in fixed.time if part.name == "trials"]
    assert trials.lower_s == pytest.approx(len(fixed.cells) * 60)
    assert (trials.upper_s, fixed.notes) == (pytest.approx(len(fixed.cells) * 180), ())


def test_notes_say_what_can_never_be_shown() -> None:
    assert "can never show" in plan("search.max_requests=50", "search.min_requests=20").notes[0]
    assert "fewer than 59 requests" in plan("search.min_requests=20").notes[0]
    listed = ("slo.ttft_ms=null", "slo.tpot_ms=null", 'slo.limits=["ttft_ms p99 <= 500"]')
    assert "fewer than 299 requests cannot show an attainment of 0.99" in plan(*listed).notes[0]
    assert (len(plan().notes), plan("search.start_rate=30").notes) == (1, ())
