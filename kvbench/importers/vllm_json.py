"""Result files of ``vllm bench serve --save-result`` (one object), ``--append-result`` (one a line), or a
list."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvbench.errors import InputError
from kvbench.importers.base import Imported, Origin, json_value, peek, read_lines, read_text
from kvbench.importers.parts.vllm_result import DEFINITIONS, is_result, row_of

FORMAT: Final = "JSON files of `vllm bench serve --save-result`, `--save-detailed` and `--append-result`"
RANK: Final = 20
TOOL: Final = "vllm bench serve"


def recognise(path: Path) -> bool:
    text = peek(path).lstrip()
    return text[:1] in ("{", "[") and '"request_throughput"' in text and '"total_input_tokens"' in text


def read(path: Path) -> Imported:
    """Return every result in the file. Raises InputError if the first one is incomplete."""
    reading = Imported(definitions=dict(DEFINITIONS))
    try:
        value = json_value(read_text(path))
    except json.JSONDecodeError as error:
        found = _lines(path, reading)
        if not found:
            raise InputError(
                f"{path.name}:{error.lineno}: is not complete JSON ({error.msg})",
                hint="the file was cut off while it was written; the run's log may hold the result block",
            ) from error
        return reading
    last = len(read_lines(path))
    for result in value if isinstance(value, list) else [value]:
        _take(result, Origin(path.name, 1, last, TOOL), reading)
    return reading


def _lines(path: Path, reading: Imported) -> int:
    for line, text in enumerate(read_lines(path), start=1):
        if not text.strip():
            continue
        try:
            _take(json_value(text), Origin(path.name, line, line, TOOL), reading)
        except json.JSONDecodeError as error:
            reading.leave_out(line, f"is not complete JSON ({error.msg}); left out", path.name)
    return len(reading.rows)


def _take(result: Any, origin: Origin, reading: Imported) -> None:
    if is_result(result):
        tool = "sglang.bench_serving" if "total_output_tokens_retokenized" in result else origin.tool
        reading.rows.append(row_of(result, replace(origin, tool=tool)))
    else:
        what = "is not a result of a serving benchmark"
        reading.leave_out(origin.line, f"{what}; left out", origin.file)
