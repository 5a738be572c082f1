"""``checksums.jsonl``: SHA-256 of everything that kvbench writes into a run folder, to detect edits.

One line per whole file and per line of a growing file, synced *before* the data. So everything in the folder
was announced, and a kill loses only the session's last announcement. Lines are ``{"file": …, "sha256": …}``;
a session begins with ``{"session": run tag}`` and ends with ``{"ended": name}`` (the file that failed, or
""). ``after`` chains each line to the previous one.

Not covered: process logs and files derived by ``kvbench report``. Checksums are no signature: an edit of a
result together with its checksum is detected only by recomputation (``kvbench verify``)."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Final

from kvbench.core.scenario.yaml_lines import MAX_CHARS
from kvbench.errors import StoreError
from kvbench.files import (
    append_bytes,
    bytes_of,
    json_row,
    line_of,
    open_append,
    open_read,
    read_object,
    write_bytes,
)
from kvbench.results.parquet import TRANSFERS
from kvbench.results.run import (
    CANARIES,
    CELLS,
    MANIFEST,
    OUTPUTS,
    TRIALS,
    RunFolder,
    parquet_path,
    writer_is_alive,
)

CHECKSUMS: Final = "checksums.jsonl"
ALGORITHM: Final = "sha256"
_GROWING: Final = (TRIALS, CELLS, OUTPUTS, CANARIES)
_WHOLE: Final = (MANIFEST, "plan.json", "environment.json", "scenario.yaml", TRANSFERS)
_AFTER_CHARS: Final = 16


@dataclass(frozen=True)
class Damage:
    """A file that differs from its checksum: path, what changed, stored and current values."""

    file: str
    what: str
    stored: str = ""
    recomputed: str = ""

    def __str__(self) -> str:
        shown = f": stored {self.stored}, recomputed {self.recomputed}" if self.stored else ""
        return f"{self.file}: {self.what}{shown}"


class Checksums:
    """Announces what a session writes. Raises OSError, or StoreError if another process changed the file."""

    def __init__(self, folder: Path) -> None:
        """Continue a folder whose last session is the caller's."""
        self._path = folder / CHECKSUMS
        self._handle = open_append(self._path)
        self._last = _last(self._path)
        self._failed = ""

    @contextmanager
    def announced(self, name: str, digest: str) -> Iterator[None]:
        """Announce a file or a line with this content around its writing."""
        self._append({"file": name, ALGORITHM: digest})
        try:
            yield
        except BaseException:
            self._failed = name
            raise

    def end(self) -> None:
        """Write the session's end; only the manifest may follow."""
        self._append({"ended": self._failed})

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def _append(self, row: Mapping[str, Any]) -> None:
        line = line_of({**row, "after": self._last})
        append_bytes(self._handle, line, self._path)
        self._last = _after(line[:-1])


def begin_checksums(folder: Path, run_tag: str) -> None:
    """Begin the checksums of a new folder, or of a copy."""
    write_bytes(folder / CHECKSUMS, _chained([{"session": run_tag}, *_found_in(folder)], _after(b"")))


def go_on_with_checksums(folder: Path, run_tag: str) -> None:
    """Begin a further session's checksums. Files of an older kvbench are adopted and marked so."""
    if (folder / CHECKSUMS).exists():
        known = bytes_of(folder / CHECKSUMS)
        added = _chained([{"session": run_tag}], _last(folder / CHECKSUMS))
    else:
        known = b""
        added = _chained([{"session": run_tag, "adopted": True}, *_found_in(folder)], _after(b""))
    write_bytes(folder / CHECKSUMS, known + added)


def _chained(rows: Iterable[Mapping[str, Any]], last: str) -> bytes:
    content = b""
    for row in rows:
        line = line_of({**row, "after": last})
        content, last = content + line, _after(line[:-1])
    return content


