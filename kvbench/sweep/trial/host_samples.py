"""The hosts of a deployment during one trial: samples of each, and what each did for others meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from kvbench.core.gates.evidence import HostFigures, NicFigures
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import KvbenchError
from kvbench.hosts.procfs import Listeners, listening
from kvbench.hosts.telemetry import Sampler, host_figures, read_host
from kvbench.launchers.base import Launcher


class Observer:
    """Context manager around the load of one trial. ``rows`` and ``host`` are there after it.

    Rows are ``Sampler``'s with ``host``, the name of the host that was sampled, empty for this machine.
    ``headers``: for the questions at the servers' /metrics.
    """

    def __init__(
        self, launcher: Launcher, deployment: RunningDeployment, trial_id: str, headers: Mapping[str, str]
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.host = HostFigures()
        self._launcher = launcher
        self._urls = deployment.endpoints.metrics_urls
        self._trial_id = trial_id
        self._far = bool(launcher.hosts)
        if self._far:
            launcher.ask_hosts("sample", self._wanted(trial_id, headers))
        else:
            # A server of somebody else's may well run here: it is what is measured, and no disturbance.
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
        if not self._far:
            self._sampler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._far:
            self._sampler.__exit__()
            self.rows = [{**row, "host": ""} for row in self._sampler.rows]
            host = host_figures(self._before, read_host(also=self._system))
            self.host = replace(host, unknown_owner=unknown_owner(self._listeners))
        elif error is None:
            self._take(self._ended())
        else:  # which is what has to be reported, not what may come of it here
            with contextlib.suppress(KvbenchError):
                self._ended()

    def _ended(self) -> dict[str, dict[str, Any]]:
        asked = {"trial_id": self._trial_id}
        return self._launcher.ask_hosts("sampled", dict.fromkeys(self._launcher.hosts, asked))

    def _wanted(self, trial_id: str, headers: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """What each host is to sample: itself, and the servers that run there."""
        urls: dict[str, dict[str, str]] = {}
        for name, url in self._urls.items():
            urls.setdefault(self._launcher.host_of(name), {})[name] = url
        common = {"trial_id": trial_id, "headers": dict(headers)}
        return {host: {**common, "metrics_urls": urls.get(host, {})} for host in self._launcher.hosts}

    def _take(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        for host, answer in answers.items():
            for row in answer["rows"]:
                # Two hosts often call their NICs alike.
                source = str(row["source"]).replace("nic:", f"nic:{host}/", 1)
                self.rows.append({**row, "source": source, "host": host})
        self.host = joined({host: figures_of(answer["figures"]) for host, answer in answers.items()})


def unknown_owner(listeners: Listeners) -> str:
    """Why CPU time that the listeners did not take may still be the server's; empty if it cannot be.

    ``listeners``: of a server that kvbench did not start. The processes that listen and their children work
    for it; others may do so too.
    """
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
    """A host's figures as its agent reported them."""
    nics = {name: NicFigures(**nic) for name, nic in figures["nics"].items()}
    words = {name: tuple(figures.get(name, ())) for name in ("gpu_slowdowns", "takers")}
    return HostFigures(**{**figures, **words, "nics": nics})


def joined(hosts: Mapping[str, HostFigures]) -> HostFigures:
    """The figures of several hosts as one machine's: the worst of each, NICs as ``host/nic``."""

    def worst(name: str) -> Any:
        values = [value for each in hosts.values() if (value := getattr(each, name)) is not None]
        return max(values, default=None)

    shares = (
        *("load_average", "cpu_count", "steal_share", "other_cpu_share", "throttled_share"),
        *("busy_share", "pressure_share"),
    )
    return replace(
        HostFigures(**{name: worst(name) for name in (*shares, "thermal_events")}),
        gpu_slowdowns=tuple(f"{host}: {text}" for host, each in hosts.items() for text in each.gpu_slowdowns),
        takers=tuple(f"{host}: {text}" for host, each in hosts.items() for text in each.takers),
        nics={f"{host}/{name}": nic for host, each in hosts.items() for name, nic in each.nics.items()},
        gpu_watts={f"{host}/{gpu}": w for host, each in hosts.items() for gpu, w in each.gpu_watts.items()},
    )
