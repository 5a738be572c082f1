"""Result blocks of ``vllm bench serve`` in a log, several per log, each with its command if present. Formats:
0.4 (``benchmark_serving.py``) to 0.32, which prints the parsed arguments before the run as ``Namespace(…)``,
and "Traffic request rate" after them. The requested load comes from the nearest of these, or from a heading
of ``key=value`` pairs, between the previous block and this one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvbench.importers.base import Imported, LeftOut, Origin, ServingRow, peek, rate, read_lines, whole
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
# Recorded settings of the command; the whole command is stored too.
_KEPT: Final = (
    "backend", "model", "served_model_name", "dataset_name", "burstiness", "max_concurrency", "seed",
    "num_warmups",
    "random_range_ratio", "random_prefix_len", "endpoint", "goodput", "ignore_eos", "label",
)  # fmt: skip


def recognise(path: Path) -> bool:
    return vllm_result.TITLE.search(peek(path)) is not None


def read(path: Path) -> Imported:
    """Return every block of a log; an incomplete one is a problem."""
    lines = read_lines(path)
    reading = Imported(definitions=dict(DEFINITIONS))
    before = 0
    for block in vllm_result.blocks(lines):
        if block.cut:
            reading.leave_out(block.line, f"a result block is left out: {block.cut}", path.name)
        else:
            reading.rows.append(row_of(block, lines, before, path.name))
            reading.problems += unknown_lines(block, path.name)
        before = block.last_line
    return reading


def unknown_lines(block: vllm_result.ResultBlock, file: str) -> list[LeftOut]:
    """Report unknown lines of a complete block."""
    problems = [LeftOut(line, f"not read: {text[:100]}", file) for line, text in block.unreadable]
    if block.unknown:
        names = ", ".join(block.unknown)
        problems.append(LeftOut(block.line, f"unknown names of values: {names} (kept as text)", file))
    return problems


def row_of(block: vllm_result.ResultBlock, lines: Sequence[str], before: int, file: str) -> ServingRow:
    """Return a block's row, with the requested load from the lines after ``before``."""
    load = RequestedLoad.before(lines, before, block.line - 1)
    row = ServingRow(
        Origin(file, block.line, block.last_line, load.tool),
        dict(block.figures),
        request_rate=block.request_rate if block.request_rate is not None else rate(load.get("request_rate")),
        num_prompts=whole(load.get("num_prompts")),
        input_len=whole(load.get("input_len")),
        output_len=whole(load.get("output_len")),
        settings={key: value for key in _KEPT if (value := load.get(key)) not in (None, "", "None")},
        unknown=dict(block.unknown),
        command=load.command,
    )
    if (max_concurrency := row.figures.pop("max_concurrency", None)) is not None:
        row.settings["max_concurrency"] = int(max_concurrency)
    for name, total in (("input_len", "total_input_tokens"), ("output_len", "total_output_tokens")):
        if getattr(row, name) is None:
            row.derive_length(name, total)
    return row


class RequestedLoad:
    """The requested load from the lines before a block."""

    def __init__(self) -> None:
        self.tool = ""
        self.command = ""
        self._values: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        return self._values.get(key)

    @classmethod
    def before(cls, lines: Sequence[str], first: int, last: int) -> RequestedLoad:
        """Parse lines ``first`` to ``last`` (from 0, ``last`` excluded); later values win."""
        load = cls()
        place = first
        while place < last:
            text = lines[place].strip()
            if _NAMESPACE.search(text):
                pairs = {found["key"]: found["value"].strip("'") for found in _PAIR.finditer(text)}
                load.tool = "vllm bench serve"
                load._take({key: value for key, value in pairs.items() if value != "None"})
            elif _COMMAND.search(text):
                place, command = _join_command(lines, place, last)
                load._command(command)
            elif found := _TRAFFIC.match(text):
                load._values["request_rate"] = found["rate"]
            elif "=" in text:
                load._heading(text)
            place += 1
        return load

    def _command(self, text: str) -> None:
        """Take only flags with a literal value, not ``$rps`` of a script."""
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


def _join_command(lines: Sequence[str], place: int, last: int) -> tuple[int, str]:
    """Join a command over several lines that end in a backslash; return it with its last line's index."""
    words = [lines[place].strip()]
    while words[-1].endswith("\\") and place + 1 < last:
        place += 1
        words[-1] = words[-1][:-1].strip()
        words.append(lines[place].strip())
    text = " ".join(words)
    return place, text[text.index("vllm") :] if "vllm bench" in text else text
