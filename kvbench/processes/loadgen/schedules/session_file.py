"""The file in which a load generator gets a load of sessions."""

from __future__ import annotations

import zipfile

import numpy as np

from kvbench.core.sessions.session_load import SessionLoad, load_of_arrays
from kvbench.errors import InputError


def read_session_load(path: str) -> SessionLoad:
    """The load in an npz file of ``core/sessions/session_load.py``. Raises InputError."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return load_of_arrays(arrays)
    except OSError as error:
        raise InputError(f"cannot read sessions_path {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"sessions_path {path} has no load of sessions: {error}") from error
