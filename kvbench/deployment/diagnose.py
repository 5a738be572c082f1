"""Find causes in logs by patterns (log_patterns.yaml) with texts and hints.

``diagnose(lines)`` explains given lines, also for ``kvbench doctor diagnose``. ``LogWatch`` follows a
deployment's logs: fatal lines stop the wait with cause and hint, others are findings of their trial."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Final, Literal

from rich.console import Console

from kvbench.core.gates.evidence import LoggedTransport
from kvbench.core.records import Finding
from kvbench.core.scenario.yaml_lines import FAST_LOADER
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError
from kvbench.files import similar_files
from kvbench.hosts.log_tail import MAX_LINE_BYTES, LogReader
from kvbench.transfer.parts.transport_log import TransportReader

Level = Literal["fatal", "refuse", "warning"]
"""fatal: the deployment is unusable · refuse: the trial is invalid · warning: shown with the results."""


@dataclass(frozen=True)
class Pattern:
    """One pattern. ``words``: alternative regular expressions. ``engine`` (as ``logs_like``) and
    ``connector`` (part of its class name): empty means any. ``asked``: only if that transport is requested.
    ``fatal_after``: occurrences within one trial. ``of_cancelled``: may be due to requests that kvbench
    cancelled, then weighs less. ``once``: counted once per process."""

    key: str
    level: Level
    words: list[str]
    cause: str
    hint: str
    engine: str = ""
    connector: str = ""
    role: str = ""
    asked: str = ""
    fatal_after: int = 0
    of_cancelled: bool = False
    once: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile("|".join(self.words))


_TABLE: Final = Path(__file__).with_name("log_patterns.yaml")


@cache
def patterns() -> dict[str, Pattern]:
    table = FAST_LOADER(_TABLE.read_text(encoding="utf-8")).get_single_data()
    return {key: Pattern(key, **entry) for key, entry in table.items()}


MAX_QUOTE_CHARS: Final = 240

FindingLevel = Literal["invalid", "warning", "note"]
_WEIGHT: Final[Mapping[str, FindingLevel]] = {"fatal": "invalid", "refuse": "invalid", "warning": "warning"}
_LIGHTER: Final[Mapping[str, FindingLevel]] = {"fatal": "invalid", "refuse": "warning", "warning": "note"}


@dataclass(frozen=True)
class LogSource:
    """Origin of a log. Unknown (empty) origins match every pattern."""

    process: str = ""
    logs_like: str = ""
    """Value of the engine options, or "router"."""
    kv_connector: str = ""
    """Connector class name such as "NixlConnector"; empty also without transfer."""
    role: str = ""
    requested_transport: str = ""
    kv_operation: str = ""

    @property
    def moves_kv(self) -> bool:
        """Whether this side reads or writes the other's memory, if known."""
        return self.role == {"read": "decode", "write": "prefill"}.get(self.kv_operation, self.role)

    def has(self, pattern: Pattern) -> bool:
        return (
            (not pattern.engine or not self.logs_like or pattern.engine == self.logs_like)
            and (not pattern.role or not self.role or pattern.role == self.role)
            and (
                not pattern.connector
                or not self.process
                or pattern.connector in self.kv_connector.lower()
                or "multi" in self.kv_connector.lower()
            )
            and (not pattern.asked or pattern.asked in self.requested_transport.split(","))
        )


@dataclass(frozen=True)
class Diagnosis:
    """Problem in a log: first matching line, count, cause and hint."""

    key: str
    level: Level
    cause: str
    hint: str
    line: str
    process: str = ""
    count: int = 1
    of_cancelled: bool = False
    number: int = 0
    """Number of the first matching line, from 1."""

    @property
    def fatal(self) -> bool:
        return self.level == "fatal"

    def text(self) -> str:
        """One sentence: process, cause, and the log's text."""
        who = f"{self.process}: " if self.process else ""
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{who}{self.cause} (its log says{times}: {self.line})"

    def finding(self, *, excused: bool = False) -> Finding:
        """Convert to a finding. ``excused``: cancelled requests may be the cause."""
        lighter = excused and self.of_cancelled
        weight: Mapping[str, FindingLevel] = _LIGHTER if lighter else _WEIGHT
        return Finding(
            f"log_{self.key}",
            weight[self.level],
            self.text(),
            self.hint,
            {"process": self.process, "count": self.count, "line": self.line},
        )


def diagnose(lines: Iterable[str], source: LogSource | None = None) -> list[Diagnosis]:
    """Return causes in these lines, nearest to the root first, without duplicates."""
    source = source or LogSource()
    possible = [pattern for pattern in patterns().values() if source.has(pattern)]
    found: dict[str, Diagnosis] = {}
    for number, line in enumerate(lines, 1):
        pattern = next((candidate for candidate in possible if candidate.regex.search(line)), None)
        if pattern is None:
            continue
        quote = line.strip()[:MAX_QUOTE_CHARS]
        new = Diagnosis(pattern.key, pattern.level, pattern.cause, pattern.hint, quote, source.process)
        new = replace(new, of_cancelled=pattern.of_cancelled, number=number)
        found[pattern.key] = _together(found.get(pattern.key), new)
    return sorted(found.values(), key=_rank)


def worst(diagnoses: Iterable[Diagnosis]) -> Diagnosis | None:
    """Fatal diagnosis nearest to the root, or None."""
    fatal = [cause for cause in diagnoses if cause.fatal]
    return min(fatal, key=_rank) if fatal else None


