"""Metrics of engines and machine: /metrics around a trial, a sampler during it, the machine's counters."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import httpx
import psutil

from kvbench.core.access import ServerAccess
from kvbench.core.gates.evidence import HostFigures, NicFigures
from kvbench.errors import ServerError
from kvbench.hosts import procfs, web
from kvbench.hosts.devices import NicReading, cgroup_throttled_s, cpu_pressure_s, nic_counters, thermal_events
from kvbench.hosts.nvml import energy_j, nvlink_bytes, slowed_s

SCRAPE_TIMEOUT_S = 5.0
SAMPLE_INTERVAL_S = 0.5
METRICS_LINES: Final = 50_000
METRICS_LINE_CHARACTERS: Final = 8 * 1024
"""Maximum line length: parsing time grows with its square."""


@dataclass(frozen=True)
class Metrics:
    """One reading of a Prometheus page: sample name → label sets with their values."""

    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum over all label sets of a sample that match ``labels``; None without any."""
        found = [
            value
            for sample_labels, value in self.samples.get(name, ())
            if all(sample_labels.get(key) == wanted for key, wanted in labels.items())
        ]
        return sum(found) if found else None

    def label(self, name: str, label: str) -> str:
        """Return a label's value of an info metric's first sample; empty without one."""
        for sample_labels, _ in self.samples.get(name, ()):
            return sample_labels.get(label, "")
        return ""


def parse_metrics(text: str) -> Metrics:
    """Parse Prometheus text. Raises ServerError for an invalid page."""
    lines = text.splitlines()
    if len(lines) > METRICS_LINES or any(len(line) > METRICS_LINE_CHARACTERS for line in lines):
        raise ServerError(
            f"a /metrics page has more than {METRICS_LINES} lines,"
            f" or a line of more than {METRICS_LINE_CHARACTERS} characters"
        )
    return _parse_common(lines) or _parse_all(text)


_SAMPLE: Final = re.compile(
    r"([a-zA-Z_:][\w:]*)"
    r'(?:\{((?:[a-zA-Z]\w*="[^"\\]*"(?:,[a-zA-Z]\w*="[^"\\]*")*)?)\})?'
    r" ([-+]?(?:\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|Inf)|NaN)",
    re.ASCII,
)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_TYPE: Final = re.compile(
    r"# TYPE ([a-zA-Z_:][\w:]*) (?:(counter)|gauge|histogram|summary|untyped)", re.ASCII
)


def _parse_common(lines: Iterable[str]) -> Metrics | None:
    """Parse a page without escapes, timestamps and unusual names of counters, in a third of the library's
    time; None for any other page."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for line in lines:
        if line.startswith("#"):
            kind = _TYPE.fullmatch(line)
            if not line.startswith("# HELP ") and (
                kind is None or (kind[2] and not kind[1].endswith("_total"))
            ):
                return None
        elif line:
            found = _SAMPLE.fullmatch(line)
            pairs = _LABEL.findall(found[2] or "") if found else ()
            labels = dict(pairs)
            if found is None or len(labels) < len(pairs):
                return None
            samples.setdefault(found[1], []).append((labels, float(found[3])))
    return Metrics(samples)


def _parse_all(text: str) -> Metrics:
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, OverflowError, IndexError) as error:
        raise ServerError(f"a /metrics page cannot be read: {error}") from error
    return Metrics(samples)


def finite(value: str) -> float | None:
    """Return a sample's value; None unless it is a finite number."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def scrape(client: httpx.Client, url: str, timeout_s: float = SCRAPE_TIMEOUT_S) -> Metrics | None:
    """Read a /metrics page; None on failure, which is a gap in the evidence and no error."""
    if not url:
        return None
    try:
        response = client.get(url, timeout=timeout_s)
        response.raise_for_status()
        return parse_metrics(response.text)
    except (httpx.HTTPError, ServerError):
        return None


def quantile(before: Metrics | None, after: Metrics | None, name: str, share: float) -> float | None:
    """Return the upper bound of a histogram's quantile between two readings: its bucket's bound. None if
    nothing was counted or it is beyond the last finite bucket."""
    if before is None or after is None:
        return None
    start = {labels["le"]: value for labels, value in before.samples.get(f"{name}_bucket", ())}
    grown = sorted(
        (float(labels["le"]), value - start.get(labels["le"], 0.0))
        for labels, value in after.samples.get(f"{name}_bucket", ())
    )
    if not grown or grown[-1][1] <= 0:
        return None
    wanted = share * grown[-1][1]
    return next((bound for bound, count in grown if count >= wanted), None)


