"""Rows of a microbenchmark for display (with footnotes) and for files. Several host pairs are shown as
matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from kvbench.core.transfers.records import Case, TransferRecord, TransferWarning, pairs_of
from kvbench.core.transfers.stats import figures
from kvbench.core.units import joined, size_text
from kvbench.report.tables.table import MISSING, Column, Table, number

HEADER: Final = (
    "op",
    "blocks",
    "descr",
    "GB/s",
    "line",
    "tcp",
    "mem",
    "p50",
    "p99",
    "CPU s/GB",
    "data",
)
_RANKS: Final = {"descr": 6, "CPU s/GB": 5, "mem": 4, "tcp": 3, "line": 2, "p99": 1}
LEGEND: Final = (
    "line, tcp, mem: per cent of the NICs' line rate, plain TCP and a memory copy (same transfer, "
    "same run); descr: descriptors; CPU s/GB: both sides; data: whether all bytes are correct"
)


@dataclass(frozen=True)
class Cases:
    """A microbenchmark's cases: table grouped by configuration, footnotes, failures, excluded cases."""

    table: Table
    footnotes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def build_cases(records: Sequence[TransferRecord]) -> Cases:
    """Build the cases of a run. A note shared by all rows is not a footnote."""
    measured = [record for record in records if record.status != "skipped"]
    merged = joined(_note(warning) for record in measured for warning in record.warnings)
    shared = _shared([record for record in measured if record.status == "ok"], merged)
    notes: dict[str, int] = {}
    groups: dict[int, str] = {}
    cells: list[list[str]] = []
    marks: list[tuple[int, ...]] = []
    for _, members in groupby(measured, key=lambda record: (record.pair, *_way(record.case))):
        group = list(members)
        groups[len(cells)] = _title(group)
        for record in group:
            numbers = [notes.setdefault(note, len(notes) + 1) for note in _row_notes(record, merged, shared)]
            cells.append(_cells(record, records))
            marks.append(tuple(dict.fromkeys(numbers)))
    footnotes = [f"{number}. {note}" for note, number in notes.items()]
    every = [f"every row: {note}" for note in shared]
    last = len(HEADER) - 1
    columns = [
        Column("", title, align="left" if number in (0, 1, last) else "right", rank=_RANKS.get(title, 0))
        for number, title in enumerate(HEADER)
    ]
    table = Table("", columns, cells, groups=groups, marks=marks, ruled=False)
    return Cases(
        table, (*every, *footnotes), tuple(_errors(measured)), tuple(dict.fromkeys(_skipped(records)))
    )


def _errors(records: Sequence[TransferRecord]) -> list[str]:
    """Return each error cause once per configuration, with the library's last line."""
    found: dict[tuple[str, str, str], list[TransferRecord]] = {}
    for record in records:
        if record.status == "error":
            found.setdefault((record.pair, way_text(record.case), record.error), []).append(record)
    lines = []
    for (pair, _, error), members in found.items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        last = f" (library: {members[0].log[-1].strip()})" if members[0].log else ""
        where = f"{pair}: " if pair else ""
        lines.append(f"{where}{case_text(members[0].case)}{more}: {error}{last}")
    return lines


def _row_notes(record: TransferRecord, merged: Mapping[str, str], left_out: Sequence[str] = ()) -> list[str]:
    """Return a row's notes in their merged wording."""
    notes = dict.fromkeys(merged[_note(warning)] for warning in record.warnings)
    return [note for note in notes if note not in left_out]


def _shared(records: Sequence[TransferRecord], merged: Mapping[str, str]) -> list[str]:
    notes_by_row = [_row_notes(record, merged) for record in records]
    if len(notes_by_row) < 2:
        return []
    return [note for note in notes_by_row[0] if all(note in notes for notes in notes_by_row)]


def _note(warning: TransferWarning) -> str:
    return warning.message + (f" → {warning.advice}" if warning.advice else "")


def _skipped(records: Iterable[TransferRecord]) -> Iterator[str]:
    for record in records:
        if record.status == "skipped":
            yield f"{way_text(record.case)}: not run here: {record.error}"


def _way(case: Case) -> tuple[Any, ...]:
    return (case.backend, case.protocol, case.nics, case.initiators, case.targets, case.memory, case.shape)


def way_text(case: Case) -> str:
    """Return ``nixl over tcp``, or the bare name of a backend without NICs and with one protocol."""
    return (
        case.backend
        if case.protocol in ("", case.backend, "memory", "none")
        else f"{case.backend} over {case.protocol}"
    )


def case_text(case: Case) -> str:
    """Return ``nixl over tcp, write 64 KiB × 32, 4 NICs``."""
    parts = [f"{way_text(case)}, {case.op} {blocks_text(case)}"]
    parts += [nics_text(case.nics)] if case.nics else []
    parts += [f"{case.initiators} to {case.targets}"] if (case.initiators, case.targets) != (1, 1) else []
    return ", ".join(parts)


def nics_text(count: int) -> str:
    return f"{count} NIC{'s' if count != 1 else ''}"


def blocks_text(case: Case) -> str:
    """Return ``64 KiB × 32``; with regions ``2 KiB × 96 × 2048``; with threads ``… at 4``."""
    regions = f" × {case.regions}" if case.regions > 1 else ""
    threads = f" at {case.threads}" if case.threads > 1 else ""
    return f"{size_text(case.block_bytes)}{regions} × {case.batch_size}{threads}"


