"""A run folder as tidy pandas DataFrames: one row per thing, one column per quantity, units in the names.

``kvbench.columns`` says what the columns mean. Of the request files only the needed Parquet columns are read;
columns that an older folder lacks are empty."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
import pandas as pd

from kvbench.core.canaries.answer_kinds import wrong_share_bound
from kvbench.core.canaries.tally import Tally
from kvbench.core.records import Cell, Method, RequestRecord, TrialRecord
from kvbench.core.transfers.model import fit_all
from kvbench.errors import InputError, StoreError
from kvbench.report.findings.findings import statements
from kvbench.report.findings.load_rows import load_rows
from kvbench.report.findings.notes import notes
from kvbench.report.tables.columns import MEANINGS
from kvbench.report.tables.result import stored_answer, summary_table
from kvbench.report.tables.transfers import flat_row
from kvbench.report.tables.trial_values import engine_word, reason_text, trial_values
from kvbench.report.tables.vllm_bench import about, serve_values
from kvbench.results.run import CellResult, RunFolder, parquet_path

if TYPE_CHECKING:
    import pyarrow as pa


_TRIAL_KEYS: Final = ("trial_id", "connector", "method", "request_rate", "verdict")
"""Columns that each request takes from its trial; ``input_len`` is that of the request."""
REQUEST_COLUMNS: Final = (
    *_TRIAL_KEYS, "request_id", "input_len", "output_len", "requested_output_len", "scheduled_s", "sent_s",
    "first_token_s", "last_token_s", "ttft_ms", "ttft_sent_ms", "tpot_ms", "e2el_ms", "ok", "error", "status",
)  # fmt: skip
"""The columns of ``requests``; on request also the other fields of a RequestRecord, such as ``itl_s``."""

# Column of a request → its stored columns and the function that computes it.
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
    """Return the trials that fit every condition. Raises InputError for an unknown id."""
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
    """Return one row per stored request of the trials ``of``.

    Raises InputError for an unknown column, StoreError for an unreadable file."""
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
    """Repeat each part's value for its rows; texts become categories, which take one or two bytes per row."""
    if all(isinstance(value, (int, float)) for value in values):
        return np.repeat(np.asarray(values), sizes)
    distinct = list(dict.fromkeys(values))
    codes = np.repeat([distinct.index(value) for value in values], sizes)
    return pd.Categorical.from_codes(cast("Sequence[int]", codes), pd.Index(distinct))


def telemetry(run: RunFolder, of: Sequence[TrialRecord]) -> pd.DataFrame:
    """Return one row per stored sample of the trials ``of``."""
    parts = [
        run.telemetry(trial.trial_id)
        for trial in of
        if parquet_path(run.path, "telemetry", trial.trial_id).is_file()
    ]
    return (
        pd.concat(parts, ignore_index=True)
        if parts
        else pd.DataFrame(columns=list(MEANINGS["telemetry"])[:5])
    )


Rows: TypeAlias = Iterable[Mapping[str, Any]]

REPORTED_AXES: Final = ("tp", "nics", "protocol")


def frame(rows: Rows, columns: Collection[str] = ()) -> pd.DataFrame:
    """Return rows as a DataFrame with at least ``columns``, in their order, even without rows."""
    table = pd.DataFrame(list(rows))
    missing = [name for name in columns if name not in table.columns]
    return table.assign(**dict.fromkeys(missing, None))[
        [*columns, *table.columns.difference(list(columns), sort=False)]
    ]


# --- what was searched and tried -------------------------------------------------------------------


def trials(run: RunFolder) -> pd.DataFrame:
    places = {row.key: row for row in load_rows(run, errors=False)}
    rows = [
        _trial(trial) | {"source": place.origin, **{name: place.axes.get(name) for name in REPORTED_AXES}}
        if (place := places.get(trial.trial_id))
        else _trial(trial)
        for trial in run.all_trials
    ]
    return frame(rows, list(_trial(TrialRecord("", Cell("", 0, 0), 0.0, 0, "measured", ""))))


def _trial(trial: TrialRecord) -> dict[str, Any]:
    return {
        **about(trial),
        "verdict": trial.verdict,
        "reason": reason_text(trial),
        "purpose": trial.purpose,
        "started_at": pd.to_datetime(trial.started_at, utc=True, errors="coerce")
        if trial.started_at
        else pd.NaT,
        "duration_s": trial.duration_s,
        "seed": trial.seed,
        "planned": trial.summary.get("planned"),
        "peak_waiting": trial.summary.get("peak_waiting"),
        "peak_in_flight": trial.summary.get("peak_in_flight"),
        **trial_values(trial),
        **{name: value for name, value in serve_values(trial).items() if name != "duration_s"},
        "transport": engine_word(trial, "transport"),
        "kv_source": engine_word(trial, "kv_source"),
        "findings": len(trial.findings),
        "labels": ";".join(trial.labels),
        "source": "",
        **dict.fromkeys(REPORTED_AXES),
    }


