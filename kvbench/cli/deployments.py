"""Commands on deployments: bring one up by hand, list what runs, end it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.console import console
from kvbench.cli.options import JsonOption, ScenarioArg, SetOption

ElsewhereArg = Annotated[
    str | None, typer.Argument(help="A scenario on whose hosts to look too.", show_default=False)
]


def launch(
    scenario: ScenarioArg = "quickstart",
    connector: Annotated[
        str | None,
        typer.Option("--connector", metavar="NAME", help="Which connector; by default the first."),
    ] = None,
    set_: SetOption = None,
    nsys: Annotated[
        bool, typer.Option("--nsys", help="Start each instance under NVIDIA's nsys; reports go to the logs.")
    ] = False,
    print_: Annotated[
        bool, typer.Option("--print", help="Only print the exact shell commands; for any machine.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FOLDER",
            help="Write a tokenizer of the emulated engine's words there, for foreign clients.",
        ),
    ] = None,
) -> int:
    """Bring one deployment up, print its URLs, and keep it until Ctrl-C."""
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
        typer.Option("--protocol", metavar="NAME", help="The transport that was asked for, such as rdma."),
    ] = "",
    json_: JsonOption = False,
) -> int:
    """Say what in a server's log is known to mean trouble, where, and what to do about it."""
    from kvbench.deployment.diagnose import command

    return command(logs or [], protocol, console(), as_json=json_)


def ps(
    scenario: ElsewhereArg = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> int:
    """List what runs for kvbench, or was left by a crash: here, and on the hosts of a scenario."""
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
    """End the processes of a run, or of all runs: here, and on the hosts of a scenario.

    Temporary folders that killed runs left on this machine are removed, too.
    """
    from kvbench.deployment import launch as launching

    return launching.stop(run, scenario, tuple(set_ or ()), console(), everything=all_)