def difference(before: Metrics | None, after: Metrics | None, name: str, **labels: str) -> float | None:
    """Return a counter's growth between two readings; None if either lacks it. A counter that first appears
    in ``after`` counts from zero: Prometheus clients create labelled counters at first use."""
    if before is None or after is None:
        return None
    end = after.total(name, **labels)
    return None if end is None else end - (before.total(name, **labels) or 0.0)


@dataclass(frozen=True)
class HostReading:
    """The machine at one moment. Counters since boot; missing ones are None or empty."""

    load_average: float
    steal_s: float
    cpu_s: float
    run_cpu_s: float
    time_s: float
    nics: Mapping[str, NicReading] = field(default_factory=dict)
    throttled_s: float | None = None
    thermal_events: int | None = None
    gpu_slowed_s: Mapping[str, float] = field(default_factory=dict)
    gpu_energy_j: Mapping[str, float] = field(default_factory=dict)
    """Energy by GPU number, and again by UUID."""
    pressure_s: float | None = None
    """Time in which some process was ready to run without a core (PSI)."""
    others: Mapping[tuple[int, int], tuple[str, float]] = field(default_factory=dict)
    """Processes outside this run, by number and start: name, CPU seconds."""


def read_host(*, slowdowns: bool = True, owners: bool = True, also: Collection[int] = ()) -> HostReading:
    """Read load average (1 min), CPU seconds over all cores (stolen, all, this run's), NICs, slowdowns. This
    run is this process with all descendants, including ended children; ``also``: the system under test, if
    started by others. Kernel threads belong to no one. Without ``slowdowns`` or ``owners`` (which reads a
    file per process) these are skipped."""
    times = psutil.cpu_times()
    used = times.user + times.system + times.nice
    table = procfs.processes() if owners else {}
    run_pids = procfs.belonging(table, {os.getpid(), *also})
    run_cpu_s = sum(table[pid].cpu_s + table[pid].ended_s for pid in run_pids)
    kernel = {pid for pid, process in table.items() if procfs.is_kernel_thread(process)}
    run_cpu_s += sum(table[pid].cpu_s for pid in kernel - run_pids)
    others = {
        (pid, process.started): (process.name, process.cpu_s)
        for pid, process in table.items()
        if pid not in run_pids and pid not in kernel
    }
    steal = float(getattr(times, "steal", 0.0))
    return HostReading(
        os.getloadavg()[0],
        steal,
        float(used),
        run_cpu_s,
        time.monotonic(),
        {**nic_counters(), **_nvlinks()},
        cgroup_throttled_s(),
        thermal_events() if slowdowns else None,
        slowed_s() if slowdowns else {},
        energy_j(),
        cpu_pressure_s(),
        others,
    )


def _nvlinks() -> dict[str, NicReading]:
    return {
        f"GPU {index} NVLink": NicReading("nvlink", sent, received)
        for index, (sent, received) in nvlink_bytes().items()
    }


class Sampler:
    """Samples the machine, given processes and /metrics gauges in a thread during a trial. Rows:
    ``{"trial_id", "t_s", "source", "metric", "value"}``; ``t_s`` counts from ``start``."""

    GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def __init__(
        self,
        trial_id: str,
        pids: Mapping[str, int],
        metrics_urls: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        access: ServerAccess = web.ANY_SERVER,
    ) -> None:
        """``headers``: for requests to ``metrics_urls``; ``access``: TLS trust."""
        self.rows: list[dict[str, Any]] = []
        self._headers = dict(headers or {})
        self._access = access
        self._trial_id = trial_id
        self._metrics_urls = dict(metrics_urls)
        self._processes = dict(_alive(pids))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._started = time.monotonic()

    def __enter__(self) -> Sampler:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=SCRAPE_TIMEOUT_S + 2)

    def _run(self) -> None:
        with web.client(headers=self._headers, access=self._access) as client:
            while not self._stop.wait(SAMPLE_INTERVAL_S):
                now = time.monotonic() - self._started
                self._sample_host(now)
                for source, url in self._metrics_urls.items():
                    metrics = scrape(client, url)
                    for gauge in self.GAUGES if metrics is not None else ():
                        assert metrics is not None
                        self._add(now, source, gauge, metrics.total(gauge))

    def _sample_host(self, now: float) -> None:
        reading = read_host(slowdowns=False, owners=False)  # hundreds of files on a large machine
        self._add(now, "host", "load_average", reading.load_average)
        self._add(now, "host", "cpu_s", reading.cpu_s)
        self._add(now, "host", "steal_s", reading.steal_s)
        for name, nic in reading.nics.items():
            self._add(now, f"nic:{name}", "tx_bytes", nic.sent_bytes)
            self._add(now, f"nic:{name}", "rx_bytes", nic.received_bytes)
        for gpu, joules in reading.gpu_energy_j.items():
            if gpu.isdecimal():
                self._add(now, f"gpu:{gpu}", "energy_j", joules)
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._add(now, name, "cpu_s", times.user + times.system)
                self._add(now, name, "rss_bytes", process.memory_info().rss)

    def _add(self, now: float, source: str, metric: str, value: float | None) -> None:
        if value is not None:
            row = {"trial_id": self._trial_id, "t_s": round(now, 4), "source": source, "metric": metric}
            self.rows.append({**row, "value": float(value)})


