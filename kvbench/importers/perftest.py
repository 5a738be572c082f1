"""Output of perftest's bandwidth programs: ``ib_write_bw``, ``ib_read_bw``, ``ib_send_bw``. The average is
the result; the peak is kept unless it is 0 (runs by duration). ``MB/sec`` and ``MiB/sec`` both mean 2²⁰ bytes
(only the name was corrected), ``Gb/sec`` (``--report_gbits``) 10⁹ bits. Rows of ``-b`` are the sum of both
directions, and are marked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from kvbench.core.transfers.records import Case, TransferOp
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

FORMAT: Final = "output of perftest's ib_write_bw, ib_read_bw and ib_send_bw"
RANK: Final = 30
TOOL: Final = "perftest"

_HEADER: Final = re.compile(
    r"^\s*#bytes\s+#iterations\s+BW peak\[(?P<unit>MB|MiB|Gb)/sec\]\s+BW average\[(?P=unit)/sec\]"
)
_TITLE: Final = re.compile(r"^\s*(?:RDMA_)?(?P<name>Write|Read|Send)(?: Bidirectional)? BW Test\s*$")
_SETTING: Final = re.compile(r"(?P<name>[A-Z][A-Za-z_*. ]*?)\s*:\s*(?P<value>\S+(?:\[\w+\])?)")
_ROW: Final = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+[\d.]+")
_BOTH: Final = "both directions together"
"""Qualifier of rows of ``-b``: the sum of two opposite transfers."""
_GB: Final = {"MB": 2.0**20 / 1e9, "MiB": 2.0**20 / 1e9, "Gb": 1 / 8}
_OPS: Final[dict[str, TransferOp]] = {"Write": "write", "Read": "read", "Send": "write"}


def recognise(path: Path) -> bool:
    return any(_HEADER.match(line) for line in peek(path).splitlines())


def read(path: Path) -> Imported:
    """Return a row for each message size of each test."""
    reading = Imported()
    settings: dict[str, str] = {}
    test, unit, both = "", "", False
    for line, text in enumerate(read_lines(path), start=1):
        if found := _TITLE.match(text):
            test, both, unit, settings = found["name"], "Bidirectional" in text, "", {}
        elif found := _HEADER.match(text):
            unit = found["unit"]
        elif unit and _ROW.match(text):
            about = {"test": test, "unit": unit, "both_directions": both, "settings": dict(settings)}
            _take(text.split(), about, Origin(path.name, line, line, TOOL), reading)
        elif not unit:
            settings |= {match["name"].strip(): match["value"] for match in _SETTING.finditer(text)}
    return reading


def _take(cells: list[str], about: dict[str, Any], origin: Origin, reading: Imported) -> None:
    size, average = whole(cells[0]), number(cells[3])
    if not size or average is None or len(cells) < 5:
        reading.leave_out(
            origin.line,
            "is incomplete: size, iterations, peak, average and rate are required; left out",
            origin.file,
        )
        return
    settings, test = about["settings"], about["test"]
    device, link = settings.get("Device", ""), settings.get("Link type", "")
    case = Case(
        backend=f"ib_{test.lower()}_bw" if test else "perftest",
        protocol="rdma",
        op=_OPS.get(test, "write"),
        block_bytes=size,
        batch_size=1,
        threads=whole(settings.get("Number of qps")) or 1,
        nics=1 if device else 0,
        shape=_BOTH if about["both_directions"] else "",
    )
    also = {
        "bw_average": average, "bw_peak": number(cells[2]) or None, "unit": f"{about['unit']}/sec",
        "device": device,
        "message_rate_mpps": number(cells[4]), "link_type": link,
        "both_directions": about["both_directions"], "settings": settings,
    }  # fmt: skip
    reported = ReportedTransfer(
        case,
        average * _GB[about["unit"]],
        whole(cells[1]),
        transport="rdma",
        also=also,
        qualifiers=[case.shape] if case.shape else [],
    )
    reading.rows.append(transfer_row(origin, reported, ["library version", *([] if test else ["op"])]))
