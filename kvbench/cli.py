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
    str | None,
    typer.Option("--input-len", metavar="N[,N…]", help="Input lengths in tokens.", rich_help_panel="Load"),
]
OutputLenOption = Annotated[
    int | None,
    typer.Option("--output-len", metavar="N", help="Output tokens per request.", rich_help_panel="Load"),
]
TtftOption = Annotated[
    float | None,
    typer.Option("--ttft-ms", metavar="MS", help="SLO: time to first token.", rich_help_panel="SLO"),
]
TpotOption = Annotated[
    float | None,
    typer.Option("--tpot-ms", metavar="MS", help="SLO: time per output token.", rich_help_panel="SLO"),
]
AttainmentOption = Annotated[
    float | None,
    typer.Option(
        "--attainment",
        metavar="SHARE",
        help="Share of requests that must meet every limit, e.g. 0.95.",
        rich_help_panel="SLO",
    ),
]
SloOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        metavar="LIMIT",
        help="A limit, instead of the scenario's: 'ttft_ms p90 <= 5000', 'tpot_ms mean <= 50'. Repeatable.",
        rich_help_panel="SLO",
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="sustained (default), burst, sustained,burst, fixed or trace.",
        rich_help_panel="Method",
    ),
]
RatesOption = Annotated[
    str | None,
    typer.Option(
        "--rates",
        metavar="R[,R…]",
        help="Measure these rates, without an SLO (method fixed).",
        rich_help_panel="Method",
    ),
]
TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Replay recorded requests: a Mooncake trace, JSON lines or CSV.",
        rich_help_panel="Method",
    ),
]
TimeScaleOption = Annotated[
    float | None,
    typer.Option(
        "--time-scale",
        metavar="X",
        help="Multiply the time between traced requests: 0.5 is twice as fast.",
        rich_help_panel="Method",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Load generator processes; by default as many as the load needs.",
        rich_help_panel="Load",
    ),
]
DirectOption = Annotated[
    bool,
    typer.Option(
        "--direct",
        help="The load generator asks P and D itself, with no router in the path.",
        rich_help_panel="Load",
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
    slo: SloOption = None,
    method: MethodOption = None,
    rates: RatesOption = None,
    trace: TraceOption = None,
    time_scale: TimeScaleOption = None,
    workers: WorkersOption = None,
    direct: DirectOption = False,
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
            slo=tuple(slo or ()),
            method=method,
            rates=rates,
            trace=trace,
            time_scale=time_scale,
            workers=workers,
            direct=direct,
        )
        raise typer.Exit(sweeping.command(wish, output, _console()))


@app.command()
def bench(
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="REQ/S", help="The request rate to offer; of a --trace its own.", min=0.001
        ),
    ] = None,
    scenario: ScenarioArg = "quickstart",
    set_: SetOption = None,
    connector: ConnectorOption = None,
    base_url: BaseUrlOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    ttft_ms: TtftOption = None,
    tpot_ms: TpotOption = None,
    slo: SloOption = None,
    trace: TraceOption = None,
    time_scale: TimeScaleOption = None,
    workers: WorkersOption = None,
    direct: DirectOption = False,
    router_cost: Annotated[
        bool,
        typer.Option(
            "--router-cost", help="Offer the same load through the router and directly, in turns; compare."
        ),
    ] = False,
    output: OutputOption = Path("results"),
) -> None:
    """Measure one request rate, for each connector and input length."""
    from kvbench import sweep as sweeping
    from kvbench.request import Wish

    if rate is None and trace is None:
        raise typer.BadParameter("give the rate to offer, or a --trace to replay", param_hint="--rate")
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
            slo=tuple(slo or ()),
            trace=trace,
            time_scale=time_scale,
            replay=trace is not None,
            fixed_rate=rate,
            workers=workers,
            direct=direct,
            both_modes=router_cost,
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
def simulate(
    scenario: ScenarioArg = "quickstart",
    set_: SetOption = None,
    connector: ConnectorOption = None,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            metavar="RUN",
            help="A measured run folder: KV bandwidth and per-request overheads are taken from it.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    splits: Annotated[
        str | None,
        typer.Option("--splits", metavar="P:D[,P:D…]", help="Compare these numbers of P and D instances."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help="Compare all splits of so many instances.", min=2, max=64),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="REQ/S", help="Only this rate, no search.", min=0.001),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the comparison of splits as JSON.")] = False,
    output: OutputOption = Path("results"),
) -> None:
    """Predict a sweep on virtual time in seconds: same plan, search and gates, but nothing is started."""
    from kvbench import simulate as simulating
    from kvbench import splits as splitting
    from kvbench.request import Wish

    with _said_clearly():
        wish = Wish(
            scenario=scenario,
            overrides=tuple(set_ or ()),
            connectors=tuple(connector or ()),
            fixed_rate=rate,
        )
        if splits is not None or gpus is not None:
            chosen = splitting.Choice(splits, gpus, json_)
            raise typer.Exit(splitting.command(wish, chosen, output, _console(), like))
        raise typer.Exit(simulating.command(wish, output, _console(), like))


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
    gates: Annotated[
        bool, typer.Option("--gates", help="Only list what every trial is checked for.")
    ] = False,
) -> None:
    """Say what is installed here, what each connector lacks, and how to mend it."""
    from kvbench import doctor as examination
    from kvbench import gatetable

    with _said_clearly():
        if gates:
            raise typer.Exit(gatetable.command(_console()))
        raise typer.Exit(examination.command(_console(), scenario, tuple(set_ or ())))


@app.command()
def selftest(
    streams: Annotated[
        str, typer.Option("--streams", metavar="N[,N…]", help="Streams that are open at a time.")
    ] = "10,100,300,1000",
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="How long each is measured.", min=1.0, max=600.0)
    ] = 5.0,
    json_: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the figures as JSON to a file, too."),
    ] = None,
) -> None:
    """Measure this host's own error and ceiling against a server with an exact schedule."""
    from kvbench import selftest as testing

    with _said_clearly():
        raise typer.Exit(testing.command(streams, seconds, _console(), as_json=json_, output=output))


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
