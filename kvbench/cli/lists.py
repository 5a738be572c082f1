"""Commands that list: the scenarios that are bundled, the runs that were made."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli.console import console

JsonOption = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
FIRST = 20


def scenarios(json_: JsonOption = False) -> None:
    """List the bundled scenarios: what each is for, on which engine, with which connectors."""
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
                "connectors": [each.label for each in scenario.connectors],
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
        typer.Argument(help="The folder they lie in; else KVBENCH_OUTPUT, else results.", show_default=False),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help=f"All, not only the latest {FIRST}.")] = False,
    json_: JsonOption = False,
) -> None:
    """List the runs that were made, the latest first: when, what, how they ended."""
    from rich.table import Column, Table

    from kvbench.results.run_list import listed_runs, output_folder

    root = folder or output_folder()
    found = listed_runs(root)
    shown = found if all_ else found[:FIRST]
    if json_:
        print(json.dumps([{**asdict(run), "path": str(run.path)} for run in shown], indent=2))
        return
    terminal = console()
    titles = ("started (UTC)", "kind", "scenario", "status", "run")
    table = Table(*(Column(each, overflow="fold") for each in titles), box=None, padding=(0, 2, 0, 0))
    for run in shown:
        started = f"{run.started_at[:10]} {run.started_at[11:16]}"
        status = run.problem or ", ".join((run.status, *run.labels))
        style = "dim" if run.problem else ""
        table.add_row(started, run.kind, run.scenario, status, str(run.path), style=style)
    if not found:
        terminal.print(f"no run in {root} yet", markup=False)
        return
    terminal.print(table)
    if len(found) > len(shown):
        terminal.print(f"and {len(found) - len(shown)} more: --all", markup=False)
    terminal.print("`latest`, or the end of a name, stands for a run: kvbench report latest", markup=False)
