"""``kvbench doctor selftest``: measure this host's client error against a server with an exact schedule.

For each number of streams the load generator sends Poisson requests at streams / request duration, and each
request's times are compared with the server's. Requests count once the first ones have ended. A pass is
repeated if the machine did other work."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from rich.console import Console

from kvbench.core.fitted_table import FittedColumn, Grid
from kvbench.core.gates.client import cpu_taken
from kvbench.core.gates.evidence import GateLimits, HostFigures
from kvbench.core.load.workers import LoadResult
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError, ProcessDiedError
from kvbench.files import scratch
from kvbench.hosts.environment import cgroup_cpu_limit, load_average
from kvbench.hosts.telemetry import host_figures, read_host
from kvbench.launchers.local import LocalLauncher
from kvbench.sweep.selftest_server import (
    Errors,
    RunningExactServer,
    chunks_between,
    errors_of,
    exact_server,
    mean_open,
    percentile,
)
from kvbench.sweep.trial.loadgen_driver import LoadGenerator
from kvbench.version import __version__

Found = TypeVar("Found")

TRIES: Final = 3


@dataclass(frozen=True)
class LeastDisturbed(Generic[Found]):
    """A result, the machine's other work meanwhile, and the number of passes."""

    found: Found
    host: HostFigures
    tries: int


def disturbance(host: HostFigures) -> str:
    """Describe what else used the CPU, by the gates' limits; empty if nothing did."""
    return " and ".join(cpu_taken(host, GateLimits()))


def least_disturbed(
    measure: Callable[[str], Found], label: str, say: Callable[[str], None]
) -> LeastDisturbed[Found]:
    """Return the first undisturbed pass, else the least disturbed of ``TRIES``. ``measure`` gets a name for
    each pass, ``say`` the reason of a repeat."""
    passes: list[tuple[Found, HostFigures]] = []
    while len(passes) < TRIES:
        before = read_host(slowdowns=False)
        found = measure(f"{label}-{len(passes)}")
        host = host_figures(before, read_host(slowdowns=False))
        passes.append((found, host))
        disturbed = disturbance(host)
        if not disturbed:
            return LeastDisturbed(found, host, len(passes))
        say(f"{label}: {disturbed}{', so it is repeated' if len(passes) < TRIES else ''}")
    found, host = min(
        passes, key=lambda attempt: (attempt[1].steal_share or 0.0) + (attempt[1].other_cpu_share or 0.0)
    )
    return LeastDisturbed(found, host, TRIES)


SCHEMA: Final = 1
FIRST_TOKEN_S: Final = 0.05
GAP_S: Final = 0.01
OUTPUT_LEN: Final = 128
INPUT_LEN: Final = 256
DURATION_S: Final = FIRST_TOKEN_S + (OUTPUT_LEN - 1) * GAP_S
ALLOWED_MS: Final = 5.0
"""Smallest client delay at which a gate refuses a trial, in milliseconds."""
QUOTED_OUTPUT_LEN: Final = 256


