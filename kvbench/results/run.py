"""Reading run folders in any state: running, complete, or cut off by a kill; finding them by name.

A folder with a newer schema (a whole number in ``manifest.json``) is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from kvbench.core.foreign_text import visible, visible_values
from kvbench.core.records import (
    MAIN_METHODS,
    SCHEMA_VERSION,
    Cell,
    Method,
    RequestRecord,
    TrialRecord,
    require_types,
)
from kvbench.core.scenario.yaml_lines import MAX_CHARS
from kvbench.core.transfers.records import TransferRecord
from kvbench.errors import InputError, KvbenchError, NewerSchemaError, StoreError
from kvbench.files import open_read, read_lines, read_object, similar_files
from kvbench.results.parquet import TRANSFERS, read_transfers
from kvbench.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from kvbench.core.search.trial_requests import TrialRequests


FIRST_SCHEMA: Final = 1
"""The oldest schema that a release wrote."""


def schema_of(manifest: Mapping[str, Any], path: Path) -> int:
    """Return the schema of a folder, by its manifest at ``path``. Raises StoreError, NewerSchemaError."""
    schema = manifest.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < FIRST_SCHEMA:
        raise StoreError(f"{path} names no schema that was ever written: {schema!r}")
    if schema > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{path.parent} was written by kvbench {manifest.get('kvbench', 'of unknown version')} "
            f"with schema {schema}; this is kvbench {__version__}, which reads up to {SCHEMA_VERSION}",
            hint="upgrade kvbench",
        )
    return schema


RunStatus = Literal["running", "complete", "failed", "interrupted"]
CellStatus = Literal["done", "refused", "failed", "skipped"]

MANIFEST: Final = "manifest.json"
TRIALS: Final = "trials.jsonl"
CELLS: Final = "cells.jsonl"
LIVE: Final = ".live.json"
"""What is being done at this moment; there only while something is measured, and no part of the record."""
OUTPUTS: Final = "outputs.jsonl"
CANARIES: Final = "canaries.jsonl"

_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_LISTS: Final[Mapping[str, type]] = {
    "sessions": dict,
    "skipped": dict,
    "labels": str,
    "hosts": str,
    "argv": str,
}
"""Lists of the manifest, and what they hold."""
T = TypeVar("T")


@dataclass(frozen=True)
class CellResult:
    """What came of one cell.

    ``answer`` is the search's answer as JSON, None when there was no search. ``equal_outputs`` is
    ``{"checked": n, "equal": n}``: greedy outputs compared with the aggregated server's; of a server that was
    asked again also ``within_noise`` and ``power`` (sweep/trial/output_check.py). ``method``: how it
    was measured. ``tier``: the SLO tier that this answers; "" where there is one SLO only.
    """

    cell: Cell
    status: CellStatus
    answer: dict[str, Any] | None = None
    equal_outputs: dict[str, Any] | None = None
    reason: str = ""
    hint: str = ""
    confirmed_by: str | None = None
    method: Method = "sustained"
    tier: str = ""
    main: bool = True
    """Whether its answer belongs into the main column: not that of another method, nor of a second tier."""
    canaries: dict[str, Any] | None = None
    """Answers under load whose right text was known: how many were checked and wrong (core/canaries/tally);
    None where there were none."""
    limit: dict[str, Any] | None = None
    """Which limit binds above the answer, as ``core.metrics.limit`` names it; None where not known."""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {"schema": SCHEMA_VERSION, **data.pop("extra"), **data}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> CellResult:
        known = {item.name for item in fields(cls)} - {"extra"}
        data = {key: row[key] for key in known & row.keys()}
        data["cell"] = Cell(**data["cell"])
        extra = {key: value for key, value in row.items() if key not in known and key != "schema"}
        result = cls(**data, extra=extra)
        require_types(result)
        require_types(result.cell)
        return result


@dataclass
class RunFolder:
    """A run folder as read. ``schema`` is the one it was written with; ``warnings`` say what is not whole.

    ``trials`` and ``cells`` are those of the main column: the searches for a sustained rate, single rates and
    replays. What was measured otherwise (burst, listed rates, one equal rate, further SLO tiers) is kept
    apart in ``other_trials`` and ``other_cells``, so that nothing can mix them up.
    """

    path: Path
    schema: int
    manifest: dict[str, Any]
    scenario_text: str
    plan: dict[str, Any]
    environment: dict[str, Any]
    trials: list[TrialRecord]
    cells: list[CellResult]
    warnings: list[str]
    other_trials: list[TrialRecord] = field(default_factory=list)
    other_cells: list[CellResult] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """Greedy outputs by deployment and input length: what the others are compared with."""
    canaries: list[dict[str, Any]] = field(default_factory=list)
    """Right answers of canaries by deployment and lengths, and answers that were asked for beside loads."""

    @property
    def all_trials(self) -> list[TrialRecord]:
        return [*self.trials, *self.other_trials]

    @property
    def run_id(self) -> str:
        return str(self.manifest.get("run_id") or self.path.name)

    @property
    def labels(self) -> list[str]:
        return [str(label) for label in self.manifest.get("labels", [])]

    @property
    def skipped(self) -> list[dict[str, str]]:
        """Connectors that were not measured: connector, reason, hint."""
        return list(self.manifest.get("skipped", []))

    def trials_of(self, cell: Cell) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.cell == cell]

    def requests(self, trial_id: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The trial's requests, one row each, columns as in RequestRecord; only ``columns`` if given."""
        return self._frame("requests", trial_id, columns)

    def columns(
        self, kind: Literal["requests", "telemetry"], trial_id: str, names: Sequence[str]
    ) -> dict[str, NDArray[Any]]:
        """Columns of the trial's requests or samples, each an array: texts, or floats and NaN for unknown.

        The same as ``requests`` and ``telemetry``, without the time that pandas takes to be there. Raises
        StoreError where the file or a column is missing.
        """
        return _columns(self._parquet(kind, trial_id), names, whole=True)

    def request_records(self, trial_id: str) -> list[RequestRecord]:
        """The trial's requests as records (``itl_s`` with the precision of a 32-bit float)."""
        import pyarrow.parquet as pq

        path = self._parquet("requests", trial_id)
        with _readable(path):
            return [RequestRecord.from_json(row) for row in pq.read_table(path).to_pylist()]

    def telemetry(self, trial_id: str) -> pd.DataFrame:
        """Samples taken while the trial ran: trial_id, t_s, source, metric, value."""
        return self._frame("telemetry", trial_id)

    def transfer_records(self) -> list[TransferRecord]:
        """The rows of a microbenchmark, in the order of measuring; none in a run of another kind."""
        return read_transfers(self.path)

    def _frame(
        self, kind: Literal["requests", "telemetry"], trial_id: str, columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        import pandas as pd

        path = self._parquet(kind, trial_id)
        with _readable(path):
            return pd.read_parquet(path, columns=list(columns) if columns else None)

    def _parquet(self, kind: Literal["requests", "telemetry"], trial_id: str) -> Path:
        path = parquet_path(self.path, kind, trial_id)
        if not path.is_file() or path.is_symlink():
            raise StoreError(f"{path} is not there", hint="the trial kept none, or the file was removed")
        return path


def _array(column: Any) -> NDArray[Any]:
    """A column of Arrow's. Its own ``to_numpy`` would import pandas (pyarrow 25)."""
    import numpy as np
    import pyarrow as pa

    whole = column.combine_chunks()
    if not (pa.types.is_floating(whole.type) or pa.types.is_integer(whole.type)):
        return np.array(whole.to_pylist(), dtype=object)
    whole = whole.cast(pa.float64())
    valid, data = whole.buffers()
    values = np.frombuffer(data, np.float64, len(whole), whole.offset * 8)
    if not whole.null_count:
        return values
    known = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[whole.offset :][: len(whole)]
    return np.where(known == 1, values, np.nan)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What a library says of a file that is cut off or damaged becomes a StoreError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # Arrow's own are among them
        raise StoreError(
            f"{path} cannot be read: {error}", hint="it is cut off or damaged; the other trials can be read"
        ) from error


def load_run(path: Path | str) -> RunFolder:
    """Reads a run folder, whatever state it is in; what is not whole becomes a warning.

    Errors: NewerSchemaError for a folder of a newer kvbench; StoreError when it is no run folder.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        inside = sorted(each.parent.name for each in folder.glob(f"*/{MANIFEST}"))
        hint = "give one of the folders that lie in results/"
        if inside:
            hint = f"it holds {len(inside)} run folder(s), the last by name is {folder / inside[-1]}"
        raise StoreError(f"{folder} is not a run folder: it has no {MANIFEST}", hint=hint)
    warnings: list[str] = []
    manifest = read_object(folder / MANIFEST, None)
    schema = schema_of(manifest, folder / MANIFEST)
    manifest = visible_values(manifest)
    plan = visible_values(read_object(folder / "plan.json", warnings))
    environment = visible_values(read_object(folder / "environment.json", warnings))
    trial_rows = [visible_values(row) for row in read_lines(folder / TRIALS, warnings)]
    cell_rows = [visible_values(row) for row in read_lines(folder / CELLS, warnings)]
    scenario = folder / "scenario.yaml"
    outputs = read_lines(folder / OUTPUTS, warnings) if (folder / OUTPUTS).is_file() else []
    if manifest.get("status") == "running" and not writer_is_alive(folder):
        manifest["status"] = "interrupted"
        warnings.append("the run was cut off: its process is gone and had not written how it ended")
    _require_shapes(manifest, warnings)
    trials = _parsed(trial_rows, TrialRecord.from_json, TRIALS, warnings)
    cells = _last_of_each(_parsed(cell_rows, CellResult.from_json, CELLS, warnings))
    return RunFolder(
        path=folder,
        schema=schema,
        manifest=manifest,
        scenario_text=visible(_text(scenario)) if scenario.is_file() else "",
        plan=plan,
        environment=environment,
        trials=[trial for trial in trials if trial.method in MAIN_METHODS],
        cells=[result for result in cells if result.main],
        warnings=warnings,
        other_trials=[trial for trial in trials if trial.method not in MAIN_METHODS],
        other_cells=[result for result in cells if not result.main],
        outputs=outputs,
        canaries=read_lines(folder / CANARIES, warnings) if (folder / CANARIES).is_file() else [],
    )


def _require_shapes(manifest: dict[str, Any], warnings: list[str]) -> None:
    """Lists in the manifest that are none, or not of objects, are emptied, and that is said."""
    for name, of in _LISTS.items():
        value = manifest.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(each, of) for each in value)
        ):
            warnings.append(f"{MANIFEST}: {name} is {str(value)[:40]!r}, which is left out")
            manifest[name] = []
    for name in ("asked", "trace"):
        if not isinstance(manifest.get(name), (dict, type(None))):
            warnings.append(f"{MANIFEST}: {name} is {str(manifest[name])[:40]!r}, which is left out")
            manifest[name] = None


def _text(path: Path) -> str:
    """A scenario's text, as much of it as a scenario may have; empty if it cannot be read."""
    try:
        with open(open_read(path), "rb") as file:
            return file.read(4 * MAX_CHARS).decode("utf-8", "replace")
    except OSError:
        return ""


def writer_is_alive(folder: Path) -> bool:
    """Whether some process still has the folder open for writing; True when that is not known."""
    try:
        handle = open_read(folder / TRIALS)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def requests_to_replay(folder: Path, trial: TrialRecord, burstiness: float) -> TrialRequests | None:
    """The requests of a stored trial; None where they are not stored, or not as a replay needs them."""
    from kvbench.core.search.trial_requests import COLUMNS, TrialRequests

    path = parquet_path(folder, "requests", trial.trial_id)
    if not path.is_file() or path.is_symlink():
        return None
    columns = _columns(path, COLUMNS, whole=False)
    if len(columns) < len(COLUMNS):
        return None
    stopped_s = (trial.summary.get("live") or {}).get("at_s", trial.duration_s)
    return TrialRequests.of(columns, trial.request_rate, trial.duration_s, stopped_s, burstiness)


def _columns(path: Path, names: Sequence[str], *, whole: bool) -> dict[str, NDArray[Any]]:
    """Columns of a file, each an array. If ``whole``, raises StoreError where one is missing."""
    import pyarrow.parquet as pq

    with _readable(path), pq.ParquetFile(path) as file:
        missing = set(names).difference(file.schema_arrow.names)
        if missing and whole:
            raise StoreError(f"{path} has no {', '.join(sorted(missing))}")
        table = file.read(columns=[name for name in names if name not in missing], use_threads=False)
        return {name: _array(table.column(name)) for name in names if name not in missing}


def parquet_path(folder: Path, kind: Literal["requests", "telemetry"], trial_id: str) -> Path:
    """Where a trial's rows lie. Raises StoreError for an id that cannot be a file name."""
    if not _SAFE_NAME.fullmatch(trial_id):
        raise StoreError(f"trial id {trial_id!r} cannot be a file name")
    return folder / kind / f"{trial_id}.parquet"


def _parsed(
    rows: Sequence[dict[str, Any]], parse: Callable[[dict[str, Any]], T], name: str, warnings: list[str]
) -> list[T]:
    parsed = []
    for row in rows:
        try:
            parsed.append(parse(row))
        except (KeyError, TypeError, ValueError) as error:
            warnings.append(f"{name}: an entry is left out, it does not have the expected fields ({error})")
    return parsed


def _last_of_each(cells: Sequence[CellResult]) -> list[CellResult]:
    """The newest line for each cell, method and tier; a failure is gone once its cell went well."""
    found: dict[tuple[Cell, Method, str], CellResult] = {}
    for result in cells:
        own = (result.cell, result.method, result.tier)
        if result.status != "failed":
            found = {key: each for key, each in found.items() if key == own or not _now_done(each, result)}
        found[own] = result
    return list(found.values())


def _now_done(earlier: CellResult, later: CellResult) -> bool:
    return earlier.status == "failed" and earlier.cell == later.cell


OUTPUT_ENV: Final = "KVBENCH_OUTPUT"
"""The environment variable with the folder that runs are written to; ``--output`` comes before it."""
LATEST: Final = "latest"
MOST_NAMED: Final = 5


@dataclass(frozen=True)
class ListedRun:
    """A run as its manifest has it; ``problem``: why that cannot be read."""

    path: Path
    kind: str = ""
    scenario: str = ""
    status: str = ""
    started_at: str = ""
    kvbench: str = ""
    labels: tuple[str, ...] = ()
    problem: str = ""

    @classmethod
    def of(cls, manifest: Path) -> ListedRun:
        try:
            known = read_object(manifest, None)
        except KvbenchError as error:
            return cls(manifest.parent, problem=error.message)
        texts = {
            key: _run_list_text(known.get(key))
            for key in ("kind", "scenario", "status", "started_at", "kvbench")
        }
        return cls(manifest.parent, **texts, labels=tuple(map(str, known.get("labels") or ())))


def _run_list_text(value: Any) -> str:
    return "" if value is None else str(value)


def output_folder() -> Path:
    """Where run folders are written if nobody says otherwise."""
    return Path(os.environ.get(OUTPUT_ENV) or "results")


def listed_runs(root: Path) -> list[ListedRun]:
    """The runs below a folder, two levels deep, the latest first. Raises InputError without the folder."""
    if not root.is_dir():
        raise InputError(
            f"there is no folder {root}",
            hint=f"give the folder that runs are written to: --output, or {OUTPUT_ENV}",
        )
    found = [ListedRun.of(manifest) for manifest in sorted(_manifests(root))]
    return sorted(found, key=lambda run: run.started_at, reverse=True)


def _manifests(root: Path) -> Iterator[Path]:
    for pattern in (MANIFEST, f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        yield from (file for file in root.glob(pattern) if not file.parent.name.startswith("."))


def is_empty(folder: Path) -> bool:
    """Return whether a run has measured nothing: it has no trial, no cell and no transfer."""
    files = [folder / name for name in (TRIALS, CELLS, TRANSFERS)]
    return not any(file.is_file() and file.stat().st_size for file in files)


def _can_be_latest(run: ListedRun) -> bool:
    running = run.status == "running" and writer_is_alive(run.path)
    return not run.problem and (running or not is_empty(run.path))


def find_run(text: str) -> Path:
    """Find a run folder by its path, by the beginning or the end of its name in the folder that runs are
    written to, or by ``latest``, which is the last run that measures or has measured something.

    Raises InputError.
    """
    path = Path(text)
    if path.is_dir() and text != LATEST:
        return path
    root = output_folder()
    if text == LATEST:
        latest = next(filter(_can_be_latest, listed_runs(root)), None)
        if latest is None:
            raise InputError(f"no run in {root} has measured anything yet", hint="kvbench sweep makes one")
        return latest.path
    if path.exists():
        raise InputError(f"{path} is no folder", hint="give a run folder, or `latest`")
    names = sorted(file.parent.name for file in _manifests(root)) if root.is_dir() and "/" not in text else []
    fitting = [name for name in names if name.startswith(text) or name.endswith(text)]
    if len(fitting) == 1:
        return next(file.parent for file in _manifests(root) if file.parent.name == fitting[0])
    if fitting:
        shown = ", ".join(fitting[-MOST_NAMED:])
        raise InputError(f"{len(fitting)} runs are called {text}…: {shown}", hint="give more of the name")
    raise InputError(
        f"there is no run {text}",
        hint=f"{similar_files(path, *names)}`kvbench runs` lists those in {root}; `latest` is one",
    )
