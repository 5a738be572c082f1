"""Commands on run folders: report, import, compare, share, follow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.choices import RunArg, RunsArg
from kvbench.cli.console import console
from kvbench.cli.options import JsonOption, OutputOption

ForceComparisonOption = Annotated[
    bool,
    typer.Option("--force", help="Put runs into one table although they are not comparable; marks them."),
]


def report(
    run: RunsArg,
    force: ForceComparisonOption = False,
    dark: Annotated[
        bool, typer.Option("--dark", help="Draw the figures for a dark background, too: figures/*-dark.*.")
    ] = False,
    png: Annotated[
        bool, typer.Option("--png", help="Draw the figures as PNG, too, as slides want them.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Write the report of a run again from its raw files, or compare several runs."""
    from kvbench.report import report as reporting

    reporting.command(run, console(), force=force, dark=dark, png=png, as_json=json_)


def import_(
    files: Annotated[
        list[Path], typer.Argument(help="Files, or folders, with results of other tools.", metavar="FILE…")
    ],
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="Which format; by default what they look like."),
    ] = None,
    output: OutputOption = Path("results"),
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The run's name; else the first file's.")
    ] = None,
    connector: Annotated[
        str | None,
        typer.Option("--connector", metavar="NAME", help="The KV connector of rows whose file names none."),
    ] = None,
    json_: JsonOption = False,
) -> int:
    """Read results of vllm bench, aiperf, guidellm, nixlbench and others into a run folder, row by row."""
    from kvbench.importers.parts import importing

    return importing.command(
        importing.ImportOptions(files, format_, name, connector), output, console(as_json=json_)
    )


def compare(
    run: RunsArg,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="AXIS",
            help="What is compared: connector, protocol, nics, tp, input_len, rate, run; else what differs.",
        ),
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", metavar="AXIS[,AXIS…]", help="Sort the rows by these axes.")
    ] = "",
    group: Annotated[
        str, typer.Option("--group", metavar="AXIS", help="A table for each level of this axis.")
    ] = "",
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help="terminal, md, csv, json or latex.")
    ] = "terminal",
    json_: JsonOption = False,
    before: Annotated[
        int,
        typer.Option("--before", metavar="N", help="The first N runs are repeats of the one before.", min=0),
    ] = 0,
    ci: Annotated[
        bool,
        typer.Option(
            "--ci", help="Only a verdict for a pipeline; exit code 4: a rate got worse, 6: inconclusive."
        ),
    ] = False,
    worse_than: Annotated[
        str, typer.Option("--worse-than", metavar="SHARE", help="With --ci: which loss is an alarm.")
    ] = "5%",
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the verdict as JUnit XML.")
    ] = None,
    comment: Annotated[
        Path | None, typer.Option("--comment", metavar="FILE", help="Write it as a Markdown comment.")
    ] = None,
    force: ForceComparisonOption = False,
) -> int:
    """What became of each highest rate from one run to the next; or who is ahead in a run, and its rows."""
    from kvbench.report import compare as comparing
    from kvbench.report.before_after.ci_verdict import share_of

    axes = tuple(axis.strip() for axis in sort.split(",") if axis.strip())
    asked = comparing.CompareOptions(
        by, axes, group, "json" if json_ else format_, force, before, ci, share_of(worse_than), junit, comment
    )
    return comparing.command(run, asked, console())


def verify(
    run: RunArg,
    json_: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> int:
    """Check that a run folder is as it was written, and that its verdicts follow from its requests."""
    from kvbench.sweep.verify import audit

    return audit.command(run, console(), as_json=json_)


def bundle(
    run: RunArg,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The archive to write; by default RUN-bundle.tar.gz here."
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="WORD", help="Remove this word, too, wherever it stands. Repeatable."),
    ] = None,
    without_logs: Annotated[
        bool, typer.Option("--without-logs", help="Leave the processes' logs out.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Pack a run that is not as it was written, too; marks it.")
    ] = False,
) -> None:
    """Pack a run for sharing, without host names, addresses, keys, user names and paths; say what went."""
    from kvbench.report import bundle as bundling
    from kvbench.sweep.verify import audit

    damaged = "" if audit.require_sound(run, force=force) else audit.DAMAGED
    bundling.command(run, bundling.BundleOptions(output, tuple(also or ()), without_logs, damaged), console())


def export(
    run: RunArg,
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help="prometheus, otel-json, csv or mlflow.")
    ] = "prometheus",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file instead of printing."),
    ] = None,
) -> None:
    """Print a run's summary as Prometheus text, OpenTelemetry JSON or CSV, or hand it to MLflow."""
    from kvbench.report import export as exporting

    exporting.command(run, format_, output, console())


def watch(
    run: RunArg,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show it as a live page, too, for browsers on this machine alone.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="The page's port; 0: any free one.", min=0, max=65535)
    ] = 0,
) -> int:
    """Follow a run while it goes on: progress, current curve, queues, NICs, verdicts; ends when it ends."""
    from kvbench.report.watch import run as watchrun

    return watchrun.command(run, console(), serve=serve, port=port)


def timeline(
    run: RunArg,
    trial: Annotated[
        str | None, typer.Argument(help="A trial's id; by default the last.", show_default=False)
    ] = None,
) -> int:
    """Write a trial's requests through client, router, P, KV transfer and D as a trace for Perfetto."""
    from kvbench.report import timeline as drawing

    return drawing.command(run, trial, console())
