"""The plan of a scenario: cells, deployments with their ports, bytes and time.

One deployment serves all input lengths of its connector. The aggregated one comes first, because the greedy
outputs of the others are compared with its outputs; a missing reference deployment is added for each tensor
parallel size. A deployment without P/D has as many engines as P and D together unless the scenario sets a
number, so that hardware is equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Protocol

from kvbench.core.physics import ModelShape
from kvbench.core.plan.prospect import Prospect, prospects, shortfall_text
from kvbench.core.ranks import Ranks
from kvbench.core.records import Cell
from kvbench.core.scenario.scenario import AGGREGATED, Scenario, Search
from kvbench.core.search.data import BURST_S
from kvbench.core.transfers.kv_shape import KvTensors, kv_pieces
from kvbench.errors import InputError

LAUNCH_S: Final = (0.5, 3.0)
"""Start time of an emulated pair in seconds, least and most; callers pass the time of other engines."""
_CHECK_S: Final = (0.1, 1.0)
"""Seconds for greedy requests and cache reset before a cell's first trial, least and most."""
_BRACKET_TRIALS: Final = 2


@dataclass(frozen=True)
class KvFootprint:
    """KV bytes of one prompt in whole blocks: each byte once, and summed over all ranks."""

    input_len: int
    logical_bytes: int
    wire_bytes: int
    blocks: int
    descriptors: int
    """Descriptors of one rank for consecutive blocks, after merging."""


@dataclass(frozen=True)
class TimePart:
    """A share of the time estimate, in seconds."""

    name: str
    lower_s: float
    upper_s: float
    how: str


# ---------------------------------------------------------------- bytes


def kv_footprint(
    shape: ModelShape,
    input_len: int,
    tensor_parallel_size: int,
    block_tokens: int,
    tensors: KvTensors = "apart",
) -> KvFootprint:
    """Return the KV of a prompt of ``input_len`` tokens; the last block moves whole."""
    blocks = shape.blocks(input_len, block_tokens)
    pieces = kv_pieces(shape, tensors)
    return KvFootprint(
        input_len=input_len,
        logical_bytes=shape.kv_bytes(input_len),
        wire_bytes=shape.wire_bytes(input_len, block_tokens, tensor_parallel_size),
        blocks=blocks,
        descriptors=pieces.per_block * (1 if pieces.merge else blocks),
    )


def scenario_footprint(scenario: Scenario, input_len: int, ranks: int) -> KvFootprint:
    """Return the KV of one request that is sent to ``ranks`` tensor parallel ranks."""
    options = scenario.deployment.engine_options
    return kv_footprint(scenario.kv_shape, input_len, ranks, options.kv_block_tokens, options.kv_tensors)


# ---------------------------------------------------------------- time


def trial_requests(search: Search, request_rate: float) -> int:
    """Return the requests of one trial: ``trial_s`` seconds at a rate, within the scenario's limits."""
    return min(search.max_requests, max(search.min_requests, round(request_rate * search.trial_s)))


def expected_trials(search: Search) -> int:
    """Return the fewest trials of a search: bracket the rate within a factor of two, then bisect."""
    bisections = (
        math.ceil(math.log2(math.log(2) / math.log1p(search.precision))) if search.precision < 1 else 0
    )
    return min(search.max_trials, _BRACKET_TRIALS + bisections)


def _slo_e2el_s(scenario: Scenario) -> float:
    """Return the end-to-end latency of a request that just meets its limits; a missing limit counts as 0."""
    latency_ms = scenario.slo.main().e2el_ms(scenario.workload.output_len)
    return min(latency_ms / 1000.0, scenario.request_timeout_s)


