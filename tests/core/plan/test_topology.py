"""P and D with ranks of their own: as a scenario writes them, as they are planned, dealt GPUs and started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hgx
import pytest
import yaml
from commands import kvbench, the_run
from jsonschema.validators import Draft202012Validator

from kvbench.core.findings.setups import unequal_ranks
from kvbench.core.plan.engine_count import ranks_in
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.scenario import Scenario, parse_scenario, scenario_schema
from kvbench.errors import LaunchError, ScenarioError
from kvbench.launchers.parts.sockets import free_ports, is_free, require_free_port
from kvbench.planning.doctor.scenario import plan_ports_check
from kvbench.planning.gpu_dealing import VISIBLE
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import process_specs
from kvbench.planning.scenario_files import load_scenario, registry

UNEQUAL = {"prefill": {"instances": 2, "tensor_parallel_size": 2}, "decode": {"tensor_parallel_size": 4}}


def written(listed: str = "[aggregated, nixl]", **deployment: Any) -> dict[str, Any]:
    """A scenario file's content; ``deployment`` for vLLM unless it names another engine."""
    engine = {"engine": "vllm", "engine_options": {"model": "m", "version": "0.33.0"}}
    return {
        "version": 1, "model": "qwen3-30b-a3b", "deployment": {"base_port": 23000, **engine, **deployment},
        "connectors": yaml.safe_load(listed), "workload": {"input_len": [64], "output_len": 4},
        "slo": {"ttft_ms": 200},
    }  # fmt: skip


def parsed(listed: str = "[aggregated, nixl]", *overrides: str, **deployment: Any) -> Scenario:
    text = yaml.safe_dump(written(listed, **deployment))
    return parse_scenario(text, "topology.yaml", registry(), overrides)


def planned(scenario: Scenario, label: str) -> DeploymentPlan:
    return next(deployment for deployment in plan_of(scenario).deployments if deployment.label == label)


def specs(scenario: Scenario, label: str) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in process_specs(scenario, planned(scenario, label))}


def flags(spec: ProcessSpec) -> dict[str, str]:
    """The flags for ranks, with their values."""
    names = [word for word in spec.argv if "-parallel" in word]
    return {name: spec.argv[spec.argv.index(name) + 1] for name in names}


# ---------------------------------------------------------------- as written
def test_a_role_is_a_number_or_a_mapping_and_stays_what_it_was() -> None:
    scenario = parsed(**UNEQUAL, aggregated=3)
    deployment = scenario.resolved()["deployment"]
    assert deployment["prefill"] == {"instances": 2, "tensor_parallel_size": 2}
    assert deployment["decode"] == {"instances": 1, "tensor_parallel_size": 4}
    assert deployment["aggregated"] == 3
    plain = parsed(prefill=2, tensor_parallel_size=4).resolved()["deployment"]
    assert (plain["prefill"], plain["tensor_parallel_size"], plain["aggregated"]) == (2, 4, None)
    for variant in (scenario, parsed(tensor_parallel_size=[1, 2])):
        again = parse_scenario(yaml.safe_dump(variant.resolved()), "again.yaml", registry())
        assert again.resolved() == variant.resolved()


def test_the_schema_takes_what_is_taken() -> None:
    schema = Draft202012Validator(scenario_schema(registry()))
    for deployment in (UNEQUAL, {"tensor_parallel_size": [1, 2]}, {"prefill": 2, "aggregated": 3}):
        assert schema.is_valid(written(**deployment)), deployment
    assert schema.is_valid(written("[{name: nixl, tensor_parallel_size: 2}]"))
    for wrong in ({"prefill": "two"}, {"prefill": {"ranks": 2}}, {"tensor_parallel_size": []}):
        assert not schema.is_valid(written(**wrong)), wrong


def test_an_override_goes_into_a_number() -> None:
    scenario = parsed("[nixl]", "deployment.prefill.tensor_parallel_size=4", prefill=2)
    assert scenario.deployment.prefill.instances == 2
    assert scenario.deployment.ranks_of("prefill-1") == Ranks(4)
    assert scenario.deployment.ranks_of("decode-0") == Ranks(1)


