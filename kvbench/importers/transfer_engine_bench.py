"""The log of Mooncake's ``transfer_engine_bench``: its last line has the throughput. ``Test completed:
duration 10.01, batch count 4895, throughput 1.25 GB/s``. The unit follows ``--report_unit`` (GB, GiB, Gb, MB,
…, per second); old versions print none and mean 10⁹ bytes. Block and batch size are only known if the log has
the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

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

FORMAT: Final = "log of Mooncake's transfer_engine_bench"
RANK: Final = 30
TOOL: Final = "transfer_engine_bench"

_DONE: Final = re.compile(
    r"Test completed: duration (?P<duration>[\d.]+)(?P<us>us)?, batch count (?P<count>\d+), "
    r"throughput (?P<speed>[\d.]+)(?:\s+(?P<unit>[KMG]i?[Bb])/s)?"
)
_FLAG: Final = re.compile(r"(?<!\S)--?(?P<name>[a-z_]+)[= ](?P<value>\"[^\"]*\"|\S+)")
_WORKER: Final = re.compile(r"transfer_engine_bench\.cpp:\d+\] Worker (?P<number>\d+) stopped!")
_TRANSPORT: Final = re.compile(r"using (?P<name>TCP|RDMA) transport|installTransport, type=(?P<type>\w+)")
_BYTES: Final = {  # mooncake-transfer-engine/example/transfer_engine_bench.cpp, RATE_UNIT_MP
    "GB": 1e9, "GiB": 2.0**30, "Gb": 1e9 / 8, "MB": 1e6, "MiB": 2.0**20, "Mb": 1e6 / 8,
    "KB": 1e3, "KiB": 2.0**10, "Kb": 1e3 / 8,
}  # fmt: skip


def recognise(path: Path) -> bool:
    text = peek(path)
    return _DONE.search(text) is not None or "transfer_engine_bench.cpp:" in text


def read(path: Path) -> Imported:
    """Return a row for each completed test."""
    reading = Imported()
    flags: dict[str, str] = {}
    workers, transport = 0, ""
    lines = read_lines(path)
    for line, text in enumerate(lines, start=1):
        if "transfer_engine_bench" in text and (found := _FLAG.findall(text)):
            flags = {name: value.strip('"') for name, value in found}
            workers, transport = 0, ""
        elif _WORKER.search(text):
            workers += 1
        elif named := _TRANSPORT.search(text):
            transport = (named["name"] or named["type"]).lower()
        elif done := _DONE.search(text):
            origin = Origin(path.name, line, line, TOOL)
            reading.rows.append(transfer_row(origin, *_reported(done, flags, workers, transport)))
            workers = 0
    if not reading.rows:
        what = 'the log of transfer_engine_bench has no line "Test completed": a target\'s log, or cut off'
        reading.leave_out(len(lines), what, path.name)
    return reading


def _reported(
    done: re.Match[str], flags: dict[str, str], workers: int, transport: str
) -> tuple[ReportedTransfer, list[str]]:
    block, batch = whole(flags.get("block_size")), whole(flags.get("batch_size"))
    speed = number(done["speed"]) or 0.0
    gb_per_s = speed if done["unit"] in (None, "GB") else speed * _BYTES[done["unit"]] / 1e9
    op: TransferOp = "write" if flags.get("operation") == "write" else "read"
    threads = whole(flags.get("threads")) or workers
    devices = [name for name in flags.get("device_name", "").split(",") if name]
    case = Case(
        backend="mooncake",
        protocol=flags.get("protocol") or transport or "unknown",
        op=op,
        block_bytes=block or 0,
        batch_size=batch or 0,
        threads=threads or 1,
        nics=len(devices),
    )
    missing = [
        name
        for name, known in (
            ("block_bytes", block),
            ("batch_size", batch),
            ("op", flags.get("operation")),
            ("threads", threads),
            ("protocol", flags.get("protocol") or transport),
            ("nics", devices),
            ("memory", None),
        )
        if not known
    ]
    duration = number(done["duration"])
    window_s = duration / 1e6 if duration is not None and done["us"] else duration
    also = {"throughput": speed, "unit": f"{done['unit']}/s" if done["unit"] else "", "flags": dict(flags)}
    reported = ReportedTransfer(
        case, gb_per_s, whole(done["count"]), window_s, transport=transport, also=also
    )
    return reported, [*missing, "library version"]