def time_parts(
    scenario: Scenario, cells: int, deployments: int, launch_s: tuple[float, float]
) -> Iterator[TimePart]:
    """Yield the parts of the time estimate (rules of thumb)."""
    search = scenario.search
    low, high = launch_s
    limit = scenario.deployment.ready_timeout_s
    yield TimePart(
        "launch",
        deployments * min(low, limit),
        deployments * min(high, limit),
        f"{deployments} deployments × {low:g} to {high:g} s",
    )
    low, high = _CHECK_S[0], _CHECK_S[1] + _slo_e2el_s(scenario)
    how = f"{cells} cells × {low:.1f} to {high:.1f} s"
    yield TimePart("correctness checks", cells * low, cells * high, how)
    drain = _slo_e2el_s(scenario)
    if search.method == "fixed":
        arrivals = sum(trial_requests(search, rate) / rate for rate in search.rates)
        longest = arrivals + len(search.rates) * scenario.request_timeout_s
        how = f"{cells} cells × {len(search.rates)} rates, {arrivals:.3g} s of arrivals in all"
        yield TimePart("trials", cells * arrivals, cells * longest, how)
        return
    fewest, most = expected_trials(search), search.max_trials
    if search.method == "burst" or search.compare_burst:
        how = f"{cells} cells × {fewest} to {most} trials × {BURST_S:g} s and up to {drain:.1f} s to drain"
        least, longest = fewest * BURST_S, most * (BURST_S + drain + scenario.request_timeout_s)
        yield TimePart("burst", cells * least, cells * longest, how)
        if search.method == "burst":
            return
    arrivals = search.max_trial_s or search.trial_s
    if search.start_rate is not None and search.max_trial_s is None:
        arrivals = trial_requests(search, search.start_rate) / search.start_rate
    if search.equal_rate and search.method == "sustained" and len(scenario.connectors) > 1:
        again = max(0, deployments - 1)
        yield TimePart(
            "one equal rate",
            again * min(launch_s[0], limit),
            again * min(launch_s[1], limit) + cells * (max(arrivals, search.trial_s) + drain),
            f"{again} deployments once more, {cells} cells × one trial where two connectors found a rate",
        )
    limit = math.inf if search.budget_s is None else search.budget_s
    at_most = "" if search.budget_s is None else f", at most {search.budget_s:g} s (search.budget_s)"
    yield TimePart(
        "trials",
        min(cells * fewest * min(arrivals, search.trial_s), limit),
        min(cells * most * (max(arrivals, search.trial_s) + drain), limit),
        f"{cells} cells × {fewest} to {most} trials × {arrivals:.3g} s and up to {drain:.1f} s to drain"
        + at_most,
    )


def notes(scenario: Scenario) -> Iterator[str]:
    """Yield notes for the user before the run that are no errors."""
    search, slo = scenario.search, scenario.slo.main()
    if search.method in ("fixed", "burst") or not slo.has_limits:
        return
    share = max(slo.shares)
    # The least n with share^n ≤ 1 − confidence (the early-stopping rule of MLPerf's load generator).
    needed = math.ceil(math.log(1.0 - search.confidence) / math.log(share))
    if search.max_requests < needed:
        yield (
            f"a trial of {search.max_requests} requests can never show an attainment of {share:g} "
            f"with confidence {search.confidence:g}: that takes {needed}; raise search.max_requests"
        )
    elif search.min_requests < needed:
        yield (
            f"a trial of fewer than {needed} requests cannot show an attainment of {share:g} with "
            f"confidence {search.confidence:g}, even with none missed; raise search.min_requests"
        )
    slowest = search.min_requests / search.trial_s
    if search.start_rate is None or search.start_rate < slowest:
        yield (
            f"below {slowest:.3g} requests/s a trial takes longer than {search.trial_s:g} s, "
            f"since it has at least {search.min_requests} requests"
        )
    expected = prospects(scenario)
    if expected and all(prospect.even > search.precision for prospect in expected):
        best = min(expected, key=lambda prospect: prospect.even)
        yield f"the requested precision is out of reach: {shortfall_text(search, best)}"


Role = Literal["prefill", "decode", "aggregated"]

LAST_PORT: Final = 65_535


class ConnectorInfo(Protocol):
    """Properties of a connector that the plan needs."""

    @property
    def disaggregated(self) -> bool: ...
    @property
    def service_ports(self) -> int: ...
    def side_ports(self, role: str, ranks: Ranks) -> int: ...


GROUP_PORTS: Final = 7
"""Ports at which an instance's hosts meet: vLLM binds two; SGLang 0.5 with attention DP binds seven."""


