"""A run's rows as Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.core.records import ROUTER_TIMES, SCHEMA_VERSION, RequestRecord


def write_parquet(path: Path, requests: Sequence[RequestRecord], metadata: Mapping[str, str]) -> None:
    """One row per request. Times as float64 seconds, ITLs as list<float32>; zstd."""
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
        columns[name] = pa.array(values, types.get(name))
    table = pa.table(columns).replace_schema_metadata({"kvbench_schema": str(SCHEMA_VERSION), **metadata})
    pq.write_table(table, path, compression="zstd")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Any rows of plain values as Parquet; the first row names the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: [row.get(name) for row in rows] for name in rows[0]})
    pq.write_table(
        table.replace_schema_metadata({"kvbench_schema": str(SCHEMA_VERSION)}), path, compression="zstd"
    )