@dataclass(frozen=True)
class Level:
    """Result of one number of streams. Times in ms."""

    streams: int
    request_rate: float
    requests: int
    failed: int
    streams_open: float
    chunks_per_s: float
    ttft_error_p50_ms: float | None
    ttft_error_p99_ms: float | None
    itl_error_p50_ms: float | None
    itl_error_p99_ms: float | None
    unmatched: int
    send_lag_p99_ms: float | None
    stamps: str
    client_cpu_s: float | None
    chunks_per_core_s: float | None
    server_late_first_p99_ms: float | None
    server_late_further_p99_ms: float | None
    server_chunks_per_core_s: float | None
    load_average: float | None
    reads_by: str = ""
    """Reader of the load generator: "compiled" or "python"."""
    steal_share: float | None = None
    """Share of CPU time taken by the hypervisor."""
    other_cpu_share: float | None = None
    """Share of CPU time used by unrelated processes."""
    tries: int = 1

    @property
    def disturbed(self) -> str:
        """Describe the machine's other work, by the gates' limits; empty if there was none."""
        host = HostFigures(steal_share=self.steal_share, other_cpu_share=self.other_cpu_share)
        return disturbance(host)

    @property
    def trusted(self) -> bool:
        """Whether nothing failed and all errors are within the gates' limits."""
        figures = (self.ttft_error_p99_ms, self.itl_error_p99_ms, self.send_lag_p99_ms)
        return not self.failed and all(figure is not None and figure <= ALLOWED_MS for figure in figures)

    def faults(self) -> list[str]:
        """Reasons not to trust the level."""
        named = {
            "TTFT is wrong by": self.ttft_error_p99_ms,
            "gaps between tokens are wrong by": self.itl_error_p99_ms,
            "requests are sent late by": self.send_lag_p99_ms,
        }
        found = [
            f"{what} {value:.1f} ms"
            for what, value in named.items()
            if value is not None and value > ALLOWED_MS
        ]
        if self.failed:
            found.append(f"{self.failed} requests failed")
        if not self.requests:
            found.append("no request ended")
        late = self.server_late_further_p99_ms
        if found and self.disturbed:
            found.append(f"{self.disturbed} meanwhile")
        elif found and late is not None and late > ALLOWED_MS:
            found.append(f"the built-in server was itself late by {late:.1f} ms, so this is the host's limit")
        return found


@dataclass(frozen=True)
class Selftest:
    host: dict[str, Any]
    levels: tuple[Level, ...]
    skipped: tuple[str, ...] = ()

    @property
    def best(self) -> Level | None:
        """Level with the most streams that, like all below it, can be trusted."""
        best = None
        for level in self.levels:
            if not level.trusted:
                break
            best = level
        return best

    def verdict(self) -> str:
        """Summarize up to which load the host can be trusted, or why not at all."""
        best = self.best
        if best is None:
            if not self.levels:
                return "Nothing was measured: " + "; ".join(self.skipped)
            worst = self.levels[0]
            return (
                f"This host cannot be trusted, not even with {worst.streams} streams: "
                + "; ".join(worst.faults())
                + f" (P99; {ALLOWED_MS:g} ms allowed). Stop other work here, or measure from another host."
            )
        rate = best.chunks_per_s / QUOTED_OUTPUT_LEN
        more = "at least" if best is self.levels[-1] else "up to"
        text = (
            f"Trusted with {more} {best.streams} streams, {best.chunks_per_s:,.0f} tokens/s: "
            f"{more} {rate:.0f} req/s of {QUOTED_OUTPUT_LEN} output tokens with one worker."
        )
        # The cost per token falls with the load, as each wake-up handles more.
        if ceiling := max((level.chunks_per_core_s or 0 for level in self.levels), default=0):
            full = ceiling / QUOTED_OUTPUT_LEN
            text += f" A core would be full at about {ceiling:,.0f} tokens/s ({full:.0f} req/s)."
        if following := self.levels[self.levels.index(best) + 1 :]:
            text += f" With {following[0].streams} streams " + "; ".join(following[0].faults()) + " (P99)."
        return text

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "schema": SCHEMA,
            "version": __version__,
            "host": self.host,
            "work": {
                "first_token_s": FIRST_TOKEN_S,
                "gap_s": GAP_S,
                "output_len": OUTPUT_LEN,
                "input_len": INPUT_LEN,
            },
            "levels": [{**asdict(level), "trusted": level.trusted} for level in self.levels],
            "skipped": list(self.skipped),
            "trusted_streams": 0 if best is None else best.streams,
            "verdict": self.verdict(),
        }


RESERVED_FDS: Final = 64
SEED: Final = 1
MAX_STREAMS: Final = 20_000


