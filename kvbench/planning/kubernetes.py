"""Kubernetes manifests of a deployment.

Each instance, and the router with its helpers, is a StatefulSet of one pod behind a headless Service; the
Service's name is its address. Specs and input files are ConfigMaps."""

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
    """Cluster options besides the scenario."""

    image: str = Field(f"kvbench:{__version__}", min_length=1, description="image with kvbench installed")
    engine_image: str = Field("", description="image of the instances, if different, such as vLLM's")
    namespace: str = Field("", pattern=_NAME, description="namespace of everything; by default kubectl's")
    gpu: str = Field(
        "nvidia.com/gpu", pattern=_RESOURCE, description="GPU resource, one per rank of an instance"
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
    """Parse NAME=VALUE options. Raises InputError with all mistakes."""
    given = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise InputError(f"--with {word}: must be NAME=VALUE")
        given[name.replace("-", "_")] = value
    try:
        return K8sOptions.model_validate(given)
    except ValidationError as error:
        problems = [f"--with {mistake['loc'][0]}: {mistake['msg']}" for mistake in error.errors()]
        known = ", ".join(K8sOptions.model_fields)
        raise InputError("\n".join(problems), hint=f"known are: {known}") from None


def pod_manifests(
    scenario: Scenario,
    planned: DeploymentPlan,
    options: K8sOptions,
    name: str,
    members: Sequence[ProcessSpec],
) -> list[Manifest]:
    """Manifests of the pod ``name`` with these processes; the instance or router is last."""
    role = members[-1].name.partition("-")[0]
    nodes = {inst.name: len(scenario.deployment.nodes_of(inst.name)) for inst in planned.instances}
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
        # Headless: the name resolves to the pod's own address, for binding, before it is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports},
    }
    files = {file: text for member in members for file, text in _files(member).items()}
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
    if any(_files(member) or _modules(member) for member in members):
        volumes.append({"name": "specs", "configMap": {"name": name}})
    if members[-1].name != "router":
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
        "containers": [_container(scenario, options, name, member, tag) for member in members],
    }
    if volumes:
        pod["volumes"] = volumes
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    return pod


def _container(scenario: Scenario, options: K8sOptions, name: str, spec: ProcessSpec, tag: str) -> Manifest:
    """Container of one process; its address becomes the pod's IP for binding."""
    engine = spec.name.partition("-")[0] in ("prefill", "decode", "aggregated")
    # A pod with an RDMA resource sees RDMA devices, others interfaces.
    env = {**nic_env(spec.nics, rdma=bool(options.rdma)), **spec.env, RUN_TAG_ENV: tag}
    if _modules(spec):
        env["PYTHONPATH"] = env["PYTHONPATH"].replace(str(IN_VLLM), SPECS)
    env |= {variable: f"{SPECS}/{_file_name(spec, variable)}" for variable in spec.files}
    argv = ["python3" if word == sys.executable else word for word in spec.argv]
    argv += [f"{SPECS}/{spec.name}.json"] if spec.spec is not None else []
    container: Manifest = {
        "name": k8s_name(spec.name),
        "image": (engine and options.engine_image) or options.image,
        "command": [_with_pod_ip(word, name) for word in argv],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": key, "value": _with_pod_ip(value, name)} for key, value in env.items()),
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
    """Readiness probe with kvbench's health URL; startup probe with the scenario's limit."""
    path = re.sub(r"^https?://[^/]+", "", spec.ready_url)
    probe: Manifest = {"httpGet": {"path": path, "port": spec.port}} if path else {}
    probe = probe or {"tcpSocket": {"port": spec.port}}
    return {
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": max(15, round(ready_s / 2))},
        "readinessProbe": {**probe, "periodSeconds": 2},
    }


def _ports(planned: DeploymentPlan, members: Sequence[ProcessSpec], nodes: Mapping[str, int]) -> list[int]:
    """All ports of a pod's processes: HTTP, side channels, helpers. ``nodes``: hosts by instance."""
    of_instance = {inst.name: inst for inst in planned.instances}
    ports: list[int] = []
    for spec in members:
        name, _, node = spec.name.partition(NODE)
        instance = of_instance.get(name)
        ports += (spec.port,) if instance is None else instance.ports_on(int(node or 0), nodes.get(name, 1))
    if members[-1].name == "router" or planned.router_port is None:
        ports += planned.service_ports
    return [port for port in dict.fromkeys(ports) if port]


def _files(spec: ProcessSpec) -> dict[str, str]:
    files = {_file_name(spec, variable): dict(content) for variable, content in spec.files.items()}
    if spec.spec is not None:
        files[f"{spec.name}.json"] = dict(spec.spec)
    return {name: json.dumps(content, indent=1) for name, content in files.items()}


def _modules(spec: ProcessSpec) -> dict[str, str]:
    """File → source of kvbench modules for an engine image without kvbench."""
    if str(IN_VLLM) not in spec.env.get("PYTHONPATH", ""):
        return {}
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(IN_VLLM.glob("*.py"))}


