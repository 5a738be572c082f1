"""Trace files: arrivals, lengths and, of Mooncake's traces, which blocks of their prompts requests share.

Formats (a file's text → ``TracedRequest`` values, all mistakes reported with their lines):

- ``mooncake``: a JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` and
  ``hash_ids``: one id for each 512 tokens of the prompt, the last block may be partial. Equal ids stand for
  equal tokens after equal beginnings (Mooncake, arXiv 2407.00079; its repository's FAST25 traces).
- ``jsonl`` and ``csv``: ``timestamp`` or ``offset_s`` (both seconds), ``input_len``, ``output_len``.

Only the order of times matters, not where they begin: offsets are counted from the first request. They are
put in order and subtracted in the unit that they are written in: two that differ there may be equal once
divided by 1000, and of milliseconds since 1970 the division would cost digits of each gap.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from kvbench.core.load.traces import BLOCK_TOKENS, TracedRequest
from kvbench.errors import InputError

LONGEST: Final = 10_000_000
MOST_MISTAKES: Final = 20

TraceFormat = Literal["mooncake", "jsonl", "csv"]
FORMATS: Final[tuple[TraceFormat, ...]] = ("mooncake", "jsonl", "csv")
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "time": ("offset_s", "timestamp"),
    "input_len": ("input_len", "input_length"),
    "output_len": ("output_len", "output_length"),
}

_UNIT_S: Final[Mapping[TraceFormat, float]] = {"mooncake": 1e-3, "jsonl": 1.0, "csv": 1.0}
"""Of ``timestamp``; ``offset_s`` is in seconds everywhere."""


def parse_trace(text: str, path: str, kind: TraceFormat | Literal["auto"] = "auto") -> list[TracedRequest]:
    """The requests of a trace file's text, by time, counted from the first.

    Raises InputError with every mistake as ``path:line: what is wrong`` (the first 20 and their number).
    """
    kind = _guess(text, path) if kind == "auto" else kind
    found: list[tuple[float, TracedRequest]] = []
    mistakes: list[str] = []
    for line, row in _csv_rows(text) if kind == "csv" else _json_rows(text):
        problems = [row] if isinstance(row, str) else []
        if not isinstance(row, str):
            timed, problems = _request(row, kind)
            if timed is not None:
                found.append(timed)
        mistakes += [f"{path}:{line}: {problem}" for problem in problems]
    if not found and not mistakes:
        mistakes = [f"{path}:1: there is no request in it"]
    if mistakes:
        more = len(mistakes) - MOST_MISTAKES
        lines = mistakes[:MOST_MISTAKES] + ([f"… and {more} more mistakes"] if more > 0 else [])
        raise InputError("\n".join(lines), hint=_hint(kind))
    found.sort(key=lambda timed: timed[0])
    first, unit_s = found[0][0], _UNIT_S[kind]
    return [replace(request, offset_s=(time - first) * unit_s) for time, request in found]


def _hint(kind: TraceFormat) -> str:
    if kind == "mooncake":
        return "each line is an object with timestamp (ms), input_length, output_length and hash_ids"
    return f"{kind} needs timestamp or offset_s (seconds), input_len and output_len"


def _guess(text: str, path: str) -> TraceFormat:
    first = text.lstrip("\ufeff \t\r\n")[:4096].split("\n", 1)[0]
    if not first.startswith("{"):
        return "csv"
    return "mooncake" if '"hash_ids"' in first or '"input_length"' in first else "jsonl"


def _json_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    for line, each in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        if not each.strip():
            continue
        try:
            row = json.loads(each, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            yield line, f"is no JSON: {error}"
            continue
        yield line, row if isinstance(row, dict) else "must be a JSON object"


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    reader = csv.reader(text.lstrip("\ufeff").splitlines(), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip().lower() for cell in cells]
                if problem := _header_problem(header):
                    yield reader.line_num, problem
                    return
                continue
            if len(cells) != len(header):
                yield reader.line_num, f"has {len(cells)} columns where the header has {len(header)}"
                continue
            yield reader.line_num, {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
    except csv.Error as error:
        yield reader.line_num, f"is no CSV: {error}"


def _header_problem(header: Sequence[str]) -> str:
    lacking = [names[0] for names in _NAMES.values() if not set(names) & set(header)]
    if lacking:
        return f"the header lacks {', '.join(lacking)}; it has: {', '.join(header) or 'nothing'}"
    return (
        f"the header names {max(header, key=header.count)!r} twice" if len(set(header)) < len(header) else ""
    )


def _request(
    row: Mapping[str, Any], kind: TraceFormat
) -> tuple[tuple[float, TracedRequest] | None, list[str]]:
    """A request and its time in the format's unit, or what is wrong with its row."""
    problems: list[str] = []
    values: dict[str, float] = {}
    for key, names in _NAMES.items():
        name = next((name for name in names if name in row), None)
        if name is None:
            problems.append(f"lacks {' or '.join(names)}")
            continue
        number = _number(row[name], from_text=kind == "csv")
        least, most = (0.0, 1e15) if key == "time" else (1, LONGEST)
        if number is None or not least <= number <= most or (key != "time" and number % 1):
            wanted = "a time of at least 0" if key == "time" else f"a whole number from 1 to {LONGEST}"
            problems.append(f"{name} must be {wanted}, not {str(row[name])[:40]!r}")
            continue
        values[key] = number
    blocks = _blocks(row, values, problems) if kind == "mooncake" else None
    if problems:
        return None, problems
    time = values["time"] / _UNIT_S[kind] if "offset_s" in row else values["time"]
    return (time, TracedRequest(0.0, int(values["input_len"]), int(values["output_len"]), blocks)), []


def _number(value: Any, *, from_text: bool) -> float | None:
    if not from_text and (isinstance(value, bool) or not isinstance(value, (int, float))):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _blocks(
    row: Mapping[str, Any], values: Mapping[str, float], problems: list[str]
) -> tuple[int, ...] | None:
    ids = row.get("hash_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 2**63 for each in ids):
        problems.append("hash_ids must be a list of whole numbers of at least 0")
        return None
    most = math.ceil(values.get("input_len", math.inf) / BLOCK_TOKENS) if "input_len" in values else len(ids)
    if len(ids) > most:
        problems.append(
            f"{len(ids)} hash_ids stand for more than its {values['input_len']:.0f} prompt tokens "
            f"({BLOCK_TOKENS} a block)"
        )
        return None
    return tuple(ids)
