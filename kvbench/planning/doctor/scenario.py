"""``kvbench doctor``: check this machine, or whether a scenario can run; starts nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import psutil
from rich.console import Console

from kvbench import connectors, engines
from kvbench.core.plan.plan import Plan
from kvbench.core.scenario.hosts import SlurmOptions
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import KvbenchError
from kvbench.hosts.devices import gpus, rdma
from kvbench.hosts.version_rules import Check
from kvbench.planning.doctor import hosts as doctor_hosts
from kvbench.planning.doctor.doctor import cpu_checks, examine, open_files_check, print_checks, python_check
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.obstacles import ports_in_use, scheduler_problem
from kvbench.planning.overrides import CliOptions, resolve, served_model
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import instances, transport_findings, unusable

GIB: Final = 2**30
_WEIGHTS_INDEX: Final = "model.safetensors.index.json"


def examine_scenario(name: str, overrides: Sequence[str]) -> list[Check]:
    """Check a scenario. Raises InputError or ScenarioError for its file."""
    scenario, _ = resolve(CliOptions(name, tuple(overrides)))
    plan = plan_of(scenario)
    checks = [Check(f"scenario {scenario.name}", "ok", f"{len(plan.cells)} cells, no mistakes")]
    if not scenario.deployment.engine_options.starts_processes:
        return [*checks, *server_checks(scenario)]
    if scenario.deployment.launcher != "local":
        # Engine, model and libraries are those of the hosts, not of this machine.
        return [*checks, launcher_check(scenario), *_notes(plan)]
    checks += connector_checks(scenario, plan)
    checks += [model_check(scenario), launcher_check(scenario), plan_ports_check(scenario, plan)]
    checks += memory_checks(scenario, plan, gpus())
    checks += transport_checks(scenario, plan, rdma())
    return [*checks, *_notes(plan)]


def _notes(plan: Plan) -> list[Check]:
    return [Check("note", "warn", note, "see the scenario") for note in plan.notes if note]


def server_checks(scenario: Scenario) -> Iterator[Check]:
    """Check that an external server responds and serves the model."""
    server, wanted = scenario.deployment.engine_options.server, scenario.model.served_model_name
    if not server.base_url:
        return

    longest: list[int] = []

    def serves() -> str:
        _, tokens = served_model(server.base_url, server.access, wanted)
        longest.extend([tokens] if tokens is not None else [])
        return f"{server.base_url} serves {wanted}"

    yield Check.tried("server", serves)
    needed = max(scenario.workload.input_len) + scenario.workload.output_len
    if longest and needed > longest[0]:
        text = f"the longest request has {needed} tokens, but the server's max_model_len is {longest[0]}"
        yield Check("request length", "missing", text, "shorten input_len or output_len, or raise it there")


def connector_checks(scenario: Scenario, plan: Plan) -> Iterator[Check]:
    """Check that the engine's version has each connector and its requirements."""
    engine = engines.get(scenario.deployment.engine)
    version = engine.version(scenario.deployment.engine_options)
    who = f"{engine.name} {version}".strip()
    for deployment in plan.deployments:
        detail = f"{connectors.get(deployment.connector).title}, with {who}"
        yield Check.unless(unusable(scenario, deployment), f"{deployment.label} on {engine.name}", detail)


def model_check(scenario: Scenario) -> Check:
    """Check that the model's folder exists; a name without a leading slash is left to the engine."""
    model = scenario.deployment.engine_options.served_from
    if not model:
        return Check(
            "model", "ok", f"{scenario.model.name}: the {scenario.deployment.engine} engine needs no files"
        )
    if not model.startswith(("/", ".", "~")) and not Path(model).exists():
        return Check("model", "ok", f"{model} is a name: the engine loads it from its cache or downloads it")
    folder = Path(model).expanduser()
    if not folder.exists():
        return Check("model", "missing", f"{model} does not exist", "correct deployment.engine_options.model")
    if folder.is_dir() and not (folder / "config.json").is_file():
        return Check("model", "missing", f"{model} holds no config.json", "give the folder of one model")
    weights = weight_bytes(folder)
    size = f", {weights / GIB:.2f} GiB of weights" if weights else ", no weights found in it"
    return Check("model", "ok", f"{model}{size}")


