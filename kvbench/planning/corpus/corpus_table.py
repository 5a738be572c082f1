"""``kvbench corpus``: what a corpus asks for, and what of it could be reused, on a terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.physics import MODELS, ModelShape
from kvbench.core.sessions.corpus import QUANTILES, CapacityRow, CorpusFigures, Spread
from kvbench.errors import InputError

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