def _file_name(spec: ProcessSpec, variable: str) -> str:
    return f"{spec.name}-{variable.lower()}.json"


def _with_pod_ip(word: str, address: str) -> str:
    """Escape an existing $(NAME), which Kubernetes would expand."""
    return re.sub(rf"(?<![\w.-]){re.escape(address)}(?![\w-])", "$(POD_IP)", word.replace("$(", "$$("))


def k8s_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-") or "kvbench"


def run_tag(scenario: Scenario, planned: DeploymentPlan) -> str:
    """Identifier of this deployment, as a label and as KVBENCH_RUN_TAG."""
    return k8s_name(f"k8s-{scenario.name}-{planned.label}")


LONGEST_NAME: Final = 52
"""Longest name: a label has 63 characters, and the StatefulSet's revision needs eleven."""


class _Dumper(yaml.SafeDumper):
    """YAML without anchors, with multi-line texts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def render_manifests(plan: Plan, options: K8sOptions, label: str = "") -> str:
    """Manifests of a deployment as YAML. ``label``: required for several. Raises InputError."""
    scenario = plan.scenario
    planned = choose_deployment(plan, label)
    manifests = manifests_of(scenario, planned, options)
    names = dns_names(scenario, planned)
    documents = "---\n".join(
        yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=110) for manifest in manifests
    )
    return f"{_header(scenario, planned, names)}{documents}"


def choose_deployment(plan: Plan, label: str) -> DeploymentPlan:
    """Deployment of that label, or the only one. Raises InputError."""
    measured = [deployment for deployment in plan.deployments if not deployment.reference_only]
    found = [deployment for deployment in measured if deployment.label == label] if label else measured
    if len(found) != 1:
        raise InputError(
            f"unknown deployment {label}" if label else "the scenario has several deployments",
            hint=f"choose one with --connector: {', '.join(deployment.label for deployment in measured)}",
        )
    return found[0]


def dns_names(scenario: Scenario, planned: DeploymentPlan) -> dict[str, str]:
    """Process → Service name. Raises InputError if a name is too long or not unique."""
    nodes_of = scenario.deployment.nodes_of
    processes = [
        f"{instance.name}{NODE}{node}" if node else instance.name
        for instance in planned.instances
        for node in range(max(1, len(nodes_of(instance.name))))
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
    """ConfigMap, Service and StatefulSet of each pod, in start order. Raises InputError."""
    scenario = scenario.at(planned.label)
    if not scenario.deployment.engine_options.starts_processes:
        raise InputError("an external server is not launched by kvbench", hint="choose another engine")
    names = dns_names(scenario, planned)
    if any(instance.port == 0 for instance in planned.instances) or planned.router_port == 0:
        raise InputError("pods need fixed ports", hint="set one: --set deployment.base_port=21000")
    undealt = tuple(replace(instance, devices=()) for instance in planned.instances)
    specs, _ = placed_specs(_placed(scenario, names), replace(planned, instances=undealt), dealt=False)
    router_pod = "router" if "router" in names else planned.instances[0].name
    pods: dict[str, list[ProcessSpec]] = {name: [] for name in names}
    for spec in specs:  # helpers are in the router's pod
        pods[spec.name if spec.name in pods else router_pod].append(spec)
    found: list[Manifest] = []
    for name, members in pods.items():
        found += pod_manifests(scenario, planned, options, names[name], members)
    return found


def _placed(scenario: Scenario, names: Mapping[str, str]) -> Scenario:
    """Scenario with each process on its own host, its Service."""
    deployment = scenario.deployment
    groups: dict[str, list[list[str]]] = {"prefill": [], "decode": [], "aggregated": []}
    for name, pod in names.items():
        if NODE in name:
            groups[name.partition("-")[0]][-1].append(pod)
        elif name != "router":
            groups[name.partition("-")[0]].append([pod])
    # Helpers run in the router's pod, even without a router.
    roles = {**groups, "router": [names["router"]] if "router" in names else groups["aggregated"][0]}
    hosts = {}
    for name, pod in names.items():
        host = deployment.hosts[deployment.host_name(name)] if deployment.hosts else RemoteHost(address=pod)
        hosts[pod] = RemoteHost(address=pod, env=host.env, nics=host.nics)
    # Device numbers are valid on one machine; a pod sees only its own devices.
    deployment = deployment.model_copy(
        update={
            "hosts": hosts,
            "roles": Roles.model_validate(roles),
            "engine_options": deployment.engine_options.without_devices(),
        }
    )
    return scenario.model_copy(update={"deployment": deployment})


def _header(scenario: Scenario, planned: DeploymentPlan, names: Mapping[str, str]) -> str:
    ports = {instance.name: instance.port for instance in planned.instances}
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
