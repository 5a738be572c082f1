"""The command line: parse, call one function, print. Heavy imports stay inside the functions."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
import typer.core

from kvbench.cli.options import (
    ForceOption,
    LoadOptions,
    OutputOption,
    ResumeOption,
    ScenarioArg,
    ScenarioOptions,
    SetOption,
    asks,
)
from kvbench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, InputError, KvbenchError
from kvbench.microbench.options import MicrobenchOptions
from kvbench.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.planning.overrides import CliOptions

TRACEBACK_ENV = "KVBENCH_TRACEBACK"
_UNFORESEEN = (
    "nobody foresaw this: a file that was read may be damaged or changed by hand, or it is a mistake of "
    f"kvbench; {TRACEBACK_ENV}=1 shows where it happened"
)

Rendering = Literal["k8s"]
Command = TypeVar("Command", bound=Callable[..., "int | None"])

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

lab_app = typer.Typer(
    help="Two hosts with N shaped NICs as network namespaces on this machine: up, exec, status, down, fault.",
    no_args_is_help=True,
)
app.add_typer(lab_app, name="lab")

hosts_app = typer.Typer(help="The hosts of a scenario: install kvbench there.", no_args_is_help=True)
app.add_typer(hosts_app, name="hosts")


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


def command(function: Command) -> Command:
    """Make a function the command of its name.

    What it returns is the exit code, None is 0; an error that it raises is said clearly and brings its own.
    """

    app.command()(_with_exit_code(function))
    return function


def lab_command(name: str, **settings: Any) -> Callable[[Command], Command]:
    """Make a function the command of that name below ``kvbench lab``, in the way of ``command``."""

    def register(function: Command) -> Command:
        lab_app.command(name, **settings)(_with_exit_code(function))
        return function

    return register


def _with_exit_code(function: Callable[..., int | None]) -> Callable[..., None]:
    @functools.wraps(function)
    def run(**options: Any) -> None:
        with _said_clearly():
            raise typer.Exit(function(**options) or EXIT_OK)

    return run


@command
@asks()
def sweep(
    options: LoadOptions,
    output: OutputOption = Path("results"),
    resume: ResumeOption = None,
    force: ForceOption = False,
) -> int:
    """Search the highest request rate that meets the SLO, for each connector and input length."""
    from kvbench.sweep import sweep as sweeping

    if resume is not None:
        return _resumed(resume, "sweep", options.cli_options(), output, force)
    return sweeping.command(options.cli_options(), output, _console())


@command
@asks(without=("attainment", "method", "rates"))
def bench(
    *,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="REQ/S", help="The request rate to offer; of a --trace its own.", min=0.001
        ),
    ] = None,
    options: LoadOptions,
    router_cost: Annotated[
        bool,
        typer.Option(
            "--router-cost", help="Offer the same load through the router and directly, in turns; compare."
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Offer the loads of this run (imported, or of listed rates) instead, and compare.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    output: OutputOption = Path("results"),
    resume: ResumeOption = None,
    force: ForceOption = False,
) -> int:
    """Measure one request rate, for each connector and input length."""
    from kvbench.sweep import sweep as sweeping

    replay = options.trace is not None
    if against is not None:
        from kvbench.sweep.against import measured

        cli = replace(options.cli_options(), fixed_rate=rate, replay=replay, both_modes=router_cost)
        return measured.command(cli, against, output, _console())
    if resume is not None:
        cli = replace(options.cli_options(), fixed_rate=rate, replay=replay, both_modes=router_cost)
        return _resumed(resume, "bench", cli, output, force)
    if rate is None and not replay:
        raise typer.BadParameter("give the rate to offer, or a --trace to replay", param_hint="--rate")
    cli = replace(options.cli_options(), fixed_rate=rate, replay=replay, both_modes=router_cost)
    return sweeping.command(cli, output, _console())


@command
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
) -> int:
    """Bring one deployment up, print its URLs, and keep it until Ctrl-C."""
    from kvbench.deployment import launch as launching

    sets = tuple(set_ or ())
    if print_:
        return launching.print_commands(scenario, connector, sets, nsys=nsys)
    return launching.command(scenario, connector, sets, _console(), nsys=nsys)


@command
@asks()
def plan(
    options: ScenarioOptions,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, with each process's argv.")
    ] = False,
    render: Annotated[
        Rendering | None,
        typer.Option("--render", help="Print one deployment as manifests instead: k8s.", show_choices=False),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NAME=VALUE", help="For --render: image, gpu, rdma, …; repeatable."),
    ] = None,
) -> None:
    """Print what a sweep would do: cells, processes, ports, time. Starts nothing."""
    from kvbench.planning import plan as planning

    if render is not None:
        planning.render(options.cli_options(), with_ or ())
    else:
        planning.command(options.cli_options(), _console(), as_json=json_)


@command
@asks()
def simulate(
    options: ScenarioOptions,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            metavar="RUN",
            help="A measured run folder: KV bandwidth is taken from it, and of a sweep the overheads.",
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
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Offer the loads of this run (imported, or of listed rates) instead, and compare.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    output: OutputOption = Path("results"),
) -> int:
    """Predict a sweep on virtual time in seconds: same plan, search and gates, but nothing is started."""
    from kvbench.sweep import simulate_splits as splitting
    from kvbench.sweep.simulate import command as simulate_command

    cli = replace(options.cli_options(), fixed_rate=rate)
    if against is not None:
        from kvbench.sweep.against.simulated import command as against_command

        return against_command(cli, against, output, _console())
    if splits is not None or gpus is not None:
        chosen = splitting.Choice(splits, gpus, json_)
        return splitting.command(cli, chosen, output, _console(), like)
    return simulate_command(cli, output, _console(), like)


@command
@asks()
def microbench(options: MicrobenchOptions, output: OutputOption = Path("results")) -> int:
    """Measure raw KV transfers by backend, protocol, NICs, op, block size and batch, beside their limits."""
    from kvbench.microbench import command as microbench_command

    return microbench_command.command(options, output, _console())


@command
def schema() -> None:
    """Print the JSON Schema of the scenario format, for editors."""
    import json

    from kvbench.core.scenario.scenario import scenario_schema
    from kvbench.planning.scenario_files import registry

    typer.echo(json.dumps(scenario_schema(registry()), indent=2))


@command
def report(
    run: Annotated[list[Path], typer.Argument(help="Run folders.", exists=True, file_okay=False)],
    force: Annotated[
        bool,
        typer.Option("--force", help="Put runs into one table although they are not comparable; marks them."),
    ] = False,
    dark: Annotated[
        bool, typer.Option("--dark", help="Draw the figures for a dark background, too: figures/*-dark.*.")
    ] = False,
) -> None:
    """Write the report of a run again from its raw files, or compare several runs."""
    from kvbench.report import report as reporting

    reporting.command(run, _console(), force=force, dark=dark)


@app.command("import")
@_with_exit_code
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
) -> int:
    """Read results of vllm bench, aiperf, guidellm, nixlbench and others into a run folder, row by row."""
    from kvbench.importers.parts import importing

    return importing.command(importing.Wish(files, format_, name, connector), output, _console())


@command
def compare(
    run: Annotated[list[Path], typer.Argument(help="Run folders.", exists=True, file_okay=False)],
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
    force: Annotated[
        bool,
        typer.Option("--force", help="Put runs into one table although they are not comparable; marks them."),
    ] = False,
) -> None:
    """Say by rule who is ahead, where, by how much, and what cannot be told; then the rows as a table."""
    from kvbench.report import compare as comparing

    axes = tuple(axis.strip() for axis in sort.split(",") if axis.strip())
    comparing.command(run, comparing.Asked(by, axes, group, format_, force), _console())


@command
def bundle(
    run: Annotated[Path, typer.Argument(help="A run folder.", exists=True, file_okay=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="The archive to write; by default RUN-bundle.tar.gz here."
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="WORD", help="Remove this word, too, wherever it stands. Repeatable."),
    ] = None,
    without_logs: Annotated[
        bool, typer.Option("--without-logs", help="Leave the processes' logs out.")
    ] = False,
) -> None:
    """Pack a run for sharing, without host names, addresses, keys, user names and paths; say what went."""
    from kvbench.report import bundle as bundling

    bundling.command(run, bundling.Asked(output, tuple(also or ()), without_logs), _console())


@command
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.", exists=True, file_okay=False)],
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help="prometheus, otel-json or csv.")
    ] = "prometheus",
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write to this file instead of printing."),
    ] = None,
) -> None:
    """Print a run's summary as Prometheus text, as OpenTelemetry metrics in JSON, or as CSV."""
    from kvbench.report import export as exporting

    exporting.command(run, format_, output, _console())


