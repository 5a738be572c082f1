"""Who sends to whom how fast: a microbenchmark's rows between several pairs of hosts, as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvbench.core.transfers.records import TransferRecord, pairs_of
from kvbench.report.tables.numbers import MISSING, number
from kvbench.report.tables.table import Column, Table
from kvbench.report.tables.transfers import way_text

CAPTION: Final = (
    "GB/s from the row's host to the column's, the best of all sizes; a write is started by the row's host, "
    "a read by the column's"
)
FAILED: Final = "FAILED"
_MOVES_NOTHING: Final = "null"


def pair_matrices(records: Sequence[TransferRecord]) -> list[Table]:
    """A matrix for each way and op, a row for each host that sends.

    None where the rows are of one pair, or of no named hosts.
    """
    if len(pairs_of(records)) < 2:
        return []
    named = [record for record in records if record.pair and record.case.backend != _MOVES_NOTHING]
    hosts = tuple(dict.fromkeys(name for each in named for name in (each.initiator_host, each.target_host)))
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
        found.append(Table(" · ".join(parts), columns, _cells(hosts, members), ruled=False))
    return found


def _cells(hosts: Sequence[str], records: Sequence[TransferRecord]) -> list[list[str]]:
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
