"""Commands on run folders and deployments: report, import, compare, share, follow, launch, list, stop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli.console import console, import_numpy
from kvbench.planning.options import JsonOption, OutputOption, RunArg, RunsArg, ScenarioArg, SetOption

ForceComparisonOption = Annotated[
    bool,
    typer.Option("--force", help="Compare runs that are not comparable; marks them."),
]


def report(
    run: RunsArg,
    force: ForceComparisonOption = False,
    dark: Annotated[
        bool, typer.Option("--dark", help="Also draw the figures for a dark background: figures/*-dark.*.")
    ] = False,
    png: Annotated[bool, typer.Option("--png", help="Also draw the figures as PNG, for slides.")] = False,
    json_: JsonOption = False,
) -> None:
    """Rebuild a run's report from its raw files, or compare several runs."""
    import_numpy()
    from kvbench.report import report as reporting

    reporting.command(run, console(), force=force, dark=dark, png=png, as_json=json_)


def import_(
    files: Annotated[
        list[Path], typer.Argument(help="Files, or folders, with results of other tools.", metavar="FILE…")
    ],
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="Input format; default: detected."),
    ] = None,
    output: OutputOption = Path("results"),
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The run's name; else the first file's.")
    ] = None,
    connector: Annotated[
        str | None,
        typer.Option("--connector", metavar="NAME", help="KV connector of rows without one."),
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
            help="Axis: connector, protocol, nics, tp, input_len, rate, run; default: what differs.",
        ),
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", metavar="AXIS[,AXIS…]", help="Sort the rows by these axes.")
    ] = "",
    group: Annotated[
        str, typer.Option("--group", metavar="AXIS", help="One table per value of this axis.")
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
            "--ci", help="Verdict for a pipeline only; exit code 4: a rate got worse, 6: inconclusive."
        ),
    ] = False,
    worse_than: Annotated[
        str, typer.Option("--worse-than", metavar="SHARE", help="With --ci: loss that raises an alarm.")
    ] = "5%",
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the verdict as JUnit XML.")
    ] = None,
    comment: Annotated[
        Path | None, typer.Option("--comment", metavar="FILE", help="Write it as a Markdown comment.")
    ] = None,
    force: ForceComparisonOption = False,
) -> int:
    """Compare the highest rates of several runs, or of the connectors within a run."""
    from kvbench.report import compare as comparing
    from kvbench.report.ci_verdict import share_of

    axes = tuple(axis.strip() for axis in sort.split(",") if axis.strip())
    options = comparing.CompareOptions(
        by, axes, group, "json" if json_ else format_, force, before, ci, share_of(worse_than), junit, comment
    )
    return comparing.command(run, options, console())