def _last(path: Path) -> str:
    return _after((_lines_of(path) or [b""])[-1])


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(open_read(path), "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _found_in(folder: Path) -> Iterator[dict[str, str]]:
    for name in _covered(folder):
        if name in _GROWING:
            for line in _lines_of(folder / name) or ():
                yield {"file": name, ALGORITHM: sha256_of(line + b"\n")}
        else:
            yield {"file": name, ALGORITHM: sha256_of_file(folder / name)}


def _covered(folder: Path) -> Iterator[str]:
    """Yield the names of all covered files: no logs, nothing derived."""
    for name in (*_WHOLE, *_GROWING):
        if os.path.lexists(folder / name):
            yield name
    for inside in ("requests", "telemetry"):
        for path in sorted((folder / inside).glob("*.parquet")):
            if not path.name.startswith("."):
                yield f"{inside}/{path.name}"


def _after(line: bytes) -> str:
    return sha256_of(line)[:_AFTER_CHARS]


def _lines_of(path: Path) -> list[bytes] | None:
    """Return the file's complete lines, or None without the file. Raises OSError."""
    try:
        return bytes_of(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return None


# --- looking ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Announced:
    """``open``: its session may have ended before the write."""

    file: str
    digest: str
    open: bool


def adopted(folder: Path) -> bool:
    """Return whether a session adopted files that had no checksums."""
    return any((json_row(line) or {}).get("adopted") for line in _lines_of(folder / CHECKSUMS) or ())


def damages(folder: Path, checked: Counter[str] | None = None) -> Iterator[Damage]:
    """Yield the differences from the checksums. Raises StoreError for unreadable files."""
    alive = writer_is_alive(folder)
    try:
        found = {name: _digests_in(folder, name) for name in _covered(folder)}
        lines = _lines_of(folder / CHECKSUMS)
    except OSError as error:
        raise StoreError(f"{folder} cannot be checked: {error}") from error
    if lines is None:
        yield Damage(CHECKSUMS, "is missing")
        return
    rows = [json_row(line) or {} for line in lines]
    last = _after(b"")
    for number, (line, row) in enumerate(zip(lines, rows, strict=True), start=1):
        if row.get("after") != last:
            yield Damage(CHECKSUMS, f"line {number} was changed, or one before it was changed or removed")
        last = _after(line)
    announced = _announced(rows)
    ended = bool(rows) and _sessions(rows)[-1][-1].get("ended") is not None
    if checked is not None:
        checked["files"] += len(found)
        checked["lines"] += sum(len(found[name][0]) for name in _GROWING if name in found)
    for name in dict.fromkeys([*(entry.file for entry in announced), *found]):
        entries = [entry for entry in announced if entry.file == name]
        there = found.get(name)
        if name in _GROWING:
            yield from _of_lines(name, entries, there or ([], b""), torn_allowed=alive or not ended)
        else:
            yield from _of_whole(name, entries, None if there is None else there[0][0], alive)


def _digests_in(folder: Path, name: str) -> tuple[list[str], bytes]:
    """Return (digests of its lines or of the whole file, incomplete last line)."""
    if name not in _GROWING:
        return [sha256_of_file(folder / name)], b""
    *lines, rest = bytes_of(folder / name).split(b"\n")
    return [sha256_of(line + b"\n") for line in lines], rest


def _sessions(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the lines of each session, without announcements of the manifest after its end, which is no
    result and may be cut off."""
    sessions: list[list[dict[str, Any]]] = [[]]
    for row in rows:
        if "session" in row:
            sessions.append([])
        elif sessions[-1] and "ended" in sessions[-1][-1]:
            continue
        sessions[-1].append(row)
    return [session for session in sessions if session]


def _announced(rows: Sequence[dict[str, Any]]) -> list[_Announced]:
    """Return the announcements in order. The last one of a session, and a failed one, are open."""
    opened: set[int] = set()
    for session in _sessions(rows):
        file_rows = [row for row in session if "file" in row]
        failed = session[-1].get("ended")
        last = file_rows[-1:] if failed is None else [row for row in file_rows if row["file"] == failed][-1:]
        opened |= {id(row) for row in last}
    places = [place for place, row in enumerate(rows) if "file" in row]
    # The last line of a session is open, be it the manifest of its end.
    ends = {place for place in places if place + 1 == len(rows) or "session" in rows[place + 1]}
    return [
        _Announced(str(rows[at]["file"]), str(rows[at].get(ALGORITHM)), at in ends or id(rows[at]) in opened)
        for at in places
    ]


def _of_whole(name: str, announced: Sequence[_Announced], there: str | None, alive: bool) -> Iterator[Damage]:
    if not announced:
        yield Damage(name, "does not belong to this run")
        return
    allowed: set[str | None] = set()
    for entry in reversed(announced):
        allowed.add(entry.digest)
        if not entry.open and not alive:
            break
    else:
        allowed.add(None)
    if there not in allowed and there is None:
        yield Damage(name, "is missing")
    elif there not in allowed:
        yield Damage(name, "was changed since it was written", announced[-1].digest[:12], (there or "")[:12])


def _of_lines(
    name: str, announced: Sequence[_Announced], there: tuple[list[str], bytes], *, torn_allowed: bool
) -> Iterator[Damage]:
    found, rest = there
    due = [entry.digest for entry in announced if not entry.open]
    perhaps = Counter(entry.digest for entry in announced if entry.open)
    for kind, first, last, begin, end in SequenceMatcher(None, due, found, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        other = []
        for place in range(begin, end):
            if perhaps[found[place]]:
                perhaps[found[place]] -= 1
            else:
                other.append(place)
        for count, place in enumerate(other):
            edited = count < last - first
            what = "was changed since it was written" if edited else "does not belong to this run"
            yield Damage(name, f"line {place + 1} {what}")
        if (gone := last - first - len(other)) > 0:
            words = "1 line" if gone == 1 else f"{gone} lines"
            yield Damage(name, f"{words} before line {end + 1} {'is' if gone == 1 else 'are'} missing")
    if rest and not torn_allowed:
        yield Damage(name, "ends in an incomplete line")


_HINT: Final = "restore the file from a copy of the run, or start a new run"


def digests(scenario_bytes: bytes, plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of scenario.yaml and of the scenario in plan.json."""
    return {"scenario.yaml": hashlib.sha256(scenario_bytes).hexdigest(), "plan.json": _of_plan(plan)}


def _of_plan(plan: Mapping[str, Any]) -> str:
    # Read as it was written: numbers and names as JSON has them.
    text = json.dumps(json.loads(json.dumps(plan.get("scenario"), default=str)), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def require_untouched(run: RunFolder) -> None:
    """Raise StoreError if the scenario changed since the run began: results would be mixed."""
    stored = run.manifest.get("asked_digests")
    if isinstance(stored, dict):
        # plan.json as it is on disk: load_run makes invisible characters visible.
        plan = read_object(run.path / "plan.json", [])
        try:
            with open(open_read(run.path / "scenario.yaml"), "rb") as file:
                found = digests(file.read(4 * MAX_CHARS), plan)
        except OSError as error:
            raise StoreError(
                f"{run.path}/scenario.yaml cannot be read: {error.strerror}", hint=_HINT
            ) from error
        if changed := [name for name, digest in found.items() if stored.get(name) != digest]:
            where = " and ".join(changed)
            raise StoreError(
                f"{run.path}: the scenario was changed since the run began, in {where}", hint=_HINT
            )


def lost_requests(run: RunFolder) -> Iterator[str]:
    """Yield the trials of a measured run whose stored requests are missing or incomplete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for trial in run.all_trials:
        sent = trial.summary.get("sent")
        if not isinstance(sent, int) or sent <= 0 or run.manifest.get("kind") not in ("sweep", "bench"):
            continue
        path = parquet_path(run.path, "requests", trial.trial_id)
        name = Path("requests", path.name)
        try:
            with open(open_read(path), "rb") as file:
                rows = pq.ParquetFile(file).metadata.num_rows
        except FileNotFoundError:
            yield f"{name} is missing"
        except (OSError, ValueError, pa.ArrowException):
            yield f"{name} is cut off or damaged"
        else:
            if rows < sent:
                yield f"{name} has {rows} of the {sent} requests that were sent"
