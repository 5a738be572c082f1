"""Tables of nixlbench (part of NIXL), with the configuration above them.

The columns changed: up to 0.2 ``Avg Lat. (us)`` precedes three bandwidths (MiB/s, GiB/s, GB/s); later there
is one bandwidth, and times of preparing, posting and transferring with their P99. ``B/W (GB/Sec)`` is always
10⁹ bytes per second. The latency is one block's, so it is kept as reported, not as a call's time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvbench.core.transfers.records import Case, Memory, TransferOp
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

FORMAT: Final = "nixlbench's table (NIXL)"
RANK: Final = 30
TOOL: Final = "nixlbench"

_HEADER: Final = re.compile(r"^\s*Block Size \(B\)\s{2,}Batch Size\s{2,}")
_SETTING: Final = re.compile(r"^(?P<name>[A-Z][^:(]*?)\s*\(--(?P<flag>\w+)=.*?\)\s*:\s*(?P<value>.*?)\s*$")
_ROW: Final = re.compile(r"^\s*\d+\s+\d+\s+[\d.]")
_ADJUSTED: Final = re.compile(r"Adjusting (?P<flag>num_iter|warmup_iter) to (?P<value>\d+)")
_KEPT: Final = {
    "Avg Lat. (us)": "avg_latency_us",
    "Avg Prep (us)": "avg_prep_us",
    "P99 Prep (us)": "p99_prep_us",
    "Avg Post (us)": "avg_post_us",
    "P99 Post (us)": "p99_post_us",
    "Avg Tx (us)": "avg_tx_us",
    "P99 Tx (us)": "p99_tx_us",
    "Aggregate B/W (GB/Sec)": "aggregate_gb_per_s",
    "Network Util (%)": "network_util_percent",
}


def recognise(path: Path) -> bool:
    return any(_HEADER.match(line) for line in peek(path).splitlines())


def read(path: Path) -> Imported:
    """Return a row for each line of a table. A line without header or bandwidth is a problem."""
    reading = Imported()
    settings: dict[str, str] = {}
    columns: list[str] = []
    for line, text in enumerate(read_lines(path), start=1):
        if found := _SETTING.match(text):
            settings[found["flag"]] = found["value"]
            columns = []
        elif found := _ADJUSTED.search(text):
            settings[found["flag"]] = found["value"]
        elif _HEADER.match(text):
            columns = re.split(r"\s{2,}", text.strip())
        elif columns and _ROW.match(text):
            _take(text, columns, settings, Origin(path.name, line, line, TOOL), reading)
    return reading


def _take(
    text: str, columns: Sequence[str], settings: dict[str, str], origin: Origin, reading: Imported
) -> None:
    cells = text.split()
    if len(cells) != len(columns):
        what = f"has {len(cells)} cells under {len(columns)} columns; left out"
        reading.leave_out(origin.line, what, origin.file)
        return
    row = dict(zip(columns, cells, strict=True))
    block, batch, speed = whole(cells[0]), whole(cells[1]), number(row.get("B/W (GB/Sec)"))
    if not block or not batch or speed is None:
        reading.leave_out(origin.line, "has no block size, batch or bandwidth; left out", origin.file)
        return
    backend = settings.get("backend", "")
    case = Case(
        backend="nixl",
        protocol=backend.lower() or "unknown",
        op=_op(settings),
        block_bytes=block,
        batch_size=batch,
        threads=whole(settings.get("num_threads")) or 1,
        initiators=whole(settings.get("num_initiator_dev")) or 1,
        targets=whole(settings.get("num_target_dev")) or 1,
        memory=_memory(settings),
    )
    also: dict[str, Any] = {
        name: number(row[column]) or None for column, name in _KEPT.items() if column in row
    }
    also["settings"] = dict(settings)
    wanted = {
        "protocol": "backend",
        "op": "op_type",
        "threads": "num_threads",
        "memory": "initiator_seg_type",
    }
    missing = [name for name, flag in wanted.items() if flag not in settings]
    prepared, together = also.get("avg_prep_us"), also.get("aggregate_gb_per_s")
    reported = ReportedTransfer(
        case,
        speed,
        calls=whole(settings.get("num_iter")),
        prepare_s=prepared / 1e6 if prepared is not None else None,
        also=also,
        qualifiers=[f"one pair; all together {together:g} GB/s"] if together and together > speed else [],
    )
    reading.rows.append(transfer_row(origin, reported, [*missing, "nics", "library version"]))


def _op(settings: dict[str, str]) -> TransferOp:
    return "read" if settings.get("op_type", "").upper() == "READ" else "write"


def _memory(settings: dict[str, str]) -> Memory:
    kinds = {settings.get("initiator_seg_type", "").upper(), settings.get("target_seg_type", "").upper()}
    return "cuda" if "VRAM" in kinds else "host"
