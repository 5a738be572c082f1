"""Requests and samples of a run as tidy pandas DataFrames.

Of the request files only the Parquet columns are read that the wanted columns are made of; a column that an
older folder does not have is there and empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
import pandas as pd

from kvbench.core.records import Method, RequestRecord, TrialRecord
from kvbench.errors import InputError, StoreError
from kvbench.report.tables.vllm_bench import about
from kvbench.results.run import RunFolder, parquet_path

if TYPE_CHECKING:
    import pyarrow as pa

_TRIAL_KEYS: Final = ("trial_id", "connector", "method", "request_rate", "verdict")
"""What each request has of its trial; ``input_len`` is the request's own."""
REQUEST_COLUMNS: Final = (
    *_TRIAL_KEYS, "request_id", "input_len", "output_len", "requested_output_len", "scheduled_s", "sent_s",
    "first_token_s", "last_token_s", "ttft_ms", "ttft_sent_ms", "tpot_ms", "e2el_ms", "ok", "error", "status",
)  # fmt: skip
"""The columns of ``requests``; on request also the other fields of a RequestRecord, such as ``itl_s``."""
TELEMETRY_COLUMNS: Final = ("trial_id", "t_s", "source", "metric", "value")

# Column of a request → the stored columns that it is made of, and how.
_Derivation: TypeAlias = tuple[tuple[str, ...], Callable[..., Any]]
_DERIVED: Final[Mapping[str, _Derivation]] = {
    "ttft_ms": (("first_token_s", "scheduled_s"), lambda first, planned: (first - planned) * 1e3),
    "ttft_sent_ms": (("first_token_s", "sent_s"), lambda first, sent: (first - sent) * 1e3),
    "e2el_ms": (("last_token_s", "scheduled_s"), lambda last, planned: (last - planned) * 1e3),
    "tpot_ms": (
        ("last_token_s", "first_token_s", "output_len", "untimed_tokens"),
        lambda last, first, tokens, untimed: (
            (last - first) / (tokens - untimed.fillna(1.0)).where(tokens > untimed.fillna(1.0)) * 1e3
        ),
    ),
    "ok": (("error",), lambda error: error == ""),
}
_STORED: Final = frozenset(item.name for item in fields(RequestRecord))
_WORDS: Final = frozenset({"request_id", "error", "error_detail", "stamps"})


def chosen_trials(
    run: RunFolder,
    ids: Sequence[str] | None = None,
    connector: str | None = None,
    input_len: int | None = None,
    method: Method | None = None,
) -> list[TrialRecord]:
    """The trials that fit every condition given. Raises InputError for an id that the run does not have."""
    known = {trial.trial_id for trial in run.all_trials}
    if unknown := [name for name in ids or () if name not in known]:
        raise InputError(
            f"the run has no trial called {unknown[0]!r}", hint="run.trials.trial_id has those that it has"
        )
    return [
        trial
        for trial in run.all_trials
        if (ids is None or trial.trial_id in ids)
        and connector in (None, trial.cell.connector)
        and input_len in (None, trial.cell.input_len)
        and method in (None, trial.method)
    ]


def requests(run: RunFolder, of: Sequence[TrialRecord], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """One row a request of the trials ``of`` that kept theirs.

    Raises InputError for a column that there is not, StoreError for a file that cannot be read.
    """
    import pyarrow as pa

    wanted = list(columns or REQUEST_COLUMNS)
    if unknown := [name for name in wanted if name not in {*_TRIAL_KEYS, *_DERIVED, *_STORED}]:
        raise InputError(
            f"requests have no column {unknown[0]!r}", hint="kvbench.columns('requests') lists them"
        )
    needed = {name for column in wanted for name in _DERIVED.get(column, ((column,), None))[0]} & _STORED
    kept = [trial for trial in of if parquet_path(run.path, "requests", trial.trial_id).is_file()]
    parts = [_request_columns(run, trial, sorted(needed)) for trial in kept]
    if not parts:
        return pd.DataFrame(columns=wanted)
    sizes = [part.num_rows for part in parts]
    stored = pa.concat_tables(parts, promote_options="permissive").to_pandas()
    values: dict[str, Any] = {}
    for name in wanted:
        if name in _TRIAL_KEYS:
            values[name] = repeated(
                [{**about(trial), "verdict": trial.verdict}[name] for trial in kept], sizes
            )
        elif name in _DERIVED:
            sources, make = _DERIVED[name]
            values[name] = make(*(stored[source] for source in sources))
        else:
            values[name] = stored[name]
    return pd.DataFrame(values, columns=wanted)


def _request_columns(run: RunFolder, trial: TrialRecord, needed: Sequence[str]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = parquet_path(run.path, "requests", trial.trial_id)
    try:
        with pq.ParquetFile(path) as file:
            there = [name for name in needed if name in file.schema_arrow.names]
            table = file.read(columns=there) if there else pa.table({"": pa.nulls(file.metadata.num_rows)})
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    for name in needed:
        if name not in there:
            kind = pa.string() if name in _WORDS else pa.float64()
            table = table.append_column(name, pa.nulls(table.num_rows, kind))
    return table


def repeated(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """A value for each row of its part; words as categories, which take one byte or two a row."""
    if all(isinstance(value, (int, float)) for value in values):
        return np.repeat(np.asarray(values), sizes)
    distinct = list(dict.fromkeys(values))
    codes = np.repeat([distinct.index(value) for value in values], sizes)
    return pd.Categorical.from_codes(cast("Sequence[int]", codes), pd.Index(distinct))


def telemetry(run: RunFolder, of: Sequence[TrialRecord]) -> pd.DataFrame:
    """One row a sample of the trials ``of`` that kept theirs."""
    parts = [
        run.telemetry(trial.trial_id)
        for trial in of
        if parquet_path(run.path, "telemetry", trial.trial_id).is_file()
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(TELEMETRY_COLUMNS))