@dataclass(frozen=True)
class InstancePlan:
    """One engine process. Port 0 means: chosen at launch. ``side_port`` None means: not needed."""

    name: str
    role: Role
    rank: int
    port: int
    side_port: int | None
    side_ports: int = 1
    """Number of side ports from ``side_port`` on."""
    group_port: int | None = None
    """First of the ports at which an instance's processes on several hosts meet; None for one host."""
    devices: tuple[str, ...] = ()
    """GPUs assigned to it, by number or UUID; empty where the engine or the host's owner chooses."""
    ranks: Ranks | None = None
    """GPUs assigned to it, by number or UUID; empty if the engine or the host's owner chooses."""

    @property
    def all_side_ports(self) -> tuple[int, ...]:
        if self.side_port is None:
            return ()
        return tuple(self.side_port and self.side_port + rank for rank in range(self.side_ports))

    @property
    def group_ports(self) -> tuple[int, ...]:
        """The ports at which its processes on several hosts meet."""
        first = self.group_port
        return () if first is None else tuple(first and first + offset for offset in range(GROUP_PORTS))

    def ports_on(self, node: int, nodes: int) -> tuple[int, ...]:
        """Return all ports of its process on one of its hosts; ranks are assigned to hosts in order."""
        side = self.all_side_ports
        there = (port for rank, port in enumerate(side) if rank * max(nodes, 1) // len(side) == node)
        return (*(() if node else (self.port, *self.group_ports)), *there)


@dataclass(frozen=True)
class DeploymentPlan:
    """Processes of one connector: its instances, prefill first, and a router if there are several."""

    label: str
    connector: str
    instances: tuple[InstancePlan, ...]
    router_port: int | None
    reference_only: bool = False
    """Not measured: it only provides the greedy outputs that the others must equal."""
    service_ports: tuple[int, ...] = ()
    """Ports of the connector's own helper processes."""

    @property
    def ports(self) -> tuple[int, ...]:
        """All its ports in the order of assignment."""
        found = [] if self.router_port is None else [self.router_port]
        for instance in self.instances:
            found += [instance.port, *instance.all_side_ports, *instance.group_ports]
        return (*found, *self.service_ports)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without fields that older runs lack, so that these can be resumed."""
        data = asdict(self)
        for instance in data["instances"]:
            for key in ("devices", "ranks"):
                if not instance[key]:
                    del instance[key]
        return data


@dataclass(frozen=True)
class Plan:
    scenario: Scenario
    cells: tuple[Cell, ...]
    deployments: tuple[DeploymentPlan, ...]
    reference: str
    """Label of the (first) deployment that provides the reference outputs."""
    kv: tuple[KvFootprint, ...]
    time: tuple[TimePart, ...]
    notes: tuple[str, ...]
    prospects: tuple[Prospect, ...] = ()
    """Precision that the search's time allows, at some rates."""
    references: Mapping[str, str] = field(default_factory=dict)
    """Reference label by deployment label, if there are several."""

    def reference_of(self, label: str) -> str:
        """Return the label of the deployment whose greedy outputs are the reference for ``label``."""
        return self.references.get(label, self.reference)

    @property
    def ports(self) -> tuple[int, ...]:
        """All ports of all deployments; empty when they are chosen at launch."""
        return tuple(port for deployment in self.deployments for port in deployment.ports if port)

    @property
    def lower_s(self) -> float:
        return sum(part.lower_s for part in self.time)

    @property
    def upper_s(self) -> float:
        return sum(part.upper_s for part in self.time)

    def cells_of(self, label: str) -> tuple[Cell, ...]:
        """Return the cells that one deployment serves, in order."""
        return tuple(cell for cell in self.cells if cell.connector == label)

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario.resolved(),
            "cells": [{**asdict(cell), "key": cell.key} for cell in self.cells],
            "deployments": [deployment.to_json() for deployment in self.deployments],
            "reference": self.reference,
            **({"references": dict(self.references)} if self.references else {}),
            "ports": list(self.ports),
            "kv_per_request": [asdict(footprint) for footprint in self.kv],
            "time_estimate": {
                "lower_s": round(self.lower_s, 1),
                "upper_s": round(self.upper_s, 1),
                "parts": [asdict(part) for part in self.time],
            },
            "notes": list(self.notes),
            "prospects": [asdict(prospect) for prospect in self.prospects],
        }


