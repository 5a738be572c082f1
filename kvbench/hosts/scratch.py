"""Temporary folders of kvbench's: gone with whoever made them, and found where that one was killed.

Each holds a file that says whose it is, locked for as long as its maker lives. Where nobody holds the lock
the maker is dead, and ``kvbench stop`` removes the folder. One without that file is to stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MARKER: Final = ".kvbench-scratch"
_PREFIX: Final = "kvbench-"
_MOST_TAG_BYTES: Final = 1000


@contextmanager
def scratch(
    prefix: str, tag: str = "", *, kept_after_trouble: bool = False, parent: Path | None = None
) -> Iterator[Path]:
    """A temporary folder; ``prefix`` begins with ``kvbench-``. ``tag``: the run that it belongs to.

    ``kept_after_trouble``: an exception leaves it there, for the logs in it. ``parent``: where it lies, if
    not where temporary files do; ``left`` does not look there.
    """
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
    """The folder stays where it is when its time is over."""
    (folder / MARKER).unlink(missing_ok=True)


def left() -> Iterator[tuple[Path, str]]:
    """Folders whose makers are dead, of this user, and the runs that they belonged to."""
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
