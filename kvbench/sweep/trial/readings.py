"""Readings around a trial (metrics, logs, host samples), and what is known before; unknown is None."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Final

from kvbench.connectors.base import Connector, ConnectorOptions
from kvbench.core.gates.evidence import EngineFigures, HostFigures, LoggedTransport, NicFigures, RouterFigures
from kvbench.core.load.workers import LoadResult
from kvbench.core.metrics.limit import sampled_use
from kvbench.core.physics import Hardware, hardware_of, prefill_work, profile_hardware
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import KvbenchError
from kvbench.hosts import nvml
from kvbench.hosts.devices import NicReading, nic_counters
from kvbench.hosts.procfs import Listeners, listening
from kvbench.hosts.server_access import access_headers
from kvbench.hosts.telemetry import Sampler, host_figures, read_host
from kvbench.launchers.base import Launcher
from kvbench.sweep.trial.evidence import (
    Reading,
    engine_figures,
    engine_summary,
    router_figures,
    transport_of,
    with_slots,
)
from kvbench.sweep.trial.kv_counters import DEFAULT_LOG_INTERVAL_S, LOG_INTERVAL_ENV, KvLogs, RoleKv, role_kv


class Observer:
    """Context manager around a trial's load; then has ``rows`` and ``host``. Rows are ``Sampler``'s with
    ``host``, empty for this machine."""

    def __init__(self, launcher: Launcher, deployment: RunningDeployment, trial_id: str) -> None:
        headers = access_headers(deployment.endpoints.access)
        self.rows: list[dict[str, Any]] = []
        self.host = HostFigures()
        self._launcher = launcher
        self._urls = deployment.endpoints.metrics_urls
        self._trial_id = trial_id
        self._remote = bool(launcher.hosts)
        if self._remote:
            launcher.ask_hosts("sample", self._samples_by_host(trial_id, headers))
        else:
            # A server that kvbench did not start may run here: it is measured, and is no disturbance.
            self._system = list(deployment.pids().values())
            self._listeners = Listeners()
            if deployment.external:
                self._listeners = listening([deployment.endpoints.base_url, *self._urls.values()])
                self._system = list(self._listeners.pids)
            self._before = read_host(also=self._system)
            self._sampler = Sampler(
                trial_id, deployment.pids(), self._urls, headers, deployment.endpoints.access
            )

    def __enter__(self) -> Observer:
        if not self._remote:
            self._sampler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._remote:
            self._sampler.__exit__()
            self.rows = [{**row, "host": ""} for row in self._sampler.rows]
            host = host_figures(self._before, read_host(also=self._system))
            self.host = replace(host, unknown_owner=unknown_owner(self._listeners))
        elif error is None:
            self._take(self._end_samples())
        else:  # which is reported, not an error that follows from it
            with contextlib.suppress(KvbenchError):
                self._end_samples()

    def _end_samples(self) -> dict[str, dict[str, Any]]:
        request = {"trial_id": self._trial_id}
        return self._launcher.ask_hosts("sampled", dict.fromkeys(self._launcher.hosts, request))

    def _samples_by_host(self, trial_id: str, headers: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return what each host samples: itself and its servers."""
        urls: dict[str, dict[str, str]] = {}
        for name, url in self._urls.items():
            urls.setdefault(self._launcher.host_of(name), {})[name] = url
        common = {"trial_id": trial_id, "headers": dict(headers)}
        return {host: {**common, "metrics_urls": urls.get(host, {})} for host in self._launcher.hosts}

    def _take(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        for host, answer in answers.items():
            for row in answer["rows"]:
                # NICs of two hosts often have the same names.
                source = str(row["source"]).replace("nic:", f"nic:{host}/", 1)
                self.rows.append({**row, "source": source, "host": host})
        self.host = join_hosts({host: figures_of(answer["figures"]) for host, answer in answers.items()})


def unknown_owner(listeners: Listeners) -> str:
    """Return why other CPU use may still be the server's, or "". ``listeners``: of a server that kvbench did
    not start; the listening processes and their children work for it, others may too."""
    if listeners.unseen:
        return (
            f"the process that listens at {listeners.unseen[0]} cannot be seen (a container's or another "
            "user's), so these may be the server's own"
        )
    if listeners.urls:
        return (
            "the server runs on this machine, and its workers need not be children of the process that "
            "listens, so these may be the server's own"
        )
    return ""


def figures_of(figures: Mapping[str, Any]) -> HostFigures:
    """A host's figures by its agent's report."""
    nics = {name: NicFigures(**nic) for name, nic in figures["nics"].items()}
    texts = {name: tuple(figures.get(name, ())) for name in ("gpu_slowdowns", "takers")}
    return HostFigures(**{**figures, **texts, "nics": nics})


def join_hosts(hosts: Mapping[str, HostFigures]) -> HostFigures:
    """Join hosts to one machine: the worst of each figure, NICs as ``host/nic``."""

    def worst(name: str) -> Any:
        values = [value for host in hosts.values() if (value := getattr(host, name)) is not None]
        return max(values, default=None)

    shares = (
        *("load_average", "cpu_count", "steal_share", "other_cpu_share", "throttled_share"),
        *("busy_share", "pressure_share"),
    )
    return replace(
        HostFigures(**{name: worst(name) for name in (*shares, "thermal_events")}),
        gpu_slowdowns=tuple(f"{host}: {text}" for host, part in hosts.items() for text in part.gpu_slowdowns),
        takers=tuple(f"{host}: {text}" for host, part in hosts.items() for text in part.takers),
        nics={f"{host}/{name}": nic for host, part in hosts.items() for name, nic in part.nics.items()},
        gpu_watts={f"{host}/{gpu}": w for host, part in hosts.items() for gpu, w in part.gpu_watts.items()},
    )


LOG_WAIT_S: Final = 2.5
"""Longest interval of KV log lines, in seconds, for which a trial waits."""


@dataclass(frozen=True)
class Readings:
    """``before``, ``after``: /metrics by instance. ``logged``: KV by role from logs, without metrics.
    ``rows``: the sampler's. ``slots``: an instance's ``max_num_seqs``, if known. ``logged_transports``:
    proven by logs. ``gpus``: of the deployment, if all are known."""

    before: Reading
    after: Reading
    logged: Mapping[str, RoleKv]
    rows: Sequence[Mapping[str, Any]]
    host: HostFigures
    slots: int | None = None
    logged_transports: Sequence[LoggedTransport] = ()
    gpus: Sequence[str] = ()

    @cached_property
    def engines(self) -> dict[str, EngineFigures]:
        return with_slots(engine_figures(self.before, self.after, self.logged), self.rows, self.slots)

    @property
    def transport(self) -> str:
        """Actual transport, reported by the engines, else proven by logs."""
        logged = dict.fromkeys(name for transport in self.logged_transports for name in transport.transports)
        return transport_of(self.after) or ",".join(logged)

    @property
    def gpu_watts(self) -> dict[str, float]:
        """Mean power of each GPU of the deployment; empty unless all are known."""
        watts = {gpu: round(self.host.gpu_watts[gpu], 3) for gpu in self.gpus if gpu in self.host.gpu_watts}
        return watts if len(watts) == len(self.gpus) else {}

    @property
    def watts(self) -> float | None:
        """Their total mean power, or None unless all are known."""
        return sum(self.gpu_watts.values()) if self.gpu_watts else None

    def router(self, seconds: float) -> RouterFigures:
        return replace(router_figures(self.before, self.after), seconds=seconds)

    def columns(self, load: LoadResult) -> dict[str, Any]:
        columns = engine_summary(self.before, self.after, self.engines, load, self.logged)
        ways = {"rdma": 0.0, "nvlink": 0.0, "ip": 0.0, "loopback": 0.0}
        for nic in self.host.nics.values():
            ways["loopback" if nic.loopback else nic.kind] += nic.most_bytes
        return {
            **columns,
            "transport": self.transport,
            "logged_transports": [asdict(transport) for transport in self.logged_transports],
            "carried_bytes": {way: carried for way, carried in ways.items() if carried},
            **({"gpu_watts": self.watts, "watts_by_gpu": self.gpu_watts} if self.gpu_watts else {}),
            "use": {role: use.to_json() for role, use in sampled_use(self.rows, self.slots).items()},
            "num_kv_tokens": {
                role: int(engine.cache_tokens) // engine.instances
                for role, engine in self.engines.items()
                if engine.cache_tokens and engine.instances
            },
        }


class MetricsReader:
    def __init__(self, deployment: RunningDeployment) -> None:
        self._deployment = deployment
        self._kv_logs = KvLogs({p.name: p.log_path for p in deployment.processes if p.name != "router"})

    def before(self) -> Reading:
        """Read /metrics of each instance before a load; earlier KV log lines are discarded."""
        pages = self._deployment.metrics()
        if self._reads_logs(pages):
            self._read_kv_logs(pages)
            pages = self._deployment.metrics()
        return pages

    def after(self, before: Reading, observer: Observer, slots: int | None) -> Readings:
        """Read everything after a drained trial."""
        pages = self._deployment.metrics()
        logged = self._read_kv_logs(pages)
        transports = self._deployment.transports()
        gpus = self._deployment.gpus()
        return Readings(before, pages, logged, observer.rows, observer.host, slots, transports, gpus)

    def _reads_logs(self, pages: Reading) -> bool:
        """Whether KV moves without metrics of it."""
        sources = (role_kv([(page, page)]).source for page in pages.values() if page is not None)
        return self._deployment.connector.disaggregated and not any(sources)

    def _read_kv_logs(self, pages: Reading) -> dict[str, RoleKv]:
        """KV transfers logged since the last call, for engines without KV metrics. If lines are frequent, one
        interval is waited for so that counts are complete; else only per-transfer means are used."""
        if not self._reads_logs(pages):
            return {}
        whole = self._log_interval_s() <= LOG_WAIT_S
        if whole:
            deadline = time.monotonic() + self._log_interval_s() + 0.5
            while time.monotonic() < deadline:
                self._deployment.check_alive()
                self._kv_logs.poll()
                time.sleep(0.05)
        return self._kv_logs.take(whole=whole)

    def _log_interval_s(self) -> float:
        envs = [process.spec.env.get(LOG_INTERVAL_ENV, "") for process in self._deployment.processes]
        try:
            return float(next(filter(None, envs), os.environ.get(LOG_INTERVAL_ENV) or DEFAULT_LOG_INTERVAL_S))
        except ValueError:
            return DEFAULT_LOG_INTERVAL_S


def kv_bytes_per_request(
    scenario: Scenario, input_len: int, engines: Mapping[str, EngineFigures]
) -> tuple[float | None, float]:
    """KV bytes one request moves in whole blocks, and how much may remain behind. Block size as reported;
    None if that or the model's shape is unknown."""
    shape, deployed = scenario.kv_shape, scenario.deployment
    blocks = {role.block_tokens for role in engines.values() if role.block_tokens}
    if not shape.known or len(blocks) != 1:
        return None, 0.0
    block_tokens = blocks.pop()
    per_block = float(shape.block_bytes(block_tokens, deployed.wire_ranks) * shape.regions())
    partial = not deployed.engine_options.kv_bytes_certain and input_len % block_tokens > 0
    moved = shape.wire_bytes(input_len, block_tokens, deployed.wire_ranks)
    return float(moved), per_block if partial else 0.0


INSIDE_ONE_HOST: Final = 2.0
"""Factor by which loopback in an RDMA device may exceed its port: PCIe is the limit."""


def surroundings(scenario: Scenario, connector: Connector, options: ConnectorOptions) -> dict[str, Any]:
    """Fields of an ``Evidence`` that are constant over trials. ``scenario``: the connector's own."""
    deployed = scenario.deployment
    hardware = instance_hardware(scenario)
    peak = None if hardware is None else hardware.peak_flops
    instances = deployed.prefill.instances if connector.disaggregated else deployed.aggregated_engines
    if peak is not None:
        peak /= deployed.engine_options.time_factor
    nics = options.requested_nics
    local = deployed.engine_options.starts_processes and not deployed.several_hosts
    return {
        "requested_nics": nics,
        "engines_here": local,
        "hosts_watched": deployed.engine_options.starts_processes,
        "kv_line_rate": line_rate(scenario, connector.requested_transport(options), nics, local),
        "prefill_work": prefill_work(scenario.model.name, scenario.model.active_parameters),
        "prefill_flops": None if peak is None else peak * instances,
        "hardware": "" if hardware is None else f"{instances} × {hardware.text()}" * (peak is not None),
    }


def instance_hardware(scenario: Scenario) -> Hardware | None:
    """GPUs of one instance: by the scenario, by the emulated timing, or detected locally."""
    deployed = scenario.deployment
    if deployed.hardware:
        return hardware_of(deployed.hardware)
    if timing := deployed.engine_options.timing_profile:
        return profile_hardware(timing, deployed.ranks_of("prefill-0").tensor)
    if not deployed.engine_options.starts_processes or deployed.several_hosts:
        return None
    found = set(nvml.names())
    return Hardware(found.pop(), deployed.ranks_of("prefill-0").gpus) if len(found) == 1 else None


def slots_of(scenario: Scenario) -> int | None:
    """``max_num_seqs`` of one instance, if the engine options set it."""
    return scenario.deployment.engine_options.slots


def line_rate(scenario: Scenario, transport: str, nics: tuple[str, ...], local: bool) -> float | None:
    """Peak bytes per second of an instance's NICs, one way."""
    if scenario.deployment.nic_gbit is not None:
        return scenario.deployment.nic_gbit * 1e9 / 8
    words = set(transport.split(","))
    if not local or words & {"", "all", "tcp"}:
        # Within one host TCP uses loopback, which has no line rate; a library that may choose uses NVLink.
        return None
    devices: dict[str, NicReading] = {
        name: nic for name, nic in nic_counters().items() if nic.kind == "rdma" and (not nics or name in nics)
    }
    rates = [nic.bytes_per_s for nic in devices.values()]
    known = [rate for rate in rates if rate is not None]
    return INSIDE_ONE_HOST * sum(known) if known and len(known) == len(rates) else None
