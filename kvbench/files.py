"""Crash-safe files, written atomically or appended as synced lines, and temporary folders.

Readers warn about torn last lines and missing files. A temporary folder's owner holds a lock; ``kvbench runs
stop`` removes unlocked ones, unless kept."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvbench.errors import StoreError

MOST_BYTES: Final = 2 << 30
"""Largest JSON file that is read, in bytes: ten times the size of a hundred thousand trials."""


Announcer: TypeAlias = Callable[[Path], AbstractContextManager[None]]
"""Context around replacing a file; gets the temporary path."""


def _unannounced(_: Path) -> AbstractContextManager[None]:
    return nullcontext()


def write_json(path: Path, data: Mapping[str, Any], announced: Announcer = _unannounced) -> None:
    write_bytes(path, _encode(data, indent=2) + b"\n", announced)


def line_of(data: Mapping[str, Any]) -> bytes:
    return _encode(data) + b"\n"


def write_bytes(path: Path, content: bytes, announced: Announcer = _unannounced) -> None:
    with replaced(path, announced) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replaced(path: Path, announced: Announcer = _unannounced) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; its content is synced and renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        handle = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        with announced(temporary):
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _encode(data: Any, indent: int | None = None) -> bytes:
    """Encode strict JSON: non-finite numbers become null, lone surrogates escapes."""
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
    """Open a run folder's file for appending, without following links. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def append_bytes(handle: int, content: bytes, path: Path | None = None) -> int:
    """Append and sync all or nothing; return the file size in bytes. ``path``: raise StoreError if it is no
    longer the opened file."""
    if handle < 0:
        raise StoreError("the run folder is already finished")
    rest = memoryview(content)
    size = os.fstat(handle).st_size
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    except BaseException:  # no space left, or Ctrl-C: half a line would spoil the next one
        os.ftruncate(handle, size)
        raise
    status = os.fstat(handle)
    if path is not None and not _is_at(path, status):
        raise StoreError(
            f"{path} was removed or replaced while it was written: its data are lost",
            hint="only kvbench may write to a run's folder; start a new run",
        )
    return status.st_size


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino, found.st_size) == (status.st_dev, status.st_ino, status.st_size)


def cut_torn_line(path: Path) -> None:
    """Remove a torn last line."""
    if not path.is_file():
        return
    content = bytes_of(path)
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "rb+") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
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
    """Read a JSON object. Problems are appended to ``warnings``, or raised as StoreError without a list."""
    try:
        data = json.loads(bytes_of(path))
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


def bytes_of(path: Path) -> bytes:
    """Read a run folder's file, which may be untrusted: pipes and devices are refused. Raises OSError."""
    with open(open_read(path), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 30} GiB")
        return file.read()


def open_read(path: Path) -> int:
    """Open a run folder's file for reading, without links or pipes. Raises OSError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed") from error
        raise


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return ``did you mean A, B or C? `` with up to three similar names, or ""."""
    near = difflib.get_close_matches(wrong, list(dict.fromkeys(names)), n=3)
    listed = " or ".join(filter(None, (", ".join(near[:-1]), *near[-1:])))
    return f"did you mean {listed}? " if near else ""


def similar_files(path: Path, *others: str) -> str:
    """Return ``did you mean …? `` for a missing file, from its folder and ``others``."""
    try:
        inside = [] if path.exists() else [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        inside = []
    return did_you_mean(path.name, (*inside, *others))


def require_no_links(folder: Path) -> None:
    """Raise StoreError for a link in a run folder, which would redirect writes."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise StoreError(
                f"{path} is a link, and a run cannot be resumed through links",
                hint="replace it by its target, or resume a complete copy of the run",
            )


def read_lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        warnings.append(f"{path.name} is missing")
        return []
    try:
        *lines, rest = bytes_of(path).split(b"\n")
    except OSError as error:
        warnings.append(f"{path.name} cannot be read: {error}")
        return []
    if rest:
        warnings.append(f"{path.name}: the last line is cut off and is left out")
    rows = []
    for number, line in enumerate(lines, start=1):
        if (row := json_row(line)) is not None:
            rows.append(row)
        else:
            warnings.append(f"{path.name}: line {number} cannot be read and is left out")
    return rows


def json_row(line: bytes) -> dict[str, Any] | None:
    """Decode a line, or return None for torn lines and other output, such as a login shell's."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


MARKER: Final = ".kvbench-scratch"
_PREFIX: Final = "kvbench-"
_MOST_TAG_BYTES: Final = 1000


@contextmanager
def scratch(
    prefix: str, tag: str = "", *, kept_after_trouble: bool = False, parent: Path | None = None
) -> Iterator[Path]:
    """Temporary folder; ``prefix`` starts with ``kvbench-``. ``tag``: its run. ``kept_after_trouble``: an
    exception keeps it with its logs. ``parent``: other location, ignored by ``left``."""
    assert prefix.startswith(_PREFIX)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    marker = folder / MARKER
    handle = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, tag.encode()[:_MOST_TAG_BYTES])
        yield folder
    except BaseException:
        if kept_after_trouble:
            keep(folder)
        raise
    finally:
        if marker.exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def keep(folder: Path) -> None:
    (folder / MARKER).unlink(missing_ok=True)


def left() -> Iterator[tuple[Path, str]]:
    """Temporary folders of dead processes of this user, with their runs."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
                continue
            handle = os.open(folder / MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                tag = os.read(handle, _MOST_TAG_BYTES).decode("utf-8", "replace")
            finally:
                os.close(handle)
            yield folder, tag
