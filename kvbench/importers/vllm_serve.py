"""Result blocks of ``vllm bench serve`` in a log, several per log, with the command before each where there
is one.

Formats seen: 0.4 (``benchmark_serving.py``) to 0.32, where the parsed arguments are printed before the run
as ``Namespace(…)``, and the "Traffic request rate" after them. What is asked for comes from the nearest of
these, or from a heading of ``key=value`` words, that stands between the block before and this one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvbench.importers.base import (
    Imported,
    LeftOut,
    Origin,
    ServingRow,
    peek,
    rate,
    read_lines,
    whole,
)
from kvbench.importers.parts import vllm_result
from kvbench.importers.parts.vllm_result import DEFINITIONS

FORMAT: Final = "text blocks that `vllm bench serve` prints, in a log"
RANK: Final = 50

_COMMAND: Final = re.compile(
    r"(?:\bvllm\s+bench\s+serve|\bbenchmark_serving\.py|\bsglang\.bench_serving)(?=\s+(?:-|\\)|\s*\\?$)"
)
_NAMESPACE: Final = re.compile(r"\bNamespace\(")
_PAIR: Final = re.compile(r"(?<![\w.])(?P<key>[a-z_]+)=(?P<value>'[^']*'|[^\s,()]+)")
_TRAFFIC: Final = re.compile(r"^Traffic request rate:\s*(?P<rate>\S+)")
_HEADING_KEYS: Final = {
    "input": "input_len",
    "input_len": "input_len",
    "isl": "input_len",
    "output": "output_len",
    "output_len": "output_len",
    "osl": "output_len",
    "rps": "request_rate",
    "qps": "request_rate",
    "request_rate": "request_rate",
    "num_prompts": "num_prompts",
}
# Settings of the command that are kept; the others are in the command itself.
_KEPT: Final = (
    "backend", "model", "served_model_name", "dataset_name", "burstiness", "max_concurrency", "seed",
    "num_warmups",
    "random_range_ratio", "random_prefix_len", "endpoint", "goodput", "ignore_eos", "label",
)  # fmt: skip


def recognise(path: Path) -> bool:
    return vllm_result.TITLE.search(peek(path)) is not None


def read(path: Path) -> Imported:
    """Every block of a log; one that is cut off is a problem and no row."""
    lines = read_lines(path)
    reading = Imported(definitions=dict(DEFINITIONS))
    before = 0
    for block in vllm_result.blocks(lines):
        if block.cut:
            reading.leave_out(block.line, f"a result block is left out: {block.cut}", path.name)
        else:
            reading.rows.append(row_of(block, lines, before, path.name))
            reading.problems += unread(block, path.name)
        before = block.last_line
    return reading


def unread(block: vllm_result.ResultBlock, file: str) -> list[LeftOut]:
    """What stood in a whole block and is no figure that is known."""
    problems = [LeftOut(line, f"not read: {text[:100]}", file) for line, text in block.unreadable]
    if block.unknown:
        names = ", ".join(block.unknown)
        problems.append(
            LeftOut(block.line, f"no figure is known by the name of: {names} (kept as text)", file)
        )
    return problems


def row_of(block: vllm_result.ResultBlock, lines: Sequence[str], before: int, file: str) -> ServingRow:
    """The row of a block, with what was asked for from the lines between ``before`` and the block."""
    asked = RequestedLoad.before(lines, before, block.line - 1)
    row = ServingRow(
        Origin(file, block.line, block.last_line, asked.tool),
        dict(block.figures),
        request_rate=block.request_rate
        if block.request_rate is not None
        else rate(asked.get("request_rate")),
        num_prompts=whole(asked.get("num_prompts")),
        input_len=whole(asked.get("input_len")),
        output_len=whole(asked.get("output_len")),
        settings={key: value for key in _KEPT if (value := asked.get(key)) not in (None, "", "None")},
        unknown=dict(block.unknown),
        command=asked.command,
    )
    max_concurrency = row.figures.pop("max_concurrency", None)
    if max_concurrency is not None:
        row.settings["max_concurrency"] = int(max_concurrency)
    for name, total in (("input_len", "total_input_tokens"), ("output_len", "total_output_tokens")):
        if getattr(row, name) is None:
            row.derive_length(name, total)
    return row


class RequestedLoad:
    """What the lines before a block say was asked for."""

    def __init__(self) -> None:
        self.tool = ""
        self.command = ""
        self._values: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        return self._values.get(key)

    @classmethod
    def before(cls, lines: Sequence[str], first: int, last: int) -> RequestedLoad:
        """Lines ``first`` to ``last``, counted from 0, ``last`` not included; later words count more."""
        asked = cls()
        place = first
        while place < last:
            text = lines[place].strip()
            if _NAMESPACE.search(text):
                asked._namespace(text)
            elif _COMMAND.search(text):
                place, command = _joined(lines, place, last)
                asked._command(command)
            elif found := _TRAFFIC.match(text):
                asked._values["request_rate"] = found["rate"]
            elif "=" in text:
                asked._heading(text)
            place += 1
        return asked

    def _namespace(self, text: str) -> None:
        pairs = {found["key"]: found["value"].strip("'") for found in _PAIR.finditer(text)}
        self.tool = "vllm bench serve"
        self._take({key: value for key, value in pairs.items() if value != "None"})

    def _command(self, text: str) -> None:
        """Only flags with a value that is reported: ``$rps`` of a script's text is none."""
        found = _COMMAND.search(text)
        self.tool = " ".join(found[0].split()) if found else ""
        self.command = text
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            words = text.split()
        pairs: dict[str, str] = {}
        for place, word in enumerate(words):
            if not word.startswith("--"):
                continue
            name, equals, value = word[2:].partition("=")
            if not equals and place + 1 < len(words) and not words[place + 1].startswith("--"):
                value = words[place + 1]
            if value and "$" not in value:
                key = name.replace("-", "_")
                pairs["num_prompts" if key == "num_prompt" else key] = value
        self._take(pairs)

    def _take(self, pairs: dict[str, str]) -> None:
        self._values.update(pairs)
        for name in ("input_len", "output_len"):
            length = pairs.get(f"random_{name}") or pairs.get(name)
            uses_random = pairs.get("dataset_name", "random") == "random"
            if length is not None and uses_random:
                self._values[name] = length

    def _heading(self, text: str) -> None:
        pairs = {found["key"]: found["value"] for found in _PAIR.finditer(text)}
        known = {_HEADING_KEYS[key]: value for key, value in pairs.items() if key in _HEADING_KEYS}
        if "request_rate" in known or "input_len" in known:
            self._values.update({key: value for key, value in known.items() if "$" not in value})


def _joined(lines: Sequence[str], place: int, last: int) -> tuple[int, str]:
    """A command over several lines that end in a backslash, and the place of its last line."""
    words = [lines[place].strip()]
    while words[-1].endswith("\\") and place + 1 < last:
        place += 1
        words[-1] = words[-1][:-1].strip()
        words.append(lines[place].strip())
    text = " ".join(words)
    return place, text[text.index("vllm") :] if "vllm bench" in text else text
