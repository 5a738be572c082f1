"""Writer of a run folder, which is readable at every instant.

::

    results/20261121T133000Z-quickstart-1a2b3c/
    ├── manifest.json              schema, status, version, git state, argv, seed, times, hosts, labels
    ├── scenario.yaml              byte copy of the input
    ├── plan.json                  everything resolved
    ├── environment.json           the machine
    ├── trials.jsonl               one line a trial; the trace of the search
    ├── cells.jsonl                one line a finished cell; of two lines for one cell the later counts
    ├── outputs.jsonl              greedy outputs that other connectors' outputs must equal
    ├── canaries.jsonl             reference outputs of canaries, and outputs outside the load
    ├── requests/<trial>.parquet   one row a request
    ├── telemetry/<trial>.parquet  samples of counters and gauges
    ├── transfers.parquet          a microbenchmark's rows, rewritten after each case
    ├── checksums.jsonl            SHA-256 of each of these files, or of each line of one that grows
    └── logs/                      output of each process

A kill at any moment is harmless: the folder is made under a hidden name and renamed when complete; whole
files are written to a temporary name, synced and renamed; ``*.jsonl`` grow by one synced write per line; a
trial's requests are in place before its line is. The writer holds a lock on ``trials.jsonl``: so readers
recognise an active run, and a second writer is refused. With the reserved space (``.reserve``) a run on a
full disk can still write how it ended."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from kvbench.core.records import SCHEMA_VERSION, RequestRecord, TrialRecord
from kvbench.core.transfers.records import TransferRecord
from kvbench.errors import StoreError
from kvbench.files import (
    append_bytes,
    cut_torn_line,
    line_of,
    open_append,
    read_object,
    replaced,
    require_no_links,
    store_errors,
    sync_folder,
    write_bytes,
    write_json,
)
from kvbench.results.checksums import (
    ALGORITHM,
    CHECKSUMS,
    Checksums,
    begin_checksums,
    digests,
    go_on_with_checksums,
    sha256_of,
    sha256_of_file,
)
from kvbench.results.finished_cells import EarlierSessions, extra_row, output_row, pool_row
from kvbench.results.parquet import TRANSFERS, TransferTable, write_parquet, write_rows
from kvbench.results.run import (
    CANARIES,
    CELLS,
    LIVE,
    MANIFEST,
    OUTPUTS,
    TRIALS,
    CellResult,
    RunStatus,
    is_empty,
    load_run,
    parquet_path,
)
from kvbench.version import __version__

if TYPE_CHECKING:
    from kvbench.core.canaries.answer_kinds import CanaryAnswer
    from kvbench.core.canaries.pool import CanaryPool
    from kvbench.core.records import Outputs

__all__ = ["CellResult", "RunInfo", "RunStatus", "RunStore", "load_run"]


RULES_VERSION: Final = 24
"""Version of the rules in ``core`` and ``sweep``. Raise it by one when the same stored requests can get
another verdict, finding or limit, the same trials another answer, or a default changes; not for wording,
renaming or speed. ``tests/sweep/test_verify.py`` verifies the reference runs with this version."""
UNVERSIONED: Final = 0
"""Rules version of runs older than this number."""


def rules_version_of(manifest: Mapping[str, Any]) -> int:
    """Return the version of the rules that judged a run: with several, the first that is not current."""
    versions = [_version(session.get("rules_version")) for session in manifest.get("sessions") or [{}]]
    return next((version for version in versions if version != RULES_VERSION), RULES_VERSION)


def _version(stored: Any) -> int:
    return stored if isinstance(stored, int) and not isinstance(stored, bool) else UNVERSIONED


LOCK_DEADLINE_S: Final = 2.0
"""How long, in seconds, a writer waits for the lock: readers hold it for an instant to test for a writer."""


def locked(path: Path) -> int:
    """Open and lock ``trials.jsonl``. Raises StoreError if another process holds the lock."""
    handle = open_append(path / TRIALS)
    deadline = time.monotonic() + LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            os.close(handle)
            raise StoreError(
                f"{path} is being written by another process{_writer(path)}",
                hint="wait until it ends, or stop it; `kvbench watch` follows it",
            ) from None
        except BaseException:
            os.close(handle)
            raise
        return handle


def _writer(path: Path) -> str:
    sessions = read_object(path / MANIFEST, []).get("sessions") or [{}]
    last = sessions[-1]
    if not last.get("pid"):
        return ""
    return f": pid {last['pid']} on {last['host']}, since {last['started_at']}, run tag {last['run_tag']}"


def new_session(run_id: str, now: datetime) -> dict[str, Any]:
    return {
        "started_at": iso(now),
        "ended_at": None,
        "why": "",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "run_tag": f"{run_id}-{secrets.token_hex(4)}",
        "kvbench": __version__,
        "rules_version": RULES_VERSION,
    }


def iso(moment: datetime) -> str:
    """Return UTC with milliseconds: ``2026-11-21T13:30:00.123Z``."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


