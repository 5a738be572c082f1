"""Kubernetes manifests of a deployment: what ``kvbench launch`` would start here, as pods.

Each instance, and the router with its helpers, is a StatefulSet of one pod behind a headless Service, whose
name is what the others know it by. Specs and files that processes read are ConfigMaps.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import yaml
from pydantic import Field, ValidationError

from kvbench.connectors.mooncake import IN_VLLM
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.plan.processes import RUN_TAG_ENV, ProcessSpec, nic_env
from kvbench.core.scenario.base import Section
from kvbench.core.scenario.hosts import NODE, RemoteHost, Roles
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.planning.process_specs import placed_specs
from kvbench.version import __version__

Manifest = dict[str, Any]

_NAME: Final = r"^([a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?)?$"
_RESOURCE: Final = r"^([A-Za-z0-9._/-]{1,253}(=[0-9]{1,4})?)?$"
SPECS: Final = "/etc/kvbench"


class K8sOptions(Section):
    """What a cluster needs to know beside the scenario."""

    image: str = Field(f"kvbench:{__version__}", min_length=1, description="image with kvbench installed")
    engine_image: str = Field("", description="image of the instances, if it is another, such as vLLM's")
    namespace: str = Field("", pattern=_NAME, description="namespace of everything; by default kubectl's")
    gpu: str = Field(
        "nvidia.com/gpu",
        pattern=_RESOURCE,
        description="GPU resource: as many of it as an instance has ranks",
    )
    rdma: str = Field(
        "",
        pattern=_RESOURCE,
        description="RDMA resource of each instance, such as rdma/hca_shared_devices_a=1",
    )
    model_claim: str = Field("", pattern=_NAME, description="PersistentVolumeClaim with the model's files")
    model_mount: str = Field("/models", pattern=r"^/[^\x00-\x20]{1,200}$", description="where it is mounted")
    cpu: str = Field("", pattern=r"^([0-9.]+m?)?$", description="CPU request of each instance, such as 4")
    memory: str = Field("", pattern=r"^([0-9.]+[KMGTi]{0,2})?$", description="memory request, such as 64Gi")
    shared_memory: str = Field(
        "16Gi", pattern=r"^[0-9.]+[KMGTi]{0,2}$", description="limit of /dev/shm in an instance's pod"
    )
    service_account: str = Field("", pattern=_NAME, description="service account of the pods")


def options_from(words: Sequence[str]) -> K8sOptions:
    """Options given as NAME=VALUE. Raises InputError with all mistakes."""
    given = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise InputError(f"--with {word}: must be NAME=VALUE")
        given[name.replace("-", "_")] = value
    try:
        return K8sOptions.model_validate(given)
    except ValidationError as error:
        problems = [f"--with {each['loc'][0]}: {each['msg']}" for each in error.errors()]
        known = ", ".join(K8sOptions.model_fields)
        raise InputError("\n".join(problems), hint=f"known are: {known}") from None


def pod_manifests(
    scenario: Scenario,
    planned: DeploymentPlan,
    options: K8sOptions,
    name: str,
    members: Sequence[ProcessSpec],
) -> list[Manifest]:
    """The manifests of the pod ``name`` with these processes, the instance or the router last."""
    role = members[-1].name.partition("-")[0]
    nodes = {each.name: len(scenario.deployment.nodes_of(each.name)) for each in planned.instances}
    labels = {
        "app.kubernetes.io/name": "kvbench",
        "app.kubernetes.io/instance": name,
        "kvbench/scenario": k8s_name(scenario.name),
        "kvbench/deployment": k8s_name(planned.label),
        "kvbench/role": role,
        "kvbench/run-tag": run_tag(scenario, planned),
    }
    meta: Manifest = {"name": name, "labels": labels}
    if options.namespace:
        meta["namespace"] = options.namespace
    selector = {"app.kubernetes.io/instance": name}
    ports = [
        {"name": f"p{number}", "port": number, "targetPort": number}
        for number in _ports(planned, members, nodes)
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        # Headless: the name is the pod's own address, to which it can bind; known before it is ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": ports,
        },
    }
    files = {file: text for each in members for file, text in _files(each).items()}
    files |= _modules(members[-1])
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": files}
    pod = _pod_spec(scenario, options, name, members, run_tag(scenario, planned))
    workload = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta,
        "spec": {
            "serviceName": name,
            "replicas": 1,
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return [*([config] if files else []), service, workload]


def _pod_spec(
    scenario: Scenario, options: K8sOptions, name: str, members: Sequence[ProcessSpec], tag: str
) -> Manifest:
    volumes: list[Manifest] = []
    if any(_files(each) or _modules(each) for each in members):
        volumes.append({"name": "specs", "configMap": {"name": name}})
    instance = members[-1].name != "router"
    if instance:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}})
        if options.model_claim:
            volumes.append(
                {
                    "name": "model",
                    "persistentVolumeClaim": {"claimName": options.model_claim, "readOnly": True},
                }
            )
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 10,
        "containers": [_container(scenario, options, name, each, tag) for each in members],
    }
    if volumes:
        pod["volumes"] = volumes
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    return pod


def _container(scenario: Scenario, options: K8sOptions, name: str, spec: ProcessSpec, tag: str) -> Manifest:
    """One process. Its own address in arguments and environment becomes the pod's IP, to bind to."""
    engine = spec.name.partition("-")[0] in ("prefill", "decode", "aggregated")
    # A pod that is given an RDMA resource sees RDMA devices, any other one interfaces.
    env = {**nic_env(spec.nics, rdma=bool(options.rdma)), **spec.env, RUN_TAG_ENV: tag}
    if _modules(spec):
        env["PYTHONPATH"] = env["PYTHONPATH"].replace(str(IN_VLLM), SPECS)
    env |= {variable: f"{SPECS}/{_file_name(spec, variable)}" for variable in spec.files}
    argv = ["python3" if word == sys.executable else word for word in spec.argv]
    argv += [f"{SPECS}/{spec.name}.json"] if spec.spec is not None else []
    container: Manifest = {
        "name": k8s_name(spec.name),
        "image": (engine and options.engine_image) or options.image,
        "command": [_expanded(word, name) for word in argv],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": key, "value": _expanded(value, name)} for key, value in env.items()),
        ],
    }
    mounts = (
        [{"name": "specs", "mountPath": SPECS, "readOnly": True}] if _files(spec) or _modules(spec) else []
    )
    if spec.port:
        container["ports"] = [{"name": "http", "containerPort": spec.port}]
        container |= _probes(spec, scenario.deployment.ready_timeout_s)
    if engine:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        if options.model_claim:
            mounts.append({"name": "model", "mountPath": options.model_mount, "readOnly": True})
        container |= _resources(scenario, options, spec.name)
    if mounts:
        container["volumeMounts"] = mounts
    return container