@pytest.mark.parametrize(("given", "message"), [
    ({"prefill": {"instances": 0}}, r"deployment\.prefill\.instances must be at least 1, not 0"),
    ({"prefill": {"instnces": 1}}, "did you mean `instances`"),
    ({"prefill": True}, r"deployment\.prefill: must be a whole number, or a mapping"),
    ({"tensor_parallel_size": 0}, r"deployment\.tensor_parallel_size: must be 1 to 64, not 0"),
    ({"tensor_parallel_size": [2, 2]}, "a list of different ones"),
    ({**UNEQUAL, "tensor_parallel_size": [1, 2]}, "no effect if prefill and decode set their own sizes"),
    ({**UNEQUAL, "aggregated": {"tensor_parallel_size": 3}}, "do not make up the 8 of prefill and decode"),
    ({"engine": "emulated", "engine_options": {}, "decode": {"data_parallel_size": 2}},
     "an instance of the emulated engine supports tensor parallel ranks only"),
    ({"engine_options": {"model": "m", "decode_args": {"data-parallel-size": 2}},
      "decode": {"data_parallel_size": 2}}, "the engine's arguments also set it"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_its_place(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        parsed(**given)


# ---------------------------------------------------------------- ranks, flags, GPUs, ports
def test_each_role_asks_for_its_ranks() -> None:
    moe = {"instances": 1, "tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel": True}
    scenario = parsed(prefill=moe, decode={"pipeline_parallel_size": 2}, tensor_parallel_size=4)
    found = specs(scenario, "nixl")
    assert flags(found["prefill-0"]) == {
        "--tensor-parallel-size": "2",
        "--data-parallel-size": "2",
        "--enable-expert-parallel": "--kv-cache-dtype",
    }
    assert flags(found["decode-0"]) == {"--tensor-parallel-size": "4", "--pipeline-parallel-size": "2"}
    # Its engines stand where P and D do.
    whole = specs(scenario, "aggregated")
    assert [flags(whole[f"aggregated-{rank}"])["--tensor-parallel-size"] for rank in (0, 1)] == ["2", "4"]


def test_an_engine_without_pd_may_have_its_own_ranks_on_the_same_gpus() -> None:
    deployment = parsed(**UNEQUAL, aggregated={"tensor_parallel_size": 4}).deployment
    assert (deployment.pair_gpus, deployment.aggregated_engines) == (8, 2)
    assert {deployment.ranks_of(f"aggregated-{rank}") for rank in (0, 1)} == {Ranks(4)}
    assert parsed(**UNEQUAL).deployment.aggregated_engines == 3


def test_gpus_are_dealt_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hgx.write_smi(tmp_path, 8)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(VISIBLE, raising=False)
    for label in ("aggregated", "nixl"):
        devices = [instance.devices for instance in planned(parsed(**UNEQUAL), label).instances]
        assert devices == [("0", "1"), ("2", "3"), ("4", "5", "6", "7")]


@pytest.mark.parametrize(("version", "listed", "counts"), [
    ("0.11.0", "[nixl]", [4, 4]), ("0.11.1", "[nixl]", [2, 1]), ("0.24.0", "[nixl_push]", [2, 1]),
    ("0.13.0", "[mooncake]", [4, 0]), ("0.33.0", "[mooncake]", [1, 0]), ("0.13.0", "[nccl]", [8, 4]),
])  # fmt: skip
def test_every_port_that_a_rank_binds_is_planned(version: str, listed: str, counts: list[int]) -> None:
    prefill = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    if listed == "[nccl]":
        prefill["pipeline_parallel_size"] = 2
    options = {"model": "m", "version": version}
    scenario = parsed(listed, prefill=prefill, decode={"tensor_parallel_size": 4}, engine_options=options)
    plan = planned(scenario, listed[1:-1])
    assert [len(instance.all_side_ports) for instance in plan.instances] == counts
    assert len(set(plan.ports)) == len(plan.ports) == 3 + sum(counts)


def test_a_plan_says_ranks_where_they_differ_and_else_is_as_older_ones() -> None:
    unequal, plain = plan_of(parsed(**UNEQUAL)).to_json(), plan_of(parsed(tensor_parallel_size=4)).to_json()
    assert ranks_in(unequal, "nixl") == {"prefill-0": 2, "prefill-1": 2, "decode-0": 4}
    assert ranks_in(unequal, "aggregated") == {"aggregated-0": 2, "aggregated-1": 2, "aggregated-2": 4}
    assert ranks_in(plain, "nixl") == {"prefill-0": 4, "decode-0": 4}
    assert all("ranks" not in instance for one in plain["deployments"] for instance in one["instances"])


# ---------------------------------------------------------------- a list of sizes
def test_of_a_list_of_sizes_each_connector_is_measured_with_each() -> None:
    scenario = parsed(
        "[aggregated, nixl, {name: nixl, label: own, tensor_parallel_size: 8}]", tensor_parallel_size=[1, 4]
    )
    plan = plan_of(scenario)
    labels = ["aggregated-tp1", "aggregated-tp4", "nixl-tp1", "own", "nixl-tp4"]
    assert [deployment.label for deployment in plan.deployments] == ["reference-tp8", *labels]
    assert [cell.connector for cell in plan.cells] == labels
    assert [scenario.deployed(label).ranks_of("decode-0").tensor for label in labels] == [1, 4, 1, 8, 4]
    assert flags(specs(scenario, "nixl-tp4")["decode-0"]) == {"--tensor-parallel-size": "4"}
    assert ranks_in(plan.to_json(), "own") == {"prefill-0": 8, "decode-0": 8}
    # Beyond four KV heads each is stored more than once: these bytes go over the wire, too.
    assert [size.wire_bytes for size in plan.kv] == [plan.kv[0].wire_bytes, 2 * plan.kv[0].wire_bytes]
    with pytest.raises(ScenarioError, match="nixl-tp1"):
        parsed("[nixl, {name: nixl, label: nixl-tp1, tensor_parallel_size: 2}]", tensor_parallel_size=[1, 2])


def test_each_size_has_a_reference_of_its_own() -> None:
    listed = "[aggregated, nixl, {name: nixl, label: own, tensor_parallel_size: 8}]"
    plan = plan_of(parsed(listed, tensor_parallel_size=[1, 4]))
    assert plan.to_json()["references"] == plan.references
    assert {label: plan.reference_of(label) for label in ("nixl-tp1", "nixl-tp4", "own")} == {
        "nixl-tp1": "aggregated-tp1",
        "nixl-tp4": "aggregated-tp4",
        "own": "reference-tp8",
    }
    added = plan.deployments[0]
    assert (added.label, added.reference_only) == ("reference-tp8", True)
    assert flags(specs(plan.scenario, "reference-tp8")["aggregated-0"])["--tensor-parallel-size"] == "8"
    one = plan_of(parsed("[nixl]", tensor_parallel_size=4))
    assert (one.references, one.reference_of("nixl")) == ({}, "reference")
    assert "references" not in one.to_json()


@pytest.mark.parametrize(("listed", "deployment", "messages"), [
    ("[aggregated, nixl]", {"tensor_parallel_size": 4}, []),
    ("[aggregated, nixl]", UNEQUAL, ["nixl: prefill has TP 2 and decode TP 4"]),
    ("[nixl, mooncake]", UNEQUAL, ["nixl, mooncake: prefill has TP 2 and decode TP 4"]),
    ("[nixl]", {"tensor_parallel_size": [2, 1]},
     ["unequal tensor parallel sizes (TP 1: nixl-tp1; TP 2: nixl-tp2)"]),
    ("[aggregated, nixl]",
     {"prefill": {"tensor_parallel_size": 2}, "aggregated": {"tensor_parallel_size": 1}},
     ["prefill has TP 2 and decode TP 1", "(TP 1: aggregated; TP 1 and 2: nixl)"]),
])  # fmt: skip
def test_unequal_sizes_are_warned_of(listed: str, deployment: dict[str, Any], messages: list[str]) -> None:
    plan = plan_of(parsed(listed, **deployment)).to_json()
    labels = [entry["label"] for entry in plan["deployments"] if not entry["reference_only"]]
    found = list(unequal_ranks(plan, labels))
    assert len(found) == len(messages)
    for warning, words in zip(found, messages, strict=True):
        assert words in warning.message
        assert f"{warning.message}; {warning.advice}" in plan["notes"]


@pytest.mark.timeout(240)
def test_the_same_topology_runs_without_gpus(tmp_path: Path) -> None:
    """P with two ranks, D with one and with eight, of a model with two KV heads."""
    sets = (
        "model={preset: tiny, kv_heads: 2}", "deployment.tensor_parallel_size=[1, 8]",
        "deployment.prefill.tensor_parallel_size=2", "workload.input_len=[64]", "search.trial_s=2",
        "search.min_requests=10", "search.max_requests=40",
    )  # fmt: skip
    words = ("bench", "quickstart", "--rate", "10", "--connector", "tcp", "--output", str(tmp_path))
    done = kvbench(*words, sets=sets)
    assert done.status in (0, 1), done.text  # on a busy machine trials are refused, and tell the same
    run = the_run(tmp_path)
    one, eight = run.trials
    assert (one.cell.connector, eight.cell.connector) == ("tcp-tp1", "tcp-tp8")
    assert eight.engine["kv_bytes_per_request"] == 4 * one.engine["kv_bytes_per_request"]
    for cell in run.cells:
        checked = cell.equal_outputs
        assert checked["equal"] == checked["checked"] > 0
    assert ranks_in(run.plan, "tcp-tp8") == {"prefill-0": 2, "decode-0": 8}
    assert {output["label"] for output in run.outputs} == {
        "reference-tp1",
        "reference-tp8",
        "tcp-tp1",
        "tcp-tp8",
    }
    assert "unequal tensor parallel sizes" in (run.path / "report.md").read_text()


# ---------------------------------------------------------------- ports of other hosts
ELSEWHERE = "192.0.2.1"
"""Of a net for examples (RFC 5737): no machine's."""


def test_ports_of_another_host_are_not_in_use_here() -> None:
    with pytest.raises(LaunchError, match=f"{ELSEWHERE} is not an address of this machine"):
        require_free_port(ELSEWHERE, 23000, "decode-0")
    with pytest.raises(LaunchError, match="is not an address of this machine"):
        free_ports(ELSEWHERE, [1])
    assert not is_free(ELSEWHERE, 0)
    scenario, _ = load_scenario(
        "quickstart", ["deployment.base_port=23500", f"deployment.decode_host={ELSEWHERE}"]
    )
    found = plan_ports_check(scenario, plan_of(scenario))
    assert (found.status, found.detail.rpartition("are free")[2]) == (
        "ok",
        f", except those of {ELSEWHERE}, which cannot be checked from here",
    )