def measure(
    streams: Sequence[int], seconds: float, folder: Path, say: Callable[[str], None] = lambda text: None
) -> Selftest:
    """Measure each number of streams for ``seconds`` after a ramp. ``folder``: logs and specs. Raises
    LaunchError or ProcessDiedError if server or generator fail."""
    launcher = LocalLauncher("selftest", folder / "logs", folder / "specs")
    host, skipped = host_facts(), []
    levels = []
    for count in sorted(set(streams)):
        if problem := descriptor_problem(count):
            skipped.append(problem)
            say(problem)
            continue
        say(f"{count} streams: {count / DURATION_S:.0f} req/s for {seconds + DURATION_S:.0f} s")
        level = least_disturbed(partial(_level, launcher, count, seconds, folder), f"{count}-streams", say)
        shares = _share(level.host.steal_share), _share(level.host.other_cpu_share)
        levels.append(
            replace(level.found, steal_share=shares[0], other_cpu_share=shares[1], tries=level.tries)
        )
    host["load_average_after"] = load_average()
    host["kernel_stamps"] = all(level.stamps == "kernel" for level in levels)
    host["reads_by"] = levels[-1].reads_by if levels else ""
    return Selftest(host, tuple(levels), tuple(skipped))


def host_facts() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cgroup_cpu_limit": cgroup_cpu_limit(Path("/")),
        "load_average": load_average(),
        "open_files_soft": soft if soft != resource.RLIM_INFINITY else None,
        "open_files_hard": hard if hard != resource.RLIM_INFINITY else None,
        "python": sys.version.split()[0],
    }


def descriptor_problem(streams: int) -> str:
    """Return why this many streams cannot be opened, or "". Both ends raise their soft limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = 2 * streams + RESERVED_FDS
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return ""
    return (
        f"{streams} streams skipped: {needed} open files may be needed and {hard} are allowed "
        f"(ulimit -Hn {needed})"
    )


def _level(launcher: LocalLauncher, streams: int, seconds: float, folder: Path, name: str) -> Level:
    rate = streams / DURATION_S
    load = load_average()
    with exact_server(launcher, {"first_token_s": FIRST_TOKEN_S, "gap_s": GAP_S}, f"exact-{name}") as server:
        spec = {
            "base_url": server.url,
            "model": "exact",
            "request_rate": rate,
            "num_requests": max(1, round(rate * (seconds + DURATION_S))),
            "seed": SEED,
            "input_len": INPUT_LEN,
            "output_len": OUTPUT_LEN,
            "vocab_size": 32_000,
            "records_path": str(folder / f"records-{name}"),
            # Not a limit to judge by: it gives the generator its number of connections.
            "slo": {"ttft_ms": 2e3 * FIRST_TOKEN_S, "tpot_ms": 1e3 * GAP_S},
        }
        generator = LoadGenerator(launcher, spec, f"loadgen-{name}")
        deadline_s = 4 * (seconds + 2 * DURATION_S) + 60.0
        result = generator.run(lambda progress: False, _alive(server), deadline_s)
        return level_of(streams, seconds, result, server.log(), load[0] if load else None)


def _alive(server: RunningExactServer) -> Callable[[], None]:
    def check() -> None:
        if server.process.poll() is not None:
            raise ProcessDiedError("the exact server died", hint=f"see {server.process.log_path}")

    return check


def level_of(
    streams: int, seconds: float, result: LoadResult, log: dict[str, Any], load: float | None = None
) -> Level:
    """Compute a level from a trial's records and the server's log."""
    window = (DURATION_S, DURATION_S + seconds)
    errors: Errors = errors_of(result.records, log["requests"], window)
    started = float(result.client["started_monotonic_s"])
    since, until = started + window[0], started + window[1]
    cpu_s = result.client.get("cpu_s")
    if cpu_s is None and "cpu_share" in result.client:
        cpu_s = float(result.client["cpu_share"]) * result.duration_s
    chunks = int(log["chunks"])
    send_lag = result.client.get("send_lag_p99_ms")
    return Level(
        streams=streams,
        request_rate=round(streams / DURATION_S, 3),
        requests=len(errors.ttft_ms),
        failed=errors.failed,
        streams_open=round(mean_open(log["requests"], since, until), 1),
        chunks_per_s=round(chunks_between(log["requests"], since, until) / seconds, 1),
        ttft_error_p50_ms=percentile(errors.ttft_ms, 50),
        ttft_error_p99_ms=percentile(errors.ttft_ms, 99),
        itl_error_p50_ms=percentile(errors.itl_ms, 50),
        itl_error_p99_ms=percentile(errors.itl_ms, 99),
        unmatched=errors.unmatched,
        send_lag_p99_ms=None if send_lag is None else float(send_lag),
        stamps=str(result.client.get("stamps", "read")),
        client_cpu_s=None if cpu_s is None else round(float(cpu_s), 3),
        chunks_per_core_s=round(chunks / cpu_s) if cpu_s else None,
        server_late_first_p99_ms=percentile(errors.late_first_ms, 99),
        server_late_further_p99_ms=percentile(errors.late_further_ms, 99),
        server_chunks_per_core_s=round(chunks / log["cpu_s"]) if log["cpu_s"] else None,
        load_average=load,
        reads_by=str(result.client.get("reads_by", "")),
    )


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def parse_streams(text: str) -> list[int]:
    """Parse ``10,100``. Raises InputError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= number <= MAX_STREAMS for number in found):
        raise InputError(
            f"--streams {text!r} is not a list of numbers from 1 to {MAX_STREAMS}",
            hint="for example 10,100,300",
        )
    return found


