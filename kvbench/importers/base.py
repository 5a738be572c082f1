"""Common parts of importers: results, lines, numbers, names, logged requests, transfer rows. An importer is a
file of this folder with ``FORMAT`` (a description), ``RANK`` (the lowest one that recognises a file reads
it), ``recognise(path) -> bool`` and ``read(path) -> Imported``. It copies what is written: missing values
stay None, and computed ones are named in ``derived``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvbench.core.records import RequestError, RequestRecord
from kvbench.core.transfers.records import Case, TransferRecord, TransferWarning
from kvbench.errors import InputError

MAX_BYTES: Final = 512 * 2**20
"""Larger files are refused: no benchmark summary is that long."""
PEEK_BYTES: Final = 8 * 2**20
"""Bytes of a file that are read to recognise its format."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
COUNTS: Final = ("completed", "failed", "total_input_tokens", "total_output_tokens")
RATES: Final = ("request_throughput", "output_throughput", "total_token_throughput")
EXPECTED: Final = (
    "duration_s",
    *COUNTS,
    *RATES,
    "peak_concurrent_requests",
    *(f"{statistic}_{latency}_ms" for latency in LATENCIES for statistic in ("mean", "median", "p90", "p99")),
)
"""Values, named as in ``vllm bench serve``, that are listed as missing if a file lacks them."""


@dataclass(frozen=True)
class Origin:
    """Source of a row: file name, first and last line (from 1), and the tool, if known."""

    file: str
    line: int
    last_line: int
    tool: str = ""
    version: str = ""

    def text(self) -> str:
        lines = f"{self.line}" if self.line == self.last_line else f"{self.line}-{self.last_line}"
        return f"{self.file}:{lines}"


@dataclass
class ServingRow:
    """One measured load, as summarised by a tool. ``figures`` are named as by ``vllm bench serve``
    (``mean_ttft_ms``, ``request_throughput``, …), durations with their unit (``duration_s``); rates are per
    second. ``request_rate`` is in requests per second, infinite if all were sent at once, None if not
    reported. ``settings`` describe the run (``tp``, ``nics``, ``protocol``, …)."""

    origin: Origin
    figures: dict[str, float]
    connector: str = ""
    input_len: int | None = None
    output_len: int | None = None
    request_rate: float | None = None
    num_prompts: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Unknown labels or columns, with their text."""
    derived: dict[str, str] = field(default_factory=dict)
    """Computed values: name → how."""
    requests: list[RequestRecord] = field(default_factory=list)
    """The single requests, if the file has them."""
    date: str = ""
    """The text as written; without a time zone it is ambiguous."""
    command: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    """Values left out of the row: name → why (``parts/trials.py``)."""
    qualifiers: list[str] = field(default_factory=list)
    """Notes needed to read the row's values."""
    incomplete: str = ""
    """Why the row is incomplete, such as a log that ends inside it; empty if complete."""

    def take_mean_length(self, name: str, mean: float, key: str) -> None:
        """Store a mean length in tokens, reported as ``key``, rounded."""
        setattr(self, name, round(mean))
        if mean != round(mean):
            self.derived[name] = f"mean of {key}, rounded"

    def derive_length(self, name: str, total: str) -> None:
        """Compute the mean length from the tokens of all completed requests, if reported."""
        tokens, completed = self.figures.get(total), self.figures.get("completed")
        if tokens is not None and completed:
            setattr(self, name, round(tokens / completed))
            self.derived[name] = f"{total} / completed, rounded"

    @property
    def missing(self) -> list[str]:
        named = {
            "connector": self.connector,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "request_rate": self.request_rate,
            "num_prompts": self.num_prompts,
        }
        return [
            *(name for name, value in named.items() if value in (None, "")),
            *(name for name in EXPECTED if name not in self.figures),
        ]


@dataclass
class TransferRow:
    """One measurement of raw transfers. ``missing``: unreported values."""

    origin: Origin
    record: TransferRecord
    missing: list[str] = field(default_factory=list)
    qualifiers: list[str] = field(default_factory=list)
    """Notes needed to read the bandwidth, such as "both directions together"."""


ImportedRow: TypeAlias = ServingRow | TransferRow


@dataclass(frozen=True)
class LeftOut:
    """A part of a file that was not imported, and why. Line 0: the file as a whole."""

    line: int
    text: str
    file: str = ""

    def message(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.text}" if place else self.text


@dataclass
class Imported:
    """Content of one file or folder. ``about`` applies to all rows (model, hardware, SLO, claims, …)."""

    rows: list[ImportedRow] = field(default_factory=list)
    problems: list[LeftOut] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)
    """The tool's definitions that differ from kvbench's."""
    files: list[Path] = field(default_factory=list)
    """The files of a folder."""

    def leave_out(self, line: int, text: str, file: str) -> None:
        """Note what was not imported, and why."""
        self.problems.append(LeftOut(line, text, file))

    @property
    def serving(self) -> list[ServingRow]:
        return [row for row in self.rows if isinstance(row, ServingRow)]

    @property
    def transfers(self) -> list[TransferRow]:
        return [row for row in self.rows if isinstance(row, TransferRow)]


def peek(path: Path) -> str:
    """Return the beginning of a file as text; empty for a folder, a binary or an unreadable file."""
    try:
        if not path.is_file():  # reading a pipe would block
            return ""
        with path.open("rb") as file:
            data = file.read(PEEK_BYTES)
    except OSError:
        return ""
    return "" if b"\0" in data[:4096] and not _utf16(data) else _decoded(data)


