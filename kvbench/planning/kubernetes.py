"""Kubernetes manifests of a deployment: what ``kvbench launch`` would start here, as pods.

Each instance, and the router with its helpers, is a StatefulSet of one pod behind a headless Service, whose
name is what the others know it by. Specs and files that processes read are ConfigMaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import yaml

from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.hosts import FarHost, Roles
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.planning.kubernetes_pods import K8sOptions, Manifest, k8s_name, pod_manifests, run_tag
from kvbench.planning.process_specs import process_specs
from kvbench.version import __version__

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
    processes = [each.name for each in planned.instances]
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
    specs = process_specs(_placed(scenario, names), replace(planned, instances=undealt))
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
    roles = {
        role: tuple(names[name] for name in names if name.rsplit("-", 1)[0] == role)
        for role in ("prefill", "decode", "aggregated", "router")
    }
    roles["router"] = roles["router"] or roles["aggregated"]  # where helpers are, even without a router
    hosts = {name: FarHost(address=name) for name in names.values()}
    # The choice of devices is that of one machine; a pod sees what it was given.
    deployment = scenario.deployment.model_copy(
        update={
            "hosts": hosts,
            "roles": Roles.model_validate(roles),
            "engine_options": scenario.deployment.engine_options.without_devices(),
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
