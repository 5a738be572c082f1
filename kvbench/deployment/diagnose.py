"""Log lines → causes. The patterns are data (log_patterns.yaml): what is written, why, and a hint.

``diagnose(lines)`` explains lines that are there; ``kvbench doctor diagnose`` does so for logs of any origin.
``LogWatch`` follows the logs of a deployment's processes while it starts and while trials run: what is fatal
ends the wait at once, with the cause and a hint; the rest is a finding of the trial in which it was written.
"""

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

import yaml
from rich.console import Console

from kvbench.core.gates.evidence import LoggedTransport
from kvbench.core.records import Finding
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError
from kvbench.files import similar_files
from kvbench.hosts.log_tail import MAX_LINE_BYTES, LogReader
from kvbench.transfer.parts.transport_log import TransportReader

Level = Literal["fatal", "refuse", "warning"]
"""fatal: no measurement can come of this deployment · refuse: the trial is no measurement ·
warning: reported beside the numbers."""


@dataclass(frozen=True)
class Pattern:
    """One entry. ``words``: regular expressions, of which one is found in the line.

    ``engine`` is what its options call ``logs_like``, ``connector`` a part of that one's class name; empty
    scopes mean any. ``asked``: only if that transport was asked for. ``fatal_after``: so many within one
    trial are fatal. ``of_cancelled``: requests that kvbench cancelled may be all there is to it, so then it
    weighs less. ``once``: it happens once in a process's life, however many lines speak of it.
    """

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
    """The table by its keys, in its order."""
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return {key: Pattern(key, **entry) for key, entry in table.items()}


MAX_QUOTE_CHARS: Final = 240

FindingLevel = Literal["invalid", "warning", "note"]
_WEIGHT: Final[Mapping[str, FindingLevel]] = {"fatal": "invalid", "refuse": "invalid", "warning": "warning"}
_LIGHTER: Final[Mapping[str, FindingLevel]] = {"fatal": "invalid", "refuse": "warning", "warning": "note"}


@dataclass(frozen=True)
class LogSource:
    """Whose log it is. Empty means unknown, and then every pattern is tried."""

    process: str = ""
    logs_like: str = ""
    """As the engine's options say, or "router"."""
    kv_connector: str = ""
    """The connector's class name, as "NixlConnector"; empty also where nothing is transferred."""
    role: str = ""
    transport_asked: str = ""
    kv_operation: str = ""
    """By what the connector moves KV, as ``Connector.kv_operation``."""

    @property
    def moves_kv(self) -> bool:
        """Whether this side reads or writes the other's memory, as far as that is known."""
        return self.role == {"read": "decode", "write": "prefill"}.get(self.kv_operation, self.role)

    def has(self, pattern: Pattern) -> bool:
        """May this log contain that pattern at all?"""
        return (
            (not pattern.engine or not self.logs_like or pattern.engine == self.logs_like)
            and (not pattern.role or not self.role or pattern.role == self.role)
            and (
                not pattern.connector
                or not self.process
                or pattern.connector in self.kv_connector.lower()
                or "multi" in self.kv_connector.lower()
            )
            and (not pattern.asked or pattern.asked in self.transport_asked.split(","))
        )


@dataclass(frozen=True)
class Diagnosis:
    """What a log says is wrong: the first matching line, how often, the cause and a hint."""

    key: str
    level: Level
    cause: str
    hint: str
    line: str
    process: str = ""
    count: int = 1
    of_cancelled: bool = False
    number: int = 0
    """Of the first matching line among those that were looked at, from 1 on."""

    @property
    def fatal(self) -> bool:
        return self.level == "fatal"

    def text(self) -> str:
        """One sentence: who, why, and the words of the log."""
        who = f"{self.process}: " if self.process else ""
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{who}{self.cause} (its log says{times}: {self.line})"

    def finding(self, *, excused: bool = False) -> Finding:
        """As a finding of a trial. ``excused``: requests were cancelled, which may be all there is to it."""
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
    """The causes in these lines, the nearest to the root first; the same cause is reported once.

    A line is taken for one cause only, the first in the table that it matches.
    """
    source = source or LogSource()
    possible = [pattern for pattern in patterns().values() if source.has(pattern)]
    found: dict[str, Diagnosis] = {}
    for number, line in enumerate(lines, 1):
        pattern = next((each for each in possible if each.regex.search(line)), None)
        if pattern is None:
            continue
        quote = line.strip()[:MAX_QUOTE_CHARS]
        new = Diagnosis(pattern.key, pattern.level, pattern.cause, pattern.hint, quote, source.process)
        new = replace(new, of_cancelled=pattern.of_cancelled, number=number)
        found[pattern.key] = _together(found.get(pattern.key), new)
    return sorted(found.values(), key=_rank)


