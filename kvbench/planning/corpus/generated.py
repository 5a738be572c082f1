"""Sessions made after a corpus: counted like recorded ones, and written so that other tools replay them."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Final

from kvbench.core.sessions.corpus import Corpus
from kvbench.core.sessions.corpus_formats import agentic_lines
from kvbench.core.sessions.generator import fitted_model
from kvbench.errors import InputError
from kvbench.files import replaced, said_clearly

MOST_BLOCKS: Final = 50_000_000
"""Of all prompts together, 400 MB of ids."""


def made_after(
    corpus: Corpus, source: str, sessions: int, seed: int, write: Path | None
) -> tuple[Corpus, str]:
    """So many sessions after those of a corpus, written where that is asked for, and what they are called."""
    made = generated_corpus(corpus, sessions, seed)
    if write is not None:
        write_corpus(write, made)
    return made, f"{sessions} sessions made after {source} (seed {seed})"


def generated_corpus(corpus: Corpus, sessions: int, seed: int) -> Corpus:
    """So many sessions after those of a corpus. Raises InputError if they are too many to be held."""
    model = fitted_model(corpus)
    held = sum(len(turn.blocks) for each in corpus.sessions for turn in each.turns) / model.sessions
    if sessions * held > MOST_BLOCKS:
        raise InputError(
            f"the prompts of {sessions:,} sessions have about {sessions * held:,.0f} blocks; "
            f"at most {MOST_BLOCKS:,} are held",
            hint=f"ask for {max(1, int(MOST_BLOCKS / held)):,} sessions or fewer",
        )
    plan = model.generate(sessions, seed)
    left = sum(each.subagent_count() for each in corpus.sessions)
    notes = (
        "sessions with equally long tools and system prompts are taken to have the same ones",
        "servers that answer at once: a session lasts its think times",
        *([f"the {left} sub-agents of the recorded sessions are not made anew"] if left else []),
    )
    made = plan.corpus()
    return Corpus(made.sessions, made.block_tokens, made.scope, notes)


def write_corpus(path: Path, corpus: Corpus) -> None:
    """An agentic trace, packed; the same corpus gives the same bytes. Raises InputError."""
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} is not there", hint="make it first")
    with said_clearly(path), replaced(path) as temporary, temporary.open("wb") as file:
        packed = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=6)
        with packed, io.TextIOWrapper(packed, encoding="ascii") as text:
            for each in agentic_lines(corpus):
                text.write(json.dumps(each, separators=(",", ":")) + "\n")
