"""Shared parts of the benchmarks: options, tables, repeats, machine load, and a load for the generator."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from kvbench.core.fitted_table import Grid, columns_of
from kvbench.core.plan.processes import ProcessSpec
from kvbench.errors import ProcessDiedError
from kvbench.hosts import web
from kvbench.launchers.local import LocalLauncher, LocalProcess
from kvbench.launchers.parts.sockets import free_ports

ROOT: Final = Path(__file__).resolve().parent.parent
HOST: Final = "127.0.0.1"
MB: Final = 1e6
COMPILE_DEADLINE_S: Final = 60.0
NEAR: Final = 0.05
"""Largest relative error of a rate that counts as near."""


def arguments(
    description: str | None, given: Sequence[str] | None = None, **options: tuple[Any, str]
) -> argparse.Namespace:
    """Parse a benchmark's options, declared as name → default and help.

    A default of False makes a switch, a list an option with any number of values, a tuple one that may be
    repeated; a type in place of a default makes an option that is None if not given.
    """
    parser = argparse.ArgumentParser(description=description)
    for name, (default, text) in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, (list, tuple)):
            how: dict[str, Any] = {"nargs": "*"} if isinstance(default, list) else {"action": "append"}
            parser.add_argument(flag, default=list(default), help=text, **how)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, help=text)
        else:
            text = f"{text} ({default})".replace("%", "%%")
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser.parse_args(given)


def table(
    left: str,
    right: str,
    rows: Sequence[Sequence[str]],
    title: str = "",
    caption: str = "",
    sections: Sequence[int] = (),
) -> str:
    """Return a table as text. ``left`` and ``right``: titles of the text columns and of the number columns,
    separated by ``|``; ``sections``: rows with an empty line before them.
    """
    grid = Grid(columns_of(left, right), rows, dict.fromkeys(sections, " "))
    return "\n".join(filter(None, [title, grid.fitted(None).text(), caption]))


@dataclass(frozen=True)
class Row:
    """A measured figure and its optional ``limit``, in the same unit."""

    what: str
    value: float | None
    unit: str
    limit: float | None = None
    note: str = ""
    at_least: bool = False

    def cells(self) -> list[str]:
        value, limit, kept = "unknown", "", ""
        if self.value is not None:
            value = f"{self.value:{',.0f' if self.value >= 1e4 else ',.4g'}} {self.unit}"
        if self.limit is not None:
            limit = f"{'≥' if self.at_least else '≤'} {self.limit:,.6g} {self.unit}"
        if self.value is not None and self.limit is not None:
            over = self.value < self.limit if self.at_least else self.value > self.limit
            kept = "OVER" if over else "ok"
        return [self.what, self.note, value, limit, kept]


def limit_table(rows: Sequence[Row]) -> str:
    return table("what|note", "measured|limit|", [row.cells() for row in rows])


def machine_load() -> str:
    load = os.getloadavg()
    return f"load average {load[0]:.2f} {load[1]:.2f} {load[2]:.2f} on {os.cpu_count()} cores, at the end"


def repeats(count: int) -> Iterator[int]:
    for number in range(count):
        print(f"repeat {number + 1} of {count} …", flush=True)
        yield number


def conclude(facts: Mapping[str, object], problems: Sequence[str]) -> int:
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def near(ratios: Sequence[float]) -> str:
    """Return how many of the ratios found / true are near 1, and their median."""
    near_count = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    middle = f"{statistics.median(ratios):.3f}" if ratios else "unknown"
    return f"found / true: median {middle}; {near_count} of {len(ratios)} within 5 %"


@contextlib.contextmanager
def workplace(name: str) -> Iterator[tuple[Path, LocalLauncher]]:
    """Yield a temporary folder, and a launcher that keeps its logs and specs there."""
    with tempfile.TemporaryDirectory(prefix=f"kvbench-{name}-") as folder:
        path = Path(folder)
        yield path, LocalLauncher(name, path / "logs", path / "specs")


def load_spec(url: str, records: Path, rate: float, requests: int, **more: Any) -> dict[str, Any]:
    """Return a spec of the load generator for an exact server; ``more`` are further entries."""
    load = {"request_rate": rate, "num_requests": requests, "seed": 1, "vocab_size": 32_000}
    return {"base_url": url, "model": "exact", "records_path": str(records), **load, **more}


def output_of(
    command: Sequence[str],
    deadline_s: float,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Return exit status and output of a command; 124 after the deadline, 127 if it cannot start."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=deadline_s,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no end within {deadline_s:g} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout


def compiled(source: Path, target: Path, *flags: str) -> str:
    """Compile a C file with the compiler that built Python; return the problem, empty if there is none."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, "-O2", "-o", str(target), str(source), *flags]
    status, output = output_of(command, COMPILE_DEADLINE_S, target.parent)
    return f"{compiler[0]}: {output.strip()[-200:]}" if status else ""


def free_port() -> int:
    return free_ports(HOST, [1])[0]


def answers(url: str) -> bool:
    try:
        with web.client(timeout_s=5) as client:
            return client.get(url).is_success
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def running(
    launcher: LocalLauncher, spec: ProcessSpec, ready: Callable[[], bool], deadline_s: float
) -> Iterator[LocalProcess]:
    """Start a process, wait until it is ready, and stop it at the end. Raises ProcessDiedError."""
    process = launcher.start(spec)
    try:
        deadline = time.monotonic() + deadline_s
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                output = "; ".join(process.tail(3)) or "no output"
                raise ProcessDiedError(
                    f"{process.name} did not get ready: {output}", hint=f"see {process.log_path}"
                )
            time.sleep(0.05)
        yield process
    finally:
        launcher.stop([process])