def _rank(diagnosis: Diagnosis) -> tuple[bool, int]:
    return not diagnosis.fatal, list(patterns()).index(diagnosis.key)


@dataclass
class _Followed:
    source: LogSource
    reader: LogReader
    transports: TransportReader

    def taken(self, lines: Sequence[str]) -> list[Diagnosis]:
        """Diagnose new lines, and keep transport lines."""
        self.transports.feed(lines)
        return diagnose(lines, self.source) if lines else []


@dataclass
class LogWatch:
    """Follows the logs of several processes and keeps diagnoses."""

    _logs: list[_Followed] = field(default_factory=list)
    _found: dict[tuple[str, str], Diagnosis] = field(default_factory=dict)

    def follow(self, path: Path, source: LogSource) -> None:
        """Follow a log from its current end; it may not exist yet."""
        transports = TransportReader(source.process, source.kv_operation)
        self._logs.append(_Followed(source, LogReader(path), transports))

    def poll(self) -> Diagnosis | None:
        """Read new lines, up to a limit; return the worst fatal diagnosis since the last ``take``."""
        for log in self._logs:
            self._add(log.taken(log.reader.read()))
        return worst(self._found.values())

    def drain(self, process: str = "") -> Diagnosis | None:
        """Poll to the logs' ends, for one process if named."""
        for log in self._logs:
            if process in ("", log.source.process):
                self._add(log.taken(log.reader.drain()))
        found = [diagnosis for diagnosis in self._found.values() if process in ("", diagnosis.process)]
        return worst(found)

    def take(self) -> list[Diagnosis]:
        """Diagnoses since the last ``take``, the worst first."""
        found = sorted(self._found.values(), key=_rank)
        self._found = {}
        return found

    def transports(self) -> list[LoggedTransport]:
        """KV transports in the logs since the processes' start. Tables precede lanes; of lanes the active
        side's count, as others may carry messages."""
        found = [(log.source, transport) for log in self._logs for transport in log.transports.found()]
        tables = [transport for _, transport in found if transport.operation]
        return tables or [transport for source, transport in found if source.moves_kv]

    def _add(self, found: Iterable[Diagnosis]) -> None:
        for new in found:
            place = (new.process, new.key)
            self._found[place] = _together(self._found.get(place), new)


def _together(known: Diagnosis | None, new: Diagnosis) -> Diagnosis:
    """Merge two diagnoses of a key and process; some patterns become fatal by their count."""
    pattern = patterns()[new.key]
    count = new.count
    if known is not None:  # a repeated line is no second event
        count = max(known.count, count) if pattern.once else known.count + count
    fatal = new.fatal or (known is not None and known.fatal) or 0 < pattern.fatal_after <= count
    return replace(known or new, count=count, level="fatal" if fatal else pattern.level)


STDIN: Final = "-"
_MARKS: Final[dict[Level, str]] = {
    "fatal": "[red]fatal[/red]",
    "refuse": "[red]no measurement[/red]",
    "warning": "[yellow]warning[/yellow]",
}


def command(names: Sequence[str], protocol: str, console: Console, *, as_json: bool = False) -> int:
    """Print each cause with first line, count and hint; return 1 if one invalidates a measurement. ``names``:
    files, folders (all ``*.log``), or ``-`` or none for stdin. ``protocol``: the requested one. Raises
    InputError for unreadable input."""
    spoiled = 0
    found: list[dict[str, object]] = []
    for name, source in _logs(list(names) or [STDIN]):
        with source as file:
            for cause in diagnose(_lines(file), LogSource(requested_transport=protocol)):
                found.append({"log": name, **vars(cause)})
                spoiled += cause.level != "warning"
                if as_json:
                    continue
                times = f", {cause.count} times" if cause.count > 1 else ""
                console.print(f"{_MARKS[cause.level]} ", end="")
                console.print(f"{name}:{cause.number}{times}: {cause.cause}", markup=False, soft_wrap=True)
                console.print(f"    log   {cause.line}", markup=False, soft_wrap=True)
                console.print(f"    hint  {cause.hint}", markup=False, soft_wrap=True)
    if as_json:
        console.file.write(json.dumps({"causes": found}, indent=2) + "\n")
    elif not found:
        console.print("no log pattern matches: no known problem", markup=False)
    return EXIT_FAILED if spoiled else EXIT_OK


def _logs(names: Sequence[str]) -> Iterator[tuple[str, contextlib.AbstractContextManager[IO[bytes]]]]:
    for name in names:
        if name == STDIN:
            yield "stdin", contextlib.nullcontext(sys.stdin.buffer)
            continue
        path = Path(name)
        paths = sorted(path.rglob("*.log")) if path.is_dir() else [path]
        if not paths:
            raise InputError(f"{path} holds no *.log", hint="name the files")
        for log in paths:
            try:
                yield str(log), log.open("rb")
            except OSError as error:
                message = f"{log} cannot be read: {error.strerror or error}"
                raise InputError(message, hint=similar_files(log).strip()) from error


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Lines up to a length limit; one library writes hundreds of megabytes into one."""
    begun = True
    for piece in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
        if begun:
            yield piece.decode("utf-8", "replace").rstrip()
        begun = piece.endswith(b"\n")
