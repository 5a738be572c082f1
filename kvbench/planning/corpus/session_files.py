"""The sessions that a scenario asks for, with their corpus where they have one."""

from __future__ import annotations

from pathlib import Path

from kvbench.core.scenario.sessions.sessions_section import Sessions
from kvbench.core.sessions.session_source import SessionSource, source_of
from kvbench.planning.corpus.corpus_files import load_corpus


def session_source(wanted: Sessions) -> SessionSource:
    """Reads the corpus, if one is named. Raises InputError."""
    corpus = None if wanted.source == "shape" else load_corpus(Path(wanted.path), wanted.format)
    return source_of(wanted, corpus)
