"""Commands for sessions: what a recorded corpus of them asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.console import console
from kvbench.cli.options import JsonOption
from kvbench.errors import InputError


def complete_format(incomplete: str) -> Iterator[str]:
    """Formats of corpora."""
    from kvbench.planning.corpus_files import AUTO, FORMATS

    yield from (name for name in (AUTO, *FORMATS) if name.startswith(incomplete))


def complete_model(incomplete: str) -> Iterator[str]:
    """Models whose KV cache is known."""
    from kvbench.core.physics import MODELS

    yield from (name for name in MODELS if name.startswith(incomplete))


def corpus(
    file: Annotated[Path, typer.Argument(help="A file of sessions, or a folder of them.", metavar="FILE")],
    format_: Annotated[
        str,
        typer.Option("--format", help="Its format; told by its keys.", autocompletion=complete_format),
    ] = "auto",
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N,N", help="Caches to ask for, in tokens. 1000..8000 doubles."),
    ] = None,
    gb: Annotated[
        list[float] | None,
        typer.Option("--gb", metavar="GB", help="A cache to ask for, of --model. Repeatable.", min=1e-6),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Whose KV cache GB are.", autocompletion=complete_model),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option("--output-len", help="Tokens of answers without a length (aiperf).", min=1),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option("--generate", metavar="N", help="Make N sessions after them, and tell of those.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is made.", min=0)] = 0,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write what is made, as agentic .jsonl.gz.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw reuse by size, as .png or .svg.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Tell what recorded sessions ask for: turns, lengths, think times, and what caches could reuse."""
    from kvbench.core.sessions.corpus import CorpusFigures
    from kvbench.core.units import parse_counts
    from kvbench.planning.corpus_files import load_corpus
    from kvbench.planning.corpus_table import corpus_report, made_after, print_report

    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise InputError(f"{plot} is the name of no picture", hint="end it in .png or .svg")
    if write is not None and (generate is None or not write.name.endswith(".jsonl.gz")):
        raise InputError("--write is for sessions that are made", hint="--generate N --write FILE.jsonl.gz")
    sessions, source = load_corpus(file, format_, output_len), file.name
    if generate is not None:
        sessions, source = made_after(sessions, source, generate, seed, write)
    figures = CorpusFigures(sessions)
    asked = parse_counts(tokens) if tokens else ()
    report = corpus_report(source, figures, asked, gb or (), model)
    print_report(report, console(), as_json=json_)
    if plot is not None:
        from kvbench.report.plots.sessions import offered_reuse_figure
        from kvbench.report.plots.style import save

        save(offered_reuse_figure(figures, source, report.model), plot)
