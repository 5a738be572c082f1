"""The Kubernetes manifests of a plan: valid by Kubernetes' own schemas, and pods that find each other."""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from jsonschema.validators import Draft202012Validator
from kubernetes_validate.utils import all_versions, major_minor, schema_contents
from referencing import Registry, Resource

from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.planning.kubernetes import K8sOptions, options_from, render_manifests, run_tag
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of

VERSION = "1.30"
"""Old enough for clusters in use; nothing newer is needed."""
RDMA = "rdma/hca_shared_devices_a=2"


def scenario_of(name: str, *settings: str, connector: str = "") -> Scenario:
    chosen = [connector] if connector else []
    scenario, _ = resolve(CliOptions(scenario=name, overrides=settings, connectors=tuple(chosen)))
    return scenario


def manifests(scenario: Scenario, words: Sequence[str] = ()) -> list[dict[str, Any]]:
    text = render_manifests(plan_of(scenario), options_from(words))
    return [document for document in yaml.safe_load_all(text) if document]


@functools.cache
def by_schema(kind: str, api_version: str) -> Draft202012Validator:
    """What ``kubernetes_validate.validate`` judges a kind by, strictly; read once, as it is 3 MB."""
    *_, version = [release for release in all_versions() if major_minor(release) == VERSION]
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    schema = schema_contents(f"{folder}/{kind.lower()}-{api_version.replace('/', '-')}.json", VERSION)
    definitions = schema_contents(f"{folder}/_definitions.json", VERSION)
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    return Draft202012Validator(schema, registry=registry)


def validate(document: dict[str, Any]) -> None:
    by_schema(document["kind"], document["apiVersion"]).validate(document)


def test_the_schemas_refuse_what_kubernetes_would() -> None:
    service, *_ = of_kind(manifests(scenario_of("quickstart", connector="nixl")), "Service").values()
    validate(service)
    for wrong in ({**service, "spec": {"ports": "8000"}}, {**service, "unknown": 1}):
        with pytest.raises(ValidationError):
            validate(wrong)


