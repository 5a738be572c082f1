"""Recorded requests and their replay: rates, shared prefixes, and prompts that share them again.

Formats (a file's text → ``TracedRequest`` values, all mistakes reported with their lines):

- ``mooncake``: one JSON object per line with ``timestamp`` (ms), ``input_length``, ``output_length`` and
  ``hash_ids``: one id for each 512 tokens of the prompt, the last block may be partial. Equal ids stand for
  equal tokens after equal beginnings (Mooncake, arXiv 2407.00079; its repository's FAST25 traces).
- ``jsonl`` and ``csv``: ``timestamp`` or ``offset_s`` (both seconds), ``input_len``, ``output_len``.

Offsets count from the first request, wherever the recorded times begin. Times are sorted and subtracted in
the unit that they are written in: two that differ there may be equal once divided by 1000, and of
milliseconds since 1970 the division would cost digits of each gap."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from kvbench.core.load.prompts import lowest_id
from kvbench.errors import InputError

BLOCK_TOKENS: Final = 512
"""Tokens per hash id of a Mooncake trace."""

_BLOCK_STREAM: Final = 3
"""Random streams of shared blocks and new tokens, separate from all others."""
_FRESH_STREAM: Final = 4


@dataclass(frozen=True)
class TracedRequest:
    """One recorded request. ``blocks``: hash ids of its prompt's blocks of 512 tokens."""

    offset_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TraceFigures:
    """Figures of a trace. Rates per second; ``hit_rate`` as in ``expected_hits``."""

    requests: int
    duration_s: float
    request_rate: float
    mean_input_len: float
    mean_output_len: float
    longest: int
    """Most tokens of one request, prompt and output together."""
    longest_output: int
    hit_rate: float


def scaled(requests: Sequence[TracedRequest], factor: float, most: int | None = None) -> list[TracedRequest]:
    """Return the first ``most`` requests with the gaps multiplied by ``factor`` (0.5: twice as fast)."""
    if not 0 < factor < math.inf:
        raise InputError(f"the time between requests must be multiplied by more than 0, not {factor}")
    return [replace(request, offset_s=request.offset_s * factor) for request in requests[:most]]


def request_rate(requests: Sequence[TracedRequest]) -> float:
    """Return the mean arrivals per second; infinite for simultaneous ones."""
    length_s = requests[-1].offset_s - requests[0].offset_s if requests else 0.0
    return (len(requests) - 1) / length_s if length_s > 0 else math.inf


def figures(requests: Sequence[TracedRequest], block_tokens: int = 16) -> TraceFigures:
    prompts = sum(request.input_len for request in requests)
    return TraceFigures(
        requests=len(requests),
        duration_s=requests[-1].offset_s,
        request_rate=request_rate(requests),
        mean_input_len=prompts / len(requests),
        mean_output_len=sum(request.output_len for request in requests) / len(requests),
        longest=max(request.input_len + request.output_len for request in requests),
        longest_output=max(request.output_len for request in requests),
        hit_rate=sum(expected_hits(requests, block_tokens)) / prompts,
    )


def shares_prefixes(requests: Iterable[TracedRequest]) -> bool:
    """Return whether two requests begin with the same block."""
    seen: set[int] = set()
    for request in requests:
        if request.blocks:
            if request.blocks[0] in seen:
                return True
            seen.add(request.blocks[0])
    return False


def expected_hits(requests: Sequence[TracedRequest], block_tokens: int = 16) -> list[int]:
    """Prompt tokens of each request that an infinite prefix cache would have, in the order of arrival. A
    request finds the blocks of the longest prefix that it shares with a single earlier request. Engines look
    up whole blocks of ``block_tokens`` and always compute at least one token (vLLM's rule). An earlier
    request counts as soon as it has arrived, so real caches hit less."""
    tree: dict[tuple[int, int], int] = {}  # (node, block) → the node that it leads to
    covered = [0]  # tokens of a prompt that are known at each node; the root is 0
    found = []
    for request in requests:
        node, hit = 0, 0
        for position, block in enumerate(request.blocks or ()):
            end = min((position + 1) * BLOCK_TOKENS, request.input_len)
            node = tree.setdefault((node, block), len(covered))
            if node == len(covered):
                covered.append(0)
            if hit == position * BLOCK_TOKENS:
                hit = max(hit, min(end, covered[node]))
            covered[node] = max(covered[node], end)
        found.append(min(hit, request.input_len - 1) // block_tokens * block_tokens)
    return found


def traced_prompt(
    input_len: int, blocks: Sequence[int] | None, seed: int, index: int, vocab_size: int
) -> list[int]:
    """Token ids of a traced request's prompt, ``input_len`` of them. The 512 tokens of a hash id depend on
    seed and id only, so equal ids give equal tokens within a trial and other tokens in the next one. Tokens
    without an id are unique: they depend on seed and index."""
    low = lowest_id(vocab_size)
    if vocab_size - low < 1:
        raise InputError(f"vocab_size must be at least 1, it is {vocab_size}")
    parts = []
    for block in list(blocks or ())[: math.ceil(input_len / BLOCK_TOKENS)]:
        # A seed sequence takes 32-bit words: a large id is two of them.
        words = [_BLOCK_STREAM, seed, block & 0xFFFFFFFF, block >> 32]
        parts.append(_generator(words).integers(low, vocab_size, BLOCK_TOKENS, dtype=np.int32))
    covered = min(input_len, BLOCK_TOKENS * len(parts))
    if covered < input_len:
        fresh = _generator([_FRESH_STREAM, seed, index])
        parts.append(fresh.integers(low, vocab_size, input_len - covered, dtype=np.int32))
    tokens: list[int] = np.concatenate(parts)[:input_len].tolist() if parts else []
    return tokens


def _generator(words: Sequence[int]) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(list(words))))


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
"""Unit of ``timestamp``; ``offset_s`` is always in seconds."""


def parse_trace(text: str, path: str, kind: TraceFormat | Literal["auto"] = "auto") -> list[TracedRequest]:
    """Return a trace file's requests by time, counted from the first. Raises InputError with the first 20
    mistakes as ``path:line: what is wrong``, and their number."""
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
        mistakes = [f"{path}:1: the file has no request"]
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
    for line, part in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        if not part.strip():
            continue
        try:
            row = json.loads(part, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            yield line, f"is not JSON: {error}"
            continue
        yield line, row if isinstance(row, dict) else "must be a JSON object"


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a number")


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
        yield reader.line_num, f"is not CSV: {error}"


def _header_problem(header: Sequence[str]) -> str:
    if lacking := [names[0] for names in _NAMES.values() if not set(names) & set(header)]:
        return f"the header lacks {', '.join(lacking)}; it has: {', '.join(header) or 'nothing'}"
    return (
        f"the header names {max(header, key=header.count)!r} twice" if len(set(header)) < len(header) else ""
    )


def _request(
    row: Mapping[str, Any], kind: TraceFormat
) -> tuple[tuple[float, TracedRequest] | None, list[str]]:
    """Return a request and its time in the format's unit, or what is wrong with its row."""
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
    if not isinstance(ids, list) or not all(type(number) is int and 0 <= number < 2**63 for number in ids):
        problems.append("hash_ids must be a list of whole numbers of at least 0")
        return None
    most = math.ceil(values.get("input_len", math.inf) / BLOCK_TOKENS) if "input_len" in values else len(ids)
    if len(ids) > most:
        problems.append(
            f"{len(ids)} hash_ids cover more than its {values['input_len']:.0f} prompt tokens "
            f"({BLOCK_TOKENS} a block)"
        )
        return None
    return tuple(ids)