def _title(records: Sequence[TransferRecord]) -> str:
    case = records[0].case
    parts = [records[0].pair] if records[0].pair else []
    parts += [way_text(case)]
    parts += [nics_text(case.nics)] if case.nics else []
    parts += [f"{case.initiators} to {case.targets}"] if case.initiators + case.targets > 2 else []
    parts += [f"{case.memory} memory"] if case.memory != "host" else []
    libraries = dict.fromkeys(record.library for record in records if record.library)
    parts += [name for name in libraries if not name.startswith("kvbench")]
    ran = dict.fromkeys(record.transport for record in records if record.transport)
    parts += [f"ran {', '.join(ran)}"] if ran else []
    parts += [case.shape] if case.shape else []
    return " · ".join(parts)


def _cells(record: TransferRecord, run: Sequence[TransferRecord]) -> list[str]:
    case = record.case
    if record.status == "error":
        # The whole cause is below the table.
        return [case.op, blocks_text(case), *[MISSING] * (len(HEADER) - 3), "FAILED"]
    measured = figures(record, run)
    return [
        case.op,
        blocks_text(case),
        f"{record.descriptors}" if record.descriptors else MISSING,
        number(measured.gb_per_s),
        *(_percent(share) for share in (measured.of_line_rate, measured.of_tcp, measured.of_memcpy)),
        time_text(measured.times.p50),
        time_text(measured.times.p99),
        number(measured.cpu_s_per_gb),
        {True: "ok", False: "WRONG", None: MISSING}[record.verified],
    ]


def time_text(time_s: float | None) -> str:
    """Return ``98.0 ns``, ``24.1 µs``, ``1.34 ms``, ``2.82 s``."""
    if time_s is None:
        return MISSING
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if time_s >= 0.9995 * size:
            return f"{number(time_s / size)} {unit}"
    return f"{number(time_s * 1e9)} ns"


def _percent(share: float | None) -> str:
    if share is None:
        return MISSING
    return f"{share * 100:.0f}" if share >= 0.01 else "<1"


# --- rows for files --------------------------------------------------------------------------------


CASE_KEYS: Final = (
    "backend", "protocol", "op", "block_bytes", "batch_size", "regions", "threads", "nics", "initiators",
    "targets", "memory", "scattered", "merged", "shape",
)  # fmt: skip
"""Fields of a case in files."""
_RECORD_KEYS: Final = (
    "calls", "window_s", "nbytes", "logical_bytes", "descriptors", "open_s", "register_s", "connect_s",
    "prepare_s", "initiator_cpu_s", "target_cpu_s",
)  # fmt: skip


def flat_row(record: TransferRecord, run: Sequence[TransferRecord]) -> dict[str, Any]:
    measured = figures(record, run)
    times = measured.times
    return {
        **{key: getattr(record.case, key) for key in CASE_KEYS},
        "initiator_host": record.initiator_host,
        "target_host": record.target_host,
        "status": record.status,
        "error": record.error,
        "gb_per_s": measured.gb_per_s,
        "of_line_rate": measured.of_line_rate,
        "of_tcp": measured.of_tcp,
        "of_memcpy": measured.of_memcpy,
        "line_rate_gb_per_s": record.line_rate_gb_per_s,
        "call_s_mean": times.mean,
        "call_s_min": times.minimum,
        "call_s_p50": times.p50,
        "call_s_p90": times.p90,
        "call_s_p99": times.p99,
        "call_s_p999": times.p999,
        "call_s_max": times.maximum,
        **{key: getattr(record, key) for key in _RECORD_KEYS},
        "cpu_s_per_gb": measured.cpu_s_per_gb,
        "transport": record.transport,
        "library": record.library,
        "verified": record.verified,
        "lab": record.lab,
        "load_average": record.load_average,
        "nic_bytes": "; ".join(f"{name}={count}" for name, count in record.nic_bytes.items()),
        "warnings": "; ".join(warning.kind for warning in record.warnings),
        "started_at": record.started_at,
    }


CAPTION: Final = (
    "GB/s from the row's host to the column's host, best of all sizes; the row's host starts a write, "
    "the column's host a read"
)
FAILED: Final = "FAILED"
_MOVES_NOTHING: Final = "null"


def pair_matrices(records: Sequence[TransferRecord]) -> list[Table]:
    """Return a matrix per configuration and op with a row per sending host; empty for one or unnamed
    pairs."""
    if len(pairs_of(records)) < 2:
        return []
    named = [record for record in records if record.pair and record.case.backend != _MOVES_NOTHING]
    hosts = tuple(dict.fromkeys(name for row in named for name in (row.initiator_host, row.target_host)))
    groups: dict[tuple[str, str, int, str], list[TransferRecord]] = {}
    for record in named:
        case = record.case
        groups.setdefault((way_text(case), case.op, case.nics, case.memory), []).append(record)
    found = []
    for (way, op, nics, memory), members in groups.items():
        parts = [f"{way} {op}", *([f"{nics} NIC{'s' * (nics != 1)}"] if nics else [])]
        parts += [f"{memory} memory"] if memory != "host" else []
        columns = [
            Column("", "from \\ to", align="left"),
            *(Column("", host, align="right") for host in hosts),
        ]
        found.append(Table(" · ".join(parts), columns, _host_pairs_cells(hosts, members), ruled=False))
    return found


def _host_pairs_cells(hosts: Sequence[str], records: Sequence[TransferRecord]) -> list[list[str]]:
    of_pair: dict[tuple[str, str], list[TransferRecord]] = {}
    for record in records:
        way = (record.initiator_host, record.target_host)
        of_pair.setdefault(way if record.case.op == "write" else (way[1], way[0]), []).append(record)
    return [[one, *(_cell(of_pair.get((one, other), [])) for other in hosts)] for one in hosts]


def _cell(records: Sequence[TransferRecord]) -> str:
    rates = [record.gb_per_s for record in records if record.status == "ok" and record.gb_per_s]
    if rates:
        return number(max(rates))
    return FAILED if any(record.status == "error" for record in records) else MISSING