def worst(diagnoses: Iterable[Diagnosis]) -> Diagnosis | None:
    """The fatal one that comes nearest to the root; None if none is fatal."""
    fatal = [each for each in diagnoses if each.fatal]
    return min(fatal, key=_rank) if fatal else None


def _rank(diagnosis: Diagnosis) -> tuple[bool, int]:
    return not diagnosis.fatal, list(patterns()).index(diagnosis.key)


@dataclass
class _Followed:
    source: LogSource
    reader: LogReader
    transports: TransportReader

    def taken(self, lines: Sequence[str]) -> list[Diagnosis]:
        """What new lines say is wrong; what they say of transports is kept."""
        self.transports.feed(lines)
        return diagnose(lines, self.source)


@dataclass
class LogWatch:
    """Follows the logs of several processes and keeps what they were found to say."""

    _logs: list[_Followed] = field(default_factory=list)
    _found: dict[tuple[str, str], Diagnosis] = field(default_factory=dict)

    def follow(self, path: Path, source: LogSource) -> None:
        """Follow a log from its present end on; it need not be there yet."""
        transports = TransportReader(source.process, source.kv_operation)
        self._logs.append(_Followed(source, LogReader(path), transports))

    def poll(self) -> Diagnosis | None:
        """Read what is new (a bounded part of it); the worst fatal diagnosis since the last ``take``."""
        for log in self._logs:
            self._add(log.taken(log.reader.read()))
        return worst(self._found.values())

    def drain(self, process: str = "") -> Diagnosis | None:
        """Like ``poll``, but to the logs' ends; of one process only if it is named."""
        for log in self._logs:
            if process in ("", log.source.process):
                self._add(log.taken(log.reader.drain()))
        found = [each for each in self._found.values() if process in ("", each.process)]
        return worst(found)

    def take(self) -> list[Diagnosis]:
        """What was found since the last ``take``, the worst first."""
        found = sorted(self._found.values(), key=_rank)
        self._found = {}
        return found

    def transports(self) -> list[LoggedTransport]:
        """What the logs have said until now of the KV's way, since their processes began.

        Tables before lanes, and of lanes those of the side that moves it: the other one's may be of messages.
        """
        found = [(log.source, each) for log in self._logs for each in log.transports.found()]
        tables = [each for _, each in found if each.operation]
        return tables or [each for source, each in found if source.moves_kv]

    def _add(self, found: Iterable[Diagnosis]) -> None:
        for new in found:
            place = (new.process, new.key)
            self._found[place] = _together(self._found.get(place), new)


def _together(known: Diagnosis | None, new: Diagnosis) -> Diagnosis:
    """One diagnosis of a key and process, with what came before; of some patterns so many are fatal."""
    pattern = patterns()[new.key]
    count = new.count
    if known is not None:  # what happens once has not happened again if it is said again
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
    """Print each cause with its first line, how often, and a hint. 1 if one of them spoils a measurement.

    ``names``: files, folders (all ``*.log`` below them), or ``-`` for stdin; none is stdin. ``protocol``:
    what was asked for, since some lines mean trouble only then. Raises InputError for what cannot be read.
    """
    spoiled = 0
    found: list[dict[str, object]] = []
    for name, source in _logs(list(names) or [STDIN]):
        with source as file:
            for each in diagnose(_lines(file), LogSource(transport_asked=protocol)):
                found.append({"log": name, **vars(each)})
                spoiled += each.level != "warning"
                if as_json:
                    continue
                times = f", {each.count} times" if each.count > 1 else ""
                console.print(f"{_MARKS[each.level]} ", end="")
                console.print(f"{name}:{each.number}{times}: {each.cause}", markup=False, soft_wrap=True)
                console.print(f"    log   {each.line}", markup=False, soft_wrap=True)
                console.print(f"    hint  {each.hint}", markup=False, soft_wrap=True)
    if as_json:
        console.file.write(json.dumps({"causes": found}, indent=2) + "\n")
    elif not found:
        console.print("no log pattern matches: nothing that is known to go wrong is in there", markup=False)
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
        for each in paths:
            try:
                yield str(each), each.open("rb")
            except OSError as error:
                said = f"{each} cannot be read: {error.strerror or error}"
                raise InputError(said, hint=similar_files(each).strip()) from error


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Lines, the first part of each: one library writes hundreds of megabytes into one."""
    begun = True
    for piece in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
        if begun:
            yield piece.decode("utf-8", "replace").rstrip()
        begun = piece.endswith(b"\n")