def weight_bytes(folder: Path) -> int:
    """Bytes of a model's weights on disk; 0 if unknown."""
    if folder.is_file():
        return folder.stat().st_size
    try:
        return int(json.loads((folder / _WEIGHTS_INDEX).read_bytes())["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    for pattern in ("*.safetensors", "*.bin", "*.gguf"):
        if total := sum(path.stat().st_size for path in folder.glob(pattern)):
            return total
    return 0


def launcher_check(scenario: Scenario) -> Check:
    """Check that every host is local, as the local launcher requires."""
    deployment = scenario.deployment
    name = f"launcher {deployment.launcher}"
    if deployment.launcher in ("slurm", "ray"):
        problem = scheduler_problem(deployment.launcher)
        return Check.unless(problem, name, "its hosts are known once a run requests them")
    if deployment.launcher != "local":
        return Check(name, "ok", f"processes start on {', '.join(deployment.used_hosts)}")
    hosts = dict.fromkeys([deployment.host_of("prefill"), deployment.host_of("decode"), deployment.host])
    for host in hosts:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind((host, 0))
        except OSError as error:
            return Check(
                name,
                "missing",
                f"{host} is not an address of this machine ({error.strerror or error})",
                "print the commands with `kvbench launch --print`, run them there, measure with --base-url",
            )
    return Check(name, "ok", f"processes start here, on {', '.join(hosts)}")


def plan_ports_check(scenario: Scenario, plan: Plan) -> Check:
    if not plan.ports:
        return Check("ports of the plan", "ok", "free ones are chosen at launch (base_port 0)")
    if scenario.deployment.launcher != "local":
        return Check("ports of the plan", "ok", "looked at on the hosts before each start")
    used_ports, foreign = ports_in_use(scenario, plan)
    span = f"{min(plan.ports)} to {max(plan.ports)}"
    others = f", except those of {', '.join(foreign)}, which cannot be checked from here" if foreign else ""
    used = f"in use: {', '.join(map(str, used_ports[:8]))} (of {span})"
    fix = "end what listens there, or --set deployment.base_port=PORT (0: any free ones)"
    detail = used if used_ports else f"{span} are free{others}"
    return Check.of("ports of the plan", not used_ports, detail, fix, "missing")


def memory_checks(scenario: Scenario, plan: Plan, listed: list[dict[str, Any]] | None) -> Iterator[Check]:
    """Check memory for weights and KV, computed from the shape. ``listed``: detected GPUs."""
    deployment = scenario.deployment
    if pools := kv_pools(scenario, plan):
        yield _host_memory(pools, psutil.virtual_memory().available)
    if not deployment.engine_options.uses_gpus or not listed:
        return
    yield gpu_count_check(scenario, plan, listed)
    if known := [gpu["memory_bytes"] for gpu in listed if gpu.get("memory_bytes")]:
        yield gpu_memory_check(scenario, min(known))


def transport_checks(scenario: Scenario, plan: Plan, listed: list[dict[str, Any]]) -> Iterator[Check]:
    """Find TCP connectors next to working RDMA. ``listed``: local RDMA devices."""
    if scenario.deployment.launcher == "local":
        for finding in transport_findings(scenario, plan, {"": listed}):
            yield Check("transport", "warn", finding.message, finding.advice)


def kv_pools(scenario: Scenario, plan: Plan) -> int:
    """Bytes of KV pools in the largest deployment, if kvbench sets their size; else 0."""
    engine = engines.get(scenario.deployment.engine)
    sizes = [0]
    for deployment in plan.deployments:
        members = instances(scenario, deployment)
        sizes.append(
            sum(engine.kv_pool_bytes(member, scenario.deployment.engine_options) for member in members)
        )
    return max(sizes)


def _host_memory(needed: int, available: int) -> Check:
    detail = f"KV pools take up to {needed / GIB:.2f} GiB, {available / GIB:.1f} GiB are available"
    fix = "lower engine_options.num_blocks or max_num_seqs, or use a smaller model"
    return Check.of("host memory", needed <= available, detail, fix, "missing")


def gpu_count_check(scenario: Scenario, plan: Plan, listed: list[dict[str, Any]]) -> Check:
    """Check that each rank of the largest deployment has a GPU."""

    def dealt() -> str:
        require_gpus(plan, listed)
        most = max(plan.deployments, key=lambda deployment: len(deployment.instances))
        cards = "; ".join(
            f"{instance.name}: {','.join(instance.devices)}"
            for instance in most.instances
            if instance.devices
        )
        deployed = scenario.deployed(most.label)
        ranks = " or ".join(
            map(str, sorted({deployed.ranks_of(instance.name).gpus for instance in most.instances}))
        )
        detail = f"{len(most.instances)} instances × {ranks} ranks, {len(listed)} GPUs here"
        return f"{detail}; {cards}" if cards else detail

    return Check.tried("gpus", dealt)


def gpu_memory_check(scenario: Scenario, gpu_bytes: int) -> Check:
    """Check how many full-length requests a rank's GPU holds besides weights."""
    options, ranks = scenario.deployment.engine_options, _fewest_ranks(scenario)
    shape, workload = scenario.kv_shape, scenario.workload
    share, folder = options.gpu_memory_share, Path(options.served_from).expanduser()
    weights = weight_bytes(folder) if folder.exists() else 0
    if not shape.known:
        return Check(
            "gpu memory", "warn", "the model's shape is not known", "name a preset or give its layers"
        )
    tokens = max(workload.input_len) + workload.output_len
    kv_bytes = shape.wire_bytes(tokens, 1, ranks) / ranks
    left_bytes = gpu_bytes * share - weights / ranks
    fits = int(left_bytes // kv_bytes) if left_bytes > 0 else 0
    weighed = (
        f"{weights / ranks / GIB:.1f} GiB of weights" if weights else "weights not known, so not counted"
    )
    detail = (
        f"per GPU {gpu_bytes * share / GIB:.1f} GiB for vLLM, {weighed}, {kv_bytes / GIB:.3f} GiB of KV per "
        f"request of {tokens} tokens: room for {fits} of them"
    )
    fix = "raise tensor_parallel_size, or shorten the requests"
    return Check.of("gpu memory", fits >= 1, detail, fix, "missing")


def _fewest_ranks(scenario: Scenario) -> int:
    """Fewest GPUs that share one model's weights and KV, over all connectors."""
    deployed = [scenario.deployed(connector.label) for connector in scenario.connectors]
    found = [site.ranks_of(f"{role}-0") for site in deployed for role in ("prefill", "decode", "aggregated")]
    return min(ranks.tensor * ranks.pipeline for ranks in found)


def vllm_command(scenario: Scenario) -> Path | None:
    """Executable for vLLM in the scenario, if it exists."""
    found = shutil.which(scenario.deployment.engine_options.executable or "vllm")
    return Path(found) if found else None


def command_of(name: str, overrides: Sequence[str]) -> Path | None:
    """Executable for vLLM of a named scenario; None if unreadable, which ``examine_scenario`` reports."""
    try:
        return vllm_command(resolve(CliOptions(name, tuple(overrides)))[0])
    except KvbenchError:
        return None


def runs_where(name: str, overrides: Sequence[str]) -> Literal["here", "server", "hosts", "later"]:
    """Return where a scenario's engines run: here, a running server, hosts, or a scheduler's nodes."""
    scenario, _ = resolve(CliOptions(name, tuple(overrides)))
    deployment = scenario.deployment
    if not deployment.engine_options.starts_processes:
        return "server"
    if deployment.launcher == "slurm":
        job = (deployment.slurm or SlurmOptions()).job or os.environ.get("SLURM_JOB_ID")
        return "hosts" if job else "later"
    return "here" if deployment.launcher == "local" else "hosts"


def command(
    console: Console, scenario: str | None = None, overrides: tuple[str, ...] = (), *, as_json: bool = False
) -> int:
    """Print all checks with hints; return 1 if something without alternative fails. A scenario's checks come
    first, then those of its machines. Raises InputError or ScenarioError for its file."""
    say = partial(print_checks, console=console, as_json=as_json)
    if scenario is None:
        return say(examine())
    checks, where = examine_scenario(scenario, overrides), runs_where(scenario, overrides)
    if where == "here":
        return say(checks + examine(command_of(scenario, overrides)))
    if where == "server":  # only the client is this machine's
        return say([*checks, python_check(), open_files_check(), *cpu_checks()])
    if where == "later" or any(check.status == "missing" for check in checks):
        return say(checks)
    return doctor_hosts.command(scenario, overrides, console, as_json=as_json, before=checks)
