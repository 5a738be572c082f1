"""Commands for preparation: checks, scenarios, corpora, hosts, ``kvbench lab``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.console import console, with_exit_code
from kvbench.errors import InputError
from kvbench.planning.options import JsonOption, ScenarioArg, SetOption


def schema() -> None:
    """Print the JSON Schema of the scenario format, for editors."""
    import json

    from kvbench.core.scenario.scenario import scenario_schema
    from kvbench.planning.scenario_files import registry

    typer.echo(json.dumps(scenario_schema(registry()), indent=2))


def doctor(
    scenario: Annotated[
        str | None,
        typer.Argument(help="Scenario to check, too: its file or bundled name.", show_default=False),
    ] = None,
    set_: SetOption = None,
    gates: Annotated[bool, typer.Option("--gates", help="Only list the checks of every trial.")] = False,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Check the scenario's hosts and their network.")
    ] = False,
    json_: JsonOption = False,
) -> int:
    """Show what is installed here, what each connector lacks, and how to fix it."""
    from kvbench.planning.doctor import gates as gatetable
    from kvbench.planning.doctor.scenario import command

    if gates:
        return gatetable.command(console(), as_json=json_)
    if hosts:
        from kvbench.planning.doctor import hosts as doctor_hosts

        if scenario is None:
            raise InputError("--hosts checks the hosts of a scenario: name one")
        return doctor_hosts.command(scenario, tuple(set_ or ()), console(), as_json=json_)
    return command(console(), scenario, tuple(set_ or ()), as_json=json_)


def init(
    file: Annotated[Path, typer.Argument(help="The scenario file to write.")] = Path("scenario.yaml"),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="No questions: use the defaults for this machine.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="A,B", help="Engines run on these hosts, reached by ssh: P, then D."),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="On the nodes of a Slurm job.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="On the nodes of a Ray cluster.")] = False,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="A running server; nothing is started.")
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Model of that server.")] = "",
) -> int:
    """Write a commented scenario for this machine, for hosts, Slurm or Ray, or for a running server."""
    from kvbench.planning import init as new_scenario
    from kvbench.planning.init_elsewhere import Elsewhere

    elsewhere = Elsewhere.create(hosts, slurm, ray, base_url, model)
    return new_scenario.command(file, console(), yes=yes, force=force, elsewhere=elsewhere)


def hosts_install(
    scenario: ScenarioArg,
    set_: SetOption = None,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", help="Wheel to install; default: built from the running version."),
    ] = None,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(
            "--wheelhouse",
            metavar="DIR",
            help="Folder with wheels of all dependencies, for hosts without a registry.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    bring: Annotated[
        bool, typer.Option("--bring", help="Download these wheels here, in the local versions.")
    ] = False,
    extra: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="NAME", help="Also install an extra of kvbench, such as mooncake."),
    ] = None,
) -> int:
    """Copy this kvbench to each host of a scenario and install it there, in its own environment."""
    from kvbench.planning import install_hosts

    wanted = install_hosts.Install(wheel, wheelhouse, bring, tuple(extra or ()))
    return install_hosts.command(scenario, tuple(set_ or ()), wanted, console())


lab = typer.Typer(
    help="Two hosts with N shaped NICs as network namespaces on this machine: up, exec, status, down, fault.",
    no_args_is_help=True,
)
LabName = Annotated[str, typer.Option("--name", metavar="NAME", help="Which lab.")]


@lab.command("up")
@with_exit_code
def up(
    nics: Annotated[int, typer.Option("--nics", metavar="N", help="NICs between the hosts A and B.")] = 2,
    rate: Annotated[
        str, typer.Option("--rate", metavar="RATE", help="Rate of each NIC, each way: 300mbit, 1gbit.")
    ] = "1gbit",
    mtu: Annotated[int, typer.Option("--mtu", metavar="BYTES", help="The NICs' MTU.")] = 1500,
    name: LabName = "kv",
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="X.Y", help="Beginning of the addresses: X.Y.i.1 and X.Y.i.2.")
    ] = "10.77",
    rootless: Annotated[
        bool, typer.Option("--rootless", help="Use a user namespace, even as root; other users always do.")
    ] = False,
) -> None:
    """Create a lab, which lasts until `kvbench lab down`."""
    from kvbench.hosts.lab import command as labcommand
    from kvbench.hosts.lab.layout import LabPlan

    labcommand.up(LabPlan(name, nics, rate, mtu, prefix), console(), rootless=rootless)


@lab.command("exec", context_settings={"allow_interspersed_args": False})
@with_exit_code
def exec_(
    host: Annotated[str, typer.Argument(help="A or B.", metavar="HOST")],
    words: Annotated[list[str], typer.Argument(help="The command and its arguments.", metavar="-- COMMAND")],
    name: LabName = "kv",
) -> None:
    """Run a command in host A or B of a lab; its exit code is passed on."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.execute(host, words[1:] if words[0] == "--" else words, name)