@command
def watch(
    run: Annotated[Path, typer.Argument(help="A run folder.", exists=True, file_okay=False)],
    serve: Annotated[
        bool, typer.Option("--serve", help="Show it as a live page, too, for browsers on this machine alone.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="The page's port; 0: any free one.", min=0, max=65535)
    ] = 0,
) -> int:
    """Follow a run while it goes on: progress, current curve, queues, NICs, verdicts; ends when it ends."""
    from kvbench.report.watch import run as watchrun

    return watchrun.command(run, _console(), serve=serve, port=port)


@command
def timeline(
    run: Annotated[Path, typer.Argument(help="A run folder.", exists=True, file_okay=False)],
    trial: Annotated[
        str | None, typer.Argument(help="A trial's id; by default the last.", show_default=False)
    ] = None,
) -> int:
    """Write a trial's requests through client, router, P, KV transfer and D as a trace for Perfetto."""
    from kvbench.report import timeline as drawing

    return drawing.command(run, trial, _console())


@command
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
) -> int:
    """Say what is installed here, what each connector lacks, and how to mend it."""
    from kvbench.planning.doctor import doctor as examination
    from kvbench.planning.doctor import gates as gatetable

    if gates:
        return gatetable.command(_console())
    if hosts:
        from kvbench.planning.doctor import hosts as hostscheck

        if scenario is None:
            raise InputError("--hosts checks the hosts of a scenario: name one")
        return hostscheck.command(scenario, tuple(set_ or ()), _console())
    return examination.command(_console(), scenario, tuple(set_ or ()))


