"""Read run folders in any state, and find them by name.

A folder with a newer schema (an integer in ``manifest.json``) is refused."""

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
"""Oldest schema of a release."""


def schema_of(manifest: Mapping[str, Any], path: Path) -> int:
    """Return the schema of the manifest at ``path``. Raises StoreError, NewerSchemaError."""
    schema = manifest.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < FIRST_SCHEMA:
        raise StoreError(f"{path} has an unknown schema: {schema!r}")
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
"""File with the current activity; it exists only during a measurement and is not part of the record."""
OUTPUTS: Final = "outputs.jsonl"
CANARIES: Final = "canaries.jsonl"

_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_LISTS: Final[Mapping[str, type]] = {
    "sessions": dict,
    "skipped": dict,
    "incomplete": str,
    "labels": str,
    "hosts": str,
    "argv": str,
}
"""Lists in the manifest, with their element types."""
T = TypeVar("T")


@dataclass(frozen=True)
class CellResult:
    """Result of one cell. ``answer``: the search's answer as JSON. ``equal_outputs``: ``{"checked": n,
    "equal": n}`` against the aggregated server's greedy outputs, with ``within_noise`` and ``power`` if the
    prompts were repeated (sweep/trial/output_check.py). ``tier``: the SLO tier, "" for a single SLO."""

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
    """Whether its answer belongs to the main column: not another method's, nor a second tier's."""
    canaries: dict[str, Any] | None = None
    limit: dict[str, Any] | None = None
    """The limit above the answer (``core.metrics.limit``)."""
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
    """A run folder. ``schema``: as written; ``warnings``: incomplete parts. ``trials`` and ``cells`` belong
    to the main column (searches for a sustained rate, single rates, replays); ``other_trials`` and
    ``other_cells`` to other methods and tiers."""

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
    """Greedy outputs by deployment and input length, used as references."""
    canaries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def all_trials(self) -> list[TrialRecord]:
        return [*self.trials, *self.other_trials]

    @property
    def equal_rate_trials(self) -> list[TrialRecord]:
        """Return the newest trial of each cell at the rate that is equal for all connectors."""
        return list(
            {trial.cell: trial for trial in self.other_trials if trial.method == "equal_rate"}.values()
        )

    @property
    def run_id(self) -> str:
        return str(self.manifest.get("run_id") or self.path.name)

    @property
    def labels(self) -> list[str]:
        return [str(label) for label in self.manifest.get("labels", [])]

    @property
    def skipped(self) -> list[dict[str, str]]:
        """Return the connectors that were not measured: connector, reason, hint."""
        return list(self.manifest.get("skipped", []))

    def trials_of(self, cell: Cell) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.cell == cell]

    def requests(self, trial_id: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the trial's requests, one row each; only ``columns`` if given."""
        return self._frame("requests", trial_id, columns)

    def columns(
        self, kind: Literal["requests", "telemetry"], trial_id: str, names: Sequence[str]
    ) -> dict[str, NDArray[Any]]:
        """Return columns of the trial's requests or samples as arrays; NaN for unknown. Avoids the import of
        pandas. Raises StoreError if the file or a column is missing."""
        return _columns(self._parquet(kind, trial_id), names, whole=True)

    def request_records(self, trial_id: str) -> list[RequestRecord]:
        """Return the trial's requests as records; ``itl_s`` in 32-bit precision."""
        import pyarrow.parquet as pq

        path = self._parquet("requests", trial_id)
        with _readable(path):
            return [RequestRecord.from_json(row) for row in pq.read_table(path).to_pylist()]

    def telemetry(self, trial_id: str) -> pd.DataFrame:
        """Return the samples of a trial: trial_id, t_s, source, metric, value."""
        return self._frame("telemetry", trial_id)

    def transfer_records(self) -> list[TransferRecord]:
        """Return the rows of a microbenchmark in order of measurement."""
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
            raise StoreError(f"{path} does not exist", hint="the trial stored none, or the file was removed")
        return path


def _array(column: Any) -> NDArray[Any]:
    """Return an Arrow column as an array. Its ``to_numpy`` imports pandas, its ``cast`` pyarrow.compute
    (pyarrow 25)."""
    import numpy as np
    import pyarrow as pa

    whole = column.combine_chunks()
    if not (pa.types.is_floating(whole.type) or pa.types.is_integer(whole.type)):
        return np.array(whole.to_pylist(), dtype=object)
    valid, data = whole.buffers()
    size = whole.type.byte_width
    letter = (
        "f" if pa.types.is_floating(whole.type) else "i" if pa.types.is_signed_integer(whole.type) else "u"
    )
    values = np.frombuffer(data, f"{letter}{size}", len(whole), whole.offset * size).astype(float)
    if not whole.null_count:
        return values
    known = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[whole.offset :][: len(whole)]
    return np.where(known == 1, values, np.nan)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn a library's error for a damaged file into a StoreError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # Arrow's own are among them
        raise StoreError(
            f"{path} cannot be read: {error}", hint="it is cut off or damaged; the other trials can be read"
        ) from error


def load_run(path: Path | str) -> RunFolder:
    """Read a run folder in any state; incomplete parts become warnings. Raises NewerSchemaError for a newer
    kvbench's folder, StoreError for no run folder."""
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        inside = sorted(file.parent.name for file in folder.glob(f"*/{MANIFEST}"))
        hint = "give a folder in results/"
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
    if _is_cut_off(manifest, folder):
        manifest["status"] = "interrupted"
        warnings.append("the run was cut off: its process ended without writing a final status")
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
    """Empty malformed lists of the manifest, with a warning."""
    for name, of in _LISTS.items():
        value = manifest.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(entry, of) for entry in value)
        ):
            warnings.append(f"{MANIFEST}: {name} is {str(value)[:40]!r}, ignored")
            manifest[name] = []
    for name in ("asked", "trace"):
        if not isinstance(manifest.get(name), (dict, type(None))):
            warnings.append(f"{MANIFEST}: {name} is {str(manifest[name])[:40]!r}, ignored")
            manifest[name] = None


