"""What every importer gives back, and what they share: lines, numbers, names, logged requests, transfer rows.

An importer is a file of this folder with ``FORMAT`` (what it reads, in words), ``RANK`` (where two recognise
one file the lower rank reads it), ``recognise(path) -> bool`` and ``read(path) -> Imported``. It copies what
is written: what the file does not say stays None, and what an importer works out is named in ``derived``.
"""

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
"""A larger file is refused: no summary of a benchmark is that long."""
PEEK_BYTES: Final = 8 * 2**20
"""How much of a file is looked at to recognise its format."""
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
"""The figures, in the words of ``vllm bench serve``, that are listed as missing where a file does not have
them."""


@dataclass(frozen=True)
class Origin:
    """Where a row stands: file name, first and last line (from 1), and which tool wrote it, if that
    is reported."""

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
    """One load offered once, as a tool summed it up.

    ``figures`` are named as by ``vllm bench serve`` (``mean_ttft_ms``, ``request_throughput``, …), durations
    with their unit (``duration_s``); rates are per second. ``request_rate`` is in requests per second,
    infinite where all were sent at once, None where it is not reported. ``settings`` say how it was run
    (``tp``, ``nics``, ``protocol``, …).
    """

    origin: Origin
    figures: dict[str, float]
    connector: str = ""
    input_len: int | None = None
    output_len: int | None = None
    request_rate: float | None = None
    num_prompts: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Labels or columns that no figure is known for, with their text."""
    derived: dict[str, str] = field(default_factory=dict)
    """What was worked out instead of read: name → how."""
    requests: list[RequestRecord] = field(default_factory=list)
    """The single requests, where the file has them."""
    date: str = ""
    """As written; without a time zone it is no moment."""
    command: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    """Figures that were left out of the row: name → why (``parts/trials.py``)."""
    qualifiers: list[str] = field(default_factory=list)
    """What must be known with the row's figures to read them."""
    incomplete: str = ""
    """Why the row is not whole, such as a log that ends inside it; empty for a whole one."""

    def take_mean_length(self, name: str, mean: float, key: str) -> None:
        """The mean length in tokens, which the tool reports as ``key``, rounded."""
        setattr(self, name, round(mean))
        if mean != round(mean):
            self.derived[name] = f"mean of {key}, rounded"

    def derive_length(self, name: str, total: str) -> None:
        """The mean length from the tokens of all completed requests; none where these are not reported."""
        tokens, completed = self.figures.get(total), self.figures.get("completed")
        if tokens is not None and completed:
            setattr(self, name, round(tokens / completed))
            self.derived[name] = f"{total} / completed, rounded"

    @property
    def missing(self) -> list[str]:
        """What the file does not say of this row."""
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
    """One measurement of raw transfers. ``missing``: what is not reported."""

    origin: Origin
    record: TransferRecord
    missing: list[str] = field(default_factory=list)
    qualifiers: list[str] = field(default_factory=list)
    """What must be known with the bandwidth to read it, such as "both directions together"."""


ImportedRow: TypeAlias = ServingRow | TransferRow


@dataclass(frozen=True)
class LeftOut:
    """Something in a file that was not taken as a row, and why. Line 0: the file as a whole."""

    line: int
    text: str
    file: str = ""

    def said(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.text}" if place else self.text


@dataclass
class Imported:
    """What one file, or folder, gave.

    ``about`` says what holds for all rows (model, hardware, SLO, claims, …).
    """

    rows: list[ImportedRow] = field(default_factory=list)
    problems: list[LeftOut] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)
    """How the tool defines a figure, where that differs from kvbench's definition."""
    files: list[Path] = field(default_factory=list)
    """The files that were read, if it was a folder."""

    def leave_out(self, line: int, text: str, file: str) -> None:
        """Note what was not taken as a row, and why."""
        self.problems.append(LeftOut(line, text, file))

    @property
    def serving(self) -> list[ServingRow]:
        return [row for row in self.rows if isinstance(row, ServingRow)]

    @property
    def transfers(self) -> list[TransferRow]:
        return [row for row in self.rows if isinstance(row, TransferRow)]