def of_kind(documents: Sequence[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


def container(documents: Sequence[dict[str, Any]], end: str, index: int = 0) -> dict[str, Any]:
    found = [document for name, document in of_kind(documents, "StatefulSet").items() if name.endswith(end)]
    (workload,) = found
    chosen: dict[str, Any] = workload["spec"]["template"]["spec"]["containers"][index]
    return chosen


@pytest.mark.parametrize(
    ("name", "connector"),
    [
        ("quickstart", "aggregated"), ("quickstart", "mooncake"), ("quickstart", "nixl"), ("xpyd", ""),
        ("qwen3-30b-a3b-h200-mooncake", "mooncake"), ("qwen3-30b-a3b-h200-nixl", "nixl"),
        ("qwen3-30b-a3b-h200-nccl-0.13", "nccl"),
    ],
)  # fmt: skip
def test_every_manifest_is_valid_by_the_schemas_of_kubernetes(name: str, connector: str) -> None:
    scenario = scenario_of(name, "deployment.base_port=21000", connector=connector)
    if not connector:
        labels = [choice.label for choice in scenario.connectors]
        scenario = scenario_of(name, "deployment.base_port=21000", connector=labels[-1])
    words = [f"rdma={RDMA}", "model-claim=models", "cpu=4", "memory=64Gi", "namespace=bench"]
    documents = manifests(scenario, words)
    for document in documents:
        validate(document)
    services, workloads = of_kind(documents, "Service"), of_kind(documents, "StatefulSet")
    deployment = scenario.deployment
    engines = deployment.prefill.instances + deployment.decode.instances
    wanted = engines + 1  # without P/D as many engines, and the router
    assert list(services) == list(workloads)
    assert len(workloads) == wanted


def test_names_that_processes_are_told_are_services_with_those_ports() -> None:
    documents = manifests(scenario_of("quickstart", connector="mooncake"))
    ports = {
        name: {entry["port"] for entry in service["spec"]["ports"]}
        for name, service in of_kind(documents, "Service").items()
    }
    configs = of_kind(documents, "ConfigMap")
    router = json.loads(configs["quickstart-mooncake-router"]["data"]["router.json"])
    urls = [server["url"] for server in (*router["prefill"], *router["decode"])]
    assert len(urls) == 2
    for url in urls:
        name, _, port = url.removeprefix("http://").partition(":")
        assert int(port) in ports[name]
    prefill = json.loads(configs["quickstart-mooncake-prefill-0"]["data"]["prefill-0.json"])
    assert prefill["port"] in ports[prefill["host"]]


def test_what_binds_to_an_address_gets_the_pods_own() -> None:
    documents = manifests(scenario_of("qwen3-30b-a3b-h200-nixl", connector="nixl"))
    prefill = container(documents, "prefill-0")
    command = prefill["command"]
    assert command[command.index("--host") + 1] == "$(POD_IP)"
    env = {variable["name"]: variable.get("value") for variable in prefill["env"]}
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    assert prefill["env"][0] == {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    # Of its neighbours it knows the names.
    assert not [word for word in container(documents, "router")["command"] if "POD_IP" in word]


def test_instances_ask_for_their_gpus_and_rdma_devices() -> None:
    scenario = scenario_of("qwen3-30b-a3b-h200-mooncake", connector="mooncake")
    documents = manifests(scenario, [f"rdma={RDMA}", "engine-image=vllm/vllm-openai:v0.11.0", "image=mine:1"])
    ranks = str(scenario.deployment.ranks_of("prefill-0").gpus)
    for end in ("prefill-0", "decode-0"):
        instance = container(documents, end)
        assert instance["image"] == "vllm/vllm-openai:v0.11.0"
        limits = instance["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": ranks, "rdma/hca_shared_devices_a": "2"}
        assert instance["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert "CUDA_VISIBLE_DEVICES" not in {variable["name"] for variable in instance["env"]}
    router = container(documents, "router")
    assert router["image"] == "mine:1"
    assert "resources" not in router


PODS = {"prefill-0": ("a", "4"), "prefill-0-node1": ("b", "4"), "decode-0": ("c", "8")}
"""Pod → its host, and its GPUs."""


def three_hosts(folder: Path) -> list[dict[str, Any]]:
    """Manifests of P over two hosts and D on one, with a NIC and a variable of each host's own."""
    hosts = {n: {"address": n, "nics": [f"mlx5_{n}"], "env": {"OF": n}} for n in "abc"}
    deployment = {
        "engine": "vllm",
        "engine_options": {"model": "m", "version": "0.16.0", "env": {"PYTHONPATH": "/mine"}},
        "launcher": "ssh", "hosts": hosts, "roles": {"prefill": [["a", "b"]], "decode": ["c"]},
        "tensor_parallel_size": 4, "decode": {"data_parallel_size": 2},
        "prefill": {"data_parallel_size": 2},
    }  # fmt: skip
    text = {
        "version": 1, "model": "tiny", "deployment": deployment,
        "connectors": [{"name": "mooncake", "device_name": "mlx5_0"}],
        "workload": {"input_len": 64, "output_len": 4}, "slo": {"ttft_ms": 100},
    }  # fmt: skip
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(text))
    return manifests(scenario_of(str(path)), [f"rdma={RDMA}", "engine-image=vllm:1"])


def pod_problems(documents: Sequence[dict[str, Any]]) -> list[str]:
    """What a pod has that is not its own node's, by pod."""
    found = []
    for end, (host, gpus) in PODS.items():
        pod = container(documents, end)
        env = {variable["name"]: variable.get("value") for variable in pod["env"]}
        wanted = {"OF": host, "UCX_NET_DEVICES": f"mlx5_{host}:1", "NCCL_IB_HCA": f"=mlx5_{host}"}
        wanted |= dict.fromkeys(("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST"), "$(POD_IP)")
        # vLLM's image has no kvbench, and this machine's folder is not there; nor are its GPUs' numbers.
        wanted |= {"PYTHONPATH": "/mine:/etc/kvbench", "CUDA_VISIBLE_DEVICES": None}
        found += [f"{end}: {key}" for key, value in wanted.items() if env.get(key) != value]
        if pod["resources"]["limits"].get("nvidia.com/gpu") != gpus:
            found.append(f"{end}: GPUs")
        command, meeting = pod["command"], {"a": "$(POD_IP)", "b": "s-mooncake-prefill-0"}.get(host)
        at = {"--host": "$(POD_IP)", "--master-addr": meeting, "--data-parallel-address": meeting}
        for flag, value in at.items():
            if (command[command.index(flag) + 1] if flag in command else None) != value:
                found.append(f"{end}: {flag}")
        headless = "--headless" in command or "readinessProbe" not in pod
        found += [f"{end}: headless"] if headless != (host == "b") else []
        files = of_kind(documents, "ConfigMap")[f"s-mooncake-{end}"]["data"]
        mount = {"name": "specs", "mountPath": "/etc/kvbench", "readOnly": True}
        if "kvbench_vllm_mooncake.py" not in files or mount not in pod["volumeMounts"]:
            found.append(f"{end}: files")
    return found


def test_pods_have_their_hosts_environment_and_an_instance_a_pod_on_each_host(tmp_path: Path) -> None:
    documents = three_hosts(tmp_path)
    for document in documents:
        validate(document)
    assert pod_problems(documents) == []


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ("VLLM_HOST_IP", "a"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "a"),
        ("UCX_NET_DEVICES", "mlx5_a:1"),
        ("NCCL_IB_HCA", None),
        ("OF", "a"),
        ("PYTHONPATH", str(Path(__file__).parents[2] / "kvbench/connectors/in_vllm")),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3"),
        ("--host", "b"),
        ("--master-addr", "a"),
        ("--data-parallel-address", "a"),
        ("headless", None),
        ("GPUs", "8"),
        ("files", None),
    ],
)
def test_each_mistake_of_a_pod_is_seen(wrong: str, value: str | None, tmp_path: Path) -> None:
    documents = three_hosts(tmp_path)
    pod = container(documents, "prefill-0-node1")
    if wrong.startswith("--"):
        pod["command"][pod["command"].index(wrong) + 1] = value
    elif wrong == "headless":
        pod["command"].remove("--headless")
        pod["readinessProbe"] = {}
    elif wrong == "GPUs":
        pod["resources"]["limits"]["nvidia.com/gpu"] = value
    elif wrong == "files":
        pod["volumeMounts"].clear()
    else:
        pod["env"] = [variable for variable in pod["env"] if variable["name"] != wrong]
        pod["env"] += [] if value is None else [{"name": wrong, "value": value}]
    assert pod_problems(documents) == [f"prefill-0-node1: {wrong}"]


def test_everything_carries_the_run_tag() -> None:
    scenario = scenario_of("quickstart", connector="nixl")
    (planned,) = [deployment for deployment in plan_of(scenario).deployments if not deployment.reference_only]
    tag = run_tag(scenario, planned)
    documents = manifests(scenario)
    assert {document["metadata"]["labels"]["kvbench/run-tag"] for document in documents} == {tag}
    for workload in of_kind(documents, "StatefulSet").values():
        for container in workload["spec"]["template"]["spec"]["containers"]:
            assert {"name": "KVBENCH_RUN_TAG", "value": tag} in container["env"]


def test_files_that_a_process_is_told_of_are_mounted() -> None:
    for name, workload in of_kind(
        manifests(scenario_of("quickstart", connector="nixl")), "StatefulSet"
    ).items():
        for container in workload["spec"]["template"]["spec"]["containers"]:
            paths = [word for word in container["command"] if word.startswith("/etc/kvbench/")]
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert paths, name
            assert "/etc/kvbench" in mounted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["image"], "must be NAME=VALUE"),
        (["nope=1"], "known are: image"),
        (["namespace=UPPER"], "namespace"),
        (["model-mount=relative"], "model_mount"),
    ],
)
def test_wrong_options_are_refused_with_what_is_known(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        options_from(words)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_what_cannot_be_rendered_is_told() -> None:
    with pytest.raises(InputError, match="several deployments"):
        render_manifests(plan_of(scenario_of("quickstart")), K8sOptions())
    with pytest.raises(InputError, match="fixed ports"):
        manifests(scenario_of("quickstart", "deployment.base_port=0", connector="nixl"))
    with pytest.raises(InputError, match="too long"):
        manifests(scenario_of("quickstart", f"name={'n' * 60}", connector="nixl"))


def test_the_words_that_kubernetes_would_expand_stay_as_they_are(tmp_path: Path) -> None:
    scenario = scenario_of("qwen3-30b-a3b-h200-nixl", connector="nixl")
    options = scenario.deployment.engine_options.model_copy(update={"env": {"ODD": "$(HOME) and $PATH"}})
    deployment = scenario.deployment.model_copy(update={"engine_options": options})
    documents = manifests(scenario.model_copy(update={"deployment": deployment}))
    env = {variable["name"]: variable.get("value") for variable in container(documents, "prefill-0")["env"]}
    assert env["ODD"] == "$$(HOME) and $PATH"
    assert not re.search(r"[&*]id\d", render_manifests(plan_of(scenario), K8sOptions()))
