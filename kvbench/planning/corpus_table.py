"""``kvbench corpus``: what a corpus asks for, and what of it could be reused, on a terminal or as JSON.

Sessions made after one are counted like recorded ones, and written so that other tools replay them.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.physics import MODELS, ModelShape
from kvbench.core.sessions.corpus import QUANTILES, CapacityRow, Corpus, CorpusFigures, Spread
from kvbench.core.sessions.corpus_formats import agentic_lines
from kvbench.core.sessions.generator import fitted_model
from kvbench.errors import InputError
from kvbench.files import replaced, said_clearly

if TYPE_CHECKING:
    from rich.console import Console


_LABELS: Final = {
    "turns": "turns of a session",
    "prompt_tokens": "prompt (tokens)",
    "unseen_tokens": "of it unseen (tokens)",
    "output_tokens": "answer (tokens)",
    "think_time_s": "think time (s)",
    "session_s": "session (s)",
    "session_reuse": "offered reuse (%)",
}
_HEADS: Final = ("least", "P25", "P50", "P75", "P90", "most")


@dataclass(frozen=True, eq=False)
class CorpusReport:
    """What is printed. ``capacities``: its rows; ``model``: whose KV cache the GB are, None without."""

    source: str
    figures: CorpusFigures
    capacities: Sequence[CapacityRow]
    model: ModelShape | None

    def gb(self, tokens: int | None) -> float | None:
        """GB (10⁹ bytes) of so many tokens' KV cache; None without a model or a capacity."""
        if tokens is None or self.model is None:
            return None
        return tokens * self.model.kv_bytes_per_token() / 1e9

    def to_json(self) -> dict[str, Any]:
        """Every figure; shares are of 1, lengths tokens, times seconds."""
        corpus, together = self.figures.corpus, self.figures.together
        return {
            "source": self.source,
            "notes": list(corpus.notes),
            "sessions": len(corpus.sessions),
            "requests": len(self.figures.turns),
            "subagents": sum(each.subagent_count() for each in corpus.sessions),
            "block_tokens": corpus.block_tokens,
            "blocks": together.blocks,
            "distinct_blocks": together.distinct,
            "found_blocks": together.found(),
            "offered_reuse": together.share(),
            "spreads": {
                name: dict(zip(map(str, QUANTILES), each, strict=True))
                for name, each in self.figures.spreads().items()
            },
            "model": self.model.name if self.model else None,
            "capacities": [
                {
                    "tokens": row.tokens,
                    "gb": self.gb(row.tokens),
                    "alone": row.alone,
                    "together": row.together,
                }
                for row in self.capacities
            ],
        }

    def print_to(self, terminal: Console) -> None:
        """Two tables, and what must be known of them."""
        corpus, together = self.figures.corpus, self.figures.together
        subagents = sum(each.subagent_count() for each in corpus.sessions)
        terminal.print(
            f"{self.source}: {len(corpus.sessions):,} sessions, {len(self.figures.turns):,} requests, "
            f"{subagents:,} sub-agents",
            markup=False,
        )
        terminal.print(_spread_table(self.figures.spreads()))
        if together.blocks:
            terminal.print(
                f"offered for reuse: {together.found():,} of {together.blocks:,} blocks of "
                f"{corpus.block_tokens} tokens, {100 * together.share():.1f} %",
                markup=False,
            )
            terminal.print(_capacity_table(self))
        for note in corpus.notes:
            terminal.print(f"note: {note}", markup=False)


def corpus_report(
    source: str, figures: CorpusFigures, tokens: Sequence[int], gb: Sequence[float], model: str | None
) -> CorpusReport:
    """``tokens`` and ``gb``: capacities asked for; without any the usual ones. Raises InputError."""
    shape = None if model is None else MODELS.get(model)
    if model is not None and shape is None:
        raise InputError(f"no model is called {model!r}", hint=f"there are: {', '.join(MODELS)}")
    if gb and shape is None:
        raise InputError(
            "how many tokens a capacity in GB holds depends on the model", hint="give --model as well"
        )
    asked = list(tokens)
    if shape is not None:
        asked += [int(each * 1e9 // shape.kv_bytes_per_token()) for each in gb]
    asked = sorted(set(asked)) or figures.usual_capacities()
    return CorpusReport(source, figures, figures.capacities(asked), shape)


def print_report(report: CorpusReport, terminal: Console, *, as_json: bool) -> None:
    """The whole of it."""
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.print_to(terminal)


def _spread_table(spreads: dict[str, Spread]) -> Any:
    from rich.table import Column, Table

    table = Table(
        Column(""), *(Column(each, justify="right") for each in _HEADS), box=None, padding=(0, 2, 0, 0)
    )
    for name, each in spreads.items():
        share = name == "session_reuse"
        table.add_row(
            _LABELS[name], *(f"{100 * x:.1f}" if share else f"{x:,.10g}" for x in map(_short, each))
        )
    return table


def _short(value: float) -> float:
    return round(value, 4) if abs(value) < 10 else round(value, 1) if abs(value) < 1000 else round(value)


def _capacity_table(report: CorpusReport) -> Any:
    from rich.table import Column, Table

    gb = [f"GB of {report.model.name}"] if report.model else []
    titles = ("cache (tokens)", *gb, "one a session (%)", "one for all (%)")
    table = Table(*(Column(each, justify="right") for each in titles), box=None, padding=(0, 2, 0, 0))
    for row in report.capacities:
        size = report.gb(row.tokens)
        cells = [] if report.model is None else ["–" if size is None else f"{size:,.1f}"]
        tokens = "unlimited" if row.tokens is None else f"{row.tokens:,}"
        table.add_row(tokens, *cells, f"{100 * row.alone:.1f}", f"{100 * row.together:.1f}")
    return table


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