def verify(
    run: RunArg,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Check that a run folder is unchanged, and that its verdicts follow from its requests."""
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
        typer.Option("--also", metavar="WORD", help="Also remove this word everywhere. Repeatable."),
    ] = None,
    without_logs: Annotated[bool, typer.Option("--without-logs", help="Omit the processes' logs.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also pack a damaged run; marks it.")] = False,
) -> None:
    """Pack a run for sharing, without host names, addresses, keys, users and paths; list what was removed."""
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
        bool, typer.Option("--serve", help="Also show a live page, for browsers on this machine only.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="The page's port; 0: any free one.", min=0, max=65535)
    ] = 0,
) -> int:
    """Follow a run until it ends: progress, current curve, queues, NICs, verdicts."""
    from kvbench.report import watch as watchrun

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


ListJsonOption = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
FIRST = 20


def scenarios(json_: ListJsonOption = False) -> None:
    """List the bundled scenarios: purpose, engine, connectors."""
    from rich.padding import Padding

    from kvbench.planning.scenario_files import bundled_names, load_scenario

    rows: list[dict[str, Any]] = []
    for name in bundled_names():
        scenario, _ = load_scenario(name)
        rows.append(
            {
                "name": name,
                "engine": scenario.deployment.engine,
                "launcher": scenario.deployment.launcher,
                "connectors": [connector.label for connector in scenario.connectors],
                "description": " ".join(scenario.description.split()),
            }
        )
    if json_:
        print(json.dumps(rows, indent=2))
        return
    terminal = console()
    for row in rows:
        where = "" if row["launcher"] == "local" else f", {row['launcher']}"
        what = f"{row['engine']}{where}: {', '.join(row['connectors'])}"
        terminal.print(f"{row['name']}  ({what})", markup=False)
        terminal.print(Padding(row["description"], (0, 0, 0, 4)))


def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder of the runs; default: KVBENCH_OUTPUT, else results.", show_default=False),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help=f"All, not only the latest {FIRST}.")] = False,
    json_: ListJsonOption = False,
) -> None:
    """List runs, the latest first, with scenario and outcome."""
    from kvbench.core.fitted_table import FittedColumn, Grid
    from kvbench.report.terminal import print_text
    from kvbench.results.run import REFERENCE, listed_runs, output_folder

    root = folder or output_folder()
    found = listed_runs(root, reference=False)
    shown = found if all_ else found[:FIRST]
    if json_:
        print(json.dumps([{**asdict(run), "path": str(run.path)} for run in shown], indent=2))
        return
    terminal = console()
    columns = [
        FittedColumn(title, "left") for title in ("started (UTC)", "kind", "scenario", "status", "run")
    ]
    cells = [
        (
            f"{run.started_at[:10]} {run.started_at[11:16]}",
            run.kind,
            run.scenario,
            run.problem or ", ".join((run.status, *run.labels)),
            str(run.path),
        )
        for run in shown
    ]
    for line in Grid(columns, cells, ruled=False).fitted(None).lines if cells else ():
        print_text(terminal, line.text.rstrip(), indent=len("2026-01-01 00:00  "))
    if not found:
        print_text(terminal, f"no run in {root} yet")
    if len(found) > len(shown):
        print_text(terminal, f"and {len(found) - len(shown)} more: --all")
    if (root / REFERENCE).is_dir():
        print_text(terminal, f"recorded with kvbench: kvbench runs {root / REFERENCE}")
    if found:
        print_text(terminal, "name a run by `latest` or the end of its name: kvbench report latest")


ElsewhereArg = Annotated[
    str | None, typer.Argument(help="Scenario whose hosts are included.", show_default=False)
]


def launch(
    scenario: ScenarioArg = "quickstart",
    connector: Annotated[
        str | None,
        typer.Option("--connector", metavar="NAME", help="Which connector; by default the first."),
    ] = None,
    set_: SetOption = None,
    nsys: Annotated[
        bool,
        typer.Option("--nsys", help="Start each instance under NVIDIA's nsys; reports are next to the logs."),
    ] = False,
    print_: Annotated[
        bool, typer.Option("--print", help="Only print the exact shell commands; for any machine.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FOLDER",
            help="Write the emulated engine's tokenizer to this folder, for other clients.",
        ),
    ] = None,
) -> int:
    """Start one deployment, print its URLs, and keep it until Ctrl-C."""
    from kvbench.deployment import launch as launching

    sets = tuple(set_ or ())
    if tokenizer is not None:
        launching.write_tokenizer(scenario, sets, tokenizer, console())
    if print_:
        return launching.print_commands(scenario, connector, sets, nsys=nsys)
    return launching.command(scenario, connector, sets, console(), nsys=nsys)


def diagnose(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOG]…", help="Log files, or folders of them; - or none reads stdin.", show_default=False
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option("--protocol", metavar="NAME", help="The requested transport, such as rdma."),
    ] = "",
    json_: JsonOption = False,
) -> int:
    """Find known problems in server logs: cause, line, and what to do."""
    from kvbench.deployment.diagnose import command

    return command(logs or [], protocol, console(), as_json=json_)


def ps(
    scenario: ElsewhereArg = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> int:
    """List kvbench's processes, running or left by a crash, here and on a scenario's hosts."""
    from kvbench.deployment import launch as launching

    return launching.ps(scenario, tuple(set_ or ()), console(), as_json=json_)


def stop(
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Only this run: its name, as `ps` lists it.")
    ] = "",
    all_: Annotated[bool, typer.Option("--all", help="All runs of this user.")] = False,
    scenario: ElsewhereArg = None,
    set_: SetOption = None,
) -> int:
    """End the processes of one run or of all runs, here and on a scenario's hosts.

    Also remove local temporary folders of killed runs.
    """
    from kvbench.deployment import launch as launching

    return launching.stop(run, scenario, tuple(set_ or ()), console(), everything=all_)