def read_text(path: Path) -> str:
    """Return a file's text: UTF-8, or UTF-16 with a byte order mark; invalid bytes become U+FFFD. Raises
    InputError if it is unreadable or too large."""
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is a folder, a pipe or a device, not a file")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"{path} is larger than {MAX_BYTES >> 20} MiB", hint="cut out the part with results"
            )
        return _decoded(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file without line ends and colours; the first is line 1. Of an overwritten
    line (a progress bar) the last text counts."""
    lines = read_text(path).split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines.pop()
    return [_COLOUR.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines]


def _utf16(data: bytes) -> bool:
    return data[:2] in (b"\xff\xfe", b"\xfe\xff")


def _decoded(data: bytes) -> str:
    return data.decode("utf-16", "replace") if _utf16(data) else data.decode("utf-8-sig", "replace")


def json_value(text: str) -> Any:
    """Parse JSON. Raises JSONDecodeError, also for JSON that Python cannot hold."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise json.JSONDecodeError(f"it cannot be read: {error}", text, 0) from error


def parse_json(path: Path) -> Any:
    """Parse a JSON file. Raises InputError with the line of an error."""
    try:
        return json_value(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path.name}:{error.lineno}: is not complete JSON ({error.msg})",
            hint="the file may have been cut off while it was written",
        ) from error


def number(value: Any) -> float | None:
    """Return a finite number from JSON or text such as ``1,234.5``, else None."""
    if isinstance(value, str):
        try:
            value = float(value.strip().replace(",", ""))
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def whole(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def rate(value: Any) -> float | None:
    """Return a request rate, which may be ``inf``; None for other text."""
    if isinstance(value, str) and value.strip().lower() in ("inf", "infinity"):
        return math.inf
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return math.inf
    found = number(value)
    return found if found is not None and found > 0 else None


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are not None, empty, or nested."""
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, (str, int, float, bool)) and value not in ("", None)
    }


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> Sequence[Any]:
    """Return the value if it is a JSON list, else an empty one."""
    return value if isinstance(value, list) else []


def excerpt(lines: Sequence[str], line: int, width: int = 100) -> str:
    """Return line ``line`` (from 1) as quoted in a message."""
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return text if len(text) <= width else text[: width - 1] + "…"


@dataclass(frozen=True)
class LoggedRequest:
    """A logged request, in seconds on the client's clock; None: did not happen, or unknown."""

    request_id: str
    scheduled_s: float
    sent_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    input_len: int
    output_len: int
    itl_s: Sequence[float] = ()
    error: str = ""


def records_of(seen: Sequence[LoggedRequest]) -> list[RequestRecord]:
    """Return the requests by planned send, with times from the first send."""
    ordered = sorted(seen, key=lambda request: request.scheduled_s)
    return [_record(request, ordered[0].scheduled_s) for request in ordered]


def _record(seen: LoggedRequest, start: float) -> RequestRecord:
    sent_s, first_s, last_s = (
        None if moment is None else moment - start
        for moment in (seen.sent_s, seen.first_token_s, seen.last_token_s)
    )
    kind: RequestError = "no_answer" if first_s is None else "early_close" if seen.error else ""
    return RequestRecord(
        request_id=seen.request_id,
        scheduled_s=seen.scheduled_s - start,
        input_len=seen.input_len,
        requested_output_len=seen.output_len,
        sent_s=sent_s,
        first_token_s=first_s,
        last_token_s=last_s,
        output_len=seen.output_len,
        itl_s=list(seen.itl_s),
        error=kind,
        error_detail=seen.error[-300:],
    )


@dataclass
class ReportedTransfer:
    """One measurement as reported. ``gb_per_s`` is in 10⁹ bytes per second, times in seconds."""

    case: Case
    gb_per_s: float
    calls: int | None = None
    window_s: float | None = None
    """Duration of the measurement, if reported."""
    library: str = ""
    transport: str = ""
    prepare_s: float | None = None
    verified: bool | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    qualifiers: Sequence[str] = ()
    """Notes needed to read the bandwidth."""


def transfer_row(origin: Origin, reported: ReportedTransfer, missing: Sequence[str]) -> TransferRow:
    """Return a row. An unreported value has its default in the record and its name in ``missing``."""
    absent = [
        *missing,
        *(
            name
            for name in ("calls", "window_s", "transport", "verified")
            if getattr(reported, name) in (None, "")
        ),
        "call_s",
    ]
    absent = list(dict.fromkeys(absent))
    record = TransferRecord(
        reported.case,
        transport=reported.transport,
        library=reported.library,
        nbytes=reported.case.nbytes,
        logical_bytes=reported.case.nbytes,
        descriptors=reported.case.batch_size * reported.case.regions,
        calls=reported.calls or 0,
        window_s=reported.window_s or 0.0,
        gb_per_s=reported.gb_per_s,
        prepare_s=reported.prepare_s,
        verified=reported.verified,
    )
    record.warnings.append(
        TransferWarning(
            "imported",
            f"read from {origin.text()}, not measured by kvbench; "
            + "".join(f"{text}; " for text in reported.qualifiers)
            + f"not reported: {', '.join(absent)}",
            evidence={
                "file": origin.file,
                "line": origin.line,
                "tool": origin.tool,
                "missing": absent,
                "qualifiers": list(reported.qualifiers),
                **dict(reported.also),
            },
        )
    )
    return TransferRow(origin, record, absent, list(reported.qualifiers))