def _alive(pids: Mapping[str, int]) -> Iterable[tuple[str, psutil.Process]]:
    """Yield the living processes and their children, by name."""
    for name, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            yield name, process
            for child in process.children(recursive=True):
                yield f"{name}/child", child


SLOWED_SHARE: Final = 0.01
MOST_TAKERS: Final = 3
TAKER_SHARE: Final = 0.02
"""Processes that used a smaller share of the CPU are not named."""


def host_figures(before: HostReading, after: HostReading) -> HostFigures:
    """Return the load average before the trial, and CPU used by others or withheld during it."""
    cores = os.cpu_count() or 1
    elapsed_s = max(1e-9, after.time_s - before.time_s)
    capacity_s = elapsed_s * cores
    others = (after.cpu_s - before.cpu_s) - (after.run_cpu_s - before.run_cpu_s)
    throttled = _growth(before.throttled_s, after.throttled_s)
    pressure = _growth(before.pressure_s, after.pressure_s)
    used = (after.cpu_s - before.cpu_s) + (after.steal_s - before.steal_s)
    return HostFigures(
        load_average=before.load_average,
        cpu_count=cores,
        steal_share=max(0.0, after.steal_s - before.steal_s) / capacity_s,
        other_cpu_share=max(0.0, others) / capacity_s,
        throttled_share=None if throttled is None else throttled / elapsed_s,
        thermal_events=_growth(before.thermal_events, after.thermal_events),
        gpu_slowdowns=tuple(_slowdowns(before.gpu_slowed_s, after.gpu_slowed_s, elapsed_s)),
        busy_share=min(1.0, max(0.0, used) / capacity_s),
        pressure_share=None if pressure is None else min(1.0, pressure / elapsed_s),
        takers=tuple(_takers(before, after, capacity_s)),
        gpu_watts=_watts(before, after, elapsed_s),
        nics={
            name: _nic_figures(start, end)
            for name, end in after.nics.items()
            if (start := before.nics.get(name)) is not None
        },
    )


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _slowdowns(before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float) -> Iterator[str]:
    for name, seconds in after.items():
        share = (seconds - before.get(name, seconds)) / elapsed_s
        if share > SLOWED_SHARE:
            yield f"{name} for {share:.0%} of the time"


def _watts(before: HostReading, after: HostReading, elapsed_s: float) -> dict[str, float]:
    """Return mean power by GPU; without those whose counter restarted."""
    grown = {
        gpu: joules - before.gpu_energy_j[gpu]
        for gpu, joules in after.gpu_energy_j.items()
        if gpu in before.gpu_energy_j
    }
    return {gpu: joules / elapsed_s for gpu, joules in grown.items() if joules >= 0}


def _takers(before: HostReading, after: HostReading, capacity_s: float) -> list[str]:
    """Return the processes that used the most CPU, as ``cc1plus 31 %``; ended ones are invisible."""
    taken: dict[str, float] = {}
    for key, (name, seconds) in after.others.items():
        grown = seconds - before.others.get(key, (name, 0.0))[1]
        taken[name] = taken.get(name, 0.0) + grown
    most = sorted(taken.items(), key=lambda pair: -pair[1])[:MOST_TAKERS]
    shares = [(name, seconds / capacity_s) for name, seconds in most]
    return [f"{name} {share:.0%}" for name, share in shares if share > TAKER_SHARE]


def _nic_figures(before: NicReading, after: NicReading) -> NicFigures:
    return NicFigures(
        after.kind,
        max(0.0, after.sent_bytes - before.sent_bytes),
        max(0.0, after.received_bytes - before.received_bytes),
        after.bytes_per_s,
        after.loopback,
    )


class TrialSamples:
    """Sampling during a trial: starts at once; ``taken`` ends it."""

    def __init__(
        self,
        trial_id: str,
        pids: Mapping[str, int],
        metrics_urls: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> None:
        self._system = list(pids.values())
        self._before = read_host(also=self._system)
        self._sampler = Sampler(trial_id, pids, metrics_urls, headers)
        self._sampler.__enter__()

    def taken(self) -> dict[str, Any]:
        """Return rows of ``Sampler``, and the machine's ``HostFigures``."""
        self._sampler.__exit__(None, None, None)
        return {
            "rows": self._sampler.rows,
            "figures": asdict(host_figures(self._before, read_host(also=self._system))),
        }