def _resources(scenario: Scenario, options: K8sOptions, instance: str) -> Manifest:
    limits: dict[str, str] = {}
    if options.gpu and scenario.deployment.engine_options.uses_gpus:
        hosts = max(1, len(scenario.deployment.nodes_of(instance)))
        limits[options.gpu.partition("=")[0]] = str(scenario.deployment.ranks_of(instance).gpus // hosts)
    found: Manifest = {}
    if options.rdma:
        resource, _, count = options.rdma.partition("=")
        limits[resource] = count or "1"
        # Memory is pinned for the NIC.
        found["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    requests = {key: value for key, value in (("cpu", options.cpu), ("memory", options.memory)) if value}
    resources = {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
    return {**found, **({"resources": resources} if resources else {})}


def _probes(spec: ProcessSpec, ready_s: float) -> Manifest:
    """Readiness as kvbench itself asks for it; so long for the start as the scenario gives it."""
    path = re.sub(r"^https?://[^/]+", "", spec.ready_url)
    asked: Manifest = {"httpGet": {"path": path, "port": spec.port}} if path else {}
    asked = asked or {"tcpSocket": {"port": spec.port}}
    return {
        "startupProbe": {**asked, "periodSeconds": 2, "failureThreshold": max(15, round(ready_s / 2))},
        "readinessProbe": {**asked, "periodSeconds": 2},
    }


def _ports(planned: DeploymentPlan, members: Sequence[ProcessSpec], nodes: Mapping[str, int]) -> list[int]:
    """All that a pod's processes listen on: HTTP, side channels, helpers. ``nodes``: hosts by instance."""
    of_instance = {each.name: each for each in planned.instances}
    ports: list[int] = []
    for each in members:
        name, _, node = each.name.partition(NODE)
        own = of_instance.get(name)
        ports += (each.port,) if own is None else own.ports_on(int(node or 0), nodes.get(name, 1))
    if members[-1].name == "router" or planned.router_port is None:
        ports += planned.service_ports
    return [port for port in dict.fromkeys(ports) if port]


def _files(spec: ProcessSpec) -> dict[str, str]:
    """The files that a process reads, by their names."""
    files = {_file_name(spec, variable): dict(content) for variable, content in spec.files.items()}
    if spec.spec is not None:
        files[f"{spec.name}.json"] = dict(spec.spec)
    return {name: json.dumps(content, indent=1) for name, content in files.items()}


def _modules(spec: ProcessSpec) -> dict[str, str]:
    """The modules of kvbench's that its engine loads, by their files; an engine's image has no kvbench."""
    if str(IN_VLLM) not in spec.env.get("PYTHONPATH", ""):
        return {}
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(IN_VLLM.glob("*.py"))}


def _file_name(spec: ProcessSpec, variable: str) -> str:
    return f"{spec.name}-{variable.lower()}.json"


def _expanded(word: str, own: str) -> str:
    """A word for Kubernetes, which expands $(NAME): what stood there already stays as it is."""
    return re.sub(rf"(?<![\w.-]){re.escape(own)}(?![\w-])", "$(POD_IP)", word.replace("$(", "$$("))


def k8s_name(text: str) -> str:
    """In letters that names and labels of Kubernetes may have."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-") or "kvbench"


def run_tag(scenario: Scenario, planned: DeploymentPlan) -> str:
    """What marks everything of this deployment: a label, and KVBENCH_RUN_TAG in the pods."""
    return k8s_name(f"k8s-{scenario.name}-{planned.label}")


LONGEST_NAME: Final = 52
"""A pod's label with the StatefulSet's revision adds eleven characters, and a label has 63 at most."""


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such; no anchors, which kubectl knows and people do not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def rendered(plan: Plan, options: K8sOptions, label: str = "") -> str:
    """The manifests of one deployment as YAML documents, with how to measure it as a comment.

    ``label``: which, if the scenario has several. Raises InputError.
    """
    scenario = plan.scenario
    planned = chosen(plan, label)
    manifests = manifests_of(scenario, planned, options)
    names = dns_names(scenario, planned)
    documents = "---\n".join(
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=110) for each in manifests
    )
    return f"{_header(scenario, planned, names)}{documents}"


def chosen(plan: Plan, label: str) -> DeploymentPlan:
    """The deployment of that label; without one, the only one there is. Raises InputError."""
    there = [each for each in plan.deployments if not each.reference_only]
    found = [each for each in there if each.label == label] if label else there
    if len(found) != 1:
        raise InputError(
            f"no deployment is called {label}" if label else "the scenario has several deployments",
            hint=f"choose one with --connector: {', '.join(each.label for each in there)}",
        )
    return found[0]


def dns_names(scenario: Scenario, planned: DeploymentPlan) -> dict[str, str]:
    """Process → the name of its Service. Raises InputError if a name is too long or not its own."""
    nodes_of = scenario.deployment.nodes_of
    processes = [
        f"{each.name}{NODE}{node}" if node else each.name
        for each in planned.instances
        for node in range(max(1, len(nodes_of(each.name))))
    ]
    processes += ["router"] if planned.router_port is not None else []
    names = {name: k8s_name(f"{scenario.name}-{planned.label}-{name}") for name in processes}
    for name in names.values():
        if len(name) > LONGEST_NAME:
            raise InputError(
                f"{name} is too long for the name of a pod ({len(name)} characters, {LONGEST_NAME} fit)",
                hint="give the scenario a shorter name: --set name=…",
            )
    return names


def manifests_of(scenario: Scenario, planned: DeploymentPlan, options: K8sOptions) -> list[Manifest]:
    """ConfigMap, Service and StatefulSet of each pod, in the order of start. Raises InputError."""
    scenario = scenario.at(planned.label)
    if not scenario.deployment.engine_options.starts_processes:
        raise InputError("an external server is not launched by kvbench", hint="name an engine that is")
    names = dns_names(scenario, planned)
    if any(each.port == 0 for each in planned.instances) or planned.router_port == 0:
        raise InputError(
            "pods need ports that are known beforehand", hint="give one: --set deployment.base_port=21000"
        )
    undealt = tuple(replace(each, devices=()) for each in planned.instances)
    specs, _ = placed_specs(_placed(scenario, names), replace(planned, instances=undealt), dealt=False)
    home = "router" if "router" in names else planned.instances[0].name
    pods: dict[str, list[ProcessSpec]] = {name: [] for name in names}
    for spec in specs:  # helpers are in the router's pod
        pods[spec.name if spec.name in pods else home].append(spec)
    found: list[Manifest] = []
    for name, members in pods.items():
        found += pod_manifests(scenario, planned, options, names[name], members)
    return found


def _placed(scenario: Scenario, names: Mapping[str, str]) -> Scenario:
    """The scenario with each process on a host of its own, which is its Service."""
    deployment = scenario.deployment
    groups: dict[str, list[list[str]]] = {"prefill": [], "decode": [], "aggregated": []}
    for name, pod in names.items():
        if NODE in name:
            groups[name.partition("-")[0]][-1].append(pod)
        elif name != "router":
            groups[name.partition("-")[0]].append([pod])
    # Helpers have the router's place, even without a router.
    roles = {**groups, "router": [names["router"]] if "router" in names else groups["aggregated"][0]}
    hosts = {}
    for name, pod in names.items():
        own = deployment.hosts[deployment.host_name(name)] if deployment.hosts else RemoteHost(address=pod)
        hosts[pod] = RemoteHost(address=pod, env=own.env, nics=own.nics)
    # The choice of devices is that of one machine; a pod sees what it was given.
    deployment = deployment.model_copy(
        update={
            "hosts": hosts,
            "roles": Roles.model_validate(roles),
            "engine_options": deployment.engine_options.without_devices(),
        }
    )
    return scenario.model_copy(update={"deployment": deployment})


def _header(scenario: Scenario, planned: DeploymentPlan, names: Mapping[str, str]) -> str:
    ports = {each.name: each.port for each in planned.instances}
    first = planned.instances[0].name
    base = (
        f"{names['router']}:{planned.router_port}" if "router" in names else f"{names[first]}:{ports[first]}"
    )
    pages = {
        f"--{role}-metrics-url": f"http://{names[f'{role}-0']}:{ports[f'{role}-0']}/metrics"
        for role in ("prefill", "decode")
        if f"{role}-0" in names
    }
    words = " ".join([f"--base-url http://{base}", *(f"{key} {value}" for key, value in pages.items())])
    return (
        f"# {scenario.name}: {planned.label}, by kvbench {__version__}\n"
        f"# all of it: kubectl get,delete all,configmap -l kvbench/run-tag={run_tag(scenario, planned)}\n"
        f"# from a pod in the same namespace: kvbench sweep {words}\n"
    )