@command
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
) -> int:
    """Measure this host's own error and ceiling against a server with an exact schedule."""
    from kvbench.sweep.selftest import selftest as testing

    return testing.command(streams, seconds, _console(), as_json=json_, output=output)


@command
def init(
    file: Annotated[Path, typer.Argument(help="The scenario file to write.")] = Path("scenario.yaml"),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take every default for this machine.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> int:
    """Write a commented scenario for this machine: devices found, connectors that can run, SLOs asked."""
    from kvbench.planning import init as wizard

    return wizard.command(file, _console(), yes=yes, force=force)


LabName = Annotated[str, typer.Option("--name", metavar="NAME", help="Which lab.")]


@hosts_app.command("install")
@_with_exit_code
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
    return install_hosts.command(scenario, tuple(set_ or ()), wanted, _console())


@command
def ps(
    scenario: Annotated[
        str | None, typer.Argument(help="A scenario on whose hosts to look too.", show_default=False)
    ] = None,
    set_: SetOption = None,
) -> int:
    """List what runs for kvbench, or was left by a crash: here, and on the hosts of a scenario."""
    from kvbench.deployment import leftovers

    return leftovers.ps(scenario, tuple(set_ or ()), _console())


@command
def stop(
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Only this run: its name, as `ps` lists it.")
    ] = "",
    all_: Annotated[bool, typer.Option("--all", help="All runs of this user.")] = False,
    scenario: Annotated[
        str | None, typer.Argument(help="A scenario on whose hosts to look too.", show_default=False)
    ] = None,
    set_: SetOption = None,
) -> int:
    """End the processes of a run, or of all runs: here, and on the hosts of a scenario."""
    from kvbench.deployment import leftovers

    return leftovers.stop(run, scenario, tuple(set_ or ()), _console(), everything=all_)


