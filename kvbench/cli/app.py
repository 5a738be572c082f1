"""The command line: which commands there are, in their order. Each parses, calls one function, and prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from kvbench.cli import deployments, measure, runs, setup
from kvbench.cli.console import with_exit_code
from kvbench.cli.lab import lab
from kvbench.version import __version__

RENAMED: dict[str, str] = {}
"""Former name of a command → its name now. The former one works for one more release: hidden, and says so."""


class _Commands(typer.core.TyperGroup):
    """The commands by their names, and by their former ones."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        now = RENAMED.get(cmd_name)
        if now is not None:
            typer.echo(
                f"kvbench: {cmd_name} is called {now} now; the next release drops the old name", err=True
            )
        return super().get_command(ctx, now or cmd_name)


app = typer.Typer(
    name="kvbench",
    cls=_Commands,
    help="Finds the highest request rate that prefill/decode (P/D) serving holds under its SLO, "
    "per KV connector and input length, and refuses numbers it cannot stand behind.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS: dict[str, Callable[..., int | None]] = {
    "sweep": measure.sweep,
    "bench": measure.bench,
    "launch": deployments.launch,
    "plan": measure.plan,
    "simulate": measure.simulate,
    "microbench": measure.microbench,
    "schema": setup.schema,
    "report": runs.report,
    "import": runs.import_,
    "compare": runs.compare,
    "bundle": runs.bundle,
    "export": runs.export,
    "watch": runs.watch,
    "timeline": runs.timeline,
    "doctor": setup.doctor,
    "selftest": measure.selftest,
    "init": setup.init,
    "ps": deployments.ps,
    "stop": deployments.stop,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(with_exit_code(_function))

app.add_typer(lab, name="lab")
hosts = typer.Typer(help="The hosts of a scenario: install kvbench there.", no_args_is_help=True)
hosts.command("install")(with_exit_code(setup.hosts_install))
app.add_typer(hosts, name="hosts")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """kvbench measures how the KV cache travels from prefill to decode, and what that does to serving."""


def main() -> None:
    """Entry point of the ``kvbench`` command."""
    app()
