"""One pod of a deployment as Kubernetes manifests: ConfigMap, Service and StatefulSet of its processes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

from pydantic import Field, ValidationError

from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.plan.processes import ONE_THREAD_ENV, RUN_TAG_ENV, ProcessSpec
from kvbench.core.scenario.base import Section
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
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
    role = members[-1].name.rsplit("-", 1)[0]
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
        {"name": f"p{number}", "port": number, "targetPort": number} for number in _ports(planned, members)
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
    if any(_files(each) for each in members):
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
    engine = spec.name.rsplit("-", 1)[0] in ("prefill", "decode", "aggregated")
    env = {**(ONE_THREAD_ENV if spec.one_thread else {}), **spec.env, RUN_TAG_ENV: tag}
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
    mounts = [{"name": "specs", "mountPath": SPECS, "readOnly": True}] if _files(spec) else []
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
        limits[options.gpu.partition("=")[0]] = str(scenario.deployment.ranks_of(instance).gpus)
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


def _ports(planned: DeploymentPlan, members: Sequence[ProcessSpec]) -> list[int]:
    """All that a pod's processes listen on: HTTP, side channels, helpers."""
    of_instance = {each.name: (each.port, *each.all_side_ports) for each in planned.instances}
    ports: list[int] = []
    for each in members:
        ports += of_instance.get(each.name, (each.port,))
    if members[-1].name == "router" or planned.router_port is None:
        ports += planned.service_ports
    return [port for port in dict.fromkeys(ports) if port]


def _files(spec: ProcessSpec) -> dict[str, str]:
    """The files that a process reads, by their names."""
    files = {_file_name(spec, variable): dict(content) for variable, content in spec.files.items()}
    if spec.spec is not None:
        files[f"{spec.name}.json"] = dict(spec.spec)
    return {name: json.dumps(content, indent=1) for name, content in files.items()}


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
