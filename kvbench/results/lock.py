"""Who writes a run folder (the lock, the manifest's sessions), and the version of the rules that judge it.

These are the rules of verdicts, findings, limits, and answers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from kvbench.errors import StoreError
from kvbench.files import open_append, read_object
from kvbench.results.run import MANIFEST, TRIALS
from kvbench.version import __version__

RULES_VERSION: Final = 1
"""Version of the rules in ``core`` and ``sweep``.

Raise it by one when the same stored requests can get another verdict, reason, finding or limit, or the same
trials another answer. Renaming, comments and faster code leave it. ``tests/sweep/test_verify.py`` judges the
reference runs: one that has this version must be sound.
"""
UNVERSIONED: Final = 0
"""Version of the rules of runs that were measured before rules had one."""


def rules_version_of(manifest: Mapping[str, Any]) -> int:
    """Return the version of the rules that judged a run; of several the first that is not today's."""
    versions = [_version(each.get("rules_version")) for each in manifest.get("sessions") or [{}]]
    return next((version for version in versions if version != RULES_VERSION), RULES_VERSION)


def _version(stored: Any) -> int:
    return stored if isinstance(stored, int) and not isinstance(stored, bool) else UNVERSIONED


LOCK_DEADLINE_S: Final = 2.0
"""A reader that asks whether the writer lives holds the lock for an instant."""


def locked(path: Path) -> int:
    """``trials.jsonl``, open and locked. Raises StoreError if another process holds the lock."""
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
                hint="wait for its end or end it; `kvbench watch` follows it",
            ) from None
        except BaseException:
            os.close(handle)
            raise
        return handle


def _writer(path: Path) -> str:
    """Who writes a folder, as far as its manifest says."""
    sessions = read_object(path / MANIFEST, []).get("sessions") or [{}]
    last = sessions[-1]
    if not last.get("pid"):
        return ""
    return f": pid {last['pid']} on {last['host']}, since {last['started_at']}, run tag {last['run_tag']}"


def new_session(run_id: str, now: datetime) -> dict[str, Any]:
    """This process as a session of a run."""
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


def ended_session(session: Mapping[str, Any]) -> dict[str, Any]:
    """A session that is over; of one that was killed nobody wrote how."""
    return {**session, "why": session.get("why") or "cut off"}


def iso(moment: datetime) -> str:
    """UTC with milliseconds: ``2026-11-21T13:30:00.123Z``."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