@lab_command("up")
def lab_up(
    nics: Annotated[int, typer.Option("--nics", metavar="N", help="NICs between the hosts A and B.")] = 2,
    rate: Annotated[
        str, typer.Option("--rate", metavar="RATE", help="What each NIC carries each way: 300mbit, 1gbit.")
    ] = "1gbit",
    mtu: Annotated[int, typer.Option("--mtu", metavar="BYTES", help="The NICs' MTU.")] = 1500,
    name: LabName = "kv",
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="X.Y", help="Beginning of the addresses: X.Y.i.1 and X.Y.i.2.")
    ] = "10.77",
    rootless: Annotated[
        bool, typer.Option("--rootless", help="By a user namespace, even as root; others always do that.")
    ] = False,
) -> None:
    """Set a lab up; it stands until `kvbench lab down`."""
    from kvbench.hosts.lab import command as labcommand
    from kvbench.hosts.lab.layout import LabPlan

    labcommand.up(LabPlan(name, nics, rate, mtu, prefix), _console(), rootless=rootless)


@lab_command("exec", context_settings={"allow_interspersed_args": False})
def lab_exec(
    host: Annotated[str, typer.Argument(help="A or B.", metavar="HOST")],
    words: Annotated[list[str], typer.Argument(help="The command and its arguments.", metavar="-- COMMAND")],
    name: LabName = "kv",
) -> None:
    """Run a command in host A or B of a lab; its exit code is passed on."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.execute(host, words[1:] if words[0] == "--" else words, name)


@lab_command("status")
def lab_status(
    json_: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say which labs are here, what has passed their NICs, and which faults are planted."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.status(_console(), as_json=json_)


@lab_command("down")
def lab_down(
    name: LabName = "kv",
    all_: Annotated[bool, typer.Option("--all", help="Every lab that no process is using.")] = False,
) -> None:
    """Take a lab down with all that runs in it, and what killed processes left."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.down(name, _console(), everything=all_)


@lab_command("fault")
def lab_fault(
    kind: Annotated[str, typer.Argument(help="pull, partition, reset, slow or loss.", metavar="KIND")],
    nic: Annotated[int, typer.Option("--nic", metavar="I", help="Which NIC, from 0.")],
    amount: Annotated[
        str,
        typer.Option("--amount", metavar="X", help="loss: a share such as 1%; slow: a rate such as 300mbit."),
    ] = "",
    heal: Annotated[bool, typer.Option("--heal", help="Take the fault away.")] = False,
    name: LabName = "kv",
) -> None:
    """Plant a fault on a NIC, or take it away, and say what its counter tells."""
    from kvbench.hosts.lab import command as labcommand
    from kvbench.hosts.lab.lab import Lab
    from kvbench.hosts.lab.state import Fault

    labcommand.fault(Lab.standing(name), Fault(kind, nic, amount), _console(), heal=heal)


def _resumed(run: Path, kind: str, cli: CliOptions, output: Path, force: bool) -> int:
    """Go on with a run folder, in which the plan is."""
    from kvbench.sweep import resume

    if output != Path("results") and output.resolve() != run.resolve().parent:
        raise typer.BadParameter(f"a run goes on in its own folder, {run}", param_hint="--output")
    return resume.command(run, cli, kind, _console(), force=force)


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
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK_ENV):
            raise
        typer.echo(f"kvbench: {type(error).__name__}: {error}", err=True)
        typer.echo(f"hint: {_UNFORESEEN}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the ``kvbench`` command."""
    app()
