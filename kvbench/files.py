"""Files that survive a kill: written whole or not at all, or grown by one synced line.

Reading is the other half of the bargain: a torn last line and a missing file become warnings.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvbench.errors import StoreError

MOST_BYTES: Final = 2 << 30
"""A larger file of JSON in a run folder is not read: a hundred thousand trials have a tenth of that."""
_FORMULA: Final = re.compile(r"^[=+@\t\r]|^-(?![\d.])")
"""Beginnings that a spreadsheet computes (OWASP, CSV injection); a negative number is none."""


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_bytes(path, _encode(data, indent=2) + b"\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of plain values, each cell safe to open in a spreadsheet; the first row names the columns."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: spreadsheet_cell(value) for key, value in row.items()} for row in rows)
    write_bytes(path, text.getvalue().encode("utf-8", "replace"))


def spreadsheet_cell(value: Any) -> Any:
    """A value for CSV, on one line; what a spreadsheet would take for a formula gets an apostrophe."""
    if isinstance(value, str):
        line = re.sub(r"[\r\n\0]+", " ", value)
        return f"'{line}" if _FORMULA.match(line) else line
    return "" if value is None else value


def write_bytes(path: Path, content: bytes) -> None:
    with replaced(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside ``path``; what was written there is synced and renamed into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        handle = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _encode(data: Any, indent: int | None = None) -> bytes:
    """Strict JSON: what is not finite becomes null, a lone surrogate its escape."""
    text = json.dumps(_plain(data), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if value - value == 0 else None
    if isinstance(value, (str, int)) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a NumPy scalar
        return _plain(value.item())
    return str(value)


def open_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def append_line(handle: int, data: Mapping[str, Any]) -> None:
    """Appends one line of JSON and syncs it; all of it or nothing."""
    if handle < 0:
        raise StoreError("the run folder is already finished")
    rest = memoryview(_encode(data) + b"\n")
    size = os.fstat(handle).st_size
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    except BaseException:  # no space left, or Ctrl-C: half a line would spoil the next one
        os.ftruncate(handle, size)
        raise


def cut_torn_line(path: Path) -> None:
    """Cuts off what a kill left of a last line, so that the next one begins a line of its own."""
    if not path.is_file():
        return
    content = _bytes_of(path)
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("rb+") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def said_clearly(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {error.filename or path}: {error.strerror or error}", hint=_free_space(path)
        ) from error


def _free_space(path: Path) -> str:
    for folder in (path, *path.parents):
        if folder.exists():
            return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free there; choose a folder with --output"
    return ""


def read_object(path: Path, warnings: list[str] | None) -> dict[str, Any]:
    """A JSON object. What is wrong with it is a warning, or a StoreError where ``warnings`` is None."""
    try:
        data = json.loads(_bytes_of(path))
        problem = "" if isinstance(data, dict) else f"{path.name} is not a JSON object"
    except FileNotFoundError:
        data, problem = {}, f"{path.name} is missing"
    except (OSError, ValueError, RecursionError) as error:
        data, problem = {}, f"{path.name} cannot be read: {error}"
    if problem and warnings is None:
        hint = "the file was cut off or changed: take it from a copy of the run"
        raise StoreError(f"{path.parent}: {problem}", hint=hint)
    if problem and warnings is not None:
        warnings.append(problem)
    return data if isinstance(data, dict) else {}


def _bytes_of(path: Path) -> bytes:
    """A file of a run folder, which may come from anywhere: a pipe would be waited for, a device has no end.

    Raises OSError.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file")
    if found.st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 30} GiB")
    return path.read_bytes()


def read_lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        warnings.append(f"{path.name} is missing")
        return []
    try:
        *lines, rest = _bytes_of(path).split(b"\n")
    except OSError as error:
        warnings.append(f"{path.name} cannot be read: {error}")
        return []
    if rest:
        warnings.append(f"{path.name}: the last line is cut off and is left out")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            warnings.append(f"{path.name}: line {number} cannot be read and is left out")
    return rows
