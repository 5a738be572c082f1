"""Parquet files of a run: a trial's requests, and a microbenchmark's ``transfers.parquet``.

A transfer's case, figures and call times are flat columns; nested values are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.records import ROUTER_TIMES, SCHEMA_VERSION, RequestRecord
from kvbench.core.transfers.records import TRANSFER_SCHEMA, Case, TransferRecord
from kvbench.errors import NewerSchemaError, StoreError
from kvbench.files import Announcer, replaced
from kvbench.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa


def write_parquet(path: Path, requests: Sequence[RequestRecord], metadata: Mapping[str, str]) -> None:
    """Write one row per request. Times are float64 seconds, ITLs list<float32>; zstd."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "request_id": pa.string(),
        "itl_s": pa.list_(pa.float32()),
        "error": pa.string(),
        "error_detail": pa.string(),
        "stamps": pa.string(),
        "sent_kernel_s": pa.float64(),
        **dict.fromkeys(("scheduled_s", "sent_s", "first_token_s", "last_token_s"), pa.float64()),
        **dict.fromkeys(ROUTER_TIMES, pa.float64()),
        **dict.fromkeys(
            ("input_len", "requested_output_len", "output_len", "status", "empty_events"), pa.int32()
        ),
        "prompt_tokens": pa.int32(),
        **dict.fromkeys(("text_crc", "text_bytes"), pa.int64()),
        "first_event_s": pa.float64(),
        **dict.fromkeys(("canary", "session", "turn", "cached_tokens"), pa.int32()),
        "session_s": pa.float64(),
        "text": pa.string(),
    }
    rows = [request.to_json() for request in requests]
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if types.get(name) == pa.string():
            values = [value.encode("utf-8", "backslashreplace").decode() for value in values]
        columns[name] = _array(values, types.get(name))
    table = pa.table(columns).replace_schema_metadata({"kvbench_schema": str(SCHEMA_VERSION), **metadata})
    pq.write_table(table, path, compression="zstd")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write plain rows as Parquet; the first row names the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: _array([row.get(name) for row in rows]) for name in rows[0]})
    pq.write_table(
        table.replace_schema_metadata({"kvbench_schema": str(SCHEMA_VERSION)}), path, compression="zstd"
    )


def _array(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    """Return a column, by default of its values' type. It is built from buffers, because ``pa.array`` imports
    pandas (most of a second of CPU time)."""
    import numpy as np
    import pyarrow as pa

    found = {type(value) for value in values} - {type(None)}
    if kind is None and not found:
        return pa.nulls(len(values))
    if kind is None:
        kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
        kind = kinds.get(float if found == {int, float} else found.pop() if len(found) == 1 else object)
    known = np.array([value is not None for value in values], bool)
    validity = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
    if kind is not None and pa.types.is_string(kind):
        texts = [b"" if value is None else value.encode() for value in values]
        parts = [validity, _offsets(texts), pa.py_buffer(b"".join(texts))]
        return pa.Array.from_buffers(kind, len(values), parts)
    if kind is not None and pa.types.is_list(kind):
        lists = [np.asarray(() if value is None else value, np.float32) for value in values]
        gaps = np.concatenate(lists)
        child = pa.Array.from_buffers(pa.float32(), len(gaps), [None, pa.py_buffer(gaps)])
        return pa.Array.from_buffers(kind, len(values), [validity, _offsets(lists)], children=[child])
    dtype = _DTYPES.get(str(kind))
    if kind is None or dtype is None:
        return pa.array(values, kind)
    data = np.array([0 if value is None else value for value in values], dtype)
    packed = np.packbits(data, bitorder="little") if dtype == "?" else data
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(packed)])


def _offsets(parts: Sequence[Sized]) -> pa.Buffer:
    """Return the start of each part, and the end of the last one."""
    import numpy as np
    import pyarrow as pa

    return pa.py_buffer(np.cumsum([0, *map(len, parts)], dtype=np.int32))


_DTYPES: Final = {"bool": "?", "double": "f8", "int64": "i8", "int32": "i4"}
"""numpy's names of the types whose values lie side by side."""


TRANSFERS: Final = "transfers.parquet"
_CASE_FIELDS: Final = tuple(item.name for item in fields(Case))
_JSON: Final = ("nic_bytes", "warnings")
_FLOATS: Final = frozenset(
    {"window_s", "gb_per_s", "open_s", "register_s", "connect_s", "prepare_s"}
    | {"initiator_cpu_s", "target_cpu_s", "line_rate_gb_per_s", "load_average"}
)
_INTEGERS: Final = frozenset(
    {"block_bytes", "batch_size", "threads", "nics", "initiators", "targets", "regions"}
    | {"nbytes", "logical_bytes", "descriptors", "calls", "warmup_calls"}
)
_SCHEMA_KEY: Final = b"kvbench_transfer_schema"


class TransferTable:
    """A microbenchmark's rows; the file is replaced as a whole after each one."""

    def __init__(self, folder: Path, announced: Announcer) -> None:
        self._path = folder / TRANSFERS
        self._announced = announced
        self._parts: list[pa.Table] = []

    def add(self, record: TransferRecord) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._parts.append(_table([record]))
        whole = pa.concat_tables(self._parts)
        with replaced(self._path, self._announced) as temporary:
            pq.write_table(whole, temporary, compression="zstd", row_group_size=64)


def read_transfers(folder: Path) -> list[TransferRecord]:
    """Return the rows of a run folder, or none. Raises StoreError for an unreadable file."""
    path = folder / TRANSFERS
    if not path.is_file():
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    schema = int((table.schema.metadata or {}).get(_SCHEMA_KEY, b"0"))
    if schema > TRANSFER_SCHEMA:
        raise NewerSchemaError(
            f"{path} has rows of schema {schema}; this is kvbench {__version__}, which reads up to "
            f"{TRANSFER_SCHEMA}",
            hint="upgrade kvbench",
        )
    try:
        return [_record(row) for row in table.to_pylist()]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} does not have the expected columns ({error})") from error


def _record(row: Mapping[str, Any]) -> TransferRecord:
    data = dict(row)
    case = {name: data.pop(name) for name in _CASE_FIELDS}
    for name in _JSON:
        data[name] = json.loads(data[name])
    return TransferRecord.from_json({**data, "case": case})


def _table(records: Sequence[TransferRecord]) -> pa.Table:
    import pyarrow as pa

    rows = []
    for record in records:
        values = {item.name: getattr(record, item.name) for item in fields(TransferRecord)}
        row = asdict(values.pop("case")) | values
        row["warnings"] = json.dumps([asdict(warning) for warning in record.warnings])
        row["nic_bytes"] = json.dumps(record.nic_bytes)
        row["error"] = _clean(record.error)
        row["log"] = [_clean(line) for line in record.log]
        rows.append(row)
    columns = {name: pa.array([row[name] for row in rows], _type_of(name)) for name in rows[0]}
    return pa.table(columns).replace_schema_metadata({_SCHEMA_KEY: str(TRANSFER_SCHEMA).encode()})


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _type_of(name: str) -> pa.DataType:
    import pyarrow as pa

    if name in _FLOATS:
        return pa.float64()
    if name in _INTEGERS:
        return pa.int64()
    if name in ("verified", "scattered", "merged"):
        return pa.bool_()
    # 32 bits hold a call's time to one part in ten million, and halve the file.
    lists = {"call_s": pa.float32(), "log": pa.string(), "nics_asked": pa.string()}
    return pa.list_(lists[name]) if name in lists else pa.string()