RESERVE: Final = ".reserve"
RESERVE_BYTES: Final = 256 * 1024
"""Bytes reserved to write a run's end on a full disk."""
LEAST_ROOM_BYTES: Final = 64 * 1024
"""Free space below which a write failure is attributed to the full disk."""
_LEFT_BY_A_KILL: Final = (LIVE, ".*.tmp", ".records-*.jsonl*", ".requests-*")


@dataclass(frozen=True)
class RunInfo:
    """Manifest fields that the store does not know itself."""

    kind: str = "sweep"
    argv: Sequence[str] = ()
    seed: int = 0
    git: Mapping[str, Any] | None = None
    hosts: Sequence[str] = ()
    labels: Sequence[str] = ()
    asked: Mapping[str, Any] | None = None
    """Load options that the scenario lacks, needed to resume; None: the run cannot be resumed."""
    overridden: Mapping[str, Any] | None = None
    """Scenario values in plan.json that scenario.yaml lacks, by path."""


class RunStore:
    """Writer of one run folder; a context manager. Raises StoreError with the path."""

    def __init__(self, path: Path, manifest: dict[str, Any], lock: int | None = None) -> None:
        """``lock``: the locked ``trials.jsonl``."""
        self.path = path
        self.earlier = EarlierSessions()
        self._manifest = manifest
        self._transfers = TransferTable(path, partial(self._announced, TRANSFERS))
        with store_errors(path):
            self._trials = locked(path) if lock is None else lock
            self._cells = open_append(path / CELLS)
            self._outputs = self._canaries = -1
            self._checksums = Checksums(path)
        self._sizes: dict[str, int] = {}

    @classmethod
    def create(
        cls,
        results_dir: Path | str,
        scenario_name: str,
        scenario_bytes: bytes,
        plan: Mapping[str, Any],
        environment: Mapping[str, Any],
        info: RunInfo | None = None,
    ) -> RunStore:
        """Create ``results_dir/<UTC time>-<scenario>-<6 hex>/``, which appears with its first files."""
        now = datetime.now(timezone.utc)
        name = f"{now:%Y%m%dT%H%M%SZ}-{slug(scenario_name)}-{secrets.token_hex(3)}"
        info = info or RunInfo()
        manifest: dict[str, Any] = {
            "schema": SCHEMA_VERSION,
            "run_id": name,
            "status": "running",
            "kvbench": __version__,
            "scenario": scenario_name,
            **asdict(info),
            "started_at": iso(now),
            "ended_at": None,
            "error": "",
            "skipped": [],
            "sessions": [new_session(name, now)],
            "asked_digests": digests(scenario_bytes, plan),
            "checksums": ALGORITHM,
        }
        results = Path(results_dir)
        hidden = results / f".{name}"
        with store_errors(results / name):
            for folder in ("requests", "telemetry", "logs"):
                (hidden / folder).mkdir(parents=True)
            write_bytes(hidden / "scenario.yaml", scenario_bytes)
            write_json(hidden / "plan.json", plan)
            write_json(hidden / "environment.json", environment)
            for lines in (TRIALS, CELLS):
                write_bytes(hidden / lines, b"")
            write_bytes(hidden / RESERVE, os.urandom(RESERVE_BYTES))
            write_json(hidden / MANIFEST, manifest)
            begin_checksums(hidden, manifest["sessions"][0]["run_tag"])
            os.rename(hidden, results / name)
            sync_folder(results)
        return cls(results / name, manifest)

    @classmethod
    def reopen(cls, path: Path) -> RunStore:
        """Resume a run folder: add a session. Raises StoreError if it is in use."""
        require_no_links(path)
        lock = locked(path)
        try:
            manifest = load_run(path).manifest
            with store_errors(path):
                for pattern in _LEFT_BY_A_KILL:
                    for left in [*path.glob(pattern), *path.glob(f"*/{pattern}")]:
                        left.unlink(missing_ok=True)
                for lines in (TRIALS, CELLS, OUTPUTS, CANARIES, CHECKSUMS):
                    cut_torn_line(path / lines)
                for folder in ("requests", "telemetry", "logs"):
                    (path / folder).mkdir(exist_ok=True)
                write_bytes(path / RESERVE, os.urandom(RESERVE_BYTES))
            session = {**new_session(str(manifest["run_id"]), datetime.now(timezone.utc)), "differs": []}
            with store_errors(path):
                go_on_with_checksums(path, session["run_tag"])
            store = cls(path, manifest, lock)
        except BaseException:
            os.close(lock)
            raise
        sessions = [{**entry, "why": entry.get("why") or "cut off"} for entry in manifest.get("sessions", [])]
        begun = {"checksums": ALGORITHM, "sessions": [*sessions, session]}
        try:
            store.update(status="running", error="", ended_at=None, **begun)
        except BaseException:
            store.close()
            raise
        return store

    @property
    def run_tag(self) -> str:
        """Tag of this session's processes in their environment; begins with the run's name."""
        return str(self._manifest["sessions"][-1]["run_tag"])

    @property
    def resumed(self) -> int:
        """Number of earlier sessions."""
        return len(self._manifest["sessions"]) - 1

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self._manifest

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def update(self, **fields: Any) -> None:
        self._manifest.update(fields)
        with store_errors(self.path):
            write_json(self.path / MANIFEST, self._manifest, partial(self._announced, MANIFEST))

    def resumed_elsewhere(self, differs: Sequence[str], label: str) -> None:
        """Store this session's differences from the first one, and label the run."""
        *earlier, session = self._manifest["sessions"]
        session = {**session, "differs": [*session.get("differs", []), *differs]}
        labels = dict.fromkeys([*self._manifest["labels"], label])
        self.update(sessions=[*earlier, session], labels=list(labels))

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Replace plan.json, for example with the processes' real ports and argv."""
        with store_errors(self.path):
            write_json(self.path / "plan.json", plan, partial(self._announced, "plan.json"))

    def processes(self) -> dict[str, Any]:
        return dict(read_object(self.path / "plan.json", []).get("processes") or {})

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace environment.json once the other hosts have reported theirs."""
        with store_errors(self.path):
            announced = partial(self._announced, "environment.json")
            write_json(self.path / "environment.json", environment, announced)

    def skip_connector(self, connector: str, reason: str, hint: str = "") -> None:
        """Note a skipped connector, with the reason and the command that fixes it."""
        skipped = [entry for entry in self._manifest["skipped"] if entry["connector"] != connector]
        self.update(skipped=[*skipped, {"connector": connector, "reason": reason, "hint": hint}])

    def add_trial(self, trial: TrialRecord, requests: Sequence[RequestRecord] = ()) -> None:
        """Store a trial: requests first, so that a listed trial is complete."""
        with store_errors(self.path):
            if requests:
                with self._replaced("requests", trial.trial_id) as temporary:
                    write_parquet(temporary, requests, {"trial_id": trial.trial_id, "cell": trial.cell.key})
            self._append(self._trials, TRIALS, trial.to_json())

    def add_telemetry(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store samples; each row has its ``trial_id``."""
        for trial_id in dict.fromkeys(str(row["trial_id"]) for row in rows):
            samples = [row for row in rows if row["trial_id"] == trial_id]
            with store_errors(self.path), self._replaced("telemetry", trial_id) as temporary:
                write_rows(temporary, samples)

    def _replaced(
        self, kind: Literal["requests", "telemetry"], trial_id: str
    ) -> AbstractContextManager[Path]:
        target = parquet_path(self.path, kind, trial_id)
        return replaced(target, partial(self._announced, f"{kind}/{target.name}"))

    def _announced(self, name: str, content: Path) -> AbstractContextManager[None]:
        return self._checksums.announced(name, sha256_of_file(content))

    def add_transfer(self, record: TransferRecord) -> None:
        with store_errors(self.path):
            self._transfers.add(record)

    def put_cell(self, result: CellResult | Mapping[str, Any]) -> None:
        """Store a cell's result; a later line replaces an earlier one."""
        checked = result if isinstance(result, CellResult) else CellResult.from_json(result)
        with store_errors(self.path):
            self._append(self._cells, CELLS, checked.to_json())

    def add_outputs(self, label: str, input_len: int, outputs: Outputs) -> None:
        """Store a deployment's greedy outputs at one input length; a later line replaces an earlier one."""
        with store_errors(self.path):
            if self._outputs < 0:
                self._outputs = open_append(self.path / OUTPUTS)
                sync_folder(self.path)
            self._append(self._outputs, OUTPUTS, output_row(label, input_len, outputs))

    def add_canaries(self, pool: CanaryPool) -> None:
        """Store right answers of canaries; a later line replaces an earlier one."""
        self._add_canaries(pool_row(pool))

    def add_extra_canaries(self, trial_id: str, canaries: Sequence[CanaryAnswer]) -> None:
        """Store canary answers requested in addition to a trial's load; a later line replaces an earlier one,
        so a resumed run also stores that there were none."""
        if canaries or self.resumed:
            self._add_canaries(extra_row(trial_id, canaries))

    def _add_canaries(self, row: Mapping[str, Any]) -> None:
        with store_errors(self.path):
            if self._canaries < 0:
                self._canaries = open_append(self.path / CANARIES)
                sync_folder(self.path)
            self._append(self._canaries, CANARIES, row)

    def _append(self, handle: int, name: str, row: Mapping[str, Any]) -> None:
        """Append a row, and check that no other process changed or moved the file."""
        path, known = self.path / name, self._sizes.get(name)
        if handle >= 0 and known is not None and os.fstat(handle).st_size != known:
            raise StoreError(
                f"{path} was changed by another process while it was written",
                hint="only kvbench may write to a run folder; start a new run",
            )
        line = line_of(row)
        with self._checksums.announced(name, sha256_of(line)):
            self._sizes[name] = append_bytes(handle, line, path)

    def require_room(self) -> None:
        """Raise StoreError if the disk is too full to continue."""
        with store_errors(self.path):
            disk = os.statvfs(self.path)
            if disk.f_bavail * disk.f_frsize < LEAST_ROOM_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def finish(self, status: RunStatus, error: str = "") -> None:
        """Write the run's end and release the folder. Only the first call counts."""
        if self._trials < 0:
            return
        ended = iso(datetime.now(timezone.utc))
        *earlier, session = self._manifest["sessions"]
        session = {**session, "ended_at": ended, "why": f"{status}: {error}" if error else status}
        try:
            (self.path / RESERVE).unlink(missing_ok=True)
            with store_errors(self.path):
                self._checksums.end()
            self.update(status=status, error=error, ended_at=ended, sessions=[*earlier, session])
        finally:
            self.close()

    def remove_if_empty(self) -> bool:
        """Remove a folder in which nothing was measured and no process has logged anything."""
        empty = is_empty(self.path) and not any(file.is_file() for file in self.logs.rglob("*"))
        if empty:
            shutil.rmtree(self.path)
        return empty

    def close(self) -> None:
        """Release the folder without an end: readers then see an interrupted run."""
        for handle in (self._trials, self._cells, self._outputs, self._canaries):
            if handle >= 0:
                os.close(handle)
        self._trials = self._cells = self._outputs = self._canaries = -1
        self._checksums.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish("complete")
        elif isinstance(error, KeyboardInterrupt) or type(error).__name__ == "CancelledError":
            self.finish("interrupted", "interrupted")
        else:
            self.finish("failed", str(error) or type(error).__name__)


def slug(name: str) -> str:
    """Return a name for a folder: lower case, digits, single hyphens, at most 40 characters."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-") or "run"
