"""What is asked of Ray, node by node, and what a cluster lacks. The real thing: test_ray_lab.py."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.scenario.hosts import RayOptions
from kvbench.errors import MissingLibraryError
from kvbench.launchers.ray import (
    Bundle,
    RayNodesOf,
    bundles_of,
    describe_nodes,
    missing,
    placed,
    problem,
    unique_names,
)


def options(**given: Any) -> RayOptions:
    return RayOptions.model_validate(given)


def node(name: str, resources: Mapping[str, float], labels: Mapping[str, str], alive: bool = True) -> Any:
    return {"NodeName": name, "Alive": alive, "Resources": dict(resources), "Labels": dict(labels)}


NODES = [
    node("a", {"CPU": 8, "prefill_node": 1, "memory": 1e9, "node:10.0.0.1": 1}, {"gpu": "h200"}),
    node("b", {"CPU": 2}, {"gpu": "h100"}),
    node("c", {"CPU": 64, "decode_node": 1}, {}, alive=False),
]


def test_each_node_of_a_role_is_a_bundle_of_what_it_sets_aside() -> None:
    wanted = options(
        prefill={"resources": {"prefill_node": 1}, "num_gpus": 8, "nodes": 2},
        decode={"labels": {"gpu": "h100"}, "num_cpus": 0},
    )
    assert bundles_of(wanted) == [
        Bundle("prefill", {"CPU": 1, "GPU": 8, "prefill_node": 1}),
        Bundle("prefill", {"CPU": 1, "GPU": 8, "prefill_node": 1}),
        Bundle("decode", {"CPU": 0.01}, {"gpu": "h100"}),
    ]


def test_a_load_generator_alone_asks_for_its_nodes_only() -> None:
    assert bundles_of(options(), loadgen_only=True) == [Bundle("loadgen", {"CPU": 1})]
    (one, two) = bundles_of(options(loadgen={"nodes": 2, "num_cpus": 3}), loadgen_only=True)
    assert one == two == Bundle("loadgen", {"CPU": 3})
    assert placed([one, two], ["x", "y"]) == {"loadgen": ("x", "y")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": {"resources": {"CPU": 1}}}, {"prefill": {"resources": {"x": 0}}},
        {"decode": {"nodes": 0}}, {"address": "two words"}, {"env": {"A-B": "x"}},
    ],
)  # fmt: skip
def test_what_ray_could_not_place_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        options(**wrong)


def test_what_the_cluster_never_has_is_told_and_what_is_in_use_is_not() -> None:
    fits = [Bundle("prefill", {"CPU": 8, "prefill_node": 1}), Bundle("decode", {"CPU": 1}, {"gpu": "h100"})]
    assert missing(fits, NODES, spread=True) == []
    gone = [*fits, Bundle("loadgen", {"decode_node": 1})]  # its node is dead
    assert missing(gone, NODES, spread=False) == ["no node has what loadgen: decode_node 1 requires"]
    wrong = [Bundle("prefill", {"CPU": 1}, {"gpu": "b200"})]
    assert missing(wrong, NODES, spread=True) == ["no node has what prefill: CPU 1, label gpu=b200 requires"]
    many = [Bundle("prefill", {"CPU": 1})] * 3
    assert missing(many, NODES, spread=True) == ["3 nodes are requested, and the cluster has 2"]
    assert missing(many, NODES, spread=False) == []
    assert describe_nodes(NODES) == "a: CPU 8, prefill_node 1; b: CPU 2"


def test_roles_get_the_nodes_that_their_bundles_landed_on() -> None:
    bundles = [Bundle("prefill"), Bundle("prefill"), Bundle("decode"), Bundle("loadgen")]
    assert placed(bundles, ["a", "b", "a", "c"]) == {
        "prefill": ("a", "b"), "decode": ("a",), "router": ("a",), "loadgen": ("c",),
    }  # fmt: skip


@given(
    st.dictionaries(st.uuids().map(lambda uuid: uuid.hex), st.sampled_from(["n1", "n2", "n3"]), min_size=1)
)
def test_every_node_has_a_name_of_its_own(nodes: dict[str, str]) -> None:
    names = unique_names(nodes)
    assert len(set(names.values())) == len(nodes)
    assert all(names[key].startswith(name) for key, name in nodes.items())


@pytest.mark.skipif(not problem(), reason="Ray is installed here")
def test_without_ray_it_is_said_how_to_get_it() -> None:
    with pytest.raises(MissingLibraryError) as caught:
        RayNodesOf(options(), "tag").__enter__()
    assert "pip install ray" in caught.value.hint
