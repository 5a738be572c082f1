"""The result block that ``vllm bench serve`` prints, and the block's descendants (SGLang's prints the same
way).

::

    ============ Serving Benchmark Result ============
    Successful requests:                     400
    …
    ---------------Time to First Token----------------
    Mean TTFT (ms):                          3798.44
    …
    ==================================================

A block ends with the line of equal signs, which may have more text behind it. Whatever stands where it
should end (another block, the end of the file, a line that is no figure) means that the log was cut off
inside the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvbench.importers.base import number, rate

TITLE: Final = re.compile(r"=+\s*Serving Benchmark Result\s*=+")
_END: Final = re.compile(r"^={40,}")
_SECTION: Final = re.compile(r"^(?:---.*---|={3,}[^=]+={3,})$")
_FIGURE: Final = re.compile(r"^(?P<label>[^:]+?(?:\([^)]*\))?):\s+(?P<value>\S.*?)\s*$")
_PREFIX: Final = re.compile(r"^(?:\([^()]*pid=\d+[^()]*\)\s*|\[[^\]]*\]\s*|\S+\s+\|\s+)")

_UNSET: Final = ("none", "not set", "n/a")
# Label of the block, lower case → name of the figure.
_LABELS: Final = {
    "successful requests": "completed",
    "failed requests": "failed",
    "maximum request concurrency": "max_concurrency",
    "max request concurrency": "max_concurrency",
    "request rate configured (rps)": "request_rate",
    "traffic request rate": "request_rate",
    "benchmark duration (s)": "duration_s",
    "total input tokens": "total_input_tokens",
    "total generated tokens": "total_output_tokens",
    "request throughput (req/s)": "request_throughput",
    "request goodput (req/s)": "request_goodput",
    "output token throughput (tok/s)": "output_throughput",
    "peak output token throughput (tok/s)": "peak_output_throughput",
    "peak concurrent requests": "peak_concurrent_requests",
    "total token throughput (tok/s)": "total_token_throughput",
}
_STATISTIC: Final = re.compile(
    r"(?P<statistic>mean|median|std|max|p\d+(?:\.\d+)?) (?P<latency>ttft|tpot|itl|e2el|e2e latency) \(ms\)"
)


@dataclass
class ResultBlock:
    """One block. Lines count from 1. ``cut``: why it is not whole; empty for a whole one."""

    line: int
    last_line: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    request_rate: float | None = None
    unknown: dict[str, str] = field(default_factory=dict)
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    cut: str = ""


def figure_name(label: str) -> str | None:
    """The name of the figure that a label stands for; None for a label that is not known."""
    low = " ".join(label.lower().split())
    if low in _LABELS:
        return _LABELS[low]
    found = _STATISTIC.fullmatch(low)
    if not found:
        return None
    latency = {"e2e latency": "e2el"}.get(found["latency"], found["latency"])
    statistic = {"p50": "p50"}.get(found["statistic"], found["statistic"])
    return f"{statistic}_{latency}_ms"


def blocks(lines: Sequence[str]) -> Iterator[ResultBlock]:
    """All blocks of a log, whole or cut off, in their order."""
    place = 0
    while place < len(lines):
        if TITLE.search(lines[place]):
            block = _block(lines, place)
            yield block
            place = block.last_line
        else:
            place += 1


def _block(lines: Sequence[str], first: int) -> ResultBlock:
    block = ResultBlock(first + 1)
    for place in range(first + 1, len(lines)):
        text = _PREFIX.sub("", lines[place].strip())
        if TITLE.search(lines[place]):
            return _cut(block, place, f"the next block begins at line {place + 1} before this one has ended")
        if _END.match(text):
            block.last_line = place + 1
            if not block.figures:
                block.cut = "it has no figures"
            return block
        if not text or _SECTION.match(text):
            continue
        found = _FIGURE.match(text)
        if found is None:
            if block.figures and len(block.unreadable) >= 3:
                return _cut(block, place, f"line {block.unreadable[0][0]} is no figure and no end follows")
            block.unreadable.append((place + 1, text))
            continue
        _take(block, place + 1, found["label"].strip(), found["value"])
    return _cut(block, len(lines), f"the file ends at line {len(lines)} before the block does")


def _take(block: ResultBlock, line: int, label: str, text: str) -> None:
    name = figure_name(label)
    if name == "request_rate":
        block.request_rate = rate(text)
        return
    value = number(text)
    if name is not None and text.lower() in _UNSET:
        return
    if name is None:
        block.unknown[label] = text
    elif value is None:
        block.unreadable.append((line, f"{label}: {text}"))
    else:
        block.figures[name] = int(text) if re.fullmatch(r"\d+", text) else value


def _cut(block: ResultBlock, end: int, why: str) -> ResultBlock:
    block.last_line = end
    block.cut = why
    return block