def summary(run: RunFolder) -> pd.DataFrame:
    """Return the report's main table: a row per connector and input length, or per case of a microbenchmark;
    without a search a row per trial with the columns of ``vllm bench serve``."""
    if run.manifest.get("kind") == "microbench":
        return transfers(run)
    rows = [row.flat() for row in summary_table(run)]
    if rows or not run.other_trials:
        return frame(rows, ("connector", "input_len", "output_len", "outcome", "max_request_rate"))
    return frame({**about(trial), **serve_values(trial)} for trial in run.other_trials)


def cells(run: RunFolder) -> pd.DataFrame:
    """Return one row per finished cell, method and SLO tier, with its limit."""
    results = [*run.cells, *run.other_cells]
    counts = pd.Series([(t.cell.key, t.method) for t in run.all_trials], dtype=object).value_counts()
    return frame((_cell(run, result, counts) for result in results), MEANINGS["cells"])


def _cell(run: RunFolder, result: CellResult, counts: pd.Series[int]) -> dict[str, Any]:
    answer = stored_answer(run, result)
    checked = result.equal_outputs or {}
    limit, tally = result.limit or {}, Tally.from_json(result.canaries)
    return {
        "connector": result.cell.connector,
        "input_len": result.cell.input_len,
        "output_len": result.cell.output_len,
        "method": result.method,
        "tier": result.tier,
        "status": result.status,
        "outcome": answer.outcome if answer else result.status,
        "max_request_rate": answer.max_request_rate if answer else None,
        "lower": answer.lower if answer else None,
        "upper": answer.upper if answer else None,
        "search": str((result.answer or {}).get("status") or ""),
        "confirmed_by": result.confirmed_by,
        "trials": int(counts.get((result.cell.key, result.method), 0)),
        "limit": str(limit.get("limit") or ""),
        "limit_evidence": str(limit.get("evidence") or ""),
        "outputs_checked": checked.get("checked"),
        "outputs_equal": checked.get("equal"),
        "canaries_checked": tally.checked or None,
        "canaries_wrong": tally.wrong if tally.checked else None,
        "canaries_wrong_below": wrong_share_bound(tally.wrong, tally.checked) if tally.checked else None,
        "reason": result.reason,
        "hint": result.hint,
    }


def findings(run: RunFolder) -> pd.DataFrame:
    """Return the gates' findings on trials, the rules' conclusions, and notes on the run."""
    rows = [
        {
            "kind": "trial",
            "level": finding.level,
            "gate": finding.gate,
            **{key: about(trial)[key] for key in ("trial_id", "connector", "input_len", "request_rate")},
            "message": finding.message,
            "advice": finding.advice,
        }
        for trial in run.all_trials
        for finding in trial.findings
    ]
    for record in run.transfer_records():
        rows += [
            {
                "kind": "transfer",
                "level": "warning",
                "gate": warning.kind,
                "trial_id": record.case.key,
                "connector": record.case.backend,
            }
            | {"message": warning.message, "advice": warning.advice}
            for warning in record.warnings
        ]
    rows += [
        {
            "kind": statement.kind,
            "level": statement.level,
            "gate": statement.rule,
            "message": statement.text,
            "advice": statement.advice,
        }
        for statement in statements(run)
    ]
    rows += [
        {"kind": "run", "level": "note", "gate": "note", "message": note.text, "advice": note.advice}
        for note in notes(run, summary_table(run), gates=False)
    ]
    return frame(rows, MEANINGS["findings"])


# --- transfers -------------------------------------------------------------------------------------


def transfers(run: RunFolder) -> pd.DataFrame:
    """Return one row per case of a microbenchmark, including skipped and failed ones."""
    records = run.transfer_records()
    return frame((flat_row(record, records) for record in records), list(MEANINGS["calls"])[:7])


def models(run: RunFolder) -> pd.DataFrame:
    """Return the fitted time formula of each way of moving bytes in a microbenchmark."""
    rows = [{**model.to_json(), "way": model.way} for model in fit_all(run.transfer_records())]
    return frame(rows, MEANINGS["models"])


def calls(run: RunFolder) -> pd.DataFrame:
    """Return one row per transfer of a microbenchmark, with its time from start to completion."""
    records = [record for record in run.transfer_records() if record.call_s]
    columns = list(MEANINGS["calls"])
    keys = [{**{name: getattr(r.case, name) for name in columns[:7]}, "case": r.case.key} for r in records]
    sizes = [len(record.call_s) for record in records]
    if not records:
        return pd.DataFrame(columns=columns)
    data: dict[str, Any] = {name: repeated([key[name] for key in keys], sizes) for name in columns[:8]}
    data["call"] = np.concatenate([np.arange(size) for size in sizes])
    data["call_s"] = np.concatenate([np.asarray(record.call_s, np.float64) for record in records])
    return pd.DataFrame(data, columns=columns)