def make_plan(
    scenario: Scenario,
    connectors: Mapping[str, ConnectorInfo],
    base_port: int | None = None,
    launch_s: tuple[float, float] = LAUNCH_S,
    profiles: Mapping[str, ConnectorInfo] | None = None,
) -> Plan:
    """Return the plan of a scenario. Raises InputError if the ports do not fit.

    ``connectors``: at least those that the scenario names. ``profiles``: properties of a label's connector
    that depend on its engine's version and options. ``base_port`` replaces the scenario's; 0 means that every
    port is chosen at launch. ``launch_s``: least and most seconds until a deployment is ready."""
    # Python's sort is stable: within the groups the file's order stays.
    chosen = sorted(
        scenario.connectors,
        key=lambda connector: (connector.name != AGGREGATED, connectors[connector.name].disaggregated),
    )
    wanted = [(choice.label, choice.name) for choice in chosen]
    truths = scenario.references
    added = [deployment.label for deployment in truths.added]
    wanted = [*((label, AGGREGATED) for label in added), *wanted]
    first = scenario.deployment.base_port if base_port is None else base_port
    ports = _PortCounter(first)
    special = profiles or {}
    deployments = tuple(
        _deployment(scenario, (label, name), special.get(label, connectors.get(name)), ports, label in added)
        for label, name in wanted
    )
    require_fitting_ports(first, ports.given)
    lengths, output_len = scenario.workload.input_len, scenario.workload.output_len
    cells = tuple(Cell(choice.label, length, output_len) for choice in chosen for length in lengths)
    return Plan(
        scenario=scenario,
        cells=cells,
        deployments=deployments,
        reference=next(label for label, name in wanted if name == AGGREGATED),
        kv=tuple(_footprints(scenario, lengths)) if scenario.model.shape.known else (),
        time=tuple(time_parts(scenario, len(cells), len(deployments), launch_s)),
        notes=tuple(notes(scenario)),
        prospects=prospects(scenario),
        references=truths.of if len(set(truths.of.values())) > 1 else {},
    )


def _footprints(scenario: Scenario, lengths: Sequence[int]) -> Iterator[KvFootprint]:
    """Yield the KV of a request of each length, for each number of ranks that receive it."""
    ranks = {scenario.deployed(connector.label).wire_ranks for connector in scenario.connectors}
    for length in lengths:
        yield from dict.fromkeys(scenario_footprint(scenario, length, rank) for rank in sorted(ranks))


class _PortCounter:
    """Counter of consecutive ports; it stays 0 if it starts at 0."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.given = 0

    def take(self, count: int = 1) -> int:
        """Return the first of ``count`` consecutive ports."""
        self.given += count
        return self._first + self.given - count if self._first else 0


def _deployment(
    scenario: Scenario,
    label_and_name: tuple[str, str],
    info: ConnectorInfo | None,
    ports: _PortCounter,
    reference_only: bool,
) -> DeploymentPlan:
    wanted = scenario.deployed(label_and_name[0])
    several = len(scenario.deployment.tensor_parallel_size) > 1
    explicit_ranks = several or any(
        size and size.given for size in (wanted.prefill, wanted.decode, wanted.aggregated)
    )
    # The servers behind a URL are given; reference outputs are not timed, so one engine suffices.
    lone = reference_only or not wanted.engine_options.starts_processes
    counts: list[tuple[Role, int]] = [("aggregated", 1 if lone else wanted.aggregated_engines)]
    if info is not None and info.disaggregated:
        counts = [("prefill", wanted.prefill.instances), ("decode", wanted.decode.instances)]
    router_port = ports.take() if sum(count for _, count in counts) > 1 else None
    instances = []
    for name, role, rank in (
        (f"{role}-{rank}", role, rank) for role, count in counts for rank in range(count)
    ):
        ranks = wanted.ranks_of(name)
        side = 0 if info is None else info.side_ports(role, ranks)
        port, side_port = ports.take(), ports.take(side) if side else None
        group = ports.take(GROUP_PORTS) if len(wanted.nodes_of(name)) > 1 else None
        given = ranks if explicit_ranks else None
        instances.append(InstancePlan(name, role, rank, port, side_port, max(side, 1), group, ranks=given))
    services = 0 if info is None else info.service_ports
    return DeploymentPlan(
        *label_and_name,
        instances=tuple(instances),
        router_port=router_port,
        reference_only=reference_only,
        service_ports=tuple(ports.take() for _ in range(services)),
    )


def require_fitting_ports(base_port: int, count: int) -> None:
    """Raise InputError if ``count`` ports from ``base_port`` on go beyond the last port."""
    if base_port and base_port + count - 1 > LAST_PORT:
        raise InputError(
            f"the plan needs {count} ports from {base_port} on, and the last one there is {LAST_PORT}",
            hint=f"deployment.base_port may be at most {LAST_PORT - count + 1}; 0 takes any free ports",
        )
