"""Tables of nccl-tests (``sendrecv_perf``, ``all_reduce_perf``, …): a row for each size and placement.
``algbw`` and ``busbw`` are 10⁹ bytes per second. ``algbw`` = size / time (bytes of one call for the caller)
becomes the bandwidth; ``busbw`` is kept too. A collective is not a one-sided transfer, so the op is ``write``
and listed as missing. Times are of one call, in µs. ``#wrong`` is 0, a number, or N/A."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from kvbench.core.transfers.records import Case
from kvbench.importers.base import (
    Imported,
    Origin,
    ReportedTransfer,
    number,
    peek,
    read_lines,
    transfer_row,
    whole,
)

FORMAT: Final = "tables of nccl-tests"
RANK: Final = 30
TOOL: Final = "nccl-tests"

_HEADER: Final = re.compile(r"^#?\s+size\s+count\s+type\s+(?:redop\s+)?(?:root\s+)?time\s+algbw\s+busbw")
_ARGUMENTS: Final = re.compile(
    r"^#?\s*nThread (?P<threads>\d+) nGpus (?P<gpus>\d+) minBytes .*?iters: \d+ iters: (?P<iters>\d+)"
)
_DEVICE: Final = re.compile(
    r"^#?\s+Rank\s+(?P<rank>\d+)\s.*?\bon\s+(?P<host>\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(?P<name>.+?)\s*$"
)
_PROGRAM: Final = re.compile(r"\b(?P<name>[a-z]+(?:_[a-z]+)*)_perf(?:_mpi)?\b")
_COLLECTIVE: Final = re.compile(r"^#\s+Collective test starting:\s*(?P<name>\w+)")
_VERSION: Final = re.compile(
    r"nccl-tests version (?P<tests>[\d.]+)|nccl-library=(?P<library>\d+)|NCCL version (?P<nccl>[\d.]+)"
)
_ROW: Final = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")


def recognise(path: Path) -> bool:
    return any(_HEADER.match(line) for line in peek(path).splitlines())


def read(path: Path) -> Imported:
    """Return two rows per line, out of place and in place; sizes of 0 bytes are left out."""
    reading = Imported()
    about: dict[str, Any] = {"gpus": [], "hosts": set(), "ranks": set()}
    columns: list[str] = []
    for line, text in enumerate(read_lines(path), start=1):
        if found := _ARGUMENTS.match(text):
            about |= {
                "threads": int(found["threads"]),
                "iters": int(found["iters"]),
                "gpus": [],
                "hosts": set(),
                "ranks": set(),
            }
            columns = []
        elif found := _DEVICE.match(text):
            about["gpus"].append(found["name"])
            about["hosts"].add(found["host"])
            about["ranks"].add(int(found["rank"]))
        elif _HEADER.match(text):
            columns = text.lstrip("# ").split()
        elif columns and _ROW.match(text):
            _take(text, columns, about, Origin(path.name, line, line, TOOL), reading)
        else:
            _program(text, about)
    if about["gpus"] and reading.rows:
        reading.about["gpus"] = list(about["gpus"])
    return reading


def _program(text: str, about: dict[str, Any]) -> None:
    if found := _COLLECTIVE.match(text) or _PROGRAM.search(text):
        about["program"] = found["name"]
    for found in _VERSION.finditer(text):
        if found["nccl"] or found["library"]:
            about["nccl"] = found["nccl"] or found["library"]


def _take(text: str, columns: list[str], about: dict[str, Any], origin: Origin, reading: Imported) -> None:
    cells = text.split()
    if len(cells) != len(columns):
        what = f"has {len(cells)} cells under {len(columns)} columns; left out"
        reading.leave_out(origin.line, what, origin.file)
        return
    size = whole(cells[0])
    if not size:
        reading.leave_out(origin.line, "a call of 0 bytes moves nothing; left out", origin.file)
        return
    if len(about["ranks"]) == 1:
        what = "was measured by a single rank that copies to itself"
        hint = "build nccl-tests with MPI=1" if len(about["gpus"]) > 1 else "give it two GPUs"
        reading.leave_out(origin.line, f"{what} ({hint}); left out", origin.file)
        return
    first = columns.index("time")
    width = (len(columns) - first) // 2 if columns.count("time") == 2 else len(columns) - first
    words = dict(zip(columns[:first], cells[:first], strict=True))
    for place, name in ((first, "out of place"), (first + width, "in place")):
        if place >= len(columns):
            continue
        values = dict(zip(columns[place : place + width], cells[place : place + width], strict=True))
        speed, time_us = number(values.get("algbw")), number(values.get("time"))
        if speed is None or time_us is None:
            continue
        wrong = values.get("#wrong", values.get("error", ""))
        also = {
            "collective": about.get("program", ""), "placement": name, "time_us": time_us,
            "busbw_gb_per_s": number(values.get("busbw")), "wrong": wrong, "type": words.get("type", ""),
            "redop": words.get("redop", ""), "ranks": len(about["gpus"]) or None,
            "hosts": len(about["hosts"]) or None,
        }  # fmt: skip
        case = Case(
            backend=f"nccl-{about['program']}" if about.get("program") else "nccl",
            protocol="nccl",
            op="write",
            block_bytes=size,
            batch_size=1,
            memory="cuda",
            shape=name,
        )
        verified = None if number(wrong) is None else number(wrong) == 0
        library = f"nccl {about['nccl']}" if about.get("nccl") else ""
        reported = ReportedTransfer(
            case, speed, about.get("iters"), library=library, verified=verified, also=also
        )
        missing = ["op", "nics", *(["collective"] if not about.get("program") else [])]
        reading.rows.append(transfer_row(origin, reported, missing))
