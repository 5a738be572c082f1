"""Run many jobs in parallel. Each row is stored as soon as it is ready, so that a run can be resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from kvbench.processes.transfer_worker.child import die_with_parent
from tools.bench import ROOT

MEMORY: Final = Path("/dev/shm")


R = TypeVar("R", bound="Row")


@dataclasses.dataclass(frozen=True)
class Row:
    """A result that is stored as JSON; sequences are tuples."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return found

    @classmethod
    def from_json(cls: type[R], row: Mapping[str, Any]) -> R:
        known = {field.name: row[field.name] for field in dataclasses.fields(cls) if field.name in row}
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in known.items()})


def known_rows(path: Path, kind: type[R], version: int) -> dict[str, R]:
    """Return the rows of a file by key; none if another version computed them."""
    data = json.loads(path.read_text()) if path.exists() else {}
    same = data.get("version") == version
    return {key: kind.from_json(row) for key, row in data["truths"].items()} if same else {}


def keep_rows(rows: Mapping[str, Row], path: Path, version: int) -> None:
    """Write rows by key, in one atomic step."""
    lines = ",\n".join(f'"{key}": {json.dumps(row.to_json())}' for key, row in sorted(rows.items()))
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh.write_text(f'{{"version": {version}, "truths": {{\n{lines}\n}}}}\n')
    fresh.replace(path)


class Job(Protocol):
    """A job that runs once per key, in any process."""

    @property
    def key(self) -> str: ...

    def row(self) -> dict[str, Any]:
        """Return the result as JSON."""


def fast_folder() -> Path | None:
    """Return the fastest parent for run folders, which are synced with each line; None: the default."""
    return MEMORY if os.access(MEMORY, os.W_OK) else None


@cache
def code_version(tools: str, left_out: tuple[str, ...] = ()) -> str:
    """Return a hash of the code that a row depends on: kvbench, except for the folders ``left_out``, and the
    module or folder ``tools/TOOLS``.
    """
    package, source = ROOT / "kvbench", ROOT / "tools" / tools
    skipped = tuple(str(package / name) for name in left_out) or "-"
    paths = [path for path in sorted(package.rglob("*.py")) if not str(path).startswith(skipped)]
    digest = hashlib.sha256()
    for path in (*paths, *(sorted(source.rglob("*.py")) if source.is_dir() else [source])):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def rows_of(
    jobs: Sequence[Job], workers: int, code: str, path: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yield each job's row when it is ready; jobs with a row in ``path`` from the same code do not run."""
    kept = _kept(path, code)
    yield from (kept[job.key] for job in jobs if job.key in kept)
    left = [job for job in jobs if job.key not in kept]
    if not left:
        return
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(left)), mp_context=spawn, initializer=_end_with, initargs=(os.getpid(),)
    )
    try:
        for done in as_completed([pool.submit(_done, code, job) for job in left]):
            row = done.result()
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            yield row
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with(parent_pid: int) -> None:
    """End this process with its parent, and remove its temporary folders."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    die_with_parent(parent_pid, signal.SIGTERM)


def _done(code: str, job: Job) -> dict[str, Any]:
    try:
        return {"key": job.key, "code": code, **job.row()}
    except SystemExit:  # the parent process has ended
        os._exit(1)


def _kept(path: Path | None, code: str) -> Mapping[str, dict[str, Any]]:
    """Return the rows of that code by key. Cuts a torn last line off the file."""
    if path is None or not path.exists():
        return {}
    text = path.read_text()
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["key"]: row for row in rows if row["code"] == code}
