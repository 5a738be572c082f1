"""Many searches on some processors, each row kept as soon as it is there, so that one can go on with them."""

from __future__ import annotations

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
from typing import Any, Protocol

from kvbench.processes.transfer_worker.child import die_with_parent

from .search import ROOT


class Job(Protocol):
    """What is done in whichever process, once for its key."""

    @property
    def key(self) -> str: ...

    def row(self) -> dict[str, Any]:
        """What came of it, as JSON."""


@cache
def code_version() -> str:
    """Of all code that a row depends on: rows of other code are not taken over."""
    here = ROOT / "tools/random_systems"
    own = [here / "judge" / f"{name}.py" for name in ("search", "judged", "twins", "rivals", "closed")]
    digest = hashlib.sha256()
    for path in (*sorted((ROOT / "kvbench").rglob("*.py")), *sorted(here.glob("*.py")), *own):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def rows_of(
    jobs: Sequence[Job], workers: int, path: Path | None = None, code: str = ""
) -> Iterator[dict[str, Any]]:
    """The row of each job, as they come; those that ``path`` has from the same code are not done again."""
    code = code or code_version()
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
    """This process ends when that one does, and takes its temporary folders with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    die_with_parent(parent_pid, signal.SIGTERM)


def _done(code: str, job: Job) -> dict[str, Any]:
    try:
        return {"key": job.key, "code": code, **job.row()}
    except SystemExit:  # would be an answer to who is not there any more
        os._exit(1)


def _kept(path: Path | None, code: str) -> Mapping[str, dict[str, Any]]:
    """The rows of that code by their key; a torn last line is none."""
    if path is None or not path.exists():
        return {}
    text = path.read_text()
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["key"]: row for row in rows if row["code"] == code}