def command(
    streams: str, seconds: float, console: Console, *, as_json: bool = False, output: Path | None = None
) -> int:
    """Measure, print table and verdict; return 1 if not even the smallest level can be trusted."""
    levels = parse_streams(streams)
    if output is not None and not output.parent.is_dir():
        raise InputError(f"there is no folder {output.parent} to write {output.name} into")
    progress = Console(stderr=True, highlight=False) if as_json else console
    # After an error the logs stay, as the error names them.
    with scratch("kvbench-selftest-", kept_after_trouble=True) as folder:
        found = measure(levels, seconds, folder, lambda text: progress.print(text, markup=False))
    text = json.dumps(found.to_json(), indent=2)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        _print(found, console)
    return EXIT_OK if found.best is not None else EXIT_FAILED


_TITLES: Final = {
    "streams\nopen": 0,
    "requests\nfailed": 3,
    "tokens/s": 2,
    "TTFT error\np50 / p99 ms": 0,
    "ITL error\np50 / p99 ms": 0,
    "send lag\np99 ms": 1,
    "tokens per\ncore-second": 4,
    "server late\np99 ms": 5,
    "": 0,
}
"""Column title → priority on a narrow terminal."""


def _print(found: Selftest, console: Console) -> None:
    cells = [
        [
            f"{level.streams} ({level.streams_open:.0f})",
            f"{level.requests}" + (f" -{level.failed}" if level.failed else ""),
            f"{level.chunks_per_s:,.0f}",
            f"{_ms(level.ttft_error_p50_ms)} / {_ms(level.ttft_error_p99_ms)}",
            f"{_ms(level.itl_error_p50_ms)} / {_ms(level.itl_error_p99_ms)}",
            _ms(level.send_lag_p99_ms),
            "" if level.chunks_per_core_s is None else f"{level.chunks_per_core_s:,}",
            f"{_ms(level.server_late_first_p99_ms)} / {_ms(level.server_late_further_p99_ms)}",
            "ok" if level.trusted else "off",
        ]
        for level in found.levels
    ]
    grid = Grid([FittedColumn(title, rank=rank) for title, rank in _TITLES.items()], cells)
    fitted = grid.fitted(console.width if console.is_terminal else None)
    console.print(fitted.text(), markup=False, soft_wrap=True)
    host = found.host
    load = " ".join(f"{value:.2f}" for value in host["load_average"] or ())
    stamps = "the kernel stamps requests" if host["kernel_stamps"] else "requests are stamped when read"
    way = "reads in C" if host["reads_by"] == "compiled" else "reads in Python (no compiled part)"
    files = f"{host['open_files_soft'] or 'unlimited'} (at most {host['open_files_hard'] or 'unlimited'})"
    console.print(
        f"{host['cores']} cores, load average {load} before; {stamps}; {way}; open files {files}",
        markup=False,
    )
    for level in found.levels:
        if level.disturbed:
            note = f"{level.streams} streams: {level.disturbed} meanwhile"
            console.print(f"{note}, in the calmest of {level.tries} tries.", markup=False)
    for problem in found.skipped:
        console.print(problem, markup=False)
    console.print(found.verdict(), markup=False)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
