"""The sessions that a scenario asks for, with their corpus where they have one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvbench.core.scenario.sections import Sessions
from kvbench.core.sessions.session_load import SessionLoad, load_arrays
from kvbench.core.sessions.session_source import SessionSource, source_of
from kvbench.planning.corpus.corpus_files import load_corpus


def session_source(wanted: Sessions) -> SessionSource:
    """Reads the corpus, if one is named. Raises InputError."""
    corpus = None if wanted.source == "shape" else load_corpus(Path(wanted.path), wanted.format)
    return source_of(wanted, corpus)


def write_session_load(path: Path, load: SessionLoad) -> None:
    """The file that a load generator reads (``LoadSpec.sessions_path``)."""
    with path.open("wb") as file:
        # A numpy before 2.1 stores the flag as one more array, which nobody reads.
        np.savez(file, allow_pickle=False, **load_arrays(load))