def _text(path: Path) -> str:
    """Return a scenario's text up to the size limit; empty if unreadable."""
    try:
        with open(open_read(path), "rb") as file:
            return file.read(4 * MAX_CHARS).decode("utf-8", "replace")
    except OSError:
        return ""


def writer_is_alive(folder: Path) -> bool:
    """Return whether a process still writes the folder; True if unknown."""
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


def _is_cut_off(manifest: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a run's process ended without writing a final status."""
    return manifest.get("status") == "running" and not writer_is_alive(folder)


def requests_to_replay(folder: Path, trial: TrialRecord, burstiness: float) -> TrialRequests | None:
    """Return the requests of a stored trial, or None if they do not suffice for a replay."""
    from kvbench.core.search.trial_requests import COLUMNS, TrialRequests

    path = parquet_path(folder, "requests", trial.trial_id)
    if not path.is_file() or path.is_symlink():
        return None
    columns = _columns(path, COLUMNS, whole=False)
    if len(columns) < len(COLUMNS):
        return None
    stopped_s = (trial.summary.get("live") or {}).get("at_s", trial.duration_s)
    return TrialRequests.of(columns, trial.request_rate, stopped_s, burstiness)


def _columns(path: Path, names: Sequence[str], *, whole: bool) -> dict[str, NDArray[Any]]:
    """Return columns of a file as arrays. If ``whole``, raises StoreError for a missing one."""
    import pyarrow.parquet as pq

    with _readable(path), pq.ParquetFile(path) as file:
        missing = set(names).difference(file.schema_arrow.names)
        if missing and whole:
            raise StoreError(f"{path} has no {', '.join(sorted(missing))}")
        table = file.read(columns=[name for name in names if name not in missing], use_threads=False)
        return {name: _array(table.column(name)) for name in names if name not in missing}


def parquet_path(folder: Path, kind: Literal["requests", "telemetry"], trial_id: str) -> Path:
    """Return the path of a trial's rows. Raises StoreError for an unsafe id."""
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
            warnings.append(f"{name}: an entry is ignored, it lacks the expected fields ({error})")
    return parsed


def _last_of_each(cells: Sequence[CellResult]) -> list[CellResult]:
    """Return the newest line per cell, method and tier; a later success replaces a failure."""
    found: dict[tuple[Cell, Method, str], CellResult] = {}
    for result in cells:
        place = (result.cell, result.method, result.tier)
        if result.status != "failed":
            found = {key: old for key, old in found.items() if key == place or not _now_done(old, result)}
        found[place] = result
    return list(found.values())


def _now_done(earlier: CellResult, later: CellResult) -> bool:
    return earlier.status == "failed" and earlier.cell == later.cell


OUTPUT_ENV: Final = "KVBENCH_OUTPUT"
"""Environment variable with the output folder; ``--output`` takes precedence."""
LATEST: Final = "latest"
MOST_NAMED: Final = 5


@dataclass(frozen=True)
class ListedRun:
    """A run by its manifest; ``problem``: why it is unreadable."""

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
        if _is_cut_off(known, manifest.parent):
            texts["status"] = "interrupted"
        return cls(manifest.parent, **texts, labels=tuple(map(str, known.get("labels") or ())))


def _run_list_text(value: Any) -> str:
    return "" if value is None else str(value)


def output_folder() -> Path:
    return Path(os.environ.get(OUTPUT_ENV) or "results")


REFERENCE: Final = "reference"
"""Folder below ``results`` with the repository's runs, which are not the user's."""


def listed_runs(root: Path, *, reference: bool = True) -> list[ListedRun]:
    """Return the runs up to two levels below a folder, latest first. ``reference``: also the reference runs
    below it. Raises InputError without the folder."""
    if not root.is_dir():
        raise InputError(
            f"folder {root} does not exist", hint=f"set the folder of the runs: --output, or {OUTPUT_ENV}"
        )
    left_out = None if reference else root / REFERENCE
    found = [ListedRun.of(file) for file in sorted(_manifests(root)) if left_out not in file.parents]
    return sorted(found, key=lambda run: run.started_at, reverse=True)


def _manifests(root: Path) -> Iterator[Path]:
    for pattern in (MANIFEST, f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        yield from (file for file in root.glob(pattern) if not file.parent.name.startswith("."))


def is_empty(folder: Path) -> bool:
    """Return whether a run has measured nothing: it has no trial, no cell and no transfer."""
    files = [folder / name for name in (TRIALS, CELLS, TRANSFERS)]
    return not any(file.is_file() and file.stat().st_size for file in files)


def _can_be_latest(run: ListedRun) -> bool:
    return not run.problem and (run.status == "running" or not is_empty(run.path))


def find_run(text: str) -> Path:
    """Find a run folder by path, by the beginning or end of its name, or as ``latest``: the last one that
    measures or has measured something. Raises InputError."""
    path = Path(text)
    if path.is_dir() and text != LATEST:
        return path
    root = output_folder()
    if text == LATEST:
        latest = next(filter(_can_be_latest, listed_runs(root, reference=False)), None)
        if latest is None:
            raise InputError(f"no run in {root} has measured anything yet", hint="kvbench sweep makes one")
        return latest.path
    if path.exists():
        raise InputError(f"{path} is not a folder", hint="give a run folder, or `latest`")
    names = sorted(file.parent.name for file in _manifests(root)) if root.is_dir() and "/" not in text else []
    fitting = [name for name in names if name.startswith(text) or name.endswith(text)]
    if len(fitting) == 1:
        return next(file.parent for file in _manifests(root) if file.parent.name == fitting[0])
    if fitting:
        shown = ", ".join(fitting[-MOST_NAMED:])
        raise InputError(f"{len(fitting)} runs match {text}…: {shown}", hint="give a longer part of the name")
    raise InputError(
        f"there is no run {text}",
        hint=f"{similar_files(path, *names)}`kvbench runs` lists those in {root}; `latest` is one",
    )
