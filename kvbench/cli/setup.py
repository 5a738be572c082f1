"""Commands that prepare: what is here and what is missing, a scenario, kvbench on other hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.console import console
from kvbench.cli.options import JsonOption, ScenarioArg, SetOption
from kvbench.errors import InputError


def schema() -> None:
    """Print the JSON Schema of the scenario format, for editors."""
    import json

    from kvbench.core.scenario.scenario import scenario_schema
    from kvbench.planning.scenario_files import registry

    typer.echo(json.dumps(scenario_schema(registry()), indent=2))


def doctor(
    scenario: Annotated[
        str | None,
        typer.Argument(help="A scenario to look at too: its file or bundled name.", show_default=False),
    ] = None,
    set_: SetOption = None,
    gates: Annotated[
        bool, typer.Option("--gates", help="Only list what every trial is checked for.")
    ] = False,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Check the scenario's hosts, and who reaches whom.")
    ] = False,
    json_: JsonOption = False,
) -> int:
    """Say what is installed here, what each connector lacks, and how to fix it."""
    from kvbench.planning.doctor import everywhere
    from kvbench.planning.doctor import gates as gatetable

    if gates:
        return gatetable.command(console(), as_json=json_)
    if hosts:
        from kvbench.planning.doctor import hosts as doctor_hosts

        if scenario is None:
            raise InputError("--hosts checks the hosts of a scenario: name one")
        return doctor_hosts.command(scenario, tuple(set_ or ()), console(), as_json=json_)
    return everywhere.command(console(), scenario, tuple(set_ or ()), as_json=json_)


def init(
    file: Annotated[Path, typer.Argument(help="The scenario file to write.")] = Path("scenario.yaml"),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take every default for this machine.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="A,B", help="Engines run on these hosts, reached by ssh: P, then D."),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="On the nodes that a Slurm job gives.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="On the nodes of a Ray cluster.")] = False,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="A server that is up; nothing is started.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="Which of that server's models.")
    ] = "",
) -> int:
    """Write a commented scenario for this machine, for hosts, Slurm or Ray, or for a server that is up."""
    from kvbench.planning.wizard import init as new_scenario
    from kvbench.planning.wizard.init_elsewhere import Elsewhere

    elsewhere = Elsewhere.asked(hosts, slurm, ray, base_url, model)
    return new_scenario.command(file, console(), yes=yes, force=force, elsewhere=elsewhere)


def hosts_install(
    scenario: ScenarioArg,
    set_: SetOption = None,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", help="The wheel to install; else one is built of what runs here."),
    ] = None,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(
            "--wheelhouse",
            metavar="DIR",
            help="Wheels of all that it needs, brought along: for hosts that reach no registry.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    bring: Annotated[
        bool, typer.Option("--bring", help="Fetch these wheels here, in the versions that are here.")
    ] = False,
    extra: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="NAME", help="An extra of kvbench to install too, such as mooncake."),
    ] = None,
) -> int:
    """Copy this kvbench to each host of a scenario and install it there, in an environment of its own."""
    from kvbench.planning import install_hosts

    wanted = install_hosts.Install(wheel, wheelhouse, bring, tuple(extra or ()))
    return install_hosts.command(scenario, tuple(set_ or ()), wanted, console())