def peek(path: Path) -> str:
    """The beginning of a file as text; empty for a folder, for a binary file and for one that cannot be
    read."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return ""
        with path.open("rb") as file:
            data = file.read(PEEK_BYTES)
    except OSError:
        return ""
    return "" if b"\0" in data[:4096] and not _utf16(data) else _decoded(data)


def read_text(path: Path) -> str:
    """A file as text: UTF-8, or UTF-16 with a byte order mark; bytes that are neither become U+FFFD.

    Raises InputError for a file that cannot be read or is too large.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is a folder, a pipe or a device, and no file")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"{path} is larger than {MAX_BYTES >> 20} MiB", hint="cut out the part with results"
            )
        return _decoded(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def read_lines(path: Path) -> list[str]:
    """The lines of a text file as editors count them, without their ends and colours; the first is line 1.

    Of a line that was written over (a progress bar), what was written last.
    """
    lines = read_text(path).split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines.pop()
    return [_COLOUR.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines]


def _utf16(data: bytes) -> bool:
    return data[:2] in (b"\xff\xfe", b"\xfe\xff")


def _decoded(data: bytes) -> str:
    if _utf16(data):
        return data.decode("utf-16", "replace")
    return data.decode("utf-8-sig", "replace")


def json_value(text: str) -> Any:
    """A JSON text's value. Raises JSONDecodeError, also for what JSON allows and Python cannot hold."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise json.JSONDecodeError(f"it cannot be read: {error}", text, 0) from error


def parse_json(path: Path) -> Any:
    """A JSON file's value. Raises InputError with the line where it stops being JSON."""
    try:
        return json_value(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path.name}:{error.lineno}: is not whole JSON ({error.msg})",
            hint="the file may have been cut off while it was written",
        ) from error


def number(value: Any) -> float | None:
    """A finite number from JSON or text such as ``1,234.5``; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value.strip().replace(",", ""))
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        return None
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def whole(value: Any) -> int | None:
    """An integer, if the value is one."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def rate(value: Any) -> float | None:
    """A request rate; ``inf`` is one. None for what is no number."""
    if isinstance(value, str) and value.strip().lower() in ("inf", "infinity"):
        return math.inf
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return math.inf
    found = number(value)
    return found if found is not None and found > 0 else None


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are not None, empty, or nested."""
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, (str, int, float, bool)) and value not in ("", None)
    }


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> Sequence[Any]:
    """The value if it is a JSON list, else an empty one."""
    return value if isinstance(value, list) else []


def excerpt(lines: Sequence[str], line: int, width: int = 100) -> str:
    """Line ``line`` (from 1) as it is quoted in a message."""
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return text if len(text) <= width else text[: width - 1] + "…"


@dataclass(frozen=True)
class LoggedRequest:
    """One request as logged, in seconds on the client's clock; None: it did not happen, or is not known."""

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
    """The requests in the order of their planned sends, with times from the first of them."""
    ordered = sorted(seen, key=lambda each: each.scheduled_s)
    return [_record(each, ordered[0].scheduled_s) for each in ordered]


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
    """One measurement as far as it is reported. ``gb_per_s`` is in 10⁹ bytes per second, times in seconds."""

    case: Case
    gb_per_s: float
    calls: int | None = None
    window_s: float | None = None
    """The length of the measurement, if the tool reports it."""
    library: str = ""
    transport: str = ""
    prepare_s: float | None = None
    verified: bool | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    qualifiers: Sequence[str] = ()
    """What must be known with the bandwidth to read it."""


def transfer_row(origin: Origin, reported: ReportedTransfer, missing: Sequence[str]) -> TransferRow:
    """The row.

    What the tool does not report stands in the record as its default, and by name in ``missing``.
    """
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
            + f"not told: {', '.join(absent)}",
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
