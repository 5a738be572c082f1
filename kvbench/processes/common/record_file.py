"""The load generator's file of records: one line of JSON per request, then all token gaps as one block. A
million gaps take 4 MB (8 MB if one exceeds 214 s) and are read and written as arrays; as JSON they would take
a second of CPU time between two trials. The first line describes the rest. A file without it is JSON lines
with one whole record each."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvbench.core.records import RequestRecord
from kvbench.errors import StoreError

FORMAT: Final = "kvbench-load-records"
VERSION: Final = 1
TICKS_PER_S: Final = 10_000_000
"""Gaps are stored in units of 0.1 µs, to which the generator rounds all times."""

_GAPS: Final = "itl_s"
_FIELDS: Final = tuple(item.name for item in fields(RequestRecord))
_values: Final = attrgetter(*_FIELDS)
_TYPES: Final = ("<i4", "<i8")


def write_records(path: Path, records: Sequence[RequestRecord]) -> None:
    """Write the records in order; the file is renamed into place when complete."""
    longest = max((max(record.itl_s) for record in records if len(record.itl_s)), default=0.0)
    kind = _TYPES[0] if longest * TICKS_PER_S < 2**31 - 1 else _TYPES[1]
    head = {"format": FORMAT, "version": VERSION, "records": len(records), "gaps": kind}
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(_line(head))
        for record in records:
            # Not vars(): that would create a dictionary in each record.
            values = dict(zip(_FIELDS, _values(record), strict=True))
            values[_GAPS] = len(record.itl_s)
            file.write(_line(values))
        for record in records:
            ticks = np.rint(np.asarray(record.itl_s, np.float64) * TICKS_PER_S)
            file.write(ticks.astype(kind).tobytes())
    os.replace(partial, path)


def read_records(path: Path) -> list[RequestRecord]:
    """Read records from such a file or JSON lines. Raises StoreError."""
    with path.open("rb") as file:
        first = file.readline()
        try:
            head = json.loads(first) if first.strip() else None
            if not isinstance(head, dict) or head.get("format") != FORMAT:
                rest = [json.loads(line) for line in file if line.strip()]
                return [RequestRecord.from_json(row) for row in ([head] if head else []) + rest]
            if head["version"] != VERSION or head["gaps"] not in _TYPES:
                raise StoreError(f"{path} is a record file of another version: {first.decode()!r}")
            rows = [json.loads(file.readline()) for _ in range(head["records"])]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is not a record file of the load generator: {error}") from error
        ticks = np.frombuffer(file.read(), head["gaps"])
    if len(ticks) != sum(row[_GAPS] for row in rows):
        raise StoreError(f"{path} is truncated: token gaps of its records are missing")
    seconds, position = ticks / TICKS_PER_S, 0
    records = []
    for row in rows:
        end = position + row[_GAPS]
        records.append(RequestRecord.from_json({**row, _GAPS: array("d", seconds[position:end].tobytes())}))
        position = end
    return records


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
