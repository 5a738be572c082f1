"""``python -m tools.perf_peers``: sets up, measures, writes results/peers/peers.json and peers.md."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.hosts.environment import cpu
from kvbench.launchers.local import LocalLauncher
from kvbench.sweep.selftest import least_disturbed
from kvbench.sweep.selftest_server import exact_server
from tools.bench import ROOT, arguments

from .clients import (
    CLIENTS,
    NEEDS_TOKENIZER,
    ROUTERS,
    Client,
    Peer,
    RoutedLoad,
    Router,
    direct,
    require,
    through,
)
from .report import Report, Row, errors_of, overloaded, percentile, together
from .work import (
    FIRST_TOKEN_S,
    GAP_S,
    START_UP,
    Cost,
    Outcome,
    PeerError,
    Work,
    make_tokenizer,
    run_command,
    set_up,
    work_for,
)

START_DEADLINE_S = 180.0
"""What a client may take besides its load: the slowest need about 60 s to start and 30 s to end."""

Send = Callable[[Path], RoutedLoad]
START_NOISE = 0.2
"""The CPU time of a start differs by so much from one to the next: a load that takes less shows no figure."""


def say(text: str) -> None:
    print(f"perf-peers: {text}", flush=True)


def main() -> None:
    names = [*(client.name for client in CLIENTS), *(f"router:{router.name}" for router in ROUTERS)]
    options = arguments(
        __doc__,
        only=("", "names by commas, of " + ", ".join(names)),
        streams=("50,100,300", "open streams on average"),
        repeats=(3, "of the routers, in turn"),
        seconds=(10.0, "how long each load lasts"),
        output=(ROOT / "results" / "peers", "folder of the tables"),
        set_up_only=(False, "make the environments, measure nothing"),
    )
    chosen = [name.strip() for name in options.only.split(",") if name.strip()] or names
    unknown = set(chosen) - set(names)
    if unknown:
        say(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        sys.exit(2)
    levels = [work_for(int(number), options.seconds) for number in options.streams.split(",")]
    clients = [client for client in CLIENTS if client.name in chosen]
    routers = [router for router in ROUTERS if f"router:{router.name}" in chosen]
    report = Report(machine_facts(), options.seconds)
    clients, routers = prepared(clients, routers, report)
    if options.set_up_only:
        for name, reason in report.not_run:
            say(f"not usable: {name}: {reason}")
        return
    with tempfile.TemporaryDirectory(prefix="kvbench-peers-") as folder:
        passes = Passes(routers, options.repeats, report, Path(folder), options.output)
        measure(clients, passes, levels, report, Path(folder), options.output)
    report.machine["load_after"] = load_average()
    report.write(options.output)
    print(report.markdown())
    say(f"written to {options.output}")


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu(Path("/")).get("model"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "at": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": load_average(),
    }


def load_average() -> str:
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def prepared(
    clients: Sequence[Client], routers: Sequence[Router], report: Report
) -> tuple[list[Client], list[Router]]:
    """Sets the environments up; those whose environment cannot be had go to the report with the reason."""
    problems: dict[str, str] = {}
    peers: list[Peer] = [*clients, *routers]
    for name in dict.fromkeys(peer.environment for peer in peers if peer.environment):
        try:
            set_up(name, say)
            if name in NEEDS_TOKENIZER:
                make_tokenizer(name)
        except PeerError as error:
            problems[name] = f"set-up: {error}"
    for peer in peers:
        label = peer.name if isinstance(peer, Client) else f"router {peer.name}"
        if peer.environment in problems:
            report.not_run.append((label, problems[peer.environment]))
        else:
            report.versions[label] = peer.version()
    usable = [client for client in clients if client.environment not in problems]
    return usable, [router for router in routers if router.environment not in problems]


def measure(
    clients: Sequence[Client],
    passes: Passes,
    levels: Sequence[Work],
    report: Report,
    folder: Path,
    output: Path,
) -> None:
    """Level by level, each client and router in turn; the report is written after each."""
    started: dict[str, Cost] = {}
    for client in clients:
        with _listed(client.name, report):
            require(client)
            _, started[client.name], _ = _run(client, START_UP, folder / f"{client.name}-start")
            say(f"{client.name}: start {started[client.name].cpu_s:.2f} CPU-s")
    for work in levels:
        for client in clients:
            if client.name in started:
                with _listed(f"{client.name}, {work.streams} streams", report):
                    row = client_row(client, work, started[client.name], folder)
                    report.clients.append(row)
                    error_ms = row["errors"]["ttft_p50_ms"]
                    say(f"{client.name}, {work.streams} streams: TTFT error p50 {error_ms} ms")
            report.write(output)
        passes.measure(work)


@dataclass
class Passes:
    """The routers, measured in turn so often with each level of load, each time beside no router."""

    routers: Sequence[Router]
    repeats: int
    report: Report
    folder: Path
    output: Path

    def measure(self, work: Work) -> None:
        if not self.routers:
            return
        rows: dict[str, list[Row]] = {}
        most_s = _deadline_s(work)
        for repeat in range(self.repeats):
            folder = self.folder / f"routers-{work.streams}-{repeat}"
            ways: dict[str, Send] = {"none": partial(direct, work, deadline_s=most_s)}
            for router in self.routers:
                ways[router.name] = partial(through, router, work, deadline_s=most_s)
            base_ms = None
            for name, send in ways.items():
                if name != "none" and any(overloaded(row) for row in rows.get(name, ())):
                    continue
                if row := self._pass(name, send, work, folder, base_ms):
                    rows.setdefault(name, []).append(row)
                if name == "none":
                    base_ms = (row and row["errors"]["ttft_p50_ms"]) or 0.0
        self.report.routers += [together(found) for found in rows.values()]
        self.report.write(self.output)

    def _pass(self, name: str, send: Send, work: Work, folder: Path, base_ms: float | None) -> Row | None:
        """Send one load by one way; ``base_ms``: the median error without a router, None for that way."""
        label = f"router {name}" if base_ms is not None else "no router"
        with _listed(f"{label}, {work.streams} streams", self.report):
            load = os.getloadavg()[0]
            passage = least_disturbed(lambda at: send(folder / at), name, say).found
            base = errors_of(passage.outcome)["ttft_p50_ms"] or 0.0 if base_ms is None else base_ms
            row = router_row(name, work, passage, base, load)
            say(f"{label}, {work.streams} streams: adds p50 {row['added_p50_ms']} ms to TTFT")
            return row
        return None


@contextlib.contextmanager
def _listed(label: str, report: Report) -> Iterator[None]:
    """List a peer that fails with the reason, and go on."""
    try:
        yield
    except (PeerError, KvbenchError, OSError, ValueError, KeyError) as error:
        report.not_run.append((label, f"{type(error).__name__}: {error}"[:300]))
        say(f"{label}: {error}")


def _deadline_s(work: Work) -> float:
    return START_DEADLINE_S + 6.0 * work.requests / work.rate


def _run(client: Client, work: Work, folder: Path) -> tuple[Outcome, Cost, dict[str, Any]]:
    launcher = LocalLauncher("perf-peers", folder / "logs", folder / "specs")
    with exact_server(launcher, {"first_token_s": FIRST_TOKEN_S, "gap_s": GAP_S}) as server:
        argv, env = client.command(work, server.url, folder)
        cost = run_command(argv, folder, _deadline_s(work), env)
        return client.outcome(work, folder), cost, server.log("?summary=1")


def client_row(client: Client, work: Work, start: Cost, folder: Path) -> Row:
    load = os.getloadavg()[0]
    label = f"{client.name}-{work.streams}"
    outcome, cost, server = least_disturbed(lambda name: _run(client, work, folder / name), label, say).found
    load_cpu_s = cost.cpu_s - start.cpu_s
    beyond_noise = load_cpu_s > START_NOISE * start.cpu_s
    return {
        "client": client.name,
        "streams": work.streams,
        "rate": work.rate,
        "streams_peak": server["streams_peak"],
        "completed": outcome.completed,
        "failed": outcome.failed,
        "errors": errors_of(outcome),
        "gaps_are": outcome.gaps_are,
        "hidden_p99_ms": percentile(outcome.hidden_ms, 99),
        "chunks_per_core_s": _per_core_s(outcome, work, load_cpu_s) if beyond_noise else None,
        "cpu_s": round(cost.cpu_s, 2),
        "start_up_cpu_s": round(start.cpu_s, 2),
        "wall_s": round(cost.wall_s, 1),
        **{
            f"server_late_{which}_p99_ms": server["lateness"][which]["p99_ms"]
            for which in ("first", "further")
        },
        "load_average": round(load, 2),
    }


def router_row(name: str, work: Work, routed: RoutedLoad, base_ms: float, load: float) -> Row:
    outcome, errors, cpu_s = routed.outcome, errors_of(routed.outcome), routed.cpu_s
    added = {at: errors[f"ttft_p{at}_ms"] for at in (50, 99)}
    return {
        "router": name,
        "streams": work.streams,
        "rate": work.rate,
        "completed": outcome.completed,
        "failed": outcome.failed,
        "errors": errors,
        **{f"added_p{at}_ms": None if ms is None else round(ms - base_ms, 3) for at, ms in added.items()},
        "chunks_per_core_s": None if cpu_s is None else _per_core_s(outcome, work, cpu_s),
        "cpu_s": None if cpu_s is None else round(cpu_s, 2),
        "memory_mb": None if routed.memory_mb is None else round(routed.memory_mb, 1),
        "prefill_late_p99_ms": routed.late_p99_ms[0],
        "decode_late_p99_ms": routed.late_p99_ms[1],
        "load_average": round(load, 2),
    }


def _per_core_s(outcome: Outcome, work: Work, cpu_s: float) -> int | None:
    """Tokens of finished requests per CPU second; None if there was next to no CPU time."""
    tokens = work.tokens * outcome.completed // work.requests
    return round(tokens / cpu_s) if cpu_s > 0.02 else None


if __name__ == "__main__":
    main()
