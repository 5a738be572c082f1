"""The command line: parse, call one function, print. Heavy imports stay inside the functions."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench import __version__
from kvbench.errors import EXIT_INTERRUPTED, KvbenchError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="kvbench",
    help="Finds the highest request rate that prefill/decode (P/D) serving holds under its SLO, "
    "per KV connector and input length, and refuses numbers it cannot stand behind.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ScenarioArg = Annotated[
    str, typer.Argument(help="A scenario file, or the name of a bundled one.", show_default="quickstart")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a scenario value, e.g. slo.ttft_ms=300. Repeatable."
    ),
]
ConnectorOption = Annotated[
    list[str] | None,
    typer.Option("--connector", metavar="NAME", help="Only this connector of the scenario. Repeatable."),
]
OutputOption = Annotated[Path, typer.Option("--output", metavar="DIR", help="Where run folders are written.")]
BaseUrlOption = Annotated[
    str | None,
    typer.Option(
        "--base-url", metavar="URL", help="Measure a running OpenAI-compatible server; needs no scenario."
    ),
]
InputLenOption = Annotated[
    str | None, typer.Option("--input-len", metavar="N[,N…]", help="Input lengths in tokens.")
]
OutputLenOption = Annotated[
    int | None, typer.Option("--output-len", metavar="N", help="Output tokens per request.")
]
TtftOption = Annotated[
    float | None, typer.Option("--ttft-ms", metavar="MS", help="SLO: time to first token.")
]
TpotOption = Annotated[
    float | None, typer.Option("--tpot-ms", metavar="MS", help="SLO: time per output token.")
]
AttainmentOption = Annotated[
    float | None,
    typer.Option(
        "--attainment", metavar="SHARE", help="Share of requests that must meet every limit, e.g. 0.95."
    ),
]


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


@app.command()
def sweep(
    scenario: ScenarioArg = "quickstart",
    set_: SetOption = None,
    connector: ConnectorOption = None,
    base_url: BaseUrlOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    ttft_ms: TtftOption = None,
    tpot_ms: TpotOption = None,
    attainment: AttainmentOption = None,
    output: OutputOption = Path("results"),
) -> None:
    """Search the highest request rate that meets the SLO, for each connector and input length."""
    from kvbench import sweep as sweeping
    from kvbench.request import Wish

    with _said_clearly():
        wish = Wish(
            scenario=scenario,
            overrides=tuple(set_ or ()),
            connectors=tuple(connector or ()),
            base_url=base_url,
            input_len=input_len,
            output_len=output_len,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            attainment=attainment,
        )
        raise typer.Exit(sweeping.command(wish, output, _console()))


@app.command()
def bench(
    rate: Annotated[
        float, typer.Option("--rate", metavar="REQ/S", help="The request rate to offer.", min=0.001)
    ],
    scenario: ScenarioArg = "quickstart",
    set_: SetOption = None,
    connector: ConnectorOption = None,
    base_url: BaseUrlOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    ttft_ms: TtftOption = None,
    tpot_ms: TpotOption = None,
    output: OutputOption = Path("results"),
) -> None:
    """Measure one request rate, for each connector and input length."""
    from kvbench import sweep as sweeping
    from kvbench.request import Wish

    with _said_clearly():
        wish = Wish(
            scenario=scenario,
            overrides=tuple(set_ or ()),
            connectors=tuple(connector or ()),
            base_url=base_url,
            input_len=input_len,
            output_len=output_len,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            fixed_rate=rate,
        )
        raise typer.Exit(sweeping.command(wish, output, _console()))


@app.command()
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
) -> None:
    """Bring one deployment up, print its URLs, and keep it until Ctrl-C."""
    from kvbench import launch as launching

    with _said_clearly():
        if print_:
            raise typer.Exit(launching.print_commands(scenario, connector, tuple(set_ or ()), nsys=nsys))
        raise typer.Exit(launching.command(scenario, connector, tuple(set_ or ()), _console(), nsys=nsys))


@app.command()
def plan(
    scenario: ScenarioArg = "quickstart",
    set_: SetOption = None,
    connector: ConnectorOption = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, with each process's argv.")
    ] = False,
) -> None:
    """Print what a sweep would do: cells, processes, ports, time. Starts nothing."""
    from kvbench import planning
    from kvbench.request import Wish

    with _said_clearly():
        wish = Wish(scenario=scenario, overrides=tuple(set_ or ()), connectors=tuple(connector or ()))
        planning.command(wish, _console(), as_json=json_)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the scenario format, for editors."""
    import json

    from kvbench.core.scenario import scenario_schema
    from kvbench.scenario_files import registry

    with _said_clearly():
        typer.echo(json.dumps(scenario_schema(registry()), indent=2))


@app.command()
def report(
    run: Annotated[list[Path], typer.Argument(help="Run folders.", exists=True, file_okay=False)],
    force: Annotated[
        bool,
        typer.Option("--force", help="Put runs into one table although they are not comparable; marks them."),
    ] = False,
) -> None:
    """Write the report of a run again from its raw files, or compare several runs."""
    from kvbench import report as reporting

    with _said_clearly():
        reporting.command(run, _console(), force=force)


@app.command()
def timeline(
    run: Annotated[Path, typer.Argument(help="A run folder.", exists=True, file_okay=False)],
    trial: Annotated[
        str | None, typer.Argument(help="A trial's id; by default the last.", show_default=False)
    ] = None,
) -> None:
    """Write a trial's requests through client, router, P, KV transfer and D as a trace for Perfetto."""
    from kvbench import timeline as drawing

    with _said_clearly():
        raise typer.Exit(drawing.command(run, trial, _console()))


@app.command()
def doctor(
    scenario: Annotated[
        str | None,
        typer.Argument(help="A scenario to look at too: its file or bundled name.", show_default=False),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Say what is installed here, what each connector lacks, and how to mend it."""
    from kvbench import doctor as examination

    with _said_clearly():
        raise typer.Exit(examination.command(_console(), scenario, tuple(set_ or ())))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The scenario file to write.")] = Path("scenario.yaml"),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take every default for this machine.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a commented scenario for this machine: devices found, connectors that can run, SLOs asked."""
    from kvbench import wizard

    with _said_clearly():
        raise typer.Exit(wizard.command(file, _console(), yes=yes, force=force))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160, soft_wrap=True)
    return console


@contextmanager
def _said_clearly() -> Iterator[None]:
    """Errors become one clear message with a hint and the right exit code; SIGTERM acts like Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KvbenchError as error:
        typer.echo(f"kvbench: {error.message}", err=True)
        if error.hint:
            typer.echo(f"hint: {error.hint}", err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        typer.echo("kvbench: interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the ``kvbench`` command."""
    app()


if __name__ == "__main__":
    main()
