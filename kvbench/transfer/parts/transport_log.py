"""Finds the KV's transport in a process's log, line by line. The lines are data (``transport_lines.yaml``).
UCX's tables of protocols prove one operation's transport between two kinds of memory; a connection's lanes
prove it only if all use one transport."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final

import yaml

from kvbench.core.gates.evidence import LoggedTransport

_TABLE: Final = Path(__file__).with_name("transport_lines.yaml")
_SELF: Final = "self"
_NO_WAY: Final = frozenset({"self", "cuda_copy", "rocm_copy", "ze_copy", "gdr_copy"})
"""Lanes inside one process; they accompany those to a peer."""
BLOCK_BYTES: Final = 65_536
"""Size of a KV block of one layer; real ones are up to a few times larger."""


@cache
def _lines() -> dict[str, re.Pattern[str]]:
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return {key: re.compile(words) for key, words in table.items()}


@dataclass
class _Table:
    """The table that one of the log's processes is printing."""

    between: str = ""
    found: LoggedTransport | None = None


@dataclass
class TransportReader:
    """Follows the lines of one log; a later statement of the same thing replaces an earlier one. ``process``:
    the log's process. ``operation``: the connector's KV operation, "read", "write" or ""."""

    process: str = ""
    operation: str = ""
    _tables: dict[tuple[str, ...], LoggedTransport] = field(default_factory=dict)
    _lanes: dict[tuple[str, str], LoggedTransport] = field(default_factory=dict)
    _engines: dict[str, LoggedTransport] = field(default_factory=dict)
    _open: dict[str, _Table] = field(default_factory=dict)

    def feed(self, lines: Iterable[str]) -> None:
        for line in lines:
            if "cfg#" in line or "| " in line:
                self._ucx(line)
            elif found := _lines()["mooncake_rdma"].search(line):
                device = f"/{found['rdma']}" if found["rdma"] else ""
                self._engine("rdma", f"rdma{device}", line)
            elif _lines()["mooncake_tcp"].search(line):
                self._engine("tcp", "tcp", line)

    def found(self) -> list[LoggedTransport]:
        """Return what proves the KV's transport. In order: tables of the connector's operation (GPU memory
        first), lanes of one transport, the transport that the library has started."""
        if tables := [table for table in self._tables.values() if table.operation == self.operation]:
            on_gpus = [table for table in tables if table.gpu]
            return on_gpus or tables
        lanes = [lane for lane in self._lanes.values() if len(_families(lane.transports)) == 1]
        if lanes and len(lanes) == len(self._lanes):
            return lanes
        # A library that has started both uses RDMA.
        engine = self._engines.get("rdma") or self._engines.get("tcp")
        return [] if engine is None else [engine]

    def _engine(self, kind: str, name: str, line: str) -> None:
        self._engines[kind] = LoggedTransport(self.process, (name,), line=line.strip())

    def _ucx(self, line: str) -> None:
        where = _lines()["ucx_process"].search(line)
        table = self._open.setdefault(where["process"] if where else "", _Table())
        if between := _lines()["ucx_between"].search(line):
            table.between, table.found = between["between"], None
        if lanes := _lines()["ucx_lanes"].search(line):
            self._connection(table.between, where["process"] if where else "", lanes["lanes"], line)
            return
        if done := _lines()["ucx_operation"].search(line):
            table.found = LoggedTransport(
                self.process,
                (),
                operation=done["operation"],
                between=table.between,
                local=done["local"],
                remote=done["remote"],
            )
        elif _lines()["ucx_other_operation"].search(line):
            table.found = None
        row = _lines()["ucx_row"].search(line)
        if row and table.found is not None and _bytes(row, "least") <= BLOCK_BYTES <= _bytes(row, "most"):
            self._row(replace(table.found, how=row["how"].removeprefix("(?) ")), row["config"], line)

    def _row(self, found: LoggedTransport, config: str, line: str) -> None:
        """Read the row of a table for sizes of KV blocks."""
        names = _names(config)
        if names and found.between != _SELF:
            key = (found.between, found.operation, found.local, found.remote)
            self._tables[key] = replace(found, transports=names, line=line.strip())

    def _connection(self, between: str, process: str, lanes: str, line: str) -> None:
        names = tuple(name for name in _names(lanes) if name.partition("/")[0] not in _NO_WAY)
        if names and between != _SELF:
            known = LoggedTransport(self.process, names, between=between, line=line.strip())
            self._lanes[between, process] = known


def _bytes(row: re.Match[str], end: str) -> float:
    """Return one end of a row's range of sizes, in UCX's format: ``2K``, ``9383``, ``inf``."""
    return float(row[end]) * 1024.0 ** " KMGT".index(row[f"{end}_unit"] or " ")


def _names(text: str) -> tuple[str, ...]:
    """Return transports with their devices, as ``rc_mlx5/mlx5_0:1``, without repetitions."""
    return tuple(dict.fromkeys(found["name"] for found in _lines()["ucx_name"].finditer(text)))


def _families(names: Sequence[str]) -> set[str]:
    return {name.partition("/")[0] for name in names}


def gpu_transport(lines: Sequence[str], operation: str) -> str:
    """Return the transport of one operation between GPUs, as ``ucx:cuda_ipc/cuda``; empty without a table. A
    connection's lanes are not enough: on an H200 with lanes ``tcp/lo cuda_ipc/cuda``, writes used cuda_ipc
    and reads TCP."""
    reader = TransportReader(operation=operation)
    reader.feed(lines)
    names = dict.fromkeys(name for entry in reader.found() if entry.gpu for name in entry.transports)
    return f"ucx:{' '.join(names)}" if names else ""