@lab.command("status")
@with_exit_code
def status(
    json_: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the labs of this machine, their NICs' traffic, and their faults."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.status(console(), as_json=json_)


@lab.command("down")
@with_exit_code
def down(
    name: LabName = "kv",
    all_: Annotated[bool, typer.Option("--all", help="All unused labs.")] = False,
) -> None:
    """Remove a lab with all its processes, and leftovers of killed ones."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.down(name, console(), everything=all_)


@lab.command("fault")
@with_exit_code
def fault(
    kind: Annotated[str, typer.Argument(help="pull, partition, reset, slow or loss.", metavar="KIND")],
    nic: Annotated[int, typer.Option("--nic", metavar="I", help="Which NIC, from 0.")],
    amount: Annotated[
        str,
        typer.Option("--amount", metavar="X", help="loss: a share such as 1%; slow: a rate such as 300mbit."),
    ] = "",
    heal: Annotated[bool, typer.Option("--heal", help="Remove the fault.")] = False,
    name: LabName = "kv",
) -> None:
    """Inject a fault on a NIC, or remove it, and print its counters."""
    from kvbench.hosts.lab import command as labcommand
    from kvbench.hosts.lab.lab import Lab
    from kvbench.hosts.lab.state import Fault

    labcommand.fault(Lab.standing(name), Fault(kind, nic, amount), console(), heal=heal)


def complete_format(incomplete: str) -> Iterator[str]:
    """Complete corpus formats."""
    from kvbench.planning.corpus_files import AUTO, FORMATS

    yield from (name for name in (AUTO, *FORMATS) if name.startswith(incomplete))


def complete_model(incomplete: str) -> Iterator[str]:
    """Complete models with a known KV cache."""
    from kvbench.core.physics import MODELS

    yield from (name for name in MODELS if name.startswith(incomplete))


def corpus(
    file: Annotated[Path, typer.Argument(help="A file of sessions, or a folder of them.", metavar="FILE")],
    format_: Annotated[
        str,
        typer.Option(
            "--format", help="Its format; default: detected by its keys.", autocompletion=complete_format
        ),
    ] = "auto",
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N,N", help="Cache sizes in tokens. 1000..8000 doubles."),
    ] = None,
    gb: Annotated[
        list[float] | None,
        typer.Option("--gb", metavar="GB", help="Cache size of --model in GB. Repeatable.", min=1e-6),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model of the KV cache in GB.", autocompletion=complete_model),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option("--output-len", help="Tokens of answers without a length (aiperf).", min=1),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option("--generate", metavar="N", help="Generate N similar sessions, and show those.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of generated sessions.", min=0)] = 0,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write generated sessions, as agentic .jsonl.gz."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw reuse by size, as .png or .svg.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Show what recorded sessions contain: turns, lengths, think times, and reusable prompt parts."""
    from kvbench.core.sessions.corpus import CorpusFigures
    from kvbench.core.units import parse_counts
    from kvbench.planning.corpus_files import corpus_report, load_corpus, made_after, print_report

    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise InputError(f"{plot} is not a picture's name", hint="end it in .png or .svg")
    if write is not None and (generate is None or not write.name.endswith(".jsonl.gz")):
        raise InputError("--write requires generated sessions", hint="--generate N --write FILE.jsonl.gz")
    sessions, source = load_corpus(file, format_, output_len), file.name
    if generate is not None:
        sessions, source = made_after(sessions, source, generate, seed, write)
    figures = CorpusFigures(sessions)
    token_counts = parse_counts(tokens) if tokens else ()
    report = corpus_report(source, figures, token_counts, gb or (), model)
    print_report(report, console(), as_json=json_)
    if plot is not None:
        from kvbench.report.plots.sessions import offered_reuse_figure
        from kvbench.report.plots.style import save

        save(offered_reuse_figure(figures, source, report.model), plot)
